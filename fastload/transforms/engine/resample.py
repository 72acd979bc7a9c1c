"""Places and normalizes the samples of a CPU batch one after the other, in one call that leaves Python once.

Where `native.c` was compiled, it does so; the code here is for all other installations, with the same levels.

Each sample has a window of its own, so torch's antialiased resize takes them one by one; this is the only loop over
them. In Python it would ask for the GIL a thousand times a batch, and next to a main thread that runs pure Python it
comes back only after the interpreter's switch interval. So the functions of `_PROGRAM` are compiled (`without_gil`).

Copies and arithmetic go in strips so small that torch keeps them in this thread: teams of threads that compete with the
loader's own halve the speed (8,700 to 16,400 images/s). Resizing stays in the thread by itself. So does narrow_copy,
which copies rows in a third of the time that strips take.
"""

from __future__ import annotations

from typing import Any, List  # noqa: UP035

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastload.system import native
from fastload.transforms.engine.buffers import SERIAL_VALUES, without_gil
from fastload.transforms.engine.placement import Placement

Constants = tuple[Tensor, Tensor]
"""Scale and shift of a Normalize, float32 (C,) each: level * scale + shift."""

# A row of constants as long as this keeps vector loops busy and stays in L1.
_ROW_VALUES = 1 << 12

# Values of a window that lose height at a time; larger windows go in blocks of columns, so that an image of 100
# megapixels asks for a few megabytes. Of 0.5, 1, 2, 4 Mi and no limit, this was the fastest for 3000x4000 (1 MiB of L2
# a core).
_BLOCK_VALUES = 1 << 21


def place_samples(
    flat: Tensor, sources: NDArray[np.int64], placement: Placement, output: Tensor, constants: Constants | None = None
) -> None:
    """Fills the output with windows of images, resized, turned and, with constants, normalized.

    Windows that lose height are resized down before across, so that the dearer of the two runs over fewer rows:
    RandomResizedCrop(224) of 400x533 at 0.98 of the rate of OpenCV's cut and resize, which averages nothing, against
    0.69 (one thread). Values are rounded after each axis, so a pixel is within a level of the exact mean.

    Args:
        flat: (T,), contiguous, on the CPU; uint8 if windows are resized or constants given. Not written to.
        sources: int64 (B, 2): where in `flat` each sample's image (H, W, C) begins, and its W. Images may differ in
            size.
        placement: of the B samples; every window lies within its image.
        output: (B, C, h, w), a view of dense (B, h, w, C) memory; of the same dtype, or with constants a float dtype.
        constants: of a Normalize; None: levels stay as they are.
    """
    image = numpy_images(output)
    if flat.dtype == torch.uint8 and image is not None and native.can_make(image.dtype):
        begin, wide = sources.T
        zeros = np.zeros_like(begin)
        whole = np.stack([begin, zeros, zeros, wide, zeros], axis=1)
        native.make_images(flat.numpy(), whole, placement.table(), image, in_numpy(constants))
        return
    table = torch.from_numpy(np.concatenate([sources, placement.table()], axis=1))
    channels, height, width = output.shape[1:]
    repeats = row_values(channels, height, width) // channels
    scale, shift = [torch.empty(0, device="cpu")] * 2 if constants is None else (v.repeat(repeats) for v in constants)
    without_gil(*_PROGRAM)(flat, table, output, scale, shift, SERIAL_VALUES, _BLOCK_VALUES)


def numpy_images(output: Tensor) -> NDArray[Any] | None:
    """Returns images (B, C, h, w) over dense (B, h, w, C) memory of the CPU as such an array, bfloat16 as its bits.

    None where the memory is not laid out so.
    """
    inside = output.permute(0, 2, 3, 1)
    if not inside.is_contiguous():
        return None
    return (inside.view(torch.uint16) if inside.dtype == torch.bfloat16 else inside).numpy()


