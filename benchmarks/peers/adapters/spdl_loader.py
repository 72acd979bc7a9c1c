"""SPDL: a pipeline of functions over a pool of threads, with spdl.io (FFmpeg) for images.

Rows: batches of shuffled row numbers go through `pipe(gather, concurrency=...)`; NumPy's `take` copies without the GIL,
into buffers that are used again. JPEGs: as its page of good practice advises, each file is decoded and cropped by
demux_image and decode_packets with an FFmpeg filter (crop, then a bilinear scale), and a batch is written once, by
convert_frames. The shuffle is a full one; it is left to the user, as all reading is. For arrays SPDL has no transforms
of its own; torchvision makes them, in its threads.

spdl.io needs the shared libraries of FFmpeg 4 to 9, which its wheel does not hold (Debian: `apt-get install ffmpeg`).
It cannot resume within an epoch.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.adapters import _files
from peers.work import Work

REQUIREMENTS = ("spdl==0.8.0", "spdl-io==0.8.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = False
ANTIALIASED = True
AHEAD = 3


def versions() -> dict[str, str]:
    """Versions of SPDL and torchvision."""
    return _files.versions_of("spdl", "spdl-io", "torchvision")


def supports(work: Work) -> str:
    """All works, with FFmpeg."""
    if work.encoding == "raw":
        return ""
    try:
        import spdl.io

        spdl.io.cpu_storage(16)
    except (ImportError, RuntimeError, AttributeError):
        return "spdl.io decodes with the shared libraries of FFmpeg 4 to 9, which its wheel does not hold"
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Threads."""
    return [{"threads": count} for count in (2, 1, 4)]


class Loader:
    """One pipeline an epoch."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        self.work, self.threads, self.seed = work, settings["threads"], seed
        self.labels = np.load(work.data.labels)
        self.free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if work.encoding == "raw":
            self.rows = np.load(path, mmap_mode="r")
            for _ in range(self.threads + AHEAD + 3):
                self.free.put(np.empty(work.batch_shape, work.dtype))
        else:
            self.files = [str(file) for file in sorted(path.glob("*/*"))]
        self.augment: Any = None
        if work.transform is not None and work.encoding == "raw":
            import torch

            from peers.adapters import _torch

            torch.set_num_threads(1)
            self.augment = _torch.augmentation(work)

    def gather(self, rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
        """A batch of rows."""
        out = self.free.get()
        np.take(self.rows, rows, axis=0, out=out, mode="clip")
        return out, self.labels[rows]

    def transformed(self, rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
        """A batch of transformed rows."""
        import torch

        out = self.free.get()
        into = torch.from_numpy(out).permute(0, 3, 1, 2)
        for at, row in enumerate(rows):
            into[at] = self.augment(torch.from_numpy(np.array(self.rows[row])).permute(2, 0, 1))
        return out, self.labels[rows]

    def decoded(self, rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
        """A batch of decoded and cropped files."""
        import spdl.io

        rng, size, frames = np.random.default_rng(rows), self.work.crop, []
        for row in rows:
            packets = spdl.io.demux_image(self.files[row])
            top, left, height, width = _files.random_crop(rng, packets.codec.height, packets.codec.width)
            filters = f"crop={width}:{height}:{left}:{top}:exact=1,scale={size}:{size}:flags=bilinear,format=rgb24"
            frames.append(spdl.io.decode_packets(packets, filter_desc=filters))
        return spdl.io.to_numpy(spdl.io.convert_frames(frames)), self.labels[rows]

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """One epoch; a buffer of raw rows is used again when the next batch is asked for."""
        from spdl.pipeline import PipelineBuilder

        order = np.random.default_rng((self.seed, number)).permutation(len(self.labels))
        size, count = self.work.batch_size, self.work.batches
        make = (
            self.decoded if self.work.encoding == "jpeg" else self.gather if self.augment is None else self.transformed
        )
        pipeline = (
            PipelineBuilder()
            .add_source(order[at * size : (at + 1) * size] for at in range(count))
            .pipe(make, concurrency=self.threads)
            .add_sink(AHEAD)
            .build(num_threads=self.threads)
        )
        with pipeline.auto_stop():
            for images, labels in pipeline:
                yield images, labels
                if self.work.encoding == "raw":
                    self.free.put(images)

    def close(self) -> None:
        """Its threads end with the epoch."""
