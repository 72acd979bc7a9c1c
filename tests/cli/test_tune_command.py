from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from fastload.cli import app

PACKED = {"rows": 200}


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", *map(str, args), "--seconds", "0.6"])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_a_table_and_a_call_to_paste(packed: Path) -> None:
    text = run(packed, "--batch-size", 20, "--cpu-budget", "90%")
    assert "batches of 20; loading may take 90% of " in text
    assert "chosen: " in text and f'FastLoader("{packed}", batch_size=20' in text.splitlines()[-1]
    assert [line for line in text.splitlines() if line.startswith("  ->")] != []


def test_json_is_one_object_and_nothing_else(packed: Path) -> None:
    value = json.loads(run(packed, "--json", "--step", "sim:1000"))
    assert value["call"].startswith("FastLoader(") and value["step"].startswith("simulated")
    assert {"rows", "chosen", "default", "gain", "notes", "cpu_budget"} <= set(value)


def test_a_report_is_written_and_none_is_replaced(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    run(packed, "--report", path)
    page = path.read_text()
    assert "fastload tune file.h5" in page and "FastLoader(" in page
    assert "--force" in run(packed, "--report", path, code=1)
    assert path.read_text() == page


@pytest.mark.parametrize(
    ("args", "why"),
    [(["--cpu-budget", "140%"], "such as 40%"), (["--step", "warp"], "choose"), (["--split", "x"], "split")],
)
def test_bad_options_are_one_line(packed: Path, args: list[str], why: str) -> None:
    text = run(packed, *args, code=1)
    assert why in text and len(text.strip().splitlines()) == 1


def test_ctrl_c_shows_what_is_known(packed: Path) -> None:
    code = "from fastload.cli import main; main()"
    command = [sys.executable, "-c", code, "tune", str(packed), "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "trials" in process.stderr.readline()  # the search begins
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted" in err and ("chosen: " in out or "nothing was measured" in out)
