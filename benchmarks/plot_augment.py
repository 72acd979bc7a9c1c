"""Draw the figures of bench_augment.py: `python benchmarks/plot_augment.py [results/augment.jsonl] [augment.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import pyplot as plt

import plots

RESULTS = Path(__file__).resolve().parent / "results"
RESIZE = {
    "resize": "uint8, main thread idle",
    "resize-train": "main thread trains\na small net",
    "resize-python": "main thread runs\npure Python",
    "resize-kernel": "the call alone",
    "resize-antialiased": "over cv2 INTER_AREA",
    "window-only": "windows from the mapping\nover whole rows",
}
WHOLE = {
    "normalized": "+ Normalize to float32,\nover Pillow",
    "normalized-opencv": "the same, over OpenCV",
    "jitter": "+ ColorJitter,\nover Pillow",
}


def main() -> None:
    """Read the last run of each figure and draw."""
    words = [Path(word) for word in sys.argv[1:]]
    source = words[0] if words else RESULTS / "augment.jsonl"
    found = plots.latest(source)
    rows = [{name: label for name, label in group.items() if name in found} for group in (RESIZE, WHOLE)]
    rows = [row for row in rows if row]
    if not rows:
        sys.exit(f"{source}: no figures of bench_augment.py in it")
    plots.style()
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(12, 2.2 + 0.75 * sum(map(len, rows))), squeeze=False,
        gridspec_kw={"width_ratios": [1.6, 1], "height_ratios": [len(row) + 0.6 for row in rows]},
    )  # fmt: skip
    for (speed, ratio), row in zip(axes, rows, strict=True):
        records = [found[name] for name in row]
        resize = row.keys() <= RESIZE.keys()
        base = "cv2.resize alone, not antialiased, 2 threads" if resize else "plain DataLoader, 2 workers"
        plots.bar_pairs(speed, list(row.values()), records, base, "images/s")
        speed.set_title("256x256 -> RandomResizedCrop 224 + flip, two threads" if resize else "As float32 batches")
        speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14 if resize else -0.26), ncols=2)
        plots.ratio_dots(ratio, list(row.values()), records, "times as fast")
        ratio.set_title("Ratio")
    axes[0][1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    first = found[next(iter(rows[0]))]
    plots.save(figure, first, words[1] if len(words) > 1 else source.with_suffix(".png"))


if __name__ == "__main__":
    main()
