"""Draw the figures of bench_stored.py: `python benchmarks/plot_stored.py [results/stored.jsonl] [stored.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import pyplot as plt

import plots

RESULTS = Path(__file__).resolve().parent / "results"
GROUPS = {
    "Over the libraries alone, two threads": {
        "ragged": "pixels of several sizes,\nover cv2.resize",
        "ragged-train": "main thread trains\na small net",
        "ragged-python": "main thread runs\npure Python",
        "jpeg": "their own JPEGs, over\nsimplejpeg + cv2.resize",
        "jpeg-train": "main thread trains\na small net",
        "jpeg-python": "main thread runs\npure Python",
        "jpeg-made": "JPEGs made by fastload",
        "jpeg-large": "photos of 1,200 x 1,600",
    },
    "Over a JPEG folder with Pillow in a plain DataLoader, two workers": {
        "folder": "clothing photos",
        "folder-large": "photos of 1,200 x 1,600",
    },
    "zstd masks over raw ones": {"masks": "CamVid, 360 x 480"},
}


def main() -> None:
    """Read the last run of each figure and draw."""
    words = [Path(word) for word in sys.argv[1:]]
    source = words[0] if words else RESULTS / "stored.jsonl"
    found = plots.latest(source)
    groups = {title: {name: label for name, label in group.items() if name in found} for title, group in GROUPS.items()}
    groups = {title: group for title, group in groups.items() if group}
    if not groups:
        sys.exit(f"{source}: no figures of bench_stored.py in it")
    plots.style()
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(12, 3 + 0.75 * sum(map(len, groups.values()))), squeeze=False,
        gridspec_kw={"width_ratios": [1.6, 1], "height_ratios": [len(group) + 0.8 for group in groups.values()]},
    )  # fmt: skip
    for (speed, ratio), (title, group) in zip(axes, groups.items(), strict=True):
        records = [found[name] for name in group]
        plots.bar_pairs(speed, list(group.values()), records, "the other way", "images/s")
        speed.set_title(title)
        plots.ratio_dots(ratio, list(group.values()), records, "times as fast")
        ratio.set_title("Ratio")
    for axis, below in ((axes[-1][0], -0.5), (axes[-1][1], -0.5)):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=2)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    first = found[next(iter(next(iter(groups.values()))))]
    plots.save(figure, first, words[1] if len(words) > 1 else source.with_suffix(".png"))


if __name__ == "__main__":
    main()
