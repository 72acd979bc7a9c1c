"""Size and speed of each encoding, from a sample of rows in all of them, and which one to pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.estimate.rates import DiskRate, measure_disk, pixel_rate
from fastload.estimate.sample import Encode, Sampled, row_bytes, take_sample
from fastload.format.ragged import ENCODINGS, JPEG, EncodedRow
from fastload.options.pack import EncodingOption, Progress
from fastload.pack.decisions import RaggedPlan
from fastload.system.machine import available_cpus, available_memory
from fastload.system.text import counted, format_bytes

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
