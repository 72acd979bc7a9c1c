from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import make, notes_of, refused, refused_or_skipped, values, write

from fastload import pack_images
from fastload.errors import MissingExtraError, SourceError
from fastload.sources import Listing, SourceOptions, detect_layout, list_source


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
    ("file", "encoding", "key"),
    [
        (b"K\xe4se.jpg", "latin-1", "K\\xe4se.jpg"),  # matched byte by byte
        ("Ka\u0308se.jpg".encode(), "utf-8", "Ka\u0308se.jpg"),  # the other form of the accent
    ],
)
def test_names_of_files_may_be_written_otherwise(tmp_path: Path, file: bytes, encoding: str, key: str) -> None:
    (tmp_path / file.decode("utf-8", "surrogateescape")).write_bytes(b"1")
    listing = list_source(write(tmp_path / "t.csv", "image,label\nK\u00e4se.jpg,0\n", encoding))
    assert listing.keys == (key,)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("t.csv", "image,label\na.jpg,1\nb.jpg,1,2\n", "line 3: 3 cells, but the first row has 2"),
        ("t.csv", 'image,label\na.jpg,"1\nb.jpg,1\n', "line 2: unexpected end of data"),
        ("t.csv", 'image,label\n"a.jpg"x,1\n', "line 2: "),
        ("t.csv", "image,label,label\na.jpg,1,2\n", "two columns are called 'label'"),
        ("t.csv", "\n\n", "holds no rows"),
        ("t.jsonl", '{"image": "a.jpg"}\n{"image": "b.jp\n', "line 2: is not JSON"),
        ("t.jsonl", '{"image": "a.jpg"}\n["b.jpg"]\n', "line 2: holds list, expected an object"),
        ("t.jsonl", "[" * 100_000, "line 1: is not JSON"),
        ("t.csv", "image,label\na.jpg,1\nd.jpg,1\n", r"d.jpg \(line 3 of t.csv\): there is no such image"),
        ("t.csv", "image,label\na.jpg,1\n,1\n", r"a row \(line 3 of t.csv\): names no image"),
        ("t.csv", "image,label\na.jpg,1\nb.jpg,2\na.jpg,1\n", "a.jpg has 2 rows: line 2 of t.csv and line 4 of t.csv"),
        ("t.csv", "image,label\na.jpg,1\n../x.jpg,2\n", "'../x.jpg', which leads out of the folder"),
        ("t.csv", "image,label\na.jpg,1\n/etc/x.jpg,2\n", "'/etc/x.jpg', which lies outside"),
        ("t.csv", "image,label\na.jpg,1\nhttp://x.org/b.jpg,2\n", "b.jpg .line 3 of t.csv.: is an address"),
        ("t.csv", "image,label\na.jpg,cat\nb.jpg,\nc.jpg,nan\n", "b.jpg .line 3 of t.csv.: its label is empty or NaN"),
        ("t.csv", "image,label\na.jpg,0.5\nb.jpg,NaN\n", r"b.jpg \(line 3 of t.csv\): its label is empty or NaN"),
        ("t.csv", "image,label,split\na.jpg,1,train\nb.jpg,2,\n", "rows without a split in column 'split' .1.: line 3"),
        ("t.csv", "image,label\nd.jpg,1\ne.jpg,1\n", "no column names images"),
        ("t.csv", "z.jpg,1\na.jpg,0\n", r"z.jpg \(line 1 of t.csv\): there is no such image"),  # no header
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


def test_an_infinite_label_is_left_out_like_an_empty_one(abc: Path) -> None:
    table = write(abc / "t.csv", "image,label\na.jpg,1\nb.jpg,inf\nc.jpg,0\n")
    assert values(refused_or_skipped(r"a label \(1\): b.jpg .line 3.*label is infinite", table)) == [1, 0]


def test_skip_leaves_out_contradictions_with_their_reasons(abc: Path) -> None:
    make(abc, "d.jpg", "e.jpg")
    table = write(abc / "t.csv", "image,label\na.jpg,cat\nb.jpg,\nx.jpg,dog\nd.jpg,dog\nd.jpg,cat\n")
    listing = list_source(table, on_error="skip")
    assert listing.keys == ("a.jpg",) and values(listing) == [0]
    assert listing.skipped == (
        ("x.jpg", "there is no such image (line 4 of t.csv)"),
        ("d.jpg", "has 2 rows: line 5 of t.csv and line 6 of t.csv"),
        ("b.jpg", "its label is empty or NaN (line 3 of t.csv)"),
    )
    assert "Images that no row names were left alone (2): c.jpg, e.jpg" in notes_of(listing)


