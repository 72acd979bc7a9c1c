"""What a FastLoader tells a Meter: the same batches, and the cost of each stage where it is done."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import torch
from hand_clock import Device, HandClock, times
from PIL import Image
from torch.utils.data import Dataset

from fastload import FastLoader, Meter, MixedEcho, PackedDataset
from fastload.timing.probe import is_probed
from fastload.transforms import CenterCrop, Normalize, RandomHorizontalFlip

N, SHAPE, B = 64, (32, 24, 3), 8
PACKED = {"rows": N, "size": SHAPE, "seed": 5, "classes": "abcdefg", "chunk_rows": 8}


def slow_third(sample):
    image, label = sample
    if int(label) == 3:
        time.sleep(0.02)
    return image.flip(-1), label


class Jpegs(Dataset):
    """Reads, decodes and turns an image, as an image folder does."""

    def __init__(self, path):
        self.path = path
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)

    def __len__(self):
        return N

    def __getitem__(self, index):
        with open(self.path, "rb") as file:
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1), index


def measured(loader, epochs=2):
    with Meter(sample_every_s=0) as meter:
        rows = [batch.rows.tolist() for _ in range(epochs) for batch in meter.watch(loader)]
    return meter, rows


PIPELINE = [CenterCrop(16), Normalize((0.5,) * 3, (0.2,) * 3)]
LOADERS = {
    "threads": ({}, {"reading"}),
    "augmenting threads": ({"transform": PIPELINE}, {"reading", "transform"}),
    "exact ends": ({"ends": "exact", "batch_size": 11}, {"reading"}),
    "pread": ({"read": "pread", "workers": 1}, {"reading"}),
    "echo": ({"echo": 2, "transform": [RandomHorizontalFlip()]}, {"reading"}),
    "mixed echo": ({"echo": MixedEcho(2, distance=3)}, {"reading"}),
}


@pytest.mark.parametrize("name", LOADERS)
def test_watching_changes_nothing_and_tells_the_stages(packed, name):
    options, stages = LOADERS[name]
    options = {"batch_size": B, "seed": 3, **options}
    loader, plain = FastLoader(packed, **options), FastLoader(packed, **options)
    meter, rows = measured(loader)
    assert rows == [batch.rows.tolist() for _ in range(2) for batch in plain]
    assert loader.state_dict() == plain.state_dict() and loader.stats.steps == plain.stats.steps
    found, demands = meter.measured(name), meter.demands()
    assert set(found.stages) == stages and found.stages["reading"].running_s > 0
    assert len(demands.steps) == len(demands.batches) == found.num_steps == len(rows)
    assert demands.is_fastload and demands.by_threads and 0 < demands.workers < demands.ahead
    assert all(step.queue_depth is not None and 0 <= step.queue_depth <= demands.ahead for step in demands.steps)
    assert sum(step.samples for step in demands.steps) == (2 * N * (2 if "echo" in options else 1))
    assert demands.receive_s > 0 and len(demands.startups_s) == 2
    assert found.verdict is not None and found.verdict == meter.verdict
    if name == "echo":  # a batch that is used again costs nothing to make
        assert [bool(batch.stages) for batch in demands.batches] == [True, False] * (2 * N // B)
        assert meter.totals.batches == 2 * N // B


def test_worker_processes_tell_transform_collate_and_slow_samples(packed):
    loader = FastLoader(PackedDataset(packed, transform=slow_third), B, workers=1, shuffle=False)
    meter, rows = measured(loader, epochs=1)
    loader.close()
    assert rows == np.arange(N).reshape(-1, B).tolist()
    demands = meter.demands()
    assert (demands.workers, demands.ahead, demands.by_threads) == (1, 2, False)
    assert set(meter.totals.stages) == {"reading", "transform", "collate"}
    # One sample or two of each batch sleep; they are blocked, and by nothing that reads.
    assert all(batch.stages["transform"].blocked_s > 0.01 for batch in demands.batches)
    assert all(batch.slow_s > 0.01 for batch in demands.batches)


def test_a_datasets_decoding_is_told_from_its_transform(tmp_path):
    loader = FastLoader(Jpegs(tmp_path / "a.jpg"), B, workers=2)
    meter, _ = measured(loader, epochs=1)
    assert {"reading", "decoding", "transform", "collate"} <= set(meter.totals.stages)
    assert meter.totals.stages["decoding"].running_s > 0 and meter.totals.batches == N // B
    # Not watched, the same workers measure nothing.
    with Meter(sample_every_s=0) as other:
        for number, _ in enumerate(loader):
            if number == 2:
                list(other.watch([1]))
    loader.close()
    assert other.measured().stages == {}


def test_compressed_chunks_are_decoded(compressed):
    meter, _ = measured(FastLoader(compressed, B, shuffle=False), epochs=1)
    assert set(meter.totals.stages) == {"reading", "decoding"} and meter.totals.stages["decoding"].running_s > 0


@pytest.mark.filterwarnings("ignore:the samples' shapes")
def test_batches_that_go_around_their_slots_are_told_too():
    ragged = [torch.zeros(3, 8 + index // B % 2, 8) for index in range(N)]  # every other batch does not fit its slot
    loader = FastLoader(ragged, B, workers=1, shuffle=False)
    with Meter(sample_every_s=0) as meter:
        assert [images.shape[2] for (images,) in meter.watch(loader)] == [8, 9] * (N // B // 2)
    loader.close()
    demands = meter.demands()
    assert len(demands.batches) == N // B and all(batch.stages["collate"].running_s > 0 for batch in demands.batches)


def test_on_a_device_what_the_copy_is_waited_for_is_told(packed):
    clock = HandClock(behind=True)
    loader = FastLoader(packed, B, device=Device(clock), echo=2)
    with Meter(device=clock, sample_every_s=0) as meter:
        for _ in meter.watch(loader):
            clock.now += 5
    # The second use is handed over as well: the user may have gone on to another stream.
    assert {times(step)[1:] for step in meter.measured().steps} <= {(1, 0, 5), (0, 1, 5), (0, 0, 5)}
    assert [step.copy_s for step in meter.measured().steps][::2] == [1] * (N // B)


def test_a_meter_watches_some_epochs_and_not_others(packed):
    loader = FastLoader(packed, B, seed=1)
    seen = []
    with Meter(sample_every_s=0) as meter:
        for epoch in range(4):
            for batch in meter.watch(loader) if epoch % 2 else loader:
                seen.append((epoch, batch.rows.tolist()))
    assert meter.totals.steps == 2 * N // B
    assert seen == [(epoch, batch.rows.tolist()) for loader in [FastLoader(packed, B, seed=1)] for epoch in range(4)
                    for batch in loader]  # fmt: skip


def test_breaking_off_and_an_error_leave_the_loader_as_without_a_meter(packed):
    loader = FastLoader(packed, B)
    with Meter(sample_every_s=0) as meter:
        for _ in meter.watch(loader):
            break
        assert loader._running() is None, "the pass ended with the loop"
        with pytest.raises(ZeroDivisionError):
            for _ in meter.watch(loader):
                _ = 1 // 0
    assert meter.totals.steps == 2
    assert len(list(loader)) == N // B


def test_a_subclass_with_its_own_iter_is_taken_as_it_is(packed):
    class Pairs(FastLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch, len(batch.rows)

    loader = Pairs(packed, B)
    assert is_probed(FastLoader(packed, B)) and not is_probed(loader) and not is_probed([1])
    with Meter(sample_every_s=0) as meter:
        assert all(count == B for _, count in meter.watch(loader))
    assert not meter.demands().is_fastload and meter.totals.stages == {}
