"""Boxes, points and drawn masks of images that have another size than their annotations declare, or another form."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload import pack_images, verify_file
from fastload.errors import OptionError, SourceError
from fastload.images.decode import upright
from fastload.images.fit import turned_coordinates

WIDE = (60, 40)  # width, height of the stored image
AT = (6, 4, 18, 12)  # x, y, width, height of the white rectangle in it


def picture(path: Path, orientation: int = 1, size: tuple[int, int] = WIDE, scale: float = 1) -> None:
    """A dark image with a white rectangle, stored as it is drawn, that EXIF turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    x, y, w, h = (round(number * scale) for number in AT)
    pixels[y : y + h, x : x + w] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, quality=95, exif=exif)


def coco(root: Path, declared: Any = WIDE, count: int = 4, **more: Any) -> Path:
    """Four images, of which the annotations declare a size; each has one box, its polygon and two keypoints."""
    x, y, w, h = AT
    polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
    images = [{"id": i, "file_name": f"{i}.jpg", "width": declared[0], "height": declared[1]} for i in range(count)]
    ends = [x, y, 2, x + w - 1, y + h - 1, 1, 0, 0, 0]
    boxes = [
        {"id": i, "image_id": i, "category_id": 1, "bbox": list(AT), "segmentation": [polygon], "keypoints": ends}
        for i in range(count)
    ]
    category = {"id": 1, "name": "cat", "keypoints": ["tail", "left_ear", "right_ear"], "skeleton": [[1, 2], [1, 3]]}
    content = {"images": images, "annotations": [one | more for one in boxes], "categories": [category]}
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations/instances_train.json").write_text(json.dumps(content))
    return root


def lies_on_the_rectangle(path: Path) -> None:
    """Asserts that the box, the mask and the keypoints of each image lie on its white rectangle."""
    with h5py.File(path) as file:
        ragged = "row_shape" in file["images"].attrs
        assert not ragged
        for row, pixels in enumerate(file["images"][()]):
            rows, columns = np.nonzero(pixels[..., 0] > 128)
            top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
            box = file["boxes"][row, 0]
            assert np.allclose(box, [left, top, right - left, bottom - top], atol=0.6)
            if "masks" in file:
                assert (file["masks"][row] == (pixels[..., 0] > 128)).mean() > 0.99
            points = file["keypoints"][row, 0]
            assert points[:, 2].tolist() == [2, 1, 0] and not points[2].any()
            corners = {(left, top), (left, bottom - 1), (right - 1, top), (right - 1, bottom - 1)}
            assert all(min(abs(x - a) + abs(y - b) for a, b in corners) <= 1.5 for x, y in points[:2, :2].tolist())


@pytest.mark.parametrize("orientation", [3, 5, 6])
def test_boxes_of_the_stored_image_are_turned_with_it_and_refused_until_that_is_said(
    tmp_path: Path, orientation: int
) -> None:
    root, out = coco(tmp_path / "src"), tmp_path / "a.h5"
    for i in range(4):
        picture(root / f"train/{i}.jpg", orientation)
    options: dict[str, Any] = {"workers": 0, "masks": "semantic"}
    if orientation >= 5:
        with pytest.raises(SourceError) as refused:
            pack_images(root, out, **options)
        said = str(refused.value)
        assert "4 of 4 images have another size than declared: train/0.jpg, train/1.jpg" in said and "is 40x60" in said
        assert "declares 60x40, its size before EXIF turns it" in said and "`--boxes-of stored`" in said
        with pytest.raises(SourceError, match="nothing else is left"):
            pack_images(root, out, on_error="skip", **options)
        with pytest.raises(SourceError, match="before EXIF turns it"):  # a scale does not turn
            pack_images(root, out, boxes_of="declared", **options)
    pack_images(root, out, boxes_of="stored", **options)
    lies_on_the_rectangle(out)
    assert verify_file(out, source=root, workers=0).ok
    pack_images(root, out, boxes_of="stored", size=(30, 30), fit="pad", overwrite=True, workers=0)
    lies_on_the_rectangle(out)
    assert verify_file(out, source=root, workers=0).ok


