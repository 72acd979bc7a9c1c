"""A disk that is full before the cache has reached its bound: rows are read by way of memory."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from remote_files import bytes_on_disk
from small_files import write_random

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.errors import CacheError
from fastload.read.linear import Read
from fastload.read.reader import open_rows
from fastload.remote.cache import DiskFullError
from fastload.remote.urls import Remote


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory, mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this run may not mount a file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, left: int) -> None:
    """Writes a file that leaves so many bytes of a disk."""
    system = os.statvfs(disk)
    with open(disk / "other", "wb") as other:
        other.write(bytes(system.f_bavail * system.f_frsize - left))


def assert_reads_right(dataset: PackedDataset, local: Path, read: Read) -> None:
    """Compares two epochs of a dataset with those of a local file."""
    options = {"batch_size": 8, "shuffle": ChunkWindow(2), "seed": 1, "workers": 2}
    there, here = dataset.reading(read), PackedDataset(local, read=read)
    with closing(FastLoader(there, **options)) as loader, closing(FastLoader(here, **options)) as expected:
        for _ in range(2):
            for batch, wanted in zip(loader, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))


@pytest.mark.parametrize("is_enough, read", [(True, "map"), (False, "map"), (False, "pread")])
def test_a_disk_that_does_not_hold_what_is_read_is_said_once(is_enough, read, small_disk, range_server, caplog):
    local = write_random(range_server.folder / "data.h5", rows=500, size=(32, 32, 3), chunk_rows=4, classes="abc")
    dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=small_disk, max_bytes="100MB"))
    if not is_enough:
        fill(small_disk, 60_000)
    with caplog.at_level(logging.WARNING, "fastload"):
        assert_reads_right(dataset, local, read)
    said = [record.getMessage() for record in caplog.records if record.name == "fastload"]
    assert len(said) == (not is_enough)
    assert all(f"the disk of the cache {small_disk} is full" in text and "Remote(cache=...)" in text for text in said)
    assert bytes_on_disk(small_disk) <= 2**20
    dataset.file.remote.close()
    # What is recorded on the disk is there: the next run reads it.
    (small_disk / "other").unlink(missing_ok=True)
    dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=small_disk, max_bytes="100MB"))
    assert_reads_right(dataset, local, read)
    dataset.file.remote.close()


def test_a_disk_without_room_for_a_header_is_an_error(small_disk, range_server):
    write_random(range_server.folder / "data.h5", rows=100, chunk_rows=4)
    (small_disk / "1").mkdir()
    with open(small_disk / "1" / "used", "wb") as used:
        used.write(bytes(4096))
    fill(small_disk, 4096)
    with pytest.raises(CacheError, match=r"the disk is full, there is no room for the header of .*data\.h5"):
        PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=small_disk, max_bytes="100MB"))
    assert not [*(small_disk / "1").glob(".new*")]


def test_records_of_a_full_disk_end_no_process(small_disk, range_server):
    """The records take several pages of a file that is mapped: to write to one of a hole would be a SIGBUS."""
    local = write_random(range_server.folder / "data.h5", rows=1600, size=(8, 8, 3), chunk_rows=2, classes="abc")
    dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=small_disk, max_bytes="100MB"))
    (records,) = small_disk.glob("1/*/chunks")
    assert records.stat().st_size > 3 * 4096 and records.stat().st_blocks * 512 >= records.stat().st_size
    fill(small_disk, 20_000)
    assert_reads_right(dataset, local, "pread")
    dataset.file.remote.close()


def test_a_thread_that_reads_goes_on_while_another_finds_the_disk_full(tmp_path, range_server):
    write_random(range_server.folder / "data.h5", rows=64, size=(64, 64, 3), chunk_rows=4, classes="abc")
    dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=tmp_path / "cache"))
    reader = open_rows(dataset.file, ["images", "labels"], "pread")
    rows, outs, left = np.arange(4), {"images": np.empty((4, 64, 64, 3), np.uint8)}, threading.Event()

    def leave() -> None:
        reader.store.leave(DiskFullError())
        left.set()

    with reader.store.holding(reader.store.table.locate(rows)):
        threading.Thread(target=leave, daemon=True).start()
        while not reader.store.files._draining:
            left.wait(0.01)
        reader.gather(rows, outs)  # as a transform does within the holding of its batch
    assert left.wait(60)
    assert (outs["images"] == np.stack([dataset[row][0].permute(1, 2, 0).numpy() for row in rows])).all()
    reader.close()
    dataset.file.remote.close()


def same(sample: object) -> object:
    return sample


def test_worker_processes_on_a_full_disk_are_an_error_that_says_so(small_disk, range_server):
    write_random(range_server.folder / "data.h5", rows=400, size=(32, 32, 3), chunk_rows=4, classes="abc")
    remote = Remote(cache=small_disk, max_bytes="100MB")
    dataset = PackedDataset(f"{range_server.url}/data.h5", transform=same, remote=remote)
    fill(small_disk, 16_384)
    with (
        closing(FastLoader(dataset, 8, shuffle=ChunkWindow(2), workers=2)) as loader,
        pytest.raises(CacheError, match="worker processes read only from it"),
    ):
        list(loader)
    dataset.file.remote.close()
