"""Packing: a dataset as it lies on disk becomes one HDF5 file of chunked pixels or encoded images.

`pack_images` takes a source (folder, archive, table, dataset object) and an output path. It lists the samples, reads
every header (`survey`, `decisions`), lets worker processes make and write rows (`pool`, `pack_worker`,
`encode`), and gives the finished file its metadata and its name (`finish`). It returns a `PackReport`. Its arguments
travel as one `PackCall`; the command makes one too.

Read `engine` first: how rows are cut into tasks, and where they are written. Unfinished work lies in
`OUT.h5.part` and `OUT.h5.journal`, and the same call continues it after a kill (`begin`, `journal`). `shards` packs a
dataset as several files, and `index` makes one dataset of them. Other machines pack shards by a `plan_file`, nodes of a
cluster by `on_engine`. `unpacked` reads a folder as the packed file that is being made of it.

Imports `sources`, `images`, `format` and below, and in `unpacked` also `read`; never the dataset, the loader or torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

import numpy as np

from fastload.errors import OptionError, PackError, check_choice, check_whole
from fastload.options import takes
from fastload.options.keywords import PackKeywords
from fastload.options.pack import OnError, PackCall, PackOptions, Progress, pack_call
from fastload.pack.begin import begin_or_resume, discard, free_bytes
from fastload.pack.engine import make_rows
from fastload.pack.finish import PackReport, finish, finished_report
from fastload.pack.journal import Journal
from fastload.pack.on_engine import check_nodes, headers_on, pack_on
from fastload.pack.output_url import check_url, disk_of, packed_at, was_packed
from fastload.pack.pack_options import KEPT, PackJob, checked_output, journal_path
from fastload.pack.plan_file import PlanFile, index_shards, pack_planned, planned_file, write_plan
from fastload.pack.pool import PackPool
from fastload.pack.shards import ShardOptions, ShardPlan, joined_report, pack_shards, plan_shards
from fastload.pack.survey import Survey, survey_listing
from fastload.remote.urls import ObjectPath, Remote, path_of, requests_as
from fastload.sources.listing import Listing, only_arrays
from fastload.sources.mask_classes import with_mask_options
from fastload.sources.open_tree import open_tree
from fastload.system.files import output_errors
from fastload.system.machine import worker_count

__all__ = [
    "PackJob",
    "PackOptions",
    "PackReport",
    "Survey",
    "pack_images",
    "pack_listing",
    "pack_shard",
    "plan_images",
    "run_pack",
    "run_plan",
    "survey_source",
]


@takes(PackCall)
def pack_images(source: str | Path | Sequence[Any], output: str | Path, **options: Unpack[PackKeywords]) -> PackReport:
    """Packs a dataset of images into one HDF5 file.

    The same call continues an interrupted one: chunks that are packed already are checked and kept.

    Args:
        source: a folder, .zip, .tar, table or array file in a known layout (`fastload layouts` lists them), or the URL
            of one, such as s3://bucket/train; a dataset of a library by its name, "torchvision:Flowers102" with `root`,
            or "hf:NAME" if Hugging Face has cached it here; or any object with a length whose items are
            (image, label) or dicts, such as a torchvision dataset: PIL images, uint8 or uint16 arrays (H, W[, C]),
            encoded bytes, paths; or a mapping of splits to such objects. Each item that is no path is read twice and
            must be the same both times.
        output: the file to make. Until it is complete, `.part` and `.journal` files lie next to it, and for a time
            `.masks` and `.meta`. Or its URL: it is made in a folder `pack-...` in `remote.cache`, each shard by
            itself, then uploaded, and removed there.
        {options}

    Raises:
        SourceError: the source cannot be packed as it is.
        OptionError: an argument is not accepted.
        OutputError: the output exists, or cannot be written.
        RemoteError: a source or an output behind a URL was not reached, or access is refused.
        ResumeError: an unfinished pack of another source, option or release is in the way.
        PackError: a worker died, or another process packs to the same output.
    """
    return run_pack(pack_call(source, output, options))


def run_pack(call: PackCall) -> PackReport:
    """Packs as a call of `pack_images` says."""
    started = time.perf_counter()
    with requests_as(call.remote):
        if call.shards is None and call.shard_bytes is None and not call.spread and call.engine is None:
            with _listed(call) as (job, pool):
                if isinstance(job.output, ObjectPath):
                    return replace(
                        packed_at(job, lambda here: _run(here, pool, started)), seconds=time.perf_counter() - started
                    )
                return _run(job, pool, started)
        if call.engine is not None:
            check_choice("engine", call.engine, ("ray",))
            _require_path(call.source)
            return _pack_on_engine(call, started)
        return pack_shards(*_planned(call), partial(pack_listing, workers=call.workers), started)


@takes(PackCall)
def plan_images(source: str | Path | Sequence[Any], output: str | Path, **options: Unpack[PackKeywords]) -> PlanFile:
    """Lists and surveys a dataset, and writes how it is packed as shards to `OUT.h5.plan`, for `pack_shard`.

    Args:
        source: as in `pack_images`.
        output: the index that the shards are to have, or its URL; they will lie in its folder.
        options: as for `pack_images`, with `shards` or `shard_bytes`.

    Raises:
        SourceError: the source cannot be packed as it is.
        OptionError: an option is not accepted, or other machines cannot read the source.
        OutputError: the plan exists, or cannot be written.
    """
    return run_plan(pack_call(source, output, options))


def run_plan(call: PackCall) -> PlanFile:
    """Writes the plan of what a call of `pack_images` would pack as shards."""
    _require_path(call.source)
    if call.engine is not None:
        raise OptionError("a plan is made by this machine: `--plan` and `--engine` do not go together.")
    with requests_as(call.remote):
        return write_plan(*_planned(call))


def _require_path(source: object) -> None:
    if not isinstance(source, (str, Path)):
        raise OptionError(
            f"a {type(source).__name__} exists in this process only, and other machines cannot read samples from it. "
            f"Pack it here, without a plan or an engine, or give the path of a dataset that they see."
        )


def pack_shard(
    plan: str | Path | PlanFile,
    number: int,
    *,
    workers: int | None = 0,
    overwrite: bool = False,
    remote: Remote | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Packs one shard of a plan, on any machine that sees the plan and the source; a complete one is kept as it is.

    Any number of processes may pack the same shard at once: they write the same bytes. When all shards are there,
    `index_plan` or `fastload index OUT.h5.plan -o OUT.h5` makes one dataset of them.

    Args:
        plan: made by `fastload pack ... --plan` or `plan_images`; its path or URL.
        number: of the shard, from 0.
        workers: processes that decode; 0: this one does, None: one for each CPU.
        overwrite: pack it anew, also where it or something else has its name.
        remote: how objects behind URLs are requested; None: `Remote()`.
        progress: called with (stage, done, total).

    Raises:
        MissingFileError, FormatError: the plan is missing, or none.
        ResumeError: it was made by another release, or with other libraries, so that shards could differ.
        OptionError: there is no shard of that number.
        SourceError: the source cannot be packed as it is, or has changed since.
        OutputError: something else has the shard's name, or it cannot be written.
    """
    check_whole("number", number, least=0)
    packing = partial(pack_listing, workers=workers)
    with requests_as(remote):
        found = plan if isinstance(plan, PlanFile) else PlanFile.read(path_of(plan))
        return pack_planned(found, number, packing, progress, overwrite=overwrite, keep=not overwrite)


