import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_trees import archived, refused, refused_or_skipped, values, write

from fastload.errors import SourceError
from fastload.sources.celeba import parse_table
from fastload.sources.layouts import detect_layout, list_source

NAMES = [f"Attribute_{i}" for i in range(40)]
POINTS = "lefteye_x lefteye_y righteye_x righteye_y nose_x nose_y leftmouth_x leftmouth_y rightmouth_x rightmouth_y"
COUNT = 6
FILES = [f"{i:06d}.jpg" for i in range(1, COUNT + 1)]
ATTRIBUTES = np.where(np.random.default_rng(0).random((COUNT, 40)) < 0.5, -1, 1)
IDENTITY = [2880, 2937, 8692, 5805, 9295, 4153]
PARTITION = [0, 0, 0, 1, 1, 2]
BBOX = np.arange(COUNT * 4).reshape(COUNT, 4)
POINTS_ALIGNED = np.arange(COUNT * 10).reshape(COUNT, 10)


def face(i: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 6), (i * 20, 90, 60)).save(data, "jpeg")
    return data.getvalue()


def rows(values, width: int = 3) -> list[str]:
    return [
        f"{name} " + " ".join(f"{v:>{width}}" for v in np.atleast_1d(v)) for name, v in zip(FILES, values, strict=True)
    ]


TEXTS = {
    "Anno/list_attr_celeba.txt": [str(COUNT), " ".join(NAMES) + " ", *rows(ATTRIBUTES, 2)],
    "Anno/identity_CelebA.txt": rows(IDENTITY, 1),
    "Eval/list_eval_partition.txt": rows(PARTITION, 1),
    "Anno/list_bbox_celeba.txt": [str(COUNT), "image_id x_1 y_1 width height", *rows(BBOX, 6)],
    "Anno/list_landmarks_align_celeba.txt": [str(COUNT), POINTS, *rows(POINTS_ALIGNED)],
    "Anno/list_landmarks_celeba.txt": [str(COUNT), POINTS, *rows(POINTS_ALIGNED + 100)],
}


def write_texts(root: Path, *, flat: bool = True, end: str = "\r\n") -> None:
    for name, lines in TEXTS.items():
        write(root / (Path(name).name if flat else name), end.join(lines) + end)


def write_images(folder: Path, suffix: str = ".jpg") -> None:
    folder.mkdir(parents=True)
    for i, name in enumerate(FILES):
        (folder / name).with_suffix(suffix).write_bytes(face(i))


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    write_images(tmp_path / "img_align_celeba")
    return tmp_path


