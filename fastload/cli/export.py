"""`fastload export`: a packed file back to image files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fastload.cli.output import format_seconds, one_line, one_line_errors, print_pairs, progress_bar

if TYPE_CHECKING:
    from fastload.export import ExportReport


def export(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.", show_default=False)],
    split: Annotated[str | None, typer.Option(help="Only this split.", show_default=False)] = None,
    layout: Annotated[
        Literal["auto", "folder", "csv"],
        typer.Option(help="Class folders, or one folder and manifest.csv; auto: folders where they say everything."),
    ] = "auto",
    format: Annotated[
        Literal["png"], typer.Option(help="Format of what is not stored as JPEG; PNG loses nothing.")
    ] = "png",
    workers: Annotated[
        int | None, typer.Option(help="Threads that encode; by default one per CPU.", show_default=False)
    ] = None,
) -> None:
    """Write a packed file's images as PNG or JPEG files, which `pack` reads back.

    What is stored as JPEG is written as it is, everything else as PNG.

    fastload.json and fields.npz beside them hold what folders and tables cannot say; once images or the table are
    changed, these are what is packed. Every row is checked against its digest on the way. Interrupted, the same command
    continues where it stopped.
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
        ("layout", "manifest.csv beside images" if report.layout == "csv" else "folders"),
        ("splits", ", ".join(f"{name} {count:,}" for name, count in report.splits.items())),
        ("speed", f"{report.images_per_s:,.0f} images/s, {format_seconds(report.seconds)} in all"),
    ]
    if report.kept:
        pairs.append(("continued", f"{report.kept:,} images were already there"))
    print_pairs([*pairs, *(("note", note) for note in report.notes)])
