"""h5py in torch's DataLoader: one contiguous dataset, opened in each worker, each row read straight into its batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from peers.adapters import _files
from peers.work import Data, Work

REQUIREMENTS = ("h5py==3.16.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of h5py and its HDF5."""
    import h5py

    return {**_files.versions_of("h5py", "torchvision"), "hdf5": h5py.version.hdf5_version}


def supports(work: Work) -> str:
    """Pixels; JPEG files could lie in it as bytes of varying length, but then nothing of HDF5 is left to compare."""
    return "" if work.encoding == "raw" else "HDF5 has no JPEG: it would only hold the files' bytes"


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes: HDF5 has one lock a process, so threads never read at once."""
    return _files.worker_settings(2, 4, 1, 0)


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """One dataset of all rows, written one after another."""
    import h5py

    labels = np.load(data.labels)
    out.mkdir(exist_ok=True)
    with h5py.File(out / "images.h5", "w") as file:
        file["labels"] = labels
        images = None
        for at, row in enumerate(_files.decoded_rows(data)):
            if images is None:
                images = file.create_dataset("images", (len(labels), *row.shape), np.uint8)
            images[at] = row


def Loader(work: Work, path: Path, settings: dict[str, Any], seed: int) -> Any:
    """Rows as `dataset[row]`."""
    import h5py

    from peers.adapters import _torch  # not above: packing has no use for torch

    images = _files.in_each_process(lambda: h5py.File(path / "images.h5", "r")["images"])
    batches = _torch.Batches(work, lambda row: images()[row], np.load(work.data.labels))
    return _torch.DataLoaderEpochs(batches, work, settings, seed)
