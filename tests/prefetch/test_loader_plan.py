"""How many threads read when nobody says it, and that what they read does not depend on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_backend import Device
from ragged_cases import varied_file

import fastload.distributed.ranks
import fastload.prefetch.loader_plan
import fastload.prefetch.producer
from fastload.dataset import PackedDataset
from fastload.loader.loader import FastLoader
from fastload.prefetch.loader_plan import copying_threads
from fastload.prefetch.ring import SLOTS_IN_COPY
from fastload.prefetch.thread_pool import ThreadPool
from fastload.transforms import RandomHorizontalFlip, Resize

PACKED = {"rows": 90, "size": (10, 8, 3), "seed": 5, "classes": "abcdefg", "chunk_rows": 8}
MB, GIB = 10**6, 2**30


@pytest.fixture
def with_cpus(monkeypatch):
    def set_cpus(cpus, ranks=1):
        monkeypatch.setattr(fastload.distributed.ranks, "available_cpus", lambda: cpus)
        monkeypatch.setattr(fastload.prefetch.loader_plan, "available_memory", lambda: 32 * GIB)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return set_cpus


@pytest.mark.parametrize(
    ("cpus", "batch_bytes", "threads"),
    [
        (1, None, 1), (2, None, 2), (3, None, 2), (96, None, 2),
        (1, 30 * MB, 1), (2, 30 * MB, 2), (3, 30 * MB, 2), (4, 30 * MB, 3), (8, 30 * MB, 7), (9, 30 * MB, 8),
        (15, 30 * MB, 8), (16, 30 * MB, 12), (96, 30 * MB, 12),
        # All slots in one GiB, three of them without a thread; two threads whatever they take.
        (96, GIB // 15, 12), (96, GIB // 15 + 1, 11), (96, 150 * MB, 4), (96, GIB // 5, 2), (96, GIB, 2),
        (96, 9 * GIB, 2), (1, 9 * GIB, 1), (96, 0, 12),
    ],
)  # fmt: skip
def test_threads_that_copy_are_so_many(cpus, batch_bytes, threads):
    assert copying_threads(cpus, batch_bytes, 32 * GIB) == threads


def test_threads_that_copy_are_more_where_much_memory_is_free():
    free = [0, 32 * GIB, 48 * GIB, 64 * GIB, 512 * GIB]
    assert [copying_threads(96, GIB // 5, one) for one in free] == [2, 2, 4, 7, 12]


@given(cpus=st.integers(1, 256), batch_bytes=st.none() | st.integers(0, 4 * GIB), free=st.integers(0, 2000 * GIB))
def test_threads_that_copy_are_no_more_than_cpus_nor_pin_more_than_is_fair(cpus, batch_bytes, free):
    threads = copying_threads(cpus, batch_bytes, free)
    assert 1 <= threads <= min(cpus, 12 if cpus >= 16 else 8)
    if batch_bytes is not None:
        assert threads <= 2 or (SLOTS_IN_COPY + 1 + threads) * batch_bytes <= max(GIB, free / 32)
        assert threads >= min(2, cpus)
        assert cpus <= 2 or threads < cpus


@pytest.mark.parametrize(
    ("cpus", "ranks", "device", "threads"),
    [
        (16, 1, False, 2),
        (16, 1, True, 12),
        (15, 1, True, 8),
        (16, 2, True, 7),
        (16, 4, True, 3),
        (16, 8, True, 2),
        (4, 8, True, 1),
    ],
)
def test_a_loader_takes_the_cpus_of_its_rank(packed, with_cpus, cpus, ranks, device, threads):
    with_cpus(cpus, ranks)
    options = {"device": Device() if device else None, "share": None}
    assert FastLoader(packed, 8, **options)._recipe.workers == threads
    assert FastLoader(packed, 8, workers=13, **options)._recipe.workers == 13
    augmented = FastLoader(packed, 8, transform=[RandomHorizontalFlip()], **options)._recipe.workers
    assert augmented == (threads if device else min(16, cpus // ranks)), "on a device it augments"
    python = FastLoader(PackedDataset(packed, transform=lambda sample: sample), 8, **options)
    assert python._recipe.workers == max(1, cpus // ranks)


def test_two_threads_have_jpegs_decoded_by_the_device(tmp_path, with_cpus):
    path = varied_file(tmp_path / "varied.h5")
    with_cpus(16)
    for decode, threads in (("device", 2), ("cpu", 16)):
        dataset = PackedDataset(path, fields=["images", "labels"], decode=decode)
        options = {"device": Device(), "transform": [Resize((9, 9))]}
        assert FastLoader(dataset, 4, **options)._recipe.workers == threads
        assert FastLoader(dataset, 4, workers=5, **options)._recipe.workers == 5


def test_large_batches_are_read_by_fewer_threads_unless_they_are_asked_for(packed, with_cpus, monkeypatch):
    with_cpus(16)
    row_bytes = 10 * 8 * 3 + 8
    monkeypatch.setattr(fastload.prefetch.loader_plan, "_PINNED_BYTES", 7 * 40 * row_bytes)
    monkeypatch.setattr(fastload.prefetch.loader_plan, "available_memory", lambda: 0)
    for workers, expected in ((None, 4), (8, 8)):
        with_device = FastLoader(packed, 40, device=Device(), workers=workers)
        next(iter(with_device))
        assert with_device._producer.pool.worker_info.workers == expected
        assert len(with_device._producer.pool.ring.slots) == expected + SLOTS_IN_COPY + 1
        with_device.close()


def test_twelve_threads_deliver_the_batches_that_one_does(packed, with_cpus):
    with_cpus(16)
    expected = list(FastLoader(packed, 4, seed=3, workers=1))
    loader = FastLoader(packed, 4, seed=3, device=Device())
    for _ in range(2):
        loader.set_epoch(0)
        found = [([tensor.clone() for tensor in batch], batch.rows.tolist()) for batch in loader]
        assert loader._producer.pool.worker_info.workers == 12
        assert len(found) == len(expected) == 22
        for (tensors, rows), batch in zip(found, expected, strict=True):
            assert rows == batch.rows.tolist()
            assert all(map(torch.equal, tensors, batch))
    loader.close()


@pytest.mark.parametrize("cache", ["device", "host"])
def test_a_cache_is_filled_by_as_many(packed, with_cpus, monkeypatch, cache):
    with_cpus(16)
    opened = []

    class Seen(ThreadPool):
        def begin(self, epochs, *, timed):
            opened.append(self.worker_info.workers)
            return super().begin(epochs, timed=timed)

    monkeypatch.setattr(fastload.prefetch.producer, "ThreadPool", Seen)
    for workers in (None, 3):
        loader = FastLoader(packed, 8, device=Device(), cache=cache, workers=workers)
        next(iter(loader))
        loader.close()
    assert opened == [12, 0, 3, 0], "and none reads rows that are cached"
