"""Sources and files, each in every store: the sizes are those that packing would make."""

from __future__ import annotations

import json
import math

import h5py
import numpy as np
import pytest
from PIL import Image
from ragged_cases import jpeg_row
from small_files import write_tokens

from fastload.estimate import estimate_file, estimate_survey
from fastload.options.pack import PackOptions
from fastload.pack import survey_source
from fastload.repack import repack_file
from sample_files import write_packed, write_ragged


def estimated(source, **options):
    survey = survey_source(source, source.parent / "out.h5", options=PackOptions(**options))
    return estimate_survey(survey, source.parent, threads=2)


def by_name(found):
    for store in found.stores:
        assert store.warm_samples_per_s > 0
        assert (store.disk_samples_per_s is None) == (found.disk.bytes_per_s is None)
        assert store.disk_samples_per_s is None or 0 < store.disk_samples_per_s <= store.warm_samples_per_s
    assert found.pick in {store.store for store in found.stores}
    json.dumps(found.to_dict())
    return {store.store: store for store in found.stores}


def test_a_folder_of_photos_in_every_encoding(image_folder):
    source = image_folder()
    found = estimated(source)
    stores = by_name(found)
    assert list(stores) == ["raw", "jpeg:90", "source", "mixed:0.5"]
    assert stores["raw"].bytes == 20 * 12 * 16 * 3 and stores["raw"].encodings == {"raw": 20}
    own = sum(path.stat().st_size for path in source.rglob("*.jpg"))
    assert stores["source"].bytes == own and stores["source"].encodings == {"jpeg": 20}
    assert stores["mixed:0.5"].bytes == round((stores["raw"].bytes + own) / 2)
    assert stores["mixed:0.5"].encodings == {"raw": 10, "jpeg": 10}
    assert [store.loses for store in stores.values()] == [False, True, False, False]
    assert (found.sampled, found.failed) == (20, 0)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_photos_of_several_sizes(tmp_path):
    (tmp_path / "photos").mkdir()
    sizes = [(10 + i, 30 - i) for i in range(9)]
    for i, (height, width) in enumerate(sizes):
        Image.new("RGB", (width, height)).save(tmp_path / "photos" / f"{i}.jpg")
    stores = by_name(estimated(tmp_path / "photos"))
    assert stores["raw"].bytes == 3 * sum(height * width for height, width in sizes)
    smaller = by_name(estimated(tmp_path / "photos", max_size=12))
    assert smaller["raw"].bytes < stores["raw"].bytes
    # Those that are larger have to be encoded anew.
    assert smaller["source"].loses and smaller["mixed:0.5"].loses and not stores["source"].loses


@pytest.mark.parametrize(("suffix", "size"), [(".png", None), (".jpg", (8, 8))])
def test_a_file_that_is_no_jpeg_or_changes_its_size_has_no_bytes_to_keep(image_folder, suffix, size):
    stores = by_name(estimated(image_folder(suffix=suffix), size=size))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"] and stores["mixed:0.5"].loses
    assert stores["raw"].bytes == 20 * math.prod(size or (12, 16)) * 3


def test_sixteen_bits_are_no_jpeg(tmp_path):
    (tmp_path / "deep").mkdir()
    Image.fromarray(np.full((6, 7), 999, np.uint16)).save(tmp_path / "deep" / "a.png")
    stores = by_name(estimated(tmp_path / "deep"))
    assert list(stores) == ["raw"] and stores["raw"].bytes == 6 * 7 * 2


def test_a_damaged_photo_is_counted_and_none_at_all_is_no_estimate(image_folder):
    source = image_folder(per_class=2)
    paths = sorted(source.rglob("*.jpg"))
    paths[0].write_bytes(paths[0].read_bytes()[:-30])
    found = estimated(source)
    assert (found.sampled, found.failed) == (3, 1)
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:-30])
    assert estimated(source) is None


def test_a_dry_run_with_a_codec_is_compared_with_decoded_pixels(image_folder):
    source = image_folder()
    for path in source.rglob("*.jpg"):
        Image.new("RGB", (64, 64)).save(path)
    found = estimated(source, codec="zstd")
    stores = by_name(found)
    assert next(iter(stores)) == "raw, zstd" and set(stores["raw, zstd"].encodings) <= {"raw", "zstd"}
    assert stores["raw, zstd"].bytes < found.raw_bytes == 20 * 64 * 64 * 3


@pytest.mark.parametrize("masks", [False, True])
def test_a_file_of_rows_and_one_in_compressed_chunks_which_is_listed_as_it_is(tmp_path, masks):
    images = np.zeros((40, 16, 16, 3), np.uint8)
    plain = write_packed(tmp_path / "a.h5", images, {}, **({"masks": images[..., 0]} if masks else {}))
    stores = by_name(estimate_file(plain, threads=2))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"]
    assert stores["raw"].bytes == images.nbytes + 40 * 256 * masks
    repack_file(plain, tmp_path / "b.h5", codec="zstd", chunk_bytes=4096, workers=0)
    found = estimate_file(tmp_path / "b.h5", threads=2)
    stores = by_name(found)
    assert list(stores) == ["as it is", "raw", "jpeg:90", "mixed:0.5"]
    with h5py.File(tmp_path / "b.h5") as file:
        of_images, of_masks = (file[name].id.get_storage_size() if name in file else 0 for name in ("images", "masks"))
    assert stores["as it is"].bytes == of_images + of_masks and stores["as it is"].encodings == {"zstd": 40}
    assert stores["raw"].bytes == images.nbytes + of_masks
    assert found.raw_bytes == images.nbytes + 40 * 256 * masks


def test_bytes_that_a_file_of_jpegs_has_are_known_not_estimated(tmp_path):
    """Rows of which a sample says little: half of them are many times smaller than the others."""
    rows = [jpeg_row(20 + i % 3, 24 if i % 2 else 2, seed=i) for i in range(90)]
    sizes = [row[1][0] * row[1][1] for row in rows]
    masks = [np.zeros(row[1][:2], np.uint8) for row in rows]
    plain = write_ragged(tmp_path / "a.h5", rows, masks=masks)
    repack_file(plain, tmp_path / "b.h5", codec="zstd", workers=0)
    with h5py.File(tmp_path / "b.h5") as file:
        compressed = int(file["masks_bytes"][()].sum())
    assert compressed < 90 * 100
    for path, of_masks in ((plain, sum(sizes)), (tmp_path / "b.h5", compressed)):
        found = estimate_file(path, threads=2)
        stores = by_name(found)
        assert list(stores) == ["as it is", "raw", "jpeg:90", "mixed:0.5"]
        assert stores["as it is"].bytes == sum(len(row[0]) for row in rows) + of_masks
        assert stores["raw"].bytes == 3 * sum(sizes) + of_masks and found.raw_bytes == 4 * sum(sizes)
        assert not stores["as it is"].loses and not stores["mixed:0.5"].loses


def test_a_file_of_pixels_that_differ_in_size_and_one_without_images(tmp_path):
    rows = [np.full((4 + i, 6, 1), i, np.uint8) for i in range(4)]
    stores = by_name(estimate_file(write_ragged(tmp_path / "a.h5", rows), threads=2))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"] and stores["raw"].bytes == sum(row.size for row in rows)
    assert estimate_file(write_tokens(tmp_path / "tokens.h5")) is None
