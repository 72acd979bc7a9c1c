"""Two ranks: echo="auto" from a source that is slow on rank 1, and caches on devices with unequal room.

    python two_ranks.py FOLDER

What each saw goes to FOLDER/report.RANK.json. The process group is real, times are told, devices those of late_backend.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # before the fork: the first optimizer or DDP imports it, for seconds
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from late_backend import LateBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import CacheError, FastLoader, OptionError
from fastload.device import DeviceMemory
from fastload.loader.echo_policy import EchoPolicy
from fastload.plan import Pace
from fastload.plan.cursor import state_from_dict
from sample_files import write_packed

# A rank that takes a step more than the others waits for them no longer than this.
PATIENCE = timedelta(minutes=5)
ROWS, BATCH_SIZE = 96, 4
CACHED_ROWS, ROW_BYTES = 50, 48


class Source(torch.utils.data.Dataset):
    """Numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Told(EchoPolicy):
    """Decides by times that it is told of instead of those of a clock, which depend on what else runs."""

    batch_s = 0.0

    def ended(self, pace: Pace, factor: int) -> None:
        """See `EchoPolicy.ended`: a step takes a second."""
        super().ended(Pace(100, 100 * factor, 100 * max(0.0, self.batch_s - factor), 100.0 * factor), factor)


class Listener(logging.Handler):
    """Keeps what fastload says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def echoes(rank: int) -> dict:
    """Epochs of both ranks, the state after them and an error."""
    listener, log = Listener(), logging.getLogger("fastload")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    model = DistributedDataParallel(nn.Linear(1, 1))
    source = Source()
    loader = FastLoader(source, BATCH_SIZE, echo="auto", workers=1)
    loader._echo = Told(chooses=True, agreement=loader._echo._agreement)
    loader._echo.batch_s = 3.5 if rank == 1 else 0.1
    epochs = []
    for epoch in range(6):
        loader.set_epoch(epoch if epoch < 4 else 10 * epoch)
        # Only one rank asks, and no other one answers meanwhile, since it waits in the collective below.
        if rank == epoch % 2:
            loader.state_dict()
            len(loader)
        dist.barrier()
        length, steps = len(loader), 0
        for batch in loader:
            model(batch[0][:, None]).sum().backward()
            steps += 1
            if epoch == 2 and steps == 15:
                break
        epochs.append({"length": length, "steps": steps, "echo": loader.stats.echo, "epoch": loader.epoch})
        if rank == 0 and epoch == 3:
            epochs[-1]["state"] = loader.state_dict()
        dist.barrier()
    state = loader.state_dict()
    resumed = FastLoader(source, BATCH_SIZE, echo="auto", workers=1)
    resumed.load_state_dict(state)
    errors = []
    try:
        FastLoader(source, BATCH_SIZE, echo="auto", share=(rank, 3))
    except OptionError as error:
        errors.append(str(error))
    result = {"epochs": epochs, "said": listener.said, "state": state, "resumed": len(resumed), "errors": errors}
    loader.close()
    resumed.close()
    return result


class Device(LateBackend):
    """Computes as soon as it is given something; with so many bytes of room."""

    def __init__(self, room: int) -> None:
        super().__init__(patience=2)
        self.room = DeviceMemory(free=room, total=0)

    def hand_over(self, event, tensors):
        super().hand_over(event, tensors)
        self.compute()


def write_file(path: Path) -> None:
    pixels = np.arange(CACHED_ROWS * ROW_BYTES, dtype=np.int64).astype(np.uint8).reshape(CACHED_ROWS, 4, 4, 3)
    write_packed(path, pixels, {}, chunk_rows=4)


def caches(rank: int, path: Path) -> dict:
    """Rows of each epoch, and whether shares are fixed, where one rank has room for all rows."""
    report = {}
    # The other has room for all, or for 60 %: then both keep their share, without the larger one being told.
    for name, rooms in (("whole", (10_000, 2_400)), ("shared", (10_000, 1_440))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = FastLoader(path, 5, cache="device", device=Device(rooms[rank]), seed=1)
        report[f"{name} warned"] = len(caught)
        report[name] = [[row for batch in loader for row in batch.rows.tolist()] for _ in range(2)]
        report[f"{name} fixed"] = state_from_dict(loader.state_dict()).fixed_shares
    try:
        FastLoader(path, 5, cache="device", device=Device((10_000, 100)[rank]))
    except CacheError as error:
        report["refused"] = str(error)
    return report


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=PATIENCE)
    report = echoes(rank) | caches(rank, folder / "a.h5")
    (folder / f"report.{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    # DistributedDataParallel's reducer must be gone before the group it talks through.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Torch is imported once where a fork will do; it takes seconds.
    gc.freeze()  # as in tests/warm_python.py
    method = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=2, start_method=method)
