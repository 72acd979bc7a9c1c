"""One sample becomes the bytes that a file stores of it: pixels, a JPEG made here, or the file's own bytes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

from fastload.codecs import NONE, Codec, decompress_zstd
from fastload.decode import decode_image
from fastload.errors import ImageError
from fastload.fitting import Target
from fastload.image_header import plain_jpeg, upright_size
from fastload.jpeg_scan import scan_jpeg
from fastload.pack.chunk_work import image_filler, mask_filler, of_mask
from fastload.pack.store_plan import StorePlan, ways
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.store import JPEG, RAW, ZSTD, EncodedRow

_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"


class RowEncoder:
    """What makes the rows of one dataset; not to be shared by threads.

    Args:
        images: of every sample of the listing; where the plan keeps rows that are encoded, it has `encoded(i)` too,
            which returns the EncodedRow of sample i, with or without its mask.
        masks: likewise; None where there are none.
        plan: how rows are stored.
    """

    def __init__(self, images: Files | Pictures | Arrays, masks: Masks | None, plan: StorePlan) -> None:
        self._images = images
        self._read = images.read if isinstance(images, Files) else None
        self._plan = plan
        self._dtype = plan.dtype.newbyteorder("<")
        self._fill = image_filler(images)
        self._fill_mask = None if masks is None else mask_filler(masks)

    def encode(self, sample: int, header: np.void) -> EncodedRow:
        """The row of a sample.

        Where the plan stores rows of pixels in chunks (form "rows"), they are never compressed here.

        Args:
            header: of HEADERS, what the survey found.

        Raises:
            ImageError: it cannot be decoded, is damaged, or is no longer what its header said; the reason only.
            OSError: it cannot be read.
        """
        if self._plan.option.kind == "keep":
            return self._kept(sample, header)
        known = _plain(header)
        height, width = self._plan.row_size(known["height"], known["width"])
        own, made = ways(self._plan, sample, known)
        orientation, encoding, ended = 1, RAW, True
        image: bytes | memoryview
        if own:
            orientation = known["jpeg"]
            encoding, (image, ended) = JPEG, self._own(sample, known)
        else:
            pixels = self._pixels(sample, header, height, width)
            encoding, image = (
                (JPEG, encode_jpeg(pixels, self._plan.option.quality)) if made else (RAW, _bytes_of(pixels))
            )
        digest = xxhash.xxh3_64(image)
        if encoding == RAW and self._plan.images == "store":
            encoding, image = _smaller(image, self._plan.image_codec)
        mask, mask_encoding = self._mask(sample, header, height, width), RAW
        stored_mask: Any = None
        if mask is not None:
            stored_mask = _bytes_of(mask)
            digest.update(stored_mask)
            if self._plan.masks == "store":
                mask_encoding, stored_mask = _smaller(stored_mask, self._plan.mask_codec)
        shape = (height, width, self._plan.channels)
        return EncodedRow(image, encoding, shape, orientation, digest.intdigest(), stored_mask, mask_encoding, ended)

    def mask(self, sample: int, header: np.void) -> NDArray[np.uint8]:
        """The mask (H, W) of a sample, as its row holds it; errors as `encode`."""
        mask = self._mask(sample, header, *self._plan.row_size(int(header["height"]), int(header["width"])))
        assert mask is not None, "there are masks"
        return mask

    def _target(self, header: np.void, height: int, width: int) -> Target:
        plan = self._plan
        if plan.target is not None:
            return plan.target
        fit = None if (height, width) == (header["height"], header["width"]) else "stretch"
        return Target(height=height, width=width, channels=plan.channels, dtype=plan.dtype, fit=fit)  # type: ignore[arg-type]  # one of two literals

    def _pixels(self, sample: int, header: np.void, height: int, width: int) -> NDArray[Any]:
        out = np.empty((height, width, self._plan.channels), self._dtype)
        target = self._target(header, height, width)
        if reasons := self._fill(np.array([sample]), target, out[None], np.array([header], header.dtype)):
            raise ImageError(reasons[0])
        return out

    def _mask(self, sample: int, header: np.void, height: int, width: int) -> NDArray[np.uint8] | None:
        if self._fill_mask is None:
            return None
        out = np.empty((height, width), np.uint8)
        target = self._target(header, height, width)
        if reasons := self._fill_mask(np.array([sample]), target, out[None], np.array([header], header.dtype)):
            raise ImageError(of_mask(reasons[0]))
        return out

    def _own(self, sample: int, header: dict[str, int]) -> tuple[bytes, bool]:
        """The file of a plain JPEG, and whether it has its end marker; one without it can be decoded all the same."""
        assert self._read is not None, "only files have bytes of their own"
        data = self._read(sample)
        frame = scan_jpeg(data)
        if (
            frame is None
            or upright_size(frame.height, frame.width, frame.orientation) != (header["height"], header["width"])
            or plain_jpeg(frame) != header["jpeg"]
            or (1 if frame.components == 1 else 3) != header["channels"]
        ):
            raise ImageError("is another file now than when its header was read")
        if data.endswith(_END_OF_IMAGE) or data.find(_END_OF_IMAGE, data.rfind(_SCAN)) >= 0:
            return data, True
        self._decodes(data, header)
        return data, False

    def _decodes(self, data: bytes, header: dict[str, int]) -> None:
        """Let the decoder say what it makes of a file that seems to be cut short: it has no end."""
        height, width, channels = header["height"], header["width"], self._plan.channels
        target = Target(height=height, width=width, channels=channels, dtype=self._plan.dtype)
        decode_image(data, target, np.empty((height, width, channels), np.uint8))

    def _kept(self, sample: int, header: np.void) -> EncodedRow:
        """The row as its file holds it; in the form of masks that the plan wants."""
        images: Any = self._images
        row: EncodedRow = images.encoded(sample)
        if row.encoding == RAW and self._plan.image_codec != NONE:
            encoding, image = _smaller(row.image, self._plan.image_codec)
            row = replace(row, image=image, encoding=encoding)
        if self._plan.masks is None:
            return row
        mask = _bytes_of(self.mask(sample, header)) if row.mask is None else row.mask
        raw = row.mask_encoding == RAW or row.mask is None
        if self._plan.masks == "rows" and not raw:
            pixels = np.empty(row.shape[0] * row.shape[1], np.uint8)
            decompress_zstd(mask, pixels)
            mask = pixels.data
        elif self._plan.masks == "store" and raw:
            encoding, mask = _smaller(mask, self._plan.mask_codec)
            return replace(row, mask=mask, mask_encoding=encoding)
        return replace(row, mask=mask, mask_encoding=RAW if self._plan.masks == "rows" else row.mask_encoding)


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """A JPEG of (H, W, 1 or 3) pixels, 4:2:0, whose rows of blocks can each be found and decoded alone."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return file.getvalue()


def _plain(header: np.void) -> dict[str, int]:
    """A header as plain numbers, which are compared in a tenth of the time."""
    return dict(zip(header.dtype.names or (), header.item(), strict=True))


def _bytes_of(rows: NDArray[Any]) -> memoryview:
    """The bytes of an array, one behind another."""
    return rows.reshape(-1).view(np.uint8).data


def _smaller(data: Any, codec: Codec) -> tuple[int, Any]:
    """Encoding and bytes of a row in a store: compressed where that makes it smaller."""
    if codec == NONE:
        return RAW, data
    found = codec.compress(data)
    return (ZSTD, found) if len(found) < len(data) else (RAW, data)
