"""echo="auto" on two ranks of a real process group, one of them slow: equal steps in every epoch, and no deadlock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastload

HERE = Path(__file__).resolve().parent
LIMIT_S = 120
BATCHES = 12


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two processes reports; see two_ranks.py."""
    folder = tmp_path_factory.mktemp("auto")
    outside = ("PYTHONSAFEPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in outside}
    env |= {
        "PYTHONPATH": str(Path(fastload.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    processes, logs = [], [folder / f"log.{rank}" for rank in range(2)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(HERE / "two_ranks.py"), str(rank), str(folder)]
            with open(log, "wb") as out:
                output = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                processes.append(subprocess.Popen(command, env=env, cwd=folder, start_new_session=True, **output))
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    assert codes == [0, 0], f"ranks ended with {codes} (None: killed, still waiting for another rank)\n{said}"
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
