"""Makes the input of a verdict on a loop, `Demands`, from records of its steps and of how batches were made."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fastload.profiling.doctor.kernel import WaitShares
from fastload.profiling.doctor.loader_records import Fetch, LoaderRecord
from fastload.profiling.doctor.trials import ImagesSeen
from fastload.profiling.verdict import Demands
from fastload.profiling.verdict.replacement import PlainLoader, completed, is_known, our_name
from fastload.system.advice import advice
from fastload.system.text import seconds_text
from fastload.timing.results import WAITING, BatchWork, LoopStep, WorkTime

# The first steps of a run include compilation, allocation and warm-up.
_WARM_UP = 2
_MIN_STEPS = 10


def demands_of(loader: LoaderRecord, *, cpus: int, waits: WaitShares | None = None) -> Demands:
    """Returns what the loop over a loader, of at least one step, asks of the machine.

    Its process, workers included, may use so many `cpus`. Waits that nothing else explains are divided as the kernel
    saw them.
    """
    facts, trials = loader.facts, loader.trials
    held_back = [(a["t"], b["t"]) for a, b in itertools.pairwise(trials) if b["limit"] and not a["limit"]]
    undisturbed = [one for one in loader.steps.kept if not any(a <= one.step.begin_s < b for a, b in held_back)]
    records = undisturbed or loader.steps.kept
    steps = [record.step for record in records]
    if len(steps) >= _MIN_STEPS:  # the first ones are taken to be as the usual ones, to leave out warm-up
        usual_s = statistics.median(step.compute_s for step in steps[_WARM_UP:])
        steps[:_WARM_UP] = [replace(step, compute_s=min(step.compute_s, usual_s)) for step in steps[:_WARM_UP]]
    gpu_s = [record.gpu_s for record in records if record.gpu_s is not None]
    workers = facts["workers"]
    begun = first_of_workers(loader.fetches) if loader.fetch_stride == 1 else set()
    later = [fetch for number, fetch in enumerate(loader.fetches) if number not in begun]
    slow_s, slow_note = slow_samples(later)
    notes = [
        f"{facts['kind']} of {loader.name}, batch_size {facts['batch_size'] or None}, num_workers {workers}"
        + (", persistent" if facts["persistent"] else "")
    ]
    waits_at, places = seen_at_work(loader)
    waits_shared, beside_others = False, list[str]()
    if workers and loader.fetches and loader.fetch_stride == 1:
        waits_shared, beside_others = shares_its_waits(loader.fetches)
    notes += [*places, *beside_others]
    fewer_workers = None
    few, full = ([one for one in trials if bool(one["limit"]) == limited] for limited in (True, False))
    if few and full:
        few_s, full_s = (statistics.median(one["s"] / one["steps"] for one in ones) for ones in (few, full))
        fewer_workers = few[0]["limit"], few_s, full_s
        notes.append(
            f"with {few[0]['limit']} of {workers} workers allowed to work at once a step took {seconds_text(few_s)}, "
            f"with all {seconds_text(full_s)} (a trial while the script ran, in turn)"
        )
    return Demands(
        batches=tuple(
            _times(replace(explained(fetch, waits or WaitShares()), slow_s=slow_s), part * loader.inner_per_batch)
            for fetch, part in zip(loader.fetches, _later_parts(loader.fetches, begun), strict=True)
        ),
        steps=tuple(steps),
        workers=workers,
        ahead=facts.get("ahead", round(workers * facts["prefetch"] / loader.inner_per_batch)),
        cpus=cpus,
        num_steps=len(steps) * loader.steps.stride,
        epochs=tuple(loader.epochs),
        starts_s=starts(loader),
        receive_s=statistics.fmean(record.receive.running_s for record in records) if workers else 0.0,
        usual_receive_s=statistics.median(record.receive.running_s for record in records) if workers else 0.0,
        receive_blocked_s=statistics.fmean(record.receive.blocked_s for record in records) if workers else 0.0,
        wrapped=loader.inner > 0 and loader.inner_per_batch == 1.0,
        step_running_s=statistics.fmean(record.running_s for record in records),
        other_loaders_s=statistics.fmean(record.others_s for record in records),
        step_runnable_s=statistics.fmean(record.runnable_s for record in records),
        by_threads=facts.get("by_threads", False),
        timed_device=bool(gpu_s),
        device_s=statistics.median(gpu_s) if gpu_s else 0.0,
        host_s=sorted(record.host_s for record in records)[len(records) // 10],
        contending=contending(loader.fetches, loader.fetch_stride, steps) if workers else (),
        fewer_workers=fewer_workers,
        persistent=facts["persistent"],
        is_fastload=facts["kind"].startswith("fastload."),
        compression_ratio=facts.get("compression_ratio", 0.0),
        waits_at=waits_at,
        waits_shared=waits_shared,
        network=loader.network,
        plain=plain_loader(loader),
        tensors=len(loader.sizes),
        channels=loader.shape[1] if loader.shape else 0,
        images=bool(loader.shape or not (loader.sizes and loader.fetches)),
        waits_only=unseen(loader),
        notes=(*notes, *slow_note),
    )


def plain_loader(loader: LoaderRecord) -> PlainLoader:
    """Returns what a FastLoader in a loader's place depends on."""
    facts, (height, width), shape = loader.facts, loader.decoded_size, loader.shape
    listed = tuple(our_name(one) for one in facts.get("transforms", ()))
    transforms, added = listed, tuple[str, ...]()
    if shape:
        images = ImagesSeen(shape)
        transforms, added = completed(
            listed,
            channels=images.channels,
            size=images.size,
            # A loader around another one may get floating-point images from it.
            floating="float" in loader.dtype and not loader.inner,
            resized=bool(height) and (height, width) != images.size,
            calls=[call for _, call in loader.seen_at("call")],
        )
    return PlainLoader(
        root=facts.get("root", ""),
        split=facts.get("split", ""),
        is_part=facts.get("is_part", False),
        num_samples=max(0, facts["length"]),
        same_labels=facts.get("same_labels", False),
        masks=facts.get("masks", False),
        batch_size=facts["batch_size"] or (*shape, 0)[0],
        sampler=facts["sampler"],
        drop_last=facts["drop_last"],
        transforms=transforms,
        added=added,
        own_transforms=tuple(facts.get("own_transforms", ())),
        lists_transforms=bool(listed),
    )


