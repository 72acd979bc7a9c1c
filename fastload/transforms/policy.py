"""Transforms that draw which of several operations to apply: RandAugment, RandomApply, RandomChoice.

RandAugment (Cubuk et al., NeurIPS 2020) draws a few of fourteen operations for each image, all at one strength.
Operations, strengths and formulas are torchvision's (v2, uint8 tensors, nearest-neighbour moves), drawn for every
sample by itself. Each operation runs once a round, on the samples that drew it: known on the host, so nothing waits.
Results are equal on every device, but for a level after sharpness and the blends with gray levels (`colour.py`).

Moves (shear, translation, rotation) are matrices (2, 3) that map a position (x, y) of the output to the position in the
input it shows, as torchvision and Pillow have it: positions are continuous, pixel (row, column) has its centre at
(column + 0.5, row + 0.5), and takes the value of the input's pixel that its position falls into. Positions are 64-bit
integers, in units of 2**-32 pixels: bit-equal on every device, where floats would differ between pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.transforms import colour
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import as_bits, empty_images, sent
from fastload.transforms.mixup import CutMix, MixingTransform, MixUp
from fastload.transforms.spec import BaseTransform, ImageSpec, as_plain, as_values, check_values, is_number, probability

OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
_MOVES = tuple(_CODES[name] for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"))
# Operations that run together: all moves, all blends with gray levels, and each of the others. Identity needs nothing.
_BLENDS = {
    _CODES["Brightness"]: colour.BRIGHTNESS,
    _CODES["Color"]: colour.SATURATION,
    _CODES["Contrast"]: colour.CONTRAST,
}
_GROUPS = (_MOVES, tuple(_BLENDS), *((code,) for code in range(_CODES["Sharpness"], len(OPERATIONS))))

Matrices = NDArray[np.float64]
"""Moves, (B, 2, 3)."""

_UNIT_BITS = 32


class RandAugment(BaseTransform):
    """Applies num_ops operations to each image, drawn for it with replacement out of fourteen, all at one strength.

    Takes uint8 images of one or three channels. Masks, points and boxes follow the operations that move pixels:
    shears, translations and rotations.

    Args:
        num_ops: operations per image, 0 or more.
        magnitude: strength of each operation, 0 to num_magnitude_bins - 1.
        num_magnitude_bins: steps that the range of strengths is divided into, 2 or more.
        fill: value of pixels that a move leaves empty, 0 to 255: one number, or one per channel.

    Raises:
        OptionError: a number is not whole or out of bounds. Images that do not fit are refused when the loader is made,
            or at `apply`.
    """

    geometric = True
    dtypes = (torch.uint8,)
    wrong_dtype = "its operations are defined for uint8 levels. Put it before Normalize, and pack images of 8 bits."
    wrong_channels = "its operations need"

    def __init__(
        self, num_ops: int = 2, magnitude: int = 9, num_magnitude_bins: int = 31, fill: float | Sequence[float] = 0
    ) -> None:
        super().__init__()
        where = f"RandAugment(num_ops={num_ops!r}, magnitude={magnitude!r}, num_magnitude_bins={num_magnitude_bins!r})"
        if not (is_whole(num_ops) and num_ops >= 0):
            raise OptionError(f"{where}: num_ops is a whole number of operations an image, 0 or more.")
        if not (is_whole(num_magnitude_bins) and num_magnitude_bins >= 2):
            raise OptionError(f"{where}: num_magnitude_bins is a whole number, 2 or more.")
        if not (is_whole(magnitude) and 0 <= magnitude < num_magnitude_bins):
            raise OptionError(f"{where}: magnitude is a whole number from 0 to num_magnitude_bins - 1.")
        self.num_ops, self.magnitude, self.num_magnitude_bins = int(num_ops), int(magnitude), int(num_magnitude_bins)
        self.fill = as_values("RandAugment(fill", fill)

    def output(self, spec: ImageSpec) -> ImageSpec:
        check_values("RandAugment(fill", self.fill, super().output(spec))
        return spec

    def rounds(self, draws: Draws) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns the operations of each round, indices into OPERATIONS, and their directions, 1 or -1; int64 (B,)."""
        return [
            (draws.stream(2 * i).integers(0, len(OPERATIONS)), 1 - 2 * draws.stream(2 * i + 1).integers(0, 2))
            for i in range(self.num_ops)
        ]

    def strengths(self, height: int, width: int) -> dict[str, float]:
        """Returns how far each operation goes on images of that size, for the sign 1, by its name.

        Shears: slope. Translations: whole pixels. Rotate: degrees. Brightness to Sharpness: the factor less 1.
        Posterize: bits kept. Solarize: the level from which on levels are inverted. Operations that have one strength
        only are left out.
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
        """Returns the transformed images, uint8 (B, C, H, W) in new channels_last memory."""
        self.output(ImageSpec.of(images))
        output = empty_images(images, images.shape[1], self._pool).copy_(images)
        for codes, signs in self.rounds(draws):
            for group in _GROUPS:
                for rows in colour.row_blocks(np.flatnonzero(np.isin(codes, group)), images):
                    colour.put(output, rows, self._operated(colour.picked(output, rows), codes[rows], signs[rows]))
        return output

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Returns masks (B, H, W) moved as `apply` moves the images, with `fill` where no image was."""
        images = masks[:, None]
        output = empty_images(images, 1, self._mask_pool).copy_(images)
        value = torch.tensor([fill], device="cpu").to(masks.dtype)
        for codes, signs in self.rounds(draws):
            matrices = _moves(self.strengths(*masks.shape[1:]), codes, signs, *masks.shape[1:])
            for rows in colour.row_blocks(np.flatnonzero(np.isin(codes, _MOVES)), images):
                colour.put(output, rows, sample_nearest(colour.picked(output, rows), matrices[rows], value))
        return output[:, 0]

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns points float32 (B, P, 2), (x, y) in images of `spec`, where `apply` moves them; some end outside."""
        return move_points(points, self._all_matrices(spec, draws))

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns the smallest boxes (B, 4) or (B, M, 4) around the moved corners of x1, y1, x2, y2; not clamped."""
        return move_boxes(boxes, self._all_matrices(spec, draws))

    def _all_matrices(self, spec: ImageSpec, draws: Draws) -> Matrices:
        matrices, strengths = np.tile(np.eye(2, 3), (len(draws), 1, 1)), self.strengths(spec.height, spec.width)
        for codes, signs in self.rounds(draws):
            matrices = followed(matrices, _moves(strengths, codes, signs, spec.height, spec.width))
        return matrices

    def _operated(self, images: torch.Tensor, codes: NDArray[np.int64], signs: NDArray[np.int64]) -> torch.Tensor:
        """Returns images (B, C, H, W) after one round; their `codes`, (B,), are all of one group of `_GROUPS`."""
        height, width = images.shape[2:]
        strengths, code = self.strengths(height, width), int(codes[0])
        if code in _MOVES:
            fill = torch.tensor(self.fill, dtype=torch.float64, device="cpu").to(images.dtype).expand(images.shape[1])
            return sample_nearest(images, _moves(strengths, codes, signs, height, width), fill)
        if code in _BLENDS:
            ops = np.array([_BLENDS[code] for code in codes.tolist()], dtype=np.int32)
            factors = (1 + signs * strengths["Color"]).astype(np.float32)
            return colour.apply_colour(images, colour.ColourSteps(ops[:, None], factors[:, None]))
        if code == _CODES["Sharpness"]:
            factors = (1 + signs * strengths["Sharpness"]).astype(np.float32)
            return _sharpened(images, sent(factors, images.device))
        if code == _CODES["Posterize"]:
            return images & (256 - (1 << (8 - int(strengths["Posterize"]))))
        if code == _CODES["Solarize"]:
            # 1e-6: as with translations, a whole level may come out just above itself.
            return torch.where(images >= math.ceil(strengths["Solarize"] - 1e-6), images.bitwise_not(), images)
        return _autocontrasted(images) if code == _CODES["AutoContrast"] else _equalized(images)


