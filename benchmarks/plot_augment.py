"""Draw the figures of bench_augment.py: `python benchmarks/plot_augment.py [results/augment.jsonl] [augment.png]`.

Left: images a second of both ways. Right: the ratios with their targets.
"""

from __future__ import annotations

from plots import Group, draw_groups

RESIZE = Group(
    "256x256 -> RandomResizedCrop 224 + flip, two threads",
    "cv2.resize alone, not antialiased, 2 threads",
    {
        "resize": "uint8, main thread idle",
        "resize-train": "main thread trains\na small net",
        "resize-python": "main thread runs\npure Python",
        "resize-kernel": "the call alone",
        "resize-antialiased": "over cv2 INTER_AREA",
        "window-only": "windows from the mapping\nover whole rows",
    },
)
WHOLE = Group(
    "As float32 batches",
    "plain DataLoader, 2 workers",
    {
        "normalized": "+ Normalize to float32,\nover Pillow",
        "normalized-opencv": "the same, over OpenCV",
        "jitter": "+ ColorJitter,\nover Pillow",
    },
)

if __name__ == "__main__":
    draw_groups("augment", [RESIZE, WHOLE])
