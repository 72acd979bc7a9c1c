"""Hugging Face datasets: an Arrow table on disk, in torch's DataLoader, which asks it for whole batches.

Pixels are an Array3D, and come by its format "numpy" as an array of the batch. Where rows are small, its format "arrow"
is tried, too: the table's own column, flattened here without its type being looked at row by row. Large rows come no
faster that way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.adapters import _files
from peers.work import RATIO, SCALE, Data, Work

REQUIREMENTS = ("datasets==5.2.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True
SMALL = 16_384  # bytes of a row


def versions() -> dict[str, str]:
    """Versions of datasets and Arrow."""
    return _files.versions_of("datasets", "pyarrow", "torchvision")


def supports(work: Work) -> str:
    """All: pixels as Array3D, files as Image."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes; for small pixels the format "arrow", too."""
    workers = _files.worker_settings(2, 4, 1, 0)
    small = work.encoding == "raw" and math.prod(work.data.shape or ()) < SMALL
    return workers + [{**some, "format": "arrow"} for some in workers if small]


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Rows through a generator, or the files' bytes, saved to disk without an index of rows."""
    import datasets

    datasets.disable_progress_bars()
    labels = np.load(data.labels)
    if encoding == "jpeg":
        files = [str(path) for path in _files.image_files(data)[0]]
        columns = {"images": files, "labels": labels}
        features = datasets.Features({"images": datasets.Image(), "labels": datasets.Value("int64")})
        made = datasets.Dataset.from_dict(columns, features=features)
    else:
        first = next(iter(_files.decoded_rows(data)))
        features = datasets.Features(
            {"images": datasets.Array3D(first.shape, "uint8"), "labels": datasets.Value("int64")}
        )

        def rows() -> Iterator[dict[str, Any]]:
            for row, label in zip(_files.decoded_rows(data), labels, strict=True):
                yield {"images": row, "labels": int(label)}

        cache = str(out.with_name(f"{out.name}-cache"))
        # Named by hand: else it pickles what the generator refers to, all of this package, to name it.
        more = {"cache_dir": cache, "writer_batch_size": 100, "fingerprint": out.name}
        made = datasets.Dataset.from_generator(rows, features=features, **more)
    made.save_to_disk(str(out))


def Loader(work: Work, path: Path, settings: dict[str, Any], seed: int) -> Any:
    """The table with pixels as NumPy, or with a transform that is called for each batch."""
    import datasets

    from peers.adapters import _torch  # not above: packing has no use for torch

    table = datasets.load_from_disk(str(path))
    if work.encoding == "jpeg":
        _torch.import_torchvision()
        from torchvision.transforms import v2

        steps: list[Any] = [v2.RandomResizedCrop(work.crop, SCALE, RATIO), v2.PILToTensor()]
        crop = v2.Compose(steps)
        table = table.with_transform(
            lambda batch: {
                "images": [crop(image.convert("RGB")) for image in batch["images"]],
                "labels": batch["labels"],
            }
        )
    elif "format" in settings:
        table = table.with_format(settings["format"])
    else:
        # Pixels come as int64 unless the type is named; the labels, as Python numbers, are not to be of that type.
        table = table.with_format("numpy", columns=["images"], output_all_columns=True, dtype=np.uint8)
    augment = _torch.augmentation(work) if work.encoding == "raw" else None
    workers = {"num_workers": settings["num_workers"]}
    return _torch.DataLoaderEpochs(Fetched(table, work, augment), work, workers, seed)


class Fetched:
    """One call of the table a batch."""

    def __init__(self, table: Any, work: Work, augment: Any) -> None:
        self.table, self.work, self.augment = table, work, augment

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, rows: list[int]) -> tuple[Any, Any]:
        import torch

        batch = self.table[rows]
        labels, images = torch.as_tensor(np.asarray(batch["labels"])), batch["images"]
        if isinstance(images, list):
            return torch.stack(images), labels
        if not isinstance(images, np.ndarray):  # Arrow's column: lists of lists of lists of bytes, row after row
            images = images.combine_chunks().storage.flatten().flatten().flatten().to_numpy()
            images = images.reshape(len(rows), *(self.work.data.shape or ()))
        images = torch.from_numpy(np.ascontiguousarray(images))
        if self.augment is None:
            return images, labels
        return torch.stack([self.augment(image.permute(2, 0, 1)) for image in images]), labels
