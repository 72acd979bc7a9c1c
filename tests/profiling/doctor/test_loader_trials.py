"""Trials of what other loaders would cost, on this machine."""

from __future__ import annotations

import functools
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fastload
from fastload.profiling.doctor import examine, trials
from fastload.profiling.doctor.loader_records import LoaderRecord
from fastload.profiling.doctor.trials import ImagesSeen, measure_fastloader, measure_worker
from fastload.profiling.verdict import Demands
from fastload.profiling.verdict.loop_model import WorkerCosts
from fastload.timing.results import WorkTime


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr(trials, "_SECONDS", 0.05)
    monkeypatch.setattr(examine, "mean_others", lambda *_: 0.0)  # beside which nothing would be tried


@pytest.mark.parametrize("seen", [
    ImagesSeen((4, 3, 8, 8), ("Resize((12, 10))", "CenterCrop(8)", "Normalize([0, 0, 0], [1, 1, 1])")),
    ImagesSeen((4, 8, 8, 1), decoded=(20, 30)),
    ImagesSeen((4, 3, 8, 8), ("RandomErasing(value)", "Unknown()", "ColorJitter(0.4)"), decoded=(20, 30)),
    ImagesSeen((1, 3, 8, 8), ("Resize((8, 8))",), decoded=(20, 30)),
])  # fmt: skip
@pytest.mark.parametrize("own_s", [0.0, 0.002])
def test_images_of_any_shape_and_transforms_are_tried(seen, own_s):
    costs = measure_fastloader(seen, own_s, 1.0, transforms=True, pause_s=0.001)
    assert costs.batch.running_s > 0
    assert costs.slows >= 0.5


def test_transforms_are_tried_with_the_arguments_that_are_known_of_the_dataset():
    names = (
        "RandomResizedCrop(8, scale=(0.5, 1))",
        "ColorJitter(0.2, 0.1)",
        "RandomErasing(value)",
        "print('no')",
        "Resize(",
    )
    crop, jitter, *others = trials._transforms(ImagesSeen((4, 3, 8, 8), names))
    assert crop.size == (8, 8) and crop.scale == (0.5, 1) and type(jitter).__name__ == "ColorJitter" and not others


def test_the_step_beside_it_uses_as_many_threads_as_the_loop_does_and_torch_gets_its_own_number_back(monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(
        trials, "_beside_steps", lambda loader, costs, *_: (seen.append(torch.get_num_threads()), costs)[1]
    )
    for own_cpus in (0.2, 2.6):
        measure_fastloader(ImagesSeen((4, 3, 8, 8)), 0.002, own_cpus, transforms=True)
    assert seen == [1, 3] and torch.get_num_threads() == before


def test_of_batches_too_large_for_memory_a_part_is_tried_and_counts_for_all(monkeypatch):
    tried = []
    monkeypatch.setattr(trials, "_MOST_BYTES", 16 * 3 * 8 * 8 * 4)
    monkeypatch.setattr(trials, "_MOST_HANDED", 1000)
    from fastload.loader.loader import FastLoader

    init = FastLoader.__init__
    monkeypatch.setattr(
        FastLoader,
        "__init__",
        lambda self, file, size, **words: (tried.append(size), init(self, file, size, **words))[0],
    )
    costs = measure_fastloader(ImagesSeen((1 << 20, 3, 8, 8)), 1000.0, 1.0, transforms=True)
    assert tried == [16, 16], "in a long epoch, and in short ones"
    assert costs.batch.running_s > 1e-9 * (1 << 20)
    assert measure_worker([1 << 40, 1 << 20]).batch.total_s > 0


@pytest.mark.parametrize("which", ["measure_worker", "measure_fastloader"])
def test_a_trial_that_fails_is_named_and_the_verdict_stays(monkeypatch, which):
    def fails(*_, **__):
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(examine, which, fails)
    monkeypatch.setattr(examine, "keeps_transform", lambda loader: False)
    loader = DataLoader(Images(2000), 10, num_workers=2)
    found = fastload.diagnose(loader, lambda batch: None, seconds=1.0)
    assert found.verdict.cause
    assert re.search(
        "a trial of .* failed, .*: ModuleNotFoundError: No module named 'torch'", "\n".join(found.verdict.evidence)
    )


def test_many_tensors_a_batch_are_tried_as_one(monkeypatch):
    tried = []
    monkeypatch.setattr(
        examine, "measure_worker", lambda sizes, **kw: (tried.append((sizes, kw)), measure_worker(sizes, **kw))[1]
    )
    found = fastload.diagnose(DataLoader(Rows(), None, num_workers=1), lambda batch: None, seconds=1.5)
    assert tried == [((32,) * 40, {}), ((32,) * 40, {"as_one": True})]
    [whole] = trials._Ready([8, 0, 24], as_one=True)[0]
    assert len(whole) == 33
    assert "a trial here: copied into one tensor such a batch costs a worker" in "\n".join(found.verdict.evidence)
    assert "fastload pack" not in found.verdict.sentence, "these are no images"


@pytest.mark.parametrize("floats", [True, False])
def test_what_turns_images_into_floats_is_part_of_the_change_where_batches_hold_such(monkeypatch, floats):
    tried = []
    monkeypatch.setattr(
        examine,
        "measure_fastloader",
        lambda seen, *args, **kw: (tried.append(seen), measure_fastloader(seen, *args, **kw))[1],
    )
    # Workers that begin at once, so that some are worth it however busy this machine is.
    monkeypatch.setattr(examine, "measure_worker", lambda sizes: WorkerCosts(WorkTime(1e-4)))
    dataset = Images(400)
    dataset.transform = ToTensor() if floats else ToNumpy()
    dataset.dtype = torch.float32 if floats else torch.uint8
    found = fastload.diagnose(DataLoader(dataset, 10), lambda batch: None, seconds=1.0)
    floating = "Normalize([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])"
    assert tried[0].transforms == (("ToTensor()", floating) if floats else ("ToNumpy()",))
    assert (f"transform=[{floating}]" in "".join(cure.how for cure in found.verdict.cures)) == floats


class Rows(Dataset):
    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        return [torch.full((8,), float(index)) for _ in range(40)]


class Images(Dataset):
    def __init__(self, count):
        self.count, self.transform, self.dtype = count, ToTensor(), torch.float32

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.004)
        return self.transform(torch.zeros(3, 4, 4, dtype=self.dtype)), index


class ToTensor:
    def __call__(self, image):
        return torch.as_tensor(image)


class ToNumpy(ToTensor):
    pass


def test_fastloader_is_tried_where_it_could_be_worth_it_though_no_change_is_known_to_be(monkeypatch):
    tried = []
    monkeypatch.setattr(
        examine, "judge", lambda asked: SimpleNamespace(cause="compute", worth_making=asked.by_fastloader is not None)
    )
    for name in ("format", "worker", "one_tensor", "fastloader"):
        trial = functools.partial(lambda name, asked, loader: (tried.append(name), asked)[1], name)
        monkeypatch.setattr(examine, f"_with_{name}_trial", trial)
    examine._judged(Demands((), (), 0, 1, 2), LoaderRecord({}, {}), ())
    assert tried == ["format", "fastloader"]
