"""Stages that say where they stand, restored: after each step, elsewhere, by others."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from check_resume import check_resume, run, through_torch
from child_processes import run_together
from torch.utils.data import TensorDataset

from fastload import ChunkWindow, FastLoader, MixedEcho, PackedDataset
from fastload.transforms import Normalize, RandomHorizontalFlip

N, SHAPE = 52, (6, 5, 3)
PACKED = {
    "rows": N, "size": SHAPE, "seed": 5, "classes": "abcdefg", "chunk_rows": 6, "splits": {"train": 33, "val": 19}
}  # fmt: skip


def fresh(loader):
    return loader.stats.fresh_samples


# Name: what makes the stage from a packed file. A stage in another module gets its line here, or calls check_resume.
STAGES = {
    "full": lambda path: FastLoader(path, 7, shuffle="full", seed=4),
    "chunk": lambda path: FastLoader(path, 7, shuffle="chunk", seed=4),
    "windows of 2": lambda path: FastLoader(path, 8, shuffle=ChunkWindow(2), ends="pad"),
    "in file order": lambda path: FastLoader(path, 9, shuffle=False),
    "exact": lambda path: FastLoader(path, 9, shuffle="full", ends="exact", workers=2),
    "one sample a batch, batches read in groups": lambda path: FastLoader(path, 2, shuffle="chunk", workers=1),
    "one batch": lambda path: FastLoader(path, 52, shuffle="full"),
    "pread": lambda path: FastLoader(PackedDataset(path, read="pread"), 7),
    "echo": lambda path: FastLoader(path, 12, echo=2, transform=[RandomHorizontalFlip()]),
    "echo exact, first of 3": lambda path: FastLoader(path, 7, echo=3, ends="exact", share=(0, 3)),
    "mixed echo": lambda path: FastLoader(path, 7, echo=MixedEcho(2), transform=[RandomHorizontalFlip()]),
    "mixed echo, 3 uses 2 batches apart": lambda path: FastLoader(
        path, 7, echo=MixedEcho(3, 2), ends="exact", transform=[RandomHorizontalFlip()]
    ),
    "mixed echo of fewer batches than the window": lambda path: FastLoader(path, 9, echo=MixedEcho(2, 8), share=(0, 2)),
    "mixed echo of one batch": lambda path: FastLoader(path, 52, echo=MixedEcho(3), shuffle="full"),
    "last of 3": lambda path: FastLoader(path, 4, shuffle="chunk", share=(2, 3)),
    "a rank that has only repeats": lambda path: FastLoader(path, 3, shuffle="full", ends="exact", share=(59, 60)),
    "a split": lambda path: FastLoader(PackedDataset(path, split="val", fields=["row", "valid", "images"]), 4),
    "a subset": lambda path: FastLoader(PackedDataset(path).select([5, 3, 3, 40, 51, 8, 0]), 2, ends="exact"),
    "normalized": lambda path: FastLoader(
        path, 11, transform=[RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3, dtype=torch.bfloat16)]
    ),
}


@pytest.mark.parametrize("name", [*STAGES, "compressed"])
def test_a_stage_stopped_after_any_step_goes_on_as_if_it_never_stopped(packed, compressed, name):
    make, path = (STAGES["chunk"], compressed) if name == "compressed" else (STAGES[name], packed)
    check_resume(lambda: make(path), fresh=fresh)


def noisy(sample):
    """What users' code does: it draws from the global random states."""
    image, label = sample
    drawn = torch.randint(0, 256, (1,), dtype=torch.uint8), random.random()
    return image ^ drawn[0], label, drawn[1], np.random.default_rng(np.random.randint(99)).random()  # noqa: NPY002


# Stages with worker processes: what makes them, and the batches after which they are stopped.
PROCESS_STAGES = {
    "a transform": (lambda path: FastLoader(PackedDataset(path, transform=noisy), 9, workers=2), (0, 1, 5)),
    "a transform, echo": (
        lambda path: FastLoader(PackedDataset(path, transform=noisy), 20, echo=2, ends="exact", workers=1),
        (1, 4, 6),
    ),
    "a transform, mixed echo": (
        lambda path: FastLoader(PackedDataset(path, transform=noisy), 9, echo=MixedEcho(4), workers=1),
        (1, 9, 18),
    ),
    "a dataset of torch": (
        lambda path: FastLoader(TensorDataset(torch.arange(33), torch.arange(66).view(33, 2)), 8, workers=1),
        (0, 3, 4),
    ),
}


