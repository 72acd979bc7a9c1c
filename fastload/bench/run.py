"""`run_bench`: the parts of a benchmark, one after another, and what they found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastload.bench.alone import AloneFigures, measure_alone
from fastload.bench.crop import crop_words
from fastload.bench.fault_runs import FaultFigures, KillFigures, measure_fault, measure_kill
from fastload.bench.faults import KILL_WORKER
from fastload.bench.headspace import HOW_IN_TURN, headspace_in_turn
from fastload.bench.loop import LoopFigures, run_loop
from fastload.bench.plain import check_source
from fastload.bench.rivals import Rival, measure_rivals
from fastload.bench.steps import LookingStep, TrainingStep, make_step
from fastload.bench.subject import BenchOptions, Subject
from fastload.bench.words import Facts, alone_facts, cold_facts, fault_facts, loop_facts, rival_table
from fastload.errors import OptionError
from fastload.measured import Measured
from fastload.meter import Meter, environment
from fastload.pairs import Spread
from fastload.transforms import RandomResizedCrop

__all__ = ["BenchOptions", "BenchResult", "run_bench"]

Show = Callable[[Mapping[str, str | float]], None]
"""Called with the figures of now, by name."""

_SHOW_EVERY_S = 0.2


@dataclass
class BenchResult:
    """What a benchmark found; a part that was not asked for, or not come to, is None or empty.

    Attributes:
        path: of the file.
        command: to measure it again.
        options: as asked for.
        batch_size: samples in a batch.
        num_samples, image_shape: of the data; (C, H, W), 0 where images differ.
        crop: (height, width) that a random crop makes of each image; None: images come as they are.
        alone: the loader by itself.
        loop: the training loop.
        headspace: see `headspace_in_turn`.
        rivals: the plain ways.
        faults: what was injected.
        left_in_cache: of each cold pass, the share of the file that could not be dropped.
        environment: see `Measured`.
        interrupted: whether it ended early, by Ctrl-C.
    """

    path: Path
    command: str
    options: BenchOptions
    batch_size: int
    num_samples: int
    image_shape: tuple[int, int, int]
    crop: tuple[int, int] | None = None
    alone: AloneFigures | None = None
    loop: LoopFigures | None = None
    headspace: dict[str, Spread] | None = None
    rivals: list[Rival] = field(default_factory=list)
    faults: list[FaultFigures | KillFigures] = field(default_factory=list)
    left_in_cache: list[float] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def title(self) -> str:
        """What was measured."""
        return f"fastload bench {self.path.name}"

    @property
    def facts(self) -> Facts:
        """The figures of the loader and of its loop, in words."""
        facts = alone_facts(self.alone) if self.alone is not None else []
        if self.crop is not None:
            facts = [("images", crop_words(RandomResizedCrop(self.crop), self.options.size)), *facts]
        facts += cold_facts(self.left_in_cache) if self.options.cold else []
        return facts + (loop_facts(self.loop, self.headspace) if self.loop is not None else [])

    @property
    def runs(self) -> list[Measured]:
        """What reports show: the loader's loop with all other figures, the plain ways' loops, those with faults."""
        first = self.loop.measured if self.loop is not None else Measured(self.title, self.command)
        if self.loop is None and self.alone is not None:
            first = replace(first, samples_per_s=self.alone.samples_per_s["median"])
        killed = [fact for fault in self.faults if isinstance(fault, KillFigures) for fact in fault_facts(fault)]
        tables = (rival_table(self.rivals),) if self.rivals else ()
        first = replace(first, facts=(*self.facts, *killed), tables=tables, environment=self.environment)
        loops = [rival.loop for rival in self.rivals if rival.loop is not None]
        loops += [fault.loop for fault in self.faults if isinstance(fault, FaultFigures)]
        # The step is the same in all of them, and so is its headspace.
        known = first.headspace_samples_per_s, first.headspace_how
        others = [replace(one.measured, headspace_samples_per_s=known[0], headspace_how=known[1]) for one in loops]
        return [first, *others]

    def to_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts; `version` tells readers what to expect."""
        found: dict[str, Any] = {"version": 1, "file": self.path.name}
        found |= {part.name: getattr(self, part.name) for part in fields(self) if part.name not in ("path", "options")}
        options = {name: value for name, value in vars(self.options).items() if name not in ("source", "faults")}
        found["options"] = options | {
            "step": str(self.options.step) if self.options.step else None,
            "shuffle": str(self.options.shuffle),
            "source": self.options.source is not None,
            "faults": [fault.text for fault in self.options.faults],
        }
        for name in ("alone", "loop"):
            found[name] = asdict(getattr(self, name)) if getattr(self, name) is not None else None
        for name in ("rivals", "faults"):
            found[name] = [asdict(one) for one in getattr(self, name)]
        return found


