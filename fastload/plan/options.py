"""What a plan can be asked for: the shuffles, the ends, and how the defaults are resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fastload.errors import OptionError


@dataclass(frozen=True)
class ChunkWindow:
    """Shuffle that reads whole chunks: permute the chunks, then mix the rows inside windows of them.

    Attributes:
        chunks: chunks a window holds, at least 1. More mix better and touch more of the file at once.
    """

    chunks: int = 16

    def __post_init__(self) -> None:
        if not is_whole(self.chunks) or self.chunks < 1:
            raise OptionError(
                f"ChunkWindow(chunks={self.chunks!r}): a window holds a whole number of chunks, 1 or more"
            )
        object.__setattr__(self, "chunks", int(self.chunks))  # NumPy's integers do not go into JSON


Shuffle = Literal["full", "chunk", "auto"] | ChunkWindow | bool
ResolvedShuffle = Literal["full", False] | ChunkWindow
Ends = Literal["drop", "pad", "exact"]

_SHUFFLES = 'True (or "auto"), False, "full", "chunk" or ChunkWindow(chunks)'


def is_whole(value: object) -> bool:
    """True for an int, Python's or NumPy's, that is not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def resolve_shuffle(shuffle: Shuffle, file_shuffled: bool) -> ResolvedShuffle:
    """The shuffle that a plan carries out, with every default decided.

    Args:
        shuffle: True or "auto" mean chunk windows if the packer already shuffled the file (neighbouring rows are a
            fair mix then), else "full". "chunk" means `ChunkWindow(16)`.
        file_shuffled: whether the packer shuffled the file's rows.

    Raises:
        OptionError: shuffle is none of the accepted values, which the message lists.
    """
    if isinstance(shuffle, ChunkWindow):
        return shuffle
    # `is`, since 1 == True and 0 == False, and a 0 meant as a window would silently switch shuffling off.
    if shuffle is False:
        return False
    if shuffle is True or shuffle == "auto":
        return ChunkWindow() if file_shuffled else "full"
    if shuffle == "full":
        return "full"
    if shuffle == "chunk":
        return ChunkWindow()
    raise OptionError(f"shuffle={shuffle!r} is not known; choose {_SHUFFLES}")


def resolve_ends(ends: Ends | None, shuffle: ResolvedShuffle) -> Ends:
    """How shares that do not fill whole batches end; None means "drop" when shuffling, else "exact".

    Raises:
        OptionError: ends is none of the accepted values, which the message lists.
    """
    if ends is None:
        return "exact" if shuffle is False else "drop"
    if ends not in ("drop", "pad", "exact"):
        raise OptionError(f'ends={ends!r} is not known; choose "drop", "pad", "exact" or None')
    return ends
