from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from small_trees import notes_of, read, refused, values

import fastload.sources.arrays as named
from fastload.errors import FileChangedError
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.raw_rows import MemoryRows, RawRows

RNG = np.random.default_rng(0)
N = 9
PIXELS = RNG.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(N) % 4


STORAGE = {
    "contiguous": ({}, RawRows),
    "linear chunks": ({"chunks": (3, 6, 5, 3)}, RawRows),
    "gzip": ({"chunks": (4, 6, 5, 3), "compression": "gzip", "shuffle": True}, MemoryRows),
    "cut chunks": ({"chunks": (4, 3, 5, 3)}, MemoryRows),
}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("transposed", [False, True])
def test_images_and_labels_are_read_in_place_where_that_is_possible(tmp_path, storage, transposed):
    options, kind = STORAGE[storage]
    pixels = PIXELS.transpose(0, 3, 1, 2).copy() if transposed else PIXELS
    if "chunks" in options and transposed:
        options = options | {"chunks": (options["chunks"][0], 3, *options["chunks"][1:3])}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=pixels, **options)
        file["labels"] = LABELS
        file["labels"].attrs["names"] = ["a", "b", "c", "d"]
        file["mean"] = 1.5
    assert detect_layout(tmp_path / "a.h5") == ("hdf5", ["a.h5"])
    listing = list_source(tmp_path / "a.h5")
    assert isinstance(listing.files, kind)
    assert np.array_equal(read(listing.files, range(N)), PIXELS)
    assert values(listing) == LABELS.tolist() and "mean" in notes_of(listing)
    assert listing.columns["labels"].attrs["names"] == ("a", "b", "c", "d")


def test_a_file_larger_than_memory_is_read_chunk_by_chunk(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=PIXELS.transpose(0, 3, 1, 2), chunks=(4, 3, 6, 5), compression="gzip")
    monkeypatch.setattr(named, "available_memory", lambda: 100)
    rows = list_source(tmp_path).files
    assert rows.shape == (6, 5, 3) and rows.dtype == np.uint8 and not isinstance(rows, MemoryRows)
    assert np.array_equal(read(rows, [8, 0, 3, 3, 7]), PIXELS[[8, 0, 3, 3, 7]])
    assert np.array_equal(read(rows.take(np.array([5, 2])), [1, 0]), PIXELS[[2, 5]])
    os.utime(tmp_path / "a.h5", (1, 1))
    with pytest.raises(FileChangedError, match="was written to"):
        read(rows, range(N))


@pytest.mark.parametrize("pcam", [False, True])
def test_splits_by_group_or_as_in_pcam_a_file_for_each_split_and_field(tmp_path, pcam):
    pixels = RNG.integers(0, 65536, (N, 6, 5)).astype(">u2")
    for split, some in (("train", slice(0, 6)), ("valid", slice(6, 9))):
        for field, rows in (("x", pixels[some]), ("y", LABELS[some].reshape(-1, 1, 1, 1).astype(np.uint8))):
            name = f"camelyonpatch_level_2_split_{split}_{field}.h5" if pcam else "a.hdf5"
            with h5py.File(tmp_path / name, "a") as file:
                file[field if pcam else f"{split}/{field}"] = rows
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0] * 6 + [1] * 3
    assert np.array_equal(read(listing.files, range(N))[..., 0], pixels)
    assert listing.files.dtype == np.dtype(np.uint16) and values(listing) == LABELS.tolist()


FUEL = np.dtype([
    ("split", "S8"), ("source", "S10"), ("start", "i8"), ("stop", "i8"),
    ("indices", h5py.special_dtype(ref=h5py.Reference)), ("available", "?"), ("comment", "S1"),
])  # fmt: skip


def fuel(path, lines, attribute="split"):
    with h5py.File(path, "w") as file:
        file["features"] = PIXELS.transpose(0, 3, 1, 2)
        file["targets"] = LABELS.reshape(-1, 1).astype(np.uint8)
        if any(line[4] for line in lines):
            file["rows"] = np.array([8, 1])
        table = np.zeros(len(lines), FUEL)
        for at, (split, source, start, stop, indices, available) in enumerate(lines):
            reference = file["rows"].ref if indices else h5py.Reference()
            table[at] = (split, source, start, stop, reference, available, b"")
        file.attrs[attribute] = table
    return path


