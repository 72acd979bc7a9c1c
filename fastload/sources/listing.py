"""The listing of a dataset, which every source returns: one row for each sample, its fields, and a reader of its image.

Files       the bytes of each sample's image file, to be decoded
Pictures    the pixels of one sample at a time, of any size
Arrays      the pixels of many samples at once, all of one shape
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.system.text import first_few as first_few  # for all of `sources`

if TYPE_CHECKING:
    from fastload.images.image_header import ImageHeader


@runtime_checkable
class Files(Protocol):
    """Reads the file of each sample. Picklable, usable from any thread and process; keeps no file open.

    A reader whose samples share arrays, or a temporary file, may have `compact()`: the same reader without what only
    other samples need, for a plan of packing (`fastload.pack.plain`), as `spans.Joined` has it.
    """

    def read(self, i: int) -> bytes:
        """Returns all bytes of the file of sample i.

        Raises:
            ImageError: this one file cannot be read or is damaged. The message is only the reason, the caller adds
                the key.
            FileChangedError: the archive that holds it has changed since it was listed.
        """
        ...

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of the file of sample i, fewer if it is shorter; raises as `read` does."""
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Files:
        """Returns the files of the samples at these indices, in their order."""
        ...


@runtime_checkable
class Pictures(Protocol):
    """Reads the pixels of one sample at a time, each of any size. Picklable, as Files."""

    def header(self, i: int) -> ImageHeader:
        """Returns size, channels and bits of the array from `read(i)`, without reading it where that is possible.

        Raises:
            ImageError: they are unknown; the message is only the reason.
        """
        ...

    def read(self, i: int) -> NDArray[Any]:
        """Returns the pixels of sample i: uint8 or uint16, (H, W) or (H, W, C) with 1, 3 or 4 channels.

        Raises:
            ImageError: this one sample cannot be read; the message is only the reason.
            FileChangedError: the file that holds it has changed since it was listed.
        """
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Pictures:
        """Returns the pictures of the samples at these indices, in their order."""
        ...


@runtime_checkable
class Arrays(Protocol):
    """Reads the pixels of many samples at once, all of one shape. Picklable, as Files.

    Attributes:
        shape: (H, W, C) of every sample, C = 1, 3 or 4; (H, W) for masks.
        dtype: uint8 or uint16.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fills `out`, (len(indices), *shape) of dtype, with the samples at these indices.

        Raises:
            FileChangedError: the file that holds them has changed since it was listed.
            SourceError: the file cannot be read.
        """
        ...

    def take(self, indices: NDArray[np.integer[Any]]) -> Arrays:
        """Returns the samples at these indices, in their order."""
        ...


Reader = Files | Pictures | Arrays


@dataclass(frozen=True, eq=False)
class Masks:
    """One mask for each sample, of class or instance numbers, which are never blended or converted."""

    # Read by row: image files (gray, or palette, of which the index counts), pictures (H, W) or arrays (H, W).
    files: Reader
    # bool (N,). Where it is False `files` is not read, and the packed mask is ignore_index throughout.
    present: NDArray[np.bool_]
    names: tuple[str, ...] = ()  # of the classes, by index; empty if unknown
    ignore_index: int | None = None  # means "no class here"; None if there is none, then all masks must be present
    attrs: dict[str, Any] = field(default_factory=dict)  # further HDF5 attributes
    drawn: bool = False  # whether they are drawn from annotations, at the size that these declare for the image
    # Red, green, blue and name of each class, if masks are colours and a list of these lies next to them.
    palette: tuple[tuple[int, int, int, str], ...] = ()
    # uint8, or uint16 for numbers up to 65,535; None: packing looks at the masks of 16 bits, and takes uint16 if any
    # holds a number above 255
    dtype: np.dtype[Any] | None = None

    def take(self, indices: NDArray[np.integer[Any]]) -> Masks:
        """Returns the masks of the samples at these indices, in their order."""
        return replace(self, files=self.files.take(indices), present=self.present[indices])


