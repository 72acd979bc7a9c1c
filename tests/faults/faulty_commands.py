"""Commands of fastload whose file operations fail or are recorded, by the shim in shim.c, and what must hold then.

`Bench` runs the real commands in forks of one process (`WarmPython`) that has the shim loaded. A `Case` is a command
that makes one file or folder. After any fault its output is absent or whole; nothing else changed; the command said
what went wrong in one line; and the same command then finishes with the bytes of a run without faults.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from child_processes import child_environment
from PIL import Image
from warm_python import WarmPython

SHIM = Path(__file__).with_name("shim.c")
KINDS = ("open", "read", "write", "sync", "truncate", "allocate", "rename", "link", "unlink", "mkdir")
CREATED, TRUNCATED = 1, 2

SHORT, KILLED = -1, -9
FAULTS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EINTR, errno.ENOSPC, errno.EDQUOT),
    "read": (errno.EIO, errno.EINTR, SHORT),
    "write": (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT, SHORT),
    "sync": (errno.EIO, errno.EINTR, errno.ENOSPC, errno.EDQUOT),
    "truncate": (errno.EIO, errno.EINTR, errno.ENOSPC, errno.EDQUOT),
    "allocate": (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT),
    "rename": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "link": (errno.EIO,),
    "unlink": (errno.EIO,),
    "mkdir": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
}
"""How a call of each kind may fail; SHORT: it reads or writes half of what it should."""

_FIRST = """
import contextlib, gc, io
from fastload.cli import main
for words in {commands}:
    sys.argv = ["fastload", *words]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main()
