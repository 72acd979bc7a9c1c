"""Worker processes: torch's `DataLoader` workers, started, watched and ended as fastload needs it.

Start methods, signals and the end of the parent are decided here; only this module uses torch's internals.
"""

from __future__ import annotations

import atexit
import copy
import errno
import functools
import logging
import multiprocessing
import multiprocessing.process
import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pickle import PicklingError
from types import CodeType, ModuleType
from typing import Any, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastload.errors import FastloadError, OptionError, WorkerError
from fastload.prefetch.waiting import WorkerStacks, is_stopped, state_of
from fastload.system.machine import how_it_ended
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


# Between looks at whether workers live that do not give results.
_LOOK_S = 5.0
# For workers to end by themselves, and after they were killed: all of them together.
_END_S = 5.0
# For a server that refuses connections to be gone.
_RESTART_S = 0.2

_log = logging.getLogger("fastload")

# The queues of workers that run. When workers are garbage of a cycle, such as an error and its traceback, their queues
# are not: those would be closed first, and the rest would then write to numbers that may belong to other files.
_queues_in_use: dict[int, Sequence[Any]] = {}

GUARD = (
    "Worker processes import the script, so its work belongs into a function, say main(), and "
    '`if __name__ == "__main__": main()` to its end.'
)
_NO_GUARD = (
    'the script has no `if __name__ == "__main__":` around its work, so each worker process of the loader would begin '
    f"it anew. {GUARD}"
)
NO_GUARD_CODE = 197
"""The exit code of a worker that found itself beginning the script's work.

Nothing else ends with it by custom: os.EX_* are 64 to 78, shells have 126 to 192, systemd those from 200 on.
"""


