"""What runs in a worker process: it makes the samples of a batch and lays them into a slot of shared memory."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from fastload.decoder_laps import watch_decoders
from fastload.errors import FastloadError, WorkerError
from fastload.inputs import Input, PackedInput
from fastload.ring import slot_arrays, slot_bytes
from fastload.samples import SampleLayout, as_array, describe, fields_of, layout_of, write_sample
from fastload.shared_memory import SharedMemory
from fastload.stopwatch import Stopwatch, current
from fastload.verdict import BatchWork

# Samples asked for at once. So few are still in the cache when they are copied into the slot, and their memory, given
# back at once, is used for the next ones.
_BLOCK = 16


class Order(NamedTuple):
    """What a worker is asked to do.

    Attributes:
        slot: to be filled; -1: none is there yet.
        rows: int64 (B,).
        seed: for Python's, NumPy's and torch's random numbers, so that they do not depend on which worker draws them.
        layout: of the slot; None: find it out from the first sample, if there is one.
        timed: whether the result says what it cost.
    """

    slot: int
    rows: NDArray[np.int64]
    seed: int
    layout: SampleLayout | None
    timed: bool = False


class Beside(NamedTuple):
    """A filled slot, and the fields that travel beside it: collated, by name."""

    slot: int
    fields: dict[str, Any]


class Loose(NamedTuple):
    """A batch that is not in its slot, collated by torch instead.

    Attributes:
        layout: of its samples.
        fields: collated.
        found: what its samples look like, when they do not fit the slot.
        kept: the slot must not be used again: code of the user's still refers to a part of it.
    """

    layout: SampleLayout
    fields: list[Any]
    found: str | None
    kept: bool = False


class Timed(NamedTuple):
    """A result, and what it cost."""

    result: int | Beside | Loose
    work: BatchWork


class Failure(NamedTuple):
    """Why there is no batch; raised in the training process."""

    error: FastloadError


class Filler(Dataset[Any]):
    """A dataset for torch's fetcher whose items are orders carried out; pickled into the workers."""

    def __init__(self, source: Input, memory: SharedMemory, batch_size: int, names: Sequence[str] | None) -> None:
        self._source = source
        self._memory = memory
        self._batch_size = batch_size
        self._names = names
        self._slots: dict[int, dict[str, NDArray[Any]]] = {}
        self._in_place = True
        self._stopwatch: Stopwatch | None = None  # while a batch is timed

    def __getitem__(self, order: Order) -> int | Beside | Loose | Timed | Failure | SampleLayout | None:
        done: list[int] = []  # grows by one a sample, so that an error can name its sample
        try:
            if order.layout is None and not len(order.rows):
                return None
            _seed(order.seed)
            if order.layout is None:
                return layout_of(next(self._made(order.rows, done)), self._names)
            if order.timed:
                return self._fill_timed(order, order.layout, done)
            return self._fill(order, order.layout, done)
        except FastloadError as error:
            return Failure(type(error)(f"{error}\n\nIn a worker process:\n{traceback.format_exc()}"))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the training loop has to hear of it
            return Failure(self._named(error, order.rows, len(done)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": {}, "_stopwatch": None}

    def _made(self, rows: NDArray[np.int64], done: list[int]) -> Iterator[Any]:
        for first in range(0, len(rows), _BLOCK):
            for sample in self._source.samples(rows[first : first + _BLOCK]):
                if sample is None:
                    raise TypeError("the sample is None")
                if self._stopwatch is not None:
                    self._stopwatch.lap("transform")
                yield sample
                done.append(1)

    def _fill_timed(self, order: Order, layout: SampleLayout, done: list[int]) -> Timed:
        self._stopwatch = stopwatch = current() or Stopwatch("transform", by_threads=False).start()
        watch_decoders()
        try:
            stopwatch.begin()
            result = self._fill(order, layout, done)
            stopwatch.lap("collate")
            return Timed(result, stopwatch.end())
        finally:
            self._stopwatch = None

    def _fill(self, order: Order, layout: SampleLayout, done: list[int]) -> int | Beside | Loose:
        arrays = self._arrays(order.slot, layout)
        if self._in_place and isinstance(self._source, PackedInput):
            into = self._source.gathered_into(self._in_memory(order.slot, layout))
            if into:
                return self._fill_in_place(self._source, order, layout, done, into)
        beside: list[list[Any]] = []
        samples = self._made(order.rows, done)
        stopwatch = self._stopwatch
        for place, sample in enumerate(samples):
            values = fields_of(sample, layout.form)
            rest = write_sample(arrays, place, values) if values is not None else None
            if rest is None:
                before = [_sample(layout, arrays, at, _New([], rest)) for at, rest in enumerate(beside)]
                return self._loose([*before, sample, *samples], order.rows)
            beside.append(rest)
            if stopwatch is not None:
                stopwatch.lap("collate")
                stopwatch.sample()
        return _filled(order.slot, layout, beside)

    def _fill_in_place(
        self, source: PackedInput, order: Order, layout: SampleLayout, done: list[int], into: dict[str, NDArray[Any]]
    ) -> int | Beside | Loose:
        """Gathers the rows into the slot and hands the transform its samples there: one copy of the pixels, not two."""
        arrays = self._arrays(order.slot, layout)
        columns = source.dataset.columns(order.rows, into)
        if self._stopwatch is not None:
            self._stopwatch.lap("reading")
        # One object a sample and field: how often it is referred to tells whether anybody still holds its memory.
        raw = [
            column if isinstance(column, list) else [column[place, ...] for place in range(len(column))]
            for column in columns
        ]
        gathered = [column for name, column in zip(source.dataset.fields, raw, strict=True) if name in into]
        beside: list[list[Any]] = []
        unfit = self._transform_in_place(source, arrays, raw, gathered, layout, beside, done)
        if not unfit and not any(max(map(sys.getrefcount, column)) > _UNHELD_MAPPED for column in gathered):
            return _filled(order.slot, layout, beside)
        # A sample does not fit its place, or the transform holds what lies there, to mix it with a later one or so.
        self._in_place = False
        samples = [_sample(layout, arrays, place, _New([], rest)) for place, rest in enumerate(beside)]
        done.extend([1] * len(unfit))
        samples += unfit
        samples += self._made(order.rows[len(samples) :], done)
        return self._loose(samples, order.rows, kept=True)

    def _transform_in_place(
        self,
        source: PackedInput,
        arrays: Sequence[NDArray[Any] | None],
        raw: Sequence[Sequence[NDArray[Any]]],
        gathered: Sequence[Sequence[NDArray[Any]]],
        layout: SampleLayout,
        beside: list[list[Any]],
        done: list[int],
    ) -> list[Any]:
        """Writes the samples to their places as far as they lie there no more; returns one that must not be written."""
        all_gathered, transformed, from_numpy = len(gathered) == len(raw), source.transformed, torch.from_numpy
        num_written, num_places = 0, len(raw[0])
        stopwatch = self._stopwatch
        if stopwatch is not None:
            stopwatch.sample_begins()
        for place in range(num_places):
            # Not by zip, which keeps the last tuple that it gave.
            given = tuple([from_numpy(column[place]) for column in raw])
            sample = transformed(given)
            if sample is given and all_gathered:
                beside.append([])
                done.append(1)
                if stopwatch is not None:
                    stopwatch.lap("transform")
                    stopwatch.sample()
                continue
            del given
            if sample is None:
                raise TypeError("the sample is None")
            new = _compared(arrays, place, sample, layout)
            if new is None:
                return [sample]
            del sample
            if stopwatch is not None:
                stopwatch.lap("transform")
            written = [(array, value) for array, value in zip(arrays, new.arrays, strict=True) if value is not None]
            if written and _is_held(gathered, place):
                return [_sample(layout, arrays, place, new)]
            for array, value in written:
                array[place] = value  # type: ignore[index]  # a field with something to write has a place
            num_written += bool(written)
            beside.append(new.beside)
            done.append(1)
            if stopwatch is not None:
                stopwatch.lap("collate")
                stopwatch.sample()
        # A transform that mostly makes new images is better off with samples that are still in the cache.
        self._in_place = 2 * num_written <= num_places
        return []

    def _loose(self, samples: list[Any], rows: NDArray[np.int64], *, kept: bool = False) -> Loose:
        layout = layout_of(samples[0], self._names)
        found = describe(samples[0])
        for row, sample in zip(rows.tolist(), samples, strict=True):
            if describe(sample) != found:
                raise WorkerError(
                    f"{self._source.name_of(row)} is {describe(sample)} while {self._source.name_of(int(rows[0]))}, in "
                    f"the same batch, is {found}. Samples of a batch have the same fields, shapes and dtypes: bring "
                    f"images to one size with a resize or a crop as the last step of the dataset's own transform, and "
                    f"numbers to one type. Samples chosen out of a packed file come as PackedDataset.select(rows), not "
                    f"as a Subset: then FastLoader(transform=[RandomResizedCrop(224), ...]) makes their size."
                )
        columns = zip(*(fields_of(sample, layout.form) or () for sample in samples), strict=True)
        return Loose(layout, [default_collate(list(values)) for values in columns], found, kept)

    def _in_memory(self, slot: int, layout: SampleLayout) -> dict[str, NDArray[Any]]:
        """The slot's arrays as they lie, by name."""
        if slot not in self._slots:
            fields = layout.slot_fields(self._batch_size)
            num_bytes = max(1, slot_bytes(fields))
            self._slots[slot] = slot_arrays(fields, self._memory.view(slot * num_bytes, num_bytes))
        return self._slots[slot]

    def _arrays(self, slot: int, layout: SampleLayout) -> list[NDArray[Any] | None]:
        """The same with the axes of a sample, in the order of its fields."""
        arrays = layout.in_axes_of_sample(self._in_memory(slot, layout))
        return [arrays.get(name) for name in layout.form.names]

    def _named(self, error: BaseException, rows: NDArray[np.int64], done: int) -> WorkerError:
        if done >= len(rows):
            where = f"the batch that begins with {self._source.name_of(int(rows[0]))}"
        elif self._source.at_once:
            first = done // _BLOCK * _BLOCK
            where = f"one of {', '.join(map(self._source.name_of, rows[first : first + _BLOCK].tolist()))}"
        else:
            where = self._source.name_of(int(rows[done]))
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return WorkerError(
            f"{where}: the dataset or its transform raised {said}\n\nIn a worker process:\n{traceback.format_exc()}"
        )


def _filled(slot: int, layout: SampleLayout, beside: Sequence[Sequence[Any]]) -> int | Beside:
    names = [name for name, leaf in zip(layout.form.names, layout.leaves, strict=True) if leaf is None]
    if not names:
        return slot
    columns = zip(*beside, strict=True)
    fields = {name: default_collate(list(values)) for name, values in zip(names, columns, strict=True)}
    return Beside(slot, fields)


class _New(NamedTuple):
    """What of a sample does not lie in its place already.

    Attributes:
        arrays: of each field that has to be written; None for the others.
        beside: the fields that have no place.
    """

    arrays: list[NDArray[Any] | None]
    beside: list[Any]


def _compared(arrays: Sequence[NDArray[Any] | None], place: int, sample: Any, layout: SampleLayout) -> _New | None:
    """What of a sample that was made out of its place has to be written there; None when it does not fit."""
    values = fields_of(sample, layout.form)
    if values is None:
        return None
    new = _New([], [])
    for array, value in zip(arrays, values, strict=True):
        if array is None:
            new.beside.append(value)
            new.arrays.append(None)
            continue
        found = as_array(value)
        if found is None or found.shape != array.shape[1:] or found.dtype != array.dtype:
            return None
        if not np.may_share_memory(found, array):
            new.arrays.append(found)
        elif _same_memory(found, array[place, ...]):
            new.arrays.append(None)
        else:
            new.arrays.append(found.copy())
    return new


def _same_memory(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.__array_interface__["data"] == other.__array_interface__["data"] and one.strides == other.strides


def _is_held(raw: Sequence[Sequence[NDArray[Any]]], place: int) -> bool:
    """Whether anything but these lists refers to a sample's arrays: a tensor made of one, or a view of that."""
    return any(sys.getrefcount(column[place]) > _UNHELD for column in raw)


_LISTED = [object()]
_UNHELD = sys.getrefcount(_LISTED[0])
_UNHELD_MAPPED = max(map(sys.getrefcount, _LISTED))


def _sample(layout: SampleLayout, arrays: Sequence[NDArray[Any] | None], place: int, new: _New) -> Any:
    """A sample out of its place and what is new, as a tuple or dict of arrays of its own."""
    beside, written = iter(new.beside), iter(new.arrays or [None] * len(arrays))
    values = []
    for array in arrays:
        fresh = next(written)
        values.append(next(beside) if array is None else array[place].copy() if fresh is None else fresh)
    return dict(zip(layout.form.keys, values, strict=True)) if layout.form.keys is not None else tuple(values)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the state that users' transforms draw from
