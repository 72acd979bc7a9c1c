"""Each layout with masks, from its files to the rows of a packed file."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.errors import FastloadError
from fastload.pack import pack_images

SHAPE = (20, 30)


def picture(path: Path, size: tuple[int, int] = SHAPE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), 99, np.uint8)).save(path)


def palette(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values).convert("P")
    image.putdata(values.ravel().tolist())
    image.putpalette([n * 37 % 256 for n in range(768)])  # colours that are nothing like the index
    image.save(path)


def random_mask(seed: int, highest: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, highest + 1, SHAPE).astype(np.uint8)


def packed(source: Path, out: Path, **options: Any) -> dict[str, dict[str, np.ndarray]]:
    """Key -> field -> row."""
    pack_images(source, out, **{"workers": 0} | options)
    with h5py.File(out) as file:
        keys = [key.decode() for key in file["key"][:]]
        fields = {name: file[name][:] for name in ("masks", "boxes", "num_boxes") if name in file}
        ignored = file["masks"].attrs.get("ignore_index")
    rows = {key: {name: values[i] for name, values in fields.items()} for i, key in enumerate(keys)}
    return rows | {"": {"ignore_index": ignored}}


def test_voc_keeps_the_index_of_palettes_and_moves_boxes_with_the_image(tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit"
    year = root / "VOC2012"
    values = random_mask(0, 20)
    values[0] = 255
    box = "<bndbox><xmin>4</xmin><ymin>6</ymin><xmax>9</xmax><ymax>15</ymax></bndbox>"
    for stem in ("a", "b"):
        picture(year / f"JPEGImages/{stem}.jpg")
        (year / "Annotations").mkdir(exist_ok=True)
        (year / f"Annotations/{stem}.xml").write_text(
            f"<annotation><object><name>cat</name>{box}</object></annotation>"
        )
        palette(year / f"SegmentationClass/{stem}.png", values)
    (year / "ImageSets/Segmentation").mkdir(parents=True)
    (year / "ImageSets/Segmentation/train.txt").write_text("a\nb\n")
    rows = packed(root, tmp_path / "voc.h5")
    assert (rows["VOC2012/JPEGImages/a.jpg"]["masks"] == values).all() and rows[""]["ignore_index"] == 255
    assert rows["VOC2012/JPEGImages/a.jpg"]["boxes"].tolist() == [[3, 5, 6, 10]]
    half = packed(root, tmp_path / "half.h5", size=(10, 15))
    assert half["VOC2012/JPEGImages/a.jpg"]["boxes"].tolist() == [[1.5, 2.5, 3, 5]]
    assert set(np.unique(half["VOC2012/JPEGImages/a.jpg"]["masks"])) <= set(np.unique(values))


def test_coco_draws_masks_in_the_workers(tmp_path: Path) -> None:
    root = tmp_path / "coco"
    images, annotations = [], []
    for i in range(3):
        picture(root / f"val2017/{i}.jpg")
        images.append({"id": i, "file_name": f"{i}.jpg", "height": SHAPE[0], "width": SHAPE[1]})
    picture(root / "test2017/t.jpg")
    square = [[4, 2, 10, 2, 10, 8, 4, 8]]
    annotations.append(
        {"id": 1, "image_id": 2, "category_id": 50, "bbox": [4, 2, 6, 6], "area": 36, "segmentation": square}
    )
    content = {"images": images, "annotations": annotations, "categories": [{"id": 50, "name": "spoon"}]}
    (root / "annotations").mkdir()
    path = root / "annotations/instances_val2017.json"
    path.write_text(json.dumps(content))
    rows = packed(root, tmp_path / "coco.h5", masks="semantic", workers=1)
    expected = np.zeros(SHAPE, np.uint8)
    expected[2:8, 4:10] = 1
    assert (rows["val2017/2.jpg"]["masks"] == expected).all() and not rows["val2017/0.jpg"]["masks"].any()
    assert (rows["test2017/t.jpg"]["masks"] == 255).all()
    half = packed(root, tmp_path / "half.h5", masks="semantic", size=(10, 15))
    assert (half["val2017/2.jpg"]["masks"] == expected[::2, ::2]).all()
    assert half["val2017/2.jpg"]["boxes"].tolist() == [[2, 1, 3, 3]] and half["val2017/0.jpg"]["num_boxes"] == 0
    # What the file of annotations says of the size is checked against the image.
    images[2]["height"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(FastloadError, match=r"val2017/2\.jpg: its mask is 30x21, the image 30x20"):
        packed(root, tmp_path / "wrong.h5", masks="semantic")
