"""Estimates for a dataset in each encoding on this machine: its size, and images/s from memory and disk.

`estimate_survey` takes a source that was surveyed, `estimate_file` a packed file; both return `EncodingEstimates` with
the encoding to pick. This module makes rows of some samples in every encoding, adds up sizes and rates of all
rows, and picks; `rates` measures how fast rows are decoded and the disk is read. Imports `pack`, `repack`, `read`,
`inspection` and below; never torch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.estimate.rates import DiskRate, Step, measure_disk, per_second, pixel_rate
from fastload.format.codecs import NONE, Codec, has_zstd, parse_codec
from fastload.format.header import PIXEL_FIELDS, PackedFile, open_hdf5, read_header, read_shard
from fastload.format.ragged import ENCODINGS, JPEG, RAW, EncodedRow
from fastload.options.pack import EncodingOption, Progress
from fastload.pack.decisions import Form, RaggedPlan, jpegs_kept_and_made, row_sizes
from fastload.pack.encode import HEADERS, RowEncoder
from fastload.pack.survey import Survey
from fastload.read.checked import close_readers
from fastload.read.reader import open_columns, open_rows
from fastload.read.row_table import index_part
from fastload.repack.packed_rows import rows_of
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.system.machine import available_cpus, available_memory
from fastload.system.text import counted, format_bytes
from fastload.system.threads import in_threads

__all__ = ["DiskRate", "EncodingEstimate", "EncodingEstimates", "estimate_file", "estimate_survey"]


AS_IT_IS = "as it is"
"""The name of a file's present encoding."""


FITS = 0.8
"""Fraction of the free memory that a file may fill to be read from there."""
CLOSE = 0.9
"""Encodings with at least this fraction of the best rate count as equally fast; then the smaller one is picked."""
WORTH_LOSS = 1.5
"""The least factor by which a lossy encoding must be faster than the best lossless one."""
_SAMPLE_S = 1.5
FEW = 8
"""Rates of fewer samples are not compared."""


@dataclass(frozen=True)
class KnownSizes:
    """The sizes of a file that exists, which are not estimated."""

    # images, masks: bytes of all their rows as stored; 0 without masks
    images: int
    masks: int
    # Of images in compressed chunks the HDF5 filters, and `samples -> images/s` measured from such chunks in memory
    chunked: tuple[str, Callable[[Sequence[int]], float]] | None = None


@dataclass(frozen=True)
class EncodingEstimate:
    """The size and speed of a dataset in one encoding."""

    store: str  # as `--store` takes it, "raw, zstd" for pixels that zstd compresses, or "as it is"
    bytes: int  # bytes of all images and masks; rows of varying length leave a few percent more free in their chunks
    warm_samples_per_s: float  # images a second from memory, decoded in full size by all CPUs, without transforms
    disk_samples_per_s: float | None  # images a second from the disk; None if its rate is not known
    encodings: dict[str, int]  # by "raw", "jpeg" or "zstd", the number of rows of the sample
    loses: bool  # images are encoded as JPEG again, which loses a little


@dataclass(frozen=True)
class EncodingEstimates:
    """The estimates of all encodings, and which one to pick."""

    stores: tuple[EncodingEstimate, ...]  # at least one; the present encoding of a file comes first
    raw_bytes: int  # bytes of all decoded images and masks
    pick: str  # name of one of them
    reason: str  # why it is picked, a sentence
    sampled: int  # number of samples made and timed
    failed: int  # number of samples that could not be read or decoded
    threads: int  # number of threads that decoded
    disk: DiskRate  # how fast the disk is read
    free_memory_bytes: int  # bytes that the page cache may fill

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return asdict(self) | {"disk": self.disk._asdict()}


@dataclass(frozen=True, eq=False)
class EncodingChoices:
    """A dataset, and the encodings that are compared for it."""

    encode: Encode  # makes the row of a sample
    samples: NDArray[np.int64]  # int64 (N,), its samples
    num_pixels: int  # pixels of all images together, decoded
    stores: Sequence[EncodingOption]  # the encodings; "mixed" needs "raw" and "jpeg" among them
    dtype: np.dtype[Any]  # of decoded images
    mask_dtype: np.dtype[Any]  # of their masks
    remade: bool = False  # "source" encodes some JPEGs again
    compressed: str = ""  # name of the codec of pixels, "" for none
    known: KnownSizes | None = None  # sizes of a file that exists; its masks stay as they are in every encoding


