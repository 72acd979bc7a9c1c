"""Makes batches out of rows in the threads that read them: decoded, cut, resized, transformed, written into the slot.

    bytes of a row --> decode what its window shows --> scratch --resize, some images later--> output (B, C, h, w)

A batch on the CPU is then ready when it is asked for, augmented and, if the list says so, normalized. Raw pixels in a
mapping are taken from where they lie, so a crop reads no more than its window. Where images differ in size, the windows
of the first transforms are drawn before anything is decoded, so that no more of a JPEG is decoded than they show, and
no larger than needed; masks, boxes and points are cut and resized with their images.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode_part import FACTORS, offset_in
from fastload.plan import PlannedBatch
from fastload.prefetch.device_stage import fields_on_cpu
from fastload.prefetch.resolved import Augmentation
from fastload.read.fields import image_axes
from fastload.read.rows import Rows
from fastload.read.table import LocatedIndex
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap
from fastload.transforms import Draws, Normalize
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import ImageRows, Placement
from fastload.transforms.engine.resample import Constants, in_numpy, numpy_images, place_samples
from fastload.transforms.engine.size_head import SizeHead

# Decoded images that wait for their resize: so few that they are still in the core's cache when it comes.
SCRATCH_BYTES = 3 * 2**19


class _Scratch(threading.local):
    """Memory of each thread's own."""

    def __init__(self) -> None:
        self.memory = np.empty(SCRATCH_BYTES, np.uint8)


