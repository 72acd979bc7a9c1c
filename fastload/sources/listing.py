"""What a source says of a dataset: one row a sample, with where its bytes are and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

OnError = Literal["fail", "skip"]
"""Whether a sample that the dataset itself contradicts (a row without its image) stops the listing or is left out."""


@dataclass(frozen=True, eq=False)
class Column:
    """One dataset of the packed file, apart from pixels.

    Attributes:
        values: (N, ...), a fixed-shape numeric array, or S for keys.
        attrs: HDF5 attributes as plain Python values, e.g. {"names": ("cat", "dog")}.
    """

    values: NDArray[Any]
    attrs: dict[str, Any] = field(default_factory=dict)


class Files(Protocol):
    """The bytes of every sample's file. Picklable, usable from any thread and process; keeps nothing open."""

    def read(self, i: int) -> bytes:
        """The whole file of sample i.

        Raises:
            ImageError: this one file cannot be read or is damaged (the reason only; the caller knows the key).
            FileChangedError: the archive that holds it is no longer the one that was listed.
        """
        ...

    def read_head(self, i: int, size: int) -> bytes:
        """The first `size` bytes of the file of sample i, fewer when it is shorter; errors as `read`."""
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Files:
        """The files of some samples, in the order of indices."""
        ...


@dataclass(frozen=True, eq=False)
class Listing:
    """A dataset of N samples, as a table that pickles quickly.

    Attributes:
        layout: name of the source that made it, a key of SOURCES.
        keys: unique names, the path relative to the source with `/`; undecodable bytes as `\\xNN`.
        split: uint8 (N,), index into split_names. Rows need not be grouped by split.
        split_names: `train`, `val`, `test` where there are any, `all` where the dataset has no splits.
        columns: what is known of each sample: labels, identity, bbox, ...; each with N rows.
        notes: what was recognised and from which evidence, what was absent or ignored: sentences for the user.
        sizes: int64 (N,), bytes of each sample's file.
        mtimes_ns: int64 (N,), its time of modification; that of the archive for the members of an archive.
        files: reads the samples' bytes, by row.
        skipped: (key, reason) of what `on_error="skip"` left out.
    """

    layout: str
    keys: tuple[str, ...]
    split: NDArray[np.uint8]
    split_names: tuple[str, ...]
    columns: dict[str, Column]
    notes: tuple[str, ...]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    files: Files
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        """N."""
        return len(self.keys)

    def take(self, indices: NDArray[np.integer[Any]]) -> Listing:
        """The listing of some rows, in the order of indices (integers, each at most once)."""
        indices = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            keys=tuple([self.keys[i] for i in indices.tolist()]),
            split=self.split[indices],
            columns={name: Column(column.values[indices], column.attrs) for name, column in self.columns.items()},
            sizes=self.sizes[indices],
            mtimes_ns=self.mtimes_ns[indices],
            files=self.files.take(indices),
        )


def first_few(names: list[str], count: int = 5) -> str:
    """The first names of a list for a message, and how many more there are."""
    shown = ", ".join(names[:count])
    return f"{shown} and {len(names) - count} more" if len(names) > count else shown


def require_unique(keys: list[str], where: str) -> None:
    """Check that no key occurs twice.

    Raises:
        SourceError: some do; it names them.
    """
    if len(set(keys)) == len(keys):
        return
    seen: set[str] = set()
    twice = [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]  # add: None
    raise SourceError(
        f"{where}: {len(twice)} names occur more than once: {first_few(twice)}. "
        "Each sample is known by its name. Remove or rename the duplicates."
    )
