"""Samples of a listing -> rows of a packed file: the header of each, its pixels and mask, or its encoded bytes.

A listing has its images as `Files` (bytes to decode), `Pictures` (decoded one by one) or `Arrays` (rows that are
copied). `image_filler` and `mask_filler` choose by that once and return a function that fills rows of one size, many at
a time, as `isinstance` with a protocol takes as long as reading a JPEG's header. `RowEncoder` makes one row of varying
length: pixels, a JPEG made here, or the source file's own bytes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError
from fastload.format.codecs import NONE, Codec, decompress_zstd
from fastload.format.ragged import JPEG, RAW, ZSTD, EncodedRow
from fastload.images.decode import decode_image, decode_mask, read_mask
from fastload.images.fit import Fit, Target, resample_mask, resample_pixels
from fastload.images.image_header import ImageHeader, header_of_pixels, plain_jpeg, probe_image, upright_size
from fastload.images.jpeg import check_scans, scan_jpeg
from fastload.pack.decisions import RaggedPlan, jpegs_kept_and_made
from fastload.remote.ranges import ObjectRange, announce
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.sources.mask_classes import same_shape
from fastload.sources.spans import ranges_of

_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
_ZEROS = bytes(256)
"""Image data hardly ever holds so many zeros; half of a disk's smallest block."""

HEADERS = np.dtype(
    [("height", "<i4"), ("width", "<i4"), ("channels", "u1"), ("bits", "u1"), ("jpeg", "u1"), ("orientation", "u1")]
)
"""The part of an image's header that decides what becomes of it; `jpeg` and `orientation` as in `ImageHeader`."""

ROW = np.dtype(
    [
        ("row", "<i8"),
        ("digest", "<u8"),
        ("images", "<i8"),
        ("masks", "<i8"),
        ("shape", "<i4", (3,)),
        ("encoding", "u1"),
        ("orientation", "u1"),
        ("mask_encoding", "u1"),
        ("warned", "u1"),
        ("chunked", "u1"),
    ]
)
"""A row that was made: its number in the order of packing, its digest, the bytes of its image and its mask, and the
values of its `EncodedRow`; warned is 1 for a JPEG that libjpeg warns of. chunked is 1 where the row belongs to
chunks that are compressed already: its first row has the chunk's length, the others 0."""


SAME_SHAPE = "another size of the same shape"
"""Why a mask that `--mask-size image` would help does not fit."""


BEFORE_EXIF = "its size before EXIF turns it"
"""Why a mask does not fit that `--boxes-of stored` would turn with its image."""

LARGE_MASKS = "masks with numbers above 255"
"""The kind in `Headers.kinds` that counts blocks of samples with such a mask: uint8 does not hold them."""

_LARGEST_OF_8_BITS = 255


class SampleProblems(NamedTuple):
    """Samples by index or row: why one cannot be decoded, and what libjpeg warns of in a JPEG that was decoded."""

    reasons: dict[int, str]
    warnings: dict[int, str]


Fill = Callable[[NDArray[np.int64], Target, NDArray[Any], NDArray[np.void]], SampleProblems]
"""`fill(samples, target, out, headers)`: decodes samples into the rows of out, and returns unusable ones by index.

headers are HEADERS (n,), or empty: a sample whose size differs from its header's is then an error."""


class Headers(NamedTuple):
    """The table of headers, HEADERS (n,), zero where unknown; counts of kinds; sample -> why it cannot be read."""

    table: NDArray[np.void]
    kinds: Counter[str]
    reasons: dict[int, str]


Begin = Callable[[int], None]
"""Called with a sample before it is read: notes it, or raises ImageError for one that is not to be read."""


def _read_any(sample: int) -> None:
    pass


