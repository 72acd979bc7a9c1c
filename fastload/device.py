"""The stage between ring and transforms: batches on the device they are used on.

On the CPU a batch is the ring's memory itself. For CUDA each slot (pinned memory, uint8) is copied on a side stream:

    side stream      [copy 1][copy 2]      [copy 3]
    compute stream           [step 1          ][step 2          ]
    slot                     ^ 1 free  ^ 2 free

- The copy of batch n + 1 begins before batch n is handed over, if the ring has it ready, else at the next call.
- The compute stream waits for the copy's event; the host waits for nothing while slots are free.
- A pinned slot never leaves this stage. It goes back to the ring after its copy's event, asked at each hand-over.
- Device tensors come from torch's caching allocator, on the side stream; `record_stream` tells it that the compute
  stream reads them, so that memory a user lets go is not written to by the next copy while a kernel still reads it.

CUDA is reached through a `Backend`, so that the rules above are tested without a GPU.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError

CHANNELS_FIRST = (0, 3, 1, 2)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class HostBatch(Protocol):
    """A filled slot of the ring."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The fields by name, (B, ...) each; "images" is (B, H, W, C), in any memory order."""
        ...

    def release(self) -> None:
        """Gives the slot back to be filled again. Called once, for CUDA only, by the thread that takes the batches."""
        ...


@runtime_checkable
class Readiness(Protocol):
    """What batches may come from, so that a copy can begin early without waiting for a read."""

    def ready(self) -> bool:
        """Whether next() would give a batch at once (not: the end, or an error)."""
        ...


Host = TypeVar("Host", bound=HostBatch)


class Stored(Protocol):
    """A field of a batch whose rows lie in a store on the device and are not gathered yet."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `gather` reads of the device's memory."""
        ...

    def gather(self) -> torch.Tensor:
        """The field as a new tensor, by the caller's current stream."""
        ...


@dataclass(frozen=True)
class DeviceBatch(Generic[Host]):
    """A batch on its device.

    Attributes:
        source: the ring's batch it was made from, for what lies beside the arrays. On CUDA its arrays must not be read
            any more: the slot may be filled again.
        fields: tensors by name; "images" is (B, C, H, W) in channels_last memory.
        stored: further fields by name, not gathered yet.
        event: of its copy.
    """

    source: Host
    fields: dict[str, torch.Tensor]
    stored: Mapping[str, Stored] = dataclass_field(default_factory=dict)
    event: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the device reads of it."""
        return [*self.fields.values(), *(tensor for rows in self.stored.values() for tensor in rows.tensors)]

    def gathered(self) -> DeviceBatch[Host]:
        """The batch with each field but images a tensor, gathered by the caller's current stream.

        Images are left to the transforms, which read them anyway.
        """
        if not self.stored:
            return self
        gathered = {name: stored.gather() for name, stored in self.stored.items() if name != "images"}
        images = {name: stored for name, stored in self.stored.items() if name == "images"}
        return DeviceBatch(self.source, self.fields | gathered, images, self.event)


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory: those that can be had now, and all."""

    free: int
    total: int


