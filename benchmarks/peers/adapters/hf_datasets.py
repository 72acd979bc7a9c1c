"""Hugging Face datasets: an Arrow table on disk, in torch's DataLoader, which asks it for whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers.adapters import _torch
from peers.work import RATIO, SCALE, Data, Work

REQUIREMENTS = ("datasets==5.2.0", "torchvision==0.28.0", "pillow")
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of datasets and Arrow."""
    return _torch.versions_of("datasets", "pyarrow", "torchvision")


def supports(work: Work) -> str:
    """All: pixels as Array3D, files as Image."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes."""
    return _torch.worker_settings(2, 4, 1, 0)


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Rows through a generator, or the files' bytes, saved to disk without an index of rows."""
    import datasets

    datasets.disable_progress_bars()
    labels = np.load(data.labels)
    if encoding == "jpeg":
        files = [str(path) for path in _torch.image_files(data)[0]]
        columns = {"images": files, "labels": labels}
        features = datasets.Features({"images": datasets.Image(), "labels": datasets.Value("int64")})
        made = datasets.Dataset.from_dict(columns, features=features)
    else:
        first = next(iter(_torch.decoded_rows(data)))
        features = datasets.Features(
            {"images": datasets.Array3D(first.shape, "uint8"), "labels": datasets.Value("int64")}
        )

        def rows() -> Iterator[dict[str, Any]]:
            for row, label in zip(_torch.decoded_rows(data), labels, strict=True):
                yield {"images": row, "labels": int(label)}

        cache = str(out.with_name(f"{out.name}-cache"))
        # Named by hand: else it pickles what the generator refers to, all of this package, to name it.
        more = {"cache_dir": cache, "writer_batch_size": 100, "fingerprint": out.name}
        made = datasets.Dataset.from_generator(rows, features=features, **more)
    made.save_to_disk(str(out))


class Loader(_torch.DataLoaderEpochs):
    """The table in the format "torch", or with a transform that is called for each batch."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import datasets

        table = datasets.load_from_disk(str(path))
        if work.encoding == "jpeg":
            _torch.import_torchvision()
            from torchvision.transforms import v2

            steps: list[Any] = [v2.RandomResizedCrop(work.crop, SCALE, RATIO), v2.PILToTensor()]
            augment: Any = v2.Compose(steps)
            table = table.with_transform(
                lambda batch: {
                    "images": [augment(image.convert("RGB")) for image in batch["images"]],
                    "labels": batch["labels"],
                }
            )
        else:
            # Pixels come as int64 unless the type is named; the labels, as Python numbers, are not to be of that type.
            table = table.with_format("numpy", columns=["images"], output_all_columns=True, dtype=np.uint8)
        super().__init__(Fetched(table, work), work, settings, seed)


class Fetched(torch.utils.data.Dataset[Any]):
    """One call of the table a batch."""

    def __init__(self, table: Any, work: Work) -> None:
        self.table, self.encoding = table, work.encoding
        self.augment = _torch.augmentation(work) if work.encoding == "raw" else None

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.table[rows]
        labels = torch.as_tensor(np.asarray(batch["labels"]))
        if self.encoding == "jpeg":
            return torch.stack(batch["images"]), labels
        images = torch.from_numpy(np.ascontiguousarray(batch["images"]))
        if self.augment is None:
            return images, labels
        return torch.stack([self.augment(image.permute(2, 0, 1)) for image in images]), labels
