"""The packer's worker processes: how they begin, get their tasks, and end."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, TypeVar

from fastload.errors import OptionError
from fastload.in_threads import in_order, in_threads
from fastload.pack.chunk_work import Worker
from fastload.pack.messages import receive, send
from fastload.pack.two_steps import TwoSteps
from fastload.sources.listing import Arrays, Files, Listing, Masks, Pictures

_EARLY_WORKERS = 2
_SAMPLES_A_WORKER = 32
_SHARED_BYTES = 64 * 2**20
"""Arrays in memory beyond this are worked on by threads of this process: each worker process would hold a copy."""

TaskT = TypeVar("TaskT")
SummaryT = TypeVar("SummaryT")
PlacedT = TypeVar("PlacedT")
HeldT = TypeVar("HeldT")
ResultT = TypeVar("ResultT")


class WorkerPool:
    """Worker processes; with no workers, the same work in this process.

    Each is a fresh Python that never imports the caller's script, so that a script may call pack_images without the
    `if __name__ == "__main__"` that multiprocessing asks for, and never inherits the locks of the caller's threads.
    Leaving the `with` block ends them, also after an error or Ctrl-C. A worker ends by itself when this process does.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.threads = workers
        """That may do in this process what leaves the GIL; 0: none but the caller's."""
        self._local: list[Worker] = []
        self._threads = 0
        self._listing: Listing | None = None
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._told = False

    def start_early(self) -> None:
        """Start a few, which import while the caller lists the source."""
        self._start(min(self.workers, _EARLY_WORKERS))

    def use(self, listing: Listing) -> None:
        """Tell whose samples the tasks to come are about; once, before `run`."""
        self._listing = listing
        self.workers = min(self.workers, -(-len(listing) // _SAMPLES_A_WORKER))

    def stay_here(self) -> None:
        """Let this process do the work: copying arrays takes less time than telling another one of them."""
        self.workers = 0

    def use_threads(self) -> None:
        """Let threads do what would stay here otherwise: it leaves the GIL, and takes longer than copying."""
        if not self.workers:
            self._threads = self.threads

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._local:
            worker.close()
        for connection, process in self._processes.items():
            connection.close()
            process.kill()  # It is idle, or its chunk is not wanted any more.
        for process in self._processes.values():
            process.wait()
        self._processes = {}

    def _start(self, count: int) -> None:
        for _ in range(count):
            ours, theirs = Pipe()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from fastload.pack.workers import serve; "
                f"serve({theirs.fileno()})"
            )
            # A session of its own: Ctrl-C is for the parent, which then ends its workers.
            self._processes[ours] = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()

    def run(self, work: Callable[[Worker, TaskT], ResultT], tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        """Results of all tasks, in the order in which they are done.

        Args:
            work: a function or method of Worker that an import finds; what it raises is raised here.

        Raises:
            PackError: a worker process died.
        """
        if not self._have_processes():
            yield from in_threads(partial(self._work_here, work), tasks, self._threads)
            return
        idle, busy = list(self._processes), set[Connection]()
        coming = iter(tasks)
        while True:
            # One task at a time each: a worker that is asked is waiting, so neither side ever blocks the other.
            for task in islice(coming, len(idle)):
                send(idle[-1], pickle.dumps((work, task)))
                busy.add(idle.pop())
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                result, error = receive(ready)
                busy.remove(ready)
                idle.append(ready)
                if error is not None:
                    raise error
                yield result

    def run_in_order(
        self,
        encode: Callable[[Worker, TaskT], tuple[SummaryT, HeldT]],
        place: Callable[[SummaryT], PlacedT],
        write: Callable[[Worker, PlacedT, HeldT], ResultT],
        tasks: Iterable[TaskT],
    ) -> Iterator[ResultT]:
        """Results of tasks whose second step needs to know the first one of all tasks before.

        A worker encodes a task and keeps what it made; `place` is called here with the summaries, in the order of the
        tasks; then the same worker writes. When `place` raises, what was placed before is written, and its results come
        first.

        Args:
            encode, write: functions that an import finds; what they raise is raised here.

        Returns:
            What `write` returns, in the order in which tasks are done.

        Raises:
            PackError: a worker process died.
        """
        if self._have_processes():
            yield from TwoSteps(list(self._processes), encode, place, write).run(tasks)
            return

        def write_here(worker: Worker, made: tuple[PlacedT, HeldT]) -> ResultT:
            return write(worker, *made)

        # Writing is short beside encoding, so that this thread does it while others encode.
        for summary, held in in_order(partial(self._work_here, encode), tasks, self._threads):
            yield self._work_here(write_here, (place(summary), held))

    def _have_processes(self) -> bool:
        """Whether worker processes do the work, started and told of the listing; else threads, or this one."""
        assert self._listing is not None, "use() comes first"
        if self.workers and not self._told and _bytes_in_memory(self._listing) > _SHARED_BYTES:
            self.workers, self._threads = 0, self.workers
        if self.workers and not self._told:
            self._told = True
            self._start(self.workers - len(self._processes))
            _tell(self._processes, self._listing)
        return self.workers > 0

    def _work_here(self, work: Callable[[Worker, TaskT], ResultT], task: TaskT) -> ResultT:
        assert self._listing is not None, "use() comes first"
        # Threads take and bring back a Worker each: its memory and its open output are not to be shared.
        try:
            worker = self._local.pop()
        except IndexError:
            worker = Worker(*_what_is_read(self._listing))
        try:
            return work(worker, task)
        finally:
            self._local.append(worker)


def _bytes_in_memory(listing: Listing) -> int:
    """Bytes of arrays that a worker process would get a copy of; 0 where images are decoded from files."""
    if not isinstance(listing.files, Arrays):
        return 0
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(_what_is_read(listing), protocol=5, buffer_callback=buffers.append)
    return sum(buffer.raw().nbytes for buffer in buffers)


def _tell(workers: Iterable[Connection], listing: Listing) -> None:
    """Send what the samples are read by; its pickled form is gone when this returns."""
    told = _pickled(listing)
    for worker in workers:
        send(worker, told)


def _what_is_read(listing: Listing) -> tuple[Files | Pictures | Arrays, Masks | None]:
    assert listing.files is not None, "a listing without images has no chunks"
    return listing.files, listing.masks


def _pickled(listing: Listing) -> bytes:
    try:
        return pickle.dumps(_what_is_read(listing))
    except Exception as exc:  # a dataset of the user's may refuse in any way
        raise OptionError(
            f"the dataset cannot be sent to worker processes ({type(exc).__name__}: {exc}). Pack it in this process, "
            f"with workers=0, or make it picklable."
        ) from exc


def serve(fd: int) -> None:
    """The life of a worker process: tasks come and results go over this descriptor, until its other end is closed."""
    with Connection(fd) as connection, suppress(EOFError, ConnectionError):
        told, worker = connection.recv_bytes(), None
        while True:
            work, task = pickle.loads(connection.recv_bytes())
            answer: tuple[Any, BaseException | None]
            try:
                if worker is None:
                    worker = Worker(*pickle.loads(told))
                    told = b""  # It may hold hundreds of MB, which now lie there unpacked.
                answer = work(worker, task), None
            except BaseException as exc:  # noqa: BLE001 - whatever it is, it is raised in the parent
                exc.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, exc
            connection.send_bytes(pickle.dumps(answer))
