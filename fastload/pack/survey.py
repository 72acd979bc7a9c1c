"""What will be packed: the listing, the headers of all images, and what each image becomes."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import Target
from fastload.errors import OptionError, OutputError, SourceError
from fastload.layout import CHUNK_BYTES, PixelSpec, chunk_rows_for
from fastload.pack.chunk_work import HEADERS, Worker, array_header
from fastload.pack.moved import move_columns
from fastload.pack.workers import WorkerPool
from fastload.plan import permute
from fastload.sources import list_source
from fastload.sources.listing import Arrays, Listing, first_few
from fastload.sources.options import SourceOptions
from fastload.sources.tree import Tree

Fit = Literal["crop", "pad", "stretch"]
Mode = Literal["rgb", "gray", "rgba"]
Bits = Literal[8, 16]
OnError = Literal["fail", "skip"]
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

_CHANNELS = {"gray": 1, "rgb": 3, "rgba": 4}
_MODES = {1: "gray", 3: "RGB", 4: "RGBA"}
_OWN_KINDS = {
    1: {1: {"L"}, 3: {"RGB"}, 4: {"RGBA"}},
    2: {1: {"I;16"}, 3: {"RGB;16"}, 4: {"RGBA;16"}},
}
"""By bytes a value and channels, the kinds that the file holds as they are."""
_HEADER_BLOCK = 512


@dataclass(frozen=True)
class PackOptions:
    """The options that shape a packed file's bytes; the attribute `pack_options` holds them as JSON."""

    size: tuple[int, int] | None = None
    fit: Fit = "crop"
    mode: Mode | None = None
    seed: int = 0
    shuffle: bool = True
    chunk_bytes: int = CHUNK_BYTES
    limit: int | None = None
    source: SourceOptions = field(default_factory=SourceOptions)
    bits: Bits | None = None

    def __post_init__(self) -> None:
        _check_choice("fit", self.fit, get_args(Fit))
        if self.mode is not None:
            _check_choice("mode", self.mode, get_args(Mode))
        if self.bits not in (None, *get_args(Bits)):
            raise OptionError(f"bits={self.bits!r} is not known; accepted: 8, 16.")
        sides = [1, 1] if self.size is None else list(self.size)
        if len(sides) != 2 or min(sides) < 1:
            raise OptionError(f"size={self.size}: needs a height and a width of at least 1, such as 224 or 218x178.")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed={self.seed}: needs 0 <= seed < 2**63.")
        if self.chunk_bytes < 1:
            raise OptionError(f"chunk_bytes={self.chunk_bytes}: needs at least 1; 8 MiB is a good choice.")
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"limit={self.limit}: needs at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; bits, and what is said of the source, only where something is said."""
        told = {**vars(self), "size": list(self.size) if self.size else None, "source": self.source.to_dict()}
        unsaid = {name for name in ("source", "bits") if not told[name]}  # neither was there in older files
        return {name: value for name, value in told.items() if name not in unsaid}


