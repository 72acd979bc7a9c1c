"""The scripts for people, run as people run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastload
from fastload import pack_images

ROOT = Path(__file__).resolve().parents[1]


def run(*words: object, cwd: Path) -> str:
    # Scripts beside each other import each other; what tools/test.sh forbids is the current folder.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fastload.__file__).parents[1])}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "faces"
    run(ROOT / "tools/make_faces.py", folder, "--count", 160, cwd=folder.parent)
    return folder


@pytest.fixture(scope="module")
def packed_faces(faces: Path) -> Path:
    return pack_images(faces, faces.parent / "faces.h5", size=(54, 44), workers=1).path


@pytest.fixture(scope="module")
def packed_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that anything can tell apart, 80 images of 32x32 each, no splits."""
    root = tmp_path_factory.mktemp("classes")
    rng = np.random.default_rng(0)
    for label, level in (("dark", 60), ("light", 190)):
        (root / "photos" / label).mkdir(parents=True)
        for i in range(80):
            pixels = np.clip(rng.normal(level, 40, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / "photos" / label / f"{i}.png")
    return pack_images(root / "photos", root / "photos.h5", workers=1).path


def test_faces_are_in_the_official_layout(faces):
    lines = (faces / "list_attr_celeba.txt").read_text().splitlines()
    assert lines[0] == "160"
    assert lines[1].endswith("Young ") and len(lines[1].split()) == 40
    values = np.array([line.split()[1:] for line in lines[2:]], dtype=int)
    assert values.shape == (160, 40) and set(np.unique(values)) == {-1, 1}
    with Image.open(faces / "img_align_celeba" / "000160.jpg") as image:
        assert image.size == (178, 218)
    partition = (faces / "list_eval_partition.txt").read_text().split()[1::2]
    assert [partition.count(part) for part in "012"] == [128, 16, 16]


def test_faces_of_a_seed_are_the_same_and_a_complete_folder_is_kept(faces, tmp_path):
    run(ROOT / "tools/make_faces.py", tmp_path / "again", "--count", 160, "--workers", 1, cwd=tmp_path)
    for name in ("img_align_celeba/000007.jpg", "list_attr_celeba.txt", "identity_CelebA.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (faces / name).read_bytes()
    said = run(ROOT / "tools/make_faces.py", faces, "--count", 160, cwd=tmp_path)
    assert "there already" in said


def accuracies(said: str) -> list[tuple[float, float]]:
    found = re.findall(r"accuracy ([\d.]+)% \(commonest answer: ([\d.]+)%\)", said)
    return [(float(accuracy), float(baseline)) for accuracy, baseline in found]


@pytest.mark.slow
def test_training_learns_classes_and_resumes_to_the_same_model(packed_classes, tmp_path):
    words = [ROOT / "tools/train.py", packed_classes, "--epochs", 3, "--batch-size", 16, "--width", 8]
    whole = run(*words, "--checkpoint", tmp_path / "whole.pt", cwd=tmp_path)
    assert accuracies(whole)[-1][0] > accuracies(whole)[-1][1] + 20

    parts = [*words, "--checkpoint", tmp_path / "parts.pt", "--resume"]
    assert "stopped after step 13" in run(*parts, "--max-steps", 13, cwd=tmp_path)
    rest = run(*parts, cwd=tmp_path)
    assert "resumed at step 13" in rest
    assert accuracies(rest)[-1] == accuracies(whole)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_training_learns_attributes(packed_faces, tmp_path, amp):
    words = ["--epochs", 3, "--batch-size", 16, "--width", 8, "--echo", 2, "--task", "attributes", "--amp", amp]
    said = run(ROOT / "tools/train.py", packed_faces, *words, cwd=tmp_path)
    assert len(accuracies(said)) == 3
    assert "with echoes" in said


@pytest.mark.slow
def test_training_runs_on_two_ranks(packed_classes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    words = ["--epochs", 2, "--batch-size", 8, "--width", 8, "--checkpoint", tmp_path / "run.pt"]
    said = run(*launcher, ROOT / "tools/train.py", packed_classes, *words, cwd=tmp_path)
    assert "2 process(es)" in said
    assert len(accuracies(said)) == 2
    assert (tmp_path / "run.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        f"bench_{what}.py"
        for what in ("loader", "pack", "shuffle", "workers", "augment", "echo", "accelerator", "meter")
    ],
)
def test_benchmarks_run_and_write_records(tmp_path, name):
    out = tmp_path / "out.jsonl"
    words = ["--quick", "--out", out]
    if name != "bench_echo.py":  # it draws what it needs as it goes
        words += ["--data", tmp_path / "data"]
    if name == "bench_pack.py":
        words += ["--tmpfs", tmp_path]
    run(ROOT / "benchmarks" / name, *words, cwd=tmp_path)
    assert '"figure"' in out.read_text()
