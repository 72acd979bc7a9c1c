"""One file with damaged rows, read in each of the ways that users read: none is delivered as valid.

`test_bit_flips.py` flips any bit, and reads by few of these ways.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flipped_files import KINDS, dataset_of, flip, rows_of
from late_backend import Device
from small_files import write_random
from small_loaders import apart
from torch.utils.data import DataLoader

from fastload import DamagedRowError, FastLoader, MixedEcho, PackedDataset
from fastload.format.header import read_header
from fastload.samplers import ChunkBatchSampler, ChunkSampler, DistributedChunkSampler
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop, Resize

BATCH = 4
FLIPS = {
    "raw": {3: "images", 9: "labels", 16: "images", 17: "masks"},
    "jpeg": {1: "images", 5: "labels", 8: "images"},
}
"""Kind of file -> damaged rows, with the field."""


def place_of(path: Path, name: str, row: int) -> int:
    """The number of a byte in a row."""
    field = read_header(path).fields[name]
    if field.ragged is not None:
        offsets = read_header(path).fields[f"{name}_offset"]
        assert offsets.offset is not None
        return field.ragged.base + int(np.fromfile(path, np.int64, 1, offset=offsets.offset + 8 * row)[0]) + 40
    assert field.offset is not None
    return field.offset + row * field.row_bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind -> a whole file, and the same with a flipped bit in some rows."""
    made = {}
    for kind, flips in FLIPS.items():
        folder = tmp_path_factory.mktemp(kind)
        whole, damaged = made[kind] = folder / "whole.h5", folder / "damaged.h5"
        if kind == "jpeg":
            KINDS["jpeg"](whole)
        else:
            write_random(whole, rows=24, classes="abc", masks=True, chunk_rows=5)
        shutil.copyfile(whole, damaged)
        for row, name in flips.items():
            flip(damaged, place_of(damaged, name, row), 2)
    return made


