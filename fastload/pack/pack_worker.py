"""The work of a packing process: reads headers, makes the rows of a task, writes them, and checks rows that are there.

No pixel crosses a process border: a worker writes rows where they belong in the file and returns their description.
Where the offsets of rows are known beforehand, it writes them at once; else it keeps them until they are.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.codecs import NONE
from fastload.format.digests import pixel_digests
from fastload.format.ragged import ragged_offsets
from fastload.format.writer import PixelSpec
from fastload.images.fit import Target
from fastload.pack.decisions import RaggedPlan
from fastload.pack.encode import (
    HEADERS,
    ROW,
    Headers,
    RowEncoder,
    SampleProblems,
    announce_samples,
    headers_of,
    image_filler,
    mask_filler,
    reason_of,
    reason_of_mask,
)
from fastload.pack.journal import TaskRecord
from fastload.pack.pack_options import MAKE_ROOM
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.system.files import open_output, output_errors, read_into, start_writing, write_at

NO_SAMPLE = -1
"""In the place of a sample's number: none is being read."""

_STEP_BYTES = 2**20
_MAX_BUFFERS = 512  # rows written by one call; the kernel's limit is 1,024
_NO_HEADERS = np.zeros(0, HEADERS)
_UINT8 = np.dtype(np.uint8)

Piece = bytes | memoryview


@dataclass(frozen=True)
class RowStream:
    """The rows of one pixel dataset being packed, "images" or "masks": written to a file from byte `base` on.

    Rows with a `spec` have one size and lie back to back; of the others each lies whole inside a chunk of chunk_bytes.
    """

    name: str
    path: str
    base: int
    chunk_bytes: int
    spec: PixelSpec | None

    @property
    def compressed(self) -> bool:
        """Whether its rows are compressed in chunks."""
        return self.spec is not None and self.spec.codec != NONE

    def offsets(self, lengths: NDArray[np.int64], start: int) -> tuple[NDArray[np.int64], int]:
        """Returns the offsets from base of rows of these lengths, written after what ends at start; and their end."""
        if self.spec is None:
            return ragged_offsets(lengths, self.chunk_bytes, start)
        ends = start + np.cumsum(lengths)
        return ends - lengths, int(ends[-1]) if len(ends) else start


@dataclass(frozen=True)
class PackTask:
    """Consecutive rows to make."""

    number: int
    first: int  # the first of the rows
    samples: NDArray[np.int64]
    headers: NDArray[np.void]  # HEADERS of the samples; empty where nothing depends on them
    digests: NDArray[np.uint64]  # empty where none are known beforehand
    plan: RaggedPlan
    streams: tuple[RowStream, ...]
    sources: int  # XXH3-64 of the samples' part of the table of source files
    starts: tuple[int, ...] | None  # for each stream, where the rows begin after its base; None if that is not known
    compress: bool  # rows of one size with a codec are whole chunks, and are compressed
    strict: bool  # JPEGs that libjpeg warns of are left out


class Unwritten(NamedTuple):
    """Rows that were made of a task and wait for their offsets: ROW (n,), and for each stream the bytes of each row."""

    streams: tuple[RowStream, ...]
    rows: NDArray[np.void]
    made: list[list[Piece]]


