"""Masks are compressed where a sample of them says that it pays."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import h5py
import numpy as np
import pytest
from golden_sources import png, write
from numpy.typing import NDArray

from fastload.format.codecs import Codec
from fastload.format.header import read_header
from fastload.inspection.info import inspect_file
from fastload.options.pack import PackOptions
from fastload.pack import PackJob, Survey, pack_images, pack_listing
from fastload.pack.pool import PackPool
from fastload.pack.survey import survey_listing
from fastload.repack import repack_file
from fastload.sources.layouts import list_source
from fastload.sources.listing import Listing

COUNT, SIDE = 20, 240


def listed(root: Path, masks: list[NDArray[np.uint8]], size: tuple[int, int] = (SIDE, SIDE)) -> Listing:
    for i, mask in enumerate(masks):
        write(root / f"images/{i:02d}.png", png(np.full((*size, 3), i, np.uint8)))
        write(root / f"masks/{i:02d}.png", png(mask))
    return list_source(root, "mask-folders")


def surveyed(listing: Listing, **options: object) -> Survey:
    with PackPool(0) as pool:
        pool.use(listing)
        return survey_listing(PackJob("S", Path(), listing, PackOptions(**options)), pool)  # type: ignore[arg-type]


def regions(side: int = SIDE) -> list[NDArray[np.uint8]]:
    mask = np.repeat(np.arange(side, dtype=np.uint8)[:, None] // 16, side, axis=1)
    return [np.roll(mask, i, axis=0) for i in range(COUNT)]


def test_masks_of_regions_are_gzip_that_bare_h5py_reads_and_a_note_gives_the_gain(tmp_path):
    listing = listed(tmp_path, regions())
    survey = surveyed(listing)
    pack_listing(PackJob("S", tmp_path / "a.h5", listing, PackOptions()), workers=0)
    repack_file(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True)
    expected = {key: listing.masks.files.read(i) for i, key in enumerate(listing.keys)}
    for name in ("a.h5", "b.h5"):
        assert read_header(tmp_path / name).fields["masks"].filters == ("deflate",), "a copy keeps it"
        with h5py.File(tmp_path / name) as file:
            for key, mask in zip(file["key"][()].tolist(), file["masks"][()], strict=True):
                assert png(mask) == expected[key.decode()]
    assert survey.plan is not None and survey.plan.mask_codec == Codec("gzip", 6)
    assert survey.plan.images == survey.plan.masks == "rows" and survey.plan.image_codec == Codec()
    assert "Masks are compressed with gzip:6: 20 of them came to " in survey.notes[-1]
    specs = survey.pixels(COUNT)
    assert specs["masks"].codec == Codec("gzip", 6) and specs["masks"].chunk_rows == 1, "64 KiB"
    assert specs["images"].codec == Codec() and specs["images"].chunk_rows == COUNT


def test_masks_of_noise_few_bytes_or_with_a_codec_of_the_users_are_left_alone(tmp_path):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8) for _ in range(COUNT)]
    listing = listed(tmp_path / "noise", noise)
    survey = surveyed(listing)
    assert not survey.plan.special and "no smaller than 100.0%" in survey.notes[-1]
    report = pack_listing(PackJob("S", tmp_path / "o.h5", listing, PackOptions()), workers=0)
    assert report.notes == survey.notes
    survey = surveyed(listed(tmp_path / "small", regions(64), (64, 64)))
    assert not survey.plan.special and survey.more_notes == ()
    own = listed(tmp_path / "own", regions())
    assert not surveyed(own, codec="none").plan.special
    assert surveyed(own, codec="gzip:2").plan.mask_codec == Codec("gzip", 2)


def test_masks_that_gzip_leaves_much_larger_are_zstd_and_the_note_says_what_reads_them(tmp_path):
    # Each mask repeats a random part beyond the 32 KiB that gzip looks back.
    rng = np.random.default_rng(1)
    parts = rng.integers(0, 256, (COUNT, 1, 160, 256), dtype=np.uint8)
    listing = listed(tmp_path, list(parts.repeat(4, axis=1).reshape(COUNT, 640, 256)), (640, 256))
    survey = surveyed(listing)
    assert survey.plan.mask_codec == Codec("zstd", 3, checksum=True)
    assert "with gzip:6 to 100" in survey.notes[-1] and "pip install hdf5plugin" in survey.notes[-1]
    pack_listing(PackJob("S", tmp_path / "a.h5", listing, PackOptions()), workers=0)
    assert inspect_file(tmp_path / "a.h5").needs == {"masks": "zstd (HDF5 filter 32015): pip install hdf5plugin"}


@pytest.mark.parametrize("sizes", ["one", "several"])
def test_without_zstandard_masks_are_gzip_and_of_several_sizes_a_note_names_the_package(tmp_path, monkeypatch, sizes):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "zstandard" else found(name))
    listing = listed(tmp_path, regions())
    if sizes == "several":
        write(tmp_path / "images/99.png", png(np.zeros((SIDE, SIDE + 1, 3), np.uint8)))
        write(tmp_path / "masks/99.png", png(np.zeros((SIDE, SIDE + 1), np.uint8)))
        listing = list_source(tmp_path, "mask-folders")
    survey = surveyed(listing)
    if sizes == "one":
        assert survey.plan.mask_codec == Codec("gzip", 6)
    else:
        assert survey.plan.mask_codec == Codec() and "pip install zstandard" in survey.notes[-1]


def test_masks_of_several_sizes_are_zstd_by_row_and_info_says_what_reads_them(tmp_path):
    listed(tmp_path / "in", regions())
    write(tmp_path / "in/images/99.png", png(np.zeros((SIDE, SIDE + 1, 3), np.uint8)))
    write(tmp_path / "in/masks/99.png", png(np.zeros((SIDE, SIDE + 1), np.uint8)))
    report = pack_images(tmp_path / "in", tmp_path / "a.h5", layout="mask-folders", workers=0)
    assert "needs: pip install zstandard" in " ".join(report.notes)
    assert inspect_file(tmp_path / "a.h5").needs == {"masks": "zstd, row by row: pip install zstandard"}
