"""Starts and ends worker processes: start methods, signals, the parent's death. No torch here."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from types import CodeType, ModuleType
from typing import Any, cast

from fastload.prefetch.waiting import WorkerStacks
from fastload.system.threads import end_with

PRELOADED = "fastload.prefetch.preloaded"
"""The module that a forkserver imports with the main program, unless somebody has chosen otherwise."""

WORKER_NAME = "fastload worker"
"""The name of worker processes, by which one that still imports the main program knows itself."""

# What a main program asks for which process runs it: the name of its module, as in `if __name__ == "__main__":`, or of
# its process, or that of the process that made it.
_ASKED = frozenset({"__name__", "current_process", "parent_process"})


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
    context: Any = copy.copy(multiprocessing.get_context(start_method()))
    context.Process = functools.partial(context.Process, name=WORKER_NAME)
    server: Any = getattr(forkserver, "_forkserver", None)
    if context.get_start_method() == "forkserver" and getattr(server, "_preload_modules", None) == ["__main__"]:
        # Nobody has chosen otherwise. Two workers then start in 0.1 s and not 2 s; the first start takes as long.
        context.set_forkserver_preload(["__main__", PRELOADED])
    return cast(BaseContext, context)


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
    return "forkserver" if _imported_main() else "fork"


def _imported_main() -> ModuleType | None:
    """Returns the main program where a new process can import it; None in a notebook, or for a script from stdin."""
    main = sys.modules["__main__"]
    is_file = getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")
    return main if is_file else None


def runs_again_in_workers() -> bool:
    """Whether a new process that imports the main program would do its work once more.

    That is so where its work is under way while it is not defined to its end, and nothing in it or in its functions
    asks which process runs it. Whether one that asks does so in the right place is not known.
    """
    main = _imported_main() if start_method() != "fork" else None
    spec = getattr(main, "__spec__", None)
    if main is None or (spec is not None and spec.name.rpartition(".")[2] == "__main__"):
        return False  # multiprocessing leaves the __main__.py of a package alone
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    running: list[CodeType] = []
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            running.append(frame.f_code)
        frame = frame.f_back
    return bool(running) and not any(map(_asks, running))


def _asks(code: CodeType) -> bool:
    """Whether code, or that of functions and classes in it, asks which process runs it."""
    within = (part for part in code.co_consts if isinstance(part, CodeType))
    return not _ASKED.isdisjoint(code.co_names) or any(map(_asks, within))
