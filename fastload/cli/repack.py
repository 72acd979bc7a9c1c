"""`fastload repack`, `merge` and `export`: copy, join or unpack packed files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.output import format_seconds, one_line, one_line_errors, print_pairs, progress_bar, skipped_lines
from fastload.cli.pack import parse_bytes

if TYPE_CHECKING:
    from fastload.export import ExportReport
    from fastload.pack import PackReport


CONTINUES = "interrupted; the same command continues where it stopped."

# Options that repack and merge share.
Seed = Annotated[int, typer.Option(help="Seed of --shuffle.")]
Codec = Annotated[
    str, typer.Option(metavar="keep|none|gzip[:L]|zstd[:L]", help="Keep the compression, decompress, or compress.")
]
Workers = Annotated[int | None, typer.Option(help="Threads that compress; by default one per CPU.", show_default=False)]
OnError = Annotated[Literal["fail", "skip"], typer.Option(help="Stop at a damaged row, or leave it out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output, or another unfinished one.")]


def repack(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT.h5", help="File to write.", show_default=False)],
    chunk_bytes: Annotated[
        Any,
        typer.Option(
            parser=parse_bytes,
            metavar="BYTES",
            help="Approximate size of a chunk; by default as in FILE.",
            show_default=False,
        ),
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep their order.")
    ] = False,
    seed: Seed = 0,
    codec: Codec = "keep",
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; may be repeated.", show_default=False)
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|INDEX", help="Only rows of this class; may be repeated.", show_default=False),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only keys that match this pattern; may be repeated.", show_default=False),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Only the rows in a text file (one number per line) or .npy, in that order.", show_default=False
        ),
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

        choice = Choice(tuple(split or ()), tuple(label or ()), tuple(key or ()), rows)
        with progress_bar() as progress:
            report = repack_file(
                file,
                output,
                chunk_bytes=chunk_bytes,
                shuffle=shuffle,
                seed=seed,
                codec=codec,
                choice=choice,
                workers=workers,
                on_error=on_error,
                overwrite=overwrite,
                progress=progress,
            )
        print_copied(report)


def print_copied(report: PackReport) -> None:
    """Prints what is in the new file."""
    from fastload.inspection.chunk_layout import format_bytes

    rows = f"{report.num_samples:,} row{'s' if report.num_samples != 1 else ''}"
    typer.echo(f"wrote {rows} into {typer.style(one_line(str(report.path)), bold=True)}")
    pairs = [("splits", ", ".join(f"{name} {count:,}" for name, count in report.splits.items()))]
    if report.skipped:
        pairs.append(("skipped", f"{len(report.skipped):,}"))
        pairs += [("", line) for line in skipped_lines(report.skipped)]
    speed = f"{report.images_per_s:,.0f} rows/s, " if report.images_per_s else ""
    pairs += [("speed", f"{speed}{format_seconds(report.seconds)} in all"), ("size", format_bytes(report.file_bytes))]
    if report.chunks_kept:
        pairs.append(("continued", f"{report.chunks_kept:,} of {report.chunks:,} chunks were already written"))
    print_pairs([*pairs, *(("note", note) for note in report.notes)])


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.h5 B.h5 ...", help="Packed files to join.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.h5", help="File to write.", show_default=False)
    ],
    chunk_bytes: Annotated[
        Any,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Approximate size of a chunk, such as 8MiB or 512K."),
    ] = "8MiB",
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep one file after another."),
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
                files,
                output,
                chunk_bytes=chunk_bytes,
                shuffle=shuffle,
                seed=seed,
                codec=codec,
                workers=workers,
                on_error=on_error,
                overwrite=overwrite,
                progress=progress,
            )
        print_copied(report)


def export(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.", show_default=False)],
    split: Annotated[str | None, typer.Option(help="Only this split.", show_default=False)] = None,
    layout: Annotated[
        Literal["auto", "folder", "csv"],
        typer.Option(
            help="Class folders, or one folder and manifest.csv; auto: class folders if they hold all labels."
        ),
    ] = "auto",
    format: Annotated[
        Literal["png"], typer.Option(help="Format of images that are not stored as JPEG; PNG is lossless.")
    ] = "png",
    workers: Annotated[
        int | None, typer.Option(help="Threads that encode; by default one per CPU.", show_default=False)
    ] = None,
) -> None:
    """Write a packed file's images as PNG or JPEG files, which `pack` reads back.

    Images that are stored as JPEG are written as they are, all others as PNG.

    fastload.json and fields.npz in DIR hold what folders and tables cannot.
    If images or the table are changed later, `pack` uses the changed ones.

    Every row is checked against its digest.
    If it is interrupted, the same command continues where it stopped.
    """
    with one_line_errors("interrupted; the same command continues where it stopped."):
        from fastload.export import export_file

        with progress_bar() as progress:
            report = export_file(
                file, folder, split=split, layout=layout, format=format, workers=workers, progress=progress
            )
        _print(report)


def _print(report: ExportReport) -> None:
    masks = f" and {report.num_masks:,} masks" if report.num_masks else ""
    plural = "s" if report.num_images != 1 else ""
    where = typer.style(one_line(str(report.folder)), bold=True)
    typer.echo(f"exported {report.num_images:,} image{plural}{masks} into {where}")
    pairs = [
        ("layout", "manifest.csv and a folder of images" if report.layout == "csv" else "folders"),
        ("splits", ", ".join(f"{name} {count:,}" for name, count in report.splits.items())),
        ("speed", f"{report.images_per_s:,.0f} images/s, {format_seconds(report.seconds)} in all"),
    ]
    if report.kept:
        pairs.append(("continued", f"{report.kept:,} images were already there"))
    print_pairs([*pairs, *(("note", note) for note in report.notes)])
