"""Checks that a packed file still holds what was packed: every digest, and on request every source image.

Rows are read with `pread`, not from a mapping: if the disk fails, that is an error with a row number, not a SIGBUS that
ends the process. A comparison decodes every source image again and compares the pixels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, ImageError, OptionError, typed
from fastload.format.digests import DIGEST_FIELDS, header_digest, row_digests
from fastload.format.header import PIXEL_FIELDS, Field, PackedFile, by_block, open_hdf5, read_shard, require_digests
from fastload.format.ragged import JPEG, Column
from fastload.format.shards import check_mappings
from fastload.images.decode import decoder_versions
from fastload.images.decode_part import decode_row
from fastload.images.fit import Fit, Target
from fastload.options.pack import EncodingOption, PackOptions
from fastload.pack.coordinates import as_upright, has_coordinates, with_clipped_boxes, with_moved_coordinates
from fastload.pack.decisions import RaggedPlan, jpegs_kept_and_made
from fastload.pack.encode import RowEncoder
from fastload.pack.pack_options import is_joined, of_file_options
from fastload.pack.pack_worker import Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import read_headers
from fastload.read.checked import CHANGED, CheckedSamples, open_samples
from fastload.read.identity import check_path
from fastload.read.reader import open_columns
from fastload.read.row_table import index_part
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName, as_given, local_path, short_name
from fastload.sources.layouts import LAYOUTS, list_source
from fastload.sources.listing import Listing
from fastload.sources.mask_classes import with_mask_options
from fastload.system.machine import worker_count
from fastload.system.text import text_of
from fastload.system.threads import in_threads

if TYPE_CHECKING:
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


MAX_LEVELS = 3
"""Largest difference, in levels of 8 bits, that two releases of a decoder may show on one image."""

_GONE = "its image can no longer be decoded"
_OTHER_MASK = "its mask differs"

_OWN_OPTIONS = ("source", "root", "workers")  # of `fastload verify`
_TASK_ROWS = 64


@dataclass(frozen=True)
class ChangedRow:
    """A row that differs from what the source holds now, and how."""

    row: int  # its number in the file
    key: str  # path of its image in the source
    reason: str  # how it differs


@dataclass(frozen=True)
class SourceReport:
    """Result of comparing a file with its source."""

    compared: int  # rows whose image was decoded again
    changed: tuple[ChangedRow, ...]  # rows whose pixels or other fields differ, or whose image can no longer be decoded
    missing: tuple[str, ...]  # keys in the file that are not in the source (any more)
    # Keys of a file with rows of several sources (append, merge) that are not in this one: no sign of damage
    of_others: tuple[str, ...]
    # Keys in the source that are not in the file: added since, or left out by `--limit` or as unreadable
    extra: tuple[str, ...]
    decoder_now: str  # decoder used to compare
    decoder_file: str  # decoder used to pack
    inexact: int  # rows equal within 3 levels of 8 bits, but not to the byte; always 0 with the decoder used to pack
    max_levels: float  # largest difference among those, in levels of 8 bits

    @property
    def same_decoder(self) -> bool:
        """Whether both decoders are the same, so that pixels have to be equal to the byte."""
        return self.decoder_now == self.decoder_file


@dataclass(frozen=True)
class _Task:
    """Rows of a file to compare."""

    file: PackedFile
    plan: RaggedPlan  # how its rows were made, as far as it affects their pixels
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]  # indices of the rows' samples in the listing
    headers: NDArray[np.void] | None  # HEADERS (n,) of the samples; only of a file with ragged fields
    unread: dict[int, str]  # sample -> why its header cannot be read


def compare_source(
    file: PackedFile,
    source: Path,
    keys: list[str],
    workers: int,
    advance: Callable[[int], None],
    *,
    root: Path | None = None,
) -> SourceReport:
    """Compares every row with what its source image decodes to now.

    Args:
        keys: of the file's rows.
        advance: called with the number of rows just compared.
        file, source, root, workers: as in `verify_file`.

    Raises:
        MissingFileError, SourceError, OptionError: the source cannot be listed, or shares no key with the file.
    """
    options = PackOptions.of_file(file)
    with options.accepting_large(workers):
        return _compare(file, options, source, keys, workers, advance, root)


def _compare(
    file: PackedFile,
    options: PackOptions,
    source: Path,
    keys: list[str],
    workers: int,
    advance: Callable[[int], None],
    root: Path | None,
) -> SourceReport:
    """Returns what `compare_source` does."""
    packed_as, joined = str(file.attrs.get("source_layout")), is_joined(file.attrs)
    layout = None if joined and packed_as not in LAYOUTS else packed_as  # files of several layouts were merged
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(
            f"{file.path}: packed as {layout!r}, and there is no such layout in this release, so that {source} cannot "
            "be listed as it was then. Leave out `--source`: rows are compared with their digests."
        )
    with of_file_options(f"`fastload verify` lists the source by layout and options of {file.path}", _OWN_OPTIONS):
        listing = list_source(source, layout, "skip", replace(options.source, root=root))
    masks = file.fields.get("masks")
    if masks is not None:
        # Releases before these options left the values of masks as they are.
        said = options.masks
        if said.values == "auto" and "source_values" not in masks.attrs:
            said = replace(said, values="keep")
        padded = options.pads and "ignore_index" in masks.attrs
        stored = options.source.boxes_of == "stored"
        listing = with_mask_options(listing, said, source, padded=padded, stored=stored)
    numbers = {key: sample for sample, key in enumerate(listing.keys)}
    found = np.array([numbers.get(key, -1) for key in keys], dtype=np.int64)
    rows = np.flatnonzero(found >= 0)
    samples = found[rows]
    if not len(rows):
        raise OptionError(
            f"{source}: none of its {len(listing)} samples is in {file.path} (first keys: {listing.keys[0]!r} there, "
            f"{keys[0]!r} here). Name the folder or archive that was given to `fastload pack`."
        )
    now, then = decoder_versions(), str(file.attrs.get("decoder"))
    changed: dict[int, list[str]] = defaultdict(list)
    inexact, max_levels = 0, 0.0
    if listing.files is None or "images" not in file.fields:
        advance(len(rows))
    else:
        scale = 257 if file.fields["images"].dtype.itemsize == 2 else 1  # levels of 16 bits in one of 8
        allowed = 0 if now == then else MAX_LEVELS
        with PackPool(workers) as pool:
            pool.use(listing)
            listing, tasks, of_size = _prepare(file, options, listing, pool, rows, samples)
            for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
                if sample in of_size:
                    changed[row].append(of_size[sample])
            for compared in pool.run(_compare_rows, tasks):
                for row, found_there in compared:
                    if isinstance(found_there, str):
                        changed[row].append(found_there)
                    elif (levels := found_there / scale) > allowed:
                        changed[row].append(f"pixels differ by up to {levels:.0f} levels")
                    elif levels:
                        inexact, max_levels = inexact + 1, max(max_levels, levels)
                advance(len(compared))
    for row, reason in _changed_fields(file, listing, rows, samples):
        changed[row].append(reason)
    advance(len(keys) - len(rows))
    known, absent = set(keys), tuple(keys[row] for row in np.flatnonzero(found < 0).tolist())
    return SourceReport(
        compared=len(rows),
        changed=tuple(ChangedRow(row, keys[row], reason) for row in sorted(changed) for reason in changed[row]),
        missing=() if joined else absent,
        of_others=absent if joined else (),
        extra=tuple(key for key in listing.keys if key not in known),
        decoder_now=now,
        decoder_file=then,
        inexact=inexact,
        max_levels=max_levels,
    )


def _prepare(
    file: PackedFile,
    options: PackOptions,
    listing: Listing,
    pool: PackPool,
    rows: NDArray[np.int64],
    samples: NDArray[np.int64],
) -> tuple[Listing, list[_Task], dict[int, str]]:
    """Returns the listing with coordinates moved as packing moved them, and the tasks of the pool.

    Also sample -> why boxes do not belong to an image of its size.
    """
    field, masks = file.fields["images"], file.fields.get("masks")
    target: Target | None = None
    if not field.varied:
        height, width, channels = field.shape
        fit: Fit | None = options.fit if options.size else "stretch" if options.max_size else None
        target = Target(height, width, channels, field.dtype, fit)
    plan = RaggedPlan(
        channels=field.shape[2],
        dtype=field.dtype.newbyteorder("="),
        option=options.store or EncodingOption(),
        target=target,
        max_size=options.max_size if target is None else None,
        images="ragged",
        masks="rows" if masks is not None else None,
        mask_dtype=np.dtype(np.uint8) if masks is None else masks.dtype.newbyteorder("="),
    )
    headers, unread, of_size = None, dict[int, str](), dict[int, str]()
    clips = options.outside_boxes == "clip" and listing.layout != "exported"
    sized = listing.declared is not None or options.source.boxes_of != "auto"
    fitted = sized or clips or (target is not None and target.fit)
    if file.ragged or (fitted and has_coordinates(listing)) or (sized and listing.masks is not None):
        headers, _, unread = read_headers(listing, pool, None, samples)
        listing, of_size, _ = as_upright(listing, headers, options, file.path)
        listing = with_clipped_boxes(listing, headers) if clips else listing
        listing = with_moved_coordinates(listing, headers, target, options.max_size)
    tasks = []
    for start in range(0, len(rows), _TASK_ROWS):
        some = samples[start : start + _TASK_ROWS]
        known = {sample: unread[sample] for sample in some.tolist() if sample in unread}
        here = headers[some] if headers is not None and file.ragged else None
        tasks.append(_Task(file, plan, rows[start : start + _TASK_ROWS], some, here, known))
    return listing, tasks, of_size


def _compare_rows(worker: Worker, task: _Task) -> list[tuple[int, int | str]]:
    """Returns (row, the largest difference in the file's own levels, or why it differs otherwise) of all rows."""
    stored = open_samples(task.file)
    if task.headers is not None:
        return list(zip(task.rows.tolist(), _compare_ragged(worker, task, stored), strict=True))
    assert task.plan.target is not None, "only ragged rows differ in size"
    arrays, amiss = worker.decode(task.samples, task.plan.target, mask_dtype=task.plan.mask_dtype)
    reasons = amiss.reasons
    found: list[int | str] = [f"{_GONE}: {reasons[at]}" if at in reasons else 0 for at in range(len(task.rows))]
    for decoded, name in zip(arrays, stored.names, strict=False):
        packed = np.empty_like(decoded)
        unreadable = stored.read(name, task.rows, packed)
        different = (decoded != packed).reshape(len(packed), -1).any(axis=1)
        for at in {*np.flatnonzero(different).tolist(), *unreadable}:
            if isinstance(found[at], int):
                levels = int(np.abs(decoded[at].astype(np.int64) - packed[at]).max())
                # Values of masks are class numbers, which no decoder may round.
                found[at] = unreadable.get(at) or (_OTHER_MASK if name == "masks" else levels)
    return list(zip(task.rows.tolist(), found, strict=True))


def _compare_ragged(worker: Worker, task: _Task, stored: CheckedSamples) -> list[int | str]:
    """Returns the same of rows of varying length, each encoded again as it was packed."""
    assert task.headers is not None, "read before"
    masks = worker.masks if task.plan.masks else None
    from_source = replace(task.plan, option=EncodingOption("source"))
    options = (EncodingOption(), from_source.option, replace(task.plan.option, kind="jpeg"))
    raw, source, jpeg = (
        RowEncoder(worker.images, masks, replace(task.plan, option=option), begin=worker.begin) for option in options
    )
    keeps = task.plan.option.kind != "jpeg"

    def compare(row: int, sample: int, header: np.void) -> int | str:
        """Returns the largest difference of a row in levels, or why it differs."""
        then = stored.encoded_bytes("images", row)
        is_jpeg = then.encoding == JPEG
        # A JPEG may be the source's own file or newly compressed; the file does not say which, so both are tried.
        now = (source if is_jpeg and keeps else jpeg if is_jpeg else raw).encode(sample, header)
        if is_jpeg and now.encoding != JPEG:
            now = jpeg.encode(sample, header)
        if now.shape != then.shape:
            (height, width, _), packed = now.shape, then.shape
            return f"its image is {width}x{height} (width x height), packed was {packed[1]}x{packed[0]}"
        if masks is not None and bytes(now.mask or b"") != stored.pixels("masks", row).tobytes():
            return _OTHER_MASK
        if is_jpeg and now.image == then.data:
            return 0
        pixels = decode_row(
            bytes(now.image), now.encoding, now.shape, now.orientation, stored.file.fields["images"].dtype
        )
        levels = int(np.abs(pixels.astype(np.int64) - stored.pixels("images", row)).max())
        if is_jpeg and keeps and jpegs_kept_and_made(from_source, sample, header)[0]:
            return "its JPEG has other bytes" + (f" (pixels differ by up to {levels} levels)" if levels else "")
        return levels

    found = list[int | str]()
    for at, (row, sample) in enumerate(zip(task.rows.tolist(), task.samples.tolist(), strict=True)):
        try:
            if sample in task.unread:
                raise ImageError(task.unread[sample])
            found.append(compare(row, sample, task.headers[at]))
        except (ImageError, OSError) as exc:
            found.append(f"{_GONE}: {exc}")
    return found


def _changed_fields(
    file: PackedFile, listing: Listing, rows: NDArray[np.int64], samples: NDArray[np.int64]
) -> Iterator[tuple[int, str]]:
    """Yields (row, reason) of rows whose labels or other fields differ in the source now."""
    with open_columns(file) as hdf5:
        for name, column in listing.columns.items():
            if name not in file.fields:
                continue
            values = _as_in_joined(column, file.fields[name]) if is_joined(file.attrs) else column.values
            now, then = values[samples], np.asarray(hdf5[name][()])[rows]
            different = np.ones(len(rows), bool)
            if now.shape == then.shape:
                floats = now.dtype.kind == then.dtype.kind == "f"
                same = (now == then) | (np.isnan(now) & np.isnan(then) if floats else False)  # or missing in both
                different = ~same.reshape(len(rows), -1).all(axis=1)
            yield from ((row, f"`{name}` differs") for row in rows[different].tolist())


def _as_in_joined(column: Column, field: Field) -> NDArray[Any]:
    """Returns a column of one source as a file that was joined from several holds it.

    That has the classes of all of them, and room for the most boxes or texts.
    """
    values, names = column.values, tuple(map(str, column.attrs.get("names", ())))
    if field.names and names != field.names and set(names) <= set(field.names) and values.dtype.kind == "i":
        table = np.array([*(field.names.index(name) for name in names), -1], values.dtype)
        inside = (values >= -1) & (values < len(names))
        values = np.where(inside, table[np.where(inside, values, -1)], values)
    if values.ndim > 1 and values.shape[1:2] < field.shape[:1] and values.shape[2:] == field.shape[1:]:
        more = np.zeros((len(values), field.shape[0] - values.shape[1], *values.shape[2:]), values.dtype)
        if field.name in ("box_labels", "segment_labels"):
            more[:] = -1
        values = np.concatenate([values, more], axis=1)
    return values
