"""Brings batches from the ring to the device they are used on; the stage before the transforms.

On the CPU a batch is the ring's memory itself. For CUDA each slot (pinned memory, uint8) is copied on a side stream:

    side stream      [copy 1][copy 2]      [copy 3]
    compute stream           [step 1          ][step 2          ]
    slot                     ^ 1 free  ^ 2 free

- A slot is one copy, with it come the numbers that the transforms' kernel needs. Images are tensors over that copy; the
  side stream copies the other fields out of it, small ones (labels) all at once.
- The copy of batch n + 1 begins before batch n is handed over, if the ring has it ready, else at the next call.
- The compute stream waits for the copy's event; the host waits for nothing while slots are free.
- A pinned slot never leaves this stage. It goes back to the ring after its copy's event, queried at each hand-over.
- Device tensors come from torch's caching allocator, on the side stream; `record_stream` tells it that the compute
  stream reads them, so that memory a user lets go is not written to by the next copy while a kernel still reads it.

CUDA is reached through a `Backend`, so that the rules above are tested without a GPU.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.device import Backend
from fastload.plan import PlannedBatch
from fastload.prefetch.fill_threads import WORDS
from fastload.prefetch.ring import INNER, FilledBatch, SlotField
from fastload.timing.probe import Probe, span

CHANNELS_FIRST = (0, 3, 1, 2)


Epochs = Iterable[tuple[int, Iterator[PlannedBatch]]]
"""Epochs one after another: their numbers, and their batches with rows of the file or indices of the dataset."""


class BatchStream(Iterator[FilledBatch]):
    """A stream of filled slots, in order, from one epoch to the next."""

    views: Mapping[str, torch.dtype] = {}  # on the CPU, of fields that lie in their arrays as another dtype

    @abstractmethod
    def ready(self) -> bool:
        """Whether next() would return a batch at once, and neither end nor raise: then its copy can begin early."""

    def depth(self) -> int | None:
        """Returns how many batches lie ready; None: that is not known."""

    @abstractmethod
    def close(self) -> None:
        """Ends the stream; when this returns nothing writes to its slots any longer, or nobody looks at them."""

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch:
        """Queues the copy that makes a batch of a filled slot, uint8 over the bus; called within `Backend.side_stream`.

        The slot is copied as a whole. Only images and what stays within the loader are then left in that copy: a user
        who keeps other fields, such as the labels of an epoch, must not keep the memory of images. What does not lie in
        the slot is copied by itself.
        """
        copied, hosts = DeviceBatch(batch, {}), batch.arrays
        if batch.memory is not None:
            layout = self._layout = self._layout or _SlotLayout.of(batch.memory, batch.arrays)
            layout = layout.cut(len(batch.planned.rows))
            slot = backend.copy(torch.from_numpy(batch.memory))
            copied.memory.append(slot)
            storage = slot.untyped_storage()
            for name, part in layout.large.items():
                if name.startswith(INNER):
                    copied.inner[name] = part.of(storage)
                elif name == "images" and not layout.turned:
                    copied.fields[name] = part.of(storage)
                else:
                    copied.add({name: own_copy(part.of(storage), backend, channels_last=name == "images")})
            if layout.small:
                small = own_copy(layout.tail.of(storage), backend)
                copied.memory.append(small)
                storage, begin = small.untyped_storage(), layout.tail.offset
                copied.fields |= {name: part.of(storage, begin) for name, part in layout.small.items()}
            hosts = {name: batch.arrays[name] for name in layout.outside}
        for name, array in hosts.items():
            host = torch.from_numpy(array[: len(batch.planned.rows)])
            is_images = name == "images"
            moved = moved_as_stored(host, backend.copy, backend) if is_images else backend.copy(host.contiguous())
            copied.add({name: moved})
        return copied

    _layout: _SlotLayout | None = None  # which all batches of a stream have


class _Part(NamedTuple):
    """Where an array lies in memory."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in items
    dtype: torch.dtype

    def cut(self, rows: int) -> _Part:
        """Returns the first rows of it."""
        return self._replace(shape=(rows, *self.shape[1:]))

    def of(self, storage: torch.UntypedStorage, begin: int = 0) -> torch.Tensor:
        """Returns the array in a copy of the memory from byte `begin` on: a tensor by itself, and no view of others.

        So writing to one field does not count as a change of the others, for autograd.
        """
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, (self.offset - begin) // self.dtype.itemsize, self.shape, self.stride)