class Worker:
    """The tools of one process or thread: the samples' images and masks, buffers, and the open output files.

    Methods that take a task are sent to worker processes by name (`PackPool.run`).
    """

    def __init__(
        self,
        images: Files | Pictures | Arrays,
        masks: Masks | None = None,
        unwritten: dict[int, Unwritten] | None = None,
    ) -> None:
        self.images = images
        self.masks = masks
        self.unwritten = {} if unwritten is None else unwritten
        """Task number -> its rows; threads share it."""
        self.refused: dict[int, str] = {}
        """Sample -> why it is not to be read: it ended another process."""
        self.place: Any = [NO_SAMPLE]
        """The sample that is being read, first and only number; of a worker process in memory that its parent reads."""
        begin = self.begin
        self._fill = [image_filler(images, begin), *([] if masks is None else [mask_filler(masks, begin)])]
        self._memory = [np.zeros(0, np.uint8), np.zeros(0, np.uint8)]
        self._outputs: dict[str, int] = {}
        self._encoder: RowEncoder | None = None  # Made with the first task; all tasks share its plan.

    def close(self) -> None:
        """Closes the output files."""
        for fd in self._outputs.values():
            os.close(fd)
        self._outputs = {}

    def begin(self, sample: int) -> None:
        """Notes that a sample is being read; raises ImageError for one that is not to be read."""
        self.place[0] = sample
        if sample in self.refused:
            raise ImageError(self.refused[sample])

    def announce(self, samples: NDArray[np.int64], *, heads: bool) -> None:
        """Has threads fetch what will be read of samples, or for their headers, where they lie behind URLs."""
        announce_samples(self.images, self.masks, samples, heads=heads)

    def probe(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], Headers]:
        """Returns samples and their headers."""
        return samples, headers_of(self.images, self.masks, samples, self.begin)

    def pack(self, task: PackTask) -> TaskRecord:
        """Makes the rows of a task, and writes them if it is known where they belong; those that fail are left out."""
        for stream in task.streams:
            self.open(stream.path)  # Its lock tells the next packer that this worker still lives.
        return self.encode(task)

    def measure(self, task: PackTask) -> TaskRecord:
        """Makes the rows of a task to see how many bytes they take, and keeps none."""
        record = self.encode(task)
        self.unwritten.pop(task.number, None)
        return record

    def encode(self, task: PackTask) -> TaskRecord:
        """Makes the rows of a task, and keeps their bytes in `unwritten` unless it is known where they belong.

        If it is, they are written a few at a time, and none after the first that fails.
        """
        amiss = SampleProblems({}, {})
        made: list[list[Piece]] = [[] for _ in task.streams]
        table = np.zeros(len(task.samples), ROW)
        checks = [np.zeros(len(table), np.uint64) for _ in task.streams]
        if task.plan.images == "ragged":
            table = self._encode_rows(task, made, amiss)
        else:
            for part, arrays in self._decoded(task, table, amiss):
                for at, (stream, array) in enumerate(zip(task.streams, arrays, strict=True)):
                    rows = array.reshape(len(array), -1).view(np.uint8)
                    if task.starts is None:
                        made[at] += [row.data for row in rows]
                        continue
                    checks[at][part] = table["digest"][part] if len(arrays) == 1 else pixel_digests([array])
                    if not amiss.reasons:
                        place = stream.base + task.starts[at] + part.start * rows.shape[1]
                        self._write(stream.path, [rows.reshape(-1).data], place)
            for stream, start in zip(task.streams, task.starts or (), strict=False):
                start_writing(self.open(stream.path), stream.base + start, int(table[stream.name].sum()))
        if task.starts is None:
            table = self._keep(task, table, made, amiss.reasons)
            checks = [_digests(pieces) for pieces in self.unwritten[task.number].made]
        return TaskRecord(
            task.number, task.first, len(task.samples), task.sources, task.starts or (), tuple(map(_digest_of, checks)),
            table, *amiss,
        )  # fmt: skip

    def _keep(
        self, task: PackTask, table: NDArray[np.void], made: list[list[Piece]], reasons: dict[int, str]
    ) -> NDArray[np.void]:
        """Puts rows that were made into `unwritten`, compressed in chunks if asked for; returns their description."""
        if reasons and task.plan.images == "rows":
            good = np.delete(np.arange(len(table)), [row - task.first for row in reasons])
            table, made = table[good], [[pieces[at] for at in good.tolist()] for pieces in made]
        if task.compress and not reasons:
            for stream, pieces in zip(task.streams, made, strict=True):
                if stream.spec is None or not stream.compressed:
                    continue
                # A chunk then stands for its first row, and its others are empty.
                for first in range(0, len(pieces), stream.spec.chunk_rows):
                    chunk = slice(first, first + stream.spec.chunk_rows)
                    data = stream.spec.compressed_chunk(b"".join(pieces[chunk]))
                    pieces[chunk] = [data, *[b""] * (len(pieces[chunk]) - 1)]
                table[stream.name] = [memoryview(piece).nbytes for piece in pieces]
            table["chunked"] = 1
        self.unwritten[task.number] = Unwritten(task.streams, table, made)
        return table

    def _encode_rows(self, task: PackTask, made: list[list[Piece]], amiss: SampleProblems) -> NDArray[np.void]:
        """Fills made and amiss with rows of varying length; returns the description of those that were made."""
        self._encoder = self._encoder or RowEncoder(
            self.images, self.masks, task.plan, strict=task.strict, begin=self.begin
        )
        table = []
        for at, sample in enumerate(task.samples.tolist()):
            try:
                row = self._encoder.encode(sample, task.headers[at])
            except (ImageError, OSError) as exc:
                amiss.reasons[task.first + at] = reason_of(exc)
                continue
            if len(task.digests) and row.digest != task.digests[at]:
                amiss.reasons[task.first + at] = _OTHER_PIXELS
                continue
            if row.warning and _warned(task, task.first + at, row.warning, amiss):
                continue
            pieces: list[Piece] = [row.image, b"" if row.mask is None else row.mask]
            lengths = [memoryview(piece).nbytes for piece in pieces]
            table.append((
                task.first + at, row.digest, *lengths, row.shape, row.encoding, row.orientation, row.mask_encoding,
                row.warning != "", False,
            ))  # fmt: skip
            for stream_pieces, piece in zip(made, pieces, strict=False):
                stream_pieces.append(piece)
        return np.array(table, ROW)

    def _decoded(
        self, task: PackTask, table: NDArray[np.void], amiss: SampleProblems
    ) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
        """Yields which rows of a task and their arrays as `decode`; describes them in table, and adds those amiss."""
        target = task.plan.target
        assert target is not None, "rows of one size have a target"
        table["row"], table["orientation"] = np.arange(task.first, task.first + len(table)), 1
        table["shape"] = target.height, target.width, target.channels
        row_bytes = 0
        for stream in task.streams:
            assert stream.spec is not None, "masks have one size where images have"
            table[stream.name] = stream.spec.row_bytes
            row_bytes += stream.spec.row_bytes
        wanted = (target.height, target.width, target.channels), target.dtype
        if isinstance(self.images, Arrays) and (self.images.shape, self.images.dtype) != wanted:  # Read together, too.
            row_bytes += math.prod(self.images.shape) * self.images.dtype.itemsize
        # A few images at a time, so that they are hashed and written while they are still in the core's cache: 20,000
        # faces took 4.2 s in steps of 512 KiB, 4.0 of 1 MiB, 4.9 of 4 MiB.
        step = max(1, _STEP_BYTES // row_bytes)
        for start in range(0, len(table), step):
            part = slice(start, min(start + step, len(table)))
            arrays, found = self.decode(
                task.samples[part], target, task.headers[part], task.plan.mask_dtype, fresh=task.starts is None
            )
            table["digest"][part] = pixel_digests(arrays)
            if len(task.digests):
                for at in np.flatnonzero(table["digest"][part] != task.digests[part]).tolist():
                    found.reasons.setdefault(at, _OTHER_PIXELS)
            first = task.first + start
            amiss.reasons.update((first + at, reason) for at, reason in found.reasons.items())
            for at, warning in found.warnings.items():
                if at not in found.reasons and not _warned(task, first + at, warning, amiss):
                    table["warned"][start + at] = 1
            yield part, arrays

    def decode(
        self,
        samples: NDArray[np.int64],
        target: Target,
        headers: NDArray[np.void] = _NO_HEADERS,
        mask_dtype: np.dtype[Any] = _UINT8,
        *,
        fresh: bool = False,
    ) -> tuple[list[NDArray[Any]], SampleProblems]:
        """Decodes samples into rows: images (n, H, W, C) and, where there are any, masks (n, H, W).

        With HEADERS (n,) a sample that now has another size counts as not decodable. The arrays are new if `fresh`,
        else valid until the next call. Also returns the samples amiss, by index.
        """
        shape = (len(samples), target.height, target.width)
        images = self._buffer(0, (*shape, target.channels), target.dtype, fresh=fresh)
        amiss = self._fill[0](samples, target, images, headers)
        if self.masks is None:
            return [images], amiss
        masks = self._buffer(1, shape, mask_dtype, fresh=fresh)
        for at, reason in self._fill[1](samples, target, masks, headers).reasons.items():
            amiss.reasons.setdefault(at, reason_of_mask(reason))
        return [images, masks], amiss

    def _buffer(self, which: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, fresh: bool) -> NDArray[Any]:
        """Returns memory of that shape: new, or the same for every call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if fresh:
            return np.empty(shape, dtype)
        if len(self._memory[which]) < num_bytes:
            self._memory[which] = np.zeros(num_bytes, np.uint8)
        return self._memory[which][:num_bytes].view(dtype).reshape(shape)

    def write(self, task: tuple[int, tuple[int, ...]]) -> int:
        """Writes the rows of a task in `unwritten`, for each stream from this offset on; returns its number."""
        number, starts = task
        streams, rows, made = self.unwritten.pop(number)
        for stream, pieces, start in zip(streams, made, starts, strict=True):
            lengths = rows[stream.name]
            offsets, _ = stream.offsets(lengths, start)
            gaps = np.flatnonzero(offsets[1:] != (offsets + lengths)[:-1]) + 1
            for first, stop in itertools.pairwise([0, *gaps.tolist(), len(offsets)]):
                for at in range(first, stop, _MAX_BUFFERS):
                    some = pieces[at : min(stop, at + _MAX_BUFFERS)]
                    self._write(stream.path, some, stream.base + int(offsets[at]))
        return number

    def check(self, written: tuple[TaskRecord, tuple[RowStream, ...]]) -> tuple[int, bool]:
        """Returns a task's number, and whether its rows lie in these streams as they were written."""
        record, streams = written
        for stream, begin, check in zip(streams, record.starts, record.checks, strict=True):
            lengths = record.rows[stream.name]
            offsets, end = stream.offsets(lengths, begin)
            first = int(offsets[0]) if len(offsets) else end
            data = np.zeros(end - first, np.uint8)
            with output_errors(
                f"{stream.path}: what was packed cannot be read ({{}}). Run the same command again; if that does "
                f"not help, remove it and the .journal next to it, and start again."
            ):
                read_into(self.open(stream.path), data.data, stream.base + first)
            pieces = [data[a : a + n].data for a, n in zip((offsets - first).tolist(), lengths.tolist(), strict=True)]
            if _digest_of(_digests(pieces)) != check:
                return record.number, False
        return record.number, True

    def _write(self, path: str, pieces: list[Any], offset: int) -> None:
        """Writes pieces one after another; raises OutputError where that fails, as on a full disk."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        with output_errors(f"{path}: {size:,} bytes cannot be written at byte {offset:,} ({{}}). {MAKE_ROOM}"):
            fd = self.open(path)
            written = os.pwritev(fd, pieces, offset)
            if written < size:  # At 2 GiB, or where the disk is full.
                write_at(fd, memoryview(b"".join(pieces))[written:], offset + written)

    def open(self, path: str) -> int:
        """Returns a descriptor of a file being packed, which stays open until `close`."""
        if path not in self._outputs:
            with output_errors(f"{path}: cannot be opened ({{}}). Run the same command again."):
                fd = open_output(Path(path), os.O_RDWR)
            # A shared lock held while this process lives: after a kill of the packer, the next one waits for it
            # before it touches the file, so that no orphan writes behind its back. Where there are no locks, nobody
            # else has the file.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH)
            self._outputs[path] = fd
        return self._outputs[path]


def _warned(task: PackTask, row: int, warning: str, amiss: SampleProblems) -> bool:
    """Notes what libjpeg warns of in the JPEG of a row that is well otherwise; returns whether it is left out."""
    amiss.warnings[row] = warning
    if task.strict:
        amiss.reasons[row] = f"libjpeg warns of it: {warning}"
    return task.strict


_OTHER_PIXELS = "its pixels changed since packing (their digest differs)"


def _digests(pieces: Sequence[Piece]) -> NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, pieces), np.uint64, len(pieces))


def _digest_of(digests: NDArray[np.uint64]) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests).data)