class WorkerProcesses(_MultiProcessingDataLoaderIter):
    """torch's workers, which carry out requests one by one; a dead one is noticed at once.

    A forked copy of this object leaves them alone.

    Args:
        dataset: given a request, returns its result.
        number: of workers.
        context: starts them.

    Attributes:
        dead: the workers that are known to have ended.
        stacks: what the living ones are doing.
    """

    def __init__(self, dataset: Dataset[Any], number: int, context: BaseContext) -> None:
        self.dead: list[Any] = []
        self.stacks = WorkerStacks()
        self._owner = os.getpid()
        self._began = False  # whether any worker has given a result
        _living.add(self)
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=(),
            num_workers=number,
            collate_fn=_as_it_is,
            worker_init_fn=functools.partial(begin_worker, self.stacks),
            persistent_workers=True,
            multiprocessing_context=context,
            generator=torch.Generator(device="cpu"),  # the user's global one is not drawn from
        )
        try:
            super().__init__(loader)
        except BaseException:
            self.end(kill=True)
            raise
        # torch's signal handler would raise in the middle of the training step, wherever that is.
        signals: Any = _utils.signal_handling
        signals._remove_worker_pids(id(self))
        self._worker_pids_set = False
        _queues_in_use[id(self)] = (*self._index_queues, self._worker_result_queue)
        # Registered once: a `Connection` that is asked makes a selector each time, which takes ten times as long.
        results: Any = self._worker_result_queue
        self._result_fd: int = results._reader.fileno()
        self._poll = select.poll()
        for fd in (self._result_fd, *(worker.sentinel for worker in self._workers)):
            self._poll.register(fd, select.POLLIN)

    def ask(self, worker: int, number: int, request: Any) -> None:
        """Sends a request to a worker, which carries out its requests in order; `number` names it.

        Not called by the thread that trains: this wakes the worker, which may take the CPU from the caller for
        milliseconds (two cores, both busy: 2.7 ms in one of ten requests). A small request does not block.
        """
        _send(self._index_queues[worker], (number, request))

    def result(self, worker: int | None, left: Callable[[], float]) -> tuple[int, Any]:
        """Waits for a result, of any request; returns the request's number with it, an exception if that came instead.

        `left` is called again and again, and gives the seconds to wait until it has to be called again, or raises.

        Raises:
            DeadWorkerError: the worker that this waits for died before it gave one; None: any of them.
            OptionError: a worker ended as it was about to do the script's work.
        """
        # Of a worker that is known to be dead only what it sent before can come.
        while not self.waiting(0 if self._is_dead(worker) else min(_LOOK_S, left())):
            if self._is_dead(worker) or (self.dead and _is_stuck(self._worker_result_queue)):
                raise _death(self.dead, began=self._began)
        number, result = self._worker_result_queue.get()
        self._began = True
        if isinstance(result, ExceptionWrapper):
            try:
                result.reraise()  # type: ignore[no-untyped-call]  # torch leaves it so
            except Exception as error:  # noqa: BLE001  # raised where the batch is due
                return number, error
        return number, result

    def all_alive(self) -> bool:
        """Whether no worker has ended."""
        self.waiting()
        return not self.dead

    def waiting(self, timeout_s: float = 0) -> bool:
        """Whether a result has arrived; waits for one, or for the end of a worker."""
        ready = [fd for fd, _ in self._poll.poll(1e3 * timeout_s)]
        if ready == [self._result_fd]:
            return True
        for worker in self._workers if ready or timeout_s else ():
            # It ends without a sign if its own children still hold that.
            if worker not in self.dead and (worker.sentinel in ready or not (ready or worker.is_alive())):
                with suppress(KeyError):
                    self._poll.unregister(worker.sentinel)
                self.dead.append(worker)
        return self._result_fd in ready

    def _is_dead(self, worker: int | None) -> bool:
        """Whether a worker, or with None any, is known to have ended."""
        return bool(self.dead) if worker is None else self._workers[worker] in self.dead

    @property
    def dead_numbers(self) -> list[int]:
        """The numbers of those that are known to have ended."""
        return [number for number, worker in enumerate(self._workers) if worker in self.dead]

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def end(self, *, kill: bool) -> None:
        """Ends the workers: they finish the sample they are at, unless killed, which nothing can delay.

        They are killed also if one is dead or stopped, which may hold locks that ending takes, and if they do not end
        within some seconds.
        """
        if self._owner != os.getpid() or getattr(self, "_shutdown", True):  # it may not have come that far
            return
        self._shutdown = True
        if not (kill or self.dead or not self.all_alive() or any(map(is_stopped, self.pids))):
            done: Any = self._workers_done_event
            done.set()
            for queue in self._index_queues:
                with suppress(OSError):  # it ended meanwhile
                    _send(queue, None)
            _join(self._workers)
        for worker in self._workers:
            worker.kill()
        for worker in _join(self._workers):
            # The kernel ends it when its disk answers; Python would wait for that when it ends itself.
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
            _log.warning("worker process %d was killed and has not ended: %s", worker.pid, state_of(worker.pid))
        for each in (*self._index_queues, self._worker_result_queue):
            each.cancel_join_thread()
            each.close()
        self.stacks.close()
        _queues_in_use.pop(id(self), None)

    def _shutdown_workers(self, _getpid: Callable[[], int] = os.getpid) -> None:
        # Found before the globals are gone, when the interpreter ends; then `_end_workers` has ended them.
        if getattr(self, "_owner", None) == _getpid() and not getattr(self, "_shutdown", True):
            self.end(kill=False)


def _is_stuck(results: Any) -> bool:
    """Whether no more results come, since a worker died while it held the lock under which all send theirs."""
    if free := results._wlock.acquire(timeout=_LOOK_S):
        results._wlock.release()
    return not free


def _send(queue: Any, message: Any) -> None:
    # As the queue's own thread does, which would have to be woken, too. The worker releases the semaphore.
    queue._sem.acquire()
    queue._writer.send_bytes(pickle.dumps(message))


def _join(workers: Sequence[Any]) -> list[Any]:
    """Waits some seconds for processes to end; returns those that did not."""
    end_s = time.monotonic() + _END_S
    for worker in workers:
        worker.join(max(0.0, end_s - time.monotonic()))
    return [worker for worker in workers if worker.is_alive()]


