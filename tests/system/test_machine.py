from __future__ import annotations

import psutil

from fastload.system.machine import available_memory


def test_memory_is_what_the_machine_has_or_the_limit_of_a_cgroup_less_what_is_held_and_cannot_be_dropped(tmp_path):
    total = psutil.virtual_memory().total
    assert 0 < available_memory(tmp_path) <= total
    (tmp_path / "memory.max").write_text("max\n")
    assert 0 < available_memory(tmp_path) <= total
    for folder, limit, used, cached in (
        (tmp_path, "memory.max", "memory.current", "inactive_file"),
        (tmp_path / "v1" / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text("5000000\n")
        (folder / used).write_text("4000000\n")
        (folder / "memory.stat").write_text(f"anon 7\n{cached} 1500000\nother 3\n")
        cgroups = folder.parent if folder.name == "memory" else folder
        assert available_memory(cgroups) == 2_500_000
        (folder / used).write_text("7000000\n")
        assert available_memory(cgroups) == 0
