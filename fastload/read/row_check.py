"""Compares rows of a dataset with their digests while they are read, so that bytes that rotted reach nobody.

Pixels of a mapping are copied and hashed in one pass by compiled code, some hundred bytes at a time, whatever files
they lie in. Without that, or where they are read otherwise, they are copied some rows at a time and hashed while they
are in the CPU's cache. That does not give up the GIL between the rows of a part: who did so for each row would wait for
it as often.
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
from fastload.format.header import PIXEL_FIELDS, FileIdentity, PackedFile, with_digests
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode_part import decode_row
from fastload.read.encoded import IndexedRows
from fastload.read.linear import as_rows
from fastload.read.row_errors import cannot_be_decoded, sample_error, unreadable
from fastload.read.row_table import Located
from fastload.read.store import OpenFile, Store
from fastload.system import native

Check = Literal["always", "first"]
"""When a row is compared with its digests: each time that it is read, or the first time."""

PART_BYTES = 2**21
"""Copied and hashed at a time. Rows of 116 KB in batches of 256, one thread: 9.8 us a row copied and hashed in parts of
1, 2 or 3 MiB, 6.3 copied alone. Hashed after the whole batch was copied it took 1.3 times as long as in parts."""

_NONE = np.empty(0, np.intp)
_MOST_BLOCKS = 2**24 // BLOCK_ROWS  # of digests that are kept of a dataset, 128 MiB


class _Seen:
    """Which rows were compared since their files were opened or touched: a bit for each, and whether all were."""

    def __init__(self, num_rows: int) -> None:
        self.bits = np.zeros(-(-num_rows // 8), np.uint8)
        self.bits[-1] = 255 & ~((1 << ((num_rows - 1) % 8 + 1)) - 1)  # of no row
        self.all, self.any_new = False, False


class _KnownDigests:
    """The digests of a file's rows in one dataset, those that were compared with the header when it was read.

    They are read in blocks when a row needs one, compared with what was kept of each block, and kept themselves: 8
    bytes a row that somebody reads, up to 2**24 rows. Any thread may call it.

    Of 10**7 rows, opening keeps 40 KB, which a pickle takes along; the digests of pixels and columns, 160 MB, would be
    kept by each process, or read and hashed again by each worker in 0.1 s (0.3 to 0.8 s with what else opening reads).
    Batches of 256 random rows, which touch each block, load all of them with the first ten, 50 ms later than before.
    """

    def __init__(self, header: PackedFile, name: str) -> None:
        assert header.digests is not None, "of a header that was compared"
        self._name, self._num_rows, self._blocks = name, header.num_rows, header.digests[name]
        self.drop()

    def drop(self) -> None:
        """Gives back the memory of the digests that were read."""
        # Memory that is not written to takes none.
        self._kept = np.empty(self._num_rows, np.uint64), np.zeros(len(self._blocks), np.bool_)

    def of(self, rows: NDArray[np.int64], file: OpenFile) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
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
            file.copy(self._name, some, read)
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
        file: written by fastload; the header of each file that holds rows is compared with what was packed when it is
            opened, if that was not done.
        fields: names of those that are read of it, one or more.
        check: "first" keeps a bit for each row.

    Attributes:
        needed: names of all datasets that are read for it.
    """

    def __init__(self, file: PackedFile, fields: Sequence[str], check: Check) -> None:
        self._file = file
        self._pixels = [name for name in PIXEL_FIELDS if name in file.fields and {*fields} & {*PIXEL_FIELDS}]
        # The index of ragged rows is among the columns. One digest is of them all, so that all of them are read.
        own = (*PIXEL_FIELDS, *DIGEST_FIELDS)
        asked = [name for name in fields if name not in own]
        others = [name for name in file.fields if name not in (*own, *asked)]
        self._has_ragged = bool(self._pixels and file.ragged)
        self._columns = [*asked, *others] if asked or self._has_ragged else []
        digests = ["digest"] * bool(self._pixels) + ["digest_fields"] * bool(self._columns)
        self.needed = [*self._pixels, *self._columns, *digests]
        self._digests: dict[int, dict[str, _KnownDigests]] = {}  # of each file that was opened
        self._headers: dict[int, PackedFile] = {}
        self._identities: dict[int, FileIdentity] = {}  # of files when their rows were compared
        # None: all rows are compared.
        self._seen = _Seen(file.num_rows) if check == "first" else None

    def opened(self, number: int, header: PackedFile) -> PackedFile:
        """Returns the header of a file that is opened, with what was compared of its digests."""
        known = self._headers.get(number)
        if known is None or known.identity != header.identity or known.path != header.path:
            header = header if header.digests is not None else with_digests(header)
            names = [name for name in DIGEST_FIELDS if name in self.needed]
            self._digests[number] = {name: _KnownDigests(header, name) for name in names}
            self._headers[number] = known = header
        self.begin(number, header.identity)
        return known

    def begin(self, number: int, identity: FileIdentity) -> None:
        """Lets all rows be compared again if a file is not of the same identity as when it was called last."""
        known = self._identities.setdefault(number, identity)
        if known == identity:
            return
        if self._seen is not None:
            # Anew: a thread that compares what was there before may still note so in the other.
            self._seen = _Seen(self._file.num_rows)
        self._identities[number] = identity

    def closed(self, number: int) -> None:
        """Gives back the memory of a file's digests, which are read again when a row needs them."""
        for digests in self._digests.get(number, {}).values():
            digests.drop()

    @property
    def all_seen(self) -> bool:
        """Whether all rows were compared, and none is to be again."""
        return self._seen is not None and self._seen.all

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
        located: Located,
        due: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        store: Store,
        encoded: Mapping[str, IndexedRows],
    ) -> None:
        """Copies rows into the arrays (B, ...) of fields that are not ragged, and compares those that are `due`.

        DamagedRowError: some are not what was packed, or cannot be decoded; it has the numbers of all of them.
        """
        seen, batch = self._seen, _BatchCheck(self, located, due, outs, store, encoded)
        batch.run()
        if wrong := batch.wrong:
            first = min(wrong)
            numbers = tuple(dict.fromkeys(int(located.rows[at]) for at in sorted(wrong)))
            more = f" (and {len(numbers) - 1} more rows that were read with it)" if len(numbers) > 1 else ""
            error = sample_error(self._file, int(located.rows[first]), wrong[first] + more)
            error.rows = numbers
            raise error
        if seen is not None and len(due):
            # Two threads at once may forget some, which are compared again.
            rows = batch.few.rows
            np.bitwise_or.at(seen.bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
            seen.any_new = True


class _BatchCheck:
    """The comparison of one batch's rows with their digests, while they are copied.

    Args:
        check: has the digests.
        located, due, outs, store, encoded: as of `RowCheck.gather`.

    Attributes:
        few: the rows that are due.
        wrong: position in the batch -> why that row is not what was packed.
    """

    def __init__(
        self,
        check: RowCheck,
        located: Located,
        due: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        store: Store,
        encoded: Mapping[str, IndexedRows],
    ) -> None:
        self._check, self._fields, self._pixels = check, check._file.fields, check._pixels
        self._located, self._due, self._outs, self._store, self._encoded = located, due, outs, store, encoded
        self.few = located if len(due) == len(located) else located.some(due)
        self.wrong: dict[int, str] = {}

    def run(self) -> None:
        """Copies the rows, and compares those that are due."""
        columns, pixels, due, store = self._check._columns, self._pixels, self._due, self._store
        if columns:
            self.wrong = dict.fromkeys(due[self._different_columns(columns)].tolist(), _differs(columns))
        for name in self._outs.keys() - {*pixels}:
            store.copy(name, self._located, self._outs[name])
        if not pixels:
            return
        expected, unknown = self._expected("digest")
        self.wrong |= dict.fromkeys(due[unknown].tolist(), _differs(pixels))
        row_bytes = sum(self._fields[name].row_bytes for name in pixels)
        if self._check._has_ragged:
            self._compare_encoded(expected)
        elif native.library() is not None and row_bytes > native.SHORT_BYTES and all(map(store.maps, pixels)):
            self.wrong = dict.fromkeys(due[self._hashed() != expected].tolist(), _differs(pixels)) | self.wrong
        else:
            self._compare_copied(expected, max(1, row_bytes))

    def _expected(self, name: str) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Returns the due rows' digests in one dataset, and which of them are others than their headers said."""
        digests, opened, few = self._check._digests, self._store.files.opened, self.few
        if len(few.numbers) == 1:
            number = few.numbers[0]
            return digests[number][name].of(few.there, opened[number])
        found, unknown = np.empty(len(few), np.uint64), [_NONE]
        for shard, rows, at in few.parts:
            found[at], others = digests[shard][name].of(rows, opened[shard])
            unknown.append(at[others])
        return found, np.concatenate(unknown)

    def _different_columns(self, columns: Sequence[str]) -> NDArray[np.bool_]:
        """Returns for each row that is due whether its values other than pixels differ from their digest."""
        expected, unknown = self._expected("digest_fields")
        different = np.empty(len(self.few), np.bool_)
        for shard, rows, at in self.few.parts:  # digests are of the values as each file has them
            values: dict[str, NDArray[Any]] = {}
            for name in columns:
                values[name] = self._check._headers[shard].fields[name].empty(len(rows))
                self._store.files.opened[shard].copy(name, rows, values[name])
            different[at] = row_digests(values) != expected[at]
        different[unknown] = True
        return different

    def _hashed(self) -> NDArray[np.uint64]:
        """Copies the batch's mapped pixels; returns the digests of those that are due, uint64 (len(due),)."""
        outs, pixels = self._outs, self._pixels
        all_due = self.few is self._located and all(name in outs for name in pixels)
        addresses: list[NDArray[np.int64]] = []
        for name in pixels:
            if all_due or name not in outs:
                addresses.append(self._store.addresses(name, self.few))
            else:  # what was copied, not what the file has by now
                self._store.copy(name, self._located, outs[name])
                addresses.append(as_rows(outs[name]).ctypes.data + self._fields[name].row_bytes * self._due)
        lengths = [self._fields[name].row_bytes for name in pixels]
        return native.digests(addresses, lengths, [as_rows(outs[name]) for name in pixels] if all_due else None)

    def _compare_copied(self, expected: NDArray[np.uint64], row_bytes: int) -> None:
        """Copies the batch's pixels and hashes what was copied.

        It all at a time, but where much is copied from a mapping and hashed, some rows.
        """
        due, count = self._due, len(self._located)
        mapped = all(map(self._store.maps, self._pixels)) and 2 * len(due) > count
        step = max(1, PART_BYTES // row_bytes) if mapped else max(1, count)
        for first in range(0, count, step):
            stop = min(first + step, count)
            arrays = self._copied(self._pixels, first, stop)
            begin, end = np.searchsorted(due, [first, stop]).tolist()
            if begin < end:
                different = pixel_digests([arrays[name] for name in self._pixels]) != expected[begin:end]
                for place in due[begin:end][different].tolist():
                    self.wrong.setdefault(place, _differs(self._pixels))

    def _copied(self, names: Sequence[str], first: int, stop: int) -> dict[str, NDArray[Any]]:
        """Copies pixels of a part of the batch that are not ragged; returns those of rows that are due."""
        is_whole = stop - first == len(self._located)
        located = self._located if is_whole else self._located.some(np.arange(first, stop))
        begin, end = np.searchsorted(self._due, [first, stop]).tolist()
        due = self._due[begin:end] - first
        arrays: dict[str, NDArray[Any]] = {}
        for name in names:
            field, out = self._fields[name], self._outs.get(name)
            if out is None:
                wanted, places, out = located.some(due), due, field.empty(len(due))
            else:
                wanted, places, out = located, np.arange(len(located)), out[first:stop]
            if len(wanted):
                for at, why in _copy(self._store, name, wanted, out, in_chunks=not field.linear).items():
                    self.wrong.setdefault(first + int(places[at]), why)
            arrays[name] = out[due] if name in self._outs and len(due) < len(out) else out
        return arrays

    def _compare_encoded(self, expected: NDArray[np.uint64]) -> None:
        """Compares rows whose images or masks vary in length, and whose index is right."""
        due, wrong, encoded = self._due, self.wrong, self._encoded
        arrays = self._copied([name for name in self._pixels if name not in encoded], 0, len(self._located))
        good = np.array([i for i, at in enumerate(due.tolist()) if at not in wrong], np.intp)
        rows, expected = self.few.rows[good], expected[good]
        known = {name: encoded[name].index(rows) for name in self._pixels if name in encoded}
        located = {name: encoded[name].located(index) for name, index in known.items()}
        addresses: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64]] = []
        as_stored = np.full(len(good), native.library() is not None)  # hashed without decoding
        for name in self._pixels:
            if name in known:
                addresses.append(located[name][0])
                lengths.append(known[name].bytes)
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
        others = np.flatnonzero(~as_stored)
        taken = {name: encoded[name].take(index.part(others)) for name, index in known.items()}
        for i, n in enumerate(others.tolist()):
            at = int(due[good[n]])
            parts: list[Any] = []
            try:
                for name in self._pixels:
                    if name not in known:
                        parts.append(arrays[name][good[n]])
                        continue
                    data, index, field = taken[name][i], known[name], self._fields[name]
                    encoding, shape = int(index.encoding[n]), tuple(index.shape[n, : len(field.shape)].tolist())
                    parts.append(data if encoding == JPEG else decode_row(data, encoding, shape, 1, field.dtype))
            except ImageError as error:
                wrong[at] = cannot_be_decoded(name, encoding, error)
                continue
            if row_digest(parts) != expected[n]:
                wrong[at] = _differs(self._pixels)


def _differs(names: Sequence[str]) -> str:
    """Returns that one digest of some fields is another one, in words."""
    one = f"its `{names[0]}` is"
    if len(names) > 1:
        one = f"one of its {', '.join(f'`{name}`' for name in names)} is"
    return f"{one} not what was packed: the digest differs"


def _copy(store: Store, name: str, located: Located, out: NDArray[Any], *, in_chunks: bool) -> dict[int, str]:
    """Copies rows into an array (n, ...); returns {position: reason} for rows in chunks that cannot be decoded."""
    if not in_chunks:
        store.copy(name, located, out)
        return {}

    def gather(at: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        store.copy(name, located.some(at), outs[name])

    failed = unreadable(gather, name, np.arange(len(located)), out)
    return {at: f"its `{name}` cannot be read ({why})" for at, why in failed.items()}
