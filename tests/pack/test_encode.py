"""A sample as the bytes that are stored of it, from real files."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import xxhash
from golden_sources import png, write
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError, SourceError
from fastload.format.codecs import decompress_zstd
from fastload.format.ragged import JPEG, RAW, ZSTD, Column, EncodedRow
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.options.pack import PackOptions, parse_encoding
from fastload.pack import PackJob, Survey, survey_source
from fastload.pack.encode import RowEncoder
from fastload.pack.pool import PackPool
from fastload.pack.survey import survey_listing
from fastload.sources.listing import Listing


def smooth(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A photo of sorts: few bytes as JPEG, all its pixels different."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: NDArray[np.uint8], orientation: int = 1, **options: object) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "JPEG", exif=exif, **options)
    return file.getvalue()


def folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        write(tmp_path / "photos" / name, data)
    return tmp_path / "photos"


def encoded(survey: Survey) -> dict[str, EncodedRow]:
    assert survey.plan is not None and survey.headers is not None and survey.listing.files is not None
    encoder = RowEncoder(survey.listing.files, survey.listing.masks, survey.plan)
    return {survey.listing.keys[i]: encoder.encode(i, survey.headers[i]) for i in survey.samples.tolist()}


def surveyed(source: Path, store: str = "raw", **options: object) -> Survey:
    return survey_source(source, options=PackOptions(store=parse_encoding(store), **options))  # type: ignore[arg-type]


def pixels_of(data: bytes, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    out = np.empty(shape, np.uint8)
    decode_image(data, Target(height=shape[0], width=shape[1], channels=shape[2], dtype=out.dtype), out)
    return out


FILES = {
    "gray.jpg": jpeg(smooth(40, 30)[..., 0]),
    "plain.jpg": jpeg(smooth(50, 70, 1)),
    "turned.jpg": jpeg(smooth(30, 60, 2), orientation=6),
    "progressive.jpg": jpeg(smooth(33, 47, 3), progressive=True),
    "cmyk.jpg": jpeg(np.asarray(Image.fromarray(smooth(20, 24, 4)).convert("CMYK"))[..., :3]),
    "drawn.png": png(smooth(21, 35, 5)),
}


def test_source_keeps_jpegs_byte_for_byte_and_counts_what_is_none(tmp_path):
    cmyk = io.BytesIO()
    Image.fromarray(smooth(20, 24)).convert("CMYK").save(cmyk, "JPEG")
    files = {**FILES, "cmyk.jpg": cmyk.getvalue()}
    survey = surveyed(folder(tmp_path, files), "source")
    rows = encoded(survey)
    for name in ("gray.jpg", "plain.jpg", "turned.jpg", "progressive.jpg"):
        assert rows[name].encoding == JPEG and rows[name].image == files[name]
        assert rows[name].digest == xxhash.xxh3_64_intdigest(files[name])
    assert rows["turned.jpg"].orientation == 6 and rows["turned.jpg"].shape == (60, 30, 3)
    for name in ("cmyk.jpg", "drawn.png"):
        assert bytes(rows[name].image) == pixels_of(files[name], rows[name].shape).tobytes()
    assert survey.converted["no plain JPEG -> stored as pixels"] == 2 and "`--strict`" in survey.notes[-1]


def test_jpegs_made_here_have_a_restart_marker_for_each_row_of_blocks(tmp_path):
    rows = encoded(surveyed(folder(tmp_path, FILES), "jpeg:80"))
    for name, row in rows.items():
        assert row.encoding == JPEG and row.orientation == 1 and row.digest == xxhash.xxh3_64_intdigest(row.image)
        shown = simplejpeg.decode_jpeg(row.image)
        original = pixels_of(FILES[name], row.shape)
        assert shown.shape == row.shape and np.abs(shown.astype(int) - original).mean() < 6
        assert b"\xff\xdd\x00\x04" in row.image, "the segment DRI"
    row = encoded(surveyed(folder(tmp_path / "gray", {"a.png": png(smooth(20, 30)[..., 0])}), "jpeg"))["a.png"]
    assert row.shape == (20, 30, 1) and simplejpeg.decode_jpeg_header(row.image)[2] == "Gray"


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 5), (0.3, 3), (0.05, 0)])
def test_mixed_takes_a_fraction_spread_evenly(tmp_path, fraction, count):
    files = {f"{i}.jpg": jpeg(smooth(20 + i, 20, i)) for i in range(9)} | {"9.png": png(smooth(20, 20))}
    rows = encoded(surveyed(folder(tmp_path, files), f"mixed:{fraction}"))
    chosen = [int(Path(name).stem) for name, row in rows.items() if row.encoding == JPEG]
    assert len(chosen) == count and all(b - a >= int(1 / fraction) for a, b in itertools.pairwise(chosen))
    kept = [rows[name].image == files[name] for name in rows if name.endswith(".jpg") and int(name[0]) in chosen]
    assert all(kept)


def test_max_size_shrinks_larger_images_only(tmp_path):
    files = {"large.jpg": jpeg(smooth(60, 90)), "small.jpg": jpeg(smooth(30, 100)), "even.png": png(smooth(41, 40))}
    source = folder(tmp_path, files)
    shapes = {name: row.shape for name, row in encoded(surveyed(source, max_size=40)).items()}
    assert shapes == {"large.jpg": (40, 60, 3), "small.jpg": (30, 100, 3), "even.png": (41, 40, 3)}
    kept = encoded(surveyed(source, "source", max_size=40))
    assert kept["small.jpg"].image == files["small.jpg"] and kept["even.png"].encoding == RAW
    assert kept["large.jpg"].encoding == JPEG and simplejpeg.decode_jpeg(kept["large.jpg"].image).shape == (40, 60, 3)
    again = surveyed(source, "source", max_size=40).converted
    assert again == {
        "no plain JPEG -> stored as pixels": 1,
        "larger JPEG -> resized, JPEG of quality 90": 1,
        "larger than --max-size 40 -> shrunk": 1,
    }


def test_a_kept_jpeg_that_is_cut_short_is_refused_as_when_it_is_decoded(tmp_path):
    data = jpeg(smooth(80, 90), quality=95)
    source = folder(tmp_path, {"a.jpg": data, "b.jpg": jpeg(smooth(20, 20))})
    for damaged in (data[:-2], data[:-400], data[:-400] + bytes(400)):
        (source / "a.jpg").write_bytes(damaged)
        reasons = []
        for store in ("source", "raw"):
            with pytest.raises(ImageError, match=r"truncated|broken data stream") as caught:
                encoded(surveyed(source, store))
            reasons.append(str(caught.value))
        assert reasons[0] == reasons[1]
    (source / "a.jpg").write_bytes(data + bytes(100))
    assert encoded(surveyed(source, "source"))["a.jpg"].image == data + bytes(100), (
        "what lies behind the image harms nobody"
    )


@pytest.mark.parametrize("store", ["raw", "source", "jpeg"])
def test_a_file_that_changed_since_its_header_was_read_is_refused(tmp_path, store):
    """Also by a program that keeps its length and time of modification, which are compared before."""
    before, after = jpeg(smooth(20, 30)), jpeg(smooth(30, 20))
    length = max(len(before), len(after))
    source = folder(tmp_path, {"a.jpg": before.ljust(length, b"\0"), "b.jpg": jpeg(smooth(20, 20))})
    survey, listed = surveyed(source, store), (source / "a.jpg").stat()
    (source / "a.jpg").write_bytes(after.ljust(length, b"\0"))
    os.utime(source / "a.jpg", ns=(listed.st_atime_ns, listed.st_mtime_ns))
    with pytest.raises(ImageError, match="header was read"):
        encoded(survey)


@pytest.mark.parametrize("store", ["raw", "source"])
def test_a_mask_is_hashed_behind_its_image_and_resized_with_it(tmp_path, store):
    mask = (np.arange(600) % 7).astype(np.uint8).reshape(20, 30)
    images = {"images/a.jpg": jpeg(smooth(20, 30)), "images/b.jpg": jpeg(smooth(40, 24))}
    source = folder(tmp_path, images | {"masks/a.png": png(mask), "masks/b.png": png(np.full((40, 24), 255, np.uint8))})
    first, second = images
    rows = encoded(surveyed(source, store))
    assert bytes(rows[first].mask) == mask.tobytes()
    assert bytes(rows[second].mask) == b"\xff" * 960
    for row in rows.values():
        assert row.digest == xxhash.xxh3_64_intdigest(bytes(row.image) + bytes(row.mask))
    smaller = encoded(surveyed(source, store, max_size=10, codec="zstd"))
    assert smaller[first].shape == (10, 15, 3) and smaller[second].shape == (17, 10, 3)
    assert smaller[second].mask_encoding == ZSTD
    out = np.empty(170, np.uint8)
    decompress_zstd(smaller[second].mask, out)
    assert (out == 255).all()


def test_boxes_shrink_with_images_of_several_sizes(tmp_path):
    source = folder(tmp_path, {"a.jpg": jpeg(smooth(20, 40)), "b.jpg": jpeg(smooth(10, 12))})
    plain = surveyed(source).listing
    boxes = Column(np.tile(np.array([[4, 8, 8, 8]], np.float32), (2, 1)), {}, "xywh")
    listing = Listing(**{**vars(plain), "columns": {"bbox": boxes}})
    with PackPool(0) as pool:
        pool.use(listing)
        survey = survey_listing(PackJob("S", Path(), listing, PackOptions(max_size=10, outside_boxes="keep")), pool)
        moved = survey.listing.columns["bbox"].values
        unknown = Listing(**{**vars(plain), "columns": {"bbox": Column(boxes.values, {"coordinates": "unknown"})}})
        for option, options in (("max-size", {"max_size": 10}), ("size", {"size": (10, 10)})):
            with pytest.raises(SourceError, match=f"`--{option}` would leave bbox behind"):
                survey_listing(PackJob("S", Path(), unknown, PackOptions(**options)), pool)
    assert moved.tolist() == [[2, 4, 4, 4], [4, 8, 8, 2]], "the second one is cut off at its image's edge"
