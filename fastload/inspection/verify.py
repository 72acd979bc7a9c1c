"""Checks that a packed file still holds what was packed: every digest, and on request every source image.

Rows are read with `pread`, not from a mapping: if the disk fails, that is an error with a row number, not a SIGBUS that
ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError, typed
from fastload.format.digests import DIGEST_FIELDS, header_digest, row_digests
from fastload.format.header import PIXEL_FIELDS, PackedFile, by_block, open_hdf5, read_shard, require_digests
from fastload.format.shards import check_mappings
from fastload.read.checked import CHANGED, CheckedSamples
from fastload.read.identity import check_path
from fastload.read.reader import open_columns
from fastload.read.row_table import index_part
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName, as_given, local_path, short_name
from fastload.system.machine import worker_count
from fastload.system.text import text_of
from fastload.system.threads import in_threads

if TYPE_CHECKING:
    from fastload.inspection.compare import SourceReport
    from fastload.read.remote_store import HeldRows

SPAN_BYTES = 8 * 2**20
FIELD_ROWS = 65_536
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class DamagedRow:
    """A row whose bytes have changed since packing."""

    row: int  # its number in the file
    key: str  # path of its image in the source
    what: str  # "pixels", "fields", or why the row cannot be read


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify_file`.

    Attributes:
        path: as given; of a URL without what may be secret in it.
        num_rows: rows checked.
        pixel_bytes: bytes of pixels hashed; of ragged rows, as they are in the file.
        header_ok: whether shapes, attributes and digests are those that were packed.
        damaged: rows whose bytes have changed.
        source: the comparison with the source, if asked for.
    """

    path: Path | str
    num_rows: int
    pixel_bytes: int
    header_ok: bool
    damaged: tuple[DamagedRow, ...]
    source: SourceReport | None = None

    @property
    def name(self) -> str:
        """The name of its path, or the whole URL."""
        return short_name(self.path)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and, if a source was given, every row is still what its image decodes to."""
        return (
            self.header_ok and not self.damaged and not (self.source and (self.source.changed or self.source.missing))
        )

    @property
    def equal(self) -> int:
        """Number of rows that are what their source image decodes to; 0 without a source."""
        if self.source is None:
            return 0
        missing = {*self.source.missing, *self.source.of_others}
        wrong = {row.row for row in self.source.changed}
        wrong |= {row.row for row in self.damaged if row.what != "fields" and row.key not in missing}
        return self.source.compared - len(wrong)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {"file": self.name, "ok": self.ok, **asdict(self), "path": str(self.path)}


def verify_file(
    path: FileName,
    *,
    source: str | Path | None = None,
    root: str | Path | None = None,
    shard: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Hashes every row again and, with a source, decodes every image again. JPEGs in the file are decoded in any case.

    Args:
        path: a packed file, or an index, of which every shard is checked, and that other programs find the same rows.
            All chunks of a URL are fetched, whatever is in the cache; `verify_cache` checks that.
        source: what it was packed from.
        root: folder that a table's paths are relative to, if one was given to pack it.
        shard: of an index, check only the shard of this number.
        workers: threads that hash, and processes that decode; None: one per CPU, 0: this thread only.
        progress: called with (rows done, rows in all) from this thread; with a source each row counts twice.

    Raises:
        MissingFileError: there is no such file, or no such source.
        FormatError: not a packed file, or one whose header cannot be read.
        FileChangedError: the file was written to meanwhile.
        SourceError, OptionError: the source cannot be listed, or is not what the file was packed from; there is no
            such shard.
        RemoteError: an object of a URL cannot be had.
    """
    workers = worker_count(workers)
    if source is not None:
        local_path(
            path,
            "only a file of this machine is compared with its source, by processes that read it. Leave --source out, "
            "or copy it first: `fastload repack URL OUT.h5`.",
        )
    with open_packed(path) as file:
        if file.version is None:
            raise FormatError(
                f"{file.name}: fastload did not write this file, so it holds no digests to check it against. "
                f"`fastload info {typed(file.name)}` describes it."
            )
        if not file.holds_rows:
            found = _verify_index(file, source, root, shard, workers, progress)
            return replace(found, path=as_given(path))
        if shard is not None:
            raise OptionError(f"{path}: is no index, so it has no shard {shard}. Leave `--shard` out.")
        return _verify_one(file, source, root, workers, progress)