def test_a_header_may_be_called_like_an_image(abc: Path) -> None:
    make(abc, "image.jpg", "label.jpg")
    assert len(list_source(write(abc / "t.csv", "image,label\na,0\nlabel,1\n"))) == 2


def test_a_table_inside_an_archive_names_its_neighbours(abc: Path, tmp_path: Path) -> None:
    write(abc / "t.csv", "image,label\na.jpg,1\nb.jpg,0\n")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in sorted(abc.iterdir()):
            archive.write(path, f"photos/{path.name}")
    listing = list_source(tmp_path / "photos.zip")
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
    refused(r"2 \(line 3 of train.csv\)", root)


def test_an_id_that_two_files_answer_to_is_an_error(tmp_path: Path) -> None:
    root = make(tmp_path, "x/1.jpg", "y/1.jpg", "masks/1.png")
    table = write(root / "t.csv", "id,label\n1,0\n")
    refused(r"may be x/1.jpg and y/1.jpg: say which folder .*--root", table)
    assert list_source(table, options=SourceOptions(root=root / "y")).keys == ("1.jpg",)


def test_paths_may_begin_elsewhere_and_absolute_ones_below_the_root(tmp_path: Path) -> None:
    root = make(tmp_path / "data", "deep/images/a.jpg", "deep/images/b.jpg")
    table = write(root / "t.csv", f"path,label\nimages\\a.jpg,0\n{root.absolute()}/deep/images/b.jpg,1\n")
    assert list_source(table).keys == ("deep/images/a.jpg", "deep/images/b.jpg")


def test_another_suffix_is_accepted_only_when_it_is_so_for_every_row(tmp_path: Path) -> None:
    root = make(tmp_path, "1.png", "2.png")
    listing = list_source(write(root / "t.csv", "image,label\n1.jpg,0\n2.jpg,1\n"), options=SourceOptions())
    assert listing.keys == ("1.png", "2.png") and "another suffix than the files have (2)" in notes_of(listing)
    refused(r"2.jpg .line 3", write(root / "t.csv", "image,label\n1.png,0\n2.jpg,1\n"))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_hugging_face_metadata_in_split_folders_rules_over_class_folders(tmp_path: Path, kind: str) -> None:
    root = make(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "validation/cat/1.jpg")
    rows = {"train": [("cat/1.jpg", "a cat"), ("dog/2.jpg", "a dog")], "validation": [("cat/1.jpg", "x")]}
    for split, pairs in rows.items():
        if kind == "csv":
            text = "file_name,caption\n" + "".join(f"{name},{text}\n" for name, text in pairs)
        else:
            text = "".join(json.dumps({"file_name": name, "caption": text}) + "\n" for name, text in pairs)
        write(root / split / f"metadata.{kind}", text)
    listing = list_source(root)
    assert listing.layout == "manifest" and listing.split_names == ("train", "val")
    assert listing.keys == ("train/cat/1.jpg", "train/dog/2.jpg", "validation/cat/1.jpg")
    assert "Names of folders are not labels here" in notes_of(listing)


def test_metadata_at_the_top_takes_splits_from_the_images_folders(tmp_path: Path) -> None:
    root = make(tmp_path, "train/1.jpg", "test/2.jpg")
    write(root / "metadata.csv", "file_name,label\ntrain/1.jpg,1\ntest/2.jpg,0\n")
    listing = list_source(root)
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("header", "cells", "wanted"),
    [
        ("split", ("train", "Valid", "TEST"), (("train", "val", "test"), [0, 1, 2])),
        ("Set", ("training", "validation", "testing"), (("train", "val", "test"), [0, 1, 2])),
        ("is_valid", ("False", "True", "False"), (("train", "val"), [0, 1, 0])),
        ("fold", ("0", "1", "0"), (("0", "1"), [0, 1, 0])),
    ],
)
def test_split_columns_are_normalised(abc: Path, header: str, cells: tuple[str, ...], wanted: object) -> None:
    text = f"image,label,{header}\n" + "".join(f"{n}.jpg,1,{c}\n" for n, c in zip("abc", cells, strict=True))
    listing = list_source(write(abc / "t.csv", text))
    assert (listing.split_names, listing.split.tolist()) == wanted
    assert list(listing.columns) == ["labels"]


