"""torch's `DataLoader` workers, watched and ended as fastload needs it; only this module uses torch's internals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastload.errors import WorkerError

GUARD = 'A script that makes worker processes begins its work under `if __name__ == "__main__":`.'


class Workers(_MultiProcessingDataLoaderIter):
    """torch's workers; a dead one is noticed at once, and a forked copy of this object leaves them alone."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._owner = os.getpid()
        self._began = False  # whether any worker has given a result
        super().__init__(loader)
        # torch's signal handler would raise in the middle of the training step, wherever that is.
        signals: Any = _utils.signal_handling
        signals._remove_worker_pids(id(self))
        self._worker_pids_set = False

    @property
    def _reader(self) -> Any:
        queue: Any = self._data_queue
        return queue._reader

    def waiting(self) -> bool:
        """Whether a result has arrived."""
        return len(self._task_info.get(self._rcvd_idx, ())) == 2 or bool(self._reader.poll())

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def num_waiting(self) -> int | None:
        """Returns how many results have arrived; None where queues have no length (macOS)."""
        early = sum(len(info) == 2 for info in self._task_info.values())
        try:
            return early + int(self._worker_result_queue.qsize())
        except NotImplementedError:
            return None

    def dead(self) -> list[Any]:
        """Returns the workers that have ended."""
        return [worker for worker in self._workers if not worker.is_alive()]

    def end(self, *, kill: bool) -> None:
        """Ends the workers; kills them also if one is dead, since torch's way would wait for locks that it may hold."""
        if not kill and not self.dead():
            self._shutdown_workers()
        if self._owner != os.getpid() or self._shutdown:
            return
        self._shutdown = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for each in (*self._index_queues, self._worker_result_queue):
            each.cancel_join_thread()
            each.close()

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        reader = self._reader
        if not reader.poll():
            # torch looks for dead workers only when nothing has arrived for five seconds.
            sentinels = {worker.sentinel: worker for worker in self._workers}
            ready = connection.wait([reader, *sentinels], timeout)
            if ready and reader not in ready:
                dead = [worker for sentinel, worker in sentinels.items() if sentinel in ready]
                raise _death(dead, hint="" if self._began else f" {GUARD}")
        result: tuple[bool, Any] = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]  # torch leaves it so
        self._began |= result[0]
        return result

    def _shutdown_workers(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._owner == _getpid():  # found before the globals are gone, when the interpreter ends
            super()._shutdown_workers()


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


class WorkerLoader(DataLoader[Any]):
    """A `DataLoader` with `Workers`."""

    def _get_iterator(self) -> Workers:
        chosen: str | None = multiprocessing.get_start_method(allow_none=True)
        try:
            return Workers(self)
        finally:
            if chosen is None:
                # Starting a worker asks for the default method, which fixes it; it is the user's to choose.
                multiprocessing.set_start_method(None, force=True)


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
