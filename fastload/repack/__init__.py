"""New packed files from packed ones: other chunks, order, codec or fewer rows (`repack_file`), or several files as one.

Packed files (or other HDF5 files with images) go in, one packed file comes out. `packed_listing` lists the rows of a
file as samples, or some of them, `packed_rows` reads them, `merge` joins several listings. The packer
(`fastload.pack`) then copies the rows as they are, each checked against its digest, and continues an interrupted call.

Read `packed_listing` first. Imports `pack`, `read`, `sources` and below; never the loader or torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import xxhash

from fastload.errors import OptionError, OutputError, ResumeError, SourceError, typed
from fastload.format import CHUNK_BYTES
from fastload.format.codecs import CODEC_CHUNK_BYTES, NONE, Codec, parse_codec
from fastload.format.header import PackedFile, read_header
from fastload.format.writer import dump_options
from fastload.options import from_arguments, takes
from fastload.options.keywords import AppendKeywords, MergeKeywords, RepackKeywords
from fastload.options.pack import EncodingOption, PackOptions
from fastload.options.repack import AppendOptions, MergeOptions, RepackOptions
from fastload.pack import PackJob, PackReport, pack_listing
from fastload.pack.finish import finished_report
from fastload.pack.journal import Journal, source_table
from fastload.pack.pack_options import PartsFacts, checked_output, is_joined, journal_path, of_file_options
from fastload.pack.run import make_file, packing_pool
from fastload.read.checked import close_readers
from fastload.read.identity import check_path
from fastload.read.reader import open_columns
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName, is_url, local_path
from fastload.repack.merge import list_merged
from fastload.repack.packed_listing import choose_rows, list_packed, pack_options, regroup, without_damaged
from fastload.repack.packed_rows import RaggedRows, RowByRow, undecodable
from fastload.sources.listing import Listing, first_few
from fastload.sources.mask_classes import with_mask_options
from fastload.system.text import text_of

__all__ = ["Choice", "append_images", "merge_files", "repack_file"]

_WRITES_HERE = "is a URL, and packed files are written to this machine. Give a path, and copy the file there."
_MERGES_HERE = "only files of this machine are merged. Copy it first: `fastload repack URL OUT.h5`."
_OWN_OPTIONS = ("layout", "workers", "on-error")  # of `fastload append`
_CODEC_OF_FILTER = {"deflate": "gzip", "zstd": "zstd"}


@takes(RepackOptions)
def repack_file(file: FileName, output: str | Path, **options: Unpack[RepackKeywords]) -> PackReport:
    """Writes some or all rows of a packed file as a new one: rows that meet every condition given, or all.

    Classes and their names stay as they are, even if a class has no row left. Rows of another tool's file lie back to
    back in the new one.

    Args:
        file: a packed file or its URL, or another HDF5 file with a dataset `images`.
        output: the file to make.
        {options}

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read.
        SourceError: rows of the file are damaged; it names them.
        OptionError: an option is not accepted for this file, or no row is left.
        OutputError, ResumeError, PackError: as pack_images.
    """
    asked = from_arguments(RepackOptions, options, of="repack_file")
    wanted = None if asked.codec == "keep" else parse_codec(asked.codec, besides=("keep",))
    local_path(output, _WRITES_HERE)
    if not is_url(file):
        _check_not_input([Path(file)], Path(output))
    with open_packed(file) as header:
        return _repack(header, Path(output), asked, wanted)


def _repack(header: PackedFile, output: Path, asked: RepackOptions, wanted: Codec | None) -> PackReport:
    damaged: list[int] = []
    _, listing = list_packed(header, damaged if asked.on_error == "skip" else None)
    chosen, listing = without_damaged(header.path, listing, choose_rows(listing, asked.choice, header.path), damaged)
    in_order = bool(np.all(np.diff(chosen) > 0))
    if (chunk_bytes := asked.chunk_bytes) is None:
        chunk_bytes = int(pack_options(header.attrs).get("chunk_bytes", CHUNK_BYTES))
        if wanted is None and _images_codec(header) != NONE:
            chunk_bytes = header.fields["images"].chunk_rows * header.fields["images"].row_bytes
        elif wanted not in (None, NONE) and not header.ragged:
            chunk_bytes = CODEC_CHUNK_BYTES
    attrs = dict(listing.attrs)
    if len(chosen) < len(listing) or not in_order:
        joined = {"joined": True} if is_joined(attrs) else {}
        attrs["repacked"] = dump_options({**asked.choice.to_dict(), "rows": len(chosen), "of": len(listing), **joined})
    if not asked.shuffle and not in_order:
        attrs |= {"shuffled": False, "seed": 0}
    part = regroup(replace(listing, attrs=attrs), chosen)
    options = PackOptions(seed=asked.seed if asked.shuffle else 0, shuffle=asked.shuffle, chunk_bytes=chunk_bytes)
    job = PackJob(header.name, output, part, options, asked.on_error, asked.overwrite, asked.progress)
    # A fork, or a worker that the rows are sent to, has no client of an object store.
    workers = asked.workers if header.remote is None else 0
    try:
        return pack_listing(*_copying(job, [header], wanted, workers))
    finally:
        close_readers()


@takes(MergeOptions)
def merge_files(files: Sequence[str | Path], output: str | Path, **options: Unpack[MergeKeywords]) -> PackReport:
    """Writes the rows of several packed files as one.

    Splits are joined by name: train holds the first file's rows, then the second's, and so on. Where class names
    differ, classes are numbered by the union of the names. The file does not count as shuffled unless `shuffle` is
    given: the rows of one file lie behind the other's.

    Args:
        files: at least two packed files with the same fields, shapes and dtypes.
        output: the file to make.
        {options}

    Raises:
        SourceError: two files differ in a way that one file cannot hold; or rows are damaged.
        OptionError, MissingFileError, FormatError, OutputError, ResumeError, PackError: as `repack_file`.
    """
    asked = from_arguments(MergeOptions, options, of="merge_files")
    for name in (*files, output):
        local_path(name, _MERGES_HERE)
    _check_not_input(list(map(Path, files)), Path(output))
    wanted = None if asked.codec == "keep" else parse_codec(asked.codec, besides=("keep",))
    listing = list_merged(files, skip_damaged=asked.on_error == "skip")
    packing = PackOptions(seed=asked.seed if asked.shuffle else 0, shuffle=asked.shuffle, chunk_bytes=asked.chunk_bytes)
    headers = [read_header(file) for file in files]
    names = ", ".join(header.path.name for header in headers)
    job = PackJob(names, Path(output), listing, packing, asked.on_error, asked.overwrite, asked.progress)
    try:
        return pack_listing(*_copying(job, headers, wanted, asked.workers))
    finally:
        close_readers()


@takes(AppendOptions)
def append_images(output: str | Path, source: str | Path, **options: Unpack[AppendKeywords]) -> PackReport:
    """Packs more images and appends them to a packed file, split by split, as one file in its place.

    They are packed with the options of the file, whose seed shuffles them among themselves; classes may be new ones.
    The file is written anew and replaced when it is complete, so that running readers keep the old content. Until then
    the new part lies next to it, as `.OUT.h5.append-DIGEST`, and the same call continues an interrupted one. Nobody
    else packs to the file meanwhile: another call is a PackError.

    Args:
        output: the packed file.
        source: the dataset to add, as for `pack_images`.
        {options}

    Raises:
        SourceError: the source cannot be packed, or its images do not fit the file's.
        MissingFileError, FormatError, OptionError, OutputError, ResumeError, PackError: as pack_images.
    """
    started = time.perf_counter()
    asked = from_arguments(AppendOptions, options, of="append_images")
    local_path(output, "packed files of an object store are not written to. Append to the file it was copied from.")
    if (file := read_header(output)).version is None:
        raise OptionError(
            f"{output}: fastload did not write it, so it is not known how to add images. Pack it first: `fastload pack "
            f"{typed(output)} OUT.h5`."
        )
    if file.is_index:
        raise OptionError(
            f"{output}: is an index, whose shards stay as they are. Pack the images to a file of their own in its "
            f"folder, and make an index of all: `fastload index`."
        )
    output = checked_output(output, True)
    with closing(Journal(journal_path(output))) as journal:  # which nobody else has until the end
        try:
            report = _append(output, source, asked, journal)
        except BaseException:
            if journal.is_empty():
                journal.remove()
            raise
    seconds = time.perf_counter() - started
    return replace(report, seconds=seconds, images_per_s=report.images_per_s / max(seconds, 1e-9), decoded_per_s=0.0)


def _append(output: Path, source: str | Path, asked: AppendOptions, journal: Journal) -> PackReport:
    """Does what `append_images` does, under the journal's lock; `images_per_s` is how many images were added."""
    from fastload.sources.layouts import list_source  # which no other copy needs

    file = read_header(output)
    options, own = _options_of_more(file), f"`fastload append` packs with the options of {output}"
    masks = file.fields.get("masks")
    padded = options.pads and masks is not None and "ignore_index" in masks.attrs
    with of_file_options(own, _OWN_OPTIONS):
        with options.accepting_large(1):
            labels = file.fields.get("labels")
            classes = labels.names if labels is not None else ()
            listing = list_source(source, asked.layout, asked.on_error, options.source, classes)
        listing = with_mask_options(listing, options.masks, source, padded=padded)
    if masks is not None and listing.masks is not None:  # also where all of the new ones are small
        listing = replace(listing, masks=replace(listing.masks, dtype=masks.dtype.newbyteorder("=")))
    # Of the samples alone: the file that it was begun for is gone when one that was killed at its end is continued.
    digest = xxhash.xxh3_64_hexdigest(source_table(listing).tobytes())
    more = output.with_name(f".{output.name}.append-{digest}")
    job = PackJob(
        f"{output.name}, {source}", output, listing, options, asked.on_error, True, asked.progress, parts=(more,)
    )
    found = journal.read()
    if report := finished_report(job, journal, found):
        return report
    if os.path.lexists(job.part) and (found is None or not found.head.get("parts")):
        raise ResumeError(
            f"{job.part}: left by an unfinished pack of something else. Finish that one by its command, or remove "
            f"{job.part.name} and {journal.path.name}."
        )
    _check_new_keys(file, listing, source)
    with of_file_options(own, _OWN_OPTIONS):
        packed = pack_listing(
            PackJob(str(source), more, listing, options, asked.on_error, True, asked.progress, is_part=True),
            asked.workers,
        )
    check_path(file)  # its names were compared, maybe hours ago
    try:
        joined = list_merged([output, more], skip_damaged=asked.on_error == "skip")
    except SourceError as exc:
        more.unlink()
        journal_path(more).unlink()
        differences = str(exc).removeprefix("Files that differ cannot be merged: ").partition(". Pack both")[0]
        differences = differences.replace(str(more), str(source)).rstrip(".")
        raise SourceError(
            f"{source}: its samples do not fit {output}: {differences}. Bring them to the same form, or pack both "
            f"together."
        ) from exc
    added = packed.num_samples
    job = replace(
        job,
        listing=replace(
            joined,
            skipped=(*packed.skipped, *joined.skipped),
            notes=tuple(note.replace(more.name, str(source)) for note in joined.notes),
            attrs={**joined.attrs, "repacked": dump_options({"appended": added, "to": file.num_rows})},
        ),
        options=PackOptions(shuffle=False, chunk_bytes=options.chunk_bytes),
        of_parts=PartsFacts(packed.converted, packed.warned),
    )
    try:
        # The file keeps its options, by which more may be appended.
        job, workers = _copying(job, [file, read_header(more)], None, asked.workers, pack_options(file.attrs))
        with packing_pool(job, workers) as pool:
            return replace(make_file(job, journal, pool, time.perf_counter()), images_per_s=added)
    finally:
        close_readers()


