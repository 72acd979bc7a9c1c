"""Rows that stay in memory: the batches of a loader that reads, without reading, and errors that say by how much."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref

import h5py
import numpy as np
import pytest
import torch
from check_resume import check_resume
from child_processes import in_a_fork
from hypothesis import given
from hypothesis import strategies as st
from late_backend import Device
from same_batches import assert_same, facts
from small_files import write_random

import fastload.prefetch.recipe
import fastload.prefetch.row_cache
from fastload.dataset import PackedDataset
from fastload.device import DeviceMemory
from fastload.errors import CacheError, FileChangedError, OptionError, StateError
from fastload.loader.loader import FastLoader
from fastload.plan import ChunkWindow, MixedEcho
from fastload.plan.cursor import state_from_dict
from fastload.prefetch.row_cache import RowCache
from fastload.prefetch.thread_pool import ThreadPool
from fastload.read.reader import Rows
from fastload.transforms import Normalize, RandomHorizontalFlip
from fastload.transforms.engine.placement import ImageRows

N, SHAPE = 61, (10, 8, 3)
ROW_BYTES = 10 * 8 * 3 + 8  # images and labels
WHOLE = {"rows": N, "size": SHAPE, "seed": 5, "classes": "abcdefg", "boxes": True, "masks": True, "chunk_rows": 8}
PACKED = WHOLE | {"splits": {"train": 40, "val": 21}}
ALL = ("images", "masks", "labels", "bbox", "row", "valid")


def has_shares(state):
    """Whether a state is of an epoch in which each rank keeps its share."""
    return state_from_dict(state).fixed_shares


def said(caplog, word):
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


# The same batches


@given(
    cache=st.sampled_from(["device", "host", "auto"]),
    shuffle=st.sampled_from([True, False, "full", ChunkWindow(2)]),
    ends=st.sampled_from(["drop", "pad", "exact"]),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 13),
    echo=st.integers(1, 3),
    fields=st.permutations(ALL).flatmap(lambda names: st.integers(1, len(ALL)).map(lambda n: names[:n])),
    split=st.sampled_from([None, "train", "val"]),
    chosen=st.none() | st.lists(st.integers(0, 20), min_size=15, max_size=40),
    patience=st.integers(1, 5),
    workers=st.integers(1, 2),
    read=st.sampled_from(["map", "pread"]),
    seed=st.integers(0, 99),
    resume_after=st.integers(0, 3),
)
def test_batches_are_those_that_are_read(
    packed, cache, shuffle, ends, world_size, batch_size, echo, fields, split, chosen, patience, workers, read, seed,
    resume_after,
):  # fmt: skip
    dataset = PackedDataset(packed, split=split, fields=fields, read=read)
    if chosen is not None:
        dataset = dataset.select(chosen)
        if isinstance(shuffle, ChunkWindow):
            shuffle = "full"
    options = {"shuffle": shuffle, "ends": ends, "echo": echo, "workers": workers, "seed": seed}
    if len(dataset) // world_size < batch_size:
        batch_size = 1
    for rank in range(world_size):
        options["share"] = (rank, world_size)
        reading = FastLoader(dataset, batch_size, **options)
        kept = FastLoader(dataset, batch_size, cache=cache, device=Device(patience), **options)
        assert len(kept) == len(reading)
        for _ in range(2):
            assert_same([facts(batch) for batch in kept], [facts(batch) for batch in reading])
        begun = iter(kept)
        for _ in range(min(resume_after, len(kept))):
            next(begun)
        state = kept.state_dict()
        assert has_shares(state) is False
        for loader in (reading, kept):
            loader.load_state_dict(state)
        assert_same([facts(batch) for batch in kept], [facts(batch) for batch in reading])
        kept.close()


@pytest.mark.parametrize("cache", ["device", "host"])
def test_transforms_and_echoes_see_what_they_would_see(packed, cache):
    transform = [RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3)]
    options = {"transform": transform, "echo": 3, "seed": 4}
    kept = FastLoader(packed, 8, cache=cache, device=Device(), **options)
    assert_same([facts(batch) for batch in kept], [facts(batch) for batch in FastLoader(packed, 8, **options)])


@pytest.mark.parametrize("echo", [2, MixedEcho(2)])
@pytest.mark.parametrize("cache", [None, "device", "host"])
def test_what_a_user_writes_to_a_batch_is_not_seen_by_its_next_use(packed, cache, echo):
    expected = [facts(batch) for batch in FastLoader(packed, 8, shuffle=False, echo=echo)]
    loader, kept = FastLoader(packed, 8, shuffle=False, cache=cache, device=Device(), echo=echo), []
    for _ in range(2):
        seen = []
        for batch in loader:
            seen.append(facts(batch))
            kept.append(batch)
            for tensor in (*batch, batch.rows, batch.valid):
                tensor.zero_()
        assert_same(seen, expected)
    assert not any(batch[0].any() for batch in kept), "what was handed over is the user's"


@pytest.mark.parametrize(
    ("shape", "axes", "dtype", "options"),
    [
        ((3, 9, 7), (1, 2, 0), np.uint8, {"chunks": (4, 3, 9, 7), "compression": "gzip"}),
        ((3, 9, 7), (1, 2, 0), np.uint16, {}),
        ((9, 7), None, np.uint8, {"chunks": (5, 9, 7)}),
        ((9, 7), None, np.uint16, {"chunks": (7, 5, 7), "compression": "lzf", "shuffle": True}),
        ((9, 7, 3), (0, 1, 2), np.uint16, {}),
        ((9, 7, 3), (0, 1, 2), ">u2", {"chunks": (6, 9, 7, 3), "compression": "gzip"}),
        ((9, 7, 4), (0, 1, 2), np.uint16, {"chunks": (5, 9, 7, 4)}),
    ],
)
@pytest.mark.parametrize("shuffle", [True, "chunk", False])
@pytest.mark.parametrize("cache", [None, "device", "host"])
def test_foreign_and_compressed_files_are_read_and_kept_too(tmp_path, shape, axes, dtype, options, shuffle, cache):
    pixels = np.random.default_rng(1).integers(0, 250, (33, *shape)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=pixels, **options)
        file["labels"] = np.arange(33, dtype=np.int16)
    arguments = {"shuffle": shuffle, "cache": cache, "device": Device() if cache else None, "ends": "exact"}
    if shuffle == "chunk" and not options:
        with pytest.raises(OptionError, match="full"):
            FastLoader(tmp_path / "a.h5", 6, **arguments)
        return
    loader = FastLoader(tmp_path / "a.h5", 6, **arguments)
    here = np.ascontiguousarray(pixels.astype(np.dtype(dtype).newbyteorder("=")))
    as_hwc = here[..., None] if axes is None else here.transpose(0, *(axis + 1 for axis in axes))
    for _ in range(2):
        rows = []
        for batch in loader:
            images, labels = batch
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), as_hwc[batch.rows.numpy()])
            assert images.numpy().dtype == here.dtype and labels.dtype == torch.int64
            assert torch.equal(labels, batch.rows)
            assert cache is None or images.is_contiguous(memory_format=torch.channels_last)
            rows += batch.rows[batch.valid].tolist()
        assert sorted(rows) == list(range(33))
    assert cache is None or loader.stats.bytes_read == 0


# Nothing is read any more


@pytest.mark.parametrize("cache", ["device", "host"])
def test_the_file_is_read_once_in_its_order_and_never_again(packed, cache, monkeypatch, caplog):
    gather, rows_read = Rows.gather, []
    lock = threading.Lock()

    def counted(self, rows, outs):
        with lock:
            rows_read.extend(rows.tolist())
        return gather(self, rows, outs)

    monkeypatch.setattr(Rows, "gather", counted)
    monkeypatch.setattr(fastload.prefetch.producer, "_LOAD_BYTES", 4 * ROW_BYTES)  # many batches, and a short one
    caplog.set_level(logging.INFO, "fastload")
    dataset = PackedDataset(packed, split="val")
    loader = FastLoader(dataset, 5, cache=cache, device=Device(), workers=1)
    assert rows_read == []
    next(iter(loader))  # the rest of the epoch is left out
    assert rows_read == list(range(40, 61)) and loader.stats.bytes_read == 21 * ROW_BYTES
    begun, done = said(caplog, f"{21 * ROW_BYTES:,} bytes")
    assert "21 rows" in begun and "images, labels" in begun and " s (" in done
    for _ in range(3):
        list(loader)
        assert loader.stats.bytes_read == 0 and loader.stats.fresh_samples == 20
    assert len(rows_read) == 21
    loader.close()
    list(loader)
    assert loader.stats.bytes_read == 21 * ROW_BYTES and len(rows_read) == 42
    # A selection is kept once a row.
    chosen = PackedDataset(packed).select([7, 3, 3, 60, 7, 0])
    loader = FastLoader(chosen, 2, cache=cache, device=Device(), shuffle=False)
    assert [row for batch in loader for row in batch.rows.tolist()] == [7, 3, 3, 60, 7, 0]
    assert loader.stats.bytes_read == 4 * ROW_BYTES


def test_a_copy_is_some_bytes_a_sample_the_host_waits_for_none_and_the_allocator_knows_what_is_read(packed):
    device = Device(patience=1)
    batches = iter(FastLoader(packed, 10, cache="device", device=device))
    copied, waits, copy = [], device.host_waits, device.copy

    def counted(host, into=None):
        copied.append(host.nbytes)
        return copy(host, into)

    device.copy = counted
    next(batches)
    # What is small, and the rows of two fields: each storage once.
    assert len(device.readers) == len(set(device.readers)) == 3
    assert len(list(batches)) == 5
    # Some of the first ones were copied before, some of the next epoch's are copied ahead.
    assert 3 <= len(copied) <= 8 and set(copied) == {8192}, "a page of indices, and one of all that is small"
    assert device.host_waits == waits


# The cache


def test_a_cache_gives_fields_that_are_gathered_when_asked():
    images = torch.arange(5 * 2 * 3 * 1).reshape(5, 2, 3, 1)
    cache = RowCache(np.array([2, 4, 8, 9, 30]), "device", {"images": images, "labels": torch.arange(5)}, 0)
    index = cache.index_of(np.array([30, 4, 4]))
    assert index.tolist() == [4, 1, 1]
    fields = cache.gather(torch.from_numpy(index))
    assert isinstance(fields["images"], ImageRows)
    assert torch.equal(fields["images"].gather(), images[[4, 1, 1]].permute(0, 3, 1, 2))
    assert fields["labels"].tolist() == [4, 1, 1]


@pytest.mark.parametrize("rows", [range(4, 9), np.array([4, 5, 8])])
@pytest.mark.parametrize("asked", [3, 9, 6, -1])
def test_a_row_that_is_not_in_the_cache_is_refused(rows, asked):
    cache = RowCache(rows, "device", {}, 0)
    if asked in rows:
        assert cache.index_of(np.array([asked])).tolist() == [2]
        return
    with pytest.raises(IndexError, match=f"row {asked} is not among the {len(rows)} rows"):
        cache.index_of(np.array([4, asked]))


# Its life


def test_pinned_memory_is_given_back_on_close_and_when_the_loader_is_dropped(packed):
    device = Device()
    loader = FastLoader(packed, 10, cache="host", device=device)
    assert device.pinned == 0
    kept = list(loader)
    expected = [batch[0].clone() for batch in kept]
    assert device.pinned >= N * ROW_BYTES
    loader.close()
    gc.collect()
    assert device.pinned == 0
    assert all(torch.equal(batch[0], images) for batch, images in zip(kept, expected, strict=True))
    batches = iter(loader)
    next(batches)
    assert device.pinned > 0
    del loader, batches
    gc.collect()
    assert device.pinned == 0


def test_the_device_store_goes_with_close_though_the_iteration_is_kept(packed):
    device, made = Device(), []
    empty = device.empty

    def noted(shape, dtype):
        tensor = empty(shape, dtype)
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    device.empty = noted
    loader = FastLoader(packed, 10, cache="device", device=device)
    batches = iter(loader)
    device.empty = empty
    next(batches)
    held = [weakref.ref(tensor) for tensor in loader._producer.pool._opened.cache.tensors.values()]
    loader.close()
    gc.collect()
    assert len(made) >= 2 and all(tensor() is None for tensor in made + held)
    with pytest.raises(OptionError, match="ended by a newer iter"):
        next(batches)


@pytest.mark.parametrize("cache", ["device", "host"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.cuda.OutOfMemoryError])
def test_an_interrupted_load_leaves_nothing_half_used(packed, cache, error, monkeypatch):
    monkeypatch.setattr(fastload.prefetch.producer, "_LOAD_BYTES", 8 * ROW_BYTES)
    device = Device()
    loader = FastLoader(packed, 8, cache=cache, device=device, seed=3)
    hand_over, calls = ThreadPool.hand_over, []

    def failing(*args, **words):
        calls.append(None)  # and not the arguments, which keep the cache
        if len(calls) == 3:  # of eight batches
            raise error("now")
        return hand_over(*args, **words)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPool, "hand_over", failing)
        with pytest.raises(error):
            iter(loader)
    assert len(calls) == 3 and not [t for t in threading.enumerate() if t.name.startswith("fastload")]
    gc.collect()
    assert device.pinned == 0 and not device.queue
    # The epoch that was asked for is still the next.
    assert_same([facts(batch) for batch in loader], [facts(batch) for batch in FastLoader(packed, 8, seed=3)])


@pytest.mark.parametrize(("cache", "left"), [("device", 1000), ("host", N * ROW_BYTES - 5)])
def test_memory_taken_since_the_loader_was_made_is_a_named_error(packed, monkeypatch, cache, left):
    device = Device(free=10**6)
    loader = FastLoader(packed, 8, cache=cache, device=device)

    def full(shape, dtype):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    said = f"{N * ROW_BYTES:,} bytes of rows: {left:,} bytes are free, {N * ROW_BYTES - left:,} are missing"
    with monkeypatch.context() as patch:
        patch.setattr(device, "room", DeviceMemory(left, 10**6))
        patch.setattr(device, "empty", full)
        patch.setattr(fastload.prefetch.row_cache, "available_memory", lambda: left)
        with pytest.raises(CacheError, match=f'cache="{cache}".*{said}'):
            iter(loader)
    assert len(list(loader)) == 7


def with_other_digests(path):
    """Writes other digests into a file in use, of the same size."""
    with h5py.File(path, "r+", locking=False) as file:
        file["digest"][0] += 1
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("loaded", [True, False])
def test_a_file_that_changes_while_or_after_it_is_loaded_is_noticed(tmp_path, monkeypatch, loaded):
    monkeypatch.setattr(fastload.prefetch.producer, "_LOAD_BYTES", 2 * ROW_BYTES)
    path, device = write_random(tmp_path / "a.h5", **WHOLE), Device()
    loader = FastLoader(path, 8, cache="device", device=device)
    if loaded:
        list(loader)
        with_other_digests(path)
    fill = device.fill

    def changed(destination, host):
        with_other_digests(path)
        fill(destination, host)

    device.fill = changed
    with pytest.raises(FileChangedError):
        iter(loader)


def test_a_fork_loads_for_itself_and_the_parent_goes_on(packed):
    loader = FastLoader(packed, 8, cache="host", device=Device(), seed=5)
    batches = iter(loader)
    next(batches)

    def load():
        expected = FastLoader(packed, 8, seed=5)
        expected.set_epoch(1)
        assert_same([facts(batch) for batch in loader], [facts(batch) for batch in expected])
        assert loader.stats.bytes_read == N * ROW_BYTES
        loader.close()

    in_a_fork(load)
    assert len(list(batches)) == 6


# What is chosen


@pytest.mark.parametrize(
    ("free", "available", "place"),
    [
        (2 * N * ROW_BYTES, 0, "device"),
        (2 * N * ROW_BYTES - 2, 2 * N * ROW_BYTES, "host"),
        (2 * N * ROW_BYTES - 2, 2 * N * ROW_BYTES - 2, None),
    ],
)
def test_auto_takes_half_of_what_is_free_and_says_why(packed, caplog, monkeypatch, free, available, place):
    monkeypatch.setattr(fastload.prefetch.row_cache, "available_memory", lambda: available)
    caplog.set_level(logging.INFO, "fastload")
    loader = FastLoader(packed, 8, cache="auto", device=Device(free=free))
    [line] = said(caplog, 'cache="auto"')
    assert line.startswith(f'cache="auto": "{place}", since' if place else 'cache="auto": None, since')
    for number in (N * ROW_BYTES, free, available):
        assert f"{number:,}" in line
    for epoch in range(2):
        list(loader)
        assert loader.stats.bytes_read == (0 if place and epoch else (N if place else 56) * ROW_BYTES)


def test_auto_never_keeps_a_share_and_counts_the_ranks_of_the_machine(packed, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for available, rows in ((4 * N * ROW_BYTES - 4, 24), (4 * N * ROW_BYTES, N)):
        monkeypatch.setattr(fastload.prefetch.row_cache, "available_memory", lambda here=available: here)
        loader = FastLoader(packed, 8, cache="auto", device=Device(free=2 * N * ROW_BYTES - 2), share=(0, 2))
        list(loader)
        assert has_shares(loader.state_dict()) is False and loader.stats.bytes_read == rows * ROW_BYTES


@pytest.mark.parametrize("cache", ["device", "host"])
def test_caches_that_cannot_be_are_refused_with_a_mend(packed, cache, caplog):
    with pytest.raises(OptionError, match=rf"cache='{cache}'.*device is None.*Give device='cuda'"):
        FastLoader(packed, 8, cache=cache)
    python = PackedDataset(packed, transform=lambda sample: sample)
    for source in (torch.utils.data.TensorDataset(torch.arange(20)), python):
        with pytest.raises(OptionError, match=rf"cache='{cache}'.*Python code for each sample.*fastload pack"):
            FastLoader(source, 8, cache=cache, device=Device())
    caplog.set_level(logging.INFO, "fastload")
    FastLoader(python, 8, cache="auto", device=Device(), workers=1)
    list(FastLoader(packed, 8, cache="auto"))
    of_python, on_cpu = said(caplog, 'cache="auto": None, since')
    assert "runs Python code for each sample" in of_python and "batches stay on the CPU" in on_cpu


def test_a_cache_larger_than_memory_says_by_how_much(packed, monkeypatch):
    need = N * ROW_BYTES
    FastLoader(packed, 8, cache="device", device=Device(free=need + 2000, total=20_000))
    with pytest.raises(
        CacheError, match=rf"{need:,} bytes\..*{need + 1990:,} are free.* 2,000 are left.*: 10 bytes are m"
    ):
        FastLoader(packed, 8, cache="device", device=Device(free=need + 1990, total=20_000))
    with pytest.raises(CacheError, match=r"the share of one of 3 ranks 5,208.*: 1,008 bytes are missing.*more ranks"):
        FastLoader(packed, 4, cache="device", device=Device(free=4_700, total=5_000), share=(0, 3))
    monkeypatch.setattr(fastload.prefetch.row_cache, "available_memory", lambda: 10_000)
    with pytest.raises(CacheError, match=rf'cache="host": larger.*{N * ROW_BYTES - 9000:,} bytes are missing'):
        FastLoader(packed, 8, cache="host", device=Device())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(fastload.prefetch.row_cache, "available_memory", lambda: 3 * N * ROW_BYTES)
    with pytest.raises(CacheError, match="in each of 3 processes"):
        FastLoader(packed, 8, cache="host", device=Device())


# Fixed shares

SMALL = {"free": 40 * ROW_BYTES, "total": 40 * ROW_BYTES}  # more than a third or half of the rows, less than all


def shared(packed, rank, world_size=3, batch_size=4, **options):
    options = {"cache": "device", "device": Device(**SMALL), "seed": 8, **options}
    if rank == 0 and options.get("shuffle") is not False and options["cache"] == "device":
        with pytest.warns(UserWarning, match="the rows do not fit on one device"):
            return FastLoader(packed, batch_size, share=(rank, world_size), **options)
    return FastLoader(packed, batch_size, share=(rank, world_size), **options)


@pytest.mark.parametrize("ends", ["drop", "pad", "exact"])
@pytest.mark.parametrize("shuffle", ["full", ChunkWindow(2), False])
def test_each_rank_keeps_its_piece_and_every_row_comes_once(packed, ends, shuffle):
    pieces = [range(0, 21), range(21, 41), range(41, 61)]
    pixels = h5py.File(packed)["images"][()]
    loaders = [shared(packed, rank, ends=ends, shuffle=shuffle) for rank in range(3)]
    orders = []
    for epoch in range(2):
        epochs = [[facts(batch) for batch in loader] for loader in loaders]
        assert len({len(batches) for batches in epochs}) == 1
        for piece, batches, loader in zip(pieces, epochs, loaders, strict=True):
            rows = [row for _, rows, _, _ in batches for row in rows]
            assert set(rows) <= set(piece)
            counted = [row for _, rows, valid, _ in batches for row, good in zip(rows, valid, strict=True) if good]
            if ends == "exact":
                assert sorted(counted) == list(piece)
            for (images, _), rows, _, _ in batches:
                assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pixels[rows])
            assert loader.stats.bytes_read == (0 if epoch else len(piece) * ROW_BYTES)
        orders.append([rows for batches in epochs for _, rows, _, _ in batches])
    assert (orders[0] == orders[1]) == (shuffle is False)


def test_the_order_quality_is_said_once_for_all_ranks_with_its_figure(packed):
    with pytest.warns(UserWarning) as warned:
        FastLoader(packed, 7, cache="device", device=Device(**SMALL), share=(0, 3), shuffle="full")
    [text] = [str(warning.message) for warning in warned]
    # Full shuffle of 61 rows: 6 / 60; of a piece of 21: 6 / 20 on average, here by the plan of two epochs.
    assert "under full shuffle of all rows 10.00%" in text and "stratified" in text and "3 ranks" in text
    figure = float(text.split("in a batch of a rank, ")[1].split("%")[0]) / 100
    assert 0.15 < figure < 0.5 and f"{figure / 0.1:.1f} times" in text
    FastLoader(packed, 7, cache="device", device=Device(**SMALL), share=(1, 3), shuffle="full")


def test_without_a_process_group_the_devices_size_decides_on_every_rank(packed, caplog):
    caplog.set_level(logging.INFO, "fastload")
    total = 40 * ROW_BYTES
    loader = shared(packed, 1, device=Device(free=30 * ROW_BYTES, total=total))
    assert has_shares(loader.state_dict()) and said(caplog, "by the device's size: there is no process group")
    # All rows would fit on this rank's device as it is, and none of the others knows.
    whole = FastLoader(packed, 4, cache="device", device=Device(free=2**30, total=2**30), share=(1, 3))
    assert not has_shares(whole.state_dict())
    with pytest.raises(CacheError, match=r"No process group could be asked.*initialize torch.distributed"):
        FastLoader(packed, 4, cache="device", device=Device(free=20 * ROW_BYTES, total=2**14), share=(1, 3))


@pytest.mark.parametrize("ends", ["drop", "pad", "exact"])
def test_shares_go_on_where_they_stopped(packed, ends):
    check_resume(lambda: shared(packed, 1, ends=ends, echo=2))


def test_a_state_of_shares_needs_them_and_the_same_ranks_and_batches(packed):
    saved = shared(packed, 1)
    batches = iter(saved)
    begun = saved.state_dict()
    next(batches)
    within = saved.state_dict()
    assert has_shares(within)
    rest = [facts(batch) for batch in batches]
    over = saved.state_dict()
    others = [shared(packed, 1, 2), shared(packed, 1, batch_size=5)]
    for other in others:
        before = other.state_dict()
        with pytest.raises(
            StateError, match=r"within an epoch of fixed shares, world size 3, batch size 4; this .* Go on"
        ):
            other.load_state_dict(within)
        assert other.state_dict() == before
        own = has_shares(other.state_dict())
        for state, epoch in ((begun, 0), (over, 1)):
            other.load_state_dict(state)
            assert other.epoch == epoch and has_shares(other.state_dict()) is own
            assert list(other) and other.epoch == epoch
        other.load_state_dict(over)
        other.set_epoch(0)  # which is not begun again
        assert list(other) == [] and list(other) and other.epoch == 1
    # After a restart there may be more room: the shares are kept to all the same.
    roomy = shared(packed, 1, device=Device())
    assert not has_shares(roomy.state_dict())
    roomy.load_state_dict(within)
    assert_same([facts(batch) for batch in roomy], rest)
    assert has_shares(roomy.state_dict())
    assert_same([facts(batch) for batch in roomy], [facts(batch) for batch in saved])


@pytest.mark.parametrize("cache", [None, "host"])
def test_ranks_that_read_any_row_finish_an_epoch_of_shares_and_have_none_in_the_next(packed, cache):
    saved = [shared(packed, rank, ends="exact") for rank in range(3)]
    done = []
    for loader in saved:
        batches = iter(loader)
        done += [row for _ in range(2) for row in next(batches).rows.tolist()]
    state = saved[0].state_dict()
    rest = {"cache": cache, "device": Device() if cache else None, "ends": "exact"}
    loaders = [shared(packed, rank, 2, 5, **rest) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
        assert has_shares(loader.state_dict())
        done += [row for batch in loader for row in batch.rows[batch.valid].tolist()]
    assert sorted(done) == list(range(N))
    fresh = shared(packed, 0, 2, 5, **rest)
    fresh.set_epoch(1)
    assert_same([facts(batch) for batch in loaders[0]], [facts(batch) for batch in fresh])
    assert not has_shares(loaders[0].state_dict())


def test_a_state_without_shares_cannot_go_on_with_them_but_for_echoes_of_a_first_batch_that_are_not_anothers(packed):
    plain = FastLoader(packed, 4, share=(1, 3), seed=8, echo=3)
    loader, batches = shared(packed, 1, echo=3), iter(plain)
    next(batches)
    state = plain.state_dict()
    assert state["echo_position"] == 1
    loader.load_state_dict(state)
    assert len(loader) == 15
    for _ in zip(range(2), batches, strict=False):
        pass
    with pytest.raises(StateError, match=r"within an epoch of changing shares.*has fixed shares.*cache=.host. or None"):
        loader.load_state_dict(plain.state_dict())
    assert len(list(batches)) == 12
    loader.load_state_dict(plain.state_dict())
    assert loader.epoch == 1 and len(list(loader)) == 15
