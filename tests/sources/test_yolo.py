import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import archived, refused_or_skipped, write

from fastload import pack_images
from fastload.errors import MissingExtraError, SourceError
from fastload.sources.layouts import detect_layout, list_source

NAMES = "names:\n  0: cat\n  1: dog\n"


def image(path: Path, width: int = 40, height: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (200, 90, 10)).save(path)
    return path


@pytest.fixture
def yolo(tmp_path: Path) -> Path:
    """As Ultralytics has it: a box, a polygon, an image without objects, one with an empty file."""
    root = tmp_path / "pets"
    for name in ("train/a", "train/b", "train/c", "val/d"):
        image(root / "images" / f"{name}.png", 40 if name != "val/d" else 80)
    write(root / "labels/train/a.txt", "1 0.5 0.5 0.5 0.5\n0 0.1 0.2 0.2 0.4\n")
    write(root / "labels/train/b.txt", "0 0.25 0.1 0.75 0.1 0.5 0.6\n")
    write(root / "labels/train/c.txt", "")
    write(root / "data.yaml", NAMES)
    return root


def test_boxes_are_pixels_and_classes_have_their_names(yolo: Path, tmp_path: Path) -> None:
    assert detect_layout(yolo) == ("yolo", ["images/train/a.png", "labels/train/a.txt"])
    listing = list_source(yolo)
    assert listing.keys == tuple(f"images/{name}.png" for name in ("train/a", "train/b", "train/c", "val/d"))
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 0, 0, 1]
    assert listing.columns["boxes"].values.tolist() == [
        [[10, 5, 20, 10], [0, 0, 8, 8]], [[10, 2, 20, 10], [0] * 4], [[0] * 4] * 2, [[0] * 4] * 2,
    ]  # fmt: skip
    assert listing.columns["box_labels"].values.tolist() == [[1, 0], [0, -1], [-1, -1], [-1, -1]]
    assert listing.columns["box_labels"].attrs["names"] == ("cat", "dog")
    assert listing.columns["num_boxes"].values.tolist() == [2, 1, 0, 0]
    notes = " ".join(listing.notes)
    assert "Objects given by polygons (1)" in notes and "Images without an object were kept (2)" in notes
    pack_images(yolo, tmp_path / "out.h5", size=(10, 20))  # half of the 40x20 ones: boxes follow
    with h5py.File(tmp_path / "out.h5") as file:
        (row,) = np.flatnonzero(file["num_boxes"][()] == 2)
        assert file["boxes"][row].tolist() == [[5, 2.5, 10, 5], [0, 0, 4, 4]]


def test_as_exported_by_roboflow_and_in_an_archive(tmp_path: Path) -> None:
    root = tmp_path / "export"
    for split in ("train", "valid"):
        image(root / split / "images" / f"{split}.jpg")
        write(root / split / "labels" / f"{split}.txt", "2 0.5 0.5 1 1\n")
    write(root / "classes.txt", "ant\nbee\nfly\n")
    for path in (root, archived(root, tmp_path / "export.zip")):
        assert detect_layout(path)[0] == "yolo"
        listing = list_source(path)
        assert listing.split_names == ("train", "val")
        assert listing.columns["boxes"].values.tolist() == [[[0, 0, 40, 20]]] * 2
        assert listing.columns["box_labels"].attrs["names"] == ("ant", "bee", "fly")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2 0.5 0.5 0.5 0.5", "line 1 of its labels has class 2, and only 2 have names"),
        ("0 0.9 0.5 0.5 0.5", "has a box outside of the image, or of negative size: 0.9 0.5 0.5 0.5"),
        ("0 0.5 0.5 -0.5 0.5", "of negative size"),
        ("0 0.5 0.5 0.5 1.5 0.1 0.1", "has a polygon outside of the image"),
        ("0 0.5 0.5 0.2 0.2 0.3", "5 numbers behind the class"),
        ("cat 0.5 0.5 0.2 0.2", "line 1 of its labels is no object: 'cat 0.5"),
    ],
)
def test_lines_that_cannot_be_are_named(yolo: Path, line: str, reason: str) -> None:
    write(yolo / "labels/train/b.txt", line + "\n")
    skipped = refused_or_skipped(reason, yolo).skipped
    assert [key for key, _ in skipped] == ["images/train/b.png"]


def test_labels_without_an_image_and_names_that_cannot_be_read(yolo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(yolo / "labels/val/gone.txt", "0 0.5 0.5 0.1 0.1\n")
    refused_or_skipped("labels/val/gone.txt has labels, but no image of its name", yolo)
    (yolo / "labels/val/gone.txt").unlink()
    for text, message in (("names: {0: cat, 2: dog}", "no list of the classes"), ("names: [", "is no YAML")):
        write(yolo / "data.yaml", text)
        with pytest.raises(SourceError, match=message):
            list_source(yolo)
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nnames: *b\n"
    for text, message in ((bomb, "YAML aliases"), ("nc: 3\n" + NAMES, "`nc` is 3, and 2 classes have names")):
        write(yolo / "data.yaml", text)
        with pytest.raises(SourceError, match=message):
            list_source(yolo)
    write(yolo / "data.yaml", "train: images/val\nval: ../images/val\ntest: test.txt\n" + NAMES)
    note = "NOT READ: train: images/val, test: test.txt in data.yaml"
    assert note in " ".join(list_source(yolo).notes)
    write(yolo / "data.yaml", "train: ../images/train\nval: images/val\n" + NAMES)
    assert "NOT READ" not in " ".join(list_source(yolo).notes)
    write(yolo / "data.yaml", "kpt_shape: [2, 2]\n" + NAMES)
    write(yolo / "labels/train/a.txt", "0 0.5 0.5 0.5 0.5 0.1 0.1 0.2 0.2\n")
    write(yolo / "labels/train/b.txt", "")
    listing = list_source(yolo)
    assert "NOT READ: keypoints" in " ".join(listing.notes)
    assert np.array_equal(listing.columns["boxes"].values[0, 0], [10, 5, 20, 10])
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match="pip install pyyaml"):
        list_source(yolo)
