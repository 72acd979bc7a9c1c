"""Which ranks run on which node: as torchrun says, or as all ranks tell one another. No torch import here."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

from fastload.distributed.ranks import Nodes, Share, launched_nodes, process_group
from fastload.errors import ShareError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def resolve_nodes(share: Share) -> Nodes:
    """Returns the nodes that the ranks of a share run on.

    torchrun's variables say them (GROUP_RANK, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE); else all ranks of the process group
    tell one another, through its store, the machine that they run on, and each waits until all have. A single rank is
    a node.

    Raises:
        ShareError: ranks are not numbered node by node, nodes have not as many ranks each, a rank does not answer, or
            there are neither torchrun's variables nor a process group of these ranks.
    """
    if share.world_size == 1:
        return Nodes(1, 1)
    if (launched := launched_nodes(share)) is not None:
        return launched
    if process_group() == share:
        # Here, since it imports torch, which a process that has a group has.
        from fastload.distributed.consensus import texts_of_all_ranks

        return nodes_of(
            texts_of_all_ranks(_this_machine(), share, what="which machine it runs on", option='share="node"')
        )
    raise ShareError(
        f'share="node": which of the {share.world_size} ranks are on this node is not known: the environment has not '
        f"torchrun's GROUP_RANK, GROUP_WORLD_SIZE and LOCAL_WORLD_SIZE, and there is no process group of these ranks. "
        f'Call init_process_group before the first iteration, start with torchrun, or give share="auto".'
    )


def nodes_of(machines: Sequence[str]) -> Nodes:
    """Returns the nodes, given the machine of each rank, by any text; raises ShareError as `resolve_nodes` does."""
    runs = [(machine, list(ranks)) for machine, ranks in itertools.groupby(range(len(machines)), machines.__getitem__)]
    seen: dict[str, list[int]] = {}
    for machine, ranks in runs:
        if (before := seen.get(machine)) is not None:
            raise ShareError(
                f'share="node": ranks are not numbered node by node: rank {ranks[0]} is on the machine of rank '
                f"{before[-1]} ({_named(machine)}), and rank {before[-1] + 1} between them on another one "
                f"({_named(machines[before[-1] + 1])}). Number them node by node, as torchrun does, or give "
                f'share="auto".'
            )
        seen[machine] = ranks
    first, first_ranks = runs[0]
    for number, (machine, ranks) in enumerate(runs):
        if len(ranks) != len(first_ranks):
            raise ShareError(
                f'share="node": nodes need as many ranks each: node {number} ({_named(machine)}) has {len(ranks)}, '
                f"from rank {ranks[0]} on, and node 0 ({_named(first)}) has {len(first_ranks)}. Start as many on each, "
                f'or give share="auto".'
            )
    return Nodes(len(runs), len(first_ranks))


def _this_machine() -> str:
    """Returns a text of one line that ranks on the same machine have in common, and no others, and its name behind."""
    # Containers of one machine share its boot id, and neither a folder for caches nor a host name.
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # only Linux has it
        boot = ""
    return f"{boot} {socket.gethostname()}"


def _named(machine: str) -> str:
    return machine.partition(" ")[2] or machine
