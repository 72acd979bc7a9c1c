import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from small_trees import listed, notes_of, refused, refused_or_skipped

from fastload.errors import ImageError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout
from fastload.sources.listing import Listing

PANOPTIC = SourceOptions(masks="panoptic")
CATEGORIES = [
    {"id": 200, "name": "rug", "isthing": 0},
    {"id": 1, "name": "person", "isthing": 1},
    {"id": 18, "name": "dog", "isthing": 1},
]
RUG, PERSON, DOG = 0x010203, 300, 7  # ids of segments: red is the lowest byte


def png(path: Path, ids: NDArray[np.integer[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([ids & 255, ids >> 8 & 255, ids >> 16], axis=-1).astype(np.uint8)).save(path)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 10), (9, 8, 7)).save(path)


def segment(number: int, category: int, crowd: int = 0) -> dict[str, Any]:
    return {"id": number, "category_id": category, "iscrowd": crowd, "area": 1, "bbox": [0, 0, 1, 1]}


def write(root: Path, split: str, segments: dict[int, list[dict[str, Any]]], images: dict[int, str]) -> None:
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    content = {
        "images": [{"id": i, "file_name": name, "height": 10, "width": 16} for i, name in images.items()],
        "annotations": [
            {"image_id": i, "file_name": f"{i:012d}.png", "segments_info": some} for i, some in segments.items()
        ],
        "categories": CATEGORIES,
    }
    (root / f"annotations/panoptic_{split}.json").write_text(json.dumps(content))


def of_ids(*columns: int) -> NDArray[np.int64]:
    """An image of stripes of these ids, each four pixels wide."""
    return np.repeat(np.array(columns, np.int64)[None], 4, axis=1).repeat(10, axis=0)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    for name in ("train2017/000000000009.jpg", "train2017/000000000025.jpg", "val2017/000000000139.jpg"):
        picture(root / name)
    picture(root / "test2017/000000000001.jpg")
    train = {9: [segment(RUG, 200), segment(PERSON, 1), segment(DOG, 18, crowd=1)], 25: [segment(RUG, 1)]}
    write(root, "train2017", train, {25: "000000000025.jpg", 9: "000000000009.jpg"})
    write(root, "val2017", {139: [segment(PERSON, 1)]}, {139: "000000000139.jpg"})
    png(root / "annotations/panoptic_train2017/000000000009.png", of_ids(RUG, PERSON, 0, DOG))
    png(root / "annotations/panoptic_train2017/000000000025.png", of_ids(0, 0, RUG, RUG))
    png(root / "annotations/panoptic_val2017/000000000139.png", of_ids(PERSON, 0, 0, 0))
    return root


def mask_of(listing: Listing, row: int) -> list[int]:
    assert listing.masks is not None
    files = pickle.loads(pickle.dumps(listing.masks.files))
    mask = files.take(np.array([row])).compact().read(0)
    assert (mask == files.read(row)).all() and mask.shape == (10, 16) and (mask == mask[:1]).all()
    return mask[0, ::4].tolist()


def test_segments_are_numbered_in_each_image_and_a_column_has_their_categories(coco: Path) -> None:
    assert detect_layout(coco) == ("coco", ["annotations/panoptic_train2017.json", "annotations/panoptic_val2017.json"])
    for masks in ("auto", "panoptic"):
        listing = listed(coco, masks)
        assert listing.split_names == ("train", "val", "test")
        assert listing.columns["image_id"].values.tolist() == [9, 25, 139, -1]
        assert listing.columns["num_segments"].values.tolist() == [3, 1, 1, 0]
        labels = listing.columns["segment_labels"]
        assert labels.values.tolist() == [[2, 0, 1], [0, -1, -1], [0, -1, -1], [-1, -1, -1]]
        assert labels.attrs["names"] == ("person", "dog", "rug") and labels.attrs["things"] == (1, 1, 0)
        assert listing.columns["segment_crowd"].values.tolist()[0] == [0, 0, 1]
        assert listing.masks.present.tolist() == [True, True, True, False]
        assert (listing.masks.dtype, listing.masks.ignore_index) == (np.uint8, 0)
        assert mask_of(listing, 0) == [1, 2, 0, 3] and mask_of(listing, 1) == [0, 0, 1, 1]
        assert "Ignored images" not in notes_of(listing), "the PNGs are no images of their own"


