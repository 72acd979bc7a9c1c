"""What all commands share: help, exit codes, one-line errors, no torch."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from child_processes import run_python, under_permissions
from click.testing import CliRunner
from commands import PROCESS, run

import fastload.cli
from fastload.cli import app, main
from fastload.errors import OptionError
from fastload.export import export_file
from fastload.pack import pack_images
from fastload.repack import append_images, merge_files, repack_file

COMMANDS = (
    "pack",
    "layouts",
    "info",
    "verify",
    "preview",
    "export",
    "repack",
    "merge",
    "doctor",
    "bench",
    "tune",
    "cache",
)
README = Path(__file__).parents[2] / "README.md"
WIDTHS = (60, 80, 120)


def kept_help(width: int) -> Path:
    return Path(__file__).parents[1] / "data" / f"help-{width}.txt"


def drawn_help(width: int) -> dict[str, str]:
    """Returns the help of every command on a terminal of so many columns."""
    return {
        name: CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": str(width)}).output
        for name in ("", *app.functions)
    }


def fastload_process(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROCESS, *map(str, args)], capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]


def test_every_command_has_a_line_of_help_and_one_for_each_option_and_stands_in_the_readme():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for command in COMMANDS:
        line = next(line for line in result.output.splitlines() if re.match(rf"\W*{command} +", line))
        assert re.search(rf"{command} +\w.*\.", line), line
        run(command, "-h")
        found = app.get_command(click.Context(app), command)
        parts = (
            [found.get_command(click.Context(found), name) for name in found.functions]
            if command == "cache"
            else [found]
        )
        for part in parts:
            lines = [line for lines in part.lines.values() for line in lines]
            assert part.help and len(lines) == len(part.params) + 1  # --help
            assert all(term and re.search(r"\.( \[.+\])?$", text) for term, text in lines), lines
        # The tests may run without the README beside them.
        assert not README.exists() or re.search(rf"fastload {command}\b", README.read_text()), command


@pytest.mark.parametrize("width", WIDTHS)
def test_help_is_drawn_as_kept_cuts_no_word_and_fits_a_screen(width):
    shown = drawn_help(width)
    for name, text in shown.items():
        drawn = text.partition("Examples:")[0]  # what is to be copied stays on one line
        assert max(map(len, drawn.splitlines())) <= width, name
        lines = getattr(app.get_command(click.Context(app), name), "lines", {})
        words = {word for rows in lines.values() for _, help in rows for word in help.split()}
        assert words <= set(text.split()), name
    assert width != 80 or len(shown["pack"].splitlines()) <= 90
    kept = kept_help(width).read_text()
    assert "\n".join(shown.values()) == kept, "if it is meant: python tools/refresh_golden.py help"


@pytest.mark.parametrize(
    ("name", "function", "own"),
    [
        ("pack", pack_images, {"dry_run", "plan", "shard_index", "num_shards"}),
        ("repack", repack_file, set()),
        ("merge", merge_files, set()),
        ("append", append_images, {"file", "output"}),
        ("export", export_file, set()),
    ],
)
def test_a_command_has_the_arguments_of_its_function(name, function, own):
    command = app.get_command(click.Context(app), name)
    ours, theirs = {each.name: each for each in command.params}, inspect.signature(function).parameters
    assert ours.keys() - own == theirs.keys() - {"progress", "remote", *own}
    for option in ours.keys() - own:
        if isinstance(ours[option], click.Option):
            asked = f"{option}: "
            assert asked in function.__doc__, "every option is in the docstring"


def test_arguments_of_no_option_and_those_of_one_that_are_not_accepted_are_named(tmp_path):
    with pytest.raises(OptionError, match=r"pack_images has no argument shard=. Did you mean shards=\?"):
        pack_images(tmp_path, tmp_path / "a.h5", shard=3)
    with pytest.raises(OptionError, match=r"repack_file has no argument xyzzy=\. It has chunk_bytes, "):
        repack_file(tmp_path / "a.h5", tmp_path / "b.h5", xyzzy=1)
    with pytest.raises(OptionError, match="fit='squash' is not known; accepted: crop, pad, stretch"):
        pack_images(tmp_path, tmp_path / "a.h5", fit="squash")
    with pytest.raises(OptionError, match="max_size=0: needs at least 1, such as 256"):
        pack_images(tmp_path, tmp_path / "a.h5", max_size=0)


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("fastload pa", 1, ["plain,pack"]),
        ("fastload pack a/ b.h5 --fi", 4, ["plain,--fit"]),
        ("fastload pack a/ b.h5 --fit ", 5, ["plain,crop", "plain,pad", "plain,stretch"]),
        ("fastload pack ph", 2, ["file,ph"]),
        ("fastload cache l", 2, ["plain,list"]),
    ],
)
def test_a_shell_completes_commands_options_choices_and_paths(words, position, expected):
    asked = {"_FASTLOAD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    assert fastload_process(env=os.environ | asked).stdout.splitlines() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell):
    assert "_FASTLOAD_COMPLETE" in run("--completion", shell).output


def test_wrong_usage_is_exit_code_2_and_python_m_fastload_is_the_command():
    assert run("--version").output == run("-V").output
    assert re.fullmatch(r"fastload .+, compiled loops (built|none).*\n", run("--version").output)
    assert fastload_process("info").returncode == 2
    run("info", "a.h5", "--no-such-option", code=2)
    result = subprocess.run([sys.executable, "-m", "fastload", "pakc"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert "Usage: fastload " in result.stderr and "No such command 'pakc'" in result.stderr


def test_an_error_is_one_line_on_stderr_and_exit_code_1(tmp_path):
    result = fastload_process("info", tmp_path / "absent.h5")
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: .*absent\.h5: no such file.*\n", result.stderr)


def test_a_folder_without_permission_is_one_line(tmp_path, packed_copy):
    packed_copy.chmod(0)
    command = [*under_permissions(), *PROCESS, "info", packed_copy]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1 and result.stdout == ""
    assert re.fullmatch(r"error: .*file\.h5.*\n", result.stderr)


def test_a_reader_that_leaves_early_is_no_error(packed_copy):
    command = f"{sys.executable} -c 'from fastload.cli import main; main()' info {packed_copy}"
    # The shell closes its end before the command has written anything.
    shell = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
    result = subprocess.run(shell, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        ("info FILE", "torch rich PIL simplejpeg psutil fastload.pack fastload.sources"),
        ("verify FILE", "torch"),
        ("preview FILE", "torch"),
        ("pack FOLDER OUT --workers 1", "torch"),
    ],
)
def test_commands_import_no_more_than_they_need(packed_copy, image_folder, tmp_path, command, unwanted):
    script = (
        "import sys; from fastload.cli import app\n"
        "try: app(sys.argv[2:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "unwanted = {*sys.argv[1].split()} & {*sys.modules}\n"
        "assert not unwanted, unwanted"
    )
    paths = {"FILE": packed_copy, "FOLDER": image_folder(), "OUT": tmp_path / "out.h5"}
    words = [paths.get(word, word) for word in command.split()]
    run_python("-c", script, unwanted, *words)


def test_windows_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(fastload.cli.sys, "platform", "win32")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert re.fullmatch(r"error: fastload runs on Linux and macOS, not on Windows.*\n", capsys.readouterr().err)
