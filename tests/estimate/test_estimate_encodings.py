"""Sources and files, each in every store: the sizes are those that packing would make."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.estimate import EncodingEstimate, EncodingEstimates, estimate_file, estimate_survey
from fastload.format.column import Column
from fastload.format.writer import create_file
from fastload.pack import PackOptions, survey_source
from fastload.repack import repack_file
from sample_files import write_packed, write_ragged

ImageFolder = Callable[..., Path]


def estimated(source: Path, **options: object) -> EncodingEstimates | None:
    survey = survey_source(source, source.parent / "out.h5", options=PackOptions(**options))  # type: ignore[arg-type]
    return estimate_survey(survey, source.parent, threads=2)


def by_name(found: EncodingEstimates | None) -> dict[str, EncodingEstimate]:
    assert found is not None
    for store in found.stores:
        assert store.warm_per_s > 0
        assert (store.disk_per_s is None) == (found.disk.bytes_per_s is None)
        assert store.disk_per_s is None or 0 < store.disk_per_s <= store.warm_per_s
    assert found.pick in {store.store for store in found.stores}
    json.dumps(found.to_dict())
    return {store.store: store for store in found.stores}


def jpeg_of(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def test_a_folder_of_photos_in_every_encoding(image_folder: ImageFolder) -> None:
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
    assert found is not None and (found.sampled, found.failed) == (20, 0)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_photos_of_several_sizes(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    sizes = [(10 + i, 30 - i) for i in range(9)]
    for i, (height, width) in enumerate(sizes):
        Image.new("RGB", (width, height)).save(tmp_path / "photos" / f"{i}.jpg")
    stores = by_name(estimated(tmp_path / "photos"))
    assert stores["raw"].bytes == 3 * sum(height * width for height, width in sizes)
    smaller = by_name(estimated(tmp_path / "photos", max_size=12))
    assert smaller["raw"].bytes < stores["raw"].bytes
    # Those that are larger have to be encoded anew.
    assert smaller["source"].loses and not stores["source"].loses


@pytest.mark.parametrize(("suffix", "size"), [(".png", None), (".jpg", (8, 8))])
def test_a_file_that_is_no_jpeg_or_changes_its_size_has_no_bytes_to_keep(
    image_folder: ImageFolder, suffix: str, size: tuple[int, int] | None
) -> None:
    stores = by_name(estimated(image_folder(suffix=suffix), size=size))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"] and stores["mixed:0.5"].loses
    assert stores["raw"].bytes == 20 * math.prod(size or (12, 16)) * 3


def test_sixteen_bits_are_no_jpeg(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    Image.fromarray(np.full((6, 7), 999, np.uint16)).save(tmp_path / "deep" / "a.png")
    stores = by_name(estimated(tmp_path / "deep"))
    assert list(stores) == ["raw"] and stores["raw"].bytes == 6 * 7 * 2


def test_a_damaged_photo_is_counted_and_none_at_all_is_no_estimate(image_folder: ImageFolder) -> None:
    source = image_folder(per_class=2)
    paths = sorted(source.rglob("*.jpg"))
    paths[0].write_bytes(paths[0].read_bytes()[:-30])
    found = estimated(source)
    assert found is not None and (found.sampled, found.failed) == (3, 1)
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:-30])
    assert estimated(source) is None


@pytest.mark.parametrize("masks", [False, True])
def test_a_file_of_rows(tmp_path: Path, masks: bool) -> None:
    images = np.random.default_rng(0).integers(0, 255, (9, 8, 10, 3), np.uint8)
    stored = {"masks": images[..., 0]} if masks else {}
    path = write_packed(tmp_path / "a.h5", images, {}, **stored)  # type: ignore[arg-type]
    stores = by_name(estimate_file(path, threads=2))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"]
    assert stores["raw"].bytes == images.nbytes + 9 * 80 * masks


def test_a_file_of_jpegs_is_listed_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255, (9 + i, 12, 3), np.uint8) for i in range(5)]
    rows = [(jpeg_of(image), image.shape, 1) for image in pixels]
    path = write_ragged(tmp_path / "a.h5", rows, masks=[image[..., 0] for image in pixels])  # type: ignore[arg-type]
    stores = by_name(estimate_file(path, threads=2))
    assert list(stores) == ["as it is", "raw", "jpeg:90", "mixed:0.5"]
    num_pixels = sum(len(image) * 12 for image in pixels)
    assert stores["raw"].bytes == 4 * num_pixels
    assert stores["as it is"].bytes == sum(len(row[0]) for row in rows) + num_pixels
    assert not stores["as it is"].loses and not stores["mixed:0.5"].loses


def test_bytes_that_a_file_has_are_known_not_estimated(tmp_path: Path) -> None:
    """Rows of which a sample says little: half of them are many times smaller than the others."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255 if i % 2 else 2, (20 + i % 3, 24, 3), np.uint8) for i in range(90)]
    rows = [(jpeg_of(image), image.shape, 1) for image in pixels]
    masks = [np.zeros(image.shape[:2], np.uint8) for image in pixels]
    path = tmp_path / "b.h5"
    repack_file(write_ragged(tmp_path / "a.h5", rows, masks=masks), path, codec="zstd", workers=0)  # type: ignore[arg-type]
    found = estimate_file(path, threads=1)
    stores = by_name(found)
    with h5py.File(path) as file:
        of_masks = int(file["masks_bytes"][()].sum())
    assert of_masks < 90 * 100
    assert stores["as it is"].bytes == sum(len(row[0]) for row in rows) + of_masks
    assert stores["raw"].bytes == 90 * 21 * 24 * 3 + of_masks
    assert found is not None and found.raw_bytes == 90 * 21 * 24 * 4


