"""Runs a command with the injected module in every Python of it, and lets nothing of its own come between.

The command has our stdin, stdout and stderr, our signals and our place in the terminal; its exit code is ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastload.doctor.signals import Signals
from fastload.errors import MissingFileError, OptionError
from fastload.meter.family import family_of

INJECT = Path(__file__).parent / "inject"
FOLDER_VARIABLE = "FASTLOAD_DOCTOR"

_LOOK_EVERY_S = 0.25
_GRACE_S = 20.0  # from asking a command to stop to telling it


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, or 128 and the signal's number, as shells have it.
        interrupted: whether it was asked to stop before it ended.
        elapsed_s: it ran.
    """

    code: int
    interrupted: bool
    elapsed_s: float


def environment_for(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python imports the injected module and records into the folder."""
    path = environ.get("PYTHONPATH")
    return {
        **environ,
        "PYTHONPATH": f"{INJECT}{os.pathsep}{path}" if path else str(INJECT),
        FOLDER_VARIABLE: str(folder),
    }


def check_command(command: Sequence[str]) -> None:
    """Refuses what cannot be run, before anything is set up.

    Raises:
        OptionError: there is no command.
        MissingFileError: its program is nowhere.
    """
    if not command:
        raise OptionError(
            "no command to run. Give it after two dashes, as you would type it: fastload doctor -- python train.py"
        )
    if shutil.which(command[0]) is None:
        mend = f" Is it a script? Then: fastload doctor -- python {command[0]}" if Path(command[0]).exists() else ""
        raise MissingFileError(f"{command[0]}: no such program, here or on PATH.{mend}")


def run_command(
    command: Sequence[str],
    folder: Path,
    signals: Signals,
    *,
    seconds: float | None = None,
    look: Callable[[float, int], None] = lambda _elapsed_s, _pid: None,
) -> Ended:
    """Runs the command to its end, and passes on the signals that it does not get by itself.

    Args:
        command: program and arguments; see `check_command`.
        folder: where the records go.
        signals: entered.
        seconds: after which the command is interrupted, as by Ctrl-C, and 20 s later all of it terminated; None: never.
        look: called every quarter of a second with the time so far and the command's pid. What it raises is raised
            when the command has ended.

    Raises:
        KeyboardInterrupt: a signal came before the command had begun.
    """
    if signals.wait(0)[0]:
        raise KeyboardInterrupt
    began = time.monotonic()
    deadlines = [] if seconds is None else [(seconds, signal.SIGINT), (seconds + _GRACE_S, signal.SIGTERM)]
    interrupting = {signal.SIGINT, signal.SIGTERM}
    interrupted = False
    failed: Exception | None = None
    process = subprocess.Popen(command, env=environment_for(folder, os.environ))
    while process.poll() is None:
        came, alone = signals.wait(_LOOK_EVERY_S)
        interrupted = interrupted or bool(came & interrupting)
        if process.poll() is not None:
            break
        for number in came:
            _send(_receivers(process.pid, number), number, but_our_group=number not in alone)
        elapsed_s = time.monotonic() - began
        while deadlines and elapsed_s >= deadlines[0][0]:
            interrupted = True
            _, number = deadlines.pop(0)
            _send(_receivers(process.pid, number) if deadlines else family_of(process.pid), number)
        if failed is None:
            try:
                look(elapsed_s, process.pid)
            except Exception as error:  # noqa: BLE001  # something of ours: the command runs to its end all the same
                failed = error
    interrupted = interrupted or bool(signals.wait(0)[0] & interrupting)  # while `look` ran, and ended it
    if failed is not None:
        raise failed
    code = process.returncode
    return Ended(128 - code if code < 0 else code, interrupted, time.monotonic() - began)


def _receivers(pid: int, number: int) -> list[int]:
    """Whom of a command a signal is for.

    Ctrl-C is for all in the terminal's foreground group. Anything else is for whoever would have it without us: the
    command, and where that is a shell or the like what it runs, down to the first Python of each branch. What that one
    started, workers for instance, is its own to end: they would die under a script that saves a checkpoint on SIGTERM.
    """
    if number == signal.SIGINT:
        return [member for member in family_of(pid) if member == pid or _group_of(member) == os.getpgrp()]
    found = [pid]
    for member in found:
        with suppress(psutil.Error):
            process = psutil.Process(member)
            if not Path(process.exe()).name.startswith("python"):
                found += [child.pid for child in process.children()]
    return found


def _send(pids: Sequence[int], number: int, *, but_our_group: bool = False) -> None:
    """Sends it to each; `but_our_group`: to those of our process group it was sent already."""
    for pid in pids:
        if not (but_our_group and _group_of(pid) == os.getpgrp()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None  # it has ended
