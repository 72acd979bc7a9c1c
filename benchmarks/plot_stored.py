"""Draw the figures of bench_stored.py: `python benchmarks/plot_stored.py [results/stored.jsonl] [stored.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

from plots import Group, draw_groups

GROUPS = [
    Group(
        "Over the libraries alone, two threads",
        "the libraries alone",
        {
            "ragged": "pixels of several sizes,\nover cv2.resize",
            "ragged-train": "main thread trains\na small net",
            "ragged-python": "main thread runs\npure Python",
            "jpeg": "their own JPEGs, over\nsimplejpeg + cv2.resize",
            "jpeg-train": "main thread trains\na small net",
            "jpeg-python": "main thread runs\npure Python",
            "jpeg-made": "JPEGs made by fastload",
            "jpeg-large": "photos of 1,200 x 1,600",
        },
    ),
    Group(
        "Over a JPEG folder with Pillow in a plain DataLoader, two workers",
        "plain DataLoader, 2 workers",
        {"folder": "clothing photos", "folder-large": "photos of 1,200 x 1,600"},
    ),
    Group("zstd masks over raw ones", "raw masks", {"masks": "CamVid, 360 x 480"}),
]

if __name__ == "__main__":
    draw_groups("stored", GROUPS)
