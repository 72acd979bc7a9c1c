"""Has the stored JPEGs of a batch decoded by the device. Never run on a GPU so far: tested with Pillow in its place.

    bytes of rows --reading thread--> pinned memory --nvJPEG--> (C, H, W) --> one buffer of the device, `PlacedImages`

The threads that read wait for the decoder, so that the training thread does not. They also draw which window of each
image is shown; the kernel that augments the batch cuts and resizes it when it is handed over, with everything else.
What nvJPEG may refuse, or give other colours (RGB and CMYK JPEGs, damaged ones), is decoded by the CPU and sent.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.device import Backend, Pins
from fastload.format.ragged import JPEG
from fastload.images.jpeg import has_end, scan_jpeg
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.ring import allocate_aligned
from fastload.prefetch.stages.gather import writable
from fastload.prefetch.stages.transform import Augmentation
from fastload.prefetch.work import Layout, Opened, Stage, Where, Work
from fastload.read.row_table import LocatedIndex
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap
from fastload.transforms.engine.decode_time_resize import DecodeTimeResize
from fastload.transforms.engine.place import place_varied_coordinates
from fastload.transforms.engine.placement import PlacedImages, Placement, windows

PINNED_BYTES = 2**28
"""Most pinned memory that a thread uses for bytes on their way to the device; a larger batch has memory of its own."""

# Kinds of row.
_UNSEEN, _BY_DEVICE, _BY_CPU = range(3)


class DecodeOnDevice(Stage):
    """Adds the images of a batch as `PlacedImages`, which lie in no slot.

    Args:
        data: of the loader, with stored JPEGs.
        augmentation: its transforms; the head's count as done.
        head: those that give images one size; None: they have one.
    """

    where = Where.THREAD

    def __init__(
        self, data: PackedInput, backend: Backend, augmentation: Augmentation, head: DecodeTimeResize | None
    ) -> None:
        self._data, self._backend, self._augmentation, self._head = data, backend, augmentation, head
        self._channels = data.image_spec()[0][0]
        self._known = np.full(data.dataset.file.num_rows, _UNSEEN, np.uint8)
        self.why = 'decode="device": stored JPEGs are decoded there'

    def open(self, opened: Opened) -> None:
        """Takes the reader, and pinned memory."""
        assert opened.pins is not None, "there is a device"
        self._reader, self._staging = opened.reader, StagingPool(opened.pins)

    def output(self, given: Layout) -> Layout:
        """Returns the same fields, as images lie in no slot; what moves with them is float32."""
        coordinates = self._augmentation.coordinates if self._head is not None else ()
        return given | {name: (given[name][0], np.dtype(np.float32)) for name in coordinates if name in given}

    def run(self, work: Work) -> None:
        """Decodes, and waits until the images are on the device.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image is too small for its crop.
        """
        index = self._reader.encoded("images").index(work.rows)
        sizes = index.shape[:, :2].astype(np.int64)
        if self._head is None:
            placement = windows(np.zeros_like(sizes), sizes[:1])  # as they are: they have one size
        else:
            found = self._head.placement(sizes, self._augmentation.draws(work.epoch, work.whole))
            assert found is not None, "one placement says it"
            placement = found
            work.fields |= place_varied_coordinates(work.fields, found, self._augmentation.coordinates)
        lap("transform")
        with span("decode"), self._staging.taken() as staging:
            work.fields["images"] = self._decoded(work.rows, index, placement, staging)
        lap("decoding")
        work.copied.append(int(index.bytes.sum()))

    def _decoded(
        self, rows: NDArray[np.int64], index: LocatedIndex, placement: Placement, staging: Staging
    ) -> PlacedImages:
        """Returns the images of rows, decoded, when they are on the device."""
        by_device = self._by_device(rows, index)
        files = self._files(index.part(by_device), staging)
        on_host = dict.fromkeys(np.flatnonzero(~by_device).tolist())
        whole = self._reader.decoded("images", rows[~by_device]) if on_host else []
        images = dict[int, torch.Tensor]()
        sizes = index.shape[:, :2].astype(np.int64)
        shapes, orientations = sizes.tolist(), index.orientation.tolist()
        with self._backend.decoding():
            decoded = self._decode(files)
            for at, image in zip(np.flatnonzero(by_device).tolist(), decoded, strict=True):
                turned = None if image is None else upright(image, orientations[at])
                if turned is None or list(turned.shape[1:]) != shapes[at]:
                    on_host[at] = None
                else:
                    images[at] = turned
            if refused := list(on_host)[len(whole) :]:
                self._known[rows[refused]] = _BY_CPU
                whole += self._reader.decoded("images", rows[refused])  # which names a sample that is damaged
            for at, image in zip(on_host, self._sent(whole, staging), strict=True):
                images[at] = image
            # One buffer: the allocator notes of each tensor that another stream uses it.
            pixels = torch.cat([images[at].reshape(-1) for at in range(len(rows))])
            areas = sizes.prod(axis=1)
            begins = self._channels * (np.cumsum(areas) - areas)
            layout = self._backend.copy(torch.from_numpy(np.stack([begins, sizes[:, 1], areas], axis=1)))
        return PlacedImages(pixels, layout, sizes, self._channels, placement)

    def _by_device(self, rows: NDArray[np.int64], index: LocatedIndex) -> NDArray[np.bool_]:
        """Returns of each row whether the device decodes it; one that was not seen before is looked at."""
        unseen = np.flatnonzero(self._known[rows] == _UNSEEN)
        if len(unseen):
            part = index.part(unseen)
            for row, data, encoding in zip(
                rows[unseen].tolist(), self._reader.encoded("images").take(part), part.encoding.tolist(), strict=True
            ):
                head = scan_jpeg(data) if encoding == JPEG else None
                plain = head is not None and head.plain_colours and head.components <= self._channels and has_end(data)
                self._known[row] = _BY_DEVICE if plain else _BY_CPU
        chosen: NDArray[np.bool_] = self._known[rows] == _BY_DEVICE
        return chosen

    def _files(self, index: LocatedIndex, staging: Staging) -> list[torch.Tensor]:
        """Returns the encoded bytes of rows in pinned memory, uint8 (bytes,) each."""
        encoded, lengths = self._reader.encoded("images"), index.bytes.tolist()
        memory = staging.room("files", sum(lengths))
        if (mapped := encoded.flat) is None:
            encoded.take(index, memory)
        elif lengths:
            flat, starts = torch.from_numpy(writable(mapped)), index.offset.tolist()
            parts = [flat[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            # One call, which gives up the GIL once and not for every row.
            torch.cat(parts, out=torch.from_numpy(memory))
        lap("reading")
        return list(torch.split(torch.from_numpy(memory), lengths))

    def _decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the images of files, (C, H, W) each; None where the device refuses one."""
        if not files:
            return []
        try:
            return list(self._backend.decode_jpegs(files, self._channels))
        except torch.OutOfMemoryError as error:
            error.add_note(
                f'fastload, decode="device": {len(files)} images are decoded at a time, each in its full size. Choose '
                f"a smaller batch_size, pack with --max-size, or leave decode out."
            )
            raise
        except RuntimeError:
            # One refused file fails the whole call, and is not named.
            half = len(files) // 2
            return [*self._decode(files[:half]), *self._decode(files[half:])] if half else [None]

    def _sent(self, whole: Sequence[NDArray[np.uint8]], staging: Staging) -> list[torch.Tensor]:
        """Returns images (H, W, C) on the device, (C, H, W) each."""
        if not whole:
            return []
        memory = staging.room("pixels", sum(image.nbytes for image in whole))
        np.concatenate([image.reshape(-1) for image in whole], out=memory)
        there = self._backend.copy(torch.from_numpy(memory))
        parts = torch.split(there, [image.nbytes for image in whole])
        return [part.view(image.shape).permute(2, 0, 1) for part, image in zip(parts, whole, strict=True)]