def kaggle(root: Path) -> Path:
    write_images(root / "img_align_celeba" / "img_align_celeba")
    heads = {
        "attr": NAMES,
        "eval": ["partition"],
        "bbox": ["x_1", "y_1", "width", "height"],
        "landmarks": POINTS.split(),
    }
    for name, lines in TEXTS.items():
        stem = Path(name).stem
        if stem not in ("identity_CelebA", "list_landmarks_celeba"):
            table = [line.split() for line in lines if line.startswith("0000")]
            rows = [["image_id", *heads[stem.split("_")[1]]], *table]
            (root / f"{stem}.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    return root


# Where the text files are (in folders of their own, or not), the end of their lines, the images, and what is given.
TREES = {
    "official": ("", False, "\r\n", "Img/img_align_celeba.zip", ""),
    "official, unpacked": ("", False, "\n", "Img/img_align_celeba", ""),
    "torchvision": ("celeba", True, "\n", "celeba/img_align_celeba", ""),
    "in torchvision": ("celeba", True, "\n", "celeba/img_align_celeba", "celeba"),
    "flat with a tar": ("", True, "\r\n", "img_align_celeba.tar", ""),
}


def made(kind: str, root: Path) -> Path:
    if kind.startswith("kaggle"):
        return archived(kaggle(root), root.parent / "archive.zip") if kind.endswith("zip") else kaggle(root)
    texts, flat, end, images, given = TREES[kind]
    write_texts(root / texts, flat=flat, end=end)
    if images.endswith("celeba"):
        write_images(root / images)
    else:
        write_images(root.parent / "img_align_celeba")
        (root / images).parent.mkdir(exist_ok=True)
        archived(root.parent / "img_align_celeba", root / images, "img_align_celeba")
    return root / given


@pytest.mark.parametrize("kind", [*TREES, "kaggle", "kaggle zip"])
def test_every_layout_gives_the_same_columns(tmp_path: Path, kind: str) -> None:
    root = made(kind, tmp_path / "data")
    assert detect_layout(root)[0] == "celeba"
    listing = list_source(root)
    assert [key.rpartition("/")[2] for key in listing.keys] == FILES
    assert "img_align_celeba/000001.jpg" in listing.keys[0]
    labels = listing.columns["labels"]
    assert labels.values.dtype == np.uint8 and labels.attrs["names"] == tuple(NAMES)
    assert np.array_equal(labels.values, ATTRIBUTES == 1)
    assert listing.split_names == ("train", "val", "test") and listing.split.tolist() == PARTITION
    bbox = listing.columns["bbox"]
    assert bbox.values.dtype == np.int32 and np.array_equal(bbox.values, BBOX)
    assert bbox.attrs == {"names": ("x_1", "y_1", "width", "height"), "coordinates": "original"}
    points = listing.columns["landmarks"]
    assert points.values.dtype == np.int32 and np.array_equal(points.values, POINTS_ALIGNED)
    assert points.attrs == {"names": tuple(POINTS.split()), "coordinates": "aligned"}
    if kind.startswith("kaggle"):
        assert "identity" not in listing.columns and any("no identity" in note for note in listing.notes)
    else:
        assert values(listing, "identity") == IDENTITY
        assert listing.columns["identity"].values.dtype == np.int64
    assert [listing.files.read(i) for i in range(COUNT)] == [face(i) for i in range(COUNT)]


@pytest.mark.parametrize("absent", [Path(name).stem for name in TEXTS])
def test_an_absent_text_file_is_said(faces: Path, absent: str) -> None:
    next(faces.glob(f"{absent}.txt")).unlink()
    listing = list_source(faces)
    expected = {"labels", "identity", "bbox", "landmarks"}
    gone = {"list_attr_celeba": "labels", "identity_CelebA": "identity", "list_bbox_celeba": "bbox"}.get(absent)
    assert set(listing.columns) == expected - {gone}
    if absent == "list_eval_partition":
        assert listing.split_names == ("all",) and not listing.split.any()
    if absent == "list_landmarks_align_celeba":
        assert listing.columns["landmarks"].attrs["coordinates"] == "original"
        assert listing.columns["landmarks"].moves == ""  # they are not moved with the aligned images
        assert np.array_equal(listing.columns["landmarks"].values, POINTS_ALIGNED + 100)
    elif absent != "list_landmarks_celeba":
        assert any(absent.lower() in note for note in listing.notes)


def test_images_alone_have_no_labels_and_png_images_match_rows_that_say_jpg(tmp_path: Path) -> None:
    write_images(tmp_path / "img_align_celeba_png", ".png")
    listing = list_source(tmp_path)
    assert listing.columns == {} and any("Not one of CelebA's text files" in note for note in listing.notes)
    write_texts(tmp_path)
    assert values(list_source(tmp_path), "identity") == IDENTITY


def test_a_row_without_its_image_or_an_image_without_a_row_fails_or_is_skipped(faces: Path) -> None:
    (faces / "identity_CelebA.txt").write_text("".join(line + "\n" for line in rows(IDENTITY)[1:]))
    listing = refused_or_skipped(r"does not list \(1\): img_align_celeba/000001.jpg has no row in identity_C", faces)
    assert listing.skipped == (("img_align_celeba/000001.jpg", "has no row in identity_CelebA.txt"),)
    assert len(listing) == COUNT - 1 and listing.files.read(0) == face(1)
    assert values(listing, "identity") == IDENTITY[1:]
    os.remove(faces / "img_align_celeba" / "000003.jpg")
    listing = refused_or_skipped(
        r"not there \(1\): img_align_celeba/000003.jpg is listed in list_attr_celeba.txt and", faces
    )
    key, reason = listing.skipped[0]
    assert key == "img_align_celeba/000003.jpg" and "identity_CelebA.txt" in reason and "has no file" in reason
    assert values(listing, "identity") == IDENTITY[1:2] + IDENTITY[3:]
    assert listing.split.tolist() == PARTITION[1:2] + PARTITION[3:]
    (faces / "img_align_celeba" / "000003.jpg").symlink_to("nowhere")  # named once
    assert sorted(key[-10:] for key, _ in list_source(faces, on_error="skip").skipped) == ["000001.jpg", "000003.jpg"]


def test_rows_in_any_order_other_splits_and_a_wrong_count_are_taken(faces: Path) -> None:
    (faces / "identity_CelebA.txt").write_text("".join(line + "\n" for line in reversed(rows(IDENTITY))))
    (faces / "list_eval_partition.txt").write_text("".join(f"{name} {2 * (i > 2)}\n" for i, name in enumerate(FILES)))
    path = faces / "list_attr_celeba.txt"
    path.write_text(path.read_text().replace("6\n", "202599\n", 1))
    listing = list_source(faces)
    assert values(listing, "identity") == IDENTITY
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0, 0, 0, 1, 1, 1]
    assert any("promises 202599 rows and has 6" in note for note in listing.notes)
    (faces / "identity_CelebA.txt").write_text("6\nimage_id identity\n")
    refused(r"identity_CelebA.txt holds no rows", faces)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("list_attr_celeba.txt", "000002.jpg -1", "000002.jpg  0", r"line 4: 000002.jpg has the value 0 \(Attribute_"),
        ("list_attr_celeba.txt", "000002.jpg -1", "000002.jpg x", "line 4: 000002.jpg .* 'x', expected an int"),
        ("list_attr_celeba.txt", "000002.jpg -1", "000002.jpg", "line 4: 000002.jpg has 39 values, expected 40"),
        ("identity_CelebA.txt", "000001.jpg 2880", "000001.jpg 28.5", "line 1: 000001.jpg has the value '28.5'"),
        ("identity_CelebA.txt", "000001.jpg 2880", "000001.jpg", "line 1: 000001.jpg has 0 values, expected 1"),
        ("identity_CelebA.txt", "000003", "000001", r"000001.jpg \(lines 1 and 3\)"),
        ("list_eval_partition.txt", "000004.jpg 1", "000004.jpg 3", r"line 4: 000004.jpg has the value 3.*0 \(train\)"),
        ("list_bbox_celeba.txt", "     1 ", " 99999999999 ", "line 3: 000001.jpg .*'99999999999', .* integer of 32"),
        ("list_bbox_celeba.txt", "     1 ", f" {2**70} ", "line 3: .* expected an integer"),
        ("identity_CelebA.txt", "000001.jpg 2880", "9" * 5000, ""),  # of images: 000001.jpg has no row
    ],
)
def test_a_bad_value_is_named_with_its_line(faces: Path, name: str, old: str, new: str, message: str) -> None:
    path = faces / name
    text = path.read_text().replace("000002.jpg  1", "000002.jpg -1")
    assert old in text
    path.write_text(text.replace(old, new, 1))
    refused(f"{name}.*{message}" if message else "000001.jpg has no row in identity", faces)


