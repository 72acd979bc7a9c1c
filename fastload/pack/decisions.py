"""Decisions from the headers of all images: common format, one size or several, the form of rows, bytes needed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OptionError, SourceError
from fastload.format.codecs import CODEC_CHUNK_BYTES, NONE, Codec, has_zstd, parse_codec
from fastload.images.fit import Fit, Target
from fastload.pack.encode import RowEncoder
from fastload.pack.encoding import EncodingOption, RaggedPlan, fitted_sizes, jpegs_kept_and_made
from fastload.pack.pack_options import Bits, Mode, PackOptions
from fastload.sources.listing import Listing

_MAX_ROW_BYTES = 2**32 - 1

_JPEG_BITS = {50: 1.0, 75: 1.3, 90: 2.0, 95: 2.7, 100: 5.0}
"""Quality -> estimated bits a pixel, a quarter above 43 photos of 400x533 pixels (0.95, 1.1, 1.6, 2.1 and 3.4)."""


_CHANNELS = {"gray": 1, "rgb": 3, "rgba": 4}
_MODES = {1: "gray", 3: "RGB", 4: "RGBA"}
_OWN_KINDS = {
    1: {1: {"L"}, 3: {"RGB"}, 4: {"RGBA"}},
    2: {1: {"I;16"}, 3: {"RGB;16"}, 4: {"RGBA;16"}},
}
"""Bytes a value -> channels -> the kinds of images that the file holds without conversion."""


@dataclass(frozen=True)
class Decision:
    """The format of all images in the packed file.

    Attributes:
        channels, dtype: of every image.
        target: the size of all images; None where they keep sizes that differ.
        sizes: (height, width) in the source -> number of images, most frequent first.
    """

    channels: int
    dtype: np.dtype[Any]
    target: Target | None
    sizes: dict[tuple[int, int], int]


def decide(headers: NDArray[np.void], options: PackOptions, source: str | Path) -> Decision:
    """Returns what the images with these headers become.

    Raises:
        SourceError: their kinds cannot share one dataset.
        OptionError: they cannot be stored as the options say.
    """
    channels, dtype = common_format(source, headers, options.mode, options.bits)
    _check_jpeg(options, channels, dtype, source)
    # One number for each size: sorting numbers is much faster than sorting pairs.
    found, counts = np.unique(headers["height"].astype(np.int64) << 32 | headers["width"], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    sizes = {(int(found[i] >> 32), int(found[i] & 0xFFFFFFFF)): int(counts[i]) for i in order}
    target = Target(height=0, width=0, channels=channels, dtype=dtype)
    if options.size is not None:
        height, width = options.size
        return Decision(channels, dtype, replace(target, height=height, width=width, fit=options.fit), sizes)
    fitted = fitted_sizes(np.array(list(sizes)), options.max_size)
    if (fitted != fitted[0]).any():
        return Decision(channels, dtype, None, sizes)
    height, width = fitted[0].tolist()
    # Aspect ratios equal the target's but for rounding, so stretching cuts nothing off.
    fit: Fit | None = None if set(sizes) == {(height, width)} else "stretch"
    return Decision(channels, dtype, replace(target, height=height, width=width, fit=fit), sizes)


def common_format(
    source: str | Path, headers: NDArray[np.void], mode: Mode | None, bits: Bits | None
) -> tuple[int, np.dtype[Any]]:
    """Returns the channels and the dtype of all images; `mode` and `bits` choose them where images differ.

    Raises:
        SourceError: they differ, and no option says what they should become.
    """
    dtype = _depth(source, headers, bits)
    if mode is not None:
        return _CHANNELS[mode], dtype
    total, alpha = len(headers), int(np.sum(headers["channels"] == 4))
    if alpha and alpha < total:
        raise SourceError(
            f"{source}: {alpha} of {total} images have an alpha channel. Say what all should become: `--mode rgb` "
            f"drops alpha, `--mode rgba` makes the others opaque."
        )
    if alpha:
        return 4, dtype
    return (3 if np.any(headers["channels"] == 3) else 1), dtype


def _depth(source: str | Path, headers: NDArray[np.void], bits: Bits | None) -> np.dtype[Any]:
    total, deep = len(headers), int(np.sum(headers["bits"] == 16))
    if bits == 8:
        return np.dtype(np.uint8)
    if bits == 16 and deep < total:
        raise SourceError(
            f"{source}: {total - deep} of {total} images have 8 bits a channel, which are never passed off as 16. "
            f"Leave `--bits 16` out, or pack the 16-bit images by themselves."
        )
    if deep and deep < total:
        raise SourceError(
            f"{source}: {deep} of {total} images have 16 bits a channel, the others 8. Say that all should have 8: "
            f"`--bits 8` keeps the high byte of the 16-bit ones."
        )
    return np.dtype(np.uint16 if deep else np.uint8)


def conversions(kinds: Counter[str], channels: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """Returns the number of images converted, by a description such as "L -> RGB of 8 bits"."""
    goal = f"{_MODES[channels]} of {dtype.itemsize * 8} bits"
    own = _OWN_KINDS[dtype.itemsize][channels]
    return {f"{kind} -> {goal}": count for kind, count in sorted(kinds.items()) if count and kind not in own}


def _check_jpeg(options: PackOptions, channels: int, dtype: np.dtype[Any], source: str | Path) -> None:
    """Raises OptionError if JPEGs should be made of images that a JPEG cannot hold."""
    if options.store is None or options.store.kind not in ("jpeg", "mixed"):
        return
    if dtype != np.uint8:
        raise OptionError(
            f"{source}: its images have 16 bits a channel, a JPEG holds 8. Keep their high byte with `--bits 8`, or "
            f"store them with `--store raw --codec zstd`."
        )
    if options.mode == "rgba":
        raise OptionError(
            f"{source}: `--mode rgba` makes an alpha channel, which a JPEG does not hold. Say `--mode rgb`, or store "
            f"images with `--store raw`."
        )
    if channels == 4:
        raise OptionError(
            f"{source}: its images have an alpha channel, which a JPEG does not hold. Drop it with `--mode rgb`, or "
            f"store them with `--store raw`."
        )


def plan_ragged(
    decision: Decision, options: PackOptions, *, masks: bool, encoded: bool = False, source: str | Path
) -> RaggedPlan:
    """Returns the plan of rows; masks are compressed only if the options say so.

    Args:
        encoded: rows to be kept are encoded ones.

    Raises:
        OptionError: a codec that rows of several sizes cannot have.
    """
    option = options.store or EncodingOption()
    codec = NONE if options.codec == "auto" else parse_codec(options.codec)
    one_size = decision.target is not None
    pixels = one_size and (option.kind == "raw" or (option.kind == "keep" and not encoded))
    if codec.name == "gzip" and not pixels:
        raise OptionError(
            f"{source}: its images differ in size or are kept as they are encoded, and rows of varying length are "
            f"compressed with zstd only. Say `--codec zstd`, or pack the images with `--size`."
        )
    return RaggedPlan(
        channels=decision.channels,
        dtype=decision.dtype,
        option=option,
        target=decision.target,
        max_size=None if one_size else options.max_size,
        images="rows" if pixels else "ragged",
        masks=("rows" if one_size else "ragged") if masks else None,
        image_codec=codec,
        mask_codec=codec if masks else NONE,
        chunk_bytes=options.chunk_bytes,
    )


def too_large(headers: NDArray[np.void], options: PackOptions, source: str | Path) -> dict[int, str]:
    """Returns {sample: reason} of images larger than a row may be (4 GiB); only arrays can be that large.

    Args:
        headers: HEADERS (N,), zero where nothing is known.

    Raises:
        OptionError: `size` makes every row that large.
        SourceError: kinds of images cannot share one dataset.
    """
    known = headers[headers["height"] > 0]
    if not len(known):
        return {}
    channels, dtype = common_format(source, known, options.mode, options.bits)
    value_bytes = channels * dtype.itemsize
    if options.size is not None:
        if (found := math.prod(options.size) * value_bytes) > _MAX_ROW_BYTES:
            raise OptionError(f"size={options.size}: {found / 2**30:.1f} GiB of pixels each, a row holds at most 4.")
        return {}
    sizes = fitted_sizes(np.stack([headers["height"], headers["width"]], 1).astype(np.int64), options.max_size)
    large = np.prod(sizes, axis=1) * value_bytes
    return {
        sample: f"is {large[sample] / 2**30:.1f} GiB of pixels, a row holds at most 4; `--max-size` makes it smaller"
        for sample in np.flatnonzero(large > _MAX_ROW_BYTES).tolist()
    }


def row_lengths(plan: RaggedPlan, headers: NDArray[np.void], listing: Listing) -> dict[str, NDArray[np.int64]]:
    """Returns the bytes of each row before the plan's codecs: int64 (N,) for "images" and, if there are any, "masks".

    Args:
        headers: HEADERS (N,) of all samples of the listing.
    """
    images: Any = listing.files
    keeps = plan.keeps and plan.images == "ragged"
    found = {"images": images.stored_bytes if keeps else image_row_bytes(plan, headers, listing.sizes)}
    if plan.masks is not None:
        # Masks stay encoded only in the ragged form: rows of one size are pixels.
        masks: Any = listing.masks and listing.masks.files
        kept = plan.keeps and plan.masks == "ragged" and hasattr(masks, "stored_bytes")
        found["masks"] = masks.stored_bytes if kept else np.prod(row_sizes(plan, headers), axis=1)
    return found


def image_row_bytes(plan: RaggedPlan, headers: NDArray[np.void], file_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the bytes of each row of `images`, int64 (N,): exact for pixels and kept files, estimated for new JPEGs.

    Args:
        plan: of any encoding but "keep".
        headers: HEADERS (N,) of all samples of the listing.
        file_bytes: int64 (N,), the size of each sample's file.
    """
    pixels = np.prod(row_sizes(plan, headers), axis=1)
    found = pixels * (plan.channels * plan.dtype.itemsize)
    own, made = jpegs_kept_and_made(plan, np.arange(len(headers)), headers)
    qualities = list(_JPEG_BITS)
    bits = float(np.interp(plan.option.quality, qualities, [_JPEG_BITS[quality] for quality in qualities]))
    found[made] = (pixels[made] * (bits / 8)).astype(np.int64) + 700
    return np.where(own, file_bytes, found)


