"""Caches of which files are removed, cut off or replaced while rows are read from them: they are fetched again.

FASTLOAD_LOST_CACHES=1 tries each way with each kind of dataset.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_files import ROWS, serve

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.errors import ReplacedError
from fastload.remote.cache import CacheFolder
from fastload.remote.urls import Remote
from fastload.transforms import RandomResizedCrop

FIELDS = ["images", "labels", "row"]


def copies(cache: Path) -> list[Path]:
    """The copies of shards that lie in a cache; of a single file, which is its own shard, that."""
    (folder,) = [one for one in cache.glob("1/*") if one.is_dir() and not one.name.startswith(".")]
    found = [path for path in folder.glob("*.h5") if path.name != "data.h5"]
    return found or [folder / "data.h5"]


def cut(path: Path, size: int = 0) -> None:
    os.truncate(path, size)


def replaced(path: Path) -> None:
    """Another file of the same size, all zeros, in its place."""
    with suppress(FileNotFoundError):  # readers remove it, too
        size, new = path.stat().st_size, path.with_name("new")
        new.touch()
        os.truncate(new, size)
        new.replace(path)


WAYS: dict[str, Callable[[Path], object]] = {
    "the cache removed": lambda cache: shutil.rmtree(cache, ignore_errors=True),  # readers move it, too
    "the cache moved": lambda cache: cache.rename(cache.with_name("moved")),
    "the dataset removed": lambda cache: shutil.rmtree(copies(cache)[0].parent, ignore_errors=True),
    "copies removed": lambda cache: [path.unlink(missing_ok=True) for path in copies(cache)],
    "a copy removed": lambda cache: copies(cache)[-1].unlink(missing_ok=True),
    "copies replaced": lambda cache: [replaced(path) for path in copies(cache)],
    "chunks removed": lambda cache: (copies(cache)[0].parent / "chunks").unlink(missing_ok=True),
    "chunks cut": lambda cache: cut(copies(cache)[0].parent / "chunks"),
    "chunks cut in a record": lambda cache: cut(copies(cache)[0].parent / "chunks", 40),
    "locks removed": lambda cache: (copies(cache)[0].parent / "locks").unlink(missing_ok=True),
    "meta.json removed": lambda cache: (copies(cache)[0].parent / "meta.json").unlink(missing_ok=True),
    "the header removed": lambda cache: (copies(cache)[0].parent / "data.h5").unlink(missing_ok=True),
    "used removed": lambda cache: (cache / "1" / "used").unlink(missing_ok=True),
    "used cut": lambda cache: cut(cache / "1" / "used"),
}
CUTS: dict[str, Callable[[Path], object]] = {
    "copies cut": lambda cache: [cut(path) for path in copies(cache)],
    "a copy cut in half": lambda cache: cut(copies(cache)[0], copies(cache)[0].stat().st_size // 2),
}


@pytest.fixture
def opened(range_server: Any, kinds: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[PackedDataset, Any]]]:
    """Opens a kind of dataset behind a URL, and from the disk; rows are not compared with digests."""
    found: list[PackedDataset] = []

    def make(kind: str, **options: Any) -> tuple[PackedDataset, PackedDataset]:
        url = f"{range_server.url}/{serve(kinds(kind), range_server.folder)}"
        options = {"fields": [name for name in FIELDS if name != "labels" or kind != "masks"], "check": None} | options
        remote = Remote(cache=tmp_path / "cache", max_bytes="64MB", give_up_after=20, in_flight=4)
        found.append(PackedDataset(url, remote=remote, **options))
        return found[-1], PackedDataset(kinds(kind), **options)

    yield make
    for dataset in found:
        dataset.file.remote.close()


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))


KINDS = ("shards", "shards of jpeg", "linear", "zstd")
TRIALS = [
    (kind, way)
    for number, way in enumerate([*WAYS, *CUTS])
    for kind in (KINDS if "FASTLOAD_LOST_CACHES" in os.environ else (KINDS[number % 4],))
]


@pytest.mark.parametrize("kind, way", TRIALS)
def test_rows_are_those_of_the_file_whatever_happens_to_the_cache(kind, way, opened, tmp_path):
    there, here = opened(kind)
    order = np.random.default_rng(0).permutation(ROWS)[:120]
    for at, row in enumerate(order.tolist()):
        if at in (30, 31, 80):
            (WAYS | CUTS)[way](tmp_path / "cache")
            if (tmp_path / "moved").exists():
                shutil.rmtree(tmp_path / "moved")
        assert same(there[row], here[row]), (at, row)
    with closing(CacheFolder(tmp_path / "cache", None)) as cache:
        assert cache.bound.num_bytes > 0


def in_python(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    "workers, way",
    [("threads", way) for way in WAYS]
    + [("processes", way) for way in ("the cache removed", "copies replaced", "locks removed")],
)
def test_epochs_are_those_of_the_file_whatever_is_removed_from_the_cache(workers, way, opened, tmp_path, caplog):
    there, here = opened("shards", transform=in_python if workers == "processes" else None)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": ChunkWindow(4), "seed": 1, "workers": 2}
    with closing(FastLoader(there, **options)) as remote, closing(FastLoader(here, **options)) as local:
        for epoch in range(2):
            for at, (batch, wanted) in enumerate(zip(remote, local, strict=True)):
                if at == 7:
                    WAYS[way](tmp_path / "cache")
                    shutil.rmtree(tmp_path / "moved", ignore_errors=True)
                assert same(batch, wanted), (epoch, at)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and one.name == "fastload"]
    assert len(said) <= 1 and all("is fetched again" in text for text in said)


@pytest.mark.parametrize("way", ["the dataset removed", "copies replaced"])
def test_crops_are_of_the_copies_that_were_made_anew(way, opened, tmp_path):
    there, here = opened("linear")
    options: dict[str, Any] = {"batch_size": 16, "shuffle": ChunkWindow(4), "seed": 1, "workers": 2}
    options["transform"] = [RandomResizedCrop(8)]
    with closing(FastLoader(there, **options)) as remote, closing(FastLoader(here, **options)) as local:
        for epoch in range(2):
            for at, (batch, wanted) in enumerate(zip(remote, local, strict=True)):
                if (epoch, at) == (0, 2):
                    WAYS[way](tmp_path / "cache")
                assert same(batch, wanted), (epoch, at)


def test_an_object_that_was_replaced_takes_no_lost_ones_place(opened, range_server, kinds, tmp_path):
    there, _ = opened("shards")
    assert len(there[0])
    shutil.rmtree(range_server.folder / "data")
    serve(kinds("shards of masks"), range_server.folder)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ReplacedError, match="replaced while in use"):
        for row in range(0, ROWS, 7):
            there[row]


def test_what_another_job_has_open_is_left_and_made_anew_beside_it(opened, tmp_path):
    first, here = opened("shards")
    second, _ = opened_again(first)
    try:
        for at in range(0, ROWS, 5):
            if at == 100:
                for path in copies(tmp_path / "cache"):
                    path.unlink()
            for dataset in (first, second)[:: 1 if at % 2 else -1]:
                assert same(dataset[at], here[at]), at
        locks = [one.file.remote.cache.cached.locks for one in (first, second)]
        folders = {Path(os.readlink(f"/proc/self/fd/{one.fd}")) for one in locks}
        assert len(folders) == 1, "both use the one that was made anew"
    finally:
        second.file.remote.close()


def opened_again(dataset: PackedDataset) -> tuple[PackedDataset, None]:
    remote = dataset.file.remote.remote
    return PackedDataset(dataset._url, remote=remote, fields=dataset.fields, check=None), None
