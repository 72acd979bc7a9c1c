"""The input of a verdict: a loop's measured steps and batches (`Demands`), and what they cost (`Costs`)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fastload.profiling.verdict.loop_model import (
    Contention,
    FastLoaderCosts,
    FormatCosts,
    LoopModel,
    WorkerCosts,
    fitted,
    own_time,
)
from fastload.profiling.verdict.replacement import PlainLoader
from fastload.timing.results import NETWORK, STAGES, WAITING, BatchWork, LoopStep, NetworkUse, WorkTime

MAKING_STAGES = STAGES[:-1]
"""The stages of making a batch before its copy to the device, in order."""

BY_FASTLOAD = ("reading", "decoding", "collate", "hand-over", "lock contention")
"""The stages of making a batch that cost nothing when images are packed and loaded by FastLoader."""

PACKED = ("reading", "decoding", "collate", "lock contention")
"""Causes whose cure is to pack the images and to load them by FastLoader."""

_PICKLED = 3.0  # times what tensors of so many bytes cost; who costs more is pickled
_LEAST_OWN = 0.3  # of a step, that is not spent on mapping memory, nor saved by another memory format


@dataclass(frozen=True)
class Demands:
    """One loader's batches and the steps that used them, whoever recorded them; all times in seconds."""

    batches: tuple[BatchWork, ...]  # their costs, in the order of the steps, as far as they are known
    steps: tuple[LoopStep, ...]  # of the loop that asked for the batches; of a long run an evenly spaced part
    workers: int  # threads or processes that make batches; 0: the loop makes them itself
    ahead: int  # batches that may be in progress or ready at once
    cpus: int  # that the job may use
    num_steps: int = 0  # number of all steps; 0: `steps` are all
    # For each epoch with a batch, the time from asking for its iterator to its first batch, and the loop's wait at its
    # end, which found no more batches and belongs to no step
    epochs: tuple[tuple[float, float], ...] = ()
    # For each of `epochs`, how long after asking for its iterator the workers began on its first batch, with what that
    # one cost beyond usual ones; empty: not known
    starts_s: tuple[float, ...] = ()
    receive_s: float = 0.0  # mean CPU time of the loop for receiving a batch, part of its wait
    usual_receive_s: float = 0.0  # the median of these times
    wrapped: bool = False  # whether that is, in part, the work of another loader around this one, such as timm's
    # Mean time that receiving a batch waits for the worker that made it: a thread of that process passes the memory on,
    # and gets its GIL late while it runs Python
    receive_blocked_s: float = 0.0
    step_running_s: float = 0.0  # mean CPU time of the loop's process, all threads, in a step outside its wait
    other_loaders_s: float = 0.0  # mean time in a step that the loop waited for batches of other loaders
    step_runnable_s: float = 0.0  # mean time in a step, outside its wait, in which the loop's thread lacked a CPU
    # A trial: workers allowed to work at once, mean seconds of a step with those, and with all; None: there was none
    fewer_workers: tuple[int, float, float] | None = None
    by_threads: bool = False  # whether workers are threads of the loop's process
    persistent: bool = False  # whether workers live from epoch to epoch
    is_fastload: bool = False  # whether the loader is a FastLoader
    timed_device: bool = False  # whether steps were timed on a device, which works while the loop goes on
    device_s: float = 0.0  # time of a step on it, waits for its batch left out; 0: take the time of `steps`
    host_s: float = 0.0  # time of the loop in such a step, waits for the device left out
    # Time of a step on a batch that lies ready, without a loader, measured in the same process; 0: it was not measured
    alone_s: float = 0.0
    by_fastloader: FastLoaderCosts | None = None  # as measured in a trial; None: there was none
    by_a_worker: WorkerCosts | None = None  # as measured in a trial; None: there was none
    by_format: FormatCosts | None = None  # of its network, as measured in a trial; None: there was none
    channels: int = 3  # of its images
    as_one_tensor: WorkerCosts | None = None  # the same of a batch that is one tensor
    keeps_transform: bool = True  # whether it would have to run the dataset's own transforms, too
    # For each of `steps`, the CPUs that workers used while it did its own work; empty: not known
    contending: tuple[float, ...] = ()
    others_cpus: float = 0.0  # CPUs of this rank that other programs used meanwhile
    job_cpus: float = 0.0  # CPUs that all processes of the job used, for each rank; 0: take its batches' and steps'
    waits_only: str = ""  # why nobody saw what batches cost, and who does: a `Meter` does not in other loaders
    # Of a packed file whose images are decoded on the fly, bytes of the pixels over bytes in the file; 0: of no such
    compression_ratio: float = 0.0
    network: NetworkUse | None = None  # what came over it meanwhile; None: the data are on this machine, or not seen
    waits_at: str = ""  # the line of the dataset's code that sleeps or waits for the network most of the time
    waits_shared: bool = False  # whether workers were seen to wait longer the more of them did
    plain: PlainLoader = field(default_factory=PlainLoader)  # what a FastLoader in its place depends on
    tensors: int = 0  # in a batch; 0: not known
    images: bool = True  # False: its batches are known to hold no images of one size, which could be packed
    notes: tuple[str, ...] = ()  # further evidence, a line each, such as the line of code that takes longest

    @cached_property
    def startups_s(self) -> tuple[float, ...]:
        """For each epoch, the time of its first batch beyond a usual one, plus its end's; empty without workers."""
        if not self.workers:
            return ()
        if self.starts_s:
            return tuple(start_s + end_s for start_s, (_, end_s) in zip(self.starts_s, self.epochs, strict=True))
        if made_s := [batch.runnable_s + batch.total_s for batch in self.batches if batch.stages]:
            usual_s = self.receive_s + self.receive_blocked_s + statistics.median(made_s)
        else:
            usual_s = statistics.median([step.wait_s for step in self.steps] or [0.0])
        return tuple(max(0.0, first_s - usual_s) + end_s for first_s, end_s in self.epochs)

    @property
    def on_device(self) -> bool:
        """Whether a device does the work of a step: it was timed, or the loop's process hardly runs meanwhile."""
        own_s = sum(step.duration_s - step.wait_s for step in self.steps) / len(self.steps)
        return self.timed_device or self.step_running_s + self.step_runnable_s < 0.5 * own_s

    @property
    def packs_transform(self) -> bool:
        """Whether a FastLoader was tried that would do the dataset's transforms, too."""
        return self.by_fastloader is not None and not self.keeps_transform and not self.is_fastload

    @property
    def operations_s(self) -> tuple[float, float]:
        """Seconds of a step's operations, and between them, by its images' memory format; infinite: not known.

        The first is of contiguous images, the second of those in channels_last memory.
        """
        costs = self.by_format
        if costs is None:
            return math.inf, math.inf
        unmap_s = self.by_a_worker.unmap_s if self.by_a_worker is not None and self.workers else 0.0
        between_s = max(0.0, costs.between_s - unmap_s) + self.other_loaders_s
        return costs.contiguous_s + between_s, costs.channels_last_s + between_s

    @property
    def ended_s(self) -> float:
        """Waits at the ends of all epochs."""
        return sum(end_s for _, end_s in self.epochs)

    def per_step(self, seconds: float) -> float:
        """Returns the share of each step in a time of the whole run."""
        return seconds / (self.num_steps or len(self.steps))


