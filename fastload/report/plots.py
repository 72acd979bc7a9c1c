"""The plots of a report, each a function from what was measured to a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fastload.measured import STAGES, Measured, Work
from fastload.report.draw import COLOURS, NARROW, Plot, draw
from fastload.report.thin import PARTS, Columns, ceiling, into_columns, into_series
from fastload.report.words import number_text, seconds_text

LINES = 8
"""Different lines that can be told apart in one panel."""


@dataclass(frozen=True)
class Line:
    """One reading in a panel: its key in `Measured.readings`, what it is called, and what it is multiplied by."""

    key: str
    name: str
    factor: float = 1.0


@dataclass(frozen=True)
class Panel:
    """Lines that share a scale; `top`: the end of the scale where it is known."""

    title: str
    lines: tuple[Line, ...]
    top: float | None = None


def plot_steps(name: str, run: Measured) -> Plot:
    """What each step's time went into, stacked; of a long run the mean of neighbours, and the slowest of them."""

    def paint(axes: list[Axes], columns: int) -> None:
        (at,) = axes
        unit_s = time_axis(at, run)
        thin = into_columns(run.steps, columns)
        top = ceiling(thin)
        factor, unit = _unit(top)
        stack(at, thin, unit_s, factor)
        if thin.steps_each > 1:
            stems(at, thin, unit_s, factor, top)
        beyond(at, thin, unit_s, factor, top)
        at.set_ylim(0, top * factor)
        at.set_title(f"{unit} a step", pad=26)

    slowest = max(step.duration_s for step in run.steps)
    means = ", ".join(
        f"{part} {seconds_text(float(np.mean([getattr(step, f'{part}_s') for step in run.steps])))}" for part in PARTS
    )
    legend = [(part, part) for part in PARTS if any(getattr(step, f"{part}_s") > 0 for step in run.steps)]
    if len(run.steps) > NARROW // 3:
        legend.append(("slowest", "slowest of the steps in a column"))
    label = (
        f"Time of each step over the run, stacked. Mean of a step: {means}; the slowest took {seconds_text(slowest)}."
    )
    return draw(name, paint, label, panel_heights=(210,), above=50, legend=tuple(legend))


def stack(at: Axes, thin: Columns, unit_s: float, factor: float) -> None:
    """The parts of a step above each other, in columns as wide as their steps took."""
    edges = thin.edges_s / unit_s
    below = np.zeros(len(edges))
    for part, values in zip(PARTS, thin.parts_s * factor, strict=True):
        above = below + np.append(values, values[-1])
        if values.any():
            at.fill_between(edges, below, above, step="post", color=COLOURS[part], linewidth=0)
        below = above


def stems(at: Axes, thin: Columns, unit_s: float, factor: float, top: float) -> None:
    """A thin line from the mean of a column up to its slowest step, where that stands out."""
    out = thin.slowest_s > 1.3 * thin.mean_s
    middle = (thin.edges_s[:-1] + thin.edges_s[1:]) / 2 / unit_s
    at.vlines(
        middle[out],
        np.minimum(thin.mean_s[out], top) * factor,
        np.minimum(thin.slowest_s[out], top) * factor,
        color=COLOURS["slowest"],
        linewidth=1.1,
    )


def beyond(at: Axes, thin: Columns, unit_s: float, factor: float, top: float) -> None:
    """A mark at the upper edge for each step taller than the plot, and the duration of the longest in words."""
    over = np.flatnonzero(thin.slowest_s > top)
    if not len(over):
        return
    middle = (thin.edges_s[:-1] + thin.edges_s[1:]) / 2 / unit_s
    at.plot(middle[over], np.full(len(over), top * factor), "^", color=COLOURS["slowest"], markersize=6, clip_on=False)
    longest = over[np.argmax(thin.slowest_s[over])]
    along = middle[longest] / at.get_xlim()[1]
    at.annotate(
        f"{'' if len(over) == 1 else 'longest '}{seconds_text(float(thin.slowest_s[longest]))}",
        (middle[longest], top * factor),
        xytext=(0, 12),
        textcoords="offset points",
        ha="left" if along < 0.12 else "right" if along > 0.88 else "center",
        va="center",
        annotation_clip=False,
    )


