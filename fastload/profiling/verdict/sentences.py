"""Writes a verdict in plain sentences. The sentence names one cause and mentions no other."""

from __future__ import annotations

from fastload.profiling.verdict.demands import PACKED, Costs, Demands
from fastload.profiling.verdict.replacement import to_type
from fastload.system.advice import CHANGES, advice
from fastload.system.text import format_bytes, seconds_text, share_text
from fastload.timing.results import NETWORK, WAITING, NetworkUse, Verdict

FASTLOAD_HELPS = frozenset(
    {"reading", "decoding", "collate", "hand-over", "copy to the device", "worker start-up", "lock contention"}
)
"""Causes that disappear when the data are packed and loaded by FastLoader."""

OTHER_PROGRAMS = "other programs"

CAUSES = (
    "reading", NETWORK, WAITING, "decoding", "transform", "collate", "hand-over", "copy to the device",
    "too few workers",
    "too many workers", "worker start-up", "a slow sample now and then", "lock contention", OTHER_PROGRAMS, "compute",
)  # fmt: skip
"""The causes that a verdict can name."""

_OF_FASTLOADER = frozenset({"reading", "transform", "copy to the device", "hand-over"})

OTHERS_FEW = 0.05
"""Share of the CPUs from which other programs are said to disturb a figure.

On a quiet machine of two CPUs they used 0.002 to 0.007 of them over 3 seconds, up to 0.01 over one second and 0.04 over
0.25 seconds, of which most is the size of the kernel's ticks."""

_FEW = 20
_MORE = 1.03  # times as much as another figure, if both are to be said
_APART = 1.1  # ratio from which two measurements of the same contradict each other
_LITTLE = 0.3  # of a step; a loop that waits longer does not "only" wait
_SHORT_S = 1e-3
_WORTH_NAMING = 0.02  # of the run


def change_for(cause: str, demands: Demands, workers: int) -> str:
    """Returns the change to make for a cause, as an imperative clause."""
    if cause == WAITING and not workers:
        return advice("keep a copy", count=demands.workers)
    if cause == NETWORK:
        return network_changes(demands)[0]
    if cause in ("too few workers", "too many workers", WAITING):
        name = "workers" if demands.is_fastload else "num_workers"
        return advice("number of workers", name=name, count=workers, now=demands.workers)
    if cause == "compute":
        return advice("channels_last")
    if cause == "worker start-up" and len(demands.startups_s) == 1:
        return advice("worker start-up once")
    if cause == "hand-over" and demands.as_one_tensor is not None and demands.tensors > 1:
        return advice("hand-over as one", count=demands.tensors)
    # Batches without images, or of images of their own sizes in a list: a FastLoader would not give the same ones.
    if not demands.images and not demands.is_fastload and f"{cause} without images" in CHANGES:
        return CHANGES[f"{cause} without images"]
    if cause == "transform" and demands.packs_transform:
        return advice("transform by FastLoader")
    if cause == "transform" and not demands.is_fastload and not demands.on_device:
        return advice("transform on the CPU")
    if demands.compression_ratio and cause == "decoding":  # of rows that FastLoader decodes itself
        more_workers = ", or give it more workers" if demands.workers < demands.cpus else ""
        return advice("decoding of FastLoader", times=f"{demands.compression_ratio:.2g}", workers=more_workers)
    return CHANGES[f"{cause} of FastLoader" if demands.is_fastload and cause in _OF_FASTLOADER else cause]


def how_to(cause: str, demands: Demands, workers: int) -> str:
    """Returns what to type for a change; "" where `change_for` says all."""
    if workers and not demands.is_fastload:
        return advice("type workers that wait" if cause == WAITING else "type number of workers", count=workers)
    if cause == "compute":
        return advice("type channels_last")
    if cause == "worker start-up" and len(demands.startups_s) > 1:
        return advice("type persistent workers")
    plain = demands.plain
    moves = demands.packs_transform or (plain.known and not plain.unknown and demands.on_device)
    packs = cause in PACKED or (cause == "transform" and moves)
    if demands.is_fastload or not demands.images or not packs:
        return ""
    keeps = demands.keeps_transform if demands.by_fastloader is not None else bool(plain.unknown)
    return to_type(plain, keeps_transform=keeps)


