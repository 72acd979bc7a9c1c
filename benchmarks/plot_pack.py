"""Draw the packer's figures: `python benchmarks/plot_pack.py [results/pack.jsonl] [results/pack.png]`."""

from __future__ import annotations

import sys

from matplotlib import pyplot as plt

import plots


def main() -> None:
    """Read the last run of each figure and draw."""
    source, picture = plots.paths("pack")
    found = plots.latest(source)
    if not {"pack", "pack-disk"} <= set(found):
        sys.exit(f"{source}: needs the figures `decode` and `disk` of bench_pack.py")
    plots.style()
    figure, (speed, disk) = plt.subplots(1, 2, figsize=(12, 3.4))
    pack, to_disk = found["pack"], found["pack-disk"]
    plots.bar_pairs(speed, ["to tmpfs"], [pack], "read and decode, pixels dropped (2 processes)", "images/s")
    target = float(pack["target"].split()[-1])
    speed.plot([target * pack["base"]["median"]] * 2, [-0.37, 0.0], color=plots.TARGET, lw=2, label="target")
    speed.set_title(f"fastload pack, 2 workers: {pack['ratio']['median']:.2f} of bare decoding")
    plots.bar_pairs(disk, ["to disk,\nwith fsync"], [to_disk], "one sequential write and fsync", "MB/s")
    disk.set_title(f"{to_disk['ratio']['median']:.2f} of the disk's own write rate")
    for axes in (speed, disk):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    plots.save(figure, pack, picture)


if __name__ == "__main__":
    main()
