"""`RowTable`: where the rows of a dataset lie: in which of its shards, and for ragged fields at which bytes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.format.digests import KEEPS_GIL
from fastload.format.header import Field, PackedFile
from fastload.format.ragged import INDEX_DTYPES, RAW, RaggedIndex, index_names


class ShardPart(NamedTuple):
    """The rows of a batch that lie in one shard: their numbers there, and their positions in the batch, int64 (n,)."""

    shard: int
    rows: NDArray[np.int64]
    at: NDArray[np.int64]


class Located:
    """Rows of a dataset, and where they lie.

    Attributes:
        rows: int64 (B,), their numbers in the dataset.
        shard, there: int64 (B,), the shard of each, and its row there.
        numbers: the shards that they lie in, ascending.
    """

    def __init__(
        self, rows: NDArray[np.int64], shard: NDArray[np.int64], there: NDArray[np.int64], only: int = -1
    ) -> None:
        """`only`: the shard that all of them lie in, where that is known; else -1."""
        self.rows, self.shard, self.there, self._only = rows, shard, there, only
        self.numbers: list[int] = [only] if only >= 0 else np.flatnonzero(np.bincount(shard)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def parts(self) -> list[ShardPart]:
        """The rows shard by shard."""
        if len(self.numbers) == 1:
            return [ShardPart(self.numbers[0], self.there, np.arange(len(self)))]
        order = np.argsort(self.shard, kind="stable")
        cuts = np.flatnonzero(np.diff(self.shard[order])) + 1
        return [ShardPart(int(self.shard[at[0]]), self.there[at], at) for at in np.split(order, cuts) if len(at)]

    def some(self, at: NDArray[np.int64]) -> Located:
        """Returns those at these positions, int64 (n,)."""
        return Located(self.rows[at], self.shard[at], self.there[at], self._only)

    def groups(self, most: int) -> Iterator[NDArray[np.int64]]:
        """Yields positions, int64 (n,), of rows that lie in so many shards or fewer."""
        for first in range(0, len(self.parts), most):
            yield np.concatenate([part.at for part in self.parts[first : first + most]])


@dataclass(frozen=True, eq=False)
class LocatedIndex(RaggedIndex):
    """Index entries of rows of a ragged field; offsets are of their shards' bytes."""

    shard: NDArray[np.int64]


class RowTable:
    """Where the rows of a dataset lie; of a file that is no index, in the file itself."""

    def __init__(self, file: PackedFile) -> None:
        self._file, self._shards = file, file.shards
        self._only = 0 if len(file.shards.names) == 1 else -1

    def locate(self, rows: NDArray[np.int64]) -> Located:
        """Returns where rows lie, int64 (B,). IndexError: one is outside the dataset."""
        check_rows(rows, self._file)
        return Located(rows, *self._shards.locate(rows), self._only)

    def of_shard(self, shard: int, there: NDArray[np.int64]) -> Located:
        """Returns rows of one shard, by their numbers there; their numbers in the dataset are not known."""
        return Located(there, np.broadcast_to(np.int64(shard), len(there)), there, shard)


def index_columns(file: PackedFile, name: str) -> dict[str, str]:
    """Returns the datasets that are the index of a field, by their meaning: "offset", "bytes", "shape", ...

    None of a field that is not ragged: what they would say is the same for all of its rows, see `index_value`.
    """
    if name not in file.ragged:
        return {}
    found = {part: f"{name}_{part}" for part in INDEX_DTYPES if f"{name}_{part}" in index_names(name)}
    if "shape" not in found and "images_shape" in file.fields:  # a mask has its image's size
        found["shape"] = "images_shape"
    return found


def index_value(field: Field, part: str) -> NDArray[Any]:
    """Returns what the index of a field would say of each row, where it has no such dataset."""
    said = {"bytes": field.row_bytes, "shape": (*field.shape, 1, 1)[:3], "encoding": RAW, "orientation": 1}
    return np.array(said[part], INDEX_DTYPES[part][0])


def index_part(columns: Mapping[str, Any], file: PackedFile, name: str, part: str) -> NDArray[Any]:
    """Returns what the index says of each row of images or masks: "bytes", "shape", "encoding" or "orientation".

    Args:
        columns: from `open_columns`.

    Returns:
        An array (N, ...); read-only where all rows are alike.
    """
    if (dataset := index_columns(file, name).get(part)) is not None:
        found: NDArray[Any] = columns[dataset][()]
        return found
    value = index_value(file.fields[name], part)
    return np.broadcast_to(value, (file.num_rows, *value.shape))


def check_rows(rows: NDArray[np.int64], file: PackedFile) -> None:
    """Raises IndexError, naming the first row outside a dataset. Gathers clip, so a bad row would pass unseen."""
    unsigned, num_rows = rows.view(np.uint64), file.num_rows  # a negative row is then larger than any
    for first in range(0, len(rows), KEEPS_GIL):
        if unsigned[first : first + KEEPS_GIL].max() >= num_rows:
            bad = rows[unsigned >= num_rows][0]
            raise IndexError(f"{file.name}: row {bad} is outside 0..{num_rows - 1}")
