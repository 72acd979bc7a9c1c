"""LitData: chunks written by `optimize`, StreamingDataset in its StreamingDataLoader, from a local folder.

Pixels are NumPy arrays; JPEG files are stored as bytes and decoded as in the other adapters, since its JPEG serializer
fails without torchvision's compiled part. `shuffle=True` shuffles the chunks, and the samples within each chunk, so
images of one chunk (64 MB) come near each other. torchvision crops.

`batch_decode` is among the settings: by default 16 MB of neighbours are made into arrays with each sample that is asked
for, and as shuffled samples are rarely neighbours most of that is lost; with 0 each is made alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peers.adapters import _torch
from peers.work import Data, Work

REQUIREMENTS = ("litdata==0.2.76", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of LitData and torchvision."""
    return _torch.versions_of("litdata", "torchvision")


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes, and none; samples made one by one, and as it does by itself."""
    numbers = _torch.worker_settings(2, 1, 4, 0)
    return [{**one, "batch_decode": how} for how in (0, "auto") for one in numbers]


class Sample:
    """What `optimize` calls in its workers for each number of an image."""

    def __init__(self, data: Data, encoding: str) -> None:
        self.data, self.encoding = data, encoding
        self.opened: tuple[Any, ...] | None = None

    def __call__(self, at: int) -> dict[str, Any]:
        from PIL import Image

        if self.opened is None:
            raw = self.data.rows is not None and self.encoding == "raw"
            self.opened = (
                np.load(self.data.rows, mmap_mode="r") if raw and self.data.rows is not None else None,
                [] if raw else _torch.image_files(self.data)[0],
                np.load(self.data.labels),
            )
        rows, files, labels = self.opened
        if rows is not None:
            image: Any = np.ascontiguousarray(rows[at])
        elif self.encoding == "jpeg":
            image = files[at].read_bytes()
        else:
            with Image.open(files[at]) as opened:
                image = np.asarray(opened.convert("RGB"))
        return {"image": image, "label": int(labels[at])}


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Its `optimize`, in processes."""
    _torch.import_torchvision()
    from litdata import optimize

    optimize(
        fn=Sample(data, encoding),
        inputs=list(range(data.num_images)),
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=workers,
        start_method="fork",
    )


class Loader:
    """Its StreamingDataLoader over a folder that is there already."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        _torch.import_torchvision()
        from litdata import StreamingDataLoader, StreamingDataset

        augment, raw, self.work = _torch.augmentation(work), work.encoding == "raw", work
        settings = dict(settings)
        decode = settings.pop("batch_decode", "auto")

        class Images(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, at: Any) -> Any:
                sample = super().__getitem__(at)
                image = sample["image"]
                if augment is None:
                    return image, sample["label"]
                if raw:
                    image = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                else:
                    image = _torch.decode(torch.frombuffer(bytearray(image), dtype=torch.uint8))
                return augment(image), sample["label"]

        self.loader: Any = StreamingDataLoader(
            Images(str(path), shuffle=True, drop_last=True, seed=seed, batch_decode=decode),
            batch_size=work.batch_size,
            drop_last=True,
            persistent_workers=settings["num_workers"] > 0,
            collate_fn=stacked if augment is None else None,
            **settings,
        )

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The next epoch, or the rest of the one that a state told."""
        for images, labels in self.loader:
            if len(images) == self.work.batch_size:
                yield images.numpy(), labels.numpy()

    def state(self) -> Any:
        """Its state_dict."""
        return self.loader.state_dict()

    def load_state(self, state: Any) -> None:
        """Goes on from a state_dict."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Ends the worker processes."""
        self.loader = None


def stacked(samples: list[tuple[NDArray[np.uint8], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; in a worker it is written straight into shared memory."""
    images = torch.empty((len(samples), *samples[0][0].shape), dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        images = images.share_memory_()
    into = images.numpy()
    for at, (image, _) in enumerate(samples):
        into[at] = image
    return images, torch.tensor([label for _, label in samples])
