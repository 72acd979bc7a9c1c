"""benchmarks/gpu.py, whose sections are forks of this process: each fresh one takes 2 s of a CPU to import torch.

So does torch._dynamo, which the first optimizer imports. Nothing else is imported before the fork: a section finds
every other module, and what is missing, as when it is started by itself.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import numpy
import torch._dynamo

if not sys.flags.safe_path:
    del sys.path[0]  # this folder, which no section has
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu

PRELOADED = numpy, torch


class Fork:
    """What gpu.py needs of a subprocess.Popen, of a script that this Python would run."""

    def __init__(
        self, words: list[str], *, stderr: TextIO, text: bool, cwd: Path, env: dict[str, str], start_new_session: bool
    ) -> None:
        assert words[0] == sys.executable and text and start_new_session
        sys.stdout.flush()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid:
            return
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.dup2(stderr.fileno(), 2)
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.path[:1] = [str(Path(words[1]).parent), *env["PYTHONPATH"].split(os.pathsep)]
            sys.argv = words[1:]
            del sys.modules["gpu"]
            runpy.run_path(words[1], run_name="__main__")
        except BaseException:  # noqa: BLE001  # told as the interpreter would
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(1)  # the script ends itself

    def wait(self, limit_s: float = 600.0) -> int:
        """Its exit code."""
        until = time.monotonic() + limit_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired(sys.argv, limit_s)
            else:
                time.sleep(0.02)
        return self._code


gc.freeze()  # as in tests/warm_python.py
gpu.subprocess = SimpleNamespace(Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
sys.exit(gpu.main())
