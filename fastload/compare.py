"""A packed file beside its source: every image listed and decoded again, and its pixels compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.compare_stored import GONE, OTHER_MASK, StoredTask, compare_stored, plan_of
from fastload.decode import Fit, Target, decoder_versions
from fastload.errors import FormatError, OptionError
from fastload.filters import load_filters
from fastload.format import Field, PackedFile, open_hdf5
from fastload.pack.chunk_work import Worker, read_at
from fastload.pack.headers import read_headers
from fastload.pack.options import PackOptions
from fastload.pack.store_plan import StorePlan, parse_store
from fastload.pack.survey import move_to
from fastload.pack.workers import WorkerPool
from fastload.sources import SourceOptions, list_source
from fastload.sources.listing import Listing
from fastload.stored_samples import has_stores

MAX_LEVELS = 3
"""Largest difference, in levels of 8 bits, that two releases of a decoder may show on one image."""

_TASK_ROWS = 64

_Result = tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]
"""Rows, the largest difference of each, and row -> why it cannot be compared."""


@dataclass(frozen=True)
class ChangedRow:
    """A row that the source now gives otherwise, and how."""

    row: int
    key: str
    reason: str


@dataclass(frozen=True)
class SourceReport:
    """What comparing a file with its source found.

    Attributes:
        compared: rows whose image was decoded again.
        changed: rows whose pixels or other fields differ, or whose image can no longer be decoded.
        missing: keys in the file that the source does not have (any more).
        extra: keys in the source that are not in the file: added since, or left out by `--limit` or as unreadable.
        decoder_now: the decoder that compared.
        decoder_file: the decoder that packed.
        inexact: rows equal within MAX_LEVELS, but not to the byte; always 0 under the decoder that packed.
        max_levels: largest difference among those, in levels of 8 bits.
    """

    compared: int
    changed: tuple[ChangedRow, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    decoder_now: str
    decoder_file: str
    inexact: int
    max_levels: float

    @property
    def same_decoder(self) -> bool:
        """Pixels had to be equal to the byte."""
        return self.decoder_now == self.decoder_file


@dataclass(frozen=True)
class _Task:
    """Rows to compare, with the sample of the listing that each one holds."""

    path: str
    fields: tuple[Field, ...]
    target: Target
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]


def compare_source(
    file: PackedFile,
    source: Path,
    keys: list[str],
    workers: int,
    advance: Callable[[int], None],
    *,
    root: Path | None = None,
) -> SourceReport:
    """Compare every row with what its source image decodes to now.

    Args:
        file: header of a packed file.
        source: what it was packed from.
        keys: of its rows.
        workers: processes that decode; 0 for this one.
        advance: called with the number of rows just dealt with.
        root: folder that a table's paths are relative to, where one was said when it was packed.

    Raises:
        MissingFileError, SourceError, OptionError: the source cannot be listed, or shares no key with the file.
    """
    options = _pack_options(file)
    layout = str(file.attrs.get("source_layout"))
    listing = list_source(source, layout, "skip", replace(options.source, root=root))
    samples = {key: sample for sample, key in enumerate(listing.keys)}
    found = np.array([samples.get(key, -1) for key in keys], dtype=np.int64)
    rows = np.flatnonzero(found >= 0)
    if not len(rows):
        raise OptionError(
            f"{source}: none of its {len(listing)} samples is in {file.path} (first keys: {listing.keys[0]!r} there, "
            f"{keys[0]!r} here). Name the folder or archive that was given to `fastload pack`."
        )
    now, then = decoder_versions(), str(file.attrs.get("decoder"))
    changed: list[ChangedRow] = []
    inexact, max_levels = 0, 0.0
    if listing.files is None or "images" not in file.fields:
        advance(len(rows))
    else:
        with WorkerPool(workers) as pool:
            pool.use(listing)
            target = None if file.fields["images"].varied else target_of(file, options)
            results: Iterator[_Result]
            if has_stores(file):
                headers, _, unread = read_headers(listing, pool, None, found[rows])
                for row in rows.tolist():
                    if int(found[row]) in unread:
                        changed.append(ChangedRow(row, keys[row], f"{GONE}: {unread[int(found[row])]}"))
                listing = move_to(listing, headers, target, options.max_size)
                plan = plan_of(file, options, target)
                results = pool.run(compare_stored, _stored_tasks(file, plan, rows, found[rows], headers))
            else:
                assert target is not None, "only rows of stores differ in size"
                if target.fit and any(column.moves for column in listing.columns.values()):
                    headers, _, _ = read_headers(listing, pool, None)
                    listing = move_to(listing, headers, target)
                results = pool.run(_compare, _tasks(file, target, listing.masks is not None, rows, found[rows]))
            scale = 257 if file.fields["images"].dtype.itemsize == 2 else 1  # levels of 16 bits in one of 8
            allowed = 0 if now == then else MAX_LEVELS
            for part, differences, reasons in results:
                changed += [ChangedRow(row, keys[row], reason) for row, reason in reasons.items()]
                for row, difference in zip(part.tolist(), (differences / scale).tolist(), strict=True):
                    if difference * scale >= OTHER_MASK:
                        changed.append(ChangedRow(row, keys[row], "its mask differs"))
                    elif difference > allowed:
                        changed.append(ChangedRow(row, keys[row], f"pixels differ by up to {difference:.0f} levels"))
                    elif difference:
                        inexact, max_levels = inexact + 1, max(max_levels, difference)
                advance(len(part))
    changed += _changed_fields(file, listing, rows, found[rows], keys)
    advance(len(keys) - len(rows))
    known = set(keys)
    return SourceReport(
        compared=len(rows),
        changed=tuple(sorted(changed, key=lambda row: row.row)),
        missing=tuple(keys[row] for row in np.flatnonzero(found < 0).tolist()),
        extra=tuple(key for key in listing.keys if key not in known),
        decoder_now=now,
        decoder_file=then,
        inexact=inexact,
        max_levels=max_levels,
    )


def _tasks(
    file: PackedFile, target: Target, masked: bool, rows: NDArray[np.int64], samples: NDArray[np.int64]
) -> Iterator[_Task]:
    fields = tuple(file.fields[name] for name in (("images", "masks") if masked else ("images",)))
    for start in range(0, len(rows), _TASK_ROWS):
        part = slice(start, start + _TASK_ROWS)
        yield _Task(str(file.path), fields, target, rows[part], samples[part])


def _stored_tasks(
    file: PackedFile, plan: StorePlan, rows: NDArray[np.int64], samples: NDArray[np.int64], headers: NDArray[np.void]
) -> Iterator[StoredTask]:
    for start in range(0, len(rows), _TASK_ROWS):
        part = slice(start, start + _TASK_ROWS)
        yield StoredTask(file, plan, rows[part], samples[part], headers[samples[part]])


def target_of(file: PackedFile, options: PackOptions) -> Target:
    """What every image became, from the file's own shape and the options it was packed with."""
    height, width, channels = file.fields["images"].shape
    fit: Fit | None = options.fit if options.size else "stretch" if options.max_size else None
    return Target(height=height, width=width, channels=channels, dtype=file.fields["images"].dtype, fit=fit)


