"""The calls say what the ordinary ones say."""

from __future__ import annotations

import os

import pytest

from fastload.format.header import FileIdentity
from fastload.system import syscalls


@pytest.mark.parametrize("with_statx", [True, False])
def test_identity_is_that_of_fstat_and_what_was_just_written_is_in_memory(tmp_path, with_statx, monkeypatch):
    if not with_statx:
        monkeypatch.setattr(syscalls, "_function", lambda name: None)
    path = tmp_path / "a"
    path.write_bytes(b"x" * 12345)
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        assert syscalls.identity_of(file.fileno()) == FileIdentity.of(stat)
        # What was just written is in memory; where nothing can be asked, nothing is known.
        assert syscalls.is_resident(file.fileno(), 12000) in ((True, None) if with_statx else (None,))
    with pytest.raises(OSError, match="descriptor"):
        syscalls.identity_of(-1)