@pytest.mark.parametrize("name", PROCESS_STAGES)
def test_a_stage_with_worker_processes_goes_on_as_if_it_never_stopped(packed, name):
    make, stops = PROCESS_STAGES[name]
    check_resume(lambda: make(packed), stops=stops, fresh=fresh)


@pytest.mark.parametrize(
    ("python", "workers", "others", "stops"),
    [(None, 1, 4, None), (None, 3, 1, None), (noisy, 2, 1, (2,))],
)
def test_another_number_of_workers_goes_on_alike(packed, python, workers, others, stops):
    def make(workers):
        return FastLoader(PackedDataset(packed, transform=python), 9, shuffle="chunk", workers=workers)

    check_resume(lambda: make(workers), remake=lambda: make(others), stops=stops)


def test_a_script_that_resumes_after_the_last_batch_trains_no_epoch_twice(packed):
    trained = FastLoader(packed, 7, seed=3)
    expected = [[batch.rows.tolist() for batch in trained] for _ in range(4)]
    trained = FastLoader(packed, 7, seed=3)
    found = [[batch.rows.tolist() for batch in trained] for _ in range(2)]
    state, saved_epoch = trained.state_dict(), trained.epoch
    resumed = FastLoader(packed, 7, seed=3)
    resumed.load_state_dict(state)
    for epoch in range(saved_epoch, 4):
        resumed.set_epoch(epoch)
        assert len(resumed) == (0 if epoch == saved_epoch else len(expected[0]))
        found += [rows for rows in [[batch.rows.tolist() for batch in resumed]] if rows]
    assert found == expected
    # The state is used up: an epoch that is named again comes again, as in a loader that loaded none.
    for again in (resumed, trained):
        again.set_epoch(saved_epoch)
        assert [batch.rows.tolist() for batch in again] == expected[saved_epoch]
    unnamed = FastLoader(packed, 7, seed=3)
    unnamed.load_state_dict(state)
    assert [batch.rows.tolist() for batch in unnamed] == expected[2]


def test_a_state_goes_through_torch_save_and_a_load_of_weights_only(packed):
    check_resume(lambda: FastLoader(packed, 12, echo=2, shuffle="chunk"), through=through_torch)
    check_resume(lambda: FastLoader(packed, 12, shuffle=False), through=through_torch)
    check_resume(lambda: FastLoader(packed, 12, echo=MixedEcho(3)), through=through_torch)


# The user asked for one process by no_dist=True; torch says so all the same.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("shuffle", ["full", "chunk", False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_state_goes_through_a_distributed_checkpoint(packed, tmp_path, shuffle, whole):
    import torch.distributed.checkpoint as dcp  # 0.7 s of a CPU: each worker process imports this module

    def stopped(steps):
        loader = FastLoader(packed, 12, shuffle=shuffle, ends="exact")
        for number, _ in enumerate(loader if steps else (), 1):
            if number == steps:
                break
        return loader

    unbroken = run(stopped(0))
    for steps in (0, 2, 5):
        saved = stopped(steps)
        dcp.save({"loader": saved if whole else saved.state_dict()}, checkpoint_id=tmp_path / f"{steps}", no_dist=True)
        # Loading fills what a new loader of another state holds.
        loader = stopped(1)
        if whole:
            dcp.load({"loader": loader}, checkpoint_id=tmp_path / f"{steps}", no_dist=True)
        else:
            held = {"loader": loader.state_dict()}
            dcp.load(held, checkpoint_id=tmp_path / f"{steps}", no_dist=True)
            assert held["loader"] == saved.state_dict()
            loader.load_state_dict(held["loader"])
        if steps == 5:
            assert loader.epoch == 1
        else:
            assert run(loader) == unbroken[steps:]


# Other ranks, other batches


