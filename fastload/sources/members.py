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

    def refuse(self, name: str, reason: str) -> None:
        """Note a member that cannot be read, if it would have been an image."""
        if is_image(name):
            self.broken.append((name, reason))


def normal(name: str) -> str:
    """A member's name without `./`, a leading or doubled `/`, or one at its end."""
    if name[:1] not in ("/", ".") and "//" not in name and "/." not in name and name[-1:] != "/":
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def with_parents(folder: str) -> list[str]:
    """A folder and those above it, outermost first; none for the archive itself."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def cut_short(path: Path, name: str) -> str:
    """The message about a member that is not wholly there."""
    return (
        f"{path}: member {key_of(name)} reaches beyond the data: the archive is damaged or cut short. "
        "Copy or download it again."
    )
