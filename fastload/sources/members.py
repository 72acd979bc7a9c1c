"""What the archives' listings share: where a member lies, and how its name is spelled."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from fastload.sources.tree import is_image, key_of

STORED, DEFLATED = 0, 8
"""The methods of compression in a zip that are read."""

PLAIN = 255
"""The method of a tar: the bytes lie at the offset itself, without a local header."""

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""In a zip before the bytes: signature, ..., the lengths of the name and of the extra field behind it."""


class Member(NamedTuple):
    """Where a file lies in its archive; offset: of the bytes in a tar, of the local header in a zip."""

    name: str
    offset: int
    stored_size: int
    size: int
    method: int
    crc: int


class Found:
    """What a listing comes upon, in the archive's order."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.folders: list[str] = []
        self.broken: list[tuple[str, str]] = []
        self.passed: list[tuple[str, str]] = []

    def refuse(self, name: str, reason: str) -> None:
        """Note a member that is not read: with the broken ones when it would have been an image, else for a note."""
        (self.broken if is_image(name) else self.passed).append((name, reason))


def why_unsafe(name: str) -> str:
    """Why a member's name is refused: it points out of the archive, or is empty; "" when all is well."""
    if not name:
        return "has no name"
    if name[:1] == "/" or (name[1:3] in (":/", ":\\") and name[0].isalpha()):
        return "has an absolute name, which points out of the archive"
    if ".." in name and ".." in name.split("/"):
        return "has `..` in its name, which may point out of the archive"
    return ""


def normal(name: str) -> str:
    """A member's name without `./`, a doubled `/`, or one at either end."""
    if name[:1] not in ("/", ".") and "//" not in name and "/." not in name and name[-1:] != "/":
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def with_parents(folder: str) -> list[str]:
    """A folder and those above it, outermost first; none for the archive itself."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def cut_short(path: Path | str, name: str) -> str:
    """The message about a member that is not wholly there."""
    return (
        f"{path}: member {key_of(name)} reaches beyond the data: the archive is damaged or cut short. "
        "Copy or download it again."
    )
