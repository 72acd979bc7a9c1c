"""Every file operation of a command fails once: the output is absent or whole, and the same command then finishes.

Here some of these calls, spread over all commands, kinds and errors; `FASTLOAD_FAULTS=3000` tries so many, and appends
what it found to the file named by FASTLOAD_FAULTS_LOG.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from faulty_commands import CASES, FAULTS, KINDS, Bench, Case, bench, log_found

POINTS = int(os.environ.get("FASTLOAD_FAULTS", "40"))

pytestmark = pytest.mark.slow


class Point(NamedTuple):
    case: Case
    kind: str
    number: int
    error: int
    many: int


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("faults")) as found:
        yield found


def points(commands: Bench) -> list[Point]:
    """All calls and errors, in an order such that the first ones are of all kinds, errors and commands."""
    found: dict[tuple[str, int, int], list[Point]] = {}
    for case in CASES:
        for kind, count in sorted(Counter(call.kind for call in commands.calls(case)).items()):
            for number in range(1, count + 1):
                for error in FAULTS[kind]:
                    found.setdefault((kind, error, 1), []).append(Point(case, kind, number, error, 1))
                if kind in ("write", "sync", "rename"):  # A disk that is full, or fails, stays so.
                    found.setdefault((kind, 0, 0), []).append(Point(case, kind, number, FAULTS[kind][0], 10**9))
    assert {kind for kind, _, _ in found} >= set(KINDS) - {"link"}
    rng = random.Random(20)
    for some in found.values():
        rng.shuffle(some)
    turns = max(map(len, found.values()))
    return [some[turn] for turn in range(turns) for some in found.values() if turn < len(some)]


def test_after_any_failed_call_the_output_is_absent_or_whole_and_the_same_command_finishes(commands: Bench) -> None:
    survived, wrong = Counter[str](), list[str]()
    tried = points(commands)[:POINTS]
    for done, point in enumerate(tried):
        log_found("failed calls", done, survived, wrong, end=False)
        try:
            survived[f"{point.kind} {commands.fail(*point)}"] += 1
        except AssertionError as exc:
            wrong.append(f"{point.case.name}: {point.kind} {point.number}, errno {point.error} x {point.many}: {exc}")
    commands.check_inputs()
    log_found("failed calls", len(tried), survived, wrong, end=True)
    assert not wrong, "\n\n".join(wrong)
    assert any("harmless" in name for name in survived) and any("failed" in name for name in survived)


def test_a_fault_that_is_not_survived_is_noticed(commands: Bench, tmp_path: Path) -> None:
    """The harness itself: a torn output, a changed input and a traceback are found."""
    case = CASES[0]
    output = commands.new_output(case)
    output.write_bytes(commands.whole(case)[""][:-1])
    with pytest.raises(AssertionError, match="neither absent nor whole"):
        commands.check_absent_or_whole(case, output)
    with pytest.raises(AssertionError, match="the same command fails"):
        commands.check_finishes(case, output)
    bad = Case("bad", ("info", "SRC/none.h5"))
    assert commands.run(bad, output).returncode == 1
    read = commands.run(Case("count", ("verify", "SRC/a.h5")), output, "fail open 1 5 1")
    assert read.returncode == 1, "the first call does not fail: is the shim loaded?"
