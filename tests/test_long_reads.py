"""Reads of any length."""

from __future__ import annotations

import os

import pytest

from fastload.long_reads import read_bytes, read_into


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Ten bytes, of which a call brings three at most."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    (tmp_path / "a").write_bytes(b"0123456789")
    with open(tmp_path / "a", "rb") as opened:
        yield opened.fileno()


@pytest.mark.parametrize(("length", "offset"), [(0, 0), (2, 1), (8, 1), (9, 1), (10, 1), (5, 10), (5, 12)])
def test_all_that_is_there_is_read(file, length, offset):
    expected = b"0123456789"[offset : offset + length]
    memory = bytearray(length)
    assert read_bytes(file, length, offset) == expected
    assert read_into(file, memoryview(memory), offset) == len(expected)
    assert memory == expected.ljust(length, b"\0")
