"""The batches that a loader hands over: tuples or dicts of tensors, with facts about their samples as attributes.

Both are nodes of torch's pytrees, as a tuple is: what maps over tensors (`tree_map`, torchvision's transforms) sees the
fields, and not the attributes. These stay: after `tree_map(lambda t: t[order], batch)` rows, valid and names are in the
old order. They are dropped where a field no longer has one entry a sample; sizes and pixel_mask, where any field has
another shape. A transform of torchvision's v2 takes the first tensor for the images and moves no other, as in a tuple:
give it tv_tensors of the fields.

Batches pickle as plain tuples and dicts; `torch.load(weights_only=True)` takes them once fastload is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch.utils._pytree import MappingKey, SequenceKey, register_pytree_node

_FACTS = ("rows", "valid", "global_valid", "names")
_SIZED = (torch.Tensor, list)
_FACTS_OF_OWN_SIZES = ("sizes", "pixel_mask")


class _Facts:
    """The plan's facts about a batch as attributes, made into tensors when they are asked for."""

    rows: torch.Tensor
    valid: torch.Tensor
    global_valid: int
    names: tuple[str, ...]
    sizes: torch.Tensor
    pixel_mask: torch.Tensor

    def _with_facts(self, facts: Mapping[str, Any]) -> Self:
        self.__dict__["_facts"] = facts
        return self

    def _known(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.__dict__.get("_facts", {})
        return facts

    def __getattr__(self, name: str) -> Any:
        facts = self._known()
        if name in facts:
            # Not before: freeing a tensor gives up the GIL, and waits 0.5 ms to get it back while pure Python runs.
            value = facts[name]() if callable(facts[name]) else facts[name]
            self.__dict__[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            return self.__dict__[name]
        if name in _FACTS:
            raise AttributeError(
                f"this batch has no {name!r}: a framework built it anew. Ask for 'row' or 'valid' in the fields of "
                f"PackedDataset, then they travel as ordinary tensors."
            )
        if name in _FACTS_OF_OWN_SIZES:
            raise AttributeError(
                f"this batch has no {name!r}: FastLoader(batch='pad') gives it, and sizes also batch='list', until the "
                f"fields get another shape. Where a framework builds batches anew, ask for 'pixel_mask' in the fields "
                f"of PackedDataset."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._known()})

    def _told(self, fields: Iterable[tuple[str, Any]]) -> str:
        """Returns the text of `repr`: how many samples, and what each field is."""
        facts = self._known()
        count = f" of {len(facts['rows'])} samples" if "rows" in facts else ""
        return f"{type(self).__name__}{count}:\n  {', '.join(name + _shown(value) for name, value in fields)}"


class Batch(_Facts, tuple[torch.Tensor, ...]):
    """A batch as a tuple of the fields asked for, in order.

    `tree_map` and other functions that map over its tensors keep the attributes, also where they change the order.

    Attributes:
        rows: int64 (B,), the row of each sample in the file; of another dataset, its index. On the loader's device.
        valid: bool (B,), False for a repeated row: it fills the last batch (ends="pad"), serves a rank that has no row
            left (ends="exact"), or replaces a damaged row (on_damage="skip"). On the loader's device.
        global_valid: number of valid samples in this step over all ranks; with several ranks it counts damaged rows,
            too, as only their own rank knows of them.
        names: each sample's name in the file (`key`), such as the path it was packed from; without keys, its row. Read
            on access.
        sizes: int64 (B, 2), height and width of each image; of images of their own sizes (`List`, `Pad`).
        pixel_mask: bool (B, H, W), which pixels belong to an image; of padded batches (`Pad`).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def __copy__(self) -> Batch:
        return Batch(self)._with_facts(self._known())

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return Batch(copy.deepcopy(list(self), memo))._with_facts(self._known())

    def __repr__(self) -> str:
        return self._told(("", value) for value in self)


class DictBatch(_Facts, dict[Any, Any]):
    """A batch as a dict, for a dataset whose samples are dicts; with the attributes of `Batch`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)

    def __copy__(self) -> DictBatch:
        return DictBatch(self)._with_facts(self._known())

    def __deepcopy__(self, memo: dict[int, Any]) -> DictBatch:
        return DictBatch(copy.deepcopy(list(self.items()), memo))._with_facts(self._known())

    def __repr__(self) -> str:
        return self._told((f"{key!r}: ", value) for key, value in self.items())


