"""Samplers in a plain DataLoader: the plan's orders, equal shares, workers in windows of their own, resume."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import pickle
import time
from collections import Counter

import h5py
import numpy as np
import pytest
import torch
from check_resume import check_resume
from child_processes import in_a_fork
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import pages_in_memory, random_pixels, write_foreign
from torch.utils.data import DataLoader, DistributedSampler, Subset

from fastload import (
    ChunkBatchSampler,
    ChunkSampler,
    ChunkWindow,
    DistributedChunkSampler,
    EpochPlan,
    FastLoader,
    PackedDataset,
)
from fastload.errors import FileChangedError, OptionError, ShareError, StateError
from fastload.format.chunk_filters import FilteredChunks
from fastload.system.files import drop
from sample_files import write_packed

ROWS, CHUNK, TRAIN = 103, 8, 70
PACKED = {
    "rows": ROWS, "size": (6, 5, 3), "seed": 5, "chunk_rows": CHUNK, "splits": {"train": TRAIN, "val": ROWS - TRAIN}
}  # fmt: skip
SHUFFLES = [True, "full", "chunk", ChunkWindow(2), False]
MAKERS = {
    "all": ChunkSampler,
    "a rank": lambda dataset, **options: DistributedChunkSampler(dataset, 2, 1, **options),
    "batches": lambda dataset, **options: ChunkBatchSampler(dataset, 4, num_workers=3, **options),
    "batches of a rank": lambda dataset, **options: ChunkBatchSampler(
        dataset, 4, num_workers=3, num_replicas=2, rank=1, **options
    ),
}
each_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture(scope="module")
def train(packed):
    return PackedDataset(packed, split="train", fields=["images", "row"])


@pytest.fixture(scope="module")
def val(packed):
    return PackedDataset(packed, split="val", fields=["images", "row"])


def planned(dataset, epoch=0, **options):
    """Of the same epoch, what the plan says."""
    options = {"shuffle": ChunkWindow(), "ends": "pad"} | options
    return EpochPlan(dataset.rows, chunk_rows=CHUNK, epoch=epoch, **options)


def positions(plan, rank, start):
    return [row - start for batch in plan.batches(rank) for row in batch.rows.tolist()]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_global_order_is_the_plans_in_every_epoch(val, shuffle):
    sampler = ChunkSampler(val, shuffle, seed=3)
    resolved = ChunkWindow() if shuffle in (True, "chunk") else shuffle
    for epoch in range(3):
        drawn = list(sampler)
        assert sampler.epoch == epoch
        assert drawn == positions(planned(val, epoch, shuffle=resolved, seed=3), 0, TRAIN)
        assert sorted(drawn) == list(range(ROWS - TRAIN)) and set(map(type, drawn)) == {int}
    sampler.set_epoch(1)
    assert list(sampler) == positions(planned(val, 1, shuffle=resolved, seed=3), 0, TRAIN)


def test_a_selection_has_no_chunks_and_is_drawn_by_its_own_positions(train):
    subset = train.select([5, 60, 7, 7, 30])
    drawn = list(ChunkSampler(subset))
    assert drawn == list(EpochPlan(range(5), shuffle="full").rows_at(0, np.arange(5)))
    rows = [row for _, batch in DataLoader(subset, 2, sampler=ChunkSampler(subset)) for row in batch.tolist()]
    assert rows == [[5, 60, 7, 7, 30][position] for position in drawn]
    with pytest.raises(OptionError, match="chunk"):
        ChunkSampler(subset, "chunk")
    assert list(ChunkSampler(train.select([]))) == [] == list(DistributedChunkSampler(train.select([]), 2, 0))


@pytest.mark.parametrize("shuffle", [True, False, "full"])
def test_ranks_beyond_the_samples_repeat_different_ones(train, shuffle):
    samplers = [DistributedChunkSampler(train.select(range(13)), 20, rank, shuffle, 3) for rank in range(20)]
    drawn = [row for sampler in samplers for row in sampler]
    assert sorted(np.bincount(drawn)) == [1] * 6 + [2] * 7


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_gets_the_right_pixels(val, pixels, workers):
    # One loader for all three: processes are started three times as it is.
    samplers = [
        {"sampler": ChunkSampler(val, ChunkWindow(2)), "batch_size": 7},
        {"sampler": DistributedChunkSampler(val, 2, 1), "batch_size": 7},
        {"batch_sampler": ChunkBatchSampler(val, 7, num_workers=workers)},
    ]
    for options, count in zip(samplers, [33, 17, 33], strict=True):
        loader = DataLoader(val, num_workers=workers, **options)
        seen = []
        for images, rows in loader:
            assert torch.equal(images, torch.from_numpy(pixels[rows]).permute(0, 3, 1, 2))
            seen += rows.tolist()
        assert len(seen) == count and set(seen) <= set(range(TRAIN, ROWS))
        assert len(loader) == {33: 5, 17: 3}[count] + (workers == 2 and "batch_sampler" in options)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_share_of_a_rank_is_the_plans_and_torchs_attributes_are_there(train, shuffle, drop_last):
    resolved = ChunkWindow() if shuffle in (True, "chunk") else shuffle
    for rank in range(3):
        ours = DistributedChunkSampler(train, 3, rank, shuffle, 9, drop_last)
        torchs = DistributedSampler(train, 3, rank, bool(shuffle), 9, drop_last)
        assert isinstance(ours, DistributedSampler)
        for name in ("num_replicas", "rank", "epoch", "num_samples", "total_size", "seed", "drop_last"):
            assert getattr(ours, name) == getattr(torchs, name), name
        assert ours.shuffle == shuffle and len(ours) == len(torchs) == len(list(ours)) == ours.num_samples
        options = {"shuffle": resolved, "seed": 9, "world_size": 3, "ends": "drop" if drop_last else "pad"}
        first, fifth = (positions(planned(train, epoch, **options), rank, 0) for epoch in (0, 4))
        assert list(ours) == first == list(ours), "without set_epoch the order is the same"
        ours.set_epoch(4)
        assert list(ours) == fifth and ours.epoch == 4


@settings(max_examples=6 * settings.default.max_examples)
@given(
    size=st.integers(1, TRAIN), world_size=st.integers(2, 4), drop_last=st.booleans(), epoch=st.integers(0, 3),
    shuffle=st.sampled_from(["full", False, ChunkWindow(1), ChunkWindow(3)]),
)  # fmt: skip
def test_ranks_draw_equal_shares_that_cover_every_row(train, size, world_size, drop_last, epoch, shuffle):
    dataset = train
    if not isinstance(shuffle, ChunkWindow):
        dataset = dataset.select(range(size))
    if drop_last and len(dataset) < world_size:
        with pytest.raises(OptionError, match="leave none for each"):
            DistributedChunkSampler(dataset, world_size, 0, shuffle, drop_last=True)
        return
    shares = []
    for rank in range(world_size):
        sampler = DistributedChunkSampler(dataset, world_size, rank, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    assert {len(share) for share in shares} == {sampler.num_samples}
    counts = Counter(itertools.chain(*shares))
    if drop_last:
        assert set(counts.values()) == {1} and len(dataset) - len(counts) < world_size
    else:
        assert set(counts) == set(range(len(dataset))) and counts.total() - len(dataset) < world_size


@settings(max_examples=6 * settings.default.max_examples)
@given(
    size=st.integers(1, TRAIN), ranks=st.integers(1, 3), workers=st.integers(0, 4), batch_size=st.integers(1, 20),
    shuffle=st.sampled_from(["full", False]), drop_last=st.booleans(),
)  # fmt: skip
def test_batches_of_all_ranks_and_workers_cover_every_row(train, size, ranks, workers, batch_size, shuffle, drop_last):
    dataset = train.select(range(size))
    options = {"num_workers": workers, "shuffle": shuffle, "drop_last": drop_last, "num_replicas": ranks}
    cut = ranks * max(1, workers)
    if drop_last and size // cut < batch_size:
        with pytest.raises(OptionError, match=f"{size} samples do not make one batch of {batch_size}"):
            ChunkBatchSampler(dataset, batch_size, rank=0, **options)
        return
    samplers = [ChunkBatchSampler(dataset, batch_size, rank=rank, **options) for rank in range(ranks)]
    lengths = {len(sampler) for sampler in samplers}
    drawn = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in drawn} == lengths and len(lengths) == 1
    assert all(0 < len(batch) <= batch_size for batches in drawn for batch in batches)
    counts = Counter(itertools.chain.from_iterable(itertools.chain(*drawn)))
    if drop_last:
        assert set(counts.values()) == {1} and {len(batch) for batches in drawn for batch in batches} == {batch_size}
        assert size - len(counts) < cut * batch_size
    else:
        assert set(counts) == set(range(size))
        assert counts.total() - size < (cut if ranks > 1 else 1)
        assert len({tuple(map(len, batches)) for batches in drawn}) == 1


def test_batch_k_comes_from_the_share_of_worker_k_modulo_workers(train):
    for rank in range(2):
        sampler = ChunkBatchSampler(
            train, 4, num_workers=3, shuffle=ChunkWindow(1), drop_last=True, num_replicas=2, rank=rank
        )
        plan = planned(train, shuffle=ChunkWindow(1), world_size=6, batch_size=4, ends="drop")
        for number, batch in enumerate(sampler):
            assert batch == plan.batch(rank * 3 + number % 3, number // 3).rows.tolist()
        assert number + 1 == len(sampler) == 3 * plan.num_steps


def note_decoded_chunks(folder):
    """A worker_init_fn: each worker writes down which chunks it decodes."""

    def patch(worker):
        original = FilteredChunks.rows

        def rows(self, fd, number):
            with open(folder / f"worker.{worker}", "a") as file:
                print(number, file=file)
            return original(self, fd, number)

        FilteredChunks.rows = rows

    return patch


@pytest.mark.parametrize("by_batches", [True, False])
def test_each_chunk_of_a_compressed_file_is_decoded_by_one_worker(tmp_path, by_batches):
    data = random_pixels(400, (6, 5, 3), below=4)
    dataset = PackedDataset(write_foreign(tmp_path / "a.h5", data, chunk_rows=8), fields=["images", "row"])
    options = {"batch_sampler": ChunkBatchSampler(dataset, 10, num_workers=2, shuffle=ChunkWindow(3))}
    if not by_batches:
        options = {"sampler": ChunkSampler(dataset, ChunkWindow(3)), "batch_size": 10}
    loader = DataLoader(dataset, num_workers=2, worker_init_fn=note_decoded_chunks(tmp_path), **options)
    seen = []
    for images, rows in loader:
        assert torch.equal(images, torch.from_numpy(data[rows]).permute(0, 3, 1, 2))
        seen += rows.tolist()
    assert sorted(seen) == list(range(400))
    decoded = [[int(line) for line in (tmp_path / f"worker.{worker}").read_text().split()] for worker in range(2)]
    assert set(decoded[0]) | set(decoded[1]) == set(range(50))
    shared = set(decoded[0]) & set(decoded[1])
    if by_batches:
        assert len(shared) <= 1
        assert all(len(chunks) == len(set(chunks)) for chunks in decoded), "some chunk was decoded twice"
    else:
        assert len(shared) > 40, "with batches in turn from one order both workers decode nearly all"


def test_unfiltered_chunks_are_read_whole_once_a_sampler_said_that_it_draws_in_windows(tmp_path, monkeypatch):
    data = np.random.default_rng(3).integers(0, 256, (40, 256, 128, 4), dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("images", shape=data.shape, chunks=(20, 256, 128, 4), dtype=np.uint8)
        images[20:], images[:20] = data[20:], data[:20]  # not back to back in the file
    parts, original = [], h5py.Dataset.read_direct
    monkeypatch.setattr(h5py.Dataset, "read_direct", lambda self, *args: (parts.append(args[1]), original(self, *args)))
    dataset = PackedDataset(tmp_path / "a.h5")
    dataset[7]
    ChunkSampler(dataset, ChunkWindow(16))
    assert np.array_equal(dataset[7][0].permute(1, 2, 0), data[7])
    assert [part.stop - part.start for part in parts] == [2, 20]


# Resume.


@pytest.mark.parametrize("shuffle", ["full", ChunkWindow(2), False])
def test_a_sampler_resumes_at_every_sample(val, shuffle):
    check_resume(lambda: ChunkSampler(val, shuffle, seed=2))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("workers", "batch_size", "ranks"), [(0, 4, 1), (2, 4, 1), (3, 2, 1), (3, 5, 2), (2, 16, 1)])
def test_batches_resume_at_every_batch(val, workers, batch_size, ranks, drop_last):
    def make():
        return ChunkBatchSampler(
            val, batch_size, num_workers=workers, shuffle=ChunkWindow(2), drop_last=drop_last, num_replicas=ranks,
            rank=ranks - 1,
        )  # fmt: skip

    check_resume(make)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", ["full", ChunkWindow(2), False])
def test_a_rank_resumes_at_every_sample(val, shuffle, drop_last):
    for rank in (0, 1):
        sampler = DistributedChunkSampler(val, 2, rank, shuffle, 1, drop_last)
        sampler.set_epoch(3)
        whole = list(sampler)
        for stop in range(len(whole)):
            sampler.set_epoch(3)
            before = list(itertools.islice(sampler, stop))
            state = json.loads(json.dumps(sampler.state_dict()))
            resumed = DistributedChunkSampler(val, 2, rank, shuffle, 1, drop_last)
            resumed.load_state_dict(state)
            assert resumed.epoch == 3 and len(resumed) == len(whole) - stop
            if stop + 1 < len(whole):
                assert next(iter(resumed)) == whole[stop], "a look inside loses nothing"
            resumed.set_epoch(3)
            assert before + list(resumed) == whole
            assert len(resumed) == len(whole) and list(resumed) == whole, "the rest is drawn once"


@each_sampler
def test_an_epoch_stopped_again_and_again_is_the_same_epoch(val, make):
    sampler = make(val)
    whole, drawn, state = list(sampler), [], make(val).state_dict()
    for _ in range(len(whole)):
        sampler = make(val)
        sampler.load_state_dict(state)
        sampler.set_epoch(0)
        drawn.append(next(iter(sampler)))
        state = sampler.state_dict()
    assert drawn == whole
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert len(sampler) == 0


def test_a_finished_epoch_is_followed_by_the_next_unless_it_is_named_again(val):
    sampler = DistributedChunkSampler(val, 2, 0)
    list(sampler)
    resumed = DistributedChunkSampler(val, 2, 0)
    resumed.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert resumed.epoch == 1 and list(resumed) == list(sampler)
    resumed.load_state_dict(DistributedChunkSampler(val, 2, 0).state_dict() | {"segments": [[2, 1, 17]]})
    resumed.set_epoch(0)
    assert list(resumed) == [] and len(resumed) == 0
    resumed.set_epoch(1)
    assert len(resumed) == 17
    alone = ChunkSampler(val)
    list(alone)
    state = alone.state_dict()
    alone.load_state_dict(state)
    alone.set_epoch(0)
    assert len(alone) == 0 and list(alone) == [] and len(list(alone)) == 33


def test_what_the_loop_consumed_counts_not_what_workers_were_given_ahead(val):
    sampler = ChunkSampler(val)
    loader = DataLoader(val, batch_size=4, sampler=sampler, num_workers=1)
    before, state = [], None
    for step, (_, rows) in enumerate(loader, 1):
        before += rows.tolist()
        if step == 3:
            assert sampler.state_dict()["segments"] != [[1, 1, 12]], "workers draw ahead"
            state = sampler.state_dict(samples_done=step * 4)
            break
    assert state["segments"] == [[1, 1, 12]]
    resumed = ChunkSampler(val)
    resumed.load_state_dict(state)
    assert len(resumed) == 21 and sorted(before + [TRAIN + p for p in resumed]) == list(range(TRAIN, ROWS))
    # A short last batch may be counted as a whole one, and a resumed iteration counts from its own beginning.
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 21
    assert resumed.state_dict(samples_done=24)["segments"] == [[1, 1, 33]]
    assert resumed.state_dict(samples_done=8)["segments"] == [[1, 1, 20]]
    batches = ChunkBatchSampler(val, 4, num_workers=2)
    list(itertools.islice(batches, 5))
    assert batches.state_dict(batches_done=3)["batches_in_round"] == 1
    for bad in (6, -1, 1.0, True):
        with pytest.raises(OptionError, match="batches_done"):
            batches.state_dict(batches_done=bad)


@pytest.mark.parametrize("worlds", [(2, 3, 2), (3, 1, 4), (1, 2, 1)])
def test_other_numbers_of_ranks_continue_with_the_rows_not_yet_seen(train, worlds):
    counts, state = Counter(), None
    for world_size, stop in zip(worlds, (9, 7, None), strict=True):
        states = []
        for rank in range(world_size):
            sampler = DistributedChunkSampler(train, world_size, rank, ChunkWindow(2), drop_last=True)
            if state is not None:
                sampler.load_state_dict(state)
            counts.update(itertools.islice(sampler, stop))
            states.append(sampler.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0]
    assert set(counts.values()) == {1} and TRAIN - counts.total() < worlds[-1]


def test_a_fast_loader_reads_on_where_a_sampler_stopped(train):
    sampler, loader = ChunkSampler(train, seed=4), FastLoader(train, 10, seed=4, share=None)
    before = list(itertools.islice(sampler, 30))
    loader.load_state_dict(sampler.state_dict())
    rows = [row for batch in loader for row in batch.rows.tolist()]
    assert sorted(before + rows) == list(range(TRAIN))


@each_sampler
def test_a_sampler_is_pickled_in_the_middle_of_an_epoch(train, make):
    sampler = make(train)
    iterator = iter(sampler)
    before = [next(iterator) for _ in range(3)]
    again = pickle.loads(pickle.dumps(sampler))
    assert again.state_dict() == sampler.state_dict()
    fresh = make(train)
    fresh.load_state_dict(again.state_dict())
    assert before + list(fresh) == list(make(train)) == before + list(iterator)


# Announcing.


def open_descriptors(path):
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)


@pytest.mark.parametrize("batched", [False, True])
def test_drawing_makes_the_kernel_read_the_rows_that_come_next_except_in_file_order(tmp_path, batched):
    path = write_packed(tmp_path / "cold.h5", np.zeros((160, 512, 683, 3), np.uint8), chunk_rows=8)
    if drop(path) != 0:
        pytest.skip("this file system keeps its files in memory, or does not say")
    dataset = PackedDataset(path)
    before = open_descriptors(path)
    sampler = ChunkBatchSampler(dataset, 4, num_workers=2, shuffle="full") if batched else ChunkSampler(dataset, "full")
    iterator = iter(sampler)
    assert open_descriptors(path) == before, "nothing is opened before something is drawn"
    next(iterator)
    assert open_descriptors(path) > before
    images = dataset.file.fields["images"]
    last_pages = (images.offset + (np.arange(160) + 1) * images.row_bytes - 1) // mmap.PAGESIZE
    until = time.monotonic() + 120
    while (found := pages_in_memory(path)[last_pages].sum()) < 50 and time.monotonic() < until:
        time.sleep(0.02)
    assert 50 <= found < 110, "about 64 MiB ahead, not the file"
    del iterator
    gc.collect()
    assert open_descriptors(path) == before
    iterator = iter(ChunkSampler(dataset, shuffle=False))
    assert [next(iterator), next(iterator)] == [0, 1]
    assert open_descriptors(path) == before, "file order is left to the kernel"


def test_a_forked_child_may_draw_on_and_leaves_the_parent_its_own(train):
    iterator = iter(ChunkSampler(train, "full"))
    whole = list(ChunkSampler(train, "full"))
    assert next(iterator) == whole[0]

    def draw_on():
        assert list(iterator) == whole[1:]

    in_a_fork(draw_on)
    draw_on()


# Bad input.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: ChunkSampler(list(range(9))), r"not from a list\. Make one of the packed file"),
        (lambda d: DistributedChunkSampler(Subset(d, [1, 2]), 2, 0), r"Subset\. .*its select\(rows\)"),
        (lambda d: ChunkBatchSampler(torch.zeros(4), 2, num_workers=1), "from a Tensor"),
        (lambda d: ChunkSampler(d, shuffle="rows"), "shuffle='rows' is not known"),
        (lambda d: DistributedChunkSampler(d, 2, 0, shuffle=1), "shuffle=1 is not known"),
        (lambda d: ChunkSampler(d, seed=-1), "seed=-1"),
        (lambda d: DistributedChunkSampler(d, 2, 2), r"rank=2 is outside 0\.\.1"),
        (lambda d: DistributedChunkSampler(d, 2, -1), "rank=-1"),
        (lambda d: DistributedChunkSampler(d, 0, 0), "num_replicas=0"),
        (lambda d: DistributedChunkSampler(d, 71, 0, drop_last=True), "70 samples over 71 ranks leave none"),
        (lambda d: ChunkBatchSampler(d, 0, num_workers=1), "batch_size=0"),
        (lambda d: ChunkBatchSampler(d, 4, num_workers=-1), "num_workers=-1"),
        (lambda d: ChunkBatchSampler(d, 4, num_workers=1, rank=1), "give both or neither"),
        (lambda d: ChunkBatchSampler(d, 36, num_workers=2, drop_last=True), "70 samples do not make one batch of 36"),
        (lambda d: ChunkSampler(d).set_epoch(-1), "epoch=-1"),
        (lambda d: DistributedChunkSampler(d, 2, 0).set_epoch(1.5), "epoch=1.5"),
        (lambda d: DistributedChunkSampler(d), "init_process_group first, or give both"),
        (lambda d: DistributedChunkSampler(d, rank=0), "init_process_group first, or give both"),
        (lambda d: DistributedChunkSampler(d, 2), "init_process_group first, or give both"),
    ],
)
def test_arguments_without_meaning_are_refused_with_the_mend(train, make, message):
    with pytest.raises(ShareError if "process_group" in message else OptionError, match=message):
        make(train)


@each_sampler
def test_a_state_of_other_data_or_options_is_refused(train, val, make):
    state = make(train, seed=1).state_dict()
    for sampler, offered, message in (
        (make(val, seed=1), state, "header_digest"),
        (make(train.select(range(TRAIN)), seed=1, shuffle="full"), state, "header_digest"),
        (make(train, seed=2), state, "seed is 2 here and 1 in the state"),
        (make(train, seed=1, shuffle="full"), state, "shuffle"),
        (make(train, seed=1), state | {"version": 2, "more": 1}, r"version 2, .*install the release"),
    ):
        with pytest.raises(StateError, match=message):
            sampler.load_state_dict(offered)
    for damaged in (None, [], {}, "state", {**state, "epoch": -1}, state | {"segments": [[1, 1, 1000]]}):
        with pytest.raises(StateError):
            make(train, seed=1).load_state_dict(damaged)


def test_batches_of_other_workers_ranks_or_sizes_are_refused(train):
    sampler = ChunkBatchSampler(train, 4, num_workers=2, num_replicas=2, rank=0)
    list(itertools.islice(sampler, 3))
    state = sampler.state_dict()
    assert (state["num_workers"], state["batches_in_round"], state["segments"]) == (2, 1, [[4, 4, 1]])
    options = {"num_workers": 2, "num_replicas": 2, "batch_size": 4}
    for name, here in (("num_workers", 3), ("num_replicas", 3), ("batch_size", 5)):
        with pytest.raises(StateError, match=f"{name} is {here} here and {options[name]} in the state"):
            ChunkBatchSampler(train, rank=0, **options | {name: here}).load_state_dict(state)
    same = ChunkBatchSampler(train, rank=0, **options)
    with pytest.raises(StateError, match="is not what a ChunkBatchSampler"):
        same.load_state_dict(ChunkSampler(train).state_dict())
    for damage in ({"batches_in_round": 2}, {"batches_in_round": "1"}, {"segments": [[3, 4, 1]]}):
        with pytest.raises(StateError, match="damaged"):
            same.load_state_dict(state | damage)
    with pytest.raises(StateError, match="unknown"):
        ChunkSampler(train).load_state_dict(state)


def test_a_file_that_is_replaced_is_named_when_an_epoch_begins(tmp_path, pixels):
    path = write_packed(tmp_path / "a.h5", pixels)
    sampler = ChunkSampler(PackedDataset(path), "full")
    next(iter(sampler))
    write_packed(path, pixels[:50])
    with pytest.raises(FileChangedError, match=r"a\.h5"):
        next(iter(sampler))


def test_batches_know_their_rank_from_the_environment(val, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="rank 1 of 2"):
        sampler = ChunkBatchSampler(val, 4, num_workers=2, seed=1)
    assert list(sampler) == list(ChunkBatchSampler(val, 4, num_workers=2, seed=1, num_replicas=2, rank=1))