def sentence_of(verdict: Verdict, demands: Demands) -> str:
    """Returns the verdict in one sentence."""
    waited = f"{verdict.stall_share:.0%} of the time the step waits for data"
    step = seconds_text(verdict.step_s)
    gain = verdict.cures[0].gain if verdict.cures else 1.0
    # No change removes the start of the first epoch.
    startup_s = demands.per_step(sum(demands.startups_s[:1]))
    all_gain = (verdict.step_s - startup_s) / max(verdict.free_step_s, 1e-9)
    if not verdict.cause and demands.batches:
        return (
            f"the data binds: {waited} ({step} a step), and no cost of a usual batch says why; a loader that costs "
            f"nothing would bring {all_gain:.2f} times"
        )
    if not verdict.cause:
        return (
            f"the data binds: {waited} ({step} a step); what making a batch costs was not seen, because its workers "
            f"were started too early to be looked at, or by a class of their own"
        )
    how = "only " if verdict.stall_share < _LITTLE else "though "
    if verdict.cause == "compute" and verdict.worth_making:
        first = verdict.cures[0]
        return (
            f"compute binds: {how}{waited} ({step} a step); first {first.change}: a step would take about "
            f"{seconds_text(first.step_s)}, {first.gain:.1f} times as fast; FastLoader's images lie there already"
        )
    if verdict.cause == "compute":
        free = f" (a loader that costs nothing {all_gain:.2f} times)" if all_gain > _MORE * gain else ""
        return (
            f"compute binds: {how}{waited} ({step} a step); the best change to the loading would bring "
            f"{gain:.2f} times{free} and is not worth making, and fastload would not help"
        )
    first = verdict.cures[0]
    if not verdict.worth_making:
        return (
            f"{verdict.cause} binds, among others: {waited} ({step} a step); first {first.change}: {gain:.2f} "
            f"times as fast, so by itself it is not worth making"
        )
    place = f", at {demands.waits_at}" if verdict.cause == WAITING and demands.waits_at else ""
    if verdict.cause == NETWORK and demands.network is not None:
        return _of_network(verdict, demands, demands.network)
    own = demands.is_fastload or verdict.fastload_helps or verdict.cause == "transform"
    aid = "" if own else "; fastload is not needed for that"
    is_range = 0 < first.least_gain < first.gain / _APART
    least = f" ({first.least_gain:.1f} times if the dataset's own transforms are kept)" if is_range else ""
    return (
        f"{verdict.cause} binds{place}: {waited} ({step} a step); first {first.change}: a step would take about "
        f"{seconds_text(first.step_s)}, {first.gain:.1f} times as fast{least}{aid}"
    )


def _of_network(verdict: Verdict, demands: Demands, use: NetworkUse) -> str:
    """Returns the sentence of a loop that waits for the network: what came, and what to change first."""
    first = verdict.cures[0]
    return (
        f"{NETWORK} binds: {verdict.stall_share:.0%} of the time the step waits for data "
        f"({seconds_text(verdict.step_s)} a step), which came at {network_rate(use)}; first {first.change}: with every "
        f"chunk there in time a step would take about {seconds_text(first.step_s)}, {first.gain:.1f} times as fast"
    )


