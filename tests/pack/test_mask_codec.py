"""Masks are compressed where a sample of them says that it pays."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from golden_sources import png, write
from numpy.typing import NDArray

from fastload.format.codecs import Codec
from fastload.format.header import read_header
from fastload.pack import PackJob, PackOptions, Survey, pack_listing
from fastload.pack.pool import PackPool
from fastload.pack.survey import survey_listing
from fastload.repack import repack_file
from fastload.sources.layouts import list_source
from fastload.sources.listing import Listing

COUNT, SIDE = 20, 240


def listed(root: Path, masks: list[NDArray[np.uint8]], side: int = SIDE) -> Listing:
    for i, mask in enumerate(masks):
        write(root / f"images/{i:02d}.png", png(np.full((side, side, 3), i, np.uint8)))
        write(root / f"masks/{i:02d}.png", png(mask))
    return list_source(root, "mask-folders")


def surveyed(listing: Listing, **options: object) -> Survey:
    with PackPool(0) as pool:
        pool.use(listing)
        return survey_listing(PackJob("S", Path(), listing, PackOptions(**options)), pool)  # type: ignore[arg-type]


def regions(side: int = SIDE) -> list[NDArray[np.uint8]]:
    mask = np.repeat(np.arange(side, dtype=np.uint8)[:, None] // 16, side, axis=1)
    return [np.roll(mask, i, axis=0) for i in range(COUNT)]


def test_masks_of_regions_are_compressed_and_a_note_gives_the_gain(tmp_path):
    listing = listed(tmp_path, regions())
    survey = surveyed(listing)
    pack_listing(PackJob("S", tmp_path / "a.h5", listing, PackOptions()), workers=0)
    repack_file(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True)
    for name in ("a.h5", "b.h5"):
        assert read_header(tmp_path / name).fields["masks"].filters == ("zstd",), "a copy keeps it"
    assert survey.plan is not None and survey.plan.mask_codec == Codec("zstd", 3, checksum=True)
    assert survey.plan.images == survey.plan.masks == "rows" and survey.plan.image_codec == Codec()
    assert "Masks are compressed with zstd:3: 20 of them came to " in survey.notes[-1]
    specs = survey.pixels(COUNT)
    assert specs["masks"].codec == Codec("zstd", 3, checksum=True) and specs["masks"].chunk_rows == 1, "64 KiB"
    assert specs["images"].codec == Codec() and specs["images"].chunk_rows == COUNT


def test_masks_of_noise_few_bytes_or_with_a_codec_of_the_users_are_left_alone(tmp_path):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8) for _ in range(COUNT)]
    listing = listed(tmp_path / "noise", noise)
    survey = surveyed(listing)
    assert not survey.plan.special and "no smaller than 100%" in survey.notes[-1]
    report = pack_listing(PackJob("S", tmp_path / "o.h5", listing, PackOptions()), workers=0)
    assert report.notes == survey.notes
    survey = surveyed(listed(tmp_path / "small", regions(64), 64))
    assert not survey.plan.special and survey.more_notes == ()
    own = listed(tmp_path / "own", regions())
    assert not surveyed(own, codec="none").plan.special
    assert surveyed(own, codec="gzip:2").plan.mask_codec == Codec("gzip", 2)


def test_without_zstandard_the_note_names_the_extra(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "zstandard" else found(name))
    survey = surveyed(listed(tmp_path, regions()))
    assert not survey.plan.special and "pip install zstandard hdf5plugin" in survey.notes[-1]
