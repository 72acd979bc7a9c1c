import re
from pathlib import Path

import pytest
from small_trees import make, notes_of, write

from fastload.sources import list_source


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("a/_annotations.coco.json", "{}", "Roboflow"),
        ("labels/0.txt", "0 0.5 0.5 0.2 0.2\n", "YOLO"),
        ("captions_val.json", "{}", "captions"),
        ("train_test_split.txt", "1 0\n", "CUB"),
        ("a/0.xml", "<annotation><object/></annotation>", "VOC"),
        ("a/x.json", '{"images": [], "annotations": []}', "COCO"),
        ("t.csv", "id,label\n0,x\n1,y\n", r"table t.csv. Its column 'id' \(e.g. '0'\)"),
    ],
)
def test_annotations_that_are_not_read_are_said(tmp_path: Path, name: str, text: str, form: str) -> None:
    make(tmp_path, "images/a/000.png", "images/b/001.png")
    assert "NOT READ" not in notes_of(list_source(tmp_path))
    write(tmp_path / name, text)
    assert re.search(f"NOT READ: .*{form}", notes_of(list_source(tmp_path)))


def test_folders_of_yolo_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for name in ("images/0.png", "labels/0.txt"):
            write(tmp_path / split / name, "0 0.5 0.5 0.2 0.2\n")
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val") and listing.columns == {}
    assert "look like YOLO's boxes" in notes_of(listing)
