from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import archived, make, notes_of, refused, refused_or_skipped, values, write

from fastload.errors import MissingExtraError, OptionError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing


def names(listing: Listing, name: str = "labels") -> tuple[str, ...]:
    return listing.columns[name].attrs["names"]


@pytest.fixture
def abc(tmp_path: Path) -> Path:
    return make(tmp_path / "photos", "a.jpg", "b.jpg", "c.jpg")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("t.csv", "image,label\na.jpg,cat\nb.jpg,dog\nc.jpg,cat\n"),
        ("t.csv", "image,label\r\na.jpg,cat\r\n\r\nb.jpg,dog\r\nc.jpg,cat"),
        ("t.csv", "a.jpg,cat\nb.jpg,dog\nc.jpg,cat\n"),
        ("t.csv", "label;image\ncat;a.jpg\ndog;b.jpg\ncat;c.jpg\n"),
        ("t.csv", "sep=;\nlabel;image\ncat;a.jpg\ndog;b.jpg\ncat;c.jpg\n"),
        ("t.csv", '"image","label"\n"./a.jpg","cat"\n"b.jpg","dog"\n"c.jpg","cat"\n'),
        ("t.csv", "id,label\na,cat\nb,dog\nc,cat\n"),
        ("t.csv", "a,cat\nb,dog\nc,cat\n"),
        ("t.tsv", "label\timage\ncat\ta.jpg\ndog\tb.jpg\ncat\tc.jpg\n"),
        ("t.jsonl", '{"file_name": "a.jpg", "label": "cat"}\n{"label": "dog", "file_name": "b.jpg"}\n\n'
         '{"file_name": "c.jpg", "label": "cat"}\n'),
        ("t.txt", "a.jpg cat\nb.jpg   dog\nc.jpg cat\n"),
        ("t.csv", ",image,label\n0,a.jpg,cat\n1,b.jpg,dog\n2,c.jpg,cat\n"),
    ],
)  # fmt: skip
def test_a_table_in_any_dialect_gives_the_same_listing(abc: Path, file: str, text: str) -> None:
    table = write(abc / file, text)
    listing = list_source(table)
    assert listing.layout == "manifest" and listing.keys == ("a.jpg", "b.jpg", "c.jpg")
    assert values(listing) == [0, 1, 0] and names(listing) == ("cat", "dog")
    assert listing.split_names == ("all",)
    assert [listing.files.read(i) for i in range(3)] == [b"a.jpg", b"b.jpg", b"c.jpg"]
    assert ("no header" in notes_of(listing)) == ("label" not in text)
    if not file.endswith(".txt"):
        assert detect_layout(abc)[0] == "manifest"
        assert list_source(abc).keys == listing.keys


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_every_encoding_gives_the_same_names(tmp_path: Path, encoding: str) -> None:
    make(tmp_path, "Käse.jpg", "b.jpg")
    listing = list_source(write(tmp_path / "t.csv", "image,label\nKäse.jpg,süß\nb.jpg,x\n", encoding))
    assert listing.keys == ("Käse.jpg", "b.jpg") and names(listing) == ("süß", "x")
    assert ("not UTF-8 (line 2): read as cp1252" in notes_of(listing)) == (encoding == "cp1252")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("t.csv", "image,label\na.jpg,1\nb.jpg,1,2\n", "line 3: 3 cells, but the first row has 2"),
        ("t.csv", 'image,label\na.jpg,"1\n2"\nb.jpg,1,2\n', "line 4: 3 cells, but the first row has 2"),
        ("t.csv", 'image,label\na.jpg,"1\nb.jpg,1\n', "line 2: unexpected end of data"),
        ("t.csv", 'image,label\n"a.jpg"x,1\n', "line 2: "),
        ("t.csv", "image,label,label\na.jpg,1,2\n", "two columns are called 'label'"),
        ("t.csv", "\n\n", "holds no rows"),
        ("t.jsonl", '{"image": "a.jpg"}\n{"image": "b.jp\n', "line 2: is not JSON"),
        ("t.jsonl", '{"image": "a.jpg"}\n["b.jpg"]\n', "line 2: holds list, expected an object"),
        ("t.jsonl", "[" * 100_000, "line 1: is not JSON"),
        ("t.csv", "image,label\na.jpg,1\nd.jpg,1\n", r"d.jpg is not there \(line 3 of t.csv\)"),
        ("t.csv", "image,label\na.jpg,1\n,1\n", r"a row names no image \(line 3 of t.csv\)"),
        ("t.csv", "image,label\na.jpg,1\nb.jpg,2\na.jpg,1\n", "a.jpg has 2 rows: line 2 of t.csv and line 4 of t.csv"),
        ("t.csv", "image,label\na.jpg,1\n../x.jpg,2\n", "'../x.jpg', which leads out of the folder"),
        ("t.csv", "image,label\na.jpg,1\n/etc/x.jpg,2\n", "'/etc/x.jpg', which lies outside"),
        ("t.csv", "image,label\na.jpg,1\nhttp://x.org/b.jpg,2\n", "b.jpg is an address: .* .line 3 of t.csv."),
        ("t.csv", "image,label\na.jpg,cat\nb.jpg,\nc.jpg,nan\n", "b.jpg lacks its label: empty or NaN .line 3 of t"),
        ("t.csv", "image,label\na.jpg,0.5\nb.jpg,NaN\n", r"b.jpg lacks its label: empty or NaN \(line 3 of t.csv\)"),
        ("t.csv", "image,label,split\na.jpg,1,train\nb.jpg,2,\n", "rows without a split in column 'split' .1.: line 3"),
        ("t.csv", "image,label\nd.jpg,1\ne.jpg,1\n", "no column names images"),
        ("t.csv", "z.jpg,1\na.jpg,0\n", r"z.jpg is not there \(line 1 of t.csv\)"),  # no header
        ("t.csv", "\0".join("image,label\na.jpg,0\n\0"), "line 1: holds a zero byte.*Save it as UTF-8"),
        ("t.csv", "image,x,y,w,h,split\na.jpg,1,2,3,4,train\na.jpg,1,2,3,4,test\n",
         r"a.jpg is in two splits: train .line 2 of t.csv. and test .line 3"),
        ("t.jsonl", '{"image": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4]], "categories": [1]}}\n'
         '{"image": "b.jpg", "objects": {"bbox": [[1, 2, 3, 4]], "categories": []}}\n',
         "line 2 of t.jsonl: 1 boxes and 0 categories"),
    ],
)  # fmt: skip
def test_a_broken_table_is_refused_with_its_line(abc: Path, file: str, text: str, message: str) -> None:
    refused(message, write(abc / file, text))


