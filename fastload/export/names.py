"""File names from keys and class names: whatever they say, a path inside the folder, and each its own."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import xxhash

from fastload.sources.exported import FIELDS, SIDECAR

MAX_NAME_BYTES = 200
"""Bytes of one name with its suffix: file systems hold 255, temporary names are longer."""
MAX_DEPTH = 16

_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\\/]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def safe_name(text: str) -> str:
    """One name of a file or folder, valid on Linux, macOS and Windows, that resembles the text.

    `..`, separators, control characters, names of Windows devices, leading dots (hidden), trailing dots and spaces do
    not survive; what is too long is cut and ends in a hash of all of it.
    """
    name = _UNSAFE.sub("_", unicodedata.normalize("NFC", text)).strip(" ").rstrip(". ")
    name = name.encode("utf-8", errors="replace").decode()
    if name.startswith("."):
        name = f"_{name[1:]}"
    if not name or _RESERVED.fullmatch(name):
        name = f"_{name}"
    if len(name.encode()) > MAX_NAME_BYTES:
        cut = name.encode()[: MAX_NAME_BYTES - 17].decode(errors="ignore").rstrip(". ")
        name = f"{cut}-{xxhash.xxh3_64_hexdigest(text.encode(errors='backslashreplace'))}"
    return name


def safe_parts(key: str) -> list[str]:
    """The folders and the name without suffix that a key becomes; those deeper than MAX_DEPTH are joined."""
    parts = [part for part in key.split("/") if part not in ("", ".", "..")]
    parts = parts or ["_"]
    if len(parts) > MAX_DEPTH:
        parts = [*parts[: MAX_DEPTH - 1], "_".join(parts[MAX_DEPTH - 1 :])]
    stem, dot, suffix = parts[-1].rpartition(".")
    if stem and dot and re.fullmatch(r"[A-Za-z0-9]{1,5}", suffix):
        parts[-1] = stem
    return [safe_name(part) for part in parts]


class Names:
    """Gives out paths, each once, also on a file system that does not tell cases apart."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {_folded(name) for name in taken}
        self._last: dict[str, int] = {}  # the highest number of each path: without it, equal names take squared time

    def path(self, folders: list[str], name: str, suffix: str) -> str:
        """`folders/name.suffix` with `/`; the name gets `_2`, `_3`, ... where there is one already."""
        # A folder whose name ends like a file's could meet a file of that name.
        above = "/".join(f"{folder}_" if folder.lower().endswith(suffix) else folder for folder in folders)
        start = f"{above}/" if above else ""
        path = f"{start}{name}{suffix}"
        plain = folded = _folded(path)
        number = self._last.get(plain, 1)
        while folded in self._taken:
            number += 1
            path = f"{start}{name}_{number}{suffix}"
            folded = _folded(path)
        self._last[plain] = number
        self._taken.add(folded)
        return path


def class_folders(names: Iterable[str]) -> list[str]:
    """A folder's name for each class, all different, and none that export needs for itself."""
    given = Names((SIDECAR, FIELDS))
    return [given.path([], safe_name(name), "") for name in names]


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
