"""The examples of README.md and docs/*.md, run as they stand: a test a page, in a folder and namespace of its own.

`python` blocks of a page share one namespace, `console` blocks are commands, and of a `diff` both sides are Python: the
old one (where what it imports is installed) and the new one. A `diff` with `+++ PATH` shows lines of that file, which
tests/tools/test_beginnings.py runs. A `python` block that begins with a file's name, as
`# my_data.py`, is that file. Everything else is not run: `py` is Python that needs another library, `sh` commands of
other programs, `text` output, and a name in braces a directive of the site.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from readme_diffs import BLOCK, FileDiff, file_diffs, sides
from record_files import image_file, write_mds

import fastload
import fastload.format

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "console", "diff")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
# What a page may name without making it first: file -> how it is packed.
GIVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "photos.h5": ("photos", {}),
    "varied.h5": ("phone", {}),
    "kept.h5": ("phone", {"store": "source", "max_size": 512}),
    "cells.h5": ("cells", {"size": 32}),
}


class Block(NamedTuple):
    """A fenced block of a page: its mark (`python`, ...) and its text."""

    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def commands(blocks: list[Block]) -> list[str]:
    lines = (line for kind, text in blocks if kind == "console" for line in text.splitlines())
    return [line[2:] for line in lines if line.startswith("$ ")]


def is_installed(code: str) -> bool:
    """Whether every package that the code imports is there."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in names)


