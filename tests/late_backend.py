"""A device that tests pass to loaders in place of a GPU."""

from __future__ import annotations

import functools
import io
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from fastload.device import Backend, DeviceMemory
from fastload.timing.clocks import Clock, HostClock

POISON = 0xEE
NOT_YET_COPIED = 0xDD


def locked(method):
    """One thread at a time: copies are begun by another one than the loop's."""

    @functools.wraps(method)
    def inside(self, *arguments):
        with self.lock:
            return method(self, *arguments)

    return inside


class Inside(threading.local):
    """Whether this thread's work belongs to the side stream."""

    side_stream = False


@dataclass
class LateEvent:
    after: int  # copies and kernels that must have run before it has happened
    at: float = 0.0  # when it happens on a device that has times


class LateBackend(Backend):
    """A device without a GPU that is as slow as the rules allow.

    Device tensors are CPU tensors full of garbage until their copy runs; copies and kernels run in order, each only
    when the host waits for it, when it was asked for `patience` times, or when the compute stream gets to work
    (`compute`) after it was told to wait. They read the slot's memory at that moment: a slot given back too early is
    seen.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.asked = 0
        self.begun = self.run = 0
        self.crossed = 0  # copies from the host
        self.queue: deque[tuple[Callable[[torch.Tensor], object], torch.Tensor]] = deque()
        self.lock = threading.RLock()
        self.here = Inside()
        self.host_waits = 0
        self.compute_waits_for = LateEvent(0)
        self.readers: list[int] = []
        self.room = DeviceMemory(free=2**40, total=2**40)
        self.pinned, self.pinnable = 0, 2**40
        self.computing = False
        self.clock = HostClock()
        self.pid = os.getpid()
        self.called_in_a_fork = []
        self.in_decoding, self.decoder = threading.Lock(), None
        self.decoded: list[int] = []  # files of each call

    def note_process(self):
        """A forked process has no device; what is called there is noted, since a finalizer's error is lost."""
        if self.pid != os.getpid():
            self.called_in_a_fork.append("called")

    def pin(self, memory):
        if self.pinned + memory.nbytes > self.pinnable:
            return None
        assert not memory.ctypes.data % 4096, "the system pins whole pages"
        memory.fill(POISON)
        self.pinned += memory.nbytes
        first = memory.ctypes.data
        memory_bytes = memory.nbytes  # and not the memory, which would then never be freed
        held = weakref.ref(memory)

        def undo():
            self.note_process()
            assert held() is not None, "memory was freed, perhaps given to another, while it was pinned"
            assert not self.computing, "a kernel may still read this memory"
            inside = [first <= host.data_ptr() < first + memory_bytes for _, host in self.queue]
            assert not any(inside), "a copy still reads this memory"
            self.pinned -= memory_bytes

        return undo

    @contextmanager
    def decoding(self):
        assert not self.in_decoding.locked() or not self.decodes_here(), "a thread waits for itself"
        with self.in_decoding:
            self.decoder = threading.get_ident()
            try:
                yield
            finally:
                self.decoder = None

    def decodes_here(self):
        return self.decoder == threading.get_ident()

    def decode_jpegs(self, files, channels):
        """Pillow in nvJPEG's place: all files or none, in the size and direction that they are stored in."""
        assert self.decodes_here(), "decoded outside of the stream for it"
        assert all(file.dtype == torch.uint8 and file.ndim == 1 and file.device.type == "cpu" for file in files)
        self.decoded.append(len(files))
        images = []
        for file in files:
            try:
                with Image.open(io.BytesIO(file.numpy().tobytes())) as image:
                    pixels = np.array(image.convert({1: "L", 3: "RGB"}[channels]))
            except Exception as error:
                raise RuntimeError("Error while decoding JPEG images") from error
            images.append(torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1).contiguous())
        return images

    def memory(self):
        return self.room

    def empty(self, shape, dtype):
        assert self.inside, "memory that the side stream did not ask for may still be read by another"
        return self.garbage(torch.empty(shape, dtype=dtype, device="cpu"))

    def garbage(self, tensor):
        tensor.view(torch.uint8).fill_(NOT_YET_COPIED)
        return tensor

    def fill(self, destination, source):
        self.run_kernel(destination.copy_, source)

    @locked
    def run_kernel(self, kernel, source):
        assert self.inside, "a copy or a kernel on the compute stream"
        self.queue.append((kernel, source))
        self.begun += 1

    @locked
    def drain(self):
        self.note_process()
        self.run_until(LateEvent(self.begun))
        self.computing = False

    @property
    def inside(self):
        return self.here.side_stream

    @contextmanager
    def side_stream(self):
        self.here.side_stream = True
        try:
            yield
        finally:
            self.here.side_stream = False

    @contextmanager
    def kernels(self):
        """What runs within computes at once, and so behind all copies that were begun."""
        assert self.inside, "a kernel on the compute stream"
        with self.lock:
            self.run_until(LateEvent(self.begun))
        yield

    @locked
    def copy(self, host, into=None):
        if self.decodes_here():  # on a stream that nobody but the decoding thread waits for
            return host.clone()
        self.crossed += 1
        device = self.garbage(torch.empty_like(host)) if into is None else into
        self.fill(device, host)
        return device

    @locked
    def record(self, again=None):
        self.note_process()
        if again is None:
            return LateEvent(self.begun)
        again.after = self.begun
        return again

    @locked
    def finished(self, event):
        self.note_process()
        if self.run < event.after:
            self.asked += 1
            if self.asked % self.patience == 0:
                self.run_until(event)
        return self.run >= event.after

    @locked
    def synchronize(self, event):
        self.note_process()
        self.host_waits += self.run < event.after
        self.run_until(event)

    def note_read(self, tensors):
        self.readers += [tensor.untyped_storage().data_ptr() for tensor in tensors]

    @locked
    def hand_over(self, event, tensors):
        assert not self.inside, "the side stream would wait for itself"
        self.compute_waits_for = event
        self.computing = True
        self.readers += [tensor.untyped_storage().data_ptr() for tensor in tensors]

    @locked
    def compute(self):
        self.run_until(self.compute_waits_for)

    @locked
    def run_until(self, event):
        while self.run < event.after:
            work, source = self.queue.popleft()
            work(source)
            self.run += 1


