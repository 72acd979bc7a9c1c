"""Damaged rows: what `check` finds while a loader reads, and what `on_damage` makes of it."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import small_loaders
import torch
from late_backend import Device
from ragged_cases import flip as flip_ragged
from ragged_cases import flip_byte, varied_file
from small_files import random_pixels, write_foreign, write_random
from torch.utils.data import Subset, random_split

from fastload import DamagedRowError, FastLoader, FormatError, OptionError, PackedDataset
from fastload.format.digests import header_digest
from fastload.format.header import read_header
from fastload.transforms import Normalize, RandomCrop, RandomResizedCrop

N = 60
PACKED = {"rows": N, "classes": "abc", "boxes": True, "masks": True, "chunk_rows": 8}


def damage(path, *rows, field="images"):
    """Changes a byte in the middle of each of these rows."""
    extent = read_header(path).fields[field]
    for row in rows:
        flip_byte(path, extent.offset + row * extent.row_bytes + extent.row_bytes // 2)
    return path


def loader_of(path, batch_size=8, fields=("images", "labels"), **options):
    return small_loaders.loader_of(path, batch_size, fields=fields, **{"workers": 1, "share": None, **options})


def as_it_is(sample):
    return sample


def pairs(loader):
    """(row, valid) of all samples of an epoch."""
    return [pair for batch in loader for pair in zip(batch.rows.tolist(), batch.valid.tolist(), strict=True)]


WAYS = [
    {},
    {"read": "pread"},
    {"transform": [Normalize([0.5] * 3, [0.5] * 3)]},
    {"transform": [RandomResizedCrop(8)]},
    {"echo": 2},
]


@pytest.mark.parametrize("options", WAYS)
def test_a_damaged_row_is_an_error_that_names_it(packed_copy, options):
    damage(packed_copy, 17)
    with pytest.raises(
        DamagedRowError, match=r"file.h5: sample '.*' \(row 17\): .*`images`.*fastload verify"
    ) as caught:
        pairs(loader_of(packed_copy, **options))
    assert caught.value.rows == (17,) and isinstance(caught.value, FormatError)


@pytest.fixture
def rotting(packed, tmp_path):
    """A copy, and its bytes, which can be changed as rot does: its times stay what they are.

    In a file of tmpfs only the first store to a mapped page counts as writing.
    """
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".h5") as file:
        shutil.copy(packed, file.name)
        with mmap.mmap(file.fileno(), 0) as data:
            data[:] = data[:]
            yield Path(file.name), data


@pytest.mark.parametrize(("check", "found"), [("first", False), ("auto", False), ("always", True), (None, False)])
def test_a_row_is_compared_once_or_always_or_never(rotting, check, found):
    path, data = rotting
    before, images = path.stat(), read_header(path).fields["images"]
    loader = FastLoader(PackedDataset(path, check=check), 8, workers=1, ends="pad", share=None)
    list(loader)
    list(loader)  # what was read ahead of this epoch is handed over
    data[images.offset + 3 * images.row_bytes] ^= 1
    assert path.stat().st_ctime_ns == before.st_ctime_ns
    if not found:
        assert len(pairs(loader)) == len(pairs(loader)) == 64
        return
    with pytest.raises(DamagedRowError, match="row 3"):
        for _ in range(2):
            pairs(loader)


@pytest.mark.parametrize(
    ("asked", "damaged", "found"),
    [
        (("images",), "images", True),
        (("images",), "masks", True),  # one digest is of both
        (("masks",), "images", True),
        (("labels",), "images", False),
        (("images",), "labels", False),
        (("labels",), "labels", True),
        (("labels",), "bbox", True),
        (("images", "labels"), "key", True),
    ],
)
def test_damage_is_found_where_a_digest_is_of_what_is_asked_for(packed_copy, asked, damaged, found):
    damage(packed_copy, 40, field=damaged)
    loader = loader_of(packed_copy, 4, fields=asked)
    if not found:
        assert len(pairs(loader)) == N
        return
    with pytest.raises(DamagedRowError, match="row 40"):
        pairs(loader)


@pytest.mark.parametrize("batch_size", [4, 8])
@pytest.mark.parametrize("options", [{}, {"read": "pread"}, {"transform": [RandomResizedCrop(8)]}])
def test_a_skipped_row_is_replaced_by_the_next_of_its_batch(packed, packed_copy, batch_size, options, caplog):
    options = {"batch_size": batch_size, "shuffle": "full", "ends": "exact", **options}
    whole = list(loader_of(packed, **options))
    rows = [15, 16, 44]
    damage(packed_copy, *rows)
    loader = loader_of(packed_copy, on_damage="skip", **options)
    for number in range(2):
        loader.set_epoch(0)
        with caplog.at_level(logging.WARNING, "fastload"):
            found = list(loader)
        assert len(found) == len(whole)
        for batch, right in zip(found, whole, strict=True):
            bad = np.isin(right.rows.numpy(), rows)
            assert batch.valid.tolist() == (right.valid.numpy() & ~bad).tolist()
            assert batch.global_valid == int(batch.valid.sum())
            for at in np.flatnonzero(~bad):
                assert batch.rows[at] == right.rows[at] and torch.equal(batch[0][at], right[0][at])
            for at in np.flatnonzero(bad):
                order = np.roll(np.arange(batch_size), -at)
                after = next(int(i) for i in order if not bad[i])
                assert batch.rows[at] == right.rows[after] and torch.equal(batch[1][at], right[1][after])
        stats = loader.stats
        assert stats.damaged_samples == len(stats.damaged_rows) == 3 and sorted(stats.damaged_rows) == rows
        assert stats.fresh_samples == N - 3
        assert sum("damaged after packing" in record.getMessage() for record in caplog.records) == number + 1


def test_ranks_give_as_many_batches_whatever_is_damaged(packed, packed_copy):
    damage(packed_copy, *range(20, 26))
    for ends in ("drop", "pad", "exact"):
        for rank in range(2):
            options = {"share": (rank, 2), "ends": ends, "seed": 3, "shuffle": "full"}
            right = list(loader_of(packed, 7, **options))
            found = list(loader_of(packed_copy, 7, on_damage="skip", **options))
            assert [batch.global_valid for batch in found] == [batch.global_valid for batch in right]
            assert [batch.rows.shape for batch in found] == [batch.rows.shape for batch in right]


@pytest.mark.parametrize("transform", [None, as_it_is])
@pytest.mark.parametrize("selected", [False, True])
def test_a_short_last_batch_of_damaged_rows_alone_has_others_in_their_place(packed_copy, transform, selected):
    damage(packed_copy, 0, 58, 59)
    dataset = PackedDataset(packed_copy, transform=transform, on_damage="skip")
    dataset = dataset.select(range(60)) if selected else dataset
    with closing(FastLoader(dataset, 29, shuffle=False, workers=1, share=None)) as loader:
        *_, last = loader
    assert last.rows.tolist() == [1, 1] and last.valid.tolist() == [False, False]
    assert loader.stats.damaged_samples == 3


def test_a_batch_of_damaged_rows_alone_is_an_error(packed_copy):
    damage(packed_copy, 8, 9)
    with pytest.raises(DamagedRowError, match=r"row 8\).*1 more row"):
        pairs(loader_of(packed_copy, 2, shuffle=False, on_damage="skip"))


@pytest.mark.parametrize("masks", [False, True])
def test_rows_that_vary_in_length_are_skipped(tmp_path, masks):
    path = varied_file(tmp_path / "a.h5", masks=masks)
    flip_ragged(path, "images", 4, 20)
    flip_ragged(path, "masks" if masks else "images", 7, -20)
    for transform in ([RandomResizedCrop(8)], [RandomCrop(8)]):
        loader = FastLoader(PackedDataset(path, on_damage="skip"), 4, transform=transform, ends="exact", share=None)
        found = pairs(loader)
        assert sorted(row for row, valid in found if valid) == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]
    with pytest.raises(DamagedRowError):
        PackedDataset(path)[4]


def test_a_damaged_index_is_found_before_it_is_used(tmp_path):
    path = varied_file(tmp_path / "a.h5")
    for name in ("images_orientation", "images_shape", "images_offset", "images_encoding", "images_bytes"):
        copy = shutil.copy(path, tmp_path / f"{name}.h5")
        field = read_header(copy).fields[name]
        flip_byte(copy, field.offset + 5 * field.row_bytes)
        with pytest.raises(DamagedRowError, match=name):
            pairs(FastLoader(copy, 4, transform=[RandomResizedCrop(8)], share=None))


@pytest.mark.parametrize("cache", ["device", "host"])
def test_damaged_rows_are_not_in_a_cache(packed_copy, cache):
    damage(packed_copy, 17, 30)
    options = {"cache": cache, "ends": "exact"}
    with pytest.raises(DamagedRowError, match="row 17"):
        pairs(loader_of(packed_copy, device=Device(), **options))
    kept = loader_of(packed_copy, device=Device(), on_damage="skip", **options)
    read = loader_of(packed_copy, on_damage="skip", ends="exact")
    for _ in range(2):
        for batch, right in zip(kept, read, strict=True):
            assert batch.rows.tolist() == right.rows.tolist() and batch.valid.tolist() == right.valid.tolist()
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch, right, strict=True))
        assert sorted(kept.stats.damaged_rows) == [17, 30]
    kept.close()


def test_a_cached_batch_of_damaged_rows_alone_is_an_error_that_names_one(packed_copy):
    damage(packed_copy, 8, 9)
    loader = loader_of(packed_copy, 2, shuffle=False, on_damage="skip", device=Device(), cache="host")
    with pytest.raises(DamagedRowError, match=r"sample '.*' \(row 8\): is damaged.*fastload verify") as caught:
        pairs(loader)
    assert set(caught.value.rows) == {8, 9}


def test_a_header_that_was_changed_is_an_error_when_the_file_is_opened(packed_copy):
    with h5py.File(packed_copy, "r+") as file:
        file["labels"].attrs["names"] = np.array([b"x", b"y", b"z"])
    for opened in (lambda: PackedDataset(packed_copy), lambda: FastLoader(packed_copy, 4, share=None)):
        with pytest.raises(FormatError, match=r"its header .* is not as it was written"):
            opened()
    assert len(pairs(FastLoader(PackedDataset(packed_copy, check=None), 4, share=None))) == N


@pytest.mark.parametrize("name", ["digest", "digest_fields"])
def test_a_packed_file_without_digests_is_refused_even_if_its_header_says_so(packed_copy, name):
    with h5py.File(packed_copy, "r+") as file:
        del file[name]
        file.attrs["header_digest"] = header_digest(file)
    with pytest.raises(FormatError, match=rf"its digests cannot be read \(missing or of another type: {name}\)"):
        FastLoader(packed_copy, 4, share=None)
    assert len(pairs(FastLoader(PackedDataset(packed_copy, check=None), 4, share=None))) == N


def test_a_file_of_another_program_has_nothing_to_compare_with(tmp_path):
    path = write_foreign(tmp_path / "a.h5", random_pixels(), chunk_rows=5)
    assert PackedDataset(path).check is None
    assert pairs(FastLoader(path, 4, share=None))
    for check in ("always", "first"):
        with pytest.raises(OptionError, match="holds no digests"):
            PackedDataset(path, check=check)
    with pytest.raises(OptionError, match="compared with a digest"):
        PackedDataset(path, on_damage="skip")


def test_checks_without_meaning_are_refused(packed):
    for options, said in [
        ({"check": "sometimes"}, "check='sometimes'"),
        ({"on_damage": "ignore"}, "on_damage='ignore'"),
        ({"on_damage": "skip", "check": None}, "check other than None"),
        ({"read": "mmap"}, "read='mmap' is not known; accepted: auto, map, pread"),
    ]:
        with pytest.raises(OptionError, match=said):
            PackedDataset(packed, **options)


def test_parts_of_a_dataset_and_loaders_read_as_it_does(packed):
    dataset = PackedDataset(packed, check="always", read="pread", on_damage="skip")
    selected = dataset.select([3, 1])
    sources = [dataset, selected, selected.select([0]), dataset.only(["b"]), Subset(dataset, [1, 2])]
    sources += random_split(dataset, [0.5, 0.5])
    sources.append(PackedDataset(packed, transform=as_it_is, check="always", read="pread", on_damage="skip"))
    for source in [*sources, *pickle.loads(pickle.dumps(sources))]:
        with closing(FastLoader(source, 1, workers=1, share=None)) as loader:
            for found in (loader.dataset, loader.with_(batch_size=2, ends="pad").dataset):
                assert (found.check, found.read, found.on_damage) == ("always", "pread", "skip")
            assert loader.stats.read == "pread" and loader._options.skip_damaged


# Around the size from which rows are hashed in pieces, and that of a part that is copied at a time.
@pytest.mark.parametrize("size", [(1, 1, 3), (128, 256, 3), (129, 256, 3), (600, 600, 3)])
def test_rows_of_every_size_are_compared(tmp_path, size):
    path = write_random(tmp_path / "a.h5", rows=5, size=size)
    assert len(pairs(loader_of(path, 5, fields=("images",), shuffle=False))) == 5
    damage(path, 4)
    with pytest.raises(DamagedRowError, match="row 4"):
        pairs(loader_of(path, 5, fields=("images",), check="always"))
