"""Runs in a worker process: makes the samples of a batch and writes them to a slot of shared memory.

Of a packed file the rows are gathered into the slot first and its Python transform is given views of them, so that a
sample that it leaves where it lies is not copied again. Samples that do not fit the slot are collated by torch.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from fastload.dataset import as_tensor
from fastload.errors import DamagedRowError, FastloadError, WorkerError, shortened
from fastload.plan import PlannedBatch
from fastload.prefetch.inputs import Input
from fastload.prefetch.ring import slot_arrays, slot_bytes
from fastload.prefetch.sample_layout import SampleLayout, describe, fields_of, layout_of, unwritten, write
from fastload.prefetch.shared_memory import SharedMemory
from fastload.remote.fetch import leave_fetching_to_others
from fastload.timing.results import BatchWork
from fastload.timing.stopwatch import Stopwatch, current, watch_decoders

# Samples asked for at once. So few are still in the cache when they are copied into the slot, and their memory, given
# back at once, is used for the next ones.
_BLOCK = 16

# Gathered into the slot at a time, so that a batch that nobody waits for any more is left within a millisecond.
_GATHER_BYTES = 4 * 2**20


TRIED = -2
"""In the place of a slot's number."""


class BatchRequest(NamedTuple):
    """A batch that a worker is asked to make."""

    # Number of the slot to fill; -1: there is none yet, only the layout of the first sample is asked for. TRIED: all
    # samples are made, and none is kept.
    slot: int
    seed: int  # for Python's, NumPy's and torch's random numbers, so that no worker draws others
    stream: int  # number of the stream of batches that it is for
    timed: bool = False  # whether the result says what it cost
    layout: SampleLayout | None = None  # of the slots; None: as in the worker's last request
    rows: NDArray[np.int64] | None = None  # of the file, or indices of the dataset; None: the first of `requested_rows`
    seeds: bool = False  # whether each sample draws from a seed of its own, of `requested_seeds`
    num_rows: int = 0  # of those
    spare: NDArray[np.int64] | None = None  # as `PlannedBatch` has them


def control_bytes(slots: int, batch_size: int) -> int:
    """Returns the size in bytes of the shared memory with wanted requests and samples in progress; see `Filler`."""
    return 8 * (2 + slots * (1 + 2 * batch_size))


def place_in_batch(control: SharedMemory, slot: int, batch_size: int) -> NDArray[np.int64]:
    """Returns where it lies which sample of a slot's batch is being made, int64 (1,): its place in the batch.

    -1: the batch was not begun; beyond its samples: all are made, and are put together.
    """
    first = 8 if slot < 0 else control_bytes(slot, batch_size)
    return control.view(first, 8).view(np.int64)


def requested_rows(control: SharedMemory, slot: int, batch_size: int) -> NDArray[np.int64]:
    """Returns where the rows lie that are asked for in a slot, int64 (B,).

    They do not go through the pipe of requests, which would be full sooner or later, and who writes would wait.
    """
    return control.view(control_bytes(slot, batch_size) + 8, 8 * batch_size).view(np.int64)


def requested_seeds(control: SharedMemory, slot: int, batch_size: int) -> NDArray[np.int64]:
    """Returns where the seeds of the rows lie that are asked for in a slot, int64 (B,)."""
    return control.view(control_bytes(slot, batch_size) + 8 * (1 + batch_size), 8 * batch_size).view(np.int64)


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's random numbers, from which users' code draws."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the state that users' transforms draw from
    # torch.manual_seed takes 0.2 ms, for devices that are not in use.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.cuda.manual_seed_all(seed)


class BatchResult(NamedTuple):
    """A worker's answer to a request. Samples that are not in the slot have a layout: torch collated them."""

    slot: int  # as requested
    layout: SampleLayout | None = None  # without a slot: of the first sample, if that was asked for
    fields: Mapping[str, Any] = {}  # collated, by name: all of them, or of a filled slot those without an array in it
    found: str = ""  # the structure of collated samples in words
    skipped: bool = False  # whether nothing was made, since nobody waits for it
    kept: bool = False  # whether the user's code still refers to a part of the slot, which must not be used again
    work: BatchWork | None = None  # what it cost, if that was asked for
    error: Exception | None = None  # came instead; raised in the training process
    damaged: tuple[int, ...] = ()  # rows that were replaced, as `PlannedBatch.without` does


