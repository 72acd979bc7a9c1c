"""Images that keep their own sizes: a list of tensors, or one tensor padded to the largest of the batch.

    bytes of a row --> decode (what the first crop or resize shows) --> own array --transforms--> list, or padded

Threads decode and, on the CPU, transform image by image. For a device they send the pixels of a batch in one piece, and
they are transformed and padded there, when they are handed over. In both forms a sample is the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import as_handed_over
from fastload.errors import OptionError
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.loader_plan import BatchForm
from fastload.prefetch.stages.cut import PlacedRows
from fastload.prefetch.stages.device_decode import Staging, StagingPool
from fastload.prefetch.stages.transform import Augmentation, named
from fastload.prefetch.work import Layout, Opened, Stage, Where, Work
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap
from fastload.transforms.engine.decode_time_resize import DecodeTimeResize
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


class DecodeVariableSize(Stage):
    """Adds lists of images (C, h, w) and masks (h, w), after the first transforms; moves boxes and points with them.

    Args:
        data: of the loader.
        augmentation: its transforms; the head's count as done.
        head: the first ones, maybe none, which are placed as the images are decoded.
        leaves: whether images leave their memory before the thread begins its next batch: padded, or sent away.
    """

    where = Where.THREAD
    alone = True

    def __init__(self, data: PackedInput, augmentation: Augmentation, head: DecodeTimeResize, *, leaves: bool) -> None:
        self._data, self._file = data, data.dataset.file
        self._augmentation, self._head, self._leaves = augmentation, head, leaves
        self._has_masks = "masks" in data.dataset.fields
        self._memory = _Memory()
        first = f"{named(head.transforms)}: no more of an image is decoded than is shown; " if head.count else ""
        self.why = f"{first}images keep their own sizes"

    def open(self, opened: Opened) -> None:
        """Takes the reader."""
        self._reader = opened.reader
        self._placed = PlacedRows(opened.reader)

    def output(self, given: Layout) -> Layout:
        """Returns the same fields, as images and masks lie in no slot; what moves with them is float32."""
        coordinates = self._augmentation.coordinates if self._head.count else ()
        return given | {name: (given[name][0], np.dtype(np.float32)) for name in coordinates if name in given}

    def run(self, work: Work) -> None:
        """Decodes.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image does not fit a transform; names it.
        """
        with span("decode"):
            self._add_pixels(work)

    def _add_pixels(self, work: Work) -> None:
        rows, fields = work.rows, work.fields
        placement = index = None
        if self._file.fields["images"].ragged is not None:
            index = self._reader.encoded("images").index(rows)
        if self._head.count:
            assert index is not None, "only ragged images have transforms at the head"
            self._check_sizes(rows, index.shape[:, :2])
            placement = self._head.placement(index.shape[:, :2], self._augmentation.draws(work.epoch, work.whole))
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
        if self._has_masks:
            fields["masks"] = self._masks(rows, placement)
        if placement is not None and self._augmentation.coordinates:
            fields |= _moved(fields, placement, self._augmentation.coordinates)
        work.copied.append(sum(image.nbytes for image in images) if index is None else int(index.bytes.sum()))

    def _memory_for(self, rows: NDArray[np.int64], placement: Placement | None) -> list[NDArray[Any]]:
        """Returns an array (h, w, C) for each image, one after another in memory of the batch, or of this thread."""
        field = self._file.fields["images"]
        dtype = field.dtype.newbyteorder("=")
        (channels, height, width), _ = self._data.image_spec()
        if placement is not None:
            sizes = np.broadcast_to(placement.sizes, (len(rows), 2)).tolist()
        elif field.ragged is not None:
            sizes = self._reader.encoded("images").part("shape", rows)[:, :2].tolist()
        else:
            sizes = [[height, width]] * len(rows)
        ends = np.cumsum([0, *(math.prod(size) * channels * dtype.itemsize for size in sizes)]).tolist()
        memory = self._memory.room(ends[-1]) if self._leaves else np.empty(ends[-1], np.uint8)
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
                    raise OptionError(f"{self._data.name_of(row)}: {error}") from None
            raise


class TransformEach(Stage):
    """Runs the transforms that are left on each sample by itself.

    Random numbers are drawn by the samples' rows, so they do not depend on the batch.
    """

    def __init__(self, data: PackedInput, augmentation: Augmentation, where: Where) -> None:
        self._data, self._augmentation, self.where = data, augmentation, where
        self.why = f"{named(augmentation.left)}: each image by itself, as it has its own size"

    def output(self, given: Layout) -> Layout:
        """Returns the same fields; what moves with the images is float32."""
        return given | {n: (given[n][0], np.dtype(np.float32)) for n in self._augmentation.coordinates if n in given}

    def run(self, work: Work) -> None:
        """Transforms each sample; OptionError: an image does not fit a transform; names it."""
        fields, made = work.fields, list[dict[str, torch.Tensor]]()
        with span("transform"):
            for at in range(len(work.rows)):
                one = slice(at, at + 1)
                sample = {name: values[at][None] if name in PIXELS else values[one] for name, values in fields.items()}
                alone = work.whole.part(one)
                try:
                    made.append(
                        self._augmentation.apply(sample, alone, epoch=work.epoch, echo=work.echo, kept=not work.last)
                    )
                except OptionError as error:
                    height, width = fields["images"][at].shape[1:]
                    name = self._data.name_of(int(work.rows[at]))
                    raise OptionError(f"{name}, an image of {height}x{width}: {error}") from None
            work.fields = {
                name: [one[name][0] for one in made] if name in PIXELS else torch.cat([one[name] for one in made])
                for name in fields
            }
        lap("transform")


class PadImages(Stage):
    """Pads images and masks to the largest of the batch, and says their sizes."""

    def __init__(self, form: BatchForm, ignore_index: int, where: Where, *, on_device: bool = False) -> None:
        self._form, self._ignore_index, self.where = form, ignore_index, where
        self._padded = padded_by_mask if on_device else padded
        self.why = "to the largest image of the batch" + (f", in multiples of {form.pad_to}" if form.pad_to > 1 else "")

    def run(self, work: Work) -> None:
        """Pads."""
        pixels = {name: work.fields[name] for name in PIXELS if name in work.fields}
        work.facts["sizes"] = sizes_of(pixels["images"])
        work.fields |= self._padded(pixels, self._form, self._ignore_index)


class SendPixels(Stage):
    """Sends images and masks to the device, each field in one piece of its memory.

    Args:
        form: of the batch, where they are padded on their way: no transform is left to run there.
        ignore_index: of masks.
    """

    where = Where.THREAD

    def __init__(self, form: BatchForm | None, ignore_index: int) -> None:
        self._form, self._ignore_index = form, ignore_index
        way = ", padded on their way" if form is not None else ""
        self.why = f"images and masks to the device, in one piece each{way}"

    def open(self, opened: Opened) -> None:
        """Takes pinned memory."""
        assert opened.pins is not None and opened.options.backend is not None, "there is a device"
        self._backend, self._staging = opened.options.backend, StagingPool(opened.pins)

    def run(self, work: Work) -> None:
        """Sends, and waits until they are there."""
        pixels = {name: work.fields[name] for name in PIXELS if name in work.fields}
        with self._staging.taken() as staging:
            # Gathered before the one copy at a time begins.
            if self._form is not None:
                work.facts["sizes"] = sizes_of(pixels["images"])
                hosts: dict[str, Any] = padded(pixels, self._form, self._ignore_index, staging.tensor)
            else:
                hosts = {name: _in_one_piece(tensors, name, staging) for name, tensors in pixels.items()}
            with self._backend.decoding():
                for name, host in hosts.items():
                    if self._form is None:
                        work.fields[name] = _taken_apart(self._backend.copy(host), pixels[name], name)
                    else:
                        inside = host.permute(0, 2, 3, 1) if name == "images" else host
                        there = self._backend.copy(inside)
                        work.fields[name] = there.permute(0, 3, 1, 2) if name == "images" else there
        lap("transform")


def _in_one_piece(tensors: Sequence[torch.Tensor], name: str, staging: Staging) -> torch.Tensor:
    """Returns images (C, h, w) or masks (h, w) one after another in pinned memory, uint8 (bytes,)."""
    inside = [tensor.permute(1, 2, 0) if name == "images" else tensor for tensor in tensors]
    flat = [array.numpy().reshape(-1).view(np.uint8) for array in inside]
    memory = staging.room(name, sum(map(len, flat)))
    np.concatenate(flat, out=memory)
    return torch.from_numpy(memory)


def _taken_apart(piece: torch.Tensor, like: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Returns the tensors of a piece of `_in_one_piece`, like those that it was made of."""
    inside = [tensor.permute(1, 2, 0) if name == "images" else tensor for tensor in like]
    parts = torch.split(piece, [one.nbytes for one in inside])
    moved = [part.view(one.dtype).view(one.shape) for part, one in zip(parts, inside, strict=True)]
    return [one.permute(2, 0, 1) if name == "images" else one for one in moved]


