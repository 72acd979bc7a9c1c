"""`fastload bench`: measures how fast a file can be loaded on this machine, and whether training waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from fastload.cli.arguments import AsJson, BatchSize, Device, Force, ImageFile, Report, Size, Split
from fastload.cli.command_line import Option
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

if TYPE_CHECKING:
    from fastload.plan.order import Shuffle
    from fastload.profiling.bench.benchmark import BenchResult

_SHUFFLES: dict[str, Shuffle] = {"auto": True, "chunk": "chunk", "full": "full", "none": False}


def bench(
    file: ImageFile,
    step: Annotated[
        str | None,
        Option(
            metavar="STEP",
            help="Train too: resnet50, resnet18, tiny, or sim:RATE, a simulated accelerator that takes RATE images/s "
            "and leaves the CPU free; sim:0.8x takes 0.8 of what the loader gives.",
        ),
    ] = None,
    batch_size: BatchSize = None,
    seconds: Annotated[float, Option(help="Time for each part.")] = 5.0,
    workers: Annotated[int | None, Option(least=1, help="Threads or processes that load.")] = None,
    shuffle: Annotated[Literal["auto", "chunk", "full", "none"], Option(help="Order of the samples.")] = "auto",
    split: Split = None,
    device: Device = None,
    size: Size = None,
    seed: Annotated[int, Option(help="Seed of the order.")] = 0,
    compare: Annotated[bool, Option("--compare", help="Compare with a plain DataLoader of the same samples.")] = False,
    source: Annotated[
        Path | None,
        Option(
            help="What FILE was packed from; --compare then also measures a plain DataLoader of the image files.",
        ),
    ] = None,
    cold: Annotated[
        bool, Option("--cold", help="Drop FILE from the page cache before each pass, and say whether it worked.")
    ] = False,
    inject: Annotated[
        list[str] | None,
        Option(
            metavar="FAULT",
            help="Show how the loop takes a fault: slow-disk=MS, stall=MS@EVERY, kill-worker; may be repeated.",
        ),
    ] = None,
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
        from fastload.profiling.bench.benchmark import BenchOptions, run_bench
        from fastload.remote.urls import as_given, short_name

        asked = BenchOptions(
            batch_size=batch_size, seconds=seconds, workers=workers, shuffle=_SHUFFLES[shuffle], device=device,
            seed=seed, split=split, step=step, compare=compare, source=source, cold=cold, faults=tuple(inject or ()),
            size=size,
        )  # fmt: skip
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
