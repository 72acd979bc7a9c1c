"""Rows that stay: read once into device memory, or pinned memory of the host, and gathered from there in every epoch.

    plan -> rows of the file -> places in the store -> device -> gather -> transform (echo) -> the training loop

`cache_load` fills the store. From then on a batch is its places, row numbers and valid flags: 17 bytes a sample in one
copy. Its fields are `StoredRows` until someone gathers them, so that a gather can be part of another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.backend import Backend
from fastload.dataset import PackedDataset
from fastload.device import CHANNELS_FIRST, DeviceBatch
from fastload.feed import SLOTS_IN_COPY, Stream
from fastload.meter import Crew
from fastload.plan import PlannedBatch
from fastload.ring import FilledBatch, Ring, SlotField
from fastload.transforms.rows import ImageRows

Place = Literal["device", "host"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A field of a batch whose rows lie in a store; see `Stored`.

    Attributes:
        rows: (N, ...), in device memory or in pinned memory of the host.
        index: int64 (B,), on the device: places in `rows`.
        places: the same on the host, where `rows` are on the host; else None.
    """

    rows: torch.Tensor
    index: torch.Tensor
    places: NDArray[np.int64] | None = None

    @property
    def shape(self) -> torch.Size:
        """Of what `gather` returns."""
        return torch.Size((len(self.index), *self.rows.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Of what `gather` returns."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """Of what `gather` returns."""
        return self.index.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Stored.tensors`."""
        return (self.index,) if self.places is not None else (self.rows, self.index)

    def gather(self) -> torch.Tensor:
        """(B, ...), a new tensor on the device, by the caller's current stream. The host waits for nothing."""
        return self._gathered(self.rows)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows at `index` of contiguous rows."""
        words = _as_words(rows)
        if self.places is None:
            picked = words.index_select(0, self.index)
        else:
            # By the CPU, for want of a kernel that reads the host's memory. torch's allocator of pinned memory gives
            # none of it out again before the copy is done.
            staged = torch.empty(
                (len(self.places), words.shape[1]), dtype=words.dtype, device="cpu", pin_memory=rows.is_pinned()
            )
            torch.index_select(words, 0, torch.from_numpy(self.places), out=staged)
            picked = staged.to(self.device, non_blocking=True)
        return picked.view(torch.uint8).view(rows.dtype).view(len(self.index), *rows.shape[1:])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows (N, ...) as (N, words) of the widest type that divides a row.

    torch gathers element by element (218x178x3 on 2 cores: 2,400 images/s in bytes, 19,000 in words of 4), and has few
    functions for the larger unsigned types.
    """
    row_bytes = rows.unsqueeze(1).flatten(1).view(torch.uint8)
    return row_bytes.view(next(word for size, word in _WORDS.items() if row_bytes.shape[1] % size == 0))


class StoredImages(StoredRows):
    """The images of a batch: `rows` are (N, H, W, C) in the file's memory order, `gather` gives (B, C, H, W)."""

    def in_place(self) -> ImageRows:
        """The same for transforms, which read them where they are if they can."""
        return ImageRows(self.rows, self.index, self.gather)

    @property
    def shape(self) -> torch.Size:
        """Of what `gather` returns."""
        height, width, channels = self.rows.shape[1:]
        return torch.Size((len(self.index), channels, height, width))

    def gather(self) -> torch.Tensor:
        """(B, C, H, W) in channels_last memory; see `StoredRows.gather`."""
        channels_first = self.rows.permute(CHANNELS_FIRST)
        if not self.rows.is_contiguous() and channels_first.is_contiguous():
            # A file that stores (C, H, W): gathered as it lies, and turned by the device.
            return self._gathered(channels_first).contiguous(memory_format=torch.channels_last)
        return self._gathered(self.rows).permute(CHANNELS_FIRST)


class RowStore:
    """Rows of a file in memory. Whoever drops it frees the memory once the device has done with it.

    Attributes:
        rows: rows of the file it holds, ascending: a range, or int64 (N,).
        place: where: "device" memory, or pinned memory of the "host".
        images: (N, H, W, C) in the file's memory order; None if images were not asked for.
        fields: the other fields by name, (N, ...).
        nbytes: of all of them.
    """

    def __init__(
        self, rows: range | NDArray[np.int64], place: Place, tensors: Mapping[str, torch.Tensor], nbytes: int
    ) -> None:
        self.rows = rows
        self.place = place
        self.images = tensors.get("images")
        self.fields = {name: tensor for name, tensor in tensors.items() if name != "images"}
        self.nbytes = nbytes

    def index_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the store of rows of the file, int64 (B,), a new array.

        Raises:
            IndexError: a row is not in the store.
        """
        if isinstance(self.rows, range):
            places = rows - self.rows.start
            known = (places >= 0) & (places < len(self.rows))
        else:
            places = np.searchsorted(self.rows, rows)
            known = self.rows[np.minimum(places, len(self.rows) - 1)] == rows
        # A gather on the device reads whatever lies there, or kills the process.
        if not known.all():
            raise IndexError(f"row {rows[~known][0]} is not among the {len(self.rows):,} rows kept in memory")
        return places

    def stored(self, index: torch.Tensor, places: NDArray[np.int64]) -> dict[str, StoredRows]:
        """The fields of a batch, to be gathered.

        Args:
            index: int64 (B,), on the device, of `index_of`.
            places: the same on the host; kept.
        """
        on_host = places if self.place == "host" else None
        stored = {name: StoredRows(rows, index, on_host) for name, rows in self.fields.items()}
        return stored if self.images is None else stored | {"images": StoredImages(self.images, index, on_host)}

    def tensor(self, name: str) -> torch.Tensor:
        """A field's rows, images too."""
        return self.images if name == "images" and self.images is not None else self.fields[name]


class StoreFeed:
    """A feed that reads nothing; see `Feed`.

    Args:
        store: with every row that will be planned.
        batch_size: rows in a batch.
        backend: of the device.
    """

    usable = True
    crew = Crew(0, 0, by_threads=False)

    def __init__(self, store: RowStore, batch_size: int, backend: Backend) -> None:
        self.views: Mapping[str, torch.dtype] = {}
        self._store: RowStore | None = store
        self._ring = Ring([SlotField("facts", (17 * batch_size,), np.dtype(np.uint8))], SLOTS_IN_COPY, backend.allocate)

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> Stream:
        """See `Feed.stream`."""
        assert self._store is not None, "the feed was closed"
        return _Places(planned, self._store, self._ring)

    def workforce(self) -> None:
        """See `Feed.workforce`."""

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch[FilledBatch]:
        """See `BeginCopy`."""
        assert self._store is not None, "the feed was closed"
        facts = batch.arrays["facts"]
        places, _, _ = _parts(facts)
        on_device = backend.copy(torch.from_numpy(facts))
        size = 8 * len(places)
        index, row = on_device[:size].view(torch.int64), on_device[size : 2 * size].view(torch.int64)
        # The slot will be filled again, and a gather from the host's memory needs the places later.
        stored = self._store.stored(index, places.copy() if self._store.place == "host" else places)
        return DeviceBatch(batch, {"row": row, "valid": on_device[2 * size :].view(torch.bool)}, stored)

    def close(self) -> None:
        """See `Feed.close`."""
        self._store = None


class _Places:
    """Batches of places, made as they are asked for: some microseconds each."""

    def __init__(self, planned: Iterator[PlannedBatch], store: RowStore, ring: Ring) -> None:
        self._planned = planned
        self._store: RowStore | None = store
        self._ring = ring
        self._coming = next(planned, None)

    def __iter__(self) -> _Places:
        return self

    def __next__(self) -> FilledBatch:
        planned = self._coming
        if planned is None or self._store is None:
            raise StopIteration
        places = self._store.index_of(planned.rows)
        slot = self._ring.take()
        assert slot is not None, "the device stage holds more slots than it said"
        for part, values in zip(_parts(slot.arrays["facts"]), (places, planned.rows, planned.valid), strict=True):
            part[...] = values
        self._coming = next(self._planned, None)
        return FilledBatch(dict(slot.arrays), planned, 0, _ring=self._ring, _slot=slot)

    def ready(self) -> bool:
        """Whether next() would give a batch without waiting."""
        return self._coming is not None

    def depth(self) -> None:
        """See `Stream.depth`: none is made before it is asked for."""

    def close(self) -> None:
        """Ends the pass, and lets go of the store."""
        self._coming = self._store = None


def _parts(facts: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Views of a batch's facts, (17 * B,): places, rows of the file, valid, (B,) each."""
    size = 8 * (len(facts) // 17)
    return facts[:size].view(np.int64), facts[size : 2 * size].view(np.int64), facts[2 * size :].view(np.bool_)


def stored_fields(dataset: PackedDataset, num_rows: int) -> list[SlotField]:
    """What a store of so many of a dataset's rows holds: the fields as the file has them, labels as handed over."""
    fields = []
    for name, shape, dtype in dataset.layout():
        is_class = name == "labels" and not shape and dtype.kind in "iu"
        fields.append(SlotField(name, (num_rows, *shape), np.dtype(np.int64) if is_class else dtype))
    return fields
