"""NVIDIA DALI on the CPU alone (device_id=None): a graph of native operators over a pool of threads.

Raw images come by fn.external_source from a memory-mapped array, as views that are not copied (`no_copy=True`), and
fn.copy or the crop reads them in DALI's threads. JPEGs come by fn.readers.file with `shuffle_after_epoch=True`, are
decoded with fn.decoders.image_random_crop, which decodes no more rows than the crop needs, and go through fn.resize.
Both shuffles are full ones. Two batches and more are made ahead by `prefetch_queue_depth`. Shrinking is antialiased,
its default.

Slower here, and left out: fn.readers.numpy and fn.readers.file with one file an image for raw images (0.55 and 0.45 of
the rate), and a source that gathers the batch itself (0.5). The dynamic executor is among the candidates.

A pipeline resumes in the midst of an epoch from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.work import MEAN, RATIO, SCALE, STD, Work

REQUIREMENTS = ("nvidia-dali-cuda120==2.4.0",)
PACKS = False
ANTIALIASED = True


def versions() -> dict[str, str]:
    """The version of DALI."""
    from importlib.metadata import version

    return {"nvidia-dali": version("nvidia-dali-cuda120"), "numpy": version("numpy")}


def supports(work: Work) -> str:
    """All works; it reads what was prepared."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Threads, batches made ahead, and the executor."""
    return [
        {"num_threads": 2, "prefetch_queue_depth": 2, "exec_dynamic": False},
        {"num_threads": 2, "prefetch_queue_depth": 3, "exec_dynamic": False},
        {"num_threads": 1, "prefetch_queue_depth": 2, "exec_dynamic": False},
        {"num_threads": 4, "prefetch_queue_depth": 2, "exec_dynamic": False},
        {"num_threads": 2, "prefetch_queue_depth": 2, "exec_dynamic": True},
    ]


class Source:
    """Views of the rows of a batch, by the number of the batch since the first epoch's first."""

    def __init__(self, path: Path, work: Work, seed: int) -> None:
        self.rows, self.labels = np.load(path, mmap_mode="r"), np.load(work.data.labels)
        self.work, self.seed = work, seed
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def __call__(self, info: Any) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
        epoch, batch = divmod(info.iteration, self.work.batches)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        rows = self.order[batch * self.work.batch_size : (batch + 1) * self.work.batch_size]
        return [self.rows[row] for row in rows], self.labels[rows].reshape(-1, 1)


class Loader:
    """One pipeline, run once a batch, in epochs one after another."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        self.work, self.path, self.settings, self.seed = work, path, settings, seed
        self.done = 0
        self.pipeline = self.build()

    def build(self, checkpoint: str | None = None) -> Any:
        """The pipeline, from its beginning or from a checkpoint."""
        from nvidia.dali import Pipeline, fn, types

        work = self.work
        pipeline = Pipeline(
            work.batch_size,
            device_id=None,
            seed=self.seed + 1,
            enable_checkpointing=True,
            checkpoint=checkpoint,
            **self.settings,
        )
        with pipeline:
            if work.encoding == "raw":
                source = Source(self.path, work, self.seed)
                images, labels = fn.external_source(
                    source, num_outputs=2, no_copy=True, batch_info=True, layout=["HWC", ""]
                )
                if work.crop is None:
                    images = fn.copy(images)
                else:
                    images = fn.random_resized_crop(
                        images, size=work.crop, random_area=list(SCALE), random_aspect_ratio=list(RATIO)
                    )
            else:
                files = sorted(str(file.relative_to(self.path)) for file in self.path.glob("*/*"))
                encoded, labels = fn.readers.file(
                    file_root=str(self.path),
                    files=files,
                    labels=np.load(work.data.labels).tolist(),
                    shuffle_after_epoch=True,
                    pad_last_batch=True,
                    name="reader",
                )
                images = fn.decoders.image_random_crop(
                    encoded, output_type=types.RGB, random_area=list(SCALE), random_aspect_ratio=list(RATIO)
                )
                images = fn.resize(images, size=work.crop)
            if work.transform == "random_resized_crop_flip_normalize":
                images = fn.crop_mirror_normalize(
                    images,
                    dtype=types.FLOAT,
                    output_layout="HWC",
                    mean=[255 * mean for mean in MEAN],
                    std=[255 * std for std in STD],
                    mirror=fn.random.coin_flip(),
                )
            pipeline.set_outputs(images, labels)
        pipeline.build()
        return pipeline

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The next epoch, whatever its number, or the rest of one; a batch is used again two batches later."""
        while self.done < self.work.batches:
            self.done += 1
            yield self.batch()
        self.done = 0
        if self.work.encoding == "jpeg" and self.work.data.num_images % self.work.batch_size:
            self.pipeline.run()  # the last batch, not full

    def batch(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The next batch, in DALI's memory."""
        images, labels = self.pipeline.run()
        return np.asarray(images.as_tensor()), np.asarray(labels.as_tensor()).reshape(-1)

    def state(self) -> Any:
        """DALI's checkpoint, and the batches of the epoch so far."""
        return self.done, self.pipeline.checkpoint()

    def load_state(self, state: Any) -> None:
        """A new pipeline from a checkpoint."""
        self.done, checkpoint = state
        self.pipeline = self.build(checkpoint)

    def close(self) -> None:
        """Ends its threads."""
        del self.pipeline
