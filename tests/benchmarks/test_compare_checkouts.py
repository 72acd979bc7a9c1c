"""`benchmarks/compare_checkouts.py`: this checkout against itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPARE = ROOT / "benchmarks" / "compare_checkouts.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def compare(tmp_path, *words):
    out = tmp_path / "checkouts.jsonl"
    command = [sys.executable, str(COMPARE), str(ROOT), str(ROOT), "--visits", "4", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    return done, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_each_figure_of_a_benchmark_is_measured_in_both_checkouts_in_turn(tmp_path):
    words = ("bench_loader.py", "--", "--quick", "--only", "take", "--data", str(tmp_path / "data"))
    done, records = compare(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert [record["figure"] for record in records] == ["take", "take-untouched", "take-read"]
    for record in records:
        assert record["new_over_old"]["count"] == 4 and record["control"]["count"] == 2
        assert 0 < record["new_over_old"]["lowest"] <= record["new_over_old"]["highest"]
        assert record["options"]["old"] == record["options"]["new"]


def test_a_benchmark_that_fails_says_where_and_why(tmp_path):
    done, records = compare(tmp_path, "bench_loader.py", "--", "--only", "nothing")
    assert done.returncode == 1 and not records
    assert str(ROOT) in done.stderr and "invalid choice: 'nothing'" in done.stderr
