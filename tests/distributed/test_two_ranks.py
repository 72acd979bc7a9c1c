"""Two ranks of a real process group, one of them slow and with less room: they decide alike, and nobody hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from two_ranks import BATCH_SIZE, CACHED_ROWS, ROW_BYTES, ROWS, write_file

SCRIPT = Path(__file__).with_name("two_ranks.py")
BATCHES = ROWS // BATCH_SIZE // 2


@pytest.fixture(scope="module")
def ranks(warm_python, tmp_path_factory) -> list[dict]:
    """What each of two processes reports; see two_ranks.py."""
    folder = tmp_path_factory.mktemp("two")
    write_file(folder / "a.h5")
    warm_python.finish(SCRIPT, folder, cwd=folder)
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(2)]


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


def test_all_rows_are_kept_where_every_rank_has_room_else_each_keeps_its_share_and_one_rank_warns(ranks):
    for rank, report in enumerate(ranks):
        assert (report["whole fixed"], report["whole warned"]) == (False, 0)
        assert (report["shared fixed"], report["shared warned"]) == (True, rank == 0)
        assert [sorted(rows) for rows in report["shared"]] == [list(range(25 * rank, 25 * rank + 25))] * 2
    for first, second in zip(ranks[0]["whole"], ranks[1]["whole"], strict=True):
        assert sorted(first + second) == list(range(CACHED_ROWS))
    assert sorted(ranks[0]["whole"][0]) != sorted(ranks[1]["whole"][0])


def test_every_rank_is_refused_where_one_has_no_room(ranks):
    missing = CACHED_ROWS // 2 * ROW_BYTES - 100
    for report in ranks:
        assert "the rank that has least has room for 100" in report["refused"]
        assert f"{missing:,} bytes are missing" in report["refused"]
