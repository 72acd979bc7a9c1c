"""How many samples a batch has, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def num_samples(batch: Any) -> int:
    """The length of the first array or tensor in a batch; 0 when there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif isinstance(batch, (str, bytes)) or not isinstance(batch, Sequence):
        inner = getattr(batch, "__dict__", None)  # a dataclass, a graph, ...
        batch = inner.values() if isinstance(inner, dict) else ()
    return next((count for count in map(num_samples, batch) if count), 0)