def _verify_one(
    file: PackedFile,
    source: str | Path | None,
    root: str | Path | None,
    workers: int,
    progress: Progress | None,
    held: HeldRows | None = None,
) -> VerifyReport:
    """Checks a file as `verify_file` does, of which `held` has the rows fetched, where it is a copy in the cache."""
    path = file.path
    require_digests(file)
    total = file.num_rows * (2 if source is not None else 1)
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, total)

    with open_hdf5(path) as hdf5:
        digests: dict[str, NDArray[np.uint64]] = {}
        header_ok = header_digest(hdf5, digests) == file.attrs.get("header_digest")
        file = replace(file, digests=by_block(digests))
        keys = [f"row {row}" for row in range(file.num_rows)]
        if "key" in file.fields:
            keys = [text_of(key) for key in hdf5["key"][()].tolist()]
        damaged = []
        # Rows whose values other than pixels do not match their digest.
        names = [name for name in file.fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS)]
        for start in range(0, file.num_rows, FIELD_ROWS):
            part = range(start, min(start + FIELD_ROWS, file.num_rows))
            with nullcontext() if held is None else held.fields(part):
                found = row_digests({name: hdf5[name][part.start : part.stop] for name in names})
            wrong = start + np.flatnonzero(found != digests["digest_fields"][part.start : part.stop])
            damaged += [DamagedRow(row, keys[row], "fields") for row in wrong.tolist()]
        damaged += [DamagedRow(row, keys[row], what) for row, what in _damaged_pixels(file, workers, advance, held)]
        pixel_bytes = 0
        for name in file.fields.keys() & PIXEL_FIELDS:
            pixel_bytes += int(index_part(hdf5, file, name, "bytes").sum())
    compared: SourceReport | None = None
    if source is not None:
        # Imported here, because it imports the decoders of sources, which hashing does not need.
        from fastload.inspection.compare import compare_source

        folder = None if root is None else Path(root)
        compared = compare_source(file, Path(source), keys, workers, advance, root=folder)
    check_path(file)  # or what was read last is of another file
    return VerifyReport(
        path=path,
        num_rows=file.num_rows,
        pixel_bytes=pixel_bytes,
        header_ok=header_ok,
        damaged=tuple(sorted(damaged, key=lambda found: found.row)),
        source=compared,
    )


def _verify_index(
    index: PackedFile,
    source: str | Path | None,
    root: str | Path | None,
    shard: int | None,
    workers: int,
    progress: Progress | None,
) -> VerifyReport:
    """Checks the shards of an index, or one of them, as `verify_file` does a file; rows have the index's numbers."""
    shards = index.shards
    if shard is not None and not 0 <= shard < len(shards.names):
        raise OptionError(f"{index.name}: has no shard {shard}; they are 0 to {len(shards.names) - 1}.")
    if shard is not None and source is not None:
        raise OptionError("one shard cannot be compared with the whole source: leave out `--shard` or `--source`.")
    with open_hdf5(index.path) as hdf5:
        if "fastload_index" in hdf5.attrs:  # else the one file behind a URL
            check_mappings(
                index.path, hdf5, shards, index.fields, {name: one.shard_bytes for name, one in index.ragged.items()}
            )
    others = sum(field.row_bytes for name, field in index.fields.items() if name not in PIXEL_FIELDS)
    index.shard_files.read_anew((workers + 1) * SPAN_BYTES + min(FIELD_ROWS, index.num_rows) * others)
    numbers = range(len(shards.names)) if shard is None else [shard]
    total = int(shards.num_rows[numbers].sum()) + (index.num_rows if source is not None else 0)
    done, pixel_bytes, header_ok, damaged = 0, 0, True, list[DamagedRow]()

    def advance_from(before: int) -> Progress | None:
        return (lambda rows, _: progress(before + rows, total)) if progress else None

    for number in numbers:
        found = read_shard(index, number)
        with _held_rows(index, number) as held:
            one = _verify_one(found, None, None, workers, advance_from(done), held)
        there, here = shards.rows_of(number)
        row_of = dict(zip(there.tolist(), here.tolist(), strict=True))
        damaged += [replace(row, row=row_of[row.row]) for row in one.damaged]
        done, pixel_bytes, header_ok = done + one.num_rows, pixel_bytes + one.pixel_bytes, header_ok and one.header_ok
    compared: SourceReport | None = None
    if source is not None:
        from fastload.inspection.compare import compare_source

        with open_columns(index) as columns:
            keys = [text_of(key) for key in columns["key"][()].tolist()]
        shown, so_far = advance_from(done), 0

        def advance(rows: int) -> None:
            nonlocal so_far
            so_far += rows
            if shown:
                shown(so_far, total)

        folder = None if root is None else Path(root)
        compared = compare_source(index, Path(source), keys, workers, advance, root=folder)
    return VerifyReport(
        path=index.path,
        num_rows=index.num_rows if shard is None else int(shards.num_rows[shard]),
        pixel_bytes=pixel_bytes,
        header_ok=header_ok,
        damaged=tuple(sorted(damaged, key=lambda found: found.row)),
        source=compared,
    )


def _held_rows(index: PackedFile, shard: int) -> AbstractContextManager[HeldRows | None]:
    """Returns what fetches the rows of a shard ahead while they are checked; None if they are in its file."""
    if index.remote is None:
        return nullcontext()
    from fastload.read.remote_store import HeldRows  # imports what files of this machine do not need

    return HeldRows(index, shard)


def _damaged_pixels(
    file: PackedFile, workers: int, advance: Callable[[int], None], held: HeldRows | None
) -> list[tuple[int, str]]:
    """Returns (row, what) for rows whose pixels do not match their digest, or cannot be read or decoded."""
    row_bytes = sum(file.fields[name].row_bytes for name in PIXEL_FIELDS if name in file.fields)
    if not row_bytes:
        advance(file.num_rows)
        return []
    step = max(1, SPAN_BYTES // row_bytes)
    spans = [range(start, min(start + step, file.num_rows)) for start in range(0, file.num_rows, step)]
    found: list[tuple[int, str]] = []
    with closing(CheckedSamples(file)) as samples:

        def work(rows: range) -> list[tuple[int, str]]:
            with nullcontext() if held is None else held.pixels(rows):
                return samples.damaged(rows)

        tasks = spans if held is None else held.ahead(spans)
        # Several threads are for reading: hashing is faster than memory anyway.
        for rows, wrong in in_threads(lambda rows: (rows, work(rows)), tasks, workers):
            found += [(row, "pixels" if why == CHANGED else why) for row, why in wrong]
            advance(len(rows))
    return found
