"""Rows brought to their places in the finished file, by what their digests say and not by what should have happened.

Skipped samples leave holes, which other rows fill; and since fewer images end earlier, all masks then move forward.
Images come first and masks second, because the masks' new place may lie where the last images lay. Within each, rows
go in ascending order and only ever forward, so that none is overwritten that is still to be moved. A kill may come at
any instant: what a later run finds in neither place is decoded again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import PackError
from fastload.pack.chunk_work import Worker, read_at, write_at
from fastload.pack.finish import chunk_tasks
from fastload.pack.options import Progress
from fastload.pack.survey import Survey
from fastload.pack.tasks import ChunkTask, Places
from fastload.pack.workers import WorkerPool


def settle_rows(
    survey: Survey,
    part: Path,
    pool: WorkerPool,
    packed: Places,
    settled: Places,
    *,
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    digests: NDArray[np.uint64],
    again: bool,
    progress: Progress | None,
) -> None:
    """Bring every row of the finished file to its place; the sync that follows the metadata brings it to disk.

    Args:
        packed: where rows were packed.
        settled: where rows of the finished file lie.
        sources: int64 (n,): the row at which each row of the finished file was packed.
        samples: int64 (n,): its sample.
        digests: uint64 (n,): its pixel digest.
        again: an earlier run was stopped in here, so that any row may or may not have been moved.
    """
    stay = packed.all == settled.all
    if again:
        wrong = _wrong_rows(survey, part, pool, settled, digests, progress)
    else:
        wrong = np.flatnonzero(sources != np.arange(len(sources))) if stay else np.arange(len(sources))
    lost: set[int] = set()
    with open(part, "r+b", buffering=0) as file:
        rows = _Rows(file.fileno(), packed, settled)
        for field in range(len(settled.all)):
            for at, row in enumerate(wrong.tolist()):
                if row not in lost and not rows.move(field, int(sources[row]), row, int(digests[row])):
                    lost.add(row)
                if progress:
                    progress("closing holes", field * len(wrong) + at + 1, len(wrong) * len(settled.all))
    for row in sorted(lost):
        _decode_again(survey, part, pool, settled, row, int(samples[row]), int(digests[row]))


class _Rows:
    """The rows of a file being packed, in their old and new places."""

    def __init__(self, fd: int, packed: Places, settled: Places) -> None:
        self._fd = fd
        self._old, self._new = packed.all, settled.all
        self._parts = [np.zeros(place.row_bytes, np.uint8) for place in settled.all]

    def move(self, field: int, source: int, row: int, digest: int) -> bool:
        """Move one row's images (field 0) or masks (1) into place; False when neither place has what belongs there.

        Earlier fields are in their new places already; a later one is in its old place, or, after a kill, in its new.
        """
        later = range(field + 1, len(self._new))
        for here in (self._new[field].offset(row), self._old[field].offset(source)):
            for behind in (
                [self._old[other].offset(source) for other in later],
                [self._new[other].offset(row) for other in later],
            )[: 1 + bool(later)]:
                before = [self._new[other].offset(row) for other in range(field)]
                if self._digest([*before, here, *behind]) == digest:
                    if here != self._new[field].offset(row):
                        write_at(self._fd, self._parts[field], self._new[field].offset(row))
                    return True
        return False

    def _digest(self, offsets: list[int]) -> int:
        digest = xxhash.xxh3_64()
        for out, offset in zip(self._parts, offsets, strict=True):
            out[read_at(self._fd, out, offset) :] = 0
            digest.update(out.data)
        return digest.intdigest()


def _wrong_rows(
    survey: Survey,
    part: Path,
    pool: WorkerPool,
    settled: Places,
    digests: NDArray[np.uint64],
    progress: Progress | None,
) -> NDArray[np.int64]:
    """Rows of the finished file that are not yet what they should be, ascending."""
    num_chunks = -(-len(digests) // survey.chunk_rows)
    tasks = chunk_tasks(survey, part, settled, len(digests), np.arange(num_chunks), digests=digests)
    wrong = [np.zeros(0, np.int64)]
    for done, (rows, right) in enumerate(pool.run(Worker.check, tasks)):
        wrong.append(rows[~right])
        if progress:
            progress("checking rows", done + 1, num_chunks)
    return np.sort(np.concatenate(wrong))


def _decode_again(
    survey: Survey, part: Path, pool: WorkerPool, settled: Places, row: int, sample: int, expected: int
) -> None:
    assert survey.target is not None, "a row of pixels was lost"
    task = ChunkTask(str(part), settled, np.array([row]), survey.target, np.array([sample]))
    for result in pool.run(Worker.pack, [task]):
        if result.reasons or int(result.digests[0]) != expected:
            raise PackError(
                f"{survey.listing.keys[sample]}: decodes to other pixels than when it was packed first. Its file or "
                f"the decoder changed; start again with `--overwrite`."
            )
