"""Samples of a listing into rows of an array: the header of each, its pixels, its mask, and the digest of the result.

A listing has its images as `Files` (bytes to decode), `Pictures` (decoded one by one) or `Arrays` (rows that are
copied). Each function here chooses by that once and returns a function for the samples, as `isinstance` with a protocol
takes as long as reading a JPEG's header.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.images.decode import decode_image, decode_mask
from fastload.images.fit import Target, resample_mask, resample_pixels
from fastload.images.image_header import ImageHeader, probe_image
from fastload.sources.listing import Arrays, Files, Masks, Pictures

HEADERS = np.dtype([("height", "<i4"), ("width", "<i4"), ("channels", "u1"), ("bits", "u1"), ("jpeg", "u1")])
"""The part of an image's header that decides what becomes of it; `jpeg` as in `ImageHeader`."""

Fill = Callable[[NDArray[np.int64], Target, NDArray[Any], NDArray[np.void]], dict[int, str]]
"""`fill(samples, target, out, headers) -> {index: error}`: decodes samples into the rows of out.

headers are HEADERS (n,), or empty: a sample whose size is no longer that of its header is then an error."""


def header_reader(images: Files | Pictures | Arrays) -> Callable[[int], ImageHeader]:
    """Returns a function `sample -> header` of images or masks, which raises ImageError for one it cannot read."""
    if isinstance(images, Files):
        read_head = images.read_head
        return lambda sample: probe_image(lambda size: read_head(sample, size))
    if isinstance(images, Pictures):
        return images.header
    header = array_header(images)
    return lambda _: header


def array_header(images: Arrays) -> ImageHeader:
    """Returns the header that all samples of an array have."""
    height, width, *rest = images.shape
    channels, bits = (rest or [1])[0], 8 * images.dtype.itemsize
    kind = {1: "L", 3: "RGB", 4: "RGBA"}[channels] if bits == 8 else {1: "I;16", 3: "RGB;16", 4: "RGBA;16"}[channels]
    return ImageHeader(height, width, channels, bits, kind, 1)


def image_filler(images: Files | Pictures | Arrays) -> Fill:
    """Returns the `Fill` of images, whose out is (n, H, W, C)."""
    if isinstance(images, Files):
        return lambda samples, target, out, headers: _one_by_one(
            samples, lambda sample, at: decode_image(_of_same_size(images.read(sample), headers, at), target, out[at])
        )
    if isinstance(images, Pictures):
        return lambda samples, target, out, _: _one_by_one(
            samples, lambda sample, at: resample_pixels(_with_channels(images.read(sample)), target, out[at])
        )

    def fill(
        samples: NDArray[np.int64], target: Target, out: NDArray[Any], headers: NDArray[np.void]
    ) -> dict[int, str]:
        if not must_convert(images, target):
            images.read_rows(samples, out)
            return {}
        pixels = np.empty((len(samples), *images.shape), images.dtype)
        images.read_rows(samples, pixels)
        return _one_by_one(samples, lambda _, at: resample_pixels(_with_channels(pixels[at]), target, out[at]))

    return fill


def must_convert(images: Arrays, target: Target) -> bool:
    """Whether rows of an array have another shape or dtype than the rows of the file."""
    return images.shape != (target.height, target.width, target.channels) or images.dtype != target.dtype


def mask_filler(masks: Masks) -> Fill:
    """Returns the `Fill` of masks, whose out is uint8 (n, H, W); samples without a mask get `ignore_index`, or 0."""
    files, outside = masks.files, masks.ignore_index or 0
    row: Callable[[int, Target, NDArray[np.uint8], tuple[int, int] | None], None]
    if isinstance(files, Files):

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            decode_mask(files.read(sample), target, out, fill=outside, image_size=size)

    elif isinstance(files, Pictures):

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            resample_mask(files.read(sample), target, out, fill=outside)

    else:

        def row(sample: int, target: Target, out: NDArray[np.uint8], size: tuple[int, int] | None) -> None:
            found = np.empty((1, *files.shape), np.uint8)
            files.read_rows(np.array([sample]), found)
            resample_mask(found[0], target, out, fill=outside)

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
    """Calls fill(sample, index) for each sample; returns {index: error} of those that fail."""
    reasons: dict[int, str] = {}
    for at, sample in enumerate(samples.tolist()):
        try:
            fill(sample, at)
        except (ImageError, OSError) as exc:
            reasons[at] = reason_of(exc)
    return reasons


def _of_same_size(data: bytes, headers: NDArray[np.void], at: int) -> bytes:
    """Returns the bytes of an image file, once their header gives the size found before."""
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


def _with_channels(pixels: NDArray[Any]) -> NDArray[Any]:
    return pixels[..., None] if pixels.ndim == 2 else pixels


def reason_of(exc: Exception) -> str:
    """Returns why a sample could not be read, as the second half of a sentence about it."""
    return str(exc) if isinstance(exc, ImageError) else f"cannot be read: {exc}"


def reason_of_mask(reason: str) -> str:
    """Returns the reason why a mask could not be read as a reason about its sample."""
    if reason.startswith("a mask "):
        return f"its {reason.removeprefix('a ')}"
    return f"its mask {reason}" if reason.startswith(("is ", "was ", "has ", "cannot ")) else f"its mask: {reason}"


def row_digests_of(arrays: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """Returns XXH3-64 of each row, over its bytes in all of the arrays (n, ...) one after another; uint64 (n,)."""
    count = len(arrays[0])
    parts = [array.reshape(count, -1).view(np.uint8) for array in arrays]
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
