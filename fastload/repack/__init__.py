"""New packed files from packed ones: other chunks, order, codec, fewer rows; or several files as one.

Rows are copied as they are, each checked against its digest on the way, by the packer itself: what is under way lies
in `OUT.h5.part` and `OUT.h5.journal`, and the same call continues it after a kill. Runs of rows are copied in pieces of
512 KiB, which stay in a core's cache between reading, hashing and writing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastload.codecs import CODEC_CHUNK_BYTES, NONE, Codec, parse_codec
from fastload.errors import OptionError, OutputError, SourceError
from fastload.format import PackedFile, read_header
from fastload.layout import CHUNK_BYTES, dump_options
from fastload.open_readers import close_readers
from fastload.pack import PackOptions, PackReport, pack_listing
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption
from fastload.repack.choose import Choice, choose_rows
from fastload.repack.compress import compress_listing
from fastload.repack.listing import list_packed, pack_options, regroup
from fastload.repack.merge import list_merged
from fastload.repack.rows import RowByRow
from fastload.repack.stored import KeptRows, undecodable
from fastload.sources.listing import Listing, OnError
from fastload.stored_samples import has_stores

__all__ = ["Choice", "merge_files", "repack_file"]

_CODEC_OF_FILTER = {"deflate": "gzip", "zstd": "zstd"}


def repack_file(
    file: str | Path,
    output: str | Path,
    *,
    chunk_bytes: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    codec: str = "keep",
    choice: Choice | None = None,
    workers: int | None = None,
    on_error: OnError = "fail",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write some or all rows of a packed file as a new one.

    Classes and their names stay as they are, also where no row of one is left. A file that another tool wrote becomes
    one whose rows lie back to back.

    Args:
        file: a packed file, or another HDF5 file with a dataset `images`.
        output: file to make.
        chunk_bytes: size at which chunks aim; by default that of the file where it was packed, 64 KiB with another
            codec for rows of one size.
        shuffle: shuffle rows within each split; by default they keep their order.
        seed: of that shuffle.
        codec: "keep": what is compressed stays so, likewise; "none": it is decompressed; "gzip" or "zstd", with or
            without a level, 0 to 9 ("gzip:4") or 1 to 19 ("zstd:3"). In a byte store "zstd" compresses rows that are
            raw pixels. JPEGs stay as they are in any case.
        choice: which rows; by default all.
        workers: threads that compress, by default one per CPU; rows that are only copied are copied by this thread.
        on_error: "fail" stops at a row that is not what was packed; "skip" leaves it out and lists it, also a JPEG
            that was damaged before it was packed, which "fail" copies unseen. Not with a codec for rows of one size:
            with "keep", these are decompressed then.
        overwrite: replace an output that exists, and discard unfinished work on something else.
        progress: called with (stage, done, total).

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read.
        SourceError: rows of the file are damaged; it names them.
        OptionError: an option has no meaning for this file, or no row is left.
        OutputError, ResumeError, PackError: as pack_images.
    """
    how = _said_codec(codec)
    choice = choice or Choice()
    _check_apart([Path(file)], Path(output))
    header, listing = list_packed(file)
    chosen = choose_rows(listing, choice, header.path)
    in_order = bool(np.all(np.diff(chosen) > 0))
    told = pack_options(header)
    kept, notes = (NONE, ()) if how is not None else _compressed_with([header], on_error)
    listing = replace(listing, notes=(*listing.notes, *notes))
    if chunk_bytes is None:
        chunk_bytes = int(told.get("chunk_bytes", CHUNK_BYTES))
        if kept != NONE:
            chunk_bytes = header.fields["images"].chunk_rows * header.fields["images"].row_bytes
        elif how not in (None, NONE) and not has_stores(header):
            chunk_bytes = CODEC_CHUNK_BYTES
    of_masks = _codec_of([header]) if how is None else "none"
    options = PackOptions(seed=seed if shuffle else 0, shuffle=shuffle, chunk_bytes=chunk_bytes, codec=of_masks)
    attrs = dict(listing.attrs)
    if len(chosen) < len(listing) or not in_order:
        attrs["repacked"] = dump_options({**choice.to_dict(), "rows": len(chosen), "of": len(listing)})
    if not shuffle and not in_order:
        attrs |= {"shuffled": False, "seed": 0}
    part = regroup(replace(listing, attrs=attrs), chosen)
    return _write(part, output, told, options, header.path, how, kept, workers, on_error, overwrite, progress)