def run_bench(
    path: Path,
    options: BenchOptions,
    *,
    command: str = "",
    show: Show = lambda figures: None,
) -> BenchResult:
    """Measures what the options ask for; Ctrl-C ends it with what was found so far.

    Args:
        command: to measure it again, for reports.
        show: told how it goes.

    Raises:
        OptionError, MissingFileError, FormatError, SourceError: before anything is measured.
    """
    if options.source is not None and not options.compare:
        raise OptionError("--source: the image files are only read with --compare")
    subject = Subject(path, options)
    if options.source is not None:
        check_source(subject)
    result = BenchResult(
        path, command, options, subject.batch_size, len(subject.dataset), subject.image_shape,
        crop=subject.crop.size if subject.crop is not None else None, environment=environment(),
    )  # fmt: skip
    try:
        for part in _parts(subject, result, show):
            part()
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        subject.close()
        result.left_in_cache = subject.left_in_cache
    return result


def _parts(subject: Subject, result: BenchResult, show: Show) -> Iterator[Callable[[], None]]:
    options, title = subject.options, result.title
    epochs = 1 if options.cold else None  # a second one is warm

    def told(part: str) -> Callable[[int, int], None]:
        return lambda done, total: show({"part": f"{part}, {done} of {total}"})

    def looped(part: str) -> Callable[[Meter, float], None]:
        shown_s = 0.0

        def tell(meter: Meter, share: float) -> None:
            nonlocal shown_s
            now = time.perf_counter()
            if now - shown_s < _SHOW_EVERY_S:
                return
            shown_s, totals = now, meter.totals
            rate = totals.samples / totals.duration_s if totals.duration_s else 0.0
            show({"part": f"{part}, {share:.0%}", "images/s": rate, "stall share": f"{totals.stall_share:.1%}"})

        return tell

    def alone() -> None:
        result.alone = measure_alone(subject, told=told("the loader alone"))

    yield alone
    step = _step(subject, result)

    def loop() -> None:
        subject.make_cold()
        result.loop = run_loop(
            subject.kept(), step, options.seconds, title=title, command=result.command,
            epochs=epochs, told=looped("the training loop"),
        )  # fmt: skip

    def headspace() -> None:
        assert result.loop is not None, "the loop was run"
        found = result.headspace = headspace_in_turn(subject, step, told=told("headspace"))
        measured = replace(
            result.loop.measured, headspace_samples_per_s=found["base"]["median"], headspace_how=HOW_IN_TURN
        )
        result.loop = replace(result.loop, measured=measured)

    if options.step is not None:
        yield loop
        yield headspace

    def compare() -> None:
        def beside(name: str, loader: Any) -> LoopFigures | None:
            if options.step is None:
                return None
            subject.make_cold()
            return run_loop(
                loader, step, options.seconds, title=f"{title}: {name}", command=result.command, epochs=epochs,
                told=looped(name),
            )  # fmt: skip

        measure_rivals(subject, result.rivals, told=told("the plain ways"), beside=beside)

    if options.compare:
        yield compare

    for fault in options.faults:

        def inject(fault: Any = fault) -> None:
            if fault.text == KILL_WORKER:
                result.faults.append(measure_kill(subject, step, fault))
            else:
                name = f"{title}, {fault.text}"
                result.faults.append(
                    measure_fault(subject, step, fault, title=name, command=result.command, told=looped(fault.text))
                )

        yield inject


def _step(subject: Subject, result: BenchResult) -> TrainingStep:
    choice = subject.options.step
    if choice is None:
        return LookingStep()
    rate = result.alone.samples_per_s["median"] if result.alone is not None else None
    return make_step(
        choice, channels=subject.image_shape[0], num_classes=subject.num_classes, device=subject.device,
        loader_samples_per_s=rate,
    )  # fmt: skip
