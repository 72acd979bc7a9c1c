"""Runs a command with the injected module in each of its Python processes, otherwise as if it ran by itself.

The command has this process's stdin, stdout, stderr, signals and terminal, and its exit code becomes this process's.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastload.errors import MissingFileError, OptionError
from fastload.profiling.meter.sampler import family_of

INJECT = Path(__file__).parent / "inject"
FOLDER_VARIABLE = "FASTLOAD_DOCTOR"
TIME_OVER = "time-over"
"""The file that is there once the command is interrupted because its time is over."""

_LOOK_EVERY_S = 0.25
_GRACE_S = 20.0  # between SIGINT and SIGTERM
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ended:
    """A command's exit code (128 plus the signal's number, as in shells), and whether it was asked to stop before."""

    code: int
    interrupted: bool
    elapsed_s: float


def environment_for(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which each Python imports the injected module and records into the folder."""
    path = os.pathsep.join(filter(None, (str(INJECT), environ.get("PYTHONPATH"))))
    return {**environ, "PYTHONPATH": path, FOLDER_VARIABLE: str(folder)}


def check_command(command: Sequence[str]) -> None:
    """Raises OptionError if there is no command, MissingFileError if its program does not exist."""
    if not command:
        raise OptionError(
            "no command to run. Give it after two dashes, as you would type it: fastload doctor -- python train.py"
        )
    if shutil.which(command[0]) is None:
        hint = f" Is it a script? Then: fastload doctor -- python {command[0]}" if Path(command[0]).exists() else ""
        raise MissingFileError(f"{command[0]}: no such program, here or on PATH.{hint}")


def run_command(
    command: Sequence[str],
    folder: Path,
    signals: Signals,
    *,
    seconds: float | None = None,
    look: Callable[[int], None] = lambda _pid: None,
) -> Ended:
    """Runs the command to its end, and forwards the signals that it does not get by itself.

    After `seconds` the command is interrupted, as by Ctrl-C but for a traceback, and 20 s later terminated with all its
    children; that it then ended by these signals is no failure, its code is 0. `look` is called every quarter of a
    second with the command's pid; an exception from it is raised again after the command has ended. If a signal came
    before, nothing is started, and KeyboardInterrupt is raised.
    """
    if signals.wait(0)[0]:
        raise KeyboardInterrupt
    began = time.monotonic()
    deadlines = [] if seconds is None else [(seconds, signal.SIGINT), (seconds + _GRACE_S, signal.SIGTERM)]
    interrupted = False
    failed: Exception | None = None
    process = subprocess.Popen(command, env=environment_for(folder, os.environ))
    while process.poll() is None:
        came, alone = signals.wait(_LOOK_EVERY_S)
        interrupted = interrupted or not came.isdisjoint(_INTERRUPTING)
        if process.poll() is not None:
            break
        for number in came:
            _send(_receivers(process.pid, number), number, but_our_group=number not in alone)
        elapsed_s = time.monotonic() - began
        while deadlines and elapsed_s >= deadlines[0][0]:
            interrupted = True
            _, number = deadlines.pop(0)
            (folder / TIME_OVER).touch()
            _send(_receivers(process.pid, number) if deadlines else family_of(process.pid), number)
        if failed is None:
            try:
                look(process.pid)
            except Exception as error:  # noqa: BLE001  # the doctor's own failure must not end the command
                failed = error
    came, _ = signals.wait(0)  # during the last `look`
    if failed is not None:
        raise failed
    code, interrupted = process.returncode, interrupted or not came.isdisjoint(_INTERRUPTING)
    code = 128 - code if code < 0 else code
    if (folder / TIME_OVER).exists() and code in _ENDED_BY_US:
        code = 0  # as planned
    return Ended(code, interrupted, time.monotonic() - began)


