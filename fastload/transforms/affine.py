"""Affine moves, each sample by its own matrix: shear, translation and rotation of images, masks, points and boxes.

A move is the matrix (2, 3) that tells for a place (x, y) of the output where in the input it lies, as torchvision and
Pillow have it: positions are continuous, the image covers [0, W] x [0, H], pixel (row, column) has its centre at
(column + 0.5, row + 0.5). Pixels are taken from the nearest one, the one that the place lies in.

Places are computed in 64-bit integers, units of 2**-32 pixels: bit-equal on every device, where floats would differ on
the borders between pixels, and within 2**-32 * (W + H) pixels of the float64 result.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.buffers import OutputPool
from fastload.transforms.colour import empty_images, sample_blocks
from fastload.transforms.spec import as_bits

Matrices = NDArray[np.float64]  # (B, 2, 3)

_UNIT_BITS = 32


def identity(batch: int) -> Matrices:
    """Matrices (B, 2, 3) that move nothing."""
    return np.tile(np.eye(2, 3), (batch, 1, 1))


def sheared(along_x: NDArray[np.float64], along_y: NDArray[np.float64]) -> Matrices:
    """The output at (x, y) shows the input at (x + along_x * y, y + along_y * x): about the upper left corner.

    Both are slopes (B,); of each sample one is 0.
    """
    matrices = identity(len(along_x))
    matrices[:, 0, 1], matrices[:, 1, 0] = along_x, along_y
    return matrices


def translated(along_x: NDArray[np.float64], along_y: NDArray[np.float64]) -> Matrices:
    """The image moves right and down by so many pixels, (B,) each."""
    matrices = identity(len(along_x))
    matrices[:, 0, 2], matrices[:, 1, 2] = -along_x, -along_y
    return matrices


def rotated(degrees: NDArray[np.float64], height: int, width: int) -> Matrices:
    """The image turns about its centre, counter-clockwise, by so many degrees (B,)."""
    angles = np.radians(degrees)
    cosine, sine, x, y = np.cos(angles), np.sin(angles), width / 2, height / 2
    first = np.stack([cosine, -sine, x - cosine * x + sine * y], axis=1)
    second = np.stack([sine, cosine, y - sine * x - cosine * y], axis=1)
    return np.stack([first, second], axis=1)


def followed(matrices: Matrices, later: Matrices) -> Matrices:
    """The move `matrices`, then the move `later`, as one."""
    # Matrices lead from output to input, so the later move is the first on the way back.
    moved = matrices[:, :, :2] @ later
    moved[:, :, 2] += matrices[:, :, 2]
    return moved


def sample_nearest(
    images: torch.Tensor, matrices: Matrices, fill: torch.Tensor, pool: OutputPool | None = None
) -> torch.Tensor:
    """Images (B, C, H, W) of any dtype, moved; channels_last memory, never the input's.

    `fill`, (C,) and of the images' dtype, on the CPU, goes where the output shows what lies outside the input.
    """
    output = empty_images(images, images.shape[1], pool)
    moves = _in_units(matrices).to(images.device, non_blocking=True)
    value = as_bits(fill.contiguous()).to(images.device, non_blocking=True)
    source, target = as_bits(images).permute(0, 2, 3, 1), as_bits(output).permute(0, 2, 3, 1)
    for part in sample_blocks(images):
        target[part] = _sampled(source[part], moves[part], value)
    return output


def _in_units(matrices: Matrices) -> torch.Tensor:
    """int64 (B, 2, 3): for row r and column c, where pixel (r, c)'s centre lies, in units: m0 * c + m1 * r + m2."""
    from_indices = matrices.copy()
    from_indices[:, :, 2] += (matrices[:, :, 0] + matrices[:, :, 1]) / 2
    return torch.from_numpy(np.rint(from_indices * 2.0**_UNIT_BITS).astype(np.int64))


def _sampled(pixels: torch.Tensor, moves: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
    (batch, height, width, channels), device = pixels.shape, pixels.device
    rows = torch.arange(height, device=device)[:, None]
    columns = torch.arange(width, device=device)
    places = []
    for axis in range(2):
        by_column, by_row, start = (moves[:, axis, i, None, None] for i in range(3))
        places.append((by_column * columns + (by_row * rows + start)) >> _UNIT_BITS)
    x, y = places
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    first = torch.arange(batch, device=device)[:, None, None] * (height * width)
    index = (y.clamp_(0, height - 1) * width).add_(x.clamp_(0, width - 1)).add_(first)
    picked = pixels.reshape(-1, channels).index_select(0, index.view(-1)).view(pixels.shape)
    return torch.where(inside[..., None], picked, fill)


def move_points(points: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """Points (B, P, 2) as (x, y) where the moved images show them, of the same dtype; computed in float64.

    As torchvision has it: a point is a place as a box's corner is, so none is shifted by half a pixel.
    """
    inverse = np.linalg.inv(matrices[:, :, :2])
    forward = torch.from_numpy(inverse).to(points.device, non_blocking=True)
    origin = torch.from_numpy(matrices[:, None, :, 2].copy()).to(points.device, non_blocking=True)
    x, y = (points.to(torch.float64) - origin).unbind(2)
    # Written out, not matmul: whose rounding may depend on the number of samples.
    moved = [forward[:, i, 0, None] * x + forward[:, i, 1, None] * y for i in range(2)]
    return torch.stack(moved, dim=2).to(points.dtype)


def move_boxes(boxes: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """The smallest boxes (B, 4) or (B, M, 4) around the moved corners of boxes (x1, y1, x2, y2).

    They are not clamped to the image.
    """
    left, top, right, bottom = boxes.unbind(-1)
    corners = torch.stack([left, top, right, top, right, bottom, left, bottom], dim=-1)
    moved = move_points(corners.view(len(boxes), boxes.shape[1:].numel(), 2), matrices).view(*boxes.shape[:-1], 4, 2)
    return torch.cat([moved.amin(dim=-2), moved.amax(dim=-2)], dim=-1)
