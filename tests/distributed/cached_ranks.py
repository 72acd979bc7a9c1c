"""One of two ranks whose devices have unequal room: `python cached_ranks.py RANK FOLDER`, report in FOLDER.

The devices are the fake of late_backend.py, the process group is real.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from late_backend import LateBackend

from fastload import CacheError, FastLoader
from fastload.device import DeviceMemory
from fastload.plan import state_from_dict
from sample_files import write_packed

ROWS, ROW_BYTES = 50, 48


class Device(LateBackend):
    """Computes as soon as it is given something; with so many bytes of room."""

    def __init__(self, room: int) -> None:
        super().__init__(patience=2)
        self.room = DeviceMemory(free=room, total=0)

    def hand_over(self, event, tensors):
        super().hand_over(event, tensors)
        self.compute()


def write_file(path: Path) -> None:
    pixels = np.arange(ROWS * ROW_BYTES, dtype=np.int64).astype(np.uint8).reshape(ROWS, 4, 4, 3)
    write_packed(path, pixels, {}, chunk_rows=4)


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    report = {"whole": [], "shared": [], "refused": ""}
    # One rank has room for all rows, the other for 60 %: both keep their share, without the larger one being told.
    for name, rooms in (("whole", (10_000, 2_400)), ("shared", (10_000, 1_440))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = FastLoader(folder / "a.h5", 5, cache="device", device=Device(rooms[rank]), seed=1)
        report[f"{name} warned"] = [str(warning.message) for warning in caught]
        report[name] = [[row for batch in loader for row in batch.rows.tolist()] for _ in range(2)]
        report[f"{name} fixed"] = state_from_dict(loader.state_dict()).fixed_shares
    try:
        FastLoader(folder / "a.h5", 5, cache="device", device=Device((10_000, 100)[rank]))
    except CacheError as error:
        report["refused"] = str(error)
    (folder / f"cached.{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