def test_fuels_splits_by_range_or_list_and_withheld_targets(tmp_path):
    lines = [("train", "features", 0, 5, 0, 1), ("train", "targets", 0, 5, 0, 1),
             ("test", "features", 5, 8, 0, 1), ("test", "targets", 5, 8, 0, 0)]  # fmt: skip
    for attribute in ("split", "split_array"):
        listing = list_source(fuel(tmp_path / f"{attribute}.hdf5", lines, attribute))
        assert listing.split_names == ("train", "test", "other")
        assert listing.split.tolist() == [0] * 5 + [1] * 3 + [2]
        assert values(listing) == [*LABELS[:5], -1, -1, -1, LABELS[8]] and "withheld for 3 rows" in notes_of(listing)
        assert np.array_equal(read(listing.files, range(N)), PIXELS)
    # They may also be lists of rows.
    lines = [("train", "features", 0, 0, 1, 1), ("test", "features", 2, 8, 0, 1)]
    listing = list_source(fuel(tmp_path / "a.hdf5", lines))
    assert listing.split_names == ("train", "test", "other")
    assert listing.split.tolist() == [2, 0, 1, 1, 1, 1, 1, 1, 0]
    assert "rows" not in listing.columns


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([("train", "features", 0, 5, 0, 1), ("valid", "features", 4, 6, 0, 1)], "splits 'train' and 'val' share rows"),
        ([("train", "features", 0, 50, 0, 1)], "'train' names rows that are not there"),
        ([("train", "features", 0, 5, 0, 1), ("train", "targets", 0, 4, 0, 1)], "'train' has other rows for targets"),
    ],
)
def test_contradicting_splits_are_named(tmp_path, lines, reason):
    refused(reason, fuel(tmp_path / "a.hdf5", lines))


def virtual(file, other):
    layout = h5py.VirtualLayout((9,), "i8")
    layout[:] = h5py.VirtualSource(other, "x", (9,))
    file.create_virtual_dataset("labels", layout)


def other_images(file, *args):
    del file["images"]
    file.create_dataset("images", *args)


# Each changes a file of images, given the path of another file that holds /x.
SPOILED = (
    (lambda file, other: file.update(labels=h5py.ExternalLink(other, "/x")), "`labels` is a link into another file"),
    (lambda file, other: file.create_dataset("labels", (9,), "u1", external=[(other, 0, 9)]), "data in another file"),
    (virtual, "`labels` is a virtual dataset"),
    (lambda file, _: file.update(labels=h5py.SoftLink("/nowhere")), "`labels` leads nowhere"),
    (
        lambda file, other: file.update({"a/b": h5py.ExternalLink(other, "/x"), "labels": h5py.SoftLink("/a/b")}),
        "link into another file|leads into another file",
    ),
    (lambda file, _: other_images(file, None, None, PIXELS / 255), r"the images are float64 .*images \* 255"),
    (lambda file, _: other_images(file, (9,), h5py.vlen_dtype(np.uint8)), "images: rows of different length"),
    (lambda file, _: file.update(labels=LABELS[:4]), "unequal length: images 9, labels 4"),
    (lambda file, _: file.attrs.update(fastload_version=1), "fastload packed this file.*fastload repack"),
)


@pytest.mark.parametrize(("change", "reason"), SPOILED)
def test_what_is_unsafe_or_wrong_is_refused_and_named(tmp_path, change, reason):
    with h5py.File(tmp_path / "secret.bin", "w") as file:
        file["x"] = LABELS
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = PIXELS
        change(file, str(tmp_path / "secret.bin"))
    refused(reason, tmp_path / "a.h5")


def test_a_circle_of_groups_ends_and_two_files_of_one_name_or_damaged_ones_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["images"] = PIXELS
        file["self"] = file["/"]
    assert len(list_source(path)) == 9
    whole = path.read_bytes()
    (tmp_path / "b.h5").write_bytes(whole)
    refused("several files hold images", tmp_path)
    for content, reason in ((b"hello", "not an HDF5"), (b"", "empty"), (whole[:-100], "truncated")):
        path.write_bytes(content)
        refused(reason, path)