def cut(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A transform in Python, for worker processes."""
    return (255 - sample[0][:, :8, :8], *sample[1:])


WAYS: dict[str, dict[str, Any]] = {
    "threads": {},
    "threads, always": {"check": "always", "workers": 3},
    "threads, pread": {"read": "pread"},
    "threads, transforms": {"transform": [RandomResizedCrop(8), RandomHorizontalFlip()]},
    "threads, transforms, pread": {"transform": [RandomResizedCrop(8)], "read": "pread", "check": "always"},
    "echo": {"echo": 2, "transform": [RandomResizedCrop(8)]},
    "mixed echo": {"echo": MixedEcho(2, distance=2)},
    "in order": {"shuffle": False, "ends": "drop"},
    "a rank of two": {"share": (1, 2)},
    "processes": {"python": cut, "workers": 2},
    "processes, pread, always": {"python": cut, "workers": 2, "read": "pread", "check": "always"},
    "processes, device, echo": {"python": cut, "workers": 2, "device": True, "echo": 2},
    "device": {"device": True},
    "device, transforms": {"device": True, "transform": [RandomResizedCrop(8)], "echo": 2},
    "host cache": {"device": True, "cache": "host"},
    "device cache": {"device": True, "cache": "device", "echo": 2},
    "device cache, pread": {"device": True, "cache": "device", "read": "pread", "transform": [RandomResizedCrop(8)]},
    "decoded by the device": {"device": True, "decode": "device", "transform": [Resize((8, 9))]},
}


def loader_of(path: Path, kind: str, way: str, **more: Any) -> FastLoader:
    options: dict[str, Any] = {"share": None, "ends": "exact", "workers": 2, "seed": 4} | WAYS[way] | more
    if options.pop("device", False):
        options["device"] = Device()
    if kind == "jpeg" and "python" not in options:  # of several sizes
        options.setdefault("transform", [RandomResizedCrop(8)])
    own, options = apart(options)
    dataset = dataset_of(path, **own)
    dataset.transform = options.pop("python", None)
    dataset.decode = options.pop("decode", "cpu")
    return FastLoader(dataset, BATCH, **options)


def cases() -> list[tuple[str, str]]:
    """Each way for each kind of file that can be read so; processes, which take a second to start, for one kind."""
    only_raw = {name for name, way in WAYS.items() if "cache" in way or ("python" in way and name != "processes")}
    only_jpeg = {name for name, way in WAYS.items() if "decode" in way}
    return [
        *(("raw", way) for way in WAYS if way not in only_jpeg),
        *(("jpeg", way) for way in WAYS if way not in only_raw),
    ]


def kept(loader: FastLoader) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(field.clone() for field in batch) for _ in range(2) for batch in loader]


@pytest.mark.parametrize(("kind", "way"), cases())
def test_every_loader_leaves_out_damaged_rows_and_nothing_else(files, kind, way):
    whole, damaged = files[kind]
    bad, names = set(FLIPS[kind]), dataset_of(whole).fields
    good, loader = loader_of(whole, kind, way, workers=1), loader_of(damaged, kind, way, on_damage="skip")
    for _ in range(2):
        expected, planned = [tuple(field.clone() for field in batch) for batch in good], set[int]()
        for then, batch in zip(expected, loader, strict=True):
            *_, rows, valid = batch
            assert torch.equal(torch.as_tensor(batch.rows), rows) and torch.equal(torch.as_tensor(batch.valid), valid)
            whole_rows = rows_of(names, [then])
            planned.update(whole_rows)
            assert rows_of(names, [batch]) == {row: values for row, values in whole_rows.items() if row not in bad}
            was_bad = [row in bad for row in then[-2].tolist()]
            assert valid.tolist() == [v and not d for v, d in zip(then[-1].tolist(), was_bad, strict=True)]
            assert not bad.intersection(rows.tolist()), "of a damaged row there is nothing, be it not valid"
        stats = loader.stats
        assert set(stats.damaged_rows) == bad & planned and stats.damaged_samples == len(bad & planned) > 0
    good.close()
    loader.close()


@pytest.mark.parametrize(("kind", "way"), [one for one in cases() if "processes" not in one[1] or "pread" in one[1]])
def test_every_loader_raises_before_it_delivers_a_damaged_row(files, kind, way):
    whole, damaged = files[kind]
    names, delivered = dataset_of(whole).fields, []
    loader = loader_of(damaged, kind, way)
    with pytest.raises(DamagedRowError, match=r"damaged.h5.*row \d+.*`fastload verify .*damaged.h5`") as caught:
        for batch in loader:
            delivered += rows_of(names, [batch])
    loader.close()
    assert set(caught.value.rows) <= set(FLIPS[kind]) and caught.value.rows
    assert not set(FLIPS[kind]).intersection(delivered)


def sampler_of(dataset: PackedDataset, kind: str) -> dict[str, Any]:
    if kind == "batches":
        return {"batch_sampler": ChunkBatchSampler(dataset, BATCH, num_workers=2)}
    if kind == "samples":
        return {"sampler": ChunkSampler(dataset), "batch_size": BATCH}
    return {"sampler": DistributedChunkSampler(dataset, num_replicas=1, rank=0), "batch_size": BATCH}


def as_lists(samples: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    return samples


@pytest.mark.parametrize("kind", FLIPS)
@pytest.mark.parametrize(
    ("given", "check"), [("batches", "first"), ("samples", "always"), ("samples of a rank", "first"), ("samples", None)]
)
def test_workers_of_a_plain_dataloader_raise_before_they_deliver_a_damaged_row(files, kind, given, check):
    whole, damaged = files[kind]
    dataset, good = dataset_of(damaged, check=check), dataset_of(whole)
    loader = DataLoader(
        dataset, num_workers=2, persistent_workers=True, collate_fn=as_lists, **sampler_of(dataset, given)
    )
    expected = good.samples(np.arange(len(good)))
    for _ in range(2):  # a row that was wrong is compared again
        named, delivered, batches = set[int](), list[int](), iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except DamagedRowError as error:  # torch keeps its text alone, and goes on with the next batch
                found = re.search(r"damaged.h5.*\(row (\d+)\).*`fastload verify .*damaged.h5`", str(error), re.DOTALL)
                assert found is not None, error
                named.add(int(found[1]))
                # It is in a cycle with the iterator, whose queues the garbage collection would end before its workers.
                error.__traceback__ = None
                continue
            if batch is None:
                break
            for sample in batch:
                delivered.append(int(sample[-2]))
                same = all(torch.equal(one, other) for one, other in zip(sample, expected[delivered[-1]], strict=True))
                assert same or (check is None and delivered[-1] in FLIPS[kind])
        if check is None:
            assert sorted(delivered) == list(range(len(good))) and not named
        else:
            assert delivered and named and named <= set(FLIPS[kind]) and not named.intersection(delivered)
            assert not set(FLIPS[kind]).intersection(delivered)
