"""Size and speed of each store, from a sample of rows in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.estimate.disk import DiskRate, measure_disk
from fastload.estimate.pick import StoreEstimate, pick_store
from fastload.estimate.rates import pixel_rate
from fastload.estimate.sample import Encode, Sampled, image_bytes, row_bytes, take_sample
from fastload.memory import available_memory
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan
from fastload.store import ENCODINGS, JPEG, EncodedRow

AS_IT_IS = "as it is"
"""What the store is called that a file has."""


@dataclass(frozen=True)
class Stored:
    """What is known of a file that is there, not estimated.

    Attributes:
        images, masks: bytes of all their rows as they are stored; of masks 0 where there are none.
        filters: names of the HDF5 filters of images in chunks; () where rows are compressed one by one, or not.
        chunked_per_s: measures images a second read from such chunks while they are in memory, given samples.
    """

    images: int
    masks: int
    filters: tuple[str, ...] = ()
    chunked_per_s: Callable[[Sequence[int]], float] | None = None


@dataclass(frozen=True)
class StoreEstimates:
    """What the stores would be, and which one to pick.

    Attributes:
        stores: at least one; the one a file has comes first.
        raw_bytes: of the pixels of all images and masks, decoded.
        pick: name of one of them.
        reason: why, a sentence.
        sampled: samples that were made and timed.
        failed: samples tried that could not be read or decoded.
        threads: that decoded at once.
        disk: how fast the disk is read.
        free_memory: bytes that the page cache may fill.
    """

    stores: tuple[StoreEstimate, ...]
    raw_bytes: int
    pick: str
    reason: str
    sampled: int
    failed: int
    threads: int
    disk: DiskRate
    free_memory: int

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for `json.dumps`."""
        return asdict(self) | {"disk": self.disk._asdict()}


def estimate_stores(
    encode: Encode,
    samples: NDArray[np.int64],
    num_pixels: int,
    stores: Sequence[StoreOption],
    dtype: np.dtype[Any],
    folder: Path,
    *,
    remade: bool = False,
    compressed: str = "",
    stored: Stored | None = None,
    room: int | None = None,
    threads: int | None = None,
    seconds: float = 1.5,
    progress: Progress | None = None,
) -> StoreEstimates | None:
    """What a dataset would be in these stores.

    Args:
        encode: makes the row of a sample.
        samples: int64 (N,), the samples of the dataset.
        num_pixels: of all their images together, decoded.
        stores: "mixed" needs "raw" and "jpeg" beside it.
        dtype: of decoded images.
        folder: whose disk is measured.
        remade: "source" encodes some JPEGs anew.
        compressed: name of the codec of pixels, "" for none.
        stored: of a file that is there already; its masks stay as they are in every store.
        room: bytes free on the disk; None: does not matter.
        threads: that decode at once, by default one per CPU.
        seconds: for making the sample; measuring takes up to 1.4 s more for the disk, and 0.25 s a store.
        progress: called with (stage, done, total).

    Returns:
        None where no image of the sample can be decoded.
    """
    threads = threads or available_cpus()
    made = [option for option in stores if option.kind != "mixed"]
    found = take_sample(encode, made, samples, threads=threads, seconds=seconds, progress=progress)
    if not found.samples:
        return None
    scale = num_pixels / sum(row.shape[0] * row.shape[1] for row in found.rows[made[0]])
    rows = {option: _rows(option, found) for option in stores}
    sizes = {option: _size(option, found, scale, stored) for option in stores}
    first = found.rows[made[0]][0]
    raw_bytes = num_pixels * (first.shape[2] * dtype.itemsize + (first.mask is not None))
    disk = measure_disk(folder, max(sizes.values()))
    estimates = []
    if stored is not None and stored.chunked_per_s is not None:
        warm = stored.chunked_per_s(found.samples)
        size = stored.images + stored.masks
        over_disk = _over_disk(disk, warm, size / len(samples))
        encodings = {", ".join(stored.filters) or "raw": len(found.samples)}
        estimates.append(StoreEstimate(AS_IT_IS, size, warm, over_disk, encodings, loses=False))
    for option, versions in rows.items():
        warm = pixel_rate(versions, dtype, threads=threads) * len(samples) / num_pixels
        encodings = {name: sum(row.encoding == code for row in versions) for code, name in enumerate(ENCODINGS)}
        estimates.append(
            StoreEstimate(
                store=_name(option, compressed),
                bytes=sizes[option],
                warm_per_s=warm,
                disk_per_s=_over_disk(disk, warm, sizes[option] / len(samples)),
                encodings={name: count for name, count in encodings.items() if count},
                loses=_loses(option, found, remade=remade),
            )
        )
    memory = available_memory()
    pick, reason = pick_store(estimates, sampled=len(found.samples), free_memory=memory, room=room)
    return StoreEstimates(
        tuple(estimates), raw_bytes, pick, reason, len(found.samples), found.failed, threads, disk, memory
    )


