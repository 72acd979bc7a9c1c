"""Small folders and archives of files, for the tests of layouts."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastload.sources import Listing, SourceOptions, list_source


def make(root: Path, *names: str) -> Path:
    """Files whose content is their own name, enough for a listing, which decodes nothing; folders for names in `/`."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)
    return root


def write(path: Path, text: str) -> Path:
    """A text file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def picture(path: Path, *values: int, palette: bool = False) -> Path:
    """A gray image of 4 x 6 pixels that repeats these values, as a mask does; with a palette, these are its indices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.resize(np.array(values or (9,), np.uint8), (4, 6)))
    if palette:
        image.putpalette([n * 7 % 256 for n in range(768)])
    image.save(path)
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


def labels(listing: Listing) -> list[Any]:
    """Its column `labels`."""
    return listing.columns["labels"].values.tolist()


def notes_of(listing: Listing) -> str:
    """All of its notes."""
    return " ".join(listing.notes)
