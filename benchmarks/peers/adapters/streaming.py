"""MosaicML Streaming: MDS shards in a local folder, StreamingDataset in its StreamingDataLoader.

Pixels have the encoding `ndarray:uint8:H,W,C`; JPEG files are stored as bytes, and torchvision decodes and crops them.
`shuffle=True` with its default py1e: shards and blocks of samples are shuffled, then each within a range of samples as
long as a block (262,144 at least), so with as few images as here it is a full shuffle. `batch_size` is given to the
dataset, as it asks. It is packed by processes, each with a folder of its own, and `merge_index`.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peers.adapters import _torch
from peers.work import Data, Work

REQUIREMENTS = ("mosaicml-streaming==0.13.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of Streaming and torchvision."""
    return _torch.versions_of("mosaicml-streaming", "torchvision")


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes, and none."""
    return _torch.worker_settings(2, 1, 4, 0)


def write(data: Data, out: Path, encoding: str, first: int, last: int) -> None:
    """Writes the images from `first` to before `last` to a folder of their own."""
    from PIL import Image
    from streaming import MDSWriter

    labels = np.load(data.labels)
    rows = np.load(data.rows, mmap_mode="r") if data.rows is not None and encoding == "raw" else None
    files = _torch.image_files(data)[0] if rows is None else []
    shape = ",".join(str(side) for side in data.shape or ())
    columns = {"image": "bytes" if encoding == "jpeg" else f"ndarray:uint8:{shape}", "label": "int"}
    with MDSWriter(out=str(out / f"{first:09}"), columns=columns) as writer:
        for at in range(first, last):
            if rows is not None:
                image: Any = np.ascontiguousarray(rows[at])
            elif encoding == "jpeg":
                image = files[at].read_bytes()
            else:
                with Image.open(files[at]) as opened:
                    image = np.asarray(opened.convert("RGB"))
            writer.write({"image": image, "label": int(labels[at])})


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """One writer in each process; compression and hashes are off, their defaults."""
    _torch.import_torchvision()
    from streaming.base.util import merge_index

    edges = np.linspace(0, data.num_images, workers + 1).astype(int).tolist()
    out.mkdir()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.starmap(write, [(data, out, encoding, *edge) for edge in itertools.pairwise(edges)])
    merge_index(str(out), keep_local=True)


class Loader:
    """Its StreamingDataLoader over a folder that is there already."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        _torch.import_torchvision()
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        augment, jpeg, self.work = _torch.augmentation(work), work.encoding == "jpeg", work

        class Images(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, at: Any) -> Any:
                sample = super().__getitem__(at)
                if augment is None:
                    return sample["image"], sample["label"]
                if jpeg:
                    image = _torch.decode(torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8))
                else:
                    image = torch.from_numpy(np.array(sample["image"])).permute(2, 0, 1)
                return augment(image), sample["label"]

        self.dataset: Any = Images(
            local=str(path), shuffle=True, shuffle_seed=seed, batch_size=work.batch_size, num_canonical_nodes=1
        )
        self.loader: Any = StreamingDataLoader(
            self.dataset,
            batch_size=work.batch_size,
            drop_last=True,
            persistent_workers=settings["num_workers"] > 0,
            collate_fn=stacked if augment is None else None,
            **settings,
        )

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The next epoch, or the rest of the one that a state told; each worker's last batch may be short."""
        for images, labels in self.loader:
            if len(images) == self.work.batch_size:
                yield images.numpy(), labels.numpy()

    def state(self) -> Any:
        """Its state_dict, of a few numbers."""
        return self.loader.state_dict()

    def load_state(self, state: Any) -> None:
        """Goes on from a state_dict."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Ends the worker processes, and the names that they share memory by."""
        from streaming.base.util import clean_stale_shared_memory

        self.loader = self.dataset = None
        clean_stale_shared_memory()


def stacked(samples: list[tuple[NDArray[np.uint8], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; in a worker it is written straight into shared memory."""
    images = torch.empty((len(samples), *samples[0][0].shape), dtype=torch.uint8)
    if torch.utils.data.get_worker_info() is not None:
        images = images.share_memory_()
    into = images.numpy()
    for at, (image, _) in enumerate(samples):
        into[at] = image
    return images, torch.tensor([label for _, label in samples])
