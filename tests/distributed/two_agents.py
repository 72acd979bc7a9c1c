"""The agent of one of two nodes, as torchrun is one: `python two_agents.py FOLDER NODE ADDRESS PORT PORT PORT`.

It starts the ranks of each phase in turn, as forks of this process: 2 nodes of 2 ranks train two epochs with
share="node" and stop in the third; of that, 2 nodes of 1 rank, and then 1 node of 3 ranks, read the rest and the epoch
after it. What each rank saw goes to FOLDER/PHASE.RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastload import FastLoader
from fastload.distributed.consensus import resolve_nodes
from fastload.distributed.ranks import local_ranks, process_group

PHASES = {"begun": (2, 2), "on other nodes": (2, 1), "on one node": (1, 3)}  # nodes, and ranks of each
BATCH_SIZE = 3
STOPPED_AFTER = 2  # steps of the third epoch


def train(loader: FastLoader, weight: torch.Tensor, steps: int | None = None) -> list[int]:
    """Takes steps of an epoch, all of them by default, and returns the rows of this rank that counted."""
    rows: list[int] = []
    for step, batch in enumerate(loader, 1):
        images = batch[0].float().flatten(1) / 255
        gradient = (images * batch.valid[:, None]).sum(0) / batch.global_valid
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient
        rows += batch.rows[batch.valid].tolist()
        if step == steps:
            break
    return rows


def rank(folder: str, phase: str) -> None:
    """Does one rank's part of a phase."""
    torch.set_num_threads(1)
    # Made before the group is there, as Lightning does: what torchrun says of the node is known.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = FastLoader(Path(folder) / "a.h5", BATCH_SIZE, share="node", ends="exact", seed=3)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    share = process_group()
    assert share is not None
    report = {"warned": [str(one.message) for one in caught], "shown": repr(loader)}
    report["local ranks"] = list(local_ranks(share))
    weight = torch.zeros(8 * 8 * 3)
    if phase == "begun":
        report["epochs"] = [train(loader, weight) for _ in range(2)] + [train(loader, weight, STOPPED_AFTER)]
        if share.rank == 0:
            (Path(folder) / "state.json").write_text(json.dumps(loader.state_dict()))
    else:
        loader.load_state_dict(json.loads((Path(folder) / "state.json").read_text()))
        report["epochs"] = [train(loader, weight) for _ in range(2)]
    everywhere = [torch.empty_like(weight) for _ in range(share.world_size)]
    dist.all_gather(everywhere, weight)
    report["alike"] = all(torch.equal(weight, other) for other in everywhere)
    # What it finds where something else than torchrun starts the ranks.
    with mock.patch.dict(os.environ):
        del os.environ["GROUP_RANK"]
        report["asked"] = [asdict(resolve_nodes(share)) for _ in range(2)]
        report["known"] = list(local_ranks(share))
    (Path(folder) / f"{phase}.{share.rank}.json").write_text(json.dumps(report))
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, node, address, *ports = sys.argv[1:]
    for (phase, (nodes, ranks)), port in zip(PHASES.items(), ports, strict=True):
        if int(node) < nodes:
            config = LaunchConfig(
                min_nodes=nodes, max_nodes=nodes, nproc_per_node=ranks, run_id=phase, rdzv_backend="static",
                rdzv_endpoint=f"{address}:{port}", rdzv_configs={"rank": int(node)}, start_method="fork",
                monitor_interval=0.1, max_restarts=0,
            )  # fmt: skip
            elastic_launch(config, rank)(folder, phase)
