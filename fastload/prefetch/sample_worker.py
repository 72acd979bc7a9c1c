"""Runs in a worker process: makes the samples of a batch and writes them to a slot of shared memory.

Of a packed file the rows are gathered into the slot first and its Python transform is given views of them, so that a
sample that it leaves where it lies is not copied again. Samples that do not fit the slot are collated by torch.
"""

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

from fastload.errors import FastloadError, WorkerError
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.ring import slot_arrays, slot_bytes
from fastload.prefetch.sample_layout import SampleLayout, Unwritten, describe, fields_of, layout_of, unwritten
from fastload.prefetch.shared_memory import SharedMemory
from fastload.timing.results import BatchWork
from fastload.timing.stopwatch import Stopwatch, current, watch_decoders

# Samples asked for at once. So few are still in the cache when they are copied into the slot, and their memory, given
# back at once, is used for the next ones.
_BLOCK = 16


class BatchRequest(NamedTuple):
    """A batch that a worker is asked to make.

    Attributes:
        slot: number of the slot to fill; -1: there is none yet.
        rows: int64 (B,), rows of the file or indices of the dataset.
        seed: for Python's, NumPy's and torch's random numbers, so that they do not depend on which worker draws them.
        layout: of the slot; None: find it out from the first sample, if there is one.
        timed: whether the result says what it cost.
    """

    slot: int
    rows: NDArray[np.int64]
    seed: int
    layout: SampleLayout | None
    timed: bool = False


class WithExtra(NamedTuple):
    """The number of a filled slot, and the fields that have no array in it: collated, by name."""

    slot: int
    fields: dict[str, Any]


class Collated(NamedTuple):
    """A batch that is not in its slot, but was collated by torch.

    Attributes:
        layout: of its samples.
        fields: collated.
        found: its samples' structure in words, when they do not fit the slot.
        kept: whether the user's code still refers to a part of the slot, so that it must not be used again.
    """

    layout: SampleLayout
    fields: list[Any]
    found: str | None
    kept: bool = False


class TimedResult(NamedTuple):
    """A result, and what it cost."""

    result: int | WithExtra | Collated
    work: BatchWork


class Failure(NamedTuple):
    """The error that came instead of a batch; raised in the training process."""

    error: FastloadError


