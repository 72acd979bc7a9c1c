import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import archived, notes_of, refused, refused_or_skipped, values, write

from fastload import pack_images
from fastload.errors import MissingExtraError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.open_tree import open_tree
from fastload.sources.yolo import yolo_evidence

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
        ("2 0.5 0.5 0.5 0.5", "line 1 has class 2, and only 2 have names; classes count from"),
        ("\n0 0.9 0.5 0.5 0.5", "line 2 has a box outside of the image, or of negative size: 0.9 0.5 0.5 0.5"),
        ("0 0.1 0.1 0.8 0.9", "as two corners it would fit: `--boxes xyxy`"),
        ("0 100 50 20 10", "line 1 has a box outside of the image.*: 100 50 20 10; these look like pixels"),
        ("0 0.5 0.5 -0.5 0.5", "of negative size"),
        ("0 0.5 0.5 0.5 1.5 0.1 0.1", "has a polygon outside of the image"),
        (
            "0 0.5 0.5 0.2 0.2 0.3",
            "5 numbers behind the class.* confidence, remove it: `sed .* angle, write the four corners",
        ),
        ("-1 0.5 0.5 0.2 0.2", "has the class '-1', which is no number of a class"),
        ("0.5 0.5 0.5 0.2 0.2", "has the class '0.5'"),
        ("1e400 0.5 0.5 0.2 0.2", "has the class '1e400'"),
        ("0 1e400 0.5 0.2 0.2", "has a box outside of the image"),
        ("fox 0.5 0.5 0.2 0.2", "has the class 'fox', which is no number of a class: 'fox 0.5 .* Known are cat, dog"),
        ("0 0.5 0.5 0.2", "line 1 is no class with four numbers: '0 0.5 0.5 0.2'"),
        ("0 0.5 0.5 nan 0.2", "is no class with four numbers"),
        ("Car 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 13.22 -1.62", "KITTI's lines"),
        ("100 100 200 100 200 200 100 200 plane 0", "DOTA's and ICDAR's"),
        ("3", "for classes of whole images, write a table"),
    ],
)
def test_lines_that_cannot_be_are_named(yolo: Path, line: str, reason: str) -> None:
    write(yolo / "labels/train/b.txt", line + "\n")
    skipped = refused_or_skipped(reason, yolo).skipped
    assert [key for key, _ in skipped] == ["images/train/b.png"] and "labels/train/b.txt, line " in skipped[0][1]
    for name in ("train/a", "train/c", "val/d"):  # nor are such lines left out where no other is right
        write(yolo / f"labels/{name}.txt", line + "\n")
    refused(f"no file of labels can be read .4 are wrong.*{reason}", yolo, "yolo", on_error="skip")


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ("0 0.5 0.5 0.5 0.5\r\n\r\n1\t.25\t0.25\t5e-1\t0.5  \r\n", ""),
        ("0 0.5 0.5 0.5 0.5\r1 0.25 0.25 0.5 0.5", ""),
        ("\ufeff0 0.5 0.5 0.5 0.5\n1 0.25 0.25 0.5 0.5\n", ""),
        ("0,0.5,0.5,0.5,0.5\n1, 0.25, 0.25, 0.5, 0.5\n", "commas (2, first labels/train/a.txt, line 1)"),
        ("0 0,5 0,5 0,5 0,5\n1 0,25 0,25 0,5 0,5\n", "commas (2"),
        ("0;0.5;0.5;0.5;0.5\n1;0.25;0.25;0.5;0.5\n", "semicolons (2"),
        ("0.0 0.5 0.5 0.5 0.5\n1.00e+00 0.25 0.25 0.5 0.5\n", "classes as 0.0 (2"),
        ("cat 0.5 0.5 0.5 0.5\ndog 0.25 0.25 0.5 0.5\n", "names in place of classes (2"),
    ],
)
def test_what_other_programs_write_is_read_and_said(yolo: Path, content: str, note: str) -> None:
    for encoding in ("utf-8", "utf-16"):
        write(yolo / "labels/train/a.txt", content, encoding)
        listing = list_source(yolo)
        assert listing.layout == "yolo" and values(listing, "box_labels")[0] == [0, 1]
        assert values(listing, "boxes")[0] == [[10, 5, 20, 10], [0, 0, 20, 10]]
        assert note in notes_of(listing) and ("YOLO writes otherwise" in notes_of(listing)) == bool(note)


