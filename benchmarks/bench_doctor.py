"""Does `fastload doctor` tell the truth? Training scripts with a planted hold-up, and what the doctor makes of each.

    python benchmarks/bench_doctor.py                    every case with seeds 0, 1, 2: about an hour on two cores
    python benchmarks/bench_doctor.py --only 11 40       some of them (numbers below)
    python benchmarks/bench_doctor.py --seeds 3 4 5      other magnitudes
    python benchmarks/bench_doctor.py --quick            one seed of one case, to see that it runs
    python benchmarks/bench_doctor.py --summary          no runs: the table of what results/doctor.jsonl holds

Each case (benchmarks/planted/case.py PLANT SEED) runs three times: under the doctor, plain, and cured, which is the
same run with its hold-up taken away; the plain run comes first or last in turn. A record holds the doctor's verdict
line, the cause and the step time after the first cure from its JSON, and the step times that the case itself measured
in the three runs. `named`: the cause is the planted one. `ratio`: predicted over measured step time of the cured run;
it counts where the cure makes steps at least 1.2 times as fast. Where it brings under 1.1, the doctor has to say that
it is not worth making. `overhead`: the case's step under the doctor over the plain run's. A run is void where the cure
of a planted hold-up measures under 1.1 times, or that of a busy accelerator over 1.2: other programs held it up more
than the plant did.

Which number hides what is known here only: neither the script's names nor its arguments say it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastload
import harness

CASE = Path(__file__).resolve().parent / "planted" / "case.py"
LIMIT_S = 150
CAUSES = (
    "reading", "waiting for the network", "waiting in the dataset's code", "decoding", "transform", "collate",
    "hand-over", "copy to the device", "too few workers", "too many workers", "worker start-up",
    "a slow sample now and then", "lock contention", "other programs", "compute",
)  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """What a case hides.

    Attributes:
        about: in a few words.
        causes: names that are right; the first is the planted one. Empty: any, as long as no cure is called worth it.
        counts: whether it is one of the planted hold-ups that all have to be named.
        by_workers: whether more workers take it away: then the number that the doctor says is tried.
    """

    about: str
    causes: tuple[str, ...]
    counts: bool = True
    by_workers: bool = False


PLANTS = {
    # A sleep is what the first two do, whatever it stands for.
    11: Plant("each read sleeps first", ("waiting in the dataset's code",), by_workers=True),
    24: Plant("workers sleep in turn, as at a service that answers one at a time", ("waiting in the dataset's code",)),
    37: Plant("files from a slow server", ("waiting in the dataset's code",)),
    18: Plant("megabytes past the page cache", ("reading",)),
    33: Plant("big JPEGs, Pillow", ("decoding",)),
    15: Plant("big JPEGs, simplejpeg", ("decoding",)),
    29: Plant("big JPEGs, OpenCV", ("decoding",)),
    40: Plant("a loop in Python", ("transform",)),
    13: Plant("many passes of NumPy", ("transform",)),
    26: Plant("Pillow resizes to large", ("transform",)),
    22: Plant("collate loops in Python", ("collate",)),
    35: Plant("collate sorts a large array", ("collate",)),
    31: Plant("a large NumPy array in each batch", ("hand-over",)),
    16: Plant("thousands of small objects in each batch", ("hand-over",)),
    28: Plant("a batch's own .to() over a slow bus", ("copy to the device",)),
    39: Plant("cast to float32 on the way", ("copy to the device",)),
    21: Plant("one worker, mixed work", ("too few workers",)),
    34: Plant("no worker, mixed work", ("too few workers",)),
    19: Plant("a team of torch threads in each of many workers", ("too many workers",)),
    36: Plant("a team of BLAS threads in each of many workers", ("too many workers",)),
    50: Plant("a thread that polls beside each of many workers", ("too many workers",)),
    49: Plant("sleeps that grow with the workers", ("too many workers", "waiting in the dataset's code"), counts=False),
    12: Plant("worker_init_fn computes, short epochs", ("worker start-up",)),
    27: Plant("spawned workers import torch, short epochs", ("worker start-up",)),
    38: Plant("the first sample of each worker opens much, short epochs", ("worker start-up",)),
    14: Plant("one of some 50 samples waits", ("a slow sample now and then",)),
    51: Plant("the same, samples of a batch asked for at once", ("a slow sample now and then",)),
    30: Plant("one of some 50 pictures is huge", ("a slow sample now and then",)),
    23: Plant("a lock of the workers round h5py", ("lock contention",)),
    32: Plant("flock round h5py", ("lock contention",)),
    17: Plant("threads in h5py's own lock", ("lock contention",)),
    25: Plant("a thread writes HDF5 beside, no worker", ("lock contention",)),
    20: Plant("the accelerator binds", ("compute",)),
    41: Plant("a net trained on the CPU binds", ("compute", "too many workers"), counts=False),
    42: Plant("the accelerator binds, waited for now and then", ("compute",)),
    48: Plant("a loop in Python in the loader of two that counts", ("transform",)),
    47: Plant("FastLoader with a loop in Python as transform", ("transform",)),
    46: Plant("FastLoader, the accelerator binds", ("compute",)),
    43: Plant("reading a little slower than the accelerator", ()),
    44: Plant("one worker, hidden behind the accelerator", ()),
    45: Plant("no worker, little work", ()),
}  # fmt: skip
QUICK = (11,)


class Examiner:
    """The folder, the journal and the runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = (options.data / "planted").resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.journal = harness.Journal(options.out, quick=options.quick, part=options.part, seeds=options.seeds)
        # Cases are run as a user's script is: the script's folder on the path, and this fastload wherever it lies.
        home = str(Path(fastload.__file__).resolve().parents[1])
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [home, self.env.get("PYTHONPATH")]))

    def case(self, plant: int, seed: int, *words: str) -> list[str]:
        """The command that runs a case, but for its `--out`."""
        return [sys.executable, str(CASE), str(plant), str(seed), "--work", str(self.work),
                "--part", str(self.options.part), *words]  # fmt: skip

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and standard error; 124 where it had to be ended."""
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.work, env=self.env,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, said = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return 124, child.communicate()[1]
        return child.returncode, said

    def plain(self, plant: int, seed: int, *words: str) -> dict[str, float]:
        """What a case measured of itself."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            code, said = self.run([*self.case(plant, seed, *words), "--out", str(out)])
            if code:
                raise RuntimeError(f"case {plant} {seed} {words} ended with {code}:\n{said}")
            return json.loads(out.read_text())  # type: ignore[no-any-return]

    def examined(self, plant: int, seed: int) -> dict[str, Any]:
        """What the doctor said of a case, and what the case measured meanwhile."""
        with tempfile.TemporaryDirectory() as folder:
            out, told = Path(folder) / "out.json", Path(folder) / "doctor.json"
            doctor = [sys.executable, "-c", "from fastload.cli import main; main()", "doctor", "--json", str(told)]
            code, said = self.run([*doctor, "--", *self.case(plant, seed), "--out", str(out)])
            lines = [line for line in said.splitlines() if line.startswith("verdict:")]
            found = json.loads(told.read_text()) if told.exists() else {}
            ran = json.loads(out.read_text()) if out.exists() else {}
            return {"code": code, "line": lines[-1] if lines else "", "verdict": found.get("verdict") or {},
                    "step_s": ran.get("step_s"), "said": said[-4000:]}  # fmt: skip

    def examine(self, plant: int, seed: int, turn: int) -> dict[str, Any]:
        """One case with one seed: all runs, compared, and noted."""
        uncured = self.plain(plant, seed) if turn % 2 else None
        doctor = self.examined(plant, seed)
        # Where the doctor's change is a number of workers, that number is tried; else the case without its hold-up.
        truth, verdict = PLANTS[plant], doctor["verdict"]
        cures = verdict.get("cures") or [{}]
        number = re.search(r"num_workers=(\d+)", str(cures[0].get("change", "")))
        tried = number and (truth.causes == () or truth.by_workers)
        words = [] if tried else ["--cured"]
        if tried or (number and truth.causes[0] in ("too few workers", "too many workers")):
            words += ["--workers", number[1]]
        # Right after the doctor's run, for the machine's other load to be as alike as may be.
        cured = self.plain(plant, seed, *words)
        uncured = uncured or self.plain(plant, seed)
        record = compared(plant, doctor, uncured["step_s"], cured["step_s"])
        self.journal.note(f"case-{plant}-seed-{seed}", plant=plant, seed=seed, about=truth.about, **record,
                          cured_words=words)  # fmt: skip
        if record["cause"]:
            print(f"    {doctor['line']}", flush=True)
        else:
            print(f"    no verdict, exit code {doctor['code']}:\n{doctor['said']}", flush=True)
        return record


