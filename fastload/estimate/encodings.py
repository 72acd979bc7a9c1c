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
from fastload.pack.decisions import RaggedPlan
from fastload.pack.pack_options import EncodingOption, Progress
from fastload.system.machine import available_cpus, available_memory
from fastload.system.text import format_bytes

AS_IT_IS = "as it is"
"""The name of a file's present encoding."""


FITS = 0.8
"""Fraction of the free memory that a file may fill to be read from there."""
CLOSE = 0.9
"""Encodings with at least this fraction of the best rate count as equally fast; then the smaller one is picked."""
WORTH_LOSS = 1.5
"""How many times faster a lossy encoding must be than the best lossless one."""
FEW = 8
"""Rates of fewer samples are not compared."""


@dataclass(frozen=True)
class KnownSizes:
    """The sizes of a file that exists, which are not estimated.

    Attributes:
        images, masks: bytes of all their rows as stored; 0 without masks.
        filters: names of the HDF5 filters of images in chunks; () if chunks are not compressed.
        chunked_per_s: `samples -> images/s`, measured from such chunks in memory.
    """

    images: int
    masks: int
    filters: tuple[str, ...] = ()
    chunked_per_s: Callable[[Sequence[int]], float] | None = None


@dataclass(frozen=True)
class EncodingEstimate:
    """The size and speed of a dataset in one encoding.

    Attributes:
        store: as `--store` takes it, "raw, zstd" for pixels that zstd compresses, or "as it is".
        bytes: bytes of all images and masks; rows of varying length leave a few percent more free in their chunks.
        warm_per_s: images a second from memory, decoded in full size by all CPUs, without transforms.
        disk_per_s: images a second from the disk; None if its rate is not known.
        encodings: "raw", "jpeg" or "zstd" -> number of rows of the sample.
        loses: images are encoded as JPEG again, which loses a little.
    """

    store: str
    bytes: int
    warm_per_s: float
    disk_per_s: float | None
    encodings: dict[str, int]
    loses: bool


@dataclass(frozen=True)
class EncodingEstimates:
    """The estimates of all encodings, and which one to pick.

    Attributes:
        stores: at least one; the present encoding of a file comes first.
        raw_bytes: bytes of all decoded images and masks.
        pick: name of one of them.
        reason: why it is picked, a sentence.
        sampled: number of samples made and timed.
        failed: number of samples that could not be read or decoded.
        threads: number of threads that decoded.
        disk: how fast the disk is read.
        free_memory: bytes that the page cache may fill.
    """

    stores: tuple[EncodingEstimate, ...]
    raw_bytes: int
    pick: str
    reason: str
    sampled: int
    failed: int
    threads: int
    disk: DiskRate
    free_memory: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return asdict(self) | {"disk": {"bytes_per_s": self.disk.bytes_per_s, "told": self.disk.note}}


@dataclass(frozen=True, eq=False)
class EncodingChoices:
    """A dataset, and the encodings that are compared for it.

    Attributes:
        encode: makes the row of a sample.
        samples: int64 (N,), its samples.
        num_pixels: pixels of all images together, decoded.
        stores: the encodings; "mixed" needs "raw" and "jpeg" among them.
        dtype: of decoded images.
        remade: "source" encodes some JPEGs again.
        compressed: name of the codec of pixels, "" for none.
        known: sizes of a file that exists; its masks stay as they are in every encoding.
    """

    encode: Encode
    samples: NDArray[np.int64]
    num_pixels: int
    stores: Sequence[EncodingOption]
    dtype: np.dtype[Any]
    remade: bool = False
    compressed: str = ""
    known: KnownSizes | None = None


