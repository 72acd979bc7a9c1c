"""Cases for the fused kernel, each compared with a float64 reference; apart for the interpreter's process.

`python tests/interpreted.py kernel_cases.py` runs them all on the CPU under Triton's interpreter, and prints
{name: error or None} as JSON.
"""

from __future__ import annotations

import functools
import json
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from colour_reference import exact_steps
from resize_cases import reference

from fastload.transforms.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION
from fastload.transforms.engine.gpu import Blocks, PassTables, fused, gather_rows
from fastload.transforms.engine.placement import Placement

MEAN, STD = np.array([0.485, 0.456, 0.406, 0.5]), np.array([0.229, 0.224, 0.225, 0.25])


@dataclass(frozen=True)
class Case:
    image: tuple[int, int, int]  # height, width, channels
    scaled: tuple[int, int]
    size: tuple[int, int]
    windows: tuple[int, int] | None = None  # of this size everywhere; None: each sample its own
    batch: int = 3
    layout: str = "channels_last"
    rows: bool = False
    steps: tuple[tuple[int, float], ...] = ()
    erased: bool = False
    dtype: torch.dtype = torch.uint8
    block: tuple[int, int] = (8, 7)  # rows, and pixels a thread

    @property
    def resampled(self) -> bool:
        return self.windows != self.scaled


