"""The data of a loader: a packed file, a part of one, or any map-style dataset.

The plan sees a run of rows, worker processes a source of samples. Both kinds have the same attributes and methods, so
that callers ask for what they need to know, and only reading threads need a packed file: see `PackedInput.packed`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

from fastload.dataset import PackedDataset, as_handed_over, collated, positions_of
from fastload.errors import OptionError, level_of_the_user
from fastload.format.ragged import JPEG, RAW
from fastload.plan import ChunkWindow, ResolvedShuffle, Shuffle, is_drawing, resolve_shuffle
from fastload.read.hdf5_chunks import CACHE_BYTES
from fastload.read.linear import Read, resolve_read_mode
from fastload.read.readahead import ReadAhead
from fastload.read.reader import Rows
from fastload.remote.remote_shards import RemoteShards
from fastload.timing.stopwatch import current
from fastload.transforms.boxes_and_points import Coordinates

# Rows that a dataset's compression ratio is taken from.
_RATIO_ROWS = 512
# Rows that are looked at before anything is read, for whether there are JPEGs.
_LOOKED_AT = 8
# Values of a list in a dataset of the user's that are looked at, for whether it is one of datasets.
_FIRST_VALUES = 8


def mentions_of(rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Returns how many times each of N rows comes before in their order, int64 (N,); None: none comes twice."""
    if (np.diff(rows) > 0).all():
        return None
    order = np.argsort(rows, kind="stable")
    new = np.diff(rows[order], prepend=-1) != 0
    if new.all():
        return None
    mentions = np.empty_like(order)
    mentions[order] = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    return mentions


