"""Runs a script whose ranks, workers and other Python processes are forks of it: `python in_forks.py SCRIPT WORDS`.

Started anew, as the script says, each would import torch for 4 s. What ranks are given is pickled all the same.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.multiprocessing

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from forks import ForkedPopen, run_words

del sys.path[1]


def spawn(run: Callable[..., Any], args: tuple[Any, ...], nprocs: int, **more: bool) -> Any:
    """As torch's, which would send so much to a process started anew."""
    ForkingPickler.dumps((run, args))
    return torch.multiprocessing.start_processes(run, args, nprocs, start_method="fork", **more)


if __name__ == "__main__":
    torch.multiprocessing.spawn = spawn
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method: None
    subprocess.Popen = ForkedPopen
    run_words(sys.argv[1:])
