"""Resamples decoded images and masks to the size, channels and depth of a dataset's rows, and moves coordinates alike.

Coordinates are pixel edges: the image spans 0 to width and 0 to height, and the middle of its first pixel is at 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError
from fastload.format.ragged import Moves

Fit = Literal["crop", "pad", "stretch"]

TOO_FEW_BITS = "has 8 bits a channel where the dataset has 16"
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


@dataclass(frozen=True)
class Target:
    """The form that every image of a dataset is brought to."""

    height: int
    width: int
    channels: int  # 1, 3 or 4
    dtype: np.dtype[Any]  # uint8, or uint16 for images of 16 bits a channel
    # How an image of another size is resized, antialiased bilinear in each case: "crop" covers the target and cuts off
    # evenly on both sides, "pad" fits inside and leaves the rest 0, "stretch" ignores the aspect ratio. None: the size
    # must match. An image of the right size is never resampled.
    fit: Fit | None = None


class Resample(NamedTuple):
    """Which part of an image is resized, and which part of the target it fills."""

    box: tuple[float, float, float, float]  # part of the image: left, top, right, bottom
    top: int  # first row of the target that it fills
    left: int
    height: int  # rows of the target that it fills
    width: int


def resample_for(height: int, width: int, target: Target) -> Resample:
    """Returns how an upright image of this size is resampled; ImageError if a target without fit has another size."""
    if (height, width) == (target.height, target.width) or target.fit == "stretch":
        return Resample((0, 0, width, height), 0, 0, target.height, target.width)
    if target.fit is None:
        raise ImageError(
            f"is {width}x{height} pixels (width x height) where the dataset is {target.width}x{target.height}"
        )
    if target.fit == "crop":
        # The largest centred part with the target's aspect, cut and resized in one exact operation.
        part_height = min(height, width * target.height / target.width)
        part_width = min(width, height * target.width / target.height)
        left, top = (width - part_width) / 2, (height - part_height) / 2
        box = (left, top, min(width, left + part_width), min(height, top + part_height))
        return Resample(box, 0, 0, target.height, target.width)
    scale = min(target.height / height, target.width / width)
    inner_height = min(target.height, max(1, round(height * scale)))
    inner_width = min(target.width, max(1, round(width * scale)))
    top_row, left_column = (target.height - inner_height) // 2, (target.width - inner_width) // 2
    return Resample((0, 0, width, height), top_row, left_column, inner_height, inner_width)


class Shrunk(NamedTuple):
    """The place in an image of pixels that a decoder made smaller than it."""

    height: int  # of the whole image, upright
    width: int
    factor: float  # pixels of the image in one of these, along each side
    top: float  # where the image begins in these pixels: above 0 if it was turned after a last, incomplete pixel
    left: float


def shrinking(height: int, width: int, target: Target) -> int:
    """Returns by which of 8, 4 and 2 an image may be decoded smaller before it is resampled, 1 for none.

    Twice the target's pixels are left along each side, so that the result hardly differs (Pillow's `reducing_gap`).
    """
    if target.fit is None:
        return 1
    part = resample_for(height, width, target)
    left, top, right, bottom = part.box
    most = min((bottom - top) / part.height, (right - left) / part.width) / 2
    return next((factor for factor in (8, 4, 2) if factor <= most), 1)


def resample_pixels(pixels: NDArray[Any], target: Target, out: NDArray[Any], shrunk: Shrunk | None = None) -> None:
    """Writes decoded pixels into a row: changes channels and depth as for files, then the size.

    Args:
        pixels: (H, W) or (H, W, C), C = 1, 3 or 4, uint8 or uint16, upright; not modified.
        out: (target.height, target.width, target.channels) of target.dtype; filled in place.
        shrunk: says that these pixels are of a larger image.

    Raises:
        ImageError: another shape or dtype, another size than a target without fit, or 8-bit if 16 are asked for.
    """
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not min(pixels.shape):
        raise ImageError(f"is an array {pixels.shape}, not (H, W) or (H, W, C) with C = 1, 3 or 4")
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ImageError(f"is of {pixels.dtype}, not uint8 or uint16; scale it to one of them")
    height, width = pixels.shape[:2] if shrunk is None else shrunk[:2]
    part = resample_for(height, width, target)
    pixels = with_channels(with_depth(pixels, target.dtype), target.channels)
    if pixels.shape == out.shape and shrunk is None:
        out[...] = pixels
        return
    left, top, right, bottom = part.box
    if shrunk is not None:
        factor = shrunk.factor
        left, right = shrunk.left + left / factor, min(shrunk.left + right / factor, pixels.shape[1])
        top, bottom = shrunk.top + top / factor, min(shrunk.top + bottom / factor, pixels.shape[0])
    _filled_part(out, part, 0)[...] = _resized(pixels, part.height, part.width, (left, top, right, bottom))


def resample_mask(mask: NDArray[Any], target: Target, out: NDArray[Any], *, fill: int = 0) -> None:
    """Writes a mask into its row, resampled exactly as its image, with each value the nearest one.

    Args:
        mask: uint8 or uint16 (H, W), upright, of its image's size; not modified.
        target: target of the image.
        out: (target.height, target.width), of the mask's dtype or, for numbers that fit, the other one.
        fill: value of pixels that fit "pad" leaves black in the image: the mask's ignore_index, if it has one.

    Raises:
        ImageError: another shape or dtype, numbers that out cannot hold, or another size than a target without fit.
    """
    if mask.ndim != 2 or mask.dtype not in (_UINT8, _UINT16) or not mask.size:
        raise ImageError(f"a mask is uint8 or uint16 (H, W), this one is {mask.dtype} {mask.shape}")
    if mask.dtype != out.dtype and (most := int(np.iinfo(out.dtype).max)) < mask.max():
        raise ImageError(f"holds the value {mask.max()}, where masks of this dataset hold 0 to {most}")
    part = resample_for(mask.shape[0], mask.shape[1], target)
    left, top, right, bottom = part.box
    rows = _nearest(top, bottom, part.height, mask.shape[0])
    columns = _nearest(left, right, part.width, mask.shape[1])
    _filled_part(out, part, fill)[...] = mask[rows][:, columns]


def _filled_part(out: NDArray[Any], part: Resample, fill: int) -> NDArray[Any]:
    """Returns the part of a row that an image fills; fills the rest, if there is one."""
    if (part.height, part.width) != out.shape[:2]:
        out[...] = fill
    return out[part.top : part.top + part.height, part.left : part.left + part.width]


def axis_letter(name: str) -> str:
    """Returns the meaning of a box's number by its name: x or y of a corner, w or h of a size, ? for anything else.

    Names such as x, xmin, x_1, left, bbox_x are known; a centre is none of these.
    """
    low = name.lower().removeprefix("bbox_")
    if low in ("w", "width", "h", "height"):
        return low[0]
    plain = low.replace("_", "").replace("min", "").replace("max", "").rstrip("0123456789")
    plain = {"left": "x", "right": "x", "top": "y", "bottom": "y"}.get(plain, plain)
    return plain if plain in ("x", "y") else "?"


def moved_coordinates(
    values: NDArray[Any], moves: Moves, sizes: NDArray[Any], target: Target | NDArray[np.int64], *, clip: bool = True
) -> NDArray[np.float32]:
    """Returns coordinates as they are after `resample_pixels` has resized their images to the target.

    Boxes are clipped to the target, so that one outside a crop has no area left; a box of four zeros is padding and
    stays so. Points may lie outside; one with a visibility then becomes three zeros, as if it were not labelled.

    Args:
        values: (N, ...): points as x, y, x, y, ... along the last axis; points with their visibility of three along
            it, boxes of four.
        moves: which of these.
        sizes: (N, 2), height and width of each upright image before.
        target: target of all images; or (N, 2), the height and width to which each is stretched.
        clip: False keeps what reaches out of the target.

    Returns:
        A new array, float32, of the shape of values.
    """
    if not values.size:
        return np.zeros(values.shape, np.float32)
    scale, shift, edges = _moves(np.asarray(sizes), target)
    scale, shift = scale[:, None], shift[:, None]
    return _with_points(values, moves, lambda points: points * scale + shift, edges if clip else None)


def turned_coordinates(
    values: NDArray[Any], moves: Moves, sizes: NDArray[Any], orientations: NDArray[Any]
) -> NDArray[np.float32]:
    """Returns coordinates as they are after images have been turned by their EXIF orientations, as `decode.upright`.

    Args:
        values, moves: as in `moved_coordinates`.
        sizes: (N, 2), height and width of each upright image.
        orientations: (N,), 1 to 8.

    Returns:
        A new array, float32, of the shape of values.
    """
    if not values.size:
        return np.zeros(values.shape, np.float32)
    # A point has the coordinates of a pixel: the first pixel becomes the last; a box ends at edges.
    ends = np.asarray(sizes, np.float64)[:, None, ::-1] - (moves in ("points", "xyv"))
    swapped = (orientations >= 5)[:, None, None]
    mirrored = np.stack([np.isin(orientations, (2, 3, 6, 7)), np.isin(orientations, (3, 4, 7, 8))], 1)[:, None]

    def turned(points: NDArray[np.float64]) -> NDArray[np.float64]:
        points = np.where(swapped, points[..., ::-1], points)
        return np.where(mirrored, ends - points, points)

    return _with_points(values, moves, turned, None)


def _with_points(
    values: NDArray[Any],
    moves: Moves,
    change: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    edges: NDArray[np.float64] | None,
) -> NDArray[np.float32]:
    """Returns coordinates after a change of points, (N, P, 2), such as the corners of boxes.

    `edges` are width and height of the images then, (N or 1, 1, 2), if what reaches out of them is cut off.
    """
    numbers = np.asarray(values, np.float64).reshape(len(values), -1, 3 if moves == "xyv" else 2)
    if moves == "points":
        return change(numbers).astype(np.float32).reshape(values.shape)
    if moves == "xyv":
        points, there = change(numbers[..., :2]), numbers[..., 2:] > 0
        if edges is not None:
            there = there & inside_image(points, edges)[..., None]
        points = np.where(there, np.concatenate([points, numbers[..., 2:]], -1), 0)
        return points.astype(np.float32).reshape(values.shape)
    boxes = numbers.reshape(len(values), -1, 2, 2).copy()
    padding = ~boxes.any(axis=(2, 3))
    if moves == "xywh":
        boxes[:, :, 1] += boxes[:, :, 0]
    ordered = boxes[:, :, 1] >= boxes[:, :, 0]
    boxes = change(boxes.reshape(numbers.shape)).reshape(boxes.shape)
    turned = (ordered & (boxes[:, :, 1] < boxes[:, :, 0]))[:, :, None]
    boxes = np.where(turned, boxes[:, :, ::-1], boxes)
    if edges is not None:
        boxes = np.clip(boxes, 0, edges[:, None])
    if moves == "xywh":
        boxes[:, :, 1] -= boxes[:, :, 0]
    boxes[padding] = 0
    return boxes.astype(np.float32).reshape(values.shape)


def inside_image(points: Any, edges: Any) -> Any:
    """Returns whether points, (..., 2), lie in images of these edges (width, height), by a pixel, bool (...)."""
    return ((points >= -1) & (points <= edges + 1)).all(-1)


def _moves(
    sizes: NDArray[Any], target: Target | NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns scale and shift of x and y for each image, both (N, 2), and the edges to clip boxes at (broadcasting)."""
    if not isinstance(target, Target):
        scale = (target / np.maximum(sizes, 1))[:, ::-1]
        return scale, np.zeros(scale.shape), target[:, None, ::-1].astype(np.float64)
    unique, which = np.unique(sizes, axis=0, return_inverse=True)
    scale, shift = np.empty((len(unique), 2)), np.empty((len(unique), 2))
    for at, (height, width) in enumerate(unique.tolist()):
        part = resample_for(height, width, target)
        left, top, right, bottom = part.box
        scale[at] = part.width / (right - left), part.height / (bottom - top)
        shift[at] = part.left - left * scale[at][0], part.top - top * scale[at][1]
    which = which.reshape(-1)
    return scale[which], shift[which], np.array([[[target.width, target.height]]], np.float64)


