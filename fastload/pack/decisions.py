"""Decisions from the headers of all images: their common format, one size or several, which are stored as JPEG.

`plan_rows` makes them, before packing begins. A `RaggedPlan` says what the rows of one dataset become.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.codecs import NONE, Codec, parse_codec
from fastload.format.ragged import MAX_ROW_BYTES
from fastload.images.fit import Target
from fastload.images.image_header import KINDS
from fastload.options.pack import Bits, EncodingOption, Mode, PackOptions
from fastload.sources.listing import Listing, first_few
from fastload.system.advice import advice

_FEW = 0.01  # of the images
_UINT8 = np.dtype(np.uint8)
_LARGER = 5  # times the bytes of the files

_JPEG_BITS = {50: 1.0, 75: 1.3, 90: 2.0, 95: 2.7, 100: 5.0}
"""Quality -> estimated bits a pixel, a quarter above 43 photos of 400x533 pixels (0.95, 1.1, 1.6, 2.1 and 3.4)."""


Form = Literal["rows", "ragged"]
"""The form of a pixel dataset: rows of one size (N, H, W[, C]), or rows of varying length in one array of bytes."""

MAX_JPEG_SIDE = 65_500
"""The limit of libjpeg; larger images are stored as pixels."""

_CHANNELS = {"gray": 1, "rgb": 3, "rgba": 4}
_MODES = {1: "gray", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class RaggedPlan:
    """The form of each row of a dataset; decided before packing begins, and picklable for the workers."""

    channels: int
    dtype: np.dtype[Any]  # of every decoded image
    option: EncodingOption
    target: Target | None  # the size of all images (`--size`, or the one they share); None where they keep their own
    max_size: int | None  # limit for an image's shorter side then; larger images are resized, antialiased
    images: Form
    masks: Form | None  # None where there are none
    image_codec: Codec = NONE  # in the form "rows" an HDF5 filter, else zstd for each row that is not JPEG
    mask_codec: Codec = NONE
    mask_dtype: np.dtype[Any] = _UINT8  # uint16 where a mask holds numbers above 255
    chunk_bytes: int = 8 * 2**20

    def __repr__(self) -> str:
        """Returns what journals and shards hold of a plan, as it was before masks could have 16 bits."""
        given = {name: value for name, value in vars(self).items() if name != "mask_dtype" or value != np.uint8}
        return f"RaggedPlan({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def special(self) -> bool:
        """Whether rows are anything but uncompressed pixels of one size."""
        return self.images == "ragged" or self.image_codec != NONE or self.mask_codec != NONE

    def without_checksums(self) -> RaggedPlan:
        """Returns the plan of a release that wrote zstd frames without checksums."""
        images, masks = (codec._replace(checksum=False) for codec in (self.image_codec, self.mask_codec))
        return replace(self, image_codec=images, mask_codec=masks)

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of the row for an image of this size."""
        if self.target is not None:
            return self.target.height, self.target.width
        if self.max_size is not None:
            height, width = fitted_sizes(np.array([[height, width]]), self.max_size)[0].tolist()
        return height, width


