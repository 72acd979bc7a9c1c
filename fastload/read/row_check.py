"""Compares rows of a packed file with their digests while they are read, so that bytes that rotted reach nobody.

Pixels of a mapping are copied and hashed in one pass by compiled code, some hundred bytes at a time. Without that, or
where they are read otherwise, they are copied some rows at a time and hashed while they are in the CPU's cache. That
does not give up the GIL between the rows of a part: who did so for each row would wait for it as often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.digests import (
    BLOCK_ROWS,
    DIGEST_FIELDS,
    KEEPS_GIL,
    block_digests,
    pixel_digests,
    row_digest,
    row_digests,
)
from fastload.format.header import PIXEL_FIELDS, Field, FileIdentity, PackedFile, with_digests
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode_part import decode_row
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import unreadable
from fastload.read.linear import MappedRows, PreadRows, as_rows
from fastload.read.ragged_rows import RaggedReader, cannot_be_decoded, sample_error
from fastload.system import native

Check = Literal["always", "first"]
"""When a row is compared with its digests: each time that it is read, or the first time."""

Sources = Mapping[str, MappedRows | PreadRows | ChunkedRows]

PART_BYTES = 2**21
"""Copied and hashed at a time. Rows of 116 KB in batches of 256, one thread: 9.8 us a row copied and hashed in parts of
1, 2 or 3 MiB, 6.3 copied alone. Hashed after the whole batch was copied it took 1.3 times as long as in parts."""

_NONE = np.empty(0, np.intp)
_MOST_BLOCKS = 2**24 // BLOCK_ROWS  # of digests that are kept of a dataset, 128 MiB


class _Seen:
    """Which rows were compared since the file was opened or touched: a bit for each, and whether all were."""

    def __init__(self, num_rows: int) -> None:
        self.bits = np.packbits(np.arange(-(-num_rows // 8) * 8) >= num_rows, bitorder="little")
        self.all, self.any_new = False, False


class _KnownDigests:
    """The digests of rows in one dataset, which are those that were compared with the header when it was read.

    They are read in blocks when a row needs one, compared with what was kept of each block, and kept themselves: 8
    bytes a row that somebody reads, up to 2**24 rows. Any thread may call it.

    Of 10**7 rows, opening keeps 40 KB, which a pickle takes along; the digests of pixels and columns, 160 MB, would be
    kept by each process, or read and hashed again by each worker in 0.1 s (0.3 to 0.8 s with what else opening reads).
    Batches of 256 random rows, which touch each block, load all of them with the first ten, 50 ms later than before.
    """

    def __init__(self, file: PackedFile, name: str) -> None:
        assert file.digests is not None, "of a header that was compared"
        self._name, self._num_rows, self._blocks = name, file.num_rows, file.digests[name]
        self.drop()

    def drop(self) -> None:
        """Gives back the memory of the digests that were read."""
        # Memory that is not written to takes none.
        self._kept = np.empty(self._num_rows, np.uint64), np.zeros(len(self._blocks), np.bool_)

    def of(self, rows: NDArray[np.int64], sources: Sources) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Returns the digests of rows, uint64 (n,), and which of them are others than the header said, by position."""
        values, there = self._kept
        numbers = rows // BLOCK_ROWS
        known = there[numbers]
        if known.all():
            return values[rows], _NONE
        for number in np.unique(numbers[~known]).tolist():
            first = number * BLOCK_ROWS
            some = np.arange(first, min(first + BLOCK_ROWS, self._num_rows))
            read = np.empty(len(some), np.uint64)
            sources[self._name].gather(some, {self._name: read})
            if block_digests(read)[0] == self._blocks[number]:
                values[first : first + len(read)] = read
                there[number] = True
        found = values[rows], np.flatnonzero(~there[numbers])
        if np.count_nonzero(there) > _MOST_BLOCKS:
            self.drop()
        return found


