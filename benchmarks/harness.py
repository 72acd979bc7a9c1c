"""The clock, the pairs and the record that all benchmarks share.

Two ways are compared in pairs, in turn; see `fastload.profiling.bench.passes`. A record is one JSON line: the question,
the figures, the options, the file, and the machine, versions and commit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

import fastload
from fastload.format.writer import writer_name
from fastload.profiling.bench.passes import Spread, Way, compare, spread, touch
from fastload.profiling.meter.sampler import peak_memory, process_memory
from fastload.system import native

# Measured by the product alike.
__all__ = ["Spread", "Way", "compare", "peak_memory", "process_memory", "spread", "touch"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(ROOT / "tools"))  # sample files and the training script, imported after this module
PACKAGES = ("numpy", "h5py", "torch", "pillow", "simplejpeg")
# Commands that are measured start from bytecode, as with a package that pip installed.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def machine() -> dict[str, Any]:
    """Where it ran, in terms that let another compare: no names of people or hosts."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what the figures depend on."""
    found = {"python": platform.python_version(), "fastload": writer_name().removeprefix("fastload ")}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    found["native"] = "absent" if native.library() is None else "with JPEG" if native.decodes_jpeg() else "without JPEG"
    return found


def commit(checkout: Path = ROOT) -> str:
    """The checkout's commit, with `+` when the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Journal:
    """One JSON line a figure, appended to a file and said on the terminal."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.where = {"machine": machine(), "versions": versions(), "commit": commit()}
        path.parent.mkdir(parents=True, exist_ok=True)

    def note(self, figure: str, *, target: str = "", file: dict[str, Any] | None = None, **values: Any) -> None:
        """Append one figure. `target` is the issue's words, such as `>= 0.9`."""
        time_text = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"figure": figure, "target": target, **values, "file": file or {}, "options": self.options}
        with open(self.path, "a") as out:
            out.write(json.dumps({**record, **self.where, "time": time_text}) + "\n")
        told = "; ".join(f"{name} {_say(value)}" for name, value in values.items() if not isinstance(value, str))
        print(f"{figure}: {told}" + (f"   [target {target}]" if target else ""), flush=True)


def _say(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{_say(value['median'])} ({_say(value['lowest'])} to {_say(value['highest'])}, n={value['count']})"
    if isinstance(value, list):
        return f"({len(value)} values)"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def read_all(batch: NDArray[Any]) -> int:
    """Reads every byte of a C-contiguous array once, in memory order: as long as memory takes, 1 to 3 ms for 30 MB."""
    flat = batch.reshape(-1).view(np.uint8)
    whole = flat.size - flat.size % 8
    return int(flat[:whole].view(np.uint64).max()) if whole else 0


def pixels_of(batches: Iterable[Any]) -> Iterator[NDArray[Any]]:
    """The images of each batch as they lie in memory."""
    for batch in batches:
        array = batch[0].numpy()
        # Not torch's permute: it gives up the GIL, and beside pure Python waits 5 ms for it; np.take does not.
        yield array if array.flags.c_contiguous else array.transpose(0, 2, 3, 1)


def rate(batches: Iterable[NDArray[Any]], work: Callable[[NDArray[Any]], object] | None = touch) -> float:
    """Images a second while the consumer does `work` on each batch."""
    count, begin = 0, time.perf_counter()
    for batch in batches:
        if work is not None:
            work(batch)
        count += len(batch)
    return count / (time.perf_counter() - begin)


def command_line(
    about: str | None, name: str, *, figures: Iterable[str] = (), pairs: int = 0
) -> argparse.ArgumentParser:
    """The command line that benchmarks share: --only, --data, --out, --pairs and --quick.

    Args:
        about: its description.
        name: of the results, NAME.jsonl.
        figures: what --only chooses from, all of them by default; without any there is no such option.
        pairs: how many pairs are measured by default; 0: there is no such option.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names := [figure.replace("_", "-") for figure in figures]:
        parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FIGURE", help=", ".join(names))
    parser.add_argument("--data", type=Path, default=ROOT / ".bench", help="folder for the data (.bench)")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl", help="JSON lines to append to")
    if pairs:
        parser.add_argument("--pairs", type=int, default=pairs, help=f"of each figure, in turn (default: {pairs})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    return parser


def begin(options: argparse.Namespace, *names: str, **more: Any) -> Journal:
    """Makes the folder for the data, and begins a journal that notes these options of the command line, and more."""
    options.data.mkdir(parents=True, exist_ok=True)
    return Journal(options.out, quick=options.quick, **{name: getattr(options, name) for name in names}, **more)


def take_figures(bench: object, figures: Iterable[str]) -> None:
    """Calls the methods that take these figures."""
    for figure in figures:
        getattr(bench, figure.replace("-", "_"))()


class Busy:
    """What the main thread does while batches are read beside it: `python`, `train` or `idle`.

    `slice` does about a millisecond of it. Pure Python never gives up the GIL of its own will; eager training of a
    small net takes and frees it some hundred times a step, as every training loop does.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "train":
            import torch
            from torch import nn

            torch.manual_seed(0)
            net = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * 49, 10),
            )
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            images, labels = torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,))
            loss_of = nn.CrossEntropyLoss()

            def step() -> None:
                optimizer.zero_grad()
                loss_of(net(images), labels).backward()
                optimizer.step()

            self.slice: Callable[[], None] = step
        elif kind == "python":

            def spin() -> None:
                total = 0
                for number in range(20_000):
                    total += number * number

            self.slice = spin
        else:
            self.slice = lambda: time.sleep(0.001)

    def beside(self, ways: Sequence[Way]) -> list[Way]:
        """The same ways, each in a thread of its own while this thread is busy; as they are where it would be idle."""
        return [way if self.kind == "idle" else functools.partial(self.rate_beside, way) for way in ways]

    def rate_beside(self, work: Way) -> float:
        """What `work` reaches in a thread of its own while this thread is busy."""
        result: list[float | BaseException] = []

        def target() -> None:
            try:
                result.append(work())
            except BaseException as exc:  # noqa: BLE001  # raised again where the thread is joined
                result.append(exc)

        thread = threading.Thread(target=target)
        thread.start()
        while thread.is_alive():
            self.slice()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]


def run_python(code: str, *words: str) -> dict[str, Any]:
    """The JSON object that a fresh Python process prints last."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the child process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def cli(*words: str | Path) -> list[str]:
    """The command line of fastload in this Python's environment."""
    script = Path(sys.executable).with_name("fastload")
    start = [str(script)] if script.exists() else [sys.executable, "-c", "from fastload.cli import main; main()"]
    return [*start, *map(str, words)]


def unpacked_photos(photos: Path, data: Path) -> Path:
    """The folder of the clothing photos: `photos`, or where that tar was unpacked."""
    if photos.is_dir():
        return photos
    folder = data / "clothing"
    if not folder.exists():
        with tarfile.open(photos) as tar:
            tar.extractall(folder, filter="data")
    return folder


def drawn_faces(folder: Path, count: int) -> Path:
    """The faces of tools/make_faces.py in that folder, drawn when they are not there."""
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_faces.py"), str(folder), "--count", str(count)], check=True
    )
    return folder


def packed_faces(folder: Path, count: int, store: str | None = None) -> Path:
    """Those faces packed, 218x178x3, beside their folder; drawn and packed when they are not there.

    `store`: as in `fastload.pack_images`.
    """
    path = folder / f"faces-{count}{f'-{store}' if store else ''}.h5"
    if not path.exists():
        fastload.pack_images(drawn_faces(folder / f"faces-{count}", count), path, store=store)
    return path
