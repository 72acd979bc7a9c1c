"""`Meter`: measures where the steps of a training loop spend their time, and reads the machine's counters meanwhile."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

from fastload.distributed.ranks import local_world_size
from fastload.errors import OptionError
from fastload.profiling.meter import exports
from fastload.profiling.meter.loops import HOW, Loop, Totals, demands_of, measure_headspace, num_samples, open_clock
from fastload.profiling.meter.sampler import Sampler, environment, mean_others
from fastload.profiling.verdict import Demands, judge
from fastload.timing.clocks import Clock, HostClock
from fastload.timing.probe import Probe, ask_for_ranges, is_probed, span
from fastload.timing.results import BatchWork, LoopStep, Measured, NetworkUse, Table, Verdict
from fastload.timing.stopwatch import run_delay_reader


class Meter:
    """Times each step of a loop (wait for data, copy, transform, compute) and reads GPU, process and disk counters.

    Around any loop::

        with fastload.Meter() as meter:
            for images, labels in meter.watch(loader):
                ...
        print(meter.verdict.sentence)

    A step begins when its batch is asked for and ends when the next one is. Any iterable can be watched; a `FastLoader`
    also reports its stages, its copies and transforms, and how many batches were ready. On CUDA, times are
    measured on the device's current stream, which the host runs ahead of: waiting counts only while the device is idle.
    Copies and transforms by the loop itself count as compute.

    Steps are kept up to a number, then an evenly spaced part of them; sums are always over all steps.

    Args:
        device: the device to time; None: CUDA if this process has used it when a loop begins, else the CPU. A `Clock`
            is used as it is.
        nvml: the module pynvml, or an object like it; None: pynvml if it is installed (extra [gpu]).
        sample_every_s: seconds between two readings of GPU, process and disk counters; 0: no readings.
        ranges: whether to mark the stages for profilers, with `record_function` and NVTX; if not, they are marked only
            while `torch.profiler` records.

    Raises:
        OptionError: a device that cannot be timed, a time below 0.
    """

    def __init__(
        self, *, device: Any = None, nvml: Any = None, sample_every_s: float = 0.1, ranges: bool = False
    ) -> None:
        if not sample_every_s >= 0:
            raise OptionError(f"sample_every_s={sample_every_s!r}: give seconds, 0 or more")
        self._device = device
        self._nvml = nvml
        self._every_s = sample_every_s
        self._ranges = ranges
        self._record: exports.LineLog | None = None
        self._clock: Clock | None = None if device is None else open_clock(device)
        self._sampler: Sampler | None = None
        self._running: list[MeteredPass] = []  # innermost last
        self._loops: list[Loop] = []
        self._headspace: float | None = None
        self._where: Literal["outside", "inside", "after"] = "outside"  # its `with` block
        self._begun_s = 0.0

    def __enter__(self) -> Meter:
        if self._where != "outside":
            raise OptionError("a Meter measures once: make another one for another `with`")
        self._where = "inside"
        self._begun_s = time.perf_counter()
        if self._every_s:
            self._sampler = Sampler(
                nvml=self._nvml, every_s=self._every_s, begun_s=self._begun_s, callback=self._note_reading
            ).start()
        ask_for_ranges(int(self._ranges))
        return self

    def __exit__(self, *_: object) -> None:
        self._where = "after"
        while self._running:
            self._running[-1].close(self._not_running("go on with a loop"))
        ask_for_ranges(-int(self._ranges))
        if self._sampler is not None:
            self._sampler.stop()
        if self._record is not None:
            for number, loop in enumerate(self._loops):
                self._record.append(exports.end_line(loop.totals, number))
            self._record.close()

    def watch(self, loader: Iterable[Any]) -> Watched:
        """Returns an iterable of the loader's batches, unchanged and in order; each `iter()` of it is one pass.

        Raises:
            OptionError: outside the Meter's `with` block; or, while iterating, two loops take turns in it.
        """
        self._require_running("watch")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise OptionError(f"watch(): {type(loader).__name__} cannot be iterated; give the loader, not its batches")
        return Watched(loader, self._begin)

    def restart(self) -> None:
        """Begins to count here, in the body of the loop's first step: what came before was start-up.

        Raises:
            OptionError: outside the Meter's `with` block, or a step has ended.
        """
        self._require_running("restart")
        if not self._running or not self._running[-1].restart():
            raise OptionError("restart(): call it in the body of a watched loop's first step")

    def record(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Starts to append each step and each reading to a file of JSON lines, so that a killed job loses none.

        The lines are as `write_jsonl` writes them, for all loops.

        Raises:
            OutputError: the file exists and `force` is not given, or it cannot be written.
            OptionError: this Meter records to a file already.
        """
        if self._record is not None:
            raise OptionError(f"this Meter has a record already, {self._record.path}")
        self._record = exports.LineLog(path, force=force)
        self._record.append(exports.head_line())

    def write_csv(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes the steps of the main loop as a CSV table; times in seconds.

        Raises:
            OutputError: the file exists and `force` is not given, or it cannot be written.
        """
        exports.save_new(exports.csv_table(self._loop(None).numbered), path, force=force)

    def write_jsonl(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes everything as JSON lines whose `kind` is `meter` (the environment), `step`, `reading` or `totals`.

        Raises:
            OutputError: the file exists and `force` is not given, or it cannot be written.
        """
        self._add_up()
        loops = list(enumerate(self._loops))
        steps = [exports.step_line(*pair, number) for number, loop in loops for pair in loop.numbered]
        readings = [exports.json_line("reading", reading) for reading in self.readings]
        ends = [exports.end_line(loop.totals, number) for number, loop in loops]
        exports.save_new("".join([exports.head_line(), *steps, *readings, *ends]), path, force=force)

    def to_tensorboard(self, writer: exports.ScalarWriter, *, prefix: str = "fastload", first_step: int = 0) -> None:
        """Writes the steps of the main loop, and the readings, as curves.

        Args:
            writer: a `SummaryWriter`, or any object with its `add_scalar(tag, value, step)`.
            prefix: of the curves' names.
            first_step: number of the first step.
        """
        exports.to_scalars(writer, self._loop(None).numbered, self.readings, prefix=prefix, first_step=first_step)

    def headspace(self, step: Callable[[Any], object], batch: Any, seconds: float = 1.0) -> float:
        """Returns the samples per second of `step` on this batch alone (`measure_headspace`), and keeps it for
        `measured`.
        """
        self._headspace = measure_headspace(step, batch, seconds, device=self._device)
        return self._headspace

    @property
    def totals(self) -> Totals:
        """Sums over the steps so far of the main loop, which took longest."""
        return self._loop(None).totals

    @property
    def readings(self) -> tuple[Mapping[str, float], ...]:
        """The readings so far; the keys are listed in `Measured`."""
        return self._sampler.readings if self._sampler is not None else ()

    @property
    def absent(self) -> Mapping[str, str]:
        """Readings that are not available here, such as `gpu`, each with the reason."""
        return self._sampler.absent if self._sampler is not None else {"readings": "sample_every_s=0"}

    def demands(self, loader: Iterable[Any] | None = None) -> Demands:
        """Returns the measurements of a loop as the input of `fastload.profiling.verdict.judge`.

        Args:
            loader: a watched one; None: the loader of the loop that took longest.
        """
        others_cpus = mean_others(self.readings, [(0.0, math.inf)]) / local_world_size()
        loop = self._loop(loader)
        passes = [loop.network, *(one.network() for one in self._running if one.loop is loop)]
        came = [one for one in passes if one is not None]
        return demands_of(
            loop,
            alone_samples_per_s=self._headspace,
            others_cpus=others_cpus,
            network=functools.reduce(operator.add, reversed(came)) if came else None,
        )

    @property
    def verdict(self) -> Verdict:
        """The cause that limits the main loop, judged by the measurements so far.

        A loader that does not report its stages is judged by its waits only: if they bind, `cause` is empty, and the
        sentence says how to find out more.

        Raises:
            OptionError: there was no step.
        """
        demands = self.demands()
        if not demands.steps:
            raise OptionError("there is no step yet to judge: iterate over what watch() gives")
        return judge(demands)

    def measured(
        self,
        title: str = "",
        *,
        loader: Iterable[Any] | None = None,
        command: str = "",
        verdict: Verdict | None = None,
        facts: Iterable[tuple[str, str]] = (),
        tables: Iterable[Table] = (),
    ) -> Measured:
        """Returns everything measured so far as plain numbers, for reports and files.

        Args:
            loader: a watched one; None: the loader of the loop that took longest.
            verdict: to be used instead of this loop's own.
            title, command, facts, tables: as in `Measured`.
        """
        loop = self._loop(loader)
        totals = loop.totals
        elapsed_s = loop.elapsed_s + sum(one.running_s() for one in self._running if one.loop is loop)
        return Measured(
            title=title,
            command=command,
            steps=loop.steps,
            num_steps=totals.steps,
            elapsed_s=elapsed_s,
            samples_per_s=totals.samples / elapsed_s if elapsed_s else 0.0,
            stages=totals.mean_stages(),
            headspace_samples_per_s=self._headspace,
            headspace_how=HOW if self._headspace is not None else "",
            readings=self.readings,
            verdict=verdict or (judge(self.demands(loader)) if totals.steps else None),
            facts=tuple(facts),
            tables=tuple(tables),
            environment=environment(),
            epochs_s=tuple(loop.begins_s),
        )

    def _begin(self, loader: Iterable[Any]) -> MeteredPass:
        self._require_running("iterate over what watch() gave")
        loop = next((one for one in self._loops if one.loader() is loader), None)
        if loop is None:
            loop = Loop.of(loader)
            self._loops.append(loop)
        clock = self._clock or open_clock(None)
        record, place = self._record, self._loops.index(loop)
        callback = (
            None if record is None else lambda number, step: record.append(exports.step_line(number, step, place))
        )
        return MeteredPass(loader, loop, clock, self._running, self._begun_s, callback)

    def _note_reading(self, reading: Mapping[str, float]) -> None:
        if self._record is not None:
            self._record.append(exports.json_line("reading", reading))

    def _add_up(self) -> None:
        for one in self._running:
            one.add_up()

    def _loop(self, loader: Iterable[Any] | None) -> Loop:
        self._add_up()
        if loader is None:
            return max(self._loops, key=lambda loop: loop.totals.duration_s, default=Loop.of(()))
        for loop in self._loops:
            if loop.loader() is loader:
                return loop
        raise OptionError(f"this Meter did not watch that {type(loader).__name__}")

    def _require_running(self, what: str) -> None:
        if self._where != "inside":
            raise OptionError(self._not_running(what))

    def _not_running(self, what: str) -> str:
        return (
            f"a Meter cannot {what} {self._where} its `with` block: write `with fastload.Meter() as meter:` around the "
            f"loop, so that its thread ends with it."
        )


class Watched:
    """An iterable over a loader whose passes are measured. Its length is the loader's."""

    def __init__(self, loader: Any, begin: Callable[[Any], MeteredPass]) -> None:
        self._loader = loader
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        one = self._begin(self._loader)
        try:
            while True:
                yield one.next_batch()
        except StopIteration:
            return
        finally:
            one.close()

    def __len__(self) -> int:
        return len(self._loader)


_MOST_PENDING = 256  # steps that the device may be behind before the meter waits for it
# A training step evicts the meter's code and data from the CPU's caches: metering then costs ten times as much as in an
# empty loop. So steps are added up 16 at a time, and CPU times (50 us of system calls) are read in some steps only.
_ADD_UP_EVERY = 16
_LOOK_AT_FIRST = 4
_LOOK_EVERY = 16
_NO_RANGE = nullcontext()


class _Open(NamedTuple):
    """A step that has not ended yet. Marks are the clock's; a moment that did not come has the mark of the next one."""

    begin_s: float
    marks: tuple[Any, Any, Any, Any]  # asked for, ready, copied, received
    samples: int
    depth: int | None
    work: BatchWork | None
    pauses: list[tuple[Any, Any]]
    epoch: int | None  # whose first step it is


class MeteredPass:
    """One pass over a loader, and the times of its steps. Used by one thread.

    It is one of the meter's `running` passes, innermost last: a watched loop may run inside the body of another one;
    two loops that take turns are refused. `callback` is called with the number and the times of each step.
    """

    def __init__(
        self, loader: Any, loop: Loop, clock: Clock, running: list[MeteredPass], begun_s: float,
        callback: Callable[[int, LoopStep], None] | None,
    ) -> None:  # fmt: skip
        self.loop = loop
        loop.timed_device = not isinstance(clock, HostClock)
        self._loader = loader
        self._clock = clock
        self._running = running
        self._begun_s = begun_s
        self._callback = callback
        self._delay_s = run_delay_reader()
        self._probe = Probe(clock.mark)
        self._is_probed = is_probed(loader)
        self._batches: Iterator[Any] = iter(())
        self._step: _Open | None = None
        self._pending: deque[tuple[_Open, Any]] = deque()
        self._paused: tuple[Any, float, float] | None = None  # since when: mark, time, CPU time of the process
        self._paused_s = 0.0
        self._asked = 0
        self._got_delay_s: float | None = None  # set during a step whose CPU times are read
        self._used_before = NetworkUse()  # the network, before it began to count
        self._cut_short = ""
        self._thread = threading.get_ident()
        if running:
            running[-1].pause()
        running.append(self)
        self._process_s = time.process_time()
        self._first_s = time.perf_counter()

    def next_batch(self) -> Any:
        """Returns the next batch, or raises StopIteration."""
        if self._cut_short:
            raise OptionError(self._cut_short)
        self._end_inner()
        asked = self._clock.mark()
        asked_s = self._end_step(asked)
        self._asked += 1
        first, probe, loop = self._asked == 1, self._probe, self.loop
        probe.clear(looked_at=self._asked <= _LOOK_AT_FIRST or self._asked % _LOOK_EVERY == 0)
        thread_s = time.thread_time() if probe.looked_at else 0.0
        try:
            with _NO_RANGE if self._is_probed else span("wait"):
                if first:
                    self._batches = self._loader.iterate(probe) if self._is_probed else iter(self._loader)
                    loop.probe = probe if self._is_probed else loop.probe
                batch = next(self._batches)
        except StopIteration:
            if not first and self._clock.is_done(asked):  # else the device is still at work
                loop.epochs[-1] = (loop.epochs[-1][0], time.perf_counter() - asked_s)
            raise
        got = self._clock.mark()
        ready = got if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        if first:
            loop.epochs.append((time.perf_counter() - asked_s, 0.0))
            loop.begins_s.append(asked_s - self._begun_s)
        if probe.looked_at:
            got_thread_s = time.thread_time()
            ready_thread_s = got_thread_s if probe.ready_running_s is None else probe.ready_running_s
            if first:
                loop.first_running_s += ready_thread_s - thread_s
            else:
                loop.receive_s.add(ready_thread_s - thread_s)
            loop.transform_running_s.add(got_thread_s - ready_thread_s)
            self._got_delay_s = self._delay_s()
        samples = probe.samples or num_samples(batch)
        # A batch used again (echo) cost nothing to make.
        work = probe.work if probe.work is not None or not probe.worker_info.workers else BatchWork({})
        marks = asked, ready, copied, got
        self._step = _Open(
            asked_s - self._begun_s,
            marks,
            samples,
            probe.queue_depth,
            work,
            [],
            len(loop.epochs) - 1 if first else None,
        )
        return batch

    def network(self) -> NetworkUse | None:
        """Returns what came over the network in this pass so far; None: its data are on this machine."""
        came = self._probe.network
        return None if came is None else came() - self._used_before

    def running_s(self) -> float:
        """Returns the seconds so far, without other loops inside this one's body."""
        until_s = time.perf_counter() if self._paused is None else self._paused[1]
        return until_s - self._first_s - self._paused_s

    def restart(self) -> bool:
        """Begins to count now; only in the first step of the loop, else returns False."""
        step, loop = self._step, self.loop
        if step is None or self._asked != 1 or loop.totals.steps or len(loop.epochs) != 1:
            return False
        now_s, mark = time.perf_counter(), self._clock.mark()
        for earlier, later in itertools.pairwise((*step.marks, mark)):
            if later is not earlier:
                self._clock.drop(earlier)
        self._step = step._replace(begin_s=now_s - self._begun_s, marks=(mark, mark, mark, mark))
        loop.epochs[0], loop.begins_s[0], loop.first_running_s = (0.0, 0.0), now_s - self._begun_s, 0.0
        self._first_s, self._paused_s, self._process_s = now_s, 0.0, time.process_time()
        self._used_before += self.network() or NetworkUse()
        return True

    def pause(self) -> None:
        """Stops the time because another loop begins inside this one's body."""
        self._got_delay_s = None  # this step's CPU times would include the inner loop's
        mark = None if self._step is None else self._clock.mark()
        self._paused = mark, time.perf_counter(), time.process_time()

    def resume(self) -> None:
        """Continues after the inner loop."""
        assert self._paused is not None, "the inner loop has paused this one"
        (mark, paused_s, process_s), self._paused = self._paused, None
        if self._step is not None and mark is not None:
            self._step.pauses.append((mark, self._clock.mark()))
        self._paused_s += time.perf_counter() - paused_s
        self._process_s += time.process_time() - process_s

    def _end_inner(self) -> None:
        """Ends the passes inside this one, which is asked for a batch: their loops must have been left."""
        while self._running[-1] is not self:
            self._running[-1].close(
                "two loops take turns in one Meter, which therefore cannot separate their steps. Give each loop a "
                "Meter of its own; a loop inside the body of another is fine."
            )

    def close(self, why: str = "") -> None:
        """Ends the pass; its last step ends now. With `why`, asking it for another batch raises an error with that."""
        if self not in self._running:
            return
        self._cut_short = why
        self._end_inner()
        self._running.pop()
        if self._running:
            self._running[-1].resume()
        if self._step is not None:
            self._end_step(self._clock.mark())
        self.add_up(wait=True)
        self.loop.elapsed_s += self.running_s()
        if (came := self.network()) is not None:
            self.loop.network = came if self.loop.network is None else came + self.loop.network
        self.loop.process_s += time.process_time() - self._process_s
        self._batches = iter(())

    def _end_step(self, end: Any) -> float:
        """Ends the step that is under way, if any; returns the time."""
        step, self._step, ended_s = self._step, None, time.perf_counter()
        if step is not None:
            if self._got_delay_s is not None:
                self.loop.runnable_s.add(self._delay_s() - self._got_delay_s)
                self._got_delay_s = None
            self._pending.append((step, end))
            if self._callback is not None or len(self._pending) >= _ADD_UP_EVERY:
                self.add_up()
        return ended_s

    def add_up(self, *, wait: bool = False) -> None:
        """Adds up the steps that have ended, or waits for all; without waiting in the loop's own thread only."""
        if not wait and threading.get_ident() != self._thread:
            return
        clock, pending, loop = self._clock, self._pending, self.loop
        while pending and (wait or len(pending) > _MOST_PENDING or clock.is_done(pending[0][1])):
            step, end = pending.popleft()
            clock.wait(end)
            between_s, got = clock.between_s, step.marks[-1]
            parts_s = []
            for earlier, later in itertools.pairwise(step.marks):
                if later is earlier:
                    parts_s.append(0.0)
                else:
                    parts_s.append(between_s(earlier, later))
                    clock.drop(earlier)
            compute_s = between_s(got, end)
            clock.drop(got)
            for begin, resumed in step.pauses:
                compute_s -= between_s(begin, resumed)
                clock.drop(begin)
                clock.drop(resumed)
            wait_s, copy_s, transform_s = parts_s
            if step.epoch is not None and loop.timed_device:
                # The device may have been at work while the loop waited.
                first_s, end_s = loop.epochs[step.epoch]
                loop.epochs[step.epoch] = min(first_s, wait_s), end_s
            times = step.begin_s, wait_s, copy_s, transform_s, max(0.0, compute_s), step.samples, step.depth
            if self._callback is not None:
                self._callback(loop.totals.steps, LoopStep(*times))
            loop.add(times, step.work)
