"""The script that counts the modules that walks through fastload pass."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from warm_python import WarmPython

import trace_walks
from fastload.plan.order import resolve_ends
from fastload.plan.shares import checked_segments, rank_share
from trace_walks import Trace

SCRIPT = Path(__file__).resolve().parents[2] / "tools/trace_walks.py"


def test_calls_moves_and_returns_of_all_threads_are_counted():
    trace = Trace()

    def work() -> None:
        rank_share(10, rank=0, world_size=2)
        checked_segments([(1, 1, 1)])  # calls `is_whole` of fastload/errors.py three times

    with trace.following():
        resolve_ends(None, False)  # before it counts
        with trace.counting():
            work()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        work()
    found = trace.result("here", 2)
    assert found.in_order == ["plan/shares", "errors"] and (found.modules, found.functions) == (2, 3)
    assert (found.calls, found.moves, found.returns) == (5, 3, 3)


def test_the_walk_to_a_loader_passes_its_modules_and_comes_back(warm_python: WarmPython, tmp_path: Path):
    done = warm_python.run(SCRIPT, "--walk", "loader", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["in_order"][0] == "loader/loader" and {"dataset", "plan/epoch"} <= set(found["in_order"])
    assert found["modules"] == len(found["in_order"]) and found["units"] == 1
    assert found["moves"] == found["returns"] < found["calls"] and found["functions"] > found["modules"]


def test_a_batch_passes_the_reader_and_the_ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(trace_walks, "FIRST", 3)
    monkeypatch.setattr(trace_walks, "LAST", 63)  # far more than are read ahead
    trace = Trace()
    assert trace_walks.raw(trace, tmp_path) == 60
    assert {"prefetch/ring", "read/reader"} <= set(trace.result("raw", 60).in_order)
