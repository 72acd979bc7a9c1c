"""`fastload pack`: packs a dataset into one file; `fastload layouts`: lists the layouts that it recognises."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from fastload.cli.arguments import parse_bytes, parse_names, parse_path, parse_size
from fastload.cli.command_line import Argument, Option
from fastload.cli.output import (
    CONTINUES,
    bold,
    changes,
    one_line_errors,
    print_encodings,
    print_error,
    print_finding,
    print_report,
    print_with_notes,
    print_written,
    progress_bar,
)
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport
    from fastload.pack.pack_options import PackCall
    from fastload.pack.plan_file import PlanFile


MAX_SIZES = 8
NO_IMAGES = "samples without images"

_OF_A_SHARD = ("source", "output", "shard_index", "num_shards", "workers", "overwrite")  # options of `--shard-index`

READ, SIZE, MASKS, STORE, SHARDS = (
    "What to read",
    "Size and channels",
    "Masks and boxes",
    "Encoding and order",
    "Shards, and packing on several machines",
)

Masks = Annotated[
    Literal["auto", "none", "semantic", "instance", "panoptic"],
    Option(metavar="KIND", group=MASKS, help="auto, none, semantic, instance or panoptic; may be drawn."),
]


def pack(
    context: click.Context,
    source: Annotated[
        Any,
        Argument(
            "SRC",
            parser=parse_path,
            help="Folder, .zip, .tar, table or array file; a URL; torchvision:NAME; hf:NAME.",
        ),
    ],
    output: Annotated[
        Any, Argument("OUT.h5", parser=parse_path, help="File to write, or its URL; --dry-run needs none.")
    ] = None,
    layout: Annotated[
        str | None, Option(metavar="NAME", group=READ, help="Layout of SRC, else recognised; see `fastload layouts`.")
    ] = None,
    labels: Annotated[
        Any,
        Option(
            parser=parse_names,
            metavar="A,B",
            group=READ,
            help="Columns with the labels; of folders: top, deepest, last, names or none.",
        ),
    ] = "",
    image_column: Annotated[str, Option(metavar="NAME", group=READ, help="Column of a table with the images.")] = "",
    split_column: Annotated[str, Option(metavar="NAME", group=READ, help="Column of a table with the split.")] = "",
    captions: Annotated[
        str, Option(metavar="all|none|N", group=READ, help="Texts of images: all, none, or cut to N bytes.")
    ] = "all",
    root: Annotated[
        Any, Option(parser=parse_path, metavar="PATH", group=READ, help="Folder of a table's paths, or of torchvision.")
    ] = None,
    download: Annotated[
        bool, Option("--download", group=READ, help="Let torchvision download missing files to --root.")
    ] = False,
    limit: Annotated[int | None, Option(group=READ, help="Pack only N images, spread over SRC.")] = None,
    size: Annotated[
        Any,
        Option(parser=parse_size, metavar="S|HxW", group=SIZE, help="Bring every image to this height x width."),
    ] = None,
    fit: Annotated[
        Literal["crop", "pad", "stretch"],
        Option(metavar="HOW", group=SIZE, help="How --size does it: crop, pad or stretch."),
    ] = "crop",
    max_size: Annotated[
        int | None, Option(metavar="S", group=SIZE, help="Shrink images until their shorter side is S or less.")
    ] = None,
    mode: Annotated[
        Literal["rgb", "gray", "rgba"] | None,
        Option(metavar="MODE", group=SIZE, help="rgb, gray or rgba; by default gray if all images are."),
    ] = None,
    bits: Annotated[
        Any,
        Option(parser=int, metavar="8|16", group=SIZE, help="8 keeps the high byte of 16; 16 needs 16-bit images."),
    ] = None,
    masks: Masks = "auto",
    mask_size: Annotated[
        Literal["same", "image"],
        Option(metavar="SIZE", group=MASKS, help="same; image: resize masks of one shape to the images."),
    ] = "same",
    mask_values: Annotated[
        str,
        Option(
            metavar="V[=NAME],...",
            group=MASKS,
            help="Values that are classes 0, 1, ...; keep; auto: 255 is 1.",
        ),
    ] = "auto",
    mask_files: Annotated[
        str, Option(metavar="PATTERN", group=MASKS, help="Paths of the masks, where there are several kinds.")
    ] = "",
    palette: Annotated[
        Path | None, Option(metavar="FILE", group=MASKS, help="Colours of classes: lines of r,g,b,name, or CVAT's.")
    ] = None,
    ignore_index: Annotated[
        str | None, Option(metavar="V|NAME", group=MASKS, help="Value or class of masks that means no class.")
    ] = None,
    boxes: Annotated[
        Literal["auto", "xyxy", "xywh", "cxcywh", "yxyx"],
        Option(metavar="FORM", group=MASKS, help="A box's numbers: auto, xyxy, xywh, cxcywh or yxyx."),
    ] = "auto",
    boxes_of: Annotated[
        Literal["auto", "upright", "stored", "declared"],
        Option(
            metavar="IMAGE",
            group=MASKS,
            help="Boxes and masks are of the upright image, of the stored one, before EXIF turns it, or of the "
            "declared size.",
        ),
    ] = "auto",
    outside_boxes: Annotated[
        Literal["refuse", "clip", "keep"],
        Option(metavar="DO", group=MASKS, help="refuse, clip or keep boxes that reach out of their image."),
    ] = "refuse",
    store: Annotated[
        str | None,
        Option(metavar="HOW", group=STORE, help="raw, jpeg[:Q], source (SRC's own JPEGs) or mixed:F; see --dry-run."),
    ] = None,
    codec: Annotated[
        str, Option(metavar="NAME", group=STORE, help="Lossless: none, gzip[:L], zstd[:L]; auto: gzip for some masks.")
    ] = "auto",
    chunk_bytes: Annotated[
        Any,
        Option(parser=parse_bytes, metavar="BYTES", group=STORE, help="Approximate size of a chunk, as 8MiB or 512K."),
    ] = "8MiB",
    shuffle: Annotated[
        bool,
        Option("--shuffle/--no-shuffle", group=STORE, help="Shuffle rows within each split, or keep SRC's order."),
    ] = True,
    seed: Annotated[int, Option(group=STORE, help="Seed of the order of rows.")] = 0,
    shards: Annotated[int | None, Option(group=SHARDS, help="Write N files, and OUT.h5 as an index over them.")] = None,
    shard_bytes: Annotated[
        Any,
        Option(parser=parse_bytes, metavar="BYTES", group=SHARDS, help="Write files of about this size, and an index."),
    ] = None,
    spread: Annotated[int, Option(group=SHARDS, help="Spread these files over N folders.")] = 0,
    engine: Annotated[
        Literal["ray"] | None, Option(group=SHARDS, help="Pack the shards on the nodes of a Ray cluster.")
    ] = None,
    address: Annotated[
        str | None, Option(metavar="WHERE", group=SHARDS, help="Of the cluster: auto, local, or HOST:PORT.")
    ] = None,
    plan: Annotated[
        bool, Option("--plan", group=SHARDS, help="Only write OUT.h5.plan, by which machines pack shards.")
    ] = False,
    shard_index: Annotated[
        int | None,
        Option(metavar="I", group=SHARDS, help="Pack shard I of it; with --num-shards N also I + N, ..."),
    ] = None,
    num_shards: Annotated[
        int | None, Option(group=SHARDS, help="How many such processes there are, by default one a shard.")
    ] = None,
    workers: Annotated[int | None, Option(help="Processes that decode, by default one per CPU.")] = None,
    on_error: Annotated[
        Literal["fail", "skip"], Option(help="Stop at an image that cannot be read, or leave it out.")
    ] = "fail",
    strict: Annotated[bool, Option("--strict", help="Leave out JPEGs that libjpeg warns of, as damaged.")] = False,
    allow_large_images: Annotated[
        bool, Option("--allow-large-images", help="Pack images above 178,956,970 pixels, too.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an existing output, or another unfinished pack.")
    ] = False,
    parents: Annotated[bool, Option("--parents", help="Make the folder of OUT.h5 where there is none.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only show what would be packed, and what each --store takes.")
    ] = False,
) -> None:
    """Pack a dataset of images into one HDF5 file.

    Without --size, images keep their sizes.
    If it is interrupted, the same command continues where it stopped.
    SRC and OUT.h5 may lie in an object store: s3://, gs://, az:// URLs.
    """
    if not (named := output is not None) and not dry_run:
        raise click.UsageError("Missing argument 'OUT.h5'.", context)
    output = output or Path("out.h5")  # on the disk of the current folder
    of_plan = shard_index is not None or num_shards is not None
    with one_line_errors("interrupted." if dry_run or of_plan else CONTINUES):
        if of_plan:
            _pack_shards(context, source, output, shard_index, num_shards, workers, overwrite)
            return
        from fastload.pack import run_pack, run_plan
        from fastload.pack.pack_options import pack_call

        call = pack_call(
            source, output, layout=layout, masks=masks, mask_size=mask_size, mask_values=mask_values, palette=palette,
            ignore_index=ignore_index, mask_files=mask_files, labels=labels, image_column=image_column,
            split_column=split_column, captions=captions, root=root, boxes=boxes, boxes_of=boxes_of, download=download,
            size=size, fit=fit, mode=mode, bits=bits, store=store, max_size=max_size, codec=codec, workers=workers,
            seed=seed, shuffle=shuffle, chunk_bytes=chunk_bytes, shards=shards, shard_bytes=shard_bytes, spread=spread,
            engine=engine, address=address, limit=limit, outside_boxes=outside_boxes, on_error=on_error, strict=strict,
            allow_large_images=allow_large_images, overwrite=overwrite, parents=parents,
        )  # fmt: skip
        if dry_run:
            _survey(call, source, named=named)
        elif plan:
            with progress_bar() as progress:
                made = run_plan(replace(call, progress=progress))
            _print_plan(made, source)
        else:
            with progress_bar() as progress:
                report = run_pack(replace(call, progress=progress))
            print_packed(report, overwrite=overwrite)


def _pack_shards(
    context: click.Context,
    source: Path,
    output: Path,
    shard_index: int | None,
    num_shards: int | None,
    workers: int | None,
    overwrite: bool,
) -> None:
    """Packs the shards of a plan that one of several processes is to pack."""
    from fastload.errors import OptionError, check_whole
    from fastload.pack import pack_shard
    from fastload.pack.plan_file import PlanFile, plan_path

    if shard_index is None:
        raise OptionError("`--num-shards` belongs to `--shard-index`: say which of these this process packs.")
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in _OF_A_SHARD}
    if given := [name for name, where in sources.items() if where is not None and where.name == "COMMANDLINE"]:
        option = f"--{given[0].replace('_', '-')}"
        raise OptionError(
            f"`{option}` cannot go with `--shard-index`, which packs by the plan {plan_path(output)}. Leave it "
            f"out, or make the plan anew with it."
        )
    plan = PlanFile.read(plan_path(output))
    if plan.source not in (str(source), os.path.abspath(source)):
        raise OptionError(f"{plan.path}: is a plan of {plan.source}, not of {source}.")
    step = plan.num_shards if num_shards is None else num_shards
    check_whole("num_shards", step, least=1)
    if not 0 <= shard_index < step:
        raise OptionError(f"`--shard-index {shard_index}` of {step}: it counts from 0 to {step - 1}.")
    for number in range(shard_index, plan.num_shards, step):
        with progress_bar() as progress:
            report = pack_shard(plan.path, number, workers=workers, overwrite=overwrite, progress=progress)
        print_packed(report, overwrite=overwrite)
    if shard_index >= plan.num_shards:
        click.echo(f"nothing to pack: {plan.path} has {plan.num_shards} shards")


def _print_plan(plan: PlanFile, source: Path) -> None:
    """Prints what was planned, and how it goes on."""
    pairs = [("shards", f"{plan.num_shards:,}")]
    pairs += changes(plan.converted, plan.skipped)
    print_written(f"planned {counted(plan.num_samples, 'sample')}", plan.path, pairs, plan.notes)
    words = {"source": source, "output": plan.output, "plan": plan.path}
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    click.echo(advice("shards of a plan", last=plan.num_shards - 1, **quoted))


def _survey(call: PackCall, source: Path, *, named: bool) -> None:
    """Prints what packing would do; ends with exit code 1 if it could not. `named`: an output was given."""
    from fastload.estimate import estimate_survey
    from fastload.pack import survey_source
    from fastload.pack.output_url import disk_of, exists
    from fastload.sources.listing import only_arrays

    output = call.output
    with call.options.accepting_large(1), progress_bar() as progress:
        survey = survey_source(
            source, output, layout=call.layout, options=call.options, workers=call.workers, on_error=call.on_error,
            progress=progress,
        )  # fmt: skip
        estimates = estimate_survey(survey, disk_of(output), threads=call.workers or None, progress=progress)
    target, plan = survey.target, survey.plan
    what = f"{NO_IMAGES} (layout {survey.listing.layout})"
    if kind := target or plan:
        size = (target.height, target.width) if target else (0, 0)
        what = f"images (layout {survey.listing.layout}) as {shape_of((*size, kind.channels))} {kind.dtype}"
    sizes = [f"{height}x{width} ({count:,})" for (height, width), count in survey.sizes.items()]
    more = f" and {len(sizes) - MAX_SIZES:,} more" if len(sizes) > MAX_SIZES else ""
    pairs = [("sizes", ", ".join(sizes[:MAX_SIZES]) + more)] if sizes else []
    pairs += _fields(tuple(survey.listing.columns), survey.listing.masks is not None)
    pairs += changes(survey.converted, survey.skipped)
    if plan is not None and plan.special:
        parts = [str(plan.option), *([f"shorter side at most {plan.max_size}"] if plan.max_size else [])]
        codecs = {"pixels": plan.image_codec, "masks": plan.mask_codec}
        parts += [f"{name} with {codec}" for name, codec in codecs.items() if codec.name != "none"]
        pairs.append(("store", ", ".join(parts)))
    pairs.append(("needed", f"{format_bytes(survey.bytes_needed)}; free: {format_bytes(survey.disk_free)}"))
    notes = list(survey.notes)
    if not (survey.headers is None or only_arrays(survey.listing)):
        notes.append("Only headers were read: what cannot be decoded shows when it is packed.")
    print_with_notes(f"would pack {survey.num_samples:,} {what}; nothing was written", pairs, notes)
    if estimates is not None:
        print_encodings(estimates)
    if survey.disk_free < survey.bytes_needed:
        print_error(
            f"{output}: not enough space on its disk. Choose another disk, a smaller `--size` or `--max-size`, "
            f"`--store source`, or `--limit`."
        )
        raise click.exceptions.Exit(1)
    if named and exists(output) and not call.overwrite:
        print_finding(advice("overwrite", path=output))


def print_packed(report: PackReport, *, overwrite: bool) -> None:
    """Prints the new file's contents, and how it was made."""
    size, pixels = format_bytes(report.file_bytes), report.pixel_bytes
    others = [f"{count:,} {name}" for name, count in report.encodings.items() if count and name != "raw"]
    stored = []
    if others or report.store != "raw":
        raw = report.encodings.get("raw", 0)
        stored.append(("store", f"{report.store}: {', '.join([*others, *([f'{raw:,} raw'] if raw else [])])}"))
    if pixels and (stored or report.file_bytes < 0.9 * pixels):
        size += f", {report.file_bytes / pixels:.1%} of the {format_bytes(pixels)} that raw pixels take"
    stored.append(("size", size))
    if report.num_shards is not None:
        stored.append(("shards", f"{report.num_shards:,}, and {report.path.name} as their index"))
    what = f"images of {shape_of(report.image_shape)} {report.dtype}" if report.image_shape else NO_IMAGES
    head = f"packed {report.num_samples:,} {what}"
    fields = _fields(report.fields)
    print_report(head, report, unit="images", done="packed", fields=fields, stored=stored, overwrite=overwrite)


def shape_of(shape: tuple[int, ...]) -> str:
    """Returns (H, W, C) as text; 0 means that images differ in it."""
    if 0 not in shape:
        return " x ".join(str(n) for n in shape)
    height, width = (str(n) if n else name for n, name in zip(shape, ("H", "W"), strict=False))
    return f"{height} x {width} x {shape[2]} (sizes vary)"


def _fields(columns: tuple[str, ...], masks: bool = False) -> list[tuple[str, str]]:
    """Returns a line on the fields, if there are others than labels."""
    names = [*(["masks"] if masks else []), *columns]
    return [("fields", ", ".join(names))] if set(names) - {"labels"} else []


def layouts() -> None:
    """List the dataset layouts that `fastload pack` reads.

    Known datasets come first, then formats, then folders of images.
    """
    from fastload.sources.layouts import LAYOUTS

    width = max(map(len, LAYOUTS))
    for name, layout in LAYOUTS.items():
        click.echo(f"{bold(name.ljust(width))}  {layout.line}")