def _pack_task(task: tuple[str, int, bool, Remote], report: Callable[[int], None]) -> PackReport:
    """Packs a shard on a node."""
    path, number, overwrite, remote = task

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "packing":
            report(done)

    packing = partial(pack_listing, workers=0)
    with requests_as(remote):
        plan = PlanFile.read(path_of(path))
        found = pack_planned(plan, number, packing, progress, overwrite=overwrite, keep=True)
    report(found.num_samples)
    return found


def _pack_on_engine(call: PackCall, started: float) -> PackReport:
    wanted = ShardOptions(call.shards, call.shard_bytes, call.spread)  # refused before anything is connected
    from fastload.system.ray_cluster import RayCluster

    with RayCluster(call.address) as engine:
        with _listed(call) as (job, pool):
            check_nodes(job, engine)
            pool.use(job.listing)
            survey = survey_listing(job, pool, headers_on(engine, job.listing, job.on_progress))
        with planned_file(job, plan_shards(job, survey, wanted)) as file:
            reports = pack_on(engine, file, _pack_task, job.on_progress, overwrite=job.overwrite)
            index = index_shards(file, job.output, overwrite=job.overwrite)
    return joined_report(survey, reports, index, started)


@contextmanager
def _listed(call: PackCall) -> Iterator[tuple[PackJob, PackPool]]:
    """Lists the source of a call; gives the job, and the pool that packs it."""
    source, output, options, on_error, overwrite = call.source, call.output, call.options, call.on_error, call.overwrite
    from fastload.sources.objects import reads_objects

    if call.address is not None and call.engine is None:
        raise OptionError(f"`--address {call.address}` names a cluster: say which kind it is, `--engine ray`.")
    if call.parents and not isinstance(output, ObjectPath):
        with output_errors(f"{output}: its folder cannot be made ({{}}). Choose another one."):
            output.absolute().parent.mkdir(parents=True, exist_ok=True)
    if isinstance(output, ObjectPath):
        check_url(output, overwrite=overwrite or was_packed(output))
    else:
        output = checked_output(output, overwrite, source)
    processes = worker_count(call.workers if isinstance(source, Path) else call.workers or 0)
    with options.accepting_large(processes), PackPool(processes) as pool:
        listing = _list_samples(source, call.layout, options, on_error, pool)
        if call.workers is None and reads_objects(listing):
            pool.workers = 0  # Each process would open the dataset anew, and import torch.
        yield PackJob(_name_of(source), output, listing, options, on_error, overwrite, call.progress), pool