class PlacedRows:
    """Decodes what windows of ragged uint8 images show, and places it. Any thread may call it."""

    def __init__(self, reader: Rows) -> None:
        self._reader = reader
        self._scratch = _Scratch()

    @staticmethod
    def factors(placement: Placement, index: LocatedIndex) -> NDArray[np.int64]:
        """Returns by how much each image may be shrunk while it is decoded and still cover its output, int64 (B,)."""
        factors = np.ones(len(index), np.int64)
        for factor in sorted(FACTORS):
            large = (placement.window >= factor * placement.scaled).all(axis=1)
            factors[large & (index.encoding == JPEG)] = factor
        return factors

    def place(
        self,
        rows: NDArray[np.int64],
        index: LocatedIndex,
        placement: Placement,
        factors: NDArray[np.int64],
        output: torch.Tensor,
        constants: Constants | None = None,
    ) -> None:
        """Decodes and places images in the output, (B, C, h, w) over dense (B, h, w, C) memory.

        The placement's windows are snapped to the factors, by which each image may be shrunk while it is decoded. With
        constants, of a Normalize, the output is normalized.
        """
        reader = self._reader.encoded("images")
        target, made = numpy_images(output), np.zeros(len(rows), np.bool_)
        if target is not None:
            windows = placement.in_decoded(factors, np.zeros_like(factors)).table()
            made = reader.make_images(rows, index, windows, factors, target, in_numpy(constants))
            if made.all():
                return
        if (index.encoding == RAW).all() and (mapped := reader.flat) is not None:
            sources = np.stack([index.offset, index.shape[:, 1]], axis=1).astype(np.int64)
            place_samples(torch.from_numpy(writable(mapped)), sources, placement, output, constants)
            lap("transform")
            return
        # The most bytes that each image's decoded pixels take.
        height, width, channels = index.shape.astype(np.int64).T
        most = np.where(index.encoding == JPEG, -(-height // factors), placement.window[:, 0])
        most = most * -(-width // factors) * channels
        # Those that were not made yet, if some were: one by one.
        left = [slice(at, at + 1) for at in np.flatnonzero(~made).tolist()]
        for some in left if made.any() else runs(most):
            shown, out, least = placement.part(some), output[some], int(most[some].sum())
            memory = self._scratch.memory if least <= SCRATCH_BYTES else np.empty(least, np.uint8)
            windows = np.concatenate([shown.first, shown.window], axis=1)
            parts = reader.parts(rows[some], index.part(some), windows, factors[some], memory)
            shrunk, tops = (np.array([getattr(part, name) for part in parts], np.int64) for name in ("factor", "top"))
            shown = shown.in_decoded(shrunk, tops)
            begins = [offset_in(memory, part.pixels) for part in parts]
            if min(begins) < 0:
                # One that only Pillow decodes comes at its full size, and may have found no room.
                flat = [part.pixels.reshape(-1) for part in parts]
                memory, begins = np.concatenate(flat), np.cumsum([0, *map(len, flat[:-1])]).tolist()
            sources = np.array([begins, [part.pixels.shape[1] for part in parts]], np.int64).T
            place_samples(torch.from_numpy(memory), sources, shown, out, constants)
            lap("transform")


class RowTransformer:
    """Fills slots with batches of one size. Any thread may call it, and decodes into memory of its own.

    Args:
        dataset: packed, without a Python transform, with images among its fields.
        reader: of its fields.
        augmentation: the loader's; the transforms of it that run here are all thread-safe.
        head: for ragged images, the transforms that give them one size, which count as done in the augmentation; None:
            all rows have one shape.
        complete: whether the transforms behind the head are done here too; else they are left to later stages.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        reader: Rows,
        augmentation: Augmentation,
        *,
        head: SizeHead | None = None,
        complete: bool = True,
    ) -> None:
        self._file, self._reader, self._augmentation, self._head = dataset.file, reader, augmentation, head
        rest = augmentation.transforms[augmentation.done :] if complete else ()
        self._goes_on = bool(rest)
        self._has_masks = "masks" in dataset.fields
        self._mask_dtype = dataset.file.fields["masks"].dtype.newbyteorder("=") if self._has_masks else np.dtype("u1")
        self._placed = PlacedRows(reader)
        self._source = self._mapped_images() if head is None else None
        self._constants: Constants | None = None
        apart: set[str] = {"images"} if self._source is not None else set()
        arrays: dict[str, NDArray[Any]] = {}
        if head is not None:
            apart = {name for name in ("images", "masks") if name in self._file.fields}
            apart = {name for name in apart if self._file.fields[name].ragged is not None}
            dtype = self._file.fields["images"].dtype.newbyteorder("=")
            arrays["images"] = np.zeros((1, *head.size, head.spec.channels), dtype)
            if self._has_masks:
                arrays["masks"] = np.zeros((1, *head.size), self._mask_dtype)
            if len(rest) == 1 and isinstance(rest[0], Normalize) and head.spec.dtype == torch.uint8:
                self._constants = rest[0].scale_and_shift(torch.uint8)
        layout = dataset.layout()
        self._gathered = [item for item in layout if item[0] not in apart]
        # The output's form is found with a batch of one black image.
        arrays |= {name: np.zeros((1, *shape), dtype) for name, shape, dtype in layout if name not in arrays}
        fields = self._as_tensors(arrays)
        if head is not None:
            fields |= {name: fields[name].to(torch.float32) for name in augmentation.coordinates if name in fields}
        planned = PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0)
        made = augmentation.apply(fields, planned, epoch=0) if self._goes_on else fields
        # Of fields whose dtype NumPy lacks; their slots hold uint16.
        self.views = {name: tensor.dtype for name, tensor in made.items() if tensor.dtype == torch.bfloat16}
        self.fields = []  # name, shape and dtype of each field of a sample, as it lies in a slot: images (H, W, C)
        for name, tensor in made.items():
            inside = tensor.permute(0, 2, 3, 1) if name == "images" else tensor
            inside = inside.view(torch.uint16) if inside.dtype == torch.bfloat16 else inside
            self.fields.append((name, tuple(inside.shape[1:]), inside.numpy().dtype))

    def fill(self, epoch: int, planned: PlannedBatch, slot: Mapping[str, NDArray[Any]]) -> int:
        """Reads a batch of an epoch into a slot's arrays, (B, ...); returns the bytes of its rows.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image is too small for its crop.
        """
        use_one_torch_thread()
        rows, count = planned.rows, len(planned.rows)
        targets = fields_on_cpu({name: slot[name] for name, _, _ in self.fields}, self.views)
        images = targets["images"]
        read = {name: np.empty((count, *shape), dtype) for name, shape, dtype in self._gathered}
        num_bytes = self._reader.gather(rows, read)  # which checks the rows, and that the file is the same
        lap("reading")
        made = self._as_tensors(read)
        if self._head is not None:
            with span("decode"):
                num_bytes += self._give_one_size(planned, epoch, made, images)
        with span("transform"):
            if self._goes_on and made.get("images") is not images:
                given: dict[str, torch.Tensor | ImageRows] = dict(made)
                if self._source is not None:
                    given["images"] = ImageRows(self._source, torch.from_numpy(rows))
                    num_bytes += count * self._file.fields["images"].row_bytes
                made = self._augmentation.apply(given, planned, epoch=epoch, output=images)
        for name, target in targets.items():
            if made[name].data_ptr() != target.data_ptr():
                target.copy_(made[name])
        lap("transform")
        return num_bytes

    def _give_one_size(
        self, planned: PlannedBatch, epoch: int, fields: dict[str, torch.Tensor], target: torch.Tensor
    ) -> int:
        """Adds images and masks after the head of the list to the fields, moves coordinates; returns bytes of rows.

        Images lie in the target if no transform is left to do; the Normalize that alone follows is done with the head.
        """
        assert self._head is not None, "only ragged images come here"
        rows = planned.rows
        index = self._reader.encoded("images").index(rows)
        draws = self._augmentation.draws(epoch, planned)
        placement = self._head.placement(index.shape[:, :2], draws)
        lap("transform")
        output = target
        if self._goes_on and (placement is None or self._constants is None):
            shape = (len(rows), *self._head.size, self._head.spec.channels)
            output = torch.empty(shape, dtype=self._head.spec.dtype, device="cpu").permute(0, 3, 1, 2)
        if placement is None:
            self._one_by_one(rows, index, draws, fields, output)
        else:
            factors = self._placed.factors(placement, index)
            placement = placement.snapped(factors, index.shape)
            self._placed.place(rows, index, placement, factors, output, self._constants)
            if self._has_masks:
                placed = torch.from_numpy(np.empty((len(rows), *placement.size), self._mask_dtype))
                for some in runs(index.shape[:, :2].prod(axis=1, dtype=np.int64)):
                    place_varied_masks(self._masks(rows, some, fields), placement.part(some), placed[some])
                    lap("transform")
                fields["masks"] = placed
            if self._augmentation.coordinates:
                fields |= place_varied_coordinates(fields, placement, self._augmentation.coordinates)
        fields["images"] = output
        return int(index.bytes.sum())

    def _one_by_one(
        self,
        rows: NDArray[np.int64],
        index: LocatedIndex,
        draws: Draws,
        fields: dict[str, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        """Runs a head that one placement cannot describe, image by image: padding, two resizes, 16 bits."""
        assert self._head is not None, "only ragged images come here"
        names = [*self._augmentation.coordinates, *(["masks"] if self._has_masks else [])]
        made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        sizes = index.shape.prod(axis=1, dtype=np.int64) * output.dtype.itemsize
        for some in runs(sizes):
            moved: dict[str, Any] = {name: fields[name][some] for name in self._augmentation.coordinates}
            if self._has_masks:
                moved["masks"] = [torch.from_numpy(mask) for mask in self._masks(rows, some, fields)]
            images = [torch.from_numpy(one).permute(2, 0, 1) for one in self._reader.decoded("images", rows[some])]
            done = self._head.apply_each(
                images,
                moved,
                draws.of_samples(some),
                ignore_index=self._augmentation.ignore_index,
                coordinates=self._augmentation.coordinates,
            )
            output[some].copy_(done.pop("images"))
            for name, values in done.items():
                made[name].append(values)
            lap("transform")
        fields |= {name: torch.cat(values) for name, values in made.items()}

    def _masks(self, rows: NDArray[np.int64], some: slice, fields: Mapping[str, torch.Tensor]) -> list[NDArray[Any]]:
        """Returns the whole masks of some rows: of one size and read with the other fields, or decoded."""
        if "masks" in fields:
            return list(fields["masks"][some].numpy())
        return self._reader.decoded("masks", rows[some])

    def _as_tensors(self, arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return fields_on_cpu(as_handed_over(self._file, arrays))

    def _mapped_images(self) -> torch.Tensor | None:
        """Returns the file's images, uint8 (N, H, W, C), or None where they are not mapped as such."""
        field = self._file.fields["images"]
        mapped = self._reader.mapped("images")
        if mapped is None or field.ragged is not None or field.dtype != np.uint8 or image_axes(self._file) == "CHW":
            return None
        shape = field.shape if len(field.shape) == 3 else (*field.shape, 1)
        return torch.from_numpy(writable(mapped)).view(len(mapped), *shape)


def writable(mapped: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the bytes of a read-only mapping, uint8 (T,), as an array that claims to be writable; it is not."""
    # torch warns of arrays that cannot be written to, as if somebody would.
    return np.ctypeslib.as_array((ctypes.c_uint8 * mapped.nbytes).from_address(mapped.ctypes.data))


def runs(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Yields runs of rows that together have at most SCRATCH_BYTES, or one row that has more; `sizes` in bytes."""
    first = total = 0
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > SCRATCH_BYTES:
            yield slice(first, at)
            first, total = at, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def use_one_torch_thread() -> None:
    """Lets torch's kernels run in the calling thread alone from now on; other threads keep their number.

    There are as many reading threads as CPUs, and a team of OpenMP for each of them fights with the model's for the
    cores.
    """
    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    # torch also gives the number to threads that begin later; a thread that ends at once puts it back.
    helper = threading.Thread(target=torch.set_num_threads, args=(before,))
    helper.start()
    helper.join()
