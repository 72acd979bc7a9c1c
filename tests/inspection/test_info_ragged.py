"""`fastload info` of files with byte stores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ragged_cases import NUM_ROWS, varied_file, varied_rows
from typer.testing import CliRunner

from fastload.cli import app
from fastload.inspection.info import inspect_file


def test_a_store_is_described(tmp_path: Path) -> None:
    rows = varied_rows()
    found = inspect_file(varied_file(tmp_path / "a.h5", rows, masks=True))
    images, masks = found.stores["images"], found.stores["masks"]
    assert found.layout is None and found.findings == () and list(found.fields)[:2] == ["images", "masks"]
    assert {each.name: each.rows for each in images.encodings} == {"raw": 6, "jpeg": 6}
    assert [(each.name, each.rows, each.share_of_raw) for each in masks.encodings] == [("raw", NUM_ROWS, 1.0)]
    assert (images.num_sizes, images.smallest, images.largest) == (NUM_ROWS, (9, 31), (31, 20))
    assert images.stored_bytes == sum(len(row[0]) if isinstance(row, tuple) else row.nbytes for row in rows)
    assert found.pixel_bytes == images.pixel_bytes == 3 * masks.pixel_bytes
    assert images.allocated_bytes == images.num_chunks * 4096 >= images.stored_bytes
    assert 0 < images.filled <= 1 and images.beyond_chunk == 0 and images.row_bytes == images.stored_bytes // NUM_ROWS
    json.dumps(found.to_dict())


def test_rows_beyond_a_chunk_are_counted(tmp_path: Path) -> None:
    rows = [np.zeros((4 + 40 * (i == 2), 8, 3), np.uint8) for i in range(6)]
    images = inspect_file(varied_file(tmp_path / "a.h5", rows, chunk_bytes=256)).stores["images"]
    assert images.beyond_chunk == 1 and images.chunk_bytes == 256


@pytest.mark.parametrize("size", [None, (16, 20)])
def test_the_command_shows_it(tmp_path: Path, size: tuple[int, int] | None) -> None:
    path = varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=True)
    shown = CliRunner().invoke(app, ["info", str(path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "raw 6 (" in shown.output and "jpeg 6 (" in shown.output and "filled; each row whole in one" in shown.output
    assert ("12 sizes, 9 x 31 to 31 x 20" if size is None else "16 x 20; ") in shown.output
    asked = CliRunner().invoke(app, ["info", str(path), "--json"])
    assert json.loads(asked.output)["stores"]["images"]["num_sizes"] == (NUM_ROWS if size is None else 1)
