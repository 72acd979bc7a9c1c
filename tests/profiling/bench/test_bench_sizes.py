"""Files whose images differ in size, and --size: the same crop in the loader, its rivals and the call to paste."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fastload import OptionError, pack_images
from fastload.format.ragged import Column
from fastload.options.measure import BenchOptions, TuneOptions
from fastload.profiling.bench.benchmark import run_bench
from fastload.profiling.bench.rivals import plain_loaders
from fastload.profiling.bench.subject import CropSample, Subject, random_window
from fastload.profiling.tune.search import Search
from sample_files import write_packed, write_ragged


@pytest.fixture
def varied(tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*rng.integers(20, 50, 2), 3), np.uint8) for _ in range(48)]
    return write_ragged(tmp_path / "varied.h5", images, {"labels": Column(np.arange(48) % 3)})


def test_images_that_differ_in_size_are_cropped_in_every_way(varied):
    options = BenchOptions(seconds=0.2, batch_size=4, workers=1, compare=True, faults=("kill-worker",))
    found = run_bench(varied, options)
    facts = dict(found.runs[0].facts)
    assert facts["images"].startswith("RandomResizedCrop(224) makes them 224 x 224, since these images differ in size")
    assert "differ in size" in facts["over np.take"]
    (kill,) = found.faults
    assert len(found.rivals) == 1 and kill.each_once and kill.samples == 48
    content = json.loads(json.dumps(found.to_dict()))
    assert content["crop"] == [224, 224] and content["options"]["size"] is None


def test_all_ways_give_the_size_asked_for_and_without_one_fixed_files_are_as_before(tmp_path, varied, image_folder):
    folder = image_folder(per_class=8)
    pack_images(folder, tmp_path / "photos.h5")
    options = BenchOptions(batch_size=4, workers=1, compare=True, source=folder, size=(10, 8))
    subject = Subject(tmp_path / "photos.h5", options)
    rows = subject.rows(2, 10)
    assert next(iter(subject.shared_loader()))[0].shape == (4, 3, 10, 8)
    ways = plain_loaders(subject, rows)
    assert [next(iter(way))[0].shape for way in ways.values()] == [(4, 3, 10, 8)] * 2
    subject.close()
    plain = Subject(tmp_path / "photos.h5", BenchOptions(batch_size=4))
    assert plain.crop is None and next(iter(plain.shared_loader()))[0].shape[1:] == plain.image_shape
    plain.close()
    with pytest.raises(OptionError, match="a size is a positive whole number"):
        Subject(varied, BenchOptions(size=0))


def test_windows_lie_inside_and_have_such_proportions():
    torch.manual_seed(0)
    for height, width in ((40, 50), (1, 1), (3, 400), (400, 3)):
        for _ in range(50):
            top, left, tall, wide = random_window(height, width)
            assert 0 <= top <= height - tall and 0 <= left <= width - wide and tall >= 1 and wide >= 1
    same = CropSample((5, 5))((torch.full((3, 20, 30), 7, dtype=torch.uint8), torch.tensor(1)))
    assert same[0].dtype == torch.uint8 and (same[0] == 7).all() and same[1] == 1
    assert CropSample((5, 5))((torch.full((1, 20, 30), 40_000, dtype=torch.uint16),))[0].dtype == torch.uint16


def test_tune_prints_the_transform_that_it_tried(varied, tmp_path):
    result = Search(varied, TuneOptions(seconds=0.3, batch_size=8, size=(12, 10))).run()
    assert "transform=[RandomResizedCrop((12, 10))]" in result.call and result.to_dict()["crop"] == (12, 10)
    assert any("from fastload.transforms import RandomResizedCrop" in note for note in result.notes)
    search = Search(varied, TuneOptions(seconds=0.3, batch_size=8))
    assert search.call(search.default).endswith("transform=[RandomResizedCrop(224)])") and search.traits.linear
    fixed = Search(write_packed(tmp_path / "fixed.h5", np.zeros((64, 8, 8, 3), np.uint8)), TuneOptions(batch_size=8))
    assert "transform=" not in fixed.call(fixed.default) and fixed.crop is None
