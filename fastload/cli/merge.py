"""`fastload merge`: several packed files become one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastload.cli.output import one_line_errors, progress_bar
from fastload.cli.pack import parse_bytes
from fastload.cli.repack import CONTINUES, Codec, OnError, Overwrite, Seed, Workers, print_copied


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.h5 B.h5 ...", help="Packed files to join.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.h5", help="File to write.", show_default=False)
    ],
    chunk_bytes: Annotated[
        Any, typer.Option(parser=parse_bytes, metavar="BYTES", help="Size at which chunks aim, such as 8MiB or 512K.")
    ] = "8MiB",
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle rows within each split, or one file behind another.")
    ] = False,
    seed: Seed = 0,
    codec: Codec = "keep",
    workers: Workers = None,
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Join packed files of the same shape into one: train with train, val with val.

    Classes are joined by their names. Interrupted, the same command continues where it stopped.
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
