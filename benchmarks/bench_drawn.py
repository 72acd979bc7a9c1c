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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_doctor
import harness

SCRIPT = Path(__file__).resolve().parent / "drawn" / "script.py"
WITHIN = 1.2
BUSY = "while True: pass"
# Those that are tried where the doctor says that no change is worth making.
ALL = ("pack", "workers=2", "persistent")
PACKED = ("reading", "decoding", "collate", "hand-over", "lock contention")


class Examiner(bench_doctor.Examiner):
    """The runs of drawn scripts."""

    def case(self, plant: int, seed: int, *words: str) -> list[str]:
        """The command that runs script `seed`, but for its `--out`."""
        return [sys.executable, str(SCRIPT), str(seed), "--work", str(self.work), *words]

    def script(self, number: int, load: str) -> dict[str, Any]:
        """One script: examined, changed, and noted."""
        with busy(load == "loaded"):
            self.plain(0, number)  # the files it reads are there then
            doctor = self.examined(0, number)
            verdict = doctor["verdict"]
            asked = change_of(verdict)
            measured = {}
            for change in [asked] if asked else ALL if verdict.get("cause") != "other programs" else ():
                self.plain(0, number, "--change", change)
                ratios = []
                for turn in range(self.options.pairs):
                    changes = ["", change] if turn % 2 else [change, ""]
                    times = {one: self.plain(0, number, "--change", one)["step_s"] for one in changes}
                    ratios.append(times[""] / times[change])
                measured[change] = statistics.median(ratios)
        cures = verdict.get("cures") or [{}]
        record = {"number": number, "load": load, "cause": verdict.get("cause", ""), "change": asked,
                  "said": cures[0].get("gain", 1.0) if asked else 1.0, "measured": measured,
                  "step_s": verdict.get("step_s"), "line": doctor["line"],
                  "evidence": list(verdict.get("evidence", ()))}  # fmt: skip
        record["right"] = is_right(record)
        self.journal.note(f"script-{number}-{load}", **record)
        print(f"    {doctor['line'] or doctor['said']}", flush=True)
        return record


def change_of(verdict: dict[str, Any]) -> str:
    """The script's word for the change that a verdict puts first; empty: it says that none is worth making."""
    if not verdict.get("worth_making"):
        return ""
    cure = verdict["cures"][0]
    if found := re.search(r"num_workers=(\d+)", cure["change"]):
        return f"workers={found[1]}"
    return "persistent" if cure["cause"] == "worker start-up" else "pack"


def is_right(record: dict[str, Any]) -> bool:
    """Whether what was said holds."""
    if record["cause"] == "other programs":
        return bool(record["load"] == "loaded")
    if not record["cause"]:
        return False
    gains = record["measured"]
    if not record["change"]:
        return all(gain < 1.1 for gain in gains.values())
    return bool(1 / WITHIN <= record["said"] / gains[record["change"]] <= WITHIN)


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
    lines = [f"{'script':>6}  {'load':<8}{'right':<7}{'said':<7}{'measured':<34}cause"]
    for one in records:
        measured = ", ".join(f"{change} {gain:.2f}" for change, gain in one["measured"].items())
        right = "yes" if one["right"] else "no"
        lines.append(
            f"{one['number']:>6}  {one['load']:<8}{right:<7}{one['said']:<7.2f}{measured or '-':<34}{one['cause']}"
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
    examiner, records = Examiner(options), []
    for number in range(options.first, options.first + options.count):
        for load in options.loads:
            try:
                records.append(examiner.script(number, load))
            except RuntimeError as error:
                print(error, file=sys.stderr)
    print("\n".join(summary(records)))


if __name__ == "__main__":
    main()
