"""Batches of images that keep their own sizes: a list of tensors, or one tensor padded to the largest of the batch.

    bytes of a row --> decode (what the first crop or resize shows) --> own array --transforms--> list, or padded

Threads decode and, on the CPU, transform image by image; `OwnSizeRows` fills the batches. For a device they send the
pixels of a batch in one piece, and `handed_over` transforms and pads there. In both forms a sample is the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import as_handed_over
from fastload.device import Pins
from fastload.errors import OptionError
from fastload.plan import PlannedBatch
from fastload.prefetch.device_decoder import StagingPool, slot_fields
from fastload.prefetch.device_stage import fields_on_cpu
from fastload.prefetch.resolved import BatchForm, Resolved
from fastload.prefetch.row_transformer import PlacedRows, use_one_torch_thread
from fastload.read.rows import Rows
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import Placement

PIXELS = ("images", "masks")
"""Fields whose samples have sizes of their own."""


class _Memory(threading.local):
    """Memory of each thread's own for the images of a batch before they are padded."""

    def __init__(self) -> None:
        self.pixels = np.empty(0, np.uint8)

    def room(self, num_bytes: int) -> NDArray[np.uint8]:
        if len(self.pixels) < num_bytes:
            self.pixels = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return self.pixels[:num_bytes]


