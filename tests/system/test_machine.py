from __future__ import annotations

import psutil
import pytest

from fastload.system.machine import available_memory


def test_without_a_limit_it_is_what_the_machine_has(tmp_path):
    total = psutil.virtual_memory().total
    assert 0 < available_memory(tmp_path) <= total
    (tmp_path / "memory.max").write_text("max\n")
    assert 0 < available_memory(tmp_path) <= total


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_cgroup_leaves_its_limit_less_what_is_held_and_cannot_be_dropped(tmp_path, folder, limit, used, cached):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / limit).write_text("5000000\n")
    (tmp_path / folder / used).write_text("4000000\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 7\n{cached} 1500000\nother 3\n")
    assert available_memory(tmp_path) == 2_500_000
    (tmp_path / folder / used).write_text("7000000\n")
    assert available_memory(tmp_path) == 0
