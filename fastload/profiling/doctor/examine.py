"""Runs a command under the doctor and returns its measurements and the verdict."""

from __future__ import annotations

import re
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastload.profiling.doctor.command import Ended, Signals, run_command
from fastload.profiling.doctor.kernel import WaitSampler
from fastload.profiling.doctor.loader_records import Interval, LoaderRecord, RecordedEvents, lanes_of, timeline
from fastload.profiling.doctor.loop_demands import demands_of, keeps_transform
from fastload.profiling.doctor.trials import ImagesSeen, measure_fastloader, measure_formats, measure_worker
from fastload.profiling.meter.loops import HOW
from fastload.profiling.meter.sampler import Sampler, environment, family_of, mean_cpus, mean_others
from fastload.profiling.verdict import Demands, judge
from fastload.profiling.verdict.demands import around_s, costs_of, own_beside_fastloader_s
from fastload.profiling.verdict.loop_model import FastLoaderCosts
from fastload.profiling.verdict.sentences import OTHER_PROGRAMS
from fastload.system.advice import advice
from fastload.system.machine import available_cpus
from fastload.system.text import seconds_text
from fastload.timing.results import Lane, Measured, Verdict, WorkTime, mean_stages

_LOOK_EVERY_S = 0.5
_SAMPLE_EVERY_S = 0.25
_SHOWN_STEPS = 4000
_OTHER_LOOP = 0.05  # of a run; a loop of less is not spoken of
_SLOWER = 1.05  # of a step, that is spoken of
_LONG_S = 0.02  # of a pause; a longer one makes no difference
# A change to a loop that does not train is named first if it saves this part of the run, and so many times what the
# change to the training loop would save.
_GOOD_PART, _CLEARLY = 0.1, 1.5


@dataclass(frozen=True)
class Examined:
    """Result of a command."""

    code: int  # the command's exit code
    measured: Measured  # without a verdict if `why_no_verdict` is set
    why_no_verdict: str  # why nothing can be said; else empty
    faults: tuple[str, ...]  # failures of the injected module
    so_far: bool  # whether the command was stopped early


def examine(
    command: Sequence[str],
    signals: Signals,
    *,
    seconds: float | None = None,
    look: Callable[[RecordedEvents], None] | None = None,
    over: Callable[[], None] = lambda: None,
) -> Examined:
    """Runs a command with each of its loaders timed, and judges the loader that takes the most time.

    After `seconds` the command is interrupted. `signals` is entered; signals that come while the records are read have
    to wait. `look` is called about twice a second with the records so far; None: nothing is read until the end.
    `over` is called when the command is over, and changes are tried.
    """

    def watch(pid: int) -> None:
        if recording.follow(pid) and look is not None:
            look(recording.records.read())

    with Recording() as recording:
        begin_s = time.perf_counter()
        ended = run_command(command, recording.folder, signals, seconds=seconds, look=watch)
        records = recording.records.read()
        loader = loader_that_binds(records)
        title = f"fastload doctor -- {shlex.join(command)}"
        why_no_verdict = "" if loader is not None else _why_no_verdict(records, command, ended, seconds)
        if loader is not None:
            over()
            measured = recording.measured(
                loader, title=title, command=title, run=Interval(begin_s, time.perf_counter())
            )
        else:
            readings = recording.readings_from(0.0)
            measured = Measured(title, title, elapsed_s=ended.elapsed_s, readings=readings, environment=environment())
        unread = [("GPU" if name == "gpu" else name, f"not read: {why}") for name, why in recording.absent.items()]
        measured = replace(measured, facts=(*measured.facts, *unread))
    return Examined(ended.code, measured, why_no_verdict, records.faults, ended.interrupted)


