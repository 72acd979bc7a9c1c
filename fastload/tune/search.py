"""The search: argument by argument the candidates run in turn, those that cannot win any more are left out.

Each round runs every candidate once, back and forth (A B C, C B A, ...), so that a machine that slows down slows all
of them. What won every stage is raced against the default at the end.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from fastload.bench.crop import crop_call, crop_for, crop_words
from fastload.bench.steps import NetworkStep, StepChoice, TrainingStep, make_step, parse_step
from fastload.cpus import available_cpus
from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.inputs import OtherInput, PackedInput, as_input
from fastload.loader import FastLoader
from fastload.open_feed import default_workers
from fastload.page_cache import drop
from fastload.plan import ChunkWindow
from fastload.quality import LEAST_ROWS, OrderQuality, measure_shuffles
from fastload.read.chunked import CACHE_BYTES
from fastload.share import local_world_size
from fastload.tune.candidates import STAGES, Candidate, Source
from fastload.tune.choose import Chosen, Row, can_still_win, choose
from fastload.tune.options import TuneOptions
from fastload.tune.trials import Runner, Way

BATCH_SIZE = 256
ROUNDS = 5
_ROUNDS_OF_ALL = 2  # before any candidate is left out
_ROUNDS_OF_LAST = 15  # it decides, and what others do on the machine must not
_STAGES_PART = 0.8  # of the seconds; what is left is for the race against the default
_TRIALS_PART = 0.6  # opening and closing loaders takes time too
_LEAST_TRIAL_S = 0.05
# Where a sample takes milliseconds, batches so small tell as much, and large ones take seconds.
_SOUNDING = 16
_SOUNDING_OF_CHUNKS = 2  # where each sample takes a whole chunk

Told = Callable[[str, int, int], None]
"""Called with (stage, trials done, trials at most)."""


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        name: of the file or dataset.
        rows: of all candidates, the default first, then in the order they were tried.
        default: arguments that `FastLoader` takes by itself.
        chosen: the row to take, with its last race's figures, and why; None: nothing was measured.
        call: to paste.
        gain: chosen over default, round by round of the last race; empty: it is the default, or was not raced.
        batch_size: of all.
        cpu_budget: of these options.
        cpus: whose share is counted.
        step: what was trained on; empty: nothing.
        notes: what was left out, and why.
        elapsed_s: that it took.
        interrupted: whether Ctrl-C ended it.
        step_on_cpu: whether the step takes CPUs too, so that shares are of both.
        crop: (height, width) that a random crop makes of each image; None: there is none.
    """

    name: str
    rows: tuple[Row, ...]
    default: Candidate
    chosen: Chosen | None
    call: str
    gain: tuple[float, ...]
    batch_size: int
    cpu_budget: float
    cpus: int
    step: str
    notes: tuple[str, ...]
    elapsed_s: float
    interrupted: bool = False
    step_on_cpu: bool = False
    crop: tuple[int, int] | None = None


@dataclass
class _Log:
    """What the search knows so far."""

    runners: dict[Candidate, Runner] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mixing: dict[str, OrderQuality] = field(default_factory=dict)
    done: int = 0


