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

import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fastload.errors import OptionError, PackError, check_choice, check_whole
from fastload.format.writer import CHUNK_BYTES
from fastload.pack.begin import begin_or_resume, discard, free_bytes
from fastload.pack.engine import make_rows
from fastload.pack.finish import PackReport, finish, finished_report
from fastload.pack.journal import Journal
from fastload.pack.on_engine import check_nodes, headers_on, pack_on
from fastload.pack.output_url import check_url, disk_of, packed_at, was_packed
from fastload.pack.pack_options import (
    KEPT,
    Bits,
    Fit,
    Mode,
    OutsideBoxes,
    PackCall,
    PackJob,
    PackOptions,
    Progress,
    checked_output,
    journal_path,
    pack_call,
)
from fastload.pack.plan_file import PlanFile, index_shards, pack_planned, planned_file, write_plan
from fastload.pack.pool import PackPool
from fastload.pack.shards import ShardOptions, ShardPlan, joined_report, pack_shards, plan_shards
from fastload.pack.survey import Survey, survey_listing
from fastload.remote.urls import ObjectPath, Remote, path_of, requests_as
from fastload.sources.listing import BoxesOf, BoxForm, Listing, MasksWanted, OnError, only_arrays
from fastload.sources.mask_classes import MaskSize, with_mask_options
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