def test_skip_leaves_out_contradictions_with_their_reasons(abc: Path) -> None:
    make(abc, "d.jpg", "e.jpg")
    table = write(abc / "t.csv", "image,label\na.jpg,cat\nb.jpg,\nx.jpg,dog\nd.jpg,dog\nd.jpg,cat\n")
    listing = list_source(table, on_error="skip")
    assert listing.keys == ("a.jpg",) and values(listing) == [0]
    assert listing.skipped == (
        ("x.jpg", "is not there (line 4 of t.csv)"),
        ("d.jpg", "has 2 rows: line 5 of t.csv and line 6 of t.csv"),
        ("b.jpg", "lacks its label: empty or NaN (line 3 of t.csv)"),
    )
    assert listing.notes[-1] == "NOT READ: images that layout manifest does not list (2): ./ (2), e.g. c.jpg."


def test_a_table_inside_an_archive_names_its_neighbours(abc: Path, tmp_path: Path) -> None:
    write(abc / "t.csv", "image,label\na.jpg,1\nb.jpg,0\n")
    listing = list_source(archived(abc, tmp_path / "photos.zip", "photos"))
    assert listing.keys == ("photos/a.jpg", "photos/b.jpg") and listing.files.read(1) == b"b.jpg"


def test_ids_without_suffix_find_the_folder_of_their_split(tmp_path: Path) -> None:
    root = make(tmp_path, "train/1.jpg", "train/2.jpg", "test/1.jpg", "test/3.png")
    write(root / "train.csv", "id,label\n1,7\n2,9\n")
    write(root / "test.csv", "id\n1\n3\n")
    write(root / "sample_submission.csv", "id,label\n1,0\n3,0\n")
    listing = list_source(root)
    assert listing.keys == ("train/1.jpg", "train/2.jpg", "test/1.jpg", "test/3.png")
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0, 0, 1, 1]
    assert values(listing) == [7, 9, -1, -1]
    assert "The split 'test' has no labels" in notes_of(listing) and "sample_submission.csv" in notes_of(listing)
    (root / "train/2.jpg").rename(root / "test/2.jpg")  # an image of test never stands in for one of train
    refused(r"2 is not there \(line 3 of train.csv\)", root)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_hugging_face_metadata_in_split_folders_rules_over_class_folders(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "validation/cat/1.jpg")
    rows = {"train": [("cat/1.jpg", "a cat"), ("dog/2.jpg", "a dog")], "validation": [("cat/1.jpg", "x")]}
    head, row = {"csv": ("file_name,caption\n", "{},{}\n")}.get(kind, ("", '{{"file_name": "{}", "caption": "{}"}}\n'))
    for split, pairs in rows.items():
        if kind == "parquet":
            pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
            import pyarrow as pa

            table = pa.table([list(column) for column in zip(*pairs, strict=True)], ["file_name", "caption"])
            pq.write_table(table, root / split / "metadata.parquet")
        else:
            write(root / split / f"metadata.{kind}", head + "".join(row.format(*pair) for pair in pairs))
    listing = list_source(root)
    assert listing.layout == "manifest" and listing.split_names == ("train", "val")
    assert listing.keys == ("train/cat/1.jpg", "train/dog/2.jpg", "validation/cat/1.jpg")
    assert "Names of folders are not labels here" in notes_of(listing)
    if kind == "parquet":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingExtraError, match=r"pip install pyarrow"):
            list_source(tmp_path)
    for split in rows:
        (root / split / f"metadata.{kind}").unlink()
    write(root / "metadata.csv", "file_name,label\ntrain/cat/1.jpg,1\nvalidation/cat/1.jpg,0\n")
    assert list_source(root).split_names == ("train", "val") and list_source(root).split.tolist() == [0, 1]


