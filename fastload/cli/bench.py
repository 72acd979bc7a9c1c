"""`fastload bench`: measures how fast a file can be loaded on this machine, and whether training waits for it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.live import live_panel
from fastload.cli.output import (
    INTERRUPTED,
    one_line,
    one_line_errors,
    print_error,
    print_json,
    print_pairs,
    print_table,
)
from fastload.cli.pack import parse_size

if TYPE_CHECKING:
    from fastload.profiling.bench.benchmark import BenchResult

_SHUFFLES = {"auto": True, "chunk": "chunk", "full": "full", "none": False}


def bench(
    file: Annotated[Path, typer.Argument(help="A packed file, or another HDF5 file of images.", show_default=False)],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Train too: resnet50, resnet18, tiny, or sim:RATE, a simulated accelerator that takes RATE images/s "
            "and leaves the CPU free; sim:0.8x takes 0.8 of what the loader gives.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a batch; by default 256.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for each part.")] = 5.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads or processes that load.", show_default=False)
    ] = None,
    shuffle: Annotated[Literal["auto", "chunk", "full", "none"], typer.Option(help="Order of the samples.")] = "auto",
    split: Annotated[str | None, typer.Option(help="Load this split only.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="Where batches go: cpu, cuda, cuda:1.", show_default=False)] = None,
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
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with a plain DataLoader of the same samples.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            help="What FILE was packed from; --compare then also measures a plain DataLoader of the image files.",
            show_default=False,
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop FILE from the page cache before each pass, and say whether it worked.")
    ] = False,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Show how the loop takes a fault: slow-disk=MS, stall=MS@EVERY, kill-worker; may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a report as an HTML page.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a report that exists.")] = False,
) -> None:
    """Measure how fast FILE can be loaded, and whether training waits for it.

    Measures the loader alone, and a bare copy of the same rows.
    With --step, also trains on the batches and says what limits the loop.
    Ctrl-C ends it and prints the results so far.
    """
    with one_line_errors():
        if report is not None:
            from fastload.profiling.report import check_report_path

            check_report_path(report, force=force)  # before minutes of measuring
        from fastload.profiling.bench.benchmark import run_bench
        from fastload.profiling.bench.faults import parse_fault
        from fastload.profiling.bench.steps import parse_step
        from fastload.profiling.bench.subject import BenchOptions

        options = BenchOptions(
            batch_size=batch_size,
            seconds=seconds,
            workers=workers,
            shuffle=_SHUFFLES[shuffle],  # type: ignore[arg-type]  # its values are shuffles
            device=device,
            seed=seed,
            split=split,
            step=parse_step(step) if step is not None else None,
            compare=compare,
            source=source,
            cold=cold,
            faults=tuple(map(parse_fault, inject or ())),
            size=size,
        )
        with live_panel(f"bench {file.name}", total_s=options.total_s) as show:
            result = run_bench(file, options, command=_command(), show=show)
        if report is not None:
            from fastload.profiling.report import write_report

            write_report(result.runs, report, force=force)
        if as_json:
            print_json(result.to_dict())
        else:
            _print(result)
        if result.interrupted:
            print_error("interrupted; the results above were measured before.")
            raise typer.Exit(INTERRUPTED)


def _command() -> str:
    return shlex.join(["fastload", *sys.argv[1:]]) if sys.argv[1:2] == ["bench"] else ""


def _print(result: BenchResult) -> None:
    from fastload.profiling.bench.facts import fault_facts, rival_table

    channels, height, width = result.image_shape
    shape = f"{height} x {width} x {channels}" if height and width else f"several sizes, {channels} channels"
    typer.echo(
        f"{typer.style(one_line(result.path.name), bold=True)}: {result.num_samples:,} images of {shape}, batches of "
        f"{result.batch_size:,}"
    )
    print_pairs(result.facts)
    if result.rivals:
        typer.echo()
        table = rival_table(result.rivals)
        print_table(table.head, table.rows)
    for fault in result.faults:
        typer.echo()
        print_pairs(fault_facts(fault))
    verdict = result.loop.measured.verdict if result.loop is not None else None
    if verdict is not None:
        typer.echo(f"\n{typer.style('verdict:', bold=True)} {one_line(verdict.sentence)}")