def test_several_tables_of_one_split_name_the_way_out(abc: Path) -> None:
    write(abc / "train.csv", "image,label\na.jpg,1\n")
    write(abc / "train_folds.csv", "image,label\nb.jpg,1\n")
    refused(r"several tables name its images: train.csv, train_folds.csv", abc)
    assert list_source(abc / "train.csv").split_names == ("train",)


def test_a_stray_table_does_not_make_a_folder_a_manifest(tmp_path: Path) -> None:
    root = make(tmp_path, "cat/0.jpg", "cat/1.jpg", "dog/2.jpg")
    write(root / "results.csv", "epoch,loss\n0,1.5\n1,1.25\n2,1.1\n50,0.2\n51,0.2\n52,0.2\n53,0.1\n")
    write(root / "broken.csv", 'a,"b\n')
    write(root / "readme.txt", "hello\n")
    assert detect_layout(root)[0] == "folder"


@pytest.mark.parametrize(
    ("header", "cells", "wanted", "named", "dtype"),
    [
        ("smiling,hat", ("-1,1", "1,-1", "1,1"), [[0, 1], [1, 0], [1, 1]], ("smiling", "hat"), np.uint8),
        ("cat,dog", ("True,False", "False,False", "True,True"), [[1, 0], [0, 0], [1, 1]], ("cat", "dog"), np.uint8),
        ("label", ("0 3 7", "3", "7"), [[1, 1, 1], [0, 1, 0], [0, 0, 1]], ("0", "3", "7"), np.uint8),
        ("label", ("cat|dog", "dog", "cat"), [[1, 1], [0, 1], [1, 0]], ("cat", "dog"), np.uint8),
        ("label", ("0.0", "1.0", "2.0"), [0, 1, 2], None, np.int64),
        ("score", ("0.5", "1", "2e1"), [0.5, 1, 20], None, np.float32),
    ],
)
def test_cells_decide_whether_they_are_labels_vectors_or_targets(
    abc: Path, header: str, cells: tuple[str, ...], wanted: list[object], named: tuple[str, ...] | None, dtype: type
) -> None:
    text = f"image,{header}\n" + "".join(f"{n}.jpg,{cell}\n" for n, cell in zip("abc", cells, strict=True))
    ((name, column),) = list_source(write(abc / "t.csv", text)).columns.items()
    assert name == ("targets" if header == "score" else "labels")
    assert column.values.tolist() == wanted and column.values.dtype == dtype and column.attrs.get("names") == named


def test_a_broken_table_beside_the_dataset_does_not_stop_it_unless_it_is_part_of_it(abc: Path) -> None:
    write(abc / "labels.csv", "image,label\na.jpg,1\n")
    write(abc / "log.csv", "epoch,loss\n1,2\n3\n")
    listing = list_source(abc)
    assert listing.keys == ("a.jpg",) and "log.csv (broken)" in notes_of(listing)
    write(abc / "train.csv", "image,label\na.jpg,1\nb.jpg\n")
    refused(r"train.csv, line 3", abc)


def test_an_image_in_two_tables_is_refused(abc: Path) -> None:
    write(abc / "train.csv", "image,label\na.jpg,1\nb.jpg,1\n")
    write(abc / "val.csv", "image,label\na.jpg,1\n")
    refused(r"a.jpg has 2 rows: line 2 of train.csv and line 2 of val.csv", abc)


def test_columns_asked_for_are_labels_and_others_stay_under_their_names(abc: Path) -> None:
    text = "image,kind,age,split?,key,caption,none\n" + "".join(
        f"{n}.jpg,{k},{a},x,{k},{'word ' * 20}{n},\n" for n, k, a in (("a", "cat", 3), ("b", "dog", 5), ("c", "cat", 4))
    )
    listing = list_source(write(abc / "t.csv", text), options=SourceOptions(labels=("kind",)))
    assert values(listing) == [0, 1, 0] and values(listing, "age") == [3, 5, 4]
    assert values(listing, "key_") == [0, 1, 0] and "key" not in listing.columns
    assert "caption (text, mostly different in each row)" in notes_of(listing) and "none (empty)" in notes_of(listing)
    several = list_source(abc / "t.csv", options=SourceOptions(labels=("kind", "age")))
    assert values(several, "kind") == [0, 1, 0] and values(several, "age") == [3, 5, 4]
    refused(r"no column 'sort' for labels. There are kind, age", abc / "t.csv", options=SourceOptions(labels=("sort",)))
    refused(r"no column 'file' for images", abc / "t.csv", options=SourceOptions(image_column="file"))


