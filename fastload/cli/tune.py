"""`fastload tune`: searches the arguments of `FastLoader` that suit a file on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload.cli.output import (
    INTERRUPTED,
    format_seconds,
    one_line,
    one_line_errors,
    print_error,
    print_json,
    print_table,
    progress_bar,
)
from fastload.cli.pack import parse_size

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def tune(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Find the cheapest arguments with which this step does not wait: resnet50, resnet18, tiny, or "
            "sim:RATE, a simulated accelerator that takes RATE images/s. By default, find the fastest.",
            show_default=False,
        ),
    ] = None,
    cpu_budget: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Share of this job's CPUs that loading may use, such as 40%, so that some is left to launch kernels; "
            "includes a network that trains on the CPU.",
        ),
    ] = "100%",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a batch; by default 256.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for the whole search.")] = 30.0,
    split: Annotated[str | None, typer.Option(help="Load this split only.", show_default=False)] = None,
    size: Annotated[
        Any,
        typer.Option(
            parser=parse_size,
            metavar="S|HxW",
            help="Begin the loader's transforms with RandomResizedCrop to this height x width; by default 224 for "
            "images that differ in size, else no crop.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where batches go: cpu, cuda, cuda:1.", show_default=False)] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop FILE from the page cache before each trial.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a report as an HTML page.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a report that exists.")] = False,
) -> None:
    """Search for the arguments of FastLoader that load FILE fastest on this machine.

    Prints the measurements and the call to paste.
    Ctrl-C ends it and prints the results so far.
    """
    with one_line_errors():
        if report is not None:
            from fastload.profiling.report import check_report_path

            check_report_path(report, force=force)
        from fastload.profiling.tune.candidates import TuneOptions, parse_share

        options = TuneOptions(
            batch_size=batch_size,
            step=step,
            cpu_budget=parse_share(cpu_budget),
            seconds=seconds,
            split=split,
            device=device,
            cold=cold,
            size=size,
        )
        from fastload.profiling.tune.search import Search

        search = Search(file, options)
        typer.echo(f"up to {search.num_trials} trials in about {format_seconds(seconds)}", err=True)
        with progress_bar("trials") as progress:
            result = search.run(progress)
        if report is not None:
            from fastload.profiling.report import write_report
            from fastload.profiling.tune.tables import measured

            write_report(measured(result, command=_command()), report, force=force)
        if as_json:
            from fastload.profiling.tune.tables import to_dict

            print_json(to_dict(result))
        else:
            _print(result)
        if result.interrupted:
            print_error("interrupted; the results above were measured before.")
            raise typer.Exit(INTERRUPTED)


def _command() -> str:
    return shlex.join(["fastload", *sys.argv[1:]]) if sys.argv[1:2] == ["tune"] else ""


def _print(result: Tuned) -> None:
    from fastload.profiling.tune.tables import gain_text, table_of

    if result.chosen is None:
        typer.echo("nothing was measured")
        return
    table = table_of(result)
    typer.echo(f"{typer.style(one_line(result.name), bold=True)}: {table.title}")
    print_table(table.head, table.rows)
    for note in result.notes:
        typer.echo(f"{typer.style('!', fg='yellow', bold=True)} {one_line(note)}")
    typer.echo(f"\nchosen: {one_line(result.chosen.reason)}{gain_text(result)}.\n")
    typer.echo(f"  {typer.style(one_line(result.call), bold=True)}")
