"""Compares rows of a packed file with their digests while they are read, so that bytes that rotted reach nobody.

Pixels are copied some rows at a time and hashed where they were copied to, while they are in the CPU's cache. Hashing
does not give up the GIL between the rows of a part: who did so for each row would wait for it as often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.digests import DIGEST_FIELDS, KEEPS_GIL, pixel_digests, row_digest, row_digests
from fastload.format.header import PIXEL_FIELDS, PackedFile
from fastload.format.ragged import JPEG
from fastload.images.decode_part import decode_row
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import unreadable
from fastload.read.linear import MappedRows, PreadRows
from fastload.read.ragged_rows import RaggedReader, cannot_be_decoded, sample_error

Check = Literal["always", "first"]
"""When a row is compared with its digests: each time that it is read, or the first time."""

Sources = Mapping[str, MappedRows | PreadRows | ChunkedRows]

PART_BYTES = 2**21
"""Copied and hashed at a time. Rows of 116 KB in batches of 256, one thread: 9.8 us a row copied and hashed in parts of
1, 2 or 3 MiB, 6.3 copied alone. Hashed after the whole batch was copied it took 1.3 times as long as in parts."""


class RowCheck:
    """Compares the rows of batches with their digests. Any thread may call it, also after a fork.

    Args:
        file: written by fastload.
        fields: names of those that are read of it, one or more.
        check: "first" keeps a bit for each row.

    Attributes:
        needed: names of all datasets that are read for it.
    """

    def __init__(self, file: PackedFile, fields: Sequence[str], check: Check) -> None:
        self._file = file
        pixels = any(name in PIXEL_FIELDS for name in fields)
        self._pixels = [name for name in PIXEL_FIELDS if pixels and name in file.fields]
        # The index of ragged rows is among the columns. One digest is of them all, so that all of them are read.
        of_ragged = any(file.fields[name].ragged is not None for name in self._pixels)
        asked = [name for name in fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS)]
        others = [name for name in file.fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS, *asked)]
        self._columns = [*asked, *others] if asked or of_ragged else []
        self.needed = [*self._pixels, *self._columns, *["digest"] * bool(self._pixels)]
        self.needed += ["digest_fields"] * bool(self._columns)
        self._seen: NDArray[np.uint8] | None = None  # a bit for each row; None: all of them are compared
        self._remembers = check == "first"
        self.forget()

    def forget(self) -> None:
        """Lets all rows be compared again, since the file was touched."""
        if self._remembers:
            num_rows = self._file.num_rows
            self._seen = np.packbits(np.arange(-(-num_rows // 8) * 8) >= num_rows, bitorder="little")
        self.all_seen, self._any_new = False, False

    def due(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns which of a batch's rows, int64 (B,), are to be compared: their positions in it, ascending."""
        seen = self._seen
        if seen is None:
            return np.arange(len(rows))
        if self.all_seen or not len(rows):
            return np.empty(0, np.int64)
        parts = (rows[first : first + KEEPS_GIL] for first in range(0, len(rows), KEEPS_GIL))
        found = [np.flatnonzero(~(seen[part >> 3] >> (part & 7)) & 1) for part in parts]
        due = np.concatenate([at + number * KEEPS_GIL for number, at in enumerate(found)])
        if self._any_new and not len(due):
            self._any_new, self.all_seen = False, bool((seen == 255).all())
        return due

    def gather(
        self,
        rows: NDArray[np.int64],
        due: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        sources: Sources,
        ragged: Mapping[str, RaggedReader],
    ) -> None:
        """Copies rows into the arrays (B, ...) of fields that are not ragged, and compares those that are `due`.

        DamagedRowError: some are not what was packed, or cannot be decoded; it has the numbers of all of them.
        """
        wrong: dict[int, str] = {}  # position -> why
        if self._columns:
            different = self._different_columns(rows[due], sources)
            wrong = dict.fromkeys(due[different].tolist(), _differs(self._columns))
        for name in outs.keys() & sources.keys() - {*self._pixels}:
            sources[name].gather(rows, {name: outs[name]})
        if self._pixels:
            expected = np.empty(len(due), np.uint64)
            sources["digest"].gather(rows[due], {"digest": expected})
            parts = self._parts(len(rows), len(due), sources)
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
        self._note(rows[due])

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
        good = [i for i, at in enumerate(due.tolist()) if at not in wrong]
        numbers = rows[due[good]]
        known = {name: ragged[name].index(numbers) for name in self._pixels if name in ragged}
        taken = {name: ragged[name].take(index) for name, index in known.items()}
        for n, i in enumerate(good):
            parts: list[Any] = []
            try:
                for name in self._pixels:
                    if name not in known:
                        parts.append(arrays[name][i])
                        continue
                    index, data, field = known[name], taken[name][n], self._file.fields[name]
                    encoding, shape = int(index.encoding[n]), tuple(index.shape[n, : len(field.shape)].tolist())
                    parts.append(data if encoding == JPEG else decode_row(data, encoding, shape, 1, field.dtype))
            except ImageError as error:
                wrong[int(due[i])] = cannot_be_decoded(name, encoding, error)
                continue
            if row_digest(parts) != expected[i]:
                wrong[int(due[i])] = _differs(self._pixels)

    def _different_columns(self, rows: NDArray[np.int64], sources: Sources) -> NDArray[np.bool_]:
        """Returns of each row whether what is no pixel differs from its digest."""
        values: dict[str, NDArray[Any]] = {}
        for name in (*self._columns, "digest_fields"):
            field = self._file.fields[name]
            values[name] = np.empty((len(rows), *field.shape), field.dtype.newbyteorder("="))
            sources[name].gather(rows, {name: values[name]})
        expected: NDArray[np.uint64] = values.pop("digest_fields")
        different: NDArray[np.bool_] = row_digests(values) != expected
        return different

    def _note(self, rows: NDArray[np.int64]) -> None:
        """Remembers that rows are what was packed. Two threads at once may forget some, which are compared again."""
        if self._seen is None or not len(rows):
            return
        np.bitwise_or.at(self._seen, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
        self._any_new = True


def _differs(names: Sequence[str]) -> str:
    """Returns that one digest of some fields is another one, in words."""
    one = f"its `{names[0]}` is"
    if len(names) > 1:
        one = f"one of its {', '.join(f'`{name}`' for name in names)} is"
    return f"{one} not what was packed: the digest differs"


def _copied(
    source: MappedRows | PreadRows | ChunkedRows, name: str, rows: NDArray[np.int64], out: NDArray[Any]
) -> dict[int, str]:
    """Copies rows into an array (n, ...); returns position -> why, of those in chunks that cannot be decoded."""
    if not isinstance(source, ChunkedRows):
        source.gather(rows, {name: out})
        return {}
    failed = unreadable(source.gather, name, rows, out)
    return {at: f"its `{name}` cannot be read ({why})" for at, why in failed.items()}
