"""`fastload tune`: searches the arguments of `FastLoader` that suit a file on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fastload.cli.measuring import (
    AsJson,
    BatchSize,
    Device,
    Force,
    ImageFile,
    Report,
    Size,
    Split,
    check_report,
    command_line,
    show_result,
)
from fastload.cli.output import format_seconds, one_line, one_line_errors, print_table, progress_bar

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def tune(
    file: ImageFile,
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
    batch_size: BatchSize = None,
    seconds: Annotated[float, typer.Option(help="Time for the whole search.")] = 30.0,
    split: Split = None,
    size: Size = None,
    device: Device = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop FILE from the page cache before each trial.")] = False,
    as_json: AsJson = False,
    report: Report = None,
    force: Force = False,
) -> None:
    """Search for the arguments of FastLoader that load FILE fastest on this machine.

    Prints the measurements and the call to paste.
    Ctrl-C ends it and prints the results so far.
    """
    with one_line_errors():
        check_report(report, force=force)
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
        from fastload.profiling.tune.tables import measured, to_dict

        search = Search(file, options)
        typer.echo(f"up to {search.num_trials} trials in about {format_seconds(seconds)}", err=True)
        with progress_bar("trials") as progress:
            result = search.run(progress)
        show_result(
            lambda: [measured(result, command=command_line())], lambda: to_dict(result), lambda: _print(result),
            interrupted=result.interrupted, as_json=as_json, report=report, force=force,
        )  # fmt: skip


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