def part_of(packed, world_size, batch_size, state, steps, **options):
    """Rows that count of so many steps (None: all) on every rank, and the state after them; the ranks agree on it."""
    rows, states = [], []
    for rank in range(world_size):
        loader = FastLoader(packed, batch_size, share=(rank, world_size), **options)
        if state is not None:
            loader.load_state_dict(state)
        taken = 0
        if steps != 0:
            for taken, batch in enumerate(loader, 1):
                rows += batch.rows[batch.valid].tolist()
                if taken == steps:
                    break
        assert loader.stats.fresh_samples == loader.stats.consumed_samples
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    return rows, states[0]


@pytest.mark.parametrize("shuffle", ["full", ChunkWindow(2), False])
@pytest.mark.parametrize(
    ("ranks", "batch_sizes"), [((2, 3, 2), (4, 4, 4)), ((1, 1, 1), (7, 4, 9)), ((2, 1, 2), (2, 9, 1))]
)
@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (1, 1), (2, 2), (4, 1), (5, 0), (6, 0)])
def test_2_ranks_then_3_then_2_and_other_batch_sizes_count_every_row_once(packed, shuffle, ranks, batch_sizes, steps):
    options = {"shuffle": shuffle, "ends": "exact", "seed": 3}
    rows, state = [], None
    for world_size, batch_size, part in zip(ranks, batch_sizes, (*steps, None), strict=True):
        more, state = part_of(packed, world_size, batch_size, state, part, **options)
        rows += more
    assert sorted(rows) == list(range(N))
    # The epoch is over for whoever comes next.
    loader = FastLoader(packed, 5, share=(0, 1), **options)
    loader.load_state_dict(state)
    assert loader.epoch == 1


@pytest.mark.parametrize("ends", ["drop", "pad"])
def test_other_ranks_take_no_dropped_row_twice_and_miss_no_padded_row(packed, ends):
    options = {"shuffle": "chunk", "ends": ends}
    rows, state = part_of(packed, 2, 5, None, 2, **options)
    more, state = part_of(packed, 3, 4, state, 1, **options)
    rest, _ = part_of(packed, 2, 6, state, None, **options)
    rows += more + rest
    if ends == "drop":
        assert len(rows) == len(set(rows)) == 20 + 12 + 12 < N
    else:
        assert set(rows) == set(range(N))


@pytest.mark.parametrize("echo", [3, MixedEcho(3), MixedEcho(2, 3)])
@pytest.mark.parametrize("other", [{"share": (0, 1)}, {"batch_size": 9}, {"echo": 2}, {"echo": MixedEcho(2, 2)}])
@pytest.mark.parametrize("stop", [1, 4, 8, 9])
def test_elsewhere_the_echoes_of_batches_in_use_are_left_out_and_no_row_is(packed, echo, other, stop):
    options = {"batch_size": 4, "shuffle": "full", "ends": "exact", "seed": 2}
    seen, states = [], []
    for rank in range(2):
        loader = FastLoader(packed, share=(rank, 2), echo=echo, **options)
        for _, batch in zip(range(stop), loader, strict=False):
            seen += batch.rows[batch.valid].tolist()
        states.append(loader.state_dict())
    assert states[0] == states[1]
    rest = []
    ranks = [(0, 1)] if "share" in other else [(0, 2), (1, 2)]
    for share in ranks:
        loader = FastLoader(packed, **(options | {"echo": echo, "share": share} | other))
        loader.load_state_dict(states[0])
        fresh_rows = [row for batch in loader for row in batch.rows[batch.valid].tolist()]
        assert loader.stats.fresh_samples == len(set(fresh_rows)) and loader.epoch == 0
        rest += fresh_rows
    # Each row before or after, none both before and after: what was in use is not read again.
    assert sorted({*seen, *rest}) == list(range(N)) and not {*seen} & {*rest}
    factor = loader.stats.echo
    assert len(rest) == factor * len(set(rest))


def test_elsewhere_an_epoch_whose_batches_were_all_used_once_is_over(packed):
    loader = FastLoader(packed, 13, echo=MixedEcho(2, 3))
    for _ in zip(range(6), loader, strict=False):
        pass
    state = loader.state_dict()
    same, other = FastLoader(packed, 13, echo=MixedEcho(2, 3)), FastLoader(packed, 13)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert (same.epoch, len(same)) == (0, 2) and (other.epoch, len(other)) == (1, 4)


