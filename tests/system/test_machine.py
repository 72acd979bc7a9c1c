from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from fastload.system.machine import available_memory, process_exists


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/meminfo")
def test_memory_without_memavailable_is_what_is_free_and_what_is_cached(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:    9000 kB\nMemFree:     300 kB\nCached:     4 kB\nHugePages_Total:    0\n")
    assert available_memory(tmp_path, meminfo) == 304 * 1024
    meminfo.write_text(f"{meminfo.read_text()}MemAvailable:    500 kB\n")
    assert available_memory(tmp_path, meminfo) == 500 * 1024


def test_a_process_exists_until_its_parent_has_its_exit_code():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert process_exists(child.pid) and process_exists(1) and process_exists(os.getpid())
    child.communicate(b"\n")
    assert not process_exists(child.pid) and not process_exists(2**40)
