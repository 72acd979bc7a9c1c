"""Packed files without images, token arrays for one, through `PackedDataset` and `FastLoader`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_loaders import loader_of

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.format.ragged import Column
from fastload.format.writer import create_file
from fastload.loader.loader import FastLoader
from fastload.transforms import RandomHorizontalFlip

N, LENGTH = 60, 9


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    rng = np.random.default_rng(0)
    columns = {
        "labels": Column(np.arange(N, dtype=np.int64) % 3, {"names": ("bad", "good", "odd")}),
        "tokens": Column(rng.integers(0, 5000, (N, LENGTH)).astype(np.int32)),
        "attention_mask": Column((rng.random((N, LENGTH)) < 0.7).astype(np.uint8)),
        "split": Column(np.repeat(np.arange(2, dtype=np.uint8), [40, 20]), {"names": ("train", "test")}),
        "key": Column(np.array([f"{i:04d}".encode() for i in range(N)])),
        "digest": Column(np.zeros(N, np.uint64)),
    }
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    path = tmp_path_factory.mktemp("tokens") / "a.h5"
    create_file(path, num_rows=N, pixels={}, columns=columns, attrs=attrs)
    return path, torch.from_numpy(columns["tokens"].values)


class Reversed:
    """Module level, as worker processes find it by its name."""

    def __call__(self, sample):
        mask, words, label = sample
        return {"words": words.flip(0), "mask": mask, "label": label}


def test_a_sample_is_all_that_holds_numbers_labels_last(tokens):
    path, words = tokens
    dataset = PackedDataset(path, split="test")
    assert dataset.fields == ("attention_mask", "tokens", "labels") and dataset.classes == ("bad", "good", "odd")
    _, first, label = dataset[0]
    assert torch.equal(first, words[40]) and first.dtype == torch.int32 and label == 40 % 3


@pytest.mark.parametrize("options", [{}, {"read": "pread", "echo": 2}, {"shuffle": False, "ends": "exact"}])
def test_batches_are_the_rows_of_the_file(tokens, options):
    path, words = tokens
    seen = []
    for batch in loader_of(path, 8, fields=("tokens", "labels", "row"), **options):
        assert torch.equal(batch[0], words[batch.rows]) and torch.equal(batch[1], batch.rows % 3)
        seen += batch[2][batch.valid].tolist()
    assert len(set(seen)) == (60 if "ends" in options else 56)


def test_worker_processes_run_a_transform_of_their_samples(tokens):
    path, words = tokens
    dataset = PackedDataset(path, split="train", transform=Reversed())
    batches = list(FastLoader(dataset, 20, workers=1))
    assert [list(batch) for batch in batches] == [["words", "mask", "label"]] * 2
    assert all(torch.equal(batch["words"], words[batch.rows].flip(1)) for batch in batches)


def test_transforms_of_images_are_refused(tokens):
    with pytest.raises(OptionError, match="the batch has no images, its fields are attention_mask, tokens, labels"):
        FastLoader(tokens[0], 8, transform=[RandomHorizontalFlip()])