def _pack_options(file: PackedFile) -> PackOptions:
    """The options a file was packed with.

    Raises:
        FormatError: they are not options of this release.
    """
    try:
        options = json.loads(file.attrs["pack_options"])
        said = options.get("source", {})
        source = SourceOptions(**{**said, "labels": tuple(said.get("labels", ()))})
        store = parse_store(options["store"]) if "store" in options else None
        size = tuple(options["size"]) if options["size"] else None
        return PackOptions(**{**options, "size": size, "source": source, "store": store})
    except (KeyError, TypeError, ValueError) as exc:
        raise FormatError(
            f"{file.path}: its pack_options cannot be read ({exc}), so its images cannot be decoded likewise. Verify "
            f"it without a source, or pack it again."
        ) from exc


def _compare(worker: Worker, task: _Task) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """Rows, the largest difference of each in the file's own levels, and row -> why it cannot be compared."""
    differences = np.zeros(len(task.rows), np.int64)
    arrays, failed = worker.decode(task.samples, task.target)
    for decoded, field in zip(arrays, task.fields, strict=True):
        packed = _read_rows(task, field)
        for at in np.flatnonzero((decoded != packed).reshape(len(packed), -1).any(axis=1)).tolist():
            levels = int(np.abs(decoded[at].astype(np.int64) - packed[at]).max())
            # A mask is a matter of yes or no, not of levels that another decoder may round otherwise.
            differences[at] = max(differences[at], levels if field.name == "images" else OTHER_MASK)
    reasons = {int(task.rows[at]): f"{GONE}: {reason}" for at, reason in failed.items()}
    differences[list(failed)] = 0
    return task.rows, differences, reasons


def _read_rows(task: _Task, field: Field) -> NDArray[Any]:
    """(rows, ...) of one field, read without a mapping so that a failing disk is an error, not a signal."""
    if field.offset is None:
        with open_hdf5(Path(task.path)) as hdf5:
            load_filters(Path(task.path), field.name, hdf5[field.name])
            return np.asarray(hdf5[field.name][task.rows])
    out = np.zeros((len(task.rows), *field.shape), field.dtype)
    flat = out.reshape(len(task.rows), -1).view(np.uint8)
    with open(task.path, "rb") as file:
        for at, row in enumerate(task.rows.tolist()):
            read_at(file.fileno(), flat[at], field.offset + row * field.row_bytes)
    return out


def _changed_fields(
    file: PackedFile, listing: Listing, rows: NDArray[np.int64], samples: NDArray[np.int64], keys: list[str]
) -> Iterator[ChangedRow]:
    """Rows whose labels or other fields the source now gives otherwise."""
    with open_hdf5(file.path) as hdf5:
        for name, column in listing.columns.items():
            if name not in file.fields:
                continue
            now, then = column.values[samples], _rows_of(hdf5, name)[rows]
            if now.shape != then.shape:
                different = np.ones(len(rows), bool)
            else:
                other = now != then
                if now.dtype.kind == "f" and then.dtype.kind == "f":
                    other &= ~(np.isnan(now) & np.isnan(then))  # the same absence
                different = other.reshape(len(rows), -1).any(axis=1)
            for row in rows[different].tolist():
                yield ChangedRow(row, keys[row], f"`{name}` differs")


def _rows_of(hdf5: h5py.File, name: str) -> NDArray[Any]:
    return np.asarray(hdf5[name][()])
