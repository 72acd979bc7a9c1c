"""RandAugment (Cubuk et al., NeurIPS 2020): a few of fourteen operations, drawn for each image, all at one strength.

Operations, strengths and formulas are torchvision's (v2, uint8 tensors, nearest-neighbour moves); there a call draws
once for all it is given, here every sample draws for itself. Which samples do what is known on the host, so each
operation runs once a round, on its group, and nothing waits for the device. All but the three blends with gray levels
(`colour.py`) and sharpness are computed in whole numbers, the same on every device; these may differ by one level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms import affine
from fastload.transforms.arguments import as_values, check_values, is_whole
from fastload.transforms.buffers import OutputPool
from fastload.transforms.colour import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    ColourSteps,
    apply_colour,
    empty_images,
    row_blocks,
)
from fastload.transforms.draws import Draws
from fastload.transforms.spec import ImageSpec, as_bits

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
_MOVES = tuple(_CODES[name] for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"))
# What can be done at once: all moves, all blends with gray levels, and each of the rest. Identity needs nothing.
_BLENDS = {_CODES["Brightness"]: BRIGHTNESS, _CODES["Color"]: SATURATION, _CODES["Contrast"]: CONTRAST}
_GROUPS = (_MOVES, tuple(_BLENDS), *((code,) for code in range(_CODES["Sharpness"], len(OPERATIONS))))


@dataclass(frozen=True)
class DrawnOperations:
    """What B samples do, in num_ops rounds.

    Attributes:
        codes: int64 (B, num_ops), positions in OPERATIONS.
        signs: int64 (B, num_ops), 1 or -1: which way those go that have two, such as rotations.
    """

    codes: NDArray[np.int64]
    signs: NDArray[np.int64]


class RandAugment:
    """Does num_ops operations to each image, drawn for it with replacement, the first one first.

    Masks, points and boxes follow those that move pixels: shears, translations and rotations.

    Args:
        num_ops: operations an image, 0 or more.
        magnitude: strength of each, from 0 to num_magnitude_bins - 1.
        num_magnitude_bins: steps that the range of strengths is divided into, 2 or more.
        fill: what goes where no image was, in the images' own units: one number, or one a channel.

    Raises:
        OptionError: numbers that are not whole or out of bounds. Whether images are uint8 of one or three channels and
            can hold the fill shows when the loader is made, or at `apply`.
    """

    geometric = True
    thread_safe = True

    def __init__(
        self, num_ops: int = 2, magnitude: int = 9, num_magnitude_bins: int = 31, fill: float | Sequence[float] = 0
    ) -> None:
        where = f"RandAugment(num_ops={num_ops!r}, magnitude={magnitude!r}, num_magnitude_bins={num_magnitude_bins!r})"
        if not (is_whole(num_ops) and num_ops >= 0):
            raise OptionError(f"{where}: num_ops is a whole number of operations an image, 0 or more.")
        if not (is_whole(num_magnitude_bins) and num_magnitude_bins >= 2):
            raise OptionError(f"{where}: num_magnitude_bins is a whole number, 2 or more.")
        if not (is_whole(magnitude) and 0 <= magnitude < num_magnitude_bins):
            raise OptionError(f"{where}: magnitude is a whole number from 0 to num_magnitude_bins - 1.")
        self.num_ops, self.magnitude = int(num_ops), int(magnitude)
        self.num_magnitude_bins = int(num_magnitude_bins)
        self.fill = as_values("RandAugment(fill", fill)
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return (
            f"RandAugment(num_ops={self.num_ops}, magnitude={self.magnitude}, "
            f"num_magnitude_bins={self.num_magnitude_bins}, fill={self.fill})"
        )

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.dtype != torch.uint8:
            raise OptionError(
                f"RandAugment: images are {spec.dtype}, and its operations are defined for uint8 levels. "
                f"Put it before Normalize, and pack images of 8 bits."
            )
        if spec.channels not in (1, 3):
            raise OptionError(
                f"RandAugment: images have {spec.channels} channels, and its operations need 1 (gray) or 3 (red, "
                f"green, blue). Pack the images with --mode rgb or --mode gray, or leave RandAugment out of transform."
            )
        check_values("RandAugment(fill", self.fill, spec)
        return spec

    def draw_operations(self, draws: Draws) -> DrawnOperations:
        """What is drawn for each sample; `strengths` says how far each operation goes."""
        codes = np.zeros((len(draws), self.num_ops), dtype=np.int64)
        signs = np.ones((len(draws), self.num_ops), dtype=np.int64)
        for i in range(self.num_ops):
            codes[:, i] = draws.stream(2 * i).integers(0, len(OPERATIONS))
            signs[:, i] -= 2 * draws.stream(2 * i + 1).integers(0, 2)
        return DrawnOperations(codes, signs)

    def strengths(self, height: int, width: int) -> dict[str, float]:
        """How far each operation goes on images of that size, for the sign 1; those absent have one strength only.

        Shears: slope. Translations: whole pixels. Rotate: degrees. Brightness to Sharpness: the factor less 1.
        Posterize: bits kept. Solarize: the level from which on levels are inverted.
        """
        part = self.magnitude / (self.num_magnitude_bins - 1)
        strengths = dict.fromkeys(("ShearX", "ShearY"), 0.3 * part)
        # 1e-6: where whole pixels are meant, float64 may end just below them, and int() cuts the rest off.
        strengths["TranslateX"] = float(int(150 / 331 * width * part + 1e-6))
        strengths["TranslateY"] = float(int(150 / 331 * height * part + 1e-6))
        strengths["Rotate"] = 30 * part
        strengths |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9 * part)
        return strengths | {"Posterize": float(round(8 - 4 * part)), "Solarize": 255 * (1 - part)}

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Images (B, C, H, W), uint8; channels_last memory, never the input's."""
        self.output(ImageSpec.of(images))
        drawn = self.draw_operations(draws)
        output = empty_images(images, images.shape[1], self._pool).copy_(images)
        for i in range(self.num_ops):
            codes, signs = drawn.codes[:, i], drawn.signs[:, i]
            for group in _GROUPS:
                for rows in row_blocks(np.flatnonzero(np.isin(codes, group)), images):
                    _replace(output, rows, self._operated(_picked(output, rows), codes[rows], signs[rows]))
        return output

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Masks (B, H, W), moved as `apply` moves the images; `fill` where no image was."""
        drawn, images = self.draw_operations(draws), masks[:, None]
        output = empty_images(images, 1, self._mask_pool).copy_(images)
        value = torch.tensor([fill], device="cpu").to(masks.dtype)
        for i in range(self.num_ops):
            matrices = self._moves(drawn.codes[:, i], drawn.signs[:, i], *masks.shape[1:])
            for rows in row_blocks(np.flatnonzero(np.isin(drawn.codes[:, i], _MOVES)), images):
                _replace(output, rows, affine.sample_nearest(_picked(output, rows), matrices[rows], value))
        return output[:, 0]

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Points float32 (B, P, 2) as (x, y) in images of `spec`, where `apply` moves them; some end outside."""
        return affine.move_points(points, self._all_matrices(spec, draws))

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """The smallest boxes (B, 4) or (B, M, 4) around the moved corners of boxes (x1, y1, x2, y2), not clamped."""
        return affine.move_boxes(boxes, self._all_matrices(spec, draws))

    def _all_matrices(self, spec: ImageSpec, draws: Draws) -> affine.Matrices:
        drawn, matrices = self.draw_operations(draws), affine.identity(len(draws))
        for i in range(self.num_ops):
            later = self._moves(drawn.codes[:, i], drawn.signs[:, i], spec.height, spec.width)
            matrices = affine.followed(matrices, later)
        return matrices

    def _moves(self, codes: NDArray[np.int64], signs: NDArray[np.int64], height: int, width: int) -> affine.Matrices:
        """Matrices (B, 2, 3) of one round, that of the identity for samples that do not move."""
        strengths = self.strengths(height, width)
        shear_x, shear_y, x, y, degrees = (
            np.where(codes == code, signs * strengths[OPERATIONS[code]], 0.0) for code in _MOVES
        )
        # At most one of the three is not the identity, exactly, so their order does not matter.
        moves = affine.followed(affine.sheared(shear_x, shear_y), affine.translated(x, y))
        return affine.followed(moves, affine.rotated(degrees, height, width))

    def _operated(self, images: torch.Tensor, codes: NDArray[np.int64], signs: NDArray[np.int64]) -> torch.Tensor:
        """Images (B, C, H, W) after one round; `codes`, (B,), are of one of `_GROUPS`."""
        height, width = images.shape[2:]
        strengths, code = self.strengths(height, width), int(codes[0])
        if code in _MOVES:
            fill = torch.tensor(self.fill, dtype=torch.float64, device="cpu").to(images.dtype).expand(images.shape[1])
            return affine.sample_nearest(images, self._moves(codes, signs, height, width), fill)
        if code in _BLENDS:
            ops = np.array([_BLENDS[code] for code in codes.tolist()], dtype=np.int32)
            factors = (1 + signs * strengths["Color"]).astype(np.float32)
            return apply_colour(images, ColourSteps(ops[:, None], factors[:, None]))
        if code == _CODES["Sharpness"]:
            factors = (1 + signs * strengths["Sharpness"]).astype(np.float32)
            return _sharpened(images, torch.from_numpy(factors).to(images.device, non_blocking=True))
        if code == _CODES["Posterize"]:
            return images & (256 - (1 << (8 - int(strengths["Posterize"]))))
        if code == _CODES["Solarize"]:
            # 1e-6: as with translations, a whole level may come out just above itself.
            return torch.where(images >= math.ceil(strengths["Solarize"] - 1e-6), images.bitwise_not(), images)
        return _autocontrasted(images) if code == _CODES["AutoContrast"] else _equalized(images)