def test_masks_of_a_column_are_found_and_may_be_absent(tmp_path: Path) -> None:
    root = make(tmp_path, "images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png")
    listing = list_source(write(root / "t.csv", "image,mask,label\n1.jpg,masks/1.png,0\n2.jpg,2.png,1\n"))
    assert listing.masks is not None and listing.masks.present.all() and listing.masks.ignore_index is None
    assert [listing.masks.files.read(i) for i in range(2)] == [b"masks/1.png", b"masks/2.png"]
    assert listing.keys == ("images/1.jpg", "images/2.jpg")
    partly = list_source(write(root / "t.csv", "image,mask,label\n1.jpg,,0\n2.jpg,2.png,1\n"))
    assert partly.masks is not None and partly.masks.present.tolist() == [False, True]
    assert partly.masks.ignore_index == 255 and partly.masks.files.read(1) == b"masks/2.png"
    assert list_source(root / "t.csv", options=SourceOptions(masks="none")).masks is None
    write(root / "t.csv", "image,mask,label\n1.jpg,masks/3.png,0\n2.jpg,2.png,1\n")
    refused(r"masks that rows name in column 'mask'.*masks/3.png .line 2", root / "t.csv")


def test_one_box_an_image_moves_with_it(abc: Path) -> None:
    listing = list_source(write(abc / "t.csv", "image,x1,y1,x2,y2,label\na.jpg,1,2,3,4,5\nb.jpg,1,2,3,4,6\n"))
    column = listing.columns["bbox"]
    assert column.moves == "xyxy" and column.values.dtype == np.float32 and values(listing) == [5, 6]


def test_several_rows_of_an_image_are_its_boxes(abc: Path) -> None:
    rows = (("b", "dog", 1), ("a", "cat", 5), ("b", "cat", 9))
    text = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    text += "".join(f"{name}.jpg,100,80,{label},{x},2,{x + 3},6\n" for name, label, x in rows)
    listing = list_source(write(abc / "t.csv", text))
    assert listing.keys == ("b.jpg", "a.jpg")
    boxes = listing.columns["boxes"]
    assert boxes.values.tolist() == [[[1, 2, 3, 4], [9, 2, 3, 4]], [[5, 2, 3, 4], [0, 0, 0, 0]]]
    assert boxes.moves == "xywh" and values(listing, "num_boxes") == [2, 1]
    assert values(listing, "box_labels") == [[1, 0], [0, -1]] and names(listing, "box_labels") == ("cat", "dog")
    assert values(listing, "width") == [100, 100]
    write(abc / "t.csv", f"{text}c.jpg,100,80,cat,9,2,3,6\n")
    assert refused_or_skipped("line 5 of t.csv has the box 9, 2, 3, 6", abc / "t.csv").keys == listing.keys


def test_nested_values_of_json_are_ignored_and_lists_of_one_length_kept(abc: Path) -> None:
    rows = [
        {"image": f"{name}.jpg", "label": i, "more": {"x": 1}, "place": [i, 2.5], "ok": bool(i % 2)}
        for i, name in enumerate("abc")
    ]
    listing = list_source(write(abc / "t.jsonl", "\n".join(map(json.dumps, rows))))
    assert values(listing, "place") == [[0, 2.5], [1, 2.5], [2, 2.5]] and values(listing, "ok") == [0, 1, 0]
    assert "more (nested" in notes_of(listing)