def parts_of_step(verdict: Verdict, demands: Demands) -> list[str]:
    """Returns how a step is spent, in parts that add up to it, and where its time without a loader contradicts that."""
    copy_s, transform_s, own_s = (
        sum(getattr(step, name) for step in demands.steps) / len(demands.steps)
        for name in ("copy_s", "transform_s", "compute_s")
    )
    others = demands.others_cpus
    shown_s = transform_s if transform_s >= 0.01 * verdict.step_s else 0.0
    transform = f"{seconds_text(shown_s)} for its transforms, " if shown_s else ""
    works_s = own_s + transform_s - shown_s
    lines = [
        f"a step takes {seconds_text(verdict.step_s)}: waits {seconds_text(verdict.stall_share * verdict.step_s)} for "
        f"its batch, {seconds_text(copy_s)} for the copy, {transform}works {seconds_text(works_s)}; with a loader that "
        f"costs nothing it would take {seconds_text(verdict.free_step_s)}"
    ]
    if demands.other_loaders_s >= 0.01 * verdict.step_s:
        waits = seconds_text(demands.other_loaders_s)
        lines.append(f"{waits} of this work are waits for batches of other loaders in the same step")
    if line := first_batches(demands, verdict.step_s):
        lines.append(line)
    if others >= OTHERS_FEW * demands.cpus and verdict.cause != OTHER_PROGRAMS:
        used = f"{others:.2f} of the {demands.cpus} CPUs"
        lines.append(f"other programs used {used} meanwhile: these are not the machine's figures")
    alone_s = demands.alone_s
    if alone_s > _APART * own_s:
        lines.append(
            f"these contradict each other: on one cached batch, without a loader, a step took {seconds_text(alone_s)}, "
            f"longer than next to it; {advice('slowed down')}"
        )
    elif alone_s and own_s > _APART * alone_s:
        why = advice("clock changed") if demands.timed_device else "CPUs are shared"
        lines.append(
            f"on one cached batch, without a loader, a step took {seconds_text(alone_s)}, next to it "
            f"{seconds_text(own_s)}: {why}"
        )
    return lines


def evidence_of(verdict: Verdict, demands: Demands, costs: Costs) -> list[str]:
    """Returns the measurements behind a verdict, a line each."""
    lines = parts_of_step(verdict, demands)
    if demands.network is not None:
        lines += network_facts(demands.network)
        if verdict.cause == NETWORK and len(changes := network_changes(demands)) > 1:
            lines.append(f"next against the network: {'; '.join(changes[1:])}")
    stages = [
        f"{stage} {seconds_text(work.total_s)}"
        + (f" ({seconds_text(work.blocked_s)} blocked)" if work.blocked_s > work.running_s else "")
        for stage, work in costs.stages.items()
        if work.total_s > 0.02 * costs.make_s
    ]
    if stages:
        workers = f"each of {demands.workers} {'threads' if demands.by_threads else 'workers'}"
        who = workers if demands.workers else "the loop"
        ahead = f" (up to {demands.ahead} batches ahead)" if demands.workers else ""
        lines.append(f"making a batch costs {who}{ahead} {seconds_text(costs.make_s)}: {', '.join(stages)}")
    if demands.workers and demands.receive_s + demands.receive_blocked_s > 0.02 * verdict.step_s:
        lines.append(
            f"taking a batch over costs the loop {seconds_text(demands.receive_s)}, and "
            f"{seconds_text(demands.receive_blocked_s)} of waiting for the worker to pass it on"
        )
    if verdict.worth_making and verdict.cures[0].gain * (1 - verdict.stall_share) > _APART and demands.workers:
        lines.append(
            f"{verdict.cures[0].gain:.1f} times is more than the waits are: the step's own work gets faster, too, once "
            f"workers leave it the CPUs"
            + (" and its images lie in channels_last memory" if demands.by_format is not None else "")
        )
    if demands.step_runnable_s > 0.05 * verdict.step_s:
        lines.append(
            f"in its own work the loop's thread waited {seconds_text(demands.step_runnable_s)} a step for a CPU"
        )
    if len(demands.steps) < _FEW:  # then they are all
        lines.append(advice("few steps", count=len(demands.steps)))
    if verdict.step_s < _SHORT_S:
        lines.append("steps so short are largely the doctor's own cost, some tens of microseconds a batch")
    return lines


