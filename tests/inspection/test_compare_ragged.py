"""`fastload verify --source` of files with byte stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastload.errors import FormatError
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images

KEYS = ("cat/0.jpg", "cat/1.jpg", "dog/2.png", "dog/3.jpg", "dog/4.jpg")


def photos(folder: Path) -> Path:
    """Images of several sizes: JPEGs, one of them gray and one to be turned, and a PNG."""
    rng = np.random.default_rng(5)
    for i, key in enumerate(KEYS):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        image = small.resize((40 + 3 * i, 50 - 4 * i), Image.Resampling.BICUBIC)
        exif = Image.Exif()
        if i == 3:
            exif[0x0112] = 6
        image.convert("L" if i == 1 else "RGB").save(path, **({"exif": exif} if i == 3 else {}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store": "source"},
        {"store": "jpeg:80"},
        {"store": "mixed:0.5"},
        {"store": "source", "max_size": 30},
        {"store": "jpeg", "size": 24},
        {"max_size": 30},
        {"codec": "zstd"},
        {"store": "source", "mode": "gray"},
    ],
    ids=str,
)
def test_an_unchanged_source_is_what_was_packed(tmp_path: Path, options: dict) -> None:
    folder = photos(tmp_path / "photos")
    pack_images(folder, tmp_path / "a.h5", workers=0, **options)
    report = verify_file(tmp_path / "a.h5", source=folder, workers=0)
    assert report.ok and report.source is not None
    assert (report.source.compared, report.source.changed, report.source.inexact) == (len(KEYS), (), 0)


@pytest.mark.parametrize("store", ["raw", "source", "jpeg"])
def test_a_changed_image_is_named(tmp_path: Path, store: str) -> None:
    folder = photos(tmp_path / "photos")
    pack_images(folder, tmp_path / "a.h5", store=store, workers=0)
    Image.open(folder / KEYS[0]).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(folder / KEYS[0])
    Image.open(folder / KEYS[4]).resize((20, 20)).save(folder / KEYS[4])
    (folder / KEYS[3]).write_bytes((folder / KEYS[3]).read_bytes()[:300])
    report = verify_file(tmp_path / "a.h5", source=folder, workers=0)
    assert report.source is not None and not report.ok
    found = {row.key: row.reason for row in report.source.changed}
    assert set(found) == {KEYS[0], KEYS[3], KEYS[4]}
    assert "differ by up to" in found[KEYS[0]] and "no longer be decoded" in found[KEYS[3]]
    assert "20x20 (width x height), packed was 52x34" in found[KEYS[4]]


def test_a_source_file_of_other_bytes_and_the_same_pixels_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    pack_images(folder, tmp_path / "a.h5", store="source", workers=0)
    data = (folder / KEYS[0]).read_bytes()
    (folder / KEYS[0]).write_bytes(data[:2] + b"\xff\xfe\x00\x07hello" + data[2:])  # a comment
    report = verify_file(tmp_path / "a.h5", source=folder, workers=0)
    assert report.source is not None
    assert [(row.key, row.reason) for row in report.source.changed] == [(KEYS[0], "its JPEG has other bytes")]


def test_masks_are_compared(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for i in range(4):
        for name, image in (
            ("images", Image.new("RGB", (20 + i, 16), (9 * i, 3, 1))), ("masks", Image.new("L", (20 + i, 16), i)),
        ):  # fmt: skip
            (root / name).mkdir(parents=True, exist_ok=True)
            image.save(root / name / f"{i}.png")
    pack_images(root, tmp_path / "a.h5", workers=0)
    assert verify_file(tmp_path / "a.h5", source=root, workers=0).ok
    Image.new("L", (22, 16), 7).save(root / "masks/2.png")
    report = verify_file(tmp_path / "a.h5", source=root, workers=0)
    assert report.source is not None
    assert [row.reason for row in report.source.changed] == ["its mask differs"]


def test_worker_processes_compare_too(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    pack_images(folder, tmp_path / "a.h5", store="source", workers=0)
    shutil.rmtree(folder / "dog")
    report = verify_file(tmp_path / "a.h5", source=folder, workers=1)
    assert report.source is not None
    assert report.source.changed == () and sorted(report.source.missing) == list(KEYS[2:])


def test_options_of_another_release_are_refused(tmp_path: Path) -> None:
    import h5py

    folder = photos(tmp_path / "photos")
    pack_images(folder, tmp_path / "a.h5", workers=0)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.attrs["pack_options"] = '{"size": null, "store": "webp"}'
    with pytest.raises(FormatError, match="pack_options cannot be read"):
        verify_file(tmp_path / "a.h5", source=folder, workers=0)
