"""An interrupted pack, continued after its source was repaired: as a whole one of what lies there now."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from golden_sources import png, write
from interrupted import stop_at
from PIL import Image

import fastload.pack.decisions
from fastload import pack_images, verify_file
from fastload.errors import ResumeError, SourceError
from fastload.format.codecs import Codec, decompress_zstd, has_zstd, parse_codec

OPTIONS: dict[str, Any] = {"workers": 0, "chunk_bytes": 1, "shuffle": False}


def picture(path: Path, side: int, seed: int, mode: str = "RGB") -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def cut(path: Path, count: int = 200) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def boxed(root: Path, count: int = 5) -> Path:
    """A table of images of 20x20, each with a box."""
    lines = ["file_name,x,y,width,height"]
    for i in range(count):
        picture(root / f"{i}.png", 20, i)
        lines.append(f"{i}.png,4,4,10,10")
    (root / "t.csv").write_text("\n".join(lines) + "\n")
    return root


def masked(root: Path) -> Path:
    for i in range(4):
        picture(root / "images" / f"{i}.png", 20, i)
        write(root / f"masks/{i}.png", png(np.full((20, 20), i, np.uint8)))
    return root


def stopped(source: Any, output: Path, error: str, **options: Any) -> None:
    with pytest.raises(SourceError, match=error):
        pack_images(source, output, **OPTIONS, **options)


def test_an_image_repaired_with_another_size_has_its_boxes_moved_as_a_whole_pack_does(tmp_path: Path) -> None:
    source, output = boxed(tmp_path / "s"), tmp_path / "o.h5"
    cut(source / "2.png")
    stopped(source, output, "2.png", size=10)
    picture(source / "2.png", 40, 2)
    cut(source / "4.png")
    stopped(source, output, "1 of 5 images.*4.png", size=10)
    picture(source / "4.png", 30, 4)
    report = pack_images(source, output, size=10, **OPTIONS)
    assert report.chunks_kept == 4
    whole = pack_images(source, tmp_path / "whole.h5", size=10, **OPTIONS).path
    assert output.read_bytes() == whole.read_bytes()


def test_a_repaired_image_that_does_not_fit_its_mask_is_refused_or_left_out(tmp_path: Path) -> None:
    source, output = masked(tmp_path / "s"), tmp_path / "o.h5"
    cut(source / "images/2.png")
    stopped(source, output, "images/2.png", size=10)
    picture(source / "images/2.png", 40, 2)
    stopped(source, output, "images/2.png: its mask is 20x20, the image 40x40.*the same command continues", size=10)
    report = pack_images(source, output, size=10, on_error="skip", **OPTIONS)
    assert [(key, reason[:17]) for key, reason in report.skipped] == [("images/2.png", "its mask is 20x20")]
    with h5py.File(output) as file:
        assert file["masks"][:, 0, 0].tolist() == [0, 1, 3]


def test_an_image_that_changes_its_size_between_header_and_pixels_is_found(tmp_path: Path) -> None:
    """Also by a program that keeps its length and time of modification, which are compared before."""
    source, output = masked(tmp_path / "s"), tmp_path / "o.h5"
    image, before = source / "images/3.png", (source / "images/3.png").read_bytes()
    picture(image, 40, 3)
    after = image.read_bytes()
    image.write_bytes(before.ljust(len(after), b"\0"))
    listed = image.stat()

    def replace_last(stage: str, done: int, total: int) -> None:
        if stage == "packing" and done == 1:
            image.write_bytes(after)
            os.utime(image, ns=(listed.st_atime_ns, listed.st_mtime_ns))

    stopped(source, output, "3.png: is 40x40 .width x height. now, and was 20x20", size=10, progress=replace_last)
    image.write_bytes(before)
    assert pack_images(source, output, size=10, **OPTIONS).chunks_kept == 3


@pytest.mark.parametrize(
    ("repair", "options"),
    [
        (lambda path: picture(path, 30, 2), {}),
        (lambda path: picture(path, 20, 2, "RGBA"), {"size": 10}),
        (lambda path: Image.fromarray(np.zeros((20, 20), np.uint16)).save(path), {"size": 10, "mode": "gray"}),
    ],
)
def test_a_repair_that_would_change_what_all_images_become_is_named(
    tmp_path: Path, repair: Callable[[Path], None], options: dict[str, Any]
) -> None:
    source, output = boxed(tmp_path / "s"), tmp_path / "o.h5"
    cut(source / "2.png")
    stopped(source, output, "2.png", **options)
    repair(source / "2.png")
    with pytest.raises(ResumeError, match=r"2.png \([23]0x[23]0, . channels of 1?[86] bits\) changed.*--overwrite"):
        pack_images(source, output, **OPTIONS, **options)
    picture(source / "2.png", 20, 2)
    assert pack_images(source, output, **OPTIONS, **options).chunks_kept == 2


def test_a_header_that_cannot_be_read_any_more_is_skipped_or_refused(tmp_path: Path) -> None:
    source, output = boxed(tmp_path / "s"), tmp_path / "o.h5"
    cut(source / "2.png")
    stopped(source, output, "2.png")
    (source / "2.png").write_bytes(b"nothing")
    stopped(source, output, "1 of 5 images.*2.png.*the same command continues")
    report = pack_images(source, output, on_error="skip", **OPTIONS)
    assert [key for key, _ in report.skipped] == ["2.png"] and report.num_samples == 4


@pytest.mark.parametrize(("value", "kept"), [(1, 5), (200, 0)])
def test_of_a_python_object_only_the_same_images_are_kept(tmp_path: Path, value: int, kept: int) -> None:
    output, png = tmp_path / "o.h5", tmp_path / "5.png"
    picture(png, 30, 0)

    def items(value: int, cut_off: int) -> list[tuple[Any, int]]:
        arrays = [(np.full((30, 30, 3), value, np.uint8), row) for row in range(5)]
        return [*arrays, (png.read_bytes()[: -cut_off or None], 5)]

    stopped(items(1, 300), output, "000005")
    assert pack_images(items(value, 0), output, **OPTIONS).chunks_kept == kept
    whole = pack_images(items(value, 0), tmp_path / "whole.h5", **OPTIONS).path
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(not has_zstd(), reason="needs the extra [zstd]")
@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"codec": "zstd", "size": 12}, {"store": "source"}])
def test_a_pack_begun_before_zstd_frames_had_checksums_is_finished_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source, output = tmp_path / "s", tmp_path / "o.h5"
    for i in range(12):
        pixels = np.full((20 + i, 24, 3), 9 * i, np.uint8)
        write(source / f"{'ab'[i % 2]}/{i:02d}.png", png(pixels))
    with monkeypatch.context() as earlier:

        def parsed(text: str, **more: Any) -> Codec:
            return parse_codec(text, **more)._replace(checksum=False)

        earlier.setattr(fastload.pack.decisions, "parse_codec", parsed)
        earlier.setattr(Codec, "__repr__", lambda codec: f"Codec(name={codec.name!r}, level={codec.level})")
        pack_images(source, tmp_path / "whole.h5", **OPTIONS, **options)
        with pytest.raises(KeyboardInterrupt):
            pack_images(source, output, progress=stop_at(5, "packing"), **OPTIONS, **options)
    report = pack_images(source, output, **OPTIONS, **options)
    assert report.chunks_kept and output.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert verify_file(output).ok
    pack_images(source, tmp_path / "new.h5", **OPTIONS, **options)
    assert ((tmp_path / "new.h5").read_bytes() == output.read_bytes()) == ("codec" not in options)


@pytest.mark.skipif(not has_zstd(), reason="needs the extra [zstd]")
@pytest.mark.parametrize("count", [1, 1000, 131_000, 131_072, 400_000])
def test_zstd_frames_have_checksums_of_their_content(count: int) -> None:
    data = np.random.default_rng(0).bytes(count)
    frame = bytearray(parse_codec("zstd").compress(data))
    assert len(frame) == len(Codec("zstd", 3).compress(data)) + 4
    out = np.empty(len(data), np.uint8)
    decompress_zstd(bytes(frame), out)
    assert out.tobytes() == data
    frame[-1] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        decompress_zstd(bytes(frame), out)
