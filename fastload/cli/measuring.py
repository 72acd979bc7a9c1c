"""What `bench` and `tune` have in common: options, and the end, in which a result is written and printed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload.cli.output import INTERRUPTED, print_error, print_json
from fastload.cli.pack import parse_size

if TYPE_CHECKING:
    from fastload.timing.results import Measured

ImageFile = Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in a batch; by default 256.", show_default=False)]
Split = Annotated[str | None, typer.Option(help="Load this split only.", show_default=False)]
Size = Annotated[
    Any,
    typer.Option(
        parser=parse_size,
        metavar="S|HxW",
        help="Begin the loader's transforms with RandomResizedCrop to this height x width; by default 224 for "
        "images that differ in size, else no crop.",
        show_default=False,
    ),
]
Device = Annotated[str | None, typer.Option(help="Where batches go: cpu, cuda, cuda:1.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Report = Annotated[
    Path | None, typer.Option(metavar="OUT.html", help="Write a report as an HTML page.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Replace a report that exists.")]


def command_line() -> str:
    """Returns the command that this process was started with; empty where it was called otherwise."""
    return shlex.join(["fastload", *sys.argv[1:]]) if sys.argv[1:2] in (["bench"], ["tune"]) else ""


def check_report(report: Path | None, *, force: bool) -> None:
    """Refuses a report that cannot be written, before minutes of measuring."""
    if report is not None:
        from fastload.profiling.report import check_report_path

        check_report_path(report, force=force)


def show_result(
    runs: Callable[[], Sequence[Measured]],
    content: Callable[[], Any],
    print_text: Callable[[], None],
    *,
    interrupted: bool,
    as_json: bool,
    report: Path | None,
    force: bool,
) -> None:
    """Writes the report, and prints the result.

    Args:
        runs: returns what the report shows.
        content: returns the JSON object.
        print_text: prints the result where JSON is not asked for.
        interrupted: whether Ctrl-C ended the measurement; the exit code then says so.
    """
    if report is not None:
        from fastload.profiling.report import write_report

        write_report(runs(), report, force=force)
    if as_json:
        print_json(content())
    else:
        print_text()
    if interrupted:
        print_error("interrupted; the results above were measured before.")
        raise typer.Exit(INTERRUPTED)
