"""Two machines to run processes on: network namespaces joined by a cable of their own, with host names of their own.

Where that takes rights that a run does not have, both are this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

_ADDRESSES = "198.51.100.1", "198.51.100.2"  # of a range for documentation, which no real network has


class NetworkNode(NamedTuple):
    """A machine as a process sees it."""

    address: str  # at which the other one reaches it
    words: tuple[str, ...]  # before a command that is to run there
    separate: bool  # whether it has a network and a host name of its own


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[NetworkNode, NetworkNode]]:
    """Opens two nodes that reach one another, and nothing else; twice this machine where `why_not_separate` says so."""
    if why_not_separate():
        alone = NetworkNode("127.0.0.1", ("env", "GLOO_SOCKET_IFNAME=lo"), separate=False)
        yield alone, alone
        return
    names = [f"fastload{os.getpid()}{side}" for side in "ab"]
    cables = [f"fl{os.getpid()}{side}" for side in "ab"]  # of at most 15 letters
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = (
            NetworkNode(address, _words(name, cable), separate=True)
            for name, cable, address in zip(names, cables, _ADDRESSES, strict=True)
        )
        yield first, second
    finally:
        for name in made:  # and the cable with them
            _ip("netns", "delete", name)


def why_not_separate() -> str:
    """Returns why this run cannot have separate nodes; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    probe = f"fastload{os.getpid()}probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"no network namespace: {done.stderr.strip()}"
    try:
        # A container may have the namespace and not the right to lay a cable or to name itself.
        cable = ["ip", "-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
        for command in (cable, [*_words(probe, "lo"), "true"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"`{' '.join(command)}`: {done.stderr.strip()}"
    finally:
        _ip("netns", "delete", probe)
    return ""


def _words(name: str, cable: str) -> tuple[str, ...]:
    # gloo looks for the address of the host name otherwise, which nobody knows.
    named = f'echo {name} > /proc/sys/kernel/hostname && GLOO_SOCKET_IFNAME={cable} exec "$@"'
    return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