def _check_new_keys(file: PackedFile, listing: Listing, source: str | Path) -> None:
    """Raises SourceError for samples that the file has already, by their names."""
    with open_columns(file) as hdf5:
        known = {text_of(key) for key in hdf5["key"][()].tolist()}
    if twice := [key for key in listing.keys if key in known]:
        raise SourceError(
            f"{source}: {len(twice):,} of its {len(listing):,} samples have names that are in {file.path} already: "
            f"{first_few(twice)}. Give the folder of the new ones only, or give them other names."
        )


def _options_of_more(file: PackedFile) -> PackOptions:
    """Returns the options by which more images are packed like a file's images."""
    options, images, masks = PackOptions.of_file(file), file.fields.get("images"), file.fields.get("masks")
    if images is not None:
        # Gray images become RGB among such, as when all are packed at once.
        mode = "rgb" if options.mode is None and images.shape[2] == 3 else options.mode
        options = replace(options, mode=mode, varied=images.varied)
    if masks is not None and options.masks.values == "auto" and not options.masks.palette:
        # What was found out then holds now: values that became classes, or none.
        values = masks.attrs.get("source_values", ())
        options = replace(options, masks=replace(options.masks, values=",".join(map(str, values)) or "keep"))
    return replace(options, limit=None)


def _copying(
    job: PackJob,
    headers: Sequence[PackedFile],
    wanted: Codec | None,
    workers: int | None,
    options_kept: dict[str, Any] | None = None,
) -> tuple[PackJob, int | None]:
    """Returns the job of copying rows from these files, with the options they were packed with that still hold.

    And the workers for it: rows that are not compressed are copied by one thread.

    `wanted`: the codec asked for; None keeps the current one. `options_kept` become the file's `pack_options`.
    """
    listing, options, skips = job.listing, job.options, job.on_error == "skip"
    packed_with = pack_options(listing.attrs)
    codecs = {_images_codec(header) for header in headers}
    # The codec for images of one size; options.codec is the masks' where images have none.
    codec, rows = NONE if len(codecs) > 1 else codecs.pop(), listing.files
    if wanted is not None:
        codec = wanted
    elif codecs:
        note = f"{job.source}: images are compressed differently, and are stored without a codec now."
        listing = replace(listing, notes=(*listing.notes, note))
    if isinstance(rows, RaggedRows):
        now = str(packed_with.get("codec", "auto")) if wanted is None else str(wanted)
        options = replace(options, codec=now, store=EncodingOption("keep"))
        listing = replace(listing, files=replace(rows, plain=wanted == NONE))
        if skips:
            bad = undecodable(rows, workers, job.on_progress)  # JPEGs
            if len(bad) == len(listing):
                raise SourceError(f"Not one of {len(bad)} rows can be decoded, the first: {bad[0]}. Pack them again.")
            left_out = tuple((listing.keys[i], bad[i]) for i in sorted(bad))
            keep = np.delete(np.arange(len(listing)), sorted(bad))
            listing = replace(listing.take(keep), skipped=(*listing.skipped, *left_out))
    elif codec != NONE:
        options = replace(options, codec=str(codec), store=EncodingOption("keep") if rows is not None else None)
    else:
        # Masks are compressed anew if the packer chose to compress them but not the images.
        fields = [header.fields if header.version is not None else {} for header in headers]
        chosen = all(
            "images" in each and each["images"].offset is not None and "masks" in each and each["masks"].filters
            for each in fields
        )
        options = replace(options, codec="auto" if chosen and wanted is None else "none")
    attrs = dict(listing.attrs)
    if options.shuffle:
        attrs |= {"shuffled": True, "seed": options.seed}
    changed = {"chunk_bytes": options.chunk_bytes, "shuffle": attrs["shuffled"], "seed": attrs["seed"]}
    given = {**replace(options, codec="auto", store=None).to_dict(), **packed_with, **changed}
    if wanted is not None or codec != NONE:
        given["codec"] = str(codec)
    elif options.codec == "none":
        given.pop("codec", None)
    listing = replace(listing, attrs={**attrs, "pack_options": dump_options(options_kept or given)})
    if skips and listing.files is not None:
        masks = listing.masks and replace(listing.masks, files=RowByRow.of(listing.masks.files))
        listing = replace(listing, files=RowByRow.of(listing.files), masks=masks)
    return replace(job, listing=listing, options=options), 0 if codec == NONE else workers


def _images_codec(file: PackedFile) -> Codec:
    """Returns the codec of images of one size in a packed file; its level only if the file's options have it."""
    images = file.fields.get("images")
    if images is None or file.ragged or file.version is None:
        return NONE
    codec = next((_CODEC_OF_FILTER[name] for name in images.filters if name in _CODEC_OF_FILTER), "none")
    option = str(pack_options(file.attrs).get("codec", ""))
    return parse_codec(option if option.partition(":")[0] == codec else codec)


def _check_not_input(files: Sequence[Path], output: Path) -> None:
    """Raises OutputError for an output that is one of the inputs, before any work."""
    for file in files:
        if output.exists() and file.exists() and output.samefile(file):
            raise OutputError(f"{output}: is the file to be read. Choose another name.")
