"""The detector of `train.py`: what it learns from, and what its average precision is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import detection
import train
from fastload import FastLoader, PackedDataset, Pad
from fastload.format.ragged import Column
from sample_files import write_ragged


def shapes(path: Path, count: int, *, boxed: bool = True) -> Path:
    """Red and blue rectangles on dark noise, one to three in an image; images differ in size."""
    rng = np.random.default_rng(0)
    images, boxes, labels = [], np.zeros((count, 3, 4), np.float32), np.full((count, 3), -1)
    for row in range(count):
        height, width = rng.integers(48, 81, 2).tolist()
        image = rng.integers(0, 60, (height, width, 3)).astype(np.uint8)
        for at in range(1 + row % 3):
            w, h = rng.integers(14, 25, 2).tolist()
            x, y = 2 + at * (width - 4) // 3, int(rng.integers(0, height - h))
            w = min(w, (width - 4) // 3 - 2)
            labels[row, at] = rng.integers(2)
            image[y : y + h, x : x + w, 2 * labels[row, at]] = 230
            boxes[row, at] = x, y, w, h
        images.append(image)
    counts = (labels >= 0).sum(axis=1)
    columns = {
        "boxes": Column(boxes, {"names": ("x", "y", "width", "height")}),
        "box_labels": Column(labels if boxed else np.full_like(labels, -1), {"names": ("red", "blue")}),
        "num_boxes": Column(counts),
    }
    return write_ragged(path, images, columns, splits={"train": count - count // 5, "val": count // 5})


@pytest.mark.slow
def test_training_finds_objects_and_shows_where(no_launcher, tmp_path, capsys):
    path, picture, threads = shapes(tmp_path / "shapes.h5", 100), tmp_path / "sheet.png", torch.get_num_threads()
    words = ["--device", "cpu", "--epochs", 5, "--width", 6, "--size", 64, "--lr", 0.01, "--picture", picture]
    torch.set_num_threads(1)
    try:
        train.run(train.parse_options([str(path), *map(str, words)]))
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "80 images of their own sizes to find 2 classes of objects in, 20 held out (val)" in said
    precisions = [float(number) for number in re.findall(r"mean average precision ([\d.]+)% at half overlap", said)]
    assert len(precisions) == 5 and precisions[-1] > 60
    assert re.search(r"red +[\d.]+% +\d+", said)
    with Image.open(picture) as sheet:
        colours = {tuple(pixel) for pixel in np.asarray(sheet).reshape(-1, 3).tolist()}
    assert (255, 255, 255) in colours  # a box that is there


def test_a_file_without_boxes_is_refused(no_launcher, tmp_path):
    with pytest.raises(SystemExit, match="has not one box"):
        train.run(train.parse_options([str(shapes(tmp_path / "a.h5", 10, boxed=False)), "--device", "cpu"]))


def test_answers_that_are_right_have_the_least_loss_and_full_precision(tmp_path):
    """Places that answer with the truth: written into the maps as a network would."""
    path = shapes(tmp_path / "shapes.h5", 30)
    task = detection.Detection(PackedDataset(path), 64)
    loader = FastLoader(PackedDataset(path, "val", task.fields), 6, shuffle=False, batch=Pad(multiple=16))
    batch = next(iter(loader))
    fields = dict(zip(task.fields, batch, strict=True))
    _, _, height, width = fields["images"].shape
    answers = torch.full((6, 7, height // 8, width // 8), -20.0)
    truth, to_sides, counted = task._targets(answers, fields)
    assert (truth >= 0).any() and not counted.all()  # some places are padding
    answers[:, :2] = torch.nn.functional.one_hot(truth.clamp(min=0), 2).permute(0, 3, 1, 2) * 40.0 - 20
    answers[:, :2].masked_fill_((truth < 0)[:, None], -20.0)
    answers[:, 2:6] = torch.log(torch.expm1((to_sides / 8).clamp(min=1e-3)))
    answers[:, 6] = torch.where(truth >= 0, 20.0, -20.0)
    counts = task.counts(answers, fields, batch.valid)
    assert "mean average precision 100.0% at half overlap" in task.score(counts)
    # What is padding may answer anything.
    noisy = torch.where(counted[:, None], answers, torch.randn_like(answers) * 9)
    assert torch.allclose(task.losses(noisy, fields), task.losses(answers, fields))
    assert "mean average precision 100.0%" in task.score(task.counts(noisy, fields, batch.valid))
    smaller, others = answers.clone(), answers.clone()
    smaller[:, 2:6] -= 3  # boxes that are too small, and the wrong one of two classes
    others[:, :2] = answers[:, :2].flip(1)
    for wrong in (smaller, others):
        assert (task.losses(answers, fields) < task.losses(wrong, fields)).all()
        assert "mean average precision 0.0%" in task.score(task.counts(wrong, fields, batch.valid))


def average_precision(found: list[tuple[float, bool]], there: int) -> float:
    """Area under the precision-recall curve, where precision is the best at that recall or more."""
    found = sorted(found, reverse=True)
    scores, right = np.array([score for score, _ in found]), np.cumsum([hit for _, hit in found])
    ends = [at for at in range(len(found)) if at + 1 == len(found) or scores[at + 1] != scores[at]]
    recalls, precisions = [right[at] / there for at in ends], [right[at] / (at + 1) for at in ends]
    area, before = 0.0, 0.0
    for at, recall in enumerate(recalls):
        area += (recall - before) * max(precisions[at:])
        before = recall
    return area


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_precision_is_the_area_under_the_curve(tmp_path, data):
    path = tmp_path / "shapes.h5"
    task = detection.Detection(PackedDataset(path if path.exists() else shapes(path, 10)), 64)
    table = np.zeros((2, 2 * detection.BINS + 1))
    expected = []
    for row in table:
        found = data.draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12))
        there = data.draw(st.integers(max(1, sum(hit for _, hit in found)), 15))
        for score, hit in found:
            row[score * 20 + (0 if hit else detection.BINS)] += 1
        row[-1] = there
        expected.append(average_precision([(float(score), hit) for score, hit in found], there) if found else 0.0)
    assert task.precisions(torch.from_numpy(table).flatten()).tolist() == pytest.approx(expected)
