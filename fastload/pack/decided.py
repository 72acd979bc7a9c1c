"""What the headers of all images come to: one size or several, how rows are stored, and how many bytes that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.codecs import NONE, parse_codec
from fastload.errors import OptionError
from fastload.fitting import Fit, Target
from fastload.pack.one_kind import one_kind
from fastload.pack.options import PackOptions
from fastload.pack.store_plan import StoreOption, StorePlan, fitted_sizes, ways
from fastload.sources.listing import Listing

_MAX_ROW_BYTES = 2**32 - 1

_JPEG_BITS = {50: 1.0, 75: 1.3, 90: 2.0, 95: 2.7, 100: 5.0}
"""Quality -> bits a pixel, a quarter above those of 43 photos of 400x533 pixels (0.95, 1.1, 1.6, 2.1 and 3.4)."""


@dataclass(frozen=True)
class Decision:
    """What images become.

    Attributes:
        channels, dtype: of all.
        target: the one size that all get; None where they keep their own, which differ.
        sizes: (height, width) -> how many images have it, commonest first.
    """

    channels: int
    dtype: np.dtype[Any]
    target: Target | None
    sizes: dict[tuple[int, int], int]


def decide(headers: NDArray[np.void], options: PackOptions, source: str | Path) -> Decision:
    """What images of these headers become.

    Raises:
        SourceError: they are of kinds that cannot share one dataset.
        OptionError: they cannot be stored as the options say.
    """
    channels, dtype = one_kind(source, headers, options.mode, options.bits)
    _check_jpeg(options, channels, dtype, source)
    # One number a size: sorting those is much faster than sorting pairs.
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
    # Each has the aspect of the target, or is a rounding away from it: nothing is cut off.
    fit: Fit | None = None if set(sizes) == {(height, width)} else "stretch"
    return Decision(channels, dtype, replace(target, height=height, width=width, fit=fit), sizes)


def _check_jpeg(options: PackOptions, channels: int, dtype: np.dtype[Any], source: str | Path) -> None:
    """Refuse to make JPEGs of what JPEG cannot hold."""
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


def plan_stores(decision: Decision, options: PackOptions, *, masks: bool, source: str | Path) -> StorePlan:
    """How rows are stored; masks are not compressed unless the options say so.

    Raises:
        OptionError: a codec that rows of several sizes cannot have.
    """
    option = options.store or StoreOption()
    codec = NONE if options.codec == "auto" else parse_codec(options.codec)
    one_size = decision.target is not None
    if codec.name == "gzip" and not one_size:
        raise OptionError(
            f"{source}: its images differ in size, and rows of several sizes are compressed with zstd only. Say "
            f"`--codec zstd`, or give all one size with `--size`."
        )
    return StorePlan(
        channels=decision.channels,
        dtype=decision.dtype,
        option=option,
        target=decision.target,
        max_size=None if one_size else options.max_size,
        images="rows" if one_size and option.kind == "raw" else "store",
        masks=("rows" if one_size else "store") if masks else None,
        image_codec=codec,
        mask_codec=codec if masks else NONE,
        chunk_bytes=options.chunk_bytes,
    )


def too_large(headers: NDArray[np.void], options: PackOptions, source: str | Path) -> dict[int, str]:
    """Sample -> that it is larger than a row can be; only arrays are, files of images have a limit of their own.

    Args:
        headers: HEADERS (N,), zero where nothing is known.

    Raises:
        OptionError: all would be, with the size that was asked for.
        SourceError: they are of kinds that cannot share one dataset.
    """
    known = headers[headers["height"] > 0]
    if not len(known):
        return {}
    channels, dtype = one_kind(source, known, options.mode, options.bits)
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


def stored_lengths(plan: StorePlan, headers: NDArray[np.void], listing: Listing) -> dict[str, NDArray[np.int64]]:
    """Bytes of each sample's rows before any codec that the plan adds, int64 (N,) for `images` and, if any, `masks`.

    Args:
        headers: HEADERS (N,), one for each sample of the listing.
    """
    images: Any = listing.files
    keeps = plan.option.kind == "keep"
    found = {"images": images.stored_bytes if keeps else row_bytes(plan, headers, listing.sizes)}
    if plan.masks is not None:
        # Those kept stay as they are in a store only: rows of one size are all their pixels.
        masks: Any = listing.masks and listing.masks.files
        kept = keeps and plan.masks == "store" and hasattr(masks, "stored_bytes")
        found["masks"] = masks.stored_bytes if kept else np.prod(row_sizes(plan, headers), axis=1)
    return found


def row_bytes(plan: StorePlan, headers: NDArray[np.void], file_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of the rows of `images` before any codec: exact for pixels and for files kept, estimated for JPEGs made.

    Args:
        plan: of images that do not come encoded.
        headers: HEADERS (N,), one for each sample of the listing.
        file_bytes: int64 (N,), of each sample's file.

    Returns:
        int64 (N,).
    """
    pixels = np.prod(row_sizes(plan, headers), axis=1)
    found = pixels * (plan.channels * plan.dtype.itemsize)
    own, made = ways(plan, np.arange(len(headers)), headers)
    qualities = list(_JPEG_BITS)
    bits = float(np.interp(plan.option.quality, qualities, [_JPEG_BITS[quality] for quality in qualities]))
    found[made] = (pixels[made] * (bits / 8)).astype(np.int64) + 700
    return np.where(own, file_bytes, found)


def row_sizes(plan: StorePlan, headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Height and width of the row of each image, int64 (N, 2)."""
    if plan.target is not None:
        return np.tile(np.array([plan.target.height, plan.target.width]), (len(headers), 1))
    sizes = np.stack([headers["height"], headers["width"]], axis=1).astype(np.int64)
    return fitted_sizes(sizes, plan.max_size)


def stored_otherwise(plan: StorePlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> dict[str, int]:
    """How many of these samples are not stored as `--store source` lets one expect, by a description."""
    if plan.option.kind != "source":
        return {}
    own, made = ways(plan, samples, headers[samples])
    pixels, plain = ~own & ~made, headers["jpeg"][samples] > 0
    found = {
        "no plain JPEG -> stored as pixels": int(np.sum(pixels & ~plain)),
        f"JPEG brought to {plan.channels} channels -> stored as pixels": int(np.sum(pixels & plain)),
        f"larger JPEG -> resized, JPEG of quality {plan.option.quality}": int(np.sum(made)),
    }
    return {what: count for what, count in found.items() if count}


def shrunk(options: PackOptions, headers: NDArray[np.void]) -> dict[str, int]:
    """How many images of these headers `--max-size` makes smaller, by a description."""
    if options.max_size is None:
        return {}
    count = int(np.sum(np.minimum(headers["height"], headers["width"]) > options.max_size))
    return {f"larger than --max-size {options.max_size} -> shrunk": count} if count else {}


def codec_unused(plan: StorePlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> list[str]:
    """What has to be said where a codec was asked for and finds nothing to compress."""
    own, made = ways(plan, samples, headers[samples])
    if plan.image_codec == NONE or not np.all(own | made):
        return []
    rest = "only the masks are compressed" if plan.masks else "nothing is left to compress"
    return [f"Every image is stored as JPEG, which {plan.image_codec.name} makes no smaller: {rest}."]


def kept_unseen(plan: StorePlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> list[str]:
    """What has to be said where files are kept as they are."""
    if not np.any(ways(plan, samples, headers[samples])[0]):
        return []
    return ["JPEGs kept as they are were not decoded: `fastload verify` finds what is damaged inside of them."]
