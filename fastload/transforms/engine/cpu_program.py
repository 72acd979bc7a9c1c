"""Places and normalizes the samples of a CPU batch one after the other, in one call that leaves Python once.

Each sample has a window of its own, so torch's operations take them one by one, and a loop over them in Python asks for
the GIL a thousand times a batch: while the main thread runs pure Python, OpenCV in two threads falls from 22,500 to 300
images/s, the same loop as a TorchScript program, which runs without the GIL, from 18,500 to 6,700 (200x190 -> 224x224
on 2 cores). The program also antialiases, which OpenCV's bilinear resize does not.

torch's C++ front end compiles the program. `torch.jit.script`, the Python one, is deprecated, and one day this may go
as well: `available()` is False then, and samples are placed by a few operations of torch each (`place_one`).
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch

_log = logging.getLogger("fastload")

SERIAL_VALUES = (1 << 15) - 1
"""Most values of an operation that torch runs in the calling thread (at::internal::GRAIN_SIZE is 32768).

Work is cut so small where a team of threads would lose: see `normalize.py`."""

# A row of constants as long as this keeps vector loops busy and stays in L1.
_ROW_VALUES = 1 << 12

# Bytes of a window that are copied at a time; larger ones go in blocks of columns, so that an image of 100 megapixels
# asks for a few megabytes. Of 0.5, 1, 2, 4 MiB and no limit, this was the fastest for 3000x4000 (1 MiB of L2 a core).
_CUT_VALUES = 1 << 21

# Copies and arithmetic are cut into strips of rows, so small that torch keeps them in this thread: teams of threads
# that compete with the loader's own halve the speed (8,700 to 16,400 images/s). Resizing stays in the thread by itself.
# So does narrow_copy, which copies rows in a third of the time that strips take.
_PROGRAM = """
def resize(source: Tensor, size: List[int], target: Tensor):
    if source.size(1) == 1 and size[1] == 1:
        # torch's loop for CPUs without AVX2 fills such a column with its first value: lay it down as a row.
        column = torch._C._nn._upsample_bilinear2d_aa(source, [source.size(2), 1], False, None, None)
        row = column.transpose(2, 3).contiguous()
        target.copy_(torch._C._nn._upsample_bilinear2d_aa(row, [1, size[0]], False, None, None).transpose(2, 3))
    else:
        torch._C._nn._upsample_bilinear2d_aa(source, size, False, None, None, out=target)

def copy_rows(source: Tensor, target: Tensor, mirrored: bool, flipped: bool, rows: int):
    height = source.size(2)
    if not mirrored and source.stride(1) == 1 and source.stride(3) == source.size(1):
        # Lines instead of pixels: fewer dimensions to loop over.
        source = source.permute([0, 2, 3, 1]).view([1, 1, height, -1])
        target = target.permute([0, 2, 3, 1]).view([1, 1, height, -1])
    for first in range(0, height, rows):
        part = source[:, :, first : first + rows]
        if mirrored:
            part = torch.flip(part, [3])
        if flipped:
            part = torch.flip(part, [2])
            last = height - first
            target[:, :, last - part.size(2) : last].copy_(part)
        else:
            target[:, :, first : first + rows].copy_(part)

def memory(scratch: Tensor, channels: int, height: int, width: int) -> Tensor:
    return scratch[: height * width * channels].view([1, height, width, channels]).permute([0, 3, 1, 2])

