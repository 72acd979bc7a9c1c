"""The scripts under tools/examples, run as their readers run them: each sample is seen once, also after resuming."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from small_files import write_random

EXAMPLES = Path(__file__).resolve().parents[2] / "tools" / "examples"
ROWS, EPOCHS, BATCH = 64, 2, 8
PACKED = {"rows": ROWS, "size": (8, 8, 3), "classes": "0123456789", "chunk_rows": 4}
TORCHRUN = [Path(__file__).with_name("elastic.py")]  # its agent, with forks

pytestmark = pytest.mark.slow


def run_example(warm_python, launcher, name, packed, folder, *options):
    """Its output, and the rows that each rank saw in each epoch."""
    for old in folder.glob("seen.*"):
        old.unlink()
    command = [*launcher, EXAMPLES / name, packed, "--epochs", EPOCHS, "--batch-size", BATCH, "--seen", folder / "seen"]
    done = warm_python.run(*command, *options, cwd=folder, frozen=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said, [json.loads(file.read_text()) for file in sorted(folder.glob("seen.*"))]


def need(package):
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    ("launcher", "name", "needs", "options"),
    [
        (TORCHRUN, "plain_ddp.py", None, ["--workers", "1"]),
        ([], "lightning_ddp.py", "lightning", []),
        ([], "lightning_ddp.py", "lightning", ["--fastloader"]),
        (TORCHRUN, "accelerate_ddp.py", "accelerate", ["--workers", "1"]),
        (TORCHRUN, "hf_trainer.py", "transformers", []),
        (TORCHRUN, "timm_train.py", "timm", []),
    ],
)
def test_two_ranks_see_each_sample_once_an_epoch_in_a_new_order(
    warm_python, packed, tmp_path, launcher, name, needs, options
):
    need(needs)
    said, seen = run_example(warm_python, launcher, name, packed, tmp_path, *options)
    assert len(seen) == 2
    for epoch in range(EPOCHS):
        shares = [seen[rank][epoch] for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == list(range(ROWS)), f"epoch {epoch}"
        assert len(shares[0]) == len(shares[1])
    assert seen[0][0] + seen[1][0] != seen[0][1] + seen[1][1]
    assert "warn" not in said.lower() and len(said.splitlines()) <= 2 * EPOCHS, f"a quiet run\n{said}"


@pytest.mark.parametrize("ranks", [3])  # 2 give the same, and take as long again
def test_an_evaluation_under_accelerate_counts_each_row_once(warm_python, tmp_path, ranks):
    need("accelerate")
    packed = write_random(tmp_path / "odd.h5", **PACKED | {"rows": 341})
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks)]
    said, seen = run_example(
        warm_python, launcher, "accelerate_ddp.py", packed, tmp_path, "--batch-size", "64", "--epochs", "1"
    )
    assert len(seen) == ranks
    counts = re.findall(r"(\d+) of (\d+) right", said)  # not by line: ranks write while others do
    assert len(counts) == ranks and len(set(counts)) == 1 and counts[0][1] == "341", said


def test_a_recipe_goes_on_with_one_rank_where_two_stopped_within_an_epoch(warm_python, packed, tmp_path):
    saved = ["--checkpoint", tmp_path / "run.pt"]
    _, stopped = run_example(warm_python, TORCHRUN, "torchtune_like.py", packed, tmp_path, *saved, "--max-steps", "1")
    said, [(rest, following)] = run_example(warm_python, [], "torchtune_like.py", packed, tmp_path, *saved, "--resume")
    assert [[len(rows) for rows in epochs] for epochs in stopped] == [[2 * BATCH]] * 2, "two batches make a step"
    assert sorted(stopped[0][0] + stopped[1][0] + rest) == sorted(following) == list(range(ROWS))
    assert [line.split(",")[0] for line in said.splitlines()] == ["epoch 0", "epoch 1"]


def test_the_trainer_of_transformers_goes_on_at_the_batch_where_its_checkpoint_was_saved(warm_python, packed, tmp_path):
    need("transformers")
    options = ["--save-steps", "3"]
    _, [whole] = run_example(warm_python, [], "hf_trainer.py", packed, tmp_path, *options)
    options += ["--resume", tmp_path / "checkpoints" / "checkpoint-3"]
    _, [resumed] = run_example(warm_python, [], "hf_trainer.py", packed, tmp_path, *options)
    assert resumed == [whole[0][3 * BATCH :], whole[1]]


def test_timm_trains_with_one_process(warm_python, packed, tmp_path):
    need("timm")
    _, [epochs] = run_example(warm_python, [], "timm_train.py", packed, tmp_path)
    assert [sorted(rows) for rows in epochs] == [list(range(ROWS))] * EPOCHS