class OwnSizeRows:
    """Fills slots with all fields but images and masks, and adds these. Any thread may call it.

    Args:
        options: of the loader; its form of batches is a list, or padded.
        reader: of the dataset's fields.
        pins: pins memory for pixels on their way to the device; None: there is none.
    """

    def __init__(self, options: Resolved, reader: Rows, pins: Pins | None) -> None:
        dataset = options.packed.dataset
        assert options.size_head is not None, "it may be empty"
        self._options, self._reader, self._file = options, reader, dataset.file
        self._head, self._augmentation = options.size_head, options.augmentation
        self._pixels = [name for name in PIXELS if name in dataset.fields]
        self._placed = PlacedRows(reader)
        self._memory = _Memory()
        self._staging = StagingPool(pins) if pins is not None else None
        self._goes_on = options.in_threads and bool(self._augmentation.transforms[self._augmentation.done :])
        self._gathered = [item for item in dataset.layout() if item[0] not in self._pixels]
        moved = self._augmentation.coordinates if self._head.count or self._goes_on else ()
        self.fields = slot_fields(self._file, self._gathered, moved)
        self.views: dict[str, torch.dtype] = {}

    def fill(self, epoch: int, planned: PlannedBatch, slot: dict[str, Any]) -> int:
        """Reads a batch of an epoch into a slot's arrays, (B, ...), adds its pixels; returns the bytes of its rows.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image does not fit a transform; names it.
        """
        use_one_torch_thread()
        rows = planned.rows
        read = {name: np.empty((len(rows), *shape), dtype) for name, shape, dtype in self._gathered}
        num_bytes = self._reader.gather(rows, read)  # which checks the rows, and that the file is the same
        fields: dict[str, Any] = dict(fields_on_cpu(as_handed_over(self._file, read)))
        lap("reading")
        with span("decode"):
            num_bytes += self._add_pixels(planned, epoch, fields)
        if self._goes_on:
            with span("transform"):
                fields = transformed(self._options, fields, planned, epoch=epoch)
                lap("transform")
        for name, _, _ in self.fields:
            slot[name][:] = fields[name].numpy()
        pixels = {name: fields[name] for name in self._pixels}
        if self._options.backend is not None:
            pixels = self._sent(pixels)
        elif self._options.in_threads and self._options.form.kind == "pad":
            slot["sizes"] = sizes_of(pixels["images"])
            pixels = padded(pixels, self._options.form, self._augmentation.ignore_index)
        slot |= pixels
        lap("transform")
        return num_bytes

    def _add_pixels(self, planned: PlannedBatch, epoch: int, fields: dict[str, Any]) -> int:
        """Adds lists of images (C, h, w) and masks (h, w) after the head, moves coordinates; returns bytes of rows."""
        rows = planned.rows
        placement = index = None
        if self._file.fields["images"].ragged is not None:
            index = self._reader.encoded("images").index(rows)
        if self._head.count:
            assert index is not None, "only ragged images have transforms at the head"
            self._check_sizes(rows, index.shape[:, :2])
            placement = self._head.placement(index.shape[:, :2], self._augmentation.draws(epoch, planned))
            assert placement is not None, "one placement says it"
            factors = self._placed.factors(placement, index)
            placement = placement.snapped(factors, index.shape)
            lap("transform")
        images = self._memory_for(rows, placement)
        if placement is None or index is None:
            self._decode_whole("images", rows, images)
        else:
            for at, image in enumerate(images):
                one, out = slice(at, at + 1), torch.from_numpy(image)[None].permute(0, 3, 1, 2)
                self._placed.place(rows[one], index.part(one), placement.part(one), factors[one], out)
        fields["images"] = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
        if "masks" in self._pixels:
            fields["masks"] = self._masks(rows, placement)
        if placement is not None and self._augmentation.coordinates:
            fields |= _moved(fields, placement, self._augmentation.coordinates)
        return sum(image.nbytes for image in images) if index is None else int(index.bytes.sum())

    def _memory_for(self, rows: NDArray[np.int64], placement: Placement | None) -> list[NDArray[Any]]:
        """Returns an array (h, w, C) for each image, one after another in memory of the batch, or of this thread."""
        field = self._file.fields["images"]
        dtype = field.dtype.newbyteorder("=")
        (channels, height, width), _ = self._options.packed.image_spec()
        if placement is not None:
            sizes = np.broadcast_to(placement.sizes, (len(rows), 2)).tolist()
        elif field.ragged is not None:
            sizes = self._reader.encoded("images").part("shape", rows)[:, :2].tolist()
        else:
            sizes = [[height, width]] * len(rows)
        ends = np.cumsum([0, *(math.prod(size) * channels * dtype.itemsize for size in sizes)]).tolist()
        # Images that were padded, or sent away, leave the memory before the thread begins its next batch.
        leaves = self._options.backend is None and self._options.in_threads and self._options.form.kind == "pad"
        memory = self._memory.room(ends[-1]) if leaves else np.empty(ends[-1], np.uint8)
        parts = (memory[begin:end] for begin, end in itertools.pairwise(ends))
        return [part.view(dtype).reshape(*size, channels) for part, size in zip(parts, sizes, strict=True)]

    def _decode_whole(self, name: str, rows: NDArray[np.int64], outs: Sequence[NDArray[Any]]) -> None:
        field = self._file.fields[name]
        if field.ragged is not None:
            self._reader.encoded(name).decoded(rows, outs)
            return
        read = {name: np.empty((len(rows), *field.shape), field.dtype.newbyteorder("="))}
        self._reader.gather(rows, read)
        for out, row in zip(outs, as_handed_over(self._file, read)[name], strict=True):
            out[:] = row

    def _masks(self, rows: NDArray[np.int64], placement: Placement | None) -> list[torch.Tensor]:
        field = self._file.fields["masks"]
        if field.ragged is not None:
            whole = self._reader.encoded("masks").decoded(rows)
        else:
            whole = list(np.empty((len(rows), *field.shape), field.dtype.newbyteorder("=")))
            self._decode_whole("masks", rows, whole)
        if placement is None:
            return [torch.from_numpy(mask if mask.flags.writeable else mask.copy()) for mask in whole]
        masks, dtype = [], torch.from_numpy(whole[0][:0]).dtype
        for at, mask in enumerate(whole):
            part = placement.part(slice(at, at + 1))
            masks.append(torch.empty((1, *part.size), dtype=dtype, device="cpu"))
            place_varied_masks([mask], part, masks[-1])
        return [mask[0] for mask in masks]

    def _check_sizes(self, rows: NDArray[np.int64], shapes: NDArray[np.int32]) -> None:
        try:
            self._head.check(shapes)
        except OptionError:
            for row, shape in zip(rows.tolist(), shapes, strict=True):
                try:
                    self._head.check(shape[None])
                except OptionError as error:
                    raise OptionError(f"{self._options.data.name_of(row)}: {error}") from None
            raise

    def _sent(self, pixels: Mapping[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """Returns the images and masks on the device, each field in one piece of its memory."""
        backend, found = self._options.backend, {}
        assert backend is not None and self._staging is not None, "there is a device"
        with self._staging.taken() as staging, backend.decoding():
            for name, tensors in pixels.items():
                inside = [tensor.permute(1, 2, 0) if name == "images" else tensor for tensor in tensors]
                flat = [array.numpy().reshape(-1).view(np.uint8) for array in inside]
                memory = staging.room(name, sum(map(len, flat)))
                np.concatenate(flat, out=memory)
                there = backend.copy(torch.from_numpy(memory))
                parts = torch.split(there, list(map(len, flat)))
                moved = [part.view(one.dtype).view(one.shape) for part, one in zip(parts, inside, strict=True)]
                found[name] = [one.permute(2, 0, 1) if name == "images" else one for one in moved]
        return found


def _moved(fields: Mapping[str, Any], placement: Placement, coordinates: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns boxes and points moved as the images are, each within its own size."""
    here = {name: fields[name] for name in coordinates if name in fields}
    each = []
    for at in range(len(placement)):
        one = slice(at, at + 1)
        each.append(place_varied_coordinates({n: v[one] for n, v in here.items()}, placement.part(one), coordinates))
    return {name: torch.cat([moved[name] for moved in each]) for name in here}


def transformed(
    options: Resolved,
    fields: Mapping[str, Any],
    planned: PlannedBatch,
    *,
    epoch: int,
    echo: int = 0,
    kept: bool = False,
) -> dict[str, Any]:
    """Returns the fields of a batch with the transforms that are left applied to each sample by itself.

    Images and masks are lists, other fields (B, ...). Random numbers are drawn by the samples' rows, so they do not
    depend on the batch.
    """
    made: list[dict[str, torch.Tensor]] = []
    for at in range(len(planned.rows)):
        one = slice(at, at + 1)
        sample = {name: values[at][None] if name in PIXELS else values[one] for name, values in fields.items()}
        alone = planned.part(one)
        try:
            made.append(options.augmentation.apply(sample, alone, epoch=epoch, echo=echo, kept=kept))
        except OptionError as error:
            height, width = fields["images"][at].shape[1:]
            name = options.data.name_of(int(planned.rows[at]))
            raise OptionError(f"{name}, an image of {height}x{width}: {error}") from None
    return {
        name: [one[name][0] for one in made] if name in PIXELS else torch.cat([one[name] for one in made])
        for name in fields
    }


def handed_over(
    options: Resolved, fields: Mapping[str, Any], planned: PlannedBatch, *, epoch: int, echo: int, kept: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of a batch as its user gets them, and facts: "sizes" and, of padded ones, "pixel_mask".

    `kept`: the batch is used again, so the result shares no memory with it.
    """
    form, augmentation, result = options.form, options.augmentation, dict(fields)
    sizes = result.pop("sizes", None)
    if sizes is None:
        if not options.in_threads and augmentation.transforms[augmentation.done :]:
            result = transformed(options, result, planned, epoch=epoch, echo=echo, kept=kept)
        sizes = sizes_of(result["images"])
        if form.kind == "pad":
            result |= padded({name: result[name] for name in PIXELS if name in result}, form, augmentation.ignore_index)
        elif kept:
            result |= {
                name: [_own(new, old) for new, old in zip(result[name], fields[name], strict=True)]
                for name in PIXELS
                if name in result
            }
    images = result["images"]
    device = images[0].device
    facts: dict[str, Any] = {"sizes": functools.partial(torch.as_tensor, sizes, device=device)}
    if form.kind == "pad":
        facts["pixel_mask"] = functools.partial(_pixel_mask, sizes, images.shape[2:], device)
    return result, facts


def _own(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new.clone() if new.untyped_storage()._cdata == old.untyped_storage()._cdata else new


def sizes_of(images: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """Returns the heights and widths of images (C, h, w), int64 (B, 2)."""
    return np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)


def padded(pixels: Mapping[str, list[torch.Tensor]], form: BatchForm, ignore_index: int) -> dict[str, torch.Tensor]:
    """Returns images (B, C, H, W) in channels_last memory and masks (B, H, W), each sample at the top left.

    H and W are the largest height and width, rounded up to a multiple of the form's `pad_to`. Images are padded with 0,
    masks with `ignore_index`.
    """
    sizes = sizes_of(pixels["images"])
    height, width = (-(-side // form.pad_to) * form.pad_to for side in sizes.max(axis=0).tolist())
    result = {}
    for name, tensors in pixels.items():
        inside = [tensor.permute(1, 2, 0) if name == "images" else tensor for tensor in tensors]
        fill = 0 if name == "images" else ignore_index
        shape = (len(inside), height, width, *inside[0].shape[2:])
        output = torch.empty(shape, dtype=inside[0].dtype, device=inside[0].device)
        for target, one in zip(output, inside, strict=True):
            h, w = one.shape[:2]
            target[:h, :w].copy_(one)
            target[h:].fill_(fill)
            target[:h, w:].fill_(fill)
        result[name] = output.permute(0, 3, 1, 2) if name == "images" else output
    return result


def _pixel_mask(sizes: NDArray[np.int64], padded: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns which pixels of images padded to (H, W) are of the samples: bool (B, H, W)."""
    limits = torch.as_tensor(sizes, device=device)
    rows, columns = (torch.arange(side, device=device) < limits[:, axis : axis + 1] for axis, side in enumerate(padded))
    return rows[:, :, None] & columns[:, None, :]