def test_metadata_that_are_given_themselves_keep_the_split_of_their_folder(tmp_path: Path) -> None:
    table = write(tmp_path / "train/metadata.jsonl", json_lines({"label": 1}, {"label": 2}, {"label": 0}))
    with zipfile.ZipFile(tmp_path / "train/images.zip", "w") as archive:
        for name in "abc":
            archive.writestr(f"{name}.jpg", name)
    refused(f"{table} OUT.h5 --root {tmp_path}/train/images.zip", tmp_path)  # which the message says to give
    listing = list_source(table, options=SourceOptions(root=tmp_path / "train/images.zip"))
    assert listing.split_names == ("train",) and values(listing) == [1, 2, 0]


def csv(header: str, *cells: str) -> str:
    """A table with a row for each of a.jpg, b.jpg, c.jpg."""
    return "".join(f"{row}\n" for row in (f"image,{header}", *map("{}.jpg,{}".format, "abc", cells)))


def json_lines(*rows: dict) -> str:
    return "".join(json.dumps({"image": f"{name}.jpg"} | row) + "\n" for name, row in zip("abc", rows, strict=True))


CORNERS = "xmin,ymin,xmax,ymax"


@pytest.mark.parametrize(
    ("text", "wanted", "note"),
    [
        (csv("smiling,hat", "-1,1", "1,-1", "1,1"),
         {"labels": [[0, 1], [1, 0], [1, 1]], "names": ("smiling", "hat")}, ""),
        (csv("cat,dog", "True,False", "False,False", "True,True"),
         {"labels": [[1, 0], [0, 0], [1, 1]], "names": ("cat", "dog")}, ""),
        (csv("label", "0 3 7", "3", "7"), {"labels": [[1, 1, 1], [0, 1, 0], [0, 0, 1]], "names": ("0", "3", "7")}, ""),
        (csv("label", "cat|dog", "dog", "cat"), {"labels": [[1, 1], [0, 1], [1, 0]], "names": ("cat", "dog")}, ""),
        (csv("label", "0.0", "1.0", "2.0"), {"labels": [0, 1, 2]}, "whole numbers written as floats"),
        (csv("score", "0.5", "1", "2e1"), {"targets": [0.5, 1, 20]}, "of floats"),
        (csv("x,y,w,h", "1,2,3,4", "5,6,7,8"), {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]]}, "Boxes by the columns x, y"),
        (csv("x1,y1,x2,y2,label", "1,2,3,4,5", "5,6,7,8,6"),
         {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": [5, 6]}, ""),
        # several rows of an image are its boxes, in columns or in one cell
        ("filename,width,class,xmin,ymin,xmax,ymax\n"
         "b.jpg,100,dog,1,2,4,6\na.jpg,100,cat,5,2,8,6\nb.jpg,100,cat,9,2,12,6\n",
         {"boxes": [[[1, 2, 3, 4], [9, 2, 3, 4]], [[5, 2, 3, 4], [0] * 4]], "num_boxes": [2, 1], "width": [100, 100],
          "box_labels": [[1, 0], [0, -1]], "names": ("cat", "dog")}, "Several rows of an image are its boxes"),
        ('image_id,width,bbox\na,16,"[0.0, 1.0, 4.0, 8.0]"\na,16,"[5, 1, 2.5, 8]"\nb,16,\n',
         {"boxes": [[[0, 1, 4, 8], [5, 1, 2.5, 8]], [[0] * 4] * 2], "num_boxes": [2, 0], "width": [16, 16]},
         "one cell"),
        # a missing integer becomes NaN only in columns that are no labels
        (csv("label,age", "1,3", "2,NA", "3,5"), {"labels": [1, 2, 3], "age": [3, np.nan, 5]}, "lacks 1 values: NaN"),
        (csv("x,y", "0,1", ",1"), {"x": [0, np.nan], "y": [1, 1]}, "No column is called label"),
        (json_lines(*({"label": i, "more": {"x": 1}, "place": [i, 2.5], "ok": bool(i % 2)} for i in range(3))),
         {"labels": [0, 1, 2], "place": [[0, 2.5], [1, 2.5], [2, 2.5]], "ok": [0, 1, 0]}, "more (nested"),
        (json_lines({"objects": {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8.5]], "categories": ["dog", "cat"]}},
                    {"objects": {"bbox": [], "categories": []}},
                    {"objects": {"bbox": [[0, 0, 1, 1]], "categories": ["dog"]}}),
         {"boxes": [[[1, 2, 3, 4], [5, 6, 7, 8.5]], [[0] * 4] * 2, [[0, 0, 1, 1], [0] * 4]], "num_boxes": [2, 0, 1],
          "box_labels": [[1, 0], [-1, -1], [1, -1]], "names": ("cat", "dog")}, "Boxes by column 'objects'"),
        ("image,label\na,0\nlabel,1\n", {"labels": [0, 1]}, ""),  # a header may be called like an image
        ("id,label\n1.0,a\n10.0,b\n", {"labels": [0, 1], "names": ("a", "b")}, ""),  # ids that pandas wrote as floats
    ],
)  # fmt: skip
def test_names_and_cells_decide_what_a_column_is(abc: Path, text: str, wanted: dict[str, list], note: str) -> None:
    make(abc, "image.jpg", "label.jpg", "1.png", "10.png")
    listing = list_source(write(abc / ("t.jsonl" if text[0] == "{" else "t.csv"), text))
    assert listing.columns.keys() == wanted.keys() - {"names"} and note in notes_of(listing)
    for name, column in listing.columns.items():
        np.testing.assert_equal(column.values.tolist(), wanted[name])
        if "labels" in name:
            assert column.attrs.get("names") == wanted.get("names")
            assert column.values.dtype == (np.uint8 if name == "labels" and column.values.ndim == 2 else np.int64)
        assert column.moves == {"boxes": "xywh", "bbox": "xywh" if "w,h" in text else "xyxy"}.get(name, "")
        assert column.values.dtype.kind != "f" or column.values.dtype == np.float32 or name == "place"


