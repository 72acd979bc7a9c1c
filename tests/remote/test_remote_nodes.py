"""Two nodes of two ranks, a cache each, read a dataset behind a URL: share="node" keeps each to its own half."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import run_together
from network_nodes import two_nodes
from remote_files import spans
from small_files import write_random
from two_remote_agents import RANKS, SHARES

from fastload.pack.index import index_files

SCRIPT = Path(__file__).with_name("two_remote_agents.py")
ROWS, SHARDS = 800, 4
ROW_BYTES = 16 * 16 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all nodes have reported; see two_remote_agents.py."""
    folder = tmp_path_factory.mktemp("nodes")
    (data := folder / "served" / "data").mkdir(parents=True)
    rows = ROWS // SHARDS
    shards = [write_random(data / f"{i}.h5", rows=rows, size=(16, 16, 3), chunk_rows=4, seed=i) for i in range(SHARDS)]
    index_files(shards, data / "data.h5")
    sockets = [socket.socket() for _ in SHARES]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    with two_nodes() as nodes:
        commands = [[SCRIPT, folder, number, nodes[0].address, *ports] for number in range(2)]
        run_together(commands, folder, on=[node.words for node in nodes])
    return folder


def reported(folder: Path, share: str) -> list[list[dict[str, Any]]]:
    """What each node reported after each epoch."""
    return [
        [json.loads((folder / f"{share}.{node}.{epoch}.json").read_text()) for epoch in range(2)] for node in range(2)
    ]


def pixel_ranges(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The ranges of images among those asked for: they begin behind the first 4,096 bytes and have whole rows."""
    ranges = [one for one in spans(report["log"]) if "/data.h5" not in one[0]]
    last = 4096 + ROWS // SHARDS * ROW_BYTES
    return [(path, begin, stop) for path, begin, stop in ranges if begin >= 4096 and stop <= last]


@pytest.mark.parametrize("share", SHARES)
def test_all_rows_of_each_epoch_are_read_once_by_all_ranks_together(share, folder):
    ranks = [json.loads((folder / f"rows.{share}.{rank}.json").read_text()) for rank in range(2 * RANKS)]
    for epoch in range(2):
        assert sorted(row for rows in ranks for row in rows[epoch]) == list(range(ROWS))


def test_each_node_fetches_the_chunks_of_its_half_and_each_of_them_once(folder):
    nodes = reported(folder, "node")
    for epochs in nodes:
        first, second = (pixel_ranges(report) for report in epochs)
        assert len(set(second)) == len(second)
        of_images = sum(stop - begin for _, begin, stop in second)
        assert 0.98 <= of_images / (ROWS // 2 * ROW_BYTES) <= 1.02
        assert set(second) == set(first)  # none in the second epoch
    both = [set(epochs[1]["chunks"]) for epochs in nodes]
    assert not both[0] & both[1] and len(both[0] | both[1]) == ROWS // 4


def test_without_it_the_second_epoch_fetches_what_the_other_node_had(folder):
    for epochs in reported(folder, "auto"):
        fetched = sum(stop - begin for _, begin, stop in pixel_ranges(epochs[1]))
        assert fetched > 1.3 * ROWS // 2 * ROW_BYTES
    both = [np.array(epochs[1]["chunks"]) for epochs in reported(folder, "auto")]
    assert len(np.intersect1d(*both)) > ROWS // 4 // 8
