"""The next epoch is read ahead while the last batches of one are in use, and nobody can tell but by the time."""

from __future__ import annotations

import gc
import os
import time
import weakref

import numpy as np
import pytest
import torch
from child_processes import in_a_fork, run_python
from late_backend import Device
from small_files import write_random
from torch.utils.data import Dataset

from fastload.dataset import PackedDataset
from fastload.loader.loader import FastLoader
from fastload.prefetch import sample_worker
from fastload.prefetch.inputs import as_input
from fastload.prefetch.process_pool import PREFETCH
from fastload.prefetch.ring import SLACK, slot_bytes
from fastload.prefetch.sample_worker import BatchRequest, BatchResult, Filler
from fastload.prefetch.shared_memory import SharedMemory
from fastload.read.reader import Rows

N = 48
PACKED = {"rows": N, "size": (20, 16, 3), "seed": 1, "chunk_rows": 8}


def as_it_is(sample):
    return sample


class Noting(Dataset):
    """Samples that hold their index; each access is noted in a file. The bad one raises, from its second access on."""

    def __init__(self, path, bad=None):
        self.path, self.bad = str(path), bad

    def __len__(self):
        return N

    def __getitem__(self, index):
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, index.to_bytes(1, "little"))
        os.close(fd)
        if index == self.bad and self.seen().count(index) > 1:
            raise LookupError("cursed")
        return torch.full((3, 4, 4), index, dtype=torch.uint8), index

    def seen(self):
        with open(self.path, "rb") as file:
            return list(file.read())


def wait_until(condition):
    """Returns when it holds; the run's own limit ends it if it never does."""
    while not condition():
        time.sleep(0.002)


def flat(lists):
    return [row for rows in lists for row in rows]


def content(batch):
    return [batch.rows.tolist(), [field.tolist() for field in batch]]


@pytest.fixture
def read_rows(monkeypatch):
    """Rows that reading threads were asked for, a list for each request."""
    asked, gather = [], Rows.gather

    def noting(self, rows, outs):
        asked.append(rows.tolist())
        return gather(self, rows, outs)

    monkeypatch.setattr(Rows, "gather", noting)
    return asked


@pytest.mark.parametrize("device", [False, True])
def test_threads_read_the_next_epoch_while_nobody_asks_for_it(packed, read_rows, device):
    kwargs = {"workers": 1, "seed": 2, **({"device": Device()} if device else {})}
    loader = FastLoader(packed, 8, **kwargs)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
    # Six batches an epoch; three of the fourth epoch fit into the ring whatever the user holds.
    wait_until(lambda: len(read_rows) >= 3 * 6 + 2)
    ahead = read_rows[18:20]
    loader.set_epoch(3)
    assert [batch.rows.tolist() for batch in loader][:2] == ahead
    wait_until(lambda: len(read_rows) >= 4 * 6 + 2)
    assert len(read_rows) <= 4 * 6 + SLACK + 3, "none was read twice, and no more than there are slots"


def test_processes_make_the_next_epoch_while_nobody_asks_for_it(tmp_path):
    data = Noting(tmp_path / "seen")
    loader = FastLoader(data, 8, workers=2, seed=2)
    first = [batch.rows.tolist() for batch in loader]
    ahead = PREFETCH * 2 * 8
    wait_until(lambda: len(data.seen()) >= 1 + N + ahead)  # the first sample tells the layout of a slot
    loader.set_epoch(1)
    second = [batch.rows.tolist() for batch in loader]
    wait_until(lambda: len(data.seen()) >= 1 + 2 * N + ahead)
    assert len(data.seen()) == 1 + 2 * N + ahead, "none was made twice"
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(N)) and first != second
    loader.close()


def test_a_validation_loader_between_finds_the_training_loaders_batches_still_there(packed, read_rows):
    training, validation = FastLoader(packed, 8, workers=1, seed=2), FastLoader(packed, 8, workers=1, shuffle=False)
    list(training)
    list(validation)
    wait_until(lambda: len(read_rows) >= 2 * (6 + 2))
    before = len(read_rows)
    training.set_epoch(1)
    first = next(iter(training)).rows.tolist()
    assert first in read_rows[:before]


@pytest.mark.parametrize("kind", ["threads", "processes", "resumed"])
def test_no_plan_of_a_finished_epoch_is_kept(packed, kind):
    data = PackedDataset(packed, transform=as_it_is if kind == "processes" else None)
    # In file order, since in another one batches are planned far ahead, to be announced to the kernel.
    loader = FastLoader(data, 8, workers=1, shuffle=False)
    if kind == "resumed":
        loader.load_state_dict(loader.state_dict())
    plans = []
    for epoch in range(6):
        loader.set_epoch(epoch)
        assert len(list(loader)) == len(loader)
        plans.append(weakref.ref(loader._epochs.last.plan))
    gc.collect()
    assert [plan() is not None for plan in plans] == [False] * 5 + [True]
    loader.close()


