from __future__ import annotations

import csv
import io
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from interrupted import killed_at
from PIL import Image
from small_files import rows_by_key, write_tokens

from fastload.errors import FormatError, OptionError, OutputError, SourceError
from fastload.export import JOURNAL, ExportReport, encode_png, export_file
from fastload.export.plan import RENUMBERED
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.pack import pack_images
from fastload.repack import repack_file
from fastload.sources.exported import FIELDS, SIDECAR
from sample_files import write_packed


def make(path: Path, *, shape=(6, 5, 3), dtype=np.uint8, labels=True, keys=None, extra=(), **options) -> Path:
    num_rows = 24
    rng = np.random.default_rng(0)
    images = rng.integers(0, np.iinfo(dtype).max + 1, (num_rows, *shape)).astype(dtype)
    columns = {"labels": Column(np.arange(num_rows) % 3, {"names": ("ant", "bee", "cat")})} if labels else {}
    columns |= dict(extra)
    if keys is not None:
        columns["key"] = Column(np.array([key.encode() for key in keys]))
    return write_packed(path, images, columns, **options)


def digests(path: Path) -> dict[bytes, tuple[str, str]]:
    """Pixel digest -> split and class of its row."""
    rows = rows_by_key(path).values()
    return {row["digest"]: (row["split"], label if isinstance(label := row.get("labels"), str) else "") for row in rows}


def assert_same_values(source: Path, again: Path, names) -> None:
    """Rows with the same pixels have the same values."""
    with h5py.File(source) as a, h5py.File(again) as b:
        order = [a["digest"][()].tolist().index(digest) for digest in b["digest"][()].tolist()]
        for name in names:
            assert np.array_equal(a[name][()][order], b[name][()]), name


def packed_again(folder: Path, **options) -> Path:
    """The folder as a packed file, by folders and table alone: without what `fastload pack` would rather believe."""
    (folder / SIDECAR).unlink()
    # Drawn boxes lie anywhere.
    options = {"outside_boxes": "keep", **options}
    return pack_images(folder, folder.parent / "b.h5", workers=0, overwrite=True, **options).path


def exported(source: Path, **options) -> ExportReport:
    """Exports to `out`, which packed again has the same pixels, splits and classes."""
    report = export_file(source, source.parent / "out", **options)
    assert digests(packed_again(source.parent / "out")) == digests(source)
    return report


def files_in(folder: Path) -> list[str]:
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in found if name not in (SIDECAR, FIELDS)]


@pytest.mark.parametrize("layout", ["auto", "folder", "csv"])
@pytest.mark.parametrize("splits", [None, {"train": 15, "val": 9}])
def test_exported_and_packed_again_it_is_the_same(tmp_path, layout, splits):
    source = make(tmp_path / "a.h5", splits=splits)
    report = exported(source, layout=layout, workers=2)
    assert report.notes == ()
    assert (report.num_images, report.layout) == (24, "csv" if layout == "csv" else "folder")
    assert read_header(tmp_path / "b.h5").fields["labels"].names == ("ant", "bee", "cat")
    if report.layout == "folder":
        top = "train/" if splits else ""
        assert files_in(tmp_path / "out")[0] == f"{top}ant/00000000.png"
    else:
        assert files_in(tmp_path / "out")[-1] == "manifest.csv"


@pytest.mark.parametrize(
    ("shape", "dtype", "mode"),
    [
        ((6, 5, 1), np.uint8, "L"), ((6, 5, 4), np.uint8, "RGBA"), ((6, 5, 1), np.uint16, "I;16"),
        ((1, 1, 3), np.uint8, "RGB"), ((6, 5, 3), np.uint16, "RGB"),
    ],
)  # fmt: skip
def test_gray_alpha_and_16_bits_lose_nothing(tmp_path, shape, dtype, mode):
    source = make(tmp_path / "a.h5", shape=shape, dtype=dtype, labels=False)
    exported(source, workers=1)
    with Image.open(tmp_path / "out" / "00000003.png") as image:
        assert image.mode == mode


def test_masks_boxes_and_other_values_come_back_through_the_table(tmp_path):
    rng = np.random.default_rng(1)
    masks = rng.integers(0, 4, (24, 6, 5), dtype=np.uint8)
    extra = {
        "bbox": Column(rng.integers(0, 5, (24, 4)).astype(np.float32), {"names": ("x", "y", "width", "height")}),
        "identity": Column(rng.integers(0, 50, 24)),
    }
    source = make(tmp_path / "a.h5", masks=masks, extra=extra, splits={"train": 15, "val": 9})
    report = exported(source)
    assert (report.layout, report.num_masks) == ("csv", 24)
    assert_same_values(source, tmp_path / "b.h5", ("bbox", "identity", "labels", "masks"))


