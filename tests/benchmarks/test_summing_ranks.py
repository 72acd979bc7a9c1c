"""Whatever way ranks add up their tensors in benchmarks/parallel_comm.py, the sum is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from summing_ranks import LENGTHS, SIZE, breakdown

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def ranks(warm_python, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("summed")
    warm_python.finish(HERE / "summing_ranks.py", folder, cwd=folder)
    return [torch.load(folder / f"summed.{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.parametrize("way", ["ring_all_reduce", "reduce_then_broadcast", "all_to_all_sum"])
def test_every_rank_has_the_sum_of_all(ranks, way):
    for number, length in enumerate(LENGTHS):
        total = sum(torch.arange(length, dtype=torch.float32) * (rank + 1) + rank for rank in range(SIZE))
        for rank in ranks:
            assert torch.equal(rank["sums"][way][number], total)


@pytest.mark.parametrize("hook", ["overlap", "delayed"])
def test_gradients_are_those_of_ddp_whenever_they_are_reduced(ranks, hook):
    for rank in ranks:
        assert rank["buckets"][hook] > 2
        for found, wanted in zip(rank["gradients"][hook], rank["gradients"]["ddp"], strict=True):
            assert torch.equal(found, wanted)


def test_what_is_hidden_behind_backward_and_what_is_exposed():
    # Three buckets are reduced from 1 to 1.5, 2 to 4 and 3 to 5 seconds; the last gradient is there after 3.
    figures = breakdown([1.0, 2.0, 3.0], [1.5, 4.0, 5.0], 5.25)
    assert figures == {
        "compute": 3.0, "backward": 5.25, "reducing": 3.5, "hidden": 1.5, "exposed": 2.0, "last": 2.0
    }  # fmt: skip
    # Those before the last may be done after it.
    assert breakdown([1.0, 2.0], [4.0, 3.0], 4.0)["exposed"] == 2.0
    # Delayed, they all start together, and nothing is hidden.
    assert breakdown([3.0, 3.0], [4.0, 5.0], 5.0)["hidden"] == 0.0
    assert breakdown([], [], 2.0) == {"compute": 2.0, "backward": 2.0}
