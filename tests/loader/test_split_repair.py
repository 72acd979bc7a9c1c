"""Bytes of `split` that rot decide which rows are a split's before any row is read."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest

from fastload import DamagedRowError, FastLoader, PackedDataset, verify_file
from fastload.errors import FormatError, SourceError
from fastload.format.header import read_header
from fastload.repack import repack_file

PACKED = {"rows": 20, "classes": "ab", "splits": {"train": 12, "val": 5, "test": 3}}
SPLITS = {"train": range(12), "val": range(12, 17), "test": range(17, 20)}


@pytest.fixture
def change(packed, tmp_path):
    """Returns a copy of the file whose `split` has other values in some rows."""

    def changed(values):
        path = shutil.copy(packed, tmp_path / "changed.h5")
        with h5py.File(path) as file:
            at = file["split"].id.get_offset()
        with open(path, "r+b") as file:
            for row, value in values.items():
                file.seek(at + row)
                file.write(bytes([value]))
        return path

    return changed


def test_every_flipped_bit_of_every_row_leaves_the_splits_as_they_were_packed(packed, change):
    with h5py.File(packed) as file:
        stored = file["split"][()]
    for row in range(20):
        for bit in range(8):
            assert read_header(change({row: stored[row] ^ 1 << bit})).splits == SPLITS, (row, bit)


@pytest.mark.parametrize("rows", [(10, 11), (12, 13, 14), (0, 19), (3, 5, 6, 15), (0, 1, 2, 3)])
def test_several_rows_are_put_right_at_once(change, rows):
    assert read_header(change(dict.fromkeys(rows, 1))).splits == SPLITS


def test_a_row_whose_split_rotted_is_named_skipped_and_left_out_and_none_is_in_another_split(change, tmp_path):
    path = change({11: 1})
    for split, count in (("train", 12), ("val", 5)):
        images = PackedDataset(path, split=split, fields=("images",), check="always")
        rows = [row for batch in FastLoader(images, 1, shuffle=False) for row in batch.rows.tolist()]
        assert rows == list(SPLITS[split]) and len(rows) == count
    with pytest.raises(DamagedRowError, match="row 11"):
        list(FastLoader(path, 4, shuffle=False))
    loader = FastLoader(PackedDataset(path, on_damage="skip"), 4, shuffle=False)
    assert sum(int(batch.valid.sum()) for batch in loader) == 19 and loader.stats.damaged_rows == (11,)
    assert [damage.row for damage in verify_file(path).damaged] == [11]
    repack_file(path, tmp_path / "whole.h5", on_error="skip")
    assert {name: len(rows) for name, rows in read_header(tmp_path / "whole.h5").splits.items()} == {
        "train": 11, "val": 5, "test": 3,
    }  # fmt: skip


def test_splits_that_no_digest_explains_are_refused(packed, change):
    path = change({5: 1})
    with h5py.File(path, "r+") as file:
        file["labels"][5] += 1  # now no number fits the digest
    with pytest.raises(FormatError, match="split"):
        read_header(path)
    with h5py.File(path) as file:
        assert np.count_nonzero(file["split"][()] == 1) == 6


def test_a_file_of_which_no_row_is_left_is_an_error_that_names_it(packed_copy, tmp_path):
    with h5py.File(packed_copy, "r+") as file:
        file["labels"][...] += 1
    with pytest.raises(SourceError, match=r"file\.h5: not one of 20 rows is what was packed"):
        repack_file(packed_copy, tmp_path / "out.h5", on_error="skip")