def headers_of(
    images: Files | Pictures | Arrays, masks: Masks | None, samples: NDArray[np.int64], begin: Begin = _read_any
) -> Headers:
    """Reads the headers of samples; one whose mask has another size counts as unreadable."""
    found = Headers(np.zeros(len(samples), HEADERS), Counter(), {})
    image_header = _header_reader(images)
    own = isinstance(images, Files)  # Pictures have no file bytes that could be kept.
    mask_header = None if masks is None else _header_reader(masks.files)
    for at, sample in enumerate(samples.tolist()):
        try:
            begin(sample)
            header = image_header(sample)
            if masks is not None and mask_header is not None and masks.present[sample] and not masks.drawn:
                try:
                    mask = mask_header(sample)
                except ImageError as exc:
                    raise ImageError(reason_of_mask(str(exc))) from exc
                # One is enough; where all are small, as classes in files of 16 bits, all are read.
                if masks.dtype is None and mask.bits == 16 and not found.kinds[LARGE_MASKS]:
                    found.kinds[LARGE_MASKS] = _largest_number(masks.files, sample) > _LARGEST_OF_8_BITS
                sizes = (mask.height, mask.width), (header.height, header.width)
                if sizes[0] != sizes[1]:
                    why = SAME_SHAPE if same_shape(*sizes) else "they cannot belong together"
                    if header.orientation > 4 and sizes[0] == sizes[1][::-1]:
                        why = BEFORE_EXIF
                    raise ImageError(
                        f"its mask is {mask.width}x{mask.height}, the image {header.width}x{header.height} (width x "
                        f"height): {why}"
                    )
        except (ImageError, OSError) as exc:
            found.reasons[sample] = reason_of(exc)
            continue
        jpeg = header.jpeg * own
        found.table[at] = (header.height, header.width, header.channels, header.bits, jpeg, header.orientation)
        found.kinds[header.kind] += 1
        found.kinds["frames"] += header.frames > 1
        found.kinds["turned"] += header.orientation != 1
    return found


def announce_samples(
    images: Files | Pictures | Arrays | None, masks: Masks | None, samples: NDArray[np.int64], *, heads: bool
) -> None:
    """Has threads fetch what will be read of samples, or for their headers, where they lie behind URLs."""
    found: list[ObjectRange] = []
    for at in range(len(samples)):
        found += ranges_of(images, samples[at : at + 1], heads=heads)
        if masks is not None and masks.present[samples[at]]:
            found += ranges_of(masks.files, samples[at : at + 1], heads=heads)
    if found:
        announce(found)


def _header_reader(images: Files | Pictures | Arrays) -> Callable[[int], ImageHeader]:
    """Returns a function `sample -> header` of images or masks, which raises ImageError for one it cannot read."""
    if isinstance(images, Files):
        read_head = images.read_head
        return lambda sample: probe_image(lambda size: read_head(sample, size))
    if isinstance(images, Pictures):
        return images.header
    header = header_of_pixels(images.shape, images.dtype)
    return lambda _: header


def _largest_number(masks: Files | Pictures | Arrays, sample: int) -> int:
    """Returns the largest number in a mask; 0 for one that cannot be read, which packing reports."""
    with suppress(ImageError, OSError):
        if isinstance(masks, Files):
            return int(read_mask(masks.read(sample)).max())
        if isinstance(masks, Pictures):
            return int(masks.read(sample).max())
    return 0


def image_filler(images: Files | Pictures | Arrays, begin: Begin = _read_any) -> Fill:
    """Returns the `Fill` of images, whose out is (n, H, W, C)."""

    def from_file(data: bytes, target: Target, out: NDArray[Any], size: tuple[int, int] | None) -> str:
        if size is not None:
            now, (height, width) = probe_image(lambda size: data[:size]), size
            if (now.height, now.width) != (height, width):
                raise ImageError(
                    f"is {now.width}x{now.height} (width x height) now, and was {width}x{height} when its header was "
                    f"read"
                )
        return decode_image(data, target, out)

    def from_pixels(pixels: NDArray[Any], target: Target, out: NDArray[Any]) -> None:
        resample_pixels(pixels if pixels.ndim == 3 else pixels[..., None], target, out)

    return _filler(images, from_file, from_pixels, begin)


def mask_filler(masks: Masks, begin: Begin = _read_any) -> Fill:
    """Returns the `Fill` of masks, whose out is uint8 or uint16 (n, H, W).

    Samples without a mask get `ignore_index`, or 0.
    """
    outside = masks.ignore_index or 0

    def from_file(data: bytes, target: Target, out: NDArray[Any], size: tuple[int, int] | None) -> str:
        decode_mask(data, target, out, fill=outside, image_size=size)
        return ""

    def from_pixels(pixels: NDArray[Any], target: Target, out: NDArray[Any]) -> None:
        resample_mask(pixels, target, out, fill=outside)

    present = None if masks.present.all() else masks.present
    return _filler(masks.files, from_file, from_pixels, begin, present, outside)