def test_an_error_of_the_next_epoch_is_raised_in_its_turn(tmp_path):
    data = Noting(tmp_path / "seen", bad=5)
    loader = FastLoader(data, 8, workers=1, seed=2)
    assert len(list(loader)) == 6
    fresh = FastLoader(Noting(tmp_path / "other"), 8, workers=1, seed=2)
    fresh.set_epoch(1)
    good = 0
    for batch in fresh:
        if 5 in batch.rows.tolist():
            break
        good += 1
    fresh.close()
    found = 0
    with pytest.raises(Exception, match="cursed"):
        for _ in loader:
            found += 1
    assert found == good


def test_stats_and_memory_are_those_of_each_epoch(packed):
    loader, figures = FastLoader(packed, 8, workers=2), []
    for _ in range(4):
        for _ in loader:
            pass
        stats = loader.stats
        figures.append((stats.fresh_samples, stats.consumed_samples, stats.steps, stats.bytes_read))
    assert len(set(figures)) == 1
    assert len(loader._producer.pool.ring.slots) == SLACK + 2
    loader.close()


def test_of_an_epoch_that_is_left_no_more_is_made_than_was_asked_for(tmp_path):
    data = Noting(tmp_path / "seen")
    loader = FastLoader(data, 8, workers=2, seed=2)
    for _ in range(5):
        for _ in loader:
            break
    seen = len(data.seen())
    whole = [batch.rows.tolist() for batch in loader]
    assert sorted(flat(whole)) == list(range(N))
    assert seen <= 1 + 5 * 8 * (1 + PREFETCH * 2)
    loader.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loop_that_leaves_each_epoch_after_as_many_batches_finds_the_next_ones_ready(
    packed, tmp_path, read_rows, kind
):
    data, known = Noting(tmp_path / "seen"), []
    loader, fresh = (FastLoader(packed if kind == "threads" else data, 8, workers=1, seed=2) for _ in range(2))
    for epoch in range(12):
        fresh.set_epoch(epoch)
        known.append([batch.rows.tolist() for batch in fresh])
    fresh.close()
    read_rows.clear()
    open(data.path, "wb").close()

    def times_read(batch):
        return bytes(flat(read_rows) if kind == "threads" else data.seen()).count(bytes(batch))

    def left_after(count):
        found = []
        for batch in loader:
            found.append(batch.rows.tolist())
            if len(found) == count:
                break
        return found

    for epoch in range(3):
        assert left_after(2) == known[epoch][:2]
    wait_until(lambda: times_read(known[3][1]))  # while nobody asks for it
    assert not times_read(known[2][2]), "of the third epoch, which ended as the two before it, no more was read"
    for epoch in (3, 4):
        assert left_after(2) == known[epoch][:2] and times_read(known[epoch][0]) == 1
    # Whoever goes on gets the rest, and ends another time elsewhere.
    assert left_after(0) == known[5] and left_after(0) == known[6]
    assert left_after(2) == known[7][:2] and left_after(3) == known[8][:3] and left_after(2) == known[9][:2]
    # One pass that was left says nothing of the next one.
    batches = iter(loader)
    assert [next(batches).rows.tolist() for _ in range(2)] == known[10][:2]
    wait_until(lambda: times_read(known[10][2]) or times_read(known[11][0]))
    assert times_read(known[10][2])
    loader.close()


def test_epochs_that_are_left_early_lose_no_slot_and_add_none(tmp_path):
    loader = FastLoader(Noting(tmp_path / "seen"), 4, workers=2, seed=2)
    for last in (0, 2, 1, 0, 3, 0, 0, 0, 2, 5, 1):
        for number, _ in enumerate(loader):
            if number == last:
                break
        iter(loader)  # and one that nothing is taken of
    assert sorted(flat(batch.rows.tolist() for batch in loader)) == list(range(N))
    pool = loader._producer.pool
    assert len(pool.ring.slots) == SLACK + PREFETCH * 2 + 1

    def all_are_back():
        pool._receive_all()
        return not pool._asked

    wait_until(all_are_back)
    assert pool.ring.collect() == len(pool.ring.slots) - PREFETCH * 2, "the next epoch's batches have the others"
    loader.close()


def test_a_changed_file_is_noticed_though_its_batches_were_read_ahead(tmp_path):
    path = tmp_path / "a.h5"
    write_random(path, **PACKED)
    loader = FastLoader(path, 8, workers=1)
    list(loader)
    write_random(tmp_path / "b.h5", **PACKED | {"seed": 9})
    os.replace(tmp_path / "b.h5", path)
    with pytest.raises(Exception, match="replaced by another file"):
        iter(loader)


