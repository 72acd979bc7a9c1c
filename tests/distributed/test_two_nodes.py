"""Two agents of torchrun, on machines of their own where the run may make some: share="node" over a packed file."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from child_processes import run_together
from network_nodes import two_nodes, why_not_separate
from small_files import write_random
from two_agents import BATCH_SIZE, PHASES, STOPPED_AFTER

SCRIPT = Path(__file__).with_name("two_agents.py")
ROWS = 94  # no multiple of ranks or batches


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> dict[str, list[dict]]:
    """What the ranks of each phase report; see two_agents.py."""
    folder = tmp_path_factory.mktemp("nodes")
    write_random(folder / "a.h5", rows=ROWS, size=(8, 8, 3), chunk_rows=4)
    ports = free_ports(len(PHASES))
    with two_nodes() as nodes:
        commands = [[SCRIPT, folder, number, nodes[0].address, *ports] for number in range(2)]
        run_together(commands, folder, on=[node.words for node in nodes])
    return {
        phase: [json.loads((folder / f"{phase}.{rank}.json").read_text()) for rank in range(nodes * ranks)]
        for phase, (nodes, ranks) in PHASES.items()
    }


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def rows_of(ranks: list[dict], epoch: int) -> list[list[int]]:
    return [of_rank["epochs"][epoch] for of_rank in ranks]


def together(ranks: list[list[int]]) -> list[int]:
    return sorted(row for rows in ranks for row in rows)


def test_a_node_reads_the_same_rows_in_each_epoch_and_its_ranks_others(phases):
    first, second = (rows_of(phases["begun"], epoch) for epoch in range(2))
    for node in (slice(0, 2), slice(2, 4)):
        assert together(first[node]) == together(second[node])
        assert all(set(a) != set(b) for a, b in zip(first[node], second[node], strict=True))
    assert together(first[:2]) == list(range(48)) and together(first) == together(second) == list(range(ROWS))


def test_all_ranks_take_the_same_steps_and_train_the_same_weights(phases):
    for ranks in phases.values():
        assert all(of_rank["alike"] for of_rank in ranks)


@pytest.mark.parametrize("phase", ["on other nodes", "on one node"])
def test_other_nodes_read_what_is_left_of_an_epoch_once_and_then_pieces_of_their_own(phases, phase):
    begun, rest = rows_of(phases["begun"], 2), rows_of(phases[phase], 0)
    assert len(together(begun)) == 4 * STOPPED_AFTER * BATCH_SIZE
    assert together(begun + rest) == list(range(ROWS))
    following = rows_of(phases[phase], 1)
    assert together(following) == list(range(ROWS))
    if phase == "on other nodes":
        assert [sorted(rows) for rows in following] == [list(range(47)), list(range(47, ROWS))]


def test_the_loader_shows_its_node_and_one_rank_warns_of_the_order_where_nodes_are_several(phases):
    for phase, (nodes, ranks) in PHASES.items():
        for rank, report in enumerate(phases[phase]):
            assert f"rank {rank} of {nodes * ranks}, node {rank // ranks} of {nodes}" in report["shown"]
            assert report["local ranks"] == list(range(rank // ranks * ranks, (rank // ranks + 1) * ranks))
            of_order = [text for text in report["warned"] if text.startswith('share="node"')]
            assert len(of_order) == (rank == 0 and nodes > 1)
            assert all("each of 2 nodes, of" in text and "meet again" in text for text in of_order)


def test_without_torchrun_ranks_ask_one_another_and_know_their_neighbours_only_then(phases):
    for phase, (nodes, ranks) in PHASES.items():
        for rank, report in enumerate(phases[phase]):
            one, again = report["asked"]
            assert one == again and one["number"] * one["ranks_per_node"] == nodes * ranks
            assert report["known"] == [rank]


def test_machines_differ_by_boot_and_host_name(phases):
    if reason := why_not_separate():
        pytest.skip(f"both nodes are this machine: {reason}")
    for phase, (nodes, ranks) in PHASES.items():
        for report in phases[phase]:
            assert report["asked"][0] == {"number": nodes, "ranks_per_node": ranks}