def _planned(call: PackCall) -> tuple[PackJob, ShardPlan]:
    """Returns the job of a call, and the shards that it is cut into."""
    wanted = ShardOptions(call.shards, call.shard_bytes, call.spread)  # refused before the source is read
    with _listed(call) as (job, pool):
        pool.use(job.listing)
        survey = survey_listing(job, pool)
    return job, plan_shards(job, survey, wanted)


def pack_listing(job: PackJob, workers: int | None = None, journal: Journal | None = None) -> PackReport:
    """Packs a listing that is made already; otherwise as `pack_images`.

    `journal`: the output's, where the caller has it locked.
    """
    started = time.perf_counter()
    job = replace(job, output=checked_output(job.output, job.overwrite))
    processes = worker_count(workers)
    sharers = worker_count(workers or None) if job.alone else processes  # as a rule each CPU has an attempt at a shard
    with job.options.accepting_large(sharers), PackPool(processes) as pool:
        return _run(job, pool, started, journal)


def _run(job: PackJob, pool: PackPool, started: float, held: Journal | None = None) -> PackReport:
    """Begins or continues a pack, under the journal's lock, and returns the report of the finished file."""
    pool.use(job.listing)
    copies = job.options.size is None and job.options.mode is None and only_arrays(job.listing)
    if copies or job.listing.files is None:
        pool.workers = 0  # Copying arrays takes less time than sending tasks.
    with nullcontext(held) if held else closing(Journal(journal_path(job.output), alone=job.alone)) as journal:
        found = journal.read()
        try:
            if report := finished_report(job, journal, found):
                return replace(report, seconds=time.perf_counter() - started)
            tasks, records = begin_or_resume(job, journal, found, pool)
        except BaseException:
            if not os.path.lexists(job.part):
                discard(job, found)
                journal.remove()  # Nothing was begun, so there is nothing to continue.
            elif journal.is_empty():
                journal.remove()
            raise
        if tasks.survey.plan is not None and tasks.survey.plan.special and not pool.workers:
            pool.local_threads = pool.threads  # Encoding releases the GIL, and takes longer than copying.
        kept, rows_kept = tasks.chunks_of(records.values()), sum(record.count for record in records.values())
        begun = time.perf_counter()
        try:
            make_rows(tasks, journal, pool, records)
        except PackError as exc:  # a worker died
            raise PackError(f"{exc} {KEPT}") from exc
        making_s = time.perf_counter() - begun
        report = finish(tasks, records, journal, pool.threads)
        seconds, made = time.perf_counter() - started, tasks.survey.num_samples - rows_kept
        return replace(
            report, seconds=seconds, chunks_kept=kept, chunks_decoded=report.chunks - kept,
            images_per_s=made / max(seconds, 1e-9), decoded_per_s=made / max(making_s, 1e-9),
        )  # fmt: skip


def survey_source(
    source: str | Path,
    output: str | Path | None = None,
    *,
    layout: str | None = None,
    options: PackOptions | None = None,
    workers: int | None = 0,
    on_error: OnError = "fail",
    progress: Progress | None = None,
) -> Survey:
    """Returns what packing this source would do, without writing anything (`fastload pack --dry-run`).

    Raises:
        SourceError, OptionError: as pack_images.
    """
    options = options or PackOptions()
    with options.accepting_large(worker_count(workers)), PackPool(worker_count(workers)) as pool:
        listing = _list_samples(source, layout, options, on_error, pool)
        pool.use(listing)
        survey = survey_listing(PackJob(str(source), Path(), listing, options, on_error, on_progress=progress), pool)
    if output is None:
        return survey
    where = path_of(output)
    return replace(
        survey, disk_free=free_bytes(disk_of(where) / where.name if isinstance(where, ObjectPath) else where)
    )


def _name_of(source: object) -> str:
    """Returns the name of a source in messages."""
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__


def _list_samples(
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
