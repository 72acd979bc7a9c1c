"""Bits that flip on the wire: bytes are asked for again, and damaged is only what comes the same twice."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from remote_files import serve

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.errors import DamagedRowError, RemoteError
from fastload.format.header import read_header
from fastload.inspection.verify import verify_file
from fastload.remote import client
from fastload.remote.urls import Remote


@pytest.fixture
def opened(range_server: Any, kinds: Any, tmp_path: Path) -> Iterator[Callable[..., PackedDataset]]:
    """Opens a kind of dataset behind a URL, while a byte of each of its objects flips a bit in some answers."""
    found: list[PackedDataset] = []
    client._warned.clear()

    def make(kind: str, at: int = -1, flips: int = 0, **options: Any) -> PackedDataset:
        if not (range_server.folder / "data").exists():
            serve(kinds(kind), range_server.folder)
        range_server.set(flip_at=at, flips=flips)
        remote = Remote(cache=tmp_path / "cache", max_bytes="64MB", give_up_after=5, in_flight=4)
        found.append(PackedDataset(f"{range_server.url}/data/data.h5", remote=remote, **options))
        return found[-1]

    yield make
    for dataset in found:
        dataset.file.remote.close()


def byte_of(path: Path, name: str, row: int = 0) -> int:
    """A byte of a row of a dataset, in a shard or in the file itself."""
    with h5py.File(path) as file:
        item = file[name]
        if item.chunks is None or item.id.get_create_plist().get_nfilters() == 0:
            first = item.id.get_offset() if item.chunks is None else item.id.get_chunk_info(0).byte_offset
            return int(first) + row * int(item[:1].nbytes) + 1
        info = item.id.get_chunk_info(0)
        return int(info.byte_offset) + int(info.size) // 2


def shard_of(path: Path) -> Path:
    return read_header(path).files[0]


def epoch(source: Any, **options: Any) -> list[list[torch.Tensor]]:
    options = {"batch_size": 16, "seed": 3, "shuffle": ChunkWindow(4), "workers": 2} | options
    with closing(FastLoader(source, **options)) as loader:
        return [[one.clone() for one in batch] for batch in loader]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "fastload" and one.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "kind, name, flips",
    [
        ("linear", "images", 3), ("linear", "labels", 3), ("linear", "digest", 1), ("linear", "", 1),
        ("jpeg", "images", 1), ("jpeg", "images_offset", 3), ("shards", "images", 1), ("shards", "labels", 1),
        ("shards", "", 3), ("zstd", "images", 1), ("zstd", "labels", 1), ("masks", "images", 1),
        ("masks", "masks", 3), ("shards of masks", "masks", 1),
    ],
)  # fmt: skip
def test_rows_of_which_bits_flip_on_the_wire_are_those_of_the_file(kind, name, flips, opened, kinds, caplog):
    at = byte_of(shard_of(kinds(kind)), name) if name else 1000
    found, expected = epoch(opened(kind, at, flips)), epoch(kinds(kind))
    for batch, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))
    assert len(warnings_in(caplog)) <= 1 and all("flips bits" in text for text in warnings_in(caplog))


def test_what_flips_is_asked_for_from_another_connection_and_said_once(opened, kinds, range_server, caplog):
    path = kinds("linear")
    dataset = opened("linear")
    range_server.set(flip_at=byte_of(path, "images"), flips=1)
    assert torch.equal(dataset[0][0], PackedDataset(path)[0][0])
    twice = [one for one in range_server.log() if one["range"] == range_server.log()[-1]["range"]]
    assert len(twice) == 2 and twice[0]["port"] != twice[1]["port"]
    assert len(warnings_in(caplog)) == 1 and "flips bits" in warnings_in(caplog)[0]


def test_what_comes_damaged_twice_is_damaged(opened, kinds, range_server, tmp_path):
    path = serve(kinds("linear"), range_server.folder)
    there = range_server.folder / path
    with open(there, "r+b") as file:
        file.seek(byte_of(there, "images", 5))
        file.write(b"\xff\x00\xff")
    with pytest.raises(DamagedRowError, match=r"row 5.*came so twice. The object itself is damaged"):
        epoch(opened("linear"))
    shutil.rmtree(tmp_path / "cache")
    with closing(FastLoader(opened("linear", on_damage="skip"), 16, shuffle=False)) as loader:
        assert sum(int((~batch.valid).sum()) for batch in loader) == 1


def test_what_never_comes_twice_the_same_is_no_damage_of_the_object(opened, kinds, range_server):
    dataset = opened("linear")
    range_server.set(flip_at=byte_of(kinds("linear"), "images"), flips=100)
    with pytest.raises(RemoteError, match=r"asked for 4 times.*changes bytes"):
        dataset[0]


@pytest.mark.parametrize("kind", ["linear", "shards of jpeg", "masks"])
def test_verify_calls_damaged_only_what_is(kind, opened, kinds, range_server):
    url = f"{range_server.url}/{serve(kinds(kind), range_server.folder)}"
    range_server.set(flip_at=byte_of(shard_of(kinds(kind)), "images"), flips=1)
    assert verify_file(url).ok