def fitted_sizes(sizes: NDArray[np.int64], max_size: int | None) -> NDArray[np.int64]:
    """Returns heights and widths, int64 (N, 2), with the shorter side at most max_size; unknown ones (0) stay 0.

    Aspect ratios stay, to the nearest pixel.
    """
    short = sizes.min(axis=1, keepdims=True)
    if max_size is None or not (short > max_size).any():
        return sizes
    return np.where(short > max_size, (2 * sizes * max_size + short) // np.maximum(2 * short, 1), sizes)


def jpegs_kept_and_made(plan: RaggedPlan, samples: Any, headers: Any) -> tuple[Any, Any]:
    """Returns which samples keep the bytes of their JPEG file, and which are encoded as JPEG; the others become pixels.

    Samples are int64 (n,) with HEADERS (n,), and the answers bool (n,); or one number with one of HEADERS, also as
    a dict of plain numbers, and two bools.
    """
    kind, height, width = plan.option.kind, headers["height"], headers["width"]
    nothing = height < 0
    if kind in ("raw", "keep"):
        return nothing, nothing
    # x ^ True negates NumPy's bools and Python's alike, ~x does not; Python's numbers take a tenth of the time.
    wanted = nothing ^ True
    if kind == "mixed":  # Spread evenly over the listing, so that the order of packing does not matter.
        wanted = (samples + 1) * plan.option.fraction // 1 > samples * plan.option.fraction // 1
    own = nothing
    if kind != "jpeg":
        fits = (headers["channels"] == plan.channels) | ((headers["channels"] == 1) & (plan.channels == 3))
        possible = (headers["jpeg"] > 0) & fits
        if plan.target is not None:
            resized = (height != plan.target.height) | (width != plan.target.width)
        else:
            resized = nothing if plan.max_size is None else (height > plan.max_size) & (width > plan.max_size)
        own = wanted & possible & (resized ^ True)
        if kind == "source":  # Other files stay lossless; a JPEG to be resized would grow as pixels.
            wanted = possible
    return own, wanted & (own ^ True) & (height <= MAX_JPEG_SIDE) & (width <= MAX_JPEG_SIDE)


def plan_rows(
    headers: NDArray[np.void],
    keys: Sequence[str],
    options: PackOptions,
    source: str | Path,
    *,
    masks: bool,
    encoded: bool = False,
) -> RaggedPlan:
    """Returns what the images with these headers and keys become; masks are compressed only if the options say so.

    `masks`: there are some; `encoded`: rows to be kept are encoded ones. Raises SourceError if kinds of images
    cannot share one dataset, OptionError if they cannot be stored as the options say.
    """
    channels, dtype = common_format(source, headers, keys, options.mode, options.bits)
    option = options.store or EncodingOption()
    if option.kind in ("jpeg", "mixed"):
        _check_jpeg(options, channels, dtype, source)
    target = None
    if options.size is not None:
        target = Target(*options.size, channels, dtype, options.fit)
    elif not options.varied:
        sizes = np.array(list(size_counts(headers)))
        fitted = fitted_sizes(sizes, options.max_size)
        if (fitted == fitted[0]).all():
            # Aspect ratios equal the target's but for rounding, so stretching cuts nothing off.
            height, width = fitted[0].tolist()
            target = Target(height, width, channels, dtype, None if np.array_equal(sizes, fitted[:1]) else "stretch")
    codec = NONE if options.codec == "auto" else parse_codec(options.codec)
    pixels = target is not None and (option.kind == "raw" or (option.kind == "keep" and not encoded))
    if codec.name == "gzip" and not pixels:
        raise OptionError(
            f"{source}: its images differ in size or are kept as they are encoded, and rows of varying length are "
            f"compressed with zstd only. Say `--codec zstd`, or pack the images with `--size`."
        )
    return RaggedPlan(
        channels=channels,
        dtype=dtype,
        option=option,
        target=target,
        max_size=options.max_size if target is None else None,
        images="rows" if pixels else "ragged",
        masks=("ragged" if target is None else "rows") if masks else None,
        image_codec=codec,
        mask_codec=codec if masks else NONE,
        chunk_bytes=options.chunk_bytes,
    )


def size_counts(headers: NDArray[np.void]) -> dict[tuple[int, int], int]:
    """Returns {(height, width): number of images}, most frequent first."""
    # One number for each size: sorting numbers is much faster than sorting pairs.
    found, counts = np.unique(headers["height"].astype(np.int64) << 32 | headers["width"], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {(int(found[i] >> 32), int(found[i] & 0xFFFFFFFF)): int(counts[i]) for i in order}


def common_format(
    source: str | Path, headers: NDArray[np.void], keys: Sequence[str], mode: Mode | None, bits: Bits | None
) -> tuple[int, np.dtype[Any]]:
    """Returns the channels and the dtype of all images; `mode` and `bits` choose them where images differ.

    SourceError: they differ, and no option says what they should become; it names the first that do, of each kind.
    """
    total, is_deep, has_alpha = len(headers), headers["bits"] == 16, headers["channels"] == 4
    deep, alpha = int(np.sum(is_deep)), int(np.sum(has_alpha))

    def first(which: NDArray[np.bool_]) -> str:
        return first_few([keys[at] for at in np.flatnonzero(which).tolist()], 3)

    wrong = []
    if bits == 16 and deep < total:
        wrong.append(
            f"{total - deep} of {total} images have 8 bits a channel ({first(~is_deep)}), which are never passed off "
            f"as 16. Leave `--bits 16` out, or pack the 16-bit images by themselves."
        )
    if bits is None and 0 < deep < total:
        wrong.append(
            f"{deep} of {total} images have 16 bits a channel ({first(is_deep)}), the others 8. Say that all should "
            f"have 8: `--bits 8` keeps the high byte of the 16-bit ones."
        )
    if mode is None and 0 < alpha < total:
        wrong.append(
            f"{alpha} of {total} images have an alpha channel ({first(has_alpha)}). Say what all should become: "
            f"`--mode rgb` drops alpha, `--mode rgba` makes the others opaque."
        )
    if wrong:
        raise SourceError(f"{source}: {' Besides, '.join(wrong)}")
    dtype = np.dtype(np.uint16 if deep and bits != 8 else np.uint8)
    if mode is not None:
        return _CHANNELS[mode], dtype
    return (4 if alpha else 3 if np.any(headers["channels"] == 3) else 1), dtype


def conversions(kinds: Counter[str], channels: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """Returns the number of images converted, by a description such as "L -> RGB of 8 bits"."""
    goal = f"{_MODES[channels]} of {dtype.itemsize * 8} bits"
    own = KINDS[8 * dtype.itemsize][channels]
    return {f"{kind} -> {goal}": count for kind, count in sorted(kinds.items()) if kind != own}


def _check_jpeg(options: PackOptions, channels: int, dtype: np.dtype[Any], source: str | Path) -> None:
    """Raises OptionError for images that a JPEG cannot hold."""
    if dtype != np.uint8:
        raise OptionError(
            f"{source}: its images have 16 bits a channel, a JPEG holds 8. Keep their high byte with `--bits 8`, or "
            f"store them with `--store raw --codec zstd`."
        )
    if channels == 4:
        made = options.mode == "rgba"
        raise OptionError(
            f"{source}: {'`--mode rgba` makes' if made else 'its images have'} an alpha channel, which a JPEG does not "
            f"hold. {'Say' if made else 'Drop it with'} `--mode rgb`, or store {'images' if made else 'them'} with "
            f"`--store raw`."
        )


def too_large(
    headers: NDArray[np.void], keys: Sequence[str], options: PackOptions, source: str | Path
) -> dict[int, str]:
    """Returns {sample: reason} of images larger than a row may be (4 GiB).

    Headers are zero where nothing is known. Raises OptionError if `size` makes every row that large, and
    SourceError.
    """
    known = np.flatnonzero(headers["height"] > 0)
    if not len(known):
        return {}
    channels, dtype = common_format(
        source, headers[known], [keys[at] for at in known.tolist()], options.mode, options.bits
    )
    value_bytes = channels * dtype.itemsize
    if options.size is not None:
        if (found := math.prod(options.size) * value_bytes) > MAX_ROW_BYTES:
            raise OptionError(f"size={options.size}: {found / 2**30:.1f} GiB of pixels each, a row holds at most 4.")
        return {}
    sizes = fitted_sizes(np.stack([headers["height"], headers["width"]], 1).astype(np.int64), options.max_size)
    large = np.prod(sizes, axis=1) * value_bytes
    return {
        sample: f"is {large[sample] / 2**30:.1f} GiB of pixels, a row holds at most 4; `--max-size` makes it smaller"
        for sample in np.flatnonzero(large > MAX_ROW_BYTES).tolist()
    }


def few_of_16_bits(headers: NDArray[np.void]) -> dict[int, str]:
    """Returns {sample: reason} of images of 16 bits a channel, where they are less than 1 % of all; else none.

    Headers are zero where nothing is known. Packed as 8 bits they would lose their low bytes unasked.
    """
    deep, total = np.flatnonzero(headers["bits"] == 16).tolist(), int(np.sum(headers["height"] > 0))
    reason = f"has 16 bits a channel where {total - len(deep):,} others have 8; `--bits 8` keeps its high byte"
    return dict.fromkeys(deep, reason) if 0 < len(deep) < _FEW * total else {}


def row_lengths(plan: RaggedPlan, headers: NDArray[np.void], listing: Listing) -> dict[str, NDArray[np.int64]]:
    """Returns int64 (N,) for "images" and, if there are any, "masks": bytes of each row, before the codecs.

    Exact for pixels, for kept files and for rows of a packed file, estimated for new JPEGs. Headers are the whole
    listing's.
    """
    pixels = np.prod(row_sizes(plan, headers), axis=1)
    images: Any = listing.files
    if plan.option.kind == "keep" and plan.images == "ragged":
        found = {"images": images.stored_bytes}
    else:
        own, made = jpegs_kept_and_made(plan, np.arange(len(headers)), headers)
        qualities = list(_JPEG_BITS)
        bits = float(np.interp(plan.option.quality, qualities, [_JPEG_BITS[quality] for quality in qualities]))
        lengths = np.where(
            made, (pixels * (bits / 8)).astype(np.int64) + 700, pixels * plan.channels * plan.dtype.itemsize
        )
        found = {"images": np.where(own, listing.sizes, lengths)}
    if plan.masks is not None:
        # Masks stay encoded only in the ragged form: rows of one size are pixels.
        masks: Any = listing.masks and listing.masks.files
        kept = plan.option.kind == "keep" and plan.masks == "ragged" and hasattr(masks, "stored_bytes")
        found["masks"] = masks.stored_bytes if kept else pixels * plan.mask_dtype.itemsize
    return found


def row_sizes(plan: RaggedPlan, headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Returns the height and width of each image's row, int64 (N, 2)."""
    if plan.target is not None:
        return np.tile(np.array([plan.target.height, plan.target.width]), (len(headers), 1))
    sizes = np.stack([headers["height"], headers["width"]], axis=1).astype(np.int64)
    return fitted_sizes(sizes, plan.max_size)


def source_exceptions(plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]) -> dict[str, int]:
    """Returns the number of samples that `--store source` or `mixed` cannot keep as they are, by a description."""
    if plan.option.kind not in ("source", "mixed"):
        return {}
    own, made = jpegs_kept_and_made(plan, samples, headers[samples])
    if plan.option.kind == "mixed":
        lossy = int(np.sum(made))
        return {f"no JPEG that can be kept -> JPEG of quality {plan.option.quality}, with loss": lossy} if lossy else {}
    pixels, plain = ~own & ~made, headers["jpeg"][samples] > 0
    found = {
        "no plain JPEG -> stored as pixels": int(np.sum(pixels & ~plain)),
        f"JPEG brought to {plan.channels} channels -> stored as pixels": int(np.sum(pixels & plain)),
        f"larger JPEG -> resized, JPEG of quality {plan.option.quality}": int(np.sum(made)),
    }
    return {description: count for description, count in found.items() if count}


def notes_on_encoding(
    plan: RaggedPlan,
    samples: NDArray[np.int64],
    headers: NDArray[np.void],
    sizes: NDArray[np.int64],
    options: PackOptions,
) -> list[str]:
    """Returns notes on what an encoding costs, or leaves out.

    Where JPEG files become far larger as pixels and nobody chose that, where such files are kept without having been
    decoded, and where a codec finds nothing to compress. `sizes` are the bytes of all files.
    """
    own, made = jpegs_kept_and_made(plan, samples, headers[samples])
    notes = []
    if options.store is None and np.mean(headers["jpeg"][samples] > 0) > 0.5:
        pixels = np.prod(row_sizes(plan, headers)[samples], axis=1).sum() * plan.channels * plan.dtype.itemsize
        times = pixels / max(1, sizes[samples].sum())
        if times >= _LARGER:
            notes.append(advice("store source", times=f"{times:.0f}"))
    if np.any(own) and not options.strict:
        notes.append(advice("strict for kept JPEGs"))
    if plan.image_codec != NONE and np.all(own | made):
        rest = "only the masks are compressed" if plan.masks else "nothing is left to compress"
        notes.append(f"Every image is stored as JPEG, which {plan.image_codec.name} makes no smaller: {rest}.")
    return notes