class Filler(Dataset[Any]):
    """A dataset for torch's fetcher whose keys are requests and whose items are results; pickled into the workers.

    Args:
        source: makes the samples.
        memory: the slots.
        control: int64: batches of streams with lower numbers than the first are skipped, also in the middle of one;
            then `place_in_batch` of the request for a layout, then that, `requested_rows` and `requested_seeds`
            of each slot.
        batch_size: samples of a batch.
        skip_damaged: whether damaged rows are replaced by others of their batch.
        refused: rows that count as damaged and are not read, since they ended a worker.
    """

    def __init__(
        self,
        source: Input,
        memory: SharedMemory,
        control: SharedMemory,
        batch_size: int,
        *,
        skip_damaged: bool = False,
        refused: Collection[int] = (),
    ) -> None:
        self._refused = list(refused)
        self._source = source
        self._memory = memory
        self._control = control
        self._batch_size = batch_size
        self._skip_damaged = skip_damaged
        self._layout: SampleLayout | None = None  # of the slots
        self._slots: dict[int, dict[str, NDArray[Any]]] = {}
        self._kept: set[int] = set()  # slots that the user's code still refers to; the training process replaces them
        self._in_place = True
        self._wanted: memoryview | None = None  # the first number of `control`
        self._place = np.zeros(1, np.int64).data  # of the sample that is being made, see `place_in_batch`
        self._stopwatch: Stopwatch | None = None  # while a batch is timed

    def __getitem__(self, request: BatchRequest) -> BatchResult:
        """Carries out a request."""
        if get_worker_info() is not None:  # not where a test runs it in its own process
            leave_fetching_to_others()
        self._place = place_in_batch(self._control, request.slot, self._batch_size).data
        self._place[0] = 0
        self._layout = request.layout or self._layout
        if (rows := request.rows) is None:
            rows = requested_rows(self._control, request.slot, self._batch_size)[: request.num_rows]
        seeds: Sequence[int] = ()
        if request.seeds:
            seeds = requested_seeds(self._control, request.slot, self._batch_size)[: len(rows)].tolist()
        try:
            if self._is_stale(request):
                return BatchResult(request.slot, skipped=True)
            set_seed(request.seed)
            if bad := tuple(rows[np.isin(rows, self._refused)].tolist()) if self._refused else ():
                raise DamagedRowError(f"{self._source.name_of(bad[0])}: ends the process that reads it", bad)
            if request.slot == TRIED:
                for _ in self._made(rows, seeds):
                    self._place[0] += 1
                return BatchResult(request.slot, skipped=True)
            if request.slot < 0:
                return BatchResult(request.slot, layout_of(next(self._made(rows, seeds)), self._source.fields))
            assert self._layout is not None, "it came with the first request for a slot"
            if not request.timed:
                return self._fill(request, rows, seeds, self._layout)
            self._stopwatch = stopwatch = current() or Stopwatch("transform", by_threads=False).start()
            watch_decoders()
            stopwatch.begin()
            result = self._fill(request, rows, seeds, self._layout)
            stopwatch.lap("collate")
            return result._replace(work=stopwatch.end())
        except FastloadError as error:
            if self._skip_damaged and isinstance(error, DamagedRowError) and error.rows:
                given = PlannedBatch(rows, np.ones(len(rows), np.bool_), 0, 0, spare=request.spare)
                planned = given.without(error.rows, world_size=1)
                if planned is not None:
                    result = self[request._replace(rows=planned.rows, spare=planned.spare)]
                    return result._replace(damaged=(*error.rows, *result.damaged))
            raised = type(error)(f"{shortened(str(error))}{_traceback()}")
            vars(raised).update(vars(error))
            return BatchResult(request.slot, error=raised)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the training loop has to hear of it
            return BatchResult(request.slot, error=self._named(error, rows))
        finally:
            self._stopwatch = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": {}, "_kept": set(), "_stopwatch": None, "_wanted": None, "_place": None}

    def _is_stale(self, request: BatchRequest) -> bool:
        """Whether the batch is no longer waited for."""
        if self._wanted is None:
            self._wanted = self._control.view(0, 8).view(np.int64).data
        return bool(self._wanted[0] > request.stream)

    def _made(self, rows: NDArray[np.int64], seeds: Sequence[int]) -> Iterator[Any]:
        """Yields the samples of rows, made some at a time; seeds: of each, or none.

        Samples that the dataset makes at once draw from the first one's seed.
        """
        for first in range(0, len(rows), _BLOCK):
            block = seeds[first : first + _BLOCK]
            for seed in block[:1]:
                set_seed(seed)
            samples = self._source.samples(rows[first : first + _BLOCK])
            if not block or self._source.at_once:
                yield from samples
                continue
            following = iter(samples)
            for seed in block:
                set_seed(seed)
                yield next(following)

    def _fill(
        self, request: BatchRequest, rows: NDArray[np.int64], seeds: Sequence[int], layout: SampleLayout
    ) -> BatchResult:
        """Writes the samples to the slot, or has them made there; where one does not fit, torch collates them."""
        slot, stopwatch = request.slot, self._stopwatch
        if slot in self._kept:  # an earlier stream's batch was made there, and that is not known yet
            return self._collated(slot, rows, list(self._made(rows, seeds)))._replace(kept=True)
        if slot not in self._slots:
            fields = layout.slot_fields(self._batch_size)
            num_bytes = max(1, slot_bytes(fields))
            own = slot_arrays(fields, self._memory.view(slot * num_bytes, num_bytes))
            self._slots[slot] = {name: array for name, array in own.items() if name in layout.form.names}
        memory = self._slots[slot]  # in its order
        named = layout.in_axes_of_sample(memory)
        arrays = [named.get(name) for name in layout.form.names]
        samples, transform = self._made(rows, seeds), None
        # One object per sample and field: its reference count shows whether anybody still refers to its memory.
        parts = self._gathered(request, rows, memory)
        if parts is None:
            return BatchResult(request.slot, skipped=True)
        raw, gathered = parts
        if gathered:
            transform = self._source.transform
        all_gathered = bool(gathered) and len(gathered) == len(raw)
        made: list[list[Any]] = []  # fields of each sample, None for those in the slot
        unfit: list[Any] = []  # the first sample that does not fit the slot, or must not be written to it
        num_written = 0
        for index in range(len(rows)):
            if self._is_stale(request):
                return BatchResult(slot, skipped=True, kept=self._note_kept(slot, kept=_any_referenced(gathered)))
            self._place[0] = index
            # Not by zip, which keeps the last tuple that it gave.
            given: Any = tuple([as_tensor(column[index]) for column in raw]) if transform else None
            if transform and seeds:
                set_seed(seeds[index])
            sample = transform(given) if transform else next(samples)
            if stopwatch is not None:
                stopwatch.lap("transform")
            if all_gathered and sample is given:
                made.append([None] * len(arrays))
            else:
                del given
                new = unwritten(arrays, index, sample, layout.form)
                if new is None:
                    unfit = [sample]
                    break
                del sample
                copies = gathered and any(
                    array is not None and value is not None for array, value in zip(arrays, new, strict=True)
                )
                if copies and _is_referenced(gathered, index):
                    unfit = [_sample(layout, arrays, index, new)]
                    break
                num_written += write(arrays, index, new)
                made.append(new)
            given = sample = None
            if stopwatch is not None:
                stopwatch.lap("collate")
                stopwatch.sample()
        self._place[0] = len(made) + len(unfit)
        if not unfit and not _any_referenced(gathered):
            if gathered:
                # A transform that mostly makes new images is better off with samples that are still in the cache.
                self._in_place = 2 * num_written <= len(rows)
            columns = zip(layout.form.names, arrays, zip(*made, strict=True), strict=True)
            extra = {name: self._source.collate(list(values)) for name, array, values in columns if array is None}
            return BatchResult(request.slot, fields=extra)
        # A sample does not fit the slot, or the transform keeps a view of it, to mix it with a later sample or so.
        self._in_place = False
        whole = [_sample(layout, arrays, index, new) for index, new in enumerate(made)] + unfit
        for sample in self._made(rows[len(whole) :], seeds[len(whole) :]) if gathered else samples:
            whole.append(sample)
            self._place[0] += 1
        return self._collated(slot, rows, whole)._replace(kept=self._note_kept(slot, kept=bool(gathered)))

    def _note_kept(self, slot: int, *, kept: bool) -> bool:
        if kept:
            self._kept.add(slot)
        return kept

    def _gathered(
        self, request: BatchRequest, rows: NDArray[np.int64], memory: Mapping[str, NDArray[Any]]
    ) -> tuple[list[list[NDArray[Any]]], list[list[NDArray[Any]]]] | None:
        """Gathers rows of a packed file into the slot, if samples can be made there.

        Returns two lists: the samples of every field, and of the gathered fields alone; both empty if nothing was
        gathered. None: nobody waits for the batch any more.
        """
        source = self._source
        into = {
            name: memory[name]
            for name, shape, dtype in (source.gathered() if self._in_place else ())
            if name in memory and memory[name].shape[1:] == shape and memory[name].dtype == dtype
        }
        if not into:
            return [], []
        raw: list[list[NDArray[Any]]] = [[] for _ in source.dataset.fields]
        # Rows of a compressed chunk are gathered together, so that it is decoded once.
        row_bytes = sum(array[0].nbytes for array in into.values())
        size = len(rows) if source.compressed else max(_BLOCK, _GATHER_BYTES // max(1, row_bytes))
        for first in range(0, len(rows), size):
            if first and self._is_stale(request):
                return None
            part = slice(first, min(first + size, len(rows)))
            columns = source.dataset.columns(rows[part], {name: array[part] for name, array in into.items()})
            for known, column in zip(raw, columns, strict=True):
                known += column if isinstance(column, list) else [column[index, ...] for index in range(len(column))]
        if self._stopwatch is not None:
            self._stopwatch.lap("reading")
            self._stopwatch.sample_begins()
        return raw, [column for name, column in zip(source.dataset.fields, raw, strict=True) if name in into]

    def _collated(self, slot: int, rows: NDArray[np.int64], samples: list[Any]) -> BatchResult:
        """Returns the samples collated by torch; raises WorkerError if they differ in structure."""
        layout, found, name_of = layout_of(samples[0], self._source.fields), describe(samples[0]), self._source.name_of
        for row, sample in zip(rows.tolist(), samples, strict=True):
            if describe(sample) != found:
                raise WorkerError(
                    f"{name_of(row)} is {describe(sample)} while {name_of(int(rows[0]))}, in the same batch, "
                    f"is {found}. Samples of a batch have the same fields, shapes and dtypes: bring images to one size "
                    f"with a resize or a crop as the last step of the dataset's own transform, and numbers to one "
                    f"type. Samples chosen out of a packed file come as PackedDataset.select(rows), not as a Subset: "
                    f"then FastLoader(transform=[RandomResizedCrop(224), ...]) makes their size."
                )
        columns = zip(*(fields_of(sample, layout.form) or () for sample in samples), strict=True)
        fields = {name: self._source.collate(list(one)) for name, one in zip(layout.form.names, columns, strict=True)}
        return BatchResult(slot, layout, fields, found)

    def _named(self, error: BaseException, rows: NDArray[np.int64]) -> WorkerError:
        """Returns an error that names the sample, as far as it is known."""
        where = sample_at(self._place[0], rows, self._source.name_of, at_once=self._source.at_once)
        said, text = type(error).__name__, str(error)
        said = shortened(f"{said}: {text}" if text else said)
        return WorkerError(f"{where}: the dataset or its transform raised {said}{_traceback()}")


def sample_at(place: int, rows: NDArray[np.int64], name_of: Callable[[int], str], *, at_once: bool) -> str:
    """Returns what messages call the sample at a place of a batch; `at_once`: only its neighbours, too, are known."""
    if place >= len(rows):
        return f"the batch that begins with {name_of(int(rows[0]))}"
    if at_once:
        first = place // _BLOCK * _BLOCK
        return f"one of {', '.join(map(name_of, rows[first : first + _BLOCK].tolist()))}"
    return name_of(int(rows[place]))


def _traceback() -> str:
    return f"\n\nIn a worker process:\n{shortened(traceback.format_exc())}"


def _any_referenced(raw: Sequence[Sequence[NDArray[Any]]]) -> bool:
    """Whether anything but these lists refers to any sample's arrays."""
    return any(max(map(sys.getrefcount, column)) > _UNREFERENCED_MAPPED for column in raw)


def _is_referenced(raw: Sequence[Sequence[NDArray[Any]]], index: int) -> bool:
    """Whether anything but these lists refers to a sample's arrays: a tensor made of one, or a view of that."""
    return any(sys.getrefcount(column[index]) > _UNREFERENCED for column in raw)


_LISTED = [object()]
_UNREFERENCED = sys.getrefcount(_LISTED[0])
_UNREFERENCED_MAPPED = max(map(sys.getrefcount, _LISTED))


def _sample(layout: SampleLayout, arrays: Sequence[NDArray[Any] | None], index: int, new: list[Any]) -> Any:
    """Returns a sample from the slot and its `unwritten` fields, as a tuple or dict of arrays of its own."""
    values = [
        array[index].copy() if array is not None and value is None else value
        for array, value in zip(arrays, new, strict=True)
    ]
    return dict(zip(layout.form.keys, values, strict=True)) if layout.form.keys is not None else tuple(values)
