from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fastload.estimate import disk
from fastload.estimate.disk import measure_disk


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 1, seconds=0.2)
    assert list(tmp_path.iterdir()) == []
    if found.bytes_per_s is None:
        assert found.told.startswith("cannot be measured: ")
    else:
        assert found.told.startswith("measured with ")


def test_the_rate_is_what_was_read_over_the_time_that_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(3 * 2**20))
    ticks = iter([10.0, *[10.5] * 3, 12.0])  # begun, after each piece, at the end
    monkeypatch.setattr(disk.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(disk, "_THREADS", 1)
    with open(file, "rb") as opened:
        found = disk._read(opened.fileno(), 3 * 2**20, 1.0)
    assert found == (3 * 2**20 / 2, "measured with 3 MiB in random order, not in memory before")


def test_a_folder_that_is_not_there_cannot_be_measured(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "none", 1)
    assert found == (None, "cannot be measured: No such file or directory")


def test_files_that_are_memory_cannot_be_measured() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        found = measure_disk(Path(folder), 1, seconds=0.2)
        assert found.bytes_per_s is None and found.told.startswith("cannot be measured: ")
        assert list(Path(folder).iterdir()) == []
