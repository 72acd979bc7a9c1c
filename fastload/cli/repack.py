"""`fastload repack`, `merge` and `export`: copy, join or unpack packed files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastload.cli.arguments import ImageFile
from fastload.cli.command_line import Argument, Given
from fastload.cli.output import (
    CONTINUES,
    one_line_errors,
    print_report,
    print_written,
    progress_bar,
    speed_pair,
    splits_pair,
)
from fastload.options import Option
from fastload.options.parse import parse_file, parse_path
from fastload.options.repack import AppendOptions, ExportOptions, MergeOptions, RepackOptions
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport


def repack(
    file: ImageFile,
    output: Annotated[Any, Argument("OUT.h5", "File to write.", parse_file)],
    options: Annotated[dict[str, Any], Given(RepackOptions)],
) -> None:
    """Copy a packed file with other chunks, another order or codec, or only some of its rows.

    Every row is checked against its digest.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import repack_file

        with progress_bar() as progress:
            report = repack_file(file, output, **options, progress=progress)
        _print_copied(report, overwrite=options["overwrite"])


def _print_copied(report: PackReport, *, overwrite: bool) -> None:
    size = ("size", format_bytes(report.file_bytes))
    head = f"wrote {counted(report.num_samples, 'row')}"
    print_report(head, report, unit="rows", done="written", stored=[size], overwrite=overwrite)


def merge(
    files: Annotated[list[Any], Argument("A.h5 B.h5 ...", "Packed files to join.", parse_file)],
    output: Annotated[
        Path,
        Option(
            names=(
                "--output",
                "-o",
            ),
            metavar="OUT.h5",
            help="File to write.",
        ),
    ],
    options: Annotated[dict[str, Any], Given(MergeOptions)],
) -> None:
    """Join packed files of the same shape into one: train with train, val with val.

    Classes are joined by their names.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import merge_files

        with progress_bar() as progress:
            report = merge_files(files, output, **options, progress=progress)
        _print_copied(report, overwrite=options["overwrite"])


def index(
    files: Annotated[
        list[Any],
        Argument("SHARD.h5 ...", "Packed files or URLs, or the plan of all.", parse_path),
    ],
    output: Annotated[
        Any,
        Option(
            names=(
                "--output",
                "-o",
            ),
            parser=parse_path,
            metavar="OUT.h5",
            help="Index to write, or its URL.",
        ),
    ],
    overwrite: Annotated[bool, Option(names=("--overwrite",), help="Replace an existing output.")] = False,
) -> None:
    """Make one dataset of packed files, its shards, without copying them: train with train, val with val.

    They lie in the folder of the index or below it, and stay as they are.
    A lone OUT.h5.plan of `fastload pack --plan` stands for all shards of that plan.
    """
    with one_line_errors():
        from fastload.pack.index import index_files
        from fastload.pack.plan import PlanFile, is_plan
        from fastload.pack.run import index_plan

        left_out = 0
        if len(files) == 1 and is_plan(files[0]):
            report = index_plan(files[0], output, overwrite=overwrite)
            left_out = PlanFile.read(files[0]).num_samples - report.num_samples
        else:
            report = index_files(files, output, overwrite=overwrite)
        notes = [f"{counted(left_out, 'planned sample')} could not be packed and left out."] if left_out else []
        pairs = [
            splits_pair(report.splits),
            ("shards", f"{report.num_shards:,}, {format_bytes(report.num_bytes)}"),
        ]
        print_written(f"indexed {counted(report.num_samples, 'sample')}", report.path, pairs, notes)


def append(
    file: Annotated[Any, Argument("OUT.h5", "The packed file.", parse_file)],
    source: Annotated[Path, Argument("MORE", help="Folder, .zip, .tar, table or array file to add.")],
    options: Annotated[dict[str, Any], Given(AppendOptions)],
) -> None:
    """Pack more images with a file's own options, and put them behind its rows, split by split.

    Classes may be new ones. The file is replaced when the new one is complete.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import append_images

        with progress_bar() as progress:
            report = append_images(file, source, **options, progress=progress)
        _print_copied(report, overwrite=True)


_LAYOUTS = {
    "folder": "folders",
    "csv": "manifest.csv and a folder of images",
    "imagefolder": "folders of splits and classes, for torchvision's ImageFolder",
    "webdataset": "WebDataset shards",
    "hf": "folders of splits with metadata.jsonl, for Hugging Face's imagefolder",
}


def export(
    file: ImageFile,
    folder: Annotated[Any, Argument("DIR", "Folder to create.", parse_file)],
    options: Annotated[dict[str, Any], Given(ExportOptions)],
) -> None:
    """Write a packed file's images as PNG or JPEG files, which `pack` reads back.

    Images that are stored as JPEG are written as they are, all others as PNG.

    fastload.json and fields.npz in DIR hold what folders and tables cannot.
    If images or the table are changed later, `pack` uses the changed ones.
    Other formats do not have them; notes name what these leave out.

    Every row is checked against its digest.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.export import export_file

        with progress_bar() as progress:
            report = export_file(file, folder, **options, progress=progress)
        masks = f" and {report.num_masks:,} masks" if report.num_masks else ""
        pairs = [
            ("layout", _LAYOUTS[report.layout]),
            splits_pair(report.splits),
            speed_pair(report.images_per_s, "images", report.seconds),
        ]
        if report.kept:
            pairs.append(("continued", f"{report.kept:,} images were already there"))
        print_written(f"exported {counted(report.num_images, 'image')}{masks}", report.folder, pairs, report.notes)
