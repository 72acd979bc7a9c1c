"""Does the change that `fastload doctor` offers bring what it says? Drawn training scripts, examined and then changed.

    python benchmarks/bench_drawn.py                     20 scripts with seeds from 0 on, quiet and loaded: an hour
    python benchmarks/bench_drawn.py --first 100 --count 5
    python benchmarks/bench_drawn.py --summary           no runs: the table of what results/drawn.jsonl holds

Each script (benchmarks/drawn/script.py NUMBER) runs under the doctor, then as it is and with the change that the doctor
put first, in turn. `said`: the predicted gain; `measured`: the median of the pairs. A run is right where both agree
within 20 %, or where the doctor said that no change is worth making and none of those tried brings 1.1 times. With
`loaded`, another program is busy on half of the CPUs all the time; right is also to say that other programs hold the
machine.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import bench_doctor
import harness

SCRIPT = Path(__file__).resolve().parent / "drawn" / "script.py"
WITHIN = 1.2
BUSY = "while True: pass"
# Those that are tried where the doctor says that no change is worth making.
ALL = ("pack", "workers=2", "persistent")
# Changes that only some scripts can be run with.
SPECIAL = ("cheaper", "one tensor", "channels_last")


class Subject(Protocol):
    """A script that is examined."""

    name: str
    changes: Sequence[str]  # that are tried where the doctor says that none is worth making
    special: Sequence[str]  # those of SPECIAL that it can be run with

    def step_s(self, change: str, verdict: dict[str, Any] | None = None) -> float:
        """Runs it with a change, "" for none, and returns the mean seconds of a step of the loop that was judged."""

    def examined(self) -> dict[str, Any]:
        """Runs it under the doctor, and returns the report's `verdict`, its `line`, and what else was `said`."""


class Drawn:
    """A drawn script."""

    changes, special = ALL, ("channels_last",)

    def __init__(self, examiner: DrawnExaminer, number: int) -> None:
        self.name, self._examiner, self._number = f"drawn {number}", examiner, number

    def step_s(self, change: str, verdict: dict[str, Any] | None = None) -> float:
        """Runs it."""
        return self._examiner.plain(0, self._number, "--change", change)["step_s"]

    def examined(self) -> dict[str, Any]:
        """Runs it under the doctor."""
        return self._examiner.examined(0, self._number)


class DrawnExaminer(bench_doctor.Examiner):
    """The runs of drawn scripts."""

    def case(self, plant: int, seed: int, *words: str) -> list[str]:
        """The command that runs script `seed`, but for its `--out`."""
        return [sys.executable, str(SCRIPT), str(seed), "--work", str(self.work), *words]


def examine(subject: Subject, load: str, pairs: int) -> dict[str, Any]:
    """Returns what the doctor said of a script, and what the change that it offers brings."""
    with busy(load == "loaded"):
        subject.step_s("")  # the files it reads are there then
        doctor = subject.examined()
        verdict = doctor["verdict"]
        asked = change_of(verdict)
        known = asked != "other" and verdict.get("cause") != "other programs"
        known = known and (asked not in SPECIAL or asked in subject.special)
        tried = ([asked] if asked else list(subject.changes)) if known else []
        for change in tuple(tried):
            try:
                subject.step_s(change)  # what it packs is there then
            except RuntimeError as error:  # it cannot be made: if that was offered, it counts as wrong
                print(error, file=sys.stderr)
                tried.remove(change)
        ratios: dict[str, list[float]] = {change: [] for change in tried}
        plain_s = []
        for turn in range(pairs if tried else 0):
            changes = ["", *tried]
            times = {one: subject.step_s(one, verdict) for one in (changes if turn % 2 else reversed(changes))}
            plain_s.append(times[""])
            for change in tried:
                ratios[change].append(times[""] / times[change])
        measured = {change: statistics.median(found) for change, found in ratios.items()}
    cures = verdict.get("cures") or [{}]
    record = {"script": subject.name, "load": load, "cause": verdict.get("cause", ""), "change": asked,
              "said": cures[0].get("gain", 1.0) if asked else 1.0, "measured": measured,
              "step_s": verdict.get("step_s"), "plain_s": statistics.median(plain_s) if plain_s else None,
              "line": doctor["line"], "evidence": list(verdict.get("evidence", ()))}  # fmt: skip
    record["right"] = is_right(record)
    print(f"    {doctor['line'] or doctor['said']}", flush=True)
    return record


