"""A dataset packed as several files, its shards, and the index over them.

The source is listed and surveyed once. Each shard holds rows that follow one another in the order that one file would
have, and is packed like a file of its own: a call after a kill keeps the shards that are complete, and continues the
one that is not.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, MissingFileError, OptionError
from fastload.format.codecs import NONE
from fastload.format.header import IMAGES_OFFSET, PackedFile, open_hdf5
from fastload.format.ragged import ENCODINGS
from fastload.format.writer import dump_options
from fastload.pack.begin import identity_of
from fastload.pack.finish import PackReport, report_of
from fastload.pack.index import IndexReport, index_packed
from fastload.pack.journal import source_table
from fastload.pack.output_url import exists, header_at, packed_at
from fastload.pack.pack_options import PackJob, journal_path, output_exists
from fastload.pack.survey import Survey
from fastload.read.row_table import index_part
from fastload.remote.urls import ObjectPath

PAGE_BYTES = IMAGES_OFFSET  # what a shard's pixels are to be a multiple of


@dataclass(frozen=True)
class ShardOptions:
    """Options for cutting a dataset into shards.

    Attributes:
        count: their number; None: as many as `num_bytes` says.
        num_bytes: most bytes of a shard, about.
        spread: folders that they are spread over; 0: they lie where the index does.
    """

    count: int | None = None
    num_bytes: int | None = None
    spread: int = 0

    def __post_init__(self) -> None:
        if (self.count is None) == (self.num_bytes is None):
            raise OptionError("shards: say how many, or how large: one of `--shards` and `--shard-bytes`.")
        bounds = (("shards", self.count, 1), ("shard-bytes", self.num_bytes, 1), ("spread", self.spread, 0))
        for name, value, least in bounds:
            if value is not None and value < least:
                raise OptionError(f"`--{name} {value}`: give a whole number, {least} or more.")


@dataclass(frozen=True)
class ShardPlan:
    """The shards of a dataset, before they are packed.

    Attributes:
        survey: of the whole dataset.
        bounds: int64 (S + 1,), the first row of each shard in the order of the dataset, and their end.
        chunk_bytes: of each shard's chunks.
        identities: hex, of each shard: of its samples' files, and of what was decided about the whole dataset.
        spread: as in `ShardOptions`.
    """

    survey: Survey
    bounds: NDArray[np.int64]
    chunk_bytes: int
    identities: tuple[str, ...]
    spread: int
    key_bytes: int  # of the dataset's longest key

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def job(self, job: PackJob, number: int) -> PackJob:
        """Returns the job of packing one shard."""
        survey = self.survey
        samples = survey.order[self.bounds[number] : self.bounds[number + 1]]
        listing = survey.listing.take(samples)
        attrs = {
            "shard": _said_of(number, len(self), self.identities[number]),
            "seed": job.options.seed,
            "shuffled": job.options.shuffle,
            "pack_options": dump_options(job.options.to_dict()),
        }
        return replace(
            job,
            output=shard_path(job.output, number, len(self), self.spread),
            listing=replace(listing, attrs={**attrs, **listing.attrs}, notes=(), skipped=()),
            options=replace(job.options, shuffle=False, chunk_bytes=self.chunk_bytes),
            planned={
                "plan": survey.plan,
                "headers": None if survey.headers is None else survey.headers[samples],
                "key_bytes": self.key_bytes,
            },
        )


def shard_path(output: Path, number: int, count: int, spread: int) -> Path:
    """Returns the path of a shard of an index, of `count` shards in so many folders."""
    folder = output.parent / f"{number % spread:02d}" if spread else output.parent
    return folder / f"{output.stem}-{number:05d}-of-{count:05d}{output.suffix or '.h5'}"


def _said_of(number: int, count: int, identity: str) -> str:
    """Returns the attribute `shard` of a shard, by which it is known as planned."""
    return json.dumps({"number": number, "of": count, "plan": identity})


def is_shard(path: Path, number: int, count: int, identity: str) -> bool:
    """Whether a file is the complete shard of that number of a plan."""
    with suppress(FormatError, MissingFileError), header_at(path) as found:
        return bool(found.attrs.get("shard") == _said_of(number, count, identity))
    return False


def plan_shards(job: PackJob, survey: Survey, wanted: ShardOptions) -> ShardPlan:
    """Returns where a dataset is cut into shards. OptionError: there are more shards than rows."""
    num_rows, chunk_bytes = survey.num_samples, job.options.chunk_bytes
    total = int(survey.expected.sum()) if survey.plan is not None else num_rows
    count = wanted.count or -(-total // (wanted.num_bytes or 1))
    if count > num_rows:
        raise OptionError(
            f"{job.source}: {count:,} shards of {num_rows:,} samples: each needs one. Say fewer, or larger ones."
        )
    even = np.arange(count + 1) * num_rows // count
    specs = survey.pixels(num_rows)
    if "images" not in specs:  # rows of varying length, or none: as many bytes in each
        bounds = even
        if survey.plan is not None:
            ends = np.cumsum(survey.expected)
            bounds = np.append(0, np.searchsorted(ends, total * np.arange(1, count + 1) // count, "left") + 1)
            bounds[-1] = num_rows
        steps = [1]
    else:
        spec = specs["images"]
        chunk_rows, step = whole_pages(spec.chunk_rows, spec.row_bytes, num_rows // count)
        if spec.codec == NONE and chunk_rows != spec.chunk_rows:
            chunk_bytes = chunk_rows * spec.row_bytes
        bounds, steps = even, [step, chunk_rows, 1] if spec.codec == NONE else [spec.chunk_rows, 1]
    for step in steps:
        found = np.append((bounds[:-1] + step // 2) // step * step, num_rows)
        if (np.diff(found) > 0).all():
            break
    else:
        found = even
    key_bytes = max(len(key.encode()) for key in survey.listing.keys)
    decided = [identity_of(job), job.on_error, count, chunk_bytes, key_bytes, repr(survey.plan)]
    said, sources = json.dumps(decided, sort_keys=True, default=str), source_table(job.listing)[survey.order]
    identities = tuple(
        xxhash.xxh3_128_hexdigest(f"{said} {first} ".encode() + sources[first:stop].tobytes())
        for first, stop in itertools.pairwise(found.tolist())
    )
    return ShardPlan(survey, found, chunk_bytes, identities, wanted.spread, key_bytes)


def whole_pages(chunk_rows: int, row_bytes: int, most_rows: int) -> tuple[int, int]:
    """Returns rows of a chunk, and of which number each shard has a multiple, so that it fills whole pages.

    The chunk stays as it is unless a shard would have to have more than `most_rows` for it: then it gets fewer rows.
    """
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    factor = 1
    while factor <= min(unit, chunk_rows):
        rows = chunk_rows - chunk_rows % factor
        if (step := math.lcm(rows, unit)) <= most_rows:
            return rows, step
        factor *= 2
    return chunk_rows, math.lcm(chunk_rows, unit)


def pack_shards(job: PackJob, plan: ShardPlan, pack: Callable[[PackJob], PackReport], started: float) -> PackReport:
    """Packs the shards that are not there yet by `pack`, and then writes the index."""
    total, done = plan.survey.num_samples, 0
    reports = []
    for number in range(len(plan)):
        one = plan.job(job, number)
        if not isinstance(one.output, ObjectPath):
            one.output.parent.mkdir(exist_ok=True)
        report = kept_shard(one)
        if report is None:
            before = done

            def progress(stage: str, rows: int, _: int, before: int = before) -> None:
                if job.on_progress:
                    job.on_progress(stage, before + rows, total)

            one = replace(one, on_progress=progress)
            report = packed_at(one, pack) if isinstance(one.output, ObjectPath) else pack(one)
        done = int(plan.bounds[number + 1])
        reports.append(report)
    index = index_packed([report.path for report in reports], job.output, overwrite=job.overwrite)
    return joined_report(plan.survey, reports, index, started)


def joined_report(survey: Survey, reports: Sequence[PackReport], index: IndexReport, started: float) -> PackReport:
    """Returns the report of an index, given its shards' reports, in order."""
    seconds = time.perf_counter() - started
    made = sum(report.num_samples for report in reports if report.chunks_decoded)
    return replace(
        reports[0],
        path=index.path,
        num_samples=index.num_samples,
        image_shape=index.image_shape,
        splits=index.splits,
        converted=_added([survey.converted, *(report.converted for report in reports)]),
        skipped=(*survey.skipped, *(one for report in reports for one in report.skipped)),
        warned=tuple(one for report in reports for one in report.warned),
        notes=tuple(dict.fromkeys([*survey.notes, *(note for report in reports for note in report.notes)])),
        file_bytes=index.num_bytes + index.index_bytes,
        seconds=seconds,
        images_per_s=made / max(seconds, 1e-9),
        decoded_per_s=0.0,
        encodings=_added([report.encodings for report in reports]),
        num_shards=len(reports),
        **{name: sum(getattr(report, name) for report in reports)
           for name in ("chunks", "chunks_kept", "chunks_decoded", "pixel_bytes")},
    )  # fmt: skip


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return dict(total)