class Device(LateBackend):
    """A `LateBackend` whose compute stream gets to work as soon as it is given something.

    What is handed over without an event that covers its copy is then garbage.
    """

    def __init__(self, patience: int = 3, free: int = 2**40, total: int = 0) -> None:
        super().__init__(patience)
        self.room = DeviceMemory(free, total or free)

    def hand_over(self, event, tensors):
        super().hand_over(event, tensors)
        self.compute()


class StreamClock(Clock):
    """Marks on the compute stream of a `TimedDevice`; each is dropped once at most, and never looked at afterwards."""

    def __init__(self, device):
        self.device = device
        self.live = {}  # when each mark happens
        self.marks = 0
        self.pid = os.getpid()

    def mark(self):
        assert self.pid == os.getpid(), "a forked process has no device"
        self.marks += 1
        self.live[self.marks] = max(self.device.now, self.device.busy_until)
        return self.marks

    def is_done(self, mark):
        assert self.pid == os.getpid(), "a forked process has no device"
        return self.device.now >= self.live[mark]

    def wait(self, mark):
        self.device.now = max(self.device.now, self.live[mark])

    def between_s(self, earlier, later):
        assert self.is_done(earlier) and self.is_done(later), "the time between two marks is known when both happened"
        return self.live[later] - self.live[earlier]

    def drop(self, mark):
        del self.live[mark]


class TimedDevice(LateBackend):
    """A device with a time line for each of its streams, beside a host whose time passes when someone says so.

    Args:
        copy_s: time that a copy takes on the side stream.
        queue: launches that the driver holds; a host that launches more is blocked until the first has ended.
    """

    def __init__(self, *, copy_s=0.0, queue=1000):
        super().__init__(patience=1)
        self.copy_s, self.queue_length = copy_s, queue
        self.now = 0.0  # the host's time
        self.busy_until = 0.0  # when the compute stream will have done all that it was given
        self.copied_at = 0.0  # when the side stream will have
        self.worked_until = self.idle_s = 0.0  # end of the last kernel; times in which none ran, before each
        self.ends = deque()
        self.clock = StreamClock(self)

    def work(self, seconds):
        """Launches a kernel on the compute stream."""
        self.enqueue()
        begin = max(self.now, self.busy_until)
        self.idle_s += begin - self.worked_until
        self.worked_until = self.busy_until = begin + seconds
        self.ends.append(self.busy_until)

    def enqueue(self):
        while self.ends and self.ends[0] <= self.now:
            self.ends.popleft()
        if len(self.ends) >= self.queue_length:
            self.now = self.ends.popleft()

    def copy(self, host, into=None):
        self.copied_at = max(self.now, self.copied_at) + self.copy_s
        return super().copy(host, into)

    def record(self, again=None):
        event = super().record(again)
        event.at = self.copied_at
        return event

    def finished(self, event):
        if self.now >= event.at:
            self.run_until(event)
        return self.now >= event.at

    def synchronize(self, event):
        self.now = max(self.now, event.at)
        super().synchronize(event)

    def hand_over(self, event, tensors):
        super().hand_over(event, tensors)
        self.enqueue()
        self.busy_until = max(self.busy_until, event.at)
        self.compute()

    @locked
    def drain(self):
        self.now = max(self.now, self.busy_until, self.copied_at)
        super().drain()
