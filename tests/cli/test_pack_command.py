from __future__ import annotations

import time

import commands
import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.cli.pack import print_packed
from fastload.errors import OptionError
from fastload.format.header import read_header
from fastload.options.parse import parse_bytes, parse_size
from fastload.pack import PackReport


def run(*words, code=0):
    return commands.run("pack", *words, "--workers", 0, code=code)


def said(*words):
    return commands.said("pack", *words, "--workers", 0)


def refused(*words):
    return commands.refused("pack", *words, "--workers", 0)


def test_the_summary_says_what_was_packed_and_an_output_that_exists_is_kept_unless_overwrite(image_folder, tmp_path):
    source = image_folder()
    text = said(source, tmp_path / "a.h5")
    assert "packed 20 images of 12 x 16 x 3 uint8 into" in text
    for word in ("splits all 20", "images/s", "in all", "size", "layout folder"):
        assert word in text
    assert read_header(tmp_path / "a.h5").num_rows == 20
    assert "--overwrite" in refused(source, tmp_path / "a.h5")
    run(source, tmp_path / "a.h5", "--overwrite", "--seed", "2")
    assert read_header(tmp_path / "a.h5").seed == 2


def test_options_reach_the_packer(image_folder, tmp_path):
    run(
        image_folder(), tmp_path / "a.h5", "--size", "10x8", "--fit", "pad", "--mode", "gray", "--seed", "3",
        "--no-shuffle", "--chunk-bytes", "400", "--limit", "6", "--layout", "folder",
    )  # fmt: skip
    header = read_header(tmp_path / "a.h5")
    assert header.fields["images"].shape == (10, 8, 1)
    assert (header.num_rows, header.seed, header.shuffled) == (6, 3, False)
    assert header.fields["images"].chunk_rows == 5
    with h5py.File(tmp_path / "a.h5") as file:
        assert sorted(file["key"][()].tolist()) == file["key"][()].tolist()


def test_skipped_and_converted_images_are_told(image_folder, tmp_path):
    source = image_folder()
    (source / "cat" / "0003.jpg").write_bytes(b"")
    Image.fromarray(np.zeros((12, 16), np.uint8)).save(source / "dog" / "0001.jpg")
    error = refused(source, tmp_path / "a.h5")
    assert "cat/0003.jpg" in error and "--on-error skip" in error
    assert not (tmp_path / "a.h5").exists()
    text = said(source, tmp_path / "a.h5", "--on-error", "skip")
    assert "packed 19 images" in text and "skipped 1 cat/0003.jpg: " in text
    assert "converted L -> RGB" in text and ": 1" in text


def test_a_dry_run_writes_nothing(image_folder, tmp_path):
    source = image_folder()
    text = said(source, tmp_path / "out.h5", "--dry-run")
    assert "would pack 20 images (layout folder) as 12 x 16 x 3 uint8; nothing was written" in text
    assert "sizes 12x16 (20)" in text and "needed 32.0 KiB; free: " in text
    assert "stores, from 20 samples of these images on this machine" in text
    assert "store size of raw from memory from this disk sampled rows raw 11.2 KiB 100%" in text
    assert "20 raw jpeg:90" in text and "20 jpeg source" in text and "mixed:0.5" in text
    assert "disk " in text and "pick raw: its 11.2 KiB fit in the " in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["photos"]
    (tmp_path / "out.h5").write_bytes(b"mine")
    assert "out.h5: exists; packing needs `--overwrite`" in said(source, tmp_path / "out.h5", "--dry-run")
    assert (tmp_path / "out.h5").read_bytes() == b"mine"
    assert said(source, "--dry-run").startswith("would pack 20 images")
    assert "Missing argument 'OUT.h5'" in run(source, code=2).stderr


