"""What a FastLoader tells a Meter and a profiler: the same batches, and the cost of each stage where it is done."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import torch
from hand_clock import Device, HandClock, times
from PIL import Image
from small_loaders import loader_of
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from fastload import FastLoader, Meter, MixedEcho, PackedDataset
from fastload.timing.probe import is_probed, span
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


def rows_of(batch):
    return batch.rows.tolist()


def measured(loader, epochs=1, of=rows_of):
    with Meter(sample_every_s=0) as meter:
        found = [of(batch) for _ in range(epochs) for batch in meter.watch(loader)]
    return meter, found


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
    loader, plain = loader_of(packed, **options), loader_of(packed, **options)
    meter, rows = measured(loader, epochs=2)
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


def test_what_was_read_ahead_while_nobody_measured_is_not_taken_for_measured(packed):
    loader = FastLoader(packed, B, workers=1)
    for _ in loader:
        pass
    meter, _ = measured(loader)
    batches = meter.demands().batches
    assert len(batches) == N // B and all(batch.stages for batch in batches)


def test_worker_processes_tell_transform_collate_and_slow_samples(packed):
    loader = FastLoader(PackedDataset(packed, transform=slow_third), B, workers=1, shuffle=False)
    meter, rows = measured(loader)
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
    meter, _ = measured(loader)
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
    meter, _ = measured(FastLoader(compressed, B, shuffle=False))
    assert set(meter.totals.stages) == {"reading", "decoding"} and meter.totals.stages["decoding"].running_s > 0


@pytest.mark.filterwarnings("ignore:the samples' shapes")
def test_batches_that_go_around_their_slots_are_told_too():
    ragged = [torch.zeros(3, 8 + index // B % 2, 8) for index in range(N)]  # every other batch does not fit its slot
    loader = FastLoader(ragged, B, workers=1, shuffle=False)
    meter, heights = measured(loader, of=lambda batch: batch[0].shape[2])
    loader.close()
    assert heights == [8, 9] * (N // B // 2)
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


def test_epochs_that_are_not_watched_or_broken_off_or_raise_are_as_without_a_meter(packed):
    loader, plain = FastLoader(packed, B, seed=1), FastLoader(packed, B, seed=1)
    with Meter(sample_every_s=0) as meter:
        seen = [rows_of(batch) for epoch in range(4) for batch in (meter.watch(loader) if epoch % 2 else loader)]
        assert meter.totals.steps == 2 * N // B
        for _ in meter.watch(loader):
            break
        assert loader._running() is None, "the pass ended with the loop"
        with pytest.raises(ZeroDivisionError):
            for _ in meter.watch(loader):
                _ = 1 // 0
    assert meter.totals.steps == 2 * N // B + 2
    assert seen == [rows_of(batch) for _ in range(4) for batch in plain] and len(list(loader)) == N // B


def test_a_subclass_with_its_own_iter_is_taken_as_it_is(packed):
    class Pairs(FastLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch, len(batch.rows)

    loader = Pairs(packed, B)
    assert is_probed(FastLoader(packed, B)) and not is_probed(loader) and not is_probed([1])
    meter, counts = measured(loader, of=lambda pair: pair[1])
    assert counts == [B] * (N // B) and not meter.demands().is_fastload and meter.totals.stages == {}


def names_of(profiler):
    return {event.key for event in profiler.key_averages() if event.key.startswith("fastload.")}


def test_a_profiler_shows_the_stages_and_under_a_meter_the_waits_of_any_loader(packed):
    loader = FastLoader(packed, B, transform=[RandomHorizontalFlip()], echo=2, device=Device(HandClock()))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert len(list(loader)) == 2 * N // B
    assert names_of(profiler) == {"fastload.wait", "fastload.transform"}, "another thread copies"
    wait = next(event for event in profiler.key_averages() if event.key == "fastload.wait")
    assert wait.count == 2 * N // B + 1  # and once to learn that there is no more
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        measured([torch.zeros(1)] * 3, of=len)
    assert names_of(profiler) == {"fastload.wait"}
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        pytest.skip("this torch cannot record all threads")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        list(FastLoader(packed, B, transform=[RandomHorizontalFlip()], device=Device(HandClock())))
    assert {"fastload.wait", "fastload.read", "fastload.copy", "fastload.transform"} <= names_of(profiler)


def test_ranges_are_off_unless_a_meter_asks_for_them():
    assert span("wait") is span("read")
    with Meter(sample_every_s=0, ranges=True):
        assert span("wait") is not span("wait")
        with Meter(sample_every_s=0, ranges=True), span("copy"):
            pass
        with pytest.raises(KeyError), span("copy"):
            raise KeyError
    assert span("wait") is span("read")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_add_up_and_its_counters_are_read(packed_file):
    path = packed_file(rows=256, size=(64, 64, 3), chunk_rows=32)
    weight = torch.rand(2048, 2048, device="cuda")
    with Meter(ranges=True, sample_every_s=0.01) as meter:
        for (images,) in meter.watch(FastLoader(path, 16, device="cuda")):
            for _ in range(50):  # the host runs ahead of it
                weight = weight @ weight / 2048
            assert images.is_cuda
    measured = meter.measured("cuda")
    assert measured.num_steps == 16 and all(step.compute_s > 0 for step in measured.steps[1:-1])
    assert all(min(step.wait_s, step.copy_s, step.transform_s) >= 0 for step in measured.steps)
    assert "GPU" in measured.environment
    assert "gpu" in meter.absent or any("gpu0.memory_bytes" in one for one in measured.readings)
