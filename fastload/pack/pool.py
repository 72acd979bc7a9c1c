"""The packer's worker processes: how they start, get their tasks, and end.

`PackPool.run` gives tasks to idle workers and yields results as they are done. Tasks may have two steps: a worker makes
rows and keeps them, this process computes where they go once all earlier rows are made, and the same worker writes
them. Without worker processes, threads or this process do the same work.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, TypeVar

from fastload.errors import OptionError, PackError
from fastload.pack.pack_worker import Unwritten, Worker
from fastload.sources.listing import Arrays, Files, Listing, Masks, Pictures
from fastload.system.threads import in_order, in_threads

_EARLY_WORKERS = 2
_SAMPLES_A_WORKER = 32
_SHARED_BYTES = 64 * 2**20
"""Larger arrays in memory are packed by threads of this process: each worker process would hold a copy."""
_AHEAD = 3
"""Tasks that a worker may have encoded and not written: a slow task elsewhere does not stop it, memory is bounded."""

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


class PackPool:
    """Worker processes; with `workers=0` the same work in this process.

    Each is a fresh Python that never imports the caller's script, so that a script may call pack_images without the
    `if __name__ == "__main__"` that multiprocessing asks for, and never inherits the locks of the caller's threads.
    Leaving the `with` block ends them, also after an error or Ctrl-C. A worker ends by itself when this process does.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.threads = workers
        """Number of threads for work in this process that releases the GIL; 0: only the caller's."""
        self._local: list[Worker] = []
        self._threads = 0
        self._listing: Listing | None = None
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._listing_sent = False

    def start_early(self) -> None:
        """Starts a few processes, which import modules while the caller lists the source."""
        self._start(min(self.workers, _EARLY_WORKERS))

    def use(self, listing: Listing) -> None:
        """Sets the listing whose samples the tasks are about; once, before `run`."""
        self._listing = listing
        self.workers = min(self.workers, -(-len(listing) // _SAMPLES_A_WORKER))

    def use_this_process(self) -> None:
        """Does without worker processes: copying arrays takes less time than sending tasks."""
        self.workers = 0

    def use_threads(self) -> None:
        """Uses threads instead of this process alone: encoding releases the GIL, and takes longer than copying."""
        if not self.workers:
            self._threads = self.threads

    def __enter__(self) -> PackPool:
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
                f"import sys; sys.path[:] = {sys.path!r}; from fastload.pack.pool import serve; "
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

    def run(
        self,
        work: Callable[[Worker, TaskT], Any],
        tasks: Iterable[TaskT],
        locate: Callable[[Any], Any] | None = None,
        write: Callable[[Worker, Any, Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yields the results of all tasks, in the order in which they are done.

        A task is done by one step, or by two: where `work` returns `Unwritten`, its rows stay with the worker, `locate`
        is called in this process with the summaries, in the order of the tasks, and then the same worker writes. When
        `locate` raises, what was located before is written, and its results come first.

        Args:
            work, write: functions or methods of Worker that can be imported; their exceptions are raised here.
            locate: summary -> where the rows go; with it either all tasks have two steps, or none has.

        Returns:
            The results of `write`, or of `work` where it is all.

        Raises:
            PackError: a worker process died.
        """
        if self._have_processes():
            yield from _Pipeline(list(self._processes), work, locate, write).run(tasks)
            return
        order = in_order if locate else in_threads
        for result in order(partial(self._work_here, work), tasks, self._threads):
            if not isinstance(result, Unwritten):
                yield result
                continue
            assert locate is not None and write is not None, "rows that wait for their offsets get some"
            # Writing takes little time compared with encoding, so this thread does it while others encode.
            yield self._work_here(_write_here, (write, locate(result.summary), result.made))

    def _have_processes(self) -> bool:
        """Whether worker processes do the work, which are started here; else threads do, or this one."""
        assert self._listing is not None, "use() comes first"
        if self.workers and not self._listing_sent and _bytes_in_memory(self._listing) > _SHARED_BYTES:
            self.workers, self._threads = 0, self.workers
        if self.workers and not self._listing_sent:
            self._listing_sent = True
            self._start(self.workers - len(self._processes))
            _send_to_all(self._processes, self._listing)
        return self.workers > 0

    def _work_here(self, work: Callable[[Worker, TaskT], ResultT], task: TaskT) -> ResultT:
        assert self._listing is not None, "use() comes first"
        # Each thread takes a Worker and returns it: its buffers and its open output are not to be shared.
        try:
            worker = self._local.pop()
        except IndexError:
            worker = Worker(*_sample_files(self._listing))
        try:
            return work(worker, task)
        finally:
            self._local.append(worker)


class _Pipeline:
    """One run of `PackPool.run` over worker processes."""

    def __init__(
        self,
        workers: list[Connection],
        work: Callable[[Worker, Any], Any],
        locate: Callable[[Any], Any] | None,
        write: Callable[[Worker, Any, Any], Any] | None,
    ) -> None:
        self._work, self._locate, self._write = work, locate, write
        self._idle = list(workers)
        self._unwritten = dict.fromkeys(workers, 0)
        self._to_write: dict[Connection, deque[tuple[int, Any]]] = {worker: deque() for worker in workers}
        self._encoded: dict[int, tuple[Connection, Any]] = {}
        self._next = 0
        self._error: Exception | None = None

    def run(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yields results in the order in which tasks are done."""
        coming = enumerate(tasks)
        # One task at a time for each: a worker that gets one is waiting, so neither side ever blocks the other.
        busy = self._assign(coming, set())
        # The first task that is not located yet is always with a worker, so somebody is busy until all are done.
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                answer, error = _receive(ready)
                if error is not None:
                    raise error
                busy.remove(ready)
                self._idle.append(ready)
                number, done, value = answer
                if done:
                    self._unwritten[ready] -= 1
                    yield value
                else:
                    self._encoded[number] = ready, value
                    self._locate_in_order()
            busy = self._assign(coming, busy)
        if self._error is not None:
            raise self._error

    def _assign(self, coming: Iterator[tuple[int, Any]], busy: set[Connection]) -> set[Connection]:
        """Gives idle workers what there is to do; returns the busy ones."""
        waiting = []
        for worker in self._idle:
            message: Any = None
            if self._to_write[worker]:
                message = _write_kept, (self._write, *self._to_write[worker].popleft())
            elif self._error is None and self._unwritten[worker] < _AHEAD and (task := next(coming, None)) is not None:
                self._unwritten[worker] += 1
                message = _work_and_keep, (self._work, *task)
            if message is None:
                waiting.append(worker)
            else:
                _send(worker, pickle.dumps(message))
                busy.add(worker)
        self._idle = waiting
        return busy

    def _locate_in_order(self) -> None:
        assert self._locate is not None, "rows that wait for their offsets get some"
        while self._error is None and self._next in self._encoded:
            worker, summary = self._encoded.pop(self._next)
            try:
                self._to_write[worker].append((self._next, self._locate(summary)))
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised when all before it is written
                self._error = exc
            self._next += 1


def _work_and_keep(worker: Worker, message: tuple[Callable[..., Any], int, Any]) -> tuple[int, bool, Any]:
    """Returns a task's number, whether it is done, and its result; of rows that are not written the summary."""
    work, number, task = message
    result = work(worker, task)
    if not isinstance(result, Unwritten):
        return number, True, result
    worker.unwritten[number] = result.made
    return number, False, result.summary


def _write_kept(worker: Worker, message: tuple[Callable[..., Any], int, Any]) -> tuple[int, bool, Any]:
    write, number, located = message
    return number, True, write(worker, located, worker.unwritten.pop(number))


def _write_here(worker: Worker, message: tuple[Callable[..., Any], Any, Any]) -> Any:
    write, located, made = message
    return write(worker, located, made)


def _sample_files(listing: Listing) -> tuple[Files | Pictures | Arrays, Masks | None]:
    """Returns the images and masks of a listing, the arguments of `Worker`."""
    assert listing.files is not None, "a listing without images has no chunks"
    return listing.files, listing.masks


def _bytes_in_memory(listing: Listing) -> int:
    """Returns the bytes of arrays that each worker process would copy; 0 where images are decoded from files."""
    if not isinstance(listing.files, Arrays):
        return 0
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(_sample_files(listing), protocol=5, buffer_callback=buffers.append)
    return sum(buffer.raw().nbytes for buffer in buffers)


def _send_to_all(workers: Iterable[Connection], listing: Listing) -> None:
    """Sends the images and masks of a listing; their pickled form is freed when this returns."""
    message = _pickled(listing)
    for worker in workers:
        _send(worker, message)


def _pickled(listing: Listing) -> bytes:
    try:
        return pickle.dumps(_sample_files(listing))
    except Exception as exc:  # A dataset of the user's may raise anything.
        raise OptionError(
            f"the dataset cannot be sent to worker processes ({type(exc).__name__}: {exc}). Pack it in this process, "
            f"with workers=0, or make it picklable."
        ) from exc


def _send(worker: Connection, message: bytes) -> None:
    """Sends a worker a pickled message.

    Raises:
        PackError: it died.
    """
    try:
        # Not send(): interrupted by Ctrl-C, its exported buffer makes Python print an "Exception ignored" at exit.
        worker.send_bytes(message)
    except OSError as exc:
        raise _worker_died() from exc


def _receive(worker: Connection) -> Any:
    """Returns a worker's answer.

    Raises:
        PackError: it died.
    """
    try:
        return pickle.loads(worker.recv_bytes())
    except (EOFError, OSError) as exc:
        raise _worker_died() from exc


def _worker_died() -> PackError:
    return PackError(
        "a worker process died: killed (out of memory?), or crashed while decoding. What was packed is kept: the same "
        "command continues. With `--workers 1` less memory is used."
    )


def serve(fd: int) -> None:
    """Runs a worker process: receives tasks and sends results over this descriptor until its other end is closed."""
    with Connection(fd) as connection, suppress(EOFError, ConnectionError):
        files, worker = connection.recv_bytes(), None
        while True:
            work, task = pickle.loads(connection.recv_bytes())
            answer: tuple[Any, BaseException | None]
            try:
                if worker is None:
                    worker = Worker(*pickle.loads(files))
                    files = b""  # It may hold hundreds of MB, which are unpickled now.
                answer = work(worker, task), None
            except BaseException as exc:  # noqa: BLE001 - whatever it is, it is raised in the parent
                exc.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, exc
            connection.send_bytes(pickle.dumps(answer))
