"""The stages one by one: `pytest benchmarks/`. For whoever changes a stage and wants to see what that did to it.

Sizes are those of a CelebA batch (256 rows of 218x178x3) unless said otherwise. pytest-benchmark's own options apply:
`--benchmark-autosave` and `--benchmark-compare` set two states of the code side by side.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fastload.format.digests import row_digests
from fastload.format.header import read_header
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.plan import EpochPlan, permute
from fastload.read.reader import open_rows
from fastload.transforms import CenterCrop, Draws, Normalize, RandomCrop, RandomHorizontalFlip
from sample_files import write_packed

pytest.importorskip("pytest_benchmark")

ROWS, BATCH, HEIGHT, WIDTH = 1024, 256, 218, 178


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed file of 1,024 rows, 120 MB, of noise."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, HEIGHT, WIDTH, 3), dtype=np.uint8)
    return write_packed(tmp_path_factory.mktemp("stages") / "faces.h5", images)


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    """uint8 (256, 3, 218, 178) in channels_last memory, as the loader hands it to transforms."""
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, HEIGHT, WIDTH, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def draws() -> Draws:
    """Draws for one batch."""
    return Draws(0, 0, np.arange(BATCH), 0)


def photo() -> NDArray[np.uint8]:
    """A picture that compresses about as a photo does."""
    ys, xs = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [128 + 90 * np.sin(xs / (9 + 4 * c)) * np.cos(ys / (7 + 5 * c)) for c in range(3)]
    noise = np.random.default_rng(0).normal(0, 4, (HEIGHT, WIDTH, 3))
    return np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("shuffle", ["chunk", "full"])
def test_plan_one_batch_of_a_billion_rows(benchmark, shuffle):
    def first_batch() -> None:
        plan = EpochPlan(
            range(1_000_000_000), chunk_rows=72, seed=1, world_size=1024, batch_size=BATCH, shuffle=shuffle
        )
        next(plan.batches(517))

    benchmark(first_batch)


def test_plan_a_whole_epoch_of_celeba(benchmark):
    plan = EpochPlan(range(202_599), chunk_rows=72, batch_size=BATCH, shuffle="chunk")
    benchmark.pedantic(lambda: sum(1 for _ in plan.batches(0)), rounds=3)


def test_permute_8192_positions(benchmark):
    positions = np.arange(8192, dtype=np.int64)
    benchmark(permute, positions, 1_000_000_007, 12345)


def test_read_gather_one_batch(benchmark, packed):
    rows = np.random.default_rng(1).permutation(ROWS)[:BATCH].astype(np.int64)
    out = np.empty((BATCH, HEIGHT, WIDTH, 3), np.uint8)
    reader = open_rows(read_header(packed), ("images",))
    try:
        benchmark(reader.gather, rows, {"images": out})
    finally:
        reader.close()


def test_read_numpy_take_of_the_same(benchmark, packed):
    rows = np.random.default_rng(1).permutation(ROWS)[:BATCH]
    out = np.empty((BATCH, HEIGHT, WIDTH, 3), np.uint8)
    mapped = np.memmap(packed, np.uint8, "r", read_header(packed).fields["images"].offset, (ROWS, HEIGHT, WIDTH, 3))
    benchmark(np.take, mapped, rows, axis=0, out=out, mode="clip")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transform_normalize(benchmark, batch, draws, dtype):
    normalize = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), dtype=dtype)
    benchmark(normalize.apply, batch, draws)


def test_transform_horizontal_flip(benchmark, batch, draws):
    benchmark(RandomHorizontalFlip().apply, batch, draws)


@pytest.mark.parametrize("crop", [RandomCrop, CenterCrop])
def test_transform_crop(benchmark, batch, draws, crop):
    benchmark(crop((160, 160)).apply, batch, draws)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_decode_one_image(benchmark, kind):
    file = io.BytesIO()
    Image.fromarray(photo()).save(file, kind, quality=88)
    out = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    target = Target(HEIGHT, WIDTH, 3, np.dtype(np.uint8), None)
    benchmark(decode_image, file.getvalue(), target, out)


def test_digest_one_batch(benchmark, batch):
    benchmark(row_digests, {"images": batch.permute(0, 2, 3, 1).numpy()})
