"""torch's `DataLoader` workers, watched and ended as fastload needs it; only this module uses torch's internals."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import pickle
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pickle import PicklingError
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastload.errors import OptionError, WorkerError

_LOOK_S = 5.0

# The queues of workers that run. When workers are garbage of a cycle, such as an error and its traceback, their queues
# are not: those would be closed first, and the rest would then write to numbers that may belong to other files.
_queues_in_use: dict[int, Sequence[Any]] = {}

GUARD = 'A script that makes worker processes begins its work under `if __name__ == "__main__":`.'


class Workers(_MultiProcessingDataLoaderIter):
    """torch's workers, which carry out requests one by one; a dead one is noticed at once.

    A forked copy of this object leaves them alone.

    Args:
        dataset: given a request, returns its result.
        number: of workers.

    Attributes:
        dead: the workers that are known to have ended.
    """

    def __init__(self, dataset: Dataset[Any], number: int) -> None:
        self.dead: list[Any] = []
        self._owner = os.getpid()
        self._began = False  # whether any worker has given a result
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=(),
            num_workers=number,
            collate_fn=_as_it_is,
            worker_init_fn=_begin_worker,
            persistent_workers=True,
            multiprocessing_context=worker_context(),
            generator=torch.Generator(device="cpu"),  # the user's global one is not drawn from
        )
        chosen: str | None = multiprocessing.get_start_method(allow_none=True)
        try:
            super().__init__(loader)
        finally:
            if chosen is None:
                # Starting a worker asks for the default method, which fixes it; it is the user's to choose.
                multiprocessing.set_start_method(None, force=True)
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
        # As the queue's own thread does, which would have to be woken, too. The worker releases the semaphore.
        queue: Any = self._index_queues[worker]
        queue._sem.acquire()
        queue._writer.send_bytes(pickle.dumps((number, request)))

    def result(self, worker: int | None) -> tuple[int, Any]:
        """Waits for a result, of any request; returns the request's number with it, an exception if that came instead.

        Raises:
            WorkerError: the worker that this waits for died before it gave one; None: any of them.
        """
        while not self.waiting(_LOOK_S):
            if self.dead and (worker is None or self._workers[worker] in self.dead or self._is_stuck()):
                raise _death(self.dead, hint="" if self._began else f" {GUARD}")
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

    def _is_stuck(self) -> bool:
        """Whether no more results come, since a worker died while it held the lock under which all send theirs."""
        lock: Any = self._worker_result_queue._wlock  # type: ignore[attr-defined]
        if free := lock.acquire(timeout=_LOOK_S):
            lock.release()
        return not free

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def end(self, *, kill: bool) -> None:
        """Ends the workers; kills them also if one is dead, since torch's way would wait for locks that it may hold."""
        if not kill and self.all_alive():
            self._shutdown_workers()
        if self._owner != os.getpid() or self._shutdown:
            return
        self._shutdown = True
        _queues_in_use.pop(id(self), None)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for each in (*self._index_queues, self._worker_result_queue):
            each.cancel_join_thread()
            each.close()

    def _shutdown_workers(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._owner == _getpid():  # found before the globals are gone, when the interpreter ends
            super()._shutdown_workers()
            _queues_in_use.pop(id(self), None)


def _begin_worker(worker: int) -> None:
    """Runs in a new worker process: leaves signals to the process that made it, and ends with that."""
    # SIGINT of Ctrl-C goes to all processes of a terminal. The training process decides what follows: it may go on.
    for number in {signal.SIGINT, *signal.pthread_sigmask(signal.SIG_BLOCK, ())}:
        signal.signal(number, _take_no_notice)  # not SIG_IGN, which the programs that a dataset starts would inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(worker)


def _take_no_notice(number: int, frame: Any) -> None:
    """Handles a signal by doing nothing."""


@contextmanager
def _own_signals_blocked() -> Iterator[None]:
    """Blocks the signals that this program handles itself; processes that are started meanwhile inherit that.

    A scheduler that announces the end of a job sends SIGUSR1 or so to all its processes. The program's handler saves a
    checkpoint, and the processes that were started without it would die.
    """
    own = {
        number
        for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        if callable(signal.getsignal(number))
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, own)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(worker: int) -> None:
    """Ends this worker process at once when the process that made it is gone, however that ended.

    torch's workers look at their parent's process id. Under a forkserver that is the server, which lives as long as
    they do.
    """
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name=f"fastload-worker-{worker}-parent", daemon=True).start()


def _death(workers: Sequence[Any], hint: str) -> WorkerError:
    """Returns an error that says how worker processes ended."""
    said = []
    for worker in workers:
        worker.join(1.0)
        code = worker.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            why = " (often the system, out of memory: look at `dmesg`)" if -code == signal.SIGKILL else ""
            said.append(f"process {worker.pid} was killed by {name}{why}")
        else:
            said.append(f"process {worker.pid} ended with exit code {code}")
    return WorkerError(f"a worker of the loader died: {'; '.join(said)}. What it wrote is above.{hint}")


def start_workers(dataset: Dataset[Any], number: int) -> Workers:
    """Starts `Workers`.

    Raises:
        OptionError: this process may not have workers, or the dataset cannot be sent to them.
        WorkerError: the process that starts them ended.
    """
    process = multiprocessing.process.current_process()
    if process.daemon:
        raise OptionError(
            "a FastLoader with worker processes cannot run in a worker of another loader, which may not have "
            "processes of its own. Use the dataset itself there, or a FastLoader without Python transforms."
        )
    if getattr(process, "_inheriting", False):
        raise OptionError(
            f"this process is importing the main script only to start a worker, and the script makes workers of "
            f"its own. {GUARD}"
        )
    try:
        # torch draws a seed, and would on the user's default device.
        with torch.device("cpu"), warnings.catch_warnings(), _own_signals_blocked():
            # The error below says it better.
            warnings.filterwarnings("ignore", "Got pickle error")
            # The user made no DataLoader, and a dataset that waits gains from more workers than CPUs.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return Workers(dataset, number)
    except ChildProcessError as error:
        raise OptionError(
            "this process was forked from one that had started a forkserver, which it cannot use. Call "
            'multiprocessing.set_start_method("fork", force=True) here, or make the loader where the server is.'
        ) from error
    except (EOFError, ConnectionError) as error:
        raise WorkerError(
            f"the process that starts the workers ended, by a signal (Ctrl-C) or an error; what it wrote is above. "
            f"{GUARD}"
        ) from error
    except (PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the dataset or its transform cannot be sent to worker processes: {error}. Define functions and "
            f"classes at the top level of a module (no lambda), open files in the worker and not before, or call "
            f'multiprocessing.set_start_method("fork") first.'
        ) from error


def worker_context() -> BaseContext:
    """Returns the context that starts workers, by `start_method`; a forkserver imports their modules once for all."""
    context = multiprocessing.get_context(start_method())
    server: Any = getattr(forkserver, "_forkserver", None)
    if context.get_start_method() == "forkserver" and getattr(server, "_preload_modules", None) == ["__main__"]:
        # Nobody has chosen otherwise. Two workers then start in 0.1 s and not 2 s; the first start takes as long.
        context.set_forkserver_preload(["__main__", "fastload.prefetch.sample_worker"])
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


def _as_it_is(item: Any) -> Any:
    return item