def in_numpy(constants: Constants | None) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Returns the constants as arrays, float32 (C,) each."""
    return None if constants is None else (constants[0].numpy(), constants[1].numpy())


def place_batch(
    images: Tensor,
    rows: NDArray[np.int64] | None,
    placement: Placement,
    output: Tensor,
    constants: Constants | None = None,
) -> None:
    """Does what `place_samples` does with rows of images (N, H, W, C), of any strides; None: with all of them."""
    if not images.is_contiguous():
        images, rows = (images if rows is None else images[torch.from_numpy(rows)]).contiguous(), None
    rows = np.arange(len(images)) if rows is None else rows
    _, height, width, channels = images.shape
    sources = np.stack([rows * (height * width * channels), np.full_like(rows, width)], axis=1)
    place_samples(images.view(-1), sources, placement, output, constants)


def normalize_in_blocks(images: Tensor, output: Tensor, constants: Constants) -> None:
    """Fills an output of a float dtype, a view of dense (B, H, W, C) memory, with images * scale + shift on the CPU."""
    if output.numel() == 0:
        return
    channels, height, width = images.shape[1:]
    row = row_values(channels, height, width)
    source = images.permute(0, 2, 3, 1).contiguous().view(-1, row)
    target = output.permute(0, 2, 3, 1).view(-1, row)
    scale, shift = (values.repeat(row // channels) for values in constants)
    without_gil(normalize_lines)(source, target, scale, shift, SERIAL_VALUES // row)


def row_values(channels: int, height: int, width: int) -> int:
    """Returns the length of a row when an image is seen as a matrix for arithmetic.

    A row is as many whole image rows as fit into some thousand values and divide H.
    """
    fitting = (n for n in range(min(height, _ROW_VALUES // (width * channels)), 1, -1) if height % n == 0)
    return width * channels * next(fitting, 1)


# Functions below are compiled: they use no other names of the module, types that TorchScript knows, no type comments.
def normalize_lines(levels: Tensor, output: Tensor, scale: Tensor, shift: Tensor, rows: int) -> None:
    """Fills the output (n, row) with levels * scale + shift, so many rows at a time."""
    rows = max(1, min(rows, levels.size(0)))
    exact = output.dtype == torch.float32
    scratch = torch.empty([0 if exact else rows, levels.size(1)], dtype=torch.float32, device=output.device)
    for first in range(0, levels.size(0), rows):
        count = min(rows, levels.size(0) - first)
        final = output.narrow(0, first, count)
        values = final if exact else scratch.narrow(0, 0, count)
        values.copy_(levels.narrow(0, first, count))
        torch.addcmul(shift, values, scale, out=values)
        if not exact:
            final.copy_(values)


def _memory(like: Tensor, height: int, width: int, channels: int) -> Tensor:
    """Returns uninitialised memory for an image (1, C, H, W), channels_last."""
    return torch.empty([1, height, width, channels], dtype=like.dtype, device=like.device).permute([0, 3, 1, 2])


def _image_of(lines: Tensor, channels: int) -> Tensor:
    """Returns lines (H, W * C) as an image (1, C, H, W)."""
    return lines.view([1, lines.size(0), -1, channels]).permute([0, 3, 1, 2])


def _resize(window: Tensor, target: Tensor) -> None:
    """Fills the target (1, C, h, w) with a window (1, C, H, W), resized and antialiased."""
    height, width = target.size(2), target.size(3)
    # What `interpolate(mode="bilinear", antialias=True)` calls, which lacks `out`: that saves an allocation and a copy.
    # Both are channels_last: what is not, torch (2.13) resizes into such a target beyond its end.
    if width == 1 and height != window.size(2):
        # torch's loop for CPUs without AVX2 fills such a column with its first value: lay it down as a row.
        column = torch.ops.aten._upsample_bilinear2d_aa(window, [window.size(2), 1], False, None, None)
        row = column.transpose(2, 3).contiguous()
        target.copy_(torch.ops.aten._upsample_bilinear2d_aa(row, [1, height], False, None, None).transpose(2, 3))
    else:
        torch.ops.aten._upsample_bilinear2d_aa(window, [height, width], False, None, None, out=target)


def _turn(source: Tensor, target: Tensor, flipped: bool, mirrored: bool, serial_values: int) -> None:
    """Fills the target with an image (1, C, h, w), turned, in strips of rows."""
    height = source.size(2)
    count = max(1, serial_values // (source.size(1) * source.size(3)))
    for first in range(0, height, count):
        rows = min(count, height - first)
        strip = source.narrow(2, first, rows)
        if mirrored:
            strip = torch.flip(strip, [3])
        if flipped:
            target.narrow(2, height - first - rows, rows).copy_(torch.flip(strip, [2]))
        else:
            target.narrow(2, first, rows).copy_(strip)


def _show(lines: Tensor, left: int, target: Tensor, flipped: bool, mirrored: bool, serial_values: int) -> None:
    """Fills the target (1, C, h, w) with columns from `left` on of lines (h, W * C), turned."""
    channels, height, width = target.size(1), target.size(2), target.size(3)
    if mirrored or flipped:
        _turn(_image_of(lines, channels).narrow(3, left, width), target, flipped, mirrored, serial_values)
    else:
        final = target.permute([0, 2, 3, 1]).view([height, width * channels])
        torch.narrow_copy(lines, 1, left * channels, width * channels, out=final)


def _window(lines: Tensor, left: int, width: int, channels: int) -> Tensor:
    """Returns columns of lines (H, W * C) as an image in dense memory."""
    values = width * channels
    if values == lines.size(1):
        return _image_of(lines, channels)
    dense = torch.empty([lines.size(0), values], dtype=lines.dtype, device=lines.device)
    torch.narrow_copy(lines, 1, left * channels, values, out=dense)
    return _image_of(dense, channels)


def _shrunk_down(
    lines: Tensor, left: int, width: int, channels: int, height: int, serial_values: int, block_values: int
) -> Tensor:
    """Returns columns of lines resized to a lower height, (1, C, height, width), some at a time if they are many."""
    result = _memory(lines, height, width, channels)
    most = width
    if width * channels != lines.size(1):
        most = max(1, block_values // (lines.size(0) * channels))
    if most >= width:
        _resize(_window(lines, left, width, channels), result)
        return result
    for first in range(0, width, most):
        columns = min(most, width - first)
        part = _memory(lines, height, columns, channels)
        _resize(_window(lines, left + first, columns, channels), part)
        _turn(part, result.narrow(3, first, columns), False, False, serial_values)
    return result


def _place(
    flat: Tensor, table: Tensor, output: Tensor, scale: Tensor, shift: Tensor, serial_values: int, block_values: int
) -> None:
    """Does what `place_samples` does, by a table of the sources and the placement; without a scale, levels stay."""
    channels, height, width = output.size(1), output.size(2), output.size(3)
    row = scale.size(0)
    numbers: List[List[int]] = table.tolist()  # noqa: UP006  # as every TorchScript knows it
    for i in range(len(numbers)):
        begin, image_width, top, left, rows, columns, down, across, y, x, flipped, mirrored = numbers[i]
        line = image_width * channels
        lines = flat.narrow(0, begin + top * line, rows * line).view([rows, line])
        final = output.narrow(0, i, 1)
        target = final
        if row > 0:
            target = _memory(flat, height, width, channels)
        if rows == down and columns == across:
            _show(lines.narrow(0, y, height), left + x, target, flipped != 0, mirrored != 0, serial_values)
        else:
            if rows > down:
                window = _shrunk_down(lines, left, columns, channels, down, serial_values, block_values)
                window = window.narrow(2, y, height)
                down = height
                y = 0
            else:
                window = _window(lines, left, columns, channels)
            whole = flipped == 0 and mirrored == 0 and down == height and across == width
            resized = target if whole else _memory(flat, down, across, channels)
            _resize(window, resized)
            if not whole:
                shown = resized.permute([0, 2, 3, 1]).view([down, -1]).narrow(0, y, height)
                _show(shown, x, target, flipped != 0, mirrored != 0, serial_values)
        if row > 0:
            levels = target.permute([0, 2, 3, 1]).view([-1, row])
            normalize_lines(levels, final.permute([0, 2, 3, 1]).view([-1, row]), scale, shift, serial_values // row)


_PROGRAM = (normalize_lines, _memory, _image_of, _resize, _turn, _show, _window, _shrunk_down, _place)
