"""Turns the results of a benchmark into names and texts for the terminal and for reports."""

from __future__ import annotations

from fastload.profiling.bench.alone import AloneFigures
from fastload.profiling.bench.faults import FaultFigures, KillFigures
from fastload.profiling.bench.passes import Spread
from fastload.profiling.bench.rivals import Rival
from fastload.profiling.bench.training_loop import LoopFigures
from fastload.profiling.verdict.sentences import seconds_text
from fastload.system.text import format_bytes
from fastload.timing.results import Table

Facts = list[tuple[str, str]]
"""(name, text) pairs; an empty name continues the line above."""


def alone_facts(alone: AloneFigures) -> Facts:
    """Returns the lines about the loader alone."""
    over_take = f"not known: {alone.why_no_take}"
    if alone.over_take is not None and alone.take_samples_per_s is not None:
        bare = f"{alone.take_samples_per_s['median']:,.0f} images/s by one thread that only copies the same rows"
        over_take = f"{_ratio(alone.over_take)}; {bare}"
    first, earliest, latest = (seconds_text(alone.first_batch_s[name]) for name in ("median", "lowest", "highest"))
    facts = [
        ("loader alone", f"{_rate(alone.samples_per_s)}, {alone.bytes_per_s / 1e6:,.0f} MB/s"),
        ("over np.take", over_take),
        ("CPU", f"{alone.cpu_s_per_1000:.3g} s for 1,000 images"),
        ("first batch", f"{first} ({earliest} to {latest}) from opening the file on"),
    ]
    if alone.peak_memory_bytes:
        loader = format_bytes(alone.loader_memory_bytes)
        facts.append(("memory", f"{format_bytes(alone.peak_memory_bytes)} at most, of which {loader} for the loader"))
    return facts


def cold_facts(left: list[float]) -> Facts:
    """Returns the line that says whether the file could be dropped from the page cache."""
    if not left:
        said = "dropped before each pass; this system does not say whether that worked"
    elif max(left) > 0.01:
        said = f"dropped before each pass, but up to {_percent(max(left))} of the file stayed: these figures are warm"
    else:
        said = f"dropped before each of {len(left)} passes; {_percent(max(left))} of the file stayed"
    return [("page cache", said)]


def loop_facts(loop: LoopFigures, headspace: dict[str, Spread] | None) -> Facts:
    """Returns the lines about the training loop."""
    facts = [("training", f"{loop.samples_per_s:,.0f} images/s, {loop.step}")]
    if loop.utilization is not None:
        facts.append(("utilization", f"{_percent(loop.utilization)} ({loop.utilization_is})"))
    wait = f"longest wait for a batch {seconds_text(loop.longest_wait_s)}"
    facts.append(("stall share", f"{_percent(loop.stall_share)}, {wait}"))
    if headspace is not None:
        rate = f"{headspace['base']['median']:,.0f} images/s on one cached batch"
        facts.append(("headspace", f"{rate}; with the loader {_ratio(headspace['ratio'])} of it"))
    return facts


def rival_table(rivals: list[Rival]) -> Table:
    """Returns the table that compares plain loaders with FastLoader."""
    head: tuple[str, ...] = ("in turn with", "images/s", "FastLoader is", "CPU s/1,000")
    rows: list[tuple[str, ...]] = []
    for rival in rivals:
        ratio = rival.ratio
        times = f"{ratio['median']:.3g} times as fast ({ratio['lowest']:.3g} to {ratio['highest']:.3g})"
        rows.append((rival.name, f"{rival.samples_per_s['median']:,.0f}", times, f"{rival.cpu_s_per_1000:.3g}"))
    if any(rival.loop is not None for rival in rivals):
        head = (*head, "its utilization")
        busy = [rival.loop.utilization if rival.loop is not None else None for rival in rivals]
        rows = [(*row, "not known" if one is None else _percent(one)) for row, one in zip(rows, busy, strict=True)]
    return Table("Plain ways", head, tuple(rows))


def fault_facts(fault: FaultFigures | KillFigures) -> Facts:
    """Returns the lines about one injected fault."""
    if isinstance(fault, KillFigures):
        if not fault.error:
            said = f"process {fault.pid} was killed; all its batches were made by then, and none was lost"
            return [(fault.fault, said)]
        named = "which names it" if fault.names_worker else "which does not name it"
        complete = "each exactly once" if fault.each_once else "NOT each exactly once"
        after = f"{seconds_text(fault.error_after_s)} and {fault.steps_until_error} batches later"
        return [
            (fault.fault, f"process {fault.pid} killed; {after} the loop had a WorkerError, {named}"),
            ("", f"state_dict() loaded again: the next batch {seconds_text(fault.resumed_after_s)} after iter()"),
            ("", f"{fault.samples:,} samples were loaded in all, {complete}"),
        ]
    loop = fault.loop
    delayed = f"{fault.delays:,} reads delayed by {seconds_text(fault.delayed_s)} in all"
    if not fault.delays:
        delayed = "no read was delayed in that time (more --seconds would help)"
    waited = f"the step waited {_percent(loop.stall_share)} of the time, at longest {seconds_text(loop.longest_wait_s)}"
    facts = [
        (fault.fault, f"{_rate(fault.samples_per_s)}, {_ratio(fault.ratio)} of the rate without"),
        ("", f"{delayed}; {waited}"),
    ]
    if loop.utilization is not None:
        facts.append(("", f"utilization {_percent(loop.utilization)}"))
    if loop.measured.verdict is not None:
        facts.append(("", f"verdict: {loop.measured.verdict.sentence}"))
    return facts


def _rate(rates: Spread) -> str:
    return f"{rates['median']:,.0f} images/s ({rates['lowest']:,.0f} to {rates['highest']:,.0f})"


def _ratio(ratio: Spread) -> str:
    return f"{ratio['median']:.3g} ({ratio['lowest']:.3g} to {ratio['highest']:.3g}, {ratio['count']} pairs)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