def boxed(root: Path, *names: str, text: str = "0 0.5 0.5 0.5 0.5\n") -> Path:
    """Images of these names, and files of labels."""
    for name in names:
        if name.lower().endswith(".txt"):
            write(root / name, text)
        else:
            image(root / name)
    return root


@pytest.mark.parametrize(
    ("names", "splits", "counts"),
    [
        (("Images/A.JPG", "Labels/A.TXT"), {"all"}, [1]),
        (("train/image/a.jpg", "train/label/a.txt", "val/image/b.jpg", "val/label/b.txt"), {"train", "val"}, [1, 1]),
        (("images/train/a.jpg", "images/val/b.jpg", "labels/a.txt", "labels/b.txt"), {"train", "val"}, [1, 1]),
        (("images/a.jpg", "images/b.png", "labels/x/a.txt", "labels/x/b.txt"), {"all"}, [1, 1]),
        (("train/cat/a.jpg", "train/cat/Label/a.txt", "train/cat/b.jpg"), {"train"}, [1, 0]),
        (("a.jpg", "a.txt", "b.jpg", "b.txt", "classes.txt"), {"all"}, [1, 1]),
        (("JPEGImages/a.jpg", "yolo/a.txt"), {"all"}, [1]),
        (("images/a.jpg", "images/a.png", "labels/a.txt"), {"all"}, [1, 1]),
    ],
)
def test_images_and_labels_are_paired_wherever_they_lie(
    tmp_path: Path, names: tuple[str, ...], splits: set[str], counts: list[int]
) -> None:
    listing = list_source(boxed(tmp_path, *names))
    assert listing.layout == "yolo" and set(listing.split_names) == splits
    assert values(listing, "num_boxes") == counts
    assert ("share one file of labels (2): images/a.jpg, images/a.png" in notes_of(listing)) == (
        names[1][-5:] == "a.png"
    )


@pytest.mark.parametrize(
    "names",
    [
        ("cat/a.jpg", "dog/b.jpg", "requirements.txt"),
        ("cat/a.jpg", "cat/a.txt", "dog/b.jpg"),
        ("VOC/JPEGImages/a.jpg", "VOC/labels/a.txt", "VOC/Annotations/a.xml"),
        ("train/cat/a.jpg", "train/dog/b.jpg", "data.yaml"),
    ],
)
def test_other_text_files_are_no_labels(tmp_path: Path, names: tuple[str, ...]) -> None:
    boxed(tmp_path, *(name for name in names if name.endswith("jpg")))
    for name in names:
        if not name.endswith("jpg"):
            write(
                tmp_path / name,
                f"{NAMES}train: train\n" if name.endswith("yaml") else "a cat on 4 1 1 1 1 mats\n1\n2\n3\n4\n5\n",
            )
    assert yolo_evidence(open_tree(tmp_path)) == []


def test_images_without_any_labels_are_said_or_refused(tmp_path: Path) -> None:
    root = boxed(tmp_path / "a", "images/train/a.jpg", "images/val/b.jpg", "labels/train/a.txt")
    listing = list_source(root)
    assert "NOT LABELLED: no image in images/val/ (1) has a file of labels" in notes_of(listing)
    refused("no image has a file of labels.*Images: images/a.jpg. Text files: labels/img_a.txt.*`--layout folder`",
            boxed(tmp_path / "b", "images/a.jpg", "labels/img_a.txt"))  # fmt: skip
    write(
        boxed(tmp_path / "c", "images/train/a.jpg", "images/val/b.jpg") / "data.yaml", f"{NAMES}train: images/train\n"
    )
    refused("no image has a file of labels", tmp_path / "c")
    assert list_source(tmp_path / "c", "folder").split_names == ("train", "val")


def test_an_image_that_is_none_is_said_to_be_so_and_not_its_labels(yolo: Path) -> None:
    write(yolo / "images/train/a.png", "no image")
    skipped = refused_or_skipped(r"images/train/a.png (?!is labelled)", yolo).skipped
    assert [key for key, _ in skipped] == ["images/train/a.png"]