def test_masks_alone_lie_in_a_folder_next_to_the_images(tmp_path):
    masks = np.random.default_rng(1).integers(0, 4, (24, 6, 5), dtype=np.uint8)
    source = make(tmp_path / "a.h5", masks=masks, labels=False, splits={"train": 15, "val": 9}, ignore_index=3)
    assert "the value 3 is no class" in exported(source, layout="folder").notes[-1]
    assert files_in(tmp_path / "out")[24] == "masks/train/00000000.png"
    with Image.open(tmp_path / "out" / "masks" / "train" / "00000000.png") as image:
        assert image.mode == "L" and np.array_equal(np.asarray(image), masks[0])


@pytest.mark.parametrize("names", [("car", "dog"), ("10", "2")])
def test_several_boxes_an_image_are_rows_of_the_table(tmp_path, names):
    counts = np.arange(24) % 3
    boxes, classes = np.zeros((24, 2, 4), np.float32), np.full((24, 2), -1)
    for row, count in enumerate(counts):
        boxes[row, :count] = np.arange(count * 4).reshape(-1, 4) + row
        classes[row, :count] = (np.arange(count) + row) % 2
    extra = {
        "boxes": Column(boxes, {"names": ("x", "y", "width", "height")}),
        "box_labels": Column(classes, {"names": names}),
        "num_boxes": Column(counts),
    }
    source = make(tmp_path / "a.h5", labels=False, extra=extra)
    export_file(source, tmp_path / "out")
    packed_again(tmp_path / "out")
    assert_same_values(source, tmp_path / "b.h5", extra)


@pytest.mark.parametrize(
    "names", [("0", "1", "10", "2"), ("nan", "cat", "dog", ""), ("a|b", "c", "d|e", "f"), (" a", "a", "b", "true")]
)
def test_class_names_that_no_table_can_hold_come_back_as_numbers(tmp_path, names):
    labels = Column(np.arange(24) % 4, {"names": names})
    other = Column(np.arange(24) % 5)
    source = make(tmp_path / "a.h5", labels=False, extra={"labels": labels, "other": other})
    report = export_file(source, tmp_path / "out")
    assert any("`label` holds the numbers of the classes" in note for note in report.notes)
    packed_again(tmp_path / "out")
    assert_same_values(source, tmp_path / "b.h5", ("labels", "other"))
    table = list(csv.DictReader((tmp_path / "out" / "manifest.csv").read_text().splitlines()))
    assert [row["label_name"] for row in table] == [names[int(row["label"])] for row in table]


@pytest.mark.parametrize(
    ("names", "layout", "renumbered"),
    [(("0", "1", "10", "2"), "auto", False), (("dog", "cat"), "folder", True), (("dog", "cat"), "csv", True)],
)
def test_classes_keep_their_names_and_it_is_noted_if_they_will_be_sorted(tmp_path, names, layout, renumbered):
    extra = {"labels": Column(np.arange(24) % len(names), {"names": names})}
    source = make(tmp_path / "a.h5", labels=False, extra=extra)
    report = exported(source, layout=layout)
    assert report.layout == ("csv" if layout == "csv" else "folder") and (RENUMBERED in report.notes) == renumbered


@pytest.mark.parametrize("others", [False, True])
def test_attribute_vectors_are_columns(tmp_path, others):
    labels = np.random.default_rng(0).integers(0, 2, (24, 3), dtype=np.uint8)
    extra = {"labels": Column(labels, {"names": ("Smiling", "Young", "Hat")})}
    extra |= {"identity": Column(np.arange(24) * 3 % 17)} if others else {}
    keys = [f"img_align_celeba/{row:06d}.jpg" for row in range(24)]
    source = make(tmp_path / "a.h5", labels=False, extra=extra, keys=keys)
    report = export_file(source, tmp_path / "out")
    assert any("name all with `--labels Smiling,Young,...`" in note for note in report.notes) == others
    assert (tmp_path / "out" / "manifest.csv").read_text().startswith("file_name,Smiling,Young,Hat")
    told = {"labels": ["Smiling", "Young", "Hat"]} if others else {}
    assert read_header(packed_again(tmp_path / "out", **told)).attrs["source_layout"] == "manifest"
    assert_same_values(source, tmp_path / "b.h5", extra)


