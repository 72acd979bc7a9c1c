"""What ranks agree on through a store, each kind of store that a process group may have."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from fastload.distributed.consensus import Agreement, open_agreement
from fastload.distributed.ranks import Share
from fastload.errors import OptionError, ShareError

MINUTE = timedelta(seconds=60)


def make_stores(kind, tmp_path):
    """Two ranks' ends of one store."""
    if kind == "hash":
        return [dist.HashStore()] * 2
    if kind == "file":
        return [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)
    return [first, dist.TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False, timeout=MINUTE)]


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request, tmp_path):
    return [dist.PrefixStore("test", store) for store in make_stores(request.param, tmp_path)]


def agreements(stores, **options):
    return [Agreement(store, Share(rank, 2), what="its number", **options) for rank, store in enumerate(stores)]


def test_all_ranks_get_the_largest_number_of_each_round(stores):
    first, second = agreements(stores)
    for number, (a, b) in enumerate([(1, 3), (2, 2), (4, 1)], 1):
        first.publish(number, a)
        second.publish(number, b)
        assert second.largest(number) == max(a, b) == first.largest(number)
        assert first.largest(number) == max(a, b)


def test_a_rank_that_is_late_is_waited_for(stores):
    first, second = agreements(stores)
    first.publish(1, 2)
    late = threading.Timer(0.05, second.publish, (1, 3))
    late.start()
    assert first.largest(1) == 3
    late.join()


def test_a_rank_that_never_answers_is_named(stores):
    first, second = agreements(stores, timeout_s=0.02)
    first.publish(7, 2)
    with pytest.raises(ShareError, match=r"rank 1 of 2 did not say within 0.02 s its number, number 7 on rank 0"):
        first.largest(7)
    second.publish(7, 1)
    first._timeout_s = 600  # a busy store may take longer than before to say what it has
    assert first.largest(7) == 2


def test_a_store_says_itself_how_long_to_wait():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=30))
    first, _ = agreements([store, store])
    first.publish(1, 1)
    with pytest.raises(ShareError, match=r"within 0\.03 s"):
        first.largest(1)


def test_rounds_that_nobody_asks_for_leave_no_more_keys_than_two_a_rank():
    store = dist.HashStore()
    ranks = agreements([store, store])
    for number in range(1, 30):
        for rank in ranks:
            rank.publish(number, 1)
        if number % 2:  # every other round is passed over, as an epoch whose factor comes from a state
            assert [rank.largest(number) for rank in ranks] == [1, 1]
            assert store.num_keys() <= 4


def test_one_rank_needs_no_process_group_and_several_do():
    assert open_agreement(Share(0, 1), option="echo", what="it") is None
    with pytest.raises(OptionError, match=r"echo: the loader is rank 2 of 3, .* not initialized"):
        open_agreement(Share(2, 3), option="echo", what="it")
