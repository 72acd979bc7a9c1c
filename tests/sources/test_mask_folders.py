from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastload.errors import OptionError, SourceError
from fastload.sources import SourceOptions, detect_layout, list_source


def make(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 4), i, np.uint8)).save(root / name)
    return root


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["images/a.jpg", "images/b.jpg", "masks/a.png", "masks/b.png"], ["all", "all"]),
        (["images/train/a.jpg", "images/val/b.jpg", "gt/train/a.png", "gt/val/b.png"], ["train", "val"]),
        (
            ["train/imgs/a.jpg", "valid/imgs/b.jpg", "train/labels/a.png", "valid/labels/b.png"],
            ["train", "val"],
        ),
        (["train/a.jpg", "train/b.jpg", "train_masks/a_mask.gif", "train_masks/b_mask.gif"], ["train", "train"]),
        (["train/a.png", "test/b.png", "trainannot/a.png", "testannot/b.png"], ["train", "test"]),
        (["images/a.jpg", "images/s/b.jpg", "images_mask/a.png", "images_mask/s/b.png"], ["all", "all"]),
    ],
)
def test_pairs_are_found_in_each_way_of_keeping_them(tmp_path: Path, names: list[str], splits: list[str]) -> None:
    root = make(tmp_path, *names)
    assert detect_layout(root)[0] == "mask-folders"
    listing = list_source(root)
    assert listing.keys == tuple(names[:2])
    assert [listing.split_names[i] for i in listing.split] == splits
    assert listing.masks is not None and listing.masks.names == () and listing.masks.ignore_index is None
    assert [listing.masks.files.read(i) for i in range(2)] == [(root / name).read_bytes() for name in names[2:]]


def test_the_values_seen_are_noted(tmp_path: Path) -> None:
    root = make(tmp_path, "images/a.png", "masks/a.png")
    Image.fromarray(np.array([[0, 7], [255, 7]], np.uint8)).save(root / "masks/a.png")
    assert "Values in a sample of the masks: 0, 7, 255." in " ".join(list_source(root).notes)
    assert list_source(root, options=SourceOptions(masks="none")).masks is None
    with pytest.raises(OptionError, match="do not say of which kind"):
        list_source(root, options=SourceOptions(masks="instance"))


def test_a_split_without_masks_is_filled_with_255(tmp_path: Path) -> None:
    listing = list_source(make(tmp_path, "images/train/a.png", "images/test/b.png", "masks/train/a.png"))
    assert listing.masks is not None and listing.masks.present.tolist() == [True, False]
    assert listing.masks.ignore_index == 255 and "Splits without masks: test" in " ".join(listing.notes)


@pytest.mark.parametrize(
    ("more", "key"), [("images/b.png", "images/b.png has no mask"), ("masks/b.png", "masks/b.png is a mask without")]
)
def test_half_a_pair_fails_or_is_skipped(tmp_path: Path, more: str, key: str) -> None:
    root = make(tmp_path, "images/a.png", "masks/a.png", more)
    with pytest.raises(SourceError, match=key):
        list_source(root)
    listing = list_source(root, on_error="skip")
    assert listing.keys == ("images/a.png",) and listing.skipped[0][0] == more


def test_two_files_of_one_name_are_named(tmp_path: Path) -> None:
    root = make(tmp_path, "images/a.png", "images/a.jpg", "masks/a.png")
    with pytest.raises(SourceError, match=r"images/a.jpg and images/a.png"):
        list_source(root)


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
    make(tmp_path, *[name for name in names if not name.endswith("txt")])
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert detect_layout(tmp_path)[0] == "folder"
    with pytest.raises(SourceError, match="no image has a mask of the same name"):
        list_source(tmp_path, "mask-folders")