def _picked(images: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """A channels_last copy of some images of a batch in such memory."""
    index = torch.from_numpy(rows).to(images.device, non_blocking=True)
    return as_bits(images).permute(0, 2, 3, 1).index_select(0, index).view(images.dtype).permute(0, 3, 1, 2)


def _replace(images: torch.Tensor, rows: NDArray[np.int64], values: torch.Tensor) -> None:
    index = torch.from_numpy(rows).to(images.device, non_blocking=True)
    as_bits(images).permute(0, 2, 3, 1).index_copy_(0, index, as_bits(values).permute(0, 2, 3, 1))


def _sharpened(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Blends with the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13, rounded; border pixels stay as they are."""
    if min(images.shape[2:]) < 3:
        return images
    levels = images.to(torch.float32)
    centre = levels[:, :, 1:-1, 1:-1]
    rows = levels[:, :, :-2] + levels[:, :, 1:-1] + levels[:, :, 2:]
    smooth = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth.add_(centre, alpha=4).div_(13).round_()  # sums are whole and never halfway: exact
    centre += smooth.sub_(centre).mul_((1 - factors)[:, None, None, None])
    return levels.clamp_(0, 255).to(torch.uint8)  # which truncates, as in torchvision


def _autocontrasted(images: torch.Tensor) -> torch.Tensor:
    """Levels stretched so that each channel's least becomes 0 and its greatest 255; rounded down."""
    least, greatest = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    span = (greatest - least).to(torch.int32).clamp_(min=1)
    stretched = (images - least).to(torch.int32).mul_(255).div_(span, rounding_mode="floor")
    return torch.where(greatest == least, images, stretched.to(torch.uint8))


def _equalized(images: torch.Tensor) -> torch.Tensor:
    """Levels mapped so that each channel's are spread evenly, by Pillow's rule (`ImageOps.equalize`)."""
    (batch, channels, height, width), device = images.shape, images.device
    first = torch.arange(0, batch * channels * 256, 256, device=device).view(batch, channels, 1, 1)
    places = (images + first).permute(0, 2, 3, 1)  # in memory order
    ones = torch.ones((), dtype=torch.int64, device=device)
    counts = torch.zeros(batch * channels * 256, dtype=torch.int64, device=device)
    counts.scatter_add_(0, places.reshape(-1), ones.expand(places.numel()))
    counts = counts.view(batch, channels, 256)
    of_greatest = counts.gather(2, images.amax(dim=(2, 3))[..., None].to(torch.int64))
    step = (height * width - of_greatest).div_(255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    tables = (below + step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    tables = torch.where(step == 0, torch.arange(256, device=device), tables).to(torch.uint8)
    return tables.view(-1)[places].permute(0, 3, 1, 2)
