from __future__ import annotations

import json

import commands
import pytest

torch = pytest.importorskip("torch")  # the command measures a loader

PACKED = {"rows": 96, "classes": "abc"}


def bench(*words, code=0):
    return commands.run("bench", *words, "--seconds", "0.2", code=code)


def refused(*words):
    return commands.refused("bench", *words, "--seconds", "0.2")


def test_the_figures_are_shown_and_the_verdict_comes_last_where_there_is_a_step(packed):
    lines = bench(packed, "--step", "sim:0.5x", "--batch-size", 8).stdout.splitlines()
    assert lines[0] == "file.h5: 96 images of 16 x 12 x 3, batches of 8"
    for name in ("loader alone", "over np.take", "CPU", "first batch", "training", "utilization", "stall share",
                 "headspace"):  # fmt: skip
        assert any(line.startswith(f"  {name} ") for line in lines), name
    assert lines[-1].startswith("verdict: ")
    text = bench(packed).stdout
    assert "loader alone" in text and "training" not in text and "verdict" not in text


def test_json_is_one_object_and_nothing_else(packed):
    found = json.loads(bench(packed, "--json", "--step", "sim:1000", "--batch-size", 8).stdout)
    assert found["schema"] == 1 and found["file"] == "file.h5"
    assert found["alone"]["over_take"]["count"] == 5
    assert 0 < found["loop"]["utilization"] <= 1
    assert found["loop"]["measured"]["verdict"]["cause"]
    assert found["options"]["step"] == "sim:1000" and found["interrupted"] is False


def test_faults_and_plain_ways_have_their_lines_and_a_report_all_loops(packed, tmp_path):
    pytest.importorskip("jinja2")
    out = tmp_path / "out.html"
    words = ("--inject", "stall=1@2", "--inject", "kill-worker", "--compare", "--workers", 1, "--batch-size", 4)
    text = bench(packed, *words, "--step", "sim:1000", "--report", out).stdout
    for said in (
        "DataLoader(num_workers=1), the packed file", "  stall=1@2", "reads delayed by",
        "the loop had a WorkerError, which names it", "96 samples were loaded in all, each exactly once",
    ):  # fmt: skip
        assert said in text
    page = out.read_text()
    assert "fastload bench file.h5, stall=1@2" in page and "<html" in page
    assert "--overwrite" in refused(packed, "--report", out)
    assert out.read_text() == page
    refused(packed, "--report", tmp_path / "absent" / "out.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "sim:fast"], "--step sim:fast: choose"),
        (["--inject", "fire"], "--inject fire: choose"),
        (["--source", "absent", "--compare"], "absent"),
        pytest.param(
            ["--device", "cuda"], "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(packed, words, message):
    assert message in refused(packed, *words)


@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured_and_ends_with_130(packed):
    # The first line on stderr comes as soon as something is measured, of minutes.
    words = ("--seconds", 8, "--step", "sim:500", "--batch-size", 8)
    out, err = commands.interrupted("bench", packed, *words, when=lambda process: process.stderr.readline())
    assert "file.h5: 96 images" in out
    assert "interrupted" in err and "Traceback" not in err
