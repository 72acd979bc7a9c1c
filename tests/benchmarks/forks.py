"""Processes of benchmarks as forks of a process that has imported torch: each fresh one takes 2 s of a CPU for that."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Fork:
    """What the benchmarks need of a subprocess.Popen, of a script that this Python would run.

    The script finds every module, and what is missing, as when it is started by itself, but for what `modules` names:
    they are imported again.
    """

    def __init__(
        self,
        words: list[str],
        *,
        env: dict[str, str],
        start_new_session: bool,
        cwd: Path | None = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        preexec_fn: Callable[[], None] | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:
        assert words[0] == sys.executable and start_new_session
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid:
            return
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            if preexec_fn is not None:
                preexec_fn()
            if cwd is not None:
                os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:1] = [str(Path(words[1]).parent), *env["PYTHONPATH"].split(os.pathsep)]
            sys.argv = words[1:]
            for name in modules:
                del sys.modules[name]
            runpy.run_path(words[1], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  # told as the interpreter would
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, timeout: float = 600.0) -> int:
        """Its exit code."""
        until = time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired(sys.argv, timeout)
            else:
                time.sleep(0.02)
        return self._code


def in_the_place_of(popen: Callable[..., Fork]) -> Any:
    """What a benchmark uses of the module subprocess, with another Popen."""
    return SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
