"""LMDB, one key an image, values read without a copy, in torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from peers.adapters import _torch
from peers.work import Data, Work

REQUIREMENTS = ("lmdb==3.0.0", "torchvision==0.28.0", "pillow")
PACKS = True
ANTIALIASED = True
MAP_BYTES = 1 << 36  # the most that the file may grow to


def versions() -> dict[str, str]:
    """Versions of the binding and torchvision."""
    return _torch.versions_of("lmdb", "torchvision")


def supports(work: Work) -> str:
    """All: values are bytes."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes, and none: its reads do not wait for a lock."""
    return _torch.worker_settings(0, 1, 2, 4)


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """One transaction for each 1,000 images; LMDB syncs at each commit unless told not to, and is told."""
    import lmdb

    out.mkdir(exist_ok=True)
    with lmdb.open(str(out), map_size=MAP_BYTES, sync=False) as db:
        if encoding == "jpeg":
            values = (path.read_bytes() for path in _torch.image_files(data)[0])
        else:
            values = (np.ascontiguousarray(row).tobytes() for row in _torch.decoded_rows(data))
        put = db.begin(write=True)
        for at, value in enumerate(values):
            put.put(at.to_bytes(8, "big"), value, append=True)
            if at % 1000 == 999:
                put.commit()
                put = db.begin(write=True)
        put.commit()


class Loader(_torch.DataLoaderEpochs):
    """Values as buffers of the mapped file, copied once, into their batch."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import lmdb

        read = _torch.in_each_process(
            lambda: lmdb.open(str(path), readonly=True, lock=False, readahead=False).begin(buffers=True)
        )
        shape, decode = work.data.shape, _torch.decoder() if work.encoding == "jpeg" else None

        def fetch(row: int) -> Any:
            value = np.frombuffer(read().get(row.to_bytes(8, "big")), np.uint8)
            return value.reshape(shape) if decode is None else decode(value)

        super().__init__(_torch.Batches(work, fetch, np.load(work.data.labels)), work, settings, seed)