class PackedInput:
    """The data of a `PackedDataset`; pickled into worker processes."""

    at_once = False  # whether `samples` makes all of a call's samples before it yields the first
    code = "the packed dataset's own transform"  # the Python code that makes samples, for messages
    collate = staticmethod(collated)  # makes a batch's field of its samples' values

    def __init__(self, dataset: PackedDataset) -> None:
        file = dataset.file
        self.dataset = dataset
        dataset.fix()
        self.name = file.name  # for messages
        self.fields: tuple[str, ...] | None = dataset.fields  # names of a batch's, in order; None: the samples decide
        # The rows that the plan orders, and their rows of the file, int64 (N,); None: the same numbers.
        rows = dataset.rows
        self.plan_rows = rows if isinstance(rows, range) else range(len(rows))
        self.selected = None if isinstance(rows, range) else rows
        # How many times the row of each was selected before, int64 (N,); None: each is selected once.
        self.mentions = None if self.selected is None else mentions_of(self.selected)
        # Rows of a chunk of the field whose chunks make up shuffle windows; 0: there are none.
        main = "images" if "images" in file.fields else next(iter(file.fields))
        self.chunk_rows = 0 if self.selected is not None else file.fields[main].chunk_rows
        self.chunk_bytes = self.chunk_rows * file.fields[main].row_bytes  # of such a chunk, decoded
        self.shuffled = file.shuffled  # whether neighbouring rows are a fair mix already
        masks = file.fields.get("masks")
        self.ignore_index = int(masks.attrs.get("ignore_index", 0)) if masks else 0
        self.runs_python = dataset.transform is not None
        self.skips_damaged = dataset.on_damage == "skip"
        self.decode_on_device = dataset.decode == "device"  # whether JPEGs are to be, where that is possible
        self.read_mode = resolve_read_mode(file.place, dataset.read)  # how rows are read; "": Python code reads
        # From where it can be opened again, a path or URL; None: it cannot, as of a list of files.
        self.path = None if file.listed else file.url or file.path
        self.files = file.files  # that hold its rows, on this machine
        asked = {name: file.fields[name] for name, _, _ in dataset.layout()}
        self.linear = not any(field.chunked for field in asked.values())  # whether any row is read without others
        self.stored_bytes = sum(field.row_bytes for field in asked.values())  # of a sample, in the mean
        self.varied = any(field.varied for field in asked.values())  # whether samples differ in shape
        self.ragged = any(field.ragged is not None for field in asked.values())
        # Fields that full shuffle decodes a chunk of for nearly every row: compressed, and too large to keep.
        self.compressed = [
            name
            for name, field in asked.items()
            if field.filters and field.chunk_rows > 1 and field.row_bytes * file.num_rows > CACHE_BYTES
        ]

    @property
    def packed(self) -> PackedInput | None:
        """Itself, where threads read its rows; None: Python code makes the samples, in processes."""
        return None if self.runs_python else self

    @property
    def row_bytes(self) -> int:
        """The bytes of a sample's fields in a batch as it lies in the file; 0 for fields that differ in size."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.dataset.layout())

    @property
    def remote(self) -> RemoteShards | None:
        """Fetches its rows over the network; None: they are on this machine."""
        return cast("RemoteShards | None", self.dataset.file.remote)

    @property
    def network_bytes(self) -> int:
        """The bytes that this process fetched of it so far."""
        use = self.dataset.file.shard_files.network_use()
        return use.bytes if use is not None else 0

    @property
    def channels(self) -> int:
        """The channels of its images; 0: not known."""
        return self.image_spec()[0][0]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or attributes in labels; empty if not known."""
        return self.dataset.classes

    @property
    def transform(self) -> Any:
        """The Python transform that is called with each gathered sample; None: there is none."""
        return self.dataset.sample_transform

    def description(self) -> list[str]:
        """Returns what it is and which part of it is read, in a few words each."""
        split, some = self.dataset.split, self.selected is not None
        return [Path(self.name).name, *([f"split {split}"] if split else []), *(["some of its rows"] if some else [])]

    def newest(self) -> Input:
        """Returns the data to be read from now on: itself, or for a folder its packed file once that is there."""
        dataset = self.dataset.packed()
        return self if dataset is self.dataset else PackedInput(dataset)

    def reading(self, read: Read) -> PackedDataset:
        """Returns the dataset with another way to read, where it has any."""
        return self.dataset.reading(read)

    def expecting(self, chunks: int | None) -> Input:
        """Returns the data for a loader that shuffles in windows of so many chunks; None: in no windows."""
        return PackedInput(self.dataset.expecting(chunks)) if self.runs_python else self

    def read_ahead(self, *, windows: bool) -> ReadAhead | None:
        """Announces rows of local files to the kernel; the caller closes it. None: samples are no rows of files."""
        return self.dataset.read_ahead(chunk_rows=self.chunk_rows if windows else 0)

    def coordinates(self) -> dict[str, Coordinates]:
        """Returns how fields hold boxes and points, by name, as far as that is known."""
        return self.dataset.coordinates()

    def gathered(self) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Returns name, shape of a row and dtype of each field whose rows can be gathered as they lie in the file."""
        fields = self.dataset.file.fields
        return [one for one in self.dataset.layout() if not fields[one[0]].renumbered]

    def identity(self) -> str:
        """Returns the digest of the file, with the selected rows if there are some; part of a saved state."""
        return self.dataset.data_identity()

    def check(self) -> None:
        """Raises FileChangedError if the file was replaced or written to."""
        self.dataset.check_unchanged()

    def rows_in_file(self, positions: range) -> range | NDArray[np.int64]:
        """Returns the rows of the file that some of `plan_rows` stand for, ascending, each once."""
        return positions if self.selected is None else np.unique(self.selected[positions.start : positions.stop])

    def image_spec(self) -> tuple[tuple[int, int, int], torch.dtype]:
        """Returns shape (C, H, W) and dtype of an image as the file has it."""
        field = self.dataset.file.fields["images"]
        blank = np.empty((1, *field.shape), field.dtype.newbyteorder("="))
        _, height, width, channels = as_handed_over(self.dataset.file, {"images": blank})["images"].shape
        return (channels, height, width), torch.from_numpy(blank[:0]).dtype

    def sizes(self) -> NDArray[np.int64]:
        """Returns height and width of the image of each of `plan_rows`, as the file has it: int64 (N, 2)."""
        rows = np.asarray(self.dataset.rows, np.int64)
        (_, height, width), _ = self.image_spec()
        if self.dataset.file.fields["images"].ragged is None:
            return np.broadcast_to(np.array([height, width]), (len(rows), 2))
        with closing(self._index_reader()) as reader:
            shapes = reader.encoded("images").part("shape", rows)
        return shapes[:, :2].astype(np.int64)

    def _index_reader(self) -> Rows:
        """Returns a reader for the index of the images."""
        return self.dataset.open_reader("auto", cache_chunks=1, windows=False)

    def samples(self, rows: NDArray[np.int64]) -> Iterable[Any]:
        """Yields the samples of rows, transformed."""
        samples = self.dataset.samples(rows)
        stopwatch = current()
        if stopwatch is not None:
            stopwatch.lap("reading")
            stopwatch.sample_begins()
        transform = self.dataset.sample_transform
        return samples if transform is None else map(transform, samples)

    def has_jpegs(self) -> bool:
        """Whether any of the images that are asked for is stored as JPEG."""
        return self._has_encodings and self._any_jpeg(self.dataset.rows)

    def seems_to_have_jpegs(self) -> bool:
        """Whether one of a few of them is a JPEG; of a URL, where to look would take requests, whether one may be."""
        dataset = self.dataset
        if dataset.file.remote is not None or not self._has_encodings:
            return self._has_encodings
        return self._any_jpeg(dataset.rows[:: max(1, len(dataset) // _LOOKED_AT)])

    @property
    def _has_encodings(self) -> bool:
        """Whether each of the images that are asked for has an encoding of its own."""
        return "images" in self.dataset.fields and self.dataset.file.fields["images"].ragged is not None

    def _any_jpeg(self, chosen: Sequence[int] | NDArray[np.int64]) -> bool:
        rows = np.asarray(chosen, np.int64)
        with closing(self._index_reader()) as reader:
            encodings = reader.encoded("images").part("encoding", rows)
        return bool((encodings == JPEG).any())

    def compression_ratio(self) -> float:
        """Returns how many times as many bytes the images would take as raw pixels; 0.0 if none is encoded.

        Taken from some of the rows.
        """
        dataset = self.dataset
        field = dataset.file.fields.get("images")
        if "images" not in dataset.fields or field is None or field.ragged is None or not len(dataset):
            return 0.0
        rows = np.asarray(dataset.rows[:: max(1, len(dataset) // _RATIO_ROWS)], np.int64)
        with closing(self._index_reader()) as reader:
            index = reader.within(rows, lambda: reader.encoded("images").index(rows))
        if (index.encoding == RAW).all():
            return 0.0
        pixels = index.shape.prod(axis=1, dtype=np.int64).sum() * field.dtype.itemsize
        return float(pixels / max(1, index.bytes.sum()))

    def name_of(self, row: int) -> str:
        """Returns the key of a row, or its number, with the file's name."""
        return self.dataset.name_of(row)

    def names_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Returns the key of each row, or its number where the file has no keys."""
        return self.dataset.keys_of(rows)


class OtherInput:
    """The data of any map-style dataset; attributes and methods as of `PackedInput`."""

    fields: tuple[str, ...] | None = None
    packed = selected = mentions = path = remote = transform = None
    compressed: Sequence[str] = ()
    files: Sequence[Path] = ()
    classes: tuple[str, ...] = ()
    chunk_rows = chunk_bytes = row_bytes = stored_bytes = network_bytes = ignore_index = channels = 0
    shuffled = ragged = varied = linear = skips_damaged = decode_on_device = False
    runs_python = True
    read_mode = ""
    collate = staticmethod(default_collate)

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = cast(Any, dataset)
        self.name = self.code = type(dataset).__name__
        self.plan_rows = range(len(self.dataset))
        # As torch does: some define it as None. A Subset has it, and calls its dataset's, if there is one.
        self._many = getattr(dataset, "__getitems__", None) if _makes_many(dataset) else None
        self.at_once = bool(self._many)

    def identity(self) -> str:
        """Returns the digests of packed files in it, the indices of subsets, the parts it is put together of."""
        return _identity(self.dataset)

    def check(self) -> None:
        """Raises OptionError if the dataset's length has changed."""
        if len(self.dataset) != len(self.plan_rows):
            raise OptionError(
                f"{self.name}: had {len(self.plan_rows):,} samples when the loader was made and has "
                f"{len(self.dataset):,} now. Make the loader again."
            )

    def description(self) -> list[str]:
        """Returns its name."""
        return [self.name]

    def newest(self) -> Input:
        """Returns itself."""
        return self

    def reading(self, read: Read) -> Any:
        """Returns the dataset."""
        return self.dataset

    def expecting(self, chunks: int | None) -> Input:
        """Returns itself."""
        return self

    def read_ahead(self, *, windows: bool) -> None:
        """Returns None: nothing is known of files."""

    def coordinates(self) -> dict[str, Coordinates]:
        """Returns an empty dict."""
        return {}

    def gathered(self) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Returns an empty list."""
        return []

    def has_jpegs(self) -> bool:
        """Returns False: not known."""
        return False

    def compression_ratio(self) -> float:
        """Returns 0.0: not known."""
        return 0.0

    def samples(self, rows: NDArray[np.int64]) -> Iterable[Any]:
        """Yields the samples of indices, in order."""
        return self._many(rows.tolist()) if self._many else (self.dataset[index] for index in rows.tolist())

    def name_of(self, row: int) -> str:
        """Returns a sample's index, with its path for datasets that list (path, class) pairs, as torchvision's do."""
        listed = getattr(self.dataset, "samples", None)
        entry = listed[row] if isinstance(listed, Sequence) and row < len(listed) else None
        path = entry[0] if isinstance(entry, (tuple, list)) and entry else None
        return f"{self.name}[{row}]" + (f" ({path})" if isinstance(path, (str, os.PathLike)) else "")

    def names_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Returns what messages call each sample."""
        return tuple(map(self.name_of, rows.tolist()))


