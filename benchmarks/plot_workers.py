"""Draw the figures of bench_workers.py: `python benchmarks/plot_workers.py [results/workers.jsonl] [workers.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

from plots import Group, draw_groups

WORKERS = Group(
    "Two worker processes, rows of 218x178x3, batches of 256",
    "plain DataLoader, 2 workers",
    {
        "workers": "transform does nothing,\nmain thread idle",
        "workers-train": "main thread trains\na small net",
        "workers-python": "main thread runs\npure Python",
        "workers-new": "transform makes\na new image",
        "workers-list": "every batch kept",
        "folder": "JPEG files, Pillow",
    },
)
OTHERS = Group(
    "Threads",
    "full shuffle / one rank",
    {
        "cold": "cold disk: chunk windows\nover full shuffle",
        "cold-128": "the same, read-ahead\nof 128 KiB",
        "cold-small": "cold disk,\nrows of 32x32x3",
        "cold-small-128": "the same, read-ahead\nof 128 KiB",
        "two-ranks": "two ranks over one",
    },
)

if __name__ == "__main__":
    draw_groups("workers", [WORKERS, OTHERS])
