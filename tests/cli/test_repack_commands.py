"""`fastload repack`, `merge` and `export`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fastload.cli import app
from fastload.format.header import read_header

PACKED = {"size": (8, 6, 3), "classes": ("cat", "dog"), "splits": {"train": 14, "val": 6}}


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def said(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_repack_says_what_it_wrote(packed_copy: Path, tmp_path: Path) -> None:
    result = run(
        "repack", packed_copy, tmp_path / "b.h5", "--chunk-bytes", "1K", "--split", "train", "--label", "dog",
        "--shuffle", "--seed", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "wrote 7 rows into" in said(result) and "splits train 7" in said(result)
    header = read_header(tmp_path / "b.h5")
    assert (header.seed, header.fields["images"].chunk_rows, header.splits) == (4, 7, {"train": range(7)})
    result = run("repack", packed_copy, tmp_path / "c.h5", "--codec", "gzip:1", "--key", "*1?", "--key", "*05")
    assert result.exit_code == 0 and "wrote 11 rows" in said(result)
    assert read_header(tmp_path / "c.h5").fields["images"].filters == ("deflate",)


def test_merge_says_what_it_joined(packed_copy: Path, tmp_path: Path) -> None:
    assert run("repack", packed_copy, tmp_path / "b.h5").exit_code == 0
    result = run("merge", packed_copy, tmp_path / "b.h5", "-o", tmp_path / "c.h5")
    assert result.exit_code == 0, result.output
    assert "wrote 40 rows into" in said(result) and "splits train 28, val 12" in said(result)
    assert "note Merged file.h5 (20 rows), b.h5 (20 rows)." in said(result)


def test_export_says_what_it_made(packed_copy: Path, tmp_path: Path) -> None:
    result = run("export", packed_copy, tmp_path / "out", "--split", "val")
    assert result.exit_code == 0, result.output
    assert "exported 6 images into" in said(result) and "layout folders" in said(result)
    assert len(list((tmp_path / "out" / "cat").iterdir())) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("repack", "file.h5", "file.h5"), ("repack", "no.h5", "b.h5"), ("repack", "file.h5", "b.h5", "--codec", "zip"),
        ("repack", "file.h5", "b.h5", "--rows", "no.txt"), ("merge", "file.h5", "-o", "b.h5"),
        ("export", "file.h5", "file.h5"), ("export", "file.h5", "out", "--split", "x"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(packed_copy: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    paths = {"file.h5", "b.h5", "no.h5", "no.txt", "out"}
    result = run(*(tmp_path / word if word in paths else word for word in words))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file.h5"]