def row_sizes(plan: RaggedPlan, headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Returns the height and width of each image's row, int64 (N, 2)."""
    if plan.target is not None:
        return np.tile(np.array([plan.target.height, plan.target.width]), (len(headers), 1))
    sizes = np.stack([headers["height"], headers["width"]], axis=1).astype(np.int64)
    return fitted_sizes(sizes, plan.max_size)


def source_exceptions(plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> dict[str, int]:
    """Returns the number of samples that `--store source` cannot keep as they are, by a description."""
    if plan.option.kind != "source":
        return {}
    own, made = jpegs_kept_and_made(plan, samples, headers[samples])
    pixels, plain = ~own & ~made, headers["jpeg"][samples] > 0
    found = {
        "no plain JPEG -> stored as pixels": int(np.sum(pixels & ~plain)),
        f"JPEG brought to {plan.channels} channels -> stored as pixels": int(np.sum(pixels & plain)),
        f"larger JPEG -> resized, JPEG of quality {plan.option.quality}": int(np.sum(made)),
    }
    return {description: count for description, count in found.items() if count}


def shrunk(options: PackOptions, headers: NDArray[np.void]) -> dict[str, int]:
    """Returns the number of images that `--max-size` makes smaller, by a description."""
    if options.max_size is None:
        return {}
    count = int(np.sum(np.minimum(headers["height"], headers["width"]) > options.max_size))
    return {f"larger than --max-size {options.max_size} -> shrunk": count} if count else {}


def note_on_kept(plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> list[str]:
    """Returns a note if JPEG files are kept without having been decoded."""
    if not np.any(jpegs_kept_and_made(plan, samples, headers[samples])[0]):
        return []
    return ["JPEGs kept as they are were not decoded: `fastload verify` finds what is damaged inside of them."]


def note_on_unused_codec(plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> list[str]:
    """Returns a note if a codec was asked for and no image is left that it would compress."""
    own, made = jpegs_kept_and_made(plan, samples, headers[samples])
    if plan.image_codec == NONE or not np.all(own | made):
        return []
    rest = "only the masks are compressed" if plan.masks else "nothing is left to compress"
    return [f"Every image is stored as JPEG, which {plan.image_codec.name} makes no smaller: {rest}."]


# The choice of the masks' codec under `--codec auto`: some masks are compressed to see what that saves.


_MASKS = 64
_TRIAL_BYTES = 64 * 2**20
_WORTH_BYTES = 2**20
"""Masks of fewer bytes in all are read in no time, however they are stored."""


def choose_mask_codec(
    listing: Listing, plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]
) -> tuple[Codec, str]:
    """Returns the codec of masks for `--codec auto`, and a note for the user, or "".

    zstd if it halves some 64 of the masks, else none.

    Args:
        listing: of images with masks.
        plan: how rows are made.
        samples: int64, the samples to pack.
        headers: HEADERS (N,) of all samples of the listing.
    """
    sizes = np.prod(row_sizes(plan, headers[samples]), axis=1)
    total = int(sizes.sum())
    if total < _WORTH_BYTES:
        return NONE, ""
    if not has_zstd():
        return NONE, (
            "Masks are stored as they are: to see whether zstd would make them smaller needs zstandard. Install it "
            "with: pip install zstandard hdf5plugin."
        )
    count = max(1, min(_MASKS, len(samples), _TRIAL_BYTES * len(samples) // total))
    some = samples[np.arange(count) * len(samples) // count]
    codec = parse_codec("zstd")
    before, after = _compressed(_masks_of(listing, plan, some, headers), codec)
    share = after / max(before, 1)
    if share <= 0.5:
        return codec, f"Masks are compressed with {codec}: {count} of them came to {share:.1%} of their size."
    return NONE, f"Masks are stored as they are: {codec} made {count} of them no smaller than {share:.0%}."


def _masks_of(
    listing: Listing, plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]
) -> list[NDArray[np.uint8]]:
    """Returns the pixels of these masks as rows hold them; packing reports those that cannot be read."""
    assert listing.files is not None, "masks belong to images"
    encoder = RowEncoder(listing.files, listing.masks, plan)
    found = []
    for sample in samples.tolist():
        try:
            found.append(encoder.mask(sample, headers[sample]))
        except (ImageError, OSError):
            continue
    return found


def _compressed(masks: list[NDArray[np.uint8]], codec: Codec) -> tuple[int, int]:
    """Returns the bytes of the masks before and after compression, in pieces of about the size of a chunk."""
    before = after = size = 0
    piece: list[bytes] = []
    for at, mask in enumerate(masks):
        piece.append(mask.tobytes())
        size += mask.nbytes
        if size >= CODEC_CHUNK_BYTES or at == len(masks) - 1:
            before, after = before + size, after + len(codec.compress(b"".join(piece)))
            piece, size = [], 0
    return before, after
