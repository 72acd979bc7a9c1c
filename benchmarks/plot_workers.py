"""Draw the figures of bench_workers.py: `python benchmarks/plot_workers.py [results/workers.jsonl] [workers.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import pyplot as plt

import plots

RESULTS = Path(__file__).resolve().parent / "results"
WORKERS = {
    "workers": "transform does nothing,\nmain thread idle",
    "workers-train": "main thread trains\na small net",
    "workers-python": "main thread runs\npure Python",
    "workers-new": "transform makes\na new image",
    "workers-list": "every batch kept",
    "folder": "JPEG files, Pillow",
}
OTHERS = {
    "cold": "cold disk: chunk windows\nover full shuffle",
    "cold-128": "the same, read-ahead\nof 128 KiB",
    "cold-small": "cold disk,\nrows of 32x32x3",
    "cold-small-128": "the same, read-ahead\nof 128 KiB",
    "two-ranks": "two ranks over one",
}


def main() -> None:
    """Read the last run of each figure and draw."""
    words = [Path(word) for word in sys.argv[1:]]
    source = words[0] if words else RESULTS / "workers.jsonl"
    found = plots.latest(source)
    rows = [{name: label for name, label in group.items() if name in found} for group in (WORKERS, OTHERS)]
    rows = [row for row in rows if row]
    if not rows:
        sys.exit(f"{source}: no figures of bench_workers.py in it")
    plots.style()
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(12, 2.2 + 0.75 * sum(map(len, rows))), squeeze=False,
        gridspec_kw={"width_ratios": [1.6, 1], "height_ratios": [len(row) + 0.6 for row in rows]},
    )  # fmt: skip
    for (speed, ratio), row in zip(axes, rows, strict=True):
        records = [found[name] for name in row]
        with_workers = row.keys() <= WORKERS.keys()
        base = "plain DataLoader, 2 workers" if with_workers else "full shuffle / one rank"
        plots.bar_pairs(speed, list(row.values()), records, base, "images/s")
        speed.set_title("Two worker processes, rows of 218x178x3, batches of 256" if with_workers else "Threads")
        speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14 if with_workers else -0.26), ncols=2)
        plots.ratio_dots(ratio, list(row.values()), records, "times as fast")
        ratio.set_title("Ratio")
    axes[0][1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    first = found[next(iter(rows[0]))]
    plots.save(figure, first, words[1] if len(words) > 1 else source.with_suffix(".png"))


if __name__ == "__main__":
    main()