def test_darknet_and_its_lists(tmp_path: Path) -> None:
    root = boxed(tmp_path / "a", *(f"obj_train_data/{name}" for name in ("x.jpg", "x.txt", "y.jpg", "y.txt", "z.jpg")))
    write(root / "obj.data", "classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = data/obj.names\n")
    write(root / "obj.names", "cat\ndog\n")
    write(root / "train.txt", "data/obj_train_data/x.jpg\r\n")
    write(root / "valid.txt", "C:\\set\\obj_train_data\\y.jpg\n")
    for _ in range(2):
        listing = list_source(root)
        assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 1]
        assert listing.columns["box_labels"].attrs["names"] == ("cat", "dog")
        assert "does not name were left alone (1): obj_train_data/z.jpg" in notes_of(listing)
        (root / "obj.data").unlink(missing_ok=True)  # the lists alone say as much
    write(root / "valid.txt", "obj_train_data/y.jpg\nobj_train_data/gone.jpg\n")
    refused_or_skipped(r"obj_train_data/gone.jpg .valid.txt, line 2. is not there", root)
    write(root / "valid.txt", "obj_train_data/y.jpg\n")
    write(root / "obj_train_data/y.txt", "0 0.5\n")
    skipped = refused_or_skipped("line 1 is no class with four numbers", root).skipped
    assert [key for key, _ in skipped] == ["obj_train_data/y.jpg"]  # not also as one that is not there
    write(root / "other.names", "cat\n")
    refused("obj.names, other.names name different classes", root)


@pytest.mark.parametrize(
    ("train", "val", "splits", "note"),
    [
        ("../a/images/A", "/content/set/images/B", ["train", "val"], "Splits by data.yaml: train, val"),
        ("t.txt", "[images/B, images/none]", ["train", "val"], "NOT READ: val: images/none in data.yaml"),
        ("images/A", "images/A", ["all"], "names for several splits are in none of them (1): images/A/a.jpg"),
        ("images", "images/B", ["train"], "names for several splits are in the first of them (1): images/B/b.jpg"),
        ("images/A", "", ["train"], "data.yaml does not name were left alone (1): images/B/b.jpg"),
        ("elsewhere/x", "y.txt", ["all"], "NOT READ: train: elsewhere/x, val: y.txt in data.yaml"),
    ],
)
def test_splits_of_a_data_yaml_are_followed_or_said(
    tmp_path: Path, train: str, val: str, splits: list[str], note: str
) -> None:
    root = boxed(tmp_path / "a", "images/A/a.jpg", "images/B/b.jpg", "labels/A/a.txt", "labels/B/b.txt")
    write(root / "t.txt", "./images/A/a.jpg\n")
    write(root / "data.yaml", f"train: {train}\nval: {val}\n{NAMES}")
    listing = list_source(root)
    assert list(listing.split_names) == splits and note in notes_of(listing)


def test_polygons_with_their_box_and_keypoints_that_nothing_declares(tmp_path: Path) -> None:
    polygon = "0 0.5 0.5 0.4 0.4 0.3 0.3 0.7 0.3 0.7 0.7 0.3 0.7\n"
    listing = list_source(boxed(tmp_path / "a", "images/a.jpg", "labels/a.txt", text=polygon))
    assert np.allclose(values(listing, "boxes"), [[[12, 6, 16, 8]]]) and "NOT READ: corners" in notes_of(listing)
    points = "0 0.5 0.5 0.4 0.4 0.4 0.4 0.6 0.4 0.5 0.6\n"
    root = boxed(tmp_path / "b", "images/a.jpg", "labels/a.txt", text=points * 4)
    refused("each object has 10 numbers.*looks like keypoints.*`kpt_shape: .3, 2.`", root)
    write(root / "data.yaml", "kpt_shape: [3, 2]\n" + NAMES)
    assert "Objects that are given twice were kept (3)" in notes_of(list_source(root))


