"""The survey before packing: every header read, what each image becomes, and what the file will hold.

`survey_listing` reads the headers with the worker pool and asks `decisions` for the common format. Boxes and points are
moved as resizing moves the pixels under them. `Survey.order` is the order of rows in the file.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError, OptionError, SourceError
from fastload.format.codecs import CODEC_CHUNK_BYTES, NONE, Codec, has_zlib_ng, has_zstd, parse_codec
from fastload.format.digests import DIGEST_FIELDS
from fastload.format.header import IMAGES_OFFSET
from fastload.format.ragged import INDEX_DTYPES, index_names, ragged_offsets
from fastload.format.writer import PixelSpec, chunk_rows_for
from fastload.images.fit import Target
from fastload.images.image_header import KINDS, header_of_pixels
from fastload.options.pack import PackOptions, Progress
from fastload.pack.coordinates import (
    DECLARED,
    EITHER_WAY,
    REACHES_OUT,
    STORED_MASKS,
    as_upright,
    count_lost_boxes,
    has_coordinates,
    undecided_masks,
    ways_out,
    with_boxes_inside,
    with_moved_coordinates,
)
from fastload.pack.decisions import (
    RaggedPlan,
    conversions,
    few_of_16_bits,
    notes_on_encoding,
    plan_rows,
    row_lengths,
    row_sizes,
    size_counts,
    source_exceptions,
    too_large,
)
from fastload.pack.encode import (
    BEFORE_EXIF,
    HEADERS,
    LARGE_MASKS,
    SAME_SHAPE,
    Headers,
    RowEncoder,
    announce_samples,
    bytes_of,
)
from fastload.pack.pack_options import PackJob
from fastload.pack.pack_worker import Worker
from fastload.pack.pool import PackPool
from fastload.plan import permute
from fastload.sources.listing import Arrays, Listing, first_few, only_arrays
from fastload.system.advice import advice

_HEADER_BLOCK = 512
_TRIAL_MASKS = 64
_TRIAL_BYTES = 64 * 2**20
_HEADER_BYTES = 16 * 2**10  # of HDF5 and attributes, about
_WORTH_BYTES = 2**20  # masks of fewer bytes in all are read in no time, however they are stored

# Of 64 masks (CamVid's; polygons as COCO's) level 6 came to 0.94 of zstd's bytes, level 4 to 1.2 to 1.5 times as many;
# zlib also inflates what level 6 made 1.3 to 1.8 times as fast.
_PLAIN_CODEC = Codec("gzip", 6)
_WORTH_PLAIN = 1.3  # times the bytes of zstd, for masks that every tool opens,
_WORTH_SHARE = 0.01  # and this share of their pixels: of nearly empty masks nothing is left with either


@dataclass(frozen=True)
class Survey:
    """The result of surveying a source: all that packing decides before it decodes a pixel."""

    listing: Listing  # every sample found; boxes and points are moved as the pixels will be
    samples: NDArray[np.int64]  # the samples to pack: all whose header can be read
    options: PackOptions
    converted: dict[str, int]  # number of images changed in kind, by a description such as "gray -> RGB"
    skipped: tuple[tuple[str, str], ...]  # (key, reason) of each sample left out so far
    disk_free: int = -1  # bytes free where the output goes; -1 when no output was named
    headers: NDArray[np.void] | None = None  # HEADERS (N,) of all samples, zero for those left out; None without images
    plan: RaggedPlan | None = None  # how rows are made; None without images
    more_notes: tuple[str, ...] = ()  # what was chosen for the user, and why
    key_bytes: int = 0  # least bytes of `key`: shards are to have the same

    @property
    def target(self) -> Target | None:
        """The size of all images; None for a dataset without images, and where images keep sizes that differ."""
        return None if self.plan is None else self.plan.target

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """(height, width) in the source -> number of images, most frequent first."""
        return {} if self.headers is None else size_counts(self.headers[self.samples])

    @property
    def num_samples(self) -> int:
        """Number of samples to pack."""
        return len(self.samples)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was recognised in the source, what was absent or ignored, and what was chosen."""
        return (*self.listing.notes, *self.more_notes)

    @property
    def chunk_rows(self) -> int:
        """Images in a chunk; 0 where there are no rows of one size."""
        pixels = self.pixels(self.num_samples)
        return pixels["images"].chunk_rows if "images" in pixels else 0

    def pixels(self, num_rows: int) -> dict[str, PixelSpec]:
        """Returns the pixel datasets with rows of one size, for a file of so many rows."""
        target, plan = self.target, self.plan
        if target is None or plan is None:
            return {}
        specs = {}
        if plan.images == "rows":
            row = (target.height, target.width, target.channels)
            specs["images"] = PixelSpec(row, target.dtype, 0, codec=plan.image_codec)
        if plan.masks == "rows":
            size = (target.height, target.width)
            specs["masks"] = PixelSpec(size, plan.mask_dtype, 0, self.mask_attrs, plan.mask_codec)
        # Of a copied file masks are compressed in as many rows as images, and in chunks as large as the options say.
        copied = plan.option.kind == "keep" and plan.images == "rows"
        for name, spec in specs.items():
            small = spec.codec != NONE and not copied
            aim = min(self.options.chunk_bytes, CODEC_CHUNK_BYTES) if small else self.options.chunk_bytes
            row_bytes = specs["images"].row_bytes if copied else spec.row_bytes
            specs[name] = replace(spec, chunk_rows=chunk_rows_for(row_bytes, num_rows, aim))
        return specs

    @property
    def mask_attrs(self) -> dict[str, Any]:
        """Attributes of the dataset `masks`."""
        if (masks := self.listing.masks) is None:
            return {}
        attrs = {**masks.attrs, "names": masks.names} if masks.names else dict(masks.attrs)
        return attrs if masks.ignore_index is None else attrs | {"ignore_index": masks.ignore_index}

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The sample of each row, int64 (N,): splits one after another, shuffled within each."""
        splits = self.listing.split[self.samples]
        order = []
        for split in np.unique(splits).tolist():
            samples = self.samples[splits == split]
            if self.options.shuffle:
                key = xxhash.xxh3_64_intdigest(f"fastload pack {self.options.seed} {split}".encode())
                samples = samples[permute(np.arange(len(samples)), len(samples), key)]
            order.append(samples)
        return np.concatenate(order)

    @cached_property
    def row_lengths(self) -> dict[str, NDArray[np.int64]]:
        """Bytes of each row of `images`, and of `masks` if there are any, before any lossless codec of the options.

        Exact for pixels, for files kept as they are and for rows of a packed file; JPEGs to be made are estimated.
        """
        if self.plan is None or self.headers is None:
            return {}
        lengths = row_lengths(self.plan, self.headers, self.listing)
        return {name: each[self.order] for name, each in lengths.items()}

    @cached_property
    def expected(self) -> NDArray[np.int64]:
        """Bytes of image and mask of each row together, likewise."""
        return sum(self.row_lengths.values(), np.zeros(self.num_samples, np.int64))

    @cached_property
    def dataset_bytes(self) -> dict[str, int]:
        """Bytes of each pixel dataset, likewise; of rows of one size the last chunk counts whole."""
        specs, num_rows = self.pixels(self.num_samples), self.num_samples
        return {
            name: specs[name].allocated_bytes(num_rows)
            if name in specs
            else ragged_offsets(lengths, self.options.chunk_bytes)[1]
            for name, lengths in self.row_lengths.items()
        }

    @property
    def bytes_needed(self) -> int:
        """Bytes of the file: pixels, exact but for JPEGs to be made and lossless codecs, and all other datasets."""
        listing, count = self.listing, self.num_samples
        values = sum(column.values.nbytes for column in listing.columns.values()) * count // max(1, len(listing))
        index = sum(
            np.dtype(INDEX_DTYPES[part.removeprefix(f"{name}_")]).itemsize
            for name in self.dataset_bytes
            if name not in self.pixels(count)
            for part in index_names(name)
        )
        key_bytes = max(len(key.encode()) for key in listing.keys)
        row_bytes = key_bytes + index + 1 + 8 * len(DIGEST_FIELDS)  # with its split
        chunk = self.options.chunk_bytes  # of which the last one of rows of varying length counts whole
        pixels = sum(
            size if name in self.pixels(count) else -(-size // chunk) * chunk
            for name, size in self.dataset_bytes.items()
        )
        return IMAGES_OFFSET + pixels + values + count * row_bytes + _HEADER_BYTES


def survey_listing(job: PackJob, pool: PackPool, found: Headers | None = None) -> Survey:
    """Reads every header, unless they were found already, and decides what each image becomes.

    SourceError: images cannot be read (unless on_error is "skip"), or their kinds cannot share one dataset.
    OptionError: they cannot be stored as the options say.
    """
    listing, options, source = job.listing, job.options, job.source
    if (whole := job.whole) is not None:
        every = np.arange(len(listing))
        return Survey(
            listing, every, options, {}, (), headers=whole.headers, plan=whole.plan, key_bytes=whole.key_bytes
        )
    if listing.files is None:
        codec = None if options.codec in ("auto", "none") else options.codec
        given = {
            name: getattr(options, name.replace("-", "_")) for name in ("size", "max-size", "mode", "bits", "store")
        }
        for name, value in {**given, "codec": codec}.items():
            if value is not None:
                raise OptionError(f"{source}: holds no images, so `--{name}` has nothing to act on. Leave it out.")
        return Survey(listing, np.arange(len(listing)), options, {}, listing.skipped)
    headers, kinds, reasons = found or read_headers(listing, pool, job.on_progress)
    kinds, reasons = kinds.copy(), dict(reasons)
    if job.on_error == "skip" and options.bits is None and (deep := few_of_16_bits(headers)):
        reasons |= deep
        for sample in deep:
            kinds[KINDS[16][int(headers["channels"][sample])]] -= 1
        headers = headers.copy()
        headers[list(deep)] = 0
    reasons |= too_large(headers, listing.keys, options, source)
    listing, of_size, notes = as_upright(listing, headers, options, source)
    undecided = undecided_masks(listing, headers) if options.source.boxes_of == "auto" else {}
    listing, reasons, more = with_boxes_inside(listing, headers, options, source, undecided | of_size | reasons)
    notes += more
    skipped = [*listing.skipped, *((listing.keys[i], reasons[i]) for i in sorted(reasons))]
    samples = np.delete(np.arange(len(listing)), sorted(reasons))
    if not len(samples) or (reasons and job.on_error == "fail"):
        raise SourceError(unreadable(job, skipped[-len(reasons) :], len(listing.keys)))
    encoded, masks = hasattr(listing.files, "encoded"), listing.masks is not None
    keys = [listing.keys[at] for at in samples]
    plan = plan_rows(headers[samples], keys, options, source, masks=masks, encoded=encoded)
    plan = replace(plan, mask_dtype=_mask_dtype(listing, large=kinds.pop(LARGE_MASKS, 0) > 0))
    _check_masks_and_coordinates(listing, options, source)
    moved = with_moved_coordinates(listing, headers, plan.target, plan.max_size)
    kept = ""
    if masks or has_coordinates(listing):
        alike = options.source.boxes_of == "stored"
        kept = (
            " (masks, boxes and points with them)" if alike else " (masks, boxes and points count as upright already)"
        )
    seen = {
        "several frames -> the first": kinds.pop("frames", 0),
        f"EXIF orientation -> upright{kept}": kinds.pop("turned", 0),
        "boxes that the crop cuts away whole -> no area": count_lost_boxes(listing, moved, samples),
        **source_exceptions(plan, samples, headers),
    }
    if options.max_size is not None:
        larger = np.minimum(headers["height"], headers["width"])[samples] > options.max_size
        seen[f"larger than --max-size {options.max_size} -> shrunk"] = int(larger.sum())
    converted = {name: count for name, count in (conversions(kinds, plan.channels, plan.dtype) | seen).items() if count}
    notes += notes_on_encoding(plan, samples, headers, listing.sizes, options)
    if plan.mask_dtype != np.uint8 and plan.option.kind != "keep":
        notes.append(advice("long"))
    if options.codec == "auto" and masks and plan.option.kind != "keep":
        mask_codec, why = _choose_mask_codec(listing, plan, samples, headers)
        plan = replace(plan, mask_codec=mask_codec)
        notes += [why] if why else []
    return Survey(
        moved, samples, options, converted, tuple(skipped), headers=headers, plan=plan, more_notes=tuple(notes)
    )


def _check_masks_and_coordinates(listing: Listing, options: PackOptions, source: str | Path) -> None:
    """Raises SourceError for a lack of masks that nothing stands for, and for boxes that cannot be resized."""
    masks = listing.masks
    if masks is not None and masks.ignore_index is None and not masks.present.all():
        lacking = [listing.keys[i] for i in np.flatnonzero(~masks.present).tolist()]
        raise SourceError(
            f"{source}: images have no mask ({len(lacking)}): {first_few(lacking)}. Add their masks, or leave all "
            f"masks out with `--masks none`."
        )
    unknown = [name for name, column in listing.columns.items() if column.attrs.get("coordinates") == "unknown"]
    option = "--size" if options.size else "--max-size" if options.max_size else ""
    if option and unknown:
        raise SourceError(
            f"{source}: `{option}` would leave {first_few(unknown)} behind: it is not known whether the numbers are "
            f"corners, or a corner and a size. Pack without it, or bring the images to their size beforehand."
        )


def _mask_dtype(listing: Listing, *, large: bool) -> np.dtype[Any]:
    """Returns uint8, or uint16 for masks that hold numbers above 255; `large`: headers showed such masks."""
    if (masks := listing.masks) is None:
        return np.dtype(np.uint8)
    known = masks.dtype or (masks.files.dtype if isinstance(masks.files, Arrays) else None)
    deep = large if known is None else known.itemsize > 1
    return np.dtype(np.uint16 if deep or (masks.ignore_index or 0) > 255 else np.uint8)


def _choose_mask_codec(
    listing: Listing, plan: RaggedPlan, samples: NDArray[np.int64], headers: NDArray[np.void]
) -> tuple[Codec, str]:
    """Returns the codec of masks for `--codec auto`, if it halves some 64 of them, and a note or "".

    Chunks of rows get gzip, which every HDF5 tool reads, unless zstd makes them much smaller. Rows of varying length,
    which are bytes to other tools, get zstd.
    """
    total = int(np.prod(row_sizes(plan, headers[samples]), axis=1).sum()) * plan.mask_dtype.itemsize
    if total < _WORTH_BYTES:
        return NONE, ""
    codecs = [_PLAIN_CODEC] if plan.masks == "rows" else []
    codecs += [parse_codec("zstd")] if has_zstd() else []
    if not codecs:
        return NONE, advice("zstandard for masks")
    assert listing.files is not None, "masks belong to images"
    encoder = RowEncoder(listing.files, listing.masks, plan)
    count = max(1, min(_TRIAL_MASKS, len(samples), _TRIAL_BYTES * len(samples) // total))
    before, after, chunk = 0, dict.fromkeys(codecs, 0), b""
    announce_samples(None, listing.masks, samples[np.arange(count) * len(samples) // count], heads=False)
    for at in range(count):
        sample = int(samples[at * len(samples) // count])
        with suppress(ImageError, OSError):  # Packing reports masks that cannot be read.
            chunk += bytes_of(encoder.mask(sample, headers[sample]))
        if chunk and (len(chunk) >= CODEC_CHUNK_BYTES or at == count - 1):
            before += len(chunk)
            for codec in codecs:
                after[codec] += len(codec.compress(chunk))
            chunk = b""
    plain, smallest = codecs[0], min(codecs, key=lambda codec: after[codec])
    most = _WORTH_PLAIN * after[smallest] + _WORTH_SHARE * before
    chosen = plain if after[plain] <= most else smallest
    share = {codec: f"{size / max(before, 1):.1%}" for codec, size in after.items()}
    if after[chosen] > before / 2:
        return NONE, f"Masks are stored as they are: {chosen} made {count} of them no smaller than {share[chosen]}."
    done = f"Masks are compressed with {chosen}: {count} of them came to {share[chosen]} of their size"
    if chosen.name == "gzip":
        faster = "" if has_zlib_ng() else f" {advice('zlib-ng')}"
        return chosen, f"{done}. Every HDF5 tool reads that.{faster}"
    if plan.masks == "ragged":
        return chosen, f"{done}. {advice('zstandard to read')}"
    return chosen, f"{done}, with {plain} to {share[plain]}. {advice('gzip for masks')}"


def read_headers(
    listing: Listing, pool: PackPool, progress: Progress | None, samples: NDArray[np.int64] | None = None
) -> Headers:
    """Returns the headers of these samples, by default all, read by the workers of the pool; others are zero."""
    samples = np.arange(len(listing)) if samples is None else samples
    headers = np.zeros(len(listing), HEADERS)
    if isinstance(images := listing.files, Arrays) and only_arrays(listing):
        masks = listing.masks and listing.masks.files
        if isinstance(masks, Arrays) and masks.shape != images.shape[:2]:
            raise SourceError(
                f"its masks are arrays of {masks.shape}, its images of {images.shape}: height and width must be the "
                f"same."
            )
        header = header_of_pixels(images.shape, images.dtype)
        headers[:] = (header.height, header.width, header.channels, header.bits, 0, 1)
        return Headers(headers, Counter({header.kind: len(listing)}), {})
    kinds: Counter[str] = Counter()
    reasons: dict[int, str] = {}
    done = 0
    blocks = (samples[start : start + _HEADER_BLOCK] for start in range(0, len(samples), _HEADER_BLOCK))
    for some, found in pool.run(Worker.probe, blocks):
        headers[some] = found.table
        kinds.update(found.kinds)
        reasons.update(found.reasons)
        done += len(some)
        if progress:
            progress("reading headers", done, len(samples))
    return Headers(headers, kinds, reasons)


def unreadable(job: PackJob, bad: list[tuple[str, str]], total: int) -> str:
    """Returns the message about images or masks that cannot be read, (key, reason) of each, the first few by name."""
    keys: dict[str, list[str]] = {}  # a reason is said once
    for key, reason in bad:
        keys.setdefault(reason, []).append(key)
    shown = "; ".join(f"{first_few(of, 3)}: {reason}" for reason, of in [*keys.items()][:5])
    untold = sum(map(len, [*keys.values()][5:]))
    more = f"; and {untold} more" if untold else ""
    sized = sum(reason.endswith(SAME_SHAPE) for _, reason in bad)
    which = "" if sized == len(bad) else f"{sized} of these "
    fix = f"`--mask-size image` resizes {which}masks to their images" if sized else "Repair or remove them"
    if job.listing.digests is not None:  # rows of packed files
        fix = "Copy the file or pack it again"
    left_out = ", or leave them out with `--on-error skip`" if job.on_error == "fail" else ": nothing else is left"
    if len(bad) == total and job.on_error == "fail":
        left_out = ""
        if not sized and all("`--" in reason for reason in keys):  # they say what to do
            fix = "This holds for every sample, so it is not the files that need a change"
        elif not sized:
            fix = "Repair them: every sample has this, so that none would be left without them"
    of_boxes = sum(REACHES_OUT in reason for _, reason in bad)
    if of_boxes:
        fix = "Say what becomes of such boxes, `--outside-boxes clip` (cut to the image) or `keep`, or correct them"
    of_masks = sum(reason.startswith("its mask") for _, reason in bad)
    what = "images or masks cannot be used" if of_masks else "images cannot be read"
    if of_masks == len(bad):
        what = "images do not have the size of their masks" if sized == len(bad) else "masks cannot be used"
    if of_boxes:
        what = "images have boxes that reach out of them" if of_boxes == len(bad) else "samples cannot be used"
    of_exif = sum(EITHER_WAY in reason or reason.endswith(BEFORE_EXIF) for _, reason in bad)
    if of_exif:
        fix = STORED_MASKS
        what = "masks may belong to the unturned images" if of_exif == len(bad) else "samples cannot be used"
    if of_sizes := [reason for _, reason in bad if DECLARED in reason]:
        fix = ways_out(of_sizes, job.options.source.boxes_of)
        what = "images have another size than declared" if len(of_sizes) == len(bad) else "samples cannot be used"
    return f"{job.source}: {len(bad)} of {total} {what}: {shown}{more}. {fix}{left_out}."
