"""The augmentations that `gpu.py` measures, in fastload's words and in torchvision's, and what they must move."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fastload import transforms as fast
from fastload.transforms import Draws, ImageSpec, apply_transforms
from fastload.transforms.engine import gpu

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}


class AbsentError(Exception):
    """What is to be measured is not in this tree, or not on this machine: said, and no failure."""


class Launches:
    """Stands before a function of a module: counts its calls, and gives it what `options` say besides.

    Only what ran is a figure of the kernel.
    """

    def __init__(self, module: Any, name: str = "fused") -> None:
        self.seen = self.count = 0
        self.options: dict[str, Any] = {}
        launch = getattr(module, name)

        @functools.wraps(launch)
        def counted(*args: Any, **options: Any) -> Any:
            result = launch(*args, **(options | self.options))
            self.count += 1
            return result

        setattr(module, name, counted)

    def any_since_last(self) -> bool:
        """Whether there were calls since this was asked last."""
        any_new, self.seen = self.count > self.seen, self.count
        return any_new

    @contextmanager
    def using(self, **options: Any) -> Iterator[None]:
        """Calls in the block get these options."""
        self.options = options
        try:
            yield
        finally:
            self.options = {}


launches = Launches(gpu)
gathers = Launches(gpu, "gather_rows")


def path_taken() -> str:
    """Which way batches went since this was asked last: "fused" if the kernel was launched, else "torch"."""
    return "fused" if launches.any_since_last() else "torch"


def void_unless_fused(kind: str) -> dict[str, Any]:
    """The path that ran, and `void` where a figure of the kernel was taken without it."""
    path = path_taken()
    return {"path": path, **({"void": "the fused kernel did not run"} if kind == "cuda" and path != "fused" else {})}


def void_unless_gathered(kind: str) -> dict[str, Any]:
    """What gathered rows of pinned memory since this was asked last, and `void` where that was the CPU beside a GPU."""
    rows = "gather_rows" if gathers.any_since_last() else "CPU"
    return {"rows": rows, **({"void": "the CPU gathered the rows"} if kind == "cuda" and rows == "CPU" else {})}


def kernel_configurations() -> list[gpu.Blocks]:
    """The ways that the kernel can be launched, each for the option `blocks` of `gpu.fused`."""
    return gpu.CONFIGURATIONS


def augmentation(size: int, *, jitter: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """RandomResizedCrop, flip, colour if wanted, Normalize."""
    colour = [fast.ColorJitter(**JITTER)] if jitter else []
    return [
        fast.RandomResizedCrop(size),
        fast.RandomHorizontalFlip(),
        *colour,
        fast.Normalize(MEAN, STD, dtype=dtype),
    ]


def plain_resize(size: int, *, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Resize and Normalize, as in evaluation."""
    return [fast.Resize((size, size)), fast.Normalize(MEAN, STD, dtype=dtype)]


def apply(pipeline: Sequence[Any], images: torch.Tensor, epoch: int) -> torch.Tensor:
    """The batch through the pipeline as the loader does it, with the numbers of that epoch."""
    draws = Draws(0, epoch, np.arange(len(images)))
    return apply_transforms(pipeline, {"images": images}, draws)["images"]


def apply_one_by_one(pipeline: Sequence[Any], images: torch.Tensor, epoch: int) -> torch.Tensor:
    """The same by each transform's own torch operations, nothing fused: the reference."""
    draws = Draws(0, epoch, np.arange(len(images)))
    for index, transform in enumerate(pipeline):
        images = transform.apply(images, draws.stream(index))
    return images


def torchvision_pipeline(size: int, *, jitter: bool = False, resize_only: bool = False, of_files: bool = False) -> Any:
    """The same in torchvision v2: for uint8 tensors, or `of_files` for opened images as the usual script has it."""
    try:
        from torchvision.transforms import v2
    except ImportError as exc:
        raise AbsentError(f"torchvision cannot be imported here ({exc})") from exc
    steps: list[Any] = [v2.Resize((size, size), antialias=True)]
    if not resize_only:
        steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.ColorJitter(**JITTER)] if jitter else []
    steps += [v2.PILToTensor()] if of_files else []
    # In workers float32, as everyone has it; on the device the dtype that ours is asked for.
    dtype = torch.float32 if of_files else torch.bfloat16
    return v2.Compose([*steps, v2.ToDtype(dtype, scale=True), v2.Normalize(MEAN, STD)])


def windows_of(pipeline: Sequence[Any], images: torch.Tensor, epoch: int = 0) -> np.ndarray[Any, Any]:
    """What the first transform shows of each image: int64 (B, 4), top, left, height, width."""
    placement = pipeline[0].place(ImageSpec.of(images).sizes, Draws(0, epoch, np.arange(len(images))).stream(0))
    return placement.table()[:, :4]


def bytes_to_move(pipeline: Sequence[Any], images: torch.Tensor, size: int) -> int:
    """Bytes that a batch must move: what is seen of each uint8 image read once, and the bfloat16 result written.

    The mean over eight draws.
    """
    seen = [np.prod(windows_of(pipeline, images, epoch)[:, 2:], axis=1).sum() for epoch in range(8)]
    return round(3 * (float(np.mean(seen)) + len(images) * 2 * size * size))


def grid_sampled(
    images: torch.Tensor, windows: torch.Tensor, size: int, mean: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Plain batched torch: windows cut out by one affine `grid_sample`, then normalized. Not antialiased, so not equal.

    Args:
        windows: float32 (B, 4), top, left, height, width, each relative to the image; on the device.
        mean, std: float32 (3, 1, 1), of values 0 to 255; on the device.
    """
    top, left, height, width = windows.unbind(1)
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 0, 2] = width, 2 * left + width - 1
    theta[:, 1, 1], theta[:, 1, 2] = height, 2 * top + height - 1
    theta[len(images) // 2 :, 0, 0] *= -1  # half of them mirrored
    grid = functional.affine_grid(theta, [len(images), 3, size, size], align_corners=False)
    sampled = functional.grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
    return ((sampled - mean) / std).to(torch.bfloat16, memory_format=torch.channels_last)
