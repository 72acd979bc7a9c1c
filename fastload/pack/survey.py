"""What will be packed: the listing, the headers of all images, and what each image becomes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.codecs import CODEC_CHUNK_BYTES, NONE
from fastload.decode import Target
from fastload.errors import OptionError, OutputError, SourceError
from fastload.layout import PixelSpec, chunk_rows_for
from fastload.pack.decided import (
    codec_unused,
    decide,
    kept_unseen,
    plan_stores,
    shrunk,
    stored_lengths,
    stored_otherwise,
    too_large,
)
from fastload.pack.headers import read_headers
from fastload.pack.moved import boxes_gone, move_columns
from fastload.pack.one_kind import conversions
from fastload.pack.options import PackOptions, Progress, check_choice
from fastload.pack.store_plan import StorePlan, fitted_sizes
from fastload.pack.trial import choose_mask_codec
from fastload.pack.workers import WorkerPool
from fastload.plan import permute
from fastload.sources.listing import Listing, OnError, first_few
from fastload.sources.tree import Tree
from fastload.store import place_rows


@dataclass(frozen=True)
class Survey:
    """What packing would do, known before a pixel is decoded.

    Attributes:
        listing: every sample found, its places in the image moved as its pixels will be.
        samples: int64, those to pack: all but the ones whose header cannot be read.
        options: what shapes the bytes.
        target: what each image becomes; None for a dataset without images, and where they keep sizes that differ.
        sizes: (height, width) -> number of images, commonest first.
        converted: how many images are changed in kind, by a description such as "gray -> RGB".
        skipped: (key, reason) of each sample left out so far.
        disk_free: bytes free where the output goes; -1 when no output was named.
        headers: HEADERS (N,), what was found in each image's header, zero for those left out; None without images.
        plan: how rows are stored; None where they are plain pixels of one size, or there are none.
        said: what was chosen for the user, and why: more notes.
    """

    listing: Listing
    samples: NDArray[np.int64]
    options: PackOptions
    target: Target | None
    sizes: dict[tuple[int, int], int]
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    disk_free: int = -1
    headers: NDArray[np.void] | None = None
    plan: StorePlan | None = None
    said: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        """Samples to pack."""
        return len(self.samples)

    @property
    def layout(self) -> str:
        """Name of the source's layout."""
        return self.listing.layout

    @property
    def notes(self) -> tuple[str, ...]:
        """What was recognised in the source, and what was absent or ignored."""
        return (*self.listing.notes, *self.said)

    @property
    def chunk_rows(self) -> int:
        """Images a chunk holds; 0 where they are no rows of pixels."""
        pixels = self.pixels(self.num_samples)
        return pixels["images"].chunk_rows if "images" in pixels else 0

    def pixels(self, num_rows: int) -> dict[str, PixelSpec]:
        """The pixel datasets of a file of so many of these rows, without byte stores."""
        if self.target is None:
            return {}
        target, plan = self.target, self.plan
        specs = {}
        if plan is None or plan.images == "rows":
            specs["images"] = PixelSpec((target.height, target.width, target.channels), target.dtype, 0)
        if self.listing.masks is not None:
            specs["masks"] = PixelSpec((target.height, target.width), np.dtype(np.uint8), 0, self.mask_attrs)
        codecs = {} if plan is None else {"images": plan.image_codec, "masks": plan.mask_codec}
        for name, spec in specs.items():
            codec = codecs.get(name, NONE)
            aim = self.options.chunk_bytes if codec == NONE else min(self.options.chunk_bytes, CODEC_CHUNK_BYTES)
            specs[name] = replace(spec, chunk_rows=chunk_rows_for(spec.row_bytes, num_rows, aim), codec=codec)
        return specs

    @property
    def mask_attrs(self) -> dict[str, Any]:
        """Attributes of the dataset `masks`."""
        if (masks := self.listing.masks) is None:
            return {}
        attrs = {**masks.attrs, "names": masks.names} if masks.names else dict(masks.attrs)
        return attrs if masks.ignore_index is None else attrs | {"ignore_index": masks.ignore_index}

    @property
    def must_keep_size(self) -> bool:
        """Whether an image must be decoded from the size that its header told: masks and places are fitted to that."""
        return self.target is not None and self.target.fit is not None and (
            self.listing.masks is not None or _has_places(self.listing)
        )  # fmt: skip

    @property
    def bytes_needed(self) -> int:
        """Bytes of rows and stores before any lossless codec that the options ask for.

        Pixels, files kept as they are and rows of a packed file count as they will be stored, rows of one size with
        their last chunk whole; JPEGs to be made are estimated.
        """
        return sum(self.stores.values()) + sum(
            -(-self.num_samples // spec.chunk_rows) * spec.chunk_rows * spec.row_bytes
            for spec in self.pixels(self.num_samples).values()
        )

    @cached_property
    def stores(self) -> dict[str, int]:
        """Bytes of the byte stores, likewise."""
        plan, headers = self.plan, self.headers
        if plan is None or headers is None:
            return {}
        forms = {"images": plan.images, "masks": plan.masks}
        lengths = stored_lengths(plan, headers, self.listing)
        rows = row_order(self)
        return {
            name: place_rows(each[rows], plan.chunk_bytes)[1]
            for name, each in lengths.items()
            if forms[name] == "store"
        }


def list_samples(source: str | Path | Tree, layout: str | None, options: PackOptions, on_error: OnError) -> Listing:
    """The samples of a source, reduced to `limit` of them spread evenly over the listing."""
    from fastload.sources import list_source  # it brings all the layouts

    check_choice("on_error", on_error, get_args(OnError))
    return limited(list_source(source, layout, on_error, options.source), options)


def limited(listing: Listing, options: PackOptions) -> Listing:
    """The listing, reduced to `limit` of its samples spread evenly."""
    total = len(listing)
    if options.limit is not None and options.limit < total:
        return listing.take(np.arange(options.limit) * total // options.limit)
    return listing


def survey_listing(
    listing: Listing,
    options: PackOptions,
    pool: WorkerPool,
    *,
    source: str | Path = "SRC",
    on_error: OnError = "fail",
    progress: Progress | None = None,
) -> Survey:
    """Read every header, and decide what each image becomes.

    Raises:
        SourceError: images that cannot be read (unless on_error is "skip"), or of kinds that cannot share one dataset.
        OptionError: they cannot be stored as the options say.
    """
    if listing.files is None:
        return _survey_without_images(listing, options, source)
    headers, kinds, reasons = read_headers(listing, pool, progress)
    reasons |= too_large(headers, options, source)
    skipped = [*listing.skipped, *((listing.keys[i], reasons[i]) for i in sorted(reasons))]
    if reasons and on_error == "fail":
        raise SourceError(unreadable(source, skipped[-len(reasons) :], len(listing.keys)))
    samples = all_but(len(listing), reasons)
    if not len(samples):
        raise SourceError(unreadable(source, skipped[-len(reasons) :], len(listing.keys)))
    frames, turned = kinds.pop("frames", 0), kinds.pop("turned", 0)
    decision = decide(headers[samples], options, source)
    target = decision.target
    converted = conversions(kinds, decision.channels, decision.dtype)
    if frames:
        converted["several frames -> the first"] = frames
    if turned:
        kept = " (masks, boxes and points count as upright already)" if listing.masks or _has_places(listing) else ""
        converted[f"EXIF orientation -> upright{kept}"] = turned
    _check_masks(listing, source)
    _check_known_places(listing, options, source)
    plan = plan_stores(decision, options, masks=listing.masks is not None, source=source)
    moved = move_to(listing, headers, target, plan.max_size)
    if gone := boxes_gone(listing, moved, samples):
        converted["boxes that the crop cuts away whole -> no area"] = gone
    converted |= stored_otherwise(plan, samples, headers) | shrunk(options, headers[samples])
    said = kept_unseen(plan, samples, headers) + codec_unused(plan, samples, headers)
    if options.codec == "auto" and plan.option.kind != "keep":
        codec, why = choose_mask_codec(listing, plan, samples, headers)
        plan = replace(plan, mask_codec=codec)
        said += [why] if why else []
    return Survey(
        moved, samples, options, target, decision.sizes, converted, tuple(skipped), headers=headers,
        plan=plan if plan.special else None, said=tuple(said),
    )  # fmt: skip


def move_to(listing: Listing, headers: NDArray[np.void], target: Target | None, max_size: int | None = None) -> Listing:
    """The listing, its places in images moved as the images of these headers are."""
    resized = max_size is not None if target is None else target.fit is not None
    if not resized or not _has_places(listing):
        return listing
    sizes = np.stack([headers["height"], headers["width"]], 1)
    return move_columns(listing, sizes, target or fitted_sizes(sizes.astype(np.int64), max_size))


def _check_known_places(listing: Listing, options: PackOptions, source: str | Path) -> None:
    """Refuse to resize under boxes of which it is not known how their numbers are to be read."""
    unknown = [name for name, column in listing.columns.items() if column.attrs.get("coordinates") == "unknown"]
    option = "--size" if options.size else "--max-size" if options.max_size else ""
    if option and unknown:
        raise SourceError(
            f"{source}: `{option}` would leave {first_few(unknown)} behind: it is not known whether the numbers are "
            f"corners, or a corner and a size. Pack without it, or bring the images to their size beforehand."
        )


def _has_places(listing: Listing) -> bool:
    return any(column.moves for column in listing.columns.values())


def all_but(total: int, left_out: Iterable[int]) -> NDArray[np.int64]:
    """The numbers below total without those left out, ascending."""
    keep = np.ones(total, np.bool_)
    keep[np.fromiter(left_out, np.int64)] = False
    return np.flatnonzero(keep).astype(np.int64)


def _survey_without_images(listing: Listing, options: PackOptions, source: str | Path) -> Survey:
    codec = None if options.codec in ("auto", "none") else options.codec
    said = {name: getattr(options, name.replace("-", "_")) for name in ("size", "max-size", "mode", "bits", "store")}
    for name, value in {**said, "codec": codec}.items():
        if value is not None:
            raise OptionError(f"{source}: holds no images, so `--{name}` has nothing to act on. Leave it out.")
    return Survey(listing, np.arange(len(listing)), options, None, {}, {}, listing.skipped)


def _check_masks(listing: Listing, source: str | Path) -> None:
    """Refuse samples without a mask where no value says so."""
    if (masks := listing.masks) is None or masks.ignore_index is not None or masks.present.all():
        return
    lacking = [listing.keys[i] for i in np.flatnonzero(~masks.present).tolist()]
    raise SourceError(
        f"{source}: images have no mask ({len(lacking)}): {first_few(lacking)}. Add their masks, or leave all masks "
        f"out with `--masks none`."
    )


def survey_source(
    source: str | Path,
    output: str | Path | None = None,
    *,
    layout: str | None = None,
    options: PackOptions | None = None,
    workers: int = 0,
    on_error: OnError = "fail",
    progress: Progress | None = None,
) -> Survey:
    """What packing this source would do, without writing anything (`fastload pack --dry-run`).

    Raises:
        SourceError, OptionError: as pack_images.
    """
    options = options or PackOptions()
    with WorkerPool(workers) as pool:
        pool.start_early()
        listing = list_samples(source, layout, options, on_error)
        pool.use(listing)
        survey = survey_listing(listing, options, pool, source=source, on_error=on_error, progress=progress)
    return replace(survey, disk_free=free_bytes(Path(output))) if output is not None else survey


def row_order(survey: Survey) -> NDArray[np.int64]:
    """The sample that each row holds: splits one after another, shuffled within each; int64 (N,)."""
    splits = survey.listing.split[survey.samples]
    order = []
    for split in np.unique(splits).tolist():
        samples = survey.samples[splits == split]
        if survey.options.shuffle:
            key = xxhash.xxh3_64_intdigest(f"fastload pack {survey.options.seed} {split}".encode())
            samples = samples[permute(np.arange(len(samples)), len(samples), key)]
        order.append(samples)
    return np.concatenate(order)


def free_bytes(output: Path) -> int:
    """Bytes free on the file system of an output.

    Raises:
        OutputError: its folder is missing.
    """
    try:
        return shutil.disk_usage(output.absolute().parent).free
    except OSError as exc:
        raise OutputError(
            f"{output}: its folder {output.absolute().parent} does not exist or cannot be read "
            f"({os.strerror(exc.errno or 0)}). Make it first."
        ) from exc


def unreadable(source: str | Path, bad: list[tuple[str, str]], total: int) -> str:
    """The message about images that cannot be read, the first few by name."""
    shown = "; ".join(f"{key}: {reason}" for key, reason in bad[:5])
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    return (
        f"{source}: {len(bad)} of {total} images cannot be decoded: {shown}{more}. Repair or remove them, or leave "
        f"them out with `--on-error skip`."
    )
