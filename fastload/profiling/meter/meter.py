"""`Meter`: measures where the steps of a training loop spend their time, and reads the machine's counters meanwhile."""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from fastload.distributed.ranks import local_world_size
from fastload.errors import OptionError
from fastload.profiling.meter import exports
from fastload.profiling.meter.loops import HOW, Loop, Totals, demands_of, measure_headspace, open_clock
from fastload.profiling.meter.sampler import Sampler, environment, mean_others
from fastload.profiling.meter.watching import WatchedPass
from fastload.profiling.verdict import Demands, judge
from fastload.timing.clocks import Clock
from fastload.timing.probe import ask_for_ranges
from fastload.timing.results import Measured, Table, Verdict


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
        self._record: exports.Record | None = None
        self._clock: Clock | None = None if device is None else open_clock(device)
        self._sampler: Sampler | None = None
        self._running: list[WatchedPass] = []  # innermost last
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
        self._record = exports.Record(path, force=force)
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

    def _begin(self, loader: Iterable[Any]) -> WatchedPass:
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
        return WatchedPass(loader, loop, clock, self._running, self._begun_s, callback)

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

    def __init__(self, loader: Any, begin: Callable[[Any], WatchedPass]) -> None:
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
