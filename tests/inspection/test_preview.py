from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFont
from ragged_cases import NUM_ROWS, flip, varied_file, varied_rows
from small_files import write_random, write_tokens

from fastload.errors import FormatError, MissingFileError, OptionError, OutputError
from fastload.format.header import open_hdf5, read_header
from fastload.format.ragged import Column
from fastload.inspection.preview import (
    _columns,
    _shown_size,
    _spread,
    attributes_of,
    class_colour,
    class_name,
    legend_of,
    make_preview,
    marks_of,
    wrap,
)
from fastload.repack import repack_file
from sample_files import write_packed

PACKED = {"rows": 30, "size": (20, 16, 3)}


def test_rows_are_spread_small_images_grow_by_whole_factors_and_the_grid_leaves_few_places_empty() -> None:
    rows = _spread(range(100, 1100), 40, 0)
    assert all(100 + 25 * i <= row < 125 + 25 * i for i, row in enumerate(rows)) and len(rows) == 40
    assert _spread(range(5), 40, 3) == (0, 1, 2, 3, 4)
    assert _spread(range(1000), 40, 1) != _spread(range(1000), 40, 2)
    shown = {(28, 28): (112, 112), (32, 32): (128, 128), (218, 178): (178, 218), (1000, 500): (112, 224)}
    assert {size: _shown_size(*size) for size in shown} == shown and _shown_size(2000, 1) == (1, 224)
    assert [_columns(count) for count in (1, 8, 12, 25, 40)] == [1, 8, 6, 5, 8]


def sheet_of(path: Path, **options: Any) -> NDArray[np.uint8]:
    """The sheet of a file, uint8 (H, W, 3)."""
    make_preview(path, path.with_suffix(".png"), overwrite=True, **options)
    return np.asarray(Image.open(path.with_suffix(".png")))


