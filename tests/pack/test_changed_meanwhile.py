"""Source files that somebody writes to or replaces while they are packed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from golden_sources import png, write
from PIL import Image
from small_trees import archived

from fastload import pack_images
from fastload.errors import FileChangedError, ImageError, SourceError
from fastload.pack.plain import from_bytes, to_bytes
from fastload.sources import spans, tree
from fastload.sources.layouts import list_source
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import ListedFile

OTHER = "was written to or replaced since it was listed"


def noise(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (12, 9, 3), np.uint8)).save(path)


def images(root: Path, suffix: str = "jpg") -> Path:
    for i in range(40):
        noise(root / "ab"[i % 2] / f"{i:02d}.{suffix}", i)
    return root


def replaced(path: Path) -> None:
    """By another image of the same size in bytes, as a program does that writes a new file and renames it."""
    Image.fromarray(np.full((12, 9, 3), 7, np.uint8)).save(path.with_suffix(".bmp"))
    os.replace(path.with_suffix(".bmp"), path)


def rewritten(path: Path) -> None:
    data, before = bytearray(path.read_bytes()), path.stat()
    data[-20:-10] = bytes(10)
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def removed(path: Path) -> None:
    path.unlink()


def once(at: str, work: Callable[[], object]) -> Callable[[str, int, int], None]:
    """A progress that does some work at the end of a stage."""
    done: list[int] = []

    def progress(now: str, count: int, total: int) -> None:
        if now == at and count == total and not done:
            done.append(work() is None)

    return progress


OPTIONS: dict[str, Any] = {"chunk_bytes": 1, "shuffle": False}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("store", ["raw", "source"])
@pytest.mark.parametrize(
    ("change", "said"), [(replaced, OTHER), (rewritten, OTHER), (removed, "cannot be read: No such file")]
)
def test_an_image_replaced_meanwhile_is_named_and_never_packed(tmp_path, workers, store, change, said):
    source, output = images(tmp_path / "s"), tmp_path / "o.h5"
    path = source / "b/39.jpg"
    options = {**OPTIONS, "workers": workers, "store": store}
    after_the_headers = once("reading headers", lambda: change(path))
    report = pack_images(source, output, on_error="skip", progress=after_the_headers, **options)
    assert report.skipped == (("b/39.jpg", report.skipped[0][1]),) and said in report.skipped[0][1]
    assert report.num_samples == 39
    with h5py.File(output) as file:
        assert b"b/39.jpg" not in file["key"][()].tolist()


def test_where_none_may_be_left_out_the_same_command_continues_with_the_new_image(tmp_path):
    source, output = images(tmp_path / "s", "png"), tmp_path / "o.h5"
    with pytest.raises(SourceError, match=rf"1 of 40 images.*b/39\.png: {OTHER}.*the same command continues"):
        progress = once("reading headers", lambda: replaced(source / "b/39.png"))
        pack_images(source, output, workers=0, progress=progress, **OPTIONS)
    report = pack_images(source, output, workers=0, **OPTIONS)
    assert report.chunks_kept == 39
    whole = pack_images(source, tmp_path / "whole.h5", workers=0, **OPTIONS).path
    assert output.read_bytes() == whole.read_bytes()


def test_a_mask_replaced_meanwhile_is_an_error_of_its_image(tmp_path):
    for i in range(4):
        noise(tmp_path / f"s/images/{i}.png", i)
        write(tmp_path / f"s/masks/{i}.png", png(np.full((12, 9), i, np.uint8)))

    def other() -> None:
        os.utime(tmp_path / "s/masks/2.png", ns=(0, 0))

    progress = once("reading headers", other)
    report = pack_images(tmp_path / "s", tmp_path / "o.h5", workers=0, on_error="skip", progress=progress, **OPTIONS)
    assert [key for key, _ in report.skipped] == ["images/2.png"]
    assert report.skipped[0][1] == f"its mask {OTHER}"


def touched(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def written_over(path: Path) -> None:
    """In place, by a file of the same size, whose time is set back."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [touched, written_over])
@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_an_archive_that_changes_ends_the_pack(tmp_path, suffix, change):
    archive = archived(images(tmp_path / "s"), tmp_path / f"a{suffix}")
    shutil.rmtree(tmp_path / "s")
    progress = once("reading headers", lambda: change(archive))
    with pytest.raises(FileChangedError, match=rf"a\{suffix}: {OTHER}"):
        pack_images(archive, tmp_path / "o.h5", workers=0, on_error="skip", progress=progress, **OPTIONS)


@pytest.mark.parametrize("kind", ["folder", ".tar", ".zip"])
def test_who_writes_during_a_read_is_seen_behind_it(tmp_path, monkeypatch, kind):
    source = images(tmp_path / "s")
    given = source if kind == "folder" else archived(source, tmp_path / f"a{kind}")
    found = open_tree(given)
    assert found.files.read(3)

    def read_slowly(fd: int, length: int, offset: int) -> bytes:
        data = os.pread(fd, length, offset)
        changed = source / found.names[3] if kind == "folder" else given
        os.utime(changed, ns=(0, 0))
        return data

    monkeypatch.setattr(tree, "read_bytes", read_slowly)
    monkeypatch.setattr(spans, "read_bytes", read_slowly)
    with pytest.raises(ImageError if kind == "folder" else FileChangedError, match=OTHER):
        found.files.read(3)


@pytest.mark.parametrize("change", [touched, written_over])
@pytest.mark.parametrize("name", ["images.npy", "a.h5"])
def test_rows_of_an_array_file_that_changes_are_not_read(tmp_path, name, change):
    path, pixels = tmp_path / name, np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
    if path.suffix == ".npy":
        np.save(path, pixels)
    else:
        with h5py.File(path, "w") as file:
            file["images"] = pixels
    files = list_source(path).files
    out = np.empty((3, 5, 4, 3), np.uint8)
    files.read_rows(np.array([4, 0, 1]), out)
    assert (out == pixels[[4, 0, 1]]).all()
    change(path)
    with pytest.raises(FileChangedError, match=OTHER):
        files.read_rows(np.array([4, 0, 1]), out)


def test_a_listed_file_that_goes_to_another_machine_is_compared_without_what_copies_differ_in(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    there = from_bytes(to_bytes(ListedFile.of(path)))
    shutil.copy2(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    there.require_unchanged()
