"""Packing: a dataset as it lies on disk becomes one HDF5 file of chunked pixels or encoded images, or several.

`pack_images` takes a source (folder, archive, table, dataset object) and an output path; its arguments travel as one
`PackCall`. There is one way to pack: `plan` lists the samples, reads every header (`survey`, `decisions`) and cuts
the dataset into shards, of which one file is the only one; a runner (`run`, on a cluster `on_ray`) packs each to its
`target`; and their reports are joined into one `PackReport`. `fastload.repack` packs listings of packed files likewise.

Read `engine` first: how rows are cut into tasks, and where they are written, by worker processes (`pool`,
`pack_worker`, `encode`); `finish` gives the finished file its metadata and its name. Unfinished work lies in
`OUT.h5.part` and `OUT.h5.journal`, and the same call continues it after a kill (`begin`, `journal`). `unpacked` reads a
folder as the packed file that is being made of it.

Imports `sources`, `images`, `format` and below, and in `unpacked` also `read`; never the dataset, the loader or torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fastload.errors import OptionError, check_choice, check_whole
from fastload.options import takes
from fastload.options.keywords import PackKeywords
from fastload.options.pack import OnError, PackCall, PackOptions, Progress, pack_call
from fastload.pack.begin import free_bytes
from fastload.pack.finish import PackReport
from fastload.pack.output_url import disk_of
from fastload.pack.pack_options import PackJob
from fastload.pack.plan import PlanFile, ShardOptions, SharedPlan, list_samples, make_plan, write_plan
from fastload.pack.run import Here, join, pack_listing
from fastload.pack.survey import Survey
from fastload.remote.urls import ObjectPath, Remote, path_of, requests_as
from fastload.system.machine import worker_count

if TYPE_CHECKING:
    from fastload.pack.on_ray import OnRay

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
    begun = time.perf_counter()
    if call.engine is not None:
        check_choice("engine", call.engine, ("ray",))
        _require_path(call.source)
    shards = ShardOptions.of(call)  # refused before anything is connected, or read
    with requests_as(call.remote), _runner_of(call) as runner:
        plan = make_plan(call, shards, runner)
        return join(plan, runner(plan, range(plan.num_shards)), begun)


def _runner_of(call: PackCall) -> OnRay | Here:
    if call.engine is None:
        return Here(call.workers)
    from fastload.pack.on_ray import OnRay

    return OnRay(call.address, call.workers)


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
    shards = ShardOptions(call.shards, call.shard_bytes, call.spread)
    with requests_as(call.remote), Here(call.workers) as here:
        return write_plan(make_plan(call, shards, here))


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
    with requests_as(remote), Here(workers, keep=not overwrite) as here:
        found = plan if isinstance(plan, PlanFile) else PlanFile.read(path_of(plan))
        return here(SharedPlan(found, overwrite, progress), [number])[0]


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
    with Here(workers) as here:
        listing = list_samples(source, layout, options, on_error, here.pool(options, worker_count(workers)))
        survey = here.survey(PackJob(str(source), Path(), listing, options, on_error, on_progress=progress))
    if output is None:
        return survey
    where = path_of(output)
    return replace(
        survey, disk_free=free_bytes(disk_of(where) / where.name if isinstance(where, ObjectPath) else where)
    )
