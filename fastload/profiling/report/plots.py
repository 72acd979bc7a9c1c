"""The plots of a report: from measurements to drawings that the page stretches to whatever width there is.

A plot is an SVG of 1000 x 1000 units, which page.css stretches to its panel; lines keep their width. Titles,
numbers at the axes and marks are text of the page, placed in per cent, so they keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from fastload.system.text import number_text, seconds_text
from fastload.timing.results import STAGES, LoopStep, Measured, WorkTime

PARTS = ("wait", "copy", "transform", "compute")
"""The parts of a step in stacking order: fields of `LoopStep` without their unit."""

Floats = NDArray[np.float64]

LINES = 8
"""Number of lines in one panel that remain distinguishable."""

MOST_EPOCHS = 60
"""Number of epochs whose beginnings remain distinguishable."""

COLUMNS = 250
"""Columns of a plot: three pixels each on the widest page."""

_UNITS = 1000  # of a drawing's width and height
_LONGEST = 85  # per cent of the width that a bar takes, so that its number stands behind it
_X_TICKS, _Y_TICKS = 10, 4  # at most; page.css hides every second number of the x axis on a phone


@dataclass(frozen=True)
class Panel:
    """Readings on one scale."""

    title: str
    lines: Mapping[str, str]  # key in `Measured.readings` -> name
    factor: float = 1.0  # of all values
    top: float | None = None  # end of the scale if it is known


@dataclass(frozen=True)
class Plot:
    """One plot: panels, one above the other, or bars."""

    label: str  # description of the plot in words
    legend: Sequence[tuple[str, str]]  # colour and name of each thing drawn, in drawing order
    panels: Sequence[Canvas] = ()
    # Name, time on a CPU and blocked time in per cent of the plot's width, and text of each bar
    bars: Sequence[tuple[str, float, float, str]] = ()
    bars_title: str = ""  # above the bars


Points = list[tuple[float, float]]
"""(seconds, value) of the corners of a line."""


def stairs(edges_s: Floats, values: Floats) -> Points:
    """Returns a line that has a value between every two edges."""
    return list(zip(np.repeat(edges_s, 2)[1:-1], np.repeat(values, 2), strict=True))


class _Axes(NamedTuple):
    """Turns seconds of a run, and values up to `top`, into places of a drawing."""

    end_s: float
    top: float

    def x(self, at_s: float) -> str:
        return f"{_UNITS * at_s / self.end_s:.1f}"

    def y(self, value: float) -> str:
        return f"{_UNITS * (1 - value / self.top):.1f}"

    def path(self, points: Points) -> str:
        """Returns the SVG path through points."""
        return "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)


class Canvas:
    """One panel, `height` CSS pixels high, drawn in the units of its axes: seconds of the run, and values up to `top`.

    Ticks are (per cent from the left or the bottom, text), marks (per cent from the left, text, where it stands).
    """

    def __init__(self, end_s: float, top: float, title: str, height: int, *, timed: bool = True) -> None:
        self.title, self.height, self.shapes = title, height, Markup()  # elements of the SVG
        self._axes = _Axes(end_s, top := top or 1.0)
        unit_s, unit = (1, "s") if end_s < 600 else (60, "min") if end_s < 4 * 3600 else (3600, "h")
        times, values = ticks(end_s / unit_s, _X_TICKS) if timed else [], ticks(top, _Y_TICKS)
        self.x_ticks = [(100 * x * unit_s / end_s, f"{x:g} {unit}") for x in times]
        self.y_ticks = [(100 * y / top, f"{y:,g}") for y in values]
        self.marks: list[tuple[float, str, str]] = []
        self._path("grid", "".join(f"M0 {self._axes.y(y)}H{_UNITS}" for y in values), "grid")

    def area(self, upper: Points, lower: Points, colour: str, kind: str = "area") -> None:
        """Fills the area between two lines."""
        self._path(kind, self._axes.path([*upper, *lower[::-1]]) + "Z", colour)

    def line(self, points: Points, colour: str) -> None:
        """Draws a line through points; a dot for one."""
        path = self._axes.path(points)
        self._path("dot" if len(points) == 1 else "line", f"{path}h0" if len(points) == 1 else path, colour)

    def level(self, value: float, colour: str) -> None:
        """Draws a dashed line at a value."""
        self._path("level", f"M0 {self._axes.y(value)}H{_UNITS}", colour)

    def moments(self, at_s: Iterable[float], colour: str) -> None:
        """Draws a dotted line from top to bottom at each moment."""
        self._path("moment", "".join(f"M{self._axes.x(x)} 0V{_UNITS}" for x in at_s), colour)

    def stems(self, at_s: Floats, low: Floats, high: Floats, colour: str) -> None:
        """Draws thin upright lines."""
        each = (
            f"M{self._axes.x(x)} {self._axes.y(a)}V{self._axes.y(b)}" for x, a, b in zip(at_s, low, high, strict=True)
        )
        self._path("stems", "".join(each), colour)

    def mark(self, at_s: float, text: str, side: str = "centre") -> None:
        """Writes a text above the drawing."""
        self.marks.append((100 * at_s / self._axes.end_s, text, side))

    def _path(self, kind: str, path: str, colour: str) -> None:
        if path:
            self.shapes += Markup(f'<path class="{kind}" d="{path}" style="color:var(--{colour})"/>')


def ticks(end: float, most: int) -> list[float]:
    """Returns round numbers from 0 to `end`, in at most `most` equal steps: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(end / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= end / most * (1 - 1e-9))
    return [float(f"{step * number:.10g}") for number in range(int(end / step * (1 + 1e-9)) + 1)]


