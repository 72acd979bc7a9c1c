"""What images become, from their headers and the options alone."""

from __future__ import annotations

import struct
import zlib
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import OptionError, SourceError
from fastload.format.codecs import Codec
from fastload.options.pack import EncodingOption, PackOptions, parse_encoding
from fastload.pack import pack_images, survey_source
from fastload.pack.decisions import (
    RaggedPlan,
    fitted_sizes,
    jpegs_kept_and_made,
    notes_on_encoding,
    plan_rows,
    row_lengths,
    row_sizes,
    source_exceptions,
    too_large,
)
from fastload.pack.encode import HEADERS


def headers(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array([(*row, 1) for row in rows], HEADERS)


NAMES = [f"{at}.png" for at in range(9)]
VARIED = headers((400, 500, 3, 8, 1), (300, 200, 3, 8, 6), (40, 30, 1, 8, 1), (70, 90, 3, 8, 0))
SAME = headers(*[(40, 50, 3, 8, 1)] * 3)


def chosen(**options: object) -> PackOptions:
    if "store" in options:
        options["store"] = parse_encoding(str(options["store"]))
    return PackOptions(**options)  # type: ignore[arg-type]


def planned(rows: np.ndarray, *, masks: bool = False, **options: object) -> RaggedPlan:
    return plan_rows(rows, NAMES, chosen(**options), "SRC", masks=masks)


def notes(rows: np.ndarray, *, masks: bool = False, file_bytes: int = 10**6, **options: object) -> list[str]:
    plan, sizes = planned(rows, masks=masks, **options), np.full(len(rows), file_bytes)
    return notes_on_encoding(plan, np.arange(len(rows)), rows, sizes, chosen(**options))


@pytest.mark.parametrize(
    ("rows", "options", "images", "masks"),
    [
        (SAME, {}, "rows", "rows"),
        (VARIED, {"size": (20, 20)}, "rows", "rows"),
        (headers((40, 60, 3, 8, 1), (80, 120, 3, 8, 1)), {"max_size": 20}, "rows", "rows"),  # all become 20 x 30
        (VARIED, {}, "ragged", "ragged"),
        (SAME, {"store": "source"}, "ragged", "rows"),
        (VARIED, {"store": "jpeg", "size": (8, 8)}, "ragged", "rows"),
        (SAME, {"codec": "gzip:1"}, "rows", "rows"),
        (VARIED, {"codec": "zstd:5", "store": "mixed:0.5"}, "ragged", "ragged"),
    ],
)
def test_only_rows_without_a_size_beforehand_are_ragged(rows, options, images, masks):
    plan = planned(rows, masks=True, **options)
    assert (plan.images, plan.masks) == (images, masks)
    assert plan.special == (images == "ragged" or "codec" in options)
    assert planned(rows, **options).masks is None
    codec = {"gzip:1": Codec("gzip", 1), "zstd:5": Codec("zstd", 5, checksum=True)}.get(options.get("codec"), Codec())
    assert plan.image_codec == plan.mask_codec == codec


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (VARIED, {"codec": "gzip"}, "--codec zstd"),
        (SAME, {"codec": "gzip", "store": "jpeg"}, "--codec zstd"),
        (SAME, {"size": (8, 8), "max_size": 8}, "only one of them"),
        (SAME, {"size": (8, 8), "store": "source"}, "--max-size"),
        (SAME, {"max_size": 0}, "max_size=0: needs at least 1, such as 256"),
        (SAME, {"limit": 0}, "limit=0: needs at least 1"),
        (SAME, {"store": "jpeg:200"}, "accepted: raw, jpeg, jpeg:1 to jpeg:100"),
        (SAME, {"codec": "lzma"}, "accepted: auto, none, gzip.* zstd"),
        (SAME, {"store": "jpeg", "mode": "rgba"}, "`--mode rgba` makes an alpha channel"),
        (headers((9, 9, 1, 16, 0)), {"store": "jpeg"}, "--bits 8"),
        (headers((9, 9, 4, 8, 0)), {"store": "mixed:0.5"}, "--mode rgb"),
    ],
)
def test_options_that_contradict_are_refused_with_a_fix(rows, options, said):
    with pytest.raises(OptionError, match=said):
        planned(rows, **options)


@pytest.mark.parametrize(
    ("mode", "brought"),
    [(None, {}), ("gray", {"JPEG brought to 1 channels -> stored as pixels": 2}),
     ("rgba", {"JPEG brought to 4 channels -> stored as pixels": 3})],
)  # fmt: skip
def test_files_that_are_no_jpeg_and_jpegs_of_other_channels_are_counted_separately(mode, brought):
    plan = planned(VARIED, store="source", mode=mode)
    assert source_exceptions(plan, np.arange(4), VARIED) == {"no plain JPEG -> stored as pixels": 1, **brought}


def test_a_codec_without_anything_to_compress_is_noted():
    (said,) = notes(VARIED, store="jpeg", codec="zstd")
    assert said == "Every image is stored as JPEG, which zstd makes no smaller: nothing is left to compress."
    (said,) = notes(VARIED, masks=True, store="jpeg", codec="zstd")
    assert "only the masks" in said
    (said,) = notes(VARIED, store="source", codec="zstd")
    assert "`--strict`" in said, "the PNG is compressed"
    assert notes(VARIED, store="source", codec="zstd", strict=True) == notes(VARIED, store="jpeg") == []


def test_jpegs_that_grow_as_pixels_are_noted_unless_pixels_were_asked_for():
    (said,) = notes(SAME, file_bytes=500)
    assert said.startswith("Pixels take 12 times the bytes of these files: `--store source`")
    assert notes(SAME, file_bytes=500, store="raw") == notes(SAME, file_bytes=5000) == []
    assert notes(headers((40, 50, 3, 8, 0)), file_bytes=500) == [], "PNGs are stored as pixels anyway"


