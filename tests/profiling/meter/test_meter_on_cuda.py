"""Events on a GPU: what the device waited for, not the host that runs ahead."""

from __future__ import annotations

import pytest
import torch

from fastload import FastLoader, Meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_steps_on_a_gpu_add_up_and_its_counters_are_read(packed_file):
    path = packed_file(rows=256, size=(64, 64, 3), chunk_rows=32)
    weight = torch.rand(2048, 2048, device="cuda")
    with Meter(ranges=True, sample_every_s=0.01) as meter:
        for (images,) in meter.watch(FastLoader(path, 16, device="cuda")):
            for _ in range(50):
                weight = weight @ weight / 2048
            assert images.is_cuda
    measured = meter.measured("cuda")
    assert measured.num_steps == 16 and all(step.compute_s > 0 for step in measured.steps[1:-1])
    assert all(min(step.wait_s, step.copy_s, step.transform_s) >= 0 for step in measured.steps)
    assert "GPU" in measured.environment
    assert "gpu" in meter.absent or any("gpu0.memory_bytes" in one for one in measured.readings)