class _SlotLayout(NamedTuple):
    """Where the fields of a batch lie in its slot, and in a copy of it."""

    large: dict[str, _Part]  # images, those that stay within the loader, and others that are not small
    small: dict[str, _Part]  # behind them
    tail: _Part  # uint8, from the first small one on
    outside: list[str]  # fields that do not lie in the slot, since they were converted
    turned: bool  # whether images lie there as (C, H, W): they cross the bus so, and are turned by the device
    rows: int  # that there is room for

    def cut(self, rows: int) -> _SlotLayout:
        """Returns the layout of a batch of fewer rows in the same slot."""
        if rows == self.rows:
            return self
        large, small = (
            {name: part if name == WORDS else part.cut(rows) for name, part in parts.items()}
            for parts in (self.large, self.small)
        )
        return self._replace(large=large, small=small)

    @classmethod
    def of(cls, memory: NDArray[np.uint8], arrays: Mapping[str, NDArray[Any]]) -> _SlotLayout:
        """Returns the layout of arrays over a slot's memory."""
        large, small, outside = dict[str, _Part](), dict[str, _Part](), []
        for name, array in arrays.items():
            offset = array.ctypes.data - memory.ctypes.data
            if not 0 <= offset < memory.nbytes or not np.may_share_memory(memory, array):
                outside.append(name)
                continue
            host = torch.from_numpy(array)
            host = host.permute(CHANNELS_FIRST) if name == "images" else host
            part = _Part(offset, tuple(host.shape), host.stride(), host.dtype)
            (small if SlotField(name, part.shape, array.dtype).small else large)[name] = part
        begin = min((part.offset for part in small.values()), default=memory.nbytes)
        assert all(part.offset < begin for part in large.values()), "small fields lie behind the others"
        tail, images = _Part(begin, (memory.nbytes - begin,), (1,), torch.uint8), arrays.get("images")
        turned = images is not None and not torch.from_numpy(images).is_contiguous()
        rows = max((len(array) for name, array in arrays.items() if name != WORDS), default=0)
        return cls(large, small, tail, outside, turned, rows)


