"""What all commands share: help, exit codes, one-line errors, no torch."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import typer.main
from child_processes import run_python
from commands import PROCESS, refused, run
from typer.testing import CliRunner

import fastload.cli
from fastload.cli import app, export, main, merge, pack, repack
from fastload.export import export_file
from fastload.format.writer import CHUNK_BYTES
from fastload.pack import pack_images
from fastload.repack import merge_files, repack_file

COMMANDS = ("pack", "layouts", "info", "verify", "preview", "export", "repack", "merge", "doctor", "bench", "tune")
README = Path(__file__).parents[2] / "README.md"


def fastload_process(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROCESS, *map(str, args)], capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]


def test_help_lists_every_command_with_one_line() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for command in COMMANDS:
        line = next(line for line in result.output.splitlines() if re.match(rf"\W*{command} +", line))
        assert re.search(rf"{command} +\w.*\.", line), line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(command: str) -> None:
    run(command, "-h")
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert parameters or command == "layouts"
    assert [parameter.name for parameter in parameters if not parameter.help] == []


@pytest.mark.parametrize(
    ("command", "function", "own"),
    [
        (pack, pack_images, {"dry_run"}),
        (repack, repack_file, {"split", "label", "key", "rows"}),
        (merge, merge_files, set()),
        (export, export_file, set()),
    ],
)
def test_a_command_has_the_arguments_of_its_function(
    command: Callable[..., None], function: Callable[..., object], own: set[str]
) -> None:
    ours, theirs = inspect.signature(command).parameters, inspect.signature(function).parameters
    assert ours.keys() - own == theirs.keys() - {"progress", "choice"}
    parsed = {"8MiB": CHUNK_BYTES, "": ()}  # of chunk_bytes and labels
    hints, choices = get_type_hints(command), get_type_hints(function)
    for name in ours.keys() - own:
        default = theirs[name].default
        assert ours[name].default == default or parsed[ours[name].default] == default, name
        if "Literal" in str(choices[name]) and name != "bits":
            assert hints[name] == choices[name], name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_stands_in_the_readme(command: str) -> None:
    if not README.exists():
        pytest.skip("the tests run without the README beside them")
    assert re.search(rf"fastload {command}\b", README.read_text())


def test_version_is_one_line() -> None:
    assert re.fullmatch(r"fastload .+\n", run("--version").output)


def test_python_m_fastload_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "fastload", "pakc"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert "Usage: fastload " in result.stderr and "No such command 'pakc'" in result.stderr


def test_an_error_is_one_line_on_stderr_and_exit_code_1(tmp_path: Path) -> None:
    result = fastload_process("info", tmp_path / "absent.h5")
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: .*absent\.h5: no such file.*\n", result.stderr)


def test_wrong_usage_is_exit_code_2() -> None:
    assert fastload_process("info").returncode == 2
    run("no-such-command", code=2)
    run("info", "a.h5", "--no-such-option", code=2)


def test_a_folder_without_permission_is_one_line(tmp_path: Path, packed_copy: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    packed_copy.chmod(0)
    refused("info", packed_copy)


def test_a_reader_that_leaves_early_is_no_error(packed_copy: Path) -> None:
    command = f"{sys.executable} -c 'from fastload.cli import main; main()' info {packed_copy}"
    # The shell closes its end before the command has written anything.
    result = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
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
def test_commands_import_no_more_than_they_need(
    packed_copy: Path, image_folder: Callable[..., Path], tmp_path: Path, command: str, unwanted: str
) -> None:
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


def test_windows_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fastload.cli.sys, "platform", "win32")  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert re.fullmatch(r"error: fastload runs on Linux and macOS, not on Windows.*\n", capsys.readouterr().err)
