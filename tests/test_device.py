"""Host memory pinned for a device: how much, until when, in which process, and what happens where it cannot be."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from child_processes import in_a_fork
from late_backend import Device, LateBackend

from fastload import FastLoader, PackedDataset
from fastload.device import Backend, Pins
from fastload.errors import WorkerError
from fastload.prefetch.ring import allocate_aligned

PACKED = {"rows": 60, "size": (16, 12, 3), "seed": 5, "classes": "abc", "chunk_rows": 8}


class Runtime:
    """A CUDA runtime that notes which device is current when memory is registered."""

    def __init__(self):
        self.current, self.calls = 0, []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.calls.append(("register", self.current, address, num_bytes, flags))
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", self.current, address))
        return 0

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before


def test_memory_is_registered_and_unregistered_under_its_own_device(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    backend = Backend.__new__(Backend)
    backend.device = torch.device("cuda", 1)
    memory = allocate_aligned(8192)
    undo = backend.pin(memory)
    undo()
    address = memory.ctypes.data
    portable, mapped = 1, 2  # the values of cudaHostRegisterPortable and cudaHostRegisterMapped
    registered = ("register", 1, address, 8192, portable | mapped)
    assert runtime.calls == [registered, ("unregister", 1, address)] and runtime.current == 0
    alive = weakref.ref(memory)
    del memory
    assert alive() is None, "who unpins memory does not keep it"


def test_the_host_takes_no_cpu_while_it_waits_for_copies_or_the_decoder(monkeypatch):
    class Event:
        def __init__(self, *, blocking=False):
            self.blocking = blocking

        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            waited.append(self.stream)

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    backend = Backend.__new__(Backend)
    backend._stream, backend._decoding_stream, backend._decoding = "side", "decoding", threading.Lock()
    event = backend.record()
    assert event.blocking and event.stream == "side"
    with contextlib.suppress(OSError), backend.decoding():
        raise OSError
    assert waited == ["decoding"] and not backend._decoding.locked()


@pytest.mark.parametrize(
    ("said", "kind"),
    [("CUDA out of memory. Tried to allocate 20 MiB.", torch.OutOfMemoryError), ("nvJPEG refused it: 2", RuntimeError)],
)
def test_memory_that_runs_out_while_jpegs_are_decoded_is_no_damaged_file(monkeypatch, said, kind):
    def decode_jpeg(files, *, mode, device):
        raise RuntimeError(f"Error while decoding JPEG images: {said}")

    waited = []
    modes = SimpleNamespace(RGB="RGB", GRAY="GRAY")
    torchvision_io = SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=modes)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(io=torchvision_io))
    monkeypatch.setitem(sys.modules, "torchvision.io", torchvision_io)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    backend = Backend.__new__(Backend)
    backend.device = torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="while decoding") as caught:
        backend.decode_jpegs([torch.zeros(4, dtype=torch.uint8)], 3)
    assert type(caught.value) is kind and waited == [backend.device]


def test_pinned_memory_lives_until_it_is_unpinned_after_the_device_has_done_its_work():
    device = LateBackend(patience=1)
    pins, memory = Pins(device), allocate_aligned(4096)
    assert pins.add(memory) and device.pinned == 4096
    alive = weakref.ref(memory.base)
    del memory
    gc.collect()
    assert alive() is not None, "memory that is freed while it is pinned can never be pinned again"
    device.computing = True
    del pins  # the device refuses while a kernel may still read the memory
    gc.collect()
    assert device.pinned == 0 and alive() is None


def as_it_is(sample):
    return sample


def refuses_class_c(sample):
    if sample[1] == 2:
        raise ValueError("this sample cannot be used")
    return sample


FEEDS = ["threads", "transforms", "processes", "device", "host"]


def loader_of(packed, feed, device, **options):
    source = PackedDataset(packed, transform=as_it_is) if feed == "processes" else packed
    cache = feed if feed in ("device", "host") else None
    return FastLoader(source, 8, device=device, cache=cache, seed=2, workers=2, **options)


@pytest.mark.parametrize("feed", FEEDS)
def test_close_gives_all_pinned_memory_back_and_another_epoch_pins_it_anew(packed, feed):
    device = Device(patience=2)
    loader = loader_of(packed, feed, device)
    assert device.pinned == 0
    expected = [tuple(t.clone() for t in batch) for batch in FastLoader(packed, 8, seed=2)]
    for _ in range(2):
        loader.set_epoch(0)
        kept = list(loader)
        ring = loader._producer.pool.ring
        rows = 60 * (16 * 12 * 3 + 8) if feed == "host" else 0
        slots = len(ring.slots) * ring.slot_bytes
        held = loader._producer.pool._opened.cache if feed == "host" else None  # as a traceback may hold it
        # Whole pages for each field, and nothing more.
        assert ring.slot_bytes % 4096 == 0 and slots + rows <= device.pinned <= slots + rows + (2 * 4096 if rows else 0)
        loader.close()
        assert device.pinned == 0, "at once, without waiting for the garbage collector"
        del held
        for batch, there in zip(kept, expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(batch, there, strict=True))


@pytest.mark.parametrize("feed", FEEDS)
def test_a_loader_that_is_dropped_leaves_nothing_pinned(packed, feed):
    device = Device()
    loader = loader_of(packed, feed, device)
    batches = iter(loader)
    next(batches)
    assert device.pinned > 0
    del loader, batches
    gc.collect()
    assert device.pinned == 0


@pytest.mark.parametrize("feed", ["threads", "processes", "device"])
@pytest.mark.parametrize("room", [0, 10_000])
def test_where_memory_cannot_be_pinned_the_log_says_so_once_and_batches_are_right(packed, feed, room, caplog):
    device = Device()
    device.pinnable = room
    expected = [batch[0].clone() for batch in FastLoader(packed, 8, seed=2)]
    with caplog.at_level(logging.WARNING, "fastload"):
        loader = loader_of(packed, feed, device)
        assert all(torch.equal(one[0], other) for one, other in zip(loader, expected, strict=True))
        list(loader)
    said = [record.getMessage() for record in caplog.records if "could not be pinned" in record.getMessage()]
    # While a cache is filled, other memory is pinned than later.
    most = 2 if feed == "device" else 1
    assert 1 <= len(said) <= most and "ulimit -l" in said[0]
    loader.close()
    assert device.pinned == 0


@pytest.mark.parametrize("died", [False, True])
def test_after_an_error_of_a_worker_the_ring_is_unpinned_when_its_copies_are_done(packed, pixels, died):
    device = Device(patience=10**9)  # copies begin when they are waited for, or when their batch is used
    dataset = PackedDataset(packed, transform=as_it_is if died else refuses_class_c)
    loader = FastLoader(dataset, 1, shuffle=False, workers=1, device=device)
    batches, kept = iter(loader), []
    kept.append(next(batches))
    if died:
        os.kill(next(iter(loader._producer.pool._workers.pids)), 9)
    with pytest.raises(WorkerError):
        kept.extend(batches)
    assert device.pinned == 0 and device.run == device.begun > 0, "unpinned, after the copies that were begun"
    device.compute()
    for batch in kept:
        assert torch.equal(batch[0], torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2))


@pytest.mark.parametrize("feed", FEEDS)
def test_a_forked_process_does_nothing_to_the_device(packed, feed, monkeypatch):
    device = Device()
    loader = loader_of(packed, feed, device)
    batches = iter(loader)
    first = next(batches)
    pinned = device.pinned

    def end():
        nonlocal loader, batches
        assert loader.stats.steps == 1
        loader.close()
        del loader, batches
        gc.collect()
        assert not device.called_in_a_fork and device.pinned == pinned

    in_a_fork(end)
    assert device.pinned == pinned and len([first, *batches]) == 7
    loader.close()
    assert device.pinned == 0
