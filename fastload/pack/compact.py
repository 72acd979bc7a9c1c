"""Compaction after skipped samples: the holes that they leave are filled with other rows.

As fewer images end earlier, all masks move forward, too. Images are moved first and masks second, because the masks'
new extent may begin where the last images lay. Within each, rows are moved in ascending order and only forward, so that
none is overwritten before it is moved. Each move is checked by digest, so that it can be repeated after a crash; a row
that is then in neither extent is decoded again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import PackError
from fastload.pack.finish import chunk_tasks
from fastload.pack.pack_options import Progress
from fastload.pack.pack_worker import ChunkTask, Extents, Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey
from fastload.system.files import read_into, write_at


def close_holes(good: NDArray[np.bool_], split: NDArray[np.uint8], *, shuffled: bool) -> NDArray[np.int64]:
    """Returns for each row of the finished file the row at which its sample was packed, int64 (number of good rows,).

    Rows only ever move forward in the file: result[i] >= i, and moving them in ascending order never overwrites a
    row that is still to be moved. With split 0 in rows 0..4, split 1 in rows 5..7 and a hole at row 1:
    shuffled gives 0 4 2 3 | 7 5 6, in order gives 0 2 3 4 | 5 6 7.

    Args:
        good: bool (N,), False where a sample was skipped.
        split: uint8 (N,), split of each row, ascending.
        shuffled: fill each hole with the last good rows of its split, so that few rows move; else keep the order.
    """
    kept = np.flatnonzero(good)
    if not shuffled or len(kept) == len(good):
        return kept
    result = np.empty(len(kept), dtype=np.int64)
    start = 0
    for name in np.unique(split[kept]):
        rows = kept[split[kept] == name]
        stop = start + len(rows)
        staying = rows[(rows >= start) & (rows < stop)]
        holes = np.setdiff1d(np.arange(start, stop), staying, assume_unique=True)
        result[staying] = staying
        # The last rows of the split, which lie behind its end in the finished file, fill its holes from the back.
        result[holes] = rows[rows >= stop][::-1]
        start = stop
    return result


def compact_rows(
    survey: Survey,
    part: Path,
    pool: PackPool,
    packed: Extents,
    final: Extents,
    *,
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    digests: NDArray[np.uint64],
    interrupted: bool,
    progress: Progress | None,
) -> None:
    """Moves every row of the finished file to its offset; `write_metadata` syncs it to disk afterwards.

    Args:
        packed: where rows were packed.
        final: where the rows of the finished file lie.
        sources: int64 (n,): the row at which each row of the finished file was packed.
        samples: int64 (n,): its sample.
        digests: uint64 (n,): its pixel digest.
        interrupted: an earlier call was stopped in here, so any row may have been moved already.
    """
    same_extents = packed.all == final.all
    if interrupted:
        wrong = _wrong_rows(survey, part, pool, final, digests, progress)
    else:
        wrong = np.flatnonzero(sources != np.arange(len(sources))) if same_extents else np.arange(len(sources))
    lost: set[int] = set()
    with open(part, "r+b", buffering=0) as file:
        mover = _RowMover(file.fileno(), packed, final)
        for field in range(len(final.all)):
            for at, row in enumerate(wrong.tolist()):
                if row not in lost and not mover.move(field, int(sources[row]), row, int(digests[row])):
                    lost.add(row)
                if progress:
                    progress("closing holes", field * len(wrong) + at + 1, len(wrong) * len(final.all))
    for row in sorted(lost):
        _decode_again(survey, part, pool, final, row, int(samples[row]), int(digests[row]))


class _RowMover:
    """Moves rows of a file being packed from their old to their new offsets."""

    def __init__(self, fd: int, packed: Extents, final: Extents) -> None:
        self._fd = fd
        self._old, self._new = packed.all, final.all
        self._buffers = [np.zeros(extent.row_bytes, np.uint8) for extent in final.all]

    def move(self, field: int, source: int, row: int, digest: int) -> bool:
        """Moves one row's image (field 0) or mask (1); returns False if it is at neither of its offsets.

        Earlier fields are at their new offsets already; a later one is at its old offset or, after a kill, at its new.
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
                        write_at(self._fd, self._buffers[field].data, self._new[field].offset(row))
                    return True
        return False

    def _digest(self, offsets: list[int]) -> int:
        digest = xxhash.xxh3_64()
        for out, offset in zip(self._buffers, offsets, strict=True):
            out[read_into(self._fd, out.data, offset) :] = 0
            digest.update(out.data)
        return digest.intdigest()


def _wrong_rows(
    survey: Survey,
    part: Path,
    pool: PackPool,
    final: Extents,
    digests: NDArray[np.uint64],
    progress: Progress | None,
) -> NDArray[np.int64]:
    """Returns the rows of the finished file whose digest is wrong so far, int64, ascending."""
    num_chunks = -(-len(digests) // survey.chunk_rows)
    tasks = chunk_tasks(survey, part, final, len(digests), np.arange(num_chunks), digests=digests)
    wrong = [np.zeros(0, np.int64)]
    for done, (rows, right) in enumerate(pool.run(Worker.check, tasks)):
        wrong.append(rows[~right])
        if progress:
            progress("checking rows", done + 1, num_chunks)
    return np.sort(np.concatenate(wrong))


def _decode_again(
    survey: Survey, part: Path, pool: PackPool, final: Extents, row: int, sample: int, expected: int
) -> None:
    assert survey.target is not None, "a row of pixels was lost"
    task = ChunkTask(str(part), final, np.array([row]), survey.target, np.array([sample]))
    for result in pool.run(Worker.pack, [task]):
        if result.reasons or int(result.digests[0]) != expected:
            raise PackError(
                f"{survey.listing.keys[sample]}: decodes to other pixels than when it was packed first. Its file or "
                f"the decoder changed; start again with `--overwrite`."
            )