class JoinPixels(Stage):
    """Puts images and masks, which lie in no slot, back to the other fields; for a use of the batch."""

    where = Where.USE
    why = "images and masks come back to the other fields"

    def run(self, work: Work) -> None:
        """Joins."""
        extra, work.extra = work.extra, {}
        work.fields |= extra


class SaySizes(Stage):
    """Says the sizes of images, and which pixels of padded ones are theirs, when somebody asks."""

    where = Where.USE

    def __init__(self, form: BatchForm) -> None:
        self._pads = form.kind == "pad"
        self.why = "batch.sizes" + (", batch.pixel_mask" if self._pads else "")

    def run(self, work: Work) -> None:
        """Adds the facts; images that are used again get memory of their own."""
        fields = work.fields
        images = fields["images"]
        sizes = work.facts.get("sizes")
        if sizes is None:
            sizes = sizes_of(images)
        if not work.last and not self._pads and work.origin is not None:
            before = work.origin.extra
            fields |= {
                name: [_own(new, old) for new, old in zip(fields[name], before[name], strict=True)]
                for name in PIXELS
                if name in fields
            }
        device = images[0].device
        work.facts["sizes"] = functools.partial(torch.as_tensor, sizes, device=device)
        if self._pads:
            work.facts["pixel_mask"] = functools.partial(_pixel_mask, sizes, images.shape[2:], device)