def estimate_encodings(
    dataset: EncodingChoices,
    folder: Path,
    *,
    room: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> EncodingEstimates | None:
    """Returns what a dataset would be in its encodings; None if no image of the sample can be decoded.

    Takes 1.5 s for making the sample, up to 1.4 s for the disk of `folder`, on which `room` bytes are free (None: that
    does not matter), and 0.25 s for each encoding.
    """
    threads = threads or available_cpus()
    known, count = dataset.known, len(dataset.samples)
    made = [option for option in dataset.stores if option.kind != "mixed"]
    found = take_sample(dataset.encode, made, dataset.samples, threads=threads, seconds=_SAMPLE_S, progress=progress)
    if not found.samples:
        return None
    row = found.rows[made[0]][0]
    mask_bytes = 0 if row.mask is None else dataset.mask_dtype.itemsize
    raw_bytes = dataset.num_pixels * (row.shape[2] * dataset.dtype.itemsize + mask_bytes)
    by_kind = {option.kind: rows for option, rows in found.rows.items()}
    own, made_jpegs = by_kind.get("keep", by_kind.get("source", [])), by_kind.get("jpeg", [])
    # Each sample as JPEG, its own if it has one that can be kept; none of images that no JPEG can hold.
    jpegs = [row if row.encoding == JPEG else new for row, new in zip(own or made_jpegs, made_jpegs, strict=False)]
    all_own = bool(own) and not dataset.remade and all(row.encoding == JPEG for row in own)
    loses = {"jpeg": True, "source": dataset.remade, "mixed": not all_own}
    sizes = {option: _size(option, found, jpegs, dataset) for option in dataset.stores}
    disk = measure_disk(folder, max(sizes.values()))

    def estimate(store: str, size: int, warm: float, encodings: dict[str, int], *, loses: bool) -> EncodingEstimate:
        over_disk = None if disk.bytes_per_s is None else min(warm, disk.bytes_per_s * count / size)
        return EncodingEstimate(store, size, warm, over_disk, encodings, loses)

    estimates = []
    if known is not None and known.chunked is not None:
        filters, per_s = known.chunked
        size, encodings = known.images + known.masks, {filters: len(found.samples)}
        estimates.append(estimate(AS_IT_IS, size, per_s(found.samples), encodings, loses=False))
    for option in dataset.stores:
        rows = found.rows.get(option)
        if rows is None:
            pairs, share = zip(found.rows[_RAW], jpegs, strict=True), option.fraction
            rows = [coded if int((at + 1) * share) > int(at * share) else raw for at, (raw, coded) in enumerate(pairs)]
        encodings = {name: sum(row.encoding == code for row in rows) for code, name in enumerate(ENCODINGS)}
        encodings = {name: number for name, number in encodings.items() if number}
        warm = pixel_rate(rows, dataset.dtype, dataset.mask_dtype, threads=threads) * count / dataset.num_pixels
        name = AS_IT_IS if option.kind == "keep" else str(option)
        if option.kind == "raw" and dataset.compressed:
            name = f"{name}, {dataset.compressed}"
        estimates.append(estimate(name, sizes[option], warm, encodings, loses=loses.get(option.kind, False)))
    memory = available_memory()
    pick, reason = pick_encoding(estimates, sampled=len(found.samples), free_memory=memory, room=room)
    return EncodingEstimates(
        tuple(estimates), raw_bytes, pick, reason, len(found.samples), found.failed, threads, disk, memory
    )


_RAW = EncodingOption("raw")


def encodings_of(plan: RaggedPlan, *, source: bool) -> list[EncodingOption]:
    """Returns the encodings possible for images of a plan, with the quality and fraction of its option.

    "source" is among them if files have bytes that can be kept.
    """
    if plan.dtype != np.uint8 or plan.channels == 4:  # A JPEG cannot hold them.
        return [_RAW]
    quality, fraction = plan.option.quality, plan.option.fraction or 0.5
    own = [EncodingOption("source", quality)] if source else []
    return [_RAW, EncodingOption("jpeg", quality), *own, EncodingOption("mixed", quality, fraction)]


def _size(option: EncodingOption, found: Sampled, jpegs: list[EncodedRow], dataset: EncodingChoices) -> int:
    """Returns the bytes of all rows in an encoding: known from a file, or estimated from the sample."""
    known = dataset.known
    if known is not None and option.kind == "keep":
        return known.images + known.masks

    def sampled(rows: Sequence[EncodedRow]) -> int:
        return sum(len(row.image) if known is not None else row_bytes(row) for row in rows)

    scale = dataset.num_pixels / sum(row.shape[0] * row.shape[1] for row in next(iter(found.rows.values())))
    if option.kind == "mixed":
        size = (1 - option.fraction) * sampled(found.rows[_RAW]) + option.fraction * sampled(jpegs)
    else:
        size = float(sampled(found.rows[option]))
    return round(scale * size) + (known.masks if known is not None else 0)


def pick_encoding(
    stores: Sequence[EncodingEstimate], *, sampled: int, free_memory: int, room: int | None
) -> tuple[str, str]:
    """Returns the encoding expected to be read fastest, and a sentence that says why.

    A file that fits in memory is read from the disk once, then at the rate of memory; a larger one at the rate of the
    disk. From few samples the first encoding, the present one of a file or raw, is picked if it fits, as their rates
    say nothing. `room` is free on the disk, in bytes; None: the file exists already.
    """
    possible = [store for store in stores if room is None or store.bytes <= room]
    possible = possible or [min(stores, key=lambda store: store.bytes)]
    fitting = [store for store in possible if store.bytes <= FITS * free_memory]
    memory = f"the {format_bytes(free_memory)} of free memory"
    if sampled < FEW and stores[0] in fitting:
        return stores[0].store, (
            f"{stores[0].store}: its {format_bytes(stores[0].bytes)} fit in {memory}; rates of "
            f"{counted(sampled, 'image')} are too uncertain to compare."
        )
    known = [store for store in possible if store in fitting or store.disk_samples_per_s is not None]
    if not known:
        chosen = min(possible, key=lambda store: (store.loses, store.bytes))
        return chosen.store, (
            f"{chosen.store}: nothing fits in {memory}, and it is not known how "
            f"fast this disk is read; of what loses nothing it is the smallest, {format_bytes(chosen.bytes)}."
        )
    rates = {
        store.store: store.warm_samples_per_s if store in fitting else store.disk_samples_per_s or 0.0
        for store in known
    }
    lossless = max((rates[store.store] for store in known if not store.loses), default=0.0)
    worth = [store for store in known if not store.loses or rates[store.store] >= WORTH_LOSS * lossless]
    best = max(rates[store.store] for store in worth)
    close = [store for store in worth if rates[store.store] >= CLOSE * best]
    # From memory all are fast: the first is the simplest, and only takes room that is there.
    chosen = min(
        close, key=lambda store: (store not in fitting, stores.index(store) if store in fitting else store.bytes)
    )
    second = max((store for store in known if store is not chosen), key=lambda store: rates[store.store], default=None)
    size, rate = format_bytes(chosen.bytes), f"{rates[chosen.store]:,.0f} images/s"
    if second is not None:
        where = "from memory" if second in fitting else "over this disk"
        rate += f" ({second.store} {rates[second.store]:,.0f} {where})"
    if chosen in fitting:
        reason = f"{chosen.store}: its {size} fit in {memory}, and from there come {rate}."
    else:
        loss = "; making JPEGs loses a little" if chosen.loses else ""
        reason = f"{chosen.store}: its {size} do not fit in {memory}, and over this disk come {rate}{loss}."
    left_out = [f"{store.store} ({format_bytes(store.bytes)})" for store in stores if store not in possible]
    if left_out and room is not None:
        reason += f" No room on the disk, where {format_bytes(room)} are free, for {', '.join(left_out)}."
    return chosen.store, reason


SAMPLES = 64
MOST_BYTES = 256 * 2**20
"""Limit for the rows in memory, not counting those being made."""
MOST_THREADS = 8
"""Limit for threads that make rows: each may hold an image of half a gigabyte."""

_GOLDEN = (5**0.5 - 1) / 2


Encode = Callable[[int, EncodingOption], EncodedRow]
"""Makes the row of a sample in an encoding; raises ImageError or OSError if it cannot be read or decoded."""


def row_maker(
    images: Files | Pictures | Arrays, masks: Masks | None, headers: NDArray[np.void], plan: RaggedPlan
) -> Encode:
    """Returns an `Encode` that makes rows of a listing's samples as the packer does, in any encoding.

    Threads may share it: each gets encoders of its own. `headers` is HEADERS (N,) of all samples.
    """
    own = threading.local()

    def encode(sample: int, option: EncodingOption) -> EncodedRow:
        encoders: dict[str, RowEncoder] = own.__dict__
        name = str(option)
        if name not in encoders:
            encoders[name] = RowEncoder(images, masks, replace(plan, option=option))
        return encoders[name].encode(sample, headers[sample])

    return encode


@dataclass(frozen=True, eq=False)
class Sampled:
    """Some samples in every encoding."""

    samples: list[int]  # numbers of the samples
    rows: dict[EncodingOption, list[EncodedRow]]  # option -> a row of each sample
    failed: int  # number of samples that could not be read or decoded


def take_sample(
    encode: Encode,
    options: Sequence[EncodingOption],
    samples: NDArray[np.int64],
    *,
    threads: int,
    seconds: float,
    progress: Progress | None = None,
) -> Sampled:
    """Makes rows of SAMPLES samples, or of as many as time and MOST_BYTES allow, at least one for each thread.

    At most MOST_THREADS call `encode`. `samples` int64 (n,) are those to choose from; none is begun after `seconds`.
    """
    threads = min(threads, MOST_THREADS)
    total, num_bytes, failed = min(SAMPLES, len(samples)), 0, 0
    found: dict[int, list[EncodedRow]] = {}
    end = time.perf_counter() + seconds

    def chosen_samples() -> Iterator[int]:
        for begun, at in enumerate(spread(len(samples), total)):
            if begun >= threads and (time.perf_counter() > end or num_bytes > MOST_BYTES):
                return
            yield int(samples[at])

    def flat(row: EncodedRow) -> EncodedRow:
        """Returns the row with its bytes in one dimension, as they come from a file."""
        mask = None if row.mask is None else memoryview(row.mask).cast("B")
        return replace(row, image=memoryview(row.image).cast("B"), mask=mask)

    def work(sample: int) -> tuple[int, list[EncodedRow] | None]:
        try:
            return sample, [flat(encode(sample, option)) for option in options]
        except (ImageError, OSError):  # Packing names it, here it is only counted.
            return sample, None

    for sample, rows in in_threads(work, chosen_samples(), threads):
        if rows is None:
            failed += 1
        else:
            found[sample] = rows
            num_bytes += sum(map(row_bytes, rows))
        if progress:
            progress("measuring stores", len(found) + failed, total)
    chosen = sorted(found)
    return Sampled(chosen, {option: [found[i][at] for i in chosen] for at, option in enumerate(options)}, failed)


def row_bytes(row: EncodedRow) -> int:
    return len(row.image) + (0 if row.mask is None else len(row.mask))


def spread(count: int, wanted: int) -> list[int]:
    """Returns so many different numbers below count, in an order in which the first k are spread evenly for any k.

    Multiples of the golden ratio without their whole part: each falls into one of the largest gaps left.
    """
    fractions: Any = np.arange(1, 4 * wanted + 1) * _GOLDEN % 1
    return list(dict.fromkeys((fractions * count).astype(np.int64).tolist()))[:wanted]


_READ_SECONDS = 0.25


def estimate_survey(
    survey: Survey, folder: Path, *, threads: int | None = None, progress: Progress | None = None
) -> EncodingEstimates | None:
    """Returns what a surveyed source would be in each encoding; takes about 5 seconds.

    Pixels count without gzip, which compresses chunks of several rows; masks as with zstd, row by row, if they are
    compressed at all.

    The disk of the output's folder is measured with a temporary file. One thread for each CPU decodes by default.

    Returns:
        None for a dataset without images, and if no image of the sample can be decoded.
    """
    listing, headers = survey.listing, survey.headers
    if listing.files is None or headers is None or survey.plan is None:
        return None
    plan = survey.plan
    masks: Form | None = None if listing.masks is None else "ragged"
    # Rows of varying length, each encoded by itself.
    image_codec = NONE if plan.image_codec.name == "gzip" else plan.image_codec
    mask_codec = _codec_by_row(compressed=True) if plan.mask_codec.name == "gzip" else plan.mask_codec
    plan = replace(plan, images="ragged", masks=masks, image_codec=image_codec, mask_codec=mask_codec)
    sizes = row_sizes(plan, headers)[survey.samples]
    own, made = jpegs_kept_and_made(
        replace(plan, option=EncodingOption("source")), survey.samples, headers[survey.samples]
    )
    dataset = EncodingChoices(
        row_maker(listing.files, listing.masks, headers, plan),
        survey.samples,
        int(sizes.prod(axis=1).sum()),
        encodings_of(plan, source=survey.options.size is None and bool(np.any(own))),
        plan.dtype,
        plan.mask_dtype,
        remade=bool(np.any(made)),
        compressed="" if plan.image_codec == NONE else plan.image_codec.name,
    )
    room = survey.disk_free if survey.disk_free >= 0 else None
    return estimate_encodings(dataset, folder, room=room, threads=threads, progress=progress)


def estimate_file(
    path: str | Path, *, threads: int | None = None, progress: Progress | None = None
) -> EncodingEstimates | None:
    """Returns what a file has in its present encoding, and would have in each other; takes about 5 seconds.

    Its present sizes are read, not estimated; masks stay as they are stored. The disk is measured with a temporary file
    in the same folder; the file itself is not dropped from memory.

    Returns:
        None if the file holds no images.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read as a packed one.
    """
    file = read_header(path)
    if "images" not in file.fields:
        return None
    images, masks = rows_of(file, "images"), None
    if "masks" in file.fields:
        masks = Masks(rows_of(file, "masks"), np.ones(file.num_rows, np.bool_))
    kept = False  # whether any image is stored other than as raw pixels
    if isinstance(images, Arrays):
        shapes = np.tile(np.array([*images.shape, 1][:3], np.int32), (file.num_rows, 1))
    else:
        with open_columns(file) as hdf5:
            shapes, kept = hdf5["images_shape"][()], bool((hdf5["images_encoding"][()] != RAW).any())
    dtype = np.dtype(file.fields["images"].dtype.newbyteorder("="))
    headers = np.zeros(file.num_rows, HEADERS)
    headers["height"], headers["width"], headers["channels"] = shapes.T
    headers["bits"] = 8 * dtype.itemsize
    threads = threads or available_cpus()
    known, small_masks = _known_sizes(file, threads)
    form: Form | None = "ragged" if masks else None
    plan = RaggedPlan(
        int(shapes[0, 2]),
        dtype,
        EncodingOption(),
        None,
        None,
        "ragged",
        form,
        mask_codec=_codec_by_row(compressed=small_masks),
    )
    if masks is not None:
        plan = replace(plan, mask_dtype=file.fields["masks"].dtype.newbyteorder("="))
    others = encodings_of(plan, source=False)
    dataset = EncodingChoices(
        row_maker(images, masks, headers, plan),
        np.arange(file.num_rows),
        int(shapes[:, :2].astype(np.int64).prod(axis=1).sum()),
        [EncodingOption("keep"), *others] if kept else others,
        dtype,
        plan.mask_dtype,
        known=known,
    )
    try:
        return estimate_encodings(dataset, file.path.absolute().parent, threads=threads, progress=progress)
    finally:
        close_readers()


def _codec_by_row(*, compressed: bool) -> Codec:
    """Returns the codec of masks in rows of varying length that are compressed, or not."""
    return parse_codec("zstd") if compressed and has_zstd() else NONE


def _known_sizes(file: PackedFile, threads: int) -> tuple[KnownSizes, bool]:
    """Returns the sizes of a file's datasets, and whether its masks are compressed."""
    num_bytes, small = dict.fromkeys(PIXEL_FIELDS, 0), False
    with open_columns(file) as hdf5:
        for name in file.fields.keys() & num_bytes:
            filtered = bool(file.fields[name].filters)
            stored = index_part(hdf5, file, name, "bytes").sum()
            num_bytes[name] = _bytes_on_disk(file, name) if filtered else int(stored)
            compressed = filtered or bool((index_part(hdf5, file, name, "encoding") != RAW).any())
            small |= name == "masks" and compressed
    filters = ", ".join(file.fields["images"].filters)
    chunked = (filters, lambda samples: _chunks_per_s(file, samples, threads)) if filters else None
    return KnownSizes(num_bytes["images"], num_bytes["masks"], chunked), small


def _bytes_on_disk(file: PackedFile, name: str) -> int:
    """Returns the bytes of a field's chunks as they are compressed, of all shards."""
    total = 0
    for number in range(len(file.shards.names)):
        with open_hdf5(read_shard(file, number).path) as hdf5:
            total += hdf5[name].id.get_storage_size()
    return total


def _chunks_per_s(file: PackedFile, samples: Sequence[int], threads: int) -> float:
    """Measures images a second, with masks, from compressed chunks in memory; each image decompresses its chunk."""
    fields = [file.fields[name] for name in PIXEL_FIELDS if name in file.fields]
    order = [samples[at] for at in spread(len(samples), len(samples))]

    def make() -> Step:
        outs = {field.name: field.empty(1) for field in fields}

        def step(number: int) -> int:
            reader.gather(np.array([order[number % len(order)]]), outs)
            return 1

        return step

    with closing(open_rows(file, [field.name for field in fields], "pread", cache_chunks=1)) as reader:
        warm_up = make()
        for number in range(len(order)):  # Brings them into memory.
            warm_up(number)
        return per_second(make, sys.maxsize, threads, _READ_SECONDS)
