"""`fastload tune`: searches the arguments of `FastLoader` that suit a file on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload.cli.arguments import AsJson, Force, ImageFile, Report
from fastload.cli.command_line import Given
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
from fastload.options import from_arguments
from fastload.options.measure import TuneOptions

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def tune(
    file: ImageFile,
    options: Annotated[dict[str, Any], Given(TuneOptions)],
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
        from fastload.options.measure import TuneOptions

        asked = from_arguments(TuneOptions, options)
        from fastload.profiling.tune.search import Search

        search = Search(file, asked)
        click.echo(f"up to {search.num_trials} trials in about {format_seconds(asked.seconds)}", err=True)
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
