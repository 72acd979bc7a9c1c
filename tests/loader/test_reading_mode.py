from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastload.dataset import PackedDataset
from fastload.errors import OptionError, ReadError
from fastload.format.header import read_header
from fastload.inspection.info import inspect_file
from fastload.loader.loader import FastLoader
from fastload.read.linear import FILE_SYSTEMS, resolve_read_mode
from fastload.system import syscalls

PACKED = {"rows": 20}


def test_auto_maps_local_files_and_no_others_and_stats_and_info_say_which(packed, monkeypatch) -> None:
    def said() -> tuple[str, str]:
        loader = FastLoader(packed, 4)
        next(iter(loader))
        found = loader.stats.read, inspect_file(packed).read
        loader.close()
        return found

    assert resolve_read_mode(packed, "auto") == "map" and said() == ("map", "map")
    kind = syscalls.file_system_of(packed)
    if kind is not None:  # not on macOS
        monkeypatch.setitem(FILE_SYSTEMS, kind, "NFS")
        assert resolve_read_mode(packed, "auto") == "pread" and said() == ("pread", "pread")
        assert inspect_file(packed).file_system == "NFS" and not inspect_file(packed).held_off
        assert resolve_read_mode(packed, "map") == "map"
    with pytest.raises(OptionError, match='"auto", "map" or "pread"'):
        resolve_read_mode(packed, "mmap")


def test_a_disk_that_fails_ends_the_loop_with_file_row_and_key(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = read_header(packed).fields["images"]
    assert images.offset is not None
    bad, preadv = images.offset + 6 * images.row_bytes + 5, os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr("fastload.read.linear.native.library", lambda: None)  # all reads come here then
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(ReadError, match=r"sample '00000006' \(row 6\): `images` cannot be read \(Input/output error\)"):
        list(FastLoader(PackedDataset(packed, read="pread"), 4, shuffle=False))
    with pytest.raises(OSError, match="row 6"):
        PackedDataset(packed).reading("pread")[6]
