"""Output of the commands: aligned lines on stdout; progress, warnings and one-line errors on stderr."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.errors import FastloadError, OutputError, training_needs
from fastload.remote.urls import is_url, shown
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.estimate import EncodingEstimates
    from fastload.options.pack import Progress
    from fastload.pack import PackReport
    from fastload.timing.results import Measured


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it; 141 after a broken pipe."""
BROKEN_PIPE = 141

CONTINUES = "interrupted; the same command continues where it stopped."

LINE_EVERY_S = 5.0
MAX_NAMED = 5

MOST_LETTERS, MOST_IN_CELL, MOST_OF_LINE = 10_000, 200, 400
"""Of a text that is printed, of one in a table, and of a message's line: names in a file may be of any length."""

_QUOTES = "\"'"

Pairs = Iterable[tuple[str, str]]
"""Lines of a name and a value."""


@contextmanager
def one_line_errors(interrupted: str = "interrupted.") -> Iterator[None]:
    """Turns errors that end a command into one line on stderr and an exit code; Ctrl-C into the line `interrupted`."""
    try:
        yield
        if sys.stdout is not None:  # None where it was closed: `fastload ... >&-`
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has ended: the rest of the buffer must not be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except FastloadError as exc:
        print_error(as_options(str(exc)))
        raise click.exceptions.Exit(1) from exc
    except ModuleNotFoundError as exc:
        needed = training_needs(exc, click.get_current_context().command_path)
        if needed is exc:
            raise
        print_error(str(needed))
        raise click.exceptions.Exit(1) from exc
    except OSError as exc:
        # The system refused (no permission, a failing disk). That is not a bug, so a traceback would not help.
        print_error(f"{exc.filename}: {exc.strerror}." if exc.filename and exc.strerror else str(exc))
        raise click.exceptions.Exit(1) from exc
    except KeyboardInterrupt:
        print_error(interrupted)
        raise click.exceptions.Exit(INTERRUPTED) from None


def as_options(message: str) -> str:
    """Returns a message of the library with the running command's options in place of Python's arguments.

    Those within a call are left, and what stands in a path, as in `label=cat/0.jpg`.
    """
    context = click.get_current_context(silent=True)
    found = context.command.params if context else []
    options = {each.name: max(each.opts, key=len) for each in found if isinstance(each, click.Option)}
    message = re.sub(r" \(`\w+=[^`]*`\)", "", message)  # `--overwrite` (`force=True`)

    def typed(match: re.Match[str]) -> str:
        name, value = match.groups()
        if re.search(r"\w\([^()]*$", message[: match.start()]):
            return match[0]
        return options[name] if value == "True" else f"{options[name]} {value.strip(_QUOTES)}"

    names = "|".join(name for name in options if name)
    value = r"('[^']*'|\"[^\"]*\"|[^\s:;)`/]*[^\s:;.,)`/])(?![^\s:;.,)`])"
    return re.sub(rf"(?<![\w/.=-])({names})={value}", typed, message) if names else message


def print_error(message: str) -> None:
    """Prints one line `error: ...` on stderr."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {in_lines(message)}", err=True)


def print_finding(text: str) -> None:
    """Prints one line `! ...`, on something to know or to change."""
    click.echo(f"{click.style('!', fg='yellow', bold=True)} {in_lines(text)}")


def bold(text: object) -> str:
    """Returns a text, or the name of a file, on one line and in bold type."""
    return click.style(one_line(str(text)), bold=True)


def show_warnings_in_one_line() -> None:
    """Prints the library's warnings, and what it logs, as `warning: ...` on stderr, without the line of code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {in_lines(str(message))}", err=True)

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            show(record.getMessage() + (f": {error}" if error is not None else ""))

    warnings.showwarning = show
    logging.getLogger("fastload").addHandler(Shown(logging.WARNING))


def one_line(text: str, most: int = MOST_LETTERS) -> str:
    """Returns the text with line breaks, control characters and undecodable bytes escaped, safe for any terminal.

    Of one longer than `most` letters its beginning and end, where messages say what to do.
    """
    if len(text) > most:
        part = most // 2
        text = f"{text[:part]} ... ({len(text) - 2 * part:,} letters left out) ... {text[-part:]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", errors="backslashreplace").decode() for c in text
    )


