"""Is what `fastload doctor` says of scripts by others true? Each is examined, then run with the change that is offered.

    python benchmarks/bench_exam.py --scripts FOLDER        all of them, about an hour on two cores
    python benchmarks/bench_exam.py --scripts FOLDER --only imagenet siamese --models light --loads quiet
    python benchmarks/bench_exam.py --summary               no runs: the table of what results/exam.jsonl holds

FOLDER has a folder for each script, since code by others is not kept here: `run.sh light` and `run.sh heavy` run it
with a light and a heavy model, and the Python in $PYTHON; `pack.py` has a function `replace(arguments)`, which gets
those of each DataLoader, and returns the FastLoader to take its place, or None. docs/doctor-exam.md says which scripts
were examined. How a change is applied without an edit of the script: see benchmarks/exam/sitecustomize.py. What counts
as right: see bench_drawn.py.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_drawn
import fastload
import harness

HOOK = Path(__file__).resolve().parent / "exam"
LIMIT_S = 400


class Foreign:
    """A script by others, with one of its models."""

    special = bench_drawn.SPECIAL

    def __init__(self, folder: Path, model: str) -> None:
        self.name, self._folder, self._model = f"{folder.name} {model}", folder, model
        self._env = dict(os.environ) | {"EXAM_PACK": str(folder / "pack.py"), "PYTHON": sys.executable}
        home = str(Path(fastload.__file__).resolve().parents[1])
        self._path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        # A FastLoader's images lie in channels_last memory: where it cannot take a loader's place, that is tried alone.
        can_pack = (self._folder / "pack.py").exists()
        self.changes = [*(("pack",) if can_pack else ("channels_last",)), *bench_drawn.ALL[1:]]

    def _run(self, *words: str, **env: str) -> str:
        command = [*words, "bash", str(self._folder / "run.sh"), self._model]
        paths = os.pathsep.join(filter(None, [env.pop("PYTHONPATH", ""), self._path]))
        child = subprocess.Popen(
            command, env=self._env | env | {"PYTHONPATH": paths}, start_new_session=True, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            _, said = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise RuntimeError(f"{self.name}: not over after {LIMIT_S} s") from None
        if child.returncode:
            raise RuntimeError(f"{self.name} ended with {child.returncode}:\n{said[-3000:]}")
        return said

    def step_s(self, change: str, verdict: dict[str, Any] | None = None) -> float:
        """Runs it. The loop is measured that was judged, by its number of steps; before that, the one that trains."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "loops.jsonl"
            self._run(EXAM_CHANGE=change, EXAM_OUT=str(out), PYTHONPATH=str(HOOK))
            loops = [loop for line in out.read_text().splitlines() if (loop := json.loads(line))["timed_steps"]]
        count = (verdict or {}).get("num_steps", 0)
        loop = min(loops, key=lambda loop: (count and abs(loop["steps"] - count), -loop["backward"]))
        return float(loop["seconds"] / loop["timed_steps"])

    def examined(self) -> dict[str, Any]:
        """Runs it under the doctor."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "doctor.json"
            try:
                said = self._run(sys.executable, "-m", "fastload", "doctor", "--json", str(out), "--")
            except RuntimeError as error:  # it counts as a doctor who says nothing
                return {"verdict": {}, "line": "", "said": str(error)}
            lines = [line for line in said.splitlines() if line.startswith("verdict:")]
            measured = json.loads(out.read_text())
            verdict = (measured["verdict"] or {}) | {"num_steps": measured["num_steps"]}
            return {"verdict": verdict, "line": lines[-1] if lines else "", "said": said[-4000:]}


def main() -> None:
    """Examine what the command line asks for."""
    parser = harness.command_line("Examine fastload doctor with scripts by others.", "exam", pairs=3)
    parser.add_argument("--scripts", type=Path, help="folder with a folder for each script")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of the scripts (default: all)")
    parser.add_argument("--models", nargs="+", default=["light", "heavy"], choices=["light", "heavy"])
    parser.add_argument("--loads", nargs="+", default=["quiet", "loaded"], choices=["quiet", "loaded"])
    parser.add_argument("--runs", type=int, default=1, help="of each (default: 1)")
    parser.add_argument("--summary", action="store_true", help="no runs: the table of what there is")
    options = parser.parse_args()
    if options.summary:
        kept = [json.loads(line) for line in options.out.read_text().splitlines()]
        print("\n".join(bench_drawn.summary(list({one["figure"]: one for one in kept}.values()))))
        return
    if options.scripts is None:
        parser.error("--scripts is needed")
    names = options.only or sorted(run.parent.name for run in options.scripts.glob("*/run.sh"))
    if options.quick:
        names, options.models, options.loads, options.pairs = names[:1], ["light"], ["quiet"], 1
    journal, records = harness.Journal(options.out, quick=options.quick, pairs=options.pairs), []
    for name, number, model, load in itertools.product(names, range(options.runs), options.models, options.loads):
        script = Foreign((options.scripts / name).resolve(), model)
        try:
            records.append(bench_drawn.examine(script, load, options.pairs))
            journal.note(f"{name}-{model}-{load}-{number}", **records[-1])
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            print(error, file=sys.stderr)
    print("\n".join(bench_drawn.summary(records)))


if __name__ == "__main__":
    main()