def test_semantic_masks_of_segments_hold_categories_of_things_and_stuff(coco: Path) -> None:
    listing = listed(coco, "semantic")
    assert (listing.masks.names, listing.masks.ignore_index) == (("person", "dog", "rug"), 255)
    assert mask_of(listing, 0) == [2, 0, 255, 1] and "segment_labels" not in listing.columns
    assert listed(coco, "none").masks is None
    refused("has panoptic files and no instances file.*--masks panoptic", coco, options=SourceOptions(masks="instance"))


def test_more_than_254_segments_make_masks_of_16_bits(coco: Path) -> None:
    ids = np.arange(1, 301)
    write(coco, "train2017", {9: [segment(int(i), 1) for i in ids]}, {9: "000000000009.jpg"})
    (coco / "train2017/000000000025.jpg").unlink()
    png(coco / "annotations/panoptic_train2017/000000000009.png", np.resize(ids[::-1], (10, 16)))
    masks = listed(coco).masks
    assert masks.dtype == np.uint16 and masks.files.header(0).bits == 16
    assert masks.files.read(0).max() == 300 and masks.files.read(0)[0, 15] == 285


def test_instances_and_segments_are_packed_together_where_both_are_asked_for(coco: Path) -> None:
    for split, image in (("train2017", 9), ("val2017", 139)):
        images = [{"id": image, "file_name": f"{image:012d}.jpg", "height": 10, "width": 16}]
        box = {"id": 1, "image_id": image, "category_id": 18, "bbox": [1, 2, 3, 4], "iscrowd": 0}
        content = {"images": images, "annotations": [box], "categories": CATEGORIES[1:]}
        (coco / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    (coco / "train2017/000000000025.jpg").unlink()
    listing = listed(coco)
    assert listing.masks is None and "`--masks panoptic` packs them" in notes_of(listing)
    listing = listed(coco, "panoptic")
    assert listing.columns["num_boxes"].values.tolist() == [1, 1, 0]
    assert listing.columns["box_labels"].attrs["names"] == ("person", "dog")
    assert listing.columns["num_segments"].values.tolist() == [3, 1, 0] and mask_of(listing, 0) == [1, 2, 0, 3]


def test_captions_beside_segments_are_packed_with_them_and_make_no_second_layout(coco: Path) -> None:
    images = [{"id": 9, "file_name": "000000000009.jpg"}]
    content = {"images": images, "annotations": [{"id": 1, "image_id": 9, "caption": "a dog"}]}
    (coco / "annotations/captions_train2017.json").write_text(json.dumps(content))
    assert detect_layout(coco)[0] == "coco"
    listing = listed(coco)
    assert listing.columns["caption"].values[0].tolist() == [b"a dog"]
    assert listing.columns["num_segments"].values.tolist() == [3, 1, 1, 0]


def test_a_segment_that_is_not_listed_is_named(coco: Path) -> None:
    png(coco / "annotations/panoptic_train2017/000000000009.png", of_ids(RUG, PERSON, 5, 5))
    with pytest.raises(ImageError, match="holds the segment 5 in 80 pixels"):
        listed(coco).masks.files.read(0)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([segment(0, 1)], "has the segment"),
        ([segment(2**24, 1)], "has the segment"),
        ([segment(3, 1), segment(3, 18)], "has the segment"),
        ([segment(3, 2)], "category id 2, which is not listed"),
        ("none", "segments_info 'none'"),
    ],
)
def test_bad_segments_are_named_or_leave_out_their_image(coco: Path, segments: Any, message: str) -> None:
    write(coco, "train2017", {25: [segment(RUG, 1)], 9: segments}, {9: "000000000009.jpg", 25: "000000000025.jpg"})
    listing = refused_or_skipped(f"train2017/000000000009.jpg is contradicted by .*{message}", coco, options=PANOPTIC)
    assert listing.columns["image_id"].values.tolist() == [25, 139, -1] and mask_of(listing, 0) == [0, 0, 1, 1]


def test_missing_pngs_are_named(coco: Path) -> None:
    (coco / "annotations/panoptic_train2017/000000000009.png").unlink()
    message = "train2017/000000000009.jpg has no mask: 000000000009.png, which .*panoptic_train2017.json names"
    assert len(refused_or_skipped(message, coco, options=PANOPTIC).skipped) == 1
    (coco / "annotations/panoptic_train2017/000000000025.png").unlink()
    refused("has no PNGs in .*Unpack panoptic_train2017.zip", coco, options=PANOPTIC)
