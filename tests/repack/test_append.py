"""`fastload append`: more images behind those of a packed file, in its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.errors import OptionError, SourceError
from fastload.format.header import read_header
from fastload.inspection.verify import verify_file
from fastload.pack import encode, pack_images
from fastload.repack import append_images, repack_file


def write(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def photos(root: Path, names: dict[str, int], *, first: int = 0, side: int = 8) -> Path:
    """Images in class folders of two splits; each is of one value, its number."""
    number = first
    for name, count in names.items():
        for split in ("train", "val"):
            for _ in range(count):
                write(root / split / name / f"{number:03d}.png", np.full((side, side, 3), number, np.uint8))
                number += 1
    return root


def rows_of(path: Path) -> dict[str, tuple[str, str, int]]:
    """Key -> split, class and value of each row."""
    with h5py.File(path) as file:
        splits, classes = file["split"].attrs["names"], file["labels"].attrs["names"]
        images = [int(image.flat[0]) for image in file["images"]]
        keys, splits, classes = file["key"].asstr()[:], *([*map(bytes.decode, names)] for names in (splits, classes))
        return {
            key: (splits[split], classes[label], value)
            for key, split, label, value in zip(keys, file["split"], file["labels"], images, strict=True)
        }


def test_new_images_lie_behind_the_old_ones_of_their_split_under_the_same_options(tmp_path):
    old = photos(tmp_path / "old", {"cat": 6, "dog": 6})
    more = photos(tmp_path / "more", {"bird": 3, "dog": 4}, first=100)
    out, whole = tmp_path / "a.h5", tmp_path / "new.h5"
    pack_images(old, out, seed=7, size=4, workers=0)
    before = rows_of(out)
    pack_images(more, whole, seed=7, size=4, workers=0)
    report = append_images(out, more, workers=0)
    assert report.images_per_s == pytest.approx(14 / report.seconds)
    after = rows_of(out)
    assert report.num_samples == len(after) == 24 + 14 and before.items() <= after.items()
    assert {name for _, name, _ in after.values()} == {"bird", "cat", "dog"}
    file = read_header(out)
    for split in ("train", "val"):
        keys = [key for key, (name, *_) in after.items() if name == split]
        added = [key for key, (name, *_) in rows_of(whole).items() if name == split]
        assert keys[: -len(added)] == [key for key, (name, *_) in before.items() if name == split]
        assert keys[-len(added) :] == added, "the seed shuffles the new ones as if they were packed by themselves"
    assert file.fields["images"].shape == (4, 4, 3) and verify_file(out).ok
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.h5", "new.h5"]
    again = photos(tmp_path / "again", {"cat": 1}, first=200)
    append_images(out, again, workers=0)
    assert len(rows_of(out)) == 40 and verify_file(out).ok
    assert read_header(out).attrs["pack_options"] == read_header(whole).attrs["pack_options"]


def test_images_of_several_sizes_and_masks_are_appended_too(tmp_path):
    for name, sides in (("old", (8, 9)), ("more", (10, 10))):
        for i in range(6):
            shape = (sides[i % 2], 12)
            write(tmp_path / name / f"images/{name}{i}.png", np.full((*shape, 3), i, np.uint8))
            write(tmp_path / name / f"masks/{name}{i}.png", np.full(shape, 255 * (i % 2), np.uint8))
    out = tmp_path / "a.h5"
    pack_images(tmp_path / "old", out, workers=0)
    append_images(out, tmp_path / "more", workers=0)
    file = read_header(out)
    assert file.num_rows == 12 and file.fields["images"].varied and file.fields["masks"].names == ("0", "255")
    assert verify_file(out).ok


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path):
    out = tmp_path / "a.h5"
    pack_images(photos(tmp_path / "old", {"cat": 2}), out, workers=0, layout="folder")
    with out.open("rb") as reader:
        before = out.read_bytes()
        append_images(out, photos(tmp_path / "more", {"cat": 2}, first=100), workers=0)
        assert reader.read() == before != out.read_bytes()


@pytest.mark.parametrize("stage", ["packing", "writing"])
def test_an_interrupted_append_leaves_the_file_and_goes_on_without_decoding_again(tmp_path, monkeypatch, stage):
    out = tmp_path / "a.h5"
    pack_images(photos(tmp_path / "old", {"cat": 40}, side=16), out, workers=0, layout="folder", chunk_bytes=2000)
    more = photos(tmp_path / "more", {"cat": 30}, first=100, side=16)
    (more / "train/cat/broken.png").write_bytes((more / "train/cat/100.png").read_bytes()[:60])
    Image.new("L", (16, 16)).save(more / "train/cat/gray.png")
    before = out.read_bytes()

    class Stop(Exception):
        pass

    seen = []

    def stop(name, done, total):
        seen.append(name)
        merging = stage == "writing"
        if name == "packing" and done > total / 2 and (not merging or total > 65):
            raise Stop

    with pytest.raises(Stop):
        append_images(out, more, workers=0, on_error="skip", progress=stop)
    assert out.read_bytes() == before
    decoded = []
    decode = encode.decode_image
    monkeypatch.setattr(encode, "decode_image", lambda data, *rest: (decoded.append(data), decode(data, *rest))[1])
    report = append_images(out, more, workers=0, on_error="skip")
    assert len(decoded) < (40 if stage == "packing" else 1), "61 were to be decoded"
    assert len(rows_of(out)) == 141 and verify_file(out).ok
    assert [key for key, _ in report.skipped] == ["train/cat/broken.png"] and report.converted == {
        "L -> RGB of 8 bits": 1
    }
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".a.h5")]


def test_what_does_not_fit_is_refused_by_name_and_the_file_stays(tmp_path):
    out = tmp_path / "a.h5"
    pack_images(photos(tmp_path / "old", {"cat": 2}), out, workers=0, layout="folder")
    before = out.read_bytes()
    with pytest.raises(SourceError, match=r"1 of its 2 .* in .*a\.h5 already: train/cat/000\.png"):
        append_images(out, photos(tmp_path / "same", {"cat": 1}), workers=0)
    with pytest.raises(SourceError, match=r"larger: its samples do not fit .*a\.h5: `images`: .*8, 8, 3.*16, 16"):
        append_images(out, photos(tmp_path / "larger", {"cat": 1}, first=100, side=16), workers=0)
    assert not list(tmp_path.glob(".a.h5*")), "nothing of it is left"
    with pytest.raises(SourceError, match="--bits"):
        deep = tmp_path / "deep"
        write(deep / "train/cat/deep.png", np.full((8, 8), 5, np.uint16))
        write(deep / "val/cat/flat.png", np.full((8, 8, 3), 5, np.uint8))
        append_images(out, deep, workers=0)
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["images"] = np.zeros((4, 8, 8, 3), np.uint8)
    with pytest.raises(OptionError, match="fastload did not write it"):
        append_images(tmp_path / "foreign.h5", tmp_path / "old", workers=0)
    assert out.read_bytes() == before


def test_rows_are_left_out_by_the_patterns_of_their_keys(tmp_path):
    out = tmp_path / "a.h5"
    pack_images(photos(tmp_path / "old", {"cat": 3, "dog": 3}), out, workers=0)
    repack_file(out, tmp_path / "b.h5", without=("train/cat/*", "*/011.png"), workers=0)
    assert set(rows_of(out)) - set(rows_of(tmp_path / "b.h5")) == {
        "train/cat/000.png", "train/cat/001.png", "train/cat/002.png", "val/dog/011.png",
    }  # fmt: skip
    with pytest.raises(OptionError, match="no key fits 'bird"):
        repack_file(out, tmp_path / "c.h5", without=("bird/*",), workers=0)
