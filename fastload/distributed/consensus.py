"""Ranks agree on small numbers, or share short texts, by the process group's key-value store, without a collective.

A collective issued by a loader could interleave with one of the training loop. Each rank reads the store on its own.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastload.distributed.ranks import Nodes, Share, launched_nodes, process_group
from fastload.errors import OptionError, ShareError

# Numbers the loaders that need an agreement in the order in which they are made, which is the same on every rank.
_numbers = itertools.count()

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.1


class Agreement:
    """Finds the largest of the numbers that the ranks give for a round, through a store that all of them see.

    Each rank counts rounds itself. A rank's number is deleted once that rank has read a later round of all ranks, since
    nobody needs the earlier one then. Ranks are waited for as long as `timeout_s` says, or by default the store's own
    timeout, as given to `init_process_group`. In the error, `what` names the value to agree on, and `instead` says what
    a user can do without it.
    """

    def __init__(
        self,
        store: Any,
        share: Share,
        *,
        what: str,
        instead: str = "give a fixed number",
        timeout_s: float | None = None,
    ) -> None:
        self._store = store
        self._share = share
        self._what = what
        self._instead = instead
        self._timeout_s = timeout_s
        self._published: deque[int] = deque()

    def publish(self, round_number: int, value: int | str) -> None:
        """Publishes this rank's number or text for a round, once; never waits for another rank."""
        self._store.set(f"{round_number}/{self._share.rank}", str(value))
        self._published.append(round_number)

    def largest(self, round_number: int) -> int:
        """Returns the largest number of the round, when every rank has given its; ShareError names one that is late."""
        values = [int(text) for text in self.texts(round_number)]
        # A rank that gave a number for this round has read all rounds before.
        while self._published and self._published[0] < round_number:
            self._store.delete_key(f"{self._published.popleft()}/{self._share.rank}")
        return max(values)

    def texts(self, round_number: int) -> list[str]:
        """Returns what each rank published for the round; ShareError names one that is late."""
        return [self._read(round_number, rank) for rank in range(self._share.world_size)]

    def _read(self, round_number: int, rank: int) -> str:
        key, wait_s = f"{round_number}/{rank}", _FIRST_WAIT_S
        timeout_s: float = self._store.timeout.total_seconds() if self._timeout_s is None else self._timeout_s
        deadline = time.monotonic() + timeout_s
        # Polled: TCPStore.wait() holds a lock meanwhile that NCCL's watchdog needs for the same store.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise ShareError(
                    f"rank {rank} of {self._share.world_size} did not say within {timeout_s:g} s {self._what}, number "
                    f"{round_number} on rank {self._share.rank}. Every rank must make the same loaders in the same "
                    f"order and run the same epochs of them; look at whether rank {rank} still lives, or "
                    f"{self._instead}. The time was set by init_process_group(timeout=...)."
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return str(self._store.get(key), "utf-8")


def open_agreement(share: Share, *, option: str, what: str) -> Agreement | None:
    """Returns the agreement of one loader; None for a single rank. All ranks must make their loaders in the same order.

    Raises OptionError, naming the option that needs it, if there are several ranks and no process group of just these.
    """
    if share.world_size == 1:
        return None
    store = _default_store()
    if store is None:
        raise OptionError(
            f"{option}: the loader is rank {share.rank} of {share.world_size}, and the ranks agree through the store "
            f"of torch.distributed, which is not initialized. Call init_process_group before making the loader, or "
            f"give a whole number."
        )
    group = process_group()
    if group != share:
        raise OptionError(
            f"{option}: the loader is rank {share.rank} of {share.world_size}, the process group says (rank, world "
            f"size) = {group and tuple(group)}, and the ranks agree through its store. Leave share out, or give a "
            f"whole number."
        )
    return _next_agreement(store, share, what)


def least_of_all_ranks(value: int, share: Share, *, what: str) -> int | None:
    """Returns the least of the numbers that the ranks give; None if there is no process group of this share.

    Each rank calls it when it makes the same loader; it returns when all have, and raises ShareError if one is late.
    """
    store = _default_store()
    if store is None or process_group() != share:
        return None
    agreement = _next_agreement(store, share, what)
    agreement.publish(0, -value)
    return -agreement.largest(0)


def texts_of_all_ranks(text: str, share: Share, *, what: str, option: str) -> list[str]:
    """Returns what each rank of the process group says of itself, which stays the same while the group lives.

    Each rank calls it at some time, as often as it likes: it returns when all have, and raises ShareError if one is
    late. `option` is what the user gave to be asked.
    """
    # The same keys for all loaders, since values found there are right.
    store = _within(_default_store(), option)
    agreement = Agreement(store, share, what=what, instead=f"leave out {option}")
    agreement.publish(0, text)
    return agreement.texts(0)


def _next_agreement(store: Any, share: Share, what: str) -> Agreement:
    return Agreement(_within(store, str(next(_numbers))), share, what=what)


def _within(store: Any, name: str) -> Any:
    """Returns a part of the store with keys of its own."""
    return dist.PrefixStore(f"fastload/{name}", store)  # type: ignore[attr-defined]  # not in torch's export list


def _default_store() -> Any | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    # Private, but the only way as of torch 2.4; pytorch/pytorch#84468 asks for a public one.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


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
