"""SIGKILL of the command or of one of its workers, at a file operation drawn at random: the same command then finishes.

`FASTLOAD_FAULTS=3000` tries a sixtieth of so many, as each starts processes, and appends what it found to the file
named by FASTLOAD_FAULTS_LOG.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from faulty_commands import KILLED, Bench, Case, bench, check_message, log_found

KILLS = max(6, int(os.environ.get("FASTLOAD_FAULTS", "0")) // 60)

pytestmark = pytest.mark.slow

_MANY = ("pack", "SRC/many photos", "OUT", "--workers", "2", "--chunk-bytes", "3000")
_MASKED = ("pack", "SRC/many masked", "OUT", "--workers", "2", "--chunk-bytes", "3000")
CASES = (
    Case("raw", (*_MANY, "--size", "16")),
    Case("masks", (*_MASKED, "--size", "16", "--codec", "none")),
    Case("jpeg", (*_MANY, "--store", "jpeg")),
    Case("ragged masks", (*_MASKED, "--store", "source")),
    Case("zstd", (*_MANY, "--size", "16", "--codec", "zstd")),
    Case("gzip masks", (*_MASKED, "--size", "16", "--codec", "gzip")),
    Case("ragged zstd", (*_MASKED, "--codec", "zstd")),
    Case("skipping", (*_MASKED, "--size", "16", "--codec", "none", "--on-error", "skip")),
    Case("repack", ("repack", "SRC/masked.h5", "OUT", "--shuffle", "--workers", "2")),
    Case("repack gzip", ("repack", "SRC/a.h5", "OUT", "--codec", "gzip", "--workers", "2")),
    Case("repack ragged", ("repack", "SRC/ragged.h5", "OUT", "--workers", "2")),
    Case("merge", ("merge", "SRC/a.h5", "SRC/b.h5", "--output", "OUT", "--workers", "2")),
    Case("shards", (*_MANY[:2], "OUT/o.h5", "--shards", "2", "--parents", *_MANY[3:]), folder=True, last="o.h5"),
    Case("export", ("export", "SRC/masked.h5", "OUT", "--workers", "2"), folder=True),
)

_CALLS = {"write": 8, "open": 20, "read": 30, "sync": 4}
"""About how many calls of a kind a process makes."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("kills")) as found:
        yield found


def test_a_command_that_was_killed_or_whose_worker_was_killed_is_finished_by_the_same_command(commands: Bench) -> None:
    rng, found, wrong = random.Random(10), Counter[str](), list[str]()
    for turn in range(KILLS):
        log_found("kills", turn, found, wrong, end=False)
        case = CASES[(turn * 5) % len(CASES)]
        who = "started" if case.words[0] == "pack" and turn % 2 else "forked"
        output = commands.new_output(case)
        kind = rng.choice(
            ("write", "write", "open", "read") if who == "started" else ("write", "write", "read", "sync")
        )
        point = f"{kind} {rng.randint(1, _CALLS[kind])}"
        try:
            for _ in range(rng.randint(1, 2)):  # Twice: what continues is killed as well.
                done = commands.run(case, output, f"fail {point} {KILLED} 1", f"only {who}")
                commands.check_absent_or_whole(case, output)
                if done.returncode != -signal.SIGKILL:
                    check_message(done)
                if done.returncode == 0:
                    break
            if done.returncode:
                commands.check_finishes(case, output)
            ends = {0: "not reached", 1: "worker killed", -signal.SIGKILL: "command killed"}
            found[ends[done.returncode]] += 1
        except AssertionError as exc:
            wrong.append(f"{case.name}: {who} killed at {point}: {exc}")
        shutil.rmtree(output.parent)
    commands.check_inputs()
    log_found("kills", KILLS, found, wrong, end=True)
    assert not wrong, "\n\n".join(wrong)
    assert found["command killed"] and found["worker killed"]
