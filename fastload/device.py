"""The operations that the loader needs of a CUDA device."""

from __future__ import annotations

import functools
import io
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import OptionError
from fastload.timing.clocks import Clock, CudaClock, cuda_event

_log = logging.getLogger("fastload")

_PORTABLE_AND_MAPPED = 3  # of cudaHostRegister: pinned for every device, and readable by kernels


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory: those that are free, and all."""

    free: int
    total: int


class Backend:
    """A CUDA device with a side stream, events on it, pinned host memory, room for rows, and a decoder of JPEGs.

    Everything that the loader asks of a device goes through it, so that a test can give a loader a subclass that
    behaves like a GPU.

    Args:
        device: a CUDA device; without an index, the current one.

    Attributes:
        clock: marks on the caller's current stream.
    """

    clock: Clock
    reads_host = False  # whether kernels read pinned host memory; what computes on the CPU in a device's place has none

    def __init__(self, device: torch.device) -> None:
        index = _index(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        # The host waits for its marks while the device has steps left: nothing is late if it sleeps, and spinning would
        # take a CPU from the readers.
        self.clock = CudaClock(self.device.index, blocking=True)
        self.reads_host = True
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._decoding_stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._decoding = threading.Lock()

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None] | None:
        """Pins host memory that is allocated already; returns a function that undoes it, None if it cannot."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        address = memory.ctypes.data
        # Registered for whichever device is current, and without the flag for that one only.
        with torch.cuda.device(self.device):
            if int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE_AND_MAPPED)) == 0:
                return functools.partial(self._unpin, runtime, address)
            try:
                # The failure stays the runtime's last error, and the next launch would raise it as its own: clear it.
                torch.zeros(1, device=self.device)
            except RuntimeError:
                pass
        return None

    def _unpin(self, runtime: Any, address: int) -> None:
        # On another device the runtime would first make a context there, some hundred MB of its memory.
        with torch.cuda.device(self.device):
            runtime.cudaHostUnregister(address)

    def side_stream(self) -> AbstractContextManager[Any]:
        """Returns a context within which work and memory belong to the side stream."""
        return torch.cuda.stream(self._stream)

    def copy(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a device tensor to which the current stream copies `host`; same shape and memory order.

        It is a new one unless one is given.
        """
        there = torch.empty_like(host, device=self.device) if into is None else into
        return there.copy_(host, non_blocking=True)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """A context for one thread at a time, within which work and memory belong to a stream for `decode_jpegs`.

        At its end the calling thread waits until all of that work is done.
        """
        # nvJPEG decodes on a stream of torchvision's own, which does not wait for the one whose memory it writes to
        # (pytorch/vision#9606). So that one has nothing left to do when decoding begins; more threads would gain
        # nothing, since torchvision decodes one call at a time.
        with self._decoding, torch.cuda.stream(self._decoding_stream):
            try:
                yield
            finally:
                self._marked(self._decoding_stream).synchronize()

    def decode_jpegs(self, files: Sequence[torch.Tensor], channels: int) -> list[torch.Tensor]:
        """Decodes JPEG files by nvJPEG, through torchvision; called within `decoding`. Never run on a GPU so far.

        nvJPEG reads the files on the host and sends their bytes to the device by itself. The host waits for it, without
        the GIL. EXIF orientations are not applied.

        Args:
            files: uint8 (bytes,) each, in host memory; pinned memory crosses the bus without another copy.
            channels: 3 or 1, of the images; a gray file is also decoded as one of three.

        Returns:
            uint8 (channels, H, W) of each, on the device.

        Raises:
            ImportError: torchvision is not installed.
            torch.OutOfMemoryError: there is no memory for the images.
            RuntimeError: one of the files cannot be decoded; then none is.
        """
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.RGB if channels == 3 else ImageReadMode.GRAY
        try:
            decoded: list[torch.Tensor] = decode_jpeg(list(files), mode=mode, device=self.device)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)  # it may have left work behind, on memory that is free now
            if "out of memory" in str(error):  # which torchvision (0.26) says as it says that a file is damaged
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return decoded

    def why_no_jpegs(self) -> str:
        """Returns why `decode_jpegs` does not work here, tried out with a small file; empty if it does."""
        file = io.BytesIO()
        Image.new("RGB", (16, 8), (200, 0, 0)).save(file, "JPEG")
        encoded = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        try:
            with self.decoding():
                shapes = [tuple(image.shape) for image in self.decode_jpegs([encoded, encoded], 3)]
        except ImportError as error:
            return f"torchvision cannot be imported, which calls nvJPEG ({error})"
        # Built without nvJPEG, a version that takes no list, a driver too old: it fails in many ways.
        except Exception as error:  # noqa: BLE001
            return f"torchvision does not decode on the device ({type(error).__name__}: {error})"
        return "" if shapes == [(3, 8, 16)] * 2 else f"torchvision made {shapes} of two images of 8x16"

    def memory(self) -> DeviceMemory:
        """Returns how much memory there is, and how much of it is free."""
        free, total = torch.cuda.mem_get_info(self.device)
        # Memory that torch holds and does not use goes back to the driver when it runs out.
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return DeviceMemory(free + unused, total)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new uninitialised device tensor. Raises torch.cuda.OutOfMemoryError."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def fill(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Lets the current stream copy to a device tensor of the same shape and dtype.

        Host memory has to be in the same order, or the host would wait.
        """
        destination.copy_(source, non_blocking=True)

    def run_kernel(self, kernel: Callable[[torch.Tensor], object], source: torch.Tensor) -> None:
        """Lets the current stream run a kernel that reads a tensor: calls the function that launches it."""
        kernel(source)

    def drain(self) -> None:
        """Waits on the host until the device has done all work, on every stream."""
        torch.cuda.synchronize(self.device)

    def kernels(self) -> AbstractContextManager[Any]:
        """Returns a context for launching kernels on what the side stream copies."""
        return nullcontext()

    def note_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records that the current stream reads tensors whose memory belongs to another one."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def record(self, again: Any = None) -> Any:
        """Returns an event that is finished when all work that the side stream was given so far is.

        `again`: an event that nobody waits for any more, to be that one.
        """
        return self._marked(self._stream, again)

    def _marked(self, stream: Any, again: Any = None) -> Any:
        # Who waits for it sleeps: else `synchronize` keeps a CPU busy for as long as a copy takes.
        event = cuda_event(blocking=True) if again is None else again
        event.record(stream)
        return event

    def finished(self, event: Any) -> bool:
        """Whether the event is finished, without waiting."""
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Waits on the host until the event is finished."""
        event.synchronize()

    def hand_over(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the caller's current stream wait for the event, and records that it uses the tensors."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(compute)


CHANNELS_FIRST = (0, 3, 1, 2)


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


class Pins:
    """Host memory that is pinned for a device, exactly as large as it is: torch's own comes in powers of two.

    It is unpinned by `close`, or when this object is gone, after the device has done all its work; it lives until then.
    In a forked process, which has no device, nothing is done.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pinned: list[tuple[NDArray[np.uint8], Callable[[], None]]] = []
        self._refused = False
        self._pid = os.getpid()
        weakref.finalize(self, _unpin, backend, self._pinned, self._pid).atexit = False

    def add(self, memory: NDArray[np.uint8]) -> bool:
        """Pins memory, uint8 (num_bytes,), that begins on a page; False where the system does not let it be pinned."""
        unpin = self._backend.pin(memory)
        if unpin is not None:
            self._pinned.append((memory, unpin))
        return unpin is not None

    def add_if_possible(self, memory: NDArray[np.uint8]) -> None:
        """Pins memory of slots. Where that is not possible it stays as it is, and the log says so once."""
        if not self._refused and not self.add(memory):
            self._refused = True
            # Copies are right without, only slower: the driver stages them, and the host waits.
            _log.warning(
                "%d bytes of host memory could not be pinned (`ulimit -l`?): copies to %s take longer",
                memory.nbytes, getattr(self._backend, "device", "the device"),
            )  # fmt: skip

    def close(self) -> None:
        """Waits until the device has done all its work, and unpins the memory."""
        _unpin(self._backend, self._pinned, self._pid)


def _unpin(backend: Backend, pinned: list[tuple[NDArray[np.uint8], Callable[[], None]]], pid: int) -> None:
    if pid != os.getpid() or not pinned:
        return
    backend.drain()  # a copy or a kernel may still read it
    while pinned:
        one = pinned.pop()  # the memory is not freed before it is unpinned
        one[1]()


def open_backend(device: str | int | torch.device | Backend | None) -> Backend | None:
    """Returns the backend of a device; None for the CPU (`None`, "cpu"), where batches need no copy.

    A `Backend` is returned as it is, so that a test can give a loader one that behaves like a GPU.

    Raises:
        OptionError: the argument is no device, one that fastload does not feed, or a CUDA device that is absent.
    """
    if isinstance(device, Backend):
        return device
    try:
        # A number alone means an accelerator's, which torch only takes where it sees one.
        wanted = torch.device("cpu" if device is None else f"cuda:{device}" if type(device) is int else device)
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
    return Backend(wanted)


def _index(device: torch.device) -> int | None:
    return cast("int | None", device.index)  # torch annotates it as int, and "cuda" has none
