"""A device that tests pass to loaders in place of a GPU."""

from __future__ import annotations

import io
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from fastload.device import Backend, DeviceMemory

POISON = 0xEE
NOT_YET_COPIED = 0xDD


@dataclass
class LateEvent:
    after: int  # copies that must have run before it has happened


class LateBackend(Backend):
    """A device without a GPU that is as slow as the rules allow.

    Device tensors are CPU tensors full of garbage until their copy runs; copies run in order, each only when the host
    waits for it, when it was asked for `patience` times, or when the compute stream gets to work (`compute`) after it
    was told to wait. They read the slot's memory at that moment: a slot given back too early is seen.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.asked = 0
        self.begun = self.run = 0
        self.queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.inside = False
        self.host_waits = 0
        self.compute_waits_for = LateEvent(0)
        self.readers: list[int] = []
        self.room = DeviceMemory(free=2**40, total=2**40)
        self.pinned = 0
        self.computing = False
        self.in_decoding, self.decoder = threading.Lock(), None
        self.decoded: list[int] = []  # files of each call

    def allocate(self, num_bytes):
        return np.full(num_bytes, POISON, dtype=np.uint8)

    def pin(self, memory):
        self.pinned += memory.nbytes

        def undo():
            assert not self.computing, "a kernel may still read this memory"
            self.pinned -= memory_bytes

        memory_bytes = memory.nbytes  # and not the memory, which would then never be freed
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
        return self.garbage(torch.empty(shape, dtype=dtype))

    def garbage(self, tensor):
        tensor.view(torch.uint8).fill_(NOT_YET_COPIED)
        return tensor

    def fill(self, destination, host):
        assert self.inside, "a copy on the compute stream"
        self.queue.append((destination, host))
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
        if self.decodes_here():  # on a stream that nobody but the decoding thread waits for
            return host.clone()
        assert self.inside, "a copy on the compute stream"
        device = self.garbage(torch.empty_like(host))
        self.queue.append((device, host))
        self.begun += 1
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
            device, host = self.queue.popleft()
            device.copy_(host)
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
