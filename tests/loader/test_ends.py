"""The end of an epoch as its user sees it: loops written for any loader count each row once, on every path."""

from __future__ import annotations

import itertools
import warnings
from contextlib import closing

import numpy as np
import pytest
import torch
from late_backend import Device
from small_files import write_random

from fastload import FastLoader, PackedDataset
from fastload.transforms import CutMix, MixUp, Normalize, RandomErasing, RandomHorizontalFlip, RandomResizedCrop

ROWS, BATCH = 341, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(
        tmp_path_factory.mktemp("ends") / "a.h5", rows=ROWS, size=(8, 6, 3), classes="abc", masks=True, chunk_rows=16
    )


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return torch.full((3, 8, 6), i % 256, dtype=torch.uint8), i % 3


def as_sample(sample):
    return sample


def counted(loader):
    """How many samples a loop sees that knows nothing of fastload, and how many of them are of class 1."""
    seen = ones = 0
    for images, labels in loader:
        assert len(images) == len(labels)
        seen, ones = seen + len(labels), ones + int((labels == 1).sum())
    return seen, ones


@pytest.mark.parametrize(
    ("batch_size", "source"),
    [
        *itertools.product([7, BATCH, ROWS, 400], ["threads", "processes", "a Python dataset"]),
        (1, "threads"),
        (340, "threads"),
    ],
)
def test_an_unchanged_loop_counts_each_row_once(path, source, batch_size):
    dataset = PackedDataset(path, transform=as_sample if source == "processes" else None)
    data = Numbers() if source == "a Python dataset" else dataset
    with closing(FastLoader(data, batch_size, shuffle=False, workers=1)) as loader:
        assert len(loader) == -(-ROWS // batch_size)
        assert counted(loader) == (ROWS, sum(1 for i in range(ROWS) if i % 3 == 1))
        for batch in loader:
            assert batch.valid.all() and len(batch.valid) == len(batch.rows) == len(batch[0]) == batch.global_valid
        assert len(batch[0]) == ROWS - (len(loader) - 1) * batch_size
        assert loader.stats.fresh_samples == ROWS


ANYWHERE = (
    {"transform": [RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.25,) * 3)]},
    {"transform": [RandomResizedCrop(6), RandomErasing(), Normalize((0.5,) * 3, (0.25,) * 3)], "echo": 2},
    {"transform": [MixUp(num_classes=3)]},
    {"transform": [RandomHorizontalFlip(), CutMix(num_classes=3)]},
    {"batch": "list"},
    {"batch": "pad", "transform": [RandomResizedCrop(6)]},
)
CACHED = (
    {"cache": "device"},
    {"cache": "host", "transform": [RandomResizedCrop(6), Normalize((0.5,) * 3, (0.25,) * 3)]},
)


@pytest.mark.parametrize(
    ("options", "on_device"),
    [*itertools.product(ANYWHERE, [False, True]), *itertools.product(CACHED, [True])],
)
def test_a_short_last_batch_is_the_first_rows_of_a_full_one(path, options, on_device):
    mixes = any(isinstance(one, (MixUp, CutMix)) for one in options.get("transform", ()))
    fields = ("images", "labels") if mixes else ("images", "masks", "labels")
    dataset = PackedDataset(path, fields=fields)
    made = {}
    for ends in ("exact", "pad"):
        device = {"device": Device()} if on_device else {}
        with closing(
            FastLoader(dataset, BATCH, shuffle="full", seed=4, workers=1, ends=ends, **device, **options)
        ) as loader:
            made[ends] = list(loader)
    for short, full in zip(made["exact"], made["pad"], strict=True):
        count = len(short.rows)
        assert count == int(full.valid.sum()) and torch.equal(short.rows, full.rows[:count])
        assert short.valid.all() and short.global_valid == full.global_valid == count
        for one, other in zip(short, full, strict=True):
            assert len(one) == count
            if not mixes and isinstance(one, torch.Tensor):
                assert torch.equal(one, other[:count])
            elif not mixes:
                assert all(map(torch.equal, one, other))
    assert len(made["exact"][-1].rows) == ROWS % BATCH
    assert {len(batch.rows) for batch in made["pad"]} == {BATCH}


def test_a_last_batch_of_one_row_is_mixed_with_itself(path):
    dataset = PackedDataset(path).select(range(65))
    with closing(FastLoader(dataset, BATCH, shuffle=False, workers=1, transform=[MixUp(num_classes=3)])) as loader:
        last = list(loader)[-1]
    assert len(last[0]) == 1 and last[1].shape == (1, 3) and float(last[1].sum()) == pytest.approx(1)


def test_a_rank_without_a_row_gets_one_again_and_is_told_once(path):
    dataset = PackedDataset(path).select(range(13))  # ranks have 5, 4 and 4 rows
    seen, told = [], []
    for rank in range(3):
        with closing(FastLoader(dataset, 2, shuffle=False, share=(rank, 3), workers=1)) as loader:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("default")
                batches = [*loader, *loader]
            told.append([str(one.message) for one in found])
        assert [len(batch.rows) for batch in batches] == [2, 2, 1] * 2
        seen.append(batches[:3])
        assert [batch.global_valid for batch in batches[:3]] == [6, 6, 1]
    assert [bool(one) for one in told] == [False, True, True] and all(len(one) <= 1 for one in told)
    assert "`right += ((output.argmax(1) == labels) & batch.valid).sum()`" in told[1][0]
    rows = [row for batches in seen for batch in batches for row in batch.rows[batch.valid].tolist()]
    assert sorted(rows) == list(range(13))
    assert sum(len(batch.rows) for batches in seen for batch in batches) == 15  # two more than there are


def test_accelerate_counts_each_row_once(path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    with closing(FastLoader(path, BATCH, shuffle=False, workers=1)) as made:
        loader = accelerator.prepare(made)
        gathered = [accelerator.gather_for_metrics(labels) for _, labels in loader]
    assert sum(map(len, gathered)) == ROWS
    assert torch.equal(torch.cat(gathered), torch.from_numpy(np.arange(ROWS) % 3))


def test_accelerate_cannot_skip_batches_and_the_error_names_the_state_that_can(path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with closing(FastLoader(path, BATCH, workers=1)) as loader:
        with pytest.raises(AttributeError, match=r"skip_first_batches.*state_dict\(\)`.*load_state_dict\(state\)"):
            accelerate.skip_first_batches(loader, 1)
        assert not hasattr(loader, "batch_sampler")


def test_lightning_validates_each_row_once(path, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Counting(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), 0

        def validation_step(self, batch, _):
            labels = batch[1]
            self.seen += len(labels)
            self.log("ones", (labels == 1).float().mean(), batch_size=len(labels))

    module = Counting()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", num_sanity_val_steps=0, default_root_dir=tmp_path, **quiet)
    with closing(FastLoader(path, BATCH, shuffle=False, workers=1)) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [found] = trainer.validate(module, dataloaders=loader, verbose=False)
    assert module.seen == ROWS
    assert found["ones"] == pytest.approx(sum(1 for i in range(ROWS) if i % 3 == 1) / ROWS)
