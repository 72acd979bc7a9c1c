"""Says from measured numbers what a loop got over the network, and what to change where it waited for that."""

from __future__ import annotations

from fastload.profiling.verdict.demands import Demands
from fastload.system.advice import advice
from fastload.system.text import format_bytes
from fastload.timing.network import NetworkUse

_REFUSED = 0.02  # share of requests from which the server is at its limit
_USED = 0.6  # part of the requests allowed at once that is in use on average where more were sent if they might be
_AGAIN, _MOSTLY_AGAIN = 0.1, 0.5  # shares of chunks that came before; see `network_changes`


def network_rate(use: NetworkUse) -> str:
    """Returns the bytes a second that came, the requests in flight meanwhile, and how many the server refused."""
    refused = "none refused"
    if use.refused:
        refused = f"{use.refused:,} of {use.requests:,} refused (the server accepts about {use.allowed:.2g} at once)"
    return (
        f"{format_bytes(use.bytes_per_s)}/s with {use.mean_in_flight:.1f} of at most {use.in_flight} requests in "
        f"flight, {refused}"
    )


def network_facts(use: NetworkUse) -> list[str]:
    """Returns what came over the network and what lay in the cache, a line each."""
    if not use.chunks:
        return [f"nothing came over the network from {use.url}: {use.hits:,} chunks lay in the cache"]
    again = f", {use.again:,} of them not for the first time" if use.again else ""
    lines = [
        f"over the network from {use.url} came {use.chunks:,} chunks ({format_bytes(use.bytes)}{again}), "
        f"{network_rate(use)}; {use.hits:,} chunks lay in the cache"
    ]
    if use.retries:
        lines.append(f"{use.retries:,} of {use.requests:,} requests repeated one that had failed")
    return lines


def network_changes(demands: Demands) -> list[str]:
    """Returns what to change where the network binds, imperative clauses, that which gains most first."""
    use = demands.network
    if use is None:
        return [advice("keep on this machine")]
    refuses = use.refused > _REFUSED * use.requests
    again = use.again / use.chunks if use.chunks else 0.0
    fits = use.dataset_bytes <= use.room_bytes
    sizes = {"room": format_bytes(use.room_bytes), "size": format_bytes(use.dataset_bytes)}
    found = []
    if again >= _AGAIN and not fits:
        found.append(advice("more room", share=f"{again:.0%}", **sizes))
    if refuses:
        found.append(advice("fewer requests"))
    elif use.mean_in_flight >= _USED * min(use.in_flight, use.allowed):
        more = advice("more requests", count=2 * use.in_flight, now=use.in_flight)
        found.insert(0 if again < _MOSTLY_AGAIN else len(found), more)
    if use.nodes > 1 and not use.by_node:
        found.append(advice("share of a node", count=use.nodes))
    if again < _AGAIN and not fits:
        found.append(advice("room for all", **sizes))
    found.append(advice("nearer"))
    if fits and again < _AGAIN:
        found.append(advice("train on"))
    return found