@pytest.mark.parametrize(
    ("header", "cells", "wanted"),
    [
        ("split", ("train", "Valid", "TEST"), (("train", "val", "test"), [0, 1, 2])),
        ("Set", ("training", "validation", "testing"), (("train", "val", "test"), [0, 1, 2])),
        ("is_valid", ("False", "True", "False"), (("train", "val"), [0, 1, 0])),
        ("is_train", ("1", "0", "1"), (("train", "val"), [0, 1, 0])),
        ("is_test", ("1.0", "0.0", "no"), (("train", "test"), [1, 0, 0])),
        ("fold", ("0", "1", "0"), (("0", "1"), [0, 1, 0])),
    ],
)
def test_split_columns_are_normalised(abc: Path, header: str, cells: tuple[str, ...], wanted: object) -> None:
    listing = list_source(write(abc / "t.csv", csv(f"label,{header}", *(f"1,{cell}" for cell in cells))))
    assert (listing.split_names, listing.split.tolist()) == wanted and list(listing.columns) == ["labels"]


@pytest.mark.parametrize(
    ("files", "rows", "wanted"),
    [
        (
            ["deep/images/a.jpg", "deep/images/b.jpg"],
            ["images\\a.jpg", "{root}/deep/images/b.jpg"],
            "deep/images/{}.jpg",
        ),
        (["a.png", "b.png"], ["a.jpg", "b.jpg"], "{}.png"),  # another suffix, but of every row
        (["a.png", "b.png"], ["a.png", "b.jpg"], r"b.jpg is not there .line 3"),
        (["x/a.jpg", "y/a.jpg", "masks/a.png"], ["a"], r"may be x/a.jpg and y/a.jpg: say which folder .*--root"),
        (["a.jpg"], ["a.jpg", "b.jpg"], r"b.jpg is a link to a file that does not exist .line 3 of t.csv"),
    ],
)
def test_images_are_found_by_path_end_or_stem(tmp_path: Path, files: list[str], rows: list[str], wanted: str) -> None:
    root = make(tmp_path / "data", *files)
    if "link" in wanted:
        (root / "b.jpg").symlink_to(root / "nowhere.jpg")
    text = "path,label\n" + "".join(f"{row.format(root=root.absolute())},0\n" for row in rows)
    table = write(root / "t.csv", text)
    if "{}" not in wanted:
        refused(wanted, table)
        if "--root" in wanted:
            assert list_source(table, options=SourceOptions(root=root / "y")).keys == ("a.jpg",)
        return
    listing = list_source(table)
    assert listing.keys == tuple(map(wanted.format, "ab"))
    assert ("another suffix than the files have (2)" in notes_of(listing)) == (files[0] == "a.png")


@pytest.mark.parametrize(
    ("file", "encoding", "key"),
    [
        (b"K\xe4se.jpg", "latin-1", "K\\xe4se.jpg"),  # matched byte by byte
        ("Ka\u0308se.jpg".encode(), "utf-8", "Ka\u0308se.jpg"),  # the other form of the accent
    ],
)
def test_names_of_files_may_be_written_otherwise(tmp_path: Path, file: bytes, encoding: str, key: str) -> None:
    (tmp_path / file.decode("utf-8", "surrogateescape")).write_bytes(b"1")
    assert list_source(write(tmp_path / "t.csv", "image,label\nK\u00e4se.jpg,0\n", encoding)).keys == (key,)


def test_a_broken_table_beside_the_dataset_does_not_stop_it_unless_it_is_part_of_it(abc: Path) -> None:
    write(abc / "labels.csv", "image,label\na.jpg,1\n")
    write(abc / "log.csv", "epoch,loss\n1,2\n3\n")
    listing = list_source(abc)
    assert listing.keys == ("a.jpg",) and "log.csv (broken)" in notes_of(listing)
    write(abc / "train.csv", "image,label\na.jpg,1\nb.jpg\n")
    refused(r"train.csv, line 3", abc)
    write(abc / "train.csv", "image,label\na.jpg,1\nb.jpg,1\n")
    write(abc / "val.csv", "image,label\na.jpg,1\n")
    (abc / "labels.csv").unlink()
    refused(r"a.jpg has 2 rows: line 2 of train.csv and line 2 of val.csv", abc)
    (abc / "val.csv").rename(abc / "train_folds.csv")
    refused(r"several tables name its images: train.csv, train_folds.csv", abc)
    assert list_source(abc / "train.csv").split_names == ("train",)


