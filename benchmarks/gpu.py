"""How fast is fastload on this GPU? Three commands of under nine minutes each; the first one says most.

    python benchmarks/gpu.py                                what matters most, into benchmarks/results/<device name>/
    python benchmarks/gpu.py --set second                   then `--set third`: the rest, into the same record
    python benchmarks/gpu.py --out FOLDER --commit HASH     elsewhere; where there is no git to ask
    python benchmarks/gpu.py --only copy kernel             some of it (names below)
    python benchmarks/gpu.py --device cpu --tiny            every branch on the CPU, in a minute: figures mean nothing

It needs the checkout, torch with CUDA, h5py, Pillow, xxhash and psutil; simplejpeg, torchvision, pynvml and matplotlib
where they are. It draws its data into memory (--data, else /dev/shm or the folder for temporary files) and removes it.
`PYTHONPATH=. python -m pytest -m gpu` runs the tests that need a GPU, with Triton and pytest besides.

`sanity`: whether each path runs and gives the rows of the file, and what it costs the host. `copy`: plain copies, the
yardsticks. `kernel`: the fused augmentation over a device copy of as many bytes, and over
other ways. `train-*`: training from FastLoader over the same step on one cached batch, with the driver's counters;
`plain-*`: from JPEG files, torchvision's transforms and a DataLoader. `host-to-device`, `host-cache`, `device-cache`:
batches into device memory. `stored`: training from JPEGs in the packed file, decoded by threads or by the device.
`workers`: Python transforms in processes. `step-rate`: the shortest step that is not held up. `cpu-seconds`: for 1,000
images.

Each section runs in a process of its own with a limit of time. What fails, hangs or is not there is written down, and
the rest goes on. gpu.jsonl has one line a section: its `figures` by name, each with `value`, `unit` and `target`, and
what it was made of; `void` says that a figure does not count. plot_gpu.py draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Only the standard library here: what is missing or broken on a machine shall be told, not end the run.
HERE = Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results"

SETS = {
    "first": {
        "sanity": 40, "data": 80, "kernel": 80, "train-resnet50": 90, "host-to-device": 40, "train-resnet18": 100,
        "copy": 25,
    },
    "second": {
        "data": 80, "device-cache": 60, "stored": 95, "host-cache": 40, "workers": 45, "step-rate": 90,
        "cpu-seconds": 45,
    },
    "third": {"data": 80, "plain-resnet50": 60, "plain-resnet18": 60, "parallel": 90, "train-compiled": 120},
}  # fmt: skip
"""The sections of each command in order of worth, and the seconds that each may take: a command ends in its budget.

What earlier ones did not take is the next one's, up to twice its own."""

LIMITS_S = {name: limit for sections in SETS.values() for name, limit in sections.items()}
NEED_DATA = set(LIMITS_S) - {"sanity", "copy", "data", "kernel", "parallel"}
LEAST_S = {"parallel": 60.0, "train-compiled": 80.0}
"""A section is not begun with less time left; 15 s for the others."""
MACHINE_S, PLOTS_S = 55, 25  # the first import of torch reads gigabytes; kept for the plots
BUDGET_S = 540
DATA_BYTES = 40 << 30  # what everything takes, worker processes' batches in /dev/shm included


