"""A device that tests pass to loaders in place of a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fastload.device import Backend, DeviceMemory

POISON = 0xEE
NOT_YET_COPIED = 0xDD


@dataclass
class LateEvent:
    after: int  # copies and kernels that must have run before it has happened


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
        self.queue: deque[tuple[Callable[[torch.Tensor], object], torch.Tensor]] = deque()
        self.inside = False
        self.host_waits = 0
        self.compute_waits_for = LateEvent(0)
        self.readers: list[int] = []
        self.room = DeviceMemory(free=2**40, total=2**40)
        self.pinned = 0
        self.computing = False

    def allocate(self, num_bytes):
        return np.full(num_bytes, POISON, dtype=np.uint8)

    def pin(self, memory):
        self.pinned += memory.nbytes

        def undo():
            assert not self.computing, "a kernel may still read this memory"
            self.pinned -= memory_bytes

        memory_bytes = memory.nbytes  # and not the memory, which would then never be freed
        return undo

    def memory(self):
        return self.room

    def empty(self, shape, dtype):
        assert self.inside, "memory that the side stream did not ask for may still be read by another"
        return self.garbage(torch.empty(shape, dtype=dtype))

    def garbage(self, tensor):
        tensor.view(torch.uint8).fill_(NOT_YET_COPIED)
        return tensor

    def fill(self, destination, source):
        self.run_kernel(destination.copy_, source)

    def run_kernel(self, kernel, source):
        assert self.inside, "a copy or a kernel on the compute stream"
        self.queue.append((kernel, source))
        self.begun += 1

    def drain(self):
        self.run_until(LateEvent(self.begun))
        self.computing = False

    @contextmanager
    def side_stream(self):
        self.inside = True
        yield
        self.inside = False

    def copy(self, host):
        device = self.garbage(torch.empty_like(host))
        self.fill(device, host)
        return device

    def record(self):
        return LateEvent(self.begun)

    def finished(self, event):
        if self.run < event.after:
            self.asked += 1
            if self.asked % self.patience == 0:
                self.run_until(event)
        return self.run >= event.after

    def synchronize(self, event):
        self.host_waits += self.run < event.after
        self.run_until(event)

    def hand_over(self, event, tensors):
        assert not self.inside, "the side stream would wait for itself"
        self.compute_waits_for = event
        self.computing = True
        self.readers += [tensor.untyped_storage().data_ptr() for tensor in tensors]

    def compute(self):
        self.run_until(self.compute_waits_for)

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
