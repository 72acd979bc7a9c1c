"""Every command on hostile files: each must end in a FastloadError or a result, in bounded memory and CPU time.

    python tests/faults/hostile_commands.py [NAME...]      # of `hostile_files.FILES`; all without one

The commands' functions run in a fork of this process, which has imported everything, with a limit for memory beyond
what is in use, and one of CPU seconds for each call. A fork does all commands of one file, unless it dies.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from hostile_files import FILES

import fastload.profiling.bench.benchmark as bench
from fastload.cli.info import _print
from fastload.dataset import PackedDataset
from fastload.errors import FastloadError
from fastload.export import export_file
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import make_preview
from fastload.inspection.shuffle_quality import measure_shuffles
from fastload.inspection.verify import verify_file
from fastload.loader.loader import FastLoader
from fastload.repack import merge_files, repack_file

MEMORY_BYTES = 3 * 2**29
CPU_S, WALL_S = 15, 60


def _info(file: Path, folder: Path) -> None:
    found = inspect_file(file)
    with contextlib.redirect_stdout(io.StringIO()):
        _print(found)
    json.dumps(found.to_dict())


def _load(read: str, file: Path, folder: Path) -> None:
    names = PackedDataset(file).fields
    loader = FastLoader(PackedDataset(file, fields=[*names, "row"], read=read), 4, workers=1, ends="exact")
    with contextlib.closing(loader):
        for number, _ in zip(range(8), loader, strict=False):
            assert number < 8
        loader.state_dict()


def _dataset(file: Path, folder: Path) -> None:
    data = PackedDataset(file)
    for at in {0, len(data) // 2, len(data) - 1}:
        data[at]


def _bench(file: Path, folder: Path) -> None:
    bench.run_bench(file, bench.BenchOptions(batch_size=4, seconds=0.02, workers=1), command="")


def _again(file: Path) -> Path:
    """Returns the same file under another name; one file cannot be merged with itself."""
    again = file.with_name("again.h5")
    if file.is_file() and not file.is_symlink():
        os.link(file, again)
    return again


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "info": _info,
    "shuffles": lambda file, folder: measure_shuffles(file, batch_size=4),
    "verify": lambda file, folder: verify_file(file, workers=1),
    "preview": lambda file, folder: make_preview(file, folder / "sheet.png", count=9),
    "export": lambda file, folder: export_file(file, folder / "exported", workers=1),
    "repack": lambda file, folder: repack_file(file, folder / "new.h5", workers=0),
    "merge": lambda file, folder: merge_files([file, _again(file)], folder / "both.h5", workers=0),
    "dataset": _dataset,
    "map": lambda file, folder: _load("map", file, folder),
    "pread": lambda file, folder: _load("pread", file, folder),
    "bench": _bench,
}


class Ending(NamedTuple):
    """How a command on a file ended."""

    file: str
    command: str
    kind: str  # "result", the name of a FastloadError, or what should not be: another exception, or a signal
    detail: str  # its message, or its traceback
    cpu_s: float

    @property
    def allowed(self) -> bool:
        return self.kind == "result" or self.kind.startswith("FastloadError ")


def endings(names: Iterable[str]) -> Iterator[Ending]:
    """Yields how each command ended on each of these files of `FILES`."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            file = Path(folder, "file.h5")
            FILES[name](file)
            left = list(COMMANDS)
            while left:
                done = [Ending(name, *said) for said in _in_fork(file, Path(folder), left)]
                yield from done
                left = left[len(done) :]
            with contextlib.suppress(OSError):
                file.chmod(0o600)


def _in_fork(file: Path, folder: Path, commands: list[str]) -> list[tuple[str, str, str, float]]:
    """Runs commands, until one ends the process; returns command, kind, detail and CPU seconds of each."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        try:
            with os.fdopen(writes, "w") as said:
                _run(file, folder, commands, said)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as lines:
        found = [tuple(json.loads(line)) for line in lines]
    _, status, used = os.wait4(child, 0)
    if len(found) < len(commands):
        number = -os.waitstatus_to_exitcode(status)
        what = f"signal {signal.Signals(number).name}" if number > 0 else f"exit code {-number}"
        found.append((commands[len(found)], what, f"{what} after {used.ru_utime:.1f} s", used.ru_utime))
    return found


def _run(file: Path, folder: Path, commands: list[str], said: io.TextIOBase) -> None:
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES,) * 2)
    for command in commands:
        before = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(before) + CPU_S + 1, resource.RLIM_INFINITY))
        signal.alarm(WALL_S)
        kind, detail = "result", ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                COMMANDS[command](file, folder)
        except FastloadError as exc:
            kind, detail = f"FastloadError {type(exc).__name__}", str(exc)
            if file.name not in detail and "again.h5" not in detail:
                kind, detail = "does not name the file", f"{type(exc).__name__}: {detail}"
        except BaseException as exc:  # noqa: BLE001, to say which it was
            kind, detail = type(exc).__name__, "".join(traceback.format_exception(exc))[-3000:]
        print(json.dumps([command, kind, detail, sum(os.times()[:2]) - before]), file=said, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    np.random.default_rng()
    kinds: Counter[str] = Counter()
    slowest: list[Ending] = []
    for ending in endings(sys.argv[1:] or FILES):
        kinds[ending.kind] += 1
        slowest = sorted([*slowest, ending], key=lambda one: -one.cpu_s)[:8]
        if not ending.allowed:
            print(f"--- {ending.file!r} {ending.command}: {ending.kind}\n{ending.detail}", flush=True)
    print(f"{sum(kinds.values()) // len(COMMANDS)} files, {len(COMMANDS)} commands: {dict(kinds.most_common())}")
    for one in slowest:
        print(f"{one.cpu_s:.1f} s of CPU: {one.command} {one.file!r}: {one.kind}")


if __name__ == "__main__":
    main()