@dataclass(frozen=True)
class Costs:
    """The costs of batches and steps, made from `Demands` by `costs_of`; means per batch or per step, in seconds."""

    # Time to make each batch by stage, as it was measured. `lock contention` and `a slow sample now and then` are
    # entries of their own, taken out of the stages in which they happen
    batches: tuple[Mapping[str, WorkTime], ...]
    stages: Mapping[str, WorkTime]  # their means
    copy_s: float  # time of the loop to bring a batch to the device
    transform_s: float  # time of the loop to transform a batch when it is received
    compute_s: float  # the rest of a step's own time
    model: LoopModel  # the loop, with costs that make its steps as long as the measured ones
    scale: float  # of the measured costs of a batch, to give the model's
    rest: float  # measured time of a step over the model's

    @property
    def make_s(self) -> float:
        """Time of one worker to make one batch, if it always has a CPU."""
        return sum(work.total_s for work in self.stages.values())

    @property
    def waits_for_network(self) -> bool:
        """Whether most of a batch's time is the wait for the network, of which more workers get no more."""
        waits_s = self.stages.get(NETWORK, WorkTime()).total_s
        return waits_s > 0 and waits_s == max(work.total_s for work in self.stages.values())

    @property
    def own_s(self) -> float:
        """Time of a step after its batch was received."""
        return self.copy_s + self.transform_s + self.compute_s

    def step_s(self, model: LoopModel) -> float:
        """Returns the time of a step of a changed loop."""
        return self.rest * model.played().step_s

    def without(self, *causes: str) -> LoopModel:
        """Returns the loop after causes are removed."""
        made = [sum((work for name, work in batch.items() if name not in causes), WorkTime()) for batch in self.batches]
        batches = tuple(WorkTime(self.scale * work.running_s, self.scale * work.blocked_s) for work in made)
        gone_s = self.copy_s * ("copy to the device" in causes) + self.transform_s * ("transform" in causes)
        left = 1 - gone_s / self.own_s if self.own_s > 0 else 1.0
        model = replace(self.model, batches=batches or self.model.batches, own_s=left * self.model.own_s)
        if "hand-over" in causes:
            return replace(model, receive_s=0.0, receive_blocked_s=0.0)
        # A worker that runs less Python gives its GIL sooner to the thread that passes the batch's memory on.
        before_s, after_s = (sum(work.running_s for work in works) for works in (self.model.batches, batches))
        return replace(model, receive_blocked_s=model.receive_blocked_s * after_s / before_s if before_s > 0 else 0.0)

    def with_workers(self, workers: int, by_a_worker: WorkerCosts | None = None) -> LoopModel:
        """Returns the loop with another number of workers; `by_a_worker` is as in `Demands`."""
        model = self.model
        share = workers / max(1, model.workers)
        starts = max(model.cpus, workers) / max(model.cpus, model.workers)  # all at once, as far as there are CPUs
        if not model.workers and by_a_worker is not None:
            start_s, receive_s = by_a_worker.start_s, by_a_worker.receive_s
            batches = tuple(batch + by_a_worker.batch for batch in model.batches)
            model = replace(model, batches=batches, own_s=model.own_s + by_a_worker.mapping_s)
            model = replace(model, receive_s=receive_s, startup_s=start_s, restart_s=start_s)
        return replace(
            model,
            workers=workers,
            ahead=max(2 * workers, model.ahead) if not model.workers else round(model.ahead * share),
            startup_s=model.startup_s * starts,
            restart_s=model.restart_s * starts,
            receive_blocked_s=model.receive_blocked_s * min(1.0, share),
        )


