from pathlib import Path

import numpy as np
import pytest
from small_trees import archived, make, notes_of, refused, values

from fastload.errors import MissingFileError
from fastload.sources.layouts import list_source

SPLIT_TREE = ("train/cat/b.jpg", "train/cat/a.jpg", "train/dog/1.png", "Validation/dog/2.JPEG", "test/cat/x.webp")


def test_class_folders_become_sorted_labels_in_one_split(tmp_path: Path) -> None:
    listing = list_source(make(tmp_path / "photos", "dog/1.jpg", "cat/2.jpg", "cat/1.jpg", "cat/deep/0.jpg"))
    assert listing.layout == "folder" and listing.notes == ("Layout folder: classes by folder (2): cat, dog.",)
    assert listing.keys == ("cat/1.jpg", "cat/2.jpg", "cat/deep/0.jpg", "dog/1.jpg")
    assert listing.columns["labels"].attrs == {"names": ("cat", "dog")}
    assert listing.columns["labels"].values.dtype == np.int64
    assert values(listing) == [0, 0, 0, 1]
    assert listing.split_names == ("all",) and listing.split.tolist() == [0, 0, 0, 0]
    assert [listing.files.read(i).decode() for i in range(4)] == list(listing.keys)
    assert listing.sizes.tolist() == [len(key) for key in listing.keys]


@pytest.mark.parametrize("suffix", ["zip", "tar"])
def test_splits_come_in_order_and_an_archive_lists_as_its_folder_does(tmp_path: Path, suffix: str) -> None:
    folder = make(tmp_path / "photos", *SPLIT_TREE, "readme.txt", "train/.DS_Store")
    plain = list_source(folder)
    assert plain.split_names == ("train", "val", "test") and plain.split.tolist() == [0, 0, 0, 1, 2]
    assert plain.keys == (*sorted(SPLIT_TREE[:3]), *SPLIT_TREE[3:]) and values(plain) == [0, 0, 1, 1, 0]
    assert "val (folder Validation)" in notes_of(plain)
    assert "Classes without an image in 'val' (1): cat" in notes_of(plain)
    packed = list_source(archived(folder, tmp_path / f"p.{suffix}", "photos"))
    assert packed.keys == tuple(f"photos/{key}" for key in plain.keys)
    assert values(packed) == values(plain) and packed.split.tolist() == plain.split.tolist()
    assert [packed.files.read(i) for i in range(5)] == [plain.files.read(i) for i in range(5)]
    assert packed.sizes.tolist() == plain.sizes.tolist()
    assert "photos/, which is no class" in notes_of(packed)
    for listing in (plain, packed):
        assert "readme.txt" in notes_of(listing) and ".DS_Store" in notes_of(listing)
    one = list_source(archived(folder / "train", tmp_path / f"train.{suffix}", "train"))  # its folder is a split
    assert one.split_names == ("train",) and one.columns["labels"].attrs["names"] == ("cat", "dog")


@pytest.mark.parametrize(
    ("files", "labels", "classes", "note"),
    [
        ("a/0.jpg a/deep/1.jpg a-1/0.jpg", [0, 0, 1], ("a", "a-1"), ""),  # a sibling sorts between the folders of a
        ("photos/cat/1.jpg photos/dog/1.jpg", [0, 1], ("cat", "dog"), "Everything lies in photos/, which is no class"),
        ("cat/1.jpg cat/2.jpg", [0, 0], ("cat",), ""),
        ("1.PNG 2.jpg 3.gif", None, (), "images without class folders"),
        ("train/cat/1.jpg train/dog/1.jpg test/9.jpg", [0, 1, -1], ("cat", "dog"), "'test' has no class folders"),
        ("train/cat/1.jpg train/dog/1.jpg val/cat/1.jpg val/dog/", [0, 1, 0], ("cat", "dog"), "in 'val' (1): dog"),
        ("train/cat/1.jpg train/dog/1.jpg val/", [0, 1], ("cat", "dog"), "without an image were ignored (1): val"),
    ],
)
def test_labels_are_the_folders_below_split_and_wrapping_folders(
    tmp_path: Path, files: str, labels: list[int] | None, classes: tuple[str, ...], note: str
) -> None:
    names = files.split()
    listing = list_source(make(tmp_path, *names), "folder")
    assert listing.keys == tuple(name for name in names if not name.endswith("/")) and note in notes_of(listing)
    assert (values(listing) if listing.columns else None) == labels
    assert not classes or listing.columns["labels"].attrs["names"] == classes


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "it is empty"),
        (("cat/", "dog/"), r"empty but for folders \(2\)"),
        (("a.txt", "b.txt", "c.csv"), "looked for .jpg .jpeg .* found only 2 .txt, 1 .csv"),
        (("photos.tar", "x.txt"), "give the archive itself: .*photos.tar"),
        (("cat/1.jpg", "dog/", "cow/"), r"class folders without an image \(2\): cow, dog"),
        (("cat/1.jpg", "cat/2.jpg", "3.jpg"), r"next to class folders \(1\): 3.jpg"),
        (("train/cat/1.jpg", "train/2.jpg"), r"train/: images lie next to class folders \(1\): 2.jpg"),
        (("train/cat/1.jpg", "extra/2.jpg"), "train look like splits, but there are images in extra"),
        (("train/cat/1.jpg", "2.jpg"), r"next to the splits train \(1\): 2.jpg"),
        (("val/cat/1.jpg", "valid/cat/1.jpg"), "val and valid are both the split 'val'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    (tmp_path / "data").mkdir()
    refused(message, make(tmp_path / "data", *names))
    with pytest.raises(MissingFileError, match="there is no such file or folder"):
        list_source(tmp_path / "none")


def test_a_dangling_link_fails_or_is_skipped_by_name(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.jpg", "dog/1.jpg")
    (tmp_path / "cat" / "2.jpg").symlink_to("nowhere.jpg")
    refused(r"cat/2.jpg is a link to a file that does not exist.*--on-error skip", tmp_path)
    listing = list_source(tmp_path, on_error="skip")
    assert listing.skipped == (("cat/2.jpg", "is a link to a file that does not exist"),)
    assert listing.keys == ("cat/1.jpg", "dog/1.jpg")
    (tmp_path / "dog/1.jpg").unlink()  # later: an error of that image alone
    assert listing.files.read(0) == b"cat/1.jpg"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        listing.files.read(1)
    (tmp_path / "cat/1.jpg").unlink()
    refused(r"holds no image: cat/2.jpg is a link to a file that does not exist", tmp_path, on_error="skip")
