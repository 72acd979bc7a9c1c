"""The plots of a report: functions from measurements to figures, as inline SVG in the page's colours and font."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fastload.profiling.report.downsample import PARTS, Columns, ceiling, into_columns, into_series
from fastload.profiling.verdict.sentences import number_text, seconds_text
from fastload.timing.results import STAGES, Measured, Work

LINES = 8
"""Number of lines in one panel that remain distinguishable."""


@dataclass(frozen=True)
class Line:
    """One reading in a panel: its key in `Measured.readings`, its name, and a factor for its values."""

    key: str
    name: str
    factor: float = 1.0


@dataclass(frozen=True)
class Panel:
    """Lines on one scale; `top` is the end of the scale if it is known."""

    title: str
    lines: tuple[Line, ...]
    top: float | None = None


def plot_steps(name: str, run: Measured) -> Plot:
    """Plots the parts of each step, stacked; of a long run, the mean of neighbouring steps and the slowest of them."""

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
    """Draws the parts of steps above each other, in columns as wide as the time their steps took."""
    edges = thin.edges_s / unit_s
    below = np.zeros(len(edges))
    for part, values in zip(PARTS, thin.parts_s * factor, strict=True):
        above = below + np.append(values, values[-1])
        if values.any():
            at.fill_between(edges, below, above, step="post", color=COLOURS[part], linewidth=0)
        below = above


def stems(at: Axes, thin: Columns, unit_s: float, factor: float, top: float) -> None:
    """Draws a thin line from the mean of a column up to its slowest step, where that stands out."""
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
    """Draws a mark at the upper edge for each step taller than the plot, and writes the duration of the longest."""
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
    """Plots samples per second over the run, with the headspace as a dashed line."""
    headspace = run.headspace_samples_per_s

    def paint(axes: list[Axes], columns: int) -> None:
        (at,) = axes
        unit_s = time_axis(at, run)
        # The rate of a single step says little: a step whose batch was ready took hardly any time.
        thin = into_columns(run.steps, max(1, min(columns // 2, len(run.steps) // 4)))
        at.stairs(thin.samples_per_s, thin.edges_s / unit_s, baseline=None, color=COLOURS["rate"], linewidth=1.8)
        usual = max(float(np.percentile(thin.samples_per_s, 95)), headspace or 0.0)
        if headspace:
            at.axhline(headspace, color=COLOURS["headspace"], linewidth=2, dashes=(5, 3))
        # A few batches that were ready, and so took no time, must not make the rest of the plot flat.
        at.set_ylim(0, min(max(float(thin.samples_per_s.max()), usual), 1.5 * usual) * 1.1 or 1)
        at.set_title("samples/s")

    label = f"Samples a second over the run: {number_text(run.samples_per_s)} on average"
    legend = [("rate", f"this run, {number_text(run.samples_per_s)} on average")]
    if headspace:
        label += f"; the same step without waiting for data reaches {number_text(headspace)}"
        legend.append(("headspace", f"headspace, {number_text(headspace)}"))
    return draw(name, paint, label + ".", panel_heights=(160,), legend=tuple(legend))


def plot_readings(name: str, run: Measured, panels: Sequence[Panel], label: str) -> Plot:
    """Plots readings over the run, a panel for each scale; a band shows the lowest and highest reading of a column."""

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
    """Plots a bar for each stage: the time that a batch took on a CPU, and blocked."""
    stages = in_order(run.stages)

    def paint(axes: list[Axes], columns: int) -> None:
        (at,) = axes
        highest = max(work.running_s + work.blocked_s for _, work in stages)
        factor, unit = _unit(highest)
        bars = np.arange(len(stages))
        running = np.array([work.running_s for _, work in stages]) * factor
        blocked = np.array([work.blocked_s for _, work in stages]) * factor
        at.barh(bars, running, height=0.62, color=COLOURS["running"])
        at.barh(bars, blocked, left=running, height=0.62, color=COLOURS["blocked"])
        for bar, total in zip(bars, running + blocked, strict=True):
            at.annotate(
                number_text(total), (total, bar), xytext=(6, 0), textcoords="offset points", va="center", ha="left"
            )
        at.set_yticks(bars, [_shortened(stage) for stage, _ in stages], color=COLOURS["ink"])
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
    """Returns the stages in the order in which a batch goes through them, unknown names last."""
    return sorted(stages.items(), key=lambda stage: STAGES.index(stage[0]) if stage[0] in STAGES else len(STAGES))


def time_axis(at: Axes, run: Measured, *, named: bool = True) -> float:
    """Sets the x axis to the whole run; returns the seconds in its unit."""
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


WIDE, NARROW = 820, 330
"""Widths of the two versions of each plot in CSS pixels: for screens and paper, and for a phone held upright."""

FONT_SIZE = 12

# Placeholders that `_inline` replaces by the page's colours, which page.css defines for light and dark mode.
COLOURS = {
    name: f"#01fe{number:02x}"
    for number, name in enumerate(
        "ink faint grid paper wait copy transform compute slowest running blocked rate headspace "
        "line0 line1 line2 line3 line4 line5 line6 line7".split()
    )
}

_STYLE: dict[Any, Any] = {  # matplotlib types the keys as Literals
    "svg.fonttype": "none",  # text stays text: it is searched, read aloud, and shown in the page's font
    "svg.hashsalt": "fastload",  # the same figures give the same file
    "text.parse_math": False,  # a dollar sign in a name is just that
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "axes.edgecolor": COLOURS["faint"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": COLOURS["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlesize": FONT_SIZE,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["faint"],
    "ytick.color": COLOURS["faint"],
    "ytick.left": False,
    "figure.facecolor": "none",
    "figure.dpi": 72,
}

Painter = Callable[[list[Axes], int], None]
"""Draws on the axes of a figure; the second argument is the number of columns there is room for."""


@dataclass(frozen=True)
class Plot:
    """One plot in two versions.

    Attributes:
        wide: SVG for screens and paper.
        narrow: SVG for a phone.
        label: description of the plot in words.
        legend: colour and name of each thing drawn, in drawing order.
    """

    wide: Markup
    narrow: Markup
    label: str
    legend: tuple[tuple[str, str], ...] = ()


def draw(
    name: str,
    paint: Painter,
    label: str,
    *,
    panel_heights: tuple[int, ...],
    legend: tuple[tuple[str, str], ...] = (),
    left: int = 58,
    above: int = 28,
) -> Plot:
    """Draws a plot of panels, one above the other, in a wide and in a narrow version.

    Args:
        name: unique in the page; ids in the SVG begin with it.
        panel_heights: of each panel in CSS pixels, without title and tick labels.
        above: space for the title.
        left: space for the labels of the y axis, the same in all plots with the same x axis.
    """
    wide = _svg(f"{name}-w", paint, label, WIDE, panel_heights, (left, above))
    narrow = _svg(f"{name}-n", paint, label, NARROW, panel_heights, (min(left, 122), above))
    return Plot(wide, narrow, label, legend)


def _svg(name: str, paint: Painter, label: str, width: int, heights: tuple[int, ...], room: tuple[int, int]) -> Markup:
    (left, above), below, between = room, 30, 52
    height = above + sum(heights) + between * (len(heights) - 1) + below
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Matplotlib's font may lack a letter of a name; the page's font, which shows it, has it.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(width / 72, height / 72))
        axes, top = [], height - above
        for panel in heights:
            box = (left / width, (top - panel) / height, (width - left - 14) / width, panel / height)
            axes.append(figure.add_axes(box))
            top -= panel + between
        paint(axes, (width - left) // 3)
        text = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    return _inline(text.getvalue(), name, label, width, height)


def _inline(svg: str, name: str, label: str, width: int, height: int) -> Markup:
    """Returns the SVG element alone, with ids that are unique in the page, and the page's colours and font."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'xlink:href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r"#01fe([0-9a-f]{2})", lambda found: f"var(--{_NAMES[found[0]]})", body)
    # Matplotlib names its own font in each text; without it, the page's is inherited.
    # It writes `font: 12px 'DejaVu Sans'` or, since 3.11, font-size and font-family.
    body = re.sub(r"\bfont: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"\bfont-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"\n\s*", "\n", body)
    # A hundredth of a pixel is enough for a path; matplotlib writes millionths.
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + body + "</svg>")


_NAMES = {value: name for name, value in COLOURS.items()}