def loop_packed(costs: Costs, demands: Demands) -> LoopModel:
    """Returns the loop with a FastLoader over packed images.

    What it makes a batch for is `demands.by_fastloader`, nothing where that is not known. Transforms that it cannot
    do are left, in worker processes as before.
    """
    made = demands.by_fastloader or FastLoaderCosts(WorkTime())
    saved_s = saved_by_channels_last_s(costs, demands)
    if demands.keeps_transform:
        model = costs.without(*BY_FASTLOAD)
        batches = tuple(batch + made.batch for batch in model.batches)
        return replace(model, batches=batches, own_s=model.own_s - saved_s, restart_s=0.0, end_s=0.0)
    model = costs.without(*BY_FASTLOAD, "transform")
    own_s = own_beside_fastloader_s(costs, demands)
    steps = made.loop(own_s, model.own_cpus, model.cpus)
    epochs = replace(steps, device_s=model.device_s, steps=model.steps, epochs=model.epochs)
    return replace(epochs, startup_s=made.begin_s, restart_s=made.begin_s)  # no process starts


def own_beside_fastloader_s(costs: Costs, demands: Demands) -> float:
    """Returns a step's own time on a FastLoader's batches, which lie in memory that is used again and again.

    It is the measured time without mapping new memory for each batch, but at most the time of the step's
    operations and between them. Steps after which the loop waits, during workers' work or after it, begin
    with cold caches.
    """
    own_s = costs.model.own_s
    mapping_s = 0.0 if demands.wrapped else _worker(costs, demands).mapping_s
    fed_s = max(own_s - mapping_s - saved_by_channels_last_s(costs, demands), _LEAST_OWN * own_s)
    return min(fed_s, demands.operations_s[1]) + around_s(costs, demands)


def around_s(costs: Costs, demands: Demands) -> float:
    """Returns the time that a loader around the replaced one spends on each batch in the loop's process.

    It reads a worker's batch before the loop does, and releases it.
    """
    worker = _worker(costs, demands)
    return max(0.0, demands.usual_receive_s - worker.receive_s - worker.mapping_s) if demands.wrapped else 0.0