_MOST_SHOWN = 3


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {_shown(one)}" for key, one in value.items()]
        return f"{{{_first_of(parts)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{_first_of([_shown(one) for one in value])}]"
    return type(value).__name__


def _first_of(parts: list[str]) -> str:
    """Returns the texts of some parts, and how many there are: one for all of them, if they are the same."""
    if len(parts) > 1 and len(set(parts)) == 1:
        return f"{len(parts)} of {parts[0]}"
    more = f", ... {len(parts)} in all" if len(parts) > _MOST_SHOWN else ""
    return ", ".join(parts[:_MOST_SHOWN]) + more


class _Context:
    """The facts and shapes that a pytree keeps with a batch's fields; comparing two trees ignores them."""

    def __init__(self, facts: Mapping[str, Any], fields: Iterable[Any] = (), keys: tuple[Any, ...] = ()) -> None:
        self.facts, self.keys = facts, keys
        self._shapes = [_shape(one) for one in fields] if "sizes" in facts else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return f"keys={self.keys!r}" if self.keys else ""

    def facts_of(self, fields: list[Any]) -> Mapping[str, Any]:
        """Returns the facts that are true of other fields: of as many samples, and of images of the same sizes."""
        facts = self.facts
        if "rows" not in facts:
            return {}
        count = len(facts["rows"])
        lengths = [len(one) if isinstance(one, list) or one.ndim else -1 for one in fields if isinstance(one, _SIZED)]
        if any(length != count for length in lengths):
            return {}
        if "sizes" in facts and [_shape(one) for one in fields] != self._shapes:
            return {name: fact for name, fact in facts.items() if name not in _FACTS_OF_OWN_SIZES}
        return facts


def _shape(value: Any) -> Any:
    if isinstance(value, list):
        return [_shape(one) for one in value]
    return value.shape if isinstance(value, torch.Tensor) else None


def _flatten_tuple(batch: Batch) -> tuple[list[Any], _Context]:
    return list(batch), _Context(batch._known(), batch)


def _unflatten_tuple(values: Iterable[Any], context: _Context) -> Batch:
    fields = list(values)
    return Batch(fields)._with_facts(context.facts_of(fields))


def _flatten_dict(batch: DictBatch) -> tuple[list[Any], _Context]:
    return list(batch.values()), _Context(batch._known(), batch.values(), tuple(batch))


def _unflatten_dict(values: Iterable[Any], context: _Context) -> DictBatch:
    fields = list(values)
    return DictBatch(zip(context.keys, fields, strict=True))._with_facts(context.facts_of(fields))


register_pytree_node(
    Batch,
    _flatten_tuple,
    _unflatten_tuple,
    serialized_type_name="fastload.Batch",
    to_dumpable_context=lambda context: list(context.keys),
    from_dumpable_context=lambda keys: _Context({}, keys=tuple(keys)),
    flatten_with_keys_fn=lambda batch: (
        [(SequenceKey(i), value) for i, value in enumerate(batch)],
        _flatten_tuple(batch)[1],
    ),
)
register_pytree_node(
    DictBatch,
    _flatten_dict,
    _unflatten_dict,
    serialized_type_name="fastload.DictBatch",
    to_dumpable_context=lambda context: list(context.keys),
    from_dumpable_context=lambda keys: _Context({}, keys=tuple(keys)),
    flatten_with_keys_fn=lambda batch: (
        [(MappingKey(key), value) for key, value in batch.items()],
        _flatten_dict(batch)[1],
    ),
)
# They pickle as these two, which torch.load does not take by itself, as harmless as they are.
torch.serialization.add_safe_globals([tuple, dict])
