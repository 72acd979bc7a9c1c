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

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastload.errors import OptionError, check_choice, check_whole
from fastload.format.writer import CHUNK_BYTES
from fastload.pack.begin import free_bytes
from fastload.pack.finish import PackReport
from fastload.pack.output_url import disk_of
from fastload.pack.pack_options import (
    Bits,
    Fit,
    Mode,
    OutsideBoxes,
    PackCall,
    PackJob,
    PackOptions,
    Progress,
    pack_call,
)
from fastload.pack.plan import PlanFile, ShardOptions, SharedPlan, list_samples, make_plan, write_plan
from fastload.pack.run import Here, join, pack_listing
from fastload.pack.survey import Survey
from fastload.remote.options import Remote
from fastload.remote.paths import ObjectPath, path_of, requests_as
from fastload.sources.listing import BoxesOf, BoxForm, MasksWanted, OnError
from fastload.sources.mask_classes import MaskSize
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