def test_boxes_as_corners_are_read_if_the_user_says_so(tmp_path: Path) -> None:
    root = boxed(tmp_path, "images/a.jpg", "labels/a.txt", text="0 0.1 0.2 0.6 0.7\n")
    refused("no file of labels can be read.*`--boxes xyxy`", root)
    listing = list_source(root, options=SourceOptions(boxes="xyxy"))
    assert np.allclose(values(listing, "boxes"), [[[4, 4, 20, 10]]])


def test_keypoints_are_pixels_with_visibility_names_and_pairs(tmp_path: Path) -> None:
    text = "0 0.5 0.5 0.5 0.5 0.4 0.4 2 0.6 0.4 1\n0 0.5 0.5 0.5 0.5 0.4 0.4 0 0 0 0\n"
    root = boxed(tmp_path, "images/a.jpg", "images/b.jpg", "labels/a.txt", text=text)
    write(root / "data.yaml", f"kpt_shape: [2, 3]\nflip_idx: [1, 0]\nkpt_names: {{0: [l, r]}}\n{NAMES}")
    column = list_source(root).columns["keypoints"]
    assert column.values.shape == (2, 2, 2, 3) and column.values.dtype == np.float32
    assert np.allclose(column.values[0], [[[16, 8, 2], [24, 8, 1]], np.zeros((2, 3))]) and not column.values[1].any()
    assert column.attrs == {"names": ("l", "r"), "flip_pairs": (1, 0)} and column.moves == "xyv"
    write(root / "data.yaml", f"kpt_shape: [2, 2]\n{NAMES}")
    write(root / "labels/a.txt", "0 0.5 0.5 0.5 0.5 0.4 0.4 -1 -1\n")
    assert np.allclose(list_source(root).columns["keypoints"].values[0, 0], [[16, 8, 2], [0, 0, 0]])


@pytest.mark.parametrize(
    ("about", "text", "message"),
    [
        (
            "kpt_shape: [2, 3]",
            "0 0.5 0.5 0.5 0.5 0.4 0.4 0.6 0.4",
            r"has 8 numbers behind the class; kpt_shape .2, 3. needs 10",
        ),
        ("kpt_shape: [1, 3]", "0 0.5 0.5 0.5 0.5 0.4 0.4 3", "a keypoint of visibility 3"),
        ("kpt_shape: [1, 2]", "0 0.5 0.5 0.5 0.5 0.4 1.4", "a keypoint outside of the image: 0.4 1.4"),
        ("kpt_shape: 17", "0 0.5 0.5 0.5 0.5", "`kpt_shape` is 17, not .number of keypoints, 2 or 3."),
        ("kpt_shape: [2, 2]\nflip_idx: [0, 0]", "0 0.5 0.5 0.5 0.5", "`flip_idx` is .0, 0., which does not say"),
    ],
)
def test_keypoints_that_cannot_be_are_refused(tmp_path: Path, about: str, text: str, message: str) -> None:
    write(boxed(tmp_path, "images/a.jpg", "labels/a.txt", text=text) / "data.yaml", f"{about}\n{NAMES}")
    refused(message, tmp_path)


def test_labels_without_an_image_and_names_that_cannot_be_read(yolo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(yolo / "labels/val/gone.txt", "0 0.5 0.5 0.1 0.1\n")
    refused_or_skipped("labels/val/gone.txt has labels, but no image of its name", yolo)
    (yolo / "labels/val/gone.txt").unlink()
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nnames: *b\n"
    for text, message in (
        ("names: {0: cat, 2: dog}", "no list of classes"),
        ("names: [", "is no YAML"),
        (bomb, "YAML aliases"),
        ("nc: 3\n" + NAMES, "`nc` is 3, 2 classes have names"),
    ):
        write(yolo / "data.yaml", text)
        refused(message, yolo)
    write(yolo / "data.yaml", "train: images/val\nval: ../images/val\ntest: test.txt\n" + NAMES)
    listing = list_source(yolo)
    assert "NOT READ: test: test.txt in data.yaml" in notes_of(listing) and listing.split.tolist() == [0, 0, 0, 1]
    write(yolo / "data.yaml", "train: ../images/train\nval: images/val\n" + NAMES)
    assert "NOT READ: train" not in notes_of(list_source(yolo))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match="pip install pyyaml"):
        list_source(yolo)
