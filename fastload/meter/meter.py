"""`Meter`: what the steps of a training loop wait for and take, with what the machine says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from fastload.cpus import available_cpus
from fastload.errors import OptionError
from fastload.measured import Measured, Step, Table, Verdict
from fastload.meter.clocks import Clock, open_clock
from fastload.meter.headspace import HOW, measure_headspace
from fastload.meter.machine import environment
from fastload.meter.sampler import Sampler
from fastload.meter.steps import Totals
from fastload.meter.watching import Loop, Pass, Turns
from fastload.verdict import Demands, judge


class Meter:
    """Times each step of a loop: wait for data, copy, transform, compute; and reads GPU, processes and disk beside it.

        with fastload.Meter() as meter:
            for images, labels in meter.watch(loader):
                ...
        print(meter.verdict.sentence)

    A step begins when its batch is asked for and ends when the next one is. Any iterable can be watched; a `FastLoader`
    also tells its stages, its copies and transforms, and how many batches lay ready. Where CUDA computes, times are
    those of the device's current stream, which the host runs ahead of: a wait is one only if the device had nothing to
    do. What the loop itself copies or transforms counts as compute.

    Steps are kept up to a number, then an evenly spaced part of them; sums are always of all.

    Args:
        device: what computes; None: CUDA if this process has used it when a loop begins, else the CPU. A `Clock` is
            taken as it is.
        nvml: the module pynvml, or an object like it; None: pynvml if it is installed (extra [gpu]).
        sample_every_s: between two readings of GPU, processes and disk; 0: none are taken.

    Raises:
        OptionError: a device that cannot be timed, a time below 0.
    """

    def __init__(self, *, device: Any = None, nvml: Any = None, sample_every_s: float = 0.1) -> None:
        if not sample_every_s >= 0:
            raise OptionError(f"sample_every_s={sample_every_s!r}: give seconds, 0 or more")
        self._device = device
        self._nvml = nvml
        self._every_s = sample_every_s
        self._clock: Clock | None = None if device is None else open_clock(device)
        self._sampler: Sampler | None = None
        self._turns = Turns()
        self._loops: list[Loop] = []
        self._headspace: float | None = None
        self._entered = self._left = False
        self._begun_s = 0.0

    def __enter__(self) -> Meter:
        if self._entered:
            raise OptionError("a Meter measures once: make another one for another `with`")
        self._entered = True
        self._begun_s = time.perf_counter()
        if self._every_s:
            self._sampler = Sampler(nvml=self._nvml, every_s=self._every_s, begun_s=self._begun_s)
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._turns.running:
            self._turns.running[-1].close()
        self._left = True
        if self._sampler is not None:
            self._sampler.stop()

    def watch(self, loader: Iterable[Any]) -> Watched:
        """The loader's batches, the same objects in the same order; each `iter()` of the result is a pass over it.

        Raises:
            OptionError: the Meter is not entered, or left already; (while iterating) two loops take turns in it.
        """
        self._require_running("watch")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise OptionError(f"watch(): {type(loader).__name__} cannot be iterated; give the loader, not its batches")
        return Watched(loader, self._begin)

    def headspace(self, step: Callable[[Any], object], batch: Any, seconds: float = 1.0) -> float:
        """Samples a second of `step` on this batch alone, kept for `measured`; see `measure_headspace`."""
        self._headspace = measure_headspace(step, batch, seconds, device=self._device)
        return self._headspace

    @property
    def totals(self) -> Totals:
        """Sums over the steps of the main loop so far: that which took longest."""
        return self._loop(None).log.totals

    @property
    def readings(self) -> tuple[Mapping[str, float], ...]:
        """See `Measured.readings`; so far."""
        return self._sampler.readings if self._sampler is not None else ()

    @property
    def absent(self) -> Mapping[str, str]:
        """Readings that cannot be had here, such as `gpu`, and why."""
        return self._sampler.absent if self._sampler is not None else {"readings": "sample_every_s=0"}

    def demands(self, loader: Iterable[Any] | None = None) -> Demands:
        """What a loop asked of the machine, for `fastload.verdict.judge`.

        Args:
            loader: that was watched; None: that of the loop which took longest.
        """
        loop = self._loop(loader)
        totals, probe = loop.log.totals, loop.probe
        source = loop.loader()
        workers = probe.workers if probe is not None else int(getattr(source, "num_workers", 0) or 0)
        ahead = probe.ahead if probe is not None else workers * int(getattr(source, "prefetch_factor", None) or 2)
        by_threads = probe is not None and probe.by_threads
        steps, waits = max(1, totals.steps), max(1, totals.steps - len(loop.startups_s))
        working_s = sum(work.running_s for work in totals.stages.values()) if by_threads else 0.0
        in_wait_s = loop.receive_s + loop.transform_running_s
        return Demands(
            batches=loop.log.works,
            steps=loop.log.steps,
            workers=workers,
            ahead=max(1, ahead) if workers else 0,
            cpus=available_cpus(),
            receive_s=loop.receive_s / waits,
            startups_s=tuple(loop.startups_s),
            step_running_s=max(0.0, loop.process_s - working_s - in_wait_s) / steps,
            step_runnable_s=loop.runnable_s / steps,
            by_threads=by_threads,
            is_fastload=probe is not None,
        )

    @property
    def verdict(self) -> Verdict:
        """What binds the main loop, by what was measured so far."""
        return judge(self.demands())

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
        """Everything so far, as plain numbers for reports and files.

        Args:
            loader: that was watched; None: that of the loop which took longest.
            verdict: as `verdict` has it, or another; None: left out.
            title, command, facts, tables: as in `Measured`.
        """
        loop = self._loop(loader)
        totals = loop.log.totals
        elapsed_s = loop.elapsed_s + sum(one.running_s() for one in self._turns.running if one.loop is loop)
        return Measured(
            title=title,
            command=command,
            steps=loop.log.steps,
            num_steps=totals.steps,
            elapsed_s=elapsed_s,
            samples_per_s=totals.samples / elapsed_s if elapsed_s else 0.0,
            stages=totals.mean_stages(),
            headspace_samples_per_s=self._headspace,
            headspace_how=HOW if self._headspace is not None else "",
            readings=self.readings,
            verdict=verdict,
            facts=tuple(facts),
            tables=tuple(tables),
            environment=environment(),
        )

    def _begin(self, loader: Iterable[Any]) -> Pass:
        self._require_running("iterate over what watch() gave")
        loop = next((one for one in self._loops if one.loader() is loader), None)
        if loop is None:
            loop = Loop.of(loader)
            self._loops.append(loop)
        clock = self._clock or open_clock(None)
        return Pass(loader, loop, clock, self._turns, self._begun_s, self._told)

    def _told(self, step: Step) -> None:
        pass

    def _loop(self, loader: Iterable[Any] | None) -> Loop:
        if loader is None:
            return max(self._loops, key=lambda loop: loop.log.totals.duration_s, default=Loop.of(()))
        for loop in self._loops:
            if loop.loader() is loader:
                return loop
        raise OptionError(f"this Meter did not watch that {type(loader).__name__}")

    def _require_running(self, what: str) -> None:
        if not self._entered or self._left:
            when = "after its `with` block" if self._left else "outside a `with` block"
            raise OptionError(
                f"a Meter cannot {what} {when}: write `with fastload.Meter() as meter:` around the loop, so that its "
                f"thread ends with it."
            )


class Watched:
    """A loader whose passes are measured. Its length is the loader's."""

    def __init__(self, loader: Any, begin: Callable[[Any], Pass]) -> None:
        self._loader = loader
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._loader)

    def __len__(self) -> int:
        return len(self._loader)
