from pathlib import Path

import pytest
from small_trees import picture, refused, refused_or_skipped, write

from fastload.sources.layouts import detect_layout, list_source

LISTS = {
    "images.txt": "1 001.Albatross/a.jpg\n2 001.Albatross/b.jpg\n3 002.Wren/c.jpg\n",
    "image_class_labels.txt": "1 1\n2 1\n3 2\n",
    "classes.txt": "1 001.Albatross\n2 002.Wren\n",
    "train_test_split.txt": "1 1\n2 0\n3 1\n",
    "bounding_boxes.txt": "1 1.0 2.0 3.0 1.0\n2 0.0 0.0 2.0 2.0\n3 1.0 1.0 1.0 1.0\n",
}


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    root = tmp_path / "CUB_200_2011"
    for name in ("001.Albatross/a.jpg", "001.Albatross/b.jpg", "002.Wren/c.jpg"):
        picture(root / "images" / name, 3)
    for name, text in LISTS.items():
        write(root / name, text)
    return root


def test_birds_have_species_splits_and_boxes(cub: Path) -> None:
    assert detect_layout(cub) == ("cub", ["images.txt", "image_class_labels.txt"])
    for path in (cub, cub.parent):
        listing = list_source(path)
        assert [key.rpartition("images/")[2] for key in listing.keys] == [
            "001.Albatross/a.jpg", "002.Wren/c.jpg", "001.Albatross/b.jpg",
        ]  # fmt: skip
        assert listing.split_names == ("train", "test") and listing.split.tolist() == [0, 0, 1]
        assert listing.columns["labels"].values.tolist() == [0, 1, 0]
        assert listing.columns["labels"].attrs["names"] == ("001.Albatross", "002.Wren")
        assert listing.columns["bbox"].values[0].tolist() == [1, 2, 3, 1] and listing.columns["bbox"].moves == "xywh"
    for name in ("train_test_split.txt", "bounding_boxes.txt", "classes.txt"):
        (cub / name).unlink()
    listing = list_source(cub)
    assert listing.split_names == ("all",) and list(listing.columns) == ["labels"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("images.txt", LISTS["images.txt"] + "4 002.Wren/gone.jpg\n", "002.Wren/gone.jpg is listed in images.txt, but"),
        ("image_class_labels.txt", "1 1\n2 1\n", "is number 3 of images.txt, and has no class"),
        (
            "train_test_split.txt",
            "1 1\n2 0\n",
            "is number 3 of images.txt, and is neither 1 .train. nor 0 .test. in train_test_split.txt",
        ),
        ("bounding_boxes.txt", "1 1 2 3 1\n2 0 0 2 2\n", "has no line in bounding_boxes.txt"),
        ("images.txt", "1 001.Albatross/a.jpg\n2 001.Albatross/b.jpg\n", "images/002.Wren/c.jpg is not listed in"),
    ],
)
def test_lists_and_images_must_agree(cub: Path, name: str, text: str, message: str) -> None:
    write(cub / name, text)
    assert len(refused_or_skipped(message, cub).keys) in (2, 3)


def test_each_image_that_is_left_out_is_named(cub: Path) -> None:
    write(cub / "images.txt", "1 001.Albatross/a.jpg\n2 001.Albatross/gone.jpg\n")
    skipped = [key for key, _ in refused_or_skipped("gone.jpg is listed in images.txt", cub).skipped]
    assert sorted(skipped) == ["001.Albatross/gone.jpg", "images/001.Albatross/b.jpg", "images/002.Wren/c.jpg"]


def test_lines_that_cannot_be(cub: Path) -> None:
    write(cub / "bounding_boxes.txt", "1 1 2 3\n")
    refused("bounding_boxes.txt, line 1: '1 1 2 3', expected a number and 4 more words", cub)
    write(cub / "image_class_labels.txt", "1 1\n1 2\n")
    refused("line 2: 1 stands in a second line", cub)
    (cub / "image_class_labels.txt").unlink()
    refused("there is no image_class_labels.txt", cub, "cub")
