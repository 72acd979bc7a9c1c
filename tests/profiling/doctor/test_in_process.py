"""`fastload.diagnose`: the doctor in the user's own process."""

from __future__ import annotations

import importlib
import os
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fastload
from fastload import FastLoader, OptionError
from fastload.timing.results import WAITING


class Waits(Dataset):
    def __init__(self, count=400, wait_s=0.004):
        self.count, self.wait_s = count, wait_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.zeros(3, 4, 4), index


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(10_000):
            time.sleep(0.001)
            yield number


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_waits_for_its_samples_is_bound_by_that_and_the_step_is_not_blamed(workers):
    for seconds in (
        1.5,
        5.0,
        15.0,
    ):  # the line is found by samples, of which a busy machine takes too few in a short run
        seen = []
        found = fastload.diagnose(DataLoader(Waits(4000), 10, num_workers=workers), seen.append, seconds=seconds)
        if found.verdict.cause == WAITING and "at __getitem__" in found.verdict.sentence:
            break  # on a busy machine the start of the workers may take most of a short run
    assert found.verdict.cause == WAITING
    assert "at __getitem__ (test_in_process.py:" in found.verdict.sentence
    assert re.search(rf"num_workers=\d+ instead of {workers}:", found.verdict.sentence)
    assert "to do it: DataLoader(..., num_workers=" in str(found)
    assert found.measured.stages[WAITING].blocked_s >= 5 * 0.004
    assert found.measured.num_steps <= len(seen) and found.measured.headspace_samples_per_s is not None
    assert str(found).splitlines()[-1] == f"verdict: {found.verdict.sentence}."


def test_a_step_that_takes_the_time_is_what_binds(monkeypatch):
    judge = importlib.import_module("fastload.profiling.verdict.judge")  # the package has a function of that name
    monkeypatch.setattr(judge, "_is_held", lambda *_: False)  # other tests may run, which is not what is judged here

    def step(batch):
        batch[0].to("cpu", torch.float64)
        time.sleep(0.1)

    found = fastload.diagnose(DataLoader(Waits(wait_s=0.0), 10), step, seconds=2.0)
    assert found.verdict.cause == "compute" and not found.verdict.worth_making
    assert found.measured.stages["copy to the device"].running_s > 0


def test_an_iterable_dataset_is_measured_and_what_cannot_be_is_named():
    assert fastload.diagnose(DataLoader(Stream(), 16), seconds=0.5).verdict.cause == WAITING
    with pytest.raises(OptionError, match="DataLoader or a FastLoader"):
        fastload.diagnose([1, 2, 3])
    with pytest.raises(OptionError, match="no batch"):
        fastload.diagnose(DataLoader(Waits(0), 10))
    for count in (10, 40):  # with one batch a pass, and with several, a step is seen however short the time
        assert fastload.diagnose(DataLoader(Waits(count, wait_s=0.002), 10), seconds=1e-6).measured.num_steps == 1


def test_a_fastloader_is_told_from_inside(tmp_path, image_folder):
    fastload.pack_images(image_folder(size=(32, 32)), tmp_path / "photos.h5")
    with_transform = FastLoader(tmp_path / "photos.h5", 4, transform=[fastload.transforms.RandomResizedCrop(16)])
    found = fastload.diagnose(with_transform, lambda batch: time.sleep(0.001), seconds=3.0)
    assert {"reading", "transform"} <= set(found.measured.stages)
    assert f"fastload.FastLoader of {tmp_path / 'photos.h5'}" in " ".join(found.verdict.evidence)


def test_afterwards_nothing_is_metered_and_the_environment_is_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    for workers in (0, 1):  # those of the second loader live on
        loader = DataLoader(Waits(40, wait_s=0.0), 10, num_workers=workers, persistent_workers=workers > 0)
        fastload.diagnose(loader, seconds=1.0)
        iterator = iter(loader)
        assert (workers or "_fastload_doctor" not in vars(iterator)) and len(list(iterator)) == 4
    assert dict(os.environ) == before and list(tmp_path.iterdir()) == []
