"""What tests of sources ask of listings, and archives and arrays for them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastload.errors import SourceError
from fastload.sources import Arrays, Listing, list_source


def refused(message: str, source: Path, *args: Any, **options: Any) -> None:
    """Asserts that a source is refused with an error that matches."""
    with pytest.raises(SourceError, match=message):
        list_source(source, *args, **options)


def refused_or_skipped(message: str, source: Path, **options: Any) -> Listing:
    """Asserts that a source is refused with an error that matches; returns its listing without those samples."""
    refused(message, source, **options)
    return list_source(source, on_error="skip", **options)


def values(listing: Listing, name: str = "labels") -> list[object]:
    return listing.columns[name].values.tolist()


def notes(listing: Listing) -> str:
    return " ".join(listing.notes)


def read(rows: Arrays, indices: Any) -> np.ndarray:
    """The rows at these indices, which all elements are written of."""
    out = np.full((len(indices), *rows.shape), 77, rows.dtype)
    rows.read_rows(np.asarray(indices, np.int64), out)
    return out


def write_tar(
    path: Path, members: list[tuple[str, bytes]] | dict[str, bytes], format: int = tarfile.PAX_FORMAT
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def npy(array: object, **options: bool) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(array), **options)
    return out.getvalue()
