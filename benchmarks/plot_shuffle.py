"""Draw the shuffle figures: `python benchmarks/plot_shuffle.py [results/shuffle.jsonl] [results/shuffle.png]`.

One column a file, one row a measure, the shuffles from none over growing windows to full. The grey band is what random
permutations reach, up to 3 spreads: a dot in it is as good as full shuffle, a red one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import plots
from fastload.inspection.shuffle_quality import format_percent

FILES = {
    "mixed": "Pre-shuffled file (as `fastload pack` writes it)",
    "sorted": "Class-sorted file (`--no-shuffle`)",
}
SPREADS = 3
BAND = "#dfe7ea"

Records = dict[str, dict[str, Any]]


def shuffles(found: Records, file: str) -> list[dict[str, Any]]:
    """The records of one file in plotting order: no shuffle, windows from small to large, full."""
    prefix = f"quality-{file}-"
    records = [record for name, record in found.items() if name.startswith(prefix) and not name.endswith("-expected")]
    return sorted(records, key=lambda record: record["window_rows"] + (record["figure"] == f"{prefix}full"))


def tick(record: dict[str, Any]) -> str:
    """What a shuffle is called below its column of dots."""
    chunks = record["window_chunks"]
    if chunks is None:
        full = record["figure"].endswith("-full")
        return f"full\n{record['window_rows']:,} rows" if full else "none"
    # The default of chunk windows, whatever shuffle=True means for this file.
    return f"{chunks}{' (default)' if chunks == 16 else ''}\n{record['window_rows']:,} rows"


def draw_speed(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Images/s over full shuffle's, with the range of the pairs and the median rate."""
    axes.axhline(1, color="#8a979e", lw=1)
    for place, record in enumerate(records):
        ratio = record["ratio"]
        axes.plot([place, place], [ratio["lowest"], ratio["highest"]], color=plots.OURS, lw=2, solid_capstyle="round")
        axes.plot(place, ratio["median"], "o", color=plots.OURS, ms=8)
        axes.annotate(
            f"{ratio['median']:.2f}x\n{record['way']['median']:,.0f}/s", (place, ratio["highest"]), xytext=(0, 6),
            textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    highest = max(record["ratio"]["highest"] for record in records)
    # Both files share the axis; the figures stand above the dots.
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.4 * highest))


def draw_measure(
    axes: Axes, records: list[dict[str, Any]], expected: dict[str, Any], name: str, said: Callable[[float], str]
) -> None:
    """One measure on a log scale, over the band of random permutations."""
    if name not in records[0]:
        axes.text(0.5, 0.5, "no labels", transform=axes.transAxes, ha="center")
        return
    middle, spread = expected[name], expected[f"{name}_spread"]
    values = [record[name] for record in records]
    least = min([*values, middle])
    axes.set_yscale("log")
    axes.axhspan(max(middle - SPREADS * spread, least / 3), middle + SPREADS * spread, color=BAND, lw=0)
    axes.axhline(middle, color="#8a979e", lw=1)
    axes.plot(range(len(values)), values, color=plots.BASE, lw=1.2, zorder=2)
    for place, record in enumerate(records):
        color = plots.TARGET if name in record["worse"].split(", ") else plots.OURS
        axes.plot(place, values[place], "o", color=color, ms=8, zorder=3)
        axes.annotate(said(values[place]), (place, values[place]), xytext=(0, 7), textcoords="offset points",
                      ha="center", fontsize=8, color=color)  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: said(value))
    axes.minorticks_off()


MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "label_mix": ("labels of batches differ,\nfull shuffle = 1x", lambda value: f"{value:.3g}x"),
    "mates_again": ("batch-mates that meet\nagain next epoch", format_percent),
    "file_order": ("rank correlation\nwith file order", lambda value: f"{value:.2g}"),
}


def main() -> None:
    """Read the last run of each figure and draw."""
    source, picture = plots.paths("shuffle")
    found = plots.latest(source)
    files = [name for name in FILES if shuffles(found, name)]
    if not files:
        sys.exit(f"{source}: no figures of bench_shuffle.py in it")
    plots.style()
    figure, grid = plt.subplots(
        1 + len(MEASURES), len(files), figsize=(6 * len(files), 10), sharex="col", sharey="row", squeeze=False
    )
    for column, name in enumerate(files):
        records = shuffles(found, name)
        expected = found[f"quality-{name}-expected"]
        top = grid[0][column]
        top.set_title(FILES[name], pad=10)
        draw_speed(top, records)
        for row, (measure, (_, said)) in enumerate(MEASURES.items(), start=1):
            draw_measure(grid[row][column], records, expected, measure, said)
        grid[-1][column].set_xticks(range(len(records)), [tick(record) for record in records])
        grid[-1][column].set_xlim(-0.6, len(records) - 0.4)
        grid[-1][column].set_xlabel("chunks in a window, and the rows that are mixed")
    grid[0][0].set_ylabel("images/s,\nover full shuffle")
    for row, (label, _) in enumerate(MEASURES.values(), start=1):
        grid[row][0].set_ylabel(label)
        low, high = grid[row][0].get_ylim()
        grid[row][0].set_ylim(low, high * (high / low) ** 0.15)  # room for the figures above the dots
    marks = [
        plt.Line2D([], [], ls="", marker="o", color=plots.OURS, label="as good as full shuffle"),
        plt.Line2D([], [], ls="", marker="o", color=plots.TARGET, label="worse than full shuffle"),
        plt.Rectangle((0, 0), 1, 1, color=BAND, label="random permutations: mean and 3 standard deviations"),
    ]
    figure.legend(handles=marks, loc="upper center", ncols=3)
    figure.align_ylabels()
    figure.tight_layout(rect=(0, 0.02, 1, 0.97))
    plots.save(figure, shuffles(found, files[0])[0], picture)


if __name__ == "__main__":
    main()
