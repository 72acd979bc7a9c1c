"""Searches argument by argument: candidates run in turn, and candidates that can no longer win are dropped.

Each round runs every candidate once, back and forth (A B C, C B A, ...), so that a machine that slows down affects all
of them. At the end the best of all stages runs against the default.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from fastload.dataset import PackedDataset
from fastload.distributed.ranks import cpus_of_rank
from fastload.errors import OptionError
from fastload.inspection.shuffle_quality import LEAST_ROWS, OrderQuality, measure_shuffles
from fastload.loader.loader import FastLoader
from fastload.options.measure import TuneOptions
from fastload.plan import ChunkWindow
from fastload.prefetch.inputs import Input, as_input, shuffle_of
from fastload.prefetch.loader_plan import default_workers
from fastload.profiling.bench.passes import repeat_epochs, run_for, touch_batch
from fastload.profiling.bench.subject import crop_call, crop_for, crop_text, default_batch_size
from fastload.profiling.bench.training_loop import NetworkStep, TouchStep, TrainingStep, make_step, parse_step
from fastload.profiling.meter import Meter, environment
from fastload.profiling.meter.sampler import OthersCpus, family_of, process_memory
from fastload.profiling.tune.candidates import (
    STAGES,
    Candidate,
    Chosen,
    DataTraits,
    Row,
    Trial,
    can_still_win,
    candidates_of,
    choose,
    fits,
)
from fastload.profiling.verdict.sentences import OTHERS_FEW
from fastload.read.hdf5_chunks import CACHE_BYTES
from fastload.remote.urls import short_name
from fastload.system.advice import advice
from fastload.system.files import drop
from fastload.system.text import counted, format_bytes
from fastload.timing.results import Measured, Table

ROUNDS = 5
_ROUNDS_OF_ALL = 2  # before the first candidates are dropped
_ROUNDS_OF_LAST = 15  # many, because this race decides, and other work on the machine disturbs it
_STAGES_PART = 0.8  # of the time; the rest is for the last race, against the default
_TRIALS_PART = 0.6  # of that; the rest goes into opening and closing loaders
_LEAST_TRIAL_S = 0.05
# Where a sample takes milliseconds to load, small batches say as much as large ones, which would take seconds each.
_SMALL_BATCH = 16
_TINY_BATCH = 2  # where each sample decodes a whole chunk

OnStep = Callable[[str, int, int], None]
"""Called with (stage, trials done, trials at most)."""


@dataclass
class Tuned:
    """Result of a search."""

    name: str  # of the file or dataset
    default: Candidate  # the arguments that `FastLoader` takes by default
    call: str  # the Python call to paste
    batch_size: int  # of all trials
    cpu_budget: float  # as in the options
    cpus: int  # number of CPUs that `cpu_budget` is a share of
    crop: tuple[int, int] | None  # (height, width) of the random crop of each image; None: no crop
    rows: tuple[Row, ...] = ()  # one for each candidate, the default first, then in the order of the trials
    chosen: Chosen | None = None  # the best row, with its figures of the last race, and why; None: nothing was measured
    # Rate of the chosen candidate divided by the default's, for each round of the last race; empty if they are the same
    # or did not race
    gain: tuple[float, ...] = ()
    step: str = ""  # name of the training step; empty: none
    step_on_cpu: bool = False  # whether the step uses CPUs too; CPU shares then include it
    notes: tuple[str, ...] = ()  # what was left out, and why
    elapsed_s: float = 0.0  # time of the search
    interrupted: bool = False  # whether Ctrl-C ended it

    @property
    def table(self) -> Table:
        """A row for each candidate: an arrow marks the chosen one, `over` those beyond the budget."""
        chosen = self.chosen.row.candidate if self.chosen is not None else None
        orders = len({row.candidate.order for row in self.rows}) > 1

        def cells(row: Row) -> dict[str, str]:
            one, rates = row.candidate, [trial.samples_per_s for trial in row.trials]
            mixing = f"worse: {row.mixing}" if row.mixes_worse else "as full" if row.mixing else "-"
            return {
                "": "->" if one == chosen else "default" if one == self.default else "",
                "workers": str(one.workers),
                **({"shuffle": one.order} if orders else {}),
                "read": one.read,
                "images/s": f"{row.samples_per_s:,.0f}",
                "lowest to highest": f"{min(rates):,.0f} to {max(rates):,.0f}, {len(rates)}",
                "CPU s/1,000": f"{row.cpu_s_per_1000:.3g}",
                "CPU": f"{row.cpu_share:.0%}{'' if fits(row, self.cpu_budget) else ' over'}",
                "others' CPUs": "not known" if row.others_cpus is None else f"{row.others_cpus:.2f}",
                "first batch": f"{1000 * row.first_batch_s:,.0f} ms",
                "memory": format_bytes(row.memory_bytes),
                **({"stall": f"{row.stall_share or 0:.1%}"} if self.step else {}),
                **({"mixing": mixing} if orders else {}),
            }

        step = f", {self.step}" if self.step else ""
        who = "loading and this training together" if self.step_on_cpu else "loading"
        share = "all" if self.cpu_budget >= 1 else f"{self.cpu_budget:.0%}"
        title = f"batches of {self.batch_size:,}{step}; {who} may take {share} of {counted(self.cpus, 'CPU')}"
        rows = [cells(row) for row in self.rows]
        return Table(title, tuple(rows[0]) if rows else (), tuple(tuple(row.values()) for row in rows))

    @property
    def why(self) -> str:
        """The reason for the chosen candidate, and how it compares with the default where both ran; empty for none."""
        if self.chosen is None:
            return ""
        if self.chosen.row.candidate == self.default:
            return f"{self.chosen.reason}; these are the default arguments"
        if not self.gain:
            return self.chosen.reason
        middle, least, most = statistics.median(self.gain), min(self.gain), max(self.gain)
        times = f"{middle:.3g} times the default's images/s ({least:.3g} to {most:.3g}, {len(self.gain)} pairs)"
        return f"{self.chosen.reason}; {times}"

    def measured(self, command: str) -> Measured:
        """Returns the result in the form that `write_report` takes."""
        why = [("why", self.why)] if self.chosen is not None else []
        return Measured(
            title=f"fastload tune {self.name}",
            command=command,
            elapsed_s=self.elapsed_s,
            samples_per_s=self.chosen.row.samples_per_s if self.chosen is not None else 0.0,
            facts=(("to paste", self.call), *why, *(("note", note) for note in self.notes)),
            tables=(self.table,),
            environment=environment(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers; `file` is the name of the file or dataset."""

        def shown(row: Row) -> dict[str, Any]:
            return row.to_dict() | {"over_budget": not fits(row, self.cpu_budget)}

        chosen = self.chosen and {**shown(self.chosen.row), "reason": self.chosen.reason}
        found = {"file": self.name, **asdict(self), "chosen": chosen, "rows": [shown(row) for row in self.rows]}
        del found["name"]
        return found


