"""The lines that the doctor offers, typed: they have to give batches like those of the loader that they replace."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

import fastload
from fastload.cli import app
from fastload.profiling.doctor import examine
from fastload.profiling.verdict.replacement import to_type


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + number, 30 + number % 3), (9 * number, 0, 0)).save(path)
    return tmp_path / "photos"


class Photos(Dataset):
    """A dataset of which nothing is known but what it opens."""

    def __init__(self, folder):
        self.files = sorted(folder.rglob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).resize((24, 16))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255, index % 2


class Bytes(Photos):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image * 255).byte(), label


@pytest.fixture
def lines_for(monkeypatch):
    """What to type in the place of a loader, after it was looked at."""
    judge, seen = examine.judge, []
    monkeypatch.setattr(examine, "judge", lambda asked: (seen.append(asked.plain), judge(asked))[1])

    def lines(loader, **how):
        fastload.diagnose(loader, seconds=0.2)
        return to_type(seen[-1], **how).split("\n")

    return lines


def typed(lines, **names):
    """Types the lines: the first in a shell, the others in Python."""
    pack, *code = lines
    program, *words = shlex.split(pack, comments=True)
    assert program == "fastload"
    CliRunner().invoke(app, words, catch_exceptions=False)
    exec("\n".join(code), names)
    return names["loader"]


@pytest.mark.parametrize("kind", [Photos, Bytes])
@pytest.mark.parametrize(
    "words", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {"shuffle": False}, {"drop_last": True}]
)
def test_the_lines_give_as_many_batches_of_the_same_shape_and_type(photos, lines_for, kind, words):
    loader = DataLoader(kind(photos), batch_size=8, **words)
    found = typed(lines_for(loader, keeps_transform=False))
    batches = list(found)
    images, labels = batches[0]
    wanted, numbers = next(iter(loader))
    assert (images.shape, images.dtype, labels.dtype) == (wanted.shape, wanted.dtype, numbers.dtype)
    assert 1 / 20 < images.float().mean() / wanted.float().mean() < 20, "0 to 1, or 0 to 255; of other photos"
    assert len(batches) == len(loader)
    read = np.concatenate([batch.rows[batch.valid] for batch in batches])
    assert len(set(read)) == (16 if words.get("drop_last") else 20), "none is left out that was not"
    assert (sorted(read) == list(read)) == (not words.get("shuffle"))


def test_of_a_subset_only_its_rows_are_loaded(photos, lines_for):
    lines = lines_for(DataLoader(Subset(Photos(photos), [0, 3, 5]), batch_size=2), keeps_transform=False)
    loader = typed(lines, rows=[4, 2, 7])
    assert sorted(row for batch in loader for row in batch.rows[batch.valid].tolist()) == [2, 4, 7]


def test_the_datasets_own_transforms_are_called_for_each_sample(photos, lines_for):
    lines = lines_for(DataLoader(Photos(photos), batch_size=4), keeps_transform=True)

    def own(sample):
        image, label = sample
        return image[:, :16, :16] / 255, label + 10

    images, labels = next(iter(typed(lines, own=own)))
    assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32 and labels.min() >= 10