def _filler(
    files: Files | Pictures | Arrays,
    from_file: Callable[[bytes, Target, NDArray[Any], tuple[int, int] | None], str],
    from_pixels: Callable[[NDArray[Any], Target, NDArray[Any]], None],
    begin: Begin,
    present: NDArray[np.bool_] | None = None,
    outside: int = 0,
) -> Fill:
    """Returns the `Fill` of any kind of images or masks; the rows of samples that are not present become `outside`.

    `from_file` is given (height, width) of the sample's header, None where nothing depends on it, and returns what
    libjpeg warns of. Of arrays, which are copied many at a time, `begin` hears nothing.
    """
    encoded = files.read if isinstance(files, Files) else None
    pixels = files.read if isinstance(files, Pictures) else None
    arrays = files if isinstance(files, Arrays) else None

    def fill(
        samples: NDArray[np.int64], target: Target, out: NDArray[Any], headers: NDArray[np.void]
    ) -> SampleProblems:
        found = SampleProblems({}, {})
        rows: Iterator[NDArray[Any]] = iter(())
        if arrays is not None:
            if present is None and (arrays.shape, arrays.dtype) == (out.shape[1:], out.dtype):
                arrays.read_rows(samples, out)
                return found
            there = samples if present is None else samples[present[samples]]
            read = np.empty((len(there), *arrays.shape), arrays.dtype)
            arrays.read_rows(there, read)
            rows = iter(read)
        # Plain numbers are read in a tenth of the time of NumPy's.
        sizes = list(zip(headers["height"].tolist(), headers["width"].tolist(), strict=True))
        for at, sample in enumerate(samples.tolist()):
            try:
                if arrays is None:
                    begin(sample)
                if present is not None and not present[sample]:
                    out[at] = outside
                elif encoded is not None:
                    warning = from_file(encoded(sample), target, out[at], sizes[at] if sizes else None)
                    if warning:
                        found.warnings[at] = warning
                else:
                    from_pixels(next(rows) if pixels is None else pixels(sample), target, out[at])
            except (ImageError, OSError) as exc:
                found.reasons[at] = reason_of(exc)
        return found

    return fill


def reason_of(exc: Exception) -> str:
    """Returns why a sample could not be read, as the second half of a sentence about it."""
    return str(exc) if isinstance(exc, ImageError) else f"cannot be read: {exc}"


def reason_of_mask(reason: str) -> str:
    """Returns the reason why a mask could not be read as a reason about its sample."""
    if reason.startswith("a mask "):
        return f"its {reason.removeprefix('a ')}"
    return (
        f"its mask {reason}"
        if reason.startswith(("is ", "was ", "has ", "holds ", "cannot "))
        else f"its mask: {reason}"
    )