def test_boxes_of_images_that_were_shrunk_are_scaled_and_refused_until_that_is_said(tmp_path: Path) -> None:
    root, out = coco(tmp_path / "src"), tmp_path / "a.h5"
    for i in range(4):
        picture(root / f"train/{i}.jpg", size=(30, 20), scale=0.5)
    for masks in ("auto", "semantic"):
        with pytest.raises(SourceError, match=r"is 30x20 .* declares 60x40.*resized.*`--boxes-of declared` scales"):
            pack_images(root, tmp_path / "b.h5", workers=0, masks=masks)
        pack_images(root, out, workers=0, boxes_of="declared", masks=masks, overwrite=True)
        lies_on_the_rectangle(out)
        assert verify_file(out, source=root, workers=0).ok
    with pytest.raises(SourceError, match=r"is 30x20 .* as it is stored, its annotation declares 60x40"):
        pack_images(root, tmp_path / "b.h5", workers=0, boxes_of="stored")
    coco(root, declared=(0, 0))
    with pytest.raises(SourceError, match="declares no size"):
        pack_images(root, tmp_path / "b.h5", workers=0, boxes_of="declared")
    coco(root, declared=(30, 20))  # verification reads the annotations again
    assert any("`boxes` differs" in row.reason for row in verify_file(out, source=root, workers=0).source.changed)


def test_a_file_packed_before_its_images_were_changed_is_not_verified_in_silence(tmp_path: Path) -> None:
    root, out = coco(tmp_path / "src"), tmp_path / "a.h5"
    for i in range(4):
        picture(root / f"train/{i}.jpg")
    pack_images(root, out, workers=0, size=(20, 30))
    coco(root, declared=(120, 80))
    changed = verify_file(out, source=root, workers=0).source.changed
    assert len(changed) >= 4 and "its annotation declares 120x80" in changed[0].reason


@pytest.mark.parametrize(
    ("declared", "refused"),
    [
        ((60, 40), False),
        ((61, 39), False),  # rounded otherwise
        ((62, 40), True),
        ((40, 60), True),
        ((0, 0), False),
        (("60", "40"), False),
        ((60.0, 40.0), False),
        ((None, None), False),
    ],
)
def test_a_size_is_another_from_two_pixels_on(tmp_path: Path, declared: Any, refused: bool) -> None:
    root = coco(tmp_path / "src", declared)
    for i in range(4):
        picture(root / f"train/{i}.jpg")
    if not refused:
        pack_images(root, tmp_path / "a.h5", workers=0)
        return lies_on_the_rectangle(tmp_path / "a.h5")
    with pytest.raises(SourceError, match="swapped" if declared == (40, 60) else "declares 62x40"):
        pack_images(root, tmp_path / "a.h5", workers=0)
    pack_images(root, tmp_path / "a.h5", workers=0, boxes_of="upright", masks="instance")
    lies_on_the_rectangle(tmp_path / "a.h5")


def test_one_image_of_many_is_named_or_left_out_and_sizes_without_boxes_are_a_note(tmp_path: Path) -> None:
    root = coco(tmp_path / "src")
    for i in range(4):
        picture(root / f"train/{i}.jpg", 6 if i == 2 else 1)
    with pytest.raises(SourceError, match=r"1 of 4 images have another size than declared: train/2\.jpg"):
        pack_images(root, tmp_path / "a.h5", workers=0)
    report = pack_images(root, tmp_path / "a.h5", workers=0, on_error="skip")
    assert [key for key, _ in report.skipped] == ["train/2.jpg"] and report.num_samples == 3
    with pytest.raises(OptionError, match="boxes_of='exif' is not known; accepted: auto, upright, stored, declared"):
        pack_images(root, tmp_path / "b.h5", boxes_of="exif")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`--boxes-of` means nothing to the layout folder"):
        pack_images(root / "train", tmp_path / "b.h5", boxes_of="stored", layout="folder")


