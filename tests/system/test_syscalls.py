"""The calls say what the ordinary ones say."""

from __future__ import annotations

import os

import pytest

from fastload.format.header import FileIdentity
from fastload.system import syscalls


@pytest.mark.parametrize("with_statx", [True, False])
def test_status_is_that_of_fstat_and_what_was_just_written_is_in_memory(tmp_path, with_statx, monkeypatch):
    if not with_statx:
        monkeypatch.setattr(syscalls, "_function", lambda name: None)
    path = tmp_path / "a"
    path.write_bytes(b"x" * 12345)
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        status = syscalls.status_of(file.fileno())
        assert status.identity == FileIdentity.of(stat) and status == syscalls.status_at(path)
        assert (status.mode, status.owner) == (stat.st_mode, stat.st_uid)
        assert (status.links, status.allocated) == (stat.st_nlink, stat.st_blocks * 512)
        # What was just written is in memory; where nothing can be asked, nothing is known.
        assert syscalls.is_resident(file.fileno(), 12000) in ((True, None) if with_statx else (None,))
    with pytest.raises(OSError, match="descriptor"):
        syscalls.status_of(-1)
    assert syscalls.status_at(tmp_path / "none") is None


def test_few_bytes_are_written_where_they_belong_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    with open(path, "r+b") as file:
        assert syscalls.write_resident(file.fileno(), b"abc", 50) and not syscalls.write_resident(-1, b"abc", 50)
    with open(path, "rb") as file:
        assert not syscalls.write_resident(file.fileno(), b"abc", 0)  # open for reading
    assert path.read_bytes() == b"x" * 50 + b"abc" + b"x" * 47