class Search:
    """One search over the arguments of a `FastLoader` of some source; call `run`.

    `default` are the arguments that `FastLoader` takes by default.

    Raises:
        MissingFileError, FormatError: the file is missing or cannot be read.
        OptionError: an option is invalid, or does not fit the data.
    """

    def __init__(self, source: str | Path | PackedDataset | Dataset[Any], options: TuneOptions | None = None) -> None:
        self.options = options = options or TuneOptions()
        self._step_choice = step = parse_step(options.step) if options.step is not None else None
        self._owns = isinstance(source, (str, Path))  # what is open of a URL
        if isinstance(source, (str, Path)):
            source = PackedDataset(source, options.split)
        elif options.split is not None:
            raise OptionError(f"split={options.split!r}: give it to the PackedDataset itself")
        self._dataset: Any = source
        self._data = data = as_input(source)
        self.batch_size = options.batch_size or default_batch_size(len(data.plan_rows))
        # A path, or a URL, to be read again; None: it is no packed file.
        self._path = data.path
        if options.cold and self._path is None:
            raise OptionError("cold: only a file can be dropped from the page cache")
        if options.cold and isinstance(self._path, str):
            raise OptionError(f"{self._path}: --cold is for files of this machine. Leave it out.")
        self.traits = traits = _traits_of(data, cold=options.cold)
        self.crop = None if options.transform and options.size is None else crop_for(data, options.size)
        self._transform = (*([self.crop] if self.crop else []), *options.transform)
        on_cpu = options.device in (None, "cpu")
        self.default = Candidate(
            default_workers(
                data,
                self.batch_size,
                computing=data.ragged or (on_cpu and bool(self._transform)),  # threads that read also decode
                to_device=not on_cpu,
            ),
            shuffle_of(data, options.shuffle, cached=True),
        )
        # A network's time per image depends on the batch size, a simulated accelerator's does not.
        small = (traits.processes or not traits.linear) and (step is None or step.name == "sim")
        self._tried_size = min(self.batch_size, _SMALL_BATCH) if small else self.batch_size
        self._step: TrainingStep | None = None
        # The loader checks its options, so wrong ones fail before anything is measured.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._loader(self.default).close()
        # The most trials are run if the default wins every stage.
        stages = [candidates_of(stage, self.default, traits) for stage in STAGES]
        self.num_trials = sum(1 + len(others) for others in stages if others) * ROUNDS + 2 * _ROUNDS_OF_LAST
        self._trial_s = max(_LEAST_TRIAL_S, _TRIALS_PART * options.seconds / self.num_trials)
        self._runners: dict[Candidate, Runner] = {}
        self._mixing: dict[str, OrderQuality] = {}
        self._done = 0  # trials
        self._begun_s = self._until_s = 0.0
        self._notes: list[str] = []
        if self.crop is not None:
            self._notes.append(f"{crop_text(self.crop, options.size)}; {advice('import crop')}")
        if self._tried_size < self.batch_size:
            self._notes.append(f"Tried in batches of {self._tried_size}, because a sample takes long to load here.")

    def run(self, on_progress: OnStep = lambda stage, done, total: None) -> Tuned:
        """Searches until all candidates are tried or the time is over. Ctrl-C ends it and keeps the results so far.

        `on_progress` is called before each trial.
        """
        self._begun_s = time.perf_counter()
        name = short_name(self._path) if self._path is not None else self._data.name
        result = Tuned(
            name, self.default, self.call(self.default), self.batch_size, self.options.cpu_budget, self.traits.cpus,
            self.crop.size if self.crop else None,
        )  # fmt: skip
        try:
            rows = self._stages(on_progress)  # of the last race
        except KeyboardInterrupt:
            result.interrupted = True
            rows = self._rows()
        finally:
            for runner in self._runners.values():
                runner.close()
            came = self._data.network_bytes
            if self._owns:
                self._dataset.file.shard_files.close()
        if rows:
            result.chosen = choose(rows, cpu_budget=self.options.cpu_budget)
            if not fits(result.chosen.row, self.options.cpu_budget):  # maybe one of an earlier race is
                result.chosen = choose(self._rows(), cpu_budget=self.options.cpu_budget)
            best = result.chosen.row
            result.call = self.call(best.candidate)
            base = next((row for row in rows if row.candidate == self.default), best)
            if base != best:
                pairs = zip(best.trials, base.trials, strict=False)
                result.gain = tuple(way.samples_per_s / one.samples_per_s for way, one in pairs)
        if self._over:
            self._notes.append(advice("seconds for candidates"))
        if (step := self._step) is not None:
            result.step = step.name
            result.step_on_cpu = isinstance(step, NetworkStep) and step.device.type == "cpu"
        result.rows = tuple(sorted(self._rows(), key=lambda row: row.candidate != self.default))
        disturbed = [row for row in result.rows if (row.others_cpus or 0.0) >= OTHERS_FEW * self.traits.cpus]
        if disturbed:
            self._notes.append(
                f"Other programs used up to {max(row.others_cpus or 0.0 for row in disturbed):.2f} of the "
                f"{self.traits.cpus} CPUs during {len(disturbed)} of {len(result.rows)} rows: these are not the "
                f"machine's figures. {advice('other programs')}"
            )
        if came:
            self._notes.append(
                f"{format_bytes(came)} came over the network in these trials, and the rates of the first ones are the "
                f"network's: {advice('tune again', url=self._path)}"
            )
        result.notes, result.elapsed_s = tuple(self._notes), time.perf_counter() - self._begun_s
        return result

    def call(self, candidate: Candidate) -> str:
        """Returns the Python expression for a loader with these arguments."""
        options, what = self.options, "dataset"
        given = {"batch_size": str(self.batch_size), **candidate.arguments(self.default)}
        of_dataset = [] if options.split is None else [f'split="{options.split}"']
        of_dataset += [f"read={given.pop('read')}"] if "read" in given else []
        if self._path is not None and (options.split is not None or not self.traits.processes):
            what = repr(str(self._path)).replace("'", '"')
            if of_dataset or isinstance(self._path, str):
                what = f"PackedDataset({', '.join([what, *of_dataset])})"
        elif of_dataset:
            what = f"PackedDataset(..., {', '.join(of_dataset)})"
        if options.device is not None:
            given["device"] = f'"{options.device}"'
        if self.crop is not None:
            given["transform"] = f"[{crop_call(self.crop)}{', *transform' if options.transform else ''}]"
        elif self._transform:
            given["transform"] = "transform"
        return f"FastLoader({what}, {', '.join(f'{name}={value}' for name, value in given.items())})"

    def _stages(self, on_progress: OnStep) -> list[Row]:
        """Varies one argument after another, then races the best against the default; returns the last race's rows."""
        if (choice := self._step_choice) is not None:
            rate = None
            if choice.relative:
                alone = Runner(self.default, self._loader, self.traits, drop=self._drop)
                rate = statistics.median(alone.run(self._trial_s).samples_per_s for _ in range(3))
                alone.close()
            channels, classes = self._data.channels or 3, len(self._data.classes) or 10
            self._step = make_step(
                choice, channels=channels, num_classes=classes, device=self.options.device, loader_samples_per_s=rate
            )
        best, rows = self.default, list[Row]()
        self._until_s = self._begun_s + _STAGES_PART * self.options.seconds
        for stage in STAGES:
            others = candidates_of(stage, best, self.traits)
            if others and not self._over:
                if stage == "windows":
                    on_progress("shuffle quality", self._done, self.num_trials)
                    self._measure_mixing(others)
                # The best so far runs last: with a compressed file it may take all the time that is left.
                raced = self._race(stage, [*others, best], on_progress)
                # A race in which some candidate never ran says nothing, unless nothing else is known.
                rows = raced if len(raced) > len(others) or not rows else rows
                best = choose(rows, cpu_budget=self.options.cpu_budget).row.candidate
        self._until_s = self._begun_s + self.options.seconds
        if not rows or (best != self.default and not self._over):
            finalists = list(dict.fromkeys([self.default, best]))
            raced = self._race("the best and the default", finalists, on_progress, rounds=_ROUNDS_OF_LAST)
            rows = raced if len(raced) == len(finalists) else rows
        return rows

    @property
    def _over(self) -> bool:
        return time.perf_counter() > self._until_s

    def _race(
        self, stage: str, candidates: Sequence[Candidate], on_progress: OnStep, *, rounds: int | None = None
    ) -> list[Row]:
        """Runs the candidates in turn and returns their rows.

        Without a number of rounds there are up to `ROUNDS`, and after two those that can no longer win are dropped.
        """
        for candidate, runner in self._runners.items():
            if candidate not in candidates:
                runner.close()
        for one in candidates:
            if one not in self._runners:
                window = one.shuffle.chunks if isinstance(one.shuffle, ChunkWindow) else 0
                self._runners[one] = Runner(
                    one, self._loader, self.traits, drop=self._drop, step=self._step,
                    least_rows=window * self._data.chunk_rows or _SMALL_BATCH,
                )  # fmt: skip
        racing = [self._runners[one] for one in candidates]
        first = {one: len(self._runners[one].trials) for one in candidates}
        rows: list[Row] = []
        for turn in range(rounds or ROUNDS):
            for runner in racing if turn % 2 == 0 else racing[::-1]:
                if not self._over or not self._done:
                    on_progress(stage, self._done, self.num_trials)
                    runner.run(self._trial_s)
                self._done += 1
            rows = self._rows(first)
            if turn + 1 >= _ROUNDS_OF_ALL and rows and rounds is None:
                left = {row.candidate for row in can_still_win(rows, cpu_budget=self.options.cpu_budget)}
                racing = [runner for runner in racing if runner.candidate in left]
                if len(racing) < 2:
                    break
        return rows

    def _rows(self, first: Mapping[Candidate, int] | None = None) -> list[Row]:
        """Returns the rows of these candidates that have trials from number `first` on, by default of all."""
        rows = []
        for candidate, since in (dict.fromkeys(self._runners, 0) if first is None else first).items():
            runner, order = self._runners[candidate], self._mixing.get(candidate.order.strip('"'))
            if len(runner.trials) > since:
                row = runner.row(since)
                rows.append(row if order is None else replace(row, mixing=order.verdict, mixes_worse=not order.as_good))
        return rows

    def _loader(self, candidate: Candidate) -> FastLoader:
        return FastLoader(
            self._data.reading(candidate.read),
            self._tried_size if candidate.shuffle != "full" or not self.traits.whole else _TINY_BATCH,
            shuffle=candidate.shuffle,
            seed=self.options.seed,
            share=None,
            workers=candidate.workers,
            device=self.options.device,
            transform=self._transform,
        )

    def _drop(self) -> None:
        assert self._path is not None, "there is a file to drop"
        left = max((share for path in self._data.files if (share := drop(path)) is not None), default=None)
        if left is not None and left > 0.01 and not any("stayed" in note for note in self._notes):
            self._notes.append(f"{left:.0%} of the file stayed in the page cache: these figures are warm.")

    def _measure_mixing(self, candidates: Sequence[Candidate]) -> None:
        """Measures how well each order mixes the samples, to be shown with its speed."""
        if self._path is None or len(self._data.plan_rows) < max(LEAST_ROWS, 2 * self.batch_size):
            self._notes.append("How well the orders mix was not measured, because there are too few samples.")
            return
        chunks = {one.shuffle.chunks for one in (self.default, *candidates) if isinstance(one.shuffle, ChunkWindow)}
        found = measure_shuffles(self._path, batch_size=self.batch_size, windows=tuple(sorted(chunks)))
        self._mixing = {order.shuffle: order for order in found.orders}


