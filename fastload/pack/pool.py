"""The packer's worker processes: how they start, get their tasks, and end.

`PackPool.run` gives tasks to idle workers and yields results as they are done. Tasks may have two steps: a worker makes
rows and keeps them, this process computes where they go once all earlier rows are made, and the same worker writes
them. Without worker processes, threads or this process do the same work.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, PackError, level_of_the_user
from fastload.images.image_header import large_images, large_room
from fastload.images.jpeg import has_libjpeg
from fastload.pack.encode import announce_samples
from fastload.pack.pack_worker import NO_SAMPLE, PackTask, Unwritten, Worker
from fastload.remote.client import in_use
from fastload.sources.listing import Arrays, Files, Listing, Masks, Pictures, first_few
from fastload.system.machine import how_it_ended, which_end
from fastload.system.threads import end_with, in_threads, may_fork

_EARLY_WORKERS = 2
_SAMPLES_A_WORKER = 32
_SHARED_BYTES = 64 * 2**20
"""Larger arrays in memory are packed by threads of this process: each worker process would hold a copy."""
_AHEAD = 3
"""Tasks that a worker may have made and not written: a slow task elsewhere does not stop it, memory is bounded."""
_BEFORE = 4
"""Tasks that a dead worker had done which are looked at if its last one did not end it."""
_WRITING = -1  # stands for the number of a task while its rows are written


LONG_S = 60.0
"""Seconds that one image takes after which a warning names it; then twice as many."""
_LOOK_S = 5.0

_TOLD = 400
"""Characters of a failed packer's output."""
_END_S = 5.0
_LOW_PRIORITY = 10

TaskT = TypeVar("TaskT")