class StagingPool:
    """Pinned memory for bytes on their way to the device, used by one batch after another."""

    def __init__(self, pins: Pins) -> None:
        self._pins, self._unused = pins, queue.SimpleQueue[Staging]()

    @contextmanager
    def taken(self) -> Iterator[Staging]:
        """A context with memory that no other thread uses meanwhile; at its end the device has read it."""
        try:
            staging = self._unused.get_nowait()
        except queue.Empty:
            staging = Staging(self._pins)
        try:
            yield staging
        finally:
            self._unused.put(staging)


class Staging:
    """Pinned memory for the bytes of one batch, used again for others."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def room(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """Returns memory of so many bytes, uint8; memory returned for this name before is no longer used."""
        if num_bytes > PINNED_BYTES:
            return np.empty(num_bytes, np.uint8)
        kept = self._kept.get(name)
        if kept is None or len(kept) < num_bytes:
            # Twice what this batch needs: pinning takes long, and outgrown memory stays pinned until the loader ends.
            kept = self._kept[name] = allocate_aligned(min(PINNED_BYTES, 2 * num_bytes + 1))
            self._pins.add_if_possible(kept)
        return kept[:num_bytes]

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a dense tensor of a shape and dtype in such memory."""
        memory = self.room(name, math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Returns an image (C, H, W) with an EXIF orientation (1 to 8) applied."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    axes = [2] * (orientation in (2, 3, 6, 7)) + [1] * (orientation in (3, 4, 7, 8))
    return image.flip(axes) if axes else image
