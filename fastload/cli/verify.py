"""`fastload verify`: checks that every row is still what was packed, and still what its source image decodes to."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from fastload.cli.arguments import AsJson, PackedName
from fastload.cli.output import format_seconds, one_line, one_line_errors, print_error, print_json, progress_bar
from fastload.options import Option
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.inspection.verify import VerifyReport

MAX_ROWS = 100


def verify(
    file: PackedName,
    source: Annotated[Path | None, Option(help="The source of FILE: decode every image again and compare.")] = None,
    root: Annotated[Path | None, Option(help="Folder that a table's paths are relative to.")] = None,
    shard: Annotated[int | None, Option(help="Of an index, check only the shard of this number.")] = None,
    workers: Annotated[int | None, Option(help="Threads and processes to work with; by default one per CPU.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that every row is still what was packed.

    Names the damaged rows, and ends with exit code 1 if there are any.
    With --source, every source image is decoded again and compared.
    """
    with one_line_errors():
        from fastload.inspection.verify import verify_file

        started = time.perf_counter()
        with progress_bar("rows") as advance:
            progress = partial(advance, "verifying")
            report = verify_file(file, source=source, root=root, shard=shard, workers=workers, progress=progress)
        if as_json:
            print_json(report.to_dict())
        else:
            _print(report, time.perf_counter() - started)
        if not report.ok:
            raise click.exceptions.Exit(1)


def _print(report: VerifyReport, seconds: float) -> None:
    rows, source, wrong = counted(report.num_rows, "row"), report.source, []
    fix = advice("damaged")
    if not report.header_ok:
        click.echo("header: shapes, attributes or digests changed since packing")
        wrong.append("its header is damaged")
    if report.damaged:
        not_packed = {what: f"its {what} changed since packing" for what in ("pixels", "fields")}
        _print_some([f"row {row.row} ({row.key}): {not_packed.get(row.what, row.what)}" for row in report.damaged])
        wrong.append(f"{len({row.row for row in report.damaged}):,} of {rows} damaged")
    if source:
        if source.changed:
            _print_some([f"row {row.row} ({row.key}): {row.reason}" for row in source.changed])
            wrong.append(f"{len(source.changed):,} of {rows} no longer as in the source")
        if source.missing:
            _print_some([f"missing from the source: {key}" for key in source.missing])
            wrong.append(f"{len(source.missing):,} of {rows} missing from the source")
        if source.of_others:
            click.echo(f"not of this source: {len(source.of_others):,} of {rows} ({advice('joined')})")
            _print_some([f"  {key}" for key in source.of_others])
        if source.extra:
            only = "in the source only (added since, or left out when it was packed)"
            click.echo(f"{only}: {len(source.extra):,}")
            _print_some([f"  {key}" for key in source.extra])
        decoded = "exactly the packed pixels"
        if not source.same_decoder:
            decoded = (
                f"the packed pixels, {source.inexact:,} of them within {source.max_levels:.0f} levels only: the "
                f"decoder is now {source.decoder_now}, packed was with {source.decoder_file}"
            )
        click.echo(f"source: {report.equal:,} of {source.compared:,} images decode to {decoded}")
    if report.ok:
        size = f"{format_bytes(report.pixel_bytes)} in {format_seconds(seconds)}"
        click.echo(f"{one_line(report.name)}: {rows}, every digest matches ({size})")
    else:
        if report.header_ok and not report.damaged:  # only the source is another one
            fix = advice("source changed")
        print_error(f"{report.path}: {', '.join(wrong)}. {fix}.")


def _print_some(lines: list[str]) -> None:
    for line in lines[:MAX_ROWS]:
        click.echo(one_line(line))
    if len(lines) > MAX_ROWS:
        click.echo(advice("more damage", count=f"{len(lines) - MAX_ROWS:,}"))