def kept_shard(job: PackJob) -> PackReport | None:
    """Returns the report of a shard that an earlier call has completed; None if it is to be packed.

    OutputError: something else lies there, and may not be overwritten.
    """
    at_url = isinstance(job.output, ObjectPath)
    if not exists(job.output) or (not at_url and journal_path(job.output).exists()):
        return None
    with suppress(FormatError), header_at(job.output) as found:
        if found.attrs.get("shard") == job.listing.attrs["shard"]:
            return _report_of_kept(job, found)
    if not job.overwrite:
        raise output_exists(job.output)
    return None


def _report_of_kept(job: PackJob, file: PackedFile) -> PackReport:
    images, plan = file.fields.get("images"), job.planned["plan"] if job.planned else None
    counts, pixel_bytes = dict[str, int](), 0
    masks = file.fields["masks"].dtype.itemsize if "masks" in file.fields else 0
    if images is not None:
        with open_hdf5(file.path) as columns:
            encodings = index_part(columns, file, "images", "encoding")
            height, width, channels = index_part(columns, file, "images", "shape").astype(np.int64).T
        found = np.bincount(encodings, minlength=len(ENCODINGS)).tolist()
        counts = {name: count for name, count in zip(ENCODINGS, found, strict=True) if count}
        pixel_bytes = int((height * width * (channels * images.dtype.itemsize + masks)).sum())
    done = {"converted": {}, "notes": (), "encodings": counts, "pixel_bytes": pixel_bytes}
    done["store"] = "raw" if plan is None else str(plan.option)
    done["chunks"] = -(-file.num_rows // max(1, images.chunk_rows if images else 1))
    return report_of(job, file, done)