class RowCheck:
    """Compares the rows of batches with their digests. Any thread may call it, also after a fork.

    Args:
        file: written by fastload; its header is compared with what was packed, if that was not done.
        fields: names of those that are read of it, one or more.
        check: "first" keeps a bit for each row.

    Attributes:
        needed: names of all datasets that are read for it.
    """

    def __init__(self, file: PackedFile, fields: Sequence[str], check: Check) -> None:
        self._file = file = file if file.digests is not None else with_digests(file)
        self._pixels, self._columns = _compared(file, fields)
        self.needed = fields_needed(file, fields)
        self._digests = {name: _KnownDigests(file, name) for name in DIGEST_FIELDS if name in self.needed}
        self._remembers = check == "first"
        self._seen: _Seen | None = None  # None: all rows are compared
        self._identity: FileIdentity | None = None  # when rows were compared
        self.begin(file.identity)

    def begin(self, identity: FileIdentity) -> None:
        """Lets all rows be compared again if the file is not of the same identity as when it was called last."""
        if identity == self._identity:
            return
        if self._remembers:
            # Anew: a thread that compares what was there before may still note so in the other.
            self._seen = _Seen(self._file.num_rows)
        self._identity = identity

    @property
    def all_seen(self) -> bool:
        """Whether all rows were compared, and none is to be again."""
        return self._seen is not None and self._seen.all

    def drop(self) -> None:
        """Gives back the memory of digests, which are read again when a row needs them."""
        for digests in self._digests.values():
            digests.drop()

    def due(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns which of a batch's rows, int64 (B,), are to be compared: their positions in it, ascending."""
        seen = self._seen
        if seen is None:
            return np.arange(len(rows))
        if seen.all or not len(rows):
            return np.empty(0, np.int64)
        parts = (rows[first : first + KEEPS_GIL] for first in range(0, len(rows), KEEPS_GIL))
        found = [np.flatnonzero(~(seen.bits[part >> 3] >> (part & 7)) & 1) for part in parts]
        due = np.concatenate([at + number * KEEPS_GIL for number, at in enumerate(found)])
        if seen.any_new and not len(due):
            seen.any_new, seen.all = False, bool((seen.bits == 255).all())
        return due

    def gather(
        self,
        rows: NDArray[np.int64],
        due: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        sources: Sources,
        ragged: Mapping[str, RaggedReader],
        hashed: NDArray[np.uint64] | None = None,
    ) -> None:
        """Copies rows into the arrays (B, ...) of fields that are not ragged, and compares those that are `due`.

        `hashed`: the digests of their pixels, uint64 (B,), where these were copied before.

        DamagedRowError: some are not what was packed, or cannot be decoded; it has the numbers of all of them.
        """
        wrong: dict[int, str] = {}  # position -> why
        seen = self._seen
        if self._columns:
            different = self._different_columns(rows[due], sources)
            wrong = dict.fromkeys(due[different].tolist(), _differs(self._columns))
        for name in outs.keys() & sources.keys() - {*self._pixels}:
            sources[name].gather(rows, {name: outs[name]})
        if self._pixels:
            expected, unknown = self._digests["digest"].of(rows[due], sources)
            if len(unknown):
                wrong |= dict.fromkeys(due[unknown].tolist(), _differs(self._pixels))
            if hashed is not None:
                hashed = hashed[due]
            elif self._is_hashed_in_c(sources):
                hashed = self._hash_pixels(rows, due, outs, sources)
            if hashed is not None:
                wrong = dict.fromkeys(due[hashed != expected].tolist(), _differs(self._pixels)) | wrong
            parts = [] if hashed is not None else self._parts(len(rows), len(due), sources)
            ends = np.searchsorted(due, [part.stop for part in parts]).tolist()
            for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
                here = due[begin:end], expected[begin:end]
                self._gather_pixels(rows, part, here, outs, sources, ragged, wrong)
        if wrong:
            first = min(wrong)
            numbers = tuple(dict.fromkeys(int(rows[at]) for at in sorted(wrong)))
            more = f" (and {len(numbers) - 1} more rows that were read with it)" if len(numbers) > 1 else ""
            error = sample_error(self._file, int(rows[first]), wrong[first] + more)
            error.rows = numbers
            raise error
        if seen is not None and len(due):
            # Two threads at once may forget some, which are compared again.
            np.bitwise_or.at(seen.bits, rows[due] >> 3, (1 << (rows[due] & 7)).astype(np.uint8))
            seen.any_new = True

    def _is_hashed_in_c(self, sources: Sources) -> bool:
        """Whether rows are copied and hashed in one pass: all pixels are mapped, and the loops were compiled."""
        mapped = all(isinstance(sources.get(name), MappedRows) for name in self._pixels)
        return mapped and can_hash([self._file.fields[name] for name in self._pixels])

    def _hash_pixels(
        self, rows: NDArray[np.int64], due: NDArray[np.int64], outs: Mapping[str, NDArray[Any]], sources: Sources
    ) -> NDArray[np.uint64]:
        """Copies a batch's pixels; returns the digests of those that are due, uint64 (len(due),)."""
        all_due = len(due) == len(rows) and all(name in outs for name in self._pixels)
        addresses, lengths = list[NDArray[np.int64]](), list[int]()
        for name in self._pixels:
            source, row_bytes = sources[name], self._file.fields[name].row_bytes
            assert isinstance(source, MappedRows), "see `_is_hashed_in_c`"
            if all_due or name not in outs:
                addresses.append(source.addresses(name, rows[due]))
            else:  # what was copied, not what the file has by now
                source.gather(rows, {name: outs[name]})
                addresses.append(as_rows(outs[name]).ctypes.data + row_bytes * due)
            lengths.append(row_bytes)
        return native.digests(addresses, lengths, [as_rows(outs[name]) for name in self._pixels] if all_due else None)

    def _parts(self, count: int, num_due: int, sources: Sources) -> list[slice]:
        """Returns the parts of a batch to read at a time: it all where that is one call, or few rows are compared."""
        row_bytes = sum(self._file.fields[name].row_bytes for name in self._pixels)
        mapped = all(isinstance(sources.get(name), MappedRows) for name in self._pixels)
        step = max(1, PART_BYTES // max(1, row_bytes)) if mapped and 2 * num_due > count else max(1, count)
        return [slice(first, min(first + step, count)) for first in range(0, count, step)]

    def _gather_pixels(
        self,
        rows: NDArray[np.int64],
        part: slice,
        here: tuple[NDArray[np.int64], NDArray[np.uint64]],
        outs: Mapping[str, NDArray[Any]],
        sources: Sources,
        ragged: Mapping[str, RaggedReader],
        wrong: dict[int, str],
    ) -> None:
        """Copies a part of a batch's pixels, and adds the rows that are wrong: of those due `here`, with digests."""
        due, expected = here
        arrays: dict[str, NDArray[Any]] = {}  # of the rows that are due
        for name in self._pixels:
            if name in ragged:
                continue
            if name in outs:
                values = outs[name][part]
                for at, why in _copied(sources[name], name, rows[part], values).items():
                    wrong.setdefault(part.start + at, why)
                arrays[name] = values if len(due) == len(values) else values[due - part.start]
            elif len(due):
                field = self._file.fields[name]
                arrays[name] = np.empty((len(due), *field.shape), field.dtype.newbyteorder("="))
                for at, why in _copied(sources[name], name, rows[due], arrays[name]).items():
                    wrong.setdefault(int(due[at]), why)
        if not len(due):
            return
        if ragged.keys() & set(self._pixels):
            self._compare_encoded(rows, due, arrays, ragged, expected, wrong)
            return
        different = due[pixel_digests([arrays[name] for name in self._pixels]) != expected]
        for at in different.tolist():
            wrong.setdefault(at, _differs(self._pixels))

    def _compare_encoded(
        self,
        rows: NDArray[np.int64],
        due: NDArray[np.int64],
        arrays: Mapping[str, NDArray[Any]],
        ragged: Mapping[str, RaggedReader],
        expected: NDArray[np.uint64],
        wrong: dict[int, str],
    ) -> None:
        """Adds the rows that are wrong among those whose images or masks vary in length, and whose index is right."""
        good = np.array([i for i, at in enumerate(due.tolist()) if at not in wrong], np.intp)
        numbers, expected = rows[due[good]], expected[good]
        known = {name: ragged[name].index(numbers) for name in self._pixels if name in ragged}
        located = {name: ragged[name].located(index) for name, index in known.items()}
        addresses, lengths = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        as_stored = np.full(len(good), native.library() is not None)  # hashed without decoding
        for name in self._pixels:
            if name in known:
                memory, starts, sizes = located[name]
                addresses.append(memory.ctypes.data + starts)
                lengths.append(sizes)
                as_stored &= np.isin(known[name].encoding, (RAW, JPEG))
            else:
                row_bytes = arrays[name][:1].nbytes
                addresses.append(arrays[name].ctypes.data + good * row_bytes)
                lengths.append(np.full(len(good), row_bytes))
        as_stored &= np.sum(lengths, axis=0) > native.SHORT_BYTES
        if as_stored.any():
            found = native.digests([one[as_stored] for one in addresses], [one[as_stored] for one in lengths])
            for at in due[good[as_stored]][found != expected[as_stored]].tolist():
                wrong[at] = _differs(self._pixels)
        for n in np.flatnonzero(~as_stored).tolist():
            at = int(due[good[n]])
            parts: list[Any] = []
            try:
                for name in self._pixels:
                    if name not in known:
                        parts.append(arrays[name][good[n]])
                        continue
                    (memory, starts, sizes), index, field = located[name], known[name], self._file.fields[name]
                    data = memory.data[starts[n] : starts[n] + sizes[n]]
                    encoding, shape = int(index.encoding[n]), tuple(index.shape[n, : len(field.shape)].tolist())
                    parts.append(data if encoding == JPEG else decode_row(data, encoding, shape, 1, field.dtype))
            except ImageError as error:
                wrong[at] = cannot_be_decoded(name, encoding, error)
                continue
            if row_digest(parts) != expected[n]:
                wrong[at] = _differs(self._pixels)

    def _different_columns(self, rows: NDArray[np.int64], sources: Sources) -> NDArray[np.bool_]:
        """Returns for each row whether its values other than pixels differ from their digest."""
        values: dict[str, NDArray[Any]] = {}
        for name in self._columns:
            field = self._file.fields[name]
            values[name] = np.empty((len(rows), *field.shape), field.dtype.newbyteorder("="))
            sources[name].gather(rows, {name: values[name]})
        expected, unknown = self._digests["digest_fields"].of(rows, sources)
        different: NDArray[np.bool_] = row_digests(values) != expected
        different[unknown] = True
        return different


def can_hash(fields: Sequence[Field]) -> bool:
    """Whether rows of these fields, which are mapped, are copied and hashed in one pass."""
    return native.library() is not None and sum(field.row_bytes for field in fields) > native.SHORT_BYTES


def _compared(file: PackedFile, fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the fields whose pixel digests, and whose column digests, are checked when these fields are read."""
    pixels = [name for name in PIXEL_FIELDS if name in file.fields and any(one in PIXEL_FIELDS for one in fields)]
    # The index of ragged rows is among the columns. One digest is of them all, so that all of them are read.
    of_ragged = any(file.fields[name].ragged is not None for name in pixels)
    asked = [name for name in fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS)]
    others = [name for name in file.fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS, *asked)]
    return pixels, [*asked, *others] if asked or of_ragged else []


def fields_needed(file: PackedFile, fields: Sequence[str]) -> list[str]:
    """Returns the names of all datasets that are read where these fields are compared."""
    pixels, columns = _compared(file, fields)
    return [*pixels, *columns, *["digest"] * bool(pixels), *["digest_fields"] * bool(columns)]


def _differs(names: Sequence[str]) -> str:
    """Returns that one digest of some fields is another one, in words."""
    one = f"its `{names[0]}` is"
    if len(names) > 1:
        one = f"one of its {', '.join(f'`{name}`' for name in names)} is"
    return f"{one} not what was packed: the digest differs"


def _copied(
    source: MappedRows | PreadRows | ChunkedRows, name: str, rows: NDArray[np.int64], out: NDArray[Any]
) -> dict[int, str]:
    """Copies rows into an array (n, ...); returns {position: reason} for rows in chunks that cannot be decoded."""
    if not isinstance(source, ChunkedRows):
        source.gather(rows, {name: out})
        return {}
    failed = unreadable(source.gather, name, rows, out)
    return {at: f"its `{name}` cannot be read ({why})" for at, why in failed.items()}