class Search:
    """One search; `run` it.

    Args:
        source: as in `FastLoader`.
        options: of the search.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read.
        OptionError: an option has no meaning, or does not fit the data.
    """

    def __init__(
        self,
        source: str | Path | PackedDataset | Dataset[Any],
        options: TuneOptions | None = None,
    ) -> None:
        self.options = options = options or TuneOptions()
        step = parse_step(options.step) if options.step is not None else None
        if isinstance(source, (str, Path)):
            source = PackedDataset(source, options.split)
        elif options.split is not None:
            raise OptionError(f"split={options.split!r}: give it to the PackedDataset itself")
        self._dataset: Any = source
        data = as_input(source)
        self.batch_size = options.batch_size or max(1, min(BATCH_SIZE, len(data.plan_rows) // 8))
        self._cpus = max(1, available_cpus() // local_world_size())
        self._path = data.dataset.file.path if isinstance(data, PackedInput) else None
        if options.cold and self._path is None:
            raise OptionError("cold: only a file can be dropped from the page cache")
        self.source = _source_of(data, self._cpus, cold=options.cold)
        self.crop = None if options.transform and options.size is None else crop_for(data, options.size)
        self._transform = (*([self.crop] if self.crop else []), *options.transform)
        in_threads = bool(self._transform) and not self.source.processes and options.device in (None, "cpu")
        stored = isinstance(data, PackedInput) and data.stored  # threads that read also decode
        self.default = Candidate(
            default_workers(processes=self.source.processes, computing=in_threads or stored),
            data.resolve_shuffle(options.shuffle, kept=True),
        )
        slow = self.source.processes or not self.source.linear
        # A network takes another time for each image of a small batch; a simulated accelerator does not.
        small = slow and (step is None or step.name == "sim")
        self._tried_size = min(self.batch_size, _SOUNDING) if small else self.batch_size
        # It looks at every option before anything is measured.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._loader(self.default).close()
        self._data = data
        self._step_choice = step
        self._step: TrainingStep | None = None
        self._told: Told = lambda stage, done, total: None
        self._log = _Log()
        if self.crop is not None:
            self._log.notes.append(
                f"{crop_words(self.crop, options.size)}; from fastload.transforms import RandomResizedCrop."
            )
        if self._tried_size < self.batch_size:
            self._log.notes.append(f"Tried in batches of {self._tried_size}, since a sample takes long here.")
        self._begun_s = self._until_s = 0.0

    def run(self, told: Told = lambda stage, done, total: None) -> Tuned:
        """Searches until the candidates or the seconds are used up. Ctrl-C ends it with what is known by then.

        Args:
            told: how far it is.
        """
        self._told = told
        self._begun_s = time.perf_counter()
        rows: list[Row] = []  # of the last race
        interrupted = False
        try:
            rows = self._stages()
        except KeyboardInterrupt:
            interrupted = True
            rows = list(self._rows())
        finally:
            self._close(())
        chosen = choose(rows, cpu_budget=self.options.cpu_budget) if rows else None
        best = chosen.row.candidate if chosen is not None else self.default
        base = next((row for row in rows if row.candidate == self.default), None)
        gain: tuple[float, ...] = ()
        if chosen is not None and base is not None and best != self.default:
            pairs = zip(chosen.row.trials, base.trials, strict=False)
            gain = tuple(way.samples_per_s / one.samples_per_s for way, one in pairs)
        if self._over:
            self._log.notes.append(
                "The time was up before all candidates had their rounds; more --seconds would tell more."
            )
        return Tuned(
            name=self._path.name if self._path is not None else self._data.name,
            rows=self._rows(),
            default=self.default,
            chosen=chosen,
            call=self.call(best),
            gain=gain,
            batch_size=self.batch_size,
            cpu_budget=self.options.cpu_budget,
            cpus=self._cpus,
            step=self._step.name if self._step is not None else "",
            crop=self.crop.size if self.crop is not None else None,
            notes=tuple(self._log.notes),
            elapsed_s=time.perf_counter() - self._begun_s,
            interrupted=interrupted,
            step_on_cpu=isinstance(self._step, NetworkStep) and self._step.device.type == "cpu",
        )

    def call(self, candidate: Candidate) -> str:
        """The loader as Python writes it."""
        options = self.options
        what = repr(str(self._path)).replace("'", '"') if self._path is not None else "dataset"
        if self._path is not None and options.split is not None:
            what = f'PackedDataset({what}, split="{options.split}")'
        elif self._path is not None and self.source.processes:
            what = "dataset"
        given = {"batch_size": str(self.batch_size), **candidate.arguments(self.default)}
        if options.device is not None:
            given["device"] = f'"{options.device}"'
        if self._transform:
            given["transform"] = "transform"
        if self.crop is not None:
            given["transform"] = (
                f"[{', '.join([crop_call(self.crop), *(['*transform'] if options.transform else [])])}]"
            )
        return f"FastLoader({what}, {', '.join(f'{name}={value}' for name, value in given.items())})"

    def _stages(self) -> list[Row]:
        """Argument by argument, then the best against the default; the rows of the last race."""
        if self._step_choice is not None:
            self._step = self._open_step(self._step_choice)
        best, rows = self.default, list[Row]()
        self._until_s = self._begun_s + _STAGES_PART * self.options.seconds
        for stage, candidates_of in STAGES.items():
            others = candidates_of(best, self.source)
            if others and not self._over:
                if stage == "windows":
                    self._look_at_orders(others)
                # The default last: of a compressed file it may take all the time.
                raced = self._race(stage, [*others, best])
                # A race that was not run once by all says nothing, unless nothing else is known.
                rows = raced if len(raced) > len(others) or not rows else rows
                best = choose(rows, cpu_budget=self.options.cpu_budget).row.candidate
        self._until_s = self._begun_s + self.options.seconds
        if not rows or (best != self.default and not self._over):
            finalists = list(dict.fromkeys([self.default, best]))
            raced = self._race("the best and the default", finalists, rounds=_ROUNDS_OF_LAST)
            rows = raced if len(raced) == len(finalists) else rows
        return rows

    @property
    def num_trials(self) -> int:
        """Most trials that there will be, if the default wins every stage."""
        stages = [candidates_of(self.default, self.source) for candidates_of in STAGES.values()]
        return sum(1 + len(others) for others in stages if others) * ROUNDS + 2 * _ROUNDS_OF_LAST

    @property
    def _trial_s(self) -> float:
        return max(_LEAST_TRIAL_S, _TRIALS_PART * self.options.seconds / self.num_trials)

    @property
    def _over(self) -> bool:
        return time.perf_counter() > self._until_s

    def _race(self, stage: str, candidates: Sequence[Candidate], *, rounds: int | None = None) -> list[Row]:
        """Rounds of trials, in turn, all of so many; None: what cannot win any more is left out after two."""
        racing = runners = [self._runner(candidate) for candidate in candidates]
        self._close(runners)
        first = [len(runner.trials) for runner in runners]
        rows: list[Row] = []
        for turn in range(rounds or ROUNDS):
            for runner in racing if turn % 2 == 0 else racing[::-1]:
                if not self._over or not self._log.done:
                    self._told(stage, self._log.done, self.num_trials)
                    runner.run(self._trial_s)
                self._log.done += 1
            rows = [
                self._with_mixing(runner.row(since))
                for runner, since in zip(runners, first, strict=True)
                if len(runner.trials) > since
            ]
            if turn + 1 >= _ROUNDS_OF_ALL and rows and rounds is None:
                left = {row.candidate for row in can_still_win(rows, cpu_budget=self.options.cpu_budget)}
                racing = [runner for runner in racing if runner.candidate in left]
                if len(racing) < 2:
                    break
        return rows

    def _runner(self, candidate: Candidate) -> Runner:
        if candidate not in self._log.runners:
            window = candidate.shuffle.chunks if isinstance(candidate.shuffle, ChunkWindow) else 0
            self._log.runners[candidate] = Runner(
                self._loader,
                candidate,
                self._way,
                cpus=self._cpus,
                least_rows=window * self._data.chunk_rows or _SOUNDING,
                step=self._step,
            )
        return self._log.runners[candidate]

    @property
    def _way(self) -> Way:
        return Way(
            continues=self.source.processes,
            whole=not self.source.linear and not self.source.processes,
            before=self._drop if self.options.cold else None,
        )

    def _close(self, keep: Sequence[Runner]) -> None:
        for runner in self._log.runners.values():
            if runner not in keep:
                runner.close()

    def _loader(self, candidate: Candidate) -> FastLoader:
        options = self.options
        return FastLoader(
            self._dataset,
            self._tried_size if candidate.shuffle != "full" or not self._way.whole else _SOUNDING_OF_CHUNKS,
            shuffle=candidate.shuffle,
            seed=options.seed,
            share=None,
            workers=candidate.workers,
            device=options.device,
            transform=self._transform,
            read=candidate.read,
        )

    def _drop(self) -> None:
        assert self._path is not None, "there is a file to drop"
        left = drop(self._path)
        if left is not None and left > 0.01 and not any("stayed" in note for note in self._log.notes):
            self._log.notes.append(f"{left:.0%} of the file stayed in the page cache: these figures are warm.")

    def _open_step(self, choice: StepChoice) -> TrainingStep:
        rate = None
        if choice.relative:
            alone = Runner(self._loader, self.default, self._way, cpus=self._cpus)
            rate = statistics.median(alone.run(self._trial_s).samples_per_s for _ in range(3))
            alone.close()
        channels, classes = 3, 10
        if isinstance(self._data, PackedInput):
            channels, classes = self._data.image_spec()[0][0], len(self._data.dataset.classes) or 10
        return make_step(
            choice,
            channels=channels,
            num_classes=classes,
            device=self.options.device,
            loader_samples_per_s=rate,
        )

    def _look_at_orders(self, candidates: Sequence[Candidate]) -> None:
        """How well each order mixes, to be shown beside its speed."""
        if self._path is None or len(self._data.plan_rows) < max(LEAST_ROWS, 2 * self.batch_size):
            self._log.notes.append("How well the orders mix was not measured: there are too few samples.")
            return
        chunks = {one.shuffle.chunks for one in (self.default, *candidates) if isinstance(one.shuffle, ChunkWindow)}
        self._told("shuffle quality", self._log.done, self.num_trials)
        found = measure_shuffles(self._path, batch_size=self.batch_size, windows=tuple(sorted(chunks)))
        self._log.mixing = {order.shuffle: order for order in found.orders}

    def _with_mixing(self, row: Row) -> Row:
        order = self._log.mixing.get(row.candidate.order.strip('"'))
        if order is None:
            return row
        return replace(row, mixing=order.verdict, mixes_worse=not order.as_good)

    def _rows(self) -> tuple[Row, ...]:
        tried = [runner for runner in self._log.runners.values() if runner.trials]
        tried.sort(key=lambda runner: runner.candidate != self.default)
        return tuple(self._with_mixing(runner.row()) for runner in tried)


def _source_of(data: PackedInput | OtherInput, cpus: int, *, cold: bool) -> Source:
    linear = isinstance(data, PackedInput) and all(
        data.dataset.file.fields[name].offset is not None or data.dataset.file.fields[name].store is not None
        for name, _, _ in data.dataset.layout()
    )
    chunks = -(-len(data.plan_rows) // data.chunk_rows) if data.chunk_rows else 0
    kept = 2**31
    if isinstance(data, PackedInput) and data.chunk_rows and not linear:
        field = data.dataset.file.fields["images" if "images" in data.dataset.file.fields else data.dataset.fields[0]]
        kept = CACHE_BYTES // (field.row_bytes * data.chunk_rows)
    return Source(data.runs_python, linear, chunks, cpus, kept, cold=cold)