class Recording:
    """Records a job within a `with` block: the events of its loaders, its waits, the machine's counters."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fastload-doctor-"))  # for the events; removed at the end
        self.records, self._kernel = RecordedEvents(self.folder), WaitSampler()
        self._sampler: Sampler | None = None
        self.absent: Mapping[str, str] = {}  # readings that are not available here, each with the reason
        self._begun_s = time.perf_counter()
        self._due_s = 0.0

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_sampling()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stop_sampling(self) -> None:
        self._kernel.close()
        if self._sampler is not None:
            self._sampler.stop()

    def follow(self, pid: int) -> bool:
        """Reads the counters of a process and its descendants from now on; to be called often.

        Returns whether it looked for new processes, as it does twice a second.
        """
        if self._sampler is None:
            self._sampler = Sampler(pid, every_s=_SAMPLE_EVERY_S, begun_s=self._begun_s).start()
            self.absent = self._sampler.absent
        now_s = time.perf_counter()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + _LOOK_EVERY_S
        self._kernel.pids = family_of(pid)
        return True

    def _in_its_run(
        self, loader: LoaderRecord, demands: Demands, run: Interval
    ) -> tuple[LoaderRecord, Demands, list[str], list[Lane]]:
        """Returns the loop to judge, what it asks, and where the other time of the run went, in words and to be drawn.

        That is `loader`'s, unless the first change to another one saves clearly more of the run, and a good part of it.
        """
        loops = [loader, *(one for one in self.records.loaders if one.process is loader.process and one is not loader)]
        calls = self.records.calls.get(loader.process["pid"], ())
        course = timeline(run, [one.passes for one in loops], calls)
        judged = {}
        for one, seconds in zip(loops, course.loops, strict=True):
            if one is loader or seconds >= _OTHER_LOOP * course.total_s:
                asked = demands if one is loader else self.demands(one)
                verdict = judge(asked)
                gain = verdict.cures[0].gain if verdict.worth_making else 1.0
                judged[one] = asked, verdict, seconds / course.total_s, seconds * (1 - 1 / gain)
        chosen = max(judged, key=lambda one: (judged[one][3], one is loader))
        # The gain of loops that ran while other programs did is not known.
        is_held = judged[loader][1].cause == OTHER_PROGRAMS
        if is_held or judged[chosen][3] < max(_GOOD_PART * course.total_s, _CLEARLY * judged[loader][3]):
            chosen = loader
        lines = course.described()
        for one, (_, verdict, share, _) in judged.items():
            name = f"the loop over {one.name} with {one.steps.count:,} steps"
            if len(judged) > 1 or lines:
                lines.append(f"{share:.0%} of the run: {name}" + (", judged here" if one is chosen else ""))
            if one is not chosen and not is_held:
                lines[-1] += f": {verdict.sentence}"
        drawn = [
            (f"{one.name}, {one.steps.count:,} steps" + ", judged" * (one is chosen), one.passes) for one in judged
        ]
        return chosen, judged[chosen][0], lines, lanes_of(run, drawn, calls)

    def readings_from(self, moment_s: float) -> tuple[Mapping[str, float], ...]:
        """Returns the readings from a moment on, counted from there: a script's imports are not part of its loop."""
        begin_s = max(0.0, moment_s - self._begun_s)
        readings = self._sampler.readings if self._sampler is not None else ()
        return tuple({**one, "at_s": one["at_s"] - begin_s} for one in readings if one["at_s"] >= begin_s)

    def demands(self, loader: LoaderRecord) -> Demands:
        """Returns what the loop over a loader asks of the machine."""
        self.records.read_making(loader)
        process = loader.process
        local_ranks = int(process["local_world"]) if process["local_world"].isdigit() else 1
        cpus = max(1, min(available_cpus(), process["cpus"]) // local_ranks)
        demands = demands_of(loader, cpus=cpus, waits=self._kernel.shares(loader.fetches))
        readings = self._sampler.readings if self._sampler is not None else ()
        spans = [(span.begin_s - self._begun_s, span.end_s - self._begun_s) for span in loader.passes]
        others_cpus, job_cpus = (look(readings, spans) / local_ranks for look in (mean_others, mean_cpus))
        return replace(demands, others_cpus=others_cpus, job_cpus=job_cpus)

    def measured(
        self, loader: LoaderRecord, *, title: str, command: str = "", run: Interval | None = None,
        alone_samples_per_s: float | None = None,
    ) -> Measured:  # fmt: skip
        """Ends the sampling, and returns everything known about one loader's loop, with the verdict.

        Given the begin and end of the script's run, it chooses among the process's loops the loop whose first change
        saves most of the run's time, and the evidence says where the rest of the run went. `alone_samples_per_s` is
        the rate of the step on one cached batch, if that was measured.
        """
        self._stop_sampling()
        demands, course, which, lanes = self.demands(loader), list[str](), "", list[Lane]()
        if run is not None:
            trains = loader
            loader, demands, course, lanes = self._in_its_run(loader, demands, run)
            name = f"{loader.name} with {loader.steps.count:,} steps"
            which = "" if loader is trains else f"in the loop over {name}, "
        steps = [record.step for record in loader.steps.kept]
        begun_s = steps[0].begin_s
        elapsed_s = loader.elapsed_s
        every = max(1, len(steps) // _SHOWN_STEPS)
        copy_s = statistics.fmean(step.copy_s for step in demands.steps)
        samples = loader.samples / loader.steps.count  # of a step
        if alone_samples_per_s:
            demands = replace(demands, alone_s=samples / alone_samples_per_s)
        verdict = _judged(demands, loader, course)
        verdict = replace(verdict, sentence=which + verdict.sentence)
        free_samples_per_s = samples / verdict.free_step_s if verdict.free_step_s else 0.0
        return Measured(
            title=title,
            command=command,
            steps=tuple(replace(step, begin_s=step.begin_s - begun_s) for step in steps[::every]),
            num_steps=loader.steps.count,
            elapsed_s=elapsed_s,
            samples_per_s=loader.samples / elapsed_s if elapsed_s else 0.0,
            stages=mean_stages(demands.batches) | {"copy to the device": WorkTime(copy_s)},
            headspace_samples_per_s=alone_samples_per_s or free_samples_per_s or None,
            headspace_how=HOW
            if alone_samples_per_s
            else "a step with a loader that costs nothing, as the verdict has it",
            readings=self.readings_from(begun_s),
            epochs_s=tuple(max(0.0, one.begin_s - begun_s) for one in loader.passes),
            verdict=verdict,
            facts=tuple(_facts(loader, self.records)),
            environment=environment() | {"the script's Python": loader.process["python"]},
            lanes=tuple(lanes),
            run_s=run.end_s - run.begin_s if run is not None else 0.0,
        )


def _judged(demands: Demands, loader: LoaderRecord, course: Sequence[str]) -> Verdict:
    """Returns the verdict on a loop; if FastLoader or a first worker may be the cure, after trials of their costs.

    A trial that fails is named in the evidence, and the verdict is the one without it.
    """
    demands = replace(demands, notes=(*demands.notes, *course))
    verdict = judge(demands)
    if demands.is_fastload or verdict.cause == OTHER_PROGRAMS:
        return verdict
    trials = {
        "its step": _with_format_trial,
        "a worker": _with_worker_trial,
        "batches of one tensor": _with_one_tensor_trial,
        "FastLoader": _with_fastloader_trial,
    }
    for what, trial in trials.items():
        is_due = verdict.worth_making or trial is _with_format_trial
        if not is_due and trial is _with_fastloader_trial:  # could it be worth it, if it cost nothing?
            free = replace(demands, by_fastloader=FastLoaderCosts(WorkTime()), keeps_transform=keeps_transform(loader))
            is_due = judge(free).worth_making
        if not is_due:
            continue
        try:
            tried = trial(demands, loader)
        except Exception as error:  # noqa: BLE001  # whatever this machine lacks for it, torch among it
            note = f"a trial of {what} failed, so that its costs count as none: {type(error).__name__}: {error}"
            tried = replace(demands, notes=(*demands.notes, note))
        if tried is not demands:
            demands, verdict = tried, judge(tried)
    return verdict


def _with_format_trial(demands: Demands, loader: LoaderRecord) -> Demands:
    """Returns the demands with what a step costs by the memory format of its images, where it works on CPUs."""
    if demands.on_device or loader.recorded is None:
        return demands
    costs = measure_formats(loader.recorded, costs_of(demands).model.own_s)
    if costs is None:
        return demands
    note = (
        f"a trial here: the operations of a step take {seconds_text(costs.contiguous_s)} with images that lie as in "
        f"these batches, {seconds_text(costs.channels_last_s)} with images in channels_last memory"
    )
    if costs.left_out:
        note += f"; {costs.left_out} of {len(loader.recorded.operations)} could not be played again, and are left out"
    return replace(demands, by_format=costs, notes=(*demands.notes, note))


def _with_worker_trial(demands: Demands, loader: LoaderRecord) -> Demands:
    """Returns the demands with what a first worker costs."""
    if not loader.sizes or demands.by_threads:
        return demands
    return replace(demands, by_a_worker=measure_worker(loader.sizes))


def _with_one_tensor_trial(demands: Demands, loader: LoaderRecord) -> Demands:
    """Returns the demands with what batches of one tensor cost to hand over, where batches of several cost much."""
    if len(loader.sizes) < 2 or all(cure.cause != "hand-over" for cure in judge(demands).cures):
        return demands
    costs = measure_worker(loader.sizes, as_one=True)
    note = (
        f"a trial here: copied into one tensor such a batch costs a worker {seconds_text(costs.batch.total_s)}, "
        f"and the loop {seconds_text(costs.receive_s)}"
    )
    return replace(demands, as_one_tensor=costs, notes=(*demands.notes, note))


def _with_fastloader_trial(demands: Demands, loader: LoaderRecord) -> Demands:
    """Returns the demands with what a FastLoader costs, where it could take the dataset's place."""
    keeps = keeps_transform(loader)
    plain = demands.plain
    # Where nothing is decoded and no transform is known, nothing says that these are images which can be packed.
    if not loader.shape or not (any(loader.decoded_size) or (plain.lists_transforms and not keeps)):
        return demands
    seen = ImagesSeen(loader.shape, plain.transforms, loader.decoded_size)
    found = costs_of(demands)
    model, made_s = found.model, statistics.fmean(batch.total_s for batch in found.model.batches)
    costs = measure_fastloader(
        seen,
        0.0 if demands.on_device else own_beside_fastloader_s(found, demands),
        model.own_cpus,
        around_s=around_s(found, demands),
        transforms=not keeps and not demands.timed_device,
        recorded=loader.recorded,
        pause_s=0.0 if model.workers else min(made_s, _LONG_S),
    )
    if keeps:
        which = "; the dataset's own transforms are left"
    elif demands.timed_device:
        which = "; their transforms are the device's work"
    elif plain.lists_transforms:
        which = ", with the dataset's transforms"
    else:
        which = f", with {', '.join(plain.added)} in place of the dataset's own code" if plain.added else ""
    note = (
        f"a trial here: FastLoader takes {seconds_text(costs.batch.running_s)} of CPU for such a batch, of images of "
        f"{seen.stored[0]}x{seen.stored[1]}{which}"
    )
    if costs.slows > _SLOWER:
        note += f"; steps next to it took {costs.slows:.2f} times as long, CPUs shared in proportion left out"
    return replace(demands, by_fastloader=costs, keeps_transform=keeps, notes=(*demands.notes, note))


def _facts(loader: LoaderRecord, records: RecordedEvents) -> list[tuple[str, str]]:
    facts = [("loader", f"{loader.facts['kind']} of {loader.name}")]
    if rank := loader.process["rank"]:
        ranks = {other.process["rank"] for other in records.loaders}
        facts.append(("rank", f"{rank}, which waits longest of {len(ranks)}"))
    facts.append(("epochs", f"{len(loader.epochs):,}"))
    others = [
        f"{other.name} {other.elapsed_s:.1f} s"
        for other in records.loaders
        if other is not loader and other.process is loader.process
    ]
    if others:
        facts.append(("other loaders", f"{', '.join(others)}; this one {loader.elapsed_s:.1f} s"))
    return facts


def _why_no_verdict(records: RecordedEvents, command: Sequence[str], ended: Ended, seconds: float | None) -> str:
    if ended.code and not ended.interrupted:
        return f"the command failed, with exit code {ended.code}, before it had used two batches of a DataLoader"
    if ended.interrupted and seconds is not None and ended.elapsed_s >= seconds:
        return advice("more seconds", seconds=f"{seconds:g}")
    if not records.num_processes:
        isolated = [word for word in command if re.match(r"-(?!-).*[IES]", word)]
        why = (
            f"Python was started with {isolated[0]}, which ignores PYTHONPATH or sitecustomize"
            if isolated
            else "the command started no Python, or one with -I, -E or -S (which ignore PYTHONPATH or sitecustomize), "
            "or one whose environment was cleared"
        )
        return f"nothing was recorded: {why}. {advice('without isolation')}"
    if not records.saw_torch:
        return advice("no DataLoader")
    return f"no DataLoader was iterated for two batches or more, so there is no step to measure. {advice('no steps')}"


def loader_that_binds(records: RecordedEvents) -> LoaderRecord | None:
    """Returns the loader with whose loop the job spends most of its time, on the rank that waits longest for it.

    A loop that trains comes before any that only validates.
    """
    if not records.loaders:
        return None
    most = max(records.loaders, key=lambda loader: (loader.trains, loader.elapsed_s))
    names = ("id", "kind", "workers", "dataset")  # the same loader of another rank has the same
    same = [loader for loader in records.loaders if all(loader.facts[name] == most.facts[name] for name in names)]
    return max(same, key=lambda loader: loader.wait_s)