def with_depth(pixels: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns pixels of uint8 or uint16 as dtype, 16 bits as their high byte; ImageError for 8 that become 16."""
    if pixels.dtype == dtype:
        return pixels
    if dtype != _UINT8:
        raise ImageError(TOO_FEW_BITS)
    # The high byte keeps the whole range; Pillow's convert("L") would clip everything above 255.
    return (pixels >> 8).astype(np.uint8)


def with_channels(pixels: NDArray[Any], channels: int) -> NDArray[Any]:
    """Returns (H, W, C) pixels in 1, 3 or 4 channels: gray replicated, luma as Pillow's, alpha dropped or opaque."""
    found = pixels.shape[2]
    if found == channels:
        return pixels
    if channels == 1:
        red, green, blue = np.moveaxis(pixels[..., :3].astype(np.uint32), 2, 0)
        luma = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16  # the weights of ITU-R BT.601, as in Pillow
        gray: NDArray[Any] = luma.astype(pixels.dtype)[..., None]
        return gray
    if channels == 3:
        return np.repeat(pixels, 3, axis=2) if found == 1 else pixels[..., :3]
    result = np.full((*pixels.shape[:2], 4), np.iinfo(pixels.dtype).max, pixels.dtype)
    result[..., :3] = pixels
    return result


def _nearest(start: float, stop: float, count: int, length: int) -> NDArray[np.intp]:
    """Returns, for each of `count` equal steps from start to stop, the pixel below `length` that holds its middle."""
    middles = start + (np.arange(count) + 0.5) * ((stop - start) / count)
    nearest: NDArray[np.intp] = np.clip(np.floor(middles).astype(np.intp), 0, length - 1)
    return nearest


def _resized(pixels: NDArray[Any], height: int, width: int, box: tuple[float, float, float, float]) -> NDArray[Any]:
    """Returns the part `box` (left, top, right, bottom) of (H, W, C) pixels, resized antialiased bilinear."""
    bilinear = Image.Resampling.BILINEAR
    if pixels.dtype == _UINT8:
        flat = np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        resized = np.asarray(Image.fromarray(flat).resize((width, height), bilinear, box))
        return resized[..., None] if resized.ndim == 2 else resized
    # Pillow resamples 16-bit pixels only to the nearest one; float32 holds them exactly and is rounded once.
    values = pixels.astype(np.float32)
    has_alpha = pixels.shape[2] == 4
    if has_alpha:  # weighted by it, as Pillow does with 8 bits: transparent pixels give no colour
        values[..., :3] *= values[..., 3:] / 65535
    planes = (Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(values, 2, 0))
    scaled = np.stack([np.asarray(plane.resize((width, height), bilinear, box)) for plane in planes], axis=2)
    if has_alpha:
        np.divide(scaled[..., :3] * 65535, scaled[..., 3:], out=scaled[..., :3], where=scaled[..., 3:] > 0)
    rounded: NDArray[Any] = np.rint(np.clip(scaled, 0, 65535)).astype(pixels.dtype)
    return rounded
