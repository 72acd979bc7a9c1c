"""Boxes and landmarks of formats that only name their columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import npy, write_tar

from fastload import pack_images
from fastload.sources.layouts import list_source
from fastload.sources.listing import Listing

PIXELS = np.zeros((2, 40, 40, 3), np.uint8)
SIZED = ("x", "y", "width", "height")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def listed(tmp_path: Path, **columns: Any) -> Listing:
    np.savez(tmp_path / "a.npz", images=PIXELS, **columns)
    return list_source(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("boxes", "moves", "names"),
    [
        ([[20, 20, 5, 5], [4, 4, 20, 20]], "xywh", SIZED),
        ([[20, 20, 35, 35], [4, 4, 20, 20]], "xyxy", CORNERS),
        ([[[20, 20, 35, 35], [0, 0, 0, 0]], [[4, 4, 20, 20], [1, 1, 39, 40]]], "xyxy", CORNERS),
        ([[4, 4, 20, 20], [4, 4, 20, 20]], "", None),
        ([[30, 30, 20, 20], [4, 4, 20, 10]], "xywh", SIZED),
        ([[30, 30, 70, 70], [4, 4, 50, 50]], "", None),
        ([[0.1, 0.1, 0.5, 0.5], [0.5, 0.5, 0.1, 0.1]], "", None),
        ([[5, 5, 35, 36], [-1, -1, -1, -1]], "", None),
    ],
)
def test_boxes_are_of_the_only_form_that_fits_the_images(
    tmp_path: Path, boxes: list[Any], moves: str, names: tuple[str, ...] | None
) -> None:
    listing = listed(tmp_path, bbox=np.array(boxes))
    column = listing.columns["bbox"]
    assert (column.moves, column.attrs.get("names")) == (moves, names)
    assert column.attrs.get("coordinates") == (None if moves else "unknown")
    assert "Column 'bbox' holds" in listing.notes[-1]


def test_points_are_pairs(tmp_path: Path) -> None:
    known = listed(tmp_path, landmarks=np.full((2, 10), 30), keypoints=np.full((2, 7, 2), 9.5))
    assert [known.columns[name].moves for name in ("landmarks", "keypoints")] == ["points", "points"]
    triples = listed(tmp_path, keypoints=np.full((2, 51), 30), landmarks=np.full((2, 10), 0.5)).columns
    assert all(not column.moves and column.attrs["coordinates"] == "unknown" for column in triples.values())


def test_names_of_the_numbers_say_the_form(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = PIXELS
        forms = {"bbox": ("x1", "y1", "x2", "y2"), "boxes": ("cx", "cy", "w", "h"), "BBox": ("x", "y", "w", "h")}
        for name, names in forms.items():
            file[name] = np.full((2, 4), 20)
            file[name].attrs["names"] = names
    columns = list_source(tmp_path / "a.h5").columns
    assert columns["bbox"].moves == "xyxy" and columns["bbox"].attrs["names"] == ("x1", "y1", "x2", "y2")
    assert columns["BBox"].moves == "xywh" and columns["BBox"].attrs["names"] == ("x", "y", "w", "h")
    assert columns["boxes"].moves == "" and columns["boxes"].attrs["coordinates"] == "unknown"


@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_boxes_beside_files_of_images_move_with_them(tmp_path: Path, kind: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (40, 40)).save(out, "PNG")
    boxes = [[20, 20, 36, 36], [4, 4, 20, 20]]
    source = tmp_path / "set"
    source.mkdir()
    if kind == "jsonl":
        for i in range(2):
            (source / f"{i}.png").write_bytes(out.getvalue())
        lines = [json.dumps({"file_name": f"{i}.png", "bbox": box, "label": i}) for i, box in enumerate(boxes)]
        (source / "t.jsonl").write_text("\n".join(lines))
        (tmp_path / "0.png").write_bytes(out.getvalue())
        (tmp_path / "t.csv").write_text("file,x,y,width,height\n0.png,0.1,0.1,0.5,0.5\n")
        column = list_source(tmp_path / "t.csv").columns["bbox"]  # fractions in four columns are no pixels
        assert column.moves == "" and column.attrs == {"names": SIZED, "coordinates": "unknown"}
    else:
        members = [((f"{i}.png", out.getvalue()), (f"{i}.bbox.npy", npy(box))) for i, box in enumerate(boxes)]
        write_tar(source / "a.tar", [member for pair in members for member in pair])
    pack_images(source, tmp_path / "a.h5", size=20, workers=0, shuffle=False)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["bbox"][:].tolist() == [[10, 10, 18, 18], [2, 2, 10, 10]] and file["bbox"].dtype == np.float32
        assert file["bbox"].attrs["names"].astype(str).tolist() == list(CORNERS)


def test_a_box_of_an_object_without_numbers_is_none(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    boxes = [[[1, 2, 3, 4], [float("nan")] * 4, [0, 1, 2, 3]], [[1, 1, 1, None]]]
    rows = [{"file_name": name, "objects": {"bbox": of, "category": list(range(len(of)))}}
            for name, of in zip(("a.png", "b.png"), boxes, strict=True)]  # fmt: skip
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = list_source(tmp_path).columns
    assert columns["num_boxes"].values.tolist() == [2, 0]
    assert columns["boxes"].values.tolist() == [[[1, 2, 3, 4], [0, 1, 2, 3]], [[0] * 4] * 2]
    assert columns["box_labels"].values.tolist() == [[0, 2], [-1, -1]]