CASES = {
    "grown": Case((12, 17, 3), (17, 29), (17, 29)),
    "grown, part shown": Case((13, 17, 3), (16, 31), (11, 23), layout="sliced"),
    "grown four times": Case((6, 7, 3), (24, 28), (24, 28), block=(16, 4)),
    "grown along one axis, shrunk along the other": Case((12, 23, 3), (15, 12), (15, 12)),
    "shrunk a little": Case((19, 29, 3), (15, 23), (15, 23), windows=(18, 28)),
    "shrunk a little, part shown": Case((19, 29, 3), (15, 23), (11, 18), windows=(17, 29), rows=True),
    "shrunk four times": Case((24, 37, 3), (6, 9), (6, 9), windows=(24, 36), batch=2, block=(4, 2)),
    "shrunk, part shown": Case((40, 37, 3), (15, 14), (11, 9), batch=2),
    "windows of one pixel": Case((5, 4, 3), (3, 4), (3, 4), windows=(1, 1)),
    "windows of two pixels": Case((5, 4, 3), (3, 1), (3, 1), windows=(2, 2)),
    "same size in a resizing batch": Case((14, 15, 3), (11, 12), (11, 12), windows=(11, 12), batch=1),
    "one sample, gray": Case((19, 13, 1), (23, 20), (23, 20), batch=1),
    "four channels": Case((19, 13, 4), (17, 20), (17, 20), layout="channels_first"),
    "channels first": Case((19, 13, 3), (17, 20), (16, 18), layout="channels_first", rows=True),
    "crop": Case((19, 17, 3), (14, 13), (14, 13), windows=(14, 13), rows=True),
    "crop, channels first": Case((19, 17, 3), (14, 13), (14, 13), windows=(14, 13), layout="channels_first"),
    "crop, part shown": Case((19, 17, 1), (14, 13), (9, 7), windows=(14, 13), layout="sliced", erased=True),
    "crop, four channels": Case((19, 17, 4), (14, 13), (14, 13), windows=(14, 13), dtype=torch.float32, batch=5),
    "words": Case((6, 132, 3), (5, 128), (5, 128), windows=(5, 128), rows=True, batch=5),
    "words, fewer than threads, bfloat16": Case(
        (6, 104, 3), (5, 100), (5, 100), windows=(5, 100), dtype=torch.bfloat16, batch=5,
    ),
    "words, rows of any length": Case(
        (6, 231, 3), (5, 224), (5, 224), windows=(5, 224), dtype=torch.float32, batch=5,
    ),
    "words, part shown": Case(
        (8, 240, 3), (7, 230), (6, 196), windows=(7, 230), erased=True, dtype=torch.float16, batch=5, layout="later",
    ),
    "words, gray": Case((6, 181, 1), (5, 160), (5, 160), windows=(5, 160), erased=True, batch=5, layout="later"),
    "words, four channels": Case(
        (6, 133, 4), (5, 132), (5, 132), windows=(5, 132), dtype=torch.float32, rows=True,
    ),
    "words, two programs a row": Case((6, 259, 3), (5, 256), (5, 256), windows=(5, 256), batch=5),
    "crop, rows that no word fits": Case((6, 105, 3), (5, 99), (5, 99), windows=(5, 99), batch=5, erased=True),
    "crop, planes, 7 pixels a thread": Case(
        (6, 229, 3), (5, 224), (5, 224), windows=(5, 224), batch=5, layout="varied", dtype=torch.bfloat16,
    ),
    "grown, 7 pixels a thread": Case((4, 150, 3), (5, 224), (5, 224), dtype=torch.float16, erased=True),
    "grown, two programs a row": Case((4, 90, 3), (5, 300), (5, 300), windows=(4, 90)),
    "shrunk a little, 6 pixels a thread": Case((7, 230, 3), (5, 192), (5, 190), windows=(6, 230)),
    "shrunk, 5 pixels a thread, part shown": Case((12, 310, 3), (4, 140), (3, 133), windows=(9, 306)),
    "shrunk four times, 4 pixels a thread": Case((12, 420, 3), (3, 105), (3, 102), windows=(12, 420), batch=2),
    "all colour steps, 7 pixels a thread": Case(
        (6, 150, 3), (5, 201), (5, 198), erased=True, dtype=torch.float16,
        steps=((BRIGHTNESS, 0.8), (CONTRAST, 0.7), (SATURATION, 1.3), (HUE, 0.1)),
    ),
    "crop, float32": Case((19, 17, 3), (14, 13), (14, 13), windows=(14, 13), dtype=torch.float32),
    "grown, float32": Case((19, 17, 3), (24, 27), (23, 23), dtype=torch.float32, erased=True),
    "grown, float16": Case((19, 17, 3), (24, 27), (23, 23), dtype=torch.float16),
    "shrunk, bfloat16": Case((30, 31, 3), (24, 22), (24, 22), dtype=torch.bfloat16, layout="channels_first"),
    "each its own strides": Case((19, 13, 3), (17, 20), (16, 18), layout="varied"),
    "each its own strides, shrunk": Case((24, 37, 3), (6, 9), (6, 9), layout="varied", batch=2),
    "each its own strides, gray": Case((31, 29, 1), (25, 23), (25, 23), layout="varied", dtype=torch.float32),
    "each its own strides, crop": Case((19, 17, 3), (14, 13), (14, 13), windows=(14, 13), layout="varied", batch=5),
    "each its own strides, all colour steps": Case(
        (12, 14, 3), (11, 13), (11, 13), layout="varied", erased=True, dtype=torch.float16,
        steps=((BRIGHTNESS, 0.8), (CONTRAST, 0.7), (SATURATION, 1.3), (HUE, 0.1)),
    ),
    "brightness": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((BRIGHTNESS, 1.37),)),
    "contrast": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((CONTRAST, 1.6),)),
    "saturation": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((SATURATION, 0.4),)),
    "made gray": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((SATURATION, 0.0),)),
    "hue": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((HUE, 0.21),)),
    "hue, backwards": Case((12, 14, 3), (11, 13), (11, 13), windows=(11, 13), steps=((HUE, -0.5),)),
    "all colour steps": Case(
        (12, 14, 3), (11, 13), (11, 13), windows=(11, 13), erased=True,
        steps=((BRIGHTNESS, 0.8), (CONTRAST, 0.7), (SATURATION, 1.3), (HUE, 0.1)),
    ),
    "all colour steps, backwards, resized, float16": Case(
        (12, 14, 3), (15, 9), (13, 9), dtype=torch.float16, erased=True, rows=True,
        steps=((HUE, -0.2), (SATURATION, 0.9), (0, 0.0), (CONTRAST, 0.8), (BRIGHTNESS, 0.9)),
    ),
    "gray images know brightness and contrast": Case(
        (12, 14, 1), (11, 13), (11, 13), windows=(11, 13), dtype=torch.float32,
        steps=((HUE, 0.3), (BRIGHTNESS, 1.2), (CONTRAST, 0.6), (SATURATION, 0.0)),
    ),
}  # fmt: skip

GATHERS = {
    "gathered, whole pieces of 16 bytes": ((9, 29, 47, 16), torch.uint8, 0),
    "gathered, one piece of 16 bytes": ((9, 3, 16), torch.uint8, 0),
    "gathered, more pieces than programs": ((40, 70000), torch.uint8, 0),
    "gathered, rows of 4 bytes times an odd number": ((9, 29, 47, 4), torch.uint8, 0),
    "gathered, rows of bytes": ((9, 29, 47, 3), torch.uint8, 0),
    "gathered, numbers": ((9,), torch.int64, 0),
    "gathered, flags": ((9,), torch.bool, 0),
    "gathered, three floats": ((9, 3), torch.float32, 0),
    "gathered, halves": ((9, 5), torch.bfloat16, 0),
    "gathered, memory that begins anywhere": ((9, 32, 64), torch.uint8, 3),
    "gathered, memory that begins at a multiple of 4": ((9, 32, 64), torch.uint8, 20),
    "gathered, memory that begins at a multiple of 16": ((9, 32, 64, 5), torch.uint8, 48),
}  # rows, their type, and bytes before the first
FAR = "gathered, beyond 2^31 bytes"


