"""Situations of public reports on reading images by YOLO's labels, tables and Parquet: each right, or refused with why.

`SITUATIONS`: where it was reported, its files (None: an image), and the columns that it must become, or the error.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_trees import notes_of, refused, values, write

from fastload.options.pack import SourceOptions
from fastload.sources.layouts import list_source

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

LINE = "0 0.5 0.5 0.5 0.5\n"
BOX = [[10.0, 5.0, 20.0, 10.0]]
YAML = "names: [cat, dog]\n"


def image() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 90, 10)).save(out, "PNG")
    return out.getvalue()


PAIR = {"bytes": image(), "path": "a.png"}
LISTS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def built(root: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        if isinstance(content, str):
            write(root / name, content)
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            pq.write_table(pa.table(content), root / name)
        else:
            (root / name).write_bytes(image() if content is None else content)
    return root


SITUATIONS: list[tuple[str, dict[str, Any], dict[str, Any] | str]] = [
    ("ultralytics/yolov5#10685, ultralytics/ultralytics#7907: commas between the numbers",
     {"images/a.png": None, "labels/a.txt": "0,0.5,0.5,0.5,0.5\n", "data.yaml": YAML}, {"boxes": [BOX]}),
    ("roboflow/supervision#2580: numpy.savetxt writes classes as 1.000e+00",
     {"images/a.png": None, "labels/a.txt": "1.000000000000000000e+00 5.0e-01 5.0e-01 5.0e-01 5.0e-01\n"},
     {"boxes": [BOX], "box_labels": [[1]]}),
    ("ultralytics/ultralytics#707: the name of a class in place of its number",
     {"images/a.png": None, "labels/a.txt": "dog 0.5 0.5 0.5 0.5\n", "data.yaml": YAML}, {"box_labels": [[1]]}),
    ("ultralytics/ultralytics#1170: predictions with a sixth number",
     {"images/a.png": None, "labels/a.txt": "0 0.684115 0.800463 0.153646 0.0935185 0.575787\n"},
     "labels/a.txt, line 1 has 5 numbers behind the class.*If the last is a confidence, remove it"),
    ("ultralytics/ultralytics#8839: labels of the OIDv4 toolkit, corners in pixels",
     {"train/Airplane/a.png": None, "train/Airplane/Label/a.txt": "Airplane 0.0 146.065 392.390 325.405\n"},
     "no file of labels can be read.*Label/a.txt, line 1 has the class 'Airplane', which is no number"),
    ("ultralytics/ultralytics#16845: data.yaml names lists by paths of another machine",
     {"Images/a.png": None, "Images/b.png": None, "Labels/a.txt": LINE, "Labels/b.txt": LINE,
      "x.yaml": "train: H:/sets/irobot/ImageSets/train.txt\nval: H:/sets/irobot/ImageSets/val.txt\n" + YAML,
      "ImageSets/train.txt": "H:\\sets\\irobot\\Images\\a.png\n",
      "ImageSets/val.txt": "H:\\sets\\irobot\\Images\\b.png\n"},
     {"boxes": [BOX] * 2, "split": ["train", "val"]}),
    ("ultralytics/yolov5#6351: lists of paths relative to the dataset",
     {"images/1.png": None, "images/2.png": None, "labels/1.txt": LINE, "labels/2.txt": LINE,
      "data.yaml": "path: ../set\ntrain: a.txt\nval: b.txt\n" + YAML,
      "a.txt": "images/2.png\n", "b.txt": "images/1.png"},
     {"key": ["images/2.png", "images/1.png"], "split": ["train", "val"]}),
    ("ultralytics/ultralytics#21224: another folder above is called images",
     {"images/site/images/a.png": None, "images/site/labels/a.txt": LINE}, {"boxes": [BOX]}),
    ("ultralytics/ultralytics#1008, #25657: boxes and polygons in one file",
     {"images/a.png": None, "labels/a.txt": LINE + "0 0.1 0.1 0.9 0.1 0.9 0.9\n"},
     {"boxes": [[*BOX, [4.0, 2.0, 32.0, 16.0]]]}),
    ("ultralytics/yolov5#3656, ultralytics/ultralytics#13203: numbers in pixels",
     {"images/a.png": None, "labels/a.txt": "0 100 50 20 10\n", "images/b.png": None, "labels/b.txt": LINE},
     "labels/a.txt, line 1 has a box outside of the image.*these look like pixels"),
    ("ultralytics/ultralytics#1256: classes that count from 1",
     {"images/a.png": None, "labels/a.txt": "2 0.5 0.5 0.5 0.5\n", "images/b.png": None, "labels/b.txt": LINE,
      "data.yaml": YAML}, "line 1 has class 2, and only 2 have names; classes count from 0"),
    ("ultralytics/ultralytics#4703: labels in the folder of the images",
     {"train/a.png": None, "train/a.txt": LINE, "train/classes.txt": "cat\n"}, {"boxes": [BOX], "split": ["train"]}),
    ("ultralytics/yolov5#5373: a folder of images whose labels are missing",
     {"images/train/a.png": None, "images/val/b.png": None, "labels/train/a.txt": LINE},
     {"num_boxes": [1, 0], "note": "NOT LABELLED: no image in images/val/"}),
    ("keras-team/keras#12214: ids without suffix, images in train/",
     {"train/0a.png": None, "train/0b.png": None, "labels.csv": "id,breed\n0a,boxer\n0b,pug\n"}, {"labels": [0, 1]}),
    ("keras-team/keras-preprocessing#116: absolute paths of another machine",
     {"train/a.png": None, "labels.csv": "image,label\n/content/data/train/a.png,cat\n"},
     "'/content/data/train/a.png', which lies outside. Write 'train/a.png', which is there"),
    ("abbyy/barcode_detection_benchmark#2: backslashes, and slashes, in a table of Windows",
     {"x/y/a.png": None, "x/b.png": None, "t.csv": "image,label\nx\\y/a.png,1\nx\\b.png,2\n"}, {"labels": [1, 2]}),
    ("fastai/fastai#1008: zeros that pandas drops from numbers",
     {"images/0007.png": None, "images/0010.png": None, "t.csv": "id,label\n7,a\n10,b\n"},
     {"key": ["images/0007.png", "images/0010.png"], "labels": [0, 1]}),
    ("findsorguk/findsorguk#1395: suffixes in another case",
     {"x/a.PNG": None, "x/b.png": None, "t.csv": "image,label\na.png,1\nb.png,2\n"}, {"labels": [1, 2]}),
    ("keras-team/keras-preprocessing#135: lists of classes, as pandas writes them",
     {"x/a.png": None, "x/b.png": None, "t.csv": "image,labels\na.png,\"['cat', 'dog']\"\nb.png,['dog']\n"},
     {"labels": [[1, 1], [0, 1]]}),
    ("fizyr/keras-retinanet#347: boxes by corners, without a header",
     {"k/a.png": None, "annotations.csv": "k\\a.png,8,2,38,18,fear\nk\\a.png,1,2,30,10,anger\n"},
     "it has no line of names.*perhaps `image,xmin,ymin,xmax,ymax,label`"),
    ("huggingface/datasets#7337: a table next to images.zip",
     {"images.zip": b"PK\5\6" + bytes(18), "metadata.jsonl": '{"file_name": "a.png", "label": 1}\n'},
     "If metadata.jsonl names its images: `fastload pack .*/metadata.jsonl OUT.h5 --root .*/images.zip`"),
    ("huggingface/datasets#6777: a table of another name, with two columns of images",
     {"images/1.png": None, "padded/p_1.png": None,
      "metadata1000.jsonl": '{"image": "images/1.png", "padded_image": "padded/p_1.png", "label": 3}\n'},
     {"key": ["images/1.png"], "labels": [3]}),
    ("Roblox/FAI-RL#81, huggingface/datasets#7508: Parquet with lists of images",
     {"a.parquet": {"images": pa.array([[PAIR, PAIR], [PAIR]], LISTS), "label": [0, 1]}},
     "column 'images' holds lists of images.*explode"),
    ("InertExpert2911/Mutual_Fund_Data#1: Parquet that Git LFS has not fetched",
     {"a.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:66\nsize 146946961\n"}, "`git lfs pull`"),
    ("rom1504/img2dataset#13, victorchall/EveryDream#7: Parquet with addresses of images",
     {"a.parquet": {"URL": ["http://x.org/a.jpg", "https://x.org/b.jpg"], "TEXT": ["a cat", "a dog"]}},
     "'URL' holds addresses.*img2dataset --url_list .*/a.parquet"),
    ("base64 text in Parquet, as APIs and spreadsheets export it",
     {"a.parquet": {"image": [base64.b64encode(image()).decode()] * 2, "label": [0, 1]}}, "base64.b64decode"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "wanted"), [case[1:] for case in SITUATIONS], ids=[case[0] for case in SITUATIONS])
def test_a_reported_situation_is_right_or_refused(
    tmp_path: Path, files: dict[str, Any], wanted: dict[str, Any] | str
) -> None:
    root = built(tmp_path / "set", files)
    if isinstance(wanted, str):
        refused(wanted, root)
        return
    listing = list_source(root)
    assert wanted.get("note", "") in notes_of(listing)
    assert list(listing.keys) == wanted.get("key", list(listing.keys))
    splits = [listing.split_names[i] for i in listing.split.tolist()]
    assert splits == wanted.get("split", splits)
    for name in wanted.keys() - {"note", "key", "split"}:
        assert values(listing, name) == wanted[name], name


def test_the_lines_that_an_error_gives_make_a_table_that_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: the lines in these errors are pandas'")
    for name in ("Roblox/FAI-RL#81", "base64 text"):
        files = next(files for source, files, _ in SITUATIONS if source.startswith(name))
        root = built(tmp_path / name[:4], files)
        with pytest.raises(Exception, match=r"`import .*`") as error:
            list_source(root)
        monkeypatch.chdir(root)
        exec(str(error.value).split("`")[1])
        listing = list_source(root / "images.parquet")
        assert len(listing) == (3 if "FAI" in name else 2)
        assert listing.files is not None and np.all([listing.files.read(i) == image() for i in range(len(listing))])


def test_boxes_in_a_table_are_what_the_user_says(tmp_path: Path) -> None:
    root = built(tmp_path, {"x/a.png": None, "t.csv": 'image,bbox,label\na.png,"[10, 5, 20, 10]",1\n'})
    for form, box in (("xywh", [10, 5, 20, 10]), ("cxcywh", [0, 0, 20, 10]), ("xyxy", [10, 5, 20, 10])):
        listing = list_source(root, options=SourceOptions(boxes=form))  # type: ignore[arg-type]
        assert values(listing, "bbox") == [box]
        assert listing.columns["bbox"].moves == ("xyxy" if form == "xyxy" else "xywh")
