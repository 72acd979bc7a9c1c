"""The figures that stand in the records of run.py, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

NAMES = {
    "fastload": "fastload", "memmap": "NumPy memmap, gathered by hand", "torchdata_nodes": "torchdata.nodes, memmap",
    "image_folder": "ImageFolder, DataLoader", "h5py_loader": "h5py, DataLoader", "lmdb_loader": "LMDB, DataLoader",
    "zarr_loader": "Zarr 3", "hf_datasets": "Hugging Face datasets", "ffcv": "FFCV", "dali": "DALI, on the CPU",
    "webdataset": "WebDataset", "streaming": "MosaicML Streaming", "litdata_loader": "LitData", "spdl_loader": "SPDL",
    "grain_loader": "Grain", "tf_data": "tf.data",
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A column: its heading, where its value stands in a record, how it is written, and whether more is better."""

    heading: str
    part: str
    key: str
    write: Callable[[float], str]
    more: bool = True

    def of(self, record: Record) -> float | None:
        """Its value in a record, if it was measured."""
        found = record.get(self.part) if self.part else record
        value = found.get(self.key) if isinstance(found, dict) else None
        return None if value is None else float(value)


def whole(value: float) -> str:
    """Three digits at least, thousands apart."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """Milliseconds below a second."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


RATE = Figure("images/s", "alone", "images_per_s", whole)
BESIDE = (
    Figure("10 ms step on another device", "step", "share", "{:.2f}".format),
    Figure("main thread trains", "train", "share", "{:.2f}".format),
    Figure("main thread in pure Python", "python", "share", "{:.2f}".format),
)
STARTS = (
    Figure("first batch", "first", "first_batch_s", seconds, more=False),
    Figure("of later epochs", "alone", "first_batch_s", seconds, more=False),
    Figure("cold: first batch", "cold", "first_batch_s", seconds, more=False),
    Figure("cold: images/s of the epoch", "cold", "images_per_s", whole),
)
COSTS = (
    Figure("CPU s per 1,000 images", "alone", "cpu_s_per_1000", "{:.3g}".format, more=False),
    Figure("memory, MB", "memory", "bytes", lambda value: f"{value / 1e6:,.0f}", more=False),
)
PACKING = (
    Figure("images/s", "", "images_per_s", whole),
    Figure("then synced", "", "synced_images_per_s", whole),
    Figure("CPU s", "", "cpu_s", "{:.1f}".format, more=False),
    Figure("bytes on disk, MB", "", "bytes", lambda value: f"{value / 1e6:,.0f}", more=False),
)


class Records:
    """The newest records: of each loader and work those of the last run that has them, and fastload's of that run."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.runs: dict[tuple[str, str], list[Record]] = {}
        every: dict[tuple[str, str, str], list[Record]] = {}
        for record in records:
            if record["options"]["quick"]:
                continue
            key = record["work"], record["peer"]
            every.setdefault((record["run"], *key), []).append(record)
            newest = self.runs.get(key)
            if newest is None or newest[0]["run"] <= record["run"]:
                self.runs[key] = every[(record["run"], *key)]
        self.every = every

    def __bool__(self) -> bool:
        return bool(self.runs)

    def peers(self, work: str) -> list[str]:
        """Loaders that were measured at a work, in the order of NAMES."""
        return [peer for peer in NAMES if any(RATE.of(one) for one in self.runs.get((work, peer), ()))]

    def values(self, work: str, peer: str, figure: Figure) -> list[float]:
        """A figure in each pass."""
        return [value for one in self.runs.get((work, peer), ()) if (value := figure.of(one)) is not None]

    def ratios(self, work: str, peer: str, figure: Figure) -> list[float]:
        """fastload's figure over a loader's, within each pass."""
        found = []
        for one in self.runs.get((work, peer), ()):
            ours = [own for own in self.every.get((one["run"], work, "fastload"), ()) if own["pass"] == one["pass"]]
            theirs = figure.of(one)
            if ours and theirs and (value := figure.of(ours[0])):
                found.append(value / theirs)
        return found

    def unmeasured(self, work: str) -> dict[str, str]:
        """Loaders without figures of a work, with the reason."""
        found = {}
        for peer in NAMES:
            for one in self.runs.get((work, peer), ()):
                if why := one.get("unsupported") or one.get("failed") or one.get("alone", {}).get("failed"):
                    found[peer] = str(why)
        return found


def spread(values: list[float], write: Callable[[float], str]) -> str:
    """The median, with the lowest and the highest where there are several."""
    if not values:
        return ""
    middle = write(statistics.median(values))
    low, high = write(min(values)), write(max(values))
    return middle if len(values) == 1 or low == high else f"{middle} ({low} to {high})"
