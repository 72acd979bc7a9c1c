"""Rank and world size from options, environment and torch.distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastload.distributed.ranks import Share, check_share, local_world_size, resolve_share
from fastload.errors import OptionError, ShareError

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_the_environment_is_taken_with_a_warning_that_gives_both_numbers_and_alone_is_rank_0_of_1(monkeypatch):
    assert resolve_share("auto") == resolve_share(None) == Share(0, 1)
    assert local_world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve_share("auto") == Share(0, 1)
    monkeypatch.setenv("RANK", "0")
    assert resolve_share("auto") == Share(0, 1)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="rank 2 of 4"):
        assert resolve_share("auto") == Share(2, 4)
    assert resolve_share(None) == Share(0, 1)
    assert local_world_size() == 2
    # Without a process group nothing can disagree; within one see test_loader.py and test_two_ranks.py.
    check_share("auto", Share(1, 3))
    check_share((0, 2), Share(0, 2))


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [(None, "2"), ("0", None), ("2", "2"), ("x", "2"), ("-1", "2"), ("4", "4"), ("17", "4")],
)
def test_an_environment_that_names_no_rank_is_an_error_with_both_values(monkeypatch, rank, world_size):
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ShareError, match=f"RANK={rank!r} and WORLD_SIZE={world_size!r}, which name no rank"):
        resolve_share("auto")


def test_given_shares_are_checked():
    assert resolve_share((1, 2)) == Share(1, 2)
    for bad in ((2, 2), (-1, 2), (0, 0), (0,), "all", 1, (0.0, 1), (True, 2)):
        with pytest.raises(OptionError, match="share="):
            resolve_share(bad)
    with pytest.raises(OptionError, match=r"share=\(17, 4\).*0\.\.world_size - 1"):
        resolve_share((17, 4))


def test_ranks_of_a_process_group_are_neighbours_unless_torchrun_says_otherwise(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # nothing is exchanged
    try:
        assert resolve_share("auto") == Share(0, 2)
        assert local_world_size() == min(2, torch.cuda.device_count() or 2)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        assert local_world_size() == 3
    finally:
        dist.destroy_process_group()