def pack_images(
    source: str | Path | Sequence[Any],
    output: str | Path,
    *,
    layout: str | None = None,
    masks: MasksWanted = "auto",
    mask_size: MaskSize = "same",
    mask_values: str = "auto",
    palette: str | Path | None = None,
    ignore_index: int | str | None = None,
    mask_files: str = "",
    labels: Sequence[str] = (),
    image_column: str = "",
    split_column: str = "",
    captions: str = "all",
    root: str | Path | None = None,
    boxes: BoxForm = "auto",
    boxes_of: BoxesOf = "auto",
    download: bool = False,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    mode: Mode | None = None,
    bits: Bits | None = None,
    store: str | None = None,
    max_size: int | None = None,
    codec: str = "auto",
    workers: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    shards: int | None = None,
    shard_bytes: int | None = None,
    spread: int = 0,
    engine: Literal["ray"] | None = None,
    address: str | None = None,
    limit: int | None = None,
    outside_boxes: OutsideBoxes = "refuse",
    on_error: OnError = "fail",
    strict: bool = False,
    allow_large_images: bool = False,
    overwrite: bool = False,
    parents: bool = False,
    remote: Remote | None = None,
    progress: Progress | None = None,
) -> PackReport:
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
        layout: name of the layout; recognised by default.
        masks: "auto": masks that are there as files; "none"; "semantic" or "instance": masks of this kind, drawn from
            polygons if the layout has no files of them; "panoptic": COCO's, with columns of their segments.
        mask_size: "same": masks have the size of their images; "image": masks with the proportions of their images,
            within 1 %, are resized to it, each value the nearest one.
        mask_values: which values of masks are which classes, in order, such as "0,255" or "0=background,255=person";
            they become 0, 1, ...; "keep": values stay; "auto": masks of 0 and 255 become 0 and 1, others stay.
        palette: file with the colour of each class (red, green, blue, name), for masks of colours.
        ignore_index: the value of masks, or the class of the palette, that means no class; it becomes the file's
            `ignore_index`, 255 unless the dataset has one.
        mask_files: pattern of the paths of the masks, in which `*` stands for any characters, where images have several
            kinds of them, such as `semantic/*`; by default found by their names.
        labels: columns of a table that hold labels; by default those with a usual name.
        image_column: column of a table that names or holds the images.
        split_column: column of a table that names the split.
        captions: "all": texts of images are packed as `caption`; "none"; or the most bytes of one, such as "512":
            longer ones are cut.
        root: folder that a table's paths are relative to, or that torchvision's data lie in.
        download: let torchvision fetch missing files into `root`.
        boxes: form of the boxes in a table or in COCO's files: "xyxy" (two corners; "yxyx": y before x), "xywh" (a
            corner, width and height), "cxcywh" (the middle, width and height); by default what the format says.
        boxes_of: which image boxes, points, polygons and masks were drawn on: "upright", as it is packed; "stored", as
            its file stores it, before its EXIF orientation turns it; "declared", of the size that the annotations
            declare and that the file has no more, so that they are scaled. By default "upright", and an image of
            another size than declared, or that EXIF turns while its mask fits before and after, is an error, or with
            on_error "skip" left out.
        size: height and width of every image, one number for a square; by default each image keeps its size.
        fit: "crop": resize to cover, cut the middle out; "pad": resize to fit inside, black around; "stretch".
        mode: "rgb", "gray" or "rgba" converts; by default gray if all images are gray, else RGB.
        bits: 8 keeps the high byte of 16-bit images, 16 requires them; by default 16 if all images have them.
        store: "raw": pixels, the default; "jpeg" or "jpeg:QUALITY": every image encoded as JPEG; "source": the bytes
            of the file where it is a JPEG, without a second loss unless `max_size` makes it smaller; "mixed:FRACTION":
            this fraction of the rows as JPEG, the others as pixels.
        max_size: limit for an image's shorter side in pixels; larger images are resized to it. Not with `size`. A JPEG
            resized under store="source" is encoded again, with quality 90.
        codec: lossless compression of all but JPEG: "none", "gzip[:LEVEL]", "zstd[:LEVEL]"; "auto": zstd for masks if
            it makes them half as large.
        workers: processes that decode, by default one for each CPU; 0 decodes in this process.
        seed: seed of the order of rows.
        shuffle: shuffle rows within each split; False keeps the order of the source.
        chunk_bytes: the size that chunks should have.
        shards: write so many files, OUT-00000-of-0000N.h5 and so on, and the output as an index over them, which is
            read as one dataset.
        shard_bytes: the same, with as many files as give each about this size.
        spread: put these files into so many folders in the output's folder; 0: into that folder itself.
        engine: "ray": read headers and pack the files on the nodes of a Ray cluster, which see source and output.
        address: of that cluster; None: the cluster that this machine belongs to; "local": this machine alone.
        limit: pack only so many samples, spread evenly over the source.
        outside_boxes: boxes that reach out of their image by more than a pixel: "refuse": an error, or with on_error
            "skip" those images are left out; "clip": cut to the image; "keep": packed as they are.
        on_error: "fail" stops at an image that cannot be decoded, "skip" leaves it out and lists it.
        strict: leave out and list JPEGs that libjpeg warns of, as of corrupt data, though it can decode them; by
            default they are packed, and listed. With store="source" this decodes all of them, which takes much longer.
        allow_large_images: pack images above 178,956,970 pixels, too, which are refused by default: a file of a few
            kB can claim to be one, and fill the memory. Of a JPEG a half, a quarter or an eighth of the size is decoded
            where `size` or `max_size` allow it; other files need up to 16 bytes a pixel (64 with 16 bits a channel),
            and are refused where a worker's share of the memory does not suffice.
        overwrite: replace an output that exists, and discard an unfinished pack of something else.
        parents: make the output's folder where it does not exist.
        remote: how objects of a source or an output behind a URL are requested; None: `Remote()`.
        progress: called with (stage, done, total).

    Raises:
        SourceError: the source cannot be packed as it is.
        OptionError: an argument is not accepted.
        OutputError: the output exists, or cannot be written.
        RemoteError: a source or an output behind a URL was not reached, or access is refused.
        ResumeError: an unfinished pack of another source, option or release is in the way.
        PackError: a worker died, or another process packs to the same output.
    """
    return run_pack(
        pack_call(
            source, output, layout=layout, masks=masks, mask_size=mask_size, mask_values=mask_values, palette=palette,
            ignore_index=ignore_index, mask_files=mask_files, labels=labels, image_column=image_column,
            split_column=split_column, captions=captions, root=root, boxes=boxes, boxes_of=boxes_of, download=download,
            size=size, fit=fit, mode=mode, bits=bits, store=store, max_size=max_size, codec=codec, workers=workers,
            seed=seed, shuffle=shuffle, chunk_bytes=chunk_bytes, shards=shards, shard_bytes=shard_bytes, spread=spread,
            engine=engine, address=address, limit=limit, outside_boxes=outside_boxes, on_error=on_error, strict=strict,
            allow_large_images=allow_large_images, overwrite=overwrite, parents=parents, remote=remote,
            progress=progress,
        )
    )  # fmt: skip


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


def plan_images(source: str | Path | Sequence[Any], output: str | Path, **options: Any) -> PlanFile:
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
    bound = inspect.signature(pack_images).bind(source, output, **options)
    bound.apply_defaults()
    return run_plan(pack_call(**bound.arguments))


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
