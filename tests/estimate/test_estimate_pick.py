from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fastload.estimate import EncodingEstimate, pick_encoding

GB = 2**30


def stores(disk_per_s: float | None) -> list[EncodingEstimate]:
    """100,000 images of 200 kB: raw 20 GB, JPEG 2 GB, and half of each, over a disk of so many raw images a second."""

    def one(name: str, size: float, warm: float, *, loses: bool = False) -> EncodingEstimate:
        over_disk = None if disk_per_s is None else min(warm, disk_per_s * 20 / size)
        return EncodingEstimate(name, int(size * GB), warm, over_disk, {"raw": 1}, loses)

    return [
        one("raw", 20, 30_000), one("jpeg:90", 2.5, 2000, loses=True), one("source", 2, 2000),
        one("mixed:0.5", 11, 3800),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "disk_per_s", "room", "pick", "said"),
    [
        (64, 100, None, "raw", ""),  # read once, then from memory
        (20, 100, None, "mixed:0.5", ""),  # raw would fill all of memory
        (3, 100, None, "source", ""),
        # A slow disk: the fewest bytes.
        (1, 200, None, "source", "over this disk come 2,000 images/s (jpeg:90 1,600 over this disk)."),
        (1, 5000, None, "raw", ""),  # a fast one: nothing to decode
        (1, 2000, None, "mixed:0.5", ""),  # between them: neither disk nor CPUs are in the way alone
        (64, None, None, "raw", ""),
        (1, None, None, "source", ""),
        (64, 5000, 12, "mixed:0.5", "No room on the disk, where 12.0 GiB are free, for raw (20.0 GiB)."),
        (64, 5000, 1, "source", ""),
    ],
)
def test_what_is_read_fastest_is_picked(memory, disk_per_s, room, pick, said):
    bytes_free = None if room is None else room * GB
    name, reason = pick_encoding(stores(disk_per_s), sampled=64, free_memory=memory * GB, room=bytes_free)
    assert name == pick and reason.startswith(f"{pick}: ") and reason.endswith(said or ".")
    assert re.search(rf"\b{memory}\.0 GiB of free memory", reason)


def test_what_loses_something_has_to_be_clearly_faster():
    raw, made, own, _ = stores(150)
    assert made.disk_samples_per_s is not None and own.disk_samples_per_s is not None
    assert pick_encoding([raw, own, made], sampled=64, free_memory=GB, room=None)[0] == "source"
    name, reason = pick_encoding([raw, made], sampled=64, free_memory=GB, room=None)
    assert name == "jpeg:90" and "loses a little" in reason
    raw, made, *_ = stores(1500)
    assert made.disk_samples_per_s is not None and 1.3 * 1500 < made.disk_samples_per_s < 1.5 * 1500
    assert pick_encoding([raw, made], sampled=64, free_memory=GB, room=None)[0] == "raw"


def test_few_samples_say_nothing_of_rates_and_of_about_equal_ones_the_simplest_is_picked():
    raw, *others = stores(100)
    slow = [replace(raw, warm_samples_per_s=1000), *others]  # slower by chance alone
    name, reason = pick_encoding(slow, sampled=1, free_memory=64 * GB, room=None)
    assert name == "raw" and reason.endswith("rates of 1 image are too uncertain to compare.")
    assert pick_encoding(slow, sampled=64, free_memory=64 * GB, room=None)[0] == "mixed:0.5"
    assert pick_encoding(slow, sampled=1, free_memory=3 * GB, room=None)[0] == "source"
    equal = [replace(raw, warm_samples_per_s=3600), *others]
    assert pick_encoding(equal, sampled=64, free_memory=64 * GB, room=None)[0] == "raw"
