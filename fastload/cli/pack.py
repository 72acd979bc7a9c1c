"""`fastload pack`: packs a dataset into one file; `fastload layouts`: lists the layouts that it recognises."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.arguments import ChunkBytes, parse_bytes, parse_names, parse_path, parse_size
from fastload.cli.output import (
    CONTINUES,
    bold,
    changes,
    one_line_errors,
    print_encodings,
    print_error,
    print_report,
    print_with_notes,
    print_written,
    progress_bar,
)
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport
    from fastload.pack.plan_file import PlanFile


MAX_SIZES = 8
NO_IMAGES = "samples without images"

Masks = Annotated[
    Literal["auto", "none", "semantic", "instance", "panoptic"],
    typer.Option(help="Masks to pack: those found, none, or one kind, drawn from annotations if there are no files."),
]


def pack(
    context: typer.Context,
    source: Annotated[
        Any,
        typer.Argument(
            parser=parse_path,
            metavar="SRC",
            help="Folder, .zip, .tar, table or array file; a URL; torchvision:NAME; hf:NAME.",
        ),
    ],
    output: Annotated[
        Any, typer.Argument(parser=parse_path, metavar="OUT.h5", help="File to write, or its URL, s3://BUCKET/OUT.h5.")
    ],
    layout: Annotated[
        str | None, typer.Option(help="Layout of SRC, by default recognised; `fastload layouts` lists all.")
    ] = None,
    masks: Masks = "auto",
    mask_size: Annotated[
        Literal["same", "image"], typer.Option(help="image: resize masks of the same shape to their images.")
    ] = "same",
    mask_values: Annotated[
        str,
        typer.Option(
            metavar="auto|keep|V[=NAME],...",
            help="Values of masks that are classes 0, 1, ...; auto: 0 and 255 become 0 and 1.",
        ),
    ] = "auto",
    palette: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Colours of classes in masks: lines of r,g,b,name, or CVAT's.")
    ] = None,
    ignore_index: Annotated[
        str | None, typer.Option(metavar="V|NAME", help="Value or class of masks that means no class.")
    ] = None,
    mask_files: Annotated[
        str,
        typer.Option(
            metavar="PATTERN", help="Paths of the masks, such as 'semantic/*', where there are several kinds."
        ),
    ] = "",
    labels: Annotated[
        Any,
        typer.Option(
            parser=parse_names,
            metavar="A,B",
            help="Columns of a table that hold the labels; of a folder: top, deepest, last, names or none.",
        ),
    ] = "",
    image_column: Annotated[str, typer.Option(metavar="NAME", help="Column of a table with the images.")] = "",
    split_column: Annotated[str, typer.Option(metavar="NAME", help="Column of a table with the split.")] = "",
    captions: Annotated[
        str, typer.Option(metavar="all|none|BYTES", help="Texts of images: all, none, or cut to so many bytes.")
    ] = "all",
    root: Annotated[
        Any,
        typer.Option(
            parser=parse_path, metavar="PATH", help="Folder that a table's paths, or torchvision's data, are in."
        ),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Let torchvision fetch what is not in --root.")] = False,
    boxes: Annotated[
        Literal["auto", "xyxy", "xywh", "cxcywh", "yxyx"],
        typer.Option(help="A box's numbers: two corners (yxyx: y first), corner and size, or middle and size."),
    ] = "auto",
    boxes_of: Annotated[
        Literal["auto", "upright", "stored", "declared"],
        typer.Option(
            help="Boxes and masks are of the upright image, of the file before EXIF turns it, or the declared size."
        ),
    ] = "auto",
    size: Annotated[
        Any, typer.Option(parser=parse_size, metavar="S|HxW", help="Bring every image to this height x width.")
    ] = None,
    fit: Annotated[
        Literal["crop", "pad", "stretch"], typer.Option(help="How --size treats images of another shape.")
    ] = "crop",
    mode: Annotated[
        Literal["rgb", "gray", "rgba"] | None,
        typer.Option(help="Convert images; by default gray if all of them are, else RGB."),
    ] = None,
    bits: Annotated[
        Any,
        typer.Option(
            parser=int, metavar="8|16", help="8 keeps the high byte of 16-bit images; 16 requires 16-bit images."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="raw|jpeg[:Q]|source|mixed:F",
            help="Store pixels, new JPEGs, the files' own JPEGs, or some of each.",
        ),
    ] = None,
    max_size: Annotated[
        int | None, typer.Option(metavar="S", help="Shrink larger images until their shorter side is S.")
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            metavar="none|gzip[:L]|zstd[:L]", help="Lossless compression; auto: gzip for masks that it halves."
        ),
    ] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that decode; by default one per CPU.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of rows.")] = 0,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep SRC's order.")
    ] = True,
    chunk_bytes: ChunkBytes = "8MiB",
    shards: Annotated[
        int | None, typer.Option(metavar="N", help="Write N files, and OUT.h5 as an index over them.")
    ] = None,
    shard_bytes: Annotated[
        Any, typer.Option(parser=parse_bytes, metavar="BYTES", help="Write files of about this size, and an index.")
    ] = None,
    spread: Annotated[int, typer.Option(metavar="N", help="Spread these files over N folders.")] = 0,
    engine: Annotated[
        Literal["ray"] | None, typer.Option(help="Pack the shards on the nodes of a Ray cluster.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Address of the cluster: auto, local, or HOST:PORT.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only write OUT.h5.plan, by which any machine can pack the shards.")
    ] = False,
    shard_index: Annotated[
        int | None, typer.Option(metavar="I", help="Pack shard I of OUT.h5.plan; with --num-shards I, I + N, ...")
    ] = None,
    num_shards: Annotated[
        int | None, typer.Option(metavar="N", help="How many such processes pack the shards; by default one each.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Pack only this many images, spread over SRC.")] = None,
    outside_boxes: Annotated[
        Literal["refuse", "clip", "keep"],
        typer.Option(help="Boxes that reach out of their image: an error, cut to the image, or packed as they are."),
    ] = "refuse",
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="Stop at an image that cannot be read, or leave it out.")
    ] = "fail",
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave out JPEGs that libjpeg warns of, as of corrupt data.")
    ] = False,
    allow_large_images: Annotated[
        bool, typer.Option("--allow-large-images", help="Pack images above 178,956,970 pixels, too.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output, or another unfinished pack.")
    ] = False,
    parents: Annotated[
        bool, typer.Option("--parents", help="Make the folder of OUT.h5 where it does not exist.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show what would be packed, and size and loading rate of each --store."),
    ] = False,
) -> None:
    """Pack a dataset of images into one HDF5 file.

    Without --size, images keep their sizes.
    If it is interrupted, the same command continues where it stopped.
    SRC and OUT.h5 may lie in an object store: s3://, gs://, az:// URLs.
    """
    arguments = dict(locals())  # named like those of `pack_images`
    for name in ("context", "dry_run", "plan", "shard_index", "num_shards"):
        del arguments[name]
    of_plan = shard_index is not None or num_shards is not None
    with one_line_errors("interrupted." if dry_run or of_plan else CONTINUES):
        if of_plan:
            _pack_shards(context, **context.params)
            return
        if dry_run:
            _survey(**arguments)
            return
        from fastload.pack import pack_images, plan_images

        with progress_bar() as progress:
            if plan:
                made = plan_images(**arguments, progress=progress)
            else:
                report = pack_images(**arguments, progress=progress)
        if plan:
            _print_plan(made, source)
        else:
            print_packed(report, overwrite=overwrite)


def _pack_shards(
    context: typer.Context,
    source: Path,
    output: Path,
    shard_index: int | None,
    num_shards: int | None,
    workers: int | None,
    overwrite: bool,
    **others: Any,
) -> None:
    """Packs the shards of a plan that one of several processes is to pack."""
    from fastload.errors import OptionError, check_whole
    from fastload.pack import pack_shard
    from fastload.pack.plan_file import PlanFile, plan_path

    if shard_index is None:
        raise OptionError("`--num-shards` belongs to `--shard-index`: say which of these this process packs.")
    sources = {name: context.get_parameter_source(name) for name in others}
    if given := [name for name, where in sources.items() if where is not None and where.name == "COMMANDLINE"]:
        option = f"--{given[0].replace('_', '-')}"
        raise OptionError(
            f"`{option}` cannot go with `--shard-index`, which packs what the plan {plan_path(output)} says. Leave it "
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
        typer.echo(f"nothing to pack: {plan.path} has {plan.num_shards} shards")


def _print_plan(plan: PlanFile, source: Path) -> None:
    """Prints what was planned, and how it goes on."""
    pairs = [("shards", f"{plan.num_shards:,}")]
    pairs += changes(plan.converted, plan.skipped)
    print_written(f"planned {counted(plan.num_samples, 'sample')}", plan.path, pairs, plan.notes)
    name = shlex.quote(str(plan.output))
    typer.echo(
        f"Next, anywhere, for each I from 0 to {plan.num_shards - 1}:\n"
        f"  fastload pack {shlex.quote(str(source))} {name} --shard-index I\n"
        f"and then:\n"
        f"  fastload index {shlex.quote(str(plan.path))} -o {name}"
    )


def _survey(source: Path, output: Path, overwrite: bool, **options: Any) -> None:
    """Prints what packing would do; ends with exit code 1 if it could not."""
    from fastload.estimate import estimate_survey
    from fastload.pack import PackOptions, survey_source
    from fastload.pack.output_url import disk_of, exists
    from fastload.sources.listing import only_arrays

    options.pop("parents")
    workers = options["workers"]
    asked = {name: options[name] for name in ("layout", "workers", "on_error")}
    packing = PackOptions.of(options)
    with packing.accepting_large(1), progress_bar() as progress:
        survey = survey_source(source, output, options=packing, progress=progress, **asked)
        estimates = estimate_survey(survey, disk_of(output), threads=workers or None, progress=progress)
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
        raise typer.Exit(1)
    if exists(output) and not overwrite:
        print_error(f"{output}: exists; packing needs `--overwrite` to replace it.")
        raise typer.Exit(1)


def print_packed(report: PackReport, *, overwrite: bool) -> None:
    """Prints what is in the new file, and how it was made."""
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
        typer.echo(f"{bold(name.ljust(width))}  {layout.line}")
