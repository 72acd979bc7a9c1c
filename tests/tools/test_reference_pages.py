"""Pages and types that are made from the package say what commands really take and print."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from running_server import serving
from small_files import write_random

from fastload import pack_images
from fastload.cli import app

pytest.importorskip("torch")  # fields of what a loader's measurements hold

from reference_pages import COMMANDS, DOCS, PAGES, ROOT, TITLES, Kind, all_commands, rows, shape
from sample_files import write_ragged


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_package_says(name):
    if not DOCS.is_dir():
        pytest.skip("the tests run without docs/ beside them")
    assert (ROOT / name).read_text() == PAGES[name](), "if it is meant: python tools/refresh_golden.py pages"


def test_every_option_is_on_the_page_and_every_example_is_one_of_its_command():
    page = PAGES["docs/commands.md"]()
    for words, command in all_commands():
        section = page.partition(f"\n## {words}\n")[2].partition("\n## ")[0]
        for option in (one for one in command.params if isinstance(one, click.Option)):
            assert all(re.search(rf"[` /]{name}\b", section) for name in (*option.opts, *option.secondary_opts)), option
        for example in command.examples.splitlines():
            assert example.startswith(f"{words} ") or example == words, example
            arguments = shlex.split(example)[len(words.split()) :]
            command.make_context(words, arguments)  # parses them, and runs nothing


def test_every_field_has_a_text_and_a_type():
    for name in [*dict.fromkeys(name for name, _ in COMMANDS.values()), *TITLES]:
        for path, kind, text in rows(name):
            assert text and str(kind), f"{name}: {path}"


class Seen:
    """Compares JSON with the page, and remembers which objects of it were there."""

    def __init__(self) -> None:
        self.shapes = set[str]()

    def check(self, value: Any, kind: Kind, path: str) -> None:
        assert self.fits(value, kind), f"{path}: {value!r:.80} is no {kind}"
        if kind.name == "or":
            self.check(value, next(part for part in kind.parts if self.fits(value, part)), path)
        elif kind.name == "list":
            for one in value:
                self.check(one, kind.parts[0], f"{path}[]")
        elif kind.name == "map":
            for name, one in value.items():
                self.check(one, kind.parts[0], f"{path}.{name}")
        elif kind.name == "object":
            self.shapes.add(kind.shape)
            for entry in shape(kind.shape):
                if entry.name in value:
                    self.check(value[entry.name], entry.kind, f"{path}.{entry.name}")

    def fits(self, value: Any, kind: Kind) -> bool:
        """Whether a value is of this type; of an object, whether its fields are those of the page, all of them."""
        if kind.name == "or":
            return any(self.fits(value, part) for part in kind.parts)
        if kind.name == "object":
            entries = shape(kind.shape)
            needed = {entry.name for entry in entries if not entry.optional}
            return isinstance(value, dict) and needed <= value.keys() <= {entry.name for entry in entries}
        types: dict[str, Any] = {
            "text": str, "integer": int, "number": int | float, "true or false": bool, "null": type(None),
            "list": list, "map": dict, "any value": object,
        }  # fmt: skip
        return isinstance(value, types[kind.name]) and (kind.name not in ("integer", "number") or value is not True)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def printed(seen: Seen) -> Callable[..., dict[str, Any]]:
    """Runs a command with `--json`, and compares what it prints with the page."""

    def run(name: str, *words: object, code: int = 0) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*name.split(), *map(str, words), "--json"])
        assert result.exit_code == code, result.output
        return compared(seen, name, json.loads(result.stdout))

    return run


def compared(seen: Seen, name: str, value: dict[str, Any]) -> dict[str, Any]:
    assert value.pop("schema") == 1
    seen.check(value, Kind("object", shape=COMMANDS[name][0]), name)
    return value


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json") / "a.h5"
    return write_random(path, rows=96, classes="abc", masks=True, splits={"train": 64, "val": 32}, chunk_rows=8)


def test_info(printed, file, tmp_path):
    found = printed("info", file, "--shuffle-quality", "--stores")
    assert found["layout"] and found["shuffle_quality"]["orders"] and found["store_estimates"]["stores"]
    rows = [np.full((4 + i, 5, 3), i, np.uint8) for i in range(6)]
    assert printed("info", write_ragged(tmp_path / "b.h5", rows))["stores"]["images"]
    with h5py.File(tmp_path / "c.h5", "w") as other:
        other["images"] = np.zeros((4, 8, 8), np.float32)
    assert printed("info", tmp_path / "c.h5")["version"] is None


def test_verify(printed, image_folder, tmp_path):
    source = image_folder()
    pack_images(source, tmp_path / "a.h5", workers=0)
    assert printed("verify", tmp_path / "a.h5", "--source", source, "--workers", 0)["source"]["compared"] == 20
    with h5py.File(tmp_path / "a.h5", "r+") as packed:
        packed["images"][3] = 0
    sorted(source.rglob("*.jpg"))[5].write_bytes(b"")
    found = printed("verify", tmp_path / "a.h5", "--source", source, "--workers", 0, code=1)
    assert found["damaged"] and found["source"]["changed"] and not found["ok"]


def test_bench(printed, seen, file, tmp_path):
    words = ("--step", "sim:2000", "--compare", "--inject", "stall=1@2", "--inject", "kill-worker", "--workers", 1)
    words = (*words, "--batch-size", 8, "--seconds", 0.2, "--report", tmp_path / "a.html")
    found = printed("bench", file, *words)
    assert found["file"] == "a.h5" and len(found["faults"]) == 2 and found["loop"]["measured"]["verdict"]
    assert str(file.parent) not in json.dumps(found), "it names nobody"
    # The report holds the same, and tables, which have their fields of their own in the command's JSON.
    page = (tmp_path / "a.html").read_text()
    runs = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])["runs"]
    for run in runs:
        seen.check(run, Kind("object", shape="Measured"), "report")
    assert runs[0]["tables"]


def test_tune(printed, file):
    found = printed("tune", file, "--seconds", 0.5, "--step", "sim:2000")
    assert found["chosen"]["reason"] and found["rows"] and found["file"] == "a.h5"


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

for images, in DataLoader(TensorDataset(torch.zeros(64, 3, 8, 8)), batch_size=4):
    for _ in range(50):
        images.sum()
torch.save(images, "images.pt")
"""


def test_doctor(seen, tmp_path, monkeypatch, warm_python):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = warm_python.run(
        "-m", "fastload", "doctor", "--json", "out.json", "--", sys.executable, "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = compared(seen, "doctor", json.loads((tmp_path / "out.json").read_text()))
    assert found["verdict"] and found["lanes"] and found["stages"]


def test_the_cache(printed, tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    write_random(tmp_path / "served" / "a.h5", rows=8)
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "served") as server:
        url = f"{server.url}/a.h5"
        assert printed("info", url)["cached"] == str(tmp_path / "cache")
        assert printed("cache list")["datasets"][0]["name"] == url
        assert printed("cache verify")["datasets"][0]["ok"]
        assert printed("cache clear", "--all")["removed"] == [url]


def test_every_object_of_the_page_was_in_some_output(seen):
    """Comes after the others, which compare outputs with the page."""
    named = {name for name, _ in COMMANDS.values()} | set(TITLES)
    for name in list(named):
        named |= {inner for _, kind, _ in rows(name) for _, inner in kind.objects()}
    assert named == seen.shapes
