"""The scripts under tools/examples, run as their readers run them: two processes, each sample seen once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "tools" / "examples"
ROWS, EPOCHS, BATCH = 64, 2, 8
PACKED = {"rows": ROWS, "size": (8, 8, 3), "classes": "0123456789", "chunk_rows": 4}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.slow


def run_example(warm_python, launcher, name, packed, folder, *options):
    """Its output, and the rows that each rank saw in each epoch."""
    command = [*launcher, EXAMPLES / name, packed, "--epochs", EPOCHS, "--batch-size", BATCH, "--seen", folder / "seen"]
    done = warm_python.run(*command, *options, cwd=folder, frozen=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said, [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("launcher", "name", "needs", "options"),
    [
        (TORCHRUN, "plain_ddp.py", None, ["--workers", "1"]),
        ([], "lightning_ddp.py", "lightning", []),
        ([], "lightning_ddp.py", "lightning", ["--fastloader"]),
        (TORCHRUN, "accelerate_ddp.py", "accelerate", ["--workers", "1"]),
    ],
)
def test_two_ranks_see_each_sample_once_an_epoch_in_a_new_order(
    warm_python, packed, tmp_path, launcher, name, needs, options
):
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; it is in the dependency group dev")
    said, seen = run_example(warm_python, launcher, name, packed, tmp_path, *options)
    for epoch in range(EPOCHS):
        shares = [seen[rank][epoch] for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == list(range(ROWS)), f"epoch {epoch}"
        assert len(shares[0]) == len(shares[1])
    assert seen[0][0] + seen[1][0] != seen[0][1] + seen[1][1]
    assert "warn" not in said.lower() and len(said.splitlines()) <= 2 * EPOCHS, f"a quiet run\n{said}"
