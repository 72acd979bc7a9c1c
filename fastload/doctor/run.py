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
from dataclasses import dataclass
from pathlib import Path

from fastload.errors import MissingFileError, OptionError

INJECT = Path(__file__).parent / "inject"
FOLDER_VARIABLE = "FASTLOAD_DOCTOR"

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, or 128 and the signal's number, as shells have it.
        interrupted: whether it was asked to stop.
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
    *,
    seconds: float | None = None,
    look: Callable[[float, int], None] = lambda _elapsed_s, _pid: None,
) -> Ended:
    """Runs the command to its end.

    Args:
        command: program and arguments; see `check_command`.
        folder: where the records go.
        seconds: after which the command is interrupted, as by Ctrl-C, and 20 s later terminated; None: never.
        look: called every quarter of a second with the time so far and the command's pid.
    """
    began = time.monotonic()
    waited = set(_FORWARDED) | {signal.SIGCHLD}
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    interrupted = False
    process: subprocess.Popen[bytes] | None = None
    deadlines = [] if seconds is None else [(seconds, signal.SIGINT), (seconds + 20, signal.SIGTERM)]
    try:
        process = subprocess.Popen(
            command,
            env=environment_for(folder, os.environ),
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, old_mask),
        )
        while process.poll() is None:
            caught = signal.sigtimedwait(waited, _LOOK_EVERY_S)
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                interrupted = interrupted or caught.si_signo in (signal.SIGINT, signal.SIGTERM)
                # What the terminal sends goes to the command as well, by itself; what a process sends, does not.
                if caught.si_pid != 0:
                    process.send_signal(caught.si_signo)
            elapsed_s = time.monotonic() - began
            while deadlines and elapsed_s >= deadlines[0][0]:
                interrupted = True
                process.send_signal(deadlines.pop(0)[1])
            look(elapsed_s, process.pid)
    finally:
        if process is not None and process.poll() is None:
            process.wait()  # something of ours failed: the command still runs to its end
        while signal.sigtimedwait(waited, 0) is not None:
            pass  # a second Ctrl-C while the command ended is not for us
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    code = process.returncode
    return Ended(128 - code if code < 0 else code, interrupted, time.monotonic() - began)
