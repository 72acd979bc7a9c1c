"""Passes by the kernel, in Triton's interpreter, against the same passes by torch: run by test_fuse.py, in a process of
its own with TRITON_INTERPRET=1. Prints one line a case, and fails at the first difference."""

from __future__ import annotations

import numpy as np
import torch

from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Draws,
    Grayscale,
    ImageSpec,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from fastload.transforms.engine.pipeline import DrawnPass, FusedPass, passes_of, run_pass
from fastload.transforms.engine.placement import ImageRows, PlacedImages, windows

RGB = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
CASES = {
    "imagenet": ([RandomResizedCrop((7, 11)), RandomHorizontalFlip(), Normalize(*RGB)], 3),
    "bfloat16": ([Resize(12), RandomCrop((7, 17)), RandomVerticalFlip(), Normalize(*RGB, dtype=torch.bfloat16)], 3),
    "colour": (
        [RandomResizedCrop((8, 12)), ColorJitter(0.4, 0.4, 0.4, 0.2), RandomHorizontalFlip(), Normalize(*RGB)],
        3,
    ),
    "gray": ([CenterCrop((6, 15)), RandomGrayscale(0.5), Grayscale(3)], 3),
    "erased": ([RandomCrop((8, 15)), RandomErasing(p=0.7, value=(9, 80, 200)), Normalize(*RGB)], 3),
    "cutout": ([Cutout(7, fill=100)], 3),
    "only normalized": ([Normalize([0.5], [0.25], dtype=torch.float16)], 1),
    "padded": ([RandomCrop((18, 25), padding=4, fill=(9, 80, 200)), RandomHorizontalFlip(), Normalize(*RGB)], 3),
    "turned and padded": (
        [
            RandomVerticalFlip(),
            RandomHorizontalFlip(),
            RandomCrop((20, 30), padding=(5, 8), padding_mode="reflect"),
            RandomVerticalFlip(),
            CenterCrop((17, 29)),
            RandomHorizontalFlip(),
        ],
        3,
    ),
    "padded by edges": ([RandomCrop((36, 40), pad_if_needed=True, padding_mode="edge"), RandomHorizontalFlip()], 1),
    "padded by all it shows": (
        [RandomHorizontalFlip(), RandomCrop((24, 26), padding=(22, 16), padding_mode="symmetric"), RandomErasing()],
        4,
    ),
    "padded and coloured": ([RandomCrop((8, 23), padding=3, fill=7), ColorJitter(0.4, 0.4), RandomHorizontalFlip()], 3),
    "four channels": ([RandomResizedCrop((7, 16)), Normalize([0.5] * 4, [0.25] * 4)], 4),
}


def main() -> None:
    for name, (transforms, channels) in CASES.items():
        values = np.random.default_rng(3).integers(0, 256, (9, 16, 25, channels), np.uint8)
        images = torch.from_numpy(values).permute(0, 3, 1, 2)
        rows = torch.tensor([4, 8, 8])
        spec = ImageSpec.of(images)
        (part,) = passes_of(transforms, spec)
        assert isinstance(part, FusedPass), name
        draws = Draws(1, 2, rows.numpy())
        words = torch.empty(part.words.number(len(rows)), dtype=torch.int32)
        placement = part.draw(draws, words.numpy())
        undrawn = DrawnPass(placement, placement.resized)
        expected = run_pass(part, images[rows], draws, undrawn)
        drawn = undrawn._replace(tables=part.words.tables(words, slice(0, len(rows)), len(rows)))
        for given in (images[rows], ImageRows(torch.from_numpy(values), rows)):
            got = run_pass(part, given, draws, drawn)
            assert got.shape == expected.shape and got.dtype == expected.dtype, name
            assert got.permute(0, 2, 3, 1).is_contiguous(), name
            scale = 1 / 255 / min(part.normalize.std) if part.normalize else 1
            # A level by which the resize was rounded otherwise may grow by the factors of colour, at most 1.4 each.
            levels = (got.float() - expected.float()).abs() / scale
            rounding = (
                2 * torch.finfo(expected.dtype).eps * expected.float().abs().max() / scale if part.normalize else 0
            )
            most = 3.5 if part.colours else 1 if placement.resized else 0
            assert levels.max() <= most + rounding + 1e-3, f"{name}: {levels.max()} levels"
            assert (levels > 0.01 + rounding).float().mean() < 0.2, f"{name}: too many differ"
        check_placed_images(part, (expected, got), images[rows], draws, (undrawn, drawn))
        print(name)


def check_placed_images(
    part: FusedPass,
    expected: tuple[torch.Tensor, torch.Tensor],
    images: torch.Tensor,
    draws: Draws,
    drawn: tuple[DrawnPass, DrawnPass],
) -> None:
    """The same pixels, as parts of images of their own sizes; `expected` one by one and of the kernel."""
    spec, channels = ImageSpec.of(images), images.shape[1]
    inside = np.arange(2 * len(images)).reshape(-1, 2) % 5
    sizes = np.array([[spec.height, spec.width]]) + inside + 3
    whole = [torch.full((channels, *size), 77, dtype=torch.uint8) for size in sizes.tolist()]
    for one, image, (top, left) in zip(whole, images, inside.tolist(), strict=True):
        one[:, top : top + spec.height, left : left + spec.width] = image
    areas = sizes.prod(axis=1)
    layout = np.stack([channels * (areas.cumsum() - areas), sizes[:, 1], areas], axis=1)
    shown = windows(inside, spec.sizes)
    pixels = torch.cat([one.reshape(-1) for one in whole])
    placed = PlacedImages(pixels, torch.from_numpy(layout), sizes, channels, shown)
    assert placed.spec == spec
    assert torch.equal(run_pass(part, placed, draws, drawn[0]), expected[0]), "made one by one"
    assert torch.equal(run_pass(part, placed, draws, drawn[1]), expected[1]), "made by the kernel"


if __name__ == "__main__":
    main()
