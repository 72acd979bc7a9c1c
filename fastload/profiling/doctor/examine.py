"""Runs a command under the doctor and returns its measurements and the verdict."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastload.profiling.doctor.command import Signals, check_command, run_command
from fastload.profiling.doctor.evidence import demands_of, loader_that_binds
from fastload.profiling.doctor.kernel import WaitSampler, WaitShares
from fastload.profiling.doctor.loader_records import LoaderRecord, RecordReader, Records
from fastload.profiling.meter.sampler import Sampler, environment, family_of
from fastload.profiling.verdict import Demands, judge
from fastload.system.machine import available_cpus
from fastload.timing.results import Measured, Step, Work

Look = Callable[[Records], None]

_FAMILY_EVERY_S = 1.0
_SAMPLE_EVERY_S = 0.25
_SHOWN_STEPS = 4000


@dataclass(frozen=True)
class Examined:
    """Result of a command.

    Attributes:
        code: the command's exit code.
        measured: with a verdict; without one if `why_no_verdict` is set.
        why_no_verdict: why nothing can be said; else empty.
        faults: failures of the injected module.
        so_far: whether the command was stopped early.
    """

    code: int
    measured: Measured
    why_no_verdict: str
    faults: tuple[str, ...] = ()
    so_far: bool = False


def examine(
    command: Sequence[str], signals: Signals, *, seconds: float | None = None, look: Look | None = None
) -> Examined:
    """Runs a command with each of its loaders timed, and judges the one that takes the most time.

    Args:
        command: as typed after `fastload doctor --`.
        signals: an entered `Signals`; signals that come while the records are read have to wait.
        seconds: after this time the command is interrupted; None: never.
        look: called about every second with the records so far; None: nothing is read until the end.

    Raises:
        OptionError, MissingFileError: the command cannot be run.
    """
    check_command(command)
    folder = Path(tempfile.mkdtemp(prefix="fastload-doctor-"))
    reader, kernel, sampler = RecordReader(folder), WaitSampler(), None
    begun_s = time.perf_counter()
    due_s = 0.0

    def watch(elapsed_s: float, pid: int) -> None:
        nonlocal due_s, sampler
        if sampler is None:
            sampler = Sampler(pid, every_s=_SAMPLE_EVERY_S, begun_s=begun_s).start()
        if elapsed_s < due_s:
            return
        due_s = elapsed_s + _FAMILY_EVERY_S
        kernel.watch(family_of(pid))
        if look is not None:
            look(reader.read())

    try:
        ended = run_command(command, folder, signals, seconds=seconds, look=watch)
        records = reader.read()
    finally:
        kernel.close()
        if sampler is not None:
            sampler.stop()
        shutil.rmtree(folder, ignore_errors=True)
    readings = sampler.readings if sampler is not None else ()
    absent = sampler.absent if sampler is not None else {}
    unread = tuple((name if name != "gpu" else "GPU", f"not read: {why}") for name, why in absent.items())
    loader = loader_that_binds(records)
    title = f"fastload doctor -- {shlex.join(command)}"
    if loader is None:
        why_no_verdict = _why_no_verdict(records, command)
        measured = Measured(title, title, elapsed_s=ended.elapsed_s, readings=readings, environment=environment())
    else:
        why_no_verdict = ""
        measured = measured_of(
            loader,
            records,
            readings=_from(readings, loader.steps[0].step.begin_s - begun_s),
            waits=kernel.shares(loader.fetches),
            title=title,
            command=title,
        )
    measured = replace(measured, facts=measured.facts + unread)
    return Examined(ended.code, measured, why_no_verdict, records.faults, ended.interrupted)


def _from(readings: Sequence[Mapping[str, float]], begin_s: float) -> tuple[Mapping[str, float], ...]:
    """Returns the readings from a moment on, counted from there: a script's imports are not part of its loop."""
    return tuple({**one, "at_s": one["at_s"] - begin_s} for one in readings if one["at_s"] >= begin_s)


