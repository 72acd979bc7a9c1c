"""One of two ranks that train with echo="auto" from a source that is slow on rank 1, by what the policy is told.

    python two_ranks.py RANK FOLDER

What it saw goes to FOLDER/echo.RANK.json.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, OptionError
from fastload.loader.echo_policy import EchoPolicy
from fastload.plan import Pace

# A rank that takes a step more than the others waits for them no longer than this.
PATIENCE = timedelta(minutes=5)
ROWS, BATCH_SIZE = 96, 4


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


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    listener, log = Listener(), logging.getLogger("fastload")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=PATIENCE)
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
    (folder / f"echo.{rank}.json").write_text(json.dumps(result))
    loader.close()
    resumed.close()
    dist.barrier()
    # DistributedDataParallel's reducer must be gone before the group it talks through.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