def draw(folder: Path, count: int, sizes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 256, (*sizes[i % len(sizes)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples speak of: photos/ with splits, phone/ of several sizes, birds.csv, shards, masks."""
    folder = tmp_path_factory.mktemp("given")
    for split, count in (("train", 48), ("val", 20)):
        for seed, label in enumerate(("cat", "dog")):
            draw(folder / "photos" / split / label, count, [(24, 32)], seed)
    for seed, label in enumerate(("inside", "outside")):
        draw(folder / "phone" / label, 15, [(40, 60), (60, 40), (50, 50)], seed)
    # Masks: of classes, of 0 and 255 at half the size, and of colours.
    draw(folder / "new-photos" / "train" / "bird", 2, [(24, 32)], 9)
    masks = {"cells": ("L", 40, 1), "people": ("L", 20, 255), "streets": ("RGB", 40, (64, 64, 0))}
    for name, (mode, side, value) in masks.items():
        draw(folder / name / "images", 6, [(40, 40)], 5)
        (folder / name / "masks").mkdir()
        for image in (folder / name / "images").iterdir():
            Image.new(mode, (side, side), value).save(folder / name / "masks" / f"{image.stem}.png")
    (folder / "streets" / "class_dict.csv").write_text("name,r,g,b\nTree,64,64,0\nVoid,0,0,0\n")
    samples = [[image_file(i, (24, 32, 3), "JPEG"), np.int64(i % 2).tobytes()] for i in range(40)]
    write_mds(folder / "mds", {"image": "jpeg", "label": "int"}, samples, shards=2)
    draw(folder / "birds", 4, [(40, 60)], 6)
    rows = [f"birds/{i:03d}.jpg,{species},{i}" for i, species in enumerate(("owl", "wren", "owl", "kite"))]
    (folder / "birds.csv").write_text("\n".join(["file,species,age", *rows]))
    return folder


@pytest.fixture
def beginning(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all of it, which is the current one; modules that the page writes are forgotten afterwards."""
    folder = tmp_path / "page"
    shutil.copytree(given, folder, ignore=lambda _, names: [name for name in names if name.endswith(".h5")])
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT / "tools" / "examples")
    monkeypatch.syspath_prepend(folder)  # for the files, as where a script lies
    yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def run_command(line: str) -> None:
    words = shlex.split(line)
    assert words[0] == "fastload", f"a console block runs fastload only, not {words[0]}"
    script = Path(sys.executable).with_name("fastload")
    start = [str(script)] if script.exists() else [sys.executable, "-c", "from fastload.cli import main; main()"]
    # The very package under test, also when it comes from a checkout by a relative PYTHONPATH.
    here = str(Path(sys.executable).parent)  # the `python` of the examples is this one
    env = os.environ | {"PYTHONPATH": str(Path(fastload.__file__).parents[1])}
    env["PATH"] = os.pathsep.join([here, os.environ.get("PATH", "")])
    env.pop("PYTHONSAFEPATH", None)  # of tools/test.sh: a user's script finds what lies beside it
    done = subprocess.run([*start, *words[1:]], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def provide(blocks: list[Block], given: Path, folder: Path) -> None:
    """Copies the packed files that a page names and does not pack itself; each is packed once for all pages."""
    used = "\n".join(text for kind, text in blocks if kind in RUN)
    for name, (source, options) in GIVEN.items():
        first_use = re.search(rf"^.*(?<![\w/.-]){re.escape(name)}", used, re.MULTILINE)
        if first_use is None or first_use[0].startswith("$ fastload pack"):
            continue
        if not (given / name).exists():
            fastload.pack_images(given / source, given / name, **options)
        shutil.copy(given / name, folder / name)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if page.exists() and any(kind in RUN for kind, _ in blocks_of(page))
    ],
)
def test_every_example_runs(page: Path, given: Path, beginning: Path):
    blocks = blocks_of(page)
    provide(blocks, given, beginning)
    namespace: dict[str, object] = {"__name__": "page"}
    for kind, text in blocks:
        if kind == "python" and (name := FILE_NAME.match(text)):
            (beginning / name[1]).write_text(text)
            importlib.invalidate_caches()
        elif kind == "python":
            exec(compile(text, str(page), "exec"), namespace)
        elif kind == "diff" and FileDiff.of(text) is None:
            before, after = sides(text)
            if is_installed(before):
                exec(compile(before, f"{page} (before)", "exec"), dict(namespace))
            exec(compile(after, f"{page} (after)", "exec"), namespace)
        elif kind == "console":
            for line in commands([Block(kind, text)]):
                run_command(line)
    for line in commands(blocks):
        for written in re.findall(r"(?:-o|--output|--report) (\S+)", line):
            assert Path(written).exists(), f"{line} wrote no {written}"


def test_the_pages_have_kept_their_examples():
    kinds = {page.name: [kind for kind, _ in blocks_of(page)] for page in PAGES}
    shown = [found.path.name for found in file_diffs()]
    assert shown == ["folder.py", "dataloader.py", "own_dataset.py"], (
        "the README shows three beginnings, before and after"
    )
    assert sum(any(kind in RUN for kind in of_page) for of_page in kinds.values()) >= 5


def test_python_blocks_do_not_hide_behind_other_names_and_nothing_is_installed_by_a_name_of_others():
    for page in PAGES:
        for kind, text in blocks_of(page):
            assert kind in (*RUN, "py", "sh", "text") or re.fullmatch(r"\{[a-z:-]+\}", kind), f"{page}: ```{kind}"
            if kind == "sh":
                assert not re.search(r"^fastload ", text, re.MULTILINE), f"{page}: use a console block: it is run"
            if kind == "py":
                assert "import fastload" not in text and "from fastload" not in text, f"{page}: use a python block"
        text = page.read_text()
        assert not re.search(r"pip3? install[^\n`]*\bfastload\b(?!-hdf5)|\bfastload\[", text), page


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_between_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
            if re.match(r"\w+:", target):
                continue
            name, _, anchor = target.partition("#")
            other = (page.parent / name) if name else page
            assert other.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(other), f"{page}: {target}"


PLACES = ("fastload", "tests", "tools", "benchmarks", "docs")
PACKAGES = "|".join(path.parent.name for path in (ROOT / "fastload").glob("*/__init__.py"))


def test_every_path_module_and_public_name_that_a_page_names_is_there():
    """A name in capitals, as in `sources/NAME.py`, stands for any; a changelog may name what is gone."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        named = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(PLACES)})/[\w/.*-]*\w\*?(?:\.\w+)?", text))
        named |= {f"fastload/{name}" for name in re.findall(rf"`((?:{PACKAGES})/[\w/]*\.py)`", text)}
        for name in named:
            assert any(ROOT.glob(name.replace("NAME", "*"))), f"{page.name} names {name}"
        for name in re.findall(r"(?<![\w./-])fastload(?:\.[a-z]\w*)+", text):
            if name.endswith((".h5", ".json", ".wait")):  # files, and the beginning of the ranges that a profiler shows
                continue
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                raise AssertionError(f"{page.name} names {name}") from error


def test_the_page_on_the_file_names_every_dataset_and_attribute_of_the_definition():
    definition = (fastload.format.__doc__ or "").partition("\nA packed file is a standard HDF5 file")[2]
    defined = set(re.findall(r"`(\w+)`", definition))
    assert {"images", "masks", "digest", "images_offset", "row_shape", "header_digest"} <= defined
    page = (ROOT / "docs" / "file-format.md").read_text()
    assert defined <= set(re.findall(r"`(\w+)`", page))