def _name(option: StoreOption, compressed: str) -> str:
    if option.kind == "keep":
        return AS_IT_IS
    return f"{option}, {compressed}" if compressed and option.kind == "raw" else str(option)


def _over_disk(disk: DiskRate, warm: float, image_bytes: float) -> float | None:
    """Images a second from the disk."""
    return None if disk.bytes_per_s is None else min(warm, disk.bytes_per_s / image_bytes)


def _size(option: StoreOption, found: Sampled, scale: float, stored: Stored | None) -> int:
    """Bytes of all rows in a store: estimated by the sample, or those that a file is known to have."""
    if stored is None:
        return round(scale * _stored_bytes(option, found, row_bytes))
    if option.kind == "keep":
        return stored.images + stored.masks
    return round(scale * _stored_bytes(option, found, image_bytes)) + stored.masks


def stores_of(plan: StorePlan, *, source: bool) -> list[StoreOption]:
    """The stores that images of a plan can have, in the quality and fraction that its option says."""
    raw = StoreOption("raw")
    if plan.dtype != np.uint8 or plan.channels == 4:  # more than a JPEG holds
        return [raw]
    quality = plan.option.quality
    own = [StoreOption("source", quality)] if source else []
    fraction = plan.option.fraction or 0.5
    return [raw, StoreOption("jpeg", quality), *own, StoreOption("mixed", quality, fraction)]


def _coded(found: Sampled) -> list[EncodedRow]:
    """Each sample as JPEG, its own where it has one that can be kept."""
    by_kind = {option.kind: rows for option, rows in found.rows.items()}
    own = by_kind.get("keep", by_kind.get("source", by_kind["jpeg"]))
    return [mine if mine.encoding == JPEG else made for mine, made in zip(own, by_kind["jpeg"], strict=True)]


def _rows(option: StoreOption, found: Sampled) -> list[EncodedRow]:
    if option.kind != "mixed":
        return found.rows[option]
    pairs = zip(found.rows[StoreOption("raw")], _coded(found), strict=True)
    share = option.fraction
    return [coded if int((at + 1) * share) > int(at * share) else raw for at, (raw, coded) in enumerate(pairs)]


def _stored_bytes(option: StoreOption, found: Sampled, of_row: Callable[[EncodedRow], int]) -> float:
    """Bytes of the sample in a store."""
    if option.kind != "mixed":
        return float(sum(map(of_row, found.rows[option])))
    raw, coded = sum(map(of_row, found.rows[StoreOption("raw")])), sum(map(of_row, _coded(found)))
    return (1 - option.fraction) * raw + option.fraction * coded


def _loses(option: StoreOption, found: Sampled, *, remade: bool) -> bool:
    if option.kind == "mixed":
        own = found.rows.get(StoreOption("source", option.quality), found.rows.get(StoreOption("keep"), []))
        return remade or not own or any(row.encoding != JPEG for row in own)
    return option.kind == "jpeg" or (option.kind == "source" and remade)
