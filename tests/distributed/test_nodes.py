"""Nodes of ranks: from torchrun's variables, from what the ranks say of their machines, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastload.distributed import consensus
from fastload.distributed.consensus import nodes_of, resolve_nodes
from fastload.distributed.ranks import Nodes, Share, local_ranks
from fastload.errors import ShareError

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def torchrun(monkeypatch):
    """Sets the variables of a node: `torchrun(node, number, ranks)`."""

    def launch(*numbers):
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name, number in zip(names, numbers, strict=True):
            monkeypatch.setenv(name, str(number))

    return launch


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_rank_is_on_one_node(number, ranks):
    nodes = Nodes(number, ranks)
    assert [rank for node in range(number) for rank in nodes.ranks_of(node)] == list(range(number * ranks))
    for rank in range(number * ranks):
        assert rank in nodes.ranks_of(nodes.node_of(rank))
        assert local_ranks(Share(rank, number * ranks), nodes) == nodes.ranks_of(nodes.node_of(rank))


def test_torchruns_nodes_are_taken_without_asking_a_rank(torchrun):
    assert local_ranks(Share(5, 6)) == range(5, 6)
    torchrun(1, 2, 3)
    assert resolve_nodes(Share(5, 6)) == Nodes(2, 3) and local_ranks(Share(5, 6)) == range(3, 6)
    assert resolve_nodes(Share(0, 1)) == Nodes(1, 1)


@pytest.mark.parametrize(
    ("numbers", "share", "message"),
    [
        ((1, 2, 3), (2, 6), r"not numbered node by node: rank 2 is on node 1 .* has ranks 3 to 5"),
        ((0, 2, 3), (1, 5), r"as many ranks each: node 0 has 3 \(LOCAL_WORLD_SIZE\), and 2 nodes .* have 5"),
        ((0, 0, 1), (1, 2), r"as many ranks each"),
    ],
)
def test_nodes_of_torchrun_that_are_not_alike_or_not_in_order_are_refused_and_ranks_then_know_themselves(
    torchrun, numbers, share, message
):
    torchrun(*numbers)
    with pytest.raises(ShareError, match=message):
        resolve_nodes(Share(*share))
    assert local_ranks(Share(*share)) == range(share[0], share[0] + 1)


def test_machines_of_ranks_make_nodes_where_they_are_neighbours_and_as_many():
    assert nodes_of(["x a"] * 3) == Nodes(1, 3)
    assert nodes_of(["x a", "y a"]) == Nodes(2, 1), "one name on two machines"
    assert nodes_of(["x a", "x b"]) == Nodes(2, 1), "two containers on one machine"
    assert nodes_of(["x a", "x a", "y b", "y b"]) == Nodes(2, 2)
    with pytest.raises(
        ShareError, match=r"rank 2 is on the machine of rank 0 \(a\), and rank 1 between them on another one \(b\)"
    ):
        nodes_of(["x a", "y b", "x a", "y b"])
    with pytest.raises(ShareError, match=r"node 1 \(b\) has 1, from rank 2 on, and node 0 \(a\) has 2"):
        nodes_of(["x a", "x a", "y b"])


def test_ranks_that_nobody_can_say_the_nodes_of_are_refused(monkeypatch):
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):
        with pytest.raises(ShareError, match=r"which of the 4 ranks are on this node is not known.*init_process_group"):
            resolve_nodes(Share(1, 4))
        monkeypatch.setenv(name, "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # nothing is exchanged
    try:
        with pytest.raises(ShareError, match="is not known"):
            resolve_nodes(Share(1, 4))  # of another group
    finally:
        dist.destroy_process_group()


def test_texts_come_from_all_ranks_as_often_as_they_are_asked_for_and_a_silent_rank_is_named(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(consensus, "_default_store", lambda: store)

    def say(rank):
        text = f"machine {rank} ü"
        return [
            consensus.texts_of_all_ranks(text, Share(rank, 3), what="where it is", option="share=") for _ in range(2)
        ]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(say, range(3))) == [[["machine 0 ü", "machine 1 ü", "machine 2 ü"]] * 2] * 3
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(ShareError, match=r"rank 1 of 2 did not say within 0\.02 s where it is.* or leave out share="):
        consensus.texts_of_all_ranks("here", Share(0, 2), what="where it is", option="share=")
