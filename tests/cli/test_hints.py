"""What errors say to type: every option that a message names is one of its own command, or of a command it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from commands import run
from PIL import Image

from fastload import pack_images
from fastload.cli import app
from fastload.repack import append_images

_COMMAND = re.compile(r"`fastload (\w+)")
_OPTION = re.compile(r"--[a-z][a-z-]*")


@cache
def options_of(command: str) -> frozenset[str]:
    return frozenset(_OPTION.findall(run(command, "--help").output))


def foreign_options(command: str, message: str) -> set[str]:
    """Returns the options in a message that neither its command has, nor any command that it tells to type."""
    named = {command, *_COMMAND.findall(message)}
    return set(_OPTION.findall(message)) - set().union(*map(options_of, named))


def photos(root: Path, *names: str, first: int = 0, mode: str = "RGB", side: int = 8) -> Path:
    for number, name in enumerate(names, first):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (side, side), number * 5).save(path)
    return root


@pytest.fixture
def file(tmp_path: Path) -> Path:
    source = photos(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png", "b/4.png")
    pack_images(source, tmp_path / "a.h5", workers=0)
    return tmp_path / "a.h5"


def damaged_pixels(path: Path) -> None:
    with h5py.File(path, "r+") as hdf5:
        hdf5["images"][1] += np.uint8(1)


def damaged_labels(path: Path) -> None:
    with h5py.File(path, "r+") as hdf5:
        hdf5["labels"][1] += 1


def all_damaged(path: Path) -> None:
    with h5py.File(path, "r+") as hdf5:
        hdf5["images"][:] += np.uint8(1)


def other_depth(path: Path) -> None:
    photos(path.parent / "more", "a/8.png", mode="I;16")


def no_image(path: Path) -> None:
    photos(path.parent / "more", "a/8.png")
    (path.parent / "more" / "a" / "9.png").write_bytes(b"")


def other_size(path: Path) -> None:
    photos(path.parent / "more", "a/8.png", side=9)
    pack_images(path.parent / "more", path.parent / "b.h5", workers=0, layout="folder")


def exists(path: Path) -> None:
    (path.parent / "out.h5").write_bytes(b"")


def nothing(path: Path) -> None:
    """Leaves all as it is."""


def mask_values(path: Path) -> None:
    more = path.parent / "more"
    photos(more / "images", "8.png", "9.png")
    photos(more / "masks", "8.png", mode="RGB")


def busy(path: Path) -> None:
    (path.parent / "out.h5.journal").write_text("mine")


@pytest.mark.parametrize(
    ("words", "prepare"),
    [
        ("verify a.h5", damaged_pixels),
        ("verify a.h5", damaged_labels),
        ("verify a.h5 --source more", other_depth),
        ("verify a.h5 --source absent", nothing),
        ("verify a.h5 --source photos --root photos", nothing),
        ("merge a.h5 b.h5 -o out.h5", other_size),
        ("merge a.h5 a.h5 -o out.h5", nothing),
        ("merge a.h5 -o out.h5", nothing),
        ("merge a.h5 photos -o out.h5", nothing),
        ("merge a.h5 b.h5 -o absent/out.h5", lambda path: pack_images(path.parent / "photos", path.parent / "b.h5")),
        ("repack a.h5 absent/out.h5", nothing),
        ("repack a.h5 out.h5", exists),
        ("repack a.h5 out.h5", busy),
        ("repack a.h5 out.h5", damaged_pixels),
        ("repack a.h5 out.h5", damaged_labels),
        ("repack a.h5 out.h5 --on-error skip", all_damaged),
        ("repack a.h5 out.h5 --codec lz4", nothing),
        ("repack a.h5 out.h5 --split absent", nothing),
        ("repack a.h5 out.h5 --rows absent", nothing),
        ("append a.h5 more", other_depth),
        ("append a.h5 more", no_image),
        ("append a.h5 more", other_size),
        ("append a.h5 more", mask_values),
        ("append a.h5 photos", nothing),
        ("append a.h5 more", lambda path: (damaged_pixels(path), photos(path.parent / "more", "a/9.png"))),
        ("append photos more", nothing),
        ("export a.h5 out", damaged_pixels),
        ("export a.h5 out", damaged_labels),
        ("export a.h5 photos", nothing),
        ("export a.h5 out --split absent", nothing),
        ("export a.h5 absent/out", nothing),
    ],
)  # fmt: skip
def test_no_message_advises_an_option_that_its_command_lacks(
    file: Path, words: str, prepare: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    prepare(file)
    command, *rest = words.split()
    said = run(command, *rest, "--workers", 0, code=1)
    assert said.stderr.startswith("error: ")
    assert foreign_options(command, said.stderr + said.stdout) == set(), said.stderr


def test_rows_of_other_sources_are_named_and_no_damage(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    photos(file.parent / "more", "b/7.png", "c/8.png", "a/9.png", first=20)
    append_images(file, file.parent / "more", workers=0)
    for source, theirs, others in (("photos", 4, 3), ("more", 3, 4)):
        said = run("verify", file, "--source", source, "--workers", 0)
        assert f"not of this source: {others} of 7 rows (the file was joined from several" in said.stdout
        assert f"source: {theirs} of {theirs} images decode to exactly the packed pixels" in said.stdout
        assert ("  c/8.png" in said.stdout) == (source == "photos") and "missing" not in said.stdout
    run("repack", file, "shuffled.h5", "--shuffle", "--label", "b", "--label", "c")
    assert "not of this source: 2 of 4 rows" in run("verify", "shuffled.h5", "--source", "photos").stdout
    Image.new("RGB", (8, 8)).save("more/c/8.png")
    assert "row 5 (c/8.png): pixels differ" in run("verify", file, "--source", "more", code=1).stdout


@pytest.mark.parametrize(
    "words",
    [
        "pack SRC OUT --store x", "pack SRC OUT --codec x", "pack SRC OUT --shards 0", "pack SRC OUT --workers -1",
        "pack SRC OUT --max-size 0", "pack SRC OUT --limit 0", "pack SRC OUT --captions x", "pack SRC OUT --spread -1",
        "pack SRC OUT --mask-values 1=a,2=a", "pack SRC OUT --bits 16", "pack SRC OUT --layout x",
        "pack SRC OUT --seed -1",
        "pack SRC OUT --chunk-bytes 0", "pack SRC OUT --size 100000",
        "export FILE OUT --shard-bytes 1", "repack FILE OUT --codec x", "repack FILE OUT --chunk-bytes 0",
        "info FILE --shuffle-quality --batch-size 5000", "bench FILE --seconds 0", "bench FILE --workers 0",
        "tune FILE --cpu-budget 0%", "tune FILE --seconds 0", "preview FILE --count 0", "verify FILE --workers -1",
    ],
)  # fmt: skip
def test_errors_name_options_as_they_are_typed(words, image_folder, packed_copy, tmp_path):
    paths = {"SRC": image_folder(), "OUT": tmp_path / "out.h5", "FILE": packed_copy}
    result = CliRunner().invoke(app, [str(paths.get(word, word)) for word in words.split()])
    if result.exit_code:
        assert not re.search(r"(?<![\w-])[a-z_]{3,}=", result.stderr), result.stderr