def first_batches(demands: Demands, step_s: float) -> str:
    """Returns how much longer than others the first batch of each epoch took, with the epoch's end, or "" if hardly."""
    share = demands.per_step(sum(demands.startups_s)) / step_s if step_s else 0.0
    if share <= _WORTH_NAMING:
        return ""
    first_s, *later_s = demands.startups_s
    mean_s = sum(later_s) / len(later_s) if later_s else first_s
    if first_s > 2 * mean_s or mean_s > 2 * first_s:
        who, each = "the first epoch", f", of {len(later_s)} later ones {seconds_text(mean_s)} each"
    else:
        first_s = sum(demands.startups_s) / len(demands.startups_s)
        who, each = (f"each of {len(demands.startups_s)} epochs" if later_s else "the epoch"), ""
    return (
        f"the first batch of {who} took {seconds_text(first_s)} longer than a usual one{each}: "
        f"{share_text(share)} of the run"
    )


def others_text(used: float | None, cpus: int) -> str:
    """Returns how many CPUs other programs used during a measurement, and whether it holds for the machine anyway.

    Empty where that is not known. `cpus`: that this process may use.
    """
    if used is None:
        return ""
    if used < OTHERS_FEW * cpus:
        return f"others {used:.2f} CPUs"
    return f"others {used:.2f} of {cpus} CPUs: not the machine's figure"


_REFUSED = 0.02  # share of requests from which the server is at its limit
_USED = 0.6  # part of the requests allowed at once that is in use on average where more were sent if they might be
_AGAIN, _MOSTLY_AGAIN = 0.1, 0.5  # shares of chunks that came before; see `network_changes`


def network_rate(use: NetworkUse) -> str:
    """Returns the bytes a second that came, the requests in flight meanwhile, and how many the server refused."""
    refused = "none refused"
    if use.refused:
        refused = f"{use.refused:,} of {use.requests:,} refused (the server accepts about {use.allowed:.2g} at once)"
    return (
        f"{format_bytes(use.bytes_per_s)}/s with {use.mean_in_flight:.1f} of at most {use.in_flight} requests in "
        f"flight, {refused}"
    )


def network_facts(use: NetworkUse) -> list[str]:
    """Returns what came over the network and what lay in the cache, a line each."""
    if not use.chunks:
        return [f"nothing came over the network from {use.url}: {use.hits:,} chunks lay in the cache"]
    again = f", {use.again:,} of them not for the first time" if use.again else ""
    lines = [
        f"over the network from {use.url} came {use.chunks:,} chunks ({format_bytes(use.bytes)}{again}), "
        f"{network_rate(use)}; {use.hits:,} chunks lay in the cache"
    ]
    if use.retries:
        lines.append(f"{use.retries:,} of {use.requests:,} requests repeated one that had failed")
    return lines


def network_changes(demands: Demands) -> list[str]:
    """Returns what to change where the network binds, imperative clauses, that which gains most first."""
    use = demands.network
    if use is None:
        return [advice("keep on this machine")]
    refuses = use.refused > _REFUSED * use.requests
    again = use.again / use.chunks if use.chunks else 0.0
    fits = use.dataset_bytes <= use.room_bytes
    sizes = {"room": format_bytes(use.room_bytes), "size": format_bytes(use.dataset_bytes)}
    found = []
    if again >= _AGAIN and not fits:
        found.append(advice("more room", share=f"{again:.0%}", **sizes))
    if refuses:
        found.append(advice("fewer requests"))
    elif use.mean_in_flight >= _USED * min(use.in_flight, use.allowed):
        more = advice("more requests", count=2 * use.in_flight, now=use.in_flight)
        found.insert(0 if again < _MOSTLY_AGAIN else len(found), more)
    if use.nodes > 1 and not use.by_node:
        found.append(advice("share of a node", count=use.nodes))
    if again < _AGAIN and not fits:
        found.append(advice("room for all", **sizes))
    found.append(advice("nearer"))
    if fits and again < _AGAIN:
        found.append(advice("train on"))
    return found
