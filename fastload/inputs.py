"""What a loader is given, seen alike: a packed file, a part of one, or any map-style dataset.

To the plan it is a run of rows; to workers it makes samples.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.format import PackedFile
from fastload.plan import PlannedBatch, ResolvedShuffle, Shuffle, resolve_shuffle
from fastload.read import image_axes
from fastload.read.chunked import CACHE_BYTES
from fastload.read.identity import check_path
from fastload.read.stored import sample_name
from fastload.stopwatch import current
from fastload.transforms.coordinates import COORDINATE_FIELDS, Coordinates, coordinates_of

# What the attribute `coordinates` says of fields whose numbers are not pixels of the packed images.
_NOT_OF_THE_PACKED = {
    "original": "they are pixels of the original images, of which the packed ones are parts",
    "aligned, before it was resized": "they are pixels of the images before `fastload pack --size` resized them",
    "unknown": "it is not known what their numbers are",
}


class Input(Protocol):
    """The data of a loader; pickled into worker processes.

    Attributes:
        name: how messages call it.
        fields: names of a batch's fields, in order; None: the samples say.
        plan_rows: what the plan puts in order.
        chunk_rows: rows of the chunks that windows are made of; 0: there are none.
        shuffled: whether neighbouring rows are a fair mix already.
        ignore_index: what masks hold where nothing is.
        runs_python: whether a sample takes Python code of the user's.
        at_once: whether `samples` makes all of a call's samples before it yields the first.
    """

    name: str
    fields: tuple[str, ...] | None
    plan_rows: range
    chunk_rows: int
    shuffled: bool
    ignore_index: int
    runs_python: bool
    at_once: bool

    def resolve_shuffle(self, shuffle: Shuffle, *, kept: bool = False) -> ResolvedShuffle:
        """The shuffle that is carried out; `kept` rows are not read again. Raises OptionError for what is none."""
        ...

    def identity(self) -> str:
        """The same for the same data, in any process; part of a saved state."""
        ...

    def check(self) -> None:
        """Raises if the data is no longer what it was."""
        ...

    def rows_of(self, planned: Iterator[PlannedBatch]) -> Iterator[PlannedBatch]:
        """The batches with rows of the file, or indices of the dataset, for the positions planned."""
        ...

    def samples(self, rows: NDArray[np.int64]) -> Iterator[Any]:
        """The samples of rows, in order."""
        ...

    def name_of(self, row: int) -> str:
        """How messages call a sample."""
        ...


class PackedInput:
    """A `PackedDataset`; see `Input`."""

    at_once = False

    def __init__(self, dataset: PackedDataset) -> None:
        file = dataset.file
        self.dataset = dataset
        self.name = str(file.path)
        self.fields: tuple[str, ...] | None = dataset.fields
        self._selected = None if isinstance(dataset.rows, range) else dataset.rows
        self.plan_rows = dataset.rows if isinstance(dataset.rows, range) else range(len(dataset.rows))
        # The field whose chunks decide how rows are shuffled.
        main = "images" if "images" in file.fields else next(iter(file.fields))
        self.chunk_rows = 0 if self._selected is not None else file.fields[main].chunk_rows
        self.shuffled = file.shuffled
        masks = file.fields.get("masks")
        self.ignore_index = int(masks.attrs.get("ignore_index", 0)) if masks else 0
        self.runs_python = dataset.transform is not None

    def resolve_shuffle(self, shuffle: Shuffle, *, kept: bool = False) -> ResolvedShuffle:
        """See `Input.resolve_shuffle`."""
        # Without chunks, as in a subset or in contiguous storage, there is no window to read.
        chosen_by_file = shuffle is True or shuffle == "auto"
        resolved = "full" if chosen_by_file and not self.chunk_rows else resolve_shuffle(shuffle, self.shuffled)
        compressed = [name for name, _, _ in self.dataset.layout() if self._is_decoded_again(name)]
        if resolved == "full" and compressed and not kept:
            warnings.warn(
                f"{self.name}: {compressed[0]} is compressed in chunks, and full shuffle decodes a chunk for nearly "
                f'every sample. shuffle="chunk" decodes each once an epoch; packing the original files with '
                f"`fastload pack` makes any order cheap.",
                stacklevel=3,
            )
        return resolved

    def _is_decoded_again(self, name: str) -> bool:
        """Whether a field in random order costs a chunk for a row: it is compressed, and too large to be kept."""
        file = self.dataset.file
        field = file.fields[name]
        return bool(field.filters) and field.chunk_rows > 1 and field.row_bytes * file.num_rows > CACHE_BYTES

    def identity(self) -> str:
        """See `Input.identity`."""
        return self.dataset.data_identity()

    def check(self) -> None:
        """See `Input.check`."""
        check_path(self.dataset.file)

    def rows_of(self, planned: Iterator[PlannedBatch]) -> Iterator[PlannedBatch]:
        """See `Input.rows_of`."""
        selected = self._selected
        return planned if selected is None else (batch._replace(rows=selected[batch.rows]) for batch in planned)

    def rows_in_file(self, positions: range) -> range | NDArray[np.int64]:
        """The rows that a part of `plan_rows` stands for, ascending, each once."""
        return positions if self._selected is None else np.unique(self._selected[positions.start : positions.stop])

    def image_spec(self) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape (C, H, W) and dtype of an image as the file has it."""
        field = self.dataset.file.fields["images"]
        return _image_shape(self.dataset.file), torch.from_numpy(np.empty(0, field.dtype.newbyteorder("="))).dtype

    def coordinates(self) -> dict[str, Coordinates]:
        """How fields hold places in the image, as far as the file says it."""
        file = self.dataset.file
        known = {}
        for name in self.fields or ():
            if name in COORDINATE_FIELDS and name in file.fields:
                field = file.fields[name]
                frame = _NOT_OF_THE_PACKED.get(str(field.attrs.get("coordinates")), "")
                known[name] = coordinates_of(name, field.shape, field.names, frame)
        return known

    def samples(self, rows: NDArray[np.int64]) -> Iterator[Any]:
        """See `Input.samples`."""
        samples = self.dataset.samples(rows)
        stopwatch = current()
        if stopwatch is not None:
            stopwatch.lap("reading")
            stopwatch.sample_begins()
        return map(self.transformed, samples)

    def gathered_into(self, slot: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Of a slot's arrays, those that rows may be gathered into: their fields fit as they lie in the file."""
        return {
            name: slot[name]
            for name, shape, dtype in self.dataset.layout()
            if name in slot and slot[name].shape[1:] == shape and slot[name].dtype == dtype
        }

    def transformed(self, sample: tuple[torch.Tensor, ...]) -> Any:
        """A sample out of the tensors of its fields."""
        return sample if self.dataset.transform is None else self.dataset.transform(sample)

    def name_of(self, row: int) -> str:
        """See `Input.name_of`."""
        return sample_name(self.dataset.file, row)


class OtherInput:
    """Any map-style dataset; see `Input`."""

    fields: tuple[str, ...] | None = None
    chunk_rows = 0
    shuffled = False
    ignore_index = 0
    runs_python = True

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = cast(Any, dataset)
        self.name = type(dataset).__name__
        self.plan_rows = range(len(self._dataset))
        # As torch does: some define it as None.
        self._many = getattr(dataset, "__getitems__", None)
        self.at_once = bool(self._many)

    def resolve_shuffle(self, shuffle: Shuffle, *, kept: bool = False) -> ResolvedShuffle:
        """See `Input.resolve_shuffle`."""
        return resolve_shuffle(shuffle, file_shuffled=False)

    def identity(self) -> str:
        """See `Input.identity`: of datasets that are not ours, no more is known than their type and length."""
        kind = type(self._dataset)
        return f"{kind.__module__}.{kind.__qualname__}/{len(self.plan_rows)}"

    def check(self) -> None:
        """See `Input.check`."""
        if len(self._dataset) != len(self.plan_rows):
            raise OptionError(
                f"{self.name}: had {len(self.plan_rows):,} samples when the loader was made and has "
                f"{len(self._dataset):,} now. Make the loader again."
            )

    def rows_of(self, planned: Iterator[PlannedBatch]) -> Iterator[PlannedBatch]:
        """See `Input.rows_of`."""
        return planned

    def samples(self, rows: NDArray[np.int64]) -> Iterator[Any]:
        """See `Input.samples`."""
        if self._many:
            yield from self._many(rows.tolist())
        else:
            for index in rows.tolist():
                yield self._dataset[index]

    def name_of(self, row: int) -> str:
        """See `Input.name_of`; with the file's name for datasets that list (path, class) pairs, as torchvision's do."""
        listed = getattr(self._dataset, "samples", None)
        entry = listed[row] if isinstance(listed, Sequence) and row < len(listed) else None
        path = entry[0] if isinstance(entry, (tuple, list)) and entry else None
        return f"{self.name}[{row}]" + (f" ({path})" if isinstance(path, (str, os.PathLike)) else "")


def as_input(source: Any) -> PackedInput | OtherInput:
    """What `FastLoader` was given.

    Raises:
        OptionError: nothing that rows can be planned of.
        MissingFileError, FormatError: the file is not there, or cannot be read.
    """
    if isinstance(source, PackedDataset):
        return PackedInput(source)
    if isinstance(source, (str, os.PathLike)):
        return PackedInput(PackedDataset(os.fspath(source)))
    if isinstance(source, (list, tuple)) and source and all(isinstance(part, (str, os.PathLike)) for part in source):
        raise OptionError(
            "several files in one FastLoader are not in this release: pack them into one file (`fastload pack`), or "
            "give FastLoader a torch.utils.data.ConcatDataset of PackedDatasets, which worker processes read."
        )
    if isinstance(source, IterableDataset):
        raise OptionError(
            f"source: {type(source).__name__} is an IterableDataset, whose samples have no numbers, so that nobody can "
            f"plan them. Give a map-style dataset (with __getitem__ and __len__), or `fastload pack` its files."
        )
    if isinstance(source, type) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise OptionError(
            f"source: expected the path of a packed file, a PackedDataset or a map-style dataset (with __getitem__ and "
            f"__len__), got {source.__name__ if isinstance(source, type) else type(source).__name__}."
        )
    return OtherInput(source)


def _image_shape(file: PackedFile) -> tuple[int, int, int]:
    """(C, H, W)."""
    axes, shape = image_axes(file), file.fields["images"].shape
    if axes == "HW":
        return 1, shape[0], shape[1]
    return (shape[2], shape[0], shape[1]) if axes == "HWC" else (shape[0], shape[1], shape[2])
