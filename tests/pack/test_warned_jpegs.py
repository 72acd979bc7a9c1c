"""JPEGs that libjpeg decodes with a warning: packed and named, or left out with `strict`; the loader reads the same."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from golden_sources import png, write
from interrupted import leftovers, stop_at
from PIL import Image

from fastload import pack_images, verify_file
from fastload.errors import ResumeError, SourceError
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.images.jpeg import libjpeg_warning

SIDE = 120
CORRUPT = "Corrupt JPEG data: "


def jpeg(seed: int, mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def zeroed(data: bytes) -> bytes:
    """With 4,096 zeroed bytes in the middle, as where a block of the disk was lost."""
    middle = len(data) // 2
    return data[:middle] + bytes(4096) + data[middle + 4096 :]


def flipped(data: bytes) -> bytes:
    """With bits of the image data flipped, so that it is out of step behind them."""
    middle = len(data) // 2
    return (
        data[:middle]
        + bytes(byte ^ 0x2A for byte in data[middle : middle + 40]).replace(b"\xff", b"\xfe")
        + (data[middle + 40 :])
    )


WARNED = {"b/03.jpg": zeroed(jpeg(3)), "a/04.jpg": zeroed(jpeg(4, progressive=True)), "a/10.jpg": flipped(jpeg(10))}


def source_of(root: Path, count: int = 12) -> Path:
    for i in range(count):
        name = f"{'ab'[i % 2]}/{i:02d}.jpg"
        write(root / name, WARNED.get(name, jpeg(i)))
    return root


OPTIONS: dict[str, Any] = {"chunk_bytes": 3 * SIDE * SIDE * 3, "shuffle": False}


def keys_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [key.decode() for key in file["key"][()]]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"optimize": True}])
def test_a_warning_is_found_in_every_kind_of_jpeg_and_in_no_good_one(options):
    good = jpeg(1, **options)
    # With tables made for the image, a decoder may fall back into step, and has nothing to warn of.
    damaged = [zeroed(good), *([] if options.get("optimize") else [flipped(good)])]
    for data, warns in ((good, False), (good + bytes(500), False), *((data, True) for data in damaged)):
        assert (libjpeg_warning(data) != "") == warns
        out = np.zeros((SIDE, SIDE, 3), np.uint8)
        assert decode_image(data, Target(SIDE, SIDE, 3, out.dtype), out) == libjpeg_warning(data)
    assert libjpeg_warning(b"no JPEG") == ""


@pytest.mark.parametrize("store", ["raw", "jpeg", "source"])
def test_they_are_packed_and_named_and_the_loader_reads_what_pillow_does(tmp_path, store):
    source = source_of(tmp_path / "s")
    report = pack_images(source, tmp_path / "o.h5", workers=0, store=store, **OPTIONS)
    assert report.num_samples == 12 and not report.skipped
    # JPEGs that are kept are not decoded; those that hold many zeros are.
    found = set(WARNED) - ({"a/10.jpg"} if store == "source" else set())
    assert {key for key, _ in report.warned} == found
    assert all(warning.startswith(CORRUPT) for _, warning in report.warned)
    assert verify_file(tmp_path / "o.h5", workers=0).ok
    pytest.importorskip("torch")
    from fastload import PackedDataset

    dataset = PackedDataset(tmp_path / "o.h5", fields=("images",))
    for row, key in enumerate(keys_of(tmp_path / "o.h5")):
        with Image.open(source / key) as image:
            wanted = np.asarray(image.convert("RGB"))
        if store != "jpeg":
            np.testing.assert_array_equal(dataset[row][0].permute(1, 2, 0).numpy(), wanted)


@pytest.mark.parametrize("store", ["raw", "jpeg", "source"])
@pytest.mark.parametrize("workers", [0, 3])
def test_strict_leaves_them_out_and_the_rest_is_as_without_them(tmp_path, store, workers):
    source = source_of(tmp_path / "s")
    options = {**OPTIONS, "workers": workers, "store": store, "strict": True}
    report = pack_images(source, tmp_path / "o.h5", **options)
    assert sorted(key for key, _ in report.skipped) == sorted(WARNED) and not report.warned
    assert all("libjpeg warns of it: Corrupt JPEG data: " in reason for _, reason in report.skipped)
    for name in WARNED:
        (source / name).unlink()
    again = pack_images(source, tmp_path / "good.h5", **options)
    assert report.path.read_bytes() == again.path.read_bytes()


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_strict_with_masks_leaves_image_and_mask_out(tmp_path, codec):
    """Of rows that are compressed in chunks, too: those behind the first that is left out are in other chunks then."""
    for i in range(14):
        write(tmp_path / f"s/images/{i:02d}.jpg", zeroed(jpeg(i)) if i in (4, 9) else jpeg(i))
        write(tmp_path / f"s/masks/{i:02d}.png", png(np.full((SIDE, SIDE), i, np.uint8)))
    options = {**OPTIONS, "workers": 0, "strict": True, "codec": codec}
    report = pack_images(tmp_path / "s", tmp_path / "o.h5", **options)
    assert [key for key, _ in report.skipped] == ["images/04.jpg", "images/09.jpg"]
    assert verify_file(report.path, workers=0).ok and leftovers(report.path) == []
    for i in (4, 9):
        (tmp_path / f"s/images/{i:02d}.jpg").unlink()
        (tmp_path / f"s/masks/{i:02d}.png").unlink()
    again = pack_images(tmp_path / "s", tmp_path / "good.h5", **options)
    assert report.path.read_bytes() == again.path.read_bytes()


def test_a_mask_that_cannot_be_decoded_fails_a_strict_pack_also_of_a_warned_image(tmp_path):
    write(tmp_path / "s/images/0.jpg", zeroed(jpeg(0)))
    write(tmp_path / "s/images/1.jpg", jpeg(1))
    for i in range(2):
        write(tmp_path / f"s/masks/{i}.png", png(np.full((SIDE, SIDE), i, np.uint8)))
    mask = tmp_path / "s/masks/0.png"
    mask.write_bytes(mask.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"images/0\.jpg: its mask"):
        pack_images(tmp_path / "s", tmp_path / "o.h5", workers=0, strict=True, **OPTIONS)


def test_what_cannot_be_decoded_at_all_still_ends_a_strict_pack(tmp_path):
    source = source_of(tmp_path / "s")
    data = (source / "a/06.jpg").read_bytes()
    (source / "a/06.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"1 of 12 images cannot be read: a/06\.jpg"):
        pack_images(source, tmp_path / "o.h5", workers=0, strict=True, **OPTIONS)
    report = pack_images(source, tmp_path / "o.h5", workers=0, strict=True, on_error="skip", **OPTIONS)
    assert sorted(key for key, _ in report.skipped) == sorted([*WARNED, "a/06.jpg"])


@pytest.mark.parametrize("strict", [False, True])
def test_interrupted_and_continued_it_is_the_same_file_and_report(tmp_path, strict):
    source = source_of(tmp_path / "s")
    options = {**OPTIONS, "workers": 0, "strict": strict}
    whole = pack_images(source, tmp_path / "whole.h5", **options)
    with pytest.raises(KeyboardInterrupt):
        pack_images(source, tmp_path / "o.h5", progress=stop_at(2, "packing"), **options)
    if not strict:
        with pytest.raises(ResumeError, match="option strict was None, now it is True"):
            pack_images(source, tmp_path / "o.h5", **{**options, "strict": True})
    report = pack_images(source, tmp_path / "o.h5", **options)
    assert report.chunks_kept and report.path.read_bytes() == whole.path.read_bytes()
    assert report.warned == whole.warned and report.skipped == whole.skipped