def change_of(verdict: dict[str, Any]) -> str:
    """The word for the change that a verdict puts first; empty: it says that none is worth making."""
    if not verdict.get("worth_making"):
        return ""
    cure = verdict["cures"][0]
    if found := re.search(r"num_workers=(\d+)", cure["change"]):
        return f"workers={found[1]}"
    if cure["cause"] == "worker start-up":
        return "persistent"
    if "fastload pack" in cure["change"] + cure["how"]:
        return "pack"
    if cure["cause"] == "compute":
        return "channels_last"
    if "one tensor" in cure["change"]:
        return "one tensor"
    return "cheaper" if cure["cause"] == "transform" else "other"


def is_right(record: dict[str, Any]) -> bool:
    """Whether what was said holds."""
    if record["cause"] == "other programs":
        return bool(record["load"] == "loaded")
    if not record["cause"]:
        return False
    gains = record["measured"]
    if not record["change"]:
        return bool(gains) and all(gain < 1.1 for gain in gains.values())
    gain = gains.get(record["change"])  # None: nothing here can make that change, so it counts as wrong
    return gain is not None and 1 / WITHIN <= record["said"] / gain <= WITHIN


@contextmanager
def busy(whether: bool) -> Iterator[None]:
    """Keeps half of the CPUs busy."""
    cpus = harness.machine()["cores"] or 2
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cpus // 2 if whether else 0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def summary(records: list[dict[str, Any]]) -> list[str]:
    """A line a run, and how many are right."""
    lines = [f"{'script':<24}{'load':<8}{'right':<7}{'said':<7}{'measured':<34}cause"]
    for one in records:
        measured = ", ".join(f"{change} {gain:.2f}" for change, gain in one["measured"].items())
        right = "yes" if one["right"] else "no"
        lines.append(
            f"{one['script']:<24}{one['load']:<8}{right:<7}{one['said']:<7.2f}{measured or '-':<34}{one['cause']}"
        )
    return [*lines, f"right: {sum(one['right'] for one in records)} of {len(records)}"]


def main() -> None:
    """Examine what the command line asks for."""
    parser = harness.command_line("Examine fastload doctor with drawn training scripts.", "drawn", pairs=3)
    parser.add_argument("--first", type=int, default=0, help="the first script's number (default: 0)")
    parser.add_argument("--count", type=int, default=20, help="of scripts (default: 20)")
    parser.add_argument("--loads", nargs="+", default=["quiet", "loaded"], choices=["quiet", "loaded"])
    parser.add_argument("--summary", action="store_true", help="no runs: the table of what there is")
    options = parser.parse_args()
    if options.summary:
        kept = [json.loads(line) for line in options.out.read_text().splitlines()]
        print("\n".join(summary(list({one["figure"]: one for one in kept}.values()))))
        return
    options.part, options.seeds = 1.0, [options.first]
    if options.quick:
        options.count, options.loads, options.pairs = 1, ["quiet"], 1
    examiner, records = DrawnExaminer(options), []
    for number in range(options.first, options.first + options.count):
        for load in options.loads:
            try:
                records.append(examine(Drawn(examiner, number), load, options.pairs))
                examiner.journal.note(f"script-{number}-{load}", **records[-1])
            except RuntimeError as error:
                print(error, file=sys.stderr)
    print("\n".join(summary(records)))


if __name__ == "__main__":
    main()
