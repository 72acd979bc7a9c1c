"""Repack and merge of files with rows of varying length."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from interrupted import stop_at
from ragged_cases import NUM_ROWS, flip, jpeg_row, varied_file, varied_rows

from fastload.errors import SourceError
from fastload.export import export_file
from fastload.format.header import read_header
from fastload.format.ragged import ENCODINGS, JPEG, Column
from fastload.inspection.verify import verify_file
from fastload.options.pack import EncodingOption, PackOptions
from fastload.pack import PackJob, pack_images
from fastload.pack.pool import PackPool
from fastload.pack.survey import survey_listing
from fastload.read.checked import CheckedSamples, close_readers
from fastload.repack import merge_files, repack_file
from fastload.repack.merge import list_merged
from fastload.repack.packed_listing import list_packed
from fastload.repack.packed_rows import RaggedRows
from sample_files import write_packed


def by_key(path: Path) -> dict[str, tuple]:
    """Split, label, digest, and the whole stored sample of each row."""
    samples = CheckedSamples(read_header(path))
    with h5py.File(path) as file:
        splits = file["split"].attrs["names"].astype(str)[file["split"][()]]
        names = file["labels"].attrs["names"].astype(str)
        labels = [names[label] for label in file["labels"][()]]
        keys = file["key"][()].astype(str)
    found = {}
    for row, key in enumerate(keys):
        each = samples.checked(row).row
        found[key] = (
            splits[row], labels[row], each.digest, each.encoding, bytes(each.image), each.shape, each.orientation,
            each.mask_encoding, each.mask and bytes(each.mask),
        )  # fmt: skip
    samples.close()
    return found


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("size", [None, (16, 20)])
def test_rows_stay_as_they_are_stored(tmp_path: Path, masks: bool, size: tuple[int, int] | None) -> None:
    path = varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=masks)
    report = repack_file(path, tmp_path / "b.h5", shuffle=True, seed=3, chunk_bytes=8192)
    assert report.num_samples == NUM_ROWS and report.splits == {"train": 8, "val": 4}
    before, after = by_key(path), by_key(tmp_path / "b.h5")
    assert before == after and list(before) != list(after)
    file = read_header(tmp_path / "b.h5")
    assert file.attrs["shuffled"] and file.seed == 3
    store = file.fields["images"].ragged
    assert store is not None and store.chunk_bytes == 8192
    assert not masks or file.fields["masks"].attrs["ignore_index"] == 255
    assert verify_file(tmp_path / "b.h5").ok
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.h5", "b.h5"]


@pytest.mark.parametrize("size", [None, (90, 120)])
def test_the_bytes_needed_are_those_that_are_stored(tmp_path: Path, size: tuple[int, int] | None) -> None:
    """A file of JPEGs needs no more space than it takes, and so much is reserved."""
    rows = [jpeg_row(*(size or (90 + i, 120)), seed=i) for i in range(40)]
    path = varied_file(tmp_path / "a.h5", rows, masks=True)
    _, listing = list_packed(path)
    options = PackOptions(store=EncodingOption("keep"), codec="none", chunk_bytes=4096, shuffle=False)
    with PackPool(0) as pool:
        pool.use(listing)
        survey = survey_listing(PackJob("S", Path(), listing, options), pool)
    close_readers()
    file = read_header(path)
    for name, num_bytes in survey.dataset_bytes.items():
        store = file.fields[name].ragged
        assert num_bytes == (store.num_bytes if size is None or name == "images" else 40 * 90 * 120)
    assert survey.bytes_needed == pytest.approx(path.stat().st_size, rel=0.1)


def test_zstd_compresses_what_is_raw_and_keeps_digests(tmp_path: Path) -> None:
    rows = [np.zeros_like(row) if isinstance(row, np.ndarray) else row for row in varied_rows()]
    path = varied_file(tmp_path / "a.h5", rows, masks=True)
    repack_file(path, tmp_path / "b.h5", codec="zstd", workers=0)
    before, after = by_key(path), by_key(tmp_path / "b.h5")
    assert [each[:3] for each in before.values()] == [each[:3] for each in after.values()]
    assert [ENCODINGS[each[3]] for each in after.values()] == ["zstd", "jpeg"] * 6
    assert verify_file(tmp_path / "b.h5").ok
    repack_file(tmp_path / "b.h5", tmp_path / "c.h5", workers=0)
    assert by_key(tmp_path / "c.h5") == after
    repack_file(tmp_path / "b.h5", tmp_path / "d.h5", codec="none", workers=0)
    assert by_key(tmp_path / "d.h5") == before  # back to raw pixels
    repack_file(tmp_path / "d.h5", tmp_path / "e.h5", workers=0)
    assert by_key(tmp_path / "e.h5") == before
    flip(tmp_path / "b.h5", "images", 4, 2)  # the head of a zstd frame
    (found,) = verify_file(tmp_path / "b.h5").damaged
    assert found.row == 4


def test_a_damaged_row_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    before = by_key(path)
    flip(path, "images", 5, -9)
    with pytest.raises(SourceError, match=r"005\.jpg: its pixels changed since packing"):
        repack_file(path, tmp_path / "b.h5")
    report = repack_file(path, tmp_path / "c.h5", on_error="skip")
    assert [key for key, _ in report.skipped] == ["005.jpg"]
    after = by_key(tmp_path / "c.h5")
    assert {key: row for key, row in before.items() if key != "005.jpg"} == after


def test_a_jpeg_damaged_before_it_was_packed_is_left_out_too(tmp_path: Path) -> None:
    rows = varied_rows()
    data, *rest = rows[5]
    table = data.index(b"\xff\xc4")
    rows[5] = (data[: table + 5] + b"\xff" * 16 + data[table + 21 :], *rest)  # no Huffman code has so many words
    path = varied_file(tmp_path / "a.h5", rows, masks=True)
    (found,) = verify_file(path).damaged
    assert found.row == 5 and "cannot be decoded" in found.what and "damaged before it was packed" in found.what
    assert repack_file(path, tmp_path / "b.h5").num_samples == NUM_ROWS  # copied, not decoded
    report = repack_file(path, tmp_path / "c.h5", on_error="skip", workers=1)
    ((key, reason),) = report.skipped
    assert key == "005.jpg" and "damaged before it was packed" in reason
    assert verify_file(tmp_path / "c.h5").ok
    merged = merge_files([path, tmp_path / "c.h5"], tmp_path / "d.h5", on_error="skip", workers=1)
    assert merged.num_samples == 2 * NUM_ROWS - 2 and verify_file(tmp_path / "d.h5").ok


def test_interrupted_the_same_call_continues(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    repack_file(path, tmp_path / "whole.h5", chunk_bytes=2048)
    with pytest.raises(KeyboardInterrupt):
        repack_file(path, tmp_path / "b.h5", chunk_bytes=2048, progress=stop_at(1, "packing"))
    assert not (tmp_path / "b.h5").exists()
    report = repack_file(path, tmp_path / "b.h5", chunk_bytes=2048)
    assert report.chunks_kept > 0 and (tmp_path / "b.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_listings_of_stores_survive_a_pickle(tmp_path: Path) -> None:
    _, listing = list_packed(varied_file(tmp_path / "a.h5", masks=True))
    kept = pickle.loads(pickle.dumps(listing.files)).take(np.array([5, 2]))
    assert bytes(kept.encoded(0).image) == varied_rows()[5][0]
    assert kept.header(1).height == varied_rows()[2].shape[0] and kept.read(1).shape == varied_rows()[2].shape
    close_readers()


def test_files_of_equal_kind_are_merged_and_what_is_stored_of_each_row_is_known(tmp_path: Path) -> None:
    first = varied_file(tmp_path / "a.h5", masks=True, prefix="a")
    second = varied_file(tmp_path / "b.h5", varied_rows(size=(16, 20))[::-1], masks=True, prefix="b")
    rows = list_merged([first, second]).files
    assert isinstance(rows, RaggedRows)
    stored = [rows.encoded(i) for i in range(2 * NUM_ROWS)]
    assert rows.stored_bytes.tolist() == [len(bytes(each.image)) for each in stored]
    assert rows.is_jpeg.tolist() == [each.encoding == JPEG for each in stored]
    merge_files([first, second], tmp_path / "c.h5")
    file = read_header(tmp_path / "c.h5")
    assert file.fields["images"].varied and file.num_rows == 2 * NUM_ROWS
    assert by_key(tmp_path / "c.h5") == by_key(first) | by_key(second)
    assert verify_file(tmp_path / "c.h5").ok


def test_rows_of_one_size_and_a_store_are_not_merged(tmp_path: Path) -> None:
    columns = {"labels": Column(np.arange(4) % 3, {"names": ("ant", "bee", "cat")})}
    plain = write_packed(tmp_path / "a.h5", np.zeros((4, 8, 8, 3), np.uint8), columns)
    stored = varied_file(tmp_path / "b.h5")
    gray = varied_file(tmp_path / "c.h5", [np.zeros((4 + i, 5, 1), np.uint8) for i in range(6)])
    with pytest.raises(
        SourceError, match=r"`images`: uint8 \(8, 8, 3\) in .*a\.h5, uint8 rows of varying length.*--store"
    ):
        merge_files([plain, stored], tmp_path / "d.h5")
    with pytest.raises(SourceError, match=r"with 3 channels in .*b\.h5, .* with 1 channels in .*c\.h5"):
        merge_files([stored, gray], tmp_path / "d.h5")


@pytest.mark.parametrize("masks", [False, True])
def test_an_export_packed_again_has_the_same_rows(tmp_path: Path, masks: bool) -> None:
    path = varied_file(tmp_path / "a.h5", masks=masks)
    export_file(path, tmp_path / "out")
    pack_images(tmp_path / "out", tmp_path / "b.h5", store="source", codec="none", shuffle=False, workers=0)
    before, after = by_key(path), by_key(tmp_path / "b.h5")
    assert before == after and list(before) == list(after)