def plot_rate(name: str, run: Measured) -> Plot:
    """Samples a second over the run, with the headspace as a line above it."""
    headspace = run.headspace_samples_per_s

    def paint(axes: list[Axes], columns: int) -> None:
        (at,) = axes
        unit_s = time_axis(at, run)
        # The rate of a single step says little: one that found a batch ready took hardly any time.
        thin = into_columns(run.steps, max(1, min(columns // 2, len(run.steps) // 4)))
        at.stairs(thin.samples_per_s, thin.edges_s / unit_s, baseline=None, color=COLOURS["rate"], linewidth=1.8)
        usual = max(float(np.percentile(thin.samples_per_s, 95)), headspace or 0.0)
        if headspace:
            at.axhline(headspace, color=COLOURS["headspace"], linewidth=2, dashes=(5, 3))
        # A few batches that lay ready, taken at once, must not make all else flat.
        at.set_ylim(0, min(max(float(thin.samples_per_s.max()), usual), 1.5 * usual) * 1.1 or 1)
        at.set_title("samples/s")

    label = f"Samples a second over the run: {number_text(run.samples_per_s)} on average"
    legend = [("rate", f"this run, {number_text(run.samples_per_s)} on average")]
    if headspace:
        label += f"; the same step without waiting for data reaches {number_text(headspace)}"
        legend.append(("headspace", f"headspace, {number_text(headspace)}"))
    return draw(name, paint, label + ".", panel_heights=(160,), legend=tuple(legend))


def plot_readings(name: str, run: Measured, panels: Sequence[Panel], label: str) -> Plot:
    """Readings over the run, a panel for each scale; a band reaches from the lowest to the highest in a column."""

    def paint(axes: list[Axes], columns: int) -> None:
        for at, panel in zip(axes, panels, strict=True):
            unit_s = time_axis(at, run, named=at is axes[-1])
            highest = 0.0
            for number, line in enumerate(panel.lines):
                series = into_series(run.readings, line.key, columns // 2)
                if series is None:
                    continue
                colour, x = COLOURS[f"line{number % LINES}"], series.at_s / unit_s
                at.plot(x, series.mean * line.factor, color=colour, linewidth=1.7, marker="o" if len(x) == 1 else "")
                if len(panel.lines) == 1:
                    at.fill_between(
                        x, series.low * line.factor, series.high * line.factor, color=colour, alpha=0.22, linewidth=0
                    )
                highest = max(highest, float(series.high.max()) * line.factor)
            at.set_ylim(0, panel.top or highest * 1.1 or 1)
            if panel.top == 100:
                at.set_yticks([0, 25, 50, 75, 100])
            at.set_title(panel.title)

    most = max(panels, key=lambda panel: len(panel.lines))
    legend = [(f"line{number % LINES}", line.name) for number, line in enumerate(most.lines)]
    return draw(name, paint, label, panel_heights=(110,) * len(panels), legend=tuple(legend) if len(legend) > 1 else ())


def plot_stages(name: str, run: Measured) -> Plot:
    """A bar for each stage: what a batch cost on a CPU, and blocked."""
    stages = in_order(run.stages)

    def paint(axes: list[Axes], columns: int) -> None:
        (at,) = axes
        highest = max(work.running_s + work.blocked_s for _, work in stages)
        factor, unit = _unit(highest)
        places = np.arange(len(stages))
        running = np.array([work.running_s for _, work in stages]) * factor
        blocked = np.array([work.blocked_s for _, work in stages]) * factor
        at.barh(places, running, height=0.62, color=COLOURS["running"])
        at.barh(places, blocked, left=running, height=0.62, color=COLOURS["blocked"])
        for place, total in zip(places, running + blocked, strict=True):
            at.annotate(
                number_text(total), (total, place), xytext=(6, 0), textcoords="offset points", va="center", ha="left"
            )
        at.set_yticks(places, [_shortened(stage) for stage, _ in stages], color=COLOURS["ink"])
        at.set_ylim(len(stages) - 0.5, -0.5)
        at.set_xlim(0, highest * factor * 1.18 or 1)
        at.xaxis.set_major_locator(MaxNLocator(4 if columns < 100 else 8))
        at.grid(axis="y", visible=False)
        at.grid(axis="x", visible=True)
        at.spines["left"].set_visible(False)
        at.set_title(f"{unit} a batch")

    parts = "; ".join(
        f"{stage}: {seconds_text(work.running_s)} running, {seconds_text(work.blocked_s)} blocked"
        for stage, work in stages
    )
    legend = (("running", "on a CPU"), ("blocked", "blocked: waiting for a disk, a lock or a queue"))
    label = f"Mean cost of a batch by stage. {parts}."
    return draw(name, paint, label, panel_heights=(34 * len(stages),), legend=legend, left=142)


def in_order(stages: Mapping[str, Work]) -> list[tuple[str, Work]]:
    """The stages in the order in which a batch goes through them; those of other names last."""
    return sorted(stages.items(), key=lambda stage: STAGES.index(stage[0]) if stage[0] in STAGES else len(STAGES))


def time_axis(at: Axes, run: Measured, *, named: bool = True) -> float:
    """Let the x axis show the whole run; returns the seconds in its unit."""
    end_s = max(
        [run.elapsed_s, *(step.begin_s + step.duration_s for step in run.steps[-1:])]
        + [reading.get("at_s", 0.0) for reading in run.readings[-1:]]
    )
    unit_s, unit = (1, "s") if end_s < 600 else (60, "min") if end_s < 4 * 3600 else (3600, "h")
    at.set_xlim(0, end_s / unit_s or 1)
    at.xaxis.set_major_locator(MaxNLocator(5 if at.get_window_extent().width < 400 else 10))
    at.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} {unit}"))
    at.yaxis.set_major_locator(MaxNLocator(4))
    at.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    at.tick_params(labelbottom=named)
    return unit_s


def _unit(highest_s: float) -> tuple[float, str]:
    return (1, "seconds") if highest_s >= 2 else (1e3, "ms") if highest_s >= 2e-3 else (1e6, "µs")


def _shortened(text: str) -> str:
    return text if len(text) <= 20 else text[:19] + "…"
