"""A meter's figures in files and in TensorBoard's curves."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from child_processes import child_environment
from fake_nvml import FakeNvml
from hand_clock import HandClock, SlowLoader

from fastload import Meter, OptionError, OutputError


@pytest.fixture
def meter():
    clock = HandClock()
    with Meter(device=clock, nvml=FakeNvml(), sample_every_s=10) as meter:
        for _ in meter.watch(SlowLoader(clock, 3)):
            clock.now += 2
    return meter


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_have_a_row_a_step_and_jsonl_the_machine_the_readings_and_the_sums_too(meter, tmp_path):
    meter.write_csv(tmp_path / "steps.csv")
    with open(tmp_path / "steps.csv", newline="") as file:
        rows = [(row["step"], row["wait_s"], row["compute_s"], row["queue_depth"]) for row in csv.DictReader(file)]
    assert rows == [("0", "1.0", "2.0", ""), ("1", "1.0", "2.0", ""), ("2", "1.0", "2.0", "")]
    meter.write_jsonl(str(tmp_path / "run.jsonl"))
    head, *middle, totals = lines_of(tmp_path / "run.jsonl")
    assert head["kind"] == "meter" and head["schema"] == 1 and "Python" in head["environment"]
    assert [line["kind"] for line in middle] == ["step"] * 3 + ["reading"] * len(meter.readings)
    known = {"loop": 0, "step": 1, "wait_s": 1, "copy_s": 0, "compute_s": 2, "queue_depth": None}
    assert middle[1].items() >= known.items()
    assert (totals["kind"], totals["steps"], totals["wait_s"]) == ("totals", 3, 3)


@pytest.mark.parametrize("write", ["write_csv", "write_jsonl", "record"])
def test_nothing_is_overwritten_unasked(meter, tmp_path, write):
    path = tmp_path / "there"
    path.write_text("mine")
    with pytest.raises(OutputError, match=r"exists.*--overwrite"):
        getattr(meter, write)(path)
    with open(path) as old:
        assert path.read_text() == "mine"
        getattr(meter, write)(path, force=True)
        assert write == "record" or old.read() == "mine", "the old file is there until the new one is whole"
    assert "mine" not in path.read_text() and [one.name for one in tmp_path.iterdir()] == ["there"]
    with pytest.raises(OutputError, match="does not exist"):
        getattr(Meter(), write)(tmp_path / "no" / "folder")
    with pytest.raises(OutputError, match="is a folder"):
        getattr(Meter(), write)(tmp_path, force=True)


def test_a_record_grows_with_the_steps(tmp_path):
    clock, path = HandClock(), tmp_path / "run.jsonl"
    with Meter(device=clock, nvml=FakeNvml(), sample_every_s=10) as meter:
        meter.record(path)
        with pytest.raises(OptionError, match="a record already"):
            meter.record(tmp_path / "other.jsonl")
        for number, _ in enumerate(meter.watch(SlowLoader(clock, 4))):
            assert [line["step"] for line in lines_of(path) if line["kind"] == "step"] == list(range(number))
        for array in (np.arange(2), np.arange(2)):  # they compare by value, and are two loops all the same
            list(meter.watch(array))
    lines = lines_of(path)
    steps = [(line["loop"], line["step"]) for line in lines if line["kind"] == "step"]
    assert steps == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [line["steps"] for line in lines if line["kind"] == "totals"] == [4, 2, 2]
    assert any(line["kind"] == "reading" and line["gpu0.power_w"] == 500 for line in lines)


def test_a_killed_job_has_its_steps_and_a_full_disk_ends_the_record_but_not_the_training(tmp_path):
    code = f"""
import os, signal, fastload
with fastload.Meter(sample_every_s=0) as meter:
    meter.record({str(tmp_path / "run.jsonl")!r})
    for number in meter.watch(range(100)):
        if number == 50:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False)
    assert done.returncode < 0
    assert [line["kind"] for line in lines_of(tmp_path / "run.jsonl")] == ["meter"] + ["step"] * 50
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with Meter(sample_every_s=0) as meter:
        meter.record("/dev/full", force=True)
        assert meter._record._fd == -1 and len(list(meter.watch(range(5)))) == 5


def test_tensorboard_gets_milliseconds_a_step_and_the_readings(meter, tmp_path):
    curves = defaultdict(list)
    writer = SimpleNamespace(add_scalar=lambda tag, value, step: curves[tag].append((step, value)))
    meter.to_tensorboard(writer, prefix="data", first_step=100)
    assert curves["data/wait_ms"] == [(100, 1000), (101, 1000), (102, 1000)]
    assert curves["data/compute_ms"] == [(100, 2000), (101, 2000), (102, 2000)]
    assert curves["data/samples_per_s"][0] == (100, pytest.approx(2 / 3))
    assert curves["data/gpu0/utilization_percent"][0] == (100, 90)
    assert "data/queue_depth" not in curves and not any("at_s" in tag for tag in curves)
    tensorboard = pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        meter.to_tensorboard(writer)
    assert any(path.stat().st_size for path in tmp_path.iterdir())