def _traits_of(data: Input, *, cold: bool) -> DataTraits:
    kept = CACHE_BYTES // data.chunk_bytes if data.chunk_bytes and not data.linear else 2**31
    chunks = -(-len(data.plan_rows) // data.chunk_rows) if data.chunk_rows else 0
    return DataTraits(data.runs_python, data.linear, chunks, cpus_of_rank(), kept, cold=cold)


# Batches before the clock starts: the system allocates the memory of a new ring while the first ones are read.
_WARM_UP = 6
_LEAST_BATCHES = 2  # in a trial, however long they take
# A trial that has to load whole windows may take this many times the time given for it.
_PATIENCE = 4


class Runner:
    """The open loader of one candidate, and its measurements. Call `close` at the end.

    With processes, trials are slices of one pass, because starting a pass starts them. With whole windows, a trial
    counts a pass from its start, and at least `least_rows` rows. From a cold page cache, `drop` is called before each
    trial, with the loader closed, which else stays open. Without a step, a byte of each memory page of a batch is read.
    """

    def __init__(
        self,
        candidate: Candidate,
        make: Callable[[Candidate], FastLoader],
        traits: DataTraits,
        *,
        drop: Callable[[], object] = lambda: None,
        step: TrainingStep | None = None,
        least_rows: int = 0,
    ) -> None:
        self.candidate = candidate
        self._make, self._traits, self._drop, self._metered = make, traits, drop, step is not None
        self._least_rows = least_rows if traits.whole else 0
        self._step: TrainingStep = step or TouchStep()
        self._loader: FastLoader | None = None
        self._stack = ExitStack()
        self._meter: Meter | None = None
        self._batches: Iterator[Any] | None = None
        self._others = OthersCpus()
        self.trials: list[Trial] = []
        self.first_batch_s = 0.0
        self.memory_bytes = 0

    def row(self, since: int = 0) -> Row:
        trials = tuple(self.trials[since:])
        return Row(self.candidate, trials, self.first_batch_s, self.memory_bytes, others_cpus=self._others.cpus)

    def run(self, seconds: float) -> Trial:
        """Runs a trial of about so many seconds, keeps it and returns it."""
        traits, step = self._traits, self._step
        if traits.cold:
            self.close()
            self._drop()
        if self._loader is None:
            self._open(seconds)
        # Batches that were ready when the clock started do not count. From a cold cache an epoch may have only one.
        batches = self._pass()
        ready = 2 * self.candidate.workers if traits.processes else 0 if traits.whole or traits.cold else 1
        for _ in range(ready):
            next(batches)
        step.begin()
        waited_s, taken_s = self._waited()

        def enough(batches: int, samples: int, taken_s: float) -> bool:
            return (batches >= _LEAST_BATCHES and samples >= self._least_rows) or taken_s >= _PATIENCE * seconds

        with self._others.measured():
            found = run_for(batches, seconds, step, discard=0, synchronize=step.finish, enough=enough)
        assert found.samples, "a loader has one batch at least"
        stall_share = None
        if self._meter is not None:  # from the accelerator if it knows, else from the meter
            waited_s, taken_s = (now - before for now, before in zip(self._waited(), (waited_s, taken_s), strict=True))
            stalled = waited_s / max(1e-9, taken_s) if step.utilization is None else 1 - step.utilization
            stall_share = min(1.0, max(0.0, stalled))
        cost_s, share = 1000 * found.cpu_s / found.samples, found.cpu_s / found.seconds / traits.cpus
        self.trials.append(Trial(found.samples_per_s, cost_s, share, stall_share))
        return self.trials[-1]

    def close(self) -> None:
        """Closes the loader; the next trial opens it again."""
        self._end_pass()
        self._stack.close()  # the meter and the loader
        self._meter = self._loader = None

    def _open(self, seconds: float) -> None:
        before = process_memory(*family_of(os.getpid()))
        begin = time.perf_counter()
        with warnings.catch_warnings():
            # torch warns of more processes than CPUs; here that is only a candidate.
            warnings.simplefilter("ignore")
            loader = self._loader = self._make(self.candidate)
            self._stack.callback(loader.close)
            batches: Iterator[Any] = iter(loader)
            batch = next(batches)
        first_s = time.perf_counter() - begin
        self.first_batch_s = min(self.first_batch_s or first_s, first_s)
        if not self._traits.cold and not self._traits.whole:
            for _ in range(_WARM_UP + self.candidate.workers):
                if batch is None or time.perf_counter() - begin > seconds:
                    break
                touch_batch(batch)
                batch = next(batches, None)
        self.memory_bytes = max(self.memory_bytes, process_memory(*family_of(os.getpid())) - before)
        if self._metered:
            self._meter = self._stack.enter_context(Meter(device=self._step.device, sample_every_s=0))
        elif self._traits.processes:
            self._batches = chain(batches, repeat_epochs(loader))

    def _pass(self) -> Iterator[Any]:
        """Returns the batches to come. From a cold cache only one epoch: a second would come from the page cache."""
        if self._batches is None or not self._traits.processes:
            self._end_pass()
            assert self._loader is not None, "it was opened"
            watched = self._meter.watch(self._loader) if self._meter is not None else self._loader
            self._batches = repeat_epochs(watched, epochs=1 if self._traits.cold else None)
        return self._batches

    def _waited(self) -> tuple[float, float]:
        """Returns the seconds that steps have waited so far, and their duration so far."""
        return (0.0, 0.0) if self._meter is None else (self._meter.totals.wait_s, self._meter.totals.duration_s)

    def _end_pass(self) -> None:
        batches, self._batches = self._batches, None
        if isinstance(batches, Generator):
            batches.close()
