"""Processes that tests start: what they inherit, and how several of them run together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import fastload

LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)  # fmt: skip
"""Variables by which torchrun tells a process its rank."""

LIMIT_S = 600  # ends a hang, and nothing that is slow on a busy machine


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment for a Python process: it imports the fastload under test and uses one thread.

    It knows nothing of a launcher or a pytest around this run, and a script imports what lies beside it, which
    PYTHONSAFEPATH (set by tools/test.sh) forbids.
    """
    outside = {"PYTHONSAFEPATH", "FASTLOAD_MAY_SKIP", *LAUNCHER}
    inherited = {
        name: value for name, value in os.environ.items() if name not in outside and not name.startswith("PYTEST")
    }
    folders = Path(fastload.__file__).parents[1], Path(__file__).resolve().parents[1] / "tools"  # sample_files.py
    path = os.pathsep.join(map(str, folders))
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | more


def run_python(*words: object, folder: Path | None = None) -> str:
    """Returns what a Python process prints on stdout, given the words behind `python`; it has to end with 0."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=child_environment(), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def under_permissions() -> list[str]:
    """Returns the words before a command that only permissions of files let read and write, also where it is root's.

    Skips the test where root cannot give up its right to pass over them.
    """
    words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if words and (shutil.which(words[0]) is None or subprocess.run([*words, "true"], check=False).returncode):
        pytest.skip("needs setpriv, or another user than root")
    return words


def in_a_fork(work: Callable[[], object]) -> None:
    """Runs work in a fork of this process; it has to return."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_together(
    commands: Sequence[Sequence[object]], folder: Path, *, on: Sequence[Sequence[str]] | None = None
) -> list[str]:
    """Runs Python processes (the words behind `python`) in a folder at once; returns the stdout and stderr of each.

    `on` has the words before `python` of each, none by default: those of a `NetworkNode`.
    The first one that fails ends the others, which may wait for it for ever; so do LIMIT_S seconds. The AssertionError,
    where not all ended with 0, shows the end of their outputs.
    """
    logs = [folder / f"log.{number}" for number in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for words, before, log in zip(commands, on or [()] * len(commands), logs, strict=True):
            with open(log, "wb") as out:
                process = subprocess.Popen(
                    [*before, sys.executable, *map(str, words)], env=child_environment(), cwd=folder,
                    start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                )  # fmt: skip
            processes.append(process)
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                _end(process)
    said = [log.read_text() for log in logs]
    shown = "\n".join(f"--- process {number}\n{text[-5000:]}" for number, text in enumerate(said))
    assert not any(codes) and None not in codes, f"they ended with {codes} (None: had to be ended)\n{shown}"
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    # torchrun's ranks are in sessions of their own: it ends them when it is asked to end.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