def is_void(truth: Plant, worth: float) -> bool:
    """Whether something else than the plant bound the case, so that there is nothing to be named."""
    if not truth.causes:
        return False
    return worth > 1.2 if truth.causes[0] == "compute" else worth < 1.1


def compared(plant: int, doctor: dict[str, Any], uncured_s: float, cured_s: float) -> dict[str, Any]:
    """The doctor's words beside what was measured."""
    truth, verdict = PLANTS[plant], doctor["verdict"]
    cause, cures = verdict.get("cause", ""), verdict.get("cures") or []
    predicted = cures[0]["step_s"] if cures else verdict.get("step_s")
    said = [name for name in CAUSES if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", doctor["line"])]
    return {
        "planted": list(truth.causes), "cause": cause, "line": doctor["line"], "code": doctor["code"],
        "named": cause in truth.causes if truth.causes else None, "in_line": said,
        "one_in_line": said == [cause] if cause else False,
        "uncured_s": uncured_s, "cured_s": cured_s, "worth": uncured_s / cured_s,
        "under_doctor_s": doctor["step_s"], "overhead": doctor["step_s"] / uncured_s if doctor["step_s"] else None,
        "doctor_step_s": verdict.get("step_s"), "predicted_s": predicted,
        "ratio": predicted / cured_s if predicted else None,
        "void": is_void(truth, uncured_s / cured_s),
        "worth_making": verdict.get("worth_making"), "cure": cures[0].get("change", "") if cures else "",
        "evidence": list(verdict.get("evidence", ())),
    }  # fmt: skip


def summary(records: list[dict[str, Any]]) -> list[str]:
    """A line a case, and the issue's figures under them."""
    by_plant: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_plant.setdefault(record["plant"], []).append(record)
    lines = [
        f"{'case':>4}  {'planted':<27}{'named':<7}{'worth':<7}{'predicted/measured':<26}{'overhead':<9}not named: said"
    ]
    named_all, counted, near, worth_it, refused, small = 0, 0, 0, 0, 0, 0
    for plant, truth in PLANTS.items():
        runs = by_plant.get(plant)
        if not runs:
            continue
        void = [run for run in runs if is_void(truth, run["worth"])]
        runs = [run for run in runs if not is_void(truth, run["worth"])]
        if not runs:
            lines.append(f"{plant:>4}  {truth.causes[0]:<27}void: {len(void)} runs, worth {void[0]['worth']:.2f}")
            continue
        worth = statistics.median(run["worth"] for run in runs)
        ratios = [run["ratio"] for run in runs if run["ratio"]]
        over = statistics.median([run["overhead"] for run in runs if run["overhead"]] or [float("nan")])
        hits = sum(bool(run["named"]) for run in runs)
        if truth.causes and truth.counts:
            counted += 1
            named_all += hits == len(runs)
        if truth.causes and truth.causes[0] != "compute" and worth >= 1.2:
            worth_it += 1
            near += bool(ratios) and abs(statistics.median(ratios) - 1) <= 0.2
        if not truth.causes or truth.causes[0] == "compute":
            small += len(runs)
            refused += sum(run["worth_making"] is False for run in runs)
        wrong = ", ".join(sorted({run["cause"] or "nothing" for run in runs if run["named"] is False}))
        told = (
            f"{hits}/{len(runs)}"
            if truth.causes
            else f"no: {sum(r['worth_making'] is False for r in runs)}/{len(runs)}"
        )
        spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
        name = (truth.causes or ("(not worth a cure)",))[0]
        wrong += f" ({len(void)} void)" if void else ""
        lines.append(f"{plant:>4}  {name:<27}{told:<7}{worth:<7.2f}{spread:<26}{over:<9.2f}{wrong}")
    one = sum(bool(record["one_in_line"]) for record in records)
    lines += [
        f"named in every run: {named_all} of {counted} cases",
        f"predicted step time within 20 %, median of its runs: {near} of {worth_it} cases whose cure is worth 1.2",
        f"said that no cure is worth making: {refused} of {small} runs where none is",
        f"exactly one documented cause in the verdict's line: {one} of {len(records)} runs",
    ]
    return lines


def latest(path: Path) -> list[dict[str, Any]]:
    """The last record of each case and seed."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    kept = {r["figure"]: r for r in records if r["figure"].startswith("case-") and not r["options"].get("quick")}
    return list(kept.values())


def main() -> None:
    """Examine what the command line asks for."""
    parser = harness.command_line("Examine fastload doctor with planted hold-ups.", "doctor")
    parser.add_argument("--only", nargs="+", type=int, choices=list(PLANTS), default=list(PLANTS), metavar="PLANT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--part", type=float, default=1.0, help="this part of each case's steps (default: 1)")
    parser.add_argument("--summary", action="store_true", help="no runs: the table of what there is")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(latest(options.out))))
        return
    if options.quick:
        options.only, options.seeds = list(QUICK), options.seeds[:1]
    examiner, records = Examiner(options), []
    for seed in options.seeds:
        for turn, plant in enumerate(options.only):
            try:
                records.append({"plant": plant, "seed": seed, **examiner.examine(plant, seed, turn + seed)})
            except RuntimeError as error:
                print(error, file=sys.stderr)
    print("\n".join(summary(records)))


if __name__ == "__main__":
    main()