def test_a_file_in_chunks_is_listed_as_it_is(tmp_path: Path) -> None:
    images = np.zeros((40, 16, 16, 3), np.uint8)
    plain = write_packed(tmp_path / "a.h5", images, {}, masks=images[..., 0])
    repack_file(plain, tmp_path / "b.h5", codec="zstd", chunk_bytes=4096, workers=0)
    found = estimate_file(tmp_path / "b.h5", threads=2)
    stores = by_name(found)
    assert list(stores) == ["as it is", "raw", "jpeg:90", "mixed:0.5"]
    with h5py.File(tmp_path / "b.h5") as file:
        of_images, of_masks = (file[name].id.get_storage_size() for name in ("images", "masks"))
    assert stores["as it is"].bytes == of_images + of_masks and stores["as it is"].encodings == {"zstd": 40}
    assert stores["raw"].bytes == images.nbytes + of_masks
    assert found is not None and found.raw_bytes == images.nbytes * 4 // 3


def test_a_dry_run_with_a_codec_is_compared_with_decoded_pixels(image_folder: ImageFolder) -> None:
    source = image_folder()
    for path in source.rglob("*.jpg"):
        Image.new("RGB", (64, 64)).save(path)
    found = estimated(source, codec="zstd")
    stores = by_name(found)
    assert next(iter(stores)) == "raw, zstd" and set(stores["raw, zstd"].encodings) <= {"raw", "zstd"}
    assert found is not None and stores["raw, zstd"].bytes < found.raw_bytes == 20 * 64 * 64 * 3


def test_a_file_of_pixels_that_differ_in_size(tmp_path: Path) -> None:
    rows = [np.full((4 + i, 6, 1), i, np.uint8) for i in range(4)]
    stores = by_name(estimate_file(write_ragged(tmp_path / "a.h5", rows), threads=2))
    assert list(stores) == ["raw", "jpeg:90", "mixed:0.5"] and stores["raw"].bytes == sum(row.size for row in rows)


def test_what_holds_no_images_has_no_stores(tmp_path: Path) -> None:
    columns = {
        "tokens": Column(np.zeros((3, 4), np.int32)),
        "split": Column(np.zeros(3, np.uint8), {"names": ("all",)}),
        "key": Column(np.array([b"a", b"b", b"c"])),
        "digest": Column(np.zeros(3, np.uint64)),
    }
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    create_file(tmp_path / "a.h5", num_rows=3, pixels={}, columns=columns, attrs=attrs)
    assert estimate_file(tmp_path / "a.h5") is None
