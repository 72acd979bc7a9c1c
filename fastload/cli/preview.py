"""`fastload preview`: a contact sheet of a packed file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastload.cli.output import one_line, one_line_errors


def preview(
    file: Annotated[Path, typer.Argument(help="A packed file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="PNG to write; by default FILE.png.", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option(help="Images to show.")] = 40,
    split: Annotated[str | None, typer.Option(help="Show this split only.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Another seed shows other images.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
) -> None:
    """Draw a contact sheet of a file: images, labels, masks, boxes, landmarks."""
    with one_line_errors():
        from fastload.preview import make_preview

        target = output or file.with_suffix(".png")
        rows = make_preview(file, target, count=count, split=split, seed=seed, overwrite=overwrite)
        typer.echo(f"{len(rows)} images of {one_line(file.name)} drawn in {one_line(str(target))}")
