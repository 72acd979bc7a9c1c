"""`fastload tune`: searches the arguments of `FastLoader` that suit a file on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import click

from fastload.cli.arguments import AsJson, BatchSize, Device, Force, ImageFile, Report, Size, Split
from fastload.cli.command_line import Option
from fastload.cli.output import (
    bold,
    check_report,
    command_line,
    format_seconds,
    one_line,
    one_line_errors,
    print_finding,
    print_table,
    progress_bar,
    show_result,
)

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def tune(
    file: ImageFile,
    step: Annotated[
        str | None,
        Option(
            metavar="STEP",
            help="Find the cheapest arguments with which this step does not wait: resnet50, resnet18, tiny, or "
            "sim:RATE, a simulated accelerator that takes RATE images/s. By default, find the fastest.",
        ),
    ] = None,
    cpu_budget: Annotated[
        str,
        Option(
            metavar="SHARE",
            help="Share of this job's CPUs that loading may use, such as 40%, so that some is left to launch kernels; "
            "includes a network that trains on the CPU.",
        ),
    ] = "100%",
    batch_size: BatchSize = None,
    seconds: Annotated[float, Option(help="Time for the whole search.")] = 30.0,
    split: Split = None,
    size: Size = None,
    device: Device = None,
    cold: Annotated[bool, Option("--cold", help="Drop FILE from the page cache before each trial.")] = False,
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

        asked = TuneOptions(
            batch_size=batch_size, step=step, cpu_budget=parse_share(cpu_budget), seconds=seconds, split=split,
            device=device, cold=cold, size=size,
        )  # fmt: skip
        from fastload.profiling.tune.search import Search

        search = Search(file, asked)
        click.echo(f"up to {search.num_trials} trials in about {format_seconds(seconds)}", err=True)
        with progress_bar("trials") as progress:
            result = search.run(progress)
        show_result(
            [result.measured(command_line())], result.to_dict(), lambda: _print(result),
            interrupted=result.interrupted, as_json=as_json, report=report, force=force,
        )  # fmt: skip


def _print(result: Tuned) -> None:
    if result.chosen is None:
        click.echo("nothing was measured")
        return
    table = result.table
    click.echo(f"{bold(result.name)}: {table.title}")
    print_table(table.head, table.rows)
    for note in result.notes:
        print_finding(note)
    click.echo(f"\nchosen: {one_line(result.why)}.\n")
    click.echo(f"  {bold(result.call)}")
