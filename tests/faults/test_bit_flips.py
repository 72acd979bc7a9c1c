"""Flips of single bits: `verify` names those that change a value, and the loader delivers none as valid.

72 flips by default; `FASTLOAD_FLIPS=2000 pytest tests/faults/test_bit_flips.py` makes so many in all.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from flipped_files import KINDS, Row, dataset_of, flip, rows_of, transforms_of
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from fastload import DamagedRowError, FastLoader, FastloadError, PackedDataset, verify_file
from fastload.format.header import read_header

FLIPS = int(os.environ.get("FASTLOAD_FLIPS", "72"))
BATCH = 6


def delivered(path: Path, workers: int | None = None, **of_dataset: Any) -> dict[int, Row]:
    """The samples that a loader gives as valid in two epochs, and up to an error, if there is one."""
    found: dict[int, Row] = {}
    try:
        dataset = dataset_of(path, **of_dataset)
        loader = FastLoader(
            dataset,
            BATCH,
            transform=transforms_of(dataset),
            share=None,
            ends="exact",
            workers=workers,
        )
        try:
            for epoch in (0, 0):
                loader.set_epoch(epoch)
                for batch in loader:
                    found.update(rows_of(dataset.fields, [batch]))
        finally:
            loader.close()
    except FastloadError:
        found[-1] = {}
    return found


def places(path: Path, count: int, rng: np.random.Generator) -> list[int]:
    """Bytes to damage: a third anywhere in the file, the others in rows of its datasets, as many in each."""
    file = read_header(path)
    extents = []
    for field in file.fields.values():
        if field.ragged is not None:
            extents.append((field.ragged.base, field.ragged.num_bytes))
        elif field.offset is not None:
            extents.append((field.offset, field.row_bytes * file.num_rows))
    found = rng.integers(0, path.stat().st_size, -(-count // 3)).tolist()
    while len(found) < count:
        first, length = extents[rng.integers(len(extents))]
        found.append(int(rng.integers(first, first + length)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_never_delivered_as_valid_and_verify_names_it(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path / f"{kind}.h5")
    intact, whole = delivered(path), path.read_bytes()
    assert -1 not in intact and len(intact) == read_header(path).num_rows
    rng, silent, changed, unnamed = np.random.default_rng(len(kind)), [], 0, []
    for number, place in enumerate(places(path, -(-FLIPS // len(KINDS)), rng)):
        bit = int(rng.integers(8))
        flip(path, place, bit)
        unchecked = delivered(path, check=None, workers=1)
        if unchecked != intact:
            changed += 1
            try:
                named = not verify_file(path, workers=0).ok
            except FastloadError:
                named = True
            if not named:
                unnamed.append((place, bit))
        options: dict[str, Any] = {
            "read": ("map", "pread")[number % 2],
            "on_damage": ("raise", "skip")[number // 2 % 2],
        }
        checked = delivered(path, workers=1 + number % 2, **options)
        wrong = [row for row, values in checked.items() if row >= 0 and values != intact[row]]
        if wrong or (len(checked) < len(intact) and unchecked == intact and verify_file(path, workers=0).ok):
            silent.append((place, bit, wrong))
        flip(path, place, bit)
    assert path.read_bytes() == whole and delivered(path) == intact
    assert changed, "no flip changed a value: the test checks nothing"
    assert not silent, f"delivered as valid, or an error although nothing is damaged: {silent}"
    assert not unnamed, f"verify finds nothing: {unnamed}"


def _first_byte(path: Path, name: str, row: int) -> int:
    field = read_header(path).fields[name]
    if field.ragged is not None:
        offsets = read_header(path).fields[f"{name}_offset"]
        assert offsets.offset is not None
        return field.ragged.base + int(np.fromfile(path, np.int64, 1, offset=offsets.offset + 8 * row)[0])
    assert field.offset is not None
    return field.offset + row * field.row_bytes


def negative(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A transform in Python, for worker processes."""
    return (255 - sample[0], *sample[1:])


@pytest.mark.parametrize("field", ["images", "labels"])
def test_worker_processes_deliver_no_damaged_row(tmp_path: Path, field: str) -> None:
    path = KINDS["raw"](tmp_path / "raw.h5")
    place = _first_byte(path, field, 7)
    flip(path, place, 3)
    dataset = dataset_of(path)
    dataset.transform = negative
    with pytest.raises(DamagedRowError, match=rf"row 7.*{field}.*fastload verify"):
        list(FastLoader(dataset, BATCH, share=None, workers=1))
    skipping = dataset_of(path, on_damage="skip")
    skipping.transform = negative
    loader = FastLoader(skipping, BATCH, share=None, workers=2, shuffle=False)
    for _ in range(2):
        found = rows_of(dataset.fields, loader)
        assert sorted(found) == [row for row in range(24) if row != 7]
        assert (loader.stats.damaged_samples, loader.stats.damaged_rows) == (1, (7,))
    loader.close()
    flip(path, place, 3)
    dataset = dataset_of(path)
    dataset.transform = negative
    assert len(rows_of(dataset.fields, FastLoader(dataset, BATCH, share=None, workers=1))) == 24


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_dataloader_raises_the_error_of_its_dataset(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path / f"{kind}.h5")
    good = PackedDataset(path)
    assert len([sample for batch in DataLoader(good, 5, num_workers=0, collate_fn=list) for sample in batch]) == len(
        good
    )
    flip(path, _inside_chunk(path) if kind == "chunks" else _first_byte(path, "images", 5), 2)
    with pytest.raises(DamagedRowError, match="fastload verify"):
        list(DataLoader(PackedDataset(path), 5, collate_fn=list))
    in_worker = pickle.loads(pickle.dumps(PackedDataset(path)))
    try:
        in_worker.samples(np.arange(len(in_worker)))
    except DamagedRowError:
        handed_over = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(DamagedRowError, match="fastload verify"):
        handed_over.reraise()
    with pytest.raises(DamagedRowError):
        [sample for sample in PackedDataset(path, check="always")]  # noqa: C416  # reads the samples one by one


def _inside_chunk(path: Path) -> int:
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(1)
    return int(chunk.byte_offset + chunk.size // 2)