def merge_files(
    files: Sequence[str | Path],
    output: str | Path,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    shuffle: bool = False,
    seed: int = 0,
    codec: str = "keep",
    workers: int | None = None,
    on_error: OnError = "fail",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write the rows of several packed files as one.

    Splits are joined by name: train holds the first file's rows, then the second's, and so on. Class numbers become
    those of the union of the names where these differ. The file does not count as shuffled unless `shuffle` is given:
    the rows of one file lie behind those of the other.

    Args:
        files: at least two packed files with the same fields, shapes and dtypes.
        output, chunk_bytes, shuffle, seed, codec, workers, on_error, overwrite, progress: as `repack_file`.

    Raises:
        SourceError: two files differ in a way that one file cannot hold; or rows are damaged.
        OptionError, MissingFileError, FormatError, OutputError, ResumeError, PackError: as `repack_file`.
    """
    how = _said_codec(codec)
    _check_apart(list(map(Path, files)), Path(output))
    listing = list_merged(files)
    headers = [read_header(file) for file in files]
    kept, notes = (NONE, ()) if how is not None else _compressed_with(headers, on_error)
    listing = replace(listing, notes=(*listing.notes, *notes))
    of_masks = _codec_of(headers) if how is None else "none"
    options = PackOptions(seed=seed if shuffle else 0, shuffle=shuffle, chunk_bytes=chunk_bytes, codec=of_masks)
    told: dict[str, Any] = json.loads(listing.attrs["pack_options"])
    names = ", ".join(Path(file).name for file in files)
    return _write(listing, output, told, options, names, how, kept, workers, on_error, overwrite, progress)


def _write(
    listing: Listing,
    output: str | Path,
    told: dict[str, Any],
    options: PackOptions,
    where: str | Path,
    how: Codec | None,
    kept: Codec,
    workers: int | None,
    on_error: OnError,
    overwrite: bool,
    progress: Progress | None,
) -> PackReport:
    """The listing's rows as a file that keeps what is still true of its origin.

    Args:
        how: the codec that was asked for; None to keep what is there.
        kept: what images of one size are compressed with then.
    """
    codec = kept if how is None else how
    if isinstance(listing.files, KeptRows):
        options = replace(options, codec=str(told.get("codec", "auto")) if how is None else str(how))
        listing = _as_asked(listing, listing.files, how, workers, on_error, progress)
    attrs = dict(listing.attrs)
    if options.shuffle:
        attrs |= {"shuffled": True, "seed": options.seed}
    changed = {"chunk_bytes": options.chunk_bytes, "shuffle": attrs["shuffled"], "seed": attrs["seed"]}
    said = {**replace(options, codec="auto").to_dict(), **told, **changed}
    if how is not None or codec != NONE:
        said["codec"] = str(codec)
    elif options.codec == "none":
        said.pop("codec", None)
    attrs["pack_options"] = dump_options(said)
    listing = replace(listing, attrs=attrs)
    workers = 0 if codec == NONE else workers
    if isinstance(listing.files, KeptRows):
        options, codec = replace(options, store=StoreOption("keep")), NONE
    if on_error == "skip" and listing.files is not None:
        masks = listing.masks and replace(listing.masks, files=RowByRow.of(listing.masks.files))
        listing = replace(listing, files=RowByRow.of(listing.files), masks=masks)
    if codec != NONE and on_error == "skip":
        raise OptionError("damaged rows cannot be left out while compressing; leave them out first, without a codec.")
    try:
        if codec == NONE:
            return pack_listing(
                listing, output, options=options, source_name=str(where), workers=workers, on_error=on_error,
                overwrite=overwrite, progress=progress,
            )  # fmt: skip
        return compress_listing(
            listing, output, options=options, source_name=str(where), codec=codec, workers=workers,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    finally:
        close_readers()


def _said_codec(text: str) -> Codec | None:
    """The codec that an option names; None for "keep"."""
    return None if text == "keep" else parse_codec(text, besides=("keep",))


def _compressed_with(files: Sequence[PackedFile], on_error: OnError) -> tuple[Codec, tuple[str, ...]]:
    """What images of one size in files of ours are all compressed with, and what is to be said where they lose that."""
    found = {_images_codec(file) for file in files}
    if found == {NONE}:
        return NONE, ()
    names = ", ".join(file.path.name for file in files)
    if len(found) > 1:
        return NONE, (f"{names}: images are compressed differently, and are stored without a codec now.",)
    if on_error == "skip":
        codec = next(iter(found))
        return NONE, (f"{names}: decompressed, so that damaged rows can be left out; `--codec {codec}` restores it.",)
    return found.pop(), ()


def _images_codec(file: PackedFile) -> Codec:
    """What images of one size in a file of ours are compressed with; of its level only what the file says is known."""
    images = file.fields.get("images")
    if images is None or images.store is not None or file.version is None:
        return NONE
    name = next((name for name in images.filters if name in _CODEC_OF_FILTER), None)
    if name is None:
        return NONE
    told = str(pack_options(file).get("codec", ""))
    codec = _CODEC_OF_FILTER[name]
    return parse_codec(told if told.partition(":")[0] == codec else codec)


def _as_asked(
    listing: Listing,
    rows: KeptRows,
    how: Codec | None,
    workers: int | None,
    on_error: OnError,
    progress: Progress | None,
) -> Listing:
    """A listing of stored rows, without JPEGs that cannot be decoded, and decompressed, where that is wanted."""
    listing = replace(listing, files=replace(rows, plain=how == NONE))
    if on_error == "fail":
        return listing
    bad = undecodable(rows, workers, progress)
    keep = np.setdiff1d(np.arange(len(listing)), np.array(sorted(bad), np.int64))
    if not len(keep):
        raise SourceError(f"Not one of {len(listing)} rows can be decoded, the first: {bad[0]}. Pack them again.")
    left_out = tuple((listing.keys[i], bad[i]) for i in sorted(bad))
    return replace(listing.take(keep), skipped=(*listing.skipped, *left_out))


def _codec_of(files: Sequence[PackedFile]) -> str:
    """The codec for packing rows of one size that keeps masks compressed where packing alone chose so."""

    def chosen(file: PackedFile) -> bool:
        images, masks = file.fields.get("images"), file.fields.get("masks")
        plain = file.version is not None and images is not None and images.offset is not None
        return plain and masks is not None and bool(masks.filters)

    return "auto" if all(map(chosen, files)) else "none"


def _check_apart(files: Sequence[Path], output: Path) -> None:
    """Refuse an output that is one of the inputs, before any work."""
    for file in files:
        if output.exists() and file.exists() and output.samefile(file):
            raise OutputError(f"{output}: is the file to be read. Choose another name.")