@dataclass(frozen=True)
class Survey:
    """What packing would do, known before a pixel is decoded.

    Attributes:
        listing: every sample found, its places in the image moved as its pixels will be.
        samples: int64, those to pack: all but the ones whose header cannot be read.
        options: what shapes the bytes.
        target: what each image becomes; None for a dataset without images.
        sizes: (height, width) -> number of images, commonest first.
        converted: how many images are changed in kind, by a description such as "gray -> RGB".
        skipped: (key, reason) of each sample left out so far.
        disk_free: bytes free where the output goes; -1 when no output was named.
        frames: int32 (N, 2), height and width of each image as it was found, where places in it had to be moved.
    """

    listing: Listing
    samples: NDArray[np.int64]
    options: PackOptions
    target: Target | None
    sizes: dict[tuple[int, int], int]
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    disk_free: int = -1
    frames: NDArray[np.int32] | None = None

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
        return self.listing.notes

    @property
    def chunk_rows(self) -> int:
        """Images a chunk holds; 0 without images."""
        pixels = self.pixels(self.num_samples)
        return pixels["images"].chunk_rows if pixels else 0

    def pixels(self, num_rows: int) -> dict[str, PixelSpec]:
        """The pixel datasets of a file of so many of these rows."""
        if self.target is None:
            return {}
        target, chunk_bytes = self.target, self.options.chunk_bytes
        specs = {"images": PixelSpec((target.height, target.width, target.channels), target.dtype, 0)}
        if (masks := self.listing.masks) is not None:
            attrs = {**masks.attrs, "names": masks.names} if masks.names else dict(masks.attrs)
            if masks.ignore_index is not None:
                attrs["ignore_index"] = masks.ignore_index
            specs["masks"] = PixelSpec((target.height, target.width), np.dtype(np.uint8), 0, attrs)
        return {
            name: replace(spec, chunk_rows=chunk_rows_for(spec.row_bytes, num_rows, chunk_bytes))
            for name, spec in specs.items()
        }

    @property
    def bytes_needed(self) -> int:
        """Bytes of all pixel chunks, the last ones whole."""
        return sum(
            -(-self.num_samples // spec.chunk_rows) * spec.chunk_rows * spec.row_bytes
            for spec in self.pixels(self.num_samples).values()
        )


def list_samples(source: str | Path | Tree, layout: str | None, options: PackOptions, on_error: OnError) -> Listing:
    """The samples of a source, reduced to `limit` of them spread evenly over the listing."""
    _check_choice("on_error", on_error, get_args(OnError))
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
        SourceError: images that cannot be read (unless on_error is "skip"), of several sizes without `size`, or of
            kinds that cannot share one dataset.
    """
    if listing.files is None:
        return _survey_without_images(listing, options, source)
    headers, kinds, reasons = read_headers(listing, pool, progress)
    skipped = [*listing.skipped, *((listing.keys[i], reasons[i]) for i in sorted(reasons))]
    if reasons and on_error == "fail":
        raise SourceError(unreadable(source, skipped[-len(reasons) :], len(listing.keys)))
    samples = all_but(len(listing), reasons)
    if not len(samples):
        raise SourceError(unreadable(source, skipped[-len(reasons) :], len(listing.keys)))
    headers = headers[samples]
    frames = kinds.pop("frames", 0)
    channels, dtype = _channels(source, headers, options.mode, options.bits)
    # One number a size: sorting those is much faster than sorting pairs.
    found, counts = np.unique(headers["height"].astype(np.int64) << 32 | headers["width"], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    sizes = {(int(found[i] >> 32), int(found[i] & 0xFFFFFFFF)): int(counts[i]) for i in order}
    if options.size is None and len(sizes) > 1:
        raise SourceError(_several_sizes(source, sizes))
    height, width = options.size or next(iter(sizes))
    fit = options.fit if options.size else None
    target = Target(height=height, width=width, channels=channels, dtype=dtype, fit=fit)
    converted = _conversions(kinds, channels, dtype)
    if frames:
        converted["several frames -> the first"] = frames
    before = None
    if fit and any(column.moves for column in listing.columns.values()):
        before = np.zeros((len(listing), 2), np.int32)
        before[samples] = np.stack([headers["height"], headers["width"]], 1)
        listing = move_columns(listing, before, target)
    _check_masks(listing, source)
    return Survey(listing, samples, options, target, sizes, converted, tuple(skipped), frames=before)


def all_but(total: int, left_out: Iterable[int]) -> NDArray[np.int64]:
    """The numbers below total without those left out, ascending."""
    keep = np.ones(total, np.bool_)
    keep[np.fromiter(left_out, np.int64)] = False
    return np.flatnonzero(keep).astype(np.int64)


def _survey_without_images(listing: Listing, options: PackOptions, source: str | Path) -> Survey:
    for name in ("size", "mode", "bits"):
        if getattr(options, name) is not None:
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


def read_headers(
    listing: Listing, pool: WorkerPool, progress: Progress | None
) -> tuple[NDArray[np.void], Counter[str], dict[int, str]]:
    """HEADERS (N,) of all samples, how many there are of each kind, and sample -> why one could not be read."""
    total = len(listing.keys)
    headers = np.zeros(total, HEADERS)
    kinds: Counter[str] = Counter()
    reasons: dict[int, str] = {}
    if isinstance(listing.files, Arrays) and (listing.masks is None or isinstance(listing.masks.files, Arrays)):
        return _headers_of_arrays(listing, listing.files)
    done = 0
    for block in pool.run(Worker.probe, _blocks(total)):
        headers[block.samples] = block.headers
        kinds.update(block.kinds)
        reasons.update(block.reasons)
        done += len(block.samples)
        if progress:
            progress("reading headers", done, total)
    return headers, kinds, reasons


def _headers_of_arrays(listing: Listing, images: Arrays) -> tuple[NDArray[np.void], Counter[str], dict[int, str]]:
    header = array_header(images)
    if (
        listing.masks is not None
        and isinstance(listing.masks.files, Arrays)
        and listing.masks.files.shape != images.shape[:2]
    ):
        raise SourceError(
            f"its masks are arrays of {listing.masks.files.shape}, its images of {images.shape}: height and width must "
            f"be the same."
        )
    headers = np.zeros(len(listing), HEADERS)
    headers[:] = (header.height, header.width, header.channels, header.bits)
    return headers, Counter({header.kind: len(listing)}), {}


def _blocks(total: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, total, _HEADER_BLOCK):
        yield np.arange(start, min(total, start + _HEADER_BLOCK))


def _channels(
    source: str | Path, headers: NDArray[np.void], mode: Mode | None, bits: Bits | None
) -> tuple[int, np.dtype[Any]]:
    """Channels and dtype that all images share: `mode` says the channels, `bits` the depth."""
    dtype = _depth(source, headers, bits)
    if mode is not None:
        return _CHANNELS[mode], dtype
    total, alpha = len(headers), int(np.sum(headers["channels"] == 4))
    if alpha and alpha < total:
        raise SourceError(
            f"{source}: {alpha} of {total} images have an alpha channel. Say what all shall become: `--mode rgb` drops "
            f"alpha, `--mode rgba` makes the others opaque."
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
            f"{source}: {deep} of {total} images have 16 bits a channel, the others 8. Say that all shall have 8: "
            f"`--bits 8` keeps the high byte of the 16-bit ones."
        )
    return np.dtype(np.uint16 if deep else np.uint8)


def _conversions(kinds: Counter[str], channels: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """How many images of each other kind become what the file holds."""
    goal = f"{_MODES[channels]} of {dtype.itemsize * 8} bits"
    own = _OWN_KINDS[dtype.itemsize][channels]
    return {f"{kind} -> {goal}": count for kind, count in sorted(kinds.items()) if count and kind not in own}


def _several_sizes(source: str | Path, sizes: dict[tuple[int, int], int]) -> str:
    shown = ", ".join(f"{h}x{w} ({n})" for (h, w), n in list(sizes.items())[:6])
    more = f", and {len(sizes) - 6} more" if len(sizes) > 6 else ""
    short_side = np.median(np.repeat([min(size) for size in sizes], list(sizes.values())))
    good = max([s for s in (32, 64, 96, 128, 160, 192, 224, 256) if s <= short_side], default=32)
    return (
        f"{source}: images of {len(sizes)} sizes (height x width): {shown}{more}. A packed file holds one size; choose "
        f"it, for example: `fastload pack {source} OUT.h5 --size {good}` (--fit crop | pad | stretch)."
    )


def _check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}.")