OLD_STATE = {
    "version": 1,
    "seed": 0,
    "epoch": 2,
    "shuffle": ["window", 16],
    "ends": "drop",
    "echo": 3,
    "echo_position": 2,
    "segments": [[1, 12, 2], [1, 12, 0]],
}


def test_a_state_of_the_release_before_mixed_echo_goes_on_in_its_place(packed):
    options = {"shuffle": "chunk", "echo": 3, "transform": [RandomHorizontalFlip()]}
    unbroken = FastLoader(packed, 12, **options)
    unbroken.set_epoch(2)
    whole = run(unbroken)
    loader = FastLoader(packed, 12, **options)
    state = OLD_STATE | {"header_digest": loader.state_dict()["header_digest"]}
    assert state.keys() == loader.state_dict().keys()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert run(loader) == whole[2 * 3 + 2 :]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_within_the_loop_is_of_the_epoch_that_runs_also_when_the_next_one_is_chosen(packed, workers):
    whole = run(FastLoader(packed, 12, workers=workers))
    loader, states, plain = FastLoader(packed, 12, workers=workers), [], []
    for _ in loader:
        plain.append(loader.state_dict())
        loader.set_epoch(5)
        states.append(loader.state_dict())
        assert loader.epoch == 5
    assert states == plain and [state["epoch"] for state in states] == [0] * len(whole)
    assert loader.state_dict()["epoch"] == 5
    for done, state in enumerate(states[:-1], 1):
        resumed = FastLoader(packed, 12, workers=workers)
        resumed.load_state_dict(state)
        assert run(resumed) == whole[done:]
    for _ in loader:
        break
    loader.set_epoch(7)
    assert loader.state_dict()["epoch"] == 7, "the loop was left"


def kernel_read_bytes():
    """Bytes that this process, all its threads together, was given by read system calls."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this kernel does not count what a process reads")
def test_no_chunk_is_read_again_for_what_is_done(tmp_path):
    # Chunks that do not compress come through one read call each; reads of plain files are not all counted.
    pixels = np.random.default_rng(0).integers(0, 256, (512, 64, 64, 3), dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=pixels, chunks=(4, 64, 64, 3), compression="gzip", compression_opts=1)

    def loader():
        return FastLoader(tmp_path / "a.h5", 4, shuffle="chunk", ends="exact", workers=1)

    before, states = kernel_read_bytes(), []
    stage = loader()
    for _ in stage:
        states.append(stage.state_dict())
    whole = kernel_read_bytes() - before
    assert whole >= pixels.nbytes
    resumed = loader()
    resumed.load_state_dict(states[-2])
    before = kernel_read_bytes()
    assert len(list(resumed)) == 1
    # Its 4 rows lie in at most 4 of the 128 chunks; the next epoch's first batches are read ahead.
    assert kernel_read_bytes() - before < whole / 2


# Another process

ELSEWHERE = """
import json, sys
from fastload import FastLoader
path, states, out = sys.argv[1:]
runs = []
for case in json.load(open(states)):
    loader = FastLoader(path, **case["options"])
    loader.load_state_dict(case["state"])
    batches = [[batch.rows.tolist(), batch.valid.tolist(), batch[0].sum().item()] for batch in loader]
    runs.append({"batches": batches, "fresh": loader.stats.fresh_samples, "state": loader.state_dict()})
json.dump(runs, open(out, "w"))
"""


def test_a_new_process_goes_on_with_as_many_workers_or_others(packed, tmp_path):
    options = {"batch_size": 6, "shuffle": "chunk", "ends": "exact", "seed": 1}
    unbroken = FastLoader(packed, **options)
    whole = [[batch.rows.tolist(), batch.valid.tolist(), batch[0].sum().item()] for batch in unbroken]
    loader = FastLoader(packed, **options)
    for _ in zip(range(4), loader, strict=False):
        pass
    cases = [{"options": options | more, "state": loader.state_dict()} for more in ({}, {"workers": 3})]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = ["-c", ELSEWHERE, packed, tmp_path / "cases.json", tmp_path / "runs.json"]
    run_together([command], tmp_path)
    for done in json.loads((tmp_path / "runs.json").read_text()):
        assert done == {"batches": whole[4:], "fresh": N - 24, "state": unbroken.state_dict()}