def test_one_split_alone(tmp_path):
    source = make(tmp_path / "a.h5", splits={"train": 15, "val": 9})
    report = export_file(source, tmp_path / "out", split="val")
    assert report.splits == {"val": 9} and len(files_in(tmp_path / "out")) == 9
    with pytest.raises(OptionError, match="no split 'test'"):
        export_file(source, tmp_path / "two", split="test")
    assert not (tmp_path / "two").exists()


def test_no_key_leads_out_of_the_folder(tmp_path):
    hostile = [
        "../../etc/passwd", "/etc/passwd", "..\\..\\x.jpg", "a/../../b.jpg", "C:\\x.png", "a\x01.jpg",
        "con.jpg", "x" * 240 + ".jpg", "A.jpg", "a.png", "a.jpg", "dir.png/a.jpg", "dir",
        "/".join("abcdefghijklmnopqrstuv"),
        "..", ".hidden/.x.jpg", "é.jpg", "e\u0301.jpg", "a .jpg", "a*?.jpg", "nul", "", "trailing. ", "日本/写真.jpg",
    ]  # fmt: skip
    for layout in ("csv", "folder"):
        # The name of one could be longer than what NumPy keeps; all are unique, as in any packed file.
        source = make(tmp_path / f"{layout}.h5", keys=hostile)
        before = {path.name for path in tmp_path.iterdir()}
        export_file(source, tmp_path / f"out-{layout}", layout=layout)
        assert {path.name for path in tmp_path.iterdir()} == before | {f"out-{layout}"}
        found = [name for name in files_in(tmp_path / f"out-{layout}") if name.endswith(".png")]
        assert len(found) == 24 == len({name.casefold() for name in found})
        assert all(part.isprintable() and not part.startswith(".") for name in found for part in name.split("/"))
        assert digests(packed_again(tmp_path / f"out-{layout}")) == digests(source)
        (tmp_path / "b.h5").unlink()


def test_class_names_that_are_no_folders_are_made_safe(tmp_path):
    names = ("../up", "a/b", "a_b")
    extra = {"labels": Column(np.arange(24) % 3, {"names": names})}
    source = make(tmp_path / "a.h5", labels=False, extra=extra)
    report = export_file(source, tmp_path / "out", layout="folder")
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["_._up", "a_b", "a_b_2"]
    assert any("a/b as a_b" in note for note in report.notes)
    assert {path.name for path in tmp_path.iterdir()} == {"a.h5", "out"}


def test_what_folders_cannot_say_goes_into_a_table_or_is_refused(tmp_path):
    cases = [
        (np.arange(24) % 3 - 1, ("a", "b"), None, "have no label"),
        (np.zeros((24, 2), np.uint8), ("a", "b"), None, "several labels"),
        (np.arange(24) % 2, ("bus", "train"), None, "'train' would be taken for a split"),
        (np.arange(24) % 2, ("a", "b"), {"train": 12, "extra": 12}, "taken for a class"),
    ]
    for number, (labels, names, splits, why) in enumerate(cases):
        extra = {"labels": Column(labels, {"names": names})}
        source = make(tmp_path / f"{number}.h5", labels=False, extra=extra, splits=splits)
        with pytest.raises(OptionError, match=f"{why}.*--layout csv"):
            export_file(source, tmp_path / "no", layout="folder")
        assert export_file(source, tmp_path / f"out{number}").layout == "csv"


def test_a_folder_of_others_is_left_alone(tmp_path):
    source = make(tmp_path / "a.h5")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / "empty").mkdir()
    export_file(source, tmp_path / "empty")
    for folder, said in (("mine", "is not empty"), ("empty", "is not empty"), ("a.h5", "is a file"),
                         ("no/out", "does not exist")):  # fmt: skip
        with pytest.raises(OutputError, match=said):
            export_file(source, tmp_path / folder)
    assert files_in(tmp_path / "mine") == ["x"]


