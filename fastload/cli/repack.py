"""`fastload repack`: a packed file becomes another one: other chunks, order or codec, or fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.output import format_seconds, one_line, one_line_errors, print_pairs, progress_bar, skipped_lines
from fastload.cli.pack import parse_bytes

if TYPE_CHECKING:
    from fastload.pack import PackReport

CONTINUES = "interrupted; the same command continues where it stopped."

# Options that repack and merge share.
Seed = Annotated[int, typer.Option(help="Seed of --shuffle.")]
Codec = Annotated[
    str, typer.Option(metavar="keep|none|gzip[:L]|zstd[:L]", help="Keep what is there, decompress, or compress.")
]
Workers = Annotated[int | None, typer.Option(help="Threads that compress; by default one per CPU.", show_default=False)]
OnError = Annotated[Literal["fail", "skip"], typer.Option(help="Stop at a damaged row, or leave it out.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that exists, or unfinished other work.")
]


def repack(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT.h5", help="File to write.", show_default=False)],
    chunk_bytes: Annotated[
        Any,
        typer.Option(
            parser=parse_bytes,
            metavar="BYTES",
            help="Size at which chunks aim; by default as in FILE.",
            show_default=False,
        ),
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or keep their order.")
    ] = False,
    seed: Seed = 0,
    codec: Codec = "keep",
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; may be given again.", show_default=False)
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|INDEX", help="Only rows of this class; may be given again.", show_default=False),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only keys that fit this pattern; may be given again.", show_default=False),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Only the rows that a text file (a number a line) or .npy lists, in its order.", show_default=False
        ),
    ] = None,
    workers: Workers = None,
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Write a packed file anew: other chunks, order or codec, or only some of its rows.

    Every row is checked against its digest on the way. Interrupted, the same command continues where it stopped.
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
    """Print what stands in the new file."""
    from fastload.chunks import format_bytes

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
