"""Small folders and archives of files, and what is asked of their listings, for the tests of layouts."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload.errors import SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import list_source
from fastload.sources.listing import Arrays, Listing


def make(root: Path, *names: str) -> Path:
    """Files whose content is their own name, enough for a listing, which decodes nothing; folders for names in `/`."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)
    return root


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    """A text file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def picture(path: Path, *values: int, palette: bool = False) -> Path:
    """A gray image of 4 x 6 pixels that repeats these values, as a mask does; with a palette, these are its indices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.resize(np.array(values or (9,), np.uint8), (4, 6)))
    if palette:
        image.putpalette([n * 7 % 256 for n in range(768)])
    image.save(path)
    return path


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (24, 32)) -> Path:
    """An image of many colours, as a photograph has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shades = np.linspace(0, 190, size[1])[None, :, None] + rng.integers(0, 65, (*size, 3))
    Image.fromarray(shades.astype(np.uint8)).save(path)
    return path


def archived(folder: Path, path: Path, inside: str = "") -> Path:
    """A .zip or .tar, by the suffix of its path, with the files of a folder below `inside`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, inside / file.relative_to(folder))
    else:
        with tarfile.open(path, "w") as tar:
            for file in files:
                tar.add(file, inside / file.relative_to(folder))
    return path


def listed(root: Path, masks: Any = "auto", on_error: Any = "fail") -> Listing:
    """The listing of a dataset with the masks wanted."""
    return list_source(root, on_error=on_error, options=SourceOptions(masks=masks))


def notes_of(listing: Listing) -> str:
    """All of its notes."""
    return " ".join(listing.notes)


def refused(message: str, source: Path, *args: Any, masks: Any = "auto", **options: Any) -> None:
    """Asserts that a source, with the masks wanted, is refused with an error that matches."""
    with pytest.raises(SourceError, match=message):
        list_source(source, *args, **{"options": SourceOptions(masks=masks)} | options)


def refused_or_skipped(message: str, source: Path, **options: Any) -> Listing:
    """Asserts that a source is refused with an error that matches; returns its listing without those samples."""
    refused(message, source, **options)
    return list_source(source, on_error="skip", **options)


def values(listing: Listing, name: str = "labels") -> list[Any]:
    """One of its columns."""
    return listing.columns[name].values.tolist()


def read(rows: Arrays, indices: Any) -> np.ndarray:
    """The rows at these indices."""
    out = np.full((len(indices), *rows.shape), 77, rows.dtype)
    rows.read_rows(np.asarray(indices, np.int64), out)
    return out


def write_tar(
    path: Path, members: list[tuple[str, bytes]] | dict[str, bytes], format: int = tarfile.PAX_FORMAT
) -> Path:
    """A tar with these members, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(members, format))
    return path


def tar_of(members: list[tuple[str, bytes]] | dict[str, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    """The content of such a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def npy(array: object, **options: bool) -> bytes:
    """The content of an .npy."""
    out = io.BytesIO()
    np.save(out, np.asarray(array), **options)
    return out.getvalue()