def measured_of(
    loader: LoaderRecord,
    records: Records,
    *,
    readings: Sequence[Mapping[str, float]] = (),
    waits: WaitShares | None = None,
    title: str = "",
    command: str = "",
) -> Measured:
    """Returns everything known about one loader's loop, with the verdict."""
    cpus = max(1, min(available_cpus(), loader.process.cpus) // loader.process.local_ranks)
    demands = demands_of(loader, cpus=cpus, waits=waits or WaitShares())
    verdict = judge(demands)
    steps = [record.step for record in loader.steps]
    begun_s = steps[0].begin_s
    elapsed_s = loader.elapsed_s
    num_samples = sum(step.samples for step in steps)
    every = max(1, len(steps) // _SHOWN_STEPS)
    own_s = elapsed_s - sum(step.wait_s for step in steps) - demands.ended_s
    return Measured(
        title=title,
        command=command,
        steps=tuple(_since(step, begun_s) for step in steps[::every]),
        num_steps=len(steps),
        elapsed_s=elapsed_s,
        samples_per_s=num_samples / elapsed_s if elapsed_s else 0.0,
        stages=_mean_work(demands),
        headspace_samples_per_s=num_samples / own_s if own_s > 0 and num_samples else None,
        headspace_how="the steps' own time, without their waits",
        readings=tuple(readings),
        verdict=verdict,
        facts=tuple(_facts(loader, records)),
        environment=environment() | {"the script's Python": loader.process.python},
    )


def _since(step: Step, begun_s: float) -> Step:
    """Returns the step with its start counted from `begun_s`."""
    return replace(step, begin_s=step.begin_s - begun_s)


def _mean_work(demands: Demands) -> dict[str, Work]:
    """Returns the mean cost of a batch by stage."""
    count = max(1, len(demands.batches))
    total: dict[str, Work] = {}
    for batch in demands.batches:
        for stage, work in batch.stages.items():
            total[stage] = total.get(stage, Work()) + work
    copy_s = sum(step.copy_s for step in demands.steps) / len(demands.steps)
    means = {stage: Work(work.running_s / count, work.blocked_s / count) for stage, work in total.items()}
    return means | {"copy to the device": Work(copy_s)}


def _facts(loader: LoaderRecord, records: Records) -> list[tuple[str, str]]:
    """Returns further facts for reports."""
    facts = [("loader", f"{loader.facts['kind']} of {loader.facts['dataset']}")]
    if loader.process.rank:
        ranks = {other.process.rank for other in records.loaders}
        facts.append(("rank", f"{loader.process.rank}, which waits longest of {len(ranks)}"))
    facts.append(("epochs", f"{len(loader.epochs):,}"))
    others = [other for other in records.loaders if other is not loader and other.process is loader.process]
    if others:
        shares = ", ".join(f"{other.facts['dataset']} {other.elapsed_s:.1f} s" for other in others)
        facts.append(("other loaders", f"{shares}; this one {loader.elapsed_s:.1f} s"))
    return facts


def _why_no_verdict(records: Records, command: Sequence[str]) -> str:
    """Returns why there is nothing to judge."""
    if not records.processes:
        isolated = [
            word for word in command if word.startswith("-") and not word.startswith("--") and set(word) & set("IES")
        ]
        why = (
            f"Python was started with {isolated[0]}, which ignores PYTHONPATH or sitecustomize"
            if isolated
            else "the command started no Python, or one with -I, -E or -S (which ignore PYTHONPATH or sitecustomize), "
            "or one whose environment was cleared"
        )
        return f"nothing was recorded: {why}. Start it without that, or use fastload.diagnose(loader) in it"
    if not records.saw_torch:
        return "the command's Python never used torch's DataLoader, so there is no wait to measure; use fastload.Meter"
    return (
        "no DataLoader was iterated for two batches or more, so there is no step to measure. Does the script load its "
        "data in another way? Then use fastload.Meter in it"
    )
