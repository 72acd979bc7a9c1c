"""Size and speed of each store, from a sample of rows in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.estimate.disk import DiskRate, measure_disk
from fastload.estimate.pick import StoreEstimate, pick_store
from fastload.estimate.rates import pixel_rate
from fastload.estimate.sample import Encode, Sampled, row_bytes, take_sample
from fastload.memory import available_memory
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan
from fastload.store import ENCODINGS, JPEG, EncodedRow

AS_IT_IS = "as it is"
"""What the store is called that a file has."""


@dataclass(frozen=True)
class StoreEstimates:
    """What the stores would be, and which one to pick.

    Attributes:
        stores: at least one; the one a file has comes first.
        pick: name of one of them.
        reason: why, a sentence.
        sampled: samples that were made and timed.
        failed: samples tried that could not be read or decoded.
        threads: that decoded at once.
        disk: how fast the disk is read.
        free_memory: bytes that the page cache may fill.
    """

    stores: tuple[StoreEstimate, ...]
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
    sizes = {option: round(scale * _stored_bytes(option, found)) for option in stores}
    disk = measure_disk(folder, max(sizes.values()))
    estimates = []
    for option, versions in rows.items():
        per_image = sizes[option] / len(samples)
        warm = pixel_rate(versions, dtype, threads=threads) * len(samples) / num_pixels
        encodings = {name: sum(row.encoding == code for row in versions) for code, name in enumerate(ENCODINGS)}
        estimates.append(
            StoreEstimate(
                store=AS_IT_IS if option.kind == "keep" else str(option),
                bytes=sizes[option],
                warm_per_s=warm,
                disk_per_s=min(warm, disk.bytes_per_s / per_image) if disk.bytes_per_s is not None else None,
                encodings={name: count for name, count in encodings.items() if count},
                loses=_loses(option, found, remade=remade),
            )
        )
    memory = available_memory()
    pick, reason = pick_store(estimates, free_memory=memory, room=room)
    return StoreEstimates(tuple(estimates), pick, reason, len(found.samples), found.failed, threads, disk, memory)


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


def _stored_bytes(option: StoreOption, found: Sampled) -> float:
    """Bytes of the sample in a store."""
    if option.kind != "mixed":
        return float(sum(map(row_bytes, found.rows[option])))
    raw, coded = sum(map(row_bytes, found.rows[StoreOption("raw")])), sum(map(row_bytes, _coded(found)))
    return (1 - option.fraction) * raw + option.fraction * coded


def _loses(option: StoreOption, found: Sampled, *, remade: bool) -> bool:
    if option.kind == "mixed":
        own = found.rows.get(StoreOption("source", option.quality), found.rows.get(StoreOption("keep"), []))
        return remade or not own or any(row.encoding != JPEG for row in own)
    return option.kind == "jpeg" or (option.kind == "source" and remade)
