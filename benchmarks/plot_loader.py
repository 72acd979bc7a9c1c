"""Draw the loader's figures: `python benchmarks/plot_loader.py [results/loader.jsonl] [results/loader.png]`.

Left: images a second of FastLoader and of the bare copy. Right: the ratios with their targets, and how many times
faster than the usual ways FastLoader is.
"""

from __future__ import annotations

import sys

from matplotlib import pyplot as plt

import plots

OVER_TAKE = {
    "take": "main thread idle,\ntouches each page",
    "take-train": "main thread trains\na small net",
    "take-python": "main thread runs\npure Python",
    "take32": "32x32x3 rows,\nbatches of 1,024",
}
OVER_PLAIN = {
    "h5py": "h5py dset[i],\nDataLoader(num_workers=2)",
    "jpeg": "JPEG files, Pillow,\nDataLoader(num_workers=2)",
}


def main() -> None:
    """Read the last run of each figure and draw."""
    source, picture = plots.paths("loader")
    found = plots.latest(source)
    take = {name: label for name, label in OVER_TAKE.items() if name in found}
    plain = {name: label for name, label in OVER_PLAIN.items() if name in found}
    large = [name for name in take if name != "take32"]
    if not large and not plain:
        sys.exit(f"{source}: no figures of bench_loader.py in it")
    plots.style()
    figure, ((speed, ratio), (usual, times)) = plt.subplots(
        2, 2, figsize=(12, 7.2), gridspec_kw={"width_ratios": [1.6, 1], "height_ratios": [max(2, len(take)), 2]}
    )
    if large:
        records = [found[name] for name in large]
        plots.bar_pairs(speed, [take[name] for name in large], records, "np.take, one thread", "images/s")
        speed.set_title("Rows of 218x178x3, batches of 256, beside the bare copy of the same rows")
        speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        plots.ratio_dots(ratio, list(take.values()), [found[name] for name in take], "FastLoader / np.take")
        ratio.set_title("Ratio")
        ratio.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13))
    if plain:
        records = [found[name] for name in plain]
        plots.bar_pairs(usual, list(plain.values()), records, "the usual way", "images/s")
        usual.set_title("Beside the usual ways")
        usual.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
        plots.ratio_dots(times, list(plain.values()), records, "times as fast")
        times.set_title("Ratio")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    plots.save(figure, found[(large or list(plain))[0]], picture)


if __name__ == "__main__":
    main()
