from __future__ import annotations

import warnings

import click
import pytest

from fastload.cli import app
from fastload.cli.output import (
    MAX_NAMED,
    _progress_lines,
    as_options,
    changes,
    format_seconds,
    in_lines,
    one_line,
    one_line_errors,
    print_table,
    show_warnings_in_one_line,
)
from fastload.errors import SourceError


def test_control_characters_and_undecodable_bytes_are_written_out_and_durations_are_for_people():
    assert one_line("a\nb\x1b[31m\udcff é") == "a\\nb\\x1b[31m\\udcff é"


def test_what_is_printed_of_a_text_of_any_length_is_bounded(capsys):
    name = "a" + 10**6 * "\x1b" + "z: how to fix it"
    assert one_line(name).startswith(r"a\x1b") and one_line(name).endswith("z: how to fix it")
    assert "990,017 letters left out" in one_line(name) and len(one_line(name)) < 41_000
    print_table(("field", "type"), [(name, "int64"), ("b", "int64")])
    out = capsys.readouterr().out
    assert len(out) < 3_000 and "\x1b" not in out

    durations = {0.04: "40 ms", 4.24: "4.2 s", 200: "3 min 20 s", 7500: "2 h 5 min"}
    assert {seconds: format_seconds(seconds) for seconds in durations} == durations


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("codec='x' is not known", "--codec x is not known"),
        ("a.h5: exists; replace it with `--overwrite` (`force=True`).", "a.h5: exists; replace it with `--overwrite`."),
        ("seed=-1 must be a whole number", "--seed -1 must be a whole number"),
        ("give overwrite=True.", "give --overwrite."),
        ("label=cat/0.jpg: cannot be read", None),
        ("data/label=cat/0.jpg: cannot be read", None),
        ("take FastLoader(a, seed=3, shuffle='full')", None),
        ("my_seed=3", None),
    ],
)
def test_arguments_in_messages_are_shown_as_options_but_in_calls_and_paths(message, shown):
    with click.Context(app.get_command(click.Context(app), "repack")):
        assert as_options(message) == (shown or message)


def test_a_long_message_is_cut_into_lines_behind_sentences_or_words():
    message = " ".join(f"Sentence {i} has five words." for i in range(60))
    lines = in_lines(message).split("\n  ")
    assert " ".join(lines) == message and all(200 < len(line) <= 400 for line in lines[:-1])
    assert all(line.endswith(".") for line in lines)
    assert in_lines("word " * 200).count("\n") == 2 and in_lines("a" * 1000) == "a" * 1000


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SourceError("photos: no image.\nsecond line"), 1, "error: photos: no image.\\nsecond line\n"),
        (PermissionError(13, "Permission denied", "x.h5"), 1, "error: x.h5: Permission denied.\n"),
        (KeyboardInterrupt(), 130, "error: run again\n"),
    ],
)
def test_what_ends_a_command_is_one_line(error, code, message, capsys):
    with pytest.raises(click.exceptions.Exit) as end, one_line_errors("run again"):
        raise error
    assert end.value.exit_code == code
    assert capsys.readouterr().err == message
    # Our own bugs keep their traceback.
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


def test_warnings_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show_warnings_in_one_line()
        warnings.warn("no labels found", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: no labels found\n"


def test_all_skipped_are_named_or_counted_by_folder():
    skipped = [(f"train/cat/{i}.jpg", "truncated") for i in range(MAX_NAMED)]
    assert changes({}, skipped)[1:] == [("", f"train/cat/{i}.jpg: truncated") for i in range(MAX_NAMED)]
    more = skipped + [(f"train/dog/{i}.jpg", "empty") for i in range(3)] + [("top.jpg", "empty")]
    assert changes({}, more)[-1][1] == "and 4 more: 3 in train/dog, 1 in the top folder"


def test_progress_lines_come_seldom(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr("fastload.cli.output.time.monotonic", lambda: clock[0])
    progress = _progress_lines("images")
    for done in range(101):
        progress("packing", done * 10, 1000)
        clock[0] += 0.125
    assert capsys.readouterr().err.splitlines() == [
        "packing: 400 of 1,000, 80 images/s, 7.5 s left",
        "packing: 800 of 1,000, 80 images/s, 2.5 s left",
    ]