def test_columns_asked_for_are_labels_and_others_stay_under_their_names(abc: Path) -> None:
    rows = (f"{k},{a},x,{k},{'word ' * 20}{a}," for k, a in (("cat", 3), ("dog", 5), ("cat", 4)))
    table = write(abc / "t.csv", csv("kind,age,split?,key,caption,none", *rows))
    listing = list_source(table, options=SourceOptions(labels=("kind",)))
    assert values(listing) == [0, 1, 0] and values(listing, "age") == [3, 5, 4]
    assert values(listing, "key_") == [0, 1, 0] and "key" not in listing.columns
    assert listing.columns["caption"].values.shape == (3, 1) and "none (empty)" in notes_of(listing)
    several = list_source(table, options=SourceOptions(labels=("kind", "age")))
    assert values(several, "kind") == [0, 1, 0] and values(several, "age") == [3, 5, 4]
    refused(r"no column 'sort' for labels. There are kind, age", table, options=SourceOptions(labels=("sort",)))
    refused(r"no column 'file' for images", table, options=SourceOptions(image_column="file"))


def test_masks_of_a_column_are_found_may_change_and_be_absent(tmp_path: Path) -> None:
    root = make(tmp_path, "images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png")
    table = write(root / "t.csv", "image,mask,label\n1.jpg,masks/1.png,0\n2.jpg,2.png,1\n")
    listing = list_source(table)
    assert listing.masks is not None and listing.masks.present.all() and listing.masks.ignore_index is None
    assert [listing.masks.files.read(i) for i in range(2)] == [b"masks/1.png", b"masks/2.png"]
    assert listing.keys == ("images/1.jpg", "images/2.jpg")
    write(root / "masks/2.png", "another mask")  # which a resume notices
    changed = list_source(table)
    for before, after in ((listing.sizes, changed.sizes), (listing.mtimes_ns, changed.mtimes_ns)):
        assert (before != after).tolist() == [False, True]
    make(root, "masks/2.png")
    partly = list_source(write(root / "t.csv", "image,mask,label\n1.jpg,,0\n2.jpg,2.png,1\n"))
    assert partly.masks is not None and partly.masks.present.tolist() == [False, True]
    assert partly.masks.ignore_index == 255 and partly.masks.files.read(1) == b"masks/2.png"
    assert list_source(root / "t.csv", options=SourceOptions(masks="none")).masks is None
    write(root / "t.csv", "image,mask,label\n1.jpg,masks/3.png,0\n2.jpg,2.png,1\n")
    refused(r"masks that rows name in column 'mask'.*masks/3.png .line 2", root / "t.csv")
    head, boxes = "image,xmin,ymin,xmax,ymax,mask\n", "1.jpg,3,3,5,5,masks/1.png\n2.jpg,0,0,2,2,\n"
    shared = list_source(write(root / "t.csv", f"{head}1.jpg,0,0,2,2,\n{boxes}")).masks
    assert shared is not None and shared.present.tolist() == [True, False] and shared.files.read(0) == b"masks/1.png"
    write(root / "t.csv", f"{head}1.jpg,0,0,2,2,masks/2.png\n{boxes}")
    refused(r"different masks in column 'mask' \(1\): 1.jpg .line", root / "t.csv")


def test_a_table_beside_class_folders_takes_over_only_when_it_names_them_all(tmp_path: Path) -> None:
    make(tmp_path, *[f"{'ab'[i > 79]}/{i:03d}.png" for i in range(160)])
    log = write(tmp_path / "log.csv", "epoch,loss\n" + "".join(f"{i:03d},0.{i}\n" for i in range(160)))
    write(tmp_path / "broken.csv", 'a,"b\n')
    write(tmp_path / "readme.txt", "hello\n")
    listing = list_source(tmp_path)
    assert listing.layout == "folder" and names(listing) == ("a", "b") and "log.csv" in notes_of(listing)
    assert list_source(log, options=SourceOptions(image_column="epoch")).keys[79:81] == ("a/079.png", "b/080.png")
    write(log, "epoch,loss\n000,0.1\n001,0.2\n")
    listed = write(tmp_path / "list.csv", "filename,label\n" + "".join(f"{i:03d},{i % 3}\n" for i in range(160)))
    listing = list_source(tmp_path)
    assert listing.layout == "manifest" and len(listing) == 160
    assert "Tables ignored: broken.csv (broken), log.csv" in notes_of(listing)
    listed.unlink()
    write(tmp_path / "log.csv", "path,label\na/000.png,x\nb/080.png,y\n")
    refused(r"two layouts fit: .* names about 2 .* 160.*--layout folder", tmp_path)
    assert values(list_source(tmp_path, "manifest")) == [0, 1]
    write(tmp_path / "log.csv", "path,label\n" + "".join(f"{'ab'[i > 79]}/{i:03d}.png,x\n" for i in range(160)))
    assert detect_layout(tmp_path)[0] == "manifest"