def estimate_encodings(
    dataset: EncodingChoices,
    folder: Path,
    *,
    room: int | None = None,
    threads: int | None = None,
    seconds: float = 1.5,
    progress: Progress | None = None,
) -> EncodingEstimates | None:
    """Returns what a dataset would be in its encodings.

    Args:
        dataset: its samples, and the encodings.
        folder: folder on the disk to measure.
        room: bytes free on the disk; None: does not matter.
        threads: number of threads that decode, by default one for each CPU.
        seconds: time for making the sample; measuring takes up to 1.4 s more for the disk, and 0.25 s for each
            encoding.
        progress: called with (stage, done, total).

    Returns:
        None if no image of the sample can be decoded.
    """
    threads = threads or available_cpus()
    stores, known, count = dataset.stores, dataset.known, len(dataset.samples)
    made = [option for option in stores if option.kind != "mixed"]
    found = take_sample(dataset.encode, made, dataset.samples, threads=threads, seconds=seconds, progress=progress)
    if not found.samples:
        return None
    scale = dataset.num_pixels / sum(row.shape[0] * row.shape[1] for row in found.rows[made[0]])
    sizes = {option: _size(option, found, scale, known) for option in stores}
    first = found.rows[made[0]][0]
    raw_bytes = dataset.num_pixels * (first.shape[2] * dataset.dtype.itemsize + (first.mask is not None))
    disk = measure_disk(folder, max(sizes.values()))

    def estimate(store: str, size: int, warm: float, encodings: dict[str, int], *, loses: bool) -> EncodingEstimate:
        over_disk = None if disk.bytes_per_s is None else min(warm, disk.bytes_per_s * count / size)
        return EncodingEstimate(store, size, warm, over_disk, encodings, loses)

    estimates = []
    if known is not None and known.chunked_per_s is not None:
        encodings = {", ".join(known.filters) or "raw": len(found.samples)}
        warm = known.chunked_per_s(found.samples)
        estimates.append(estimate(AS_IT_IS, known.images + known.masks, warm, encodings, loses=False))
    for option in stores:
        rows = _rows(option, found)
        encodings = {name: sum(row.encoding == code for row in rows) for code, name in enumerate(ENCODINGS)}
        warm = pixel_rate(rows, dataset.dtype, threads=threads) * count / dataset.num_pixels
        estimates.append(
            estimate(
                _name(option, dataset.compressed),
                sizes[option],
                warm,
                {name: number for name, number in encodings.items() if number},
                loses=_loses(option, found, remade=dataset.remade),
            )
        )
    memory = available_memory()
    pick, reason = pick_encoding(estimates, sampled=len(found.samples), free_memory=memory, room=room)
    return EncodingEstimates(
        tuple(estimates), raw_bytes, pick, reason, len(found.samples), found.failed, threads, disk, memory
    )


def encodings_of(plan: RaggedPlan, *, source: bool) -> list[EncodingOption]:
    """Returns the encodings possible for images of a plan, with the quality and fraction of its option.

    Args:
        source: files have bytes that can be kept.
    """
    raw = EncodingOption("raw")
    if plan.dtype != np.uint8 or plan.channels == 4:  # A JPEG cannot hold them.
        return [raw]
    quality = plan.option.quality
    own = [EncodingOption("source", quality)] if source else []
    fraction = plan.option.fraction or 0.5
    return [raw, EncodingOption("jpeg", quality), *own, EncodingOption("mixed", quality, fraction)]


def _rows(option: EncodingOption, found: Sampled) -> list[EncodedRow]:
    if option.kind != "mixed":
        return found.rows[option]
    pairs = zip(found.rows[EncodingOption("raw")], _jpegs(found), strict=True)
    share = option.fraction
    return [coded if int((at + 1) * share) > int(at * share) else raw for at, (raw, coded) in enumerate(pairs)]


def _jpegs(found: Sampled) -> list[EncodedRow]:
    """Returns each sample as JPEG, its own if it has one that can be kept."""
    by_kind = {option.kind: rows for option, rows in found.rows.items()}
    own = by_kind.get("keep", by_kind.get("source", by_kind["jpeg"]))
    return [mine if mine.encoding == JPEG else made for mine, made in zip(own, by_kind["jpeg"], strict=True)]


def _name(option: EncodingOption, compressed: str) -> str:
    if option.kind == "keep":
        return AS_IT_IS
    return f"{option}, {compressed}" if compressed and option.kind == "raw" else str(option)


def _size(option: EncodingOption, found: Sampled, scale: float, known: KnownSizes | None) -> int:
    """Returns the bytes of all rows in an encoding: known from a file, or estimated from the sample."""
    if known is None:
        return round(scale * _sample_bytes(option, found, row_bytes))
    if option.kind == "keep":
        return known.images + known.masks
    return round(scale * _sample_bytes(option, found, lambda row: len(row.image))) + known.masks


def _sample_bytes(option: EncodingOption, found: Sampled, of_row: Callable[[EncodedRow], int]) -> float:
    """Returns the bytes of the sample in an encoding."""
    if option.kind != "mixed":
        return float(sum(map(of_row, found.rows[option])))
    raw, coded = sum(map(of_row, found.rows[EncodingOption("raw")])), sum(map(of_row, _jpegs(found)))
    return (1 - option.fraction) * raw + option.fraction * coded