def end_of(run: Measured) -> float:
    """Returns the end of a run's time axis in seconds."""
    steps = [step.begin_s + step.duration_s for step in run.steps[-1:]]
    return max([run.elapsed_s, *steps, *(one.get("at_s", 0.0) for one in run.readings[-1:])]) or 1.0


def plot_steps(run: Measured) -> Plot:
    """Plots the parts of each step, stacked; of a long run, the mean of neighbouring steps and the slowest of them."""
    thin = into_columns(run.steps, COLUMNS)
    top_s = ceiling(thin)
    factor, unit = _unit(top_s)
    canvas = Canvas(end_of(run), top_s * factor, f"{unit} a step", 210)
    middles_s = (thin.edges_s[:-1] + thin.edges_s[1:]) / 2
    below = np.zeros_like(thin.mean_s)
    for part, values in zip(PARTS, thin.parts_s * factor, strict=True):
        if values.any():
            canvas.area(stairs(thin.edges_s, below + values), stairs(thin.edges_s, below), part)
        below = below + values
    if thin.steps_each > 1:
        out = thin.slowest_s > 1.3 * thin.mean_s
        low, high = (np.minimum(ends_s[out], top_s) * factor for ends_s in (thin.mean_s, thin.slowest_s))
        canvas.stems(middles_s[out], low, high, "slowest")
    over = np.flatnonzero(thin.slowest_s > top_s)
    for column in over:
        canvas.mark(middles_s[column], "▲")
    if len(over):
        longest = over[np.argmax(thin.slowest_s[over])]
        at_s, text = middles_s[longest], seconds_text(float(thin.slowest_s[longest]))
        side = "right" if at_s < 0.12 * end_of(run) else "left" if at_s > 0.88 * end_of(run) else "centre"
        canvas.mark(at_s, text if len(over) == 1 else f"longest {text}", f"{side} above")
    means_s = dict(zip(PARTS, parts_of(run.steps).mean(axis=1).tolist(), strict=True))
    means = ", ".join(f"{part} {seconds_text(mean_s)}" for part, mean_s in means_s.items())
    legend = [(part, part) for part, mean_s in means_s.items() if mean_s]
    if thin.steps_each > 1:
        legend.append(("slowest", "slowest of the steps in a column"))
    if 1 < len(run.epochs_s) <= MOST_EPOCHS:
        canvas.moments(run.epochs_s[1:], "epoch")
        legend.append(("epoch", "an epoch begins"))
    slowest = seconds_text(max(step.duration_s for step in run.steps))
    label = f"Time of each step over the run, stacked. Mean of a step: {means}; the slowest took {slowest}."
    return Plot(label, legend, [canvas])


