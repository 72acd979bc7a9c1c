"""Normalization, the last transform: images stay integers, a quarter of the bytes, until here.

On the CPU a block of values is converted, scaled and shifted while it stays in the cache: 26,000 images/s (218x178x3,
float32, one thread) against 700 to 2,100 for `(images.float() / 255 - mean) / std` on two. Blocks are so small that
torch works in the calling thread: with a core taken by the loader's readers 14,000, larger ones on two threads 2,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from fastload.errors import OptionError
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import sent
from fastload.transforms.engine.resample import normalize_in_blocks
from fastload.transforms.spec import BaseTransform, ImageSpec

_LARGEST = {torch.uint8: 255, torch.uint16: 65535}
_OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Normalize(BaseTransform):
    """Turns images into floats, (image / 255 - mean) / std per channel; / 65535 for uint16 images.

    Takes images (B, C, H, W), uint8 or uint16, as they lie in the file: it does what torchvision's `ToTensor` and
    `Normalize` do together. Only MixUp and CutMix may stand after it. float32 results are within
    `4 * 2**-24 * (1 + |mean|) / std` of the exact value; float16 and bfloat16 are those, rounded to nearest.

    Args:
        mean, std: one value per channel, of images scaled to 0..1.
        dtype: of the result: torch.float32, torch.float16 or torch.bfloat16.

    Raises:
        OptionError: lengths that differ, a mean or std above 1, a std that is not positive, values that are not finite
            or that the dtype cannot hold, or another dtype. Images that do not fit are refused when the loader is made,
            or at `apply`.
    """

    geometric = False
    wrong_dtype = (
        "it divides uint8 by 255 and uint16 by 65535. Give it images as they lie in the file; it scales them to 0..1 "
        "itself, so leave ToTensor out."
    )

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mean, self.std = _channel_values("mean", mean), _channel_values("std", std)
        if len(self.mean) != len(self.std):
            raise OptionError(
                f"Normalize: mean has {len(self.mean)} values and std {len(self.std)}. Give one of each per channel."
            )
        if max(*self.mean, *self.std) > 1:
            most = 255 if max(*self.mean, *self.std) <= 255 else 65535
            means, stds = (
                ", ".join(f"{value / most if max(values) > 1 else value:.6g}" for value in values)
                for values in (self.mean, self.std)
            )
            raise OptionError(
                f"Normalize(mean={self.mean}, std={self.std}): these are of pixels from 0 to {most}, and images are "
                f"scaled to 0..1 before. Divide by {most}: Normalize(mean=({means}), std=({stds}))."
            )
        if min(self.std) <= 0:
            raise OptionError(
                f"Normalize(std={self.std}): a standard deviation is above 0, and images are divided by it. "
                f"For a constant channel use 1."
            )
        if dtype not in _OUTPUT_DTYPES:
            accepted = ", ".join(str(accepted) for accepted in _OUTPUT_DTYPES)
            raise OptionError(f"Normalize(dtype={dtype!r}): no such output. Choose one of {accepted}.")
        largest = max(max(abs(m), abs(1 - m)) / s for m, s in zip(self.mean, self.std, strict=True))
        if largest > torch.finfo(dtype).max:
            raise OptionError(
                f"Normalize(mean={self.mean}, std={self.std}): results reach {largest:g}, more than {dtype} can hold. "
                f"Give mean and std of images scaled to 0..1, or a wider dtype."
            )
        self.dtype = dtype

    def output(self, spec: ImageSpec) -> ImageSpec:
        super().output(spec)
        if spec.channels != len(self.mean):
            raise OptionError(
                f"Normalize: mean and std have {len(self.mean)} values, the images {spec.channels} channels. "
                f"Give one of each per channel, or bring images to three channels: `fastload pack ... --mode rgb`."
            )
        return spec._replace(dtype=self.dtype)

    def apply(
        self, images: torch.Tensor, draws: Draws | None = None, *, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns floats (B, C, H, W) in new channels_last memory, on the CPU in the output's if given; no draws."""
        self.output(ImageSpec.of(images))
        scale, shift = (sent(constants, images.device) for constants in self.scale_and_shift(images.dtype))
        if images.device.type != "cpu":
            return normalize_at_once(images, scale, shift, self.dtype)
        if output is None:
            shape = (len(images), *images.shape[2:], images.shape[1])
            output = self._pool.empty(shape, self.dtype).permute(0, 3, 1, 2)
        normalize_in_blocks(images, output, (scale, shift))
        return output

    def scale_and_shift(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns constants for value * scale + shift, float32 (C,) each, for images of a dtype."""
        # In float64 first: each constant is then rounded once.
        std = torch.tensor(self.std, dtype=torch.float64, device="cpu")
        scale = (1 / (std * _LARGEST[dtype])).to(torch.float32)
        return scale, (-torch.tensor(self.mean, dtype=torch.float64, device="cpu") / std).to(torch.float32)


def normalize_at_once(
    images: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns images scaled and shifted by whole-batch operations, for devices with fast memory; channels_last."""
    values = images.to(torch.float32, memory_format=torch.channels_last)
    return values.mul_(scale[:, None, None]).add_(shift[:, None, None]).to(dtype)


def _channel_values(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise OptionError(f"Normalize({name}={values!r}): give one number per channel.") from exc
    if array.ndim != 1 or array.size == 0 or not all(math.isfinite(value) for value in array.tolist()):
        raise OptionError(f"Normalize({name}={values!r}): give one finite number per channel, as a list.")
    return tuple(array.tolist())
