"""Runs a script whose ranks, workers and other Python processes are forks of it: `python in_forks.py SCRIPT WORDS`.

Started anew, as the script says, each would import torch for 4 s. What ranks are given is pickled all the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing


def spawn(run: Callable[..., Any], args: tuple[Any, ...], nprocs: int, **more: bool) -> Any:
    """As torch's, which would send so much to a process started anew."""
    ForkingPickler.dumps((run, args))
    return torch.multiprocessing.start_processes(run, args, nprocs, start_method="fork", **more)


class ForkedPopen(subprocess.Popen):
    """A `Popen` that forks where it is one of Python, without files that it inherits; all else is started as ever."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        words = [args] if isinstance(args, (str, os.PathLike)) else list(map(os.fspath, args))
        _, _, _, inherited, folder, environment, _, _, _, *pipes = more[:15]
        if words[0] != sys.executable or inherited or (words[1][0] == "-" and words[1] not in ("-c", "-m")):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        atexit._clear()  # what the other process does at its end, as to remove its folders
        code = 1
        try:
            for number, pipe in enumerate((pipes[0], pipes[3], pipes[5])):
                os.dup2(number if pipe == -1 else pipe, number)
            os.closerange(3, 1024)
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                setattr(sys, name, os.fdopen(number, "rw"[number > 0], closefd=False))
            os.chdir(folder or os.curdir)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            run_words(words[1:])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, (int, type(None))):
                print(end.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001 # nobody else will say what it was
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def run_words(words: list[str]) -> None:
    """Does in this process what `python WORDS` does."""
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    torch.multiprocessing.spawn = spawn
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method: None
    subprocess.Popen = ForkedPopen
    run_words(sys.argv[1:])
