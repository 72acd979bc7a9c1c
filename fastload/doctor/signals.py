"""Signals while a command runs in our place: which came, and which of them the command did not get by itself.

A signal to the whole process group (Ctrl-C in a terminal, a job's end) reaches the command as it reaches us; one to
this process alone does not. No handler in Python is told which it was. So a witness, a small process in the same group,
is asked: what it got as well was for all.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from types import FrameType, TracebackType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_ANSWER = b"\0"
_ANSWER_S = 1.0  # a witness that somebody stopped never answers
# What it catches is in its pipe before it reads our question, and so before its answer.
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
    """Catches what would end this process, from entering the block to leaving it; main thread only.

    Handlers do nothing but wake `wait`, whichever thread the system chose: nothing that runs is interrupted. A signal
    that is ignored (`nohup`, jobs in the background) stays so, for us as for the command.
    """

    def __enter__(self) -> Signals:
        caught = [number for number in CAUGHT if signal.getsignal(number) != signal.SIG_IGN]
        words = [sys.executable, "-I", "-S", "-c", _WITNESS, *(str(int(number)) for number in caught)]
        self._witness = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        try:
            assert self._witness.stdout is not None, "it has a pipe"
            self._witness.stdout.read(1)  # it is ready
        except BaseException:
            self._close_witness()
            raise
        self._reads, self._writes = os.pipe()
        for end in (self._reads, self._writes):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _note) for number in (*caught, signal.SIGCHLD)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reads)
        os.close(self._writes)
        self._close_witness()

    def wait(self, seconds: float) -> tuple[set[int], set[int]]:
        """The signals that came, and of these the ones for this process alone.

        Returns as soon as one comes or a child ends, at the latest after so long.
        """
        select.select([self._reads], [], [], seconds)
        came = self._drain()
        if not came:
            return set(), set()
        for_all = self._ask()
        # A second one meanwhile: for the witness they may have been one.
        return came | self._drain(), came - for_all

    def _drain(self) -> set[int]:
        try:
            return set(os.read(self._reads, 4096)) - {signal.SIGCHLD}
        except BlockingIOError:
            return set()

    def _ask(self) -> set[int]:
        """The signals that the witness got since it was asked last."""
        assert self._witness.stdin is not None and self._witness.stdout is not None, "it has pipes"
        said = b""
        try:
            self._witness.stdin.write(b"?")
            while _ANSWER not in said and select.select([self._witness.stdout], [], [], _ANSWER_S)[0]:
                part = self._witness.stdout.read(64)
                if not part:
                    break
                said += part
        except OSError:
            pass  # somebody killed it: what comes now counts as ours alone
        return set(said) - set(_ANSWER)

    def _close_witness(self) -> None:
        for pipe in (self._witness.stdin, self._witness.stdout):
            if pipe is not None:
                pipe.close()
        self._witness.kill()
        self._witness.wait()


def _note(_number: int, _frame: FrameType | None) -> None:
    """The number is in the pipe already: `signal.set_wakeup_fd` put it there."""