def test_what_nobody_waits_for_is_skipped_also_in_the_middle_of_a_batch():
    memory, wanted, made = SharedMemory(), SharedMemory(), []
    wanted.extend(sample_worker.control_bytes(2, N))
    newest = wanted.view(0, 8).view(np.int64)

    class Samples(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            made.append(index)
            if index == 2:
                newest[0] += 1  # the loop is left while this sample is made
            return torch.full((3, 4, 4), index, dtype=torch.uint8), index

    filler = Filler(as_input(Samples()), memory, wanted, batch_size=4)
    layout = filler[BatchRequest(-1, 0, stream=0, rows=np.arange(1))].layout
    memory.extend(slot_bytes(layout.slot_fields(4)))
    made.clear()
    newest[0] = 5
    request = BatchRequest(0, 0, stream=5, layout=layout, rows=np.arange(4))
    assert filler[request].skipped and made == [0, 1, 2]
    assert filler[request] == BatchResult(0, skipped=True) and made == [0, 1, 2]
    assert filler[request._replace(slot=-1, layout=None)] == BatchResult(-1, skipped=True) and made == [0, 1, 2]
    assert not filler[request._replace(rows=np.arange(3, 7), stream=6)].skipped and made == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kept", [False, True])
def test_what_nobody_waits_for_is_skipped_also_while_rows_are_gathered(packed, monkeypatch, kept):
    memory, wanted, asked = SharedMemory(), SharedMemory(), []
    wanted.extend(sample_worker.control_bytes(2, N))
    newest = wanted.view(0, 8).view(np.int64)
    held = []

    def holding(sample):
        held.extend([sample[0]] if kept and not held else [])
        newest[0] = 6 if len(held) and newest[0] == 5 else newest[0]
        return sample

    dataset = PackedDataset(packed, transform=holding)
    columns = PackedDataset.columns

    def noting(self, rows, into=None):
        asked.append(rows.tolist())
        if len(asked) == 2 and not kept:
            newest[0] = 6  # the loop is left meanwhile
        return columns(self, rows, into)

    filler = Filler(as_input(dataset), memory, wanted, batch_size=N)
    layout = filler[BatchRequest(-1, 0, stream=0, rows=np.arange(1))].layout
    memory.extend(2 * slot_bytes(layout.slot_fields(N)))
    monkeypatch.setattr(PackedDataset, "columns", noting)
    monkeypatch.setattr(sample_worker, "_GATHER_BYTES", 1)
    newest[0] = 5
    held.clear()
    request = BatchRequest(0, 0, stream=5, layout=layout, rows=np.arange(N))
    result = filler[request]
    assert result.skipped and result.kept == kept
    assert len(asked) == (3 if kept else 2), "sixteen rows at a time"
    again = filler[request._replace(stream=6)]
    assert not again.skipped
    # A slot that the transform still looks at is not written to, though the training process asks for it again.
    assert again.kept == kept and (again.layout is not None) == kept
    if kept:
        before = held[0].clone()
        assert torch.equal(again.fields["images"][0], before) and torch.equal(held[0], before)
    assert not filler[request._replace(stream=6, slot=1)].kept


def test_a_fork_that_drops_the_loader_leaves_the_workers_of_its_parent_at_work(packed):
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 4, workers=2, seed=3)
    fresh = FastLoader(packed, 4, seed=3)
    batches = iter(loader)
    found = [content(next(batches))]

    def drop():
        nonlocal loader, batches
        loader.close()
        del loader, batches
        gc.collect()

    in_a_fork(drop)
    found += [content(batch) for batch in batches]
    assert found == [content(batch) for batch in fresh]
    assert [content(batch) for batch in loader] == [content(batch) for batch in fresh]
    loader.close()


@pytest.mark.parametrize("last", ["pass", "it = iter(loader); next(it)", "handlers.append(loader.close)"])
def test_a_script_may_end_while_the_next_epoch_is_read(warm_python, packed, tmp_path, last):
    # A thread that the interpreter ends within a call of torch aborts the process.
    script = f"""
import atexit, sys

handlers = []
atexit.register(lambda: [handler() for handler in handlers])  # runs after those of modules imported later
from fastload import FastLoader
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

loader = FastLoader(sys.argv[1], 8, transform=[RandomResizedCrop(256), RandomHorizontalFlip()])
for batch in loader:
    pass
{last}
"""
    if "handlers" in last:
        run_python("-c", script, packed)  # its handler runs after those of torch as well
    (tmp_path / "script.py").write_text(script)
    for _ in range(2):
        done = warm_python.run(tmp_path / "script.py", packed, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