def _receivers(pid: int, number: int) -> list[int]:
    """Returns the processes of a command that are to get a signal.

    SIGINT goes to all in the terminal's foreground group, as Ctrl-C does. Other signals go to whom they would have
    reached without us: the command, and if that is a shell or the like, the programs it runs, down to the first Python
    of each branch. A Python's own children, such as workers, are not signalled: they would die under a script that
    saves a checkpoint on SIGTERM.
    """
    if number == signal.SIGINT:
        return [member for member in family_of(pid) if member == pid or _in_our_group(member)]
    found = [pid]
    for member in found:
        with suppress(psutil.Error):
            process = psutil.Process(member)
            if not Path(process.exe()).name.startswith("python"):
                found += [child.pid for child in process.children()]
    return found


def _send(pids: Sequence[int], number: int, *, but_our_group: bool = False) -> None:
    """Sends a signal to each process; with `but_our_group`, not to our process group, which has got it already."""
    for pid in pids:
        if not (but_our_group and _in_our_group(pid)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _in_our_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgrp()
    except OSError:
        return False  # it has ended


_ENDED_BY_US = (128 + signal.SIGINT, 128 + signal.SIGTERM)

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_ANSWER = b"\0"
_ANSWER_S = 1.0  # a witness that was stopped (SIGSTOP) never answers
# A signal that it catches is in its pipe before it reads our question, and so before its answer.
_WITNESS = """
import os, signal, sys
os.set_blocking(1, False)
signal.set_wakeup_fd(1, warn_on_full_buffer=False)
for number in sys.argv[1:]:
    signal.signal(int(number), lambda *_: None)
while os.write(1, b"\\0") and os.read(0, 1):
    pass
"""


class Signals:
    """Catches the signals that would end this process, within the `with` block. Main thread only.

    A signal to the whole process group (Ctrl-C in a terminal, the end of a job) reaches the command as well; a signal
    to this process alone does not. A handler cannot see which of the two it was. So a witness is asked, a small
    process in the same group: a signal that it got too was sent to the group.

    Handlers only wake `wait`, whichever thread gets the signal; nothing is interrupted. A signal that is ignored
    (`nohup`, jobs in the background) stays ignored, by us and by the command.
    """

    def __enter__(self) -> Signals:
        caught = [number for number in CAUGHT if signal.getsignal(number) != signal.SIG_IGN]
        words = [sys.executable, "-I", "-S", "-c", _WITNESS, *(str(int(number)) for number in caught)]
        with ExitStack() as stack:
            witness = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            self._witness = stack.enter_context(witness)  # at the end its pipes are closed, and it is waited for
            stack.callback(witness.kill)
            assert witness.stdout is not None, "it has a pipe"
            witness.stdout.read(1)  # it is ready when it has written a byte
            self._reads, writes = os.pipe()
            for end in (self._reads, writes):
                os.set_blocking(end, False)
                stack.callback(os.close, end)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writes, warn_on_full_buffer=False))
            # The handlers do nothing: `signal.set_wakeup_fd` has already put the number into the pipe.
            for number in (*caught, signal.SIGCHLD):
                stack.callback(signal.signal, number, signal.signal(number, lambda *_: None) or signal.SIG_DFL)
            self._end = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def wait(self, seconds: float) -> tuple[set[int], set[int]]:
        """Waits for a signal or the end of a child process, at most `seconds`.

        Returns the signals that came, and which of them were sent to this process alone.
        """
        select.select([self._reads], [], [], seconds)
        came = self._drain()
        if not came:
            return came, came
        assert self._witness.stdin is not None and self._witness.stdout is not None, "it has pipes"
        seen = b""  # by the witness since it was last asked
        with suppress(OSError):  # it was killed: signals count as sent to this process alone
            self._witness.stdin.write(b"?")
            while _ANSWER not in seen and select.select([self._witness.stdout], [], [], _ANSWER_S)[0]:
                seen += self._witness.stdout.read(64) or _ANSWER  # nothing comes from a witness that has ended
        # A second signal may have come meanwhile; the witness may have seen both as one.
        return came | self._drain(), came - set(seen)

    def _drain(self) -> set[int]:
        try:
            return set(os.read(self._reads, 4096)) - {signal.SIGCHLD}
        except BlockingIOError:
            return set()