def test_the_sheet_shows_the_pixels_of_all_rows_sixteen_bits_scaled_and_channels_in_any_place(tmp_path: Path) -> None:
    grays = np.ones((3, 120, 120, 1), np.uint8) * np.uint8([[[[60]]], [[[120]]], [[[180]]]])
    sheet = sheet_of(write_packed(tmp_path / "a.h5", grays))
    assert all(np.count_nonzero(sheet[..., 0] == value) >= 120 * 120 for value in (60, 120, 180))
    sheet = sheet_of(write_packed(tmp_path / "b.h5", grays[:2] // 120 * np.uint16(1000)))  # the largest value shown
    assert np.count_nonzero(sheet[..., 0] == 255) >= 120 * 120
    for i, shape in enumerate([(28, 28, 1), (9, 300, 4), (1, 1, 3), (400, 500, 3)]):
        sheet = sheet_of(write_random(tmp_path / f"{i}.h5", rows=9, size=shape))
        assert sheet.shape[1] >= 5 * min(112, shape[1])
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["images"] = np.full((4, 3, 120, 130), 77, np.uint8)
    assert np.count_nonzero(np.all(sheet_of(tmp_path / "c.h5") == 77, axis=2)) >= 4 * 120 * 130


def test_masks_are_laid_over_except_what_is_ignored(tmp_path: Path) -> None:
    images = np.full((1, 120, 120, 3), 200, np.uint8)
    masks = np.full((1, 120, 120), 255, np.uint8)
    masks[0, :60] = 3
    bare = np.all(sheet_of(write_packed(tmp_path / "a.h5", images, masks=masks, ignore_index=255)) == 200, axis=2)
    assert 60 * 120 <= np.count_nonzero(bare) < 61 * 120


def test_a_split_attribute_vectors_and_a_seed_are_shown_on_request(
    packed_file: Callable[..., Path], tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 2, (200, 40), dtype=np.uint8)
    labels = Column(values, {"names": tuple(f"Attribute_{i}" for i in range(40))})
    path = packed_file(rows=200, columns={"labels": labels}, splits={"train": 190, "val": 10})
    assert make_preview(path, tmp_path / "a.png", split="val") == tuple(range(190, 200))
    with pytest.raises(OptionError, match="no split 'test'; it has 'train', 'val'"):
        make_preview(path, tmp_path / "b.png", split="test")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert len(make_preview(path, tmp_path / f"{name}.png", seed=seed, count=12, overwrite=True)) == 12
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


def test_what_cannot_be_drawn_leaves_nothing_behind_and_what_exists_is_kept(packed_copy: Path, tmp_path: Path) -> None:
    for output, options, error, message in (
        ("a.jpg", {}, OptionError, r"ends in \.png"),
        ("nowhere/a.png", {}, OutputError, "does not exist"),
        ("a.png", {"count": 0}, OptionError, "count=0"),
    ):
        with pytest.raises(error, match=message):
            make_preview(packed_copy, tmp_path / output, **options)  # type: ignore[arg-type]
    with pytest.raises(MissingFileError):
        make_preview(tmp_path / "absent.h5", tmp_path / "a.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.h5"]
    (tmp_path / "a.png").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        make_preview(packed_copy, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_text() == "mine"
    make_preview(packed_copy, tmp_path / "a.png", overwrite=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_labels_name_the_class_and_the_rarest_attributes() -> None:
    names = ("tabby_cat", "Crème", "Größe", "日本")
    found = [class_name(i, names) for i in (0, 1, 2, 3, 7, -1)]
    assert found == ["tabby cat", "Creme", "class 2", "class 3", "7", "no label"]
    assert attributes_of(["Hat", "Bald", "Smile", "Male", "Young"]) == "Hat, Bald, Smile, Male +1"
    assert attributes_of([]) == "none"


def test_no_line_is_wider_than_its_room_and_no_word_is_lost() -> None:
    font = ImageFont.load_default(14)
    text = "Wearing Necklace, 5 o Clock Shadow, aVeryLongWordThatDoesNotFitIntoTheWidthAtAll +3"
    lines = wrap(text, font, 112, 20)
    assert all(font.getlength(line) <= 112 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    short = wrap(text, font, 112, 2)
    assert len(short) == 2 and short[-1].endswith("...") and font.getlength(short[-1]) <= 112
    assert wrap("", font, 112, 2) == []


class CountingFont(ImageFont.FreeTypeFont):
    """A font that counts the letters that it measures and draws."""

    letters = 0

    def getlength(self, text: str, *args: Any, **options: Any) -> float:  # type: ignore[override]
        type(self).letters += len(text)
        return super().getlength(text, *args, **options)

    def getmask2(self, text: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        type(self).letters += len(text)
        return super().getmask2(text, *args, **options)


def test_names_of_any_length_are_cut_before_they_are_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counting(size: float) -> ImageFont.FreeTypeFont:
        font = load(size)
        font.__class__ = CountingFont
        return font

    load = ImageFont.load_default
    monkeypatch.setattr(ImageFont, "load_default", counting)
    letters, sizes = [], []
    for length in (2_000, 60_000):
        path = tmp_path / f"{length:05}.h5"
        write_random(
            path,
            rows=8,
            columns={
                "labels": Column(np.zeros(8, np.int64), {"names": ("i" * length, "W " * length)}),
                "boxes": Column(np.tile(np.array([1, 1, 9, 9], np.int32), (8, 1, 1)), {"names": ("x", "y", "w", "h")}),
                "box_labels": Column(np.zeros((8, 1), np.int64), {"names": ("l" * length,)}),
            },
        )
        CountingFont.letters = 0
        make_preview(path, path.with_suffix(".png"))
        letters.append(CountingFont.letters)
        with Image.open(path.with_suffix(".png")) as sheet:
            sizes.append(sheet.size)
    assert 0 < letters[1] == letters[0] < 30_000
    assert sizes[1] == sizes[0]


def one_image(tmp_path: Path, **columns: Column) -> NDArray[np.uint8]:
    """The part of a sheet that shows one image of 60 x 120, enlarged twice, with its fields."""
    images = np.full((1, 60, 56, 3), 200, np.uint8)
    sheet = sheet_of(write_packed(tmp_path / "a.h5", images, columns))
    rows, places = np.nonzero((sheet == (218, 216, 210)).all(axis=2))  # the frame around the image
    return sheet[rows.min() + 1 : rows.max(), places.min() + 1 : places.max()]


def test_boxes_are_outlines_of_the_colour_of_their_class(tmp_path: Path) -> None:
    corners = np.zeros((1, 3, 4), np.float32)
    corners[0, :2] = (10, 20, 30, 50), (40, 5, 50, 15)
    labels = Column(np.array([[0, 2, -1]]), {"names": ("cat", "dog", "bird")})
    found = one_image(tmp_path, boxes=Column(corners, {"names": ("xmin", "ymin", "xmax", "ymax")}), box_labels=labels)
    for (left, top, right, bottom), index in zip(corners[0, :2].astype(int) * 2, (0, 2), strict=True):
        y, x = np.nonzero((found == class_colour(index)).all(axis=2))
        assert (x.min(), y.min(), x.max() + 1, y.max() + 1) == (left, top, right, bottom)
    assert (found[0, 0] == 200).all()  # padding is not drawn
    sizes = corners.copy()
    sizes[..., 2:] -= sizes[..., :2]
    again = one_image(tmp_path, boxes=Column(sizes, {"names": ("x", "y", "width", "height")}), box_labels=labels)
    np.testing.assert_array_equal(again, found)


def test_one_box_and_landmarks_are_drawn_where_they_are(tmp_path: Path) -> None:
    box = Column(np.array([[10, 20, 20, 30]], np.int16), {"names": ("x_1", "y_1", "width", "height")})
    points = Column(np.array([[12.5, 40.5, 50, 10]], np.float32), {"names": ("eye_x", "eye_y", "nose_x", "nose_y")})
    found = one_image(tmp_path, bbox=box, landmarks=points)
    assert tuple(found[40, 20]) == tuple(found[99, 59]) == (230, 30, 110)
    assert tuple(found[81, 25]) == class_colour(0) and tuple(found[20, 100]) == class_colour(1)


def test_keypoints_are_drawn_where_they_are_labelled_in_the_colour_of_their_number(tmp_path: Path) -> None:
    points = np.zeros((1, 3, 2, 3), np.float32)
    points[0, :2] = [[[12, 40, 2], [30, 30, 0]], [[50, 10, 1], [20, 20, 2]]]
    found = one_image(tmp_path, keypoints=Column(points, {"names": ("nose", "tail")}))
    assert tuple(found[80, 24]) == tuple(found[20, 100]) == class_colour(0)
    assert tuple(found[40, 40]) == class_colour(1)
    assert (found[60, 60] == 200).all() and (found[0, 0] == 200).all()
    unknown = Column(points, {"coordinates": "unknown"})
    assert (one_image(tmp_path, keypoints=unknown) == 200).all()


def test_places_of_another_image_are_not_drawn(tmp_path: Path) -> None:
    values = np.array([[10, 20, 20, 30]], np.int16)
    for attrs in (
        {"names": ("x", "y", "w", "h"), "coordinates": "original"},
        {},
        {"names": ("x_center", "y_center", "w", "h")},
    ):
        assert (one_image(tmp_path, bbox=Column(values, attrs)) == 200).all()
    points = Column(values, {"coordinates": "original"})
    assert (one_image(tmp_path, landmarks=points) == 200).all()


def test_the_legend_names_classes_of_masks_and_boxes(tmp_path: Path) -> None:
    images = np.zeros((1, 40, 40, 3), np.uint8)
    masks = np.zeros((1, 40, 40), np.uint8)
    masks[0, :9], masks[0, 9:12] = 2, 1
    boxes = Column(np.array([[[1, 1, 9, 9]]], np.float32), {"names": ("x", "y", "width", "height")})
    columns = {"boxes": boxes, "box_labels": Column(np.array([[1]]), {"names": ("cat", "dog")})}
    path = write_packed(tmp_path / "a.h5", images, columns, masks=masks, ignore_index=0)
    with open_hdf5(path) as hdf5:
        file = read_header(path)
        entries = legend_of(file, marks_of(hdf5, file, [0], [masks[0]]))
    assert [entry.name for entry in entries] == ["1 7.5 %", "2 22 %", "dog"], "shares of the pixels"
    assert [entry.kind for entry in entries] == ["mask", "mask", "box"]


def test_a_file_without_images_has_no_preview(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = np.zeros((4, 8), np.int64)
    with pytest.raises(FormatError, match="images"):
        make_preview(tmp_path / "a.h5", tmp_path / "a.png")
    write_tokens(tmp_path / "b.h5")
    with pytest.raises(OptionError, match="holds no images, so there is nothing to draw"):
        make_preview(tmp_path / "b.h5", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_a_row_that_cannot_be_read_or_decoded_is_named(packed: Path, tmp_path: Path) -> None:
    repack_file(packed, tmp_path / "z.h5", codec="gzip", chunk_bytes=20 * 16 * 3 * 4)
    with h5py.File(tmp_path / "z.h5") as file:
        at = file["images"].id.get_chunk_info(1).byte_offset
    with open(tmp_path / "z.h5", "r+b") as raw:
        raw.seek(at + 20)
        raw.write(b"\xff" * 60)
    flip(varied_file(tmp_path / "a.h5"), "images", 5, 0)  # no JPEG any more
    for name, message in (
        ("z.h5", r"z\.h5: sample .* \(row 4\): cannot be read"),
        ("a.h5", r"a\.h5: sample '005\.jpg' \(row 5\): its stored JPEG"),
    ):
        with pytest.raises(FormatError, match=message):
            make_preview(tmp_path / name, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("size", [None, (120, 130)])
def test_the_sheet_shows_every_row_in_its_own_size(tmp_path: Path, size: tuple[int, int] | None) -> None:
    rows = varied_rows(size=size)
    rows[0] = np.full((130, 120, 3) if size is None else (*size, 3), (1, 200, 100), np.uint8)
    rows[2] = np.full((113, 180, 3) if size is None else (*size, 3), (99, 7, 50), np.uint8)
    path = varied_file(tmp_path / "a.h5", rows, chunk_bytes=1 << 20)
    assert make_preview(path, tmp_path / "a.png") == tuple(range(NUM_ROWS))
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    for row in (rows[0], rows[2]):
        assert isinstance(row, np.ndarray)
        shown = np.argwhere((sheet == row[0, 0]).all(axis=2))
        assert tuple(shown.max(axis=0) - shown.min(axis=0) + 1) == row.shape[:2] and len(shown) == row.size // 3


def test_masks_of_several_sizes_lie_over_their_images(tmp_path: Path) -> None:
    rows = [np.full((112 + 8 * i, 120, 3), 200, np.uint8) for i in range(6)]
    for masks in (False, True):
        sheet = sheet_of(varied_file(tmp_path / f"{masks}.h5", rows, masks=masks, chunk_bytes=1 << 20))
        shown = (sheet == 200).all(axis=2).sum()
        pixels = sum(row.size // 3 for row in rows)
        # Of five classes without names, 0 is what is not marked, and remains as it is.
        assert pixels * 0.15 < shown < pixels * 0.25 if masks else shown >= pixels


def _compressed(path: Path, rows: int, chunk_rows: int) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "images", data=np.zeros((rows, 16, 16, 3), np.uint8), chunks=(chunk_rows, 16, 16, 3), compression=1
        )
    return path


def test_a_preview_decodes_no_large_chunk_and_few_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _compressed(tmp_path / "a.h5", rows=400, chunk_rows=10)
    monkeypatch.setattr("fastload.inspection.preview._MOST_DECODED_BYTES", 3 * 10 * 768)
    rows = make_preview(path, tmp_path / "a.png", count=20)
    assert len(rows) == 20 and len({row // 10 for row in rows}) == 3 and list(rows) == sorted(set(rows))
    assert max(rows) > 200  # spread over the file
    assert make_preview(path, tmp_path / "b.png", count=2) == _spread(range(400), 2, 0)
    monkeypatch.setattr("fastload.inspection.preview._MOST_CHUNK_BYTES", 7679)
    with pytest.raises(FormatError, match=r"a.h5: .*a whole chunk of 10 rows, 7.5 KiB; a preview decodes at most"):
        make_preview(path, tmp_path / "c.png")


def test_the_rows_asked_for_are_drawn_in_their_order(packed_copy, tmp_path):
    assert make_preview(packed_copy, tmp_path / "a.png", rows=[7, 3, 7]) == (7, 3, 7)
    with pytest.raises(OptionError, match="the file has no row 4000; it has 0 to "):
        make_preview(packed_copy, tmp_path / "b.png", rows=[3, 4000])
    assert not (tmp_path / "b.png").exists()
