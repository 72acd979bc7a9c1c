"""One sample -> its bytes in the packed file: pixels, a JPEG made here, or the source file's own bytes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError
from fastload.format.codecs import NONE, Codec, decompress_zstd
from fastload.format.ragged import JPEG, RAW, ZSTD, EncodedRow
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.images.image_header import plain_jpeg, upright_size
from fastload.images.jpeg import scan_jpeg
from fastload.pack.encoding import RaggedPlan, jpegs_kept_and_made
from fastload.pack.fill import image_filler, mask_filler, reason_of_mask
from fastload.sources.listing import Arrays, Files, Masks, Pictures

_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"


class RowEncoder:
    """Makes the rows of one dataset; not to be shared by threads.

    Args:
        images: of every sample of the listing. Under the encoding "keep" they also have `encoded(i)`, which returns the
            EncodedRow of sample i, with or without its mask.
        masks: of every sample; None where there are none.
        plan: how rows are made.
    """

    def __init__(self, images: Files | Pictures | Arrays, masks: Masks | None, plan: RaggedPlan) -> None:
        self._images = images
        self._read = images.read if isinstance(images, Files) else None
        self._plan = plan
        self._dtype = plan.dtype.newbyteorder("<")
        self._fill = image_filler(images)
        self._fill_mask = None if masks is None else mask_filler(masks)

    def encode(self, sample: int, header: np.void) -> EncodedRow:
        """Returns the row of a sample, uncompressed in the form "rows": there chunks are compressed as a whole.

        Args:
            header: one of HEADERS, as the survey found it.

        Raises:
            ImageError: the sample cannot be decoded, or its file changed; the message is the reason only.
            OSError: it cannot be read.
        """
        if self._plan.option.kind == "keep":
            return self._recoded(sample, header)
        known = _plain(header)
        height, width = self._plan.row_size(known["height"], known["width"])
        own, made = jpegs_kept_and_made(self._plan, sample, known)
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
        if encoding == RAW and self._plan.images == "ragged":
            encoding, image = _smaller(image, self._plan.image_codec)
        mask, mask_encoding = self._mask(sample, header, height, width), RAW
        stored_mask: Any = None
        if mask is not None:
            stored_mask = _bytes_of(mask)
            digest.update(stored_mask)
            if self._plan.masks == "ragged":
                mask_encoding, stored_mask = _smaller(stored_mask, self._plan.mask_codec)
        shape = (height, width, self._plan.channels)
        return EncodedRow(image, encoding, shape, orientation, digest.intdigest(), stored_mask, mask_encoding, ended)

    def mask(self, sample: int, header: np.void) -> NDArray[np.uint8]:
        """Returns the mask (H, W) of a sample as its row holds it; raises as `encode`."""
        mask = self._mask(sample, header, *self._plan.row_size(int(header["height"]), int(header["width"])))
        assert mask is not None, "only called where there are masks"
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
            raise ImageError(reason_of_mask(reasons[0]))
        return out

    def _own(self, sample: int, header: dict[str, int]) -> tuple[bytes, bool]:
        """Returns the bytes of a plain JPEG file, and whether it has its end marker; if not, it was also decoded."""
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
        self._check_decodable(data, header)
        return data, False

    def _check_decodable(self, data: bytes, header: dict[str, int]) -> None:
        """Raises ImageError if a file without an end marker cannot be decoded."""
        height, width, channels = header["height"], header["width"], self._plan.channels
        target = Target(height=height, width=width, channels=channels, dtype=self._plan.dtype)
        decode_image(data, target, np.empty((height, width, channels), np.uint8))

    def _recoded(self, sample: int, header: np.void) -> EncodedRow:
        """Returns the row as its packed file holds it, its mask in the form that the plan asks for."""
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
        elif self._plan.masks == "ragged" and raw:
            encoding, mask = _smaller(mask, self._plan.mask_codec)
            return replace(row, mask=mask, mask_encoding=encoding)
        return replace(row, mask=mask, mask_encoding=RAW if self._plan.masks == "rows" else row.mask_encoding)


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Returns a 4:2:0 JPEG of (H, W, 1 or 3) pixels, with restart markers so that parts of it can be decoded."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return file.getvalue()


def _plain(header: np.void) -> dict[str, int]:
    """Returns a header as plain numbers, which are compared in a tenth of the time of NumPy's."""
    return dict(zip(header.dtype.names or (), header.item(), strict=True))


def _bytes_of(rows: NDArray[Any]) -> memoryview:
    """Returns the bytes of a contiguous array."""
    return rows.reshape(-1).view(np.uint8).data


def _smaller(data: Any, codec: Codec) -> tuple[int, Any]:
    """Returns the encoding and the bytes of a ragged row: compressed where that makes it smaller."""
    if codec == NONE:
        return RAW, data
    found = codec.compress(data)
    return (ZSTD, found) if len(found) < len(data) else (RAW, data)