def _loses(option: EncodingOption, found: Sampled, *, remade: bool) -> bool:
    if option.kind == "mixed":
        own = found.rows.get(EncodingOption("source", option.quality), found.rows.get(EncodingOption("keep"), []))
        return remade or not own or any(row.encoding != JPEG for row in own)
    return option.kind == "jpeg" or (option.kind == "source" and remade)


def pick_encoding(
    stores: Sequence[EncodingEstimate], *, sampled: int, free_memory: int, room: int | None
) -> tuple[str, str]:
    """Returns the encoding expected to be read fastest, and a sentence that says why.

    A file that fits in memory is read from the disk once, then at the rate of memory; a larger one at the rate of the
    disk. From few samples the first encoding is picked if it fits, as their rates say nothing.

    Args:
        stores: at least one; the first is the present encoding of a file, or raw.
        sampled: number of images with which the rates were measured.
        free_memory: bytes that the page cache may fill.
        room: bytes free on the disk; None: the file exists already.
    """
    smallest = min(stores, key=lambda store: store.bytes)
    possible = [store for store in stores if room is None or store.bytes <= room] or [smallest]
    fitting = [store for store in possible if _fits(store, free_memory)]
    if sampled < FEW and stores[0] in fitting:
        return stores[0].store, (
            f"{stores[0].store}: its {format_bytes(stores[0].bytes)} fit in the {format_bytes(free_memory)} of free "
            f"memory; rates of {sampled} image{'s' if sampled > 1 else ''} are too uncertain to compare."
        )
    known = [store for store in possible if store in fitting or store.disk_per_s is not None]
    if not known:
        chosen = min(possible, key=lambda store: (store.loses, store.bytes))
        return chosen.store, (
            f"{chosen.store}: nothing fits in the {format_bytes(free_memory)} of free memory, and it is not known how "
            f"fast this disk is read; of what loses nothing it is the smallest, {format_bytes(chosen.bytes)}."
        )
    rates = {store.store: store.warm_per_s if store in fitting else store.disk_per_s or 0.0 for store in known}
    lossless = max((rates[store.store] for store in known if not store.loses), default=0.0)
    worth = [store for store in known if not store.loses or rates[store.store] >= WORTH_LOSS * lossless]
    best = max(rates[store.store] for store in worth)
    close = [store for store in worth if rates[store.store] >= CLOSE * best]
    # From memory all are fast: the first is the simplest, and only takes room that is there.
    chosen = min(
        close, key=lambda store: (store not in fitting, stores.index(store) if store in fitting else store.bytes)
    )
    return chosen.store, _why(chosen, rates, known, fitting, free_memory) + _no_room(stores, possible, room)


def _why(
    chosen: EncodingEstimate,
    rates: dict[str, float],
    known: Sequence[EncodingEstimate],
    fitting: Sequence[EncodingEstimate],
    free_memory: int,
) -> str:
    size, rate = format_bytes(chosen.bytes), f"{rates[chosen.store]:,.0f} images/s"
    others = sorted((store for store in known if store is not chosen), key=lambda store: -rates[store.store])
    second = f" ({_rate(others[0], rates, fitting)})" if others else ""
    if chosen in fitting:
        memory = format_bytes(free_memory)
        return f"{chosen.store}: its {size} fit in the {memory} of free memory, and from there come {rate}{second}."
    loss = "; making JPEGs loses a little" if chosen.loses else ""
    return (
        f"{chosen.store}: its {size} do not fit in the {format_bytes(free_memory)} of free memory, and over this disk "
        f"come {rate}{second}{loss}."
    )


def _rate(store: EncodingEstimate, rates: dict[str, float], fitting: Sequence[EncodingEstimate]) -> str:
    where = "from memory" if store in fitting else "over this disk"
    return f"{store.store} {rates[store.store]:,.0f} {where}"


def _no_room(stores: Sequence[EncodingEstimate], possible: Sequence[EncodingEstimate], room: int | None) -> str:
    left_out = [f"{store.store} ({format_bytes(store.bytes)})" for store in stores if store not in possible]
    if not left_out or room is None:
        return ""
    return f" No room on the disk, where {format_bytes(room)} are free, for {', '.join(left_out)}."


def _fits(store: EncodingEstimate, free_memory: int) -> bool:
    return store.bytes <= FITS * free_memory