def _makes_many(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _makes_many(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def _identity(dataset: Any, around: frozenset[int] = frozenset()) -> str:
    """Returns what is known of a dataset's content: of a foreign one its type and length, and of those that it holds.

    `around`: the `id` of each that holds it, which it may know in turn.
    """
    if isinstance(dataset, PackedDataset):
        return dataset.data_identity()
    around |= {id(dataset)}
    parts = [_identity(part, around) for part in _parts(dataset) if id(part) not in around]
    if isinstance(dataset, ConcatDataset):
        return f"({' + '.join(parts)})"
    kind = type(dataset)
    name = f"{kind.__module__}.{kind.__qualname__}/{_length(dataset)}"
    if isinstance(dataset, Subset):
        indices = positions_of("Subset.indices", dataset.indices)
        name += f"/{hashlib.sha256(indices.tobytes()).hexdigest()[:16]}"
    return f"{name} of {', '.join(parts)}" if parts else name


def _length(dataset: Any) -> str:
    """Returns the length as text; "?" of a dataset that has none, as one that is only iterated."""
    try:
        return str(len(dataset))
    except (TypeError, NotImplementedError):
        return "?"


def _parts(dataset: Any) -> list[Dataset[Any]]:
    """Returns the datasets that another one holds: in attributes, or in lists or dicts of them."""
    found: list[Dataset[Any]] = []
    for value in getattr(dataset, "__dict__", {}).values():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        # Not all of a list of samples, which may be long.
        if any(isinstance(one, Dataset) for one in itertools.islice(several, _FIRST_VALUES)):
            found += [one for one in several if isinstance(one, Dataset)]
    return found


def unwrapped(dataset: Any) -> Any:
    """Returns a subset of a packed dataset, as torch's `random_split` makes them, as the selection that it is.

    Also one of several within each other; any other dataset as it is.
    """
    if type(dataset) is not Subset:  # one of the user's own may do more
        return dataset
    inner = unwrapped(dataset.dataset)
    if isinstance(inner, PackedDataset):
        inner.fix()
    indices = positions_of("Subset.indices", dataset.indices)
    return inner.select(indices) if isinstance(inner, PackedDataset) else dataset


def _holds_packed(dataset: Any, depth: int = 8) -> bool:
    parts = _parts(dataset)
    here = any(isinstance(part, PackedDataset) for part in parts)
    return here or (depth > 0 and any(_holds_packed(part, depth - 1) for part in parts))


Input = PackedInput | OtherInput


def shuffle_of(data: Input, shuffle: Shuffle, *, cached: bool = False) -> ResolvedShuffle:
    """Returns the shuffle that is carried out, with the classes of a field that it names.

    Warns where chunks are decoded again and again, unless `cached`.
    """
    # Without chunks, as in a subset or in contiguous storage, there is no window to read.
    chosen_by_file = shuffle is True or shuffle == "auto"
    resolved = "full" if chosen_by_file and not data.chunk_rows else resolve_shuffle(shuffle, data.shuffled)
    if is_drawing(resolved) and isinstance(resolved.field, str):
        if data.fields is None:
            raise OptionError(
                f"shuffle={resolved!r}: {data.name} has no fields by name. Give the class of each sample in the place "
                f"of {resolved.field!r}: whole numbers, ({len(data.plan_rows)},)."
            )
        field, file = resolved.field, data.dataset.file
        resolved = resolved.of_labels(data.dataset.class_numbers(field), file.fields[field].names)
    if isinstance(resolved, ChunkWindow) and data.selected is not None:
        raise OptionError(
            f'{data.name}: shuffle="chunk" reads whole chunks, and a selection of rows has none. Leave shuffle out, or '
            f'give "full".'
        )
    if (resolved == "full" or is_drawing(resolved)) and data.compressed and not cached:
        what = "full shuffle" if resolved == "full" else "drawing samples"
        warnings.warn(
            f"{data.name}: {data.compressed[0]} is compressed in chunks, and {what} decodes a chunk for nearly "
            f'every sample. shuffle="chunk" decodes each once an epoch; packing the original files with '
            f"`fastload pack` makes any order cheap.",
            stacklevel=level_of_the_user(),
        )
    return resolved


def as_input(source: Any) -> Input:
    """Returns the data that `FastLoader` was given.

    Raises:
        OptionError: it is nothing whose rows can be planned.
        MissingFileError, FormatError: the file is not there, or cannot be read.
    """
    source = unwrapped(source)
    if isinstance(source, PackedDataset):
        source.fix()
        return PackedInput(source)
    if isinstance(source, (str, os.PathLike)):
        return PackedInput(PackedDataset(os.fspath(source)))
    if isinstance(source, (list, tuple)) and source and all(isinstance(part, (str, os.PathLike)) for part in source):
        return PackedInput(PackedDataset(source))
    if isinstance(source, IterableDataset):
        raise OptionError(
            f"source: {type(source).__name__} is an IterableDataset, whose samples have no indices and cannot be put "
            f"in order. Give a map-style dataset (with __getitem__ and __len__), or `fastload pack` its files."
        )
    if isinstance(source, type):
        raise OptionError(
            f"source={source.__name__} is a class. Give a dataset, an object of it, with its parentheses: "
            f"{source.__name__}(...)."
        )
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise OptionError(
            f"source: expected the path of a packed file, a PackedDataset or a map-style dataset (with __getitem__ and "
            f"__len__), got {type(source).__name__}."
        )
    if _holds_packed(source):
        warnings.warn(
            f"source: {type(source).__name__} holds a PackedDataset, but its samples come through Python code of its "
            f"own, in worker processes. A PackedDataset itself, its `select(positions)` or a Subset of it is read by "
            f"threads, and transformed on the device.",
            stacklevel=level_of_the_user(),
        )
    return OtherInput(source)