def test_pascal_vocs_sizes_are_compared_as_well(tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    for i in range(2):
        picture(root / f"JPEGImages/{i}.jpg", 6)
    (root / "Annotations").mkdir()
    (root / "ImageSets/Main").mkdir(parents=True)
    (root / "ImageSets/Main/train.txt").write_text("0\n1\n")
    x, y, w, h = AT
    box = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
    for i, size in enumerate(["<width>60</width><height>40</height><depth>3</depth>", "<width>0</width>"]):
        text = f"<annotation><size>{size}</size><object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
        (root / f"Annotations/{i}.xml").write_text(text)
    with pytest.raises(SourceError, match=r"1 of 2 images have another size than declared: JPEGImages/0\.jpg"):
        pack_images(root, tmp_path / "a.h5", workers=0)
    pack_images(root, tmp_path / "a.h5", workers=0, boxes_of="stored", shuffle=False)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["boxes"][()].tolist() == [[[40 - 4 - 12, 6, 12, 18]]] * 2


@pytest.mark.parametrize(
    ("columns", "declared", "refused"),
    [
        (("width", "height"), (60, 40), True),
        (("image_width", "image_height"), (60, 40), True),
        (("img_w", "img_h"), (60, 40), True),
        (("width", "height"), (40, 60), False),
        (("width", "height"), (5, 3), False),  # no box lies within: sizes of something else
        (("img_w", "img_h"), (5, 3), True),
    ],
)
def test_sizes_in_a_table_are_compared_as_well(
    tmp_path: Path, columns: tuple[str, str], declared: tuple[int, int], refused: bool
) -> None:
    root = tmp_path / "src"
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file_name", "xmin", "ymin", "xmax", "ymax", *columns])
        for i in range(3):
            picture(root / f"{i}.jpg", 6)
            rows.writerow([f"{i}.jpg", 6, 4, 24, 16, *declared])
    options: dict[str, Any] = {"workers": 0, "root": root}
    if not refused:
        pack_images(tmp_path / "labels.csv", tmp_path / "a.h5", **options)
        return
    with pytest.raises(SourceError, match="3 of 3 images have another size than declared"):
        pack_images(tmp_path / "labels.csv", tmp_path / "a.h5", **options)
    if declared == (60, 40):
        pack_images(tmp_path / "labels.csv", tmp_path / "a.h5", boxes_of="stored", **options)
        with h5py.File(tmp_path / "a.h5") as packed:
            assert packed["bbox"][0].tolist() == [24, 6, 36, 24]


@pytest.mark.parametrize("moves", ["xywh", "xyxy", "points", "xyv"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_coordinates_are_turned_as_pixels_are(moves: Any, orientation: int) -> None:
    pixels = np.zeros((9, 14, 1), np.uint8)
    pixels[2:5, 3:10] = 1
    shown = upright(pixels, orientation)[..., 0]
    rows, columns = np.nonzero(shown)
    top, bottom, left, right = rows.min(), rows.max(), columns.min(), columns.max()
    given = {"xywh": [3, 2, 7, 3], "xyxy": [3, 2, 10, 5], "points": [3, 2, 9, 4], "xyv": [[3, 2, 1], [9, 4, 2]]}
    values = np.array([given[moves]])
    found = turned_coordinates(values, moves, np.array([shown.shape]), np.array([orientation]))[0]
    if moves == "xywh":
        assert found.tolist() == [left, top, right + 1 - left, bottom + 1 - top]
    elif moves == "xyxy":
        assert found.tolist() == [left, top, right + 1, bottom + 1]
    else:
        pairs = found.reshape(2, -1)[:, :2]
        assert (pairs.min(axis=0).tolist(), pairs.max(axis=0).tolist()) == ([left, top], [right, bottom])


@pytest.mark.parametrize("form", ["xyxy", "cxcywh"])
@pytest.mark.parametrize("outside", ["refuse", "clip", "keep"])
def test_boxes_that_fit_only_in_another_form_are_refused_before_any_clip(
    tmp_path: Path, form: str, outside: Any
) -> None:
    x, y, w, h = 40, 25, 18, 12
    four = {"xyxy": [x, y, x + w, y + h], "cxcywh": [x + w / 2, y + h / 2, w, h]}[form]
    if form == "cxcywh":
        four = [52, 34, 16, 12]
        x, y, w, h = 44, 28, 16, 12
    root = coco(tmp_path / "src", bbox=four)
    for i in range(4):
        picture(root / f"train/{i}.jpg")
    for on_error in ("fail", "skip"):
        with pytest.raises(SourceError) as refused:
            pack_images(root, tmp_path / "a.h5", workers=0, outside_boxes=outside, on_error=on_error)
        assert f"`--boxes {form}`" in str(refused.value) and "clip" not in str(refused.value)
        assert "4 of 4 reach out of their images" in str(refused.value)
    pack_images(root, tmp_path / "a.h5", workers=0, boxes=form)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["boxes"][()].tolist() == [[[x, y, w, h]]] * 4
    with pytest.raises(SourceError, match="--outside-boxes clip"):
        pack_images(root, tmp_path / "b.h5", workers=0, boxes="xywh")


def test_one_box_of_many_that_reaches_out_is_no_sign_of_another_form(tmp_path: Path) -> None:
    root = coco(tmp_path / "src", count=11)
    path = root / "annotations/instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][3]["bbox"] = [40, 20, 50, 30]
    path.write_text(json.dumps(content))
    for i in range(11):
        picture(root / f"train/{i}.jpg")
    said = r"a box of annotation 3 in annotations/instances_train.json that reaches out .* with its right side at x 90"
    with pytest.raises(SourceError, match=rf"train/3\.jpg: has in boxes {said}.*--outside-boxes clip"):
        pack_images(root, tmp_path / "a.h5", workers=0)


def test_keypoints_go_through_export_packing_and_the_loader_with_their_meaning(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fastload import FastLoader, PackedDataset
    from fastload.export import export_file
    from fastload.transforms import RandomHorizontalFlip

    root = coco(tmp_path / "src")
    for i in range(4):
        picture(root / f"train/{i}.jpg")
    first, again = tmp_path / "a.h5", tmp_path / "b.h5"
    pack_images(root, first, workers=0, shuffle=False)
    export_file(first, tmp_path / "out")
    pack_images(tmp_path / "out", again, workers=0, shuffle=False)
    with h5py.File(first) as a, h5py.File(again) as b:
        assert np.array_equal(a["keypoints"][()], b["keypoints"][()])
        for file in (a, b):
            attrs = {name: np.asarray(value).tolist() for name, value in file["keypoints"].attrs.items()}
            assert attrs == {
                "names": [b"tail", b"left_ear", b"right_ear"], "skeleton": [0, 1, 0, 2], "flip_pairs": [0, 2, 1],
            }  # fmt: skip
    pack_images(tmp_path / "out", tmp_path / "c.h5", workers=0, size=(20, 30), fit="stretch")
    with h5py.File(tmp_path / "c.h5") as file:
        assert file["keypoints"][0, 0].tolist() == [[3, 2, 2], [11.5, 7.5, 1], [0, 0, 0]]
    dataset = PackedDataset(again, fields=("images", "boxes", "keypoints"))
    (batch,) = list(FastLoader(dataset, 4, shuffle=False, workers=1, transform=[RandomHorizontalFlip(1)]))
    points = batch[2] if isinstance(batch, (tuple, list)) else batch["keypoints"]
    assert points.dtype == torch.float32 and tuple(points.shape) == (4, 1, 3, 3)
    assert points[:, 0].tolist() == [[[59 - 6, 4, 2], [0, 0, 0], [59 - 23, 15, 1]]] * 4


def masked(root: Path, *orientations: int, size: tuple[int, int] = WIDE, own: int = 1, shown: bool = False) -> Path:
    """Images that EXIF turns, each with a mask of its rectangle, drawn on it as it is stored, or as it is `shown`."""
    for name, orientation in enumerate(orientations):
        path = root / f"images/{name}.jpg"
        picture(path, orientation, size)
        with Image.open(path) as image:
            mask = (np.asarray(image.convert("L")) > 128).astype(np.uint8)
        mask = upright(mask[..., None], orientation)[..., 0] if shown else mask
        (root / "masks").mkdir(exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = own
        Image.fromarray(mask).save(root / f"masks/{name}.png", exif=exif)
    return root


def masks_lie_on_the_rectangle(path: Path) -> bool:
    with h5py.File(path) as file:
        return bool(((file["images"][..., 0] > 128) == (file["masks"][()] > 0)).all())


@pytest.mark.parametrize("orientation", [2, 3, 6, 7])
def test_masks_that_fit_before_and_after_exif_are_refused_until_it_is_said_which(
    tmp_path: Path, orientation: int
) -> None:
    size = WIDE if orientation <= 4 else (40, 40)
    root, out = masked(tmp_path / "a", orientation, 1, size=size), tmp_path / "a.h5"
    said = (
        rf"images/0.jpg: is turned by EXIF \(orientation {orientation}\), and its mask fits before and after. If masks"
    )
    with pytest.raises(SourceError, match=rf"{said} .*`--boxes-of stored` .*`--boxes-of upright`"):
        pack_images(root, out, workers=0)
    pack_images(root, out, workers=0, boxes_of="stored")
    assert masks_lie_on_the_rectangle(out) and verify_file(out, source=root).ok
    pack_images(root, out, workers=0, boxes_of="upright", overwrite=True)
    assert not masks_lie_on_the_rectangle(out)
    pack_images(masked(tmp_path / "b", orientation, 1, size=size, shown=True), out, workers=0, boxes_of="upright",
                overwrite=True)  # fmt: skip
    assert masks_lie_on_the_rectangle(out)
    pack_images(root, out, workers=0, boxes_of="stored", size=(30, 30), mask_values="0,1", overwrite=True)


def test_masks_whose_size_or_own_exif_says_how_they_lie_are_taken_so(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    pack_images(masked(tmp_path / "shown", 3, 3, 1, own=3), out, workers=0)
    assert not masks_lie_on_the_rectangle(out), "the last is turned alone"
    pack_images(masked(tmp_path / "sized", 6, 5, shown=True), out, workers=0, overwrite=True)
    assert masks_lie_on_the_rectangle(out)
    root = masked(tmp_path / "stored", 6, 8, 5, 7)
    with pytest.raises(SourceError, match=r"is 60x40, the image 40x60 .*before EXIF turns it.*`--boxes-of stored`"):
        pack_images(root, out, workers=0, overwrite=True)
    pack_images(root, out, workers=0, boxes_of="stored", overwrite=True)
    assert masks_lie_on_the_rectangle(out)