def _later_parts(fetches: Sequence[Fetch], begun: set[int]) -> list[float]:
    """Returns 1.0 for each batch; for workers' first ones, `begun`, what of them a later one costs.

    The rest is part of the worker's start: see `starts`.
    """
    costs_s = [fetch.work.total_s for fetch in fetches]
    later_s = statistics.median([cost_s for number, cost_s in enumerate(costs_s) if number not in begun] or [0.0])
    return [min(1.0, later_s / max(cost_s, 1e-9)) if number in begun else 1.0 for number, cost_s in enumerate(costs_s)]


def starts(loader: LoaderRecord) -> tuple[float, ...]:
    """Returns `Demands.starts_s` of a loop; empty if the making of each epoch's first batch was not seen."""
    fetches = sorted((fetch for fetch in loader.fetches if fetch.wall_s > 0), key=lambda fetch: fetch.begin_s)
    begun = first_of_workers(fetches)
    costs_s = sorted(fetch.work.total_s for number, fetch in enumerate(fetches) if number not in begun)
    begins = [fetch.begin_s for fetch in fetches]
    found = []
    for span in loader.passes:
        number = bisect.bisect_left(begins, span.begin_s)
        if number < len(fetches) and fetches[number].begin_s < span.end_s:
            first = fetches[number]
            usual_s = costs_s[int(0.9 * len(costs_s))]
            found.append(first.begin_s - span.begin_s + max(0.0, first.work.total_s - usual_s))
    return tuple(found) if loader.fetch_stride == 1 and len(found) == len(loader.epochs) else ()


def _times(work: BatchWork, count: float) -> BatchWork:
    """Returns the cost of so many batches."""
    stages = {name: WorkTime(one.running_s * count, one.blocked_s * count) for name, one in work.stages.items()}
    slow_s, lock_s, runnable_s = (count * seconds for seconds in (work.slow_s, work.lock_s, work.runnable_s))
    return replace(work, stages=stages, slow_s=slow_s, lock_s=lock_s, runnable_s=runnable_s)


def contending(fetches: Sequence[Fetch], stride: int, steps: Sequence[LoopStep]) -> tuple[float, ...]:
    """Returns for each step the mean number of CPUs that makers of batches wanted while it did its own work.

    Every `stride`-th batch is among the fetches. Empty: it is not known when batches were made.
    """
    spans = []
    for fetch in fetches:
        if fetch.wall_s > 0:  # and then it is handed over
            end_s = fetch.begin_s + fetch.wall_s + fetch.work.stages.get("hand-over", WorkTime()).running_s
            spans.append((fetch.begin_s, end_s, fetch.work))
    if not spans:
        return ()
    spans.sort(key=lambda span: span[0])
    begins, longest_s = [span[0] for span in spans], max(end - begin for begin, end, _ in spans)
    found = []
    for step in steps:
        first_s, last_s = step.begin_s + step.wait_s, step.begin_s + step.duration_s
        wanted_s = 0.0
        for begin_s, end_s, work in spans[
            bisect.bisect_left(begins, first_s - longest_s) : bisect.bisect_left(begins, last_s)
        ]:
            blocked_s = sum(stage.blocked_s for stage in work.stages.values())
            running_s = sum(stage.running_s for stage in work.stages.values()) + work.runnable_s
            together_s = min(end_s, last_s) - max(begin_s, first_s)
            wanted_s += max(0.0, together_s) * (running_s / (running_s + blocked_s) if running_s else 0.0)
        found.append(stride * wanted_s / max(last_s - first_s, 1e-9))
    return tuple(found)