def test_objects_of_hugging_face_are_boxes(abc: Path) -> None:
    rows = [
        {"file_name": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8.5]], "categories": ["dog", "cat"]}},
        {"file_name": "b.jpg", "objects": {"bbox": [], "categories": []}},
        {"file_name": "c.jpg", "objects": {"bbox": [[0, 0, 1, 1]], "categories": ["dog"]}},
    ]
    listing = list_source(write(abc / "metadata.jsonl", "\n".join(map(json.dumps, rows))))
    assert values(listing, "num_boxes") == [2, 0, 1] and values(listing, "box_labels") == [[1, 0], [-1, -1], [1, -1]]
    assert values(listing, "boxes")[0] == [[1, 2, 3, 4], [5, 6, 7, 8.5]]
    assert names(listing, "box_labels") == ("cat", "dog")
    assert listing.columns["boxes"].moves == "xywh"


def test_a_missing_integer_becomes_nan_only_in_columns_that_are_no_labels(abc: Path) -> None:
    listing = list_source(write(abc / "t.csv", "image,label,age\na.jpg,1,3\nb.jpg,2,NA\nc.jpg,3,5\n"))
    assert listing.columns["age"].values.dtype == np.float32 and np.isnan(listing.columns["age"].values[1])
    assert "Column 'age' lacks 1 values: NaN there" in notes_of(listing)
    unlabelled = list_source(write(abc / "t.csv", "image,x,y\na.jpg,0,1\nb.jpg,,1\n"))
    assert np.isnan(unlabelled.columns["x"].values[1])


def test_a_dangling_link_that_a_row_names_says_so(abc: Path) -> None:
    (abc / "d.jpg").symlink_to(abc / "nowhere.jpg")
    table = write(abc / "t.csv", "image,label\na.jpg,1\nd.jpg,2\n")
    refused(r"d.jpg .line 3 of t.csv.: is a link to a file that does not exist", table)


def test_a_manifest_packs_with_its_masks_boxes_and_splits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "image;mask;label;split;x;y;w;h\n"
    for i in range(6):
        for folder, shape in (("images", (8, 12, 3)), ("masks", (8, 12))):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 9, shape, np.uint8)).save(tmp_path / folder / f"{i}.png")
        text += f"{i};{i};{'ab'[i % 2]};{'train' if i else 'dev'};{i};2;4;6\n"
    report = pack_images(
        write(tmp_path / "t.csv", text), tmp_path / "t.h5", root=tmp_path, size=(4, 6), workers=1, shuffle=False
    )
    assert report.layout == "manifest"
    with h5py.File(tmp_path / "t.h5") as file:
        keys = file["key"].asstr()[:].tolist()
        assert keys == [f"images/{i}.png" for i in (1, 2, 3, 4, 5, 0)]
        assert file["images"].shape == (6, 4, 6, 3) and file["masks"].shape == (6, 4, 6)
        assert file["bbox"][0].tolist() == [0.5, 1, 2, 3] and file["labels"][:].tolist() == [1, 0, 1, 0, 1, 0]
        assert file["split"].attrs["names"].tolist() == [b"train", b"dev"]


def test_rows_of_one_image_share_a_mask_or_are_refused(abc: Path) -> None:
    make(abc, "masks/1.png", "masks/2.png")
    table, head = abc / "t.csv", "file_name,xmin,ymin,xmax,ymax,mask\n"
    write(table, f"{head}a.jpg,0,0,2,2,\na.jpg,3,3,5,5,masks/1.png\nb.jpg,0,0,2,2,\nc.jpg,0,0,2,2,masks/2.png\n")
    listing = list_source(abc)
    assert listing.masks is not None and listing.masks.present.tolist() == [True, False, True]
    assert [listing.masks.files.read(i) for i in (0, 2)] == [b"masks/1.png", b"masks/2.png"]
    write(table, f"{head}a.jpg,0,0,2,2,masks/2.png\na.jpg,3,3,5,5,masks/1.png\nb.jpg,0,0,2,2,\n")
    refused(r"different masks in column 'mask' \(1\): a.jpg .line", abc)


def test_a_changed_mask_changes_what_a_resume_compares(abc: Path) -> None:
    make(abc, "masks/a.png", "masks/b.png")
    write(abc / "t.csv", "image,mask\na.jpg,masks/a.png\nb.jpg,masks/b.png\nc.jpg,\n")
    before = list_source(abc)
    (abc / "masks/b.png").write_text("another mask")
    after = list_source(abc)
    assert (before.sizes != after.sizes).tolist() == [False, True, False]
    assert (before.mtimes_ns != after.mtimes_ns).tolist() == [False, True, False]


