"""SIGKILL of `fastload append`, also once it has replaced the file: the same command then ends with the same bytes.

`FASTLOAD_FAULTS=3000` tries a fiftieth of so many moments, and a third of that behind the replacement; what it found is
appended to the file named by FASTLOAD_FAULTS_LOG.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_commands import KILLED, Bench, Case, append_cases, bench, check_message, content, log_found

KILLS = max(4, int(os.environ.get("FASTLOAD_FAULTS", "0")) // 50)
BEHIND = max(4, KILLS // 3)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("appends")) as found:
        yield found


def kill(commands: Bench, case: Case, output: Path, point: str) -> bool:
    """Kills the command there; returns whether it was killed and had replaced the file."""
    done = commands.run(case, output, f"fail {point} {KILLED} 1")
    commands.check_absent_or_whole(case, output)
    if done.returncode != -signal.SIGKILL:  # a worker was killed, or none of them
        check_message(done)
    return done.returncode != 0 and content(output) == commands.whole(case)


def points(commands: Bench, case: Case) -> tuple[list[str], list[str]]:
    """All calls of the command itself, as "KIND NUMBER": before the file is replaced, and behind that."""
    before, behind, counts, replaced = list[str](), list[str](), Counter[str](), False
    for call in commands.calls(case):
        counts[call.kind] += 1
        (behind if replaced else before).append(f"{call.kind} {counts[call.kind]}")
        replaced |= call.kind == "rename" and call.other.endswith("/out.h5")
    assert replaced and behind
    return before, behind


def test_an_append_that_was_killed_is_continued_to_the_same_bytes(commands: Bench) -> None:
    rng, found, wrong = random.Random(7), Counter[str](), list[str]()
    cases = append_cases(commands.inputs)
    calls = {case: points(commands, case) for case in cases}
    alone = [case for case in cases if "2" not in case.words]  # whose calls are those of one process
    for turn in range(KILLS + BEHIND):
        case = cases[turn % len(cases)] if turn < KILLS else alone[turn % len(alone)]
        output, (before, behind) = commands.new_output(case), calls[case]
        try:
            if turn < KILLS:
                point = rng.choice(before + behind)
                kill(commands, case, output, point)
                if rng.random() < 0.3:  # what continues is killed as well
                    kill(commands, case, output, rng.choice(before))
                found["at any moment"] += 1
            else:
                point = behind[(turn - KILLS) // len(alone) % len(behind)]
                found["behind the replacement"] += kill(commands, case, output, point)
            commands.check_finishes(case, output)
        except AssertionError as exc:
            wrong.append(f"{case.name}: killed at {point}: {exc}")
        shutil.rmtree(output.parent)
    commands.check_inputs()
    log_found("killed appends", KILLS + BEHIND, found, wrong, end=True)
    assert not wrong, "\n\n".join(wrong)
    assert found["behind the replacement"] == BEHIND