def plot_run(run: Measured) -> Plot:
    """Plots when each loop of the run and each long call went on, one below another."""
    canvas = Canvas(run.run_s, len(run.lanes), "", 26 * len(run.lanes) + 8)
    canvas.y_ticks = []
    for number, lane in enumerate(run.lanes):
        low = len(run.lanes) - 1 - number
        for begin_s, end_s in lane.spans_s:
            upper, lower = ([(begin_s, low + part), (end_s, low + part)] for part in (0.85, 0.15))
            canvas.area(upper, lower, f"line{number % LINES}")
    times = (f"{lane.name} {seconds_text(lane.seconds)}" for lane in run.lanes)
    legend = [(f"line{number % LINES}", lane.name) for number, lane in enumerate(run.lanes)]
    return Plot(f"When each went on in a run of {seconds_text(run.run_s)}: {'; '.join(times)}.", legend, [canvas])


def plot_rate(run: Measured) -> Plot:
    """Plots samples per second over the run, with the headspace as a dashed line."""
    headspace = run.headspace_samples_per_s
    # The rate of a single step says little: a step whose batch was ready took hardly any time.
    thin = into_columns(run.steps, max(1, min(COLUMNS // 2, len(run.steps) // 4)))
    usual = max(float(np.percentile(thin.samples_per_s, 95)), headspace or 0.0)
    # A few batches that were ready, and so took no time, must not make the rest of the plot flat.
    top = min(max(float(thin.samples_per_s.max()), usual), 1.5 * usual) * 1.1
    canvas = Canvas(end_of(run), top, "samples/s", 160)
    canvas.line(stairs(thin.edges_s, thin.samples_per_s), "rate")
    label = f"Samples a second over the run: {number_text(run.samples_per_s)} on average"
    legend = [("rate", f"this run, {number_text(run.samples_per_s)} on average")]
    if headspace:
        canvas.level(headspace, "headspace")
        label += f"; the same step without waiting for data reaches {number_text(headspace)}"
        legend.append(("headspace", f"headspace, {number_text(headspace)}"))
    return Plot(label + ".", legend, [canvas])


def plot_readings(run: Measured, panels: Sequence[Panel], label: str) -> Plot:
    """Plots readings over the run, a panel for each scale; a band shows the lowest and highest reading of a column."""
    drawings = []
    for panel in panels:
        known = [series for key in panel.lines if (series := into_series(run.readings, key, COLUMNS // 2))]
        highest = max((float(series.high.max()) for series in known), default=0.0) * panel.factor
        canvas = Canvas(end_of(run), panel.top or highest * 1.1, panel.title, 110, timed=panel is panels[-1])
        for number, series in enumerate(known):
            colour = f"line{number % LINES}"
            low, mean, high = (
                list(zip(series.at_s, values * panel.factor, strict=True))
                for values in (series.low, series.mean, series.high)
            )
            if len(panel.lines) == 1:
                canvas.area(high, low, colour, "band")
            canvas.line(mean, colour)
        drawings.append(canvas)
    most = max((panel.lines.values() for panel in panels), key=len)
    legend = [(f"line{number % LINES}", name) for number, name in enumerate(most)]
    return Plot(label, legend if len(legend) > 1 else (), drawings)


def plot_stages(run: Measured) -> Plot:
    """Plots a bar for each stage: the time that a batch took on a CPU, and blocked."""
    stages = in_order(run.stages)
    highest_s = max(work.total_s for _, work in stages)
    factor, unit = _unit(highest_s)
    percent = _LONGEST / (highest_s or 1)
    bars, texts = [], []
    for stage, work in stages:
        together = number_text(work.total_s * factor)
        bars.append((stage, percent * work.running_s, percent * work.blocked_s, together))
        texts.append(f"{stage}: {seconds_text(work.running_s)} running, {seconds_text(work.blocked_s)} blocked")
    legend = (("running", "on a CPU"), ("blocked", "blocked: waiting for a disk, a lock or a queue"))
    label = f"Mean cost of a batch by stage. {'; '.join(texts)}."
    return Plot(label, legend, bars=bars, bars_title=f"{unit} a batch")


def in_order(stages: Mapping[str, WorkTime]) -> list[tuple[str, WorkTime]]:
    """Returns the stages in the order in which a batch goes through them, unknown names last."""
    return sorted(stages.items(), key=lambda stage: STAGES.index(stage[0]) if stage[0] in STAGES else len(STAGES))


def _unit(highest_s: float) -> tuple[float, str]:
    return (1, "seconds") if highest_s >= 2 else (1e3, "ms") if highest_s >= 2e-3 else (1e6, "µs")


# A long run, reduced to the columns that a plot has room for, with what stands out kept.


@dataclass(frozen=True)
class Columns:
    """Successive steps, grouped into columns."""

    edges_s: Floats  # (columns + 1,) start of each, and the end of the last
    parts_s: Floats  # (4, columns) mean seconds of each of `PARTS`
    slowest_s: Floats  # (columns,) duration of the slowest step in each
    samples_per_s: Floats  # (columns,) over the time of the steps in each
    mean_s: Floats  # (columns,) mean duration of a step
    steps_each: int  # largest number of steps in a column


@dataclass(frozen=True)
class Series:
    """One reading over time, grouped into columns; each array is (columns,)."""

    at_s: Floats
    mean: Floats
    low: Floats
    high: Floats


def parts_of(steps: Sequence[LoopStep]) -> Floats:
    """Returns (4, steps) seconds of each of `PARTS`; values that are negative or not finite become 0."""
    values = np.array([[getattr(step, f"{part}_s") for step in steps] for part in PARTS], dtype=np.float64)
    return np.maximum(np.nan_to_num(values, posinf=0.0), 0.0)


def into_columns(steps: Sequence[LoopStep], count: int) -> Columns:
    """Groups steps, at least one, into at most `count` columns of about equally many successive steps."""
    steps = sorted(steps, key=lambda step: step.begin_s)
    parts = parts_of(steps)
    begins = np.array([step.begin_s for step in steps])
    samples = np.array([step.samples for step in steps], dtype=np.float64)
    first = _firsts(len(steps), count)
    sizes = np.diff(np.append(first, len(steps)))
    duration = parts.sum(axis=0)
    taken = np.add.reduceat(duration, first)
    rates = np.divide(np.add.reduceat(samples, first), taken, out=np.zeros_like(taken), where=taken > 0)
    parts_s = np.add.reduceat(parts, first, axis=1) / sizes
    return Columns(
        edges_s=np.append(begins[first], begins[-1] + duration[-1]),
        parts_s=parts_s,
        slowest_s=np.maximum.reduceat(duration, first),
        samples_per_s=rates,
        mean_s=parts_s.sum(axis=0),
        steps_each=int(sizes.max()),
    )


def _firsts(length: int, count: int) -> NDArray[np.intp]:
    """Returns the first index of each of at most `count` columns; their sizes differ by at most one."""
    columns = min(count, length)
    return np.arange(columns) * length // columns


def names_of(readings: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the names of all readings in alphabetical order, without the time and those that were never finite."""
    return sorted({name for reading in readings for name, value in reading.items() if math.isfinite(value)} - {"at_s"})


def into_series(readings: Sequence[Mapping[str, float]], name: str, count: int) -> Series | None:
    """Groups one reading into at most `count` columns; None if it never occurs."""
    found = np.array([(one["at_s"], one[name]) for one in readings if name in one and "at_s" in one], dtype=np.float64)
    found = found.reshape(-1, 2)
    found = found[np.isfinite(found).all(axis=1)]
    if not len(found):
        return None
    first = _firsts(len(found), count)
    sizes = np.diff(np.append(first, len(found)))
    at_s, values = found.T
    return Series(
        at_s=np.add.reduceat(at_s, first) / sizes,
        mean=np.add.reduceat(values, first) / sizes,
        low=np.minimum.reduceat(values, first),
        high=np.maximum.reduceat(values, first),
    )


def ceiling(columns: Columns) -> float:
    """Returns the height for the plot of steps: the tallest, unless a few tall ones would make the others flat."""
    tallest = float(columns.slowest_s.max())
    usual = float(np.percentile(columns.mean_s, 95))
    return (tallest * 1.06 if tallest <= 5 * usual or usual <= 0 else 3 * usual) or 1.0
