from pathlib import Path

import pytest
from small_trees import make, picture, refused

from fastload.sources.layouts import detect_layout, list_source


def pictures(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        picture(root / name, i)
    return root


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["images/a.jpg", "images/b.jpg", "masks/a.png", "masks/b.png"], ["all", "all"]),
        (["images/train/a.jpg", "images/val/b.jpg", "gt/train/a.png", "gt/val/b.png"], ["train", "val"]),
        (["train/imgs/a.jpg", "valid/imgs/b.jpg", "train/labels/a.png", "valid/labels/b.png"], ["train", "val"]),
        (["train/a.jpg", "train/b.jpg", "train_masks/a_mask.gif", "train_masks/b_mask.gif"], ["train", "train"]),
        (["train/a.png", "test/b.png", "trainannot/a.png", "testannot/b.png"], ["train", "test"]),
        (["images/a.jpg", "images/s/b.jpg", "images_mask/a.png", "images_mask/s/b.png"], ["all", "all"]),
    ],
)
def test_pairs_are_found_in_each_way_of_keeping_them(tmp_path: Path, names: list[str], splits: list[str]) -> None:
    root = pictures(tmp_path, *names)
    assert detect_layout(root)[0] == "mask-folders"
    listing = list_source(root)
    assert listing.keys == tuple(names[:2])
    assert [listing.split_names[i] for i in listing.split] == splits
    assert listing.masks is not None and listing.masks.names == () and listing.masks.ignore_index is None
    assert [listing.masks.files.read(i) for i in range(2)] == [(root / name).read_bytes() for name in names[2:]]


def test_a_split_without_masks_is_filled_with_255(tmp_path: Path) -> None:
    listing = list_source(pictures(tmp_path, "images/train/a.png", "images/test/b.png", "masks/train/a.png"))
    assert listing.masks is not None and listing.masks.present.tolist() == [True, False]
    assert listing.masks.ignore_index == 255 and "Splits without masks: test" in " ".join(listing.notes)
    picture(tmp_path / "masks/train/a.png", 0, 7, 255, 7)
    assert "Values in a sample of the masks: 0, 7, 255." in list_source(tmp_path).notes[-1]
    picture(tmp_path / "images/train/a.jpg")
    refused(r"images/train/a.jpg and images/train/a.png", tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["mask/1.jpg", "no_mask/1.jpg"],  # classes
        ["with_mask/1.jpg", "without_mask/1.jpg"],
        ["images/1.jpg", "labels/1.txt"],  # YOLO
        ["images/1.jpg", "masks/2.png"],
        ["train/images/1.jpg", "train/masked/1.jpg"],
    ],
)
def test_what_only_looks_like_pairs_is_left_to_others(tmp_path: Path, names: list[str]) -> None:
    make(tmp_path, *names)
    pictures(tmp_path, *[name for name in names if not name.endswith("txt")])
    assert detect_layout(tmp_path)[0] == "folder"
    refused("no image has a mask of the same name", tmp_path, "mask-folders")