class Run:
    """One run: its processes, its record, its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.budget_s
        self.child: subprocess.Popen[str] | None = None
        self.data = Path(tempfile.mkdtemp(prefix="fastload-gpu-", dir=options.data))
        self.where: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.out: Path | None = None
        self.stopped = False  # by a signal

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()

    def begin(self) -> Path:
        """Asks the machine what it is, and returns the file of the record.

        Raises:
            SystemExit: it has no such device, or torch cannot use it: there is nothing to measure.
        """
        record = self.section("machine", MACHINE_S)
        if self.stopped:
            sys.exit(143)
        if "where" not in record["figures"] and "code" in record.get("error", ""):
            sys.exit(f"nothing can be measured with --device {self.options.device}: see the error above")
        where = record["figures"].get("where", {})
        self.where = {name: where[name] for name in ("machine", "versions", "commit", "device") if name in where}
        if self.options.commit:
            self.where["commit"] = self.options.commit
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(self.where.get("device", {}).get("name", "unknown-device")))
        self.out = self.options.out or RESULTS / name
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "gpu.jsonl"
        if not self.options.only and self.options.set in ("first", "all"):
            path.unlink(missing_ok=True)  # else what is measured again is added, and the last one counts
        self.write(record)
        return path

    def sections(self, names: list[str]) -> None:
        """All of them, in order, as far as time allows."""
        built = "data" in names
        for place, name in enumerate(names):
            left = self.left_s() - PLOTS_S
            spare = left - sum(LIMITS_S[later] for later in names[place + 1 :])
            if left < LEAST_S.get(name, 15.0):
                self.write({"section": name, "figures": {}, "skipped": f"the budget left {max(0, left):.0f} s"})
            elif name in NEED_DATA and not built:
                self.write({"section": name, "figures": {}, "error": "the data could not be made"})
            else:
                usual = LIMITS_S[name]
                limit = self.options.limit.get(name, max(usual, min(2 * usual, spare)))
                self.write(self.section(name, min(limit, left)))
            if self.stopped:
                return
            if name == "data":
                built = (self.data / "photos.h5").exists()

    def section(self, name: str, limit_s: float, data: Path | None = None) -> dict[str, Any]:
        """Runs one in its own process group; what it measured, and why it ended if not by itself."""
        print(f"{name} (at most {limit_s:.0f} s)", flush=True)
        figures, log = self.data / f"{name}.jsonl", self.data / f"{name}.log"
        words = {
            "device": self.options.device, "tiny": self.options.tiny, "data": str(data or self.data),
            "figures": str(figures), "fail": self.options.fail, "hang": self.options.hang,
        }  # fmt: skip
        paths = [str(ROOT), str(HERE), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        begin, ended = time.monotonic(), ""
        with open(log, "w") as errors:
            self.child = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_sections.py"), name, json.dumps(words)], stderr=errors, text=True,
                cwd=self.data, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = self.child.wait(limit_s)
                ended = f"the process ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"over its limit of {limit_s:.0f} s, and killed"
            except (SystemExit, KeyboardInterrupt):
                self.stopped, ended = True, "gpu.py was stopped meanwhile"  # what was measured so far counts
            finally:
                self.end_child()
        found = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
        record: dict[str, Any] = {"section": name, "figures": {one.pop("figure"): one for one in found}}
        if ended:
            tail = log.read_text(errors="replace")[-3000:]
            record |= {"error": ended, "log": tail}
            print(f"  {name}: {ended}\n{tail}", flush=True)
        return record | {"seconds": round(time.monotonic() - begin, 1)}

    def end_child(self) -> None:
        """Ends the section's process and all that it started."""
        if self.child is None:
            return
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()
        self.child = None

    def write(self, record: dict[str, Any]) -> None:
        """One line of the record, on disk before anything else begins."""
        assert self.out is not None, "begin() was called"
        options = {"device": self.options.device, "tiny": self.options.tiny, "budget_s": self.options.budget_s}
        note = {"note": "cpu, not a GPU figure"} if self.options.device == "cpu" else {}
        at = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(map(without_folder, sys.argv)),
        }
        self.records.append(record)
        with open(self.out / "gpu.jsonl", "a") as file:
            file.write(json.dumps(record | note | at | {"options": options} | self.where) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def summary(self) -> None:
        """The table of what was measured, last."""
        print(f"\n{'figure':58} {'value':>14} unit")
        for record in self.records:
            for name, figure in record["figures"].items():
                told = figure.get("value")
                text = f"{told:,.3f}" if isinstance(told, float) and abs(told) < 1000 else f"{told:,.0f}" \
                    if isinstance(told, (int, float)) else "-"  # fmt: skip
                beside = figure.get("error") or figure.get("skipped") or figure.get("unit", "")
                target = f"   [target {figure['target']}{judged(figure)}]" if figure.get("target") else ""
                void = f"   VOID: {figure['void']}" if "void" in figure else ""
                if record["section"] not in ("machine", "plots"):
                    print(f"{name[:58]:58} {text:>14} {str(beside)[:90]}{target}{void}")
            if "error" in record or "skipped" in record:
                print(f"section {record['section']}: {record.get('error') or record.get('skipped')}")
        print(f"{self.out}: {self.options.budget_s - self.left_s():.0f} s", flush=True)


def judged(figure: dict[str, Any]) -> str:
    """Whether the figure's value meets its target, as said in the table; "" where it has none."""
    value, (sign, number) = figure.get("value"), figure["target"].split()
    if not isinstance(value, (int, float)) or "void" in figure:
        return ""
    met = value >= float(number) if sign == ">=" else value <= float(number)
    return ": met" if met else ": MISSED"


def without_folder(word: str) -> str:
    """A word of the command line without the folders of this machine."""
    return Path(word).name if word.startswith("/") else word


def room_for_data(wished: Path | None, *, tiny: bool) -> Path:
    """A folder for the data that stays in memory if possible."""
    shared = Path("/dev/shm")
    if wished is not None:
        return wished
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > (0 if tiny else DATA_BYTES):
        return shared
    return Path(tempfile.gettempdir())


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure fastload on a GPU.")
    parser.add_argument("--out", type=Path, help="folder for gpu.jsonl and plots (benchmarks/results/<device name>)")
    parser.add_argument("--set", choices=(*SETS, "all"), default="first", help="which sections (first)")
    parser.add_argument("--only", nargs="+", choices=list(LIMITS_S), metavar="SECTION", help=", ".join(LIMITS_S))
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"seconds for everything ({BUDGET_S})")
    parser.add_argument("--limit", nargs="+", default=[], metavar="SECTION=SECONDS", help="other limits of time")
    parser.add_argument("--data", type=Path, help="folder for the data (/dev/shm where it has room)")
    parser.add_argument("--commit", help="commit of this tree, where git cannot tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--fail", help=argparse.SUPPRESS)  # a section that shall fail, or hang: for the tests
    parser.add_argument("--hang", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.limit = {word.split("=")[0]: float(word.split("=")[1]) for word in options.limit}
    options.data = room_for_data(options.data, tiny=options.tiny)
    if options.device == "cpu":
        if not options.tiny:
            parser.error("--device cpu measures nothing: give --tiny with it")
        options.out = options.out or Path(tempfile.mkdtemp(prefix="fastload-gpu-on-cpu-"))
        if options.out.resolve().is_relative_to(RESULTS):
            parser.error(f"--out {options.out}: what a CPU gives is no figure, and does not belong among the results")
    if options.only and NEED_DATA & set(options.only):
        options.only = [name for name in LIMITS_S if name in {*options.only, "data"}]
    if options.out is not None:
        options.out = options.out.resolve()
    return options


def main() -> int:
    """Measure, draw, and say what came out; 1 when any section failed."""
    options = parse()
    # Killed from outside, it still ends its processes, writes down what they measured and removes its data.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(options)
    try:
        record = run.begin()
        run.sections(options.only or list(SETS.get(options.set, LIMITS_S)))
        if not run.stopped:
            run.write(run.section("plots", max(15, min(60, run.left_s())), record))
        run.summary()
    finally:
        run.end_child()
        shutil.rmtree(run.data, ignore_errors=True)
    return 143 if run.stopped else int(any("error" in record for record in run.records))


if __name__ == "__main__":
    sys.exit(main())
