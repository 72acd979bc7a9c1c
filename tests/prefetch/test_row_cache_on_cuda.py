"""Rows kept for a GPU: the same batches as on the CPU, without a synchronization in the loop."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from fastload.dataset import PackedDataset
from fastload.errors import CacheError
from fastload.loader.loader import FastLoader
from fastload.transforms.engine import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N, SHAPE = 700, (48, 40, 3)


@pytest.fixture(scope="module", params=[np.uint8, np.uint16])
def packed(request, packed_file):
    path = packed_file(
        rows=N, size=SHAPE, seed=5, below=250, dtype=request.param, classes="abcdefg", masks=True, chunk_rows=64
    )
    return PackedDataset(path, fields=["images", "masks", "labels", "row", "valid"])


def on_cpu(batch):
    # uint16 is not compared on every device
    return [t.cpu() for t in batch], batch.rows.tolist(), batch.valid.tolist(), batch.global_valid


@pytest.mark.parametrize("cache", ["device", "host"])
@pytest.mark.parametrize("ends", ["drop", "exact"])
def test_batches_are_those_of_the_cpu_while_the_compute_stream_is_busy(packed, cache, ends):
    expected = [
        (list(batch), batch.rows.tolist(), batch.valid.tolist(), batch.global_valid)
        for batch in FastLoader(packed, 64, ends=ends, seed=3)
    ]
    loader = FastLoader(packed, 64, ends=ends, seed=3, cache=cache, device="cuda")
    kept, work = [], torch.ones((2048, 2048), device="cuda")
    for batch in loader:
        assert batch[0].is_cuda and batch[0].is_contiguous(memory_format=torch.channels_last)
        for _ in range(20):  # the step's kernels queue up: the host runs far ahead of them
            work = work @ work / 2048
        kept.append(batch)
    for batch, (fields, *rest) in zip(kept, expected, strict=True):
        tensors, *found = on_cpu(batch)
        assert found == rest
        for tensor, field in zip(tensors, fields, strict=True):
            assert tensor.dtype == field.dtype and np.array_equal(tensor.numpy(), field.numpy())


def test_pinned_rows_are_in_memory_that_the_device_reads_and_are_given_back(packed):
    loader = FastLoader(packed, 64, cache="host", device="cuda")
    list(loader)
    images = loader._producer.pool._opened.cache.tensors["images"]
    assert images.is_pinned() and not images.is_cuda
    held = weakref.ref(images)
    del images
    loader.close()
    gc.collect()
    assert held() is None


def test_rows_of_the_host_are_gathered_by_a_kernel_and_never_on_the_compute_stream(packed, monkeypatch):
    if not gpu.kernel_runs(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("Triton does not run here")
    gather_rows, streams = gpu.gather_rows, []

    def seen(*args, **options):
        streams.append(torch.cuda.current_stream())
        return gather_rows(*args, **options)

    monkeypatch.setattr(gpu, "gather_rows", seen)
    loader = FastLoader(packed, 64, cache="host", device="cuda")
    count = len(list(loader))
    assert len(streams) >= 3 * count and torch.cuda.current_stream() not in streams
    loader.close()


def test_device_memory_is_free_again_after_close_and_another_load(packed):
    loader = FastLoader(packed, 64, cache="device", device="cuda")
    for _ in range(3):
        list(loader)
        held = torch.cuda.memory_allocated()
        loader.close()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= held - N * 48 * 40 * 3


def test_more_than_the_device_has_is_refused(packed, monkeypatch):
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.95), dtype=torch.uint8, device="cuda")
    with pytest.raises(CacheError, match="bytes are missing"):
        FastLoader(packed, 64, cache="device", device="cuda")
    del taken
    torch.cuda.empty_cache()
