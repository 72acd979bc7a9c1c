from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_files import rows_by_key
from small_trees import refused

from fastload.export import export_file
from fastload.format.digests import header_digest, plain
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.pack import pack_images
from fastload.sources.exported import FIELDS, SIDECAR, TABLE
from fastload.sources.layouts import detect_layout, list_source
from sample_files import write_packed

N = 12
SIZED = ("x", "y", "width", "height")


def make(path: Path, columns=None, *, shape=(6, 5, 3), dtype=np.uint8, **options) -> Path:
    rng = np.random.default_rng(0)
    images = rng.integers(0, np.iinfo(dtype).max + 1, (N, *shape)).astype(dtype)
    keys = np.array([f"some folder/é{row}.jpg".encode() for row in range(N)])
    return write_packed(path, images, {"key": Column(keys), **(columns or {})}, **options)


def rows_of(path: Path):
    """Every row; and of every field dtype, row shape and attributes."""
    with h5py.File(path) as file:
        kinds = {
            name: (item.dtype, item.shape, {k: plain(v) for k, v in item.attrs.items()})
            for name, item in file.items()
            if name not in ("split", "digest_fields")
        }
    return rows_by_key(path), kinds


rng = np.random.default_rng(3)
numbers = np.where(np.arange(N)[:, None] < 6, [[1, -1]], [[0, 1]])
boxes = {
    "boxes": Column(rng.integers(0, 3, (N, 2, 4)).astype(np.float32), {"names": SIZED}),
    "box_labels": Column(numbers, {"names": ("dog", "cat"), "category_ids": (7, 90)}),
    "num_boxes": Column(np.arange(N) % 2 + 1),
}
labels = {"labels": Column(np.arange(N) % 4 - 1, {"names": ("10", "2", "nan", "train")})}
CASES = {
    "vector labels next to columns": {
        "labels": Column(rng.integers(0, 2, (N, 40), dtype=np.uint8), {"names": tuple(f"a{i}" for i in range(40))}),
        "identity": Column(np.arange(N) * 3 % 5),
        "bbox": Column(rng.integers(0, 999, (N, 4), dtype=np.int32), {"names": SIZED, "coordinates": "original"}),
    },
    "boxes and labels": {**boxes, **labels},
    "labels of which some are none": labels,
    "arrays": {
        "wide": Column(rng.normal(size=(N, 7))),
        "large": Column(rng.integers(0, 2**64, (N, 3), dtype=np.uint64), {"scale": 0.1, "unit": "m"}),
        "small": Column(np.arange(N).astype(np.int8)),
        "half": Column(rng.normal(size=(N, 2, 3)).astype(np.float16)),
        "name": Column(np.array([b"x" * (row % 3) for row in range(N)])),
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [None, {"val": N}, {"train": 5, "extra": 7}])
def test_every_field_comes_back_with_dtype_and_attributes(tmp_path, name, splits):
    source = make(tmp_path / "a.h5", CASES[name], splits=splits)
    export_file(source, tmp_path / "out", workers=1)
    report = pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0)
    assert report.layout == "exported" and read_header(tmp_path / "b.h5").attrs["source_layout"] == "exported"
    assert rows_of(tmp_path / "b.h5") == rows_of(source)
    assert list(read_header(tmp_path / "b.h5").splits) == list(read_header(source).splits)
    if name == "arrays" and not splits:  # and from an archive of the folder
        shutil.make_archive(str(tmp_path / "z"), "zip", tmp_path, "out")
        pack_images(tmp_path / "z.zip", tmp_path / "c.h5", workers=0)
        assert rows_of(tmp_path / "c.h5") == rows_of(source)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 5, 1), np.uint16), ((6, 5, 3), np.uint16), ((6, 5, 4), np.uint8), ((6, 5, 1), np.uint8)]
)
@pytest.mark.parametrize("layout", ["auto", "csv"])
def test_masks_and_pixels_come_back_with_what_they_mean(tmp_path, shape, dtype, layout):
    masks = rng.integers(0, 4, (N, 6, 5), dtype=np.uint8)
    source = make(tmp_path / "a.h5", labels, shape=shape, dtype=dtype, masks=masks, ignore_index=3)
    with h5py.File(source, "r+") as file:
        file["masks"].attrs["names"] = ["sky", "road", "car"]
        file["masks"].attrs["scale"] = 0.5
        file.attrs["header_digest"] = header_digest(file)
    export_file(source, tmp_path / "out", layout=layout, workers=1)
    pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0)
    assert rows_of(tmp_path / "b.h5") == rows_of(source)
    assert list_source(tmp_path / "out", options=SourceOptions(masks="none")).masks is None


def test_folders_of_classes_come_back_and_boxes_move_with_a_size(tmp_path):
    plain_labels = {"labels": Column(np.arange(N) % 3, {"names": ("n01440764", "img_align_celeba", "fastload.json")})}
    source = make(tmp_path / "a.h5", plain_labels, splits={"train": 6, "val": 6})
    assert export_file(source, tmp_path / "out").layout == "folder"
    pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0)
    assert rows_of(tmp_path / "b.h5") == rows_of(source)
    alone = make(tmp_path / "c.h5", plain_labels)
    assert export_file(alone, tmp_path / "one").layout == "folder"
    assert detect_layout(tmp_path / "one") == ("exported", [SIDECAR])
    export_file(make(tmp_path / "d.h5", boxes), tmp_path / "boxed")
    pack_images(tmp_path / "boxed", tmp_path / "e.h5", size=(12, 10), fit="stretch", workers=0, shuffle=False)
    with h5py.File(tmp_path / "e.h5") as file:
        assert np.array_equal(file["boxes"][()], boxes["boxes"].values * 2)


