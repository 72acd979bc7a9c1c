"""Readers that stay open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastload import open_readers
from fastload.format import PackedFile, read_header
from fastload.layout import write_packed
from fastload.open_readers import OpenReaders


def header(path: Path) -> PackedFile:
    return read_header(write_packed(path, np.zeros((2, 3, 4, 3), np.uint8)))


def test_the_reader_least_recently_used_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_readers, "_MAX_OPEN", 2)
    opened: list[str] = []
    readers = OpenReaders(lambda file, name: opened.append(f"{file.path.name} {name}") or object())
    a, b = header(tmp_path / "a.h5"), header(tmp_path / "b.h5")
    first = readers.of(a, "images")
    readers.of(b, "images")
    assert readers.of(a, "images") is first
    readers.of(b, "masks")
    assert readers.of(a, "images") is first, "used since the one that had to go"
    readers.of(b, "images")
    assert opened == ["a.h5 images", "b.h5 images", "b.h5 masks", "b.h5 images"]