gc.freeze()  # Without it each fork copies the memory of every object there is, when it ends.
"""


class Call(NamedTuple):
    """A file operation that succeeded, as shim.c records it."""

    kind: str
    path: str
    other: str
    offset: int  # of "open": CREATED | TRUNCATED; of "sync": 1 for a whole file system
    length: int
    data: bytes


def read_calls(log: Path) -> list[Call]:
    """Returns the calls in a log, in order."""
    head, data, at = struct.Struct("=IIIIqq"), log.read_bytes() if log.exists() else b"", 0
    calls = []
    while at < len(data):
        kind, path, other, has_data, offset, length = head.unpack_from(data, at)
        at += head.size
        ends = np.cumsum([at, path, other, length if has_data else 0]).tolist()
        parts = [data[a:b] for a, b in itertools.pairwise(ends)]
        calls.append(Call(KINDS[kind], parts[0].decode(), parts[1].decode(), offset, length, parts[2]))
        at = ends[-1]
    return calls


@dataclass(frozen=True)
class Case:
    """A command: `words` with SRC and OUT for the folder of inputs and the output; `before`: what OUT holds first.

    `last`: the file of a folder that is written when all others are whole.
    """

    name: str
    words: tuple[str, ...]
    before: bytes | None = None
    folder: bool = False
    last: str = ""

    @property
    def warms(self) -> bool:
        """Whether it imports what other commands need, too."""
        return self.words[0] != "pack"

    def command(self, source: Path, output: Path) -> list[str]:
        """Returns the words behind `fastload`."""
        return [word.replace("SRC", str(source)).replace("OUT", str(output)) for word in self.words]


_PACK = ("pack", "SRC/photos", "OUT", "--workers", "0", "--chunk-bytes", "1500")
_EXPORT = ("export", "SRC/masked.h5", "OUT", "--workers", "1")
_MASKED = ("pack", "SRC/masked", "OUT", "--workers", "0", "--chunk-bytes", "1500")
CASES = (
    Case("raw", (*_PACK, "--size", "16")),
    Case("raw, replacing", (*_PACK, "--size", "16", "--overwrite"), before=b"an older file"),
    Case("ragged", _PACK),
    Case("jpeg", (*_PACK, "--store", "jpeg")),
    Case("source", (*_PACK, "--store", "source")),
    Case("gzip", (*_PACK, "--size", "16", "--codec", "gzip")),
    Case("zstd", (*_PACK, "--size", "16", "--codec", "zstd")),
    Case("ragged zstd", (*_PACK, "--codec", "zstd")),
    Case("masks", (*_MASKED, "--size", "16", "--codec", "none")),
    Case("compressed masks", (*_MASKED, "--size", "16")),
    Case("ragged masks", (*_MASKED, "--store", "source")),
    Case("skipping", ("pack", "SRC/damaged", "OUT", "--on-error", "skip", *_PACK[3:])),
    Case("skipping masks", (*_MASKED, "--size", "16", "--codec", "none", "--on-error", "skip")),
    Case("workers", (*_PACK[:4], "1", "--chunk-bytes", "1500", "--size", "16")),
    Case("repack", ("repack", "SRC/a.h5", "OUT", "--shuffle", "--seed", "3", "--workers", "0")),
    Case("repack gzip", ("repack", "SRC/a.h5", "OUT", "--codec", "gzip", "--workers", "0")),
    Case("repack ragged", ("repack", "SRC/ragged.h5", "OUT", "--workers", "0")),
    Case("merge", ("merge", "SRC/a.h5", "SRC/b.h5", "--output", "OUT", "--workers", "0")),
    Case("export folders", ("export", "SRC/a.h5", "OUT", "--workers", "1"), folder=True),
    Case("export table", ("export", "SRC/masked.h5", "OUT", "--workers", "1", "--layout", "csv"), folder=True),
    Case("export jpeg", ("export", "SRC/source.h5", "OUT", "--workers", "1"), folder=True),
    Case("export shards", (*_EXPORT, "--format", "webdataset", "--shard-bytes", "8K"), folder=True),
    Case("export hf", (*_EXPORT, "--format", "hf"), folder=True),
)


MANY = 70
"""Images in the folders `many photos`, `many more` and `many masked`: enough for two workers."""


def make_inputs(root: Path) -> None:
    """Writes small images of several sizes in class folders, others with masks, and one folder with a damaged image."""
    rng = np.random.default_rng(20)
    for number in range(MANY):
        size = (24 + number % 3 * 4, 20)
        pixels = rng.integers(0, 255, (*size, 3), np.uint8)
        small = number < 12
        for folder in ("photos", "damaged", "more", "many photos", "many more")[0 if small else 3 :]:
            more = "more" * folder.endswith("more")
            path = root / folder / f"class{number % 2}" / f"{more}{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=80)
        for folder in ("masked", "masked more", "many masked")[0 if small else 2 :]:
            more = "more" * folder.endswith("more")
            for name, image in (("images", pixels), ("masks", np.full(size, number % 4, np.uint8))):
                path = root / folder / name / f"{more}{number:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
    damaged = root / "damaged/class0/04.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])


PACKED = (
    Case("a", (*_PACK, "--size", "16")),
    Case("b", (*_PACK, "--size", "16", "--seed", "5")),
    Case("ragged", _PACK),
    Case("source", (*_PACK, "--store", "source")),
    Case("masked", (*_MASKED, "--size", "16")),
)
"""Packed files that are inputs of other cases."""


def append_cases(inputs: Path) -> tuple[Case, ...]:
    """Returns cases of `fastload append` to copies of packed inputs."""
    words = {
        "a": ("SRC/more", "--workers", "0"),
        "ragged": ("SRC/many more", "--workers", "2"),
        "masked": ("SRC/masked more", "--workers", "0"),
        "source": ("SRC/more", "--workers", "0", "--on-error", "skip"),
    }
    return tuple(
        Case(f"append to {name}", ("append", "OUT", *more), before=(inputs / f"{name}.h5").read_bytes())
        for name, more in words.items()
    )


def content(path: Path) -> dict[str, bytes] | None:
    """Returns the files of an output, file or folder, by their names in it; None if it is absent."""
    if path.is_dir():
        return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}
    return {"": path.read_bytes()} if path.exists() else None


class Bench:
    """Runs cases in a folder: `inputs` must never change, and each run has an output folder of its own."""

    def __init__(self, python: WarmPython, folder: Path, control: Path) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        self._python, self._control = python, control
        self._runs = 0
        self.messages = Counter[str]()
        assert self.run(Case("first", ("verify", "SRC/a.h5")), folder).returncode == 0  # All inputs are made by then.
        self._before = self._inputs_now()
        self._whole: dict[str, dict[str, bytes]] = {}

    def _inputs_now(self) -> dict[str, tuple[int, int, bytes]]:
        files = [path for path in sorted(self.inputs.rglob("*")) if path.is_file()]
        return {str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    def check_inputs(self) -> None:
        """Asserts that no input changed."""
        assert self._inputs_now() == self._before

    def new_output(self, case: Case) -> Path:
        """Returns the output of a run, in a new folder."""
        self._runs += 1
        output = self.folder / f"run{self._runs}" / ("out" if case.folder else "out.h5")
        output.parent.mkdir()
        if case.before is not None:
            output.write_bytes(case.before)
        return output

    def run(self, case: Case, output: Path, *control: str) -> subprocess.CompletedProcess[str]:
        """Runs the command; lines of `control` say what the shim does with inputs and outputs."""
        # Inputs that cannot be read are skipped where this is asked for.
        below = output.parent if "skip" in case.words else self.folder
        self._control.write_text("\n".join([f"below {below}", *control]) if control else "")
        try:
            return self._python.run("-m", "fastload", *case.command(self.inputs, output), cwd=self.folder)
        finally:
            self._control.write_text("")

    def whole(self, case: Case) -> dict[str, bytes]:
        """Returns the output of a run without faults, which `fastload verify` finds right."""
        if case.name not in self._whole:
            output = self.new_output(case)
            done = self.run(case, output)
            assert done.returncode == 0, done.stderr
            found = content(output)
            assert found is not None and os.listdir(output.parent) == [output.name]
            if not case.folder:
                assert self.run(Case("", ("verify", "OUT")), output).returncode == 0
            if case.last:
                assert self.run(Case("", ("verify", "OUT")), output / case.last).returncode == 0
            self._whole[case.name] = found
            shutil.rmtree(output.parent)
        return self._whole[case.name]

    def calls(self, case: Case) -> list[Call]:
        """Returns the calls of a run without faults."""
        output, log = self.new_output(case), self.folder / f"log{self._runs}"
        done = self.run(case, output, f"log {log}")
        assert done.returncode == 0 and content(output) == self.whole(case), done.stderr
        shutil.rmtree(output.parent)
        calls = read_calls(log)
        log.unlink()
        return calls

    def check_absent_or_whole(self, case: Case, output: Path) -> None:
        """Asserts that there is no output, that of before, or the whole one; a folder may be marked as unfinished."""
        found = content(output)
        if case.folder and found is not None:
            # An empty folder, or one whose journal is not begun, is what an export may begin in.
            unfinished = ".fastload-export" in found or not found or (case.last and case.last not in found)
            assert unfinished or found == self.whole(case), (
                f"neither absent, nor unfinished, nor whole: {sorted(found)}"
            )
            return
        accepted = [None, self.whole(case), *([] if case.before is None else [{"": case.before}])]
        assert found in accepted, "the output is neither absent nor whole"

    def check_finishes(self, case: Case, output: Path) -> None:
        """Asserts that the same command gives the whole output, and leaves nothing else.

        A command that had finished, up to the removal of its journal, is done: again it would say that the file exists.
        """
        if content(output) == self.whole(case) and os.listdir(output.parent) == [output.name]:
            return
        done = self.run(case, output)
        assert done.returncode == 0, f"the same command fails: {done.stderr}"
        found = content(output)
        assert found == self.whole(case), "the same command gives other bytes"
        assert os.listdir(output.parent) == [output.name], f"left over: {sorted(os.listdir(output.parent))}"

    def fail(self, case: Case, kind: str, number: int, error: int, many: int = 1) -> str:
        """Lets the call of this number fail, and those behind it; returns "failed" or "harmless", or raises."""
        output = self.new_output(case)
        done = self.run(case, output, f"fail {kind} {number} {error} {many}")
        check_message(done)
        self.messages[re.sub(r"\S*/|\d+", "", done.stderr)] += done.returncode
        self.check_absent_or_whole(case, output)
        if done.returncode == 0:
            assert content(output) == self.whole(case), "it says that it succeeded"
            assert os.listdir(output.parent) == [output.name]
        else:
            self.check_finishes(case, output)
        shutil.rmtree(output.parent)
        return "harmless" if done.returncode == 0 else "failed"


_BARE = re.compile(rf"error: \[Errno |: ({'|'.join(map(re.escape, filter(None, map(os.strerror, range(1, 133)))))})\.$")


def check_message(done: subprocess.CompletedProcess[str]) -> None:
    """Asserts that a command ended with 0, or with 1 and one line that is a FastloadError's, not the system's own."""
    shown = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode in (0, 1), shown
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, shown
    lines = [line for line in re.split(r"[\r\n]+", done.stderr) if "error:" in line]
    assert len(lines) == (done.returncode == 1), shown
    assert not any(_BARE.search(line) for line in lines), f"the system's message alone: {lines}"


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    """Yields a Bench in a folder; skips the test where the shim cannot be built or loaded."""
    if sys.platform != "linux":
        pytest.skip("the shim that fails file operations is loaded by LD_PRELOAD, as Linux has it")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc, clang) to build the shim that fails file operations")
    library, control = folder / "shim.so", folder / "control"
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, SHIM, "-ldl", "-lpthread"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        pytest.skip(f"the shim cannot be built: {textwrap.shorten(built.stderr, 200)}")
    control.write_text("")
    environment: Mapping[str, str] = child_environment(
        LD_PRELOAD=str(library), FAULTS_CONTROL=str(control), OPENBLAS_NUM_THREADS="1", COLUMNS="10000"
    )
    inputs = folder / "runs" / "inputs"
    inputs.mkdir(parents=True)
    make_inputs(inputs)
    # By that the process also imports what commands need: each fork would have to, and take ten times as long.
    commands = [case.command(inputs, inputs / f"{case.name}.h5") for case in PACKED]
    commands += [case.command(inputs, folder / f"first{number}") for number, case in enumerate(CASES) if case.warms]
    with WarmPython(environment, folder, _FIRST.format(commands=commands)) as python:
        yield Bench(python, folder / "runs", control)


_LOGGED_EVERY = 100


def log_found(what: str, tried: int, survived: Counter[str], wrong: Sequence[str], *, end: bool) -> None:
    """Appends what was found so far to the file named by FASTLOAD_FAULTS_LOG, if any; a long run does so as it goes."""
    if (log := os.environ.get("FASTLOAD_FAULTS_LOG")) and (end or tried % _LOGGED_EVERY == 0):
        with open(log, "a", encoding="utf-8") as file:
            print(json.dumps({"what": what, "tried": tried, "survived": survived, "wrong": wrong}), file=file)
