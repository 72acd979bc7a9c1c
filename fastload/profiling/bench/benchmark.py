"""`run_bench`: runs the parts of a benchmark one after another and collects their results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastload.errors import OptionError
from fastload.profiling.bench.alone import AloneFigures, measure_alone
from fastload.profiling.bench.facts import Facts, alone_facts, cold_facts, fault_facts, loop_facts, rival_table
from fastload.profiling.bench.faults import (
    KILL_WORKER,
    Fault,
    FaultFigures,
    KillFigures,
    measure_fault,
    measure_kill,
    parse_fault,
)
from fastload.profiling.bench.passes import Show, Spread
from fastload.profiling.bench.rivals import Rival, check_source, measure_rivals
from fastload.profiling.bench.steps import StepChoice, TouchStep, TrainingStep, make_step, parse_step
from fastload.profiling.bench.subject import BenchOptions, Subject, crop_text
from fastload.profiling.bench.training_loop import HOW_IN_TURN, LoopFigures, headspace_in_turn, run_loop
from fastload.profiling.meter import environment
from fastload.timing.results import Measured
from fastload.transforms import RandomResizedCrop

__all__ = ["BenchOptions", "BenchResult", "run_bench"]


@dataclass
class BenchResult:
    """Results of a benchmark. A part that was not asked for, or not reached, is None or empty."""

    path: Path  # of the file
    command: str  # that repeats the measurement
    options: BenchOptions  # as given
    batch_size: int  # samples in a batch
    # num_samples, image_shape: of the data; (C, H, W), 0 where images differ
    num_samples: int
    image_shape: tuple[int, int, int]
    crop: tuple[int, int] | None = None  # (height, width) of the random crop of each image; None: no crop
    alone: AloneFigures | None = None  # the loader alone
    loop: LoopFigures | None = None  # the training loop
    headspace: dict[str, Spread] | None = None  # as `headspace_in_turn` returns it
    rivals: list[Rival] = field(default_factory=list)  # the plain `DataLoader`s
    faults: list[FaultFigures | KillFigures] = field(default_factory=list)  # the injected faults
    # For each cold pass, the share of the file that stayed in the page cache
    left_in_cache: list[float] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # as in `Measured`
    interrupted: bool = False  # whether Ctrl-C ended it early

    @property
    def title(self) -> str:
        """The title of reports."""
        return f"fastload bench {self.path.name}"

    @property
    def facts(self) -> Facts:
        """The figures of the loader and its training loop, as text."""
        facts = alone_facts(self.alone) if self.alone is not None else []
        if self.crop is not None:
            facts = [("images", crop_text(RandomResizedCrop(self.crop), self.options.size)), *facts]
        facts += cold_facts(self.left_in_cache) if self.options.cold else []
        return facts + (loop_facts(self.loop, self.headspace) if self.loop is not None else [])

    @property
    def runs(self) -> list[Measured]:
        """The runs that a report shows: the loader's loop with all other figures, then those of rivals and faults."""
        first = self.loop.measured if self.loop is not None else Measured(self.title, self.command)
        if self.loop is None and self.alone is not None:
            first = replace(first, samples_per_s=self.alone.samples_per_s["median"])
        killed = [fact for fault in self.faults if isinstance(fault, KillFigures) for fact in fault_facts(fault)]
        tables = (rival_table(self.rivals),) if self.rivals else ()
        first = replace(first, facts=(*self.facts, *killed), tables=tables, environment=self.environment)
        loops = [rival.loop for rival in self.rivals if rival.loop is not None]
        loops += [fault.loop for fault in self.faults if isinstance(fault, FaultFigures)]
        # All loops make the same step, so the headspace is the same too.
        rate, how = first.headspace_samples_per_s, first.headspace_how
        others = [replace(one.measured, headspace_samples_per_s=rate, headspace_how=how) for one in loops]
        return [first, *others]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts; `version` is the version of this format."""
        found = {"version": 1, "file": self.path.name, **asdict(self)}
        del found["path"]
        shown = {"shuffle": str(self.options.shuffle), "source": self.options.source is not None}
        found["options"] |= shown
        return found


def run_bench(
    path: Path, options: BenchOptions, *, command: str = "", show: Show = lambda figures: None
) -> BenchResult:
    """Measures what the options ask for; Ctrl-C ends it and keeps the results so far.

    Args:
        command: that repeats the measurement, for reports.
        show: called with the current figures while it runs.

    Raises:
        OptionError, MissingFileError, FormatError, SourceError: before anything is measured.
    """
    if options.source is not None and not options.compare:
        raise OptionError("--source: the image files are only read with --compare")
    step = parse_step(options.step) if options.step is not None else None
    faults = [parse_fault(text) for text in options.faults]
    subject = Subject(path, options)
    if options.source is not None:
        check_source(subject, options.source)
    result = BenchResult(
        path, command, options, subject.batch_size, len(subject.dataset), subject.image_shape,
        crop=subject.crop.size if subject.crop is not None else None, environment=environment(),
    )  # fmt: skip
    try:
        _measure(subject, step, faults, result, show)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        subject.close()
        result.left_in_cache = subject.left_in_cache
    return result


def _measure(subject: Subject, choice: StepChoice | None, faults: list[Fault], result: BenchResult, show: Show) -> None:
    """Runs what the options ask for, part by part, and keeps each in the result."""
    options, title = subject.options, result.title
    result.alone = measure_alone(subject, show)
    step: TrainingStep = TouchStep()  # without a training step, batches are only read
    if choice is not None:
        step = make_step(
            choice, channels=subject.image_shape[0], num_classes=subject.num_classes, device=subject.device,
            loader_samples_per_s=result.alone.samples_per_s["median"],
        )  # fmt: skip

    def train(name: str, loader: Any, title: str) -> LoopFigures:
        subject.make_cold()
        return run_loop(
            loader, step, options.seconds, title=title, command=result.command, epochs=subject.epochs,
            part=name, show=show,
        )  # fmt: skip

    if choice is not None:
        result.loop = train("the training loop", subject.shared_loader(), title)
        result.headspace = headspace_in_turn(subject, step, show)
        rate = result.headspace["base"]["median"]
        measured = replace(result.loop.measured, headspace_samples_per_s=rate, headspace_how=HOW_IN_TURN)
        result.loop = replace(result.loop, measured=measured)
    if options.compare:
        measure_rivals(
            subject, result.rivals, show,
            lambda name, loader: train(name, loader, f"{title}: {name}") if choice is not None else None,
        )  # fmt: skip
    for fault in faults:
        if fault.text == KILL_WORKER:
            result.faults.append(measure_kill(subject, step, fault))
        else:
            of_fault = f"{title}, {fault.text}"
            found = measure_fault(subject, step, fault, title=of_fault, command=result.command, show=show)
            result.faults.append(found)
