"""Captions of files next to images, of tables and of shards, joined to the images that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import listed, make, notes_of, refused, refused_or_skipped, values, write, write_tar

from fastload.errors import OptionError
from fastload.format.texts import text_lists
from fastload.options.pack import SourceOptions
from fastload.sources.captions import caption_column, texts_in
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing


def texts(listing: Listing) -> dict[str, list[str]]:
    """Key of each sample -> its captions."""
    columns = listing.columns
    found = text_lists(columns["caption"].values, columns["num_captions"].values)
    return dict(zip(listing.keys, found, strict=True))


def coco(path: Path, images: dict[int, str], captions: list[tuple[Any, str]]) -> Path:
    content = {
        "info": {"year": 2017},
        "images": [{"id": number, "file_name": name, "height": 4, "width": 6} for number, name in images.items()],
        "annotations": [{"id": n, "image_id": of, "caption": text} for n, (of, text) in enumerate(captions)],
    }
    return write(path, json.dumps(content))


def test_captions_of_coco_alone_are_a_layout_of_their_own(tmp_path: Path) -> None:
    make(tmp_path, "train2017/1.jpg", "train2017/2.jpg", "val2017/1.jpg", "annotations/readme.txt")
    said = [(2, "zwei "), (1, "a dog"), (2, ""), (2, "日本")]
    coco(tmp_path / "annotations/captions_train2017.json", {1: "1.jpg", 2: "2.jpg"}, said)
    coco(tmp_path / "annotations/captions_val2017.json", {1: "1.jpg"}, [(1, "another dog")])
    assert detect_layout(tmp_path)[0] == "captions"
    listing = listed(tmp_path)
    assert listing.split_names == ("train", "val") and list(listing.columns) == ["caption", "num_captions"]
    expected = {
        "train2017/1.jpg": ["a dog"],
        "train2017/2.jpg": ["zwei ", "", "日本"],
        "val2017/1.jpg": ["another dog"],
    }
    assert texts(listing) == expected
    assert "Captions: 5 of 3 images, 1 to 3 each, the longest of 11 bytes." in notes_of(listing)


def test_captions_beside_instances_are_a_field_of_coco(tmp_path: Path) -> None:
    make(tmp_path, "train2017/1.jpg", "train2017/2.jpg", "test2017/3.jpg")
    path = coco(tmp_path / "annotations/instances_train2017.json", {8: "1.jpg", 9: "2.jpg"}, [])
    content = json.loads(path.read_text()) | {"categories": [{"id": 1, "name": "dog"}]}
    path.write_text(json.dumps(content))
    coco(tmp_path / "annotations/captions_train2017.json", {9: "2.jpg", 77: "gone.jpg"}, [(9, "two"), (77, "gone")])
    assert detect_layout(tmp_path)[0] == "coco"
    listing = listed(tmp_path)
    assert texts(listing) == {"train2017/1.jpg": [], "train2017/2.jpg": ["two"], "test2017/3.jpg": []}
    left = list_source(tmp_path, options=SourceOptions(captions="none"))
    assert "caption" not in left.columns and "num_boxes" in left.columns


@pytest.mark.parametrize(
    ("name", "content", "expected", "splits"),
    [
        (
            "results_20130124.token",
            "1000_a.jpg#0\tA dog , running .\r\n1000_a.jpg#1\tTwo  dogs\n2000_b.jpg#0\tä\n",
            [["A dog , running .", "Two  dogs"], ["ä"]],
            ("all",),
        ),
        (
            "Flickr8k.token.txt",
            "2000_b.jpg#0\tä\n1000_a.jpg#0\tA dog\n1000_a.jpg#1\tTwo\n",
            [["A dog", "Two"], ["ä"]],
            ("all",),
        ),
        (
            "captions.txt",
            'image,caption\n1000_a.jpg,A dog , running .\n1000_a.jpg,"Two, ""big"" dogs"\n2000_b.jpg,ä\n',
            [["A dog , running .", 'Two, "big" dogs'], ["ä"]],
            ("all",),
        ),
        (
            "Flickr_8k.html",
            "<table><tr><td><a href='x'>http://www.flickr.com/photos/some_one/2000/</a><ul><li> ä </li></ul></td></tr>"
            "<tr><td><a>http://www.flickr.com/photos/who/1000/</a><ul><li>A dog</li><li>Two</li></ul></td></tr>"
            "<tr><td>Image Not Found<ul><li>Nothing</li></ul></td></tr></table>",
            [["A dog", "Two"], ["ä"]],
            ("all",),
        ),
        (
            "dataset_flickr8k.json",
            json.dumps(
                {
                    "images": [
                        {"filename": "1000_a.jpg", "split": "train", "sentences": [{"raw": "A dog"}, {"raw": "Two"}]},
                        {"filename": "2000_b.jpg", "split": "val", "sentences": [{"raw": "ä", "tokens": ["a"]}]},
                    ],
                    "dataset": "flickr8k",
                }
            ),
            [["A dog", "Two"], ["ä"]],
            ("train", "val"),
        ),
    ],
)
def test_files_of_captions_are_joined_to_their_images(
    tmp_path: Path, name: str, content: str, expected: list[list[str]], splits: tuple[str, ...]
) -> None:
    make(tmp_path, "Images/1000_a.jpg", "Images/2000_b.jpg", "Images/3000_c.jpg")
    write(tmp_path / name, content)
    listing = list_source(tmp_path)
    assert listing.layout == "captions" and listing.split_names == splits
    assert texts(listing) == dict(zip(("Images/1000_a.jpg", "Images/2000_b.jpg"), expected, strict=True))
    assert "NOT READ: images that layout captions does not list (1): Images/ (1), e.g. Images/3000_c.jpg." in notes_of(
        listing
    )


def test_sbus_captions_are_lines_of_a_second_file(tmp_path: Path) -> None:
    make(tmp_path, "dataset/1_x.jpg", "dataset/2_y.jpg")
    write(tmp_path / "SBU_captioned_photo_dataset_urls.txt", "http://a/b/2_y.jpg\r\nhttp://a/1_x.jpg\n")
    other = write(tmp_path / "SBU_captioned_photo_dataset_captions.txt", "a lake\nmy dog\n")
    assert texts(list_source(tmp_path)) == {"dataset/1_x.jpg": ["my dog"], "dataset/2_y.jpg": ["a lake"]}
    other.write_text("a lake\n")
    refused(r"has 2 lines, .*captions.txt 1. Fetch both", tmp_path)


def test_flickrs_lists_of_images_are_its_splits(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    write(tmp_path / "Flickr8k.token.txt", "a.jpg#0\tA\nb.jpg#0\tB\nc.jpg#0\tC\n")
    for split, name in (("train", "c"), ("dev", "a"), ("test", "b")):
        write(tmp_path / f"Flickr_8k.{split}Images.txt", f"{name}.jpg\n")
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val", "test") and listing.keys == ("c.jpg", "a.jpg", "b.jpg")


def test_a_caption_of_an_image_that_is_gone_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    write(tmp_path / "captions.txt", "image,caption\na.jpg,one\nb.jpg,two\n")
    listing = refused_or_skipped(r"captions without their image \(1\): b.jpg is named in captions.txt, but", tmp_path)
    assert listing.keys == ("a.jpg",) and listing.skipped[0][0] == "b.jpg"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions_a.json", '{"images": [', "is not well-formed JSON: "),
        ("captions_a.json", '{"images": [{"id": 1}]}', "images has file_name None"),
        (
            "captions_a.json",
            '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": "1", "caption": "x"}]}',
            "a caption is of the image '1', which is not among its images. Ids are whole numbers",
        ),
        ("results.token", "a.jpg#0\tx\nb.jpg y\n", r"results.token, line 2: 'b.jpg y' is not `image.jpg#0<TAB>text`"),
        ("captions.txt", "image,caption\na.jpg,x\nan end\n", r"captions.txt, line 3: 'an end' is not `image.jpg,text`"),
    ],
)
def test_damaged_files_of_captions_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    make(tmp_path, "a.jpg")
    write(tmp_path / name, content)
    refused(message, tmp_path)


# Tables and shards


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_column_of_a_table_holds_captions(tmp_path: Path, kind: str, several: bool) -> None:
    make(tmp_path, "a.jpg", "b.jpg")
    said: list[Any] = ["eins, ä, und so fort bis zum Ende des Satzes", "x"]
    if several:
        said = [[said[0], "zwei"], ["x"]]
    if kind == "jsonl":
        lines = [json.dumps({"file_name": f"{'ab'[n]}.jpg", "text": said[n], "label": n + 3}) for n in range(2)]
    else:
        cells = [(json.dumps(one) if several else one).replace('"', '""') for one in said]
        lines = ["file_name,caption,label", *(f'{"ab"[n]}.jpg,"{cells[n]}",{n + 3}' for n in range(2))]
    content = "\n".join(lines)
    write(tmp_path / f"metadata.{kind}", content)
    listing = list_source(tmp_path)
    assert texts(listing) == {"a.jpg": said[0] if several else said[:1], "b.jpg": ["x"]}
    assert values(listing) == [3, 4]


def test_several_rows_of_an_image_are_its_captions(tmp_path: Path) -> None:
    make(tmp_path, "im/1.jpg", "im/2.jpg")
    long = "Two young guys with shaggy hair look at their hands ."
    lines = f"1.jpg| 0| {long}\n2.jpg| 0| A dog .\n1.jpg| 1| Friends enjoy the time .\n2.jpg| 1| Dogs .\n"
    write(tmp_path / "results.csv", f"image_name| comment_number| comment\n{lines}")
    listing = list_source(tmp_path)
    expected = {"im/1.jpg": [long, "Friends enjoy the time ."], "im/2.jpg": ["A dog .", "Dogs ."]}
    assert texts(listing) == expected and list(listing.columns) == ["caption", "num_captions"]
    assert "columns that differ among them were left out (1): comment_number" in notes_of(listing)


def test_rows_of_an_image_with_two_labels_stay_an_error(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    write(tmp_path / "t.csv", "image,caption,label\na.jpg,one dog,0\na.jpg,two dogs,1\n")
    refused("images with more than one row", tmp_path)


def test_boxes_in_rows_say_their_caption_once(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg", "b.jpg")
    lines = "a.jpg,a dog,1,1,2,2\na.jpg,a dog,2,1,2,2\nb.jpg,,1,1,3,3\n"
    write(tmp_path / "t.csv", f"image,caption,x,y,w,h\n{lines}")
    listing = list_source(tmp_path)
    assert texts(listing) == {"a.jpg": ["a dog"], "b.jpg": []} and values(listing, "num_boxes") == [2, 1]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": ["ja", "nein", "ja", "nein"]}, ""),  # classes
        ({"caption": ["ja", "nein", "ja", "nein"]}, "caption"),
        ({"captions": [3, 4]}, ""),
        ({"captions": ["3", "4"]}, ""),  # their numbers
        ({"text": [["a"], None], "label": [1, 2]}, "text"),
        ({"text": ["a long text that says much about its image", "b"], "Caption": [None, ""]}, "text"),
        ({"text": ["a long text that says much about its image", "b"], "Caption": ["c", ""]}, "Caption"),
        ({"url": ["http://a long address of an image on some server", "b"]}, ""),
    ],
)
def test_a_column_of_captions_is_known_by_its_name_and_cells(columns: dict[str, Any], expected: str) -> None:
    assert caption_column(columns) == expected
    assert caption_column(columns, (expected,)) == ("" if "text" not in columns or expected != "Caption" else "text")


def test_cells_hold_a_text_or_a_list() -> None:
    assert texts_in("a") == ["a"] and texts_in("") == texts_in(None) == texts_in([]) == []
    assert texts_in('["a", ""]') == texts_in(["a", ""]) == ["a", ""] and texts_in("[a]") == ["[a]"]


def test_parquet_with_texts_beside_its_images(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow as pa

    image = [{"bytes": b"x%d" % n, "path": f"{n}.jpg"} for n in range(3)]
    said = [["a dog", "ein Hund"], [], ["ä"]]
    table = pa.table({"image": image, "captions": said, "label": [0, 1, 2], "url": ["a" * 50, "b", "c"]})
    pq.write_table(table, tmp_path / "a.parquet")
    listing = list_source(tmp_path / "a.parquet")
    assert list(texts(listing).values()) == said and values(listing) == [0, 1, 2]
    assert "caption" not in list_source(tmp_path / "a.parquet", options=SourceOptions(captions="none")).columns


def test_texts_of_shards_are_captions_and_those_of_a_json_come_first(tmp_path: Path) -> None:
    members = {"a.jpg": b"1", "a.txt": "Hündin \n".encode(), "a.json": b'{"width": 3}', "b.jpg": b"2", "b.json": b"{}"}
    path = write_tar(tmp_path / "x.tar", members)
    assert texts(list_source(path)) == {"a.jpg": ["Hündin \n"], "b.jpg": []}
    members |= {"a.json": b'{"caption": ["one", "two"]}', "b.json": b'{"caption": null}'}
    listing = list_source(write_tar(tmp_path / "x.tar", members))
    assert texts(listing) == {"a.jpg": ["one", "two"], "b.jpg": []} and "by 'caption' of 'json'" in notes_of(listing)
    refused(r"a has in 'txt' no text in UTF-8", write_tar(tmp_path / "y.tar", {"a.jpg": b"", "a.txt": b"\xff"}))


# What a file can hold


def test_long_texts_that_would_blow_a_file_up_are_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.sources.captions._LARGE", 100_000)
    make(tmp_path, *(f"{n:03}.jpg" for n in range(200)))
    lines = "".join(f"{n:03}.jpg#0\t{'ä' * 4000 if n == 7 else f'image {n}'}\n" for n in range(200))
    write(tmp_path / "results.token", lines)
    refused(r"captions would take 1,600,000 bytes, their texts 9,\d+: .* of 8,000 bytes \(the longest\)", tmp_path)
    listing = list_source(tmp_path, options=SourceOptions(captions="9"))
    assert texts(listing)["007.jpg"] == ["ää" * 2] and texts(listing)["008.jpg"] == ["image 8"]
    assert "cut to 9 bytes: 1." in notes_of(listing)
    assert listing.columns["caption"].values.dtype == np.dtype("S9")


def test_a_text_that_hdf5_cannot_hold_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg", "b.jpg")
    coco(tmp_path / "captions_x.json", {1: "a.jpg", 2: "b.jpg"}, [(1, "a\0b"), (2, "c\0")])
    refused("a caption of b.jpg ends in a zero byte", tmp_path)


def test_an_option_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="accepted: all, none, or the most bytes"):
        SourceOptions(captions="some")
    make(tmp_path, "cat/1.jpg")
    with pytest.raises(OptionError, match="`--captions` means nothing to the layout folder"):
        list_source(tmp_path, "folder", options=SourceOptions(captions="none"))
