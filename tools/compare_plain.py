"""Time the plain way (JPEG files, Pillow, DataLoader) against FastLoader on the same images, in turn.

    python tools/compare_plain.py SOURCE_FOLDER PACKED.h5 [--rounds 5] [--workers 2] [--json FILE]

Each round runs both, first the one, then the other, then the other way round; both hand out shuffled uint8 batches and
the consumer touches every pixel. The ratio is the median over the rounds. The page cache is warm: both have read
everything once before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastload import FastLoader, PackedDataset, inspect_file

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}


class ImageFiles(Dataset[Tensor]):
    """What most training scripts do: open, decode and resize one file an item; uint8 (3, H, W)."""

    def __init__(self, files: list[Path], height: int, width: int, fit: str) -> None:
        self.files, self.height, self.width, self.fit = files, height, width, fit

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.files[index]) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
        size = (self.width, self.height)
        if image.size != size:
            image = {"crop": ImageOps.fit, "pad": ImageOps.pad, "stretch": Image.Image.resize}[self.fit](image, size)
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*size[::-1], 3).permute(2, 0, 1)


def drain(loader: DataLoader[Tensor] | FastLoader, seconds: float) -> float:
    """Images a second over whole epochs, as many as it takes to fill that time."""
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        for batch in loader:
            images = batch if isinstance(batch, Tensor) else batch[0]
            # One pass over every pixel in the order of memory.
            flat = images if images.is_contiguous() else images.permute(0, 2, 3, 1)
            flat.reshape(-1).max()
            count += len(images)
    return count / elapsed


def main() -> None:
    """Measure, print a line for each way, and write them down where asked."""
    parser = argparse.ArgumentParser(description="Time JPEG files + Pillow + DataLoader against FastLoader, in turn.")
    parser.add_argument("source", type=Path, help="the folder that was packed")
    parser.add_argument("packed", type=Path, help="what `fastload pack` made of it")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2, help="of the plain DataLoader (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="least time for each way and round (default: 2)")
    parser.add_argument("--fit", choices=["crop", "pad", "stretch"], default="crop", help="as the file was packed")
    parser.add_argument("--json", type=Path, help="file to write the figures into")
    options = parser.parse_args()

    files = sorted(file for file in options.source.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f"{options.source}: no image files in it; the plain way needs them unpacked")
    height, width = inspect_file(options.packed).fields["images"].shape[1:3]
    plain = DataLoader(
        ImageFiles(files, height, width, options.fit),
        options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    packed = FastLoader(PackedDataset(options.packed, fields=["images"]), options.batch_size, ends="exact")
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: drain(plain, options.seconds),
        "fastload": lambda: drain(packed, options.seconds),
    }
    for run in ways.values():  # warm-up: starts the workers and fills the page cache
        run()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            rates[name].append(ways[name]())
    ratios = [fast / slow for fast, slow in zip(rates["fastload"], rates["plain"], strict=True)]
    figures = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(ratios)
    print(f"image files + Pillow + DataLoader(num_workers={options.workers}): {figures['plain']:,.0f} images/s")
    print(f"FastLoader: {figures['fastload']:,.0f} images/s")
    print(f"{ratio:.1f} times as fast (median of {len(ratios)} pairs, {min(ratios):.1f} to {max(ratios):.1f})")
    if options.json:
        options.json.write_text(json.dumps({**figures, "ratio": ratio, "ratios": ratios}) + "\n")


if __name__ == "__main__":
    main()
