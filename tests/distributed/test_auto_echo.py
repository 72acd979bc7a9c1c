"""echo="auto" on two ranks of a real process group, one of them slow: equal steps in every epoch, and no deadlock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from child_processes import run_together

HERE = Path(__file__).resolve().parent
LIMIT_S = 600
BATCHES = 12


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two processes reports; see two_ranks.py."""
    folder = tmp_path_factory.mktemp("auto")
    run_together([[HERE / "two_ranks.py", rank, folder] for rank in range(2)], folder)
    return [json.loads((folder / f"echo.{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_take_equal_steps_in_every_epoch_and_echo_more_than_once(ranks):
    first, second = (of_rank["epochs"] for of_rank in ranks)
    for mine, other in zip(first, second, strict=True):
        assert {**mine, "state": None} == {**other, "state": None}
        assert mine["length"] == BATCHES * mine["echo"]
    assert [of_epoch["steps"] for of_epoch in first] == [
        15 if number == 2 else of_epoch["length"] for number, of_epoch in enumerate(first)
    ]
    echoes = [of_epoch["echo"] for of_epoch in first]
    assert echoes[0] == 1 and max(echoes) > 1
    assert [of_epoch["epoch"] for of_epoch in first] == [0, 1, 2, 3, 40, 50]


def test_the_fast_rank_knows_that_the_slow_one_asked_for_it(ranks):
    assert "another rank needs" in ranks[0]["said"][0]
    assert "another rank needs" not in ranks[1]["said"][0] and "a fresh batch takes" in ranks[1]["said"][0]
    assert len(ranks[0]["said"]) == len(ranks[1]["said"])


def test_the_state_is_the_same_on_both_ranks_and_holds_the_coming_factor(ranks):
    assert ranks[0]["state"] == ranks[1]["state"]
    kind, echo, following = ranks[0]["state"]["echo"]
    assert kind == "auto" and echo == ranks[0]["epochs"][-1]["echo"]
    assert ranks[0]["resumed"] == ranks[1]["resumed"] == BATCHES * following
    assert ranks[0]["epochs"][3]["state"]["echo"][2] == ranks[0]["epochs"][4]["echo"]


def test_another_share_than_the_groups_is_refused(ranks):
    for rank, of_rank in enumerate(ranks):
        assert f"rank {rank} of 3, the process group says (rank, world size) = ({rank}, 2)" in of_rank["errors"][0]