@dataclass
class DeviceBatch:
    """A batch on its device."""

    # The ring's batch it was made from, with its plan and extra fields. On CUDA its arrays must not be read any more:
    # the slot may be filled again.
    source: FilledBatch
    # As the user may have and keep them. "images" is (B, C, H, W) in channels_last memory.
    fields: dict[str, torch.Tensor]
    inner: dict[str, torch.Tensor] = field(default_factory=dict)  # those that stay within the loader
    # Device tensors that it is read from, one for each piece of memory.
    memory: list[torch.Tensor] = field(default_factory=list)
    # Returns further fields, made by the caller's current stream out of rows in device memory; images as rows that the
    # transforms gather, or as parts of others, which they read anyway, or a list of their own sizes. None: there are
    # none.
    gather: Callable[[], Mapping[str, Any]] | None = None
    event: Any = None  # of its copy; None on the CPU

    def add(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Adds fields that lie in device memory of their own."""
        self.fields |= fields
        self.memory += fields.values()


def own_copy(source: torch.Tensor, backend: Backend, *, channels_last: bool = False) -> torch.Tensor:
    """Returns a dense copy of a device tensor, made by the current stream; `channels_last` of images (B, C, H, W)."""
    batch, *inside = source.shape
    shape = (batch, *inside[1:], inside[0]) if channels_last else (batch, *inside)
    copy = backend.empty(shape, source.dtype)
    copy = copy.permute(CHANNELS_FIRST) if channels_last else copy
    backend.fill(copy, source)
    return copy


def moved_as_stored(
    images: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], backend: Backend | None = None
) -> torch.Tensor:
    """Returns images (N, H, W, C), moved by a function of dense tensors, (B, C, H, W) in channels_last memory.

    Images stored as (C, H, W) are moved in that layout and transposed on the device, on the side stream if the backend
    is given.
    """
    channels_first = images.permute(CHANNELS_FIRST)
    if images.is_contiguous() or not channels_first.is_contiguous():
        return move(images.contiguous()).permute(CHANNELS_FIRST)
    moved = move(channels_first)
    if backend is None:
        return moved.contiguous(memory_format=torch.channels_last)
    return own_copy(moved, backend, channels_last=True)


SLOTS_IN_COPY = 2
"""Slots that a stage keeps while their copies run."""


class DeviceStage(Iterator[DeviceBatch]):
    """The batches of a stream on their device, in order. An iterator for one thread; `close` gives back every slot.

    Args:
        source: filled slots; closed with the stage.
        backend: None: the CPU, nothing is copied; the tensors are the arrays' memory.
        slots_in_copy: most slots kept while copies run, 1 or more. The ring has at least two more, so that it can fill
            one and keep one ready meanwhile.

    Attributes:
        probe: takes note of when a batch is there and when it is on the device; not on the CPU.
    """

    def __init__(
        self,
        source: BatchStream,
        backend: Backend | None = None,
        *,
        slots_in_copy: int = SLOTS_IN_COPY,
    ) -> None:
        assert slots_in_copy >= 1, "a batch in copy holds a slot"
        self._source = source
        self._backend = backend
        self._slots_in_copy = slots_in_copy
        self.probe: Probe | None = None
        self._pid = os.getpid()
        self._copying: deque[tuple[Any, FilledBatch]] = deque()  # slots that the device may still read, oldest first
        self._begun: deque[DeviceBatch] = deque()  # with a copy that has begun, not handed over yet: two at most

    # No generator: its frame would keep the last batch alive, and its memory busy, while the user works on it.
    def __next__(self) -> DeviceBatch:
        if self._backend is None:
            batch = next(self._source)
            made = fields_on_cpu(batch.arrays, self._source.views) if batch.tensors is None else batch.tensors
            return DeviceBatch(batch, made)
        try:
            return self._next_copied(self._backend)
        except BaseException:
            self._begun.clear()
            self._give_back(self._backend)
            raise

    def depth(self) -> int | None:
        """Returns how many batches lie ready in the source."""
        return self._source.depth()

    def close(self) -> None:
        """Waits for copies that still run, gives back their slots, and closes the source."""
        try:
            if self._backend is not None and self._pid == os.getpid():  # a forked child has no device
                self._begun.clear()
                self._give_back(self._backend)
        finally:
            self._source.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_copying", None) and not _is_finalizing():
            self.close()

    def _next_copied(self, backend: Backend) -> DeviceBatch:
        probe = self.probe
        while self._copying and backend.finished(self._copying[0][0]):
            self._copying.popleft()[1].release()
        if not self._begun:
            self._give_back(backend, leave=self._slots_in_copy - 1)  # out of slots: the only wait of the host
            self._begin_next(backend)
            if not self._begun:
                raise StopIteration
        if len(self._copying) < self._slots_in_copy and self._source.ready():
            self._begin_next(backend)
        if probe is not None:
            probe.in_copy = len(self._begun) - 1
            probe.note_ready()
        batch = self._begun.popleft()
        backend.hand_over(batch.event, batch.memory)
        if probe is not None:
            probe.note_copied()
        return batch

    def _begin_next(self, backend: Backend) -> None:
        batch = next(self._source, None)
        if batch is None:
            return
        try:
            with span("copy"), backend.side_stream():
                device_batch = self._source.begin_copy(batch, backend)
        finally:
            # Also when memory ran out half way: what was begun still reads the slot.
            event = backend.record()
            self._copying.append((event, batch))
        device_batch.event = event
        self._begun.append(device_batch)

    def _give_back(self, backend: Backend, leave: int = 0) -> None:
        """Waits for copies, the oldest first, until so many are left, and gives back their slots."""
        while len(self._copying) > leave:
            event, batch = self._copying[0]
            backend.synchronize(event)
            self._copying.popleft()
            batch.release()


def fields_on_cpu(
    arrays: Mapping[str, NDArray[Any]], views: Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the arrays as tensors of the same memory, which they keep alive; "images" permuted to (B, C, H, W).

    `views` gives the torch dtype of fields whose arrays hold another dtype of the same size.
    """
    # Permuted by NumPy: torch gives up the GIL in permute, and waits 0.5 ms on average to get it back while another
    # thread runs pure Python.
    fields = {
        name: torch.from_numpy(array.transpose(CHANNELS_FIRST) if name == "images" else array)
        for name, array in arrays.items()
    }
    for name, dtype in (views or {}).items():
        fields[name] = fields[name].view(dtype)
    return fields