class Filler(Dataset[Any]):
    """A dataset for torch's fetcher whose keys are requests and whose items are results; pickled into the workers."""

    def __init__(self, source: Input, memory: SharedMemory, batch_size: int, names: Sequence[str] | None) -> None:
        self._source = source
        self._memory = memory
        self._batch_size = batch_size
        self._names = names
        self._slots: dict[int, dict[str, NDArray[Any]]] = {}
        self._in_place = True
        self._stopwatch: Stopwatch | None = None  # while a batch is timed

    def __getitem__(
        self, request: BatchRequest
    ) -> int | WithExtra | Collated | TimedResult | Failure | SampleLayout | None:
        """Carries out a request; returns the number of the filled slot, or what there is instead."""
        done: list[int] = []  # grows by one with each sample, so that an error can name its sample
        try:
            if request.layout is None and not len(request.rows):
                return None
            _seed(request.seed)
            if request.layout is None:
                return layout_of(next(self._made(request.rows, done)), self._names)
            if request.timed:
                return self._fill_timed(request, request.layout, done)
            return self._fill(request, request.layout, done)
        except FastloadError as error:
            return Failure(type(error)(f"{error}\n\nIn a worker process:\n{traceback.format_exc()}"))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the training loop has to hear of it
            return Failure(self._named(error, request.rows, len(done)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": {}, "_stopwatch": None}

    def _made(self, rows: NDArray[np.int64], done: list[int]) -> Iterator[Any]:
        """Yields the samples of rows, made some at a time."""
        for first in range(0, len(rows), _BLOCK):
            for sample in self._source.samples(rows[first : first + _BLOCK]):
                if sample is None:
                    raise TypeError("the sample is None")
                if self._stopwatch is not None:
                    self._stopwatch.lap("transform")
                yield sample
                done.append(1)

    def _fill_timed(self, request: BatchRequest, layout: SampleLayout, done: list[int]) -> TimedResult:
        self._stopwatch = stopwatch = current() or Stopwatch("transform", by_threads=False).start()
        watch_decoders()
        try:
            stopwatch.begin()
            result = self._fill(request, layout, done)
            stopwatch.lap("collate")
            return TimedResult(result, stopwatch.end())
        finally:
            self._stopwatch = None

    def _fill(self, request: BatchRequest, layout: SampleLayout, done: list[int]) -> int | WithExtra | Collated:
        arrays = self._arrays(request.slot, layout)
        if self._in_place and isinstance(self._source, PackedInput):
            into = self._source.gathered_into(self._in_memory(request.slot, layout))
            if into:
                return self._fill_in_place(self._source, request, layout, done, into)
        extra: list[list[Any]] = []
        samples = self._made(request.rows, done)
        stopwatch = self._stopwatch
        for index, sample in enumerate(samples):
            new = unwritten(arrays, index, sample, layout.form)
            if new is None:
                before = [_sample(layout, arrays, at, Unwritten([], rest)) for at, rest in enumerate(extra)]
                return self._collated([*before, sample, *samples], request.rows)
            new.write(arrays, index)
            extra.append(new.extra)
            if stopwatch is not None:
                stopwatch.lap("collate")
                stopwatch.sample()
        return _filled(request.slot, layout, extra)

    def _fill_in_place(
        self,
        source: PackedInput,
        request: BatchRequest,
        layout: SampleLayout,
        done: list[int],
        into: dict[str, NDArray[Any]],
    ) -> int | WithExtra | Collated:
        """Gathers the rows into the slot and hands the transform its samples there: one copy of the pixels, not two."""
        arrays = self._arrays(request.slot, layout)
        columns = source.dataset.columns(request.rows, into)
        if self._stopwatch is not None:
            self._stopwatch.lap("reading")
        # One object per sample and field: its reference count shows whether anybody still refers to its memory.
        raw = [
            column if isinstance(column, list) else [column[index, ...] for index in range(len(column))]
            for column in columns
        ]
        gathered = [column for name, column in zip(source.dataset.fields, raw, strict=True) if name in into]
        extra: list[list[Any]] = []
        unfit = self._transform_in_place(source, arrays, raw, gathered, layout, extra, done)
        if not unfit and not any(max(map(sys.getrefcount, column)) > _UNREFERENCED_MAPPED for column in gathered):
            return _filled(request.slot, layout, extra)
        # A sample does not fit the slot, or the transform keeps a view of it, to mix it with a later sample or so.
        self._in_place = False
        samples = [_sample(layout, arrays, index, Unwritten([], rest)) for index, rest in enumerate(extra)]
        done.extend([1] * len(unfit))
        samples += unfit
        samples += self._made(request.rows[len(samples) :], done)
        return self._collated(samples, request.rows, kept=True)

    def _transform_in_place(
        self,
        source: PackedInput,
        arrays: Sequence[NDArray[Any] | None],
        raw: Sequence[Sequence[NDArray[Any]]],
        gathered: Sequence[Sequence[NDArray[Any]]],
        layout: SampleLayout,
        extra: list[list[Any]],
        done: list[int],
    ) -> list[Any]:
        """Writes transformed samples to the slot where they do not lie in it already.

        Returns:
            The first sample that does not fit the slot, or must not be written to it; or nothing.
        """
        all_gathered, transformed, from_numpy = len(gathered) == len(raw), source.transformed, torch.from_numpy
        num_written, num_samples = 0, len(raw[0])
        stopwatch = self._stopwatch
        if stopwatch is not None:
            stopwatch.sample_begins()
        for index in range(num_samples):
            # Not by zip, which keeps the last tuple that it gave.
            given = tuple([from_numpy(column[index]) for column in raw])
            sample = transformed(given)
            if sample is given and all_gathered:
                extra.append([])
                done.append(1)
                if stopwatch is not None:
                    stopwatch.lap("transform")
                    stopwatch.sample()
                continue
            del given
            if sample is None:
                raise TypeError("the sample is None")
            new = unwritten(arrays, index, sample, layout.form)
            if new is None:
                return [sample]
            del sample
            if stopwatch is not None:
                stopwatch.lap("transform")
            if any(value is not None for value in new.arrays) and _is_referenced(gathered, index):
                return [_sample(layout, arrays, index, new)]
            num_written += new.write(arrays, index)
            extra.append(new.extra)
            done.append(1)
            if stopwatch is not None:
                stopwatch.lap("collate")
                stopwatch.sample()
        # A transform that mostly makes new images is better off with samples that are still in the cache.
        self._in_place = 2 * num_written <= num_samples
        return []

    def _collated(self, samples: list[Any], rows: NDArray[np.int64], *, kept: bool = False) -> Collated:
        """Returns the samples collated by torch; raises WorkerError if they differ in structure."""
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
        return Collated(layout, [default_collate(list(values)) for values in columns], found, kept)

    def _in_memory(self, slot: int, layout: SampleLayout) -> dict[str, NDArray[Any]]:
        """Returns the slot's arrays in memory order, by name."""
        if slot not in self._slots:
            fields = layout.slot_fields(self._batch_size)
            num_bytes = max(1, slot_bytes(fields))
            self._slots[slot] = slot_arrays(fields, self._memory.view(slot * num_bytes, num_bytes))
        return self._slots[slot]

    def _arrays(self, slot: int, layout: SampleLayout) -> list[NDArray[Any] | None]:
        """Returns the slot's arrays with the axes of a sample, in the order of its fields; None for extra fields."""
        arrays = layout.in_axes_of_sample(self._in_memory(slot, layout))
        return [arrays.get(name) for name in layout.form.names]

    def _named(self, error: BaseException, rows: NDArray[np.int64], done: int) -> WorkerError:
        """Returns an error that names the sample, as far as it is known."""
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


def _filled(slot: int, layout: SampleLayout, extra: Sequence[Sequence[Any]]) -> int | WithExtra:
    """Returns the result of a slot that was filled."""
    names = [name for name, leaf in zip(layout.form.names, layout.leaves, strict=True) if leaf is None]
    if not names:
        return slot
    columns = zip(*extra, strict=True)
    fields = {name: default_collate(list(values)) for name, values in zip(names, columns, strict=True)}
    return WithExtra(slot, fields)


def _is_referenced(raw: Sequence[Sequence[NDArray[Any]]], index: int) -> bool:
    """Whether anything but these lists refers to a sample's arrays: a tensor made of one, or a view of that."""
    return any(sys.getrefcount(column[index]) > _UNREFERENCED for column in raw)


_LISTED = [object()]
_UNREFERENCED = sys.getrefcount(_LISTED[0])
_UNREFERENCED_MAPPED = max(map(sys.getrefcount, _LISTED))


def _sample(layout: SampleLayout, arrays: Sequence[NDArray[Any] | None], index: int, new: Unwritten) -> Any:
    """Returns a sample from the slot and what is new of it, as a tuple or dict of arrays of its own."""
    extra, written = iter(new.extra), iter(new.arrays or [None] * len(arrays))
    values = []
    for array in arrays:
        fresh = next(written)
        values.append(next(extra) if array is None else array[index].copy() if fresh is None else fresh)
    return dict(zip(layout.form.keys, values, strict=True)) if layout.form.keys is not None else tuple(values)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the state that users' transforms draw from
