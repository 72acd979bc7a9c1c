"""The live panel: what it shows where, and that nothing of it stays."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fastload.cli.live import HISTORY, _lines, _Panel, figure_text, live_panel, sparkline, times_text

SHOWING = """
import sys, time
from fastload.cli.live import live_panel
try:
    with live_panel("bench x.h5", total_s=30, script_runs="beside" in sys.argv) as show:
        show({"images/s": 51234.0, "GPU": "no counters"})
        time.sleep(0.4)
        show({"images/s": 61234.0, "GPU": "no counters"})  # drawn at the end, if not before
        time.sleep(0.4)
        if "interrupt" in sys.argv: raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
print("the result")
"""
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def on_a_terminal(shell: str, tmp_path: Path, term: str = "xterm") -> str:
    """What a terminal is sent by a shell command in which `$SHOWING` is the program above."""
    (tmp_path / "showing.py").write_text(SHOWING)
    program = f"{sys.executable} {tmp_path / 'showing.py'}"
    code = f"import pty, sys; sys.exit(pty.spawn(['sh', '-c', {shell.replace('$SHOWING', program)!r}]))"
    environment = os.environ | {"TERM": term, "COLUMNS": "80", "LINES": "24"}
    return subprocess.check_output(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, text=True, env=environment, timeout=600
    )


def drawn(panel: _Panel, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(panel.draw(console))
    return console.file.getvalue()


@pytest.mark.parametrize("end", ["", "interrupt"])
def test_on_a_terminal_a_panel_comes_and_goes(tmp_path, end):
    sent = on_a_terminal(f"$SHOWING {end}", tmp_path)
    assert "61,234" in sent and "no counters" in sent and "left" in sent
    assert sent.count(HIDE) == sent.count(SHOW) == 1
    # Each line of the panel is erased (2K) on the way up (1A) before the result is printed.
    rest = sent[sent.index(SHOW) :]
    assert rest.replace(SHOW, "").replace("\x1b[1A", "").replace("\x1b[2K", "").split() == ["the", "result"]
    assert rest.count("\x1b[2K") >= 5


def test_the_result_alone_goes_to_a_redirected_stdout_and_to_a_terminal_that_cannot_move_its_cursor(tmp_path):
    sent = on_a_terminal(f"$SHOWING >{tmp_path}/out", tmp_path)
    assert "61,234" in sent and (tmp_path / "out").read_text() == "the result\n"
    assert on_a_terminal("$SHOWING", tmp_path, term="dumb").split() == ["the", "result"]


@pytest.mark.parametrize("redirect", ["", ">{0}/out", "2>{0}/err", ">{0}/out 2>&1 </dev/null"])
def test_beside_a_script_nothing_is_drawn_where_it_writes(tmp_path, redirect):
    sent = on_a_terminal(f"$SHOWING beside {redirect.format(tmp_path)}", tmp_path)
    both = redirect.endswith("</dev/null")
    assert ("61,234" in sent) == both
    for name in ("out", "err"):
        if (tmp_path / name).exists():
            assert (tmp_path / name).read_text() in ("", "the result\n")
    if not both:
        assert sent.strip() in ("", "the result")
    # Nor where there is no terminal at all.
    result = subprocess.run(
        [sys.executable, tmp_path / "showing.py", "beside"], capture_output=True, text=True, start_new_session=True
    )
    assert (result.stdout, result.stderr) == ("the result\n", "")


def test_in_a_log_a_line_comes_now_and_then_and_none_of_what_takes_a_moment(monkeypatch, capsys):
    with live_panel("bench x.h5") as show:
        show({"images/s": 1.0})
    assert capsys.readouterr() == ("", "")
    clock = [100.0]
    monkeypatch.setattr("fastload.cli.live.time.monotonic", lambda: clock[0])
    show = _lines("bench x.h5", 12.0)
    for second in range(12):
        clock[0] = 100.0 + second
        show({"images/s": 61234.0 + second, "GPU": "no\ncounters"})
    assert capsys.readouterr().err.splitlines() == [
        "bench x.h5: 5 s, about 7 s left, images/s 61,239, GPU no\\ncounters",
        "bench x.h5: 10 s, about 2 s left, images/s 61,244, GPU no\\ncounters",
    ]


def test_the_panel_fits_its_terminal_and_curves_what_is_a_number():
    panel = _Panel("bench \x1b[31mx.h5 " + "very " * 30, 10.0)
    for value in range(3 * HISTORY):
        panel.show({"images/s": float(value), "waiting for data": "3 %"})
    for width in (24, 40, 80, 200):
        lines = drawn(panel, width).splitlines()
        assert max(map(len, lines)) <= width
        assert "\x1b" not in "".join(lines)
    assert "█" in drawn(panel) and "119" in drawn(panel)
    assert drawn(_Panel("nothing yet", None))


def test_any_thread_may_show():
    panel = _Panel("bench", None)
    with ThreadPoolExecutor(4) as pool:
        shown = [pool.submit(panel.show, {"a": float(n), "b": str(n)}) for n in range(800)]
        for _ in range(20):
            assert drawn(panel)
    assert all(each.result() is None for each in shown)


def test_figures_times_and_curves_in_short():
    assert [figure_text(value) for value in (61234.4, 12.34, 0.612, 0, "3 %")] == ["61,234", "12.3", "0.61", "0", "3 %"]
    assert times_text(5, None) == "5 s" and times_text(200, None) == "3 min 20 s"
    assert times_text(9.6, 10) == "10 s, soon done" and times_text(30, 150) == "30 s, about 2 min 0 s left"
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█" and sparkline([1]) == sparkline([]) == sparkline([0, 0]) == ""
    assert sparkline([math.nan, -1.0, math.inf, 1.0]) == "▁▁▁█"
