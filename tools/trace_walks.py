"""Counts the modules that four walks through fastload pass, from a trace of all of its functions in all threads.

    python tools/trace_walks.py                       all four, each in a process of its own: half a minute
    python tools/trace_walks.py --walk jpeg           one of them: loader, raw, jpeg, pack
    python tools/trace_walks.py --walk raw --list     its modules in the order in which they are first entered
    python tools/trace_walks.py --record FILE         appends the counts to a file, a line of JSON a walk

| walk | what is traced | counts are |
| --- | --- | --- |
| loader | `FastLoader(FILE, 16)` is made, of images stored as pixels | of all of it |
| raw | batches 60 to 160 of an epoch of such a loader | a batch |
| jpeg | the same of stored JPEGs, with `transform=[RandomResizedCrop(24)]` | a batch |
| pack | `pack_images(FOLDER, FILE, size=32, workers=0)` of 256 JPEGs | an image |

Images are drawn, 40 x 48, and batches have 16 of them; everything runs on the CPU. `modules` and `functions` are those
entered at all. A call counts each time that a function is entered, also a generator each time that it goes on; a move
is a call from a function of fastload in another module, whatever lies between them, and a return its end. Modules that
are imported and comprehensions do not count. Threads read ahead, and raw batches are read several at a time or not, as
they come to it: a batch's counts are those of a hundred, divided, and vary by a tenth or, of `raw`, a third.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import fastload
from fastload import FastLoader, pack_images
from fastload.transforms import RandomResizedCrop

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(fastload.__file__).resolve().parent
BATCH_SIZE, FIRST, LAST = 16, 60, 160
PACKED = 256  # images
_NO_FUNCTIONS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True)
class WalkCounts:
    """What one walk enters; calls, moves and returns are per unit, a batch or an image."""

    walk: str
    units: int
    modules: int
    functions: int
    calls: float
    moves: float
    returns: float
    in_order: list[str]  # modules as they are first entered, in any thread


@dataclass
class _Thread:
    """The functions of fastload that a thread is in, outermost first, by module; and what it did while that counts."""

    inside: list[str] = field(default_factory=list)
    calls: int = 0
    moves: int = 0
    returns: int = 0


class Trace:
    """Follows functions of fastload in this thread and all that begin later; counts them within `counting`."""

    def __init__(self) -> None:
        self._modules: dict[CodeType, str | None] = {}  # None: no function of fastload
        self._here = threading.local()
        self._threads: list[_Thread] = []
        self._functions: dict[CodeType, str] = {}  # entered while that counts, in order
        self._counts = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Sees calls and returns inside the block."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is entered inside the block."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def result(self, walk: str, units: int) -> WalkCounts:
        """Returns what was counted."""
        calls, moves, returns = (
            round(sum(getattr(thread, name) for thread in self._threads) / units, 2)
            for name in ("calls", "moves", "returns")
        )
        modules = list(dict.fromkeys(self._functions.values()))
        return WalkCounts(walk, units, len(modules), len(self._functions), calls, moves, returns, modules)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._modules:
            self._modules[code] = _module_of(code)
        if (module := self._modules[code]) is None:
            return
        thread = getattr(self._here, "thread", None)
        if thread is None:
            thread = self._here.thread = _Thread()
            self._threads.append(thread)
        inside, counts = thread.inside, self._counts
        if event == "call":
            if counts:
                self._functions.setdefault(code, module)
                thread.calls += 1
                thread.moves += bool(inside) and inside[-1] != module
            inside.append(module)
        elif inside:  # else it was entered before anything was followed
            inside.pop()
            if counts:
                thread.returns += bool(inside) and inside[-1] != module


def _module_of(code: CodeType) -> str | None:
    """Returns the module of a function of fastload, as `read/reader`; None of anything else."""
    path = Path(code.co_filename)
    if code.co_name in _NO_FUNCTIONS or not path.is_relative_to(PACKAGE):
        return None
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def draw(folder: Path, count: int) -> Path:
    """Draws JPEGs of two classes."""
    rng = np.random.default_rng(0)
    for name in ("disc", "square"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        name = ("disc", "square")[number % 2]
        image = Image.new("RGB", (48, 40), tuple(rng.integers(0, 256, 3).tolist()))
        left, top = rng.integers(0, 20, 2).tolist()
        shape, color = (left, top, left + 18, top + 18), tuple(rng.integers(0, 256, 3).tolist())
        pen = ImageDraw.Draw(image)
        (pen.ellipse if name == "disc" else pen.rectangle)(shape, fill=color)
        image.save(folder / name / f"{number:05}.jpg")
    return folder


def loader(trace: Trace, folder: Path) -> int:
    """Makes a loader of pixels."""
    file = pack_images(draw(folder / "images", PACKED), folder / "raw.h5", size=32, workers=0).path
    with trace.following(), trace.counting():
        made = FastLoader(file, BATCH_SIZE)
    made.close()
    return 1


def raw(trace: Trace, folder: Path) -> int:
    """Reads batches of pixels."""
    images = draw(folder / "images", (LAST + 10) * BATCH_SIZE)
    return _batches(trace, pack_images(images, folder / "raw.h5", size=32, workers=0).path)


def jpeg(trace: Trace, folder: Path) -> int:
    """Reads batches of crops of stored JPEGs."""
    images = draw(folder / "images", (LAST + 10) * BATCH_SIZE)
    file = pack_images(images, folder / "jpeg.h5", store="source", workers=0).path
    return _batches(trace, file, transform=[RandomResizedCrop(24)])


def _batches(trace: Trace, file: Path, **options: Any) -> int:
    with trace.following(), closing(FastLoader(file, BATCH_SIZE, **options)) as batches:
        coming = iter(batches)
        for _ in range(FIRST):
            next(coming)
        with trace.counting():
            for _ in range(LAST - FIRST):
                next(coming)
    return LAST - FIRST


def pack(trace: Trace, folder: Path) -> int:
    """Packs a folder of images."""
    images = draw(folder / "images", PACKED)
    with trace.following(), trace.counting():
        pack_images(images, folder / "packed.h5", size=32, workers=0)
    return PACKED


WALKS: dict[str, Callable[[Trace, Path], int]] = {"loader": loader, "raw": raw, "jpeg": jpeg, "pack": pack}


def walked(name: str) -> WalkCounts:
    """Walks in this process, in a folder that is removed afterwards."""
    trace = Trace()
    with tempfile.TemporaryDirectory(prefix="fastload-walk-") as folder:
        units = WALKS[name](trace, Path(folder))
    return trace.result(name, units)


def walked_apart(name: str) -> WalkCounts:
    """Walks in a process of its own, where nothing was made or remembered before."""
    command = [sys.executable, __file__, "--walk", name, "--json"]
    return WalkCounts(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", choices=WALKS, help="this one only")
    parser.add_argument("--list", action="store_true", help="print the modules in the order of first entry")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a walk")
    parser.add_argument("--record", type=Path, help="file to which the counts are appended")
    options = parser.parse_args()
    found = [walked(options.walk)] if options.walk else list(map(walked_apart, WALKS))
    if options.json:
        print("\n".join(json.dumps(asdict(one)) for one in found))
        return
    if options.record:
        sys.path.append(str(ROOT / "benchmarks"))
        from harness import Journal

        journal = Journal(options.record, command=" ".join(["tools/trace_walks.py", *sys.argv[1:]]))
        for one in found:
            values = asdict(one)
            journal.note(f"walk-{values.pop('walk')}", **values)
        return
    print(f"{'walk':8}{'modules':>8}{'functions':>11}{'calls':>9}{'moves':>8}{'returns':>9}")
    for one in found:
        unit = {"loader": "", "pack": "an image"}.get(one.walk, "a batch")
        print(
            f"{one.walk:8}{one.modules:8}{one.functions:11}{one.calls:9.1f}{one.moves:8.1f}{one.returns:9.1f}  {unit}"
        )
        if options.list:
            print("\n".join(f"    {module}" for module in one.in_order))


if __name__ == "__main__":
    main()
