"""The file, the model and the loops that the ranks and the single process they are compared with have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.format.column import Column
from sample_files import write_packed

CLASSES = 5
SHAPE = (4, 3, 3)

SPLITS = {"even": 24, "odd": 23, "seven": 7, "two": 2, "one": 1}
"""Sizes that divide by 2, by 3, by neither; fewer than the ranks."""

EVALUATED = [("even", 4), ("odd", 4), ("odd", 1), ("seven", 2), ("seven", 8), ("two", 3), ("one", 1)]
"""(split, batch size)"""

TRAINED = [
    ("odd", 4, "full"),
    ("odd", 5, ChunkWindow(2)),
    ("even", 3, False),
    ("seven", 2, "full"),
    ("two", 2, "full"),
    ("one", 2, False),
]
"""(split, batch size, shuffle)"""


def write_file(path: Path) -> None:
    count = sum(SPLITS.values())
    rng = np.random.default_rng(8)
    pixels = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    labels = {"labels": Column(rng.integers(0, CLASSES, count), {"names": tuple("abcde")})}
    write_packed(path, pixels, labels, chunk_rows=4, splits=SPLITS)


def make_loader(folder: Path, split: str, batch_size: int, **options) -> FastLoader:
    """Of all rows for "all"; the process group, if there is one, decides which of them."""
    dataset = PackedDataset(folder / "sizes.h5", split=None if split == "all" else split)
    return FastLoader(dataset, batch_size, seed=6, **options)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    pixels = int(np.prod(SHAPE))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def losses_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each sample, float64 (B,)."""
    return nn.functional.cross_entropy(model(images.double() / 255), labels, reduction="none")


def metric_of(loader: FastLoader) -> tuple[torch.Tensor, int, int]:
    """Sums of this rank, float64 (4,): correct, counted, margins, cross entropies; its steps; rows without `valid`.

    Scores are whole numbers, pixels times whole weights, so sums of margins are exact in any order.
    """
    weights = torch.from_numpy(np.random.default_rng(1).integers(-9, 10, (int(np.prod(SHAPE)), CLASSES))).double()
    sums, steps, without_valid = torch.zeros(4, dtype=torch.float64), 0, 0
    for batch in loader:
        images, labels = batch
        scores = images.flatten(1).double() @ weights
        margins = scores.amax(1) - scores.gather(1, labels[:, None])[:, 0]
        correct = (scores.argmax(1) == labels).double()
        entropies = nn.functional.cross_entropy(scores / 1000, labels, reduction="none")
        of_each = torch.stack([correct, torch.ones_like(correct), margins, entropies])
        sums += (of_each * batch.valid).sum(1)
        without_valid += len(labels)
        steps += 1
    assert steps == len(loader)
    return sums, steps, without_valid


def train(model: nn.Module, loader: FastLoader, loss_of: Callable) -> list[dict]:
    """One epoch of plain SGD: of each step the rows, which of them count, and the gradient."""
    steps = []
    for batch in loader:
        loss_of(batch).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        steps.append({
            "rows": batch.rows.clone(), "valid": batch.valid.clone(), "global_valid": batch.global_valid,
            "gradient": gradient,
        })  # fmt: skip
        descend(model)
    return steps


def descend(model: nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
            parameter.grad = None


def read_on(loader: FastLoader, steps: int | None) -> dict:
    """Rows that count of the next steps, or of all to come."""
    rows, done = [], 0
    for batch in loader:
        rows += batch.rows[batch.valid].tolist()
        done += 1
        if done == steps:
            break
    return {"rows": rows, "steps": done, "fresh": loader.stats.fresh_samples}
