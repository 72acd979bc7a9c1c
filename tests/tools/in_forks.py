"""Runs a script whose ranks, workers and measured processes are forks of it: `python in_forks.py SCRIPT WORDS`.

Started anew, as the script says, each would import torch for 4 s. What ranks are given is pickled all the same.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
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


def run_python(code: str, *words: str) -> Any:
    """As the benchmarks' harness does, but the process has imported torch already."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if not child:
            code_of_exit = 1
            try:
                os.dup2(out.fileno(), 1)
                sys.argv, sys.stdout = ["-c", *words], io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
                sys.stdout.flush()
                code_of_exit = 0
            except BaseException:  # noqa: BLE001 # nobody else will say what it was
                traceback.print_exc()
            finally:
                os._exit(code_of_exit)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == 0, f"the child process ended with {ended}"
        out.seek(0)
        return json.loads(out.read().splitlines()[-1])


if __name__ == "__main__":
    torch.multiprocessing.spawn = spawn
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method: None
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if Path(sys.path[0], "harness.py").exists():
        import harness

        harness.run_python = run_python
    runpy.run_path(sys.argv[0], run_name="__main__")
