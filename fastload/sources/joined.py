"""The files of several folders and archives as one: shards, a train and a val archive, images beside their masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.sources.listing import Files


@dataclass(frozen=True, eq=False)
class JoinedFiles:
    """Files of several origins, behind one another until `take` mixes them.

    Attributes:
        parts: the origins.
        part: int32 (F,), the origin of each file.
        place: int64 (F,), its place there.
    """

    parts: tuple[Files, ...]
    part: NDArray[np.int32]
    place: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[tuple[Files, int]]) -> JoinedFiles:
        """All files of the origins, each given with their number."""
        counts = [count for _, count in parts]
        return cls(
            parts=tuple(files for files, _ in parts),
            part=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            place=np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)]),
        )

    def read(self, i: int) -> bytes:
        """The whole file i."""
        return self.parts[int(self.part[i])].read(int(self.place[i]))

    def read_head(self, i: int, size: int) -> bytes:
        """The first bytes of file i."""
        return self.parts[int(self.part[i])].read_head(int(self.place[i]), size)

    def take(self, indices: NDArray[np.integer[Any]]) -> JoinedFiles:
        """Some of the files, in the order of indices."""
        return JoinedFiles(self.parts, self.part[indices], self.place[indices])
