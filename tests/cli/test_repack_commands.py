"""`fastload repack`, `merge` and `export`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fastload.cli import app
from fastload.format import read_header
from fastload.layout import write_packed
from fastload.sources.listing import Column


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 6, 3), dtype=np.uint8)
    labels = Column(np.arange(20) % 2, {"names": ("cat", "dog")})
    return write_packed(tmp_path / "a.h5", images, {"labels": labels}, splits={"train": 14, "val": 6})


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def said(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_repack_says_what_it_wrote(packed: Path, tmp_path: Path) -> None:
    result = run(
        "repack", packed, tmp_path / "b.h5", "--chunk-bytes", "1K", "--split", "train", "--label", "dog", "--shuffle",
        "--seed", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "wrote 7 rows into" in said(result) and "splits train 7" in said(result)
    header = read_header(tmp_path / "b.h5")
    assert (header.seed, header.fields["images"].chunk_rows, header.splits) == (4, 7, {"train": range(7)})
    result = run("repack", packed, tmp_path / "c.h5", "--codec", "gzip:1", "--key", "*1?", "--key", "*05")
    assert result.exit_code == 0 and "wrote 11 rows" in said(result)
    assert read_header(tmp_path / "c.h5").fields["images"].filters == ("deflate",)


def test_merge_says_what_it_joined(packed: Path, tmp_path: Path) -> None:
    assert run("repack", packed, tmp_path / "b.h5").exit_code == 0
    result = run("merge", packed, tmp_path / "b.h5", "-o", tmp_path / "c.h5")
    assert result.exit_code == 0, result.output
    assert "wrote 40 rows into" in said(result) and "splits train 28, val 12" in said(result)
    assert "note Merged a.h5 (20 rows), b.h5 (20 rows)." in said(result)


def test_export_says_what_it_made(packed: Path, tmp_path: Path) -> None:
    result = run("export", packed, tmp_path / "out", "--split", "val")
    assert result.exit_code == 0, result.output
    assert "exported 6 images into" in said(result) and "layout folders" in said(result)
    assert len(list((tmp_path / "out" / "cat").iterdir())) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("repack", "a.h5", "a.h5"), ("repack", "no.h5", "b.h5"), ("repack", "a.h5", "b.h5", "--codec", "zip"),
        ("repack", "a.h5", "b.h5", "--rows", "no.txt"), ("merge", "a.h5", "-o", "b.h5"),
        ("export", "a.h5", "a.h5"), ("export", "a.h5", "out", "--split", "x"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(packed: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    paths = {"a.h5", "b.h5", "no.h5", "no.txt", "out"}
    result = run(*(tmp_path / word if word in paths else word for word in words))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