def check_gather(case: tuple[tuple[int, ...], torch.dtype, int], device: str) -> None:
    """Asserts that rows are gathered bit by bit, and that nothing beside them is written."""
    shape, dtype, before = case
    rng = np.random.default_rng(5)
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    held = torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 256, before + count, dtype=np.uint8))
    held = held if device == "cpu" else held.pin_memory()
    index = torch.from_numpy(rng.integers(0, shape[0], 13))
    for memory in (held, held.to(device)):
        source = memory[before:].view(dtype).view(shape)
        around = torch.full((15, *shape[1:]), 1, dtype=dtype, device=device)
        expected = around.cpu()
        expected[1:14] = held[before:].view(dtype).view(shape)[index]
        out = around[1:14]
        assert gather_rows(source, index.to(device), out=out) is out
        for found, rows in ((around, expected), (gather_rows(source, index.to(device)), expected[1:14])):
            assert found.dtype == dtype and found.shape == rows.shape
            as_bytes = [rows.contiguous().view(-1).view(torch.uint8) for rows in (found.cpu(), rows)]
            assert torch.equal(*as_bytes)


def check_far_rows() -> None:
    """Asserts that rows beyond 2^31 bytes are found: in pages of zeros, which take no memory."""
    far = torch.from_numpy(np.zeros((540_000, 4003), np.uint8))
    index = torch.tensor([539_999, 3, 537_000])
    far[index] = torch.arange(3 * 4003, dtype=torch.int32).view(3, 4003).to(torch.uint8)
    assert torch.equal(gather_rows(far, index), far[index])


