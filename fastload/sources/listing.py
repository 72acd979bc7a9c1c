"""What a source says of a dataset: one row a sample, with where its bytes are and what is known about it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

if TYPE_CHECKING:
    from fastload.image_header import ImageHeader

OnError = Literal["fail", "skip"]
"""Whether a sample that the dataset itself contradicts (a row without its image) stops the listing or is left out."""


Moves = Literal["", "points", "xywh", "xyxy"]
"""What the numbers of a column are when they are pixels of the sample's image, which resizing moves: points x, y;
boxes by a corner and a size; boxes by two corners. "": no such thing."""


@dataclass(frozen=True, eq=False)
class Column:
    """One dataset of the packed file, apart from pixels.

    Attributes:
        values: (N, ...), a fixed-shape numeric array, or S for keys.
        attrs: HDF5 attributes as plain Python values, e.g. {"names": ("cat", "dog")}.
        moves: places in the image as it is upright and before any resizing, the last axis holding x, y (or x, y, x, y,
            ...) or the 4 numbers of a box. The packer scales them with the image.
    """

    values: NDArray[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    moves: Moves = ""


@runtime_checkable
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


@runtime_checkable
class Pictures(Protocol):
    """Pixels of every sample, one at a time and of any size. Picklable, as Files."""

    def header(self, i: int) -> ImageHeader:
        """What `read(i)` holds, found without making it where that is possible.

        Raises:
            ImageError: it cannot be told; the reason only.
        """
        ...

    def read(self, i: int) -> NDArray[Any]:
        """uint8 or uint16, (H, W) or (H, W, C) with 1, 3 or 4 channels.

        Raises:
            ImageError: this one sample cannot be read; the reason only.
            FileChangedError: what holds it is no longer what was listed.
        """
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Pictures:
        """Those of some samples, in the order of indices."""
        ...


@runtime_checkable
class Arrays(Protocol):
    """Pixels of all samples at hand as one array, read many rows at a time. Picklable, as Files.

    Attributes:
        shape: (H, W, C) of every sample, C = 1, 3 or 4; (H, W) for masks.
        dtype: uint8 or uint16.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill out, (len(indices), *shape) of dtype, with these samples.

        Raises:
            FileChangedError: what holds them is no longer what was listed.
            SourceError: it cannot be read.
        """
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Arrays:
        """Those of some samples, in the order of indices."""
        ...


@dataclass(frozen=True, eq=False)
class Masks:
    """One mask a sample, class (or instance) indices that are never blended or converted.

    Attributes:
        files: what reads them by row: image files (gray or palette: the index), pictures (H, W) or arrays (H, W).
        present: bool (N,): where it is False there is no mask, its row is filled with ignore_index, and `files` is not
            asked.
        names: of the classes, by index; empty when not known.
        ignore_index: the value that says "no class here"; None when there is none, then all must be present.
        attrs: other HDF5 attributes.
    """

    files: Files | Pictures | Arrays
    present: NDArray[np.bool_]
    names: tuple[str, ...] = ()
    ignore_index: int | None = None
    attrs: dict[str, Any] = field(default_factory=dict)

    def take(self, indices: NDArray[np.integer[Any]]) -> Masks:
        """Those of some samples."""
        return replace(self, files=self.files.take(indices), present=self.present[indices])


@dataclass(frozen=True, eq=False)
class Listing:
    """A dataset of N samples, as a table that pickles quickly.

    Attributes:
        layout: name of the source that made it, a key of LAYOUTS.
        keys: unique names, the path relative to the source with `/`; undecodable bytes as `\\xNN`.
        split: uint8 (N,), index into split_names. Rows need not be grouped by split.
        split_names: `train`, `val`, `test` where there are any, `all` where the dataset has no splits.
        columns: what is known of each sample: labels, identity, bbox, ...; each with N rows.
        notes: what was recognised and from which evidence, what was absent or ignored: sentences for the user.
        sizes: int64 (N,), bytes of each sample's file.
        mtimes_ns: int64 (N,), its time of modification; that of the archive for the members of an archive.
        files: reads the samples' images, by row; None for a dataset without images, whose samples are its columns.
        skipped: (key, reason) of what `on_error="skip"` left out.
        masks: reads their masks; None when there are none.
        attrs: root attributes of the packed file that it takes over instead of those that packing would write, such as
            `decoder` of pixels that were decoded long ago.
        digests: uint64 (N,), what the pixels of each row must hash to, where that is known beforehand; else None.
    """

    layout: str
    keys: tuple[str, ...]
    split: NDArray[np.uint8]
    split_names: tuple[str, ...]
    columns: dict[str, Column]
    notes: tuple[str, ...]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    files: Files | Pictures | Arrays | None
    skipped: tuple[tuple[str, str], ...] = ()
    masks: Masks | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    digests: NDArray[np.uint64] | None = None

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
            columns={name: replace(column, values=column.values[indices]) for name, column in self.columns.items()},
            sizes=self.sizes[indices],
            mtimes_ns=self.mtimes_ns[indices],
            files=None if self.files is None else self.files.take(indices),
            masks=None if self.masks is None else self.masks.take(indices),
            digests=None if self.digests is None else self.digests[indices],
        )


RESERVED = ("images", "masks", "labels", "targets", "split", "key", "digest", "digest_fields", "row", "valid")
"""Names of fields that mean something in a packed file, or in a batch of it."""


def free_name(name: str, used: Collection[str] = ()) -> str:
    """The name for a field of the packed file that means nothing yet, and that no other has: `row` becomes `row_`."""
    while name in RESERVED or name in used:
        name += "_"
    return name


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
