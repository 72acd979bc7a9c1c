"""Estimates of a surveyed source and of a packed file: what each would be in every encoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastload.estimate.encodings import EncodingChoices, EncodingEstimates, KnownSizes, encodings_of, estimate_encodings
from fastload.estimate.rates import Step, per_second
from fastload.estimate.sample import row_maker, spread
from fastload.format.codecs import NONE, Codec, has_zstd, parse_codec
from fastload.format.header import PIXEL_FIELDS, PackedFile, open_hdf5, read_header, read_shard
from fastload.format.ragged import RAW
from fastload.options.pack import EncodingOption, Progress
from fastload.pack.decisions import Form, RaggedPlan, jpegs_kept_and_made, row_sizes
from fastload.pack.encode import HEADERS
from fastload.pack.survey import Survey
from fastload.read.checked import close_readers
from fastload.read.reader import open_columns, open_rows
from fastload.read.row_table import index_part
from fastload.repack.packed_rows import rows_of
from fastload.sources.listing import Arrays, Masks
from fastload.system.machine import available_cpus

_READ_SECONDS = 0.25


def estimate_survey(
    survey: Survey, folder: Path, *, threads: int | None = None, progress: Progress | None = None
) -> EncodingEstimates | None:
    """Returns what a surveyed source would be in each encoding; takes about 5 seconds.

    Pixels count without gzip, which compresses chunks of several rows; masks as with zstd, row by row, if they are
    compressed at all.

    The disk of the output's folder is measured with a temporary file. One thread for each CPU decodes by default.

    Returns:
        None for a dataset without images, and if no image of the sample can be decoded.
    """
    listing, headers = survey.listing, survey.headers
    if listing.files is None or headers is None or survey.plan is None:
        return None
    plan = survey.plan
    masks: Form | None = None if listing.masks is None else "ragged"
    # Rows of varying length, each encoded by itself.
    image_codec = NONE if plan.image_codec.name == "gzip" else plan.image_codec
    mask_codec = _codec_by_row(compressed=True) if plan.mask_codec.name == "gzip" else plan.mask_codec
    plan = replace(plan, images="ragged", masks=masks, image_codec=image_codec, mask_codec=mask_codec)
    sizes = row_sizes(plan, headers)[survey.samples]
    own, made = jpegs_kept_and_made(
        replace(plan, option=EncodingOption("source")), survey.samples, headers[survey.samples]
    )
    dataset = EncodingChoices(
        row_maker(listing.files, listing.masks, headers, plan),
        survey.samples,
        int(sizes.prod(axis=1).sum()),
        encodings_of(plan, source=survey.options.size is None and bool(np.any(own))),
        plan.dtype,
        plan.mask_dtype,
        remade=bool(np.any(made)),
        compressed="" if plan.image_codec == NONE else plan.image_codec.name,
    )
    room = survey.disk_free if survey.disk_free >= 0 else None
    return estimate_encodings(dataset, folder, room=room, threads=threads, progress=progress)


def estimate_file(
    path: str | Path, *, threads: int | None = None, progress: Progress | None = None
) -> EncodingEstimates | None:
    """Returns what a file has in its present encoding, and would have in each other; takes about 5 seconds.

    Its present sizes are read, not estimated; masks stay as they are stored. The disk is measured with a temporary file
    in the same folder; the file itself is not dropped from memory.

    Returns:
        None if the file holds no images.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read as a packed one.
    """
    file = read_header(path)
    if "images" not in file.fields:
        return None
    images, masks = rows_of(file, "images"), None
    if "masks" in file.fields:
        masks = Masks(rows_of(file, "masks"), np.ones(file.num_rows, np.bool_))
    kept = False  # whether any image is stored other than as raw pixels
    if isinstance(images, Arrays):
        shapes = np.tile(np.array([*images.shape, 1][:3], np.int32), (file.num_rows, 1))
    else:
        with open_columns(file) as hdf5:
            shapes, kept = hdf5["images_shape"][()], bool((hdf5["images_encoding"][()] != RAW).any())
    dtype = np.dtype(file.fields["images"].dtype.newbyteorder("="))
    headers = np.zeros(file.num_rows, HEADERS)
    headers["height"], headers["width"], headers["channels"] = shapes.T
    headers["bits"] = 8 * dtype.itemsize
    threads = threads or available_cpus()
    known, small_masks = _known_sizes(file, threads)
    form: Form | None = "ragged" if masks else None
    plan = RaggedPlan(
        int(shapes[0, 2]),
        dtype,
        EncodingOption(),
        None,
        None,
        "ragged",
        form,
        mask_codec=_codec_by_row(compressed=small_masks),
    )
    if masks is not None:
        plan = replace(plan, mask_dtype=file.fields["masks"].dtype.newbyteorder("="))
    others = encodings_of(plan, source=False)
    dataset = EncodingChoices(
        row_maker(images, masks, headers, plan),
        np.arange(file.num_rows),
        int(shapes[:, :2].astype(np.int64).prod(axis=1).sum()),
        [EncodingOption("keep"), *others] if kept else others,
        dtype,
        plan.mask_dtype,
        known=known,
    )
    try:
        return estimate_encodings(dataset, file.path.absolute().parent, threads=threads, progress=progress)
    finally:
        close_readers()


def _codec_by_row(*, compressed: bool) -> Codec:
    """Returns the codec of masks in rows of varying length that are compressed, or not."""
    return parse_codec("zstd") if compressed and has_zstd() else NONE


def _known_sizes(file: PackedFile, threads: int) -> tuple[KnownSizes, bool]:
    """Returns the sizes of a file's datasets, and whether its masks are compressed."""
    num_bytes, small = dict.fromkeys(PIXEL_FIELDS, 0), False
    with open_columns(file) as hdf5:
        for name in file.fields.keys() & num_bytes:
            filtered = bool(file.fields[name].filters)
            stored = index_part(hdf5, file, name, "bytes").sum()
            num_bytes[name] = _bytes_on_disk(file, name) if filtered else int(stored)
            compressed = filtered or bool((index_part(hdf5, file, name, "encoding") != RAW).any())
            small |= name == "masks" and compressed
    filters = ", ".join(file.fields["images"].filters)
    chunked = (filters, lambda samples: _chunks_per_s(file, samples, threads)) if filters else None
    return KnownSizes(num_bytes["images"], num_bytes["masks"], chunked), small


def _bytes_on_disk(file: PackedFile, name: str) -> int:
    """Returns the bytes of a field's chunks as they are compressed, of all shards."""
    total = 0
    for number in range(len(file.shards.names)):
        with open_hdf5(read_shard(file, number).path) as hdf5:
            total += hdf5[name].id.get_storage_size()
    return total


def _chunks_per_s(file: PackedFile, samples: Sequence[int], threads: int) -> float:
    """Measures images a second, with masks, from compressed chunks in memory; each image decompresses its chunk."""
    fields = [file.fields[name] for name in PIXEL_FIELDS if name in file.fields]
    order = [samples[at] for at in spread(len(samples), len(samples))]

    def make() -> Step:
        outs = {field.name: field.empty(1) for field in fields}

        def step(number: int) -> int:
            reader.gather(np.array([order[number % len(order)]]), outs)
            return 1

        return step

    with closing(open_rows(file, [field.name for field in fields], "pread", cache_chunks=1)) as reader:
        warm_up = make()
        for number in range(len(order)):  # Brings them into memory.
            warm_up(number)
        return per_second(make, sys.maxsize, threads, _READ_SECONDS)
