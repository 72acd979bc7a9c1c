"""How worker processes begin and end: start methods, signals, the death of who made them. No torch here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from fastload.prefetch.waiting import WorkerStacks
from fastload.system.threads import end_with

PRELOADED = "fastload.prefetch.preloaded"
"""The module that a forkserver imports beside the main program, where nobody has chosen otherwise."""


def begin_worker(stacks: WorkerStacks, worker: int) -> None:
    """Runs in a new worker process: leaves signals to the process that made it, and ends with that."""
    # SIGINT of Ctrl-C goes to all processes of a terminal. The training process decides what follows: it may go on.
    for number in {signal.SIGINT, *signal.pthread_sigmask(signal.SIG_BLOCK, ())}:
        signal.signal(number, _take_no_notice)  # not SIG_IGN, which the programs that a dataset starts would inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    stacks.answer()
    end_with_parent(worker)


def _take_no_notice(number: int, frame: Any) -> None:
    """Handles a signal by doing nothing."""


@contextmanager
def left_alone_by_signals() -> Iterator[BaseContext]:
    """Gives the context that starts workers; neither they nor their start are disturbed by signals meanwhile.

    Ctrl-C goes to all processes of a terminal, and one that imports its modules would print where it was. A scheduler
    that announces the end of a job sends SIGUSR1 or so to all its processes: the program's handler saves a checkpoint,
    and the processes that were started without it would die. So what is started inherits these signals blocked, until
    it takes no notice of them (`begin_worker`).
    """
    context = worker_context()
    method = context.get_start_method()
    own = {
        number
        for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        if callable(signal.getsignal(number))
    }
    with _ctrl_c_held_back() as held_back, _method_left_to_the_user():
        if method != "fork":
            with _blocked(own):  # Python's own process, too; its start lets SIGINT through again
                resource_tracker.ensure_running()
        if method == "forkserver":
            # What a server inherits it passes on to all its processes, and only this module of ours undoes that.
            server: Any = forkserver._forkserver
            before = server._forkserver_pid
            with _blocked(own | {signal.SIGINT} if PRELOADED in server._preload_modules else own):
                forkserver.ensure_running()
            if server._forkserver_pid != before:
                held_back.server = server._forkserver_pid
                if held_back.came:
                    raise EOFError  # as when the server is ended while it is waited for
            yield context
        else:
            with _blocked(own | {signal.SIGINT}):
                yield context


@contextmanager
def _method_left_to_the_user() -> Iterator[None]:
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        if chosen is None:
            # Starting a process asks for the default method, which fixes it.
            multiprocessing.set_start_method(None, force=True)


class _HeldBack:
    """A Ctrl-C that came while workers were started."""

    came = False
    # The process id of a forkserver that was started with them. It imports torch, for seconds, before it starts the
    # first one, for which this process waits: it is ended, and so the wait.
    server: int | None = None


@contextmanager
def _ctrl_c_held_back() -> Iterator[_HeldBack]:
    """Lets a Ctrl-C be handled at the end; a second one is not held back, in case that takes for ever."""
    held_back, handler = _HeldBack(), signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield held_back  # no Ctrl-C comes here
        return

    def note(number: int, frame: Any) -> None:
        if held_back.came and callable(handler):
            handler(number, frame)
        held_back.came = True
        if held_back.server is not None:
            os.kill(held_back.server, signal.SIGKILL)

    signal.signal(signal.SIGINT, note)  # a forked worker inherits it
    try:
        yield held_back
    except (EOFError, ConnectionError):  # of the server
        if not held_back.came:
            raise
    finally:
        signal.signal(signal.SIGINT, handler)
    if held_back.came:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise error from None


@contextmanager
def _blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(worker: int) -> None:
    """Ends this worker process at once when the process that made it is gone, however that ended.

    torch's workers look at their parent's process id. Under a forkserver that is the server, which lives as long as
    they do.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        end_with(parent.sentinel)


def worker_context() -> BaseContext:
    """Returns the context that starts workers, by `start_method`; a forkserver imports their modules once for all."""
    context = multiprocessing.get_context(start_method())
    server: Any = getattr(forkserver, "_forkserver", None)
    if context.get_start_method() == "forkserver" and getattr(server, "_preload_modules", None) == ["__main__"]:
        # Nobody has chosen otherwise. Two workers then start in 0.1 s and not 2 s; the first start takes as long.
        context.set_forkserver_preload(["__main__", PRELOADED])
    return context


def start_method() -> str:
    """Returns how workers are started: as `multiprocessing.set_start_method` says, else by a forkserver.

    Where the main program is no file (a notebook, `python -c`, a script from stdin), what it defines cannot be imported
    by a new process, so there it is "fork", as for torch's own workers.
    """
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    if chosen is not None:
        return chosen
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    main = sys.modules["__main__"]
    is_file = getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")
    return "forkserver" if is_file else "fork"
