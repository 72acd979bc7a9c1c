"""Draw the GPU figures: `python benchmarks/plot_gpu.py FOLDER/gpu.jsonl`, into that folder.

gpu_kernel.png: the fused kernel over a copy and over other ways. gpu_feed.png: batches into device memory.
gpu_training.png: training, its utilization and its stalls, beside the plain DataLoader. gpu_step_rate.png: how the
ratio to the cached-batch step falls with the step's rate. A figure that was not taken leaves its place empty.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plots

Figures = dict[str, dict[str, Any]]
COLORS = {"None": plots.OURS, "device": "#e0a030", "host": "#7a5ba8"}
NAMES = {"None": "page cache", "device": 'cache="device"', "host": 'cache="host"'}


def read(path: Path) -> tuple[Figures, dict[str, Any]]:
    """The last of each figure, if it has a value that counts, and the last record for its machine and versions."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    found: Figures = {}
    for record in records:
        for name, figure in record["figures"].items():
            found.pop(name, None)
            if isinstance(figure.get("value"), (int, float)) and "void" not in figure:
                found[name] = figure
    return found, records[-1]


def bars(axes: Axes, rows: list[tuple[str, dict[str, Any], str]], unit: str, *, log: bool = False) -> None:
    """One bar a figure with the range of its runs, its value beside it and its target as a red tick.

    Args:
        rows: label, figure, and the name of its spread, "" where it has only a value.
    """
    axes.grid(axis="x", color="#e6eaec")
    if not rows:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#5b6b73")
    for place, (_, figure, key) in enumerate(rows):
        value, spread = float(figure["value"]), figure.get(key)
        low, high = (spread["lowest"], spread["highest"]) if isinstance(spread, dict) else (value, value)
        axes.barh(place, value, 0.55, color=plots.OURS)
        axes.plot([low, high], [place, place], color="#44525a", lw=1.5)
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(text, (max(high, value), place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=8.5)  # fmt: skip
        if figure.get("target", "").startswith(">= "):
            axes.plot(float(figure["target"][3:]), place, "|", color=plots.TARGET, ms=20, mew=2)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if log and rows:
        axes.set_xscale("log")
        values = [float(figure["value"]) for _, figure, _ in rows if figure["value"] > 0] or [1.0]
        axes.set_xlim(10 ** math.floor(math.log10(min(values))), 4 * max(values))
    else:
        axes.margins(x=0.18)
    axes.set_xlabel(unit)


def chosen(found: Figures, prefix: str, key: str) -> list[tuple[str, dict[str, Any], str]]:
    """The figures whose name begins so, labelled by the rest."""
    return [(name[len(prefix) :].strip(" ,") or name, figure, key) for name, figure in found.items()
            if name.startswith(prefix)]  # fmt: skip


def kernel(found: Figures) -> Figure:
    """The fused kernel over a copy of as many bytes, and over other ways by the clock."""
    over = [(name.replace(", over ", " over "), value, "ratio") for name, value in found.items() if ", over " in name]
    size = (13, 1.6 + 0.34 * max(4, len(over)))
    figure, (copy, ways) = plt.subplots(1, 2, figsize=size, gridspec_kw={"width_ratios": [1, 1.35]})
    bars(copy, chosen(found, "fused ", "ratio"), "time of a device copy of as many bytes / time of the kernel")
    copy.set_title("Fused kernel, of a device copy")
    bars(ways, over, "times as fast, call after call, host included", log=True)
    ways.set_title("Over other ways on the GPU, one batch")
    return figure


def feed(found: Figures) -> Figure:
    """Bytes into device memory over a pinned copy; augmented images/s; CPU seconds."""
    figure, ((into, rates), (copies, seconds)) = plt.subplots(2, 2, figsize=(12, 8))
    moved = chosen(found, "page cache to device, ", "ratio")
    moved += [
        (f"host cache, {label}", value, key) for label, value, key in chosen(found, "host cache to device, ", "ratio")
    ]
    bars(into, moved, "bytes/s over those of a pinned copy")
    into.set_title("Batches into device memory")
    cached = chosen(found, "device cache, ", "images_per_s")
    cached += (
        [("host cache, photos", found["host cache, augmented"], "images_per_s")]
        if "host cache, augmented" in found
        else []
    )
    bars(rates, cached, "images/s, augmented to bfloat16", log=True)
    rates.set_title("Rows that stay")
    bars(copies, chosen(found, "copy ", "gb_per_s"), "GB/s", log=True)
    copies.set_title("What a plain copy reaches")
    bars(seconds, chosen(found, "CPU seconds per 1,000, ", "cpu_s_per_1000"), "CPU seconds per 1,000 images", log=True)
    seconds.set_title("CPU time")
    return figure


def training(found: Figures) -> Figure:
    """The ratio to the cached-batch step, and with it images/s, utilization and stalls."""
    rows = chosen(found, "training ", "ratio")
    lines = max(3, len(rows))
    figure, (ratio, table) = plt.subplots(1, 2, figsize=(13, 1.6 + 0.55 * lines),
                                          gridspec_kw={"width_ratios": [1, 1.25]})  # fmt: skip
    bars(ratio, rows, "images/s over those of the same step on one cached batch")
    ratio.set_ylim(lines - 0.5, -0.5)
    ratio.set_title("Training")
    table.axis("off")
    if rows:
        cells = [[f"{_middle(value.get('images_per_s')):,.0f}", f"{_middle(value.get('cached_images_per_s')):,.0f}",
                  _percent(value.get("counters", {}).get("utilization_percent", {}).get("mean"), 1),
                  _percent(value.get("stall_share")), _percent(value.get("watched_gap_share")),
                  _middle_text(value.get("counters", {}).get("power_w", {}).get("mean"))]
                 for _, value, _ in rows]  # fmt: skip
        cells += [[""] * len(cells[0])] * (lines - len(rows))
        heads = ["images/s", "cached batch", "GPU utilization", "stall share\n(loader)", "gaps between\nsteps", "watts"]
        drawn = table.table(
            cellText=cells, colLabels=heads, loc="center", cellLoc="center", bbox=[0, 0, 1, 1 + 1 / lines]
        )
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(8.5)
        for cell in drawn.get_celld().values():
            cell.set_edgecolor("#e6eaec")
    return figure


def step_rate(found: Figures) -> Figure | None:
    """The ratio to the cached-batch step against the rate of that step; None: it was not measured."""
    if not any(name.startswith("highest step rate") for name in found):
        return None
    figure, axes = plt.subplots(figsize=(8.5, 4.6))
    axes.grid(color="#e6eaec")
    for cache, name in NAMES.items():
        sweep = found.get(f"highest step rate, cache {cache}")
        if sweep is None:
            continue
        points = sorted(sweep["points"], key=lambda point: float(point["images_per_s"]))
        rates = [point["images_per_s"] for point in points]
        ratios = [point["ratio"] for point in points]
        axes.fill_between(rates, [r["lowest"] for r in ratios], [r["highest"] for r in ratios], color=COLORS[cache],
                          alpha=0.15, lw=0)  # fmt: skip
        axes.plot(rates, [r["median"] for r in ratios], "o-", color=COLORS[cache], ms=4,
                  label=f"{name}: 0.99 up to {sweep['value']:,.0f} images/s")  # fmt: skip
    axes.axhline(0.99, color=plots.TARGET, lw=1, ls="--")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("rate of the synthetic step on one cached batch, images/s")
    axes.set_ylabel("from FastLoader / on one cached batch")
    axes.set_title("How short a step may be, batches of augmented photos")
    axes.legend(loc="lower left")
    return figure


def _middle(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value if value is not None else "nan")


def _middle_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None, of: float = 0.01) -> str:
    return "-" if value is None else f"{value / of:.1f} %"


def draw(path: Path) -> list[Path]:
    """All plots of a record, beside it."""
    found, record = read(path)
    plots.style()
    written = []
    pictures: dict[str, Callable[[Figures], Figure | None]] = {
        "kernel": kernel, "feed": feed, "training": training, "step_rate": step_rate,
    }  # fmt: skip
    for name, picture in pictures.items():
        if (figure := picture(found)) is None:
            continue
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        machine, versions, device = (record.get(key, {}) for key in ("machine", "versions", "device"))
        figure.text(
            0.01, 0.008,
            f"{device.get('name', 'unknown device')}, {machine.get('cpu', '?')}, {machine.get('cores', '?')} cores; "
            f"fastload ({record.get('commit', '?')}), torch {versions.get('torch', '?')}, "
            f"triton {versions.get('triton', '?')}; page cache warm; "
            f"lines: lowest to highest, red: target, at least; {record['time'][:10]}",
            fontsize=7, color="#5b6b73",
        )  # fmt: skip
        written.append(path.with_name(f"gpu_{name}.png"))
        figure.savefig(written[-1])
        plt.close(figure)
    return written


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1])):
        print(drawn)
