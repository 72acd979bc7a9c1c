"""Draw the figures of bench_echo.py: `python benchmarks/plot_echo.py [results/echo.jsonl] [echo.png]`.

Held-out accuracy against wall time (above) and against fresh samples (below), a column for each slowness of the source;
the line is the median of the seeds, the band reaches from the lowest to the highest.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import plots

SLOWNESS = (2, 4, 8)
WAYS = {
    "off": ("no echo", "#7d8b92"),
    "batch": ("same augmented batch n times", "#d98324"),
    "echo": ("echo=n", plots.OURS),
    "mixed": ("MixedEcho(n)", "#7a4fa3"),
    "auto": ('echo="auto"', "#2e8b57"),
}
COLUMNS = {0: "seconds", 1: "fresh samples"}


def draw(axes: Axes, record: dict[str, Any], column: int, label: str, color: str) -> None:
    """Median and range over the seeds, at places that all of them reached."""
    curves = [np.array(curve) for curve in record["curves"]]
    places = np.linspace(0, min(curve[-1, column] for curve in curves), 60)
    found = np.array([np.interp(places, curve[:, column], curve[:, 3]) for curve in curves])
    axes.fill_between(places, found.min(0), found.max(0), color=color, alpha=0.15, lw=0)
    axes.plot(places, np.median(found, 0), color=color, lw=1.8, label=label)


def main() -> None:
    """Read the last run of each figure and draw."""
    source, picture = plots.paths("echo")
    found = plots.latest(source)
    slowness = [slow for slow in SLOWNESS if f"off-{slow}" in found]
    if not slowness:
        sys.exit(f"{source}: no figures of bench_echo.py in it")
    plots.style()
    figure, grid = plt.subplots(2, len(slowness), figsize=(4.2 * len(slowness), 7.2), squeeze=False, sharey=True)
    for place, slow in enumerate(slowness):
        for row, (column, unit) in enumerate(COLUMNS.items()):
            axes = grid[row][place]
            axes.grid(color="#e6eaec")
            for way, (label, color) in WAYS.items():
                if f"{way}-{slow}" in found:
                    draw(axes, found[f"{way}-{slow}"], column, label, color)
            axes.set_xlabel(unit)
            axes.set_xlim(left=0)
        grid[0][place].set_title(f"The source gives 1/{slow} of the batches (n = {slow})")
    for row in grid:
        row[0].set_ylabel("held-out accuracy")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="upper center", ncols=len(WAYS))
    figure.tight_layout(rect=(0, 0.03, 1, 0.95))
    first = found[f"off-{slowness[0]}"]
    options = first["options"]
    how = f"a step takes {options['step_ms']:g} ms; {options['seeds']} seeds, {options['seconds']:g} s each"
    plots.save(figure, first, picture, how)


if __name__ == "__main__":
    main()