def test_images_in_two_folders_or_none_are_an_error(tmp_path: Path) -> None:
    write_texts(tmp_path)
    refused("holds no image", tmp_path)
    (tmp_path / "img_align_celeba_png.7z.001").write_bytes(b"7z")
    refused(r"packed in img_align_celeba_png.7z.001", tmp_path)
    write_images(tmp_path / "a")
    assert len(list_source(tmp_path)) == COUNT
    write_images(tmp_path / "b")
    refused("more than one folder: a, b", tmp_path)


@pytest.mark.parametrize(
    ("data", "path", "num_values", "header"),
    [
        (b"a.jpg 1 -2\nb.jpg  3   4\n", "t.txt", None, ()),
        (b"2\r\nx y \r\na.jpg 1 -2\r\nb.jpg 3 4", "t.txt", None, ("x", "y")),
        (b"2\nimage_id x y\na.jpg 1 -2\nb.jpg 3 4\n", "t.txt", None, ("x", "y")),
        (b"number x y\na.jpg 1 -2\n\nb.jpg 3 4\n\n", "t.txt", 2, ("x", "y")),
        (b"\xef\xbb\xbfx y\na.jpg\t1\t-2\nb.jpg\t3\t4\n", "t.txt", 2, ("x", "y")),
        (b"\n2\n\nx y\na.jpg 1 -2\n\nb.jpg 3 4\n", "t.txt", None, ("x", "y")),
        (b'image_id,x,y\n"a.jpg", 1,-2\nb.jpg,3,4\n', "T.CSV", None, ("x", "y")),
    ],
)
def test_every_head_and_separator_gives_the_same_rows(
    data: bytes, path: str, num_values: int | None, header: tuple
) -> None:
    table = parse_table(data, path, num_values)
    assert table.images == ["a.jpg", "b.jpg"] and table.values.tolist() == [[1, -2], [3, 4]]
    assert table.header == header
    assert [data.splitlines()[line.number - 1].strip(b'"')[:5] for line in table.lines] == [b"a.jpg", b"b.jpg"]
    with pytest.raises(SourceError, match=r"t.txt, line 1: a.jpg has 0 values, expected 1"):
        parse_table(b"a.jpg\nb.jpg\n", "t.txt")
    with pytest.raises(SourceError, match=r"t.txt, line 2: b.jpg has the value 'one', expected an integer"):
        parse_table(b"a.jpg 1 2\nb.jpg 1 one\n", "t.txt")