class PackPool:
    """Worker processes; with `workers=0` the same work in this process.

    Each is a fresh Python that never imports the caller's script, so that a script may call pack_images without the
    `if __name__ == "__main__"` that multiprocessing asks for, and never inherits the locks of the caller's threads; or,
    where it `may_fork`, a fork of this process, 0.3 s of imports cheaper.
    Leaving the `with` block ends them, also after an error or Ctrl-C. A worker ends by itself when this process
    does.

    `threads` is for work that releases the GIL, `local_threads` for tasks where no process does them; 0: the
    caller's only.
    """

    def __init__(self, workers: int) -> None:
        self.workers = self.threads = workers
        self.local_threads = 0
        self._local: list[Worker] = []
        self._unwritten: dict[int, Unwritten] = {}
        self._files: tuple[Files | Pictures | Arrays | None, Masks | None] = None, None
        self._processes: dict[Connection, int] = {}  # to their numbers
        self._numbers: dict[Connection, int] = {}  # to their places
        self._spawned = False  # whether one of them is no fork of this process
        self._held: list[Connection] = []  # a pipe to each, whose end is theirs
        self._places: _Places | None = None  # of the processes; the last one is for those that try samples alone
        self._refused: dict[int, str] = {}  # samples that ended a process, also alone, and how
        self._keys: Sequence[str] = ()
        self._files_sent = False
        self._ahead = False  # whether what tasks read is behind URLs, and fetched before they begin

    def start_early(self) -> None:
        """Starts a few processes, which get ready while the caller lists the source."""
        self._start(min(self.workers, _EARLY_WORKERS))

    def use(self, listing: Listing) -> None:
        """Sets the listing whose samples the tasks are about; once, before `run`."""
        self._files, self._keys = (listing.files, listing.masks), listing.keys
        self._ahead = any(hasattr(files, "ranges") for files in (listing.files, listing.masks and listing.masks.files))
        self.workers = min(self.workers, -(-len(listing) // _SAMPLES_A_WORKER))

    def __enter__(self) -> PackPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._local:
            worker.close()
        for connection, process in self._processes.items():
            connection.close()
            with suppress(ProcessLookupError):  # somebody else has waited for it
                os.kill(process, signal.SIGKILL)  # It is idle, or its chunk is not wanted any more.
        for process in self._processes.values():
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
        self._processes = {}
        self._held = []
        if self._places is not None:
            self._places.close()

    def _start(self, count: int) -> None:
        for _ in range(count):
            self._start_one(len(self._numbers))

    def _start_one(self, number: int, *, trial: bool = False) -> Connection:
        """Starts a process that notes in this place which sample it is at; below 0: in the last one.

        As a `trial` it ends where memory is freed behind which something was written, and not some time later.
        """
        ours, theirs = Pipe()
        parent, held = Pipe(duplex=False)
        if self._places is None:
            self._places = _Places(self.threads + 1)
        start = partial(_spawn, trial=True) if trial else _fork if self._forks else _spawn
        self._spawned |= start is _spawn
        self._places[number] = NO_SAMPLE
        process = start(theirs.fileno(), parent.fileno(), self._places.fileno(), number)
        self._processes[ours], self._numbers[ours] = process, number
        self._held.append(held)
        theirs.close()
        parent.close()
        return ours

    @property
    def _forks(self) -> bool:
        """Whether a process that starts now is a fork of this one, which has what the script defines."""
        return may_fork() and not in_use()

    def _at(self, number: int) -> int:
        """Returns the sample that a process is at."""
        return NO_SAMPLE if self._places is None else self._places[number]

    def _buried(self, worker: Connection) -> str:
        """Returns how a process ended whose connection is at its end."""
        worker.close()
        del self._numbers[worker]
        try:
            return how_it_ended(os.waitstatus_to_exitcode(os.waitpid(self._processes.pop(worker), 0)[1]))
        except ChildProcessError:  # somebody else has waited for it
            return "is gone"

    def run(
        self,
        work: Callable[[Worker, TaskT], Any],
        tasks: Iterable[TaskT],
        locate: Callable[[Any], Any] | None = None,
        write: Callable[[Worker, Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yields the results of all tasks, of `write` or else of `work`, in the order in which they are done.

        With `locate` each task has two steps: `work` keeps rows in `Worker.unwritten`, `locate` is called in this
        process with its results, in the order of the tasks, and then the same worker writes what that returns. When it
        raises, the rows located before are written, and their results come first. `work` and `write` can be imported;
        their exceptions are raised here. Where a worker process dies, the samples of its task are tried in processes of
        their own; those that end these, too, are left out as if they could not be decoded, and another process does the
        task. PackError if there are none.
        """
        if self.workers and not self._files_sent:
            self._start_all()
        if self.workers:
            yield from self._in_processes(work, tasks, locate, write)
            return
        tasks = self._announced(tasks) if self._ahead else tasks
        for result in in_threads(partial(self._here, work), tasks, self.local_threads, ordered=locate is not None):
            # Writing takes little time compared with encoding, so this thread does it while others encode.
            yield result if locate is None or write is None else self._here(write, locate(result))

    def _start_all(self) -> None:
        """Starts the processes and sends them the images and masks, unless these are large arrays, or of the script."""
        if isinstance(self._files[0], Arrays):
            buffers: list[pickle.PickleBuffer] = []
            pickle.dumps(self._files, protocol=5, buffer_callback=buffers.append)
            if sum(buffer.raw().nbytes for buffer in buffers) > _SHARED_BYTES:
                self.workers, self.local_threads = 0, self.workers
                return
        message = self._files_message()
        if (self._spawned or not self._forks) and refers_to_main(message):
            warnings.warn(
                f"the dataset is made of classes or functions of the script itself, which worker processes do not "
                f"import: this process packs it alone. Define them in a module that the script imports to have it "
                f"packed by {self.workers} processes.",
                stacklevel=level_of_the_user(),
            )
            self.workers = 0
            return
        self._files_sent = True
        self._start(self.workers - len(self._processes))
        for worker in self._processes:
            _send(worker, message)

    def _files_message(self) -> bytes:
        try:
            return pickle.dumps((self._files, large_room()))
        except Exception as exc:  # A dataset of the user's may raise anything.
            raise OptionError(
                f"the dataset cannot be sent to worker processes ({type(exc).__name__}: {exc}). Pack it in this "
                f"process, with workers=0, or make it picklable."
            ) from exc

    def _in_processes(
        self,
        work: Callable[[Worker, TaskT], Any],
        tasks: Iterable[TaskT],
        locate: Callable[[Any], Any] | None,
        write: Callable[[Worker, Any], Any] | None,
    ) -> Iterator[Any]:
        """Yields the results of `run` by worker processes.

        With `_ahead` each worker is given a task's samples while it is at the task before, to have them fetched.
        """
        workers, ahead, watch = list(self._processes), self._ahead, _Watch(self._keys)
        coming, to_locate = enumerate(tasks), 0
        promised: dict[Connection, tuple[int, TaskT]] = {}  # the task that a worker was announced, and did not get yet

        def take(worker: Connection) -> tuple[tuple[int, TaskT] | None, list[TaskT]]:
            """Returns the next task of a worker and its number, and the tasks that it is to announce before."""
            known = worker in promised
            task = promised.pop(worker) if known else next(coming, None)
            if task is None and promised:  # another worker has more to do than this one
                task = promised.pop(min(promised, key=lambda other: promised[other][0]))
            announced = [] if known or task is None or not ahead else [task[1]]
            if ahead and task is not None and (following := next(coming, None)) is not None:
                promised[worker] = following
                announced.append(following[1])
            return task, announced

        busy: dict[Connection, int] = {}  # Worker -> number of its task.
        # What it was given and did not finish, by number; a process that takes its place makes that again.
        given: dict[Connection, dict[int, TaskT]] = {worker: {} for worker in workers}
        again: dict[Connection, deque[int]] = {worker: deque() for worker in workers}
        before: dict[Connection, deque[TaskT]] = {worker: deque(maxlen=_BEFORE) for worker in workers}  # what it made
        made: dict[int, tuple[Connection, Any]] = {}
        to_write: dict[Connection, deque[Any]] = {worker: deque() for worker in workers}
        error: Exception | None = None
        while True:
            # One task at a time for each: a worker that gets one is waiting, so neither side ever blocks the other.
            for worker in workers:
                if worker in busy:
                    continue
                if again[worker]:
                    busy[worker] = again[worker].popleft()
                    self._ask(worker, work, given[worker][busy[worker]])
                elif to_write[worker]:
                    busy[worker] = _WRITING
                    self._ask(worker, write, to_write[worker].popleft())
                elif error is None and len(given[worker]) < _AHEAD:
                    task, announced = take(worker)
                    if task is not None:
                        busy[worker], given[worker][task[0]] = task
                        self._ask(worker, work, task[1], [found for one in announced for found in _samples_of(one)])
            # The first task that is not located yet is always with a worker, so somebody is busy until all are done.
            if not busy:
                break
            for ready in wait(list(busy), _LOOK_S):
                assert isinstance(ready, Connection)
                number, answer = busy.pop(ready), _answer(ready)
                if answer is None:
                    successor = self._succeed(ready, work, given[ready].get(number), before.pop(ready))
                    before[successor] = deque(maxlen=_BEFORE)
                    workers[workers.index(ready)] = successor
                    given[successor], to_write[successor] = given.pop(ready), to_write.pop(ready)
                    again[successor] = deque(sorted(given[successor]))
                    again.pop(ready)
                    if ready in promised:
                        promised[successor] = promised.pop(ready)
                    made = {number: each for number, each in made.items() if each[0] is not ready}
                    continue
                result, raised = answer
                if raised is not None:
                    raise raised
                if number != _WRITING:
                    before[ready].append(given[ready][number])
                if number == _WRITING or locate is None:
                    # Rows are written in the order in which they were made.
                    given[ready].pop(min(given[ready]))
                    yield result
                    continue
                if number < to_locate:  # made again: its place is known
                    continue
                made[number] = ready, result
                while error is None and to_locate in made:
                    owner, summary = made.pop(to_locate)
                    try:
                        to_write[owner].append(locate(summary))
                    except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised when all before it is written
                        error = exc
                    to_locate += 1
            watch.look({number: self._at(number) for number in map(self._numbers.__getitem__, busy)})
        if error is not None:
            raise error

    def _ask(self, worker: Connection, work: object, task: object, announced: Sequence[Any] = ()) -> None:
        _send(worker, pickle.dumps((work, task, announced, self._refused)))

    def _succeed(
        self, dead: Connection, work: Callable[[Worker, TaskT], Any], task: TaskT | None, before: Sequence[TaskT]
    ) -> Connection:
        """Returns another process in the place of a dead one, after samples of its task that end processes were found.

        Raises PackError if there are none, or it was at no task that reads samples. Samples of tasks that it did
        `before` may have written past their memory: they are named then.
        """
        number = self._numbers[dead]
        at, how = self._at(number), self._buried(dead)

        def killers_in(task: TaskT | None) -> dict[int, str]:
            samples = [] if task is None or isinstance(self._files[0], Arrays) else _numbers_in(task)
            found = which_end(samples, at, lambda some: self._ended(work, task, samples, some))
            return {sample: f"ends the process that reads it, also one that reads nothing else: it {ended}"
                    for sample, ended in found.items()}  # fmt: skip

        killers = killers_in(task)
        if not killers or killers.keys() & self._refused.keys():
            earlier = next(filter(None, map(killers_in, reversed(before))), {}) if not killers else {}
            said = [f"{self._keys[sample]}, which it had read, {why}; remove it" for sample, why in earlier.items()]
            samples = _numbers_in(task)
            if samples and not earlier:
                names = first_few([self._keys[sample] for sample in samples], 3)
                said = [f"It was at {names}; none of these ends a process by itself"]
            raise PackError(
                f"a worker process died: it {'. '.join([how, *said])}. With `--workers 1` less memory is used."
            )
        self._refused |= killers
        successor = self._start_one(number)
        _send(successor, self._files_message())
        return successor

    def _ended(self, work: object, task: object, samples: list[int], tried: list[int]) -> str:
        """Returns how a new process ended that did a task with these of its samples alone; "" if it did not."""
        trial = self._start_one(-1, trial=True)
        others = dict.fromkeys(set(samples) - set(tried), "not tried")
        try:
            _send(trial, self._files_message())
            _send(trial, pickle.dumps((work, task, (), self._refused | others)))
        except PackError:
            return self._buried(trial)
        if _answer(trial) is None:
            return self._buried(trial)
        os.kill(self._processes[trial], signal.SIGKILL)
        self._buried(trial)
        return ""

    def _announced(self, tasks: Iterable[TaskT]) -> Iterator[TaskT]:
        """Yields the tasks; what the next one reads is being fetched when one is yielded."""
        coming = deque[TaskT]()
        for task in tasks:
            coming.append(task)
            for samples, heads in _samples_of(task):
                announce_samples(*self._files, samples, heads=heads)
            if len(coming) > 1:
                yield coming.popleft()
        yield from coming

    def _here(self, work: Callable[[Worker, TaskT], Any], task: TaskT) -> Any:
        # Each thread takes a Worker and returns it: its buffers and its open output are not to be shared.
        try:
            worker = self._local.pop()
        except IndexError:
            images, masks = self._files
            assert images is not None, "without images there are no tasks"
            worker = Worker(images, masks, self._unwritten)
        try:
            return work(worker, task)
        finally:
            self._local.append(worker)


def refers_to_main(message: bytes) -> bool:
    """Whether a pickle of protocol 4 or 5 has a class or function of the script, which a fresh Python cannot import."""
    if b"__main__" not in message:
        return False  # looking at each part takes a second for some hundred thousand paths
    last: deque[Any] = deque(maxlen=2)  # what was put on the stack: of STACK_GLOBAL the module and the name
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(message):
        if opcode.name == "STACK_GLOBAL" and last[0] == "__main__":
            return True
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = last[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            last.append(memo[argument])
        elif opcode.name != "FRAME":
            last.append(argument)
    return False


def _samples_of(task: object) -> list[tuple[NDArray[np.int64], bool]]:
    """Returns the samples that a task reads, and whether only their headers; [] for a task that reads no samples."""
    if isinstance(task, PackTask):
        return [(task.samples, False)]
    return [(task, True)] if isinstance(task, np.ndarray) else []


def _numbers_in(task: object) -> list[int]:
    """Returns the samples that a task is about; [] for one that reads none."""
    samples = getattr(task, "samples", task)
    return samples.tolist() if isinstance(samples, np.ndarray) else []


def _answer(worker: Connection) -> tuple[Any, BaseException | None] | None:
    """Returns the result of a worker's task, or what it raised; None if it died."""
    try:
        answer: tuple[Any, BaseException | None] = pickle.loads(worker.recv_bytes())
    except (EOFError, OSError):
        return None
    return answer


def _send(worker: Connection, message: bytes) -> None:
    # Not send(): interrupted by Ctrl-C, its exported buffer makes Python print an "Exception ignored" at exit.
    try:
        worker.send_bytes(message)
    except OSError as exc:
        raise PackError(
            "a worker process died while it had nothing to do: killed (out of memory?). With `--workers 1` less memory "
            "is used."
        ) from exc


class _Places:
    """For each worker process the number of the sample that it is at, in memory that all of them share."""

    def __init__(self, count: int) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("fastload-pack", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        os.truncate(self._fd, 8 * count)
        self._numbers = place_in(self._fd)

    def fileno(self) -> int:
        """Returns the descriptor of the memory."""
        return self._fd

    def __getitem__(self, worker: int) -> int:
        return int(self._numbers[worker])

    def __setitem__(self, worker: int, sample: int) -> None:
        self._numbers[worker] = sample

    def close(self) -> None:
        """Lets go of the memory."""
        os.close(self._fd)


def place_in(fd: int) -> memoryview:
    """Returns the numbers in the memory of a descriptor, int64."""
    return memoryview(mmap.mmap(fd, 0)).cast("q")


class _Watch:
    """Warns of samples that take long; one for a run."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._since: dict[int, tuple[int, float, float]] = {}  # worker -> sample, since when, seconds until a warning
        self._last_s = 0.0

    def look(self, busy: dict[int, int]) -> None:
        """Looks at which sample busy workers are, by number, not more often than each few seconds."""
        now = time.monotonic()
        if now - self._last_s < min(_LOOK_S, LONG_S):
            return
        self._last_s = now
        for worker, sample in busy.items():
            known, since, limit_s = self._since.get(worker, (NO_SAMPLE, now, LONG_S))
            if sample != known or sample == NO_SAMPLE:
                since, limit_s = now, LONG_S
            elif now - since >= limit_s:
                limit_s *= 2
                warnings.warn(
                    f"{self._keys[sample]} has been read for {now - since:.0f} s and is not done. If that takes for "
                    f"ever, remove it, and run the same command again.",
                    stacklevel=level_of_the_user(),
                )
            self._since[worker] = sample, since, limit_s


# Workers have a session of their own: Ctrl-C is for the parent, which then ends them.


def _spawn(fd: int, parent: int, places: int, number: int, *, trial: bool = False) -> int:
    """Starts a worker process as a fresh Python; returns its number. `trial`: see `PackPool._start_one`."""
    serving = f"from fastload.pack.pool import serve; serve({fd}, {parent}, {places}, {number})"
    code = f"import sys; sys.path[:] = {sys.path!r}; {serving}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[fd, parent, places], start_new_session=True,
        env=_checked_memory() if trial else None,
    )  # fmt: skip
    process.returncode = 0  # The pool waits for it.
    return process.pid


def _checked_memory() -> dict[str, str]:
    """Returns this process's environment, with which glibc compares what lies behind memory when that is freed."""
    found = {**os.environ, "MALLOC_CHECK_": "3", "PYTHONMALLOC": "malloc"}
    with suppress(OSError, StopIteration):
        libc = next(path for path in Path("/proc/self/maps").read_text().split() if path.endswith("/libc.so.6"))
        if (checking := Path(libc).with_name("libc_malloc_debug.so.0")).exists():  # from glibc 2.34 on
            found["LD_PRELOAD"] = f"{checking} {found.get('LD_PRELOAD', '')}".strip()
    return found


def _fork(fd: int, parent: int, places: int, number: int) -> int:
    """Starts a worker process as a fork of this one; returns its number."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of the threads of NumPy's BLAS, which a worker never calls
        process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        gc.freeze()  # The collector would visit all that the parent imported, and copy its memory by that.
        # What the parent has open must not stay open with a worker: the other workers' pipes, and files that it locked.
        # The numbers stay in use, as objects from before the fork may close them.
        null = os.open(os.devnull, os.O_RDWR)
        for inherited in map(int, os.listdir("/proc/self/fd")):
            if inherited not in (1, 2, fd, parent, places, null):
                with suppress(OSError):  # the listing's own descriptor is closed already
                    os.fstat(inherited)
                    os.dup2(null, inherited)
        serve(fd, parent, places, number)
    finally:
        os._exit(0)


def serve(fd: int, parent: int, places: int, number: int) -> None:
    """Runs a worker process: receives tasks and sends results over this descriptor until its other end is closed.

    It notes which sample it is at in a place of the memory that it shares with its parent, and ends at once, whatever
    it is at, when the other end of the pipe `parent` is.
    """
    end_with(parent)
    place = place_in(places)[number:][:1]
    if has_libjpeg():
        import_module("simplejpeg")  # while the parent still lists
    with Connection(fd) as connection, suppress(EOFError, ConnectionError), ExitStack() as stack:
        files, worker = connection.recv_bytes(), None
        while True:
            work, task, announced, refused = pickle.loads(connection.recv_bytes())
            answer: tuple[Any, BaseException | None]
            try:
                if worker is None:
                    (images, masks), room = pickle.loads(files)
                    stack.enter_context(large_images(room))
                    worker = Worker(images, masks)
                    worker.place = place
                    files = b""  # It may hold hundreds of MB, which are unpickled now.
                worker.refused.update(refused)
                for samples, heads in announced:
                    worker.announce(samples, heads=heads)
                answer = work(worker, task), None
            except BaseException as exc:  # noqa: BLE001 - whatever it is, it is raised in the parent
                exc.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, exc
            place[0] = NO_SAMPLE
            connection.send_bytes(pickle.dumps(answer))


class BackgroundPack:
    """`fastload pack --store source` of a folder, in a process of low priority that ends with this one.

    What an earlier run left unfinished is continued.
    """

    def __init__(self, source: Path, output: Path) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process runs
        # Not by the command line, whose start takes as long as packing a thousand photos.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from fastload.system.threads import end_with; end_with(0); "
            f"from fastload.pack import pack_images; "
            f"pack_images({str(source)!r}, {str(output)!r}, store='source', workers=0)"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, self._process, self._said)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOW_PRIORITY)

    def failure(self) -> str:
        """Returns, once, what the process said if it ended without packing; else ""."""
        if self._said.closed or self._process.poll() in (None, 0):
            return ""
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip().rpartition("\n")[2][-_TOLD:]
        self._said.close()
        ended = how_it_ended(self._process.returncode)
        return text or f"its process {ended}; `fastload pack SOURCE OUTPUT --store source` names what it was at"


def _end(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    said.close()
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
