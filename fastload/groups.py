"""Small batches read several at a time, and handed over one by one.

A batch of a few megabytes is copied in less time than two threads need to wake each other, so that a thread that
reads one batch at a time runs in turn with the consumer and not beside it (32x32x3, batches of 1024: 0.6 of a bare
copy one at a time, 0.9 in groups).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from fastload.plan import PlannedBatch
from fastload.ring import FilledBatch
from fastload.stopwatch import part_of

GROUP_BYTES = 12 * 2**20


def group_size(batch_bytes: int, num_steps: int) -> int:
    """Batches to read at a time: about GROUP_BYTES, and an eighth of the epoch at most, so that reading stays ahead."""
    return max(1, min(GROUP_BYTES // max(1, batch_bytes), num_steps // 8))


class Groups:
    """Planned batches, a few joined into one, and the way back. One thread uses it.

    Iterating gives batches of up to `size` times as many rows; `apart` turns those, filled, into the planned ones.

    Args:
        planned: batches of equal size, in order.
        size: batches in a group; the last group may have fewer.
    """

    def __init__(self, planned: Iterator[PlannedBatch], size: int) -> None:
        self._planned = planned
        self._size = size
        self._members: deque[list[PlannedBatch]] = deque()  # of each group that is under way

    def __iter__(self) -> Groups:
        return self

    def __next__(self) -> PlannedBatch:
        members = list(islice(self._planned, self._size))
        if not members:
            raise StopIteration
        self._members.append(members)
        return PlannedBatch(
            rows=np.concatenate([batch.rows for batch in members]),
            valid=np.concatenate([batch.valid for batch in members]),
            global_valid=sum(batch.global_valid for batch in members),
            step=members[0].step,
        )

    def apart(self, filled: Iterable[FilledBatch]) -> Apart:
        """The planned batches, each with its part of a group's arrays, whose memory returns when all parts are gone."""
        return Apart(iter(filled), self._members)


class Apart:
    """The batches of groups. No generator: its frame would keep the last batch alive while the user works on it."""

    def __init__(self, filled: Iterator[FilledBatch], members: deque[list[PlannedBatch]]) -> None:
        self._filled = filled
        self._members = members
        self._ready: deque[FilledBatch] = deque()

    def __iter__(self) -> Apart:
        return self

    @property
    def in_hand(self) -> int:
        """Batches left of the group that was taken last."""
        return len(self._ready)

    def __next__(self) -> FilledBatch:
        if not self._ready:
            group = next(self._filled)
            members = self._members.popleft()
            size, count = len(members[0].rows), len(members)
            work = part_of(group.work, count) if group.work is not None else None
            for at, planned in enumerate(members):
                arrays = {name: array[at * size : (at + 1) * size] for name, array in group.arrays.items()}
                self._ready.append(FilledBatch(arrays, planned, group.bytes_read // count, work=work))
        return self._ready.popleft()
