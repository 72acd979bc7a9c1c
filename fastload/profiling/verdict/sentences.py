"""Writes a verdict in plain sentences, and numbers as text. The sentence names one cause and mentions no other."""

from __future__ import annotations

import math

from fastload.profiling.verdict.demands import Costs, Demands
from fastload.timing.results import Verdict

FASTLOAD_HELPS = frozenset(
    {"reading", "decoding", "collate", "hand-over", "copy to the device", "worker start-up", "lock contention"}
)
"""Causes that disappear when the data are packed and loaded by FastLoader."""

_CHANGES = {
    "reading": "pack the files (fastload pack) and feed them with FastLoader, or put them on a faster disk",
    "decoding": "decode once, with fastload pack, and feed the pixels with FastLoader",
    "transform": "move this Python code to the device (fastload.transforms has crops, flips, colour, erasing), or make "
    "it one call that frees the GIL",
    "collate": "return tensors of one shape and let torch's default_collate stack them, or use FastLoader, which fills "
    "batches in place",
    "hand-over": "return a few tensors a batch, not arrays or Python objects that are pickled; FastLoader passes slot "
    "numbers",
    "copy to the device": "copy while the step runs: pin_memory=True with .to(device, non_blocking=True), or "
    "FastLoader(device=...)",
    "worker start-up": "persistent_workers=True, so that workers live from epoch to epoch",
    "a slow sample now and then": "find out what is special about those samples, and pack, shrink or leave them out",
    "lock contention": "read without the lock: a file packed by fastload is read by any number of threads or processes",
}

CAUSES = (
    "reading", "decoding", "transform", "collate", "hand-over", "copy to the device", "too few workers",
    "too many workers", "worker start-up", "a slow sample now and then", "lock contention", "other programs", "compute",
)  # fmt: skip
"""The causes that a verdict can name."""

_FASTLOADER_CHANGES = {
    "reading": "a faster disk, more memory for the page cache, or smaller images (fastload pack --size)",
    "transform": "let the GPU do it (device='cuda'), give it more workers, or pack smaller images (--size)",
    "copy to the device": "keep the rows there: FastLoader(cache='device')",
    "hand-over": "return fewer or smaller fields, each of one shape",
}


_FEW = 20
_LITTLE = 0.3  # of a step; a loop that waits longer does not "only" wait
_SHORT_S = 1e-3


def change_for(cause: str, demands: Demands, workers: int) -> str:
    """Returns the change to make for a cause, as an imperative clause."""
    if cause in ("too few workers", "too many workers"):
        name = "workers" if demands.is_fastload else "num_workers"
        return f"{name}={workers} instead of {demands.workers}"
    if cause == "worker start-up" and len(demands.startups_s) == 1:
        return "make it cheaper: import less in the script that workers import again, or judge a longer run"
    if demands.compression_ratio and cause == "decoding":  # of rows that FastLoader decodes itself
        more_workers = ", or give it more workers" if demands.workers < demands.cpus else ""
        return (
            f"run fastload pack again, with --store raw (rows are copied then, of about "
            f"{demands.compression_ratio:.2g} times the bytes) or with a smaller --max-size{more_workers}; "
            f"`fastload info FILE --stores` has the numbers"
        )
    if demands.is_fastload and cause in _FASTLOADER_CHANGES:
        return _FASTLOADER_CHANGES[cause]
    return _CHANGES[cause]


def sentence_of(verdict: Verdict, demands: Demands) -> str:
    """Returns the verdict in one sentence."""
    waited = f"{verdict.stall_share:.0%} of the time the step waits for data"
    step = seconds_text(verdict.step_s)
    gain = verdict.cures[0].gain if verdict.cures else 1.0
    if not verdict.cause:
        return (
            f"the data binds: {waited} ({step} a step); what making a batch costs was not seen, because its workers "
            f"were started too early to be looked at, or by a class of their own"
        )
    if verdict.cause == "compute":
        how = "only " if verdict.stall_share < _LITTLE else "though "
        return (
            f"compute binds: {how}{waited} ({step} a step); the best change to the loading would bring "
            f"{gain:.2f} times and is not worth making, and fastload would not help"
        )
    first = verdict.cures[0]
    if not verdict.worth_making:
        return (
            f"{verdict.cause} binds, among others: {waited} ({step} a step); first {first.change}: {gain:.2f} "
            f"times as fast, so by itself it is not worth making"
        )
    own = demands.is_fastload or verdict.fastload_helps or verdict.cause == "transform"
    aid = "" if own else "; fastload is not needed for that"
    return (
        f"{verdict.cause} binds: {waited} ({step} a step); first {first.change}: a step would take about "
        f"{seconds_text(first.step_s)}, {first.gain:.1f} times as fast{aid}"
    )


def evidence_of(verdict: Verdict, demands: Demands, costs: Costs, best_s: float) -> list[str]:
    """Returns the measurements behind a verdict, a line each; `best_s`: a step with a loader that costs nothing."""
    transforms = f"{seconds_text(costs.transform_s)} for its transforms, " if costs.transform_s else ""
    lines = [
        f"a step takes {seconds_text(verdict.step_s)}: waits {seconds_text(verdict.stall_share * verdict.step_s)} for "
        f"its batch, {seconds_text(costs.copy_s)} for the copy, {transforms}works {seconds_text(costs.compute_s)}; "
        f"with a loader that costs nothing it would take {seconds_text(best_s)}"
    ]
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
    if demands.step_runnable_s > 0.05 * verdict.step_s:
        lines.append(
            f"in its own work the loop's thread waited {seconds_text(demands.step_runnable_s)} a step for a CPU"
        )
    if len(demands.steps) < _FEW:  # then they are all
        lines.append(f"only {len(demands.steps)} steps were seen: a longer run gives firmer figures")
    if verdict.step_s < _SHORT_S:
        lines.append("steps so short are largely the doctor's own cost, some tens of microseconds a batch")
    startup_s = demands.per_step(sum(demands.startups_s))
    if startup_s > 0.02 * verdict.step_s:
        first_s, *later_s = demands.startups_s
        later = (
            f", those of {len(later_s)} later ones {seconds_text(sum(later_s) / len(later_s))} each" if later_s else ""
        )
        lines.append(f"the first epoch's start took {seconds_text(first_s)}{later}: {seconds_text(startup_s)} a step")
    return lines


# Numbers as text with three significant digits and a unit.


def seconds_text(seconds: float) -> str:
    """Returns a time: `0 s`, `830 µs`, `12.3 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if not math.isfinite(seconds):
        return "not known"
    if seconds == 0:
        return "0 s"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{number_text(seconds * factor)} {unit}"
    raise AssertionError


def number_text(value: float) -> str:
    """Returns a number: `12,345`, `123`, `12.3`, `1.23`, `0`."""
    if not math.isfinite(value):
        return "not known"
    size = abs(value)
    digits = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}"


def share_text(share: float) -> str:
    """Returns a share of 1 in per cent: `62 %`, `0.4 %`."""
    if not math.isfinite(share):
        return "not known"
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.1f} %"