def _worker(costs: Costs, demands: Demands) -> WorkerCosts:
    """Returns what its workers cost, as measured in a trial; nothing without any."""
    known = demands.by_a_worker if costs.model.workers else None
    return known or WorkerCosts(WorkTime())


def loop_with_channels_last(costs: Costs, demands: Demands) -> LoopModel:
    """Returns the loop that brings each batch's images into channels_last memory first."""
    convert_s = demands.by_format.convert_s if demands.by_format is not None else 0.0
    return replace(costs.model, own_s=costs.model.own_s + convert_s - saved_by_channels_last_s(costs, demands))


def saved_by_channels_last_s(costs: Costs, demands: Demands) -> float:
    """Returns what a step saves on images in channels_last memory, the memory format of FastLoader."""
    formats = demands.by_format
    if formats is None or formats.contiguous_s <= 0:
        return 0.0
    # Played again, they may take longer.
    part = min(1.0, costs.model.own_s / formats.contiguous_s)
    return min(part * (formats.contiguous_s - formats.channels_last_s), (1 - _LEAST_OWN) * costs.model.own_s)


def loop_with_one_tensor(costs: Costs, demands: Demands, one: WorkerCosts) -> LoopModel:
    """Returns the loop whose batches are handed over as one tensor each, at such costs in a trial.

    Where a trial with as many tensors as now says what these cost, that in the script becomes less, or more, in
    proportion. It does not where either side takes far longer there: then batches are pickled.
    """
    model, without, now_s = costs.model, costs.without("hand-over"), costs.stages["hand-over"].total_s
    several, receive_s = demands.by_a_worker, 0.0 if demands.wrapped else demands.usual_receive_s
    if several is None or now_s > _PICKLED * several.batch.total_s or receive_s > _PICKLED * several.receive_s:
        batches = tuple(batch + one.batch for batch in without.batches)
        return replace(without, batches=batches, receive_s=one.receive_s)
    handed_s = costs.scale * now_s * one.batch.total_s / several.batch.total_s
    taken = min(1.0, one.receive_s / several.receive_s) if several.receive_s > 0 else 1.0
    return replace(
        without,
        batches=tuple(batch + WorkTime(handed_s) for batch in without.batches),
        receive_s=taken * model.receive_s,
        receive_blocked_s=taken * model.receive_blocked_s,
    )


def costs_of(demands: Demands) -> Costs:
    """Returns what the batches and steps cost."""
    steps = demands.steps
    batches = _with_causes(demands)
    copy_s, transform_s, compute_s = (
        statistics.fmean(getattr(step, name) for step in steps) for name in ("copy_s", "transform_s", "compute_s")
    )
    own_s = [step.copy_s + step.transform_s + step.compute_s for step in steps]
    contention, device_s, host_s = Contention(), demands.device_s, demands.host_s
    # A batch that lies ready was copied and transformed before.
    ready_s = demands.alone_s + copy_s + transform_s if demands.alone_s else 0.0
    if ready_s and demands.timed_device:
        device_s, host_s = ready_s, host_s or demands.step_running_s
    if demands.on_device and (device_s or not ready_s):
        compute_s = max(compute_s, _device_step_s(steps))
        alone_s = host_s if device_s else copy_s + transform_s + compute_s
    else:
        # An epoch's last batch may be a part of one.
        full = 0.9 * max(step.samples for step in steps)
        wanted = demands.contending or _contending(demands)
        whole = [number for number, step in enumerate(steps) if step.samples >= full]
        alone_s, contention = own_time(
            [own_s[number] for number in whole], [wanted[number] for number in whole],
            demands.step_running_s, demands.cpus, ready_s,
        )  # fmt: skip
    own_cpus = demands.step_running_s / alone_s if alone_s > 0 else 0.0
    starts, epochs = demands.startups_s, max(1, len(demands.epochs))
    model = LoopModel(
        batches=tuple(sum(batch.values(), WorkTime()) for batch in batches) or (WorkTime(),),
        workers=demands.workers,
        ahead=max(demands.ahead, demands.workers),
        in_turn=not demands.by_threads,
        cpus=max(1, demands.cpus),
        receive_s=demands.receive_s,
        receive_blocked_s=demands.receive_blocked_s,
        own_s=alone_s,
        own_cpus=min(float(demands.cpus), own_cpus),
        device_s=device_s,
        contention=contention,
        startup_s=starts[0] if starts else 0.0,
        restart_s=statistics.fmean(starts[1:]) if len(starts) > 1 else 0.0,
        steps=max(1, round((demands.num_steps or len(steps)) / epochs)),
        epochs=epochs,
    )
    measured_s = statistics.fmean(step.duration_s for step in steps) + demands.per_step(demands.ended_s)
    found, rest = fitted(model, measured_s)
    before_s, after_s = (sum(work.total_s for work in one.batches) for one in (model, found))
    return Costs(
        batches=batches,
        stages={name: sum((batch[name] for batch in batches), WorkTime()) / len(batches) for name in batches[0]}
        if batches else {},
        copy_s=copy_s,
        transform_s=transform_s,
        compute_s=compute_s,
        model=found,
        scale=after_s / before_s if before_s else 1.0,
        rest=rest,
    )  # fmt: skip