def test_a_file_without_images_and_a_full_disk_are_refused_before_work(tmp_path, monkeypatch):
    with pytest.raises(FormatError, match=r"holds no images to export, only arrays \(tokens\).*h5py"):
        export_file(write_tokens(tmp_path / "a.h5"), tmp_path / "out")
    source = make(tmp_path / "a.h5")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=24 * 4096 - 1))
    with pytest.raises(OutputError, match=r"needs about 98,496 bytes for 24 images, 98,303 are free"):
        export_file(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_row_is_named(tmp_path):
    source = make(tmp_path / "a.h5")
    with open(source, "r+b") as file:
        file.seek(4096 + 7 * 90)
        file.write(b"\x00\xff\x00")
    with pytest.raises(SourceError, match=r"00000007 is damaged: its pixels changed since packing"):
        export_file(source, tmp_path / "out")
    repack_file(make(tmp_path / "b.h5"), tmp_path / "z.h5", codec="gzip", chunk_bytes=90 * 4)
    with h5py.File(tmp_path / "z.h5") as file:
        at = file["images"].id.get_chunk_info(0).byte_offset
    with open(tmp_path / "z.h5", "r+b") as file:
        file.seek(at + 20)
        file.write(b"\xff" * 60)
    with pytest.raises(OutputError, match=r"its folder .* does not exist"):  # told before a row is read
        export_file(tmp_path / "z.h5", tmp_path / "no" / "out")
    with pytest.raises(SourceError, match=r"00000000 is damaged: `images` cannot be read: "):
        export_file(tmp_path / "z.h5", tmp_path / "three")
    assert not (tmp_path / "three").exists()


def _killed(source: Path, folder: Path, kill_at: int) -> None:
    block_rows = {"fastload.export._BLOCK_ROWS": 2}
    killed_at(kill_at, "fastload.export.export_file", source, folder, settings=block_rows, workers=1)


def test_killed_the_same_call_continues(tmp_path):
    source = make(tmp_path / "a.h5")
    _killed(source, tmp_path / "out", 5)
    there = {path: os.stat(path).st_ino for path in (tmp_path / "out").rglob("*.png")}
    assert 10 <= len(there) < 24 and (tmp_path / "out" / JOURNAL).exists()
    torn = sorted(there)[:2]
    for path, cut in zip(torn, (slice(30), slice(-12)), strict=True):  # The second has all its pixels.
        path.write_bytes(path.read_bytes()[cut])
    with pytest.raises(OutputError, match="holds an unfinished export of another"):
        export_file(source, tmp_path / "out", layout="csv")
    report = export_file(source, tmp_path / "out")
    assert report.kept == len(there) - 2
    assert all(os.stat(path).st_ino == inode for path, inode in there.items() if path not in torn)
    export_file(source, tmp_path / "whole")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    for name in (*files_in(tmp_path / "whole"), SIDECAR, FIELDS):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("image", [True, False])
def test_what_was_changed_meanwhile_is_not_overwritten(tmp_path, image):
    source = make(tmp_path / "a.h5")
    _killed(source, tmp_path / "out", 5)
    mine = min((tmp_path / "out").rglob("*.png"))
    if image:
        Image.new("RGB", (5, 6)).save(mine)
    else:
        mine.write_bytes(b"no image, but somebody's all the same")
    before = mine.read_bytes()
    with pytest.raises(OutputError, match="was changed since it was exported"):
        export_file(source, tmp_path / "out")
    assert mine.read_bytes() == before


def test_two_calls_never_write_into_one_folder(tmp_path):
    source = make(tmp_path / "a.h5")
    seen = []

    def meanwhile(stage: str, done: int, total: int) -> None:
        with pytest.raises(OutputError, match="another process is exporting into it"):
            export_file(source, tmp_path / "out")
        seen.append(done)

    export_file(source, tmp_path / "out", workers=1, progress=meanwhile)
    assert seen and len(files_in(tmp_path / "out")) == 24
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / JOURNAL).touch()  # killed as it began
    assert export_file(source, tmp_path / "two").kept == 0


@given(st.data())
def test_decoding_a_png_gives_back_every_pixel(data):
    channels, dtype = data.draw(
        st.sampled_from([(1, "uint8"), (3, "uint8"), (4, "uint8"), (1, "uint16"), (3, "uint16")])
    )
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    pixels = data.draw(arrays(dtype, (height, width, channels)))
    out = np.empty_like(pixels)
    decode_image(encode_png(pixels), Target(height, width, channels, pixels.dtype), out)
    assert np.array_equal(out, pixels)


def test_pillow_finds_nothing_wrong_with_a_png_and_its_lines_are_filtered():
    pixels = np.add.outer(np.arange(100, dtype=np.uint8), np.arange(90, dtype=np.uint8))
    data = encode_png(pixels)
    with Image.open(io.BytesIO(data)) as image:
        image.verify()
    assert len(data) < 500
