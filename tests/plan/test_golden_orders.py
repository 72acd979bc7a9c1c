"""Orders that must never drift: a saved state names rows only by them, and papers quote seeds.

A test that fails here means that every state saved by an earlier release would continue with other rows. Change the
order only together with the version of the state.
"""

from __future__ import annotations

import hashlib

import pytest

from fastload.plan import ChunkWindow, EpochPlan

LAST = 2**64 - 1

# (rows, other options, rows of each batch of each rank)
SHORT = [
    (range(9), {"shuffle": False, "world_size": 2, "batch_size": 3, "ends": "pad"},
     [[[0, 1, 2], [3, 4, 0]], [[5, 6, 7], [8, 5, 6]]]),
    (range(9), {"shuffle": "full", "batch_size": 4, "ends": "pad"},
     [[[2, 7, 6, 3], [0, 1, 4, 8], [5, 2, 7, 6]]]),
    (range(9), {"shuffle": "full", "epoch": 1, "batch_size": 4, "ends": "pad"},
     [[[7, 3, 1, 6], [8, 5, 2, 4], [0, 7, 3, 1]]]),
    (range(9), {"shuffle": "full", "seed": 1, "world_size": 2, "batch_size": 2},
     [[[4, 2], [7, 8]], [[6, 3], [1, 5]]]),
    (range(5, 14), {"shuffle": "full", "seed": LAST, "epoch": LAST, "world_size": 2, "batch_size": 3, "ends": "pad"},
     [[[12, 10, 13], [5, 9, 12]], [[8, 7, 6], [11, 8, 7]]]),
    (range(2), {"shuffle": "full", "seed": 3, "world_size": 3, "batch_size": 2, "ends": "pad"},
     [[[1, 1]], [[0, 0]], [[1, 0]]]),
    (range(12), {"chunk_rows": 3, "shuffle": ChunkWindow(1), "batch_size": 6},
     [[[3, 5, 4, 2, 0, 1], [11, 9, 10, 7, 6, 8]]]),
    (range(12), {"chunk_rows": 3, "shuffle": ChunkWindow(2), "batch_size": 6},
     [[[5, 3, 2, 0, 1, 4], [9, 10, 6, 11, 8, 7]]]),
    (range(12), {"chunk_rows": 3, "shuffle": "chunk", "batch_size": 6},
     [[[0, 4, 10, 3, 8, 5], [2, 9, 6, 1, 7, 11]]]),
    (range(12), {"chunk_rows": 3, "shuffle": "chunk", "epoch": 3, "world_size": 2, "batch_size": 3},
     [[[1, 5, 3], [4, 0, 2]], [[6, 11, 10], [9, 7, 8]]]),
    (range(2, 13),
     {"chunk_rows": 4, "shuffle": ChunkWindow(2), "seed": 9, "epoch": 1, "world_size": 2, "batch_size": 4,
      "ends": "pad"},
     [[[5, 11, 9, 10], [8, 4, 5, 11]], [[6, 12, 7, 3], [2, 6, 12, 7]]]),
    (range(3, 14),
     {"shuffle": "full", "seed": 7, "epoch": 2, "world_size": 3, "batch_size": 2, "ends": "pad",
      "fixed_pieces": 3},
     [[[6, 5], [3, 4]], [[8, 9], [7, 10]], [[13, 11], [12, 13]]]),
    (range(24),
     {"chunk_rows": 3, "shuffle": ChunkWindow(2), "seed": 7, "world_size": 2, "batch_size": 6, "fixed_pieces": 2},
     [[[10, 3, 11, 4, 5, 9], [6, 2, 8, 1, 0, 7]], [[15, 20, 16, 19, 17, 18], [13, 12, 14, 22, 23, 21]]]),
    (range(3, 14),
     {"shuffle": "full", "seed": 7, "epoch": 2, "world_size": 4, "batch_size": 2, "ends": "pad",
      "fixed_pieces": 2},
     [[[8, 4], [6, 8]], [[3, 5], [7, 3]], [[12, 10], [11, 12]], [[9, 13], [9, 13]]]),
    (range(24),
     {"chunk_rows": 3, "shuffle": ChunkWindow(2), "seed": 7, "world_size": 4, "batch_size": 6, "fixed_pieces": 2},
     [[[10, 3, 11, 4, 5, 9]], [[6, 2, 8, 1, 0, 7]], [[15, 20, 16, 19, 17, 18]], [[13, 12, 14, 22, 23, 21]]]),
    (range(24),
     {"chunk_rows": 3, "shuffle": ChunkWindow(2), "seed": 7, "world_size": 3, "batch_size": 3,
      "segments": ((4, 3, 1),), "fixed_pieces": 3, "begun_pieces": 2},
     [[[4, 5, 9]], [[0, 7, 19]], [[18, 22, 23]]]),
    (range(14),
     {"shuffle": "full", "seed": 5, "world_size": 2, "batch_size": 2, "ends": "pad",
      "segments": ((2, 2, 1), (3, 2, 1))},
     [[[13, 8]], [[11, 7]]]),
    (range(14),
     {"chunk_rows": 4, "shuffle": ChunkWindow(2), "seed": 5, "epoch": 2, "world_size": 2, "batch_size": 2,
      "ends": "pad", "segments": ((2, 2, 1), (3, 1, 2))},
     [[[9, 10]], [[5, 12]]]),
    (range(14),
     {"chunk_rows": 4, "shuffle": ChunkWindow(2), "seed": 5, "epoch": 2, "world_size": 2, "batch_size": 2,
      "ends": "pad", "segments": ((2, 2, 2),)},
     [[[9, 10], [8, 1]], [[6, 13], [12, 3]]]),
]  # fmt: skip

# SHA-256 of the rows of every batch, rank by rank: 100,003 rows, so windows longer and shorter than what is planned
# at a time, and two changes of the world within the epoch.
LONG = {
    False: "9ec5cb9bc9d3b295",
    "full": "6f0642913782b130",
    ChunkWindow(1): "ccbf4a20a8b27252",
    ChunkWindow(16): "c231164fee84c470",
    ChunkWindow(1000): "ef04ac66e4b63ca2",
}


@pytest.mark.parametrize(("rows", "options", "golden"), SHORT)
def test_short_epochs_hold_the_rows_they_always_held(rows, options, golden):
    plan = EpochPlan(rows, **options)
    batches = [list(plan.batches(rank)) for rank in range(plan.world_size)]
    assert [[batch.rows.tolist() for batch in of_rank] for of_rank in batches] == golden
    if plan.ends == "pad":  # without its repeats
        plan = EpochPlan(rows, **options | {"ends": "exact"})
        exact = [[batch.rows.tolist() for batch in plan.batches(rank)] for rank in range(plan.world_size)]
        assert exact == [[batch.rows[: max(1, batch.valid.sum())].tolist() for batch in of_rank] for of_rank in batches]


@pytest.mark.parametrize("shuffle", LONG)
def test_a_long_epoch_cut_anew_twice_holds_the_rows_it_always_held(shuffle):
    plan = EpochPlan(
        range(1000, 101_003), chunk_rows=72, seed=11, epoch=4, world_size=3, batch_size=256, shuffle=shuffle,
        ends="pad", segments=((3, 256, 10), (2, 100, 7)),
    )  # fmt: skip
    digest = hashlib.sha256()
    for rank in range(3):
        for batch in plan.batches(rank):
            digest.update(batch.rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == LONG[shuffle]