# torch leaves its workers to Python when that ends, which waits for stopped ones for ever.
_living: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Ends all workers of this process, which is ending; what they are at is of no use."""
    for workers in list(_living):
        workers.end(kill=True)


def how_ended(worker: Any) -> str:
    """Returns how a worker ended."""
    worker.join(1.0)
    return how_it_ended(worker.exitcode)


class DeadWorkerError(WorkerError):
    """A worker ended before it gave its result."""


def _death(workers: Sequence[Any], *, began: bool) -> FastloadError:
    """Returns an error that says how worker processes ended; `began`: whether any had given a result."""
    said = [f"process {worker.pid} {how_ended(worker)}" for worker in workers]
    if not began and any(worker.exitcode == NO_GUARD_CODE for worker in workers):
        return OptionError(_NO_GUARD)
    hint = "" if began else f" {GUARD}"
    return DeadWorkerError(f"a worker of the loader died: {'; '.join(said)}. If it wrote why, that is above.{hint}")


def start_workers(dataset: Dataset[Any], number: int) -> WorkerProcesses:
    """Starts `WorkerProcesses`.

    Raises:
        OptionError: this process may not have workers, the script has no guard, or the dataset cannot be sent to them.
        WorkerError: one of them, or the process that starts them, ended.
    """
    process = multiprocessing.process.current_process()
    if process.daemon:
        raise OptionError(
            "a FastLoader with worker processes cannot run in a worker of another loader, which may not have "
            "processes of its own. Use the dataset itself there, or a FastLoader without Python transforms."
        )
    if getattr(process, "_inheriting", False):
        # One of ours, or the server that forks them, which imports the script in some releases of Python: the process
        # that made it says what is wrong.
        if process.name in (WORKER_NAME, "MainProcess"):
            os._exit(NO_GUARD_CODE)
        raise OptionError(
            f"this process is importing the main script only to start a worker, and the script makes workers of "
            f"its own. {GUARD}"
        )
    if runs_again_in_workers():
        raise OptionError(_NO_GUARD)
    try:
        try:
            return _started(dataset, number)
        except ConnectionRefusedError:
            # Ctrl-C came while the server that forks workers began, and it has ended: the next call starts another.
            time.sleep(_RESTART_S)
            return _started(dataset, number)
    except ChildProcessError as error:
        raise OptionError(
            "this process was forked from one that had started a forkserver, which it cannot use. Call "
            'multiprocessing.set_start_method("fork", force=True) here, or make the loader where the server is.'
        ) from error
    except (EOFError, ConnectionError) as error:
        # It is not as likely that the guard is missing: `runs_again_in_workers` has found something like it.
        raise WorkerError(
            "a worker process ended while it was started: importing the script failed (what it wrote is above), or the "
            f"process was killed (out of memory?). {GUARD}"
        ) from error
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise WorkerError(
            f"{number} worker processes cannot be started: {error.strerror}. Each takes some descriptors in this "
            f"process: raise the limit (`ulimit -n`), or choose fewer workers."
        ) from error
    except (PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the dataset or its transform cannot be sent to worker processes: {error}. Define functions and "
            f"classes at the top level of a module (no lambda), open files in the worker and not before, or call "
            f'multiprocessing.set_start_method("fork") first.'
        ) from error


def _started(dataset: Dataset[Any], number: int) -> WorkerProcesses:
    # torch draws a seed, and would on the user's default device.
    with torch.device("cpu"), warnings.catch_warnings(), left_alone_by_signals() as context:
        # `start_workers` says it better.
        warnings.filterwarnings("ignore", "Got pickle error")
        # The user made no DataLoader, and a dataset that waits gains from more workers than CPUs.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return WorkerProcesses(dataset, number, context)


def _as_it_is(item: Any) -> Any:
    return item
