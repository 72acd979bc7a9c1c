"""The agent of one of two nodes that read a URL: `python two_remote_agents.py FOLDER NODE ADDRESS PORT PORT`.

It serves FOLDER/served to its own node, so that the server's log is that of the node, and starts two ranks as torchrun
does, for each of SHARES in turn: they train two epochs through one cache. What the node asked for, and its cache holds,
after each epoch goes to FOLDER/SHARE.NODE.EPOCH.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.distributed.ranks import process_group
from fastload.remote.urls import Remote

SHARES = ("node", "auto")
RANKS = 2  # of each node


def report(url: str, dataset: PackedDataset) -> dict[str, list]:
    """What this node has asked for since its server started, and the chunks of images in its cache."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/log") as answer:
        log = json.load(answer)["requests"]
    remote = dataset.file.remote
    kept = remote.cache.cached.records.kept().tolist()
    return {"log": log, "chunks": [chunk for chunk in kept if remote.table.chunk(chunk).field]}


def rank(folder: str, node: int, share: str, url: str) -> None:
    """Reads two epochs as one rank; the first one of the node reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    own = process_group()
    assert own is not None
    remote = Remote(cache=Path(folder) / f"cache-{share}-{node}", max_bytes="50MB")
    dataset = PackedDataset(f"{url}/data/data.h5", remote=remote)
    rows = []
    loader = FastLoader(dataset, 8, share=share, shuffle=ChunkWindow(4), seed=1, ends="exact", workers=1)  # type: ignore[arg-type]
    for epoch in range(2):
        rows.append([row for batch in loader for row in batch.rows[batch.valid].tolist()])
        dist.barrier()
        if own.rank % RANKS == 0:
            (Path(folder) / f"{share}.{node}.{epoch}.json").write_text(json.dumps(report(url, dataset)))
        dist.barrier()
    (Path(folder) / f"rows.{share}.{own.rank}.json").write_text(json.dumps(rows))
    loader.close()
    dataset.file.remote.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, node, address, *ports = sys.argv[1:]
    script = Path(__file__).with_name("range_server.py")
    for share, port in zip(SHARES, ports, strict=True):
        command = [sys.executable, str(script), f"{folder}/served"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None and server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            config = LaunchConfig(
                min_nodes=2, max_nodes=2, nproc_per_node=RANKS, run_id=share, rdzv_backend="static",
                rdzv_endpoint=f"{address}:{port}", rdzv_configs={"rank": int(node)}, start_method="fork",
                monitor_interval=0.1, max_restarts=0,
            )  # fmt: skip
            elastic_launch(config, rank)(folder, int(node), share, url)
            server.stdin.close()
