"""`NetworkUse`: counts of a loader's fetches over the network in some time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

_STATES = ("url", "in_flight", "allowed", "dataset_bytes", "room_bytes", "nodes", "by_node")


@dataclass(frozen=True)
class NetworkUse:
    """Counts of this process's fetches of one dataset in some time; all zero for a file of this machine.

    `+` and `-` add and subtract the counts; the result keeps the left side's other values.
    """

    elapsed_s: float = 0.0  # of the time
    bytes: int = 0  # of chunks that came
    chunks: int = 0  # that came
    again: int = 0  # of these, chunks that had come before and were evicted since
    hits: int = 0  # chunks that were found in the cache
    requests: int = 0  # that were sent, each try
    retries: int = 0  # of these, tries after one that failed
    refused: int = 0  # tries that the server refused for their number
    busy_s: float = 0.0  # of all tries together, from sending one to the end of its answer
    waited_s: float = 0.0  # of all threads together, in which they needed chunks that had not come
    url: str = ""
    in_flight: int = 0  # requests that `Remote` allows at once
    allowed: float = 0.0  # requests that the server bears at once, as far as it refused some
    dataset_bytes: int = 0  # of all objects
    room_bytes: int = 0  # of the cache
    nodes: int = 1  # machines that train together
    by_node: bool = False  # whether each of them has a share of its own: share="node"

    def __add__(self, other: NetworkUse) -> NetworkUse:
        return self._with(other, 1)

    def __sub__(self, other: NetworkUse) -> NetworkUse:
        return self._with(other, -1)

    def _with(self, other: NetworkUse, sign: int) -> NetworkUse:
        counts: dict[str, Any] = {
            one.name: getattr(self, one.name) + sign * getattr(other, one.name)
            for one in fields(self)
            if one.name not in _STATES
        }
        return replace(self, **counts)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mean_in_flight(self) -> float:
        """Requests that were in flight at once, on average."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0
