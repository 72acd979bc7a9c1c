"""Fuses neighbouring transforms into passes, each of which reads and writes the pixels once.

    crops, resize, flips  ->  colour  ->  erasing  ->  Normalize

A list is cut into passes of that form; a transform that fits into none runs by itself. Each step of a pass rounds as it
does alone, so a pass changes a result only by the one level that a resize may round differently, and by the effect of
colour steps on that. On CUDA a pass is one kernel (`gpu.py`; two with contrast, which needs the mean of an image
first). On the CPU crops, resizes, flips and Normalize are one loop (`resample.py`), and colour and erasing run in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.colour import ColorJitter, ColourTransform
from fastload.transforms.draws import Draws
from fastload.transforms.engine import gpu
from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool
from fastload.transforms.engine.place import place_images
from fastload.transforms.engine.placement import ImageRows, PlacedImages, Placement
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.erasing import Eraser
from fastload.transforms.geometry import PlacedTransform, RandomFlip, joint_placement
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import ImageSpec

Images = torch.Tensor | ImageRows | PlacedImages

_pool = OutputPool()


@dataclass(frozen=True)
class FusedPass:
    """Transforms that one pass runs, each with its index in the list, which is its stream of random numbers."""

    moves: tuple[tuple[int, PlacedTransform], ...] = ()
    colours: tuple[tuple[int, ColourTransform], ...] = ()
    eraser: tuple[int, Eraser] | None = None
    normalize: Normalize | None = None

    def __bool__(self) -> bool:
        return bool(self.moves or self.colours or self.eraser or self.normalize)

    def placement(self, spec: ImageSpec, draws: Draws) -> Placement:
        """Returns the crops, resizes and flips together, for images of a spec."""
        return joint_placement(self.moves, spec.sizes, draws)


def passes_of(
    transforms: Sequence[Any], spec: ImageSpec | None, *, first: int = 0
) -> list[FusedPass | tuple[int, Any]]:
    """Returns the list as passes and, with its index, from `first` on, each transform that fits into none.

    The spec is of the images; None: not known, nothing is fused.
    """
    parts: list[FusedPass | tuple[int, Any]] = []
    current = FusedPass()
    for index, transform in enumerate(transforms, first):
        grown = _grown(current, index, transform, spec)
        if grown is None:
            if current:
                parts.append(current)
            grown = _grown(FusedPass(), index, transform, spec)
        if grown is None:
            parts.append((index, transform))
        current = grown or FusedPass()
        spec = transform.output(spec) if spec is not None and hasattr(transform, "output") else None
    return [*parts, current] if current else parts


def _grown(current: FusedPass, index: int, transform: Any, spec: ImageSpec | None) -> FusedPass | None:
    """Returns the pass with one more transform; None if it cannot take it."""
    if spec is None or spec.dtype != torch.uint8 or current.normalize:
        return None
    one = (index, transform)
    if isinstance(transform, Normalize):
        return replace(current, normalize=transform)
    if current.eraser:
        return None
    if isinstance(transform, PlacedTransform):
        resized = any(other.resizes for _, other in current.moves)
        # A flip after colour is as good as before it: colour looks at single pixels, and at the mean of all.
        late = current.colours and not isinstance(transform, RandomFlip)
        if not (late or transform.pads(spec.sizes) or (transform.resizes and resized)):
            return replace(current, moves=(*current.moves, one))
    elif isinstance(transform, ColourTransform) and transform.output(spec) == spec:
        two_contrasts = _has_contrast(transform) and any(_has_contrast(other) for _, other in current.colours)
        if spec.channels == 3 and not two_contrasts:
            return replace(current, colours=(*current.colours, one))
    elif isinstance(transform, Eraser) and transform.filled is not None:  # the kernel draws no random pixels
        return replace(current, eraser=one)
    return None


def run_pass(
    part: FusedPass,
    images: Images,
    placement: Placement,
    spec: ImageSpec,
    draws: Draws,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the images after a pass, (B, C, h, w) in channels_last memory; each draws from the stream of its index.

    Args:
        part: the pass.
        images: uint8 (B, C, H, W), rows that are not gathered yet, or images not made yet; not written to.
        placement: `part.placement(spec, draws)`.
        spec: of the images.
        draws: for the batch's samples.
        output: on the CPU, memory for the result, in its shape, dtype and memory order.
    """
    device = _device_of(images)
    by_kernel = _kernel_makes(spec, device)
    if isinstance(images, PlacedImages):
        joined = images.then(placement)
        if by_kernel and joined is not None:
            return _by_kernel(part, joined, joined.placement, spec, draws, device)
        images = gathered(images)
    if by_kernel:
        images = images if _readable(images) else gathered(images)
        return _by_kernel(part, images, placement, spec, draws, device)
    between: list[tuple[int, ColourTransform | Eraser]] = [*part.colours, *([part.eraser] if part.eraser else [])]
    # Small samples that keep their size are rather moved all at once.
    apart = placement.resized or spec.channels * spec.height * spec.width > SMALL_SAMPLE_BYTES
    if device.type == "cpu" and part.moves and apart and not between:
        source, rows = _where_they_lie(images)
        if output is None:
            dtype = part.normalize.dtype if part.normalize else torch.uint8
            output = _pool.empty((len(placement), *placement.size, spec.channels), dtype).permute(0, 3, 1, 2)
        constants = part.normalize.scale_and_shift(torch.uint8) if part.normalize else None
        place_batch(source, None if rows is None else rows.numpy(), placement, output, constants)
        return output
    pixels = gathered(images)
    if part.moves:
        pixels = place_images(pixels, placement, _pool)
    for index, transform in between:
        pixels = transform.apply(pixels, draws.stream(index))
    if not part.normalize:
        return pixels
    return part.normalize.apply(pixels, output=output if device.type == "cpu" else None)


