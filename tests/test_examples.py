"""The scripts under tools/examples, run as their readers run them: two processes, each sample seen once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastload
from fastload.layout import write_packed
from fastload.sources.listing import Column

EXAMPLES = Path(__file__).resolve().parents[1] / "tools" / "examples"
ROWS, EPOCHS, BATCH = 64, 2, 8
LIMIT_S = 120
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="no tools/examples beside the tests: run them from a checkout"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 8, 3), dtype=np.uint8)
    labels = {"labels": Column(np.arange(ROWS, dtype=np.int64) % 10)}
    return write_packed(tmp_path_factory.mktemp("examples") / "a.h5", pixels, labels, chunk_rows=4)


def run_example(launcher, name, packed, folder, *options):
    """Its output, and the rows that each rank saw in each epoch."""
    # Ranks are the launcher's to say, whatever launched this run.
    given = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    env = {name: value for name, value in os.environ.items() if name not in given and not name.startswith("PYTEST")}
    env |= {
        "PYTHONPATH": str(Path(fastload.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [*launcher, EXAMPLES / name, packed, "--epochs", EPOCHS, "--batch-size", BATCH, "--seen", folder / "seen"]
    log = folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, *map(str, command), *options], env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            # torchrun's ranks are in sessions of their own: it ends them when it is asked to end.
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text()
    assert code == 0, f"ended with {code} (None: killed after {LIMIT_S} s)\n{said[-4000:]}"
    return said, [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("launcher", "name", "needs", "options"),
    [
        (TORCHRUN, "plain_ddp.py", None, ["--workers", "1"]),
        ([], "lightning_ddp.py", "lightning", []),
        (TORCHRUN, "accelerate_ddp.py", "accelerate", ["--workers", "1"]),
    ],
)
def test_two_ranks_see_each_sample_once_an_epoch_in_a_new_order(packed, tmp_path, launcher, name, needs, options):
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; it is in the dependency group dev")
    said, seen = run_example(launcher, name, packed, tmp_path, *options)
    for epoch in range(EPOCHS):
        shares = [seen[rank][epoch] for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == list(range(ROWS)), f"epoch {epoch}"
        assert len(shares[0]) == len(shares[1])
    assert seen[0][0] + seen[1][0] != seen[0][1] + seen[1][1]
    assert "warn" not in said.lower() and len(said.splitlines()) <= 2 * EPOCHS, f"a quiet run\n{said}"