def _moves(
    strengths: Mapping[str, float], codes: NDArray[np.int64], signs: NDArray[np.int64], height: int, width: int
) -> Matrices:
    """Returns the matrices (B, 2, 3) of one round, the identity for samples that do not move."""
    shear_x, shear_y, x, y, degrees = (
        np.where(codes == code, signs * strengths[OPERATIONS[code]], 0.0) for code in _MOVES
    )
    return affine((shear_x, shear_y), (x, y), degrees, height, width)


def _sharpened(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns images blended with a copy smoothed by (1 1 1; 1 5 1; 1 1 1) / 13; border pixels stay as they are."""
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
    """Returns images stretched so that each channel's least level becomes 0 and its greatest 255; rounded down."""
    least, greatest = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    span = (greatest - least).to(torch.int32).clamp_(min=1)
    stretched = (images - least).to(torch.int32).mul_(255).div_(span, rounding_mode="floor")
    return torch.where(greatest == least, images, stretched.to(torch.uint8))


def _equalized(images: torch.Tensor) -> torch.Tensor:
    """Returns images with each channel's levels spread evenly, by Pillow's rule (`ImageOps.equalize`)."""
    (batch, channels, height, width), device = images.shape, images.device
    first = torch.arange(0, batch * channels * 256, 256, device=device).view(batch, channels, 1, 1)
    bins = (images + first).permute(0, 2, 3, 1)  # in memory order
    ones = torch.ones((), dtype=torch.int64, device=device)
    counts = torch.zeros(batch * channels * 256, dtype=torch.int64, device=device)
    counts.scatter_add_(0, bins.reshape(-1), ones.expand(bins.numel()))
    counts = counts.view(batch, channels, 256)
    of_greatest = counts.gather(2, images.amax(dim=(2, 3))[..., None].to(torch.int64))
    step = (height * width - of_greatest).div_(255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    tables = (below + step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    tables = torch.where(step == 0, torch.arange(256, device=device), tables).to(torch.uint8)
    return tables.view(-1)[bins].permute(0, 3, 1, 2)


def affine(
    shears: Sequence[NDArray[np.float64]],
    shifts: Sequence[NDArray[np.float64]],
    degrees: NDArray[np.float64],
    height: int,
    width: int,
) -> Matrices:
    """Returns moves of B images, of which each is sheared, shifted or rotated, or stays; all numbers are (B,).

    Args:
        shears: slopes along x and y, about the upper left corner: (x, y) shows (x + slope * y, y).
        shifts: pixels to the right and down.
        degrees: of counter-clockwise rotations about the image's centre.
    """
    angles = np.radians(degrees)
    cosine, sine, x, y = np.cos(angles), np.sin(angles), width / 2, height / 2
    first = np.stack([cosine, shears[0] - sine, x - cosine * x + sine * y - shifts[0]], axis=1)
    second = np.stack([shears[1] + sine, cosine, y - sine * x - cosine * y - shifts[1]], axis=1)
    return np.stack([first, second], axis=1)


def followed(matrices: Matrices, later: Matrices) -> Matrices:
    """Returns the move `matrices`, then the move `later`, as one."""
    # Matrices map output to input, so the later move is applied first.
    moved = matrices[:, :, :2] @ later
    moved[:, :, 2] += matrices[:, :, 2]
    return moved


def sample_nearest(images: torch.Tensor, matrices: Matrices, fill: torch.Tensor) -> torch.Tensor:
    """Returns the moved images, (B, C, H, W) of the same dtype, which may be any, in new channels_last memory.

    The fill, (C,) of that dtype and on the CPU, is the value of pixels whose position lies outside the input.
    """
    output, device = empty_images(images, images.shape[1], None), images.device
    # The centre of pixel (row, column) lies at m0 * column + m1 * row + m2, in units of 2**-32 pixels.
    from_indices = matrices.copy()
    from_indices[:, :, 2] += (matrices[:, :, 0] + matrices[:, :, 1]) / 2
    units = np.rint(from_indices * 2.0**_UNIT_BITS).astype(np.int64)
    moves, value = sent(units, device)[..., None, None], sent(as_bits(fill.contiguous()), device)
    source, target = as_bits(images).permute(0, 2, 3, 1), as_bits(output).permute(0, 2, 3, 1)
    _, height, width, channels = source.shape
    rows, columns = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    for part in colour.sample_blocks(images):
        pixels = source[part]
        x, y = (
            (moves[part, axis, 0] * columns + (moves[part, axis, 1] * rows + moves[part, axis, 2])) >> _UNIT_BITS
            for axis in range(2)
        )
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        first = torch.arange(len(pixels), device=device)[:, None, None] * (height * width)
        index = (y.clamp_(0, height - 1) * width).add_(x.clamp_(0, width - 1)).add_(first)
        shown = pixels.reshape(-1, channels).index_select(0, index.view(-1)).view(pixels.shape)
        target[part] = torch.where(inside[..., None], shown, value)
    return output


def move_points(points: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """Returns points (B, P, 2), (x, y), where the moved images show them, of the same dtype; computed in float64.

    As torchvision has it: a point is a position as a box's corner is, so none is shifted by half a pixel.
    """
    inverse = np.linalg.inv(matrices[:, :, :2])
    forward = sent(inverse, points.device)
    origin = sent(matrices[:, None, :, 2].copy(), points.device)
    x, y = (points.to(torch.float64) - origin).unbind(2)
    # Written out, not matmul: whose rounding may depend on the number of samples.
    moved = [forward[:, i, 0, None] * x + forward[:, i, 1, None] * y for i in range(2)]
    return torch.stack(moved, dim=2).to(points.dtype)


def move_boxes(boxes: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """Returns the smallest boxes (B, 4) or (B, M, 4) around the moved corners of x1, y1, x2, y2; not clamped."""
    left, top, right, bottom = boxes.unbind(-1)
    corners = torch.stack([left, top, right, top, right, bottom, left, bottom], dim=-1)
    moved = move_points(corners.view(len(boxes), boxes.shape[1:].numel(), 2), matrices).view(*boxes.shape[:-1], 4, 2)
    return torch.cat([moved.amin(dim=-2), moved.amax(dim=-2)], dim=-1)


_CHANCE = 1 << 20  # a stream that no index of the transforms within reaches


class RandomApply(colour.ColourTransform):
    """Runs colour transforms, one after the other, on each image with probability p; the others stay as they are.

    Takes images (B, C, H, W), uint8 or uint16, of one or three channels, and keeps size and dtype.

    Args:
        transforms: ColorJitter, RandomGrayscale, Grayscale(3).
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1]; there is no transform, or one that is no colour transform.
    """

    def __init__(self, transforms: Sequence[colour.ColourTransform], p: float = 0.5) -> None:
        super().__init__()
        self.transforms = _listed("RandomApply", transforms)
        self.p = probability("RandomApply", p)
        for one in self.transforms:
            if not isinstance(one, colour.ColourTransform):
                raise OptionError(
                    f"RandomApply: {type(one).__name__} is no transform of colours, as ColorJitter is. Those that move "
                    f"pixels, erase or mix have p of their own."
                )

    def output(self, spec: ImageSpec) -> ImageSpec:
        for one in self.transforms:
            if one.output(spec) != spec:
                raise OptionError(
                    f"RandomApply: {one!r} changes the number of channels, which a batch has in common. Use "
                    f"RandomGrayscale."
                )
        return super().output(spec)

    def steps(self, draws: Draws) -> colour.ColourSteps:
        """Returns the steps of the transforms for the samples drawn, none for the others."""
        drawn = [one.steps(draws.stream(i)) for i, one in enumerate(self.transforms)]
        chosen = (draws.stream(_CHANCE).uniform() < self.p)[:, None]
        ops, factors = (
            np.concatenate(parts, axis=1) for parts in zip(*((s.ops, s.factors) for s in drawn), strict=True)
        )
        return colour.ColourSteps(np.where(chosen, ops, colour.IDENTITY).astype(np.int32), factors)


class RandomChoice(BaseTransform):
    """Mixes each batch by one of several transforms, drawn once a batch.

    Args:
        transforms: MixUp and CutMix, with one num_classes.
        p: probability of each, which add up to 1; None: all are as likely.

    Raises:
        OptionError: there is no transform, or one that does not mix; numbers of classes differ; probabilities are not
            as many, negative, or do not add up to 1.
    """

    mixes = True

    def __init__(self, transforms: Sequence[MixUp | CutMix], p: Sequence[float] | None = None) -> None:
        super().__init__()
        self.transforms = _listed("RandomChoice", transforms)
        for one in self.transforms:
            if not isinstance(one, MixingTransform):
                raise OptionError(
                    f"RandomChoice: {type(one).__name__} does not mix samples; MixUp and CutMix do. Transforms of "
                    f"single images are drawn for each: they have p of their own, and RandomApply gives it to colours."
                )
        if len({one.num_classes for one in self.transforms}) > 1:
            raise OptionError(f"RandomChoice: num_classes differ in {', '.join(map(repr, self.transforms))}")
        count = len(self.transforms)
        given = [1 / count] * count if p is None else as_plain(p)
        numbers = (
            isinstance(given, Sequence) and len(given) == count and all(is_number(one) and one >= 0 for one in given)
        )
        if not numbers or abs(sum(given) - 1) > 1e-6:
            raise OptionError(
                f"RandomChoice(p={p!r}): give a probability for each of {count} transforms; they add up to 1."
            )
        self.p = tuple(float(one) for one in given)

    def output(self, spec: ImageSpec) -> ImageSpec:
        for one in self.transforms:
            one.output(spec)
        return spec

    def check_fields(self, names: Iterable[str]) -> None:
        """Raises OptionError for fields that one of the transforms cannot mix."""
        names = list(names)
        for one in self.transforms:
            one.check_fields(names)

    def apply_batch(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """Returns the batch mixed by one of the transforms, as its `apply_batch` does; draws are for one sample."""
        ends = np.cumsum(self.p[:-1])
        chosen = int(np.searchsorted(ends, draws.stream(_CHANCE).uniform()[0], side="right"))
        transform: MixUp | CutMix = self.transforms[chosen]
        return transform.apply_batch(fields, draws.stream(chosen))


def _listed(name: str, transforms: Any) -> tuple[Any, ...]:
    if not isinstance(transforms, Sequence) or isinstance(transforms, str) or not transforms:
        raise OptionError(f"{name}(transforms={transforms!r}): give a list of transforms")
    return tuple(transforms)
