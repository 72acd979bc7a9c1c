"""What a packer's worker does: read headers, decode chunks into place, and check chunks already there.

No pixel crosses a process border: a worker writes a chunk's rows at their places in the file and returns digests.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import decode_image, decode_mask, probe_image
from fastload.errors import ImageError, OutputError
from fastload.fitting import Target, place_mask, place_pixels
from fastload.image_header import ImageHeader
from fastload.pack.tasks import HEADERS, ChunkResult, ChunkTask, HeaderBlock
from fastload.sources.listing import Arrays, Files, Masks, Pictures

if TYPE_CHECKING:
    from fastload.pack.encode import RowEncoder

Fill = Callable[[NDArray[np.int64], Target, NDArray[Any], NDArray[np.void]], dict[int, str]]
"""Called with samples, what they become, the rows to fill and, where it matters, what their headers told."""

_CACHE_BYTES = 512 * 2**10
_COPY_BYTES = 2 * 2**20
_NO_HEADERS = np.zeros(0, HEADERS)


class Worker:
    """What one process needs to work on chunks: the samples' images and masks, some memory, the open output."""

    def __init__(self, images: Files | Pictures | Arrays, masks: Masks | None = None) -> None:
        self.images = images
        self.masks = masks
        self._fill = [image_filler(images), *([] if masks is None else [mask_filler(masks)])]
        self._copies = isinstance(images, Arrays)
        self._memory = [np.zeros(0, np.uint8), np.zeros(0, np.uint8)]
        self._outputs: dict[str, int] = {}
        self.encoder: RowEncoder | None = None
        """Made with the first task that has a `StorePlan`, which all share."""
        self.held: dict[int, Any] = {}
        """By number, what tasks done in two steps (`WorkerPool.run_in_order`) keep here between them."""

    def close(self) -> None:
        """Close the output."""
        for fd in self._outputs.values():
            os.close(fd)
        self._outputs = {}

    def probe(self, samples: NDArray[np.int64]) -> HeaderBlock:
        """Read the headers of these samples; one whose mask has another size counts as unreadable."""
        block = HeaderBlock(samples, np.zeros(len(samples), HEADERS), Counter(), {})
        image_header = header_reader(self.images)
        own = isinstance(self.images, Files)  # of Pictures there are no bytes to keep
        mask_header = header_reader(self.masks.files) if self.masks is not None else None
        for at, sample in enumerate(samples.tolist()):
            try:
                header = image_header(sample)
                if mask_header is not None and self.masks is not None and self.masks.present[sample]:
                    _check_same_size(header, sample, mask_header)
            except (ImageError, OSError) as exc:
                block.reasons[sample] = reason_of(exc)
                continue
            block.headers[at] = (header.height, header.width, header.channels, header.bits, header.jpeg * own)
            block.kinds[header.kind] += 1
            block.kinds["frames"] += header.frames > 1
            block.kinds["turned"] += header.turned
        return block

    def pack(self, task: ChunkTask) -> ChunkResult:
        """Decode a chunk's rows and write them at their places; rows that cannot be decoded stay zero."""
        digests = np.zeros(len(task.rows), np.uint64)
        reasons: dict[int, str] = {}
        # A few images at a time, so that they are hashed and written while they are still in the core's cache. Copied
        # rows are so quick that calls count more: 0.7 s a GB of 116 kB rows in steps of 2 MiB, 1.0 s of 512 KiB.
        step_bytes = _COPY_BYTES if self._copies else _CACHE_BYTES
        step = max(1, step_bytes // (sum(place.row_bytes for place in task.places.all) + self._read_bytes(task.target)))
        for start in range(0, len(task.rows), step):
            stop = min(start + step, len(task.rows))
            arenas, found = self.decode(task.samples[start:stop], task.target, task.headers[start:stop])
            digests[start:stop] = row_digests_of(arenas)
            if len(task.digests):
                for at in np.flatnonzero(digests[start:stop] != task.digests[start:stop]).tolist():
                    found.setdefault(at, "its pixels are not those that were packed (their digest differs)")
            for at, reason in found.items():
                for arena in arenas:
                    arena[at] = 0
                reasons[int(task.rows[start + at])] = reason
            for arena, place in zip(arenas, task.places.all, strict=True):
                self._write(task.part, arena, place.offset(int(task.rows[start])))
        return ChunkResult(task.rows, digests, reasons)

    def _read_bytes(self, target: Target) -> int:
        """Bytes that reading one image takes beside its row, where many are read at once."""
        if not isinstance(self.images, Arrays) or not _differs(self.images, target):
            return 0
        return math.prod(self.images.shape) * self.images.dtype.itemsize

    def decode(
        self, samples: NDArray[np.int64], target: Target, headers: NDArray[np.void] = _NO_HEADERS
    ) -> tuple[list[NDArray[Any]], dict[int, str]]:
        """The samples as rows: images (n, H, W, C) and, where there are any, masks (n, H, W).

        Args:
            headers: HEADERS (n,): a sample of another size now could not be decoded; empty: any size is taken.

        Returns:
            The arrays, valid until the next call, and position -> why a sample could not be decoded.
        """
        shape = (len(samples), target.height, target.width)
        images = self._arena(0, (*shape, target.channels), target.dtype)
        reasons = self._fill[0](samples, target, images, headers)
        if self.masks is None:
            return [images], reasons
        masks = self._arena(1, shape, np.dtype(np.uint8))
        for at, reason in self._fill[1](samples, target, masks, headers).items():
            reasons.setdefault(at, of_mask(reason))
        return [images, masks], reasons

    def _write(self, part: str, arena: NDArray[Any], offset: int) -> None:
        try:
            write_at(self.open(part), arena.reshape(-1).view(np.uint8), offset)
        except OSError as exc:
            raise OutputError(
                f"{part}: cannot be written ({exc.strerror}). What was packed is kept: make room, then run the "
                f"same command again."
            ) from exc

    def check(self, task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The chunk's rows, and for each whether the bytes on disk have the digest expected."""
        arenas = []
        for at, place in enumerate(task.places.all):
            arena = self._arena(at, (len(task.rows), place.row_bytes), np.dtype(np.uint8))
            flat = arena.reshape(-1)
            flat[read_at(self.open(task.part), flat, place.offset(int(task.rows[0]))) :] = 0
            arenas.append(arena)
        return task.rows, row_digests_of(arenas) == task.digests

    def _arena(self, which: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Memory of that shape, used again and again."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if len(self._memory[which]) < num_bytes:
            self._memory[which] = np.zeros(num_bytes, np.uint8)
        return self._memory[which][:num_bytes].view(dtype).reshape(shape)

    def open(self, part: str) -> int:
        """A descriptor of a file under way, kept open."""
        if part not in self._outputs:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
            # A shared lock held while this process lives: after a kill of the packer, the next one waits for it
            # before it touches the file, so that no orphan writes behind its back.
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._outputs[part] = fd
        return self._outputs[part]


def header_reader(images: Files | Pictures | Arrays) -> Callable[[int], ImageHeader]:
    """What gives the header of a sample's image or mask; it raises ImageError where it cannot be told."""
    # Asked once and not for each sample: isinstance with a protocol takes as long as reading a JPEG's header.
    if isinstance(images, Files):
        read_head = images.read_head
        return lambda sample: probe_image(lambda size: read_head(sample, size))
    if isinstance(images, Pictures):
        return images.header
    header = array_header(images)
    return lambda _: header


def of_mask(reason: str) -> str:
    """What is wrong with a sample whose mask is the one meant."""
    if reason.startswith("a mask "):
        return f"its {reason.removeprefix('a ')}"
    return f"its mask {reason}" if reason.startswith(("is ", "was ", "has ", "cannot ")) else f"its mask: {reason}"


def _check_same_size(image: ImageHeader, sample: int, mask_header: Callable[[int], ImageHeader]) -> None:
    try:
        mask = mask_header(sample)
    except ImageError as exc:
        raise ImageError(of_mask(str(exc))) from exc
    if (mask.height, mask.width) != (image.height, image.width):
        raise ImageError(
            f"its mask is {mask.width}x{mask.height}, the image {image.width}x{image.height} (width x height): they "
            f"cannot belong together"
        )


def array_header(images: Arrays) -> ImageHeader:
    """What all samples of an array have in common."""
    height, width, *rest = images.shape
    channels, bits = (rest or [1])[0], 8 * images.dtype.itemsize
    kind = {1: "L", 3: "RGB", 4: "RGBA"}[channels] if bits == 8 else {1: "I;16", 3: "RGB;16", 4: "RGBA;16"}[channels]
    return ImageHeader(height, width, channels, bits, kind, 1)


def row_digests_of(arenas: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """XXH3-64 of each row's bytes, those of the arrays (n, ...) one after another; uint64 (n,)."""
    count = len(arenas[0])
    parts = [arena.reshape(count, -1).view(np.uint8) for arena in arenas]
    if len(parts) == 1:
        hash_row: Callable[[Any], int] = xxhash.xxh3_64_intdigest
        return np.fromiter(map(hash_row, parts[0]), np.uint64, count)
    digests = np.empty(count, np.uint64)
    for at, pieces in enumerate(zip(*parts, strict=True)):
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        digests[at] = digest.intdigest()
    return digests


def image_filler(images: Files | Pictures | Arrays) -> Fill:
    """What brings samples into the rows of an array (n, H, W, C); position -> why one could not be."""
    # Chosen once and not for each block: isinstance with a protocol takes longer than to copy many an image.
    if isinstance(images, Files):
        return lambda samples, target, out, headers: _one_by_one(
            samples, lambda sample, at: decode_image(_of_size(images.read(sample), headers, at), target, out[at])
        )
    if isinstance(images, Pictures):
        return lambda samples, target, out, _: _one_by_one(
            samples, lambda sample, at: place_pixels(_with_channels(images.read(sample)), target, out[at])
        )

    def fill(
        samples: NDArray[np.int64], target: Target, out: NDArray[Any], headers: NDArray[np.void]
    ) -> dict[int, str]:
        if not _differs(images, target):
            images.read_rows(samples, out)
            return {}
        pixels = np.empty((len(samples), *images.shape), images.dtype)
        images.read_rows(samples, pixels)
        return _one_by_one(samples, lambda _, at: place_pixels(_with_channels(pixels[at]), target, out[at]))

    return fill


def _differs(images: Arrays, target: Target) -> bool:
    """Whether the rows of an array are not at once those of the file."""
    return images.shape != (target.height, target.width, target.channels) or images.dtype != target.dtype


def _of_size(data: bytes, headers: NDArray[np.void], at: int) -> bytes:
    """The file of an image, known to have the size that its header told at first."""
    if len(headers):
        now, then = probe_image(lambda size: data[:size]), headers[at]
        if (now.height, now.width) != (then["height"], then["width"]):
            raise ImageError(
                f"is {now.width}x{now.height} (width x height) now, and was {then['width']}x{then['height']} when its "
                f"header was read"
            )
    return data


def _size_of(headers: NDArray[np.void], at: int) -> tuple[int, int] | None:
    return (int(headers[at]["height"]), int(headers[at]["width"])) if len(headers) else None


def mask_filler(masks: Masks) -> Fill:
    """What brings the masks of samples into the rows of an array (n, H, W); position -> why one could not be."""
    files, outside = masks.files, masks.ignore_index or 0
    row: Callable[[int, Target, NDArray[np.uint8], tuple[int, int] | None], None]
    if isinstance(files, Files):

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            decode_mask(files.read(sample), target, out, fill=outside, image_size=size)

    elif isinstance(files, Pictures):

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            place_mask(files.read(sample), target, out, fill=outside)

    else:

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            found = np.empty((1, *files.shape), np.uint8)
            files.read_rows(np.array([sample]), found)
            place_mask(found[0], target, out, fill=outside)

    whole = files if isinstance(files, Arrays) and bool(masks.present.all()) else None

    def fill(
        samples: NDArray[np.int64], target: Target, out: NDArray[Any], headers: NDArray[np.void]
    ) -> dict[int, str]:
        if whole is not None and whole.shape == out.shape[1:]:
            whole.read_rows(samples, out)
            return {}
        present = masks.present[samples]
        present_at = np.flatnonzero(present).tolist()
        out[~present] = outside
        reasons = _one_by_one(
            samples[present],
            lambda sample, at: row(sample, target, out[present_at[at]], _size_of(headers, present_at[at])),
        )
        return {present_at[at]: reason for at, reason in reasons.items()}

    return fill


def _one_by_one(samples: NDArray[np.int64], fill: Callable[[int, int], None]) -> dict[int, str]:
    """Call fill(sample, position) for each; position -> why it failed."""
    reasons: dict[int, str] = {}
    for at, sample in enumerate(samples.tolist()):
        try:
            fill(sample, at)
        except (ImageError, OSError) as exc:
            reasons[at] = reason_of(exc)
    return reasons


def _with_channels(pixels: NDArray[Any]) -> NDArray[Any]:
    return pixels[..., None] if pixels.ndim == 2 else pixels


def write_at(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    """Write all bytes at an offset of a file."""
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, out: NDArray[np.uint8], offset: int) -> int:
    """Fill an array from an offset of a file; bytes read, fewer at its end."""
    view, total = out.data, 0
    while view and (count := os.preadv(fd, [view], offset + total)):
        view, total = view[count:], total + count
    return total


def reason_of(exc: Exception) -> str:
    """Why a sample could not be read, in words."""
    return str(exc) if isinstance(exc, ImageError) else f"cannot be read: {exc}"
