"""Images above the limit of pixels: refused by name, packed with `allow_large_images`, bounded by the memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fastload import pack_images, verify_file
from fastload.errors import SourceError
from fastload.images import image_header
from fastload.images.decode import decode_image
from fastload.images.fit import Fit, Target
from fastload.images.image_header import large_images
from fastload.options.pack import PackOptions
from fastload.pack import survey_source
from fastload.repack import append_images
from fastload.system import machine

LIMIT = 200 * 150
UINT8 = np.dtype(np.uint8)


def smooth(height: int, width: int) -> Image.Image:
    """Returns an image that stays itself when it is shrunk: gradients in each direction, and a dark left half."""
    down, across = np.mgrid[0:height, 0:width]
    pixels = np.stack([down * 255 // height, across * 255 // width, np.where(2 * across < width, 40, 200)], 2)
    return Image.fromarray(pixels.astype(np.uint8))


def jpeg(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    smooth(height, width).convert(mode).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limit; Pillow's own is far above."""
    monkeypatch.setattr(image_header, "MAX_PIXELS", LIMIT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two images within the limit and two above."""
    folder = tmp_path / "photos"
    for name, size in (("a/1", (90, 120)), ("a/2", (700, 930)), ("b/3", (100, 100)), ("b/4", (640, 801))):
        path = folder / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(*size))
    smooth(300, 400).save(folder / "b" / "5.png")
    return folder


@pytest.mark.usefixtures("small_limit")
def test_without_the_option_large_images_are_named_with_their_size_and_the_option(source: Path, tmp_path: Path) -> None:
    said = r"a/2.jpg: claims 930x700 pixels, more than the 30,000 accepted .*`fastload pack --allow-large-images`"
    with pytest.raises(SourceError, match=said):
        pack_images(source, tmp_path / "a.h5", workers=0, size=64)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    "options", [{"size": 64}, {"max_size": 64}, {"store": "jpeg"}, {"store": "source"}, {}], ids=lambda o: str([*o])
)
def test_with_it_they_are_packed_read_compared_and_appended_to(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    pytest.importorskip("torch")
    from fastload import PackedDataset

    output = tmp_path / "a.h5"
    pack_images(source, output, workers=0, shuffle=False, allow_large_images=True, **options)
    dataset = PackedDataset(output)
    assert len(dataset) == 5
    whole = np.asarray(smooth(700, 930).resize((85, 64)), np.int64)
    height, width = (64, 64) if "size" in options else (64, 85) if "max_size" in options else (700, 930)
    image = dataset[1][0].numpy()
    if image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    assert image.shape == (height, width, 3)
    if "max_size" in options:
        assert np.abs(image - whole).mean() < 2
    report = verify_file(output, source=source, workers=0)
    assert report.ok and report.source is not None and not report.source.changed
    more = tmp_path / "more"
    (more / "a").mkdir(parents=True)
    (more / "a" / "9.jpg").write_bytes(jpeg(400, 500))
    append_images(output, more, workers=0)
    assert len(PackedDataset(output)) == 6
    survey = survey_source(source, options=PackOptions(allow_large_images=True), workers=0)
    assert survey.num_samples == 5


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])  # Pillow decodes CMYK
def test_a_jpeg_decoded_smaller_is_where_the_whole_one_would_be(
    monkeypatch: pytest.MonkeyPatch, fit: Fit, orientation: int, mode: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(700, 931, mode, exif=exif.tobytes())
    target = Target(40, 60, 3, UINT8, fit)
    whole, smaller = np.empty((40, 60, 3), np.uint8), np.empty((40, 60, 3), np.uint8)
    decode_image(data, target, whole)
    monkeypatch.setattr(image_header, "MAX_PIXELS", LIMIT)
    with large_images(700 * 931 // 4 * 16):  # which does not suffice for the whole image
        decode_image(data, target, smaller)
    assert np.abs(whole.astype(int) - smaller).mean() < 1
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).height == (700 if orientation < 5 else 931)


@pytest.mark.usefixtures("small_limit")
def test_one_that_takes_more_memory_than_a_worker_may_use_is_named_with_its_size_and_the_option(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available: Callable[[], int] = lambda: 1_000_000  # noqa: E731
    monkeypatch.setattr(machine, "available_memory", available)
    said = r"b/5.png.* takes about 1.8 MiB .*400x300 pixels .*`--allow-large-images`.*976.6 KiB.*`--workers`"
    with pytest.raises(SourceError, match=said):
        pack_images(source, tmp_path / "a.h5", workers=0, size=32, allow_large_images=True)
    report = pack_images(
        source, tmp_path / "b.h5", workers=0, size=32, allow_large_images=True, on_error="skip"
    )  # The JPEGs are decoded smaller.
    assert [key for key, _ in report.skipped] == ["b/5.png"]


def test_an_image_of_182_million_pixels_is_packed_by_a_worker_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from fastload import PackedDataset

    (source := tmp_path / "photos").mkdir()
    with (source / "a.jpg").open("wb") as file:
        Image.new("L", (13_000, 14_000), 77).save(file, "JPEG")
    with pytest.raises(SourceError, match=r"a\.jpg: claims 13000x14000 pixels"):
        pack_images(source, tmp_path / "a.h5", workers=1)
    pack_images(source, tmp_path / "a.h5", workers=1, size=(56, 52), allow_large_images=True)
    assert (PackedDataset(tmp_path / "a.h5")[0][0] == 77).all()
    pack_images(source, tmp_path / "b.h5", workers=1, store="source", allow_large_images=True)
    assert (PackedDataset(tmp_path / "b.h5")[0][0] == 77).all()
