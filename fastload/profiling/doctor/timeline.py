"""Divides a script's time among its loops over loaders, and its work before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastload.timing.results import Lane

BEFORE, BETWEEN, AFTER = "before its first loop", "between its loops", "after its last loop"

_SEEN = 1 / 500  # of the run; a gap of less is not seen in a picture
_LEAST_CALLS, _MOST_CALLS = 0.01, 3  # part of the run, number of functions


@dataclass(frozen=True)
class Span:
    """A piece of time; seconds on one clock."""

    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """The seconds of a run: `loops` and `outside` together are all of it."""

    loops: list[float]  # of each loop, without loops inside of it
    outside: dict[str, float]  # by BEFORE, BETWEEN and AFTER
    calls: dict[str, dict[str, float]] = field(default_factory=dict)  # of these, the seconds of known calls, by name

    @property
    def total_s(self) -> float:
        return sum(self.loops) + sum(self.outside.values())

    def described(self) -> list[str]:
        """Returns what was outside of loops, and took a fiftieth of the time or more, in words."""
        found = []
        for where, seconds in self.outside.items():
            if seconds >= 0.02 * self.total_s:
                longest = sorted(self.calls[where].items(), key=lambda call: -call[1])[:3]
                known = [f"{name} {taken_s:.1f} s" for name, taken_s in longest if taken_s >= 0.05]
                inside = f" ({', '.join(known)})" if known else ""
                found.append(f"{seconds / self.total_s:.0%} of the run, {seconds:.1f} s, were {where}{inside}")
        return found


def timeline(run: Span, passes: Sequence[Sequence[Span]], calls: Sequence[tuple[str, Span]] = ()) -> Timeline:
    """Returns where the time of a run went.

    Args:
        run: from the script's begin to its end.
        passes: of each loop over a loader, within the run; a pass may lie within one of another loop, which then waits.
        calls: the name of a function, and a call of it; counted where they lie outside of all loops.
    """
    marks = sorted(
        [(span.begin_s, 1, loop) for loop, spans in enumerate(passes) for span in spans]
        + [(span.end_s, 0, loop) for loop, spans in enumerate(passes) for span in spans]
    )
    loops, gaps, open_loops, since_s = [0.0] * len(passes), list[Span](), list[int](), run.begin_s
    for moment_s, begins, loop in marks:
        if open_loops:
            loops[open_loops[-1]] += moment_s - since_s
        elif moment_s > since_s:
            gaps.append(Span(since_s, moment_s))
        since_s = moment_s
        if begins:
            open_loops.append(loop)
        elif loop in open_loops:
            open_loops.remove(loop)
    if run.end_s > since_s or not marks:
        gaps.append(Span(since_s, max(since_s, run.end_s)))
    first_s = marks[0][0] if marks else run.end_s
    outside = dict.fromkeys((BEFORE, BETWEEN, AFTER), 0.0)
    named: dict[str, dict[str, float]] = {where: {} for where in outside}
    for gap in gaps:
        where = BEFORE if gap.begin_s < first_s else AFTER if marks and gap.begin_s >= marks[-1][0] else BETWEEN
        outside[where] += gap.end_s - gap.begin_s
        for name, call in calls:
            inside_s = min(call.end_s, gap.end_s) - max(call.begin_s, gap.begin_s)
            if inside_s > 0:
                named[where][name] = named[where].get(name, 0.0) + inside_s
    return Timeline(loops, outside, named)


def lanes_of(run: Span, loops: Sequence[tuple[str, Sequence[Span]]], calls: Sequence[tuple[str, Span]]) -> list[Lane]:
    """Returns the passes of each loop, by name, and the calls of functions that take long, to be drawn."""
    total_s, by_name = run.end_s - run.begin_s, dict[str, list[Span]]()
    for name, span in calls:
        by_name.setdefault(name, []).append(span)
    long = [(sum(one.end_s - one.begin_s for one in spans), name) for name, spans in by_name.items()]
    kept = [name for seconds, name in sorted(long, reverse=True) if seconds >= _LEAST_CALLS * total_s][:_MOST_CALLS]
    lanes = []
    for name, spans in [*loops, *((name, by_name[name]) for name in kept)]:
        drawn: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: span.begin_s):
            begin_s, end_s = span.begin_s - run.begin_s, span.end_s - run.begin_s
            if drawn and begin_s - drawn[-1][1] < _SEEN * total_s:
                drawn[-1] = drawn[-1][0], max(drawn[-1][1], end_s)
            else:
                drawn.append((begin_s, end_s))
        lanes.append(Lane(name, sum(span.end_s - span.begin_s for span in spans), tuple(drawn)))
    return lanes
