from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")  # the command measures a loader

from fastload.cli import app

PACKED = {"rows": 96, "classes": "abc"}


def bench(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, words), "--seconds", "0.2"])


def refused(result: Result) -> str:
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_the_figures_are_shown_and_the_verdict_comes_last(packed):
    result = bench(packed, "--step", "sim:0.5x", "--batch-size", 8)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "file.h5: 96 images of 16 x 12 x 3, batches of 8"
    for name in ("loader alone", "over np.take", "CPU", "first batch", "training", "utilization", "stall share",
                 "headspace"):  # fmt: skip
        assert any(line.startswith(f"  {name} ") for line in lines), name
    assert lines[-1].startswith("verdict: ")


def test_json_is_one_object_and_nothing_else(packed):
    found = json.loads(bench(packed, "--json", "--step", "sim:1000", "--batch-size", 8).stdout)
    assert found["version"] == 1 and found["file"] == "file.h5"
    assert found["alone"]["over_take"]["count"] == 5
    assert 0 < found["loop"]["utilization"] <= 1
    assert found["loop"]["measured"]["verdict"]["cause"]
    assert found["options"]["step"] == "sim:1000" and found["interrupted"] is False


def test_faults_and_plain_ways_have_their_lines(packed):
    words = ("--inject", "stall=1@2", "--inject", "kill-worker", "--compare", "--workers", 1, "--batch-size", 4)
    result = bench(packed, *words)
    assert result.exit_code == 0, result.stderr
    assert "DataLoader(num_workers=1), the packed file" in result.stdout
    assert "  stall=1@2" in result.stdout and "reads delayed by" in result.stdout
    assert "the loop had a WorkerError, which names it" in result.stdout
    assert "96 samples were loaded in all, each exactly once" in result.stdout


def test_a_report_holds_all_loops_that_were_metered(packed, tmp_path):
    pytest.importorskip("jinja2")
    out = tmp_path / "out.html"
    result = bench(packed, "--step", "sim:1000", "--batch-size", 8, "--inject", "slow-disk=1", "--report", out)
    assert result.exit_code == 0, result.stderr
    text = out.read_text()
    assert "fastload bench file.h5, slow-disk=1" in text and "<html" in text


def test_a_report_that_exists_is_refused_before_anything_is_measured(packed, tmp_path):
    out = tmp_path / "out.html"
    out.write_text("mine")
    assert "--force" in refused(bench(packed, "--report", out))
    assert out.read_text() == "mine"
    refused(bench(packed, "--report", tmp_path / "absent" / "out.html"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "sim:fast"], "--step sim:fast: choose"),
        (["--inject", "fire"], "--inject fire: choose"),
        (["--batch-size", "97"], "do not make one batch of 97"),
        (["--split", "test"], "no split 'test'"),
        (["--device", "gpu"], "knows no such device"),
        (["--source", "x"], "only read with --compare"),
        (["--source", "absent", "--compare"], "absent"),
    ],
)
def test_bad_input_is_one_line(packed, words, message):
    assert message in refused(bench(packed, *words))


def test_cuda_without_a_gpu_is_refused(packed):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no CUDA device" in refused(bench(packed, "--device", "cuda"))


def test_no_file_is_one_line(tmp_path):
    assert "absent.h5: no such file" in refused(bench(tmp_path / "absent.h5"))


@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured_and_ends_with_130(packed):
    code = "from fastload.cli import main; main()"
    words = ["bench", str(packed), "--seconds", "60", "--step", "sim:500", "--batch-size", "8"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        # The first line comes after five seconds, of minutes.
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130, said + err
    assert "file.h5: 96 images" in out
    assert "interrupted" in err and "Traceback" not in err
