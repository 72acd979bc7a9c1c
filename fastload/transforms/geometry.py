"""Transforms that move pixels: flip and crops, drawn per sample, the same for images and masks.

Parameters are torchvision's (v2). Values are moved, never mixed, so each takes any dtype and masks as well.

CPU: calls that copy whole rows of a sample (small images: of many samples) into a reused output, in the calling thread.
torch's own threads are avoided on purpose: with the loader's readers beside them on 2 cores, a team of threads waits
for its slowest member at each call, and mirroring fell from 78,000 to 2,400 images/s, this way from 52,000 to 19,000
(256 x 218x178x3; `torch.where` on the whole batch: 4,000 to 6,500). CUDA: one gather, its indices computed on the
device from B drawn numbers, so nothing waits for the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.buffers import OutputPool
from fastload.transforms.draws import Draws
from fastload.transforms.spec import SERIAL_VALUES, ImageSpec, as_bits

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
_Index = TypeVar("_Index", NDArray[np.int64], torch.Tensor)

# Below this many bytes a sample, a call per sample costs more than copying some pixels twice.
_SMALL_SAMPLE_BYTES = 1 << 14


class RandomHorizontalFlip:
    """Mirrors each image left to right with probability p.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    geometric = True

    def __init__(self, p: float = 0.5) -> None:
        if not (_is_number(p) and 0 <= p <= 1):
            raise OptionError(f"RandomHorizontalFlip(p={p!r}): p is a probability, so give a number from 0 to 1.")
        self.p = float(p)
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip(p={self.p})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Images (B, C, H, W) of any dtype, some mirrored; channels_last memory, never the input's."""
        ImageSpec.of(images)
        return _flip(images, draws.uniform() < self.p, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Masks (B, H, W), mirrored where `apply` mirrors the image."""
        return _flip(masks[:, None], draws.uniform() < self.p, self._mask_pool)[:, 0]


class RandomCrop:
    """Cuts a window of a fixed size at a random place of each image, after padding if asked for.

    Args:
        size: of the window, (height, width); one number: a square.
        padding: pixels added before cropping: one number for all sides, (left and right, top and bottom), or
            (left, top, right, bottom).
        pad_if_needed: pad an image that is smaller than the window, on both sides by what is missing.
        fill: value of constant padding, for every channel or one a channel, in the images' own units (0..255).
        padding_mode: "constant", "edge" (repeat the last pixel), "reflect" (mirror without repeating it) or
            "symmetric" (mirror and repeat it).

    Raises:
        OptionError: a size, padding or mode that has no meaning. Whether images are large enough shows when the
            loader is made, or at `apply`.
    """

    geometric = True

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        self.size = _window_size("RandomCrop", size)
        self.padding = _sides(padding)
        self.pad_if_needed = bool(pad_if_needed)
        self.fill = tuple(float(value) for value in (fill if isinstance(fill, Sequence) else (fill,)))
        if padding_mode not in get_args(PaddingMode):
            modes = ", ".join(repr(mode) for mode in get_args(PaddingMode))
            raise OptionError(f"RandomCrop(padding_mode={padding_mode!r}): no such mode. Choose one of {modes}.")
        self.padding_mode = padding_mode
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return (
            f"RandomCrop(size={self.size}, padding={self.padding}, pad_if_needed={self.pad_if_needed}, "
            f"fill={self.fill}, padding_mode={self.padding_mode!r})"
        )

    def output(self, spec: ImageSpec) -> ImageSpec:
        left, top, right, bottom = self._padding(spec.height, spec.width)
        if spec.height + top + bottom < self.size[0] or spec.width + left + right < self.size[1]:
            padded = "with their padding " if any(self.padding) else ""
            raise OptionError(
                f"RandomCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are {padded}"
                f"smaller than the window. Choose a smaller size, pass pad_if_needed=True, or pack larger images."
            )
        # Mirroring has only the image itself to show; "reflect" cannot use its first pixel again.
        limits = {"reflect": 1, "symmetric": 0}
        if self.padding_mode in limits:
            most_high, most_wide = spec.height - limits[self.padding_mode], spec.width - limits[self.padding_mode]
            if max(top, bottom) > most_high or max(left, right) > most_wide:
                raise OptionError(
                    f"RandomCrop(padding_mode={self.padding_mode!r}): images of {spec.height}x{spec.width} can be "
                    f"mirrored by at most {most_high} rows and {most_wide} columns, the padding is "
                    f"(left, top, right, bottom) = {(left, top, right, bottom)}. Pad less, or use 'edge'."
                )
        if self.padding_mode == "constant" and (any(self.padding) or self.pad_if_needed):
            self._check_fill(spec)
        return spec._replace(height=self.size[0], width=self.size[1])

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Windows (B, C, height, width) of images of any dtype; channels_last memory, never the input's."""
        self.output(ImageSpec.of(images))
        fill = torch.tensor(self.fill, dtype=torch.float64).to(images.dtype).expand(images.shape[1])
        return self._cut(images, draws, fill, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Windows (B, height, width) of masks, at the places where `apply` cuts the images."""
        value = torch.tensor([fill], dtype=masks.dtype)
        return self._cut(masks[:, None], draws, value, self._mask_pool)[:, 0]

    def _cut(self, images: torch.Tensor, draws: Draws, fill: torch.Tensor, pool: OutputPool) -> torch.Tensor:
        height, width = images.shape[2:]
        left, top, right, bottom = self._padding(height, width)
        tops = draws.stream(0).integers(0, height + top + bottom - self.size[0] + 1) - top
        lefts = draws.stream(1).integers(0, width + left + right - self.size[1] + 1) - left
        padding_mode = self.padding_mode if left or top or right or bottom else None
        return _crop(images, tops, lefts, self.size, padding_mode, fill, pool)

    def _padding(self, height: int, width: int) -> tuple[int, int, int, int]:
        left, top, right, bottom = self.padding
        if self.pad_if_needed:
            # As torchvision does it: both sides by all that is missing, so every place in between can be drawn.
            missing_high = max(0, self.size[0] - (height + top + bottom))
            missing_wide = max(0, self.size[1] - (width + left + right))
            return left + missing_wide, top + missing_high, right + missing_wide, bottom + missing_high
        return left, top, right, bottom

    def _check_fill(self, spec: ImageSpec) -> None:
        if len(self.fill) not in (1, spec.channels):
            raise OptionError(
                f"RandomCrop(fill={self.fill}): {len(self.fill)} values for images of {spec.channels} channels. "
                f"Give one value, or one a channel."
            )
        if not spec.dtype.is_floating_point:
            limits = torch.iinfo(spec.dtype)
            if any(not limits.min <= value <= limits.max or value != int(value) for value in self.fill):
                raise OptionError(
                    f"RandomCrop(fill={self.fill}): the images are {spec.dtype}, so a fill is a whole number from "
                    f"{limits.min} to {limits.max}. Give it in the images' units, for example 255 * mean."
                )


class CenterCrop:
    """Cuts a window of a fixed size out of the middle of each image.

    Args:
        size: of the window, (height, width); one number: a square.

    Raises:
        OptionError: a size that has no meaning. Whether images are large enough shows when the loader is made, or at
            `apply`; smaller images are not padded.
    """

    geometric = True

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _window_size("CenterCrop", size)
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return f"CenterCrop(size={self.size})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.height < self.size[0] or spec.width < self.size[1]:
            raise OptionError(
                f"CenterCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are smaller than "
                f"the window. Choose a smaller size, or pack larger images with --size."
            )
        return spec._replace(height=self.size[0], width=self.size[1])

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Windows (B, C, height, width) of images of any dtype; channels_last memory, never the input's."""
        self.output(ImageSpec.of(images))
        return self._cut(images, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Windows (B, height, width) of masks."""
        return self._cut(masks[:, None], self._mask_pool)[:, 0]

    def _cut(self, images: torch.Tensor, pool: OutputPool) -> torch.Tensor:
        # round() and not //: torchvision's choice for an odd remainder (half to even).
        top, left = (round((images.shape[2 + axis] - self.size[axis]) / 2.0) for axis in (0, 1))
        window = images[:, :, top : top + self.size[0], left : left + self.size[1]]
        if images.device.type != "cpu":
            return window.clone(memory_format=torch.channels_last)
        output = _empty_like(window, pool)
        as_bits(output).numpy()[...] = as_bits(window).numpy()
        return output


def _flip(images: torch.Tensor, chosen: NDArray[np.bool_], pool: OutputPool) -> torch.Tensor:
    """Images (B, C, H, W), those with chosen (B,) mirrored."""
    if images.device.type != "cpu":
        return _flip_by_gather(images, chosen)
    output = _empty_like(images, pool)
    source, target = as_bits(images), as_bits(output).permute(0, 2, 3, 1)
    sample_values = max(1, math.prod(images.shape[1:]))
    if sample_values * images.dtype.itemsize <= _SMALL_SAMPLE_BYTES:
        count = SERIAL_VALUES // sample_values
        for block, copy, mirror in zip(
            torch.split(source, count),
            torch.split(target, count),
            torch.split(torch.from_numpy(chosen), count),
            strict=True,
        ):
            in_memory_order = block.permute(0, 2, 3, 1)  # picking through the (B, C, H, W) view is half as fast
            copy.copy_(in_memory_order)
            picked = mirror.nonzero()[:, 0]
            copy.index_copy_(0, picked, in_memory_order.index_select(0, picked).flip(2))
        return output
    height, width, channels = target.shape[1:]
    strip_rows = max(1, SERIAL_VALUES // (width * channels))
    samples = zip(source, source.permute(0, 2, 3, 1).numpy(), target.numpy(), chosen.tolist(), strict=True)
    for image, pixels, copy, mirror in samples:
        if not mirror:
            copy[...] = pixels
            continue
        # torch has a fast path for mirroring (C, H, W) in channels_last memory; the copy then reads it from cache.
        for top, strip in zip(range(0, height, strip_rows), torch.split(image, strip_rows, dim=1), strict=True):
            copy[top : top + strip_rows] = strip.flip(2).permute(1, 2, 0).numpy()
    return output


def _flip_by_gather(images: torch.Tensor, chosen: NDArray[np.bool_]) -> torch.Tensor:
    batch, _, height, width = images.shape
    columns = torch.arange(width, device=images.device)
    columns = torch.where(_send(chosen, images.device)[:, None], columns.flip(0), columns)
    rows = torch.arange(height, device=images.device).expand(batch, height)
    return _gather(images, rows, columns)


def _crop(
    images: torch.Tensor,
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    size: tuple[int, int],
    padding_mode: PaddingMode | None,
    fill: torch.Tensor,
    pool: OutputPool,
) -> torch.Tensor:
    """Windows of images (B, C, H, W), each sample's at its own place.

    `tops` and `lefts`, (B,), say where the window's first pixel lies in the image; negative: in the padding.
    `padding_mode` None: no window reaches out of its image. `fill` is (C,), of the images' dtype, for "constant".
    """
    if images.device.type != "cpu":
        return _crop_by_gather(images, tops, lefts, size, padding_mode, fill)
    batch, channels, height, width = images.shape
    output = pool.empty((batch, *size, channels), images.dtype)
    # NumPy, since a call costs a fifth of torch's, which decides for small images.
    source, target = as_bits(images).permute(0, 2, 3, 1).numpy(), as_bits(output).numpy()
    value = as_bits(fill.contiguous()).numpy()
    if (value == value[0]).all():
        value = value[:1]  # spread over whole rows at once, not three values at a time
    if math.prod(images.shape[1:]) * images.dtype.itemsize <= _SMALL_SAMPLE_BYTES:
        _crop_small(source, target, tops, lefts, padding_mode, value)
        return output.permute(0, 3, 1, 2)
    for image, window, top, left in zip(source, target, tops.tolist(), lefts.tolist(), strict=True):
        if 0 <= top <= height - size[0] and 0 <= left <= width - size[1]:
            window[...] = image[top : top + size[0], left : left + size[1]]
        else:
            assert padding_mode is not None, "a window outside its image, without padding"
            _cut_padded(image, window, top, left, padding_mode, value)
    return output.permute(0, 3, 1, 2)


def _crop_small(
    source: NDArray[np.generic],
    target: NDArray[np.generic],
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    padding_mode: PaddingMode | None,
    fill: NDArray[np.generic],
) -> None:
    """Cuts all windows (B, h, w, C) out of the images (B, H, W, C) at once, padding whole images where needed."""
    (batch, height, width, channels), size = source.shape, target.shape[1:3]
    if batch == 0:
        return
    if padding_mode is not None:
        top, left = max(0, -int(tops.min())), max(0, -int(lefts.min()))
        bottom, right = max(0, int(tops.max()) + size[0] - height), max(0, int(lefts.max()) + size[1] - width)
        sides = ((0, 0), (top, bottom), (left, right), (0, 0))
        if padding_mode == "constant":
            padded = np.empty((batch, height + top + bottom, width + left + right, channels), dtype=source.dtype)
            padded[...] = fill
            padded[:, top : top + height, left : left + width] = source
            source = padded
        else:
            source = np.pad(source, sides, mode=padding_mode)
        tops, lefts = tops + top, lefts + left
    # Rows of bytes, so that each window is copied in runs of whole rows.
    lines = np.ascontiguousarray(source).reshape(batch, source.shape[1], -1)
    windows = np.lib.stride_tricks.sliding_window_view(lines, (size[0], size[1] * channels), axis=(1, 2))
    target.reshape(batch, size[0], -1)[...] = windows[np.arange(batch), tops, lefts * channels]


def _cut_padded(
    image: NDArray[np.generic],
    window: NDArray[np.generic],
    top: int,
    left: int,
    padding_mode: PaddingMode,
    fill: NDArray[np.generic],
) -> None:
    """Fills one window (h, w, C) from an image (H, W, C) that it does not lie within."""
    (height, width), (window_height, window_width) = image.shape[:2], window.shape[:2]
    # The part [y0, y1) x [x0, x1) of the window that shows the image; it may be empty.
    y0, x0 = min(max(-top, 0), window_height), min(max(-left, 0), window_width)
    y1, x1 = max(min(height - top, window_height), y0), max(min(width - left, window_width), x0)
    window[y0:y1, x0:x1] = image[top + y0 : top + y1, left + x0 : left + x1]
    if padding_mode == "constant":
        window[:y0], window[y1:] = fill, fill
        window[y0:y1, :x0], window[y0:y1, x1:] = fill, fill
        return
    rows = np.concatenate([np.arange(y0), np.arange(y1, window_height)])
    columns = np.concatenate([np.arange(x0), np.arange(x1, window_width)])
    source_rows = _source_index(np.arange(top, top + window_height), height, padding_mode)
    source_columns = _source_index(np.arange(left, left + window_width), width, padding_mode)
    window[y0:y1, columns] = image[source_rows[y0:y1, None], source_columns[columns]]
    window[rows] = image[source_rows[rows, None], source_columns]


def _crop_by_gather(
    images: torch.Tensor,
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    size: tuple[int, int],
    padding_mode: PaddingMode | None,
    fill: torch.Tensor,
) -> torch.Tensor:
    height, width = images.shape[2:]
    device = images.device
    rows = _send(tops, device)[:, None] + torch.arange(size[0], device=device)
    columns = _send(lefts, device)[:, None] + torch.arange(size[1], device=device)
    if padding_mode is None:
        return _gather(images, rows, columns)
    windows = _gather(images, _source_index(rows, height, padding_mode), _source_index(columns, width, padding_mode))
    if padding_mode != "constant":
        return windows
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    value = as_bits(fill.contiguous()).to(device, non_blocking=True)[:, None, None]
    return torch.where(inside, as_bits(windows), value).view(images.dtype)


def _source_index(positions: _Index, size: int, padding_mode: PaddingMode) -> _Index:
    """The row (or column) of an image of `size` rows that each position shows, those outside it included."""
    last = size - 1
    if padding_mode == "reflect":
        return last - abs(last - abs(positions))
    if padding_mode == "symmetric":
        # "reflect" about the borders instead of the border pixels' centres: in half pixels, each centre is odd.
        halves = 2 * size - abs(2 * size - abs(2 * positions + 1))
        return (halves - 1) // 2
    return positions.clip(0, last)  # "edge"; with "constant" the caller replaces what is outside


def _gather(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Pixels of images (B, C, H, W) at rows (B, h) and columns (B, w): (B, C, h, w) in channels_last memory."""
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    pixels = as_bits(images).permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return pixels.view(images.dtype).permute(0, 3, 1, 2)


def _empty_like(images: torch.Tensor, pool: OutputPool) -> torch.Tensor:
    batch, channels, height, width = images.shape
    return pool.empty((batch, height, width, channels), images.dtype).permute(0, 3, 1, 2)


def _send(drawn: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # B numbers: the driver stages so small a copy at once and returns, so pageable memory does no harm here.
    return torch.from_numpy(drawn).to(device, non_blocking=True)


def _window_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or not all(_is_whole(side) and side > 0 for side in sides):
        raise OptionError(
            f"{name}(size={size!r}): a size is a positive whole number of pixels, or (height, width) of them."
        )
    return int(sides[0]), int(sides[1])


def _sides(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    sides = tuple(padding) if isinstance(padding, Sequence) else (0 if padding is None else padding,)
    if len(sides) not in (1, 2, 4) or not all(_is_whole(side) and side >= 0 for side in sides):
        raise OptionError(
            f"RandomCrop(padding={padding!r}): padding is a whole number of pixels, (left and right, top and bottom), "
            f"or (left, top, right, bottom); none is negative."
        )
    left, top, right, bottom = (int(side) for side in sides * (4 // len(sides)))
    return left, top, right, bottom


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)
