"""WebDataset: tar shards read in sequence, in torch's DataLoader.

As its documentation does: shards in a new order each epoch, then `shuffle(1000)`, a buffer of 1,000 samples in each
worker, so the shuffle is a buffered one; batches are made in the workers (`batched`, then WebLoader with
`batch_size=None`). Pixels are stored as bare bytes, which spares the header of .npy, with whole seconds as their time:
the writer's default, fractions, costs a second header for each file. There are eight shards or more, so that one, two
and four workers get as many; each worker drops its own last batch if that is not full. torchvision decodes and crops.

It cannot resume within an epoch but by reading again what was read.
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

REQUIREMENTS = ("webdataset==1.0.2", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True
SHARDS, BUFFER = 8, 1000


def versions() -> dict[str, str]:
    """Versions of WebDataset and torchvision."""
    return _torch.versions_of("webdataset", "torchvision")


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes, and none."""
    return _torch.worker_settings(2, 1, 4, 0)


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Its ShardWriter, which is one process."""
    import webdataset

    out.mkdir()
    files, labels = _torch.image_files(data) if encoding == "jpeg" else ([], np.load(data.labels))
    contents: Iterator[bytes]
    if encoding == "jpeg":
        contents, suffix = (file.read_bytes() for file in files), "jpg"
    else:
        contents, suffix = (np.ascontiguousarray(row).tobytes() for row in _torch.decoded_rows(data)), "bin"
    most = -(-data.num_images // SHARDS)
    limits = {"maxcount": most, "maxsize": 1 << 40}
    with webdataset.ShardWriter(str(out / "%06d.tar"), **limits, mtime=0, verbose=0) as writer:
        for at, (content, label) in enumerate(zip(contents, labels, strict=True)):
            writer.write({"__key__": f"{at:09}", suffix: content, "cls": int(label)})


class Prepared:
    """Turns the members of a sample into a tensor and its label; picklable, for the workers."""

    def __init__(self, work: Work) -> None:
        self.work, self.shape, self.augment = work, work.data.shape, _torch.augmentation(work)

    def __call__(self, sample: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
        image: torch.Tensor = torch.frombuffer(bytearray(sample[0]), dtype=torch.uint8)
        if self.augment is None:
            return image.view(self.shape), int(sample[1])
        image = _torch.decode(image) if self.work.encoding == "jpeg" else image.view(self.shape).permute(2, 0, 1)
        return self.augment(image), int(sample[1])


class Raw(Prepared):
    """The same without a copy: a view of the tar member's bytes, which collation only reads."""

    def __call__(self, sample: tuple[bytes, bytes]) -> tuple[Any, int]:
        return np.frombuffer(sample[0], np.uint8).reshape(self.shape), int(sample[1])


def stacked(samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; in a worker it is written straight into shared memory."""
    first = samples[0][0]
    labels = torch.tensor([label for _, label in samples])
    if isinstance(first, torch.Tensor):
        return torch.utils.data.default_collate([image for image, _ in samples]), labels
    shape = (len(samples), *first.shape)
    images = torch.empty(shape, dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        images = images.share_memory_()
    into = images.numpy()
    for at, (image, _) in enumerate(samples):
        into[at] = image
    return images, labels


class Loader:
    """Its WebLoader; an epoch is one pass over the shards."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import webdataset

        shards = sorted(str(shard) for shard in path.glob("*.tar"))
        prepared = Raw(work) if work.transform is None else Prepared(work)
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed)
        dataset = dataset.shuffle(BUFFER, initial=BUFFER).to_tuple("jpg" if work.encoding == "jpeg" else "bin", "cls")
        dataset = dataset.map(prepared).batched(work.batch_size, collation_fn=stacked, partial=False)
        workers = settings["num_workers"]
        self.loader: Any = webdataset.WebLoader(
            dataset, batch_size=None, persistent_workers=workers > 0, prefetch_factor=2 if workers else None, **settings
        )

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """One pass over the shards."""
        for images, labels in self.loader:
            yield images.numpy(), labels.numpy()

    def close(self) -> None:
        """Ends the worker processes."""
        self.loader = None
