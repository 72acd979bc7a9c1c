"""What all plots share: the last record of each figure, the command line, pairs of bars, and one look."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a server has no screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
OURS, BASE, TARGET = "#1f6f8b", "#b8c4ca", "#c0392b"


@dataclass(frozen=True)
class Group:
    """Figures that are drawn in one row: a title, the name of the other way, and the label of each figure."""

    title: str
    base: str
    labels: dict[str, str]


def paths(name: str) -> tuple[Path, Path]:
    """The results of bench_NAME.py and the picture to draw, as the command line says, or where they usually are."""
    words = [Path(word) for word in sys.argv[1:]]
    source = words[0] if words else RESULTS / f"{name}.jsonl"
    return source, words[1] if len(words) > 1 else source.with_suffix(".png")


def latest(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each figure in a file of JSON lines; trial runs (`--quick`) are passed over."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {record["figure"]: record for record in records if not record["options"].get("quick")}


def style() -> None:
    """One look for all plots."""
    plt.rcParams.update({
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 10.5,
        "figure.dpi": 130, "legend.frameon": False,
    })  # fmt: skip


def bar_pairs(axes: Axes, labels: list[str], records: list[dict[str, Any]], base_name: str, unit: str) -> None:
    """Two bars a record, ours and the base, with the range of their runs and the ratio at the end."""
    axes.grid(axis="x", color="#e6eaec")
    for place, record in enumerate(records):
        for offset, name, color in ((-0.19, "way", OURS), (0.19, "base", BASE)):
            value = record[name]
            low, high = value["median"] - value["lowest"], value["highest"] - value["median"]
            axes.barh(place + offset, value["median"], 0.36, color=color, xerr=[[low], [high]],
                      error_kw={"ecolor": "#44525a", "lw": 1, "capsize": 2})  # fmt: skip
            axes.annotate(f"{value['median']:,.0f}", (value["highest"], place + offset), xytext=(5, 0),
                          textcoords="offset points", va="center", fontsize=8.5)  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_xlim(0, 1.17 * max(max(record["way"]["highest"], record["base"]["highest"]) for record in records))
    axes.barh([-9], [0], color=OURS, label="fastload")
    axes.barh([-9], [0], color=BASE, label=base_name)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def ratio_dots(axes: Axes, labels: list[str], records: list[dict[str, Any]], unit: str) -> None:
    """The ratio of each record with its range, and its target as a red tick."""
    axes.grid(axis="x", color="#e6eaec")
    for place, record in enumerate(records):
        ratio = record["ratio"]
        axes.plot([ratio["lowest"], ratio["highest"]], [place, place], color=OURS, lw=2, solid_capstyle="round")
        axes.plot(ratio["median"], place, "o", color=OURS, ms=7)
        axes.annotate(f"{ratio['median']:.3g}", (ratio["highest"], place), xytext=(7, 0), textcoords="offset points",
                      va="center", fontsize=8.5)  # fmt: skip
        if record["target"].startswith(">= "):
            axes.plot(float(record["target"][3:]), place, "|", color=TARGET, ms=20, mew=2)
    axes.plot([], [], "|", color=TARGET, ms=12, mew=2, label="target: at least")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.set_xlim(0, 1.15 * max(record["ratio"]["highest"] for record in records))
    axes.set_xlabel(unit)


def draw_groups(name: str, groups: Sequence[Group]) -> None:
    """Draws the figures of bench_NAME.py: a row for each group, the rates of both ways left, the ratios right."""
    source, picture = paths(name)
    found = latest(source)
    groups = [replace(one, labels={key: one.labels[key] for key in one.labels if key in found}) for one in groups]
    groups = [one for one in groups if one.labels]
    if not groups:
        sys.exit(f"{source}: no figures of bench_{name}.py in it")
    style()
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(12, 2.2 + 0.75 * sum(len(one.labels) for one in groups)), squeeze=False,
        gridspec_kw={"width_ratios": [1.6, 1], "height_ratios": [len(one.labels) + 0.6 for one in groups]},
    )  # fmt: skip
    for (speed, ratio), group in zip(axes, groups, strict=True):
        records, labels = [found[key] for key in group.labels], list(group.labels.values())
        bar_pairs(speed, labels, records, group.base, "images/s")
        speed.set_title(group.title)
        speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.8 / len(labels)), ncols=2)
        ratio_dots(ratio, labels, records, "times as fast")
        ratio.set_title("Ratio")
    axes[0][1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.8 / len(groups[0].labels)))
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, found[next(iter(groups[0].labels))], picture)


def save(figure: Figure, record: dict[str, Any], path: Path, how: str = "") -> None:
    """The figure as PNG, with the conditions under it; `how` it was measured, if not in pairs with a warm cache."""
    machine, versions = record["machine"], record["versions"]
    how = how or f"page cache warm; median of {record['options']['pairs']} pairs in turn, lines: lowest to highest"
    figure.text(
        0.01, 0.005,
        f"{machine['cpu']}, {machine['cores']} cores; fastload {versions['fastload']} ({record['commit']}), "
        f"Python {versions['python']}, torch {versions['torch']}, NumPy {versions['numpy']}; {how}; "
        f"{record['time'][:10]}",
        fontsize=7, color="#5b6b73",
    )  # fmt: skip
    figure.savefig(path)
    print(path)
