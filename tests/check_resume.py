"""The one check that every stateful stage has to pass: stop after each step, restore, and the rest must be equal."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Stage(Protocol):
    """Whatever can be iterated, again and again, and says where it stands."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def check_resume(
    make: Callable[[], Stage],
    *,
    remake: Callable[[], Stage] | None = None,
    stops: Iterable[int] | None = None,
    through: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: json.loads(json.dumps(state)),
    fresh: Callable[[Stage], int] | None = None,
) -> None:
    """Stops a stage after each step, restores its state in a new one, and requires the rest of the unbroken run.

    What was handed over before the stop and what comes after it must equal the unbroken run batch for batch: every
    field's dtype, shape and bytes, rows, valid and global_valid. The epoch after the resumed one must equal too. A
    state saved when the epoch was finished is followed by the next epoch.

    Args:
        make: the stage, at its beginning; each call gives an independent one.
        remake: makes the stages that are resumed, when they differ (other workers, another process's options).
        stops: numbers of batches after which to stop; None for every one, 0 and the last included.
        through: what the state goes through on its way, as JSON.
        fresh: samples that a stage read in its last pass. The resumed pass must read no more than the unbroken one
            read for the batches after the stop: nothing that was done is read again, but batches between two echoes.
    """
    remake = remake or make
    unbroken = make()
    whole, read_until = [], [0]
    for batch in unbroken:
        whole.append(as_plain(batch))
        read_until.append(fresh(unbroken) if fresh else 0)
    following = run(unbroken)
    assert whole, "an epoch without batches proves nothing"
    for stop in range(len(whole) + 1) if stops is None else stops:
        stage = make()
        before = []
        with ended(iter(stage)) as iterator:
            for batch in itertools.islice(iterator, stop):
                before.append(as_plain(batch))
            if stop == len(whole):
                assert next(iterator, None) is None, "the unbroken run ended here"
            # As in the body of a training loop: the iterator is still open, and may have read further.
            state = through(stage.state_dict())
        assert same(before, whole[:stop]), f"stopped after {stop}: the batches before differ"
        resumed = remake()
        resumed.load_state_dict(state)
        if stop < len(whole):
            assert through(resumed.state_dict()) == state, f"stopped after {stop}: the state comes back otherwise"
        expected = whole[stop:] or following
        if hasattr(resumed, "__len__"):
            assert len(resumed) == len(expected), f"stopped after {stop}: len"
        after = run(resumed)
        read = fresh(resumed) if fresh else 0
        assert same(after, expected), f"stopped after {stop}: {_difference(after, expected)}"
        if fresh and stop < len(whole):
            most = read_until[-1] - read_until[stop] + _in_use(whole, read_until, stop)
            assert read <= most, f"stopped after {stop}: {read} samples are read, {most} were left"
        if stop < len(whole):
            assert same(run(resumed), following), f"stopped after {stop}: the next epoch differs"


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as `torch.save` and a load of weights only give it back."""
    file = io.BytesIO()
    torch.save(state, file)
    loaded: dict[str, Any] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return loaded


def run(stage: Stage) -> list[Any]:
    """One pass, each batch in a form that can be compared and keeps no memory of the stage's alive."""
    return [as_plain(batch) for batch in stage]


def as_plain(value: Any) -> Any:
    """A batch as nested tuples that `==` compares: tensors and arrays become (dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, as_plain(item)) for key, item in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        # A batch has facts beside its fields; a tuple that a framework built anew has not.
        facts = [as_plain(getattr(value, name, None)) for name in ("rows", "valid", "global_valid")]
        return (*(as_plain(item) for item in value), *facts)
    return value


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two runs handed over the same; not `==` in an assert, whose account of images would never end."""
    return len(left) == len(right) and all(a == b for a, b in zip(left, right, strict=True))


@contextlib.contextmanager
def ended(iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """An iterator that is closed, if it can be, when the block ends."""
    try:
        yield iterator
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


def _in_use(whole: list[Any], read_until: list[int], stop: int) -> int:
    """Samples of the batches that were used before the stop and are used again after it; rows tell a batch."""
    coming = {batch[-3] for batch in whole[stop:]}
    return sum(read_until[i + 1] - read_until[i] for i in range(stop) if whole[i][-3] in coming)


def _difference(got: list[Any], expected: list[Any]) -> str:
    if len(got) != len(expected):
        return f"{len(got)} batches came after, not {len(expected)}"
    return f"batch {next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)} of the rest differs"
