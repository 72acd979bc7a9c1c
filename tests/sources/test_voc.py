from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import archived, listed, notes_of, picture, refused, values, write

from fastload.sources.layouts import detect_layout
from fastload.sources.voc import CLASSES, Item, parse_annotation

XML = """<annotation><filename>x.jpg</filename><size><width>8</width><height>6</height></size>{}</annotation>"""
OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>
<xmax>{xmax}</xmax><xmin>{xmin}</xmin><ymin>{ymin}</ymin><ymax>{ymax}</ymax></bndbox>
<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part></object>"""


DOGS, CATS = CLASSES.index("dog"), CLASSES.index("cat")


def item(name: str, box: tuple[Any, ...], difficult: int = 0) -> str:
    xmin, ymin, xmax, ymax = box
    return OBJECT.format(name=name, difficult=difficult, xmin=xmin, ymin=ymin, xmax=xmax, ymax=ymax)


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    year = tmp_path / "VOCdevkit/VOC2012"
    for stem in ("2007_1", "2007_2", "2007_3", "2008_4"):
        picture(year / f"JPEGImages/{stem}.jpg")
        write(year / f"Annotations/{stem}.xml", XML.format(item("dog", (1, 1, 8, 6)) + item("cat", (2, 3, 4.5, 5), 1)))
    write(year / "Annotations/2007_2.xml", XML.format(""))
    for stem in ("2007_1", "2007_3"):
        picture(year / f"SegmentationClass/{stem}.png", 0, 12, 255, palette=True)
        picture(year / f"SegmentationObject/{stem}.png", 0, 1, 255, palette=True)
    write(year / "ImageSets/Segmentation/train.txt", "2007_3\n")
    write(year / "ImageSets/Segmentation/val.txt", "2007_1\r\n\r\n")
    write(year / "ImageSets/Segmentation/trainval.txt", "2007_1\n2007_3\n")
    write(year / "ImageSets/Main/train.txt", "2007_3\n2007_2\n2008_4\n")
    write(year / "ImageSets/Main/val.txt", "2007_1\n")
    write(year / "ImageSets/Main/trainval.txt", "2007_1\n2007_2\n2007_3\n2008_4\n")
    for name, train in {"dog": "2007_3  1\n2007_2 -1\n2008_4  0\n", "cat": "2007_3  0\n2007_2 -1\n2008_4  1\n"}.items():
        write(year / f"ImageSets/Main/{name}_train.txt", train)
        write(year / f"ImageSets/Main/{name}_val.txt", "2007_1 -1\n")
        write(year / f"ImageSets/Main/{name}_trainval.txt", train)
    return tmp_path / "VOCdevkit"


def test_the_images_with_masks_are_listed_and_palettes_stay_files(devkit: Path) -> None:
    assert detect_layout(devkit)[0] == "voc"
    listing = listed(devkit)
    assert listing.keys == ("VOC2012/JPEGImages/2007_3.jpg", "VOC2012/JPEGImages/2007_1.jpg")
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 1]
    masks = listing.masks
    assert masks is not None and masks.present.all() and masks.ignore_index == 255
    assert masks.names == ("background", *CLASSES) and len(masks.names) == 21
    assert masks.files.read(0) == (devkit / "VOC2012/SegmentationClass/2007_3.png").read_bytes()
    assert "labels" not in listing.columns
    notes = notes_of(listing)
    assert "`--masks none` lists all" in notes and "do not name were left (2)" in notes
    assert listing.sizes[0] > (devkit / "VOC2012/JPEGImages/2007_3.jpg").stat().st_size
    for source in (devkit / "VOC2012", archived(devkit, devkit.parent / "voc.tar")):
        again = listed(source)
        assert [key[-21:] for key in again.keys] == [key[-21:] for key in listing.keys]
        assert all((again.columns[name].values == listing.columns[name].values).all() for name in listing.columns)
        assert again.masks is not None and again.masks.files.read(0) == masks.files.read(0)
    masks = listed(devkit, "instance").masks  # the objects
    assert masks is not None and masks.names == () and masks.ignore_index == 255
    assert masks.files.read(1) == (devkit / "VOC2012/SegmentationObject/2007_1.png").read_bytes()


def test_all_images_have_labels_boxes_from_0_without_parts_and_difficult_ones_apart(devkit: Path) -> None:
    listing = listed(devkit, "none")
    assert [key[-10:-4] for key in listing.keys] == ["2007_2", "2007_3", "2008_4", "2007_1"]
    assert listing.masks is None
    labels, difficult = listing.columns["labels"], listing.columns["difficult"]
    assert labels.values.dtype == np.uint8 and labels.attrs["names"] == CLASSES and len(CLASSES) == 20
    assert labels.values[:, [DOGS, CATS]].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert difficult.values[:, [DOGS, CATS]].tolist() == [[0, 0], [0, 1], [1, 0], [0, 0]]
    boxes = listing.columns["boxes"]
    assert boxes.moves == "xywh" and boxes.values.dtype == np.float32
    assert values(listing, "num_boxes") == [0, 2, 2, 2]
    assert boxes.values[1].tolist() == [[0, 0, 8, 6], [1, 2, 3.5, 3]]
    assert values(listing, "box_labels")[:2] == [[-1, -1], [DOGS, CATS]]
    assert values(listing, "box_difficult")[:2] == [[0, 0], [0, 1]]
    # Without lists of classes the annotations give labels; a difficult object does not hide a plain one.
    for path in (devkit / "VOC2012/ImageSets/Main").glob("*_*.txt"):
        path.unlink()
    both = item("dog", (1, 1, 8, 6)) + item("dog", (1, 1, 2, 2), 1)
    write(devkit / "VOC2012/Annotations/2007_1.xml", XML.format(both))
    columns = listed(devkit, "none").columns
    assert columns["labels"].values[:, [DOGS, CATS]].tolist() == [[0, 0], [1, 0], [1, 0], [1, 0]]
    assert columns["difficult"].values[:, [DOGS, CATS]].tolist() == [[0, 0], [0, 1], [0, 1], [0, 0]]
    for path in (devkit / "VOC2012/Annotations").iterdir():  # a column holds one box at least
        write(path, XML.format(""))
    columns = listed(devkit, "none").columns
    assert columns["boxes"].values.shape == (4, 1, 4) and not columns["num_boxes"].values.any()
    assert columns["box_labels"].values.tolist() == [[-1]] * 4


def test_the_augmented_masks_are_noted_and_used_when_alone(devkit: Path) -> None:
    year = devkit / "VOC2012"
    for stem in ("2007_1", "2007_2", "2007_3"):
        picture(year / f"SegmentationClassAug/{stem}.png", 0, 1)
    assert "Read the masks in SegmentationClass, not those in SegmentationClassAug" in notes_of(listed(devkit))
    (year / "SegmentationClass").rename(devkit / "away")
    write(year / "ImageSets/Segmentation/train_aug.txt", "2007_2\n2007_3\n")
    listing = listed(devkit)
    assert listing.split.tolist() == [0, 0, 1]
    assert "Masks in SegmentationClassAug" in notes_of(listing)


def test_a_test_split_has_neither_masks_nor_annotations(devkit: Path) -> None:
    year = devkit / "VOC2012"
    write(year / "ImageSets/Segmentation/test.txt", "2009_9\n")
    picture(year / "JPEGImages/2009_9.jpg")
    listing = listed(devkit)
    assert listing.split_names == ("train", "val", "test")
    assert listing.masks is not None and listing.masks.present.tolist() == [True, True, False]
    assert listing.columns["num_boxes"].values.tolist() == [2, 2, 0]
    notes = notes_of(listing)
    assert "Splits without masks: test" in notes and "'test' has no annotations" in notes


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("JPEGImages/2007_1.jpg", r"JPEGImages/2007_1.jpg is listed in val.txt, but has no file"),
        ("Annotations/2007_1.xml", r"JPEGImages/2007_1.jpg has no annotation"),
        ("SegmentationClass/2007_1.png", r"2007_1.jpg has no mask"),
    ],
)
def test_what_a_list_names_and_is_not_there_fails_or_is_skipped(devkit: Path, gone: str, message: str) -> None:
    year = devkit / "VOC2012"
    write(year / "ImageSets/Segmentation/val.txt", "2007_1\n2008_4\n")
    picture(year / "SegmentationClass/2008_4.png", 0)
    (year / gone).unlink()
    refused(message, devkit)
    listing = listed(devkit, on_error="skip")
    assert [key[-10:-4] for key in listing.keys] == ["2007_3", "2008_4"]
    assert [key for key, _ in listing.skipped] == ["VOC2012/JPEGImages/2007_1.jpg"]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("ImageSets/Segmentation/val.txt", "2007_3\n", r"line 1: 2007_3 is listed a second time \(first in train"),
        ("ImageSets/Segmentation/val.txt", "\n", r"val.txt is empty"),
        ("ImageSets/Segmentation/val.txt", "2007_1 1\n", r"val.txt, line 1: '2007_1 1', expected the name of one"),
        ("Annotations/2007_1.xml", "<annotation><object>", "2007_1.jpg has an annotation.*is not well formed"),
        ("ImageSets/Main/dog_val.txt", "2007_1 2\n", "line 1: '2007_1 2', expected an image and -1, 0 or 1"),
        ("ImageSets/Main/dog_val.txt", "2007_2 1\n", "2007_2 is not in val"),
    ],
)
def test_damaged_lists_and_annotations_are_named(devkit: Path, path: str, text: str, message: str) -> None:
    write(devkit / "VOC2012" / path, text)
    refused(message, devkit, masks="none" if "Main" in path else "auto")


def test_no_images_no_masks_no_lists_and_several_years_are_errors(devkit: Path) -> None:
    year = devkit / "VOC2012"
    (year / "SegmentationObject").rename(devkit / "objects")
    refused("there is no mask of instances in VOC2012/SegmentationObject", devkit, masks="instance")
    (year / "ImageSets/Segmentation").rename(devkit / "lists")
    refused(r"none of train.txt, .* in VOC2012/ImageSets/Segmentation/", devkit)
    (year / "JPEGImages").rename(devkit / "pictures")
    refused("there are no images in VOC2012/JPEGImages", devkit)
    refused("no folder with VOC's JPEGImages", devkit / "pictures", "voc")
    picture(devkit / "VOC2007/JPEGImages/1.jpg")
    write(devkit / "VOC2007/Annotations/1.xml", XML.format(""))
    refused(r"several years of VOC: VOC2007/, VOC2012/.*VOC2012.*fastload merge", devkit)


def test_other_classes_and_no_lists_at_all_are_packed_as_they_are(devkit: Path) -> None:
    year = devkit / "VOC2012"
    write(year / "Annotations/2007_1.xml", XML.format(item("zebra", (1, 1, 2, 2))))
    (year / "ImageSets").rename(devkit / "lists")
    listing = listed(devkit)
    assert listing.split_names == ("all",) and len(listing) == 2
    assert listing.masks is not None and listing.masks.names == ()
    assert listing.columns["box_labels"].attrs["names"] == ("cat", "dog", "zebra")


def test_folders_of_imagenet_with_the_same_names_are_not_voc(tmp_path: Path) -> None:
    write(tmp_path / "ILSVRC/Annotations/CLS-LOC/val/1.xml", XML.format(""))
    write(tmp_path / "ILSVRC/ImageSets/CLS-LOC/val.txt", "1 1\n")
    picture(tmp_path / "ILSVRC/Data/1.jpg")
    assert detect_layout(tmp_path)[0] == "folder"


def test_the_whole_image_is_0_0_width_height() -> None:
    cat = XML.format(item(" cat ", (1, 1, 8, 6)))
    for text in (cat, cat.replace("<difficult>0</difficult>", "")):
        assert parse_annotation(text.encode()).items == [Item("cat", False, (0, 0, 8, 6))]
    assert parse_annotation(b"<annotation/>") == ((0, 0), [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *[(data, "is not well formed") for data in (b"", b"<a", b"<a>&b;</a>", "<a>é".encode())],
        (b"<?xml version='1.0' encoding='nonsense'?><a/>", "is not well formed"),
        (b'<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><a>&c;</a>', "declares a document type"),
        ('<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a []><a/>'.encode("utf-16"), "is not in UTF-8"),
        (b"\x00", "is not in UTF-8"),
        (XML.format(item("", (1, 1, 2, 2))).encode(), "an object without a name"),
        *[(XML.format(item("dog", (x, 1, 2, 2))).encode(), r"\(dog\) without a box of four") for x in ("", "x")],
        *[(XML.format(item("dog", (x, 1, 8, 2))).encode(), r"\(dog\) with the") for x in ("inf", "nan", 9, "1e999")],
    ],
)
def test_a_damaged_annotation_is_a_named_error(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_annotation(data)
