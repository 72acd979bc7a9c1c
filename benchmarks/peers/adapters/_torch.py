"""What the adapters share whose users write a torch DataLoader: transforms by torchvision, and the epochs."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from peers.adapters._files import decoded_rows, image_files, versions_of, worker_settings
from peers.work import MEAN, RATIO, SCALE, STD, Work

__all__ = ["decoded_rows", "image_files", "versions_of", "worker_settings"]  # for adapters that import torch anyway


def augmentation(work: Work) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The transform of one uint8 image (C, H, W) by torchvision's v2, antialiased; None where there is none."""
    if work.transform is None:
        return None
    import_torchvision()
    from torchvision.transforms import v2

    assert work.crop is not None, "every transform here begins with a crop"
    steps: list[Any] = [v2.RandomResizedCrop(work.crop, SCALE, RATIO, antialias=True)]
    if work.transform == "random_resized_crop_flip_normalize":
        steps += [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)


def import_torchvision() -> bool:
    """Imports torchvision; returns whether its compiled part is there.

    It is not where torch is a build for the CPU and torchvision one for CUDA, as an index may give them. Then two
    operators, which nothing here uses, are declared to let its Python part be imported; its transforms are that part.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        import torchvision
    return bool(torchvision.extension._has_ops())


_DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # kept: what it declares goes with it


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """The pixels of a JPEG file, (3, H, W), by torchvision's decoder, or by Pillow where that is not there."""
    return _decoder()(encoded)


@functools.cache
def _decoder() -> Callable[[torch.Tensor], torch.Tensor]:
    if import_torchvision():
        from torchvision.io import ImageReadMode, decode_jpeg

        return lambda encoded: decode_jpeg(encoded, mode=ImageReadMode.RGB)
    from PIL import Image

    def by_pillow(encoded: torch.Tensor) -> torch.Tensor:
        with Image.open(io.BytesIO(encoded.numpy())) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    return by_pillow


class Batches(Dataset[Any]):
    """Makes whole batches: `__getitems__` gets the rows of one, which saves torch's collation.

    `fetch(row)` returns the pixels of an image, an array (H, W, C) or, where a codec gave it, a tensor (C, H, W).
    """

    def __init__(self, work: Work, fetch: Callable[[int], Any], labels: NDArray[np.int64]) -> None:
        self.work, self.fetch, self.labels = work, fetch, torch.from_numpy(labels)
        self.augment = augmentation(work)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = self.labels[rows]
        if self.augment is None:
            images = torch.empty((len(rows), *self.work.batch_shape[1:]), dtype=torch.uint8)
            into = images.numpy()
            for at, row in enumerate(rows):
                into[at] = self.fetch(row)
            return images, labels
        made = []
        for row in rows:
            image = self.fetch(row)
            if not isinstance(image, torch.Tensor):
                image = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # copied: torch wants what may be written
            made.append(self.augment(image))
        return torch.stack(made), labels


def as_is(batch: Any) -> Any:
    """The collation of what is a batch already."""
    return batch


class DataLoaderEpochs:
    """Shuffled epochs of a dataset through torch's DataLoader; the base of several adapters' Loader."""

    def __init__(
        self, dataset: Dataset[Any], work: Work, settings: dict[str, Any], seed: int, collate: Any = as_is
    ) -> None:
        self.seed, self.generator = seed, torch.Generator()
        workers = settings["num_workers"]
        self.loader: DataLoader[Any] | None = DataLoader(
            dataset,
            work.batch_size,
            shuffle=True,
            drop_last=True,
            generator=self.generator,
            collate_fn=collate,
            persistent_workers=workers > 0,
            **settings,
        )

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The batches of one epoch; its order is that of its seed."""
        assert self.loader is not None, "not closed"
        self.generator.manual_seed(1000 * self.seed + number)
        for images, labels in self.loader:
            yield images.numpy(), labels.numpy()

    def close(self) -> None:
        """Ends the worker processes."""
        self.loader = None