@pytest.fixture
def exported(tmp_path) -> Path:
    export_file(make(tmp_path / "a.h5", {**labels, **boxes}), tmp_path / "out", workers=1)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "images" / "new.png").write_bytes(b""), "images were added that it does not list"),
        (
            lambda folder: (folder / TABLE).write_bytes((folder / TABLE).read_bytes() + b"\n"),
            "manifest.csv was changed",
        ),
        (lambda folder: min((folder / "images").iterdir()).unlink(), r"files it lists are gone \(1\)"),
        (lambda folder: (folder / FIELDS).unlink(), "files it lists are gone"),
        (lambda folder: (folder / SIDECAR).write_text("["), "it is no JSON"),
        (lambda folder: (folder / SIDECAR).write_text("{}"), "not what `fastload export` writes"),
        (lambda folder: (folder / SIDECAR).write_text('{"format": "fastload-export", "version": 9}'), "version 9"),
    ],
)
def test_what_the_user_changed_is_what_is_packed(exported, change, why):
    change(exported)
    assert detect_layout(exported)[0] == "manifest"
    listing = list_source(exported, on_error="skip")
    assert listing.layout == "manifest" and any("was passed over" in note for note in listing.notes)
    refused(why, exported, "exported")


def test_class_folders_that_were_changed_are_packed_as_folders(tmp_path):
    ants = {"labels": Column(np.arange(N) % 2, {"names": ("ant", "bee")})}
    export_file(make(tmp_path / "a.h5", ants), tmp_path / "out", layout="folder")
    moved = min((tmp_path / "out" / "ant").iterdir())
    moved.rename(tmp_path / "out" / "bee" / "moved.png")
    report = pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0)
    assert report.layout == "folder" and "files it lists are gone (1)" in report.notes[-1]
    with h5py.File(tmp_path / "b.h5") as file:
        assert np.bincount(file["labels"][()]).tolist() == [5, 7]


def described(**values):
    return {"columns": [{"name": "boxes", "dtype": "<f4", "shape": [2, 4], "attrs": {}} | values]}


def edited(folder: Path, **values) -> None:
    said = json.loads((folder / SIDECAR).read_text())
    (folder / SIDECAR).write_text(json.dumps(said | values))


@pytest.mark.parametrize(
    "path", ["../a.png", "/etc/passwd", "images/../../a.png", "images\\..\\a.png", "images//a.png"]
)
def test_nothing_leads_out_of_the_folder(exported, path):
    Image.new("RGB", (5, 6)).save(exported.parent / "a.png")
    rows = json.loads((exported / SIDECAR).read_text())["rows"]
    for row in ([rows[0][0], path, ""], [*rows[0][:2], path]):
        edited(exported, rows=[row, *rows[1:]])
        refused("would lead out of the folder", exported, "exported")
    edited(exported, rows=[rows[0], ["another", *rows[0][1:]], *rows[2:]])
    refused("it lists a file twice", exported, "exported")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": [["a", 1, ""]]}, "not a key, an image and a mask"),
        ({"rows": None}, "no rows"),
        ({"split_names": []}, "split_names"),
        ({"split_names": ["a", "a"]}, "split_names"),
        ({"columns": 3}, "does not describe the columns"),
        ({"columns": [{"name": "../x"}]}, "no name of a column"),
        ({"columns": [{"name": "split"}]}, "no name of a column"),
        (described(shape=[3, 4]), r"fastload.json says float32"),
        (described(dtype="O"), "never holds"),
        (described(dtype="?!"), "dtype of `boxes`"),
        (described(shape=[-2]), "shape of `boxes`"),
        (described(attrs={"a": None}), "neither texts nor"),
        (described(name="num_boxes", dtype="<i8", shape=[], moves="xywh"), "coordinates such"),
        (described(name="absent", dtype="<i8", shape=[]), "`absent` is absent, fastload.json says int64"),
        ({"masks": {"names": [], "ignore_index": 70000, "attrs": {}}}, "ignore_index is 70000"),
        ({"masks": {"names": [], "ignore_index": None, "attrs": {}}}, "describes masks and lists none"),
        ({"masks": 3}, "description of masks"),
    ],
)
def test_a_sidecar_that_contradicts_is_refused_by_name(exported, values, why):
    edited(exported, **values)
    refused(why, exported, "exported")


def test_arrays_are_checked_before_they_are_read(exported):
    whole = (exported / FIELDS).read_bytes()
    (exported / FIELDS).write_bytes(whole[:100])
    refused(r"fields\.npz: damaged", exported)
    arrays = dict(np.load(io.BytesIO(whole)))
    np.savez(exported / FIELDS, **arrays | {"boxes": np.array([{}] * N, dtype=object)})
    refused(r"fields\.npz: damaged, or not the file.*Python objects", exported)
    np.savez(exported / FIELDS, **arrays | {"split": np.full(N, 3, np.uint8)})
    refused("split 3, of 1 that have names", exported)
    for boxes in (np.zeros((N, 2**20), np.float32), arrays["boxes"].astype(np.int32)):
        np.savez_compressed(exported / FIELDS, **arrays | {"boxes": boxes})
        refused(r"`boxes` is .*fastload.json says float32 \(12, 2, 4\)", exported)
    with zipfile.ZipFile(exported / FIELDS, "w") as archive:
        archive.writestr("boxes.npy", bytes(2**20))
    refused(r"fields\.npz: damaged, or not the file.*not an \.npy array", exported)
