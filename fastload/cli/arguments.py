"""Arguments that several commands share: their texts parsed, and their declarations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import click

from fastload.cli.command_line import Argument, Option
from fastload.system.text import bytes_of


def parse_size(text: str) -> int | tuple[int, int]:
    """Parses `224` or `218x178` (height x width)."""
    found = re.fullmatch(r"(\d+)(?:\s*[x×]\s*(\d+))?", text.strip(), flags=re.IGNORECASE)
    if not found:
        raise click.BadParameter(f"{text!r} is not a size; write 224 or 218x178 (height x width).")
    height, width = found.groups()
    return int(height) if width is None else (int(height), int(width))


def parse_path(text: str) -> Path:
    """Parses a path, or the URL of an object."""
    from fastload.errors import OptionError
    from fastload.remote.urls import path_of

    try:
        return path_of(text)
    except OptionError as exc:
        raise click.BadParameter(str(exc)) from exc


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_rows(text: str) -> tuple[int, ...]:
    """Parses `3,17`."""
    names = parse_names(text)
    if not names or not all(name.isdecimal() for name in names):
        raise click.BadParameter(f"{text!r} is no list of rows; write 3,17.")
    return tuple(map(int, names))


def parse_bytes(text: str) -> int:
    """Parses `8MiB`, `8M` or `8388608`."""
    count = bytes_of(text)
    if count is None:
        raise click.BadParameter(f"{text!r} is not a number of bytes; write 8MiB, 8M or 8388608.")
    return count


def parse_file(text: str) -> Path | str:
    """Parses a path, or a URL, which stays text."""
    from fastload.remote.urls import is_url

    return text if is_url(text) else Path(text)


PackedName = Annotated[Any, Argument("FILE", parser=parse_file, help="A packed file, by its path or its URL.")]


ChunkBytes = Annotated[
    Any, Option(parser=parse_bytes, metavar="BYTES", help="Approximate size of a chunk, such as 8MiB or 512K.")
]
ImageFile = Annotated[Any, Argument("FILE", parser=parse_file, help="A packed file or its URL, or another HDF5 file.")]
BatchSize = Annotated[
    int | None, Option(least=1, help="Samples in a batch; by default 256, or an eighth of a small file.")
]
Split = Annotated[str | None, Option(help="Load this split only.")]
Size = Annotated[
    Any,
    Option(
        parser=parse_size,
        metavar="S|HxW",
        help="Begin the loader's transforms with RandomResizedCrop to this height x width; by default 224 for "
        "images that differ in size, else no crop.",
    ),
]
Device = Annotated[str | None, Option(help="Where batches go: cpu, cuda, cuda:1.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Report = Annotated[Path | None, Option(metavar="OUT.html", help="Write a report as an HTML page.")]
Force = Annotated[bool, Option("--overwrite", "--force", help="Replace files that exist.")]