@runtime_checkable
class Backend(Protocol):
    """What the stages need of a device: one side stream, events on it, pinned memory, and room for rows."""

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory the device reads by itself, (num_bytes,), page-aligned; freed with the array's last view."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None] | None:
        """Lets the device read host memory that is there already; returns what undoes it, None if it cannot."""
        ...

    def side_stream(self) -> AbstractContextManager[Any]:
        """Within it, work and memory belong to the side stream."""
        ...

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        """A new device tensor that will hold `host` once the side stream gets there; same shape and memory order."""
        ...

    def memory(self) -> DeviceMemory:
        """How much there is, and how much of it is free."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new device tensor with nothing in it. Raises torch.cuda.OutOfMemoryError."""
        ...

    def fill(self, destination: torch.Tensor, host: torch.Tensor) -> None:
        """Makes a device tensor hold `host` once the side stream gets there; same shape, dtype and memory order."""
        ...

    def drain(self) -> None:
        """Waits on the host until the device has done all that it was given, on every stream."""
        ...

    def record(self) -> Any:
        """An event that is finished when all that the side stream was given so far is."""
        ...

    def finished(self, event: Any) -> bool:
        """Whether the event has happened, without waiting."""
        ...

    def synchronize(self, event: Any) -> None:
        """Waits on the host until the event has happened."""
        ...

    def hand_over(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the caller's current stream wait for the event, and makes it a user of the tensors."""
        ...


class CudaBackend:
    """The `Backend` of one CUDA device.

    Args:
        device: a CUDA device; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = _index(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return array

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None] | None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        address = memory.ctypes.data
        # Registered for whichever device is current, and without the flag for that one only.
        with torch.cuda.device(self.device):
            if int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)) == 0:
                return lambda: runtime.cudaHostUnregister(address) and None
            try:
                # The failure stays the runtime's last error, which the next launch would raise as its own.
                torch.zeros(1, device=self.device)
            except RuntimeError:
                pass
        return None

    def side_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def copy(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        # What torch holds and does not use it gives back to the driver when it runs out.
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return DeviceMemory(free + unused, total)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def fill(self, destination: torch.Tensor, host: torch.Tensor) -> None:
        destination.copy_(host, non_blocking=True)

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        event.record(self._stream)
        return event

    def finished(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def hand_over(self, event: torch.cuda.Event, tensors: Iterable[torch.Tensor]) -> None:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(compute)


def open_backend(device: str | torch.device | Backend | None) -> Backend | None:
    """The backend of a device; None for the CPU (`None`, "cpu"), where batches need no copy.

    A `Backend` is taken as it is, so that whoever has no GPU can give a loader something that behaves like one.

    Raises:
        OptionError: not a device, one fastload does not feed, or a CUDA device that is not there.
    """
    if isinstance(device, Backend):
        return device
    try:
        wanted = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as exc:
        raise OptionError(
            f"device={device!r}: torch knows no such device. Give None, 'cpu', 'cuda' or 'cuda:1'."
        ) from exc
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise OptionError(
            f"device={str(wanted)!r}: batches go to the CPU or to CUDA in this release. Leave device out and move them "
            f"in the loop: images.to({str(wanted)!r})."
        )
    if not torch.cuda.is_available():
        raise OptionError(
            f"device={str(wanted)!r}: torch finds no CUDA device (torch {torch.__version__}, built "
            f"{'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}). Install a CUDA build and "
            f"check `nvidia-smi`, or leave device out to stay on the CPU."
        )
    if (_index(wanted) or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device={str(wanted)!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0. "
            f"Choose a smaller index, or look at CUDA_VISIBLE_DEVICES."
        )
    return CudaBackend(wanted)


def _index(device: torch.device) -> int | None:
    return cast("int | None", device.index)  # torch annotates it as int, and "cuda" has none


BeginCopy = Callable[[Host, Backend], DeviceBatch[Host]]
"""Gives the side stream the work that makes a batch out of a filled slot; called within `Backend.side_stream`."""


def copy_fields(batch: Host, backend: Backend) -> DeviceBatch[Host]:
    """Begins the copy of all arrays of a batch; see `BeginCopy`."""
    # Uint8 over the bus: floats are made on the device.
    return DeviceBatch(batch, {name: _copy(name, array, backend) for name, array in batch.arrays.items()})


def to_device(
    batches: Iterable[Host],
    backend: Backend | None = None,
    *,
    slots_in_copy: int = 2,
    views: Mapping[str, torch.dtype] | None = None,
    begin_copy: BeginCopy[Host] = copy_fields,
) -> Iterator[DeviceBatch[Host]]:
    """The batches on the device, in order; closing the iterator gives back every slot it holds.

    Args:
        batches: filled slots; if they tell their `Readiness`, copies begin one batch early.
        backend: of `open_backend`. None: the CPU, nothing is copied; the tensors are the arrays' memory.
        slots_in_copy: most slots kept while copies run, 1 or more. The ring has at least as many, and two more so that
            it can fill one and hold one ready meanwhile.
        begin_copy: what is done with a slot; not called on the CPU.
        views: on the CPU, fields that lie in their arrays as another dtype than they are, with what they are.
    """
    if backend is None:
        # No generator: its frame would keep the last batch alive, and its slot busy, while the user works on it.
        return map(functools.partial(_on_cpu, views or {}), batches)
    return _copied(batches, backend, slots_in_copy, begin_copy)


def fields_on_cpu(
    arrays: Mapping[str, NDArray[Any]], views: Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor]:
    """The arrays as tensors of the same memory, which they keep alive; "images" permuted to (B, C, H, W).

    `views` names fields that are of another dtype than their arrays, of the same size, and which.
    """
    # Turned by NumPy: torch gives up the GIL in permute, and beside pure Python waits 0.5 ms on average to get it back.
    fields = {
        name: torch.from_numpy(array.transpose(CHANNELS_FIRST) if name == "images" else array)
        for name, array in arrays.items()
    }
    for name, dtype in (views or {}).items():
        fields[name] = fields[name].view(dtype)
    return fields


def _on_cpu(views: Mapping[str, torch.dtype], batch: Host) -> DeviceBatch[Host]:
    return DeviceBatch(batch, fields_on_cpu(batch.arrays, views))


def _copied(
    batches: Iterable[Host], backend: Backend, slots_in_copy: int, begin_copy: BeginCopy[Host]
) -> Iterator[DeviceBatch[Host]]:
    assert slots_in_copy >= 1, "a batch in copy holds a slot"
    source = iter(batches)
    copying: deque[tuple[Any, Host]] = deque()  # slots that the device may still read, oldest first
    begun: deque[DeviceBatch[Host]] = deque()  # batches not handed over yet: two at most

    def release_oldest() -> None:
        copying.popleft()[1].release()

    def begin_next() -> None:
        batch = next(source, None)
        if batch is None:
            return
        try:
            with backend.side_stream():
                device_batch = begin_copy(batch, backend)
        finally:
            # Also when memory ran out half way: what was begun still reads the slot.
            event = backend.record()
            copying.append((event, batch))
        begun.append(replace(device_batch, event=event))

    def hand_over() -> DeviceBatch[Host]:
        batch = begun.popleft()
        backend.hand_over(batch.event, batch.tensors)
        return batch

    try:
        while True:
            while copying and backend.finished(copying[0][0]):
                release_oldest()
            if not begun:
                if len(copying) == slots_in_copy:  # out of slots: the only wait of the host in this loop
                    backend.synchronize(copying[0][0])
                    release_oldest()
                begin_next()
            if not begun:
                return
            if len(copying) < slots_in_copy and isinstance(batches, Readiness) and batches.ready():
                begin_next()
            # No variable here holds the batch while the user works on it: its memory is free when they are done.
            yield hand_over()
    finally:
        while copying:
            backend.synchronize(copying[0][0])
            release_oldest()


def _copy(name: str, array: NDArray[Any], backend: Backend) -> torch.Tensor:
    host = torch.from_numpy(array)
    if name != "images":
        return backend.copy(host.contiguous())
    channels_first = host.permute(CHANNELS_FIRST)
    if not host.is_contiguous() and channels_first.is_contiguous():
        # A file that stores (C, H, W): copied as it lies, and turned by the device.
        return backend.copy(channels_first).contiguous(memory_format=torch.channels_last)
    return backend.copy(host.contiguous()).permute(CHANNELS_FIRST)