def check(case: Case, device: str, *, interpreted: bool = False) -> None:
    """Asserts that the kernel makes of a case what the reference does."""
    rng = np.random.default_rng(7)
    height, width, channels = case.image
    count = 4 if case.rows else case.batch
    images = rng.integers(0, 256, (count, *case.image), dtype=np.uint8)
    images[:, : height // 2] = rng.choice(np.array([0, 255], np.uint8), (count, height // 2, width, channels))
    rows = rng.integers(0, count, case.batch) if case.rows else np.arange(case.batch)
    placement = drawn_placement(case, rng)
    # Every second sample goes through its steps in the other order.
    steps = np.array([case.steps[:: -1 if b % 2 else 1] for b in range(case.batch)]).reshape(case.batch, -1, 2)
    rectangles = np.stack([rng.integers(0, side, case.batch) for side in (*case.size, *case.size)], axis=1)
    value = np.array([7.0, 200.0, 255.0, 0.0], np.float32)[:channels]
    floats = case.dtype != torch.uint8
    scale, shift = ((1 / (255 * STD))[:channels], (-MEAN / STD)[:channels]) if floats else (np.ones(1), np.zeros(1))

    def sent(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    tables = PassTables(
        windows=sent(placement.table(), torch.int32),
        ops=sent(steps[..., 0], torch.int32) if case.steps else None,
        factors=sent(steps[..., 1], torch.float32) if case.steps else None,
        rectangles=sent(rectangles, torch.int32) if case.erased else None,
        value=sent(value, torch.float32) if case.erased else None,
        scale=sent(scale, torch.float32) if floats else None,
        shift=sent(shift, torch.float32) if floats else None,
    )
    source, chosen = stored(images, case.layout, device), sent(rows, torch.int64) if case.rows else None
    if case.layout == "varied":
        source, chosen = sent(np.concatenate(planes := padded_planes(images)), torch.uint8), layout_of(images, planes)
        chosen = chosen.to(device)
    output = fused(
        source,
        chosen,
        tables,
        case.size,
        has_contrast=any(op == CONTRAST for op, _ in case.steps),
        dtype=case.dtype,
        resampled=case.resampled,
        channels=channels if case.layout == "varied" else None,
        blocks=Blocks(*case.block, 1),
    )
    assert output.dtype == case.dtype
    assert output.shape == (case.batch, channels, *case.size)
    assert output.permute(0, 2, 3, 1).is_contiguous()
    found = output.permute(0, 2, 3, 1).double().cpu().numpy()
    # What the floats may be off by, in levels. The interpreter (3.6 to 3.9) truncates to bfloat16, where GPUs round.
    ulp = 2.0 ** (1 if interpreted and case.dtype == torch.bfloat16 else 0)
    coarse = ulp * torch.finfo(case.dtype).eps / 2 * np.abs(found) / scale + 1e-3 if floats else 0.0
    levels = (found - shift) / scale
    for b in range(case.batch):
        exact = reference(images[rows[b]], placement, b)
        expected = exact
        for op, factor in steps[b]:
            whole = np.moveaxis(np.floor(expected + 0.5), 2, 0)
            expected = np.moveaxis(exact_steps(whole, np.array([op], int), np.array([factor], np.float32), 255), 0, 2)
        if case.erased:
            top, left, tall, wide = rectangles[b]
            expected = expected.copy()
            expected[top : top + tall, left : left + wide] = value
        error = np.abs(levels[b] - expected) - (coarse[b] if floats else 0.0)
        if not case.steps:
            assert error.max() <= (0.5 + 1e-3 if case.resampled else 0), f"sample {b} is off by {error.max()} levels"
        else:
            # Each step truncates: float32 lands on the other side of a whole number now and then, and so does the
            # rounding before it; later steps make more of it. Seldom, and never much.
            often = np.quantile(error, 0.99)
            assert often <= (2 if case.resampled else 1), f"sample {b}: one in 100 is off by {often} levels"
            assert error.max() <= (1 if len(case.steps) == 1 else 4), f"sample {b} is off by {error.max()} levels"


def drawn_placement(case: Case, rng: np.random.Generator) -> Placement:
    height, width, _ = case.image
    first, window, offset = [], [], []
    for _ in range(case.batch):
        tall, wide = case.windows or (rng.integers(height // 2, height + 1), rng.integers(width // 2, width + 1))
        window.append((tall, wide))
        first.append((rng.integers(0, height - tall + 1), rng.integers(0, width - wide + 1)))
        offset.append([rng.integers(0, whole - part + 1) for whole, part in zip(case.scaled, case.size, strict=True)])
    number, scaled = np.arange(case.batch), np.array([case.scaled] * case.batch)
    turned = np.stack([(number + 1) // 2 % 2, number % 2], axis=1).astype(bool)
    return Placement(*(np.array(columns) for columns in (first, window, scaled, offset, [case.size])), turned)


def stored(images: np.ndarray, layout: str, device: str) -> torch.Tensor:
    """The same images (N, H, W, C) with other strides."""
    there = torch.from_numpy(images).to(device)
    if layout == "channels_first":
        return there.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    if layout == "later":  # it begins three bytes after whole words
        later = torch.empty(there.numel() + 3, dtype=torch.uint8, device=device)[3:].view(there.shape)
        return later.copy_(there)
    if layout == "sliced":
        wider = torch.full([2 * side + 1 for side in there.shape], 99, dtype=torch.uint8, device=device)
        part = wider[1::2, 1::2, 1::2, 1::2]
        part.copy_(there)
        return part
    return there


def padded_planes(images: np.ndarray) -> list[np.ndarray]:
    """The bytes of each image, plane after plane, and 2 b + 1 other ones behind each row of image b."""
    planes = [image.transpose(2, 0, 1) for image in images]
    padded = [np.pad(one, [(0, 0), (0, 0), (0, 2 * b + 1)], constant_values=99) for b, one in enumerate(planes)]
    return [one.reshape(-1) for one in padded]


def layout_of(images: np.ndarray, planes: list[np.ndarray]) -> torch.Tensor:
    """Where each of the images of `padded_planes` begins, and the bytes of its rows and planes."""
    ends = np.cumsum([len(one) for one in planes])
    channels = images.shape[3]
    lines = [(end - len(one), images.shape[2] + 2 * b + 1, len(one) // channels) for b, (end, one) in
             enumerate(zip(ends, planes, strict=True))]  # fmt: skip
    return torch.tensor(lines, dtype=torch.int64)


def main() -> None:
    errors: dict[str, str | None] = {}
    checks: dict[str, Callable[[], None]] = {
        **{name: functools.partial(check, case, "cpu", interpreted=True) for name, case in CASES.items()},
        **{name: functools.partial(check_gather, case, "cpu") for name, case in GATHERS.items()},
        FAR: check_far_rows,
    }
    for name, run in checks.items():
        try:
            run()
            errors[name] = None
        except Exception:  # noqa: BLE001  # whatever it is, it is this case's error, and the others still run
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
