"""Ranks with unequal room for rows come to one decision, through the store of a real process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cached_ranks import ROW_BYTES, ROWS, write_file
from child_processes import run_together

HERE = Path(__file__).resolve().parent
LIMIT_S = 600


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("cached")
    write_file(folder / "a.h5")
    run_together([[HERE / "cached_ranks.py", rank, folder] for rank in range(2)], folder)
    return [json.loads((folder / f"cached.{rank}.json").read_text()) for rank in range(2)]


def test_all_rows_are_kept_where_every_rank_has_room(reports):
    assert [report["whole fixed"] for report in reports] == [False, False]
    assert all(report["whole warned"] == [] for report in reports)
    for epoch in range(2):
        assert sorted(reports[0]["whole"][epoch] + reports[1]["whole"][epoch]) == list(range(ROWS))
    assert sorted(reports[0]["whole"][0]) != sorted(reports[0]["whole"][1])


def test_the_rank_with_least_room_makes_all_keep_their_share(reports):
    assert [report["shared fixed"] for report in reports] == [True, True]
    for rank, report in enumerate(reports):
        for epoch in range(2):
            assert sorted(report["shared"][epoch]) == list(range(25 * rank, 25 * rank + 25))
    assert len(reports[0]["shared warned"]) == 1 and reports[1]["shared warned"] == []


def test_every_rank_is_refused_where_one_has_no_room(reports):
    missing = ROWS // 2 * ROW_BYTES - 100
    for report in reports:
        assert "the rank that has least has room for 100" in report["refused"]
        assert f"{missing:,} bytes are missing" in report["refused"]
