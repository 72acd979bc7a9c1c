"""Processes of benchmarks as forks of a process that has imported torch: each fresh one takes 2 s of a CPU for that."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class ForkedPopen(subprocess.Popen):
    """A `Popen` that forks where it is one of Python, without files that it inherits; all else is started as ever.

    What runs finds every module, and what is missing, as when it is started by itself, but for what `again` names: they
    are imported again.
    """

    again: tuple[str, ...] = ()

    def _execute_child(self, args: Any, *more: Any) -> None:
        words = [args] if isinstance(args, (str, os.PathLike)) else list(map(os.fspath, args))
        _, before, _, inherited, folder, environment, _, _, _, *pipes = more[:15]
        if words[0] != sys.executable or inherited or (words[1][0] == "-" and words[1] not in ("-c", "-m")):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        atexit._clear()  # what the other process does at its end, as to remove its folders
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number, pipe in enumerate((pipes[0], pipes[3], pipes[5])):
                os.dup2(number if pipe == -1 else pipe, number)
            os.closerange(3, 1024)
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                setattr(sys, name, os.fdopen(number, "rw"[number > 0], closefd=False))
            os.chdir(folder or os.curdir)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            if more[20]:  # start_new_session
                os.setsid()
            if before is not None:
                before()
            for name in self.again:
                del sys.modules[name]
            run_words(words[1:])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, (int, type(None))):
                print(end.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001 # told as the interpreter would
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def run_words(words: list[str]) -> None:
    """Does in this process what `python WORDS` does."""
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], str(Path(words[0]).parent))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def in_the_place_of(popen: Callable[..., ForkedPopen]) -> Any:
    """What a benchmark uses of the module subprocess, with another Popen."""
    return SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