_SHARES = 0.05  # of the time of making a batch; calls that take less are not named
_MOST_CALLS = 3
_IMAGE_LIBRARIES = ("PIL.", "cv2.", "torchvision.", "albumentations.", "kornia.", "skimage.")
# Methods and functions of tensors and arrays by which images become floats, as they do in a FastLoader.
_CONVERTS = frozenset({
    "array", "asarray", "astype", "clone", "contiguous", "copy", "div", "div_", "float", "from_numpy", "mul", "mul_",
    "permute", "sub", "sub_", "tensor", "to", "transpose", "true_divide",
})  # fmt: skip
_BEGINS = 2.0  # times as much as a usual batch costs a worker's first one, from which on it is part of its start
_LEAST_FEW, _LEAST_MANY = 2, 10  # waits; of fewer nothing is concluded

# Packages whose loaders make batches where nothing is timed, by the first part of their name, and their advice.
_MAKERS = {"nvidia": "DALI", "ffcv": "FFCV", "torchdata": "torchdata"}


def unseen(loader: LoaderRecord) -> str:
    """Returns why nobody saw what a loader's batches cost, and what to do; empty: somebody did."""
    maker = _MAKERS.get(loader.facts["kind"].split(".")[0])
    return "" if loader.fetches or maker is None else advice(maker)


def seen_at_work(loader: LoaderRecord) -> tuple[str, list[str]]:
    """Returns the line of the dataset's code that waits most, if any does, and evidence on where workers were."""
    looks, notes = loader.seen["look",], []
    if lines := loader.seen_at("line").most_common(1):
        (line,), count = lines[0]
        if count >= _SHARES * looks:
            notes.append(f"workers were at {line} in {count / looks:.0%} of {looks} looks")
    calls = loader.seen_at("call")
    works = [fetch.work for fetch in loader.fetches]
    total_s = sum(work.total_s for work in works)
    for part in ("decoding", "transform"):
        # Who looks needs the GIL, and sees more of the calls that free it: the looks only divide what was timed.
        part_s = sum(work.stages.get(part, WorkTime()).total_s for work in works)
        most = part_s / max(total_s, 1e-9) / max(1, sum(count for (at, _), count in calls.items() if at == part))
        shares = {call: most * count for (at, call), count in calls.most_common() if at == part and call}
        named = [f"{call} {share:.0%}" for call, share in shares.items() if share >= _SHARES][:_MOST_CALLS]
        if named:
            notes.append(f"{part}, of the time of making a batch: {', '.join(named)}")
    waits: Counter[str] = Counter()
    for fetch in loader.fetches:
        waits.update(dict(fetch.waits))
    if not waits:
        waits.update({line: count for (line,), count in loader.seen_at("wait").items()})
    elif waits.most_common(1)[0][0]:
        line, waited_s = waits.most_common(1)[0]
        notes.append(f"the dataset's code waits {seconds_text(waited_s / len(loader.fetches))} a batch at {line}")
    return (waits.most_common(1)[0][0] if waits else ""), notes


def keeps_transform(loader: LoaderRecord) -> bool:
    """Returns whether a FastLoader would have to run the dataset's transforms, too, being none that fastload has.

    Those that the dataset lists tell, else the calls in which workers were seen: who mostly resizes, crops or flips
    does so in a library for images, and then makes floats of them. Where neither is known, images of another size than
    those decoded were resized.
    """
    if listed := loader.facts.get("transforms"):
        return not all(is_known(our_name(one)) for one in listed)
    calls = Counter({call: count for (at, call), count in loader.seen_at("call").items() if at == "transform"})
    ours = sum(
        count
        for call, count in calls.items()
        if call in _CONVERTS or call.startswith(_IMAGE_LIBRARIES) or is_known(our_name(call))
    )
    return bool(calls) and ours < 0.5 * calls.total()


