"""`run_bench`: runs the parts of a benchmark one after another and collects their results.

The first part is the loader alone: its rate, CPU time and memory, and its rate relative to a bare copy of the same
rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.format.header import PackedFile
from fastload.options.measure import BenchOptions
from fastload.profiling.bench.faults import Fault, FaultFigures, KillFigures, measure_fault, measure_kill, parse_fault
from fastload.profiling.bench.passes import Show, Spread, compare, counting, repeated, run_for, spread, touch_batch
from fastload.profiling.bench.rivals import Rival, check_source, measure_rivals
from fastload.profiling.bench.subject import Subject, crop_text
from fastload.profiling.bench.training_loop import (
    LoopFigures,
    StepChoice,
    TouchStep,
    TrainingStep,
    headspace_in_turn,
    make_step,
    parse_step,
    run_loop,
)
from fastload.profiling.meter import environment
from fastload.profiling.meter.sampler import OthersCpus, peak_memory, process_memory
from fastload.profiling.verdict.sentences import network_facts, others_text
from fastload.remote.urls import FileName, as_given, is_url, short_name
from fastload.system.advice import advice
from fastload.system.machine import available_cpus
from fastload.system.text import format_bytes, seconds_text
from fastload.timing.results import Measured, Table
from fastload.transforms import RandomResizedCrop

__all__ = ["BenchOptions", "BenchResult", "run_bench"]

Facts = list[tuple[str, str]]
"""(name, text) pairs; an empty name continues the line above."""


@dataclass
class BenchResult:
    """Results of a benchmark. A part that was not asked for, or not reached, is None or empty."""

    path: Path | str  # of the file, or its URL
    command: str  # that repeats the measurement
    options: BenchOptions  # as given
    batch_size: int  # samples in a batch
    num_samples: int  # of the data
    image_shape: tuple[int, int, int]  # (C, H, W), 0 where images differ
    crop: tuple[int, int] | None = None  # (height, width) of the random crop of each image; None: no crop
    alone: AloneFigures | None = None  # the loader alone
    loop: LoopFigures | None = None  # the training loop
    headspace: dict[str, Spread] | None = None  # as `headspace_in_turn` returns it
    rivals: list[Rival] = field(default_factory=list)  # the plain `DataLoader`s
    faults: list[FaultFigures | KillFigures] = field(default_factory=list)  # the injected faults
    # For each cold pass, the share of the file that stayed in the page cache
    left_in_cache: list[float] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # as in `Measured`
    cpus: int = field(default_factory=available_cpus)  # that this process may use
    network: tuple[str, ...] = ()  # of a URL, what came over the network in all, in sentences
    why_slow: str = ""  # why the loader decodes or crops slowly on this machine, and what to do; empty: it does not
    interrupted: bool = False  # whether Ctrl-C ended it early

    @property
    def title(self) -> str:
        return f"fastload bench {short_name(self.path)}"

    @property
    def facts(self) -> Facts:
        """The figures of the loader and its training loop, as text."""
        facts = [("slow path", self.why_slow)] if self.why_slow else []
        if self.crop is not None:
            facts.append(("images", crop_text(RandomResizedCrop(self.crop), self.options.size)))
        if (alone := self.alone) is not None:
            over_take = f"not known: {alone.why_no_take}"
            if alone.over_take is not None and alone.take_samples_per_s is not None:
                bare = (
                    f"{alone.take_samples_per_s['median']:,.0f} images/s by one thread that only copies the same rows"
                )
                over_take = f"{_ratio(alone.over_take)}; {bare}"
            first, *others = (seconds_text(alone.first_batch_s[name]) for name in ("median", "lowest", "highest"))
            loader, opening = self._others(alone.samples_per_s), self._others(alone.first_batch_s)
            facts += [
                ("loader alone", f"{_rate(alone.samples_per_s)}, {alone.bytes_per_s / 1e6:,.0f} MB/s{loader}"),
                ("over np.take", f"{over_take}{self._others(alone.over_take)}"),
                ("CPU", f"{alone.cpu_s_per_1000:.3g} s for 1,000 images{loader}"),
                ("first batch", f"{first} ({' to '.join(others)}) from opening the file on{opening}"),
            ]
            if alone.peak_memory_bytes:
                whole, loader = format_bytes(alone.peak_memory_bytes), format_bytes(alone.loader_memory_bytes)
                facts.append(("memory", f"{whole} at most, of which {loader} for the loader"))
        facts += [("network" if not number else "", line) for number, line in enumerate(self.network)]
        if self.options.cold:
            facts.append(("page cache", _cold_text(self.left_in_cache)))
        if (loop := self.loop) is not None:
            taken = self._others(loop.others_cpus)
            facts.append(("training", f"{loop.samples_per_s:,.0f} images/s, {loop.step}{taken}"))
            if loop.utilization is not None:
                facts.append(("utilization", f"{_percent(loop.utilization)} ({loop.utilization_is}){taken}"))
            wait = f"longest wait for a batch {seconds_text(loop.longest_wait_s)}"
            facts.append(("stall share", f"{_percent(loop.stall_share)}, {wait}{taken}"))
            if self.headspace is not None:
                rate = f"{self.headspace['base']['median']:,.0f} images/s on one cached batch"
                ratio = f"with the loader {_ratio(self.headspace['ratio'])} of it"
                facts.append(("headspace", f"{rate}; {ratio}{self._others(self.headspace['ratio'])}"))
        return facts

    def _others(self, figure: Spread | float | None) -> str:
        """Returns the note on other programs for the end of a figure's line."""
        text = others_text(figure.get("others_cpus") if isinstance(figure, dict) else figure, self.cpus)
        return text and f"; {text}"

    @property
    def runs(self) -> list[Measured]:
        """The runs that a report shows: the loader's loop with all other figures, then rivals and injected faults."""
        first = self.loop.measured if self.loop is not None else Measured(self.title, self.command)
        if self.loop is None and self.alone is not None:
            first = replace(first, samples_per_s=self.alone.samples_per_s["median"])
        killed = [
            fact for fault in self.faults if isinstance(fault, KillFigures) for fact in fault_facts(fault, self.cpus)
        ]
        tables = (rival_table(self.rivals, self.cpus),) if self.rivals else ()
        first = replace(
            first, command=self.command, facts=(*self.facts, *killed), tables=tables, environment=self.environment
        )
        loops = [one.loop for one in (*self.rivals, *self.faults) if not isinstance(one, KillFigures)]
        more = (replace(loop.measured, command=self.command, facts=self._beside(loop)) for loop in loops if loop)
        return [first, *more]

    def _beside(self, loop: LoopFigures) -> tuple[tuple[str, str], ...]:
        text = others_text(loop.others_cpus, self.cpus)
        return (("CPUs", text),) if text else ()

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts; `file` is the name of the path, or the URL."""
        found = {"file": short_name(self.path), **asdict(self)}
        del found["path"]
        found["options"] |= {"shuffle": str(self.options.shuffle), "source": self.options.source is not None}
        return found


def run_bench(
    path: FileName, options: BenchOptions, *, command: str = "", show: Show = lambda figures: None
) -> BenchResult:
    """Measures what the options ask for; Ctrl-C ends it and keeps the results so far. `command` is for reports.

    Raises:
        OptionError, MissingFileError, FormatError, SourceError: before anything is measured.
    """
    if options.source is not None and not options.compare:
        raise OptionError("--source: the image files are only read with --compare")
    step = parse_step(options.step) if options.step is not None else None
    faults = [parse_fault(text) for text in options.faults]
    subject = Subject(str(path) if is_url(path) else Path(path), options)
    if options.source is not None:
        check_source(subject, options.source)
    result = BenchResult(
        as_given(path), command, options, subject.batch_size, len(subject.dataset), subject.image_shape,
        crop=subject.crop.size if subject.crop is not None else None, environment=environment(),
        why_slow=subject.why_slow,
    )  # fmt: skip
    since_s = time.perf_counter()
    try:
        _measure(subject, step, faults, result, show)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        subject.close()
        result.left_in_cache = subject.left_in_cache
        shards = subject.dataset.file.shard_files
        if (use := shards.network_use()) is not None:
            result.network = tuple(network_facts(replace(use, elapsed_s=time.perf_counter() - since_s)))
        shards.close()  # nothing can be read from a URL after that
    return result


def _measure(subject: Subject, choice: StepChoice | None, faults: list[Fault], result: BenchResult, show: Show) -> None:
    """Runs what the options ask for, part by part, and keeps each in the result."""
    options, title = subject.options, result.title
    result.alone = measure_alone(subject, show)
    step: TrainingStep = TouchStep()  # without a training step, batches are only read
    alone_samples_per_s = None
    if choice is not None:
        step = make_step(
            choice, channels=subject.image_shape[0], num_classes=len(subject.dataset.classes) or 10,
            device=subject.device, loader_samples_per_s=result.alone.samples_per_s["median"],
        )  # fmt: skip

    def train(part: str, title: str, loader: Any, seconds: float = options.seconds) -> LoopFigures:
        subject.make_cold()
        return run_loop(
            loader, step, seconds, title=title, epochs=subject.epochs, part=part, show=show,
            alone_samples_per_s=alone_samples_per_s,
        )  # fmt: skip

    if choice is not None:
        # First, because all loops make the same step, whose time without a loader is part of their verdicts.
        result.headspace = headspace_in_turn(subject, step, show)
        alone_samples_per_s = result.headspace["base"]["median"]
        result.loop = train("the training loop", title, subject.shared_loader())
    if options.compare:
        for rival in measure_rivals(
            subject, show, lambda name, loader: train(name, f"{title}: {name}", loader) if choice is not None else None
        ):
            result.rivals.append(rival)
    for fault in faults:
        if not fault.every:
            with (others := OthersCpus()).measured():
                killed = measure_kill(subject, step, fault)
            killed.others_cpus = others.cpus
            result.faults.append(killed)
        else:
            train_slowed = partial(train, fault.text, f"{title}, {fault.text}")
            result.faults.append(measure_fault(subject, step, fault, train_slowed))


def _cold_text(left: list[float]) -> str:
    """Returns whether the file could be dropped from the page cache."""
    if not left:
        return "dropped before each pass; this system does not say whether that worked"
    stayed = f"{_percent(max(left))} of the file stayed"
    if max(left) > 0.01:
        return f"dropped before each pass, but up to {stayed}: these figures are warm"
    return f"dropped before each of {len(left)} passes; {stayed}"


def rival_table(rivals: list[Rival], cpus: int) -> Table:
    """Returns the table that compares plain loaders with FastLoader, on so many CPUs."""
    with_loops = any(rival.loop is not None for rival in rivals)
    rows = []
    for rival in rivals:
        ratio, busy = rival.ratio, rival.loop.utilization if rival.loop is not None else None
        times = f"{ratio['median']:.3g} times as fast ({ratio['lowest']:.3g} to {ratio['highest']:.3g})"
        row = (rival.name, f"{rival.samples_per_s['median']:,.0f}", times, f"{rival.cpu_s_per_1000:.3g}")
        others = others_text(ratio.get("others_cpus"), cpus) or "not known"
        rows.append((*row, others, "not known" if busy is None else _percent(busy)) if with_loops else (*row, others))
    head = ("in turn with", "images/s", "FastLoader is", "CPU s/1,000", "other programs", "its utilization")
    return Table("Plain ways", head if with_loops else head[:-1], tuple(rows))


def fault_facts(fault: FaultFigures | KillFigures, cpus: int) -> Facts:
    """Returns the lines about one injected fault, on so many CPUs."""
    used = fault.others_cpus if isinstance(fault, KillFigures) else fault.ratio.get("others_cpus")
    others = (text := others_text(used, cpus)) and f"; {text}"
    if isinstance(fault, KillFigures):
        if not fault.error:
            said = f"process {fault.pid} was killed; all its batches were made by then, and none was lost"
            return [(fault.fault, said)]
        named = "which names it" if fault.names_worker else "which does not name it"
        complete = "each exactly once" if fault.each_once else "NOT each exactly once"
        after = f"{seconds_text(fault.error_after_s)} and {fault.steps_until_error} batches later"
        return [
            (fault.fault, f"process {fault.pid} killed; {after} the loop had a WorkerError, {named}{others}"),
            ("", f"state_dict() loaded again: the next batch {seconds_text(fault.resumed_after_s)} after iter()"),
            ("", f"{fault.samples:,} samples were loaded in all, {complete}"),
        ]
    loop = fault.loop
    delayed = f"{fault.delays:,} reads delayed by {seconds_text(fault.delayed_s)} in all"
    if not fault.delays:
        delayed = advice("seconds for faults")
    waited = f"the step waited {_percent(loop.stall_share)} of the time, at longest {seconds_text(loop.longest_wait_s)}"
    facts = [
        (fault.fault, f"{_rate(fault.samples_per_s)}, {_ratio(fault.ratio)} of the rate without{others}"),
        ("", f"{delayed}; {waited}"),
    ]
    if loop.utilization is not None:
        facts.append(("", f"utilization {_percent(loop.utilization)}"))
    if loop.measured.verdict is not None:
        facts.append(("", f"verdict: {loop.measured.verdict.sentence}"))
    return facts


def _rate(rates: Spread) -> str:
    return f"{rates['median']:,.0f} images/s ({rates['lowest']:,.0f} to {rates['highest']:,.0f})"


def _ratio(ratio: Spread) -> str:
    return f"{ratio['median']:.3g} ({ratio['lowest']:.3g} to {ratio['highest']:.3g}, {ratio['count']} pairs)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


PAIRS = 5
FIRST_BATCHES = 5

_MOST_BATCHES = 2000  # whose rows the copy with np.take gets, again and again


@dataclass(frozen=True)
class AloneFigures:
    """Figures of a loader whose batches are only read, one byte of each memory page."""

    samples_per_s: Spread  # rate of each pass
    bytes_per_s: float  # bytes read, at the median rate
    cpu_s_per_1000: float  # CPU seconds of all threads and processes for 1,000 images
    first_batch_s: Spread  # seconds from opening the file to the first batch, without imports
    peak_memory_bytes: int  # anonymous and shared memory of this process and its children, Python and torch included
    loader_memory_bytes: int  # the part of `peak_memory_bytes` that was not there before the loader
    # Rate of a bare copy of the same rows, in turn with the loader; None: not possible
    take_samples_per_s: Spread | None = None
    over_take: Spread | None = None  # rate of the loader divided by the copy's, for each pair
    why_no_take: str = ""  # why there is no bare copy


def measure_alone(subject: Subject, show: Show) -> AloneFigures:
    """Measures the loader alone for `options.seconds`; half of that time goes to the bare copy."""
    cold, file, names = subject.options.cold, subject.dataset.file, subject.dataset.fields
    why_no_take = ""
    if any(name in file.ragged for name in names):
        why_no_take = "its images differ in size or are kept encoded"
    elif file.remote is not None:
        why_no_take = "its rows come chunk by chunk over the network"
    elif len(file.shards.names) > 1:
        why_no_take = "its rows lie in several shards"
    elif any(file.fields[name].offset is None for name in names):
        why_no_take = "its rows are compressed or cut into chunks that do not lie back to back"
    # A cold pass reads each row only once: three passes say as much about a disk as six.
    pairs, warm_up = 3 if cold else PAIRS, 0 if cold or why_no_take else 1
    tick = counting(show, "the loader alone", 2 + warm_up + pairs)
    seconds = subject.options.seconds / (pairs * (1 if why_no_take else 2) + 1)
    before = process_memory(os.getpid())
    _first_batch_s(subject)  # includes imports
    first = repeated(lambda: _first_batch_s(subject), FIRST_BATCHES)
    tick()
    subject.make_cold()
    with peak_memory(os.getpid()) as peak:
        rows = subject.rows(_MOST_BATCHES, seconds)
    tick()
    costs = []

    def loader() -> float:
        found = subject.run(seconds, touch_batch)
        costs.append(found.cpu_s / found.samples * 1000)
        tick()
        return found.samples_per_s

    warm = None if why_no_take or cold else BareTake(file, names, subject.batch_size)

    def take() -> float:
        subject.make_cold()
        batches = (warm or BareTake(file, names, subject.batch_size)).fill(rows if cold else cycle(rows))
        return run_for(batches, seconds, len, discard=int(len(rows) > 1)).samples_per_s

    if why_no_take:
        result = {"way": repeated(loader, pairs)}
    else:
        result = compare(loader, take, pairs=pairs, warm_up=warm_up)
    row_bytes = sum(file.fields[name].row_bytes for name in names)
    return AloneFigures(
        samples_per_s=result["way"],
        bytes_per_s=result["way"]["median"] * row_bytes,
        cpu_s_per_1000=spread(costs)["median"],
        first_batch_s=first,
        peak_memory_bytes=peak[0],
        loader_memory_bytes=max(0, peak[0] - before),
        take_samples_per_s=result.get("base"),
        over_take=result.get("ratio"),
        why_no_take=why_no_take,
    )


def _first_batch_s(subject: Subject) -> float:
    """Returns the seconds from opening the file to the first batch: header, loader, threads, one batch."""
    subject.make_cold()
    begin = time.perf_counter()
    dataset = subject.dataset if is_url(subject.path) else PackedDataset(subject.path, subject.options.split)
    with closing(subject.loader(dataset)) as loader:
        next(iter(loader))
        subject.synchronize()
        return time.perf_counter() - begin


class BareTake:
    """Copies rows with `np.take` from a memory-mapped file, in one thread: the least a loader has to do.

    The fields are contiguous arrays in the file. `slots` batches' worth of memory are allocated once and used in turn;
    a `FastLoader` with two threads has 5.
    """

    def __init__(self, file: PackedFile, names: Sequence[str], batch_size: int, slots: int = 5) -> None:
        self.num_slots = slots
        self._fields: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for name in names:
            field = file.fields[name]
            assert field.offset is not None, "a field that is not one linear array cannot be mapped"
            mapped = np.memmap(file.path, field.dtype, "r", field.offset, (file.num_rows, *field.shape))
            self._fields.append((mapped, np.zeros((slots, batch_size, *field.shape), field.dtype)))

    def fill(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[NDArray[Any]]:
        """Yields the first field of each batch; its memory is overwritten `slots` batches later."""
        for number, rows in enumerate(batches):
            filled = []
            for mapped, slots in self._fields:
                out = slots[number % self.num_slots, : len(rows)]
                np.take(mapped, rows, axis=0, out=out, mode="clip")
                filled.append(out)
            yield filled[0]