@pytest.mark.parametrize(
    ("text", "message", "left"),
    [
        (csv(CORNERS, "1,2,3,4", "9,9,3,3"), "has the box 9, 9, 3, 3 .*ends before it begins", [[1, 2, 3, 4]]),
        (csv(CORNERS, "1,2,3,4", "1,1,nan,3"), "has the box .* not four numbers", [[1, 2, 3, 4]]),
        (csv(CORNERS, "1,2,3,4", "1,1,inf,3"), "has the box .* not four numbers", [[1, 2, 3, 4]]),
        (csv(CORNERS, "1,2,4,6", "9,2,3,6") + "a.jpg,9,2,12,6\n", "line 3 of t.csv has the box 9, 2, 3, 6",
         [[[1, 2, 3, 4], [9, 2, 3, 4]]]),
        (csv("label", "1", "inf", "0"), r"a label \(1\): b.jpg has an infinite label .line 3", [1, 0]),
    ],
)  # fmt: skip
def test_boxes_and_labels_that_cannot_be_leave_their_image_out(abc: Path, text: str, message: str, left: list) -> None:
    listing = refused_or_skipped(message, write(abc / "t.csv", text))
    ((name, column),) = [(n, c) for n, c in listing.columns.items() if n != "num_boxes"]
    assert column.values.tolist() == left and "b.jpg" not in listing.keys, name


@pytest.mark.parametrize(
    ("files", "text", "keys", "note"),
    [
        ("x/a.jpg x/y/b.jpg", "image,label\nx\\a.jpg,1\nx\\y/b.jpg,2\n", "x/a.jpg x/y/b.jpg", ""),
        ("x/A.JPG x/b.jpg", "image,label\na.jpg,1\nb.jpg,2\n", "x/A.JPG x/b.jpg", "in another case"),
        ("x/007.jpg x/010.jpg", "id,label\n7,1\n10,2\n", "x/007.jpg x/010.jpg", "without the zeros"),
        ("x/a.jpg x/b.jpg", "'image','label'\n'a.jpg','1'\n'b.jpg','2'\n", "x/a.jpg x/b.jpg", ""),
        ("x/a.jpg z/b.jpg", "image,other,label\nx/a.jpg,z/b.jpg,1\nz/b.jpg,x/a.jpg,2\n", "x/a.jpg z/b.jpg",
         "NOT READ: the images that column 'other' names"),
    ],
)  # fmt: skip
def test_images_are_found_however_the_table_writes_them(
    tmp_path: Path, files: str, text: str, keys: str, note: str
) -> None:
    root = make(tmp_path, *files.split())
    write(root / "t.csv", text)
    for path in (root / "t.csv", root):
        listing = list_source(path)
        assert listing.layout == "manifest" and " ".join(listing.keys) == keys and values(listing) == [1, 2]
        assert note in notes_of(listing) and set(listing.columns) == {"labels"}


def test_a_name_that_two_files_have_in_other_cases_is_not_guessed(tmp_path: Path) -> None:
    root = make(tmp_path, "x/A.jpg", "x/a.JPG", "x/b.jpg")
    refused(
        r"a.jpg may be x/A.jpg and x/a.JPG: .*line 2 of t.csv", write(root / "t.csv", "image,label\na.jpg,1\nb.jpg,2\n")
    )


@pytest.mark.parametrize(
    ("column", "cells", "labels", "classes"),
    [
        ("labels", ("['cat', 'dog']", "['dog']", "[]"), [[1, 1], [0, 1], [0, 0]], ("cat", "dog")),
        ("labels", ('["cat", "dog"]', '["dog"]', '["cat"]'), [[1, 1], [0, 1], [1, 0]], ("cat", "dog")),
        ("labels", ("[0, 2]", "[10]", "[]"), [[1, 1, 0], [0, 0, 1], [0, 0, 0]], ("0", "2", "10")),
        ("label", ("[0, 1, 0]", "[1, 0, 0]", "[0, 0, 1]"), [[0, 1, 0], [1, 0, 0], [0, 0, 1]], ()),
        ("label", ("cat, dog", "dog", "cat"), [[1, 1], [0, 1], [1, 0]], ("cat", "dog")),
        ("label", ("0,3,10", "3", "0,10"), [1, 2, 0], ("0,10", "0,3,10", "3")),  # too few to tell
        ("label", ("tench, Tinca", "goldfish", "tench, Tinca"), [1, 0, 1], ("goldfish", "tench, Tinca")),
        ("tags", ("a b", "b", "a"), [[1, 1], [0, 1], [1, 0]], ("a", "b")),
        ("label", ("red car", "car", "red"), [2, 0, 1], ("car", "red", "red car")),
    ],
)  # fmt: skip
def test_cells_of_several_classes_are_vectors(
    abc: Path, column: str, cells: tuple[str, ...], labels: list[Any], classes: tuple[str, ...]
) -> None:
    rows = "".join(
        f'{name}.jpg,"{cell.replace(chr(34), chr(34) * 2)}"\n' for name, cell in zip("abc", cells, strict=True)
    )
    listing = list_source(write(abc / "t.csv", f"image,{column}\n{rows}"))
    assert values(listing) == labels and listing.columns["labels"].attrs.get("names", ()) == classes
    assert ("are one class each" in notes_of(listing)) == any("," in name or name == "red car" for name in classes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,label\na.jpg,\"1,5\"\nb.jpg,\"2,5\"\n", "numbers with commas, e.g. 1,5, .*or two classes"),
        ("image,label\na.jpg,\"[3, 3]\"\nb.jpg,\"[2, 3]\"\n", "numbers that recur within a cell, e.g. .3, 3."),
        ("a.jpg,1,2,cat\nb.jpg,3,4,dog\n", "first line is `a.jpg,1,2,cat`.*`image,column_2,column_3,label`"),
        ("a.jpg,1,2,3,4,cat\na.jpg,3,4,5,6,dog\n", "no line of names.*perhaps `image,xmin,ymin,xmax,ymax,label`"),
        ("image,label\nC:\\\\x\\a.jpg,1\n/data/set/b.jpg,1\n", "'C:.*lies outside. Write 'a.jpg', which is there"),
    ],
)  # fmt: skip
def test_what_may_mean_several_things_is_refused(abc: Path, text: str, message: str) -> None:
    refused(message, write(abc / "t.csv", text))


