from __future__ import annotations

import json
import time

import commands
import pytest

pytest.importorskip("torch")

PACKED = {"rows": 200}


def run(*words):
    return commands.run("tune", *words, "--seconds", "0.6").stdout


def refused(*words):
    return commands.refused("tune", *words, "--seconds", "0.6")


def test_a_table_and_a_call_to_paste_and_a_report_that_replaces_none(packed, tmp_path):
    path = tmp_path / "out.html"
    text = run(packed, "--batch-size", 20, "--cpu-budget", "90%", "--report", path)
    assert "batches of 20; loading may take 90% of " in text
    assert "chosen: " in text and f'FastLoader("{packed}", batch_size=20' in text.splitlines()[-1]
    assert [line for line in text.splitlines() if line.startswith("  ->")] != []
    page = path.read_text()
    assert "fastload tune file.h5" in page and "FastLoader(" in page
    assert "--overwrite" in refused(packed, "--report", path)
    assert path.read_text() == page


def test_json_is_one_object_and_nothing_else(packed):
    value = json.loads(run(packed, "--json", "--step", "sim:1000"))
    assert value["call"].startswith("FastLoader(") and value["step"].startswith("simulated")
    assert {"rows", "chosen", "default", "gain", "notes", "cpu_budget"} <= set(value)


@pytest.mark.parametrize(
    ("args", "why"),
    [(["--cpu-budget", "140%"], "such as 40%"), (["--step", "warp"], "choose"), (["--split", "x"], "split")],
)
def test_bad_options_are_one_line(packed, args, why):
    assert why in refused(packed, *args)


def test_ctrl_c_shows_what_is_known(packed):
    def begun(process):
        assert "trials" in process.stderr.readline()
        time.sleep(1.5)

    out, err = commands.interrupted("tune", packed, "--seconds", 60, when=begun)
    assert "interrupted" in err and ("chosen: " in out or "nothing was measured" in out)
