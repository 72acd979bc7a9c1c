"""Rows in pinned host memory: gathered on the side stream ahead of their use, by a kernel or by the CPU.

As a script under Triton's interpreter it runs the loader with the kernel, and prints what went wrong with each case.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from late_backend import Device
from small_files import write_random

from fastload.dataset import PackedDataset
from fastload.loader.loader import FastLoader
from fastload.prefetch.producer import READY_ON_DEVICE
from fastload.transforms import Normalize, RandomHorizontalFlip
from fastload.transforms.engine import gpu

PACKED = {"rows": 40, "size": (10, 8, 3), "seed": 5, "classes": "abcdefg", "masks": True, "chunk_rows": 8}

# Shape and type of an image, and the loader's options besides. Fields lie on pages of their own.
CASES = {
    "rows of 16 bytes times 15": ((10, 8, 3), np.uint8, {}),
    "rows of 4 bytes times 35": ((7, 20, 1), np.uint8, {}),
    "rows of bytes": ((9, 7, 3), np.uint8, {}),
    "rows longer than a piece": ((64, 61, 3), np.uint8, {}),
    "16 bits": ((9, 6, 3), np.uint16, {}),
    "a short last batch": ((10, 8, 3), np.uint8, {"ends": "exact"}),
    "echo": ((10, 8, 3), np.uint8, {"echo": 3}),
    "echo, transformed": (
        (10, 8, 3),
        np.uint8,
        {"echo": 2, "transform": [RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3)]},
    ),
    "a share": ((10, 8, 3), np.uint8, {"share": (1, 2)}),
}
FOREIGN = {
    "channels first": ((3, 9, 7), np.uint8),
    "16 bits, channels first": ((3, 9, 7), np.uint16),
    "no channels": ((9, 7), np.uint8),
}


class Interpreted(Device):
    """A device whose kernels are run by Triton's interpreter."""

    reads_host = True


class Counting(Device):
    """A device that notes what its side stream is given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.launched = []

    def run_kernel(self, kernel, source):
        super().run_kernel(kernel, source)
        self.launched.append(kernel)


def dataset_of(name, folder):
    path = folder / "file.h5"
    if name in FOREIGN:
        shape, dtype = FOREIGN[name]
        with h5py.File(path, "w") as file:
            file["images"] = np.random.default_rng(0).integers(0, 250, (31, *shape)).astype(dtype)
            file["labels"] = np.arange(31, dtype=np.int16)
        return PackedDataset(path), {}
    shape, dtype, options = CASES[name]
    write_random(path, rows=31, size=shape, dtype=dtype, classes="abcdefg", boxes=True, masks=True, below=250)
    # Flips refuse masks and boxes of images that they do not know; they are fields of their own.
    fields = ["images", "labels", "masks", "bbox", "row", "valid"]
    return PackedDataset(path, fields=fields if "transform" not in options else ["images", "labels", "masks"]), options


def check(name, device, folder):
    """Asserts that cached rows come as rows from the file do."""
    dataset, options = dataset_of(name, folder)
    expected = FastLoader(dataset, 8, seed=3, **options)
    loader = FastLoader(dataset, 8, seed=3, cache="host", device=device, **options)
    for _ in range(2):
        batches = list(expected)
        assert len(batches) == len(loader) > 0
        for batch, other in zip(loader, batches, strict=True):
            assert batch.rows.tolist() == other.rows.tolist() and batch.valid.tolist() == other.valid.tolist()
            for tensor, right in zip(batch, other, strict=True):
                assert tensor.dtype == right.dtype and torch.equal(tensor, right), name
            assert batch[0].is_contiguous(memory_format=torch.channels_last)
            for tensor in batch:  # a user's, who may write to it
                tensor.zero_()
    loader.close()


def main():
    """Prints, by case, what went wrong."""
    errors = {}
    gather_rows, calls = gpu.gather_rows, []

    @functools.wraps(gather_rows)
    def counted(*args, **options):
        calls.append(args)
        return gather_rows(*args, **options)

    gpu.gather_rows = counted
    for name in (*CASES, *FOREIGN):
        with tempfile.TemporaryDirectory() as folder:
            before = len(calls)
            try:
                check(name, Interpreted(), Path(folder))
                assert len(calls) > before, "the kernel was not used"
                errors[name] = None
            except Exception:  # noqa: BLE001  # whatever it is, the test of that case shows it
                errors[name] = traceback.format_exc()
    print(json.dumps(errors))


@pytest.fixture(scope="module")
def errors_under_the_interpreter(run_interpreted):
    return json.loads(run_interpreted(Path(__file__)))


@pytest.mark.skipif(not gpu.triton_available(), reason="Triton is not installed")
@pytest.mark.parametrize("name", [*CASES, *FOREIGN])
def test_the_kernel_brings_the_rows_of_the_file(errors_under_the_interpreter, name):
    error = errors_under_the_interpreter[name]
    if error and "only 0-dimensional arrays can be converted" in error:
        pytest.skip("this Triton's interpreter cannot read loop bounds with NumPy 2.4 or newer")
    assert error is None, error


@pytest.mark.parametrize("patience", [1, 4])
@pytest.mark.parametrize("name", [*CASES, *FOREIGN])
def test_without_the_kernel_the_cpu_gathers_the_same(tmp_path, name, patience):
    check(name, Device(patience), tmp_path)


def test_rows_are_under_way_before_they_are_asked_for_and_once_for_all_uses(packed):
    device = Counting()
    dataset = PackedDataset(packed, fields=["images", "labels", "masks"])
    loader = FastLoader(dataset, 8, cache="host", device=device, echo=2, shuffle=False)
    uses = iter(loader)
    next(uses)
    one_batch = 5  # its slot, what is small in it, and three fields
    ahead = 1 + READY_ON_DEVICE
    while len(device.launched) < ahead * one_batch:  # as much as is brought there ahead
        time.sleep(1e-3)
    next(uses)
    time.sleep(0.01)
    assert len(device.launched) == ahead * one_batch, "the second use of the first batch reads nothing"
    next(uses)
    while len(device.launched) < (ahead + 1) * one_batch:  # behind the second batch one more
        time.sleep(1e-3)


def test_what_is_fetched_belongs_to_the_side_stream_and_is_known_to_be_read_by_the_loops(packed):
    device = Device(patience=1)
    loader = FastLoader(PackedDataset(packed, fields=["images", "masks"]), 8, cache="host", device=device)
    batches = iter(loader)
    device.readers.clear()
    waits = device.host_waits
    batch = next(batches)
    # Row and valid; images; masks.
    assert len(device.readers) == len(set(device.readers)) == 3
    assert {tensor.untyped_storage().data_ptr() for tensor in batch} < set(device.readers)
    assert list(batches) and device.host_waits == waits


if __name__ == "__main__":
    main()
