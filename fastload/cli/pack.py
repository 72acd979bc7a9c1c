"""`fastload pack`: packs a dataset into one file; `fastload layouts`: lists the layouts that it recognises."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload.cli.command_line import Argument, Given
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
from fastload.options import Option
from fastload.options.pack import SHARDS, PackCall, pack_call
from fastload.options.parse import parse_path
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport
    from fastload.pack.plan import PlanFile


MAX_SIZES = 8
NO_IMAGES = "samples without images"

_OF_A_SHARD = ("source", "output", "shard_index", "num_shards", "workers", "overwrite")  # options of `--shard-index`


def pack(
    context: click.Context,
    source: Annotated[
        Any,
        Argument("SRC", "Folder, .zip, .tar, table or array file; a URL; torchvision:NAME; hf:NAME.", parse_path),
    ],
    options: Annotated[dict[str, Any], Given(PackCall)],
    output: Annotated[Any, Argument("OUT.h5", "File to write, or its URL; --dry-run needs none.", parse_path)] = None,
    plan: Annotated[
        bool, Option(names=("--plan",), group=SHARDS, help="Only write OUT.h5.plan, by which machines pack shards.")
    ] = False,
    shard_index: Annotated[
        int | None,
        Option(metavar="I", group=SHARDS, help="Pack shard I of it; with --num-shards N also I + N, ..."),
    ] = None,
    num_shards: Annotated[
        int | None, Option(group=SHARDS, help="How many such processes there are, by default one a shard.")
    ] = None,
    dry_run: Annotated[
        bool, Option(names=("--dry-run",), help="Only show what would be packed, and what each --store takes.")
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
            _pack_shards(context, source, output, shard_index, num_shards, options["workers"], options["overwrite"])
            return
        from fastload.pack import run_pack, run_plan

        call = pack_call(source, output, options)
        if dry_run:
            _survey(call, source, named=named)
        elif plan:
            with progress_bar() as progress:
                made = run_plan(replace(call, progress=progress))
            _print_plan(made, source)
        else:
            with progress_bar() as progress:
                report = run_pack(replace(call, progress=progress))
            print_packed(report, overwrite=call.overwrite)


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
    from fastload.pack.plan import PlanFile, plan_path

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
