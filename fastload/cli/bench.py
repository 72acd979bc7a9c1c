"""`fastload bench`: measures how fast a file can be loaded on this machine, and whether training waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload.cli.arguments import AsJson, Force, ImageFile, Report
from fastload.cli.command_line import Given
from fastload.cli.live import live_panel
from fastload.cli.output import (
    bold,
    check_report,
    command_line,
    one_line,
    one_line_errors,
    print_pairs,
    print_table,
    show_result,
)
from fastload.options import from_arguments
from fastload.options.measure import BenchOptions

if TYPE_CHECKING:
    from fastload.profiling.bench.benchmark import BenchResult


def bench(
    file: ImageFile,
    options: Annotated[dict[str, Any], Given(BenchOptions)],
    as_json: AsJson = False,
    report: Report = None,
    force: Force = False,
) -> None:
    """Measure how fast FILE can be loaded, and whether training waits for it.

    Measures the loader alone, and a bare copy of the same rows.
    With --step, also trains on the batches and says what limits the loop.
    Ctrl-C ends it and prints the results so far.
    """
    with one_line_errors():
        check_report(report, force=force)
        from fastload.options.measure import BenchOptions
        from fastload.profiling.bench.benchmark import run_bench
        from fastload.remote.urls import as_given, short_name

        asked = from_arguments(BenchOptions, options)
        with live_panel(f"bench {short_name(as_given(file))}", total_s=asked.total_s) as show:
            result = run_bench(file, asked, command=command_line(), show=show)
        show_result(
            result.runs, result.to_dict(), lambda: _print(result),
            interrupted=result.interrupted, as_json=as_json, report=report, force=force,
        )  # fmt: skip


def _print(result: BenchResult) -> None:
    from fastload.profiling.bench.benchmark import fault_facts, rival_table
    from fastload.remote.urls import short_name

    channels, height, width = result.image_shape
    shape = f"{height} x {width} x {channels}" if height and width else f"several sizes, {channels} channels"
    click.echo(
        f"{bold(short_name(result.path))}: {result.num_samples:,} images of {shape}, batches of {result.batch_size:,}"
    )
    print_pairs(result.facts)
    if result.rivals:
        click.echo()
        table = rival_table(result.rivals, result.cpus)
        print_table(table.head, table.rows)
    for fault in result.faults:
        click.echo()
        print_pairs(fault_facts(fault, result.cpus))
    verdict = result.loop.measured.verdict if result.loop is not None else None
    if verdict is not None:
        click.echo()
        for line in verdict.evidence:
            click.echo(f"  {one_line(line)}")
        click.echo(f"\n{bold('verdict:')} {one_line(verdict.sentence)}")
