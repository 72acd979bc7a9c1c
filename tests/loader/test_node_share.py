"""FastLoader(share="node"): what the ranks of nodes read, go on with, show and warn of; see also test_two_nodes.py."""

from __future__ import annotations

import warnings

import pytest
from late_backend import Device

from fastload.distributed import consensus as consensus_module
from fastload.distributed import ranks as ranks_module
from fastload.distributed.ranks import Share
from fastload.errors import ShareError
from fastload.loader import loader as loader_module
from fastload.loader import loader_options as options_module
from fastload.loader.loader import FastLoader
from fastload.plan import ChunkWindow

N, BATCH_SIZE = 94, 4
PACKED = {"rows": N, "size": (6, 6, 3), "seed": 1, "chunk_rows": 4}

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def loader_of(packed, monkeypatch):
    """Makes the loader of a rank as torchrun would start it: `loader_of(rank, nodes, ranks_per_node, **options)`."""

    def make(rank, nodes, ranks, *, batch_size=BATCH_SIZE, **options):
        numbers = (rank, nodes * ranks, rank // ranks, nodes, ranks)
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
        with monkeypatch.context() as patch, warnings.catch_warnings():
            for name, number in zip(names, numbers, strict=True):
                patch.setenv(name, str(number))
            warnings.filterwarnings("ignore", "torch.distributed is not initialized")
            warnings.filterwarnings("ignore", ".*a stratified sample")
            return FastLoader(packed, batch_size, **{"share": "node", "ends": "exact", "seed": 7} | options)

    return make


def rows_of(loader, steps=None):
    rows = []
    for step, batch in enumerate(loader, 1):
        rows += batch.rows[batch.valid].tolist()
        if step == steps:
            break
    return rows


@pytest.mark.parametrize("shuffle", ["full", ChunkWindow(2), False])
def test_a_node_has_the_same_rows_in_every_epoch_and_a_rank_has_not(loader_of, shuffle):
    loaders = [loader_of(rank, 2, 3, shuffle=shuffle) for rank in range(6)]
    epochs = [[rows_of(loader) for loader in loaders] for _ in range(3)]
    for epoch in epochs:
        assert sorted(row for rows in epoch[:3] for row in rows) == list(range(48))
        assert sorted(row for rows in epoch[3:] for row in rows) == list(range(48, N))
    same = [set(epochs[0][rank]) == set(epochs[1][rank]) for rank in range(6)]
    assert same == [shuffle is False] * 6


@pytest.mark.parametrize(("begun", "then"), [("node", "auto"), ("auto", "node"), ("node", "node")])
@pytest.mark.parametrize("world", [(2, 3), (3, 2), (1, 2), (6, 1)])
def test_an_epoch_goes_on_with_another_share_or_other_nodes_each_row_once(loader_of, begun, then, world):
    first = [loader_of(rank, 2, 3, share=begun) for rank in range(6)]
    read = [row for loader in first for row in rows_of(loader, 2)]
    state = first[0].state_dict()
    assert all(loader.state_dict() == state for loader in first)
    nodes, ranks = world
    loaders = [loader_of(rank, nodes, ranks, share=then, batch_size=5) for rank in range(nodes * ranks)]
    for loader in loaders:
        loader.load_state_dict(state)
        read += rows_of(loader)
    assert sorted(read) == list(range(N))
    fresh = [loader_of(rank, nodes, ranks, share=then, batch_size=5) for rank in range(nodes * ranks)]
    for loader, other in zip(loaders, fresh, strict=True):
        other.set_epoch(1)
        assert [batch.rows.tolist() for batch in loader] == [batch.rows.tolist() for batch in other]


def test_the_repr_shows_the_node(loader_of):
    assert "rank 3 of 4, node 1 of 2" in repr(loader_of(3, 2, 2)) and "node 1 of 2" in loader_of(3, 2, 2)._repr_html_()
    assert "node" not in repr(loader_of(3, 2, 2, share="auto"))
    assert "node" not in repr(loader_of(0, 1, 1))


def test_rank_0_alone_warns_of_the_order_with_its_figures_where_nodes_are_several_and_shuffle(packed, monkeypatch):
    def warned(rank, nodes, ranks, **options):
        for module in (ranks_module, consensus_module, options_module, loader_module):
            monkeypatch.setattr(module, "process_group", lambda: Share(rank, nodes * ranks))
        machines = [str(other // ranks) for other in range(nodes * ranks)]
        monkeypatch.setattr("fastload.distributed.consensus.texts_of_all_ranks", lambda *_, **__: machines)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FastLoader(packed, 7, share="node", **options)
        return [str(one.message) for one in caught]

    [text] = warned(0, 3, 2, shuffle="full")
    assert text.startswith('share="node": each of 3 nodes, of 2 ranks, reads one piece of the file in all epochs')
    # Full shuffle of 94 rows: 6 / 93; of a node's 32: 6 / 31 on average, here by the plan of two epochs.
    assert "under full shuffle of all rows 6.45%" in text and "without fixed pieces" in text
    figure = float(text.split("in a batch of a rank, ")[1].split("%")[0]) / 100
    assert 0.05 < figure < 0.5 and f"{figure / (6 / 93):.1f} times" in text
    for rank, nodes, ranks, shuffle in ((1, 3, 2, "full"), (0, 1, 4, "full"), (0, 3, 2, False)):
        assert warned(rank, nodes, ranks, shuffle=shuffle, ends="exact") == []


def test_a_loader_made_before_its_process_group_finds_its_node_there_or_says_why_not(packed, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="torch.distributed is not initialized"):
        loader = FastLoader(packed, BATCH_SIZE, share="node", ends="exact", seed=7)
    with pytest.raises(ShareError, match=r"which of the 4 ranks are on this node is not known"):
        iter(loader)
    loader.set_epoch(1)
    for module in (ranks_module, consensus_module, options_module, loader_module):
        monkeypatch.setattr(module, "process_group", lambda: Share(3, 4))
    monkeypatch.setattr("fastload.distributed.consensus.texts_of_all_ranks", lambda *_, **__: ["a", "a", "b", "b"])
    assert "rank 3 of 4, node 1 of 2" not in repr(loader)
    assert len(loader) == 6 and loader.epoch == 1
    assert "rank 3 of 4, node 1 of 2" in repr(loader)
    assert set(rows_of(loader)) < set(range(48, N))
    for module in (ranks_module, consensus_module, options_module, loader_module):
        monkeypatch.setattr(module, "process_group", lambda: Share(2, 4))
    with pytest.raises(ShareError, match=r"iterated as rank 3 of 4.*says rank 2 of 4"):
        iter(loader)
    monkeypatch.setattr("fastload.distributed.consensus.texts_of_all_ranks", lambda *_, **__: ["a", "b", "a", "b"])
    with pytest.raises(ShareError, match="not numbered node by node"):
        FastLoader(packed, BATCH_SIZE, share="node")


def test_a_cache_of_fixed_shares_keeps_a_piece_a_rank_and_says_nothing_of_nodes(loader_of):
    row_bytes = 6 * 6 * 3
    small = {"cache": "device", "shuffle": "full"}
    loaders = [
        loader_of(rank, 2, 2, device=Device(free=40 * row_bytes, total=40 * row_bytes), **small) for rank in range(4)
    ]
    for _ in range(2):
        rows = [sorted(rows_of(loader)) for loader in loaders]
        assert rows == [list(range(0, 24)), list(range(24, 48)), list(range(48, 71)), list(range(71, N))]
    assert all(loader._options.nodes is None for loader in loaders)
    assert loaders[0].state_dict()["shuffle"] == ["shares", "full"]
    roomy = [loader_of(rank, 2, 2, device=Device(), **small) for rank in range(4)]
    first, second = ([set(rows_of(loader)) for loader in roomy] for _ in range(2))
    assert first[0] | first[1] == second[0] | second[1] == set(range(48)) and first[0] != second[0]
    assert roomy[0].state_dict()["shuffle"] == ["pieces", [2, "full"]]
    # A rank that is a node never reads other rows, and keeps no others.
    alone = [loader_of(rank, 2, 1, device=Device(), **small) for rank in range(2)]
    for loader, piece in zip(alone, (range(47), range(47, N)), strict=True):
        assert sorted(rows_of(loader)) == sorted(rows_of(loader)) == list(piece)
        assert loader._producer.pool is not None and len(loader._producer.pool._opened.cache.rows) == 47


def test_a_given_share_is_no_node(packed):
    assert "node" not in repr(FastLoader(packed, BATCH_SIZE, share=(1, 2)))
    loader = FastLoader(packed, BATCH_SIZE, share="node", shuffle="full")
    assert loader.state_dict()["shuffle"] == "full" and len(rows_of(loader)) == N // BATCH_SIZE * BATCH_SIZE
