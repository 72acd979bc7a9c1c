"""Options as text: sizes, numbers of bytes, lists and paths that a user types. OptionError says what to write."""

from __future__ import annotations

import re
from pathlib import Path

from fastload.errors import OptionError
from fastload.remote.urls import is_url, path_of
from fastload.system.text import bytes_of


def parse_size(text: str) -> int | tuple[int, int]:
    """Parses `224` or `218x178` (height x width)."""
    found = re.fullmatch(r"(\d+)(?:\s*[x×]\s*(\d+))?", text.strip(), flags=re.IGNORECASE)
    if not found:
        raise OptionError(f"{text!r} is not a size; write 224 or 218x178 (height x width).")
    height, width = found.groups()
    return int(height) if width is None else (int(height), int(width))


def parse_path(text: str) -> Path:
    """Parses a path, or the URL of an object."""
    return path_of(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Parses `a,b`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_rows(text: str) -> tuple[int, ...]:
    """Parses `3,17`."""
    names = parse_names(text)
    if not names or not all(name.isdecimal() for name in names):
        raise OptionError(f"{text!r} is no list of rows; write 3,17.")
    return tuple(map(int, names))


def parse_bytes(text: str) -> int:
    """Parses `8MiB`, `8M` or `8388608`."""
    count = bytes_of(text)
    if count is None:
        raise OptionError(f"{text!r} is not a number of bytes; write 8MiB, 8M or 8388608.")
    return count


def parse_file(text: str) -> Path | str:
    """Parses a path, or a URL, which stays text."""
    return text if is_url(text) else Path(text)
