"""What the commands print: aligned lines on stdout; progress, warnings and one-line errors on stderr."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from fastload.errors import FastloadError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it; a broken pipe likewise gives 141."""
BROKEN_PIPE = 141

LINE_EVERY_S = 5.0
MAX_SKIPPED = 1000

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@contextmanager
def one_line_errors(interrupted: str = "interrupted.") -> Iterator[None]:
    """Turn what ends a command early into one line on stderr and an exit code.

    Args:
        interrupted: said after Ctrl-C.
    """
    try:
        yield
        if sys.stdout is not None:  # None where it was closed: `fastload ... >&-`
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has gone; what is left in the buffer must not be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except FastloadError as exc:
        print_error(str(exc))
        raise typer.Exit(1) from exc
    except OSError as exc:
        # The machine's no (a folder without permission, a failing disk), not a bug: a traceback would not help.
        print_error(f"{exc.filename}: {exc.strerror}." if exc.filename and exc.strerror else str(exc))
        raise typer.Exit(1) from exc
    except KeyboardInterrupt:
        print_error(interrupted)
        raise typer.Exit(INTERRUPTED) from None


def print_error(message: str) -> None:
    """Print one line `error: ...` on stderr."""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {one_line(message)}", err=True)


def show_warnings_in_one_line() -> None:
    """Print warnings of the library as `warning: ...` on stderr, without the line of code they came from."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} {one_line(str(message))}", err=True)

    warnings.showwarning = show


def one_line(text: str) -> str:
    """The text with line breaks, control characters and undecodable bytes written out, safe for any terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", errors="backslashreplace").decode() for c in text
    )


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print `name  value` lines, aligned; an empty name continues the line above."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        typer.echo(f"  {typer.style(name.ljust(width), fg='cyan')}  {one_line(value)}".rstrip())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a head, in columns as wide as their widest cell."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for number, row in enumerate([head, *rows]):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        typer.echo("  " + (typer.style(text, bold=True) if number == 0 else text))


def print_json(value: Any) -> None:
    """Print one JSON object."""
    import json

    typer.echo(json.dumps(value, indent=2, default=str))


def skipped_lines(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """`key: reason` of each sample; after MAX_SKIPPED of them how many more there are, and in which folders."""
    lines = [f"{key}: {reason}" for key, reason in skipped[:MAX_SKIPPED]]
    rest = Counter(key.rpartition("/")[0] or "the top folder" for key, _ in skipped[MAX_SKIPPED:])
    if rest:
        where = ", ".join(f"{count:,} in {folder}" for folder, count in rest.most_common(5))
        others = sum(rest.values()) - sum(count for _, count in rest.most_common(5))
        lines.append(f"and {sum(rest.values()):,} more: {where}{f', {others:,} elsewhere' if others else ''}")
    return lines


@contextmanager
def progress_bar(unit: str = "images") -> Iterator[Progress]:
    """A function to call with (stage, done, total): a bar on a terminal, else a line now and then; on stderr."""
    if not sys.stderr.isatty():
        yield _ProgressLines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    tasks: dict[str, tuple[Any, float, int]] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = (bars.add_task(stage, total=total, rate=""), time.monotonic(), done)
            task, started, first = tasks[stage]
            bars.update(task, completed=done, total=total, rate=_rate(done - first, time.monotonic() - started, unit))

        yield advance


class _ProgressLines:
    """Progress for logs: a line every few seconds, none for what takes less."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._stage = ""
        self._started = self._last = 0.0
        self._first = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._last, self._first = stage, now, now, done
        if now - self._last < LINE_EVERY_S:
            return
        self._last = now
        elapsed, fresh = now - self._started, done - self._first
        left = f", {format_seconds(elapsed / fresh * (total - done))} left" if fresh else ""
        typer.echo(f"{stage}: {done:,} of {total:,}, {_rate(fresh, elapsed, self._unit)}{left}", err=True)


def _rate(count: int, seconds: float, unit: str) -> str:
    return f"{count / seconds:,.0f} {unit}/s" if seconds > 0.2 else ""


def format_seconds(seconds: float) -> str:
    """A duration for people: `40 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
