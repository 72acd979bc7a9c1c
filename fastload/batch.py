"""What a loader hands over: the fields of a batch, with the plan's facts beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_FACTS = ("rows", "valid", "global_valid")


class _Facts:
    """The plan's facts as attributes, made into tensors when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        if name in facts:
            # Not before: freeing a tensor gives up the GIL, and beside pure Python waits 0.5 ms to get it back.
            value = facts[name]
            self.__dict__[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            return self.__dict__[name]
        if name in _FACTS:
            raise AttributeError(
                f"this batch has no {name!r}: a framework built it anew. Ask for 'row' or 'valid' in the fields of "
                f"PackedDataset, then they travel as ordinary tensors."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Batch(_Facts, tuple[torch.Tensor, ...]):
    """The fields asked for, in order, with the plan's facts beside them.

    Attributes:
        rows: int64 (B,), row of the file of each sample; of another dataset, its index.
        valid: bool (B,), False for a repeat that only fills the last batch (ends="exact").
        global_valid: rows that count in this step over all ranks.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    global_valid: int

    @classmethod
    def of(cls, fields: Iterable[torch.Tensor], facts: Mapping[str, Any]) -> Batch:
        """A batch with its facts: rows, valid, global_valid."""
        batch = cls(fields)
        batch.__dict__["_facts"] = facts
        return batch


class DictBatch(_Facts, dict[Any, Any]):
    """A batch of a dataset whose samples are dicts; the same facts beside it as `Batch` has."""

    rows: torch.Tensor
    valid: torch.Tensor
    global_valid: int

    @classmethod
    def of(cls, fields: Mapping[Any, Any], facts: Mapping[str, Any]) -> DictBatch:
        """A batch with its facts: rows, valid, global_valid."""
        batch = cls(fields)
        batch.__dict__["_facts"] = facts
        return batch
