"""The table of stores that `pack --dry-run` and `info --stores` show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fastload.cli import app
from sample_files import write_packed

ImageFolder = Callable[..., Path]


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_a_dry_run_shows_each_store_and_picks_one(image_folder: ImageFolder, tmp_path: Path) -> None:
    source = image_folder()
    text = run("pack", source, tmp_path / "a.h5", "--dry-run", "--workers", 0)
    assert "stores, from 20 samples of these images on this machine" in text
    assert "store size of raw from memory from this disk sampled rows raw 11.2 KiB 100%" in text
    assert "20 raw jpeg:90" in text and "20 jpeg source" in text and "mixed:0.5" in text
    assert "disk " in text and "pick raw: its 11.2 KiB fit in the " in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["photos"]


def test_what_the_user_asks_for_is_among_them(image_folder: ImageFolder, tmp_path: Path) -> None:
    text = run("pack", image_folder(), tmp_path / "a.h5", "--dry-run", "--workers", 0, "--store", "jpeg:40")
    assert "jpeg:40" in text and "jpeg:90" not in text


def test_a_photo_that_cannot_be_decoded_is_told(image_folder: ImageFolder, tmp_path: Path) -> None:
    source = image_folder()
    first = sorted(source.rglob("*.jpg"))[0]
    first.write_bytes(first.read_bytes()[:-30])
    text = run("pack", source, tmp_path / "a.h5", "--dry-run", "--workers", 0)
    assert "stores, from 19 samples" in text
    assert "note 1 more samples could not be decoded; `fastload pack` names them" in text


def test_info_measures_only_where_it_is_asked(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "a.h5", np.zeros((6, 8, 9, 3), np.uint8))
    assert "from this disk" not in run("info", path)
    assert "pick raw" in run("info", path, "--stores")
    found = json.loads(run("info", path, "--stores", "--json"))["store_estimates"]
    assert found["pick"] == "raw" and found["sampled"] == 6 and set(found["disk"]) == {"bytes_per_s", "told"}
    assert [store["store"] for store in found["stores"]] == ["raw", "jpeg:90", "mixed:0.5"]
    assert "store_estimates" not in json.loads(run("info", path, "--json"))