def test_a_dry_run_measures_what_is_asked_for_and_tells_how_it_is_stored_and_what_is_damaged(image_folder, tmp_path):
    source = image_folder()
    first = sorted(source.rglob("*.jpg"))[0]
    first.write_bytes(first.read_bytes()[:-30])
    text = said(source, tmp_path / "a.h5", "--dry-run", "--store", "jpeg:40")
    assert "jpeg:40" in text and "jpeg:90" not in text
    assert "stores, from 19 samples" in text
    assert "note 1 more samples could not be decoded; `fastload pack` names them" in text
    # How images of several sizes are stored.
    image_folder(name="all/a")
    image_folder(name="all/b", size=(30, 20), classes=("x",))
    text = said(
        tmp_path / "all",
        tmp_path / "o.h5",
        "--dry-run",
        "--layout",
        "folder",
        "--store",
        "mixed:0.5",
        "--max-size",
        "16",
    )
    assert "would pack 30 images (layout folder) as H x W x 3 (sizes vary) uint8" in text
    assert "store mixed:0.5, shorter side at most 16" in text and "needed" in text
    text = said(tmp_path / "all", tmp_path / "o.h5", "--dry-run", "--layout", "folder", "--codec", "zstd")
    assert "store raw, pixels with zstd:3 needed" in text


def test_the_summary_tells_encodings_and_what_they_save(tmp_path, capsys):
    report = PackReport(
        tmp_path / "a.h5", "folder", 4, (0, 0, 3), "uint8", ("masks",), {"all": 4}, {}, (), (), 36_000, 1.0, 4.0, 1, 0,
        1, store="source", encodings={"raw": 1, "jpeg": 3, "zstd": 0}, pixel_bytes=720_140,
    )  # fmt: skip
    print_packed(report, overwrite=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "packed 4 images of H x W x 3 (sizes vary) uint8 into" in text
    assert "store source: 3 jpeg, 1 raw" in text and "5.0% of the 703.3 KiB that raw pixels take" in text


def test_wrong_usage_is_exit_code_2_and_values_without_meaning_are_one_line(image_folder, tmp_path):
    source = image_folder()
    for words in ("--size abc", "--fit squash", "--chunk-bytes 8apples", "--seed x", "--nope"):
        run(source, tmp_path / "a.h5", *words.split(), code=2)
    for words in ("--layout nope", "--limit 0", "--size 0", "--seed -1", "--store gif", "--codec lzf"):
        refused(source, tmp_path / "a.h5", *words.split())
    assert not (tmp_path / "a.h5").exists()


def test_sizes_and_numbers_of_bytes_are_parsed_and_what_is_none_is_refused():
    assert [parse_size(text) for text in ("224", "218x178", " 10 X 8 ")] == [224, (218, 178), (10, 8)]
    counts = {"8MiB": 2**23, "8M": 2**23, "8388608": 2**23, "512K": 2**19, "1.5 GiB": 3 * 2**29, "2MB": 2_000_000}
    assert {text: parse_bytes(text) for text in counts} == counts
    for text in ("", "x", "-3", "8XB", "1e3"):
        with pytest.raises(OptionError):
            parse_bytes(text)


def test_ctrl_c_says_that_the_same_command_continues(image_folder, tmp_path):
    source = image_folder(per_class=1000)
    words = ("pack", source, tmp_path / "a.h5", "--workers", 1, "--chunk-bytes", "2K")

    def begun(process):
        while process.poll() is None and not (tmp_path / "a.h5.part").exists():
            time.sleep(0.01)

    _, error = commands.interrupted(*words, when=begun)
    # On a slow machine, lines of progress come before it.
    assert error.splitlines()[-1] == "error: interrupted; the same command continues where it stopped."
    assert not (tmp_path / "a.h5").exists()
    assert "packed 2,000 images" in commands.run(*words).stdout


def test_jpegs_that_libjpeg_warns_of_are_named_or_left_out_with_strict(tmp_path):
    for i in range(3):
        path = tmp_path / "s" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (90, 90, 3), np.uint8)).save(path, quality=95)
    data = path.read_bytes()
    path.write_bytes(data[:2000] + bytes(4096) + data[6096:])
    text = said(tmp_path / "s", tmp_path / "a.h5")
    assert "packed 3 images" in text and "warned 1 packed though libjpeg warns of them; `--strict`" in text
    assert "2.jpg: Corrupt JPEG data: " in text
    text = said(tmp_path / "s", tmp_path / "b.h5", "--strict")
    assert "packed 2 images" in text and "skipped 1 2.jpg: libjpeg warns of it: Corrupt JPEG data: " in text
