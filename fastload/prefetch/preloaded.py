"""Imported by a forkserver alone, before it starts processes: the modules of workers, and signals for all others.

The server was started with signals blocked (see `left_alone_by_signals`), and so is every process that it starts. Our
processes ignore the signals by their own code; processes of other parts of the program receive them as usual.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import util
from typing import Any

from fastload.prefetch.sample_worker import Filler


def _let_signals_through(_: object) -> None:
    process: Any = multiprocessing.current_process()
    if not any(isinstance(argument, Filler) for argument in process._args):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


util.register_after_fork(_let_signals_through, _let_signals_through)  # runs when a process has received its task
