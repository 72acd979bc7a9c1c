from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from fastload.system import page_cache
from fastload.system.page_cache import drop, resident_share


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(1 << 20))
    if resident_share(path) is None:
        pytest.skip("this system does not say which pages are in memory")
    return path


def test_what_was_dropped_comes_back_when_it_is_read_and_an_empty_file_has_no_share(file):
    assert resident_share(file) == _probed_share(file) == 1
    (file.parent / "empty").touch()
    assert drop(file.parent / "empty") is None
    left = drop(file)
    if left == 1:
        pytest.skip("this file system keeps its pages, as tmpfs does")
    assert left == resident_share(file) == 0
    assert _probed_share(file) < 0.1
    file.read_bytes()
    assert resident_share(file) == 1
    drop(file)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) >= 0  # touches each page
        assert drop(file) == 1  # mapped pages stay


def _probed_share(path: Path) -> float:
    with open(path, "rb") as opened:
        share = page_cache._probed(opened.fileno(), path.stat().st_size)
    assert share is not None
    return share
