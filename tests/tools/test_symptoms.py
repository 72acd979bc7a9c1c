"""What tools/symptoms.py shows is real, and so are the cures; docs/several-gpus.md speaks of both."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import symptoms
import train

HERE = Path(__file__).parent
ROOT = HERE.resolve().parents[1]


@pytest.mark.slow
def test_ranks_fail_as_shown_and_finish_when_cured(warm_python, tmp_path):
    warm_python.finish(HERE / "in_forks.py", HERE / "symptoms_of_ranks.py", tmp_path, cwd=tmp_path)
    found_of_ranks = json.loads((tmp_path / "found.json").read_text())
    shown, found, static, drop, pad, exact, (waits, finishes) = found_of_ranks
    for of_rank in shown:
        assert of_rank["steps"] == 1
        assert of_rank["error"].startswith("Expected to have finished reduction in the prior iteration")
        assert of_rank["error"].endswith(("second.bias, second.weight", "second.weight, second.bias"))
    assert all(of_rank == {"steps": 5, "error": None} for of_rank in (*found, *static))

    assert (waits["batches"], waits["steps"]) == (6, 5) and "imed out" in waits["error"]
    assert (finishes["batches"], finishes["steps"]) == (5, 5) and finishes["error"] is None
    for of_ranks, steps, rows in ((drop, 5, 40), (pad, 6, 41), (exact, 6, 41)):
        assert [of_rank["steps"] for of_rank in of_ranks] == [steps, steps]
        assert sum(of_rank["rows"] for of_rank in of_ranks) == rows


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="with several GPUs their memory is read instead")
def test_the_first_gpu_gets_a_number_from_each_replica(tmp_path, capsys):
    gathered = []
    for cure in (False, True):
        symptoms.first_gpu_full(cure, tmp_path)
        gathered.append(int(re.search(r"([\d,]+) bytes a step", capsys.readouterr().out)[1].replace(",", "")))
    assert gathered == [3 * 8 * symptoms.CLASSES * 128 * 128 * 4, 3 * 4]


def test_the_page_names_every_symptom_and_only_flags_that_there_are(monkeypatch, capsys):
    page = (ROOT / "docs" / "several-gpus.md").read_text()
    assert set(re.findall(r"tools/symptoms\.py ([a-z-]+)", page)) == set(symptoms.SYMPTOMS)
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        train.parse_options()
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    known |= set(re.findall(r'"(--[\w-]+)"', (ROOT / "tools" / "examples" / "ray_train.py").read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page))
    assert named - known <= {"--cure", "--nproc-per-node", "--standalone"}