def shares_its_waits(fetches: Sequence[Fetch]) -> tuple[bool, list[str]]:
    """Returns whether workers wait longer the more of them do, as at a service that answers one at a time; evidence.

    A batch's first wait shows it: at the begin of epochs some begin while few others work, later ones while all work.
    Each of the former has to be shorter than nearly all the latter. `fetches` are all batches of the workers.
    """
    begins, ends = (sorted(times) for times in zip(*((f.begin_s, f.begin_s + f.wall_s) for f in fetches), strict=True))
    most = len({fetch.pid for fetch in fetches}) - 1  # others
    waits = [fetch.first_wait for fetch in fetches if fetch.first_wait[1]]
    usual_s = statistics.median(seconds for _, seconds in waits) if waits else 0.0

    def others(since_s: float, until_s: float) -> int:
        return bisect.bisect_right(begins, until_s) - bisect.bisect_right(ends, since_s) - 1

    # A worker that has just ended a batch is about to wait again.
    few = [seconds for at_s, seconds in waits if others(at_s - usual_s, at_s) <= most / 2]
    many = [seconds for at_s, seconds in waits if others(at_s, at_s) >= most]
    if most < 1 or len(few) < _LEAST_FEW or len(many) < _LEAST_MANY:
        return False, []
    few_s, many_s = statistics.median(few), statistics.median(many)
    if max(few) >= statistics.quantiles(many, n=10)[0] or many_s < few_s * (1 + most / 2):
        return False, []
    return True, [f"with few other workers active a wait takes {seconds_text(few_s)}, with all {seconds_text(many_s)}"]


def first_of_workers(fetches: Sequence[Fetch]) -> set[int]:
    """Returns the numbers of each worker's first batches if most of them cost far more than later ones; else none.

    These costs are part of a worker's start, as of one that opens files with its first sample.
    """
    firsts: dict[int, int] = {}
    for number, fetch in sorted(enumerate(fetches), key=lambda one: one[1].begin_s):
        firsts.setdefault(fetch.pid, number)
    later = [fetch.work.total_s for number, fetch in enumerate(fetches) if firsts[fetch.pid] != number]
    if len(firsts) < 2 or len(later) < len(firsts):
        return set()
    usual_s, begun_s = (
        statistics.median(costs) for costs in (later, [fetches[number].work.total_s for number in firsts.values()])
    )
    return set(firsts.values()) if begun_s > _BEGINS * usual_s else set()


def explained(fetch: Fetch, waits: WaitShares) -> BatchWork:
    """Returns the cost of a batch, its unexplained waits assigned to locks and GIL as the kernel saw them."""
    work = fetch.work
    reading = work.stages.get("reading", WorkTime())
    # A thread that waits for the GIL is ready to run: another thread of its process holds it.
    gil_s = min(reading.blocked_s, waits.gil * fetch.unknown_blocked_s)
    waiting_s = min(reading.blocked_s - gil_s, waits.outward * fetch.unknown_blocked_s)
    stages = {
        **work.stages,
        "reading": WorkTime(reading.running_s, reading.blocked_s - gil_s - waiting_s),
        WAITING: work.stages.get(WAITING, WorkTime()) + WorkTime(0.0, waiting_s),
    }
    lock_s = work.lock_s + waits.lock * fetch.unknown_blocked_s
    return replace(work, stages=stages, lock_s=lock_s, runnable_s=work.runnable_s + gil_s)


def slow_samples(fetches: Iterable[Fetch]) -> tuple[float, list[str]]:
    """Finds samples that take far longer than the others: 5 times a usual one, and twice the mean. Many are not slow.

    Of samples asked for at once only their time together is known: of 5 times the usual, one of them took the excess.

    Returns the seconds per batch that they take beyond usual ones, and a line of evidence; 0.0 and none if there is
    none.
    """
    fetches = [fetch for fetch in fetches if fetch.samples[0]]
    if not fetches:
        return 0.0, []
    counts, sums_s, usuals_s = zip(*(fetch.samples for fetch in fetches), strict=True)
    count, usual_s = sum(counts), statistics.median(usuals_s)
    least_s = max(5 * usual_s, 2 * sum(sums_s) / count)
    slow = []
    for fetch in fetches:
        number, sum_s, _ = fetch.samples
        alone = [sum_s - (number - 1) * usual_s] if sum_s > 5 * number * usual_s else []
        slow += [value for value in (alone if fetch.slow is None else fetch.slow) if value > least_s]
    if not slow or len(slow) > 0.1 * count:
        return 0.0, []
    extra_s = sum(value - usual_s for value in slow) / len(fetches)
    mean, usual = seconds_text(statistics.fmean(slow)), seconds_text(usual_s)
    who = f"{len(slow)} samples took {mean} each" if len(slow) > 1 else f"one sample took {mean}"
    return extra_s, [f"{who}, where most take {usual}"]
