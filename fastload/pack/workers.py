"""The packer's worker processes: they read headers, decode chunks into place, and check chunks already there.

No pixel crosses a process border: a worker writes its chunk at its place in the file and returns digests.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import Target, decode_image, probe_image
from fastload.errors import ImageError, OutputError, PackError
from fastload.sources.listing import Files, Listing

HEADERS = np.dtype([("height", "<i4"), ("width", "<i4"), ("channels", "u1"), ("bits", "u1")])

_CACHE_BYTES = 512 * 2**10
_EARLY_WORKERS = 2
_SAMPLES_A_WORKER = 32

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class HeaderBlock:
    """Headers of a block of samples.

    Attributes:
        samples: int64 (n,), which samples of the listing.
        headers: HEADERS (n,); zero where a header could not be read.
        kinds: how many of each kind of image, for the report of conversions.
        reasons: sample -> why its header could not be read.
    """

    samples: NDArray[np.int64]
    headers: NDArray[np.void]
    kinds: Counter[str]
    reasons: dict[int, str]


@dataclass(frozen=True)
class ChunkTask:
    """A chunk to decode or to check.

    Attributes:
        part: path of the file being packed.
        offset: byte at which the chunk begins.
        rows: int64 (k,), its rows, ascending.
        samples: int64 (k,), the sample of the listing that each row holds; empty when only checked.
        target: what each image becomes.
        digests: uint64 (k,), what is expected when checking; empty when decoding.
    """

    part: str
    offset: int
    rows: NDArray[np.int64]
    target: Target
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        target = self.target
        return target.height * target.width * target.channels * target.dtype.itemsize


@dataclass(frozen=True)
class ChunkResult:
    """A chunk in its place: pixel digests uint64 (k,) of its rows, and row -> reason for those skipped."""

    rows: NDArray[np.int64]
    digests: NDArray[np.uint64]
    reasons: dict[int, str]


class Worker:
    """What one process needs to work on chunks: the samples' files, one chunk of memory, the open output."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._memory = np.zeros(0, np.uint8)
        self._part = ("", -1)

    def close(self) -> None:
        """Close the output."""
        if self._part[1] >= 0:
            os.close(self._part[1])
        self._part = ("", -1)

    def probe(self, samples: NDArray[np.int64]) -> HeaderBlock:
        """Read the headers of these samples."""
        block = HeaderBlock(samples, np.zeros(len(samples), HEADERS), Counter(), {})
        for at, sample in enumerate(samples.tolist()):
            try:
                header = probe_image(lambda size, i=sample: self.files.read_head(i, size))  # type: ignore[misc]
            except (ImageError, OSError) as exc:
                block.reasons[sample] = _reason(exc)
                continue
            block.headers[at] = (header.height, header.width, header.channels, header.bits)
            block.kinds[header.kind] += 1
            block.kinds["frames"] += header.frames > 1
        return block

    def pack(self, task: ChunkTask) -> ChunkResult:
        """Decode a chunk and write it at its place; rows that cannot be decoded stay zero."""
        digests = np.zeros(len(task.rows), np.uint64)
        reasons: dict[int, str] = {}
        # A few images at a time, so that they are hashed and written while they are still in the core's cache.
        step = max(1, _CACHE_BYTES // task.row_bytes)
        for start in range(0, len(task.rows), step):
            samples = task.samples[start : start + step].tolist()
            arena = self._arena(task, len(samples))
            for at, sample in enumerate(samples):
                try:
                    decode_image(self.files.read(sample), task.target, arena[at])
                    digests[start + at] = xxhash.xxh3_64_intdigest(arena[at].data)
                except (ImageError, OSError) as exc:
                    arena[at] = 0
                    reasons[int(task.rows[start + at])] = _reason(exc)
            self._write(task, arena, task.offset + start * task.row_bytes)
        return ChunkResult(task.rows, digests, reasons)

    def _write(self, task: ChunkTask, arena: NDArray[Any], offset: int) -> None:
        try:
            write_at(self._open(task.part), arena.reshape(-1).view(np.uint8), offset)
        except OSError as exc:
            raise OutputError(
                f"{task.part}: cannot be written ({exc.strerror}). What was packed is kept: make room, then run the "
                f"same command again."
            ) from exc

    def check(self, task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The chunk's rows, and for each whether the bytes on disk have the digest expected."""
        arena = self._arena(task, len(task.rows))
        flat = arena.reshape(-1).view(np.uint8)
        flat[read_at(self._open(task.part), flat, task.offset) :] = 0
        found = np.fromiter((xxhash.xxh3_64_intdigest(row.data) for row in arena), np.uint64, len(arena))
        return task.rows, found == task.digests

    def _arena(self, task: ChunkTask, num_rows: int) -> NDArray[Any]:
        """Memory for so many images, (num_rows, H, W, C), used again and again."""
        num_bytes = num_rows * task.row_bytes
        if len(self._memory) < num_bytes:
            self._memory = np.zeros(num_bytes, np.uint8)
        target = task.target
        shape = (num_rows, target.height, target.width, target.channels)
        return self._memory[:num_bytes].view(target.dtype).reshape(shape)

    def _open(self, part: str) -> int:
        if self._part[0] != part:
            self.close()
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
            # A shared lock held while this process lives: after a kill of the packer, the next one waits for it
            # before it touches the file, so that no orphan writes behind its back.
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._part = (part, fd)
        return self._part[1]


class WorkerPool:
    """Worker processes; with no workers, the same work in this process.

    Each is a fresh Python that never imports the caller's script, so that a script may call pack_images without the
    `if __name__ == "__main__"` that multiprocessing asks for, and never inherits the locks of the caller's threads.
    Leaving the `with` block ends them, also after an error or Ctrl-C. A worker ends by itself when this process does.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._local: Worker | None = None
        self._listing: Listing | None = None
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._told = False
        # They import while the caller lists the source.
        self._start(min(workers, _EARLY_WORKERS))

    def use(self, listing: Listing) -> None:
        """Tell whose samples the tasks to come are about; once, before `run`."""
        self._listing = listing
        self.workers = min(self.workers, -(-len(listing) // _SAMPLES_A_WORKER))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._local is not None:
            self._local.close()
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
        assert self._listing is not None, "use() comes first"
        if not self.workers:
            self._local = self._local or Worker(self._listing.files)  # type: ignore[arg-type]
            for task in tasks:
                yield work(self._local, task)
            return
        if not self._told:
            self._told = True
            self._start(self.workers - len(self._processes))
            for worker in self._processes:
                _send(worker, self._listing.files)
        idle, busy = list(self._processes), set[Connection]()
        coming = iter(tasks)
        while True:
            # One task at a time each: a worker that is asked is waiting, so neither side ever blocks the other.
            for task in islice(coming, len(idle)):
                _send(idle[-1], (work, task))
                busy.add(idle.pop())
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                result, error = _receive(ready)
                busy.remove(ready)
                idle.append(ready)
                if error is not None:
                    raise error
                yield result


def _send(worker: Connection, message: object) -> None:
    try:
        # Not send(): interrupted by Ctrl-C, its exported buffer makes Python print an "Exception ignored" at exit.
        worker.send_bytes(pickle.dumps(message))
    except OSError as exc:
        raise _worker_died() from exc


def _receive(worker: Connection) -> Any:
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
    """The life of a worker process: tasks come and results go over this descriptor, until its other end is closed."""
    with Connection(fd) as connection, suppress(EOFError, ConnectionError):
        worker = Worker(pickle.loads(connection.recv_bytes()))
        while True:
            work, task = pickle.loads(connection.recv_bytes())
            answer: tuple[Any, BaseException | None]
            try:
                answer = work(worker, task), None
            except BaseException as exc:  # noqa: BLE001 - whatever it is, it is raised in the parent
                exc.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, exc
            connection.send_bytes(pickle.dumps(answer))


def write_at(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    """Write all bytes at an offset of a file."""
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, out: NDArray[np.uint8], offset: int) -> int:
    """Fill an array from an offset of a file; bytes read, fewer at its end."""
    view, total = out.data, 0
    while view and (count := os.preadv(fd, [view], offset + total)):
        view, total = view[count:], total + count
    return total


def _reason(exc: Exception) -> str:
    return str(exc) if isinstance(exc, ImageError) else f"cannot be read: {exc}"
