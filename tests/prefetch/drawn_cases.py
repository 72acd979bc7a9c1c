"""Loaders whose batches go through the kernel, in Triton's interpreter, with numbers that were drawn ahead and at the
hand-over: run by test_drawn_ahead.py, in a process of its own with TRITON_INTERPRET=1. Prints one line a case."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from late_backend import Device

import fastload.transforms.engine.pipeline as engine
from fastload.loader.loader import FastLoader
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Normalize,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from fastload.transforms.engine.pipeline import FusedPass, drawn_now
from sample_files import write_packed

NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
CASES = {
    "imagenet": [RandomResizedCrop((3, 4)), RandomHorizontalFlip(), NORMALIZE],
    "colour and erasing": [RandomResizedCrop((3, 5)), ColorJitter(0.3, 0.3), RandomErasing(p=0.7, value=9), NORMALIZE],
    "two passes": [Resize(6), RandomHorizontalFlip(), Cutout(3), CenterCrop(4), NORMALIZE],
}  # fmt: skip


def main() -> None:
    FusedPass.runs_by_kernel = lambda self, device: True  # of the fake device, whose tensors lie on the CPU
    with tempfile.TemporaryDirectory() as folder:
        images = np.random.default_rng(0).integers(0, 256, (4, 9, 8, 3), np.uint8)
        path = write_packed(Path(folder) / "file.h5", images)
        for name, transform in CASES.items():
            for cache in (None, "device"):
                drawn = {"ahead": 0, "now": 0}

                def counted(*args):
                    drawn["now"] += 1  # noqa: B023  # called in this turn
                    return drawn_now(*args)

                engine.drawn_now = counted
                options = {"transform": transform, "cache": cache, "seed": 1}
                ahead = [batch[0].clone() for batch in FastLoader(path, 2, device=Device(), echo=2, **options)]
                assert drawn["now"] == 0, f"{name}: drawn in the training thread"
                loader = FastLoader(path, 2, device=Device(), echo="auto", **options)
                loader._echo.adopt(2)
                late = [batch[0].clone() for batch in loader]
                assert drawn["now"] > 0, f"{name}: the second use was not known of"
                assert len(ahead) == len(late) == 4
                assert all(torch.equal(one, other) for one, other in zip(ahead, late, strict=True)), name
                assert not torch.equal(ahead[0], ahead[1]), f"{name}: each use is drawn anew"
            print(name)


if __name__ == "__main__":
    main()