def _contending(demands: Demands) -> list[float]:
    """Returns for each step about how many CPUs workers use: none where as many batches lie ready as ever."""
    steps = demands.steps
    mean_s = statistics.fmean(step.duration_s for step in steps)
    if not demands.workers or not mean_s:
        return [0.0] * len(steps)
    running_s = sum(work.running_s for batch in demands.batches for work in batch.stages.values())
    mean = running_s / max(1, len(demands.batches)) / mean_s
    most = max((step.queue_depth or 0 for step in steps), default=0)
    return [0.0 if most and step.queue_depth == most else mean for step in steps]


def _with_causes(demands: Demands) -> tuple[dict[str, WorkTime], ...]:
    """Returns the stages of each batch, and what lock contention and slow samples take of them."""
    found = []
    slow_s = _beyond_level([batch.total_s for batch in demands.batches], sum(one.slow_s for one in demands.batches))
    for batch, slow in zip(demands.batches, slow_s, strict=True):
        stages = dict.fromkeys(MAKING_STAGES, WorkTime()) | dict(batch.stages)
        # A FastLoader reads without a lock: what looks like one is its threads waiting for the GIL, or for the disk.
        _move(stages, "lock contention", 0.0 if demands.is_fastload else batch.lock_s, running=False)
        _move(stages, "a slow sample now and then", slow, running=True)
        found.append(stages)
    return tuple(found)


def _beyond_level(times_s: Sequence[float], excess_s: float) -> list[float]:
    """Returns what each time exceeds the level by above which lies `excess_s` in all."""
    if not excess_s:
        return [0.0] * len(times_s)
    ordered, above, level = sorted(times_s, reverse=True), 0.0, 0.0
    for count, (this, below) in enumerate(itertools.pairwise([*ordered, 0.0]), 1):
        if above + count * (this - below) >= excess_s:
            level = this - (excess_s - above) / count
            break
        above += count * (this - below)
    return [max(0.0, time - level) for time in times_s]


def _move(stages: dict[str, WorkTime], cause: str, cost_s: float, *, running: bool) -> None:
    """Moves blocked seconds, and running ones if asked for, out of the stages in proportion into an entry `cause`."""
    names = ("reading", "decoding", "transform", *([WAITING] if running else []))
    sources = {stage: stages[stage] for stage in names}
    total = sum(work.blocked_s + running * work.running_s for work in sources.values())
    share = min(1.0, cost_s / total) if total > 0 else 0.0
    stages[cause] = WorkTime()
    for stage, work in sources.items():
        running_s, blocked_s = running * share * work.running_s, share * work.blocked_s
        stages[cause] += WorkTime(running_s, blocked_s)
        stages[stage] = WorkTime(work.running_s - running_s, work.blocked_s - blocked_s)


def _device_step_s(steps: Sequence[LoopStep]) -> float:
    """Returns the time of a step on a device that works asynchronously, 0.0 when it is not known.

    A loop that only launches kernels goes on at once while the device is idle. When several batches are ready in a row,
    the loop waits for the device inside the step instead: the median of such steps is the device's time.
    """
    mean_s = statistics.fmean(step.duration_s for step in steps)
    ready = [
        second.compute_s
        for first, second in itertools.pairwise(steps)
        if max(first.wait_s, second.wait_s) < 0.1 * mean_s
    ]
    return min(statistics.median(ready), mean_s) if len(ready) >= 4 else 0.0