def test_targets_as_lists_and_labels_that_each_row_has_alone(tmp_path: Path) -> None:
    names = [f"{i:02}.jpg" for i in range(20)]
    root = make(tmp_path, *names)
    table = write(root / "t.csv", "image,label\n" + "".join(f"{name},{i * 7}\n" for i, name in enumerate(names)))
    assert "CHECK: each of 20 rows has a label of its own in column 'label', e.g. 0" in notes_of(list_source(table))
    write(table, "image,label\n" + "".join(f'{name},"[0.5, {i}]"\n' for i, name in enumerate(names)))
    assert values(list_source(table), "targets")[:2] == [[0.5, 0], [0.5, 1]]


def test_a_sample_submission_and_a_table_of_test_images_are_no_labels_of_the_rest(tmp_path: Path) -> None:
    root = make(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg", "test/4.jpg")
    write(root / "sampleSubmission.csv", "id,label\n3,0\n4,0\n")
    assert detect_layout(root)[0] == "folder"
    write(root / "test.csv", "image\n3.jpg\n4.jpg\n")
    refused(
        r"test.csv .* names images of the test split alone, and there are 2 others.*`--layout folder`.*/test.csv OUT",
        root,
    )
    assert list_source(root / "test.csv").keys == ("test/3.jpg", "test/4.jpg")
    write(root / "train.csv", "image,label\n1.jpg,cat\n2.jpg,dog\n")
    assert list_source(root).split_names == ("train", "test")


def test_lists_of_boxes_in_cells_and_boxes_by_their_middle(abc: Path) -> None:
    table = write(
        abc / "t.csv", "image,bboxes,labels\na.jpg,\"[[1, 2, 3, 4], [5, 6, 7, 8]]\",\"['x', 'y']\"\nb.jpg,[],[]\n"
    )
    listing = list_source(table)
    assert values(listing, "boxes") == [[[1, 2, 3, 4], [5, 6, 7, 8]], [[0] * 4] * 2]
    assert values(listing, "box_labels") == [[0, 1], [-1, -1]] and names(listing, "box_labels") == ("x", "y")
    assert values(list_source(table, options=SourceOptions(boxes="xyxy")), "boxes")[0][1] == [5, 6, 2, 2]
    write(table, "image,x_center,y_center,width,height\na.jpg,10,10,4,6\nb.jpg,10,10,4,6\n")
    assert values(list_source(table), "bbox") == [[8, 7, 4, 6]] * 2
    write(table, "image,bbox\na.jpg,1 2 3 4\nb.jpg,[1. 2. 3. 4.]\n")
    assert values(list_source(table), "bbox") == [[1, 2, 3, 4]] * 2
    write(table, "image,label\na.jpg,1\nb.jpg,2\n")
    with pytest.raises(OptionError, match="`--boxes xyxy`, but nothing here holds boxes"):
        list_source(table, options=SourceOptions(boxes="xyxy"))


def test_files_that_are_no_tables_yet_say_how_to_make_one(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    refused("is a spreadsheet.* Save it as CSV", write(tmp_path / "t.xlsx", "PK"))
    refused(r"jq -c '\.\[\]' .*t.json > .*t.jsonl", write(tmp_path / "t.json", '[{"image": "a.jpg", "label": 1}]'))
    refused("to_entries.*file_name: .key", write(tmp_path / "t.json", '{"a.jpg": "cat"}'))
    (archive := tmp_path / "set").mkdir()
    archived(make(tmp_path / "other", "b.jpg"), archive / "images.zip")
    table = write(archive / "t.csv", "image,label\nb.jpg,1\n")
    refused(r"If they lie in images.zip: `--root .*images.zip`", table)
    assert values(list_source(table, options=SourceOptions(root=archive / "images.zip"))) == [1]


def test_a_table_without_a_column_of_labels_does_not_replace_class_folders(tmp_path: Path) -> None:
    make(tmp_path, "cat/a.jpg", "cat/b.jpg", "dog/c.jpg", "dog/d.jpg")
    for column, cells in (("width", "8 9 8 9"), ("size", "1 2 3 4"), ("author", "ann joe ann joe")):
        rows = zip(("cat/a.jpg", "cat/b.jpg", "dog/c.jpg", "dog/d.jpg"), cells.split(), strict=True)
        write(tmp_path / "meta.csv", f"file_name,{column}\n" + "".join(f"{name},{cell}\n" for name, cell in rows))
        refused("two layouts fit: folder by class folders .*none of whose columns is called label", tmp_path)
    said = list_source(tmp_path, "manifest", options=SourceOptions(labels=("author",)))
    assert said.columns["labels"].attrs["names"] == ("ann", "joe")
    write(tmp_path / "meta.csv", "file_name,label\ncat/a.jpg,x\ncat/b.jpg,x\ndog/c.jpg,y\ndog/d.jpg,y\n")
    assert list_source(tmp_path).columns["labels"].attrs["names"] == ("x", "y")


def test_paths_that_begin_with_the_name_of_the_folder_given_are_found(tmp_path: Path) -> None:
    root = make(tmp_path / "set", "train/1.jpg", "train/2.jpg")
    write(root / "train.csv", "Path,label\nset/train/1.jpg,a\nset/train/2.jpg,b\n")
    assert values(list_source(root)) == [0, 1]
    make(root, "set/train/1.jpg", "set/train/2.jpg")  # a folder of that name in it counts first
    assert list_source(root).keys == ("set/train/1.jpg", "set/train/2.jpg")


def test_labels_of_boxes_are_found_or_their_loss_is_said(tmp_path: Path) -> None:
    make(tmp_path, "1.jpg", "2.jpg")
    boxes = "1.jpg,{},0,0,4,4\n1.jpg,{},1,1,5,5\n2.jpg,{},0,0,3,3\n".format
    write(tmp_path / "t.csv", "ImageID,LabelName,XMin,YMin,XMax,YMax\n" + boxes("cat", "dog", "cat"))
    listing = list_source(tmp_path)
    assert listing.columns["box_labels"].values.tolist() == [[0, 1], [0, -1]]
    boxes = "1.jpg,{},p,0,0,4,4\n1.jpg,{},q,1,1,5,5\n2.jpg,{},q,0,0,3,3\n".format
    write(tmp_path / "t.csv", "ImageID,kind,side,XMin,YMin,XMax,YMax\n" + boxes("cat", "dog", "cat"))
    assert "NOT READ: `--labels` says which one is the boxes' labels. Columns that differ" in notes_of(
        list_source(tmp_path)
    )


def test_rows_of_one_image_are_refused_with_what_differs(tmp_path: Path) -> None:
    make(tmp_path, "1.jpg", "2.jpg")
    write(tmp_path / "t.csv", "image,runs\n1.jpg,3 4\n1.jpg,9 2\n2.jpg,\n")
    refused(r"1.jpg has 2 rows.*They differ in runs. Write one row for each image", tmp_path)


def test_a_table_called_otherwise_next_to_those_of_splits_is_to_be_moved_away(tmp_path: Path) -> None:
    make(tmp_path, "Train/1.jpg", "Test/2.jpg", "Meta/3.jpg")
    for name, path in (("Train", "Train/1.jpg"), ("Test", "Test/2.jpg"), ("Meta", "Meta/3.jpg")):
        write(tmp_path / f"{name}.csv", f"Path,ClassId\n{path},4\n")
    refused("move Meta.csv away: the others are called after their splits", tmp_path)


def test_phrases_of_words_that_are_classes_are_checked(abc: Path) -> None:
    rows = "a.jpg,scab\nb.jpg,scab rust\nc.jpg,rust\n"
    assert "CHECK: cells like 'scab rust' are one class each" in notes_of(
        list_source(write(abc / "t.csv", f"image,label\n{rows}"))
    )
    rows = "a.jpg,great dane\nb.jpg,great pyrenees\nc.jpg,pug\n"
    assert "CHECK" not in notes_of(list_source(write(abc / "t.csv", f"image,label\n{rows}")))


def test_a_lone_column_of_metadata_is_no_label_where_folders_are_classes(tmp_path: Path) -> None:
    root = make(tmp_path, "cat/1.jpg", "dog/2.jpg")
    write(root / "metadata.csv", "file_name,age\ncat/1.jpg,7\ndog/2.jpg,9\n")
    refused(r"two layouts fit.*none of whose columns is called label", root)


def test_labels_of_minus_one_and_one_are_two_classes(abc: Path) -> None:
    listing = list_source(write(abc / "t.csv", "image,label\na.jpg,-1\nb.jpg,1\nc.jpg,1\n"))
    assert values(listing) == [0, 1, 1] and "its -1 and 1 became 0 and 1" in notes_of(listing)
    listing = list_source(write(abc / "t.csv", "image,label\na.jpg,-2\nb.jpg,1\nc.jpg,0\n"))
    assert values(listing) == [-2, 1, 0] and "CHECK: labels below 0 in column 'label'" in notes_of(listing)
    listing = list_source(write(abc / "t.csv", "image,label\na.jpg,-1.0\nb.jpg,1.0\nc.jpg,1.0\n"))
    assert values(listing) == [0, 1, 1] and "its -1 and 1 became 0 and 1" in notes_of(listing)


def test_objects_of_json_in_cells_are_no_classes(abc: Path) -> None:
    shapes = '"{""name"":""rect"",""x"":5}"'
    rows = "".join(f"{name}.jpg,{shapes},{i}\n" for i, name in enumerate("abc"))
    listing = list_source(write(abc / "t.csv", f"filename,region_shape_attributes,size\n{rows}"))
    assert set(listing.columns) == {"size"}
    assert "NOT READ: objects of JSON in column 'region_shape_attributes'" in notes_of(listing)
