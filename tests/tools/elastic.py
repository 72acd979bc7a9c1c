"""Starts a script on two ranks as torchrun does, by its agent: `python elastic.py [--nproc-per-node N] SCRIPT WORDS`.

torchrun's command line starts fresh processes, which import torch for four seconds each; here they are forked off this
one, which has imported it where tests/warm_python.py runs this.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(words: list[str]) -> None:
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    words, ranks = sys.argv[1:], 2
    if words[0] == "--nproc-per-node":
        words, ranks = words[2:], int(words[1])
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, rank)(words)
