from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image, ImageFont

from fastload.errors import MissingFileError, OptionError, OutputError
from fastload.format import read_header
from fastload.layout import write_packed
from fastload.preview import _attributes, _class_name, _columns, _shown_size, _spread, _wrap, make_preview
from fastload.sources.listing import Column


def packed(tmp_path: Path, shape: tuple[int, ...] = (20, 16, 3), count: int = 30, **more: object) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    return write_packed(tmp_path / "file.h5", images, **more)  # type: ignore[arg-type]


def test_rows_are_spread_over_the_file_and_differ() -> None:
    rows = _spread(range(100, 1100), 40, 0)
    assert len(set(rows)) == 40
    assert all(100 + 25 * i <= row < 125 + 25 * i for i, row in enumerate(rows))
    assert _spread(range(5), 40, 3) == (0, 1, 2, 3, 4)
    assert _spread(range(1000), 40, 1) != _spread(range(1000), 40, 2)


def test_the_sheet_shows_the_pixels_of_the_rows_it_names(tmp_path: Path) -> None:
    path = write_packed(
        tmp_path / "a.h5", np.ones((3, 120, 120, 1), np.uint8) * np.uint8([[[[60]]], [[[120]]], [[[180]]]])
    )
    assert make_preview(path, tmp_path / "a.png") == (0, 1, 2)
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    for value in (60, 120, 180):
        assert np.count_nonzero(sheet == value) >= 120 * 120


@pytest.mark.parametrize("shape", [(28, 28, 1), (20, 16, 3), (9, 300, 4), (1, 1, 3), (400, 500, 3)])
def test_every_shape_is_drawn(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = packed(tmp_path, shape, count=9)
    assert len(make_preview(path, tmp_path / "a.png")) == 9
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.width >= 5 * min(112, shape[1])


def test_small_images_grow_by_whole_factors_and_large_ones_shrink() -> None:
    assert _shown_size(28, 28) == (112, 112)
    assert _shown_size(32, 32) == (128, 128)
    assert _shown_size(218, 178) == (178, 218)
    assert _shown_size(1000, 500) == (112, 224)
    assert _shown_size(2000, 1) == (1, 224)


def test_sixteen_bits_are_scaled_to_the_largest_value(tmp_path: Path) -> None:
    images = np.zeros((2, 120, 120, 1), np.uint16)
    images[1] = 1000
    make_preview(write_packed(tmp_path / "a.h5", images), tmp_path / "a.png")
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    assert np.count_nonzero(sheet == 255) >= 120 * 120


def test_masks_are_laid_over_except_what_is_ignored(tmp_path: Path) -> None:
    images = np.full((1, 120, 120, 3), 200, np.uint8)
    masks = np.full((1, 120, 120), 255, np.uint8)
    masks[0, :60] = 3
    path = write_packed(tmp_path / "a.h5", images, masks=masks, ignore_index=255)
    make_preview(path, tmp_path / "a.png")
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    bare = np.all(sheet == 200, axis=2)
    assert 60 * 120 <= np.count_nonzero(bare) < 61 * 120


def test_a_foreign_file_with_channels_first_is_drawn(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.full((4, 3, 120, 130), 77, np.uint8)
    make_preview(tmp_path / "a.h5", tmp_path / "a.png")
    assert np.count_nonzero(np.all(np.asarray(Image.open(tmp_path / "a.png")) == 77, axis=2)) >= 4 * 120 * 130


def test_one_split_is_shown_on_request(tmp_path: Path) -> None:
    path = packed(tmp_path, splits={"train": 20, "val": 10})
    assert make_preview(path, tmp_path / "a.png", split="val") == tuple(range(20, 30))
    with pytest.raises(OptionError, match="no split 'test'; accepted: train, val"):
        make_preview(path, tmp_path / "b.png", split="test")


def test_the_same_seed_draws_the_same_picture(tmp_path: Path) -> None:
    path = packed(tmp_path, count=200)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_preview(path, tmp_path / f"{name}.png", seed=seed)
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


def test_an_output_that_exists_is_kept_unless_overwrite(tmp_path: Path) -> None:
    path = packed(tmp_path)
    (tmp_path / "a.png").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        make_preview(path, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_text() == "mine"
    make_preview(path, tmp_path / "a.png", overwrite=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_leaves_nothing_behind(tmp_path: Path) -> None:
    path = packed(tmp_path)
    with pytest.raises(OptionError, match=r"ends in \.png"):
        make_preview(path, tmp_path / "a.jpg")
    with pytest.raises(OutputError, match="does not exist"):
        make_preview(path, tmp_path / "nowhere" / "a.png")
    with pytest.raises(OptionError, match="count=0"):
        make_preview(path, tmp_path / "a.png", count=0)
    with pytest.raises(MissingFileError):
        make_preview(tmp_path / "absent.h5", tmp_path / "a.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.h5"]


def test_labels_name_the_class_and_the_rarest_attributes(tmp_path: Path) -> None:
    assert _class_name(0, ("tabby_cat",)) == "tabby cat"
    assert _class_name(7, ("tabby_cat",)) == "7"
    assert _class_name(-1, ("tabby_cat",)) == "no label"
    assert _class_name(0, ("Größe",)) == "GroBe" or _class_name(0, ("Größe",)) == "class 0"
    assert _class_name(1, ("a", "日本")) == "class 1"
    assert _attributes(["Hat", "Bald", "Smile", "Male", "Young"]) == "Hat, Bald, Smile, Male +1"
    assert _attributes([]) == "none"


def test_no_line_is_wider_than_its_room_and_no_word_is_lost() -> None:
    font = ImageFont.load_default(14)
    text = "Wearing Necklace, 5 o Clock Shadow, aVeryLongWordThatDoesNotFitIntoTheWidthAtAll +3"
    lines = _wrap(text, font, 112, 20)
    assert all(font.getlength(line) <= 112 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    short = _wrap(text, font, 112, 2)
    assert len(short) == 2 and short[-1].endswith("...") and font.getlength(short[-1]) <= 112
    assert _wrap("", font, 112, 2) == []


def test_the_grid_leaves_few_places_empty() -> None:
    assert [_columns(count) for count in (1, 8, 12, 25, 40)] == [1, 8, 6, 5, 8]


def test_attribute_vectors_and_splits_are_drawn(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2, (30, 40), dtype=np.uint8)
    labels = Column(values, {"names": tuple(f"Attribute_{i}" for i in range(40))})
    path = packed(tmp_path, columns={"labels": labels}, splits={"train": 20, "val": 10})
    assert len(make_preview(path, tmp_path / "a.png", count=12)) == 12
    assert read_header(path).num_rows == 30