def test_options_are_written_down_only_where_something_is_said():
    for unsaid in (PackOptions(), PackOptions(store=parse_encoding("raw"), codec="auto")):
        assert not {"store", "max_size", "codec"} & unsaid.to_dict().keys()
    told = PackOptions(store=parse_encoding("mixed:0.25"), max_size=256, codec="zstd:7").to_dict()
    assert (told["store"], told["max_size"], told["codec"]) == ("mixed:0.25", 256, "zstd:7")
    assert parse_encoding(told["store"]) == EncodingOption("mixed", fraction=0.25)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 600))
def test_a_fitted_image_keeps_its_aspect_and_never_grows(height, width, most):
    found, unknown = fitted_sizes(np.array([[height, width], [0, 0]]), most).tolist()
    assert unknown == [0, 0]
    assert min(found) == min(most, height, width) and max(found) <= max(height, width)
    scale = min(found) / min(height, width)
    assert np.abs(np.array(found) - np.array([height, width]) * scale).max() <= 0.5


@pytest.mark.parametrize("store", ["raw", "jpeg", "source", "mixed:0.4"])
@pytest.mark.parametrize("options", [{}, {"max_size": 64}, {"size": (40, 30)}])
def test_one_sample_is_decided_as_all_together(store, options):
    if store == "source" and "size" in options:
        return
    plan = planned(VARIED, store=store, **options)
    own, made = jpegs_kept_and_made(plan, np.arange(4), VARIED)
    assert own.dtype == made.dtype == np.bool_ and not (own & made).any()
    plain = [dict(zip(HEADERS.names, header, strict=True)) for header in VARIED.tolist()]
    assert [jpegs_kept_and_made(plan, i, plain[i]) for i in range(4)] == list(zip(own, made, strict=True))
    assert row_sizes(plan, VARIED).tolist() == [list(plan.row_size(each["height"], each["width"])) for each in plain]


def test_rows_take_the_bytes_of_their_pixels_or_of_their_file():
    listing = SimpleNamespace(files=None, masks=None, sizes=np.array([1000, 2000, 3000, 4000]))

    def lengths(**options: object) -> np.ndarray:
        return row_lengths(planned(VARIED, **options), VARIED, listing)["images"]

    assert lengths(max_size=100).tolist() == [37500, 45000, 3600, 18900]
    assert lengths(store="source").tolist() == [1000, 2000, 3000, 18900]
    made = lengths(store="jpeg:50")
    assert (made < lengths(store="jpeg:95")).all() and made[0] > 400 * 500 / 12


def test_what_no_row_can_hold_is_named():
    large = headers((70_000, 30_000, 3, 8, 0), (10, 10, 3, 8, 0))
    found = too_large(large, NAMES, PackOptions(), "SRC")
    assert list(found) == [0] and "5.9 GiB" in found[0]
    assert not too_large(large, NAMES, PackOptions(max_size=500), "SRC") and not too_large(
        large, NAMES, PackOptions((8, 8)), "SRC"
    )
    gray = headers((50_000, 40_000, 1, 8, 0))
    assert (
        not too_large(gray, NAMES, PackOptions(), "SRC")
        and "5.6 GiB" in too_large(gray, NAMES, PackOptions(mode="rgb"), "SRC")[0]
    )
    with pytest.raises(OptionError, match=r"5.6 GiB"):
        too_large(gray, NAMES, PackOptions((50_000, 40_000), mode="rgb"), "SRC")
    assert too_large(headers((0, 0, 0, 0, 0)), NAMES, PackOptions(), "SRC") == {}


@pytest.mark.parametrize("options", [{}, {"store": "jpeg"}, {"codec": "gzip"}, {"mode": "gray"}])
def test_what_is_too_large_is_refused_by_name_before_it_is_read(tmp_path, options):
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(tmp_path / "s.h5", "w") as file:  # a hole: its bytes are there, and were never written
        space = h5py.h5s.create_simple((2, 70_000, 70_000, 3))
        h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, space, created)
        file["labels"] = np.zeros(2, np.int64)
    with pytest.raises(SourceError, match=r"2 of 2 images .* 000000, 000001: is .* GiB of pixels, a row holds"):
        pack_images(tmp_path / "s.h5", tmp_path / "o.h5", workers=0, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["s.h5"]


def test_a_file_that_claims_too_many_pixels_is_named(tmp_path):
    Image.new("L", (8, 9)).save(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", 20_000, 20_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "big.png").write_bytes(data)
    with pytest.raises(SourceError, match=r"1 of 2 images .* big.png: too large: .*400000000 pixels"):
        survey_source(tmp_path)


LONG = headers((70_000, 10, 3, 8, 0), (10, 10, 3, 8, 0))
MIXED = headers((8, 9, 1, 8, 1), (7, 9, 3, 8, 1))


@pytest.mark.parametrize(
    ("rows", "options", "own", "made"),
    [
        (LONG, {"store": "jpeg"}, [False, False], [False, True]),
        (MIXED, {"store": "source"}, [True, True], [False, False]),  # a gray JPEG decodes to RGB
        (MIXED, {"store": "source", "mode": "gray"}, [True, False], [False, False]),
        (MIXED, {"store": "source", "mode": "rgba"}, [False, False], [False, False]),
    ],
)
def test_length_and_channels_decide_which_files_fit_and_which_jpegs_are_made(rows, options, own, made):
    found = jpegs_kept_and_made(planned(rows, **options), np.arange(2), rows)
    assert [each.tolist() for each in found] == [own, made]