def _own(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new.clone() if new.untyped_storage()._cdata == old.untyped_storage()._cdata else new


def _moved(fields: Mapping[str, Any], placement: Placement, coordinates: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns boxes and points moved as the images are, each within its own size."""
    here = {name: fields[name] for name in coordinates if name in fields}
    each = []
    for at in range(len(placement)):
        one = slice(at, at + 1)
        each.append(place_varied_coordinates({n: v[one] for n, v in here.items()}, placement.part(one), coordinates))
    return {name: torch.cat([moved[name] for moved in each]) for name in here}


def sizes_of(images: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """Returns the heights and widths of images (C, h, w), int64 (B, 2)."""
    return np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)


def padded(
    pixels: Mapping[str, list[torch.Tensor]],
    form: BatchForm,
    ignore_index: int,
    empty: Callable[[str, Sequence[int], torch.dtype], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns images (B, C, H, W) in channels_last memory and masks (B, H, W), each sample at the top left.

    H and W are the largest height and width, rounded up to a multiple of the form's `pad_to`. Images are padded with 0,
    masks with `ignore_index`. `empty` gives the memory of a field, by name, shape and dtype.
    """
    height, width = _padded_size(pixels, form)
    result = {}
    for name, tensors in pixels.items():
        inside = [tensor.permute(1, 2, 0) if name == "images" else tensor for tensor in tensors]
        fill = 0 if name == "images" else ignore_index
        shape = (len(inside), height, width, *inside[0].shape[2:])
        if empty is not None:
            output = empty(name, shape, inside[0].dtype)
        else:
            output = torch.empty(shape, dtype=inside[0].dtype, device=inside[0].device)
        for target, one in zip(output, inside, strict=True):
            h, w = one.shape[:2]
            target[:h, :w].copy_(one)
            target[h:].fill_(fill)
            target[:h, w:].fill_(fill)
        result[name] = output.permute(0, 3, 1, 2) if name == "images" else output
    return result


def padded_by_mask(
    pixels: Mapping[str, list[torch.Tensor]], form: BatchForm, ignore_index: int
) -> dict[str, torch.Tensor]:
    """Returns what `padded` does, in some launches a batch instead of three for each sample and field."""
    height, width = _padded_size(pixels, form)
    sizes = sizes_of(pixels["images"])
    mask = _pixel_mask(sizes, (height, width), pixels["images"][0].device)
    result = {}
    for name, tensors in pixels.items():
        inside = [(tensor.permute(1, 2, 0) if name == "images" else tensor).reshape(-1) for tensor in tensors]
        channels = tensors[0].shape[:1] if name == "images" else ()
        shape, fill = (len(tensors), height, width, *channels), 0 if name == "images" else ignore_index
        output = torch.full(shape, fill, dtype=tensors[0].dtype, device=tensors[0].device)
        shown = mask[..., None].expand(shape) if channels else mask
        # In words of as many bytes, as torch scatters few of the unsigned types.
        word = _SIGNED.get(output.dtype, output.dtype)
        output.view(word).masked_scatter_(shown, torch.cat(inside).view(word))
        result[name] = output.permute(0, 3, 1, 2) if name == "images" else output
    return result


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def _padded_size(pixels: Mapping[str, list[torch.Tensor]], form: BatchForm) -> tuple[int, int]:
    height, width = sizes_of(pixels["images"]).max(axis=0).tolist()
    return -(-height // form.pad_to) * form.pad_to, -(-width // form.pad_to) * form.pad_to


def _pixel_mask(sizes: NDArray[np.int64], padded: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns which pixels of images padded to (H, W) are of the samples: bool (B, H, W)."""
    limits = torch.as_tensor(sizes, device=device)
    rows, columns = (torch.arange(side, device=device) < limits[:, axis : axis + 1] for axis, side in enumerate(padded))
    return rows[:, :, None] & columns[:, None, :]