@dataclass(frozen=True, eq=False)
class Listing:
    """The N samples of a dataset, as a table that pickles quickly."""

    layout: str  # the layout it was listed as, a key of LAYOUTS
    keys: tuple[str, ...]  # unique: path of each sample relative to the source, with `/`; undecodable bytes as `\\xNN`
    split: NDArray[np.uint8]  # uint8 (N,), index into split_names; rows need not be grouped by split
    split_names: tuple[str, ...]  # train, val, test as far as the dataset has them; `all` if it has no splits
    columns: dict[str, Column]  # the fields of each sample other than pixels: labels, bbox, ...; N rows each
    notes: tuple[str, ...]  # for the user: what was recognised and by which files, what was absent or ignored
    sizes: NDArray[np.int64]  # int64 (N,), bytes of each sample's file
    mtimes_ns: NDArray[np.int64]  # int64 (N,), modification of each file; for a member of an archive, of the archive
    files: Reader | None  # reads the images, by row; None: the samples are their columns
    skipped: tuple[tuple[str, str], ...] = ()  # (key, reason) of each sample that `on_error="skip"` left out
    masks: Masks | None = None  # reads the masks; None if there are none
    # Root attributes to write instead of packing's own, such as `decoder` for pixels that were decoded earlier.
    attrs: dict[str, Any] = field(default_factory=dict)
    digests: NDArray[np.uint64] | None = None  # uint64 (N,), what the pixels of each row must hash to, if known
    # int64 (N, 2), height and width of each image by its annotations, 0 if unknown; None if they declare none.
    declared: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Number of samples, N."""
        return len(self.keys)

    def take(self, indices: NDArray[np.integer[Any]]) -> Listing:
        """Returns the listing of the rows at these indices (each at most once), in their order."""
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
            declared=None if self.declared is None else self.declared[indices],
        )


_SPELLINGS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
SPLITS = {spelling: split for split, spellings in _SPELLINGS.items() for spelling in spellings}
"""Folder name, in lower case -> the split it stands for. Such a folder is a split, not a class."""

SPLIT_ORDER = ("train", "val", "test")


def split_of_parts(parts: Iterable[str]) -> str:
    """Returns the split that the first of these parts of a path names; "" if none does."""
    return next((SPLITS[part.lower()] for part in parts if part.lower() in SPLITS), "")


def split_of_shard(name: str) -> str:
    """Returns the split that a shard, or else a folder above it, is named after: train-000000.tar, val/000000.tar."""
    words = (word for part in reversed(name.lower().split("/")) for word in re.findall("[a-z]+", part))
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def in_split_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the different names of splits: train, val and test first, the others sorted behind them."""
    found = set(names)
    return (*(name for name in SPLIT_ORDER if name in found), *sorted(found - set(SPLIT_ORDER)))


RESERVED = (
    "images",
    "masks",
    "labels",
    "targets",
    "split",
    "key",
    "digest",
    "digest_fields",
    "row",
    "valid",
    "pixel_mask",
)
"""Names of fields that have a meaning in a packed file, or in a batch read from it."""


def free_name(name: str, used: Collection[str] = ()) -> str:
    """Returns a field's name for the packed file: `_` is appended while it is reserved or used, `row` -> `row_`."""
    while name in RESERVED or name in used:
        name += "_"
    return name


def only_arrays(listing: Listing) -> bool:
    """Whether all pixels of a listing are rows of arrays, which are copied."""
    masks = listing.masks
    return isinstance(listing.files, Arrays) and (masks is None or isinstance(masks.files, Arrays))


def require_unique(keys: Collection[str], where: str) -> None:
    """Refuses keys that occur more than once, with a SourceError that names them."""
    if len(set(keys)) < len(keys):
        twice = [key for key, count in Counter(keys).items() if count > 1]
        fix = "Each sample is known by its name. Remove or rename the duplicates."
        raise SourceError(f"{where}: {len(twice)} names occur more than once: {first_few(twice)}. {fix}")