def gathered(images: Images) -> torch.Tensor:
    """Returns the images as a batch, (B, C, H, W); a kernel fetches rows in pinned memory, without the CPU."""
    if isinstance(images, torch.Tensor):
        return images
    device, spec = _device_of(images), images.spec
    if isinstance(images, PlacedImages):
        undrawn = Draws(0, 0, np.zeros(len(images), np.int64))
        if _kernel_makes(spec, device):
            return _by_kernel(FusedPass(), images, images.placement, spec, undrawn, device)
        one_by_one = enumerate(images.whole())
        placed = [place_images(one[None], images.placement.part(slice(at, at + 1)), _pool) for at, one in one_by_one]
        return torch.cat(placed).contiguous(memory_format=torch.channels_last)
    if device.type != "cpu" and images.source.device.type == "cpu" and _readable(images) and gpu.kernel_runs(device):
        undrawn = Draws(0, 0, np.zeros(len(images.samples), np.int64))
        whole = FusedPass().placement(spec, undrawn)
        return _by_kernel(FusedPass(), images, whole, spec, undrawn, device)
    return images.gather()


def _device_of(images: Images) -> torch.device:
    """Returns the device that the batch is made on."""
    if isinstance(images, ImageRows):
        return images.samples.device
    return images.pixels.device if isinstance(images, PlacedImages) else images.device


def _kernel_makes(spec: ImageSpec, device: torch.device) -> bool:
    """Whether images of a spec, on a device, are made by the kernel."""
    return device.type != "cpu" and spec.channels in gpu.CHANNELS and gpu.kernel_runs(device)


def _readable(images: Images) -> bool:
    """Whether the kernel can read the pixels where they are: uint8, on the device or in pinned memory of the host."""
    if not isinstance(images, ImageRows):
        return True
    source = images.source
    return source.dtype == torch.uint8 and (source.device.type != "cpu" or source.is_pinned())


def _by_kernel(
    part: FusedPass, images: Images, placement: Placement, spec: ImageSpec, draws: Draws, device: torch.device
) -> torch.Tensor:
    """Returns the images of a pass by the Triton kernel."""
    steps = [transform.steps(draws.stream(index)) for index, transform in part.colours]
    coloured = any(step.ops.shape[1] for step in steps)
    ops = np.concatenate([step.ops for step in steps], axis=1) if coloured else None
    factors = np.concatenate([step.factors for step in steps], axis=1) if coloured else None
    rectangles = value = scale = shift = None
    if part.eraser:
        index, eraser = part.eraser
        shown = spec._replace(height=placement.size[0], width=placement.size[1])
        rectangles = eraser.rectangles(shown, draws.stream(index))
        value = np.resize(np.asarray(eraser.filled, np.float32), spec.channels)
    if part.normalize:
        scale, shift = (constants.numpy() for constants in part.normalize.scale_and_shift(torch.uint8))
    tables = _sent(device, placement.table(), ops, factors, rectangles, value, scale, shift)
    return gpu.fused(
        *_where_they_lie(images),
        tables,
        placement.size,
        has_contrast=any(_has_contrast(transform) for _, transform in part.colours),
        dtype=part.normalize.dtype if part.normalize else torch.uint8,
        resampled=placement.resized,
        channels=spec.channels,
    )


def _sent(device: torch.device, *tables: NDArray[Any] | None) -> gpu.PassTables:
    """Returns tables of integers (int32) and floats (float32) on the device, by one copy that nothing waits for."""
    given = [
        table if table is None else np.ascontiguousarray(table, np.int32 if table.dtype.kind in "iub" else np.float32)
        for table in tables
    ]
    flat = [table.reshape(-1).view(np.int32) for table in given if table is not None]
    packed = torch.from_numpy(np.concatenate(flat))
    # torch keeps pinned memory until the stream has read it, and then uses it again.
    there = (packed.pin_memory() if device.type == "cuda" else packed).to(device, non_blocking=True)
    parts = iter(torch.split(there, [len(table) for table in flat]))
    return gpu.PassTables(
        *(  # type: ignore[arg-type]  # every sample has a window
            table if table is None else next(parts).view(torch.from_numpy(table).dtype).view(table.shape)
            for table in given
        )
    )


def _where_they_lie(images: Images) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns images (N, H, W, C) or (T,), and which of them the samples are, as `gpu.fused` takes them."""
    if isinstance(images, PlacedImages):
        return images.pixels, images.layout
    if isinstance(images, ImageRows):
        return images.source, images.samples
    return images.permute(0, 2, 3, 1), None


def _has_contrast(transform: ColourTransform) -> bool:
    return isinstance(transform, ColorJitter) and transform.contrast != (1, 1)
