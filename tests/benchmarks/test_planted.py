"""The examiner of the doctor, with a few of its cases; `benchmarks/bench_doctor.py` runs all of them."""

import argparse
import json
import re
from pathlib import Path

import pytest
from child_processes import run_python

from fastload.timing.results import WAITING

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cases(monkeypatch):
    """The modules that draw the cases and that know what they hide."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "planted"))
    import bench_doctor
    import drawn

    return drawn, bench_doctor


def test_each_case_is_drawn_from_its_seed_and_its_cure_changes_what_it_should(cases):
    drawn, bench_doctor = cases
    assert set(drawn.plants()) == set(bench_doctor.PLANTS)
    for plant in drawn.plants():
        for seed in range(5):
            assert drawn.draw(plant, seed) == drawn.draw(plant, seed)
            with_it, without = drawn.draw(plant, seed)
            assert (with_it.steps, with_it.step_s, with_it.batch) == (without.steps, without.step_s, without.batch)
            causes = bench_doctor.PLANTS[plant].causes
            assert (with_it != without) or causes[0] == "compute"
        assert len({drawn.draw(plant, seed) for seed in range(5)}) == 5


def test_every_documented_cause_is_planted_and_told_by_no_name_in_a_case(cases):
    from fastload.profiling.verdict import CAUSES

    _, bench_doctor = cases
    counted = {plant.causes[0] for plant in bench_doctor.PLANTS.values() if plant.causes and plant.counts}
    assert bench_doctor.CAUSES == CAUSES
    # For the network it takes a server: tests/remote/test_network_use.py has the doctor look at a script that asks one.
    assert counted == set(CAUSES) - {"other programs", "waiting for the network"}
    code = (BENCHMARKS / "planted" / "case.py").read_text()
    words = {word for cause in bench_doctor.CAUSES for word in cause.split() if len(word) > 5}
    # A worker is what the DataLoader's own option is called.
    assert not [word for word in words - {"workers", "worker", "device", "sample"} if f"def {word}" in code]


@pytest.mark.slow
def test_the_examiner_measures_a_case_with_its_hold_up_and_without(tmp_path):
    out = tmp_path / "doctor.jsonl"
    said = run_python(BENCHMARKS / "bench_doctor.py", "--quick", "--data", tmp_path, "--out", out)
    (record,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (record["planted"], record["cause"]) == ([WAITING], WAITING), said
    assert record["line"].startswith("verdict: ") and record["uncured_s"] > record["cured_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "cause"), [(40, "transform"), (20, "compute")])
def test_the_doctor_names_a_slow_transform_and_a_busy_accelerator(cases, tmp_path, plant, cause):
    _, bench_doctor = cases
    options = argparse.Namespace(data=tmp_path, out=tmp_path / "doctor.jsonl", quick=True, part=1.0, seeds=[0])
    found = bench_doctor.Examiner(options).examined(plant, 0)
    verdict = found["verdict"]
    assert bench_doctor.PLANTS[plant].causes[0] == cause, "the case is the one that it was"
    if verdict["cause"] == "other programs" and cause == "compute":  # then nothing is promised
        assert not verdict["cures"]
    elif verdict["cause"] == "other programs":  # as they do where tests run side by side: then the costs say it
        (making,) = (line for line in verdict["evidence"] if line.startswith("making a batch"))
        parts = re.findall(r"([a-z-]+) ([\d.]+) (µs|ms|s)\b", making.partition(": ")[2])
        costs = {name: float(value) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit] for name, value, unit in parts}
        assert max(costs, key=costs.__getitem__) == cause, found
    else:
        assert verdict["cause"] == cause, found
    assert found["line"].startswith("verdict: ")
    assert cause != "compute" or verdict["worth_making"] is False