def in_lines(text: str) -> str:
    """Returns a message as `one_line` does, or of more than MOST_OF_LINE letters as several lines, cut after words.

    A line ends with a sentence where one of them ends in its second half.
    """
    lines, rest = [], one_line(text)
    while len(rest) > MOST_OF_LINE:
        sentence = rest.rfind(". ", MOST_OF_LINE // 2, MOST_OF_LINE)
        end = sentence + 1 if sentence >= 0 else rest.rfind(" ", 0, MOST_OF_LINE)
        if end <= 0:
            break  # one word
        lines.append(rest[:end])
        rest = rest[end + 1 :]
    return "\n  ".join([*lines, rest])


def print_pairs(pairs: Pairs) -> None:
    """Prints `name  value` lines, aligned; an empty name continues the line above."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        click.echo(f"  {click.style(name.ljust(width), fg='cyan')}  {one_line(value)}".rstrip())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a head, in columns as wide as their widest cell."""
    rows = [[one_line(cell, MOST_IN_CELL) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for number, row in enumerate([head, *rows]):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo("  " + (click.style(text, bold=True) if number == 0 else text))


def print_written(head: str, path: Path, pairs: Pairs, notes: Iterable[str]) -> None:
    """Prints that `head` was written into a file or folder, and the notes on it."""
    print_with_notes(f"{head} into {bold(path)}", pairs, notes)


def print_with_notes(head: str, pairs: Pairs, notes: Iterable[str]) -> None:
    """Prints what was or would be packed: first what is not packed or in doubt, then how SRC was understood."""
    notes = list(notes)
    first = [note for note in notes if note.startswith(("NOT READ", "CHECK"))]
    understood = [note for note in notes if note.startswith("Layout ")]
    for note in first:
        print_finding(note)
    click.echo(head)
    layout = [("layout", note.removeprefix("Layout ")) for note in understood]
    print_pairs([*layout, *pairs, *(("note", note) for note in notes if note not in first + understood)])


def print_report(
    head: str,
    report: PackReport,
    *,
    unit: str,
    done: str,
    fields: Pairs = (),
    stored: Pairs,
    overwrite: bool,
) -> None:
    """Prints a new packed file's contents, and how it was made; lists samples left out in a file if they are many.

    `head` says how many of what were written, `unit` whether the speed is of images or rows, `done` whether chunks left
    by an interrupted call were packed or written; `fields` and `stored` are lines on the fields, encodings and size;
    `overwrite`: whether the file, and the list next to it, may be replaced.
    """
    pairs = [splits_pair(report.splits), *fields, *changes(report.converted, report.skipped)]
    if report.warned:
        pairs += _named("warned", f"{len(report.warned):,} {advice('strict')}", report.warned)
    alone = f"; decoding and writing alone {report.decoded_per_s:,.0f}" if report.decoded_per_s else ""
    name, speed = speed_pair(report.images_per_s, unit, report.seconds)
    pairs += [(name, speed + alone), *stored]
    if report.chunks_kept:
        pairs.append(("continued", f"{report.chunks_kept:,} of {report.chunks:,} chunks were already {done}"))
    print_written(head, report.path, pairs, report.notes)
    if len(report.skipped) > MAX_NAMED:
        _list_skipped(report, overwrite=overwrite)


def _list_skipped(report: PackReport, *, overwrite: bool) -> None:
    """Writes each sample that was left out, with its reason, to OUT.h5.skipped.csv, and says so."""
    from fastload.system.files import save_text

    path, text = report.path.with_name(f"{report.path.name}.skipped.csv"), io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("key", "reason"), *report.skipped])
    try:
        save_text(text.getvalue(), path, force=overwrite)
    except OutputError as error:
        print_finding(f"The list of all that were left out was not written: {error}")
    else:
        print_finding(f"{len(report.skipped):,} samples were left out: {path} lists each with its reason.")


def splits_pair(splits: Mapping[str, int]) -> tuple[str, str]:
    """Returns a line on the number of samples of each split."""
    return "splits", ", ".join(f"{name} {count:,}" for name, count in splits.items())


def speed_pair(per_s: float, unit: str, seconds: float) -> tuple[str, str]:
    """Returns a line on the speed of the whole command, if it is known, and its time."""
    return "speed", f"{f'{per_s:,.0f} {unit}/s, ' if per_s else ''}{format_seconds(seconds)} in all"


def changes(converted: Mapping[str, int], skipped: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns lines on what was converted, and on each sample that was left out."""
    pairs = [("converted", f"{what}: {count:,}") for what, count in converted.items()]
    return pairs + (_named("skipped", f"{len(skipped):,}", skipped) if skipped else [])


def _named(title: str, what: str, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns a line that says what was found, and a line on each sample, by key and reason.

    After MAX_NAMED samples, the number of the others and their folders.
    """
    pairs = [(title, what), *(("", f"{key}: {reason}") for key, reason in found[:MAX_NAMED])]
    rest = Counter(key.rpartition("/")[0] or "the top folder" for key, _ in found[MAX_NAMED:])
    if rest:
        most = rest.most_common(5)
        where = ", ".join(f"{count:,} in {folder}" for folder, count in most)
        others = rest.total() - sum(count for _, count in most)
        pairs.append(("", f"and {rest.total():,} more: {where}{f', {others:,} elsewhere' if others else ''}"))
    return pairs


def json_text(content: Mapping[str, Any]) -> str:
    """Returns a JSON object as all commands print and write it, without a line break at its end."""
    import json

    from fastload.timing.results import with_schema

    return json.dumps(with_schema(content), indent=2, default=str)


def print_json(content: Mapping[str, Any]) -> None:
    """Prints a JSON object, as docs/json.md describes it."""
    click.echo(json_text(content))


def check_report(report: Path | None, *, force: bool) -> None:
    """Refuses a report that cannot be written, before minutes of measuring."""
    if report is not None:
        from fastload.profiling.report import check_report_path

        check_report_path(report, force=force)


def command_line() -> str:
    """Returns the command that this process was started with; empty where it was called otherwise."""
    words = [shown(word) if is_url(word) else word for word in sys.argv[1:]]  # it may end up in a report
    return shlex.join(["fastload", *words]) if sys.argv[1:2] in (["bench"], ["tune"]) else ""


def show_result(
    runs: Sequence[Measured],
    content: Any,
    print_text: Callable[[], None],
    *,
    interrupted: bool,
    as_json: bool,
    report: Path | None,
    force: bool,
) -> None:
    """Writes the report of the runs, and prints the JSON object `content` or the text of the result."""
    if report is not None:
        from fastload.profiling.report import write_report

        write_report(runs, report, force=force)
    if as_json:
        print_json(content)
    else:
        print_text()
    if interrupted:
        print_error("interrupted; the results above were measured before.")
        raise click.exceptions.Exit(INTERRUPTED)


@contextmanager
def progress_bar(unit: str = "images") -> Iterator[Progress]:
    """Yields a function to call with (stage, done, total): a bar on a terminal, else a line now and then, on stderr."""
    if not sys.stderr.isatty():
        yield _progress_lines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    texts = (TextColumn("{task.description}"), TextColumn("{task.fields[rate]}"))
    columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeRemainingColumn(compact=True))
    tasks: dict[str, tuple[Any, float, int]] = {}
    bars = Progress(*columns, console=Console(stderr=True), transient=True)

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            bars.start()  # Not before: its thread would keep the packer from forking.
            tasks[stage] = (bars.add_task(stage, total=total, rate=""), time.monotonic(), done)
        task, started, first = tasks[stage]
        bars.update(task, completed=done, total=total, rate=_rate(done - first, time.monotonic() - started, unit))

    try:
        yield advance
    finally:
        bars.stop()


def _progress_lines(unit: str) -> Progress:
    """Returns the progress for logs: a line every few seconds, none for shorter stages."""
    stages: dict[str, tuple[Callable[[], float], int]] = {}

    def advance(stage: str, done: int, total: int) -> None:
        due, first = stages.setdefault(stage, (now_and_then(), done))
        if elapsed := due():
            fresh = done - first
            left = f", {format_seconds(elapsed / fresh * (total - done))} left" if fresh else ""
            click.echo(f"{stage}: {done:,} of {total:,}, {_rate(fresh, elapsed, unit)}{left}", err=True)

    return advance


def now_and_then() -> Callable[[], float]:
    """Returns a function for logs: the seconds since now when it is time for the next line, else 0."""
    started = last = time.monotonic()

    def due() -> float:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_EVERY_S:
            return 0.0
        last = now
        return now - started

    return due


def _rate(count: int, seconds: float, unit: str) -> str:
    return f"{count / seconds:,.0f} {unit}/s" if seconds > 0.2 else ""


def format_seconds(seconds: float) -> str:
    """Returns a duration as text: `40 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    from fastload.system.text import seconds_text

    return seconds_text(seconds)


def print_encodings(found: EncodingEstimates) -> None:
    """Prints size and loading rate of each encoding, and which one to choose."""
    rates = f"images/s read and decoded in {counted(found.threads, 'thread')}, without transforms"
    click.echo(f"\nstores, from {found.sampled:,} samples of these images on this machine ({rates})")
    rows = []
    for one in found.stores:
        from_disk = "?" if one.disk_samples_per_s is None else f"{one.disk_samples_per_s:,.0f}"
        sampled = ", ".join(f"{count} {name}" for name, count in one.encodings.items())
        size, share = format_bytes(one.bytes), f"{one.bytes / found.raw_bytes:.0%}"
        rows.append((one.store, size, share, f"{one.warm_samples_per_s:,.0f}", from_disk, sampled))
    print_table(("store", "size", "of raw", "from memory", "from this disk", "sampled rows"), rows)
    disk = found.disk
    rate = f"{format_bytes(disk.bytes_per_s)}/s, {disk.note}" if disk.bytes_per_s is not None else disk.note
    pairs = [("disk", rate), ("pick", found.reason)]
    if found.failed:
        pairs.append(("note", advice("undecodable", count=f"{found.failed:,}")))
    print_pairs(pairs)