class RowEncoder:
    """Makes the rows of one dataset whose images have varying lengths; not to be shared by threads.

    Images and masks are the whole listing's. Under the encoding "keep" images also have `encoded(i)`, which
    returns the EncodedRow of sample i, with or without its mask.
    """

    def __init__(
        self,
        images: Files | Pictures | Arrays,
        masks: Masks | None,
        plan: RaggedPlan,
        *,
        strict: bool = False,
        begin: Begin = _read_any,
    ) -> None:
        """Prepares the encoder; strict: JPEGs that are kept as they are get decoded, too, to find damage."""
        self._strict, self._begin = strict, begin
        self._images = images
        self._read = images.read if isinstance(images, Files) else None
        self._plan = plan
        self._fill = image_filler(images)
        self._fill_mask = None if masks is None else mask_filler(masks)

    def encode(self, sample: int, header: np.void) -> EncodedRow:
        """Returns the row of a sample; a mask in the form "rows" is uncompressed, as its chunks are compressed whole.

        The header is one of HEADERS, as the survey found it. ImageError, with the reason only: the sample cannot be
        decoded, or its file changed; OSError: it cannot be read.
        """
        self._begin(sample)
        plan = self._plan
        if plan.option.kind == "keep":
            return self._recoded(sample, header)
        # Plain numbers are compared in a tenth of the time of NumPy's.
        known = dict(zip(header.dtype.names or (), header.item(), strict=True))
        shape = (*plan.row_size(known["height"], known["width"]), plan.channels)
        own, made = jpegs_kept_and_made(plan, sample, known)
        image: bytes | memoryview
        encoding = JPEG if own or made else RAW
        if own:
            image, warning = self._own(sample, known)
        else:
            pixels, warning = self._filled(self._fill, sample, header, np.empty(shape, plan.dtype.newbyteorder("<")))
            image = encode_jpeg(pixels, plan.option.quality) if made else bytes_of(pixels)
        digest = xxhash.xxh3_64(image)
        if encoding == RAW:
            encoding, image = _smaller(image, plan.image_codec)
        mask: Any = None
        mask_encoding = RAW
        if self._fill_mask is not None:
            mask = bytes_of(self.mask(sample, header))
            digest.update(mask)
            if plan.masks == "ragged":
                mask_encoding, mask = _smaller(mask, plan.mask_codec)
        orientation = known["jpeg"] if own else 1
        return EncodedRow(image, encoding, shape, orientation, digest.intdigest(), mask, mask_encoding, warning)

    def mask(self, sample: int, header: np.void) -> NDArray[Any]:
        """Returns the mask (H, W) of a sample as its row holds it; raises as `encode`."""
        assert self._fill_mask is not None, "only called where there are masks"
        size = self._plan.row_size(int(header["height"]), int(header["width"]))
        try:
            return self._filled(self._fill_mask, sample, header, np.empty(size, self._plan.mask_dtype))[0]
        except ImageError as exc:
            raise ImageError(reason_of_mask(str(exc))) from exc

    def _filled(self, fill: Fill, sample: int, header: np.void, out: NDArray[Any]) -> tuple[NDArray[Any], str]:
        """Returns out, filled, and what libjpeg warns of."""
        target, (height, width) = self._plan.target, out.shape[:2]
        if target is None:
            fit: Fit | None = None if (height, width) == (header["height"], header["width"]) else "stretch"
            target = Target(height, width, self._plan.channels, self._plan.dtype, fit)
        found = fill(np.array([sample]), target, out[None], np.array([header], header.dtype))
        if found.reasons:
            raise ImageError(found.reasons[0])
        return out, found.warnings.get(0, "")

    def _own(self, sample: int, header: dict[str, int]) -> tuple[bytes, str]:
        """Returns the bytes of a plain JPEG file, and what libjpeg warns of where it was decoded to see that.

        It is where it lacks its end marker, as after an interrupted download, or holds zeros where image data should
        be, as files do whose blocks were never written or were lost.
        """
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
        if frame.scan is None:
            check_scans(data)
        ended = data.endswith(_END_OF_IMAGE) or data.find(_END_OF_IMAGE, data.rfind(_SCAN)) >= 0
        if ended and not self._strict and data.find(_ZEROS, frame.scan.begins if frame.scan else 0) < 0:
            return data, ""
        shape = (header["height"], header["width"], self._plan.channels)
        warning = decode_image(data, Target(*shape, self._plan.dtype), np.empty(shape, np.uint8))
        return data, warning or ("" if ended else "it ends without its end marker")

    def _recoded(self, sample: int, header: np.void) -> EncodedRow:
        """Returns the row as its packed file holds it, its mask in the form that the plan asks for."""
        images: Any = self._images
        row: EncodedRow = images.encoded(sample)
        plan = self._plan
        if row.encoding == RAW:
            encoding, image = _smaller(row.image, plan.image_codec)
            row = replace(row, image=image, encoding=encoding)
        if plan.masks is None:
            return row
        mask = bytes_of(self.mask(sample, header)) if row.mask is None else row.mask
        encoding = RAW if row.mask is None else row.mask_encoding
        if plan.masks == "rows" and encoding != RAW:
            encoding, pixels = RAW, np.empty(row.shape[0] * row.shape[1] * plan.mask_dtype.itemsize, np.uint8)
            decompress_zstd(mask, pixels)
            mask = pixels.data
        elif plan.masks == "ragged" and encoding == RAW:
            encoding, mask = _smaller(mask, plan.mask_codec)
        return replace(row, mask=mask, mask_encoding=encoding)


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Returns a 4:2:0 JPEG of (H, W, 1 or 3) pixels, with restart markers so that parts of it can be decoded."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return file.getvalue()


def bytes_of(pixels: NDArray[Any]) -> memoryview:
    """Returns the bytes of an array as a file holds them: little-endian, in the order of rows."""
    little = np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _smaller(data: Any, codec: Codec) -> tuple[int, Any]:
    """Returns the encoding and the bytes of a ragged row: compressed where that makes it smaller."""
    if codec == NONE:
        return RAW, data
    found = codec.compress(data)
    return (ZSTD, found) if len(found) < len(data) else (RAW, data)
