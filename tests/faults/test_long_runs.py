"""Loaders that are made, used and left again and again: what they take stays the same.

90 loaders here; `FASTLOAD_LOADERS=3000 python -m pytest tests/faults/test_long_runs.py -s` makes 3,000, and runs 200
epochs and 50 loops that are left half way of each kind, in some minutes, and prints what was measured.
"""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from late_backend import Device
from ragged_cases import varied_file

from fastload import Workers
from fastload.dataset import PackedDataset
from fastload.loader.loader import FastLoader
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="what is taken is read in /proc")

LOADERS = int(os.environ.get("FASTLOAD_LOADERS", "90"))
EPOCHS, BREAKS = max(10, LOADERS // 15), max(5, LOADERS // 60)

# A loader's ring has four slots of 8 images of 110 KB or more: 150 of them would be 500 MB.
PACKED = {"rows": 48, "size": (192, 192, 3), "classes": "abc", "chunk_rows": 8}
BATCH = 8

# What allocators keep for later, and a count that another thread of the test run changes meanwhile.
_MEMORY_BYTES = 48 * 2**20
_COUNT = 2


@dataclass
class Taken:
    """What this process and its children hold."""

    memory_bytes: int  # that no other process has, and shared memory; pages of mapped files do not count
    descriptors: int
    threads: int
    segments: int  # of shared memory that are mapped
    children: int


def taken() -> Taken:
    for _ in range(3):
        gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(600)
    memory = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
            memory += 1024 * int(line.split()[1])
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    children = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            children += child.status() != psutil.STATUS_ZOMBIE
    return Taken(
        memory,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        sum(name.startswith(("/memfd:", "/dev/shm/")) or name == "(deleted)" for name in maps),
        children,
    )


def drain(loader):
    """Lets a device of these tests, which is always late, come to the end of what it was asked for."""
    if (device := loader._options.backend) is not None:
        device.drain()


def as_it_is(sample):
    return sample


@pytest.fixture
def make(packed, tmp_path, start_by_fork):
    """Makes a loader of a kind; equal kinds have equal loaders."""
    del start_by_fork
    jpegs = varied_file(tmp_path / "jpegs.h5")

    def of(kind):
        if kind == "processes":
            return FastLoader(PackedDataset(packed, transform=as_it_is), BATCH, workers=2)
        if kind == "jpeg":
            cut = [RandomResizedCrop((96, 96)), RandomHorizontalFlip()]
            return FastLoader(jpegs, 4, transform=cut, workers=2)
        if kind == "echo":
            return FastLoader(packed, BATCH, echo=2, transform=[RandomHorizontalFlip()], workers=2)
        if kind == "cache":
            return FastLoader(packed, BATCH, cache="device", device=Device(patience=1), workers=2)
        return FastLoader(packed, BATCH, workers=Workers(2, timeout=600))

    return of


@pytest.fixture
def start_by_fork():
    """A fork takes the least time, and the most along."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("kind", ["threads", "processes", "echo", "cache", "jpeg"])
def test_what_loaders_take_does_not_grow(make, kind, capsys):
    many = max(3, LOADERS // 25) if kind == "processes" else LOADERS if kind == "threads" else LOADERS // 5

    def loaders(count):
        for number in range(count):
            loader = make(kind)
            steps = 0
            for _ in loader:
                steps += 1
                if number % 3 == 1:
                    break
            drain(loader)
            assert steps == (1 if number % 3 == 1 else len(loader))
            if number % 2:
                loader.close()

    loaders(3)  # what is made once, is made
    with_one = make(kind)
    list(with_one)
    figures = []
    for what in ("loaders", "epochs", "breaks"):
        before = taken()
        if what == "loaders":
            loaders(many)
        elif what == "epochs":
            for _ in range(EPOCHS):
                assert sum(1 for _ in with_one) == len(with_one)
        else:
            for _ in range(BREAKS):
                assert next(iter(with_one)) is not None
                drain(with_one)
            list(with_one)
        drain(with_one)
        after = taken()
        figures.append((what, before, after))
    with_one.close()
    with capsys.disabled():
        for what, before, after in figures if "FASTLOAD_LOADERS" in os.environ else ():
            print(f"\n{kind}, {what}: {before} -> {after}")
    for what, before, after in figures:
        assert after.memory_bytes - before.memory_bytes < _MEMORY_BYTES, (kind, what, before, after)
        for count in ("descriptors", "threads", "segments", "children"):
            assert getattr(after, count) - getattr(before, count) <= _COUNT, (kind, what, count, before, after)
