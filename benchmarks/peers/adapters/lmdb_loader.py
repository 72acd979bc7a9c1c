"""LMDB, one key an image, values read without a copy, in torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from peers.adapters import _files
from peers.work import Data, Work

REQUIREMENTS = ("lmdb==3.0.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = True
MAP_BYTES = 1 << 36  # the most that the file may grow to


def versions() -> dict[str, str]:
    """Versions of the binding and torchvision."""
    return _files.versions_of("lmdb", "torchvision")


def supports(work: Work) -> str:
    """All: values are bytes."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes, and none: its reads do not wait for a lock."""
    return _files.worker_settings(0, 1, 2, 4)


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """One transaction for each 1,000 images; LMDB syncs at each commit unless told not to, and is told."""
    import lmdb

    out.mkdir(exist_ok=True)
    with lmdb.open(str(out), map_size=MAP_BYTES, sync=False) as db:
        if encoding == "jpeg":
            values = (path.read_bytes() for path in _files.image_files(data)[0])
        else:
            values = (np.ascontiguousarray(row).tobytes() for row in _files.decoded_rows(data))
        put = db.begin(write=True)
        for at, value in enumerate(values):
            put.put(at.to_bytes(8, "big"), value, append=True)
            if at % 1000 == 999:
                put.commit()
                put = db.begin(write=True)
        put.commit()


def Loader(work: Work, path: Path, settings: dict[str, Any], seed: int) -> Any:
    """Values as buffers of the mapped file, copied once, into their batch."""
    import lmdb
    import torch  # not above: packing has no use for it

    from peers.adapters import _torch

    read = _files.in_each_process(
        lambda: lmdb.open(str(path), readonly=True, lock=False, readahead=False).begin(buffers=True)
    )

    def fetch(row: int) -> Any:
        value = read().get(row.to_bytes(8, "big"))
        if work.encoding == "jpeg":
            return _torch.decode(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return np.frombuffer(value, np.uint8).reshape(work.data.shape)

    batches = _torch.Batches(work, fetch, np.load(work.data.labels))
    return _torch.DataLoaderEpochs(batches, work, settings, seed)
