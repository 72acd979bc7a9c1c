"""One sample placed by a few operations of torch, for a torch without TorchScript."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


def place_one(image: torch.Tensor, numbers: list[int], scaled: tuple[int, int], output: torch.Tensor) -> None:
    """One image (C, H, W) into one output (C, h, w), by its numbers of `Placement.table`."""
    top, left, height, width, offset_y, offset_x, mirrored, flipped = numbers
    window = image[:, top : top + height, left : left + width]
    grows = height <= scaled[0] and width <= scaled[1]
    if (height, width) == scaled:
        resized = window
    elif grows and (cv2 := opencv()) is not None:
        # Nothing to antialias: OpenCV gives the same within a level, at twice the speed.
        pixels = cv2.resize(window.permute(1, 2, 0).numpy(), scaled[::-1], interpolation=cv2.INTER_LINEAR)
        resized = torch.from_numpy(pixels.reshape(*scaled, -1)).permute(2, 0, 1)
    else:
        dense = window[None].contiguous(memory_format=torch.channels_last)
        resized = torch.nn.functional.interpolate(dense, scaled, mode="bilinear", antialias=True)[0]
    shown = resized[:, offset_y : offset_y + output.shape[1], offset_x : offset_x + output.shape[2]]
    axes = [axis for axis, turned in ((2, mirrored), (1, flipped)) if turned]
    output.copy_(shown.flip(axes) if axes else shown)


def place_varied_one_by_one(
    flat: torch.Tensor,
    sources: torch.Tensor,
    table: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> None:
    """See `place_varied_in_one_call`."""
    channels = output.shape[1]
    for (first, height, width), (*numbers, down, across), final in zip(
        sources.tolist(), table.tolist(), output, strict=True
    ):
        image = flat[first : first + height * width * channels].view(height, width, channels).permute(2, 0, 1)
        if scale is None or shift is None:
            place_one(image, numbers, (down, across), final)
            continue
        pixels = torch.empty(final.shape, dtype=torch.uint8, device="cpu")
        place_one(image, numbers, (down, across), pixels)
        final.copy_(torch.addcmul(shift[:, None, None], pixels.float(), scale[:, None, None]))


@functools.cache
def opencv() -> Any:
    """OpenCV, of the extra [cpu-aug], or None."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None
