"""Rank, world size and node of this process, from torch.distributed or the environment. No torch import here."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastload.errors import OptionError, ShareError, level_of_the_user
from fastload.system.machine import available_cpus


class Share(NamedTuple):
    """A rank and the world size."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class Nodes:
    """The nodes that the ranks run on: numbered node by node, as many on each."""

    number: int
    ranks_per_node: int

    def node_of(self, rank: int) -> int:
        """Returns the node of a rank, in [0, number)."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


ShareOption = Literal["auto", "node", "elastic"] | tuple[int, int] | None


def resolve_share(share: ShareOption) -> Share:
    """Returns the rank and world size that a `share` option means at present.

    Args:
        share: "auto" uses torch.distributed if it is initialized, else the environment (RANK and WORLD_SIZE, with a
            warning that shows both), and so do "node" and "elastic"; (rank, world_size) is taken as given; None means
            all rows.

    Raises:
        OptionError: none of these.
        ShareError: the environment has only one of RANK and WORLD_SIZE, or impossible values.
    """
    if share is None:
        return Share(0, 1)
    if asks_process(share):
        return process_group() or _environment() or Share(0, 1)
    # Callers may pass anything: not all check types.
    given: Any = share
    if (
        not isinstance(given, (tuple, list))
        or len(given) != 2
        or not all(isinstance(number, int) and not isinstance(number, bool) for number in given)
        or not 0 <= given[0] < given[1]
    ):
        raise OptionError(
            f'share={share!r}: give "auto", "node", "elastic", (rank, world_size) with rank in 0..world_size - 1, or '
            f"None for all rows"
        )
    return Share(*given)


def asks_process(share: ShareOption) -> bool:
    """Returns whether the option leaves it to process group and environment to say the rank."""
    return isinstance(share, str) and share in ("auto", "node", "elastic")


def check_share(share: ShareOption, resolved: Share) -> None:
    """Raises ShareError if a process group initialized since then disagrees with what the option resolved to."""
    now = process_group() if asks_process(share) else None
    if now is not None and now != resolved:
        raise ShareError(
            f"this loader was iterated as rank {resolved.rank} of {resolved.world_size}, and torch.distributed, "
            f"initialized since, says rank {now.rank} of {now.world_size}. Make the loader where the process group is "
            f"there (in Lightning in `train_dataloader()`), or give share=(rank, world_size)."
        )


def launched_nodes(share: Share) -> Nodes | None:
    """Returns the nodes that torchrun's GROUP_RANK, GROUP_WORLD_SIZE and LOCAL_WORLD_SIZE say; None without all three.

    Raises ShareError if they say that ranks are not numbered node by node, or that nodes have not as many ranks each.
    """
    texts = [os.environ.get(name, "") for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if not all(text.isdecimal() for text in texts):
        return None
    node, number, ranks_per_node = map(int, texts)
    nodes = Nodes(number, ranks_per_node)
    if number * ranks_per_node != share.world_size:
        raise ShareError(
            f'share="node": nodes need as many ranks each: node {node} has {ranks_per_node} (LOCAL_WORLD_SIZE), and '
            f"{number} nodes (GROUP_WORLD_SIZE) have {share.world_size}. Start as many on each, or give "
            f'share="auto".'
        )
    if share.rank not in nodes.ranks_of(node):
        own = nodes.ranks_of(node)
        raise ShareError(
            f'share="node": ranks are not numbered node by node: rank {share.rank} is on node {node} (GROUP_RANK), '
            f"which with {ranks_per_node} ranks a node has ranks {own.start} to {own.stop - 1}. Number them as "
            f'torchrun does, or give share="auto".'
        )
    return nodes


def local_ranks(share: Share, nodes: Nodes | None = None) -> range:
    """Returns the ranks on the node of this one, itself included; just itself where that is not known.

    It asks no other rank. It knows nodes that were found before (`nodes.resolve_nodes`) or that torchrun's variables
    name.
    """
    if nodes is None:
        try:
            nodes = launched_nodes(share)
        except ShareError:
            nodes = None
    return range(share.rank, share.rank + 1) if nodes is None else nodes.ranks_of(nodes.node_of(share.rank))


def local_world_size() -> int:
    """Returns the number of this job's processes on this machine: torchrun's LOCAL_WORLD_SIZE, else an upper bound.

    Without that variable, as after `torch.multiprocessing.spawn`, the bound is the world size, and the number of GPUs
    if the machine has any, since each rank uses one. 1 without a process group.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if text.isdecimal():
        return max(1, int(text))
    group = process_group()
    if group is None:
        return 1
    gpus: int = sys.modules["torch"].cuda.device_count()
    return min(group.world_size, gpus) if gpus else group.world_size


def cpus_of_rank() -> int:
    """Returns how many CPUs each rank on this machine has, if all share those that this process may use; at least 1."""
    return max(1, available_cpus() // local_world_size())


def local_rank() -> int:
    """Returns this process's number within its job on this machine: torchrun's, else its rank; 0 if alone."""
    text = os.environ.get("LOCAL_RANK", "")
    group = process_group()
    return int(text) if text.isdecimal() else group.rank if group is not None else 0


def process_group() -> Share | None:
    """Returns rank and world size in the default process group; None without one."""
    # A process group exists only if torch was imported.
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return Share(torch.distributed.get_rank(), torch.distributed.get_world_size())


def _environment() -> Share | None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and (world_size is None or world_size.strip() == "1"):
        return None
    try:
        share = Share(int(rank or ""), int(world_size or ""))
    except ValueError:
        share = Share(-1, -1)
    if not 0 <= share.rank < share.world_size:
        raise ShareError(
            f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}, which name no rank. Set both, "
            f"initialize torch.distributed first, give share=(rank, world_size), or share=None to read all rows."
        )
    if share.world_size > 1:
        # The text is always the same, so that Python's default filter shows it once.
        warnings.warn(
            f"torch.distributed is not initialized; taking rank {share.rank} of {share.world_size} from RANK and "
            f"WORLD_SIZE. Give share=None to read all rows here.",
            stacklevel=level_of_the_user(),
        )
    return share
