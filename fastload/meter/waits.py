"""A verdict by the waits alone, for loaders that tell nothing of what their batches cost."""

from __future__ import annotations

import statistics

from fastload.measured import Cure, Verdict
from fastload.verdict import Demands
from fastload.verdict.judge import WORTH
from fastload.verdict.words import format_time


def judge_waits(demands: Demands) -> Verdict:
    """Whether waiting binds, and what could be won at most; not what is waited for.

    Args:
        demands: with at least one step.
    """
    steps = demands.steps
    step_s = statistics.fmean(step.duration_s for step in steps) + demands.ended_s / len(steps)
    fed_s = statistics.fmean(step.duration_s - step.wait_s for step in steps)
    share = max(0.0, 1 - fed_s / step_s) if step_s else 0.0
    gain = step_s / fed_s if fed_s else float("inf")
    evidence = (
        f"a step takes {format_time(step_s)}, of which {format_time(step_s - fed_s)} are waiting for its batch",
        f"with a loader that costs nothing it would take {format_time(fed_s)}",
    )
    waits = f"{share:.0%} of the time the step waits for data ({format_time(step_s)} a step)"
    if gain < WORTH:
        sentence = f"compute binds: only {waits}, so that no loader could make it more than {gain:.2f} times as fast"
        return Verdict("compute", sentence, evidence, step_s, share)
    cure = Cure("", "find out what the loader waits for", fed_s, gain)
    sentence = (
        f"the data binds: {waits}; this loader does not say what for, fastload.diagnose(loader) or "
        f"`fastload doctor` does; a step could be {gain:.1f} times as fast at most"
    )
    return Verdict("", sentence, evidence, step_s, share, (cure,), worth_making=True)
