"""Crashes and power failures at every file operation: then the same command finishes with the same bytes.

The calls of a run are recorded, and a folder is made as a crash at one of them may leave it: `power_loss`. Here some of
these crashes; `FASTLOAD_FAULTS=3000` tries so many, and appends what it found to the file named by
FASTLOAD_FAULTS_LOG.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_commands import CASES, CREATED, Bench, Call, Case, bench, log_found, read_calls
from power_loss import MODES, Mode, after_crash, changing_calls, restore, snapshot

from fastload.pack.journal import MAGIC

POINTS = int(os.environ.get("FASTLOAD_FAULTS", "40"))
_TWICE = 4  # of so many crashes one is followed by a crash of the command that was to finish

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("crashes")) as found:
        yield found


def crashes(recorded: dict[str, list[Call]]) -> list[tuple[Case, int, Mode]]:
    """All crashes, in an order such that the first ones are of all modes and commands."""
    rng, columns = random.Random(20), []
    for mode in MODES:
        column = []
        for case in CASES:
            numbers = list(range(len(recorded[case.name]) + 1))
            rng.shuffle(numbers)
            column.append([(case, number, mode) for number in numbers])
        longest = max(map(len, column))
        columns.append([some[turn] for turn in range(longest) for some in column if turn < len(some)])
    return [each for some in zip(*columns, strict=True) for each in some]


def test_after_any_power_failure_the_same_command_finishes_with_the_same_bytes(commands: Bench) -> None:
    recorded, starts = {}, {}
    for case in CASES:
        output = commands.new_output(case)
        starts[case.name], log = snapshot(output.parent), commands.folder / "log"
        assert commands.run(case, output, f"log {log}").returncode == 0
        recorded[case.name] = changing_calls(read_calls(log), output.parent)
        log.unlink()
        assert after_crash(starts[case.name], recorded[case.name], 10**6, "killed", random.Random()) == snapshot(
            output.parent
        ), "the calls that were recorded are all that changes the folder"
        check_kept(starts[case.name], recorded[case.name], output.parent)
        shutil.rmtree(output.parent)
    everything = crashes(recorded)
    survived, wrong = Counter[str](), list[str]()
    for turn in range(POINTS):
        log_found("power failures", turn, survived, wrong, end=False)
        case, number, mode = everything[turn % len(everything)]
        rng = random.Random(turn)
        output = commands.new_output(case)
        shutil.rmtree(output.parent)
        output.parent.mkdir()
        restore(output.parent, after_crash(starts[case.name], recorded[case.name], number, mode, rng))
        try:
            commands.check_absent_or_whole(case, output)
            if turn % _TWICE == 0:
                again(commands, case, output.parent, rng)
            commands.check_finishes(case, output)
            survived[mode + (" twice" if turn % _TWICE == 0 else "")] += 1
        except AssertionError as exc:
            wrong.append(f"{case.name}: {mode} at {number} of {len(recorded[case.name])}, turn {turn}: {exc}")
        shutil.rmtree(output.parent)
    commands.check_inputs()
    log_found("power failures", POINTS, survived, wrong, end=True)
    assert not wrong, "\n\n".join(wrong)


def check_kept(start: dict[str, bytes | None], calls: list[Call], folder: Path) -> None:
    """Checks that a finished output, and the journal of a begun one, are there whatever was not synced is lost."""
    lost = after_crash(start, calls, len(calls), "all lost", random.Random())
    assert snapshot(folder).items() <= lost.items(), "what a command that ended has made is on the disk, as is its name"
    made = [n for n, call in enumerate(calls) if call.kind == "open" and call.offset & CREATED]
    part = next((n for n in made if calls[n].path.endswith(".h5.part")), None)
    if part is not None:
        begun = after_crash(start, calls, part, "all lost", random.Random())
        journal = begun.get(calls[part].path.removesuffix(".part") + ".journal")
        assert journal is not None and journal.startswith(MAGIC), "the journal is on the disk before the file is made"


def again(commands: Bench, case: Case, folder: Path, rng: random.Random) -> None:
    """Lets the command that continues after a crash crash as well."""
    output, log = folder / ("out" if case.folder else "out.h5"), folder.parent / "log"
    start = snapshot(folder)
    done = commands.run(case, output, f"log {log}")
    if done.returncode:  # It had finished.
        commands.check_finishes(case, output)
        return
    calls = changing_calls(read_calls(log), folder)
    log.unlink(missing_ok=True)
    shutil.rmtree(folder)
    folder.mkdir()
    restore(folder, after_crash(start, calls, rng.randint(0, len(calls)), rng.choice(MODES), rng))
    commands.check_absent_or_whole(case, output)


def call(kind: str, path: str, offset: int = 0, length: int = 0, data: bytes = b"", other: str = "") -> Call:
    return Call(kind, path, other, offset, length or len(data), data)


CALLS = [
    call("open", "a", CREATED),
    call("write", "a", 0, data=b"x" * 700),
    call("sync", "a"),
    call("write", "a", 700, data=b"y" * 700),
    call("rename", "a", other="b"),
    call("sync", ""),
]


def test_what_is_synced_is_kept_and_the_rest_may_be_lost() -> None:
    def left(stop: int, mode: Mode, seed: int = 0) -> dict[str, bytes | None]:
        return after_crash({"b": b"old"}, CALLS, stop, mode, random.Random(seed))

    assert left(6, "killed") == {"b": b"x" * 700 + b"y" * 700}
    assert left(6, "all lost") == {"b": b"x" * 700}, (
        "the folder is synced, what was written after the file's sync is not"
    )
    assert left(5, "all lost") == {"b": b"old"}, "neither name is synced"
    assert left(5, "names kept") == {"b": b"x" * 700}
    assert left(5, "names lost") == {"b": b"old"}
    assert left(2, "names kept") == {"b": b"old", "a": b""}
    torn = {bytes(left(1, "torn", seed)["a"] or b"") for seed in range(20)}
    assert len(torn) > 3 and b"x" * 512 in torn and torn <= {b"x" * count for count in range(701)}
    some = [left(5, "some lost", seed) for seed in range(50)]
    assert {"b": b"old"} in some and {"b": b"x" * 700 + bytes(700)} in some and len({str(each) for each in some}) > 5
    assert all((each.get("a") or each["b"])[:700] in (b"x" * 700, b"old") for each in some)


def test_without_its_syncs_a_pack_would_not_survive(commands: Bench) -> None:
    """The harness itself: a pack that never waits for the disk is found out."""
    case = CASES[0]
    output, log = commands.new_output(case), commands.folder / "log"
    assert commands.run(case, output, f"log {log}").returncode == 0
    calls = [each for each in changing_calls(read_calls(log), output.parent) if each.kind != "sync"]
    shutil.rmtree(output.parent)
    output.parent.mkdir()
    restore(output.parent, after_crash({}, calls, len(calls), "names kept", random.Random(0)))
    with pytest.raises(AssertionError, match="neither absent nor whole"):
        commands.check_absent_or_whole(case, output)