def normalize(pixels: Tensor, target: Tensor, scale: Tensor, shift: Tensor, floats: Tensor, serial_values: int):
    line = scale.numel()
    lines = pixels.permute([0, 2, 3, 1]).contiguous().view([-1, line])
    finals = target.permute([0, 2, 3, 1]).view([-1, line])
    count = max(1, serial_values // line)
    for first in range(0, lines.size(0), count):
        final = finals[first : first + count]
        if final.dtype == torch.float32:
            final.copy_(lines[first : first + count])
            torch.addcmul(shift, final, scale, out=final)
        else:
            values = floats[: final.numel()].view(final.size())
            values.copy_(lines[first : first + count])
            torch.addcmul(shift, values, scale, out=values)
            final.copy_(values)

def normalize_all(pixels: Tensor, output: Tensor, scale: Tensor, shift: Tensor, serial_values: int):
    floats = torch.empty([max(serial_values, scale.numel())], dtype=torch.float32, device=output.device)
    normalize(pixels, output, scale, shift, floats, serial_values)

def place(source: Tensor, samples: Tensor, windows: Tensor, scaled: List[int], output: Tensor,
          scale: Optional[Tensor], shift: Optional[Tensor], serial_values: int):
    channels = source.size(1)
    size = [output.size(2), output.size(3)]
    whole = scaled[0] == size[0] and scaled[1] == size[1]
    cut = torch.empty([source.size(2) * source.size(3) * channels], dtype=source.dtype, device=source.device)
    large = torch.empty([scaled[0] * scaled[1] * channels], dtype=source.dtype, device=source.device)
    pixels = torch.empty([size[0] * size[1] * channels], dtype=source.dtype, device=source.device)
    out_rows = max(1, serial_values // (size[1] * channels))
    floats = torch.empty([max(serial_values, size[1] * channels)], dtype=torch.float32, device=output.device)
    rows: List[int] = samples.tolist()
    table: List[List[int]] = windows.tolist()
    for i in range(len(rows)):
        top, left, height, width, offset_y, offset_x, mirror, flip = table[i]
        mirrored = mirror != 0
        flipped = flip != 0
        window = source[rows[i] : rows[i] + 1, :, top : top + height, left : left + width]
        final = output[i : i + 1]
        target = final
        if scale is not None:
            target = memory(pixels, channels, size[0], size[1])
        if height == scaled[0] and width == scaled[1]:
            shown = window[:, :, offset_y : offset_y + size[0], offset_x : offset_x + size[1]]
            copy_rows(shown, target, mirrored, flipped, out_rows)
        else:
            dense = memory(cut, channels, height, width)
            copy_rows(window, dense, mirrored and whole, flipped and whole, max(1, serial_values // (width * channels)))
            resized = target
            if not whole:
                resized = memory(large, channels, scaled[0], scaled[1])
            resize(dense, scaled, resized)
            if not whole:
                shown = resized[:, :, offset_y : offset_y + size[0], offset_x : offset_x + size[1]]
                copy_rows(shown, target, mirrored, flipped, out_rows)
        if scale is not None and shift is not None:
            normalize(target, final, scale, shift, floats, serial_values)

def image_of(lines: Tensor, channels: int) -> Tensor:
    return lines.view([1, lines.size(0), -1, channels]).permute([0, 3, 1, 2])

def window_of(lines: Tensor, left: int, width: int, channels: int, scratch: Tensor) -> Tensor:
    height, values = lines.size(0), width * channels
    if values == lines.size(1):
        return image_of(lines, channels)
    dense = scratch.narrow(0, 0, height * values).view([height, values])
    torch.narrow_copy(lines, 1, left * channels, values, out=dense)
    return image_of(dense, channels)

def shrink_down(lines: Tensor, left: int, width: int, channels: int, height: int, cut: Tensor, part: Tensor,
                tall: Tensor, serial_values: int) -> Tensor:
    result = memory(tall, channels, height, width)
    most = width
    if width * channels != lines.size(1):
        most = max(1, cut.size(0) // (lines.size(0) * channels))
    if most >= width:
        window = window_of(lines, left, width, channels, cut)
        resize(window, [height, width], result)
        return result
    for first in range(0, width, most):
        columns = min(most, width - first)
        window = window_of(lines, left + first, columns, channels, cut)
        shrunk = memory(part, channels, height, columns)
        resize(window, [height, columns], shrunk)
        turn_rows(shrunk, result.narrow(3, first, columns), False, False, serial_values)
    return result

def turn_rows(source: Tensor, target: Tensor, mirrored: bool, flipped: bool, serial_values: int):
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

def show(lines: Tensor, left: int, target: Tensor, mirrored: bool, flipped: bool, serial_values: int):
    channels, height, width = target.size(1), target.size(2), target.size(3)
    if mirrored or flipped:
        turn_rows(image_of(lines, channels).narrow(3, left, width), target, mirrored, flipped, serial_values)
    else:
        final = target.permute([0, 2, 3, 1]).view([height, width * channels])
        torch.narrow_copy(lines, 1, left * channels, width * channels, out=final)

def place_varied(flat: Tensor, sources: Tensor, table: Tensor, output: Tensor, scale: Optional[Tensor],
                 shift: Optional[Tensor], serial_values: int, cut_values: int):
    if sources.size(0) == 0:
        return
    channels, height, width = output.size(1), output.size(2), output.size(3)
    tallest, widest = int(table.select(1, 2).max()), int(table.select(1, 3).max())
    scaled_height, scaled_width = int(table.select(1, 8).max()), int(table.select(1, 9).max())
    window_values = table.select(1, 2) * table.select(1, 3) * channels
    most_values = int(window_values.max())
    uncut_values = int((window_values * (table.select(1, 2) <= table.select(1, 8))).max())
    cut = torch.empty([max(uncut_values, min(most_values, max(cut_values, tallest * channels)))], dtype=torch.uint8)
    part = torch.empty([scaled_height * widest * channels if most_values > cut.size(0) else 0], dtype=torch.uint8)
    tall = torch.empty([scaled_height * widest * channels], dtype=torch.uint8)
    large = torch.empty([scaled_height * scaled_width * channels], dtype=torch.uint8)
    pixels = torch.empty([height * width * channels if scale is not None else 0], dtype=torch.uint8)
    floats = torch.empty([max(serial_values, width * channels) if scale is not None else 0], dtype=torch.float32)
    images: List[List[int]] = sources.tolist()
    numbers: List[List[int]] = table.tolist()
    for i in range(len(images)):
        byte, image_height, image_width = images[i]
        top, left, rows, columns, offset_y, offset_x, mirror, flip, down, across = numbers[i]
        lines = flat.narrow(0, byte, image_height * image_width * channels).view([image_height, -1])
        lines = lines.narrow(0, top, rows)
        final = output.narrow(0, i, 1)
        target = final
        if scale is not None:
            target = memory(pixels, channels, height, width)
        if rows == down and columns == across:
            show(lines.narrow(0, offset_y, height), left + offset_x, target, mirror != 0, flip != 0, serial_values)
        else:
            if rows > down:
                window = shrink_down(lines, left, columns, channels, down, cut, part, tall, serial_values)
                window = window.narrow(2, offset_y, height)
                down = height
                offset_y = 0
            else:
                window = window_of(lines, left, columns, channels, cut)
            whole = mirror == 0 and flip == 0 and down == height and across == width
            resized = target if whole else memory(large, channels, down, across)
            resize(window, [down, across], resized)
            if not whole:
                shown = resized.permute([0, 2, 3, 1]).view([down, -1]).narrow(0, offset_y, height)
                show(shown, offset_x, target, mirror != 0, flip != 0, serial_values)
        if scale is not None and shift is not None:
            normalize(target, final, scale, shift, floats, serial_values)
"""


@functools.cache
def _compiled() -> Any:
    try:
        return torch.jit.CompilationUnit(_PROGRAM)
    except (AttributeError, RuntimeError) as exc:
        _log.info("torch %s compiles no TorchScript (%s): samples are placed one by one", torch.__version__, exc)
        return None


def available() -> bool:
    """Whether this torch compiles and runs the program."""
    return _compiled() is not None


def place_in_one_call(
    source: torch.Tensor,
    samples: torch.Tensor,
    windows: torch.Tensor,
    scaled: tuple[int, int],
    output: torch.Tensor,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> None:
    """Fills the output with windows of source images, resized, flipped and, with scale and shift, normalized.

    Args:
        source: uint8 (N, C, H, W), a view of (N, H, W, C) memory on the CPU. Where that is not dense, pixels of windows
            that lose height may differ by a level.
        samples: int64 (B,), which source image each output is made of.
        windows: int64 (B, 8), `Placement.table`; every window lies within its image.
        scaled: height and width of the resized windows.
        output: (B, C, h, w), a view of dense (B, h, w, C) memory; uint8, or with scale and shift a float dtype.
        scale, shift: float32 (C,), for value * scale + shift.
    """
    if scale is not None and shift is not None:
        scale, shift = _repeated(scale, output), _repeated(shift, output)
    lines = source.permute(0, 2, 3, 1)
    if lines.is_contiguous():
        # As if sizes varied: windows of 400x533 that become 224x224 take two thirds of the time.
        height, width, channels = lines.shape[1:]
        sizes = torch.tensor([height, width], device=samples.device).expand(len(samples), 2)
        sources = torch.cat([(samples * (height * width * channels))[:, None], sizes], 1)
        table = torch.cat([windows, torch.tensor(scaled, device=samples.device).expand(len(samples), 2)], 1)
        program = _compiled().place_varied
        program(lines.view(-1), sources, table, output, scale, shift, SERIAL_VALUES, _CUT_VALUES)
        return
    _compiled().place(source, samples, windows, list(scaled), output, scale, shift, SERIAL_VALUES)


def place_varied_in_one_call(
    flat: torch.Tensor,
    sources: torch.Tensor,
    table: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> None:
    """Does what `place_in_one_call` does with source images that differ in size; without TorchScript one by one.

    Windows that lose height are resized down before across, so that the dearer of the two runs over fewer rows:
    RandomResizedCrop(224) of 400x533 at 0.98 of the rate of OpenCV's cut and resize, which averages nothing, against
    0.69 (one thread). A pixel may differ from a resize in one step by a level, since values are rounded after each
    axis.

    Args:
        flat: uint8 (T,), contiguous, on the CPU.
        sources: int64 (B, 3): of each sample's source image the offset of its first byte in `flat`, H and W; it lies
            there as (H, W, C).
        table: int64 (B, 10), `VariedPlacement.table`; every window lies within its image.
        output: (B, C, h, w), a view of dense (B, h, w, C) memory; uint8, or with scale and shift a float dtype.
        scale, shift: float32 (C,), for value * scale + shift.
    """
    if not available():
        place_varied_one_by_one(flat, sources, table, output, scale, shift)
        return
    if scale is not None and shift is not None:
        scale, shift = _repeated(scale, output), _repeated(shift, output)
    _compiled().place_varied(flat, sources, table, output, scale, shift, SERIAL_VALUES, _CUT_VALUES)


def normalize_in_one_call(pixels: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> None:
    """Fills the output, of a float dtype, with pixels * scale + shift; shapes and memory as in `place_in_one_call`."""
    scale, shift = _repeated(scale, output), _repeated(shift, output)
    _compiled().normalize_all(pixels, output, scale, shift, SERIAL_VALUES)


def _repeated(constants: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Returns constants (C,) repeated for one row of values of such images, as they lie in memory."""
    return constants.repeat(row_values(images.shape[1], images.shape[2], images.shape[3]) // len(constants))


def row_values(channels: int, height: int, width: int) -> int:
    """Returns the length of a row when an image is seen as a matrix for arithmetic.

    A row is as many whole image rows as fit into some thousand values and divide H.
    """
    fitting = (n for n in range(min(height, _ROW_VALUES // (width * channels)), 1, -1) if height % n == 0)
    return width * channels * next(fitting, 1)


def place_one(image: torch.Tensor, numbers: list[int], scaled: tuple[int, int], output: torch.Tensor) -> None:
    """Places one image (C, H, W) into one output (C, h, w), by its row of `Placement.table`."""
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
        resized = _resize(dense, scaled)[0]
    shown = resized[:, offset_y : offset_y + output.shape[1], offset_x : offset_x + output.shape[2]]
    axes = [axis for axis, turned in ((2, mirrored), (1, flipped)) if turned]
    output.copy_(shown.flip(axes) if axes else shown)


def _resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Returns images (B, C, H, W) resized to (B, C, *size), antialiased."""
    resize = functools.partial(torch.nn.functional.interpolate, mode="bilinear", antialias=True)
    if size[1] == 1:
        # torch's loop for CPUs without AVX2 fills such a column with its first value: lay it down as a row.
        column = resize(images, (images.shape[2], 1))
        return resize(column.transpose(2, 3).contiguous(), (1, size[0])).transpose(2, 3)
    return resize(images, size)


def place_varied_one_by_one(
    flat: torch.Tensor,
    sources: torch.Tensor,
    table: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> None:
    """Does what `place_varied_in_one_call` does, by a few operations of torch for each sample."""
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
    """Returns OpenCV, an optional dependency of the extra [cpu-aug], or None."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None
