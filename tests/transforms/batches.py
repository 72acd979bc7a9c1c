"""What the tests of transforms share: transforms, batches, draws, and checks of memory and of waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)

EVERY = [
    RandomHorizontalFlip(0.2),
    RandomVerticalFlip(0.4),
    RandomCrop((5, 4), padding=2, padding_mode="reflect"),
    RandomCrop((4, 3), padding=(1, 2)),
    CenterCrop(4),
    Resize((5, 6)),
    RandomResizedCrop(9),
    ColorJitter(0.5, 0.5, 0.5, 0.3),
    Grayscale(1),
    Grayscale(3),
    RandomGrayscale(0.5),
    RandomErasing(0.5, value="random"),
    RandomErasing(value=3),
    Cutout(2),
    RandAugment(3, 25, 31, (1, 2, 3)),
    Normalize(np.array([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3]), torch.bfloat16),
]


LAYOUTS = ("nhwc", "nchw", "strided")


def some_images(count, height=12, width=11, dtype=np.uint8, *, channels=3, layout="nhwc", seed=0) -> torch.Tensor:
    """A random batch (B, C, H, W): channels_last, contiguous, or every second image, row and pixel of a larger one."""
    wide = 2 if layout == "strided" else 1
    largest = 65535 if np.dtype(dtype).kind == "f" else min(np.iinfo(dtype).max, 65535)
    shape = count, height, width, channels
    values = np.random.default_rng(seed).integers(0, largest, shape, endpoint=True).astype(dtype)
    for axis in range(3):
        values = np.repeat(values, wide, axis)
    images = torch.from_numpy(values)[::wide, ::wide, ::wide].permute(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images.numpy())) if layout == "nchw" else images


def applied(transform, images: torch.Tensor, draws: Draws) -> list[torch.Tensor]:
    """Images, and masks, points and boxes where they follow."""
    made = [transform.apply(images, draws)]
    if transform.geometric:
        masks, points = images[:, 0].contiguous(), images[:, 0, :4, :2].float()
        made.append(transform.apply_masks(masks, draws, 255))
        made.append(transform.move_points(points, ImageSpec.of(images), draws))
        made.append(transform.move_boxes(points.flatten(1)[:, :4], ImageSpec.of(images), draws))
    return made


def draws_for(batch: int, epoch: int = 0) -> Draws:
    return Draws(3, epoch, np.arange(batch) * 7 + 1)


def in_channels_last_memory(images: torch.Tensor) -> bool:
    return images.permute(0, 2, 3, 1).is_contiguous()


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within, whatever waits for the device raises."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
