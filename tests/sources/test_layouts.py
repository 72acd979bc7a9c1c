"""How a layout is recognised by what lies in a folder, and what is said where that is not enough."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import make, notes_of, picture, values, write

from fastload.errors import OptionError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import LAYOUTS, detect_layout, list_source


def test_two_formats_that_fit_equally_well_are_left_to_the_user(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "1.png")
    picture(tmp_path / "masks" / "1.png")
    (tmp_path / "train.csv").write_text("file,label\nimages/1.png,cat\n")
    with pytest.raises(SourceError, match=r"more than one layout fits: .*Say which one it is: `--layout") as error:
        list_source(tmp_path)
    assert "train.csv" in str(error.value) and "masks" in str(error.value)
    assert list_source(tmp_path, "manifest").layout == "manifest"
    assert list_source(tmp_path, "mask-folders").layout == "mask-folders"


def test_a_dataset_known_by_name_comes_before_a_format_and_that_before_a_folder(tmp_path: Path) -> None:
    picture(tmp_path / "img_align_celeba" / "000001.jpg")
    assert detect_layout(tmp_path) == ("celeba", ["img_align_celeba/"])
    assert list_source(tmp_path).notes[0] == "Layout celeba, recognised by img_align_celeba/."
    (tmp_path / "list_eval_partition.csv").write_text("image_id,partition\n000001.jpg,0\n")
    assert detect_layout(tmp_path)[0] == "celeba"
    picture(tmp_path / "other" / "a" / "1.jpg")
    assert detect_layout(tmp_path / "other")[0] == "folder"


@pytest.mark.parametrize(
    ("name", "layout", "splits", "first", "classes"),
    [
        ("celeba", "celeba", {"train": 1200, "val": 150, "test": 150}, "img_align_celeba/000001.jpg", 40),
        ("camvid/camvid.tar", "camvid", {"train": 100, "val": 25}, "camvid/train/0001TP_006690.png", 0),
        ("flowers128/flowers128.tar", "folder", {"all": 4317}, "", 5),
        ("clothing/clothing.tar", "folder", {"train": 1817, "val": 341, "test": 372}, "", 10),
        ("nasty/files", "folder", {"all": 75}, "", 0),
    ],
)
def test_the_real_datasets(
    shared_data: Path, name: str, layout: str, splits: dict[str, int], first: str, classes: int
) -> None:
    listing = list_source(shared_data / name)
    assert listing.layout == layout and not listing.skipped and listing.keys[0].startswith(first)
    assert dict(zip(listing.split_names, np.bincount(listing.split).tolist(), strict=True)) == splits
    assert listing.masks is None or (listing.masks.present.all() and listing.masks.files.read(0)[:4] == b"\x89PNG")
    if not classes:
        return
    labels = listing.columns["labels"]
    assert len(labels.attrs["names"]) == classes and listing.files.read_head(0, 2) == b"\xff\xd8"
    if layout == "celeba":
        assert labels.values.shape == (1500, 40) and [labels.attrs["names"][i] for i in (20, -1)] == ["Male", "Young"]
        assert labels.values[0].tolist()[:4] == [0, 1, 1, 0]
        assert values(listing, "identity")[:2] == [2880, 2937]


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_of_a_layout_is_a_named_error_and_no_evidence(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.md").write_text("nothing to see")
    with pytest.raises(SourceError):
        list_source(tmp_path, name)
    assert detect_layout(tmp_path) == ("folder", [])


def test_every_layout_has_a_line_and_an_unknown_one_names_them_all(tmp_path: Path) -> None:
    assert all(layout.line and len(layout.line) < 100 for layout in LAYOUTS.values())
    with pytest.raises(OptionError, match=", ".join(LAYOUTS)):
        list_source(tmp_path, "imagenat")


def test_an_option_that_a_layout_does_not_use_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png")
    given: dict[str, Any] = {"image_column": "a", "split_column": "a", "root": Path()}
    for name, value in (given | {"masks": "semantic"}).items():
        flag = name.replace("_", "-")
        with pytest.raises(OptionError, match=f"`--{flag}` means nothing to the layout folder; it is for .*manifest"):
            list_source(tmp_path, "folder", options=SourceOptions(**{name: value}))
    with pytest.raises(OptionError, match=r"`--labels a`: .* `top` .*, `deepest` .* or `none`"):
        list_source(tmp_path, "folder", options=SourceOptions(labels=("a",)))
    assert len(list_source(tmp_path, "folder", options=SourceOptions(masks="none"))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels/000.txt", "0 0.5 0.5 0.2 0.2\n"),
        ("captions_val.json", '{"annotations": [{"file_name": "000.png"}, {"file_name": "001.png"}]}'),
        ("images/a/000.xml", "<annotation><object/></annotation>"),
        ("t.csv", "id;label\na/000.png;x\nb/001.png;y\n"),
        ("meta/t.mat", "MATLAB"),
    ],
)
def test_annotations_that_a_layout_that_was_asked_for_does_not_read_are_said(
    tmp_path: Path, name: str, text: str
) -> None:
    make(tmp_path, "images/a/000.png", "images/b/001.png")
    assert "NOT READ" not in notes_of(list_source(tmp_path, "folder"))
    write(tmp_path / name, text)
    assert re.search(f"NOT READ: .*{name}", notes_of(list_source(tmp_path, "folder")))


def test_whole_numbers_one_a_line_are_no_boxes_of_yolo(tmp_path: Path) -> None:
    write(make(tmp_path, "a/0.png", "b/1.png") / "ids.txt", "1\n2\n3\n4\n5\n6\n")
    assert "YOLO" not in notes_of(list_source(tmp_path))


def test_folders_of_yolo_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for name in ("images/0.png", "labels/0.txt"):
            write(tmp_path / split / name, "0 0.5 0.5 0.2 0.2\n")
    listing = list_source(tmp_path, "folder")
    assert listing.split_names == ("train", "val") and listing.columns == {}
    assert "NOT READ: train/labels/0.txt and 1 more .txt files" in notes_of(listing)
