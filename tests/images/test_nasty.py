"""Every odd file of ../shared/data/nasty: packed as Pillow shows it, or left out with its reason; its neighbours stay.

Needs ../shared/data beside the checkout, and skips without it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin

from fastload import pack_images
from fastload.errors import ImageError, SourceError
from fastload.images.decode import decode_mask
from fastload.images.fit import Target, resample_pixels

SIZE = 48
PIXELS_ARE_DAMAGED = "broken_data_stream.png"
"""The manifest says that it loads, since it asked twice: Pillow's second load gives what came before the damage."""

UNTRIED = "l2rgb_read.bmp"
"""57 bytes that claim 152 million pixels, which the manifest's author did not try to load."""

LARGE_TEXT = "png_decompression_dos.png"
"""Its text is larger than Pillow inflates, and changes no pixel: it is read without."""

PACK = """
    import resource, sys
    from fastload import pack_images

    resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000, resource.RLIM_INFINITY))
    report = pack_images(
        sys.argv[1], sys.argv[2], size=48, mode="rgb", bits=8, on_error="skip", workers=2, chunk_bytes=50_000
    )
    for key, reason in report.skipped:
        print(key, reason, sep="\\t")
"""


@pytest.fixture(scope="module")
def manifest(shared_data: Path) -> dict[str, dict[str, str]]:
    with (shared_data / "nasty" / "manifest.csv").open(newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    del rows[".DS_Store"]  # hidden, and so no part of any folder of images
    return rows


def test_each_is_packed_rightly_or_left_out_and_no_neighbour_changes(tmp_path, shared_data, manifest):
    rng = np.random.default_rng(0)
    for folder in ("a_good", "z_good"):
        (tmp_path / "src" / folder).mkdir(parents=True)
        for i in range(30):
            suffix, shape = ((".jpg", (40, 60, 3)), (".png", (70, 50, 3)), (".png", (30, 30)))[i % 3]
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "src" / folder / f"{i:02d}{suffix}")
    shutil.copytree(shared_data / "nasty" / "files", tmp_path / "src" / "m_nasty")
    output = tmp_path / "o.h5"
    # In a process of bounded memory: what a small file claims must not be believed.
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PACK), tmp_path / "src", output],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    skipped = dict(line.split("\t") for line in result.stdout.splitlines())
    with h5py.File(output) as file:
        packed = dict(zip(file["key"].asstr()[:], file["images"][:], strict=True))
    assert len(packed) + len(skipped) == 60 + len(manifest)
    assert not any("good" in key for key in skipped)
    for key, pixels in packed.items():
        path = tmp_path / "src" / key
        np.testing.assert_array_equal(pixels, as_pillow_shows_it(path.read_bytes(), manifest.get(path.name)), key)
    for name, row in manifest.items():
        expected = expected_reason(row)
        assert (f"m_nasty/{name}" in skipped) == bool(expected), name
        if expected:
            assert re.search(expected, skipped[f"m_nasty/{name}"]), (name, skipped[f"m_nasty/{name}"])


def test_each_alone_gives_the_same(tmp_path, shared_data, manifest):
    for name, row in manifest.items():
        source = tmp_path / name / "src"
        source.mkdir(parents=True)
        shutil.copy(shared_data / "nasty" / "files" / name, source)
        output = tmp_path / name / "o.h5"
        if expected := expected_reason(row):
            with pytest.raises(SourceError, match=rf"1 of 1 images cannot be read: {name}: .*({expected})"):
                pack_images(source, output, size=SIZE, workers=0)
            assert not output.exists(), name
            continue
        # The kind that the file has, whatever it is: nothing is converted for the neighbours' sake.
        report = pack_images(source, output, workers=0)
        with h5py.File(output) as file:
            pixels = file["images"][0]
        assert report.num_samples == 1 and not report.skipped, name
        alone = np.empty((SIZE, SIZE, 3), np.uint8)
        resample_pixels(pixels, Target(SIZE, SIZE, 3, alone.dtype, "crop"), alone)
        data = (source / name).read_bytes()
        np.testing.assert_array_equal(alone, as_pillow_shows_it(data, row), name)


def test_as_a_mask_each_gives_its_index_or_an_image_error(shared_data, manifest):
    decoded = []
    for name in manifest:
        data = (shared_data / "nasty" / "files" / name).read_bytes()
        out = np.empty((SIZE, SIZE), np.uint8)
        with contextlib.suppress(ImageError):
            decode_mask(data, Target(SIZE, SIZE, 3, out.dtype, "crop"), out)
            decoded.append(name)
    assert {"1_trns.png", "l_trns.png", "p_trns_single.png", "pil123p.png", "multipage.tiff"} <= set(decoded)
    assert not any(name.endswith((".jpg", ".webp")) for name in decoded)


def expected_reason(row: dict[str, str]) -> str:
    """What is said of a file that cannot be packed; "" of one that can."""
    if row["file"] == PIXELS_ARE_DAMAGED:
        return "unrecognized data stream"
    if row["file"] == UNTRIED:
        return "truncated|not enough memory"
    if row["file"] == LARGE_TEXT:
        return ""
    said = next((text for text in (row["pillow_open"], row["pillow_load"]) if "Error" in text), "")
    for theirs, ours in (("Bomb", "claims|too large"), ("UnidentifiedImage", "not an image|header is damaged")):
        if theirs in said:
            return ours
    return re.escape(re.sub(r" \(\d+ bytes not processed\)", "", said.partition(": ")[2]))


def as_pillow_shows_it(data: bytes, row: dict[str, str] | None) -> NDArray[np.uint8]:
    """Upright, RGB, of SIZE; row: the manifest's words on it."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 2**30)
        patch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 2**31)
        image: Image.Image = Image.open(io.BytesIO(data))
        if row and row["pillow_warnings"].startswith(("OSError", "SyntaxError")) and image.format == "PNG":
            with pytest.raises((OSError, SyntaxError)):
                image.load()  # what stands behind the pixels is damaged; the pixels are all there
        else:
            try:
                image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            except SyntaxError:  # EXIF that Pillow cannot parse
                image = Image.open(io.BytesIO(data))
        pixels = np.asarray(image) >> 8 if image.mode.startswith("I;16") else np.asarray(image.convert("RGB"))
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    resample_pixels(pixels.astype(np.uint8), Target(SIZE, SIZE, 3, out.dtype, "crop"), out)
    return out
