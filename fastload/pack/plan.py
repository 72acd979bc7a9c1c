"""A plan of packing: a dataset that is listed, and where it is cut into shards, if it is to be several files.

`make_plan` makes one of a call of `pack_images`. One file is surveyed when it is packed, under the lock of its journal,
which may hold the headers already. For shards the source is surveyed once; each holds rows that follow one another in
the order that one file would have, and is a file of its own.

`OUT.h5.plan` is such a plan as a file: what any process on any machine needs to pack one of the shards of OUT.h5. It is
a zip. `plan.json` describes it; `00017.npz` is shard 17 as a `PackJob` (`plain`): its samples in order, how each is
read, and all that was decided about the whole dataset. Shards lie where the plan lies, wherever that is mounted.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FastloadError, FormatError, MissingFileError, OptionError, ResumeError, check_choice
from fastload.format.codecs import NONE
from fastload.format.header import IMAGES_OFFSET
from fastload.format.writer import dump_options, writer_name
from fastload.images.decode import decoder_versions
from fastload.options.pack import OnError, PackCall, PackOptions, Progress
from fastload.pack.begin import identity_of
from fastload.pack.journal import source_table
from fastload.pack.output_url import (
    check_url,
    found_object,
    header_at,
    remove_empty,
    upload,
    was_packed,
    work_folder,
)
from fastload.pack.pack_options import PackJob, Whole, checked_output, output_exists
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey
from fastload.remote.ranges import open_binary
from fastload.remote.urls import ObjectPath, is_url
from fastload.sources.listing import Listing
from fastload.sources.mask_classes import with_mask_options
from fastload.sources.open_tree import open_tree
from fastload.system.files import output_errors, sync_folder
from fastload.system.machine import worker_count

PAGE_BYTES = IMAGES_OFFSET  # what a shard's pixels are to be a multiple of
VERSION = 1
SUFFIX = ".plan"
_HEAD = "plan.json"
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # of a zip: the same plan has the same bytes


class Plan(Protocol):
    """What a runner packs: shards by number, from 0."""

    @property
    def num_shards(self) -> int: ...

    def job(self, number: int) -> PackJob:
        """Returns the job of packing one shard."""
        ...


class Surveyor(Protocol):
    """The part of a runner that lists and looks at a source before it is packed."""

    def pool(self, options: PackOptions, processes: int) -> PackPool:
        """Returns the workers of this machine that help to list a source."""
        ...

    def survey(self, job: PackJob) -> Survey:
        """Reads every header of a listing, and decides what each image becomes."""
        ...


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

    @classmethod
    def of(cls, call: PackCall) -> ShardOptions | None:
        """Returns the options of a call; None where it packs one file."""
        if call.shards is None and call.shard_bytes is None and not call.spread and call.engine is None:
            return None
        return cls(call.shards, call.shard_bytes, call.spread)


@dataclass(frozen=True)
class Cut:
    """Where a dataset is cut into shards.

    Attributes:
        survey: of the whole dataset.
        bounds: int64 (S + 1,), the first row of each shard in the order of the dataset, and their end.
        chunk_bytes: of each shard's chunks.
        identities: hex, of each shard: of its samples' files, and of what was decided about the whole dataset.
        spread: as in `ShardOptions`.
        key_bytes: of the dataset's longest key.
    """

    survey: Survey
    bounds: NDArray[np.int64]
    chunk_bytes: int
    identities: tuple[str, ...]
    spread: int
    key_bytes: int

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class PackPlan:
    """A dataset to be packed here.

    Attributes:
        whole: the job of packing all of it as one file.
        cut: where it is cut into shards; None: it becomes one file.
    """

    whole: PackJob
    cut: Cut | None = None

    @property
    def num_shards(self) -> int:
        return 1 if self.cut is None else len(self.cut)

    def job(self, number: int) -> PackJob:
        """Returns the job of packing one shard, whose progress is that of the dataset."""
        job, cut = self.whole, self.cut
        if cut is None:
            return job
        survey, first = cut.survey, int(cut.bounds[number])
        samples = survey.order[first : cut.bounds[number + 1]]
        listing = survey.listing.take(samples)
        attrs = {
            "shard": _shard_attr(number, len(cut), cut.identities[number]),
            "seed": job.options.seed,
            "shuffled": job.options.shuffle,
            "pack_options": dump_options(job.options.to_dict()),
        }

        def progress(stage: str, rows: int, _: int) -> None:
            if job.on_progress:
                job.on_progress(stage, first + rows, survey.num_samples)

        return replace(
            job,
            output=shard_path(job.output, number, len(cut), cut.spread),
            listing=replace(listing, attrs={**attrs, **listing.attrs}, notes=(), skipped=()),
            options=replace(job.options, shuffle=False, chunk_bytes=cut.chunk_bytes),
            on_progress=progress,
            whole=Whole(survey.plan, None if survey.headers is None else survey.headers[samples], cut.key_bytes),
        )


def make_plan(call: PackCall, wanted: ShardOptions | None, surveyor: Surveyor) -> PackPlan:
    """Lists the source of a call; for shards also surveys it, and cuts it. The output is looked at before."""
    from fastload.sources.objects import reads_objects

    source, output, options = call.source, call.output, call.options
    if call.address is not None and call.engine is None:
        raise OptionError(f"`--address {call.address}` names a cluster: say which kind it is, `--engine ray`.")
    if call.parents and not isinstance(output, ObjectPath):
        with output_errors(f"{output}: its folder cannot be made ({{}}). Choose another one."):
            output.absolute().parent.mkdir(parents=True, exist_ok=True)
    if isinstance(output, ObjectPath):
        check_url(output, overwrite=call.overwrite or was_packed(output))
    else:
        output = checked_output(output, call.overwrite, source)
    pool = surveyor.pool(options, worker_count(call.workers if isinstance(source, Path) else call.workers or 0))
    listing = list_samples(source, call.layout, options, call.on_error, pool)
    if call.workers is None and reads_objects(listing):
        pool.workers = 0  # Each process would open the dataset anew, and import torch.
    job = PackJob(_name_of(source), output, listing, options, call.on_error, call.overwrite, call.progress)
    return PackPlan(job) if wanted is None else PackPlan(job, _cut(job, surveyor.survey(job), wanted))


def _name_of(source: object) -> str:
    """Returns the name of a source in messages."""
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__


def list_samples(
    source: str | Path | Sequence[Any], layout: str | None, options: PackOptions, on_error: OnError, pool: PackPool
) -> Listing:
    """Returns the samples of a source, or `limit` of them, spread evenly."""
    # Imported here, as repacking does not need all the layouts.
    from fastload.sources.layouts import LAYOUTS, detect_layout, list_source
    from fastload.sources.objects import list_objects

    check_choice("on_error", on_error, get_args(OnError))
    if isinstance(source, (str, Path)):
        tree = open_tree(source)
        name = layout or detect_layout(tree)[0]
        if name not in LAYOUTS or LAYOUTS[name].decodes:
            pool.start_early()
        listing = list_source(tree, layout, on_error, options.source)
    else:
        listing = list_objects(source, on_error=on_error)
    stored = options.source.boxes_of == "stored"
    listing = with_mask_options(listing, options.masks, _name_of(source), padded=options.pads, stored=stored)
    total = len(listing)
    if options.limit is None or options.limit >= total:
        return listing
    return listing.take(np.arange(options.limit) * total // options.limit)


def _cut(job: PackJob, survey: Survey, wanted: ShardOptions) -> Cut:
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
    return Cut(survey, found, chunk_bytes, identities, wanted.spread, key_bytes)


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


def shard_path(output: Path, number: int, count: int, spread: int) -> Path:
    """Returns the path of a shard of an index, of `count` shards in so many folders."""
    folder = output.parent / f"{number % spread:02d}" if spread else output.parent
    return folder / f"{output.stem}-{number:05d}-of-{count:05d}{output.suffix or '.h5'}"


def _shard_attr(number: int, count: int, identity: str) -> str:
    """Returns the attribute `shard` of a shard, by which it is known as planned."""
    return json.dumps({"number": number, "of": count, "plan": identity})


def is_shard(path: Path, number: int, count: int, identity: str) -> bool:
    """Whether a file is the complete shard of that number of a plan."""
    with suppress(FormatError, MissingFileError), header_at(path) as found:
        return bool(found.attrs.get("shard") == _shard_attr(number, count, identity))
    return False


@dataclass(frozen=True)
class PlanFile:
    """A plan's facts about the whole dataset.

    Attributes:
        path: the plan.
        source: absolute path of the dataset, or its URL.
        num_samples: rows of all shards.
        num_shards: the shards.
        spread: folders that they are spread over; 0: they lie where the plan does.
        identities: of each shard, hex: of its samples' files, and of what was decided about the whole dataset.
        release: of fastload.
        decoder: versions of the libraries that decode.
        temporary: whether a call on an engine made it, which replaces and removes it unasked.
        converted: how many images are changed in kind, by a description.
        skipped: (key, reason) of each sample left out.
        notes: what was recognised in the source, what was absent or ignored, and what was chosen.
    """

    path: Path
    source: str
    num_samples: int
    num_shards: int
    spread: int
    identities: tuple[str, ...]
    release: str
    decoder: str
    temporary: bool
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> PlanFile:
        """Returns what a plan says.

        Raises:
            MissingFileError: it is not there.
            FormatError: it is no plan, or of another release.
        """
        with _opened(path) as archive:
            head = json.loads(archive.read(_HEAD))
            if head.pop("fastload_plan") != VERSION:
                raise FormatError(f"{path}: is a plan of another release of fastload. Make it anew.")
            head["skipped"] = tuple((key, reason) for key, reason in head["skipped"])
            texts = {name: tuple(head[name]) for name in ("identities", "notes")}
            return cls(**{**head, **texts, "path": path})

    @property
    def output(self) -> Path:
        """The index that the shards are to have."""
        return self.path.with_name(self.path.name.removesuffix(SUFFIX))

    def shard(self, number: int) -> Path:
        """Returns the path of a shard."""
        return shard_path(self.output, number, self.num_shards, self.spread)

    def is_packed(self, number: int) -> bool:
        """Whether a shard is there, complete."""
        return is_shard(self.shard(number), number, self.num_shards, self.identities[number])

    def job(self, number: int) -> PackJob:
        """Returns the job of packing a shard.

        Raises:
            OptionError: there is no such shard.
            ResumeError: this process has another release, or other libraries, than the process that made the plan.
        """
        if not 0 <= number < self.num_shards:
            raise OptionError(f"{self.path}: there is no shard {number}; it has 0 to {self.num_shards - 1}.")
        for name, then, now in (
            ("release", self.release, writer_name()),
            ("decoder", self.decoder, decoder_versions()),
        ):
            if then != now:
                raise ResumeError(
                    f"{self.path}: the {name} was {then}, here it is {now}, and shards could differ. Install the same "
                    f"on all machines, or make the plan anew."
                )
        with _opened(self.path) as archive:
            job = from_bytes(archive.read(_member(number)))
            if not isinstance(job, PackJob):
                raise FormatError(f"{self.path}: shard {number} is damaged. Make the plan anew.")
        return replace(job, output=self.shard(number))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens a plan; MissingFileError or FormatError: it is missing, or is no plan."""
    try:
        with open_binary(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except FastloadError:
        raise
    except FileNotFoundError as exc:
        raise MissingFileError(f"{path}: is missing. Make it with `fastload pack ... --plan`.") from exc
    except OSError as exc:
        raise FormatError(f"{path}: cannot be read ({exc.strerror or exc}).") from exc
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as exc:
        raise FormatError(f"{path}: cannot be read as a plan of packing ({exc}). Make it anew.") from exc


def is_plan(path: str | Path) -> bool:
    """Whether a path names a plan, by its ending."""
    return str(path).endswith(SUFFIX)


def plan_path(output: Path) -> Path:
    """Returns the path of an output's plan."""
    return output.with_name(output.name + SUFFIX)


def write_plan(plan: PackPlan, *, temporary: bool = False) -> PlanFile:
    """Writes a plan of shards next to its output; OutputError: another is there, or it cannot be written."""
    job, cut = plan.whole, plan.cut
    assert cut is not None, "a plan of shards"
    path, survey = plan_path(job.output), cut.survey
    there = found_object(path) if isinstance(path, ObjectPath) else None
    if (there or path.exists()) and not job.overwrite:
        before: PlanFile | None = None
        with suppress(FormatError):
            before = PlanFile.read(path)
        if before is None or not before.temporary:
            raise output_exists(path)
    found = PlanFile(
        path=path,
        source=job.source if is_url(job.source) else os.path.abspath(job.source),
        num_samples=survey.num_samples,
        num_shards=len(cut),
        spread=cut.spread,
        identities=cut.identities,
        release=writer_name(),
        decoder=decoder_versions(),
        temporary=temporary,
        converted=survey.converted,
        skipped=survey.skipped,
        notes=survey.notes,
    )
    head = {"fastload_plan": VERSION, **asdict(found)}
    del head["path"]
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    if isinstance(path, ObjectPath):
        part = work_folder(path) / part.name
    try:
        with output_errors(f"{path}: cannot be written ({{}})."):
            with open(part, "xb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    archive.writestr(zipfile.ZipInfo(_HEAD, _FIRST_DATE), json.dumps(head, indent=1))
                    for number in range(len(cut)):
                        one = replace(plan.job(number), output=Path(), overwrite=False, on_progress=None)
                        member = zipfile.ZipInfo(_member(number), _FIRST_DATE)
                        archive.writestr(member, to_bytes(one), zipfile.ZIP_DEFLATED, 1)
                        if job.on_progress:
                            job.on_progress("writing the plan", number + 1, len(cut))
                file.flush()
                os.fsync(file.fileno())
            if not isinstance(path, ObjectPath):
                os.replace(part, path)
                sync_folder(path.absolute().parent)
        if isinstance(path, ObjectPath):
            upload(part, path, before=there, is_same=lambda *_: False)
    finally:
        part.unlink(missing_ok=True)
        if isinstance(path, ObjectPath):
            remove_empty(part.parent)
    return found


def _member(number: int) -> str:
    return f"{number:05d}.npz"


@dataclass(frozen=True)
class SharedPlan:
    """A plan file whose shards any processes on any machines pack, also several the same one.

    Attributes:
        file: the plan.
        overwrite: whether something else that has a shard's name is replaced.
        on_progress: called of a shard by itself.
    """

    file: PlanFile
    overwrite: bool = False
    on_progress: Progress | None = None

    @property
    def num_shards(self) -> int:
        return self.file.num_shards

    def job(self, number: int) -> PackJob:
        return replace(self.file.job(number), overwrite=self.overwrite, on_progress=self.on_progress)
