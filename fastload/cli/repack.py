"""`fastload repack`, `merge` and `export`: copy, join or unpack packed files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastload.cli.arguments import ChunkBytes, ImageFile, parse_bytes, parse_file, parse_path
from fastload.cli.command_line import Argument, Option
from fastload.cli.output import (
    CONTINUES,
    one_line_errors,
    print_report,
    print_written,
    progress_bar,
    speed_pair,
    splits_pair,
)
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport

# Options that repack and merge share.
Seed = Annotated[int, Option(help="Seed of --shuffle.")]
Codec = Annotated[
    str, Option(metavar="keep|none|gzip[:L]|zstd[:L]", help="Keep the compression, decompress, or compress.")
]
Workers = Annotated[int | None, Option(help="Threads that compress; by default one per CPU.")]
OnError = Annotated[Literal["fail", "skip"], Option(help="Stop at a damaged row, or leave it out.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing output, or another unfinished one.")]


def repack(
    file: ImageFile,
    output: Annotated[Any, Argument("OUT.h5", parser=parse_file, help="File to write.")],
    chunk_bytes: Annotated[
        Any,
        Option(parser=parse_bytes, metavar="BYTES", help="Approximate size of a chunk; by default as in FILE."),
    ] = None,
    shuffle: Annotated[
        bool, Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep their order.")
    ] = False,
    seed: Seed = 0,
    codec: Codec = "keep",
    split: Annotated[list[str] | None, Option(help="Only this split; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, Option(metavar="NAME|INDEX", help="Only rows of this class; may be repeated.")
    ] = None,
    key: Annotated[
        list[str] | None, Option(metavar="GLOB", help="Only keys that match this pattern; may be repeated.")
    ] = None,
    rows: Annotated[
        Path | None, Option(help="Only the rows in a text file (one number per line) or .npy, in that order.")
    ] = None,
    without: Annotated[
        list[str] | None, Option(metavar="GLOB", help="No keys that match this pattern; may be repeated.")
    ] = None,
    workers: Workers = None,
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Copy a packed file with other chunks, another order or codec, or only some of its rows.

    Every row is checked against its digest.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import Choice, repack_file

        choice = Choice(tuple(split or ()), tuple(label or ()), tuple(key or ()), tuple(without or ()), rows)
        with progress_bar() as progress:
            report = repack_file(
                file, output, chunk_bytes=chunk_bytes, shuffle=shuffle, seed=seed, codec=codec, choice=choice,
                workers=workers, on_error=on_error, overwrite=overwrite, progress=progress,
            )  # fmt: skip
        _print_copied(report, overwrite=overwrite)


def _print_copied(report: PackReport, *, overwrite: bool) -> None:
    size = ("size", format_bytes(report.file_bytes))
    head = f"wrote {counted(report.num_samples, 'row')}"
    print_report(head, report, unit="rows", done="written", stored=[size], overwrite=overwrite)


def merge(
    files: Annotated[list[Any], Argument("A.h5 B.h5 ...", parser=parse_file, help="Packed files to join.")],
    output: Annotated[Path, Option("--output", "-o", metavar="OUT.h5", help="File to write.")],
    chunk_bytes: ChunkBytes = "8MiB",
    shuffle: Annotated[
        bool,
        Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep one file after another."),
    ] = False,
    seed: Seed = 0,
    codec: Codec = "keep",
    workers: Workers = None,
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Join packed files of the same shape into one: train with train, val with val.

    Classes are joined by their names.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import merge_files

        with progress_bar() as progress:
            report = merge_files(
                files, output, chunk_bytes=chunk_bytes, shuffle=shuffle, seed=seed, codec=codec, workers=workers,
                on_error=on_error, overwrite=overwrite, progress=progress,
            )  # fmt: skip
        _print_copied(report, overwrite=overwrite)


def index(
    files: Annotated[
        list[Any],
        Argument("SHARD.h5 ...", parser=parse_path, help="Packed files or URLs, or the plan of all."),
    ],
    output: Annotated[
        Any, Option("--output", "-o", parser=parse_path, metavar="OUT.h5", help="Index to write, or its URL.")
    ],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Make one dataset of packed files, its shards, without copying them: train with train, val with val.

    They lie in the folder of the index or below it, and stay as they are.
    A lone OUT.h5.plan of `fastload pack --plan` stands for all shards of that plan.
    """
    with one_line_errors():
        from fastload.pack.index import index_files
        from fastload.pack.plan_file import PlanFile, index_plan, is_plan

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
    file: Annotated[Any, Argument("OUT.h5", parser=parse_file, help="The packed file.")],
    source: Annotated[Path, Argument("MORE", help="Folder, .zip, .tar, table or array file to add.")],
    layout: Annotated[str | None, Option(help="Layout of MORE, by default recognised.")] = None,
    workers: Annotated[int | None, Option(help="Processes that decode; by default one per CPU.")] = None,
    on_error: OnError = "fail",
) -> None:
    """Pack more images with a file's own options, and put them behind its rows, split by split.

    Classes may be new ones. The file is replaced when the new one is complete.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors(CONTINUES):
        from fastload.repack import append_images

        with progress_bar() as progress:
            report = append_images(file, source, layout=layout, workers=workers, on_error=on_error, progress=progress)
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
    folder: Annotated[Any, Argument("DIR", parser=parse_file, help="Folder to create.")],
    split: Annotated[str | None, Option(help="Only this split.")] = None,
    layout: Annotated[
        Literal["auto", "folder", "csv"],
        Option(help="Class folders, or one folder and manifest.csv; auto: class folders if they hold all labels."),
    ] = "auto",
    format: Annotated[
        Literal["folder", "imagefolder", "webdataset", "hf", "png"],  # png: as folder was called before
        Option(
            metavar="folder|imagefolder|webdataset|hf",
            help="Folders that `pack` reads back exactly; or for torchvision, WebDataset (shards), Hugging Face.",
        ),
    ] = "folder",
    shard_bytes: Annotated[
        Any, Option(parser=parse_bytes, metavar="BYTES", help="Most bytes of a shard; by default 1GiB.")
    ] = None,
    workers: Annotated[int | None, Option(help="Threads that encode; by default one per CPU.")] = None,
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
            report = export_file(
                file, folder, split=split, layout=layout, format="folder" if format == "png" else format,
                shard_bytes=shard_bytes, workers=workers, progress=progress,
            )  # fmt: skip
        masks = f" and {report.num_masks:,} masks" if report.num_masks else ""
        pairs = [
            ("layout", _LAYOUTS[report.layout]),
            splits_pair(report.splits),
            speed_pair(report.images_per_s, "images", report.seconds),
        ]
        if report.kept:
            pairs.append(("continued", f"{report.kept:,} images were already there"))
        print_written(f"exported {counted(report.num_images, 'image')}{masks}", report.folder, pairs, report.notes)
