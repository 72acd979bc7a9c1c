"""The live panel of bench, tune and doctor: a few figures, updated while something runs, that vanish at the end."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

import click

from fastload.cli.output import format_seconds, now_and_then, one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Show = Callable[[Mapping[str, str | float]], None]
"""Called with the current figures, by name, in display order."""

HISTORY = 40
WIDTH = 76
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_panel(title: str, total_s: float | None = None, *, script_runs: bool = False) -> Iterator[Show]:
    """Yields a function to be called, from any thread, with the current figures; the display ends with the block.

    On a terminal it is a panel with a running clock; a figure that is a number also gets a small curve of its last
    values. Elsewhere it is a line every few seconds, and none for shorter runs. Both go to stderr.

    A script that runs meanwhile writes to the same stdout and stderr, and its output must not be disturbed. So with
    `script_runs` nothing is shown there. Only if both are redirected away from any terminal, the panel is drawn on the
    terminal in which the command was typed, as long as it runs in the foreground there.

    `total_s` is how long it will take; None: not known.
    """
    with ExitStack() as stack:
        terminal = sys.stderr if _is_terminal(sys.stderr) else None
        if script_runs:
            terminal = stack.enter_context(_free_terminal())
        if terminal is None:
            yield show_nothing if script_runs else _lines(title, total_s)
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=terminal)
        panel = _Panel(title, total_s)
        # Transient: cleared at the end, also after Ctrl-C. Output on stderr meanwhile appears above the panel; stdout
        # may be a file or a pipe and is left alone.
        live = Live(
            get_renderable=lambda: panel.draw(console), console=console, refresh_per_second=4, transient=True,
            redirect_stdout=False, redirect_stderr=terminal is sys.stderr,
        )  # fmt: skip
        stack.enter_context(live)
        yield panel.show


def show_nothing(_figures: Mapping[str, str | float]) -> None:
    """Does nothing. `live_panel` yields it where nothing is shown, so that a caller need not compute figures."""


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a panel can be drawn there."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in (None, "dumb")


@contextmanager
def _free_terminal() -> Iterator[TextIO | None]:
    """Yields the terminal of this session, if nothing else writes there; else None."""
    if any(stream is None or stream.isatty() for stream in (sys.stdout, sys.stderr)):
        yield None
        return
    with ExitStack() as stack:
        terminal = None
        with suppress(OSError):  # started by cron, CI or a daemon, or not in the foreground of a terminal
            opened = stack.enter_context(open("/dev/tty", "w", encoding="utf-8"))
            if os.tcgetpgrp(opened.fileno()) == os.getpgrp() and _is_terminal(opened):
                terminal = opened
        yield terminal


class _Panel:
    """The contents of the panel; `show` may be called from any thread."""

    def __init__(self, title: str, total_s: float | None) -> None:
        self._title, self._total_s = one_line(title), total_s
        self._began = time.monotonic()
        self._figures: dict[str, str | float] = {}
        self._history: dict[str, deque[float]] = {}

    def show(self, figures: Mapping[str, str | float]) -> None:
        for name, value in figures.items():
            if not isinstance(value, str):
                self._history.setdefault(name, deque(maxlen=HISTORY)).append(float(value))
        # Replaced, never changed in place: the thread that draws may be reading it.
        self._figures = dict(figures)

    def draw(self, console: Console) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        elapsed = time.monotonic() - self._began
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="cyan", no_wrap=True)
        lines.add_column(justify="right", no_wrap=True)
        lines.add_column(style="blue", no_wrap=True)
        width = min(console.width, WIDTH)
        rows = [(name, one_line(name), figure_text(value)) for name, value in self._figures.items()]
        room = width - 8 - sum(max((len(row[column]) for row in rows), default=0) for column in (1, 2))
        for name, shown, value in rows:
            curve = sparkline(list(self._history.get(name, ()))[-room:]) if room > 1 else ""
            lines.add_row(Text(shown), Text(value), curve)
        whole = Table.grid()
        whole.add_row(lines)
        if self._total_s:
            whole.add_row(ProgressBar(self._total_s, completed=min(elapsed, self._total_s), width=width - 4))
        title, times = Text(self._title, style="bold", overflow="ellipsis"), Text(times_text(elapsed, self._total_s))
        return Panel(
            whole, title=title, subtitle=times, title_align="left", subtitle_align="left", border_style="dim",
            width=width,
        )  # fmt: skip


def _lines(title: str, total_s: float | None) -> Show:
    """Returns what shows the same figures in logs: a line every few seconds."""
    due = now_and_then()

    def show(figures: Mapping[str, str | float]) -> None:
        if elapsed_s := due():
            parts = [times_text(elapsed_s, total_s), *(f"{name} {figure_text(figures[name])}" for name in figures)]
            click.echo(one_line(f"{title}: {', '.join(parts)}"), err=True)

    return show


def times_text(elapsed_s: float, total_s: float | None) -> str:
    """Returns `12 s`, or `12 s, about 8 s left`."""
    left_s = 0.0 if total_s is None else total_s - elapsed_s
    elapsed, left = (f"{s:.0f} s" if s < 59.5 else format_seconds(s) for s in (elapsed_s, left_s))
    if total_s is None:
        return elapsed
    return f"{elapsed}, about {left} left" if left_s >= 1 else f"{elapsed}, soon done"


def figure_text(value: str | float) -> str:
    """Returns a figure as text: `61,200`, `61.2`, `0.61`; text is put on one line."""
    from fastload.system.text import number_text

    return one_line(value) if isinstance(value, str) else number_text(value)


def sparkline(values: list[float]) -> str:
    """Returns the values as small bars above zero, the largest as the tallest; "" for fewer than two values."""
    values = [value if 0 <= value < float("inf") else 0.0 for value in values]
    highest = max(values, default=0.0)
    if len(values) < 2 or highest <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in values)