def test_a_table_of_numbers_beside_class_folders_is_no_manifest(tmp_path: Path) -> None:
    make(tmp_path, *[f"{'cat' if i % 2 else 'dog'}/{i}.png" for i in range(30)])
    log = write(tmp_path / "log.csv", "epoch,loss\n" + "".join(f"{i},{1 / (i + 1):.4f}\n" for i in range(12)))
    listing = list_source(tmp_path)
    assert listing.layout == "folder" and len(listing) == 30 and names(listing) == ("cat", "dog")
    assert "log.csv" in notes_of(listing)
    write(tmp_path / "list.csv", "filename,label\n" + "".join(f"{i},{i % 3}\n" for i in range(30)))
    listing = list_source(tmp_path)
    assert listing.layout == "manifest" and len(listing) == 30 and "Tables ignored: log.csv" in notes_of(listing)
    assert list_source(log, options=SourceOptions(image_column="epoch")).keys[:2] == ("dog/0.png", "cat/1.png")


def test_metadata_parquet_of_an_imagefolder_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra [parquet] is not installed")
    import pyarrow as pa

    for split in ("train", "test"):
        make(tmp_path / split, "a/0.png", "b/1.png")
        rows = {"file_name": ["a/0.png", "b/1.png"], "label": [5, 7]}
        pq.write_table(pa.table(rows), tmp_path / split / "metadata.parquet")
    listing = list_source(tmp_path)
    assert listing.layout == "manifest" and listing.split_names == ("train", "test")
    assert values(listing) == [5, 7, 5, 7] and listing.keys[2] == "test/a/0.png"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install pyarrow"):
        list_source(tmp_path)


def test_a_table_beside_class_folders_takes_over_only_when_it_names_them_all(tmp_path: Path) -> None:
    make(tmp_path, *[f"{name}/{i + 4 * (name == 'b')}.png" for name in "ab" for i in range(4)])
    write(tmp_path / "log.csv", "epoch,loss\n" + "".join(f"{i},0.{i}\n" for i in range(8)))
    assert detect_layout(tmp_path)[0] == "folder"
    write(tmp_path / "log.csv", "path,label\na/0.png,x\nb/4.png,y\n")
    with pytest.raises(SourceError, match=r"two layouts fit: .* names about 2 .* 8.*--layout folder"):
        detect_layout(tmp_path)
    assert values(list_source(tmp_path, "manifest")) == [0, 1]
    write(tmp_path / "log.csv", "path,label\n" + "".join(f"{'ab'[i > 3]}/{i}.png,x\n" for i in range(8)))
    assert detect_layout(tmp_path)[0] == "manifest"


def test_ids_that_pandas_wrote_as_floats(tmp_path: Path) -> None:
    make(tmp_path, "1.png", "10.png")
    write(tmp_path / "t.csv", "id,label\n1.0,a\n10.0,b\n")
    assert list_source(tmp_path).keys == ("1.png", "10.png")


@pytest.mark.parametrize(
    ("cells", "message"),
    [("9,9,3,3", "9, 9, 3, 3 .*ends before it begins"), ("1,1,nan,3", "not four numbers"), ("1,1,inf,3", "not four")],
)
def test_boxes_that_cannot_be(tmp_path: Path, cells: str, message: str) -> None:
    make(tmp_path, "a.png", "b.png")
    table = write(tmp_path / "t.csv", f"file,xmin,ymin,xmax,ymax\na.png,1,2,3,4\nb.png,{cells}\n")
    listing = refused_or_skipped(f"line 3 of t.csv has the box .*{message}", table)
    assert values(listing, "bbox") == [[1, 2, 3, 4]] and listing.skipped[0][0] == "b.png"


def test_boxes_in_one_cell_with_several_rows_an_image(tmp_path: Path) -> None:
    make(tmp_path, "a.png", "b.png")
    rows = 'a,16,"[0.0, 1.0, 4.0, 8.0]"\na,16,"[5, 1, 2.5, 8]"\nb,16,\n'
    listing = list_source(write(tmp_path / "t.csv", f"image_id,width,bbox\n{rows}"))
    assert values(listing, "boxes") == [[[0, 1, 4, 8], [5, 1, 2.5, 8]], [[0] * 4] * 2]
    assert values(listing, "num_boxes") == [2, 0]
