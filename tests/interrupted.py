"""Calls that are stopped or killed on the way, and what they leave."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def stop_at(call: int, stage: str = "") -> Callable[[str, int, int], None]:
    """A progress callback that stops at this call of it (those of one stage count), as Ctrl-C would; 0: never."""
    calls = itertools.count(1)

    def progress(now: str, done: int, total: int) -> None:
        if now.startswith(stage) and next(calls) == call:
            raise KeyboardInterrupt

    return progress


_KILLED = """
import itertools, json, os, signal, sys
from pkgutil import resolve_name
call, function, args, options, settings = json.loads(sys.argv[1])
for name, value in settings.items():
    setattr(resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2], value)
calls = itertools.count(1)
def progress(stage, done, total):
    if next(calls) == call:
        os.kill(os.getpid(), signal.SIGKILL)
resolve_name(function)(*args, **options, progress=progress)
"""


def killed_at(call: int, function: str, *args: Any, settings: dict[str, int], **options: Any) -> None:
    """Calls a function by its name in a process that is killed at this call of progress; `settings` of modules hold."""
    words = json.dumps([call, function, args, options, settings], default=str)
    assert subprocess.run([sys.executable, "-c", _KILLED, words], timeout=600).returncode == -signal.SIGKILL


def leftovers(output: Path) -> list[str]:
    """The names of the files that packing left beside an output."""
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(f"{output.name}."))


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can be larger: that stands in for a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_SCRIPT = """
import json, os, signal, sys
from fastload.pack import pack_images
source, scratch, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def pack(output, kill_at, others):
    seen = 0
    def hook(event, args):
        nonlocal seen
        ours = event == "fcntl.flock" or output in str(args[0] if args else "")
        if event in ("open", "os.rename", "os.remove", "os.truncate", "fcntl.flock") and ours:
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    progress = lambda stage, done, total: hook("os.rename", (output,))
    report = pack_images(source, output, on_error="skip", progress=progress, **{**options, **others})
    return [report.chunks, report.chunks_kept, report.chunks_decoded, seen]

# Here, so that forks find everything imported.
pack_images(source, scratch, on_error="skip", **{**options, "workers": 0})
for line in sys.stdin:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, json.dumps(pack(*json.loads(line))).encode())
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    said = os.read(read, 100).decode()
    os.close(read)
    print("killed" if status == signal.SIGKILL else said, flush=True)
"""


@contextlib.contextmanager
def packer(source: Path, scratch: Path, **options: Any) -> Iterator[Callable[..., list[int] | None]]:
    """Packs an output in a process of its own, skipping what is bad: `pack(output, kill_at, **further options)`.

    Killed at a step (a file operation or a call of progress) it gives None; else the numbers of its chunks, of those
    kept, of those decoded, and of its steps.
    """
    # One thread, so that Python does not warn of the fork.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, source, scratch, json.dumps(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def pack(output: Path, kill_at: int = 0, **others: Any) -> list[int] | None:
        print(json.dumps([str(output), kill_at, others]), file=process.stdin, flush=True)
        said = process.stdout.readline().strip()
        if not said:
            process.stdin.close()
            raise AssertionError(process.stderr.read())
        return None if said == "killed" else json.loads(said)

    try:
        yield pack
        _, complaints = process.communicate(timeout=600)
        assert process.returncode == 0 and not complaints
    finally:
        process.kill()
        process.communicate()
