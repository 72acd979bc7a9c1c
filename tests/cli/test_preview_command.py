from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from fastload.cli import app
from sample_files import write_packed


def test_the_sheet_is_drawn_beside_the_file_and_not_over_another(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "file.h5", np.zeros((20, 16, 12, 3), np.uint8))
    result = CliRunner().invoke(app, ["preview", str(path), "--count", "7"])
    assert result.exit_code == 0
    assert result.stdout.startswith("7 images of file.h5 drawn in")
    with Image.open(tmp_path / "file.png") as sheet:
        assert sheet.format == "PNG"
    again = CliRunner().invoke(app, ["preview", str(path)])
    assert again.exit_code == 1 and "exists" in again.stderr
    assert CliRunner().invoke(app, ["preview", str(path), "--overwrite"]).exit_code == 0
    assert CliRunner().invoke(app, ["preview", str(path), "-o", str(tmp_path / "grid.png")]).exit_code == 0
    assert (tmp_path / "grid.png").exists()
