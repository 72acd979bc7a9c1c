"""The command `fastload`: each command parses its arguments, calls one function of the library, and prints the result.

One module for each command (`merge` and `export` are in `repack`, `layouts` in `pack`, `preview` in `info`); `output`
and `live` do the printing. Commands import the library only when they are called, so that `fastload info` starts in a
tenth of a second.
Nothing but `fastload.__main__` imports this package.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fastload.cli.bench import bench
from fastload.cli.doctor import doctor
from fastload.cli.info import info, preview
from fastload.cli.output import print_error, show_warnings_in_one_line
from fastload.cli.pack import layouts, pack
from fastload.cli.repack import export, merge, repack
from fastload.cli.tune import tune
from fastload.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="fastload",
    help="Pack an image dataset into one HDF5 file, and train from it in PyTorch without the GPU waiting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (pack, layouts, info, verify, preview, export, repack, merge, bench, tune, doctor):
    app.command()(_command)


def main() -> None:
    """Runs the command; a FastloadError ends it with one line and exit code 1, wrong usage with 2, Ctrl-C with 130."""
    if sys.platform == "win32":
        print_error("fastload runs on Linux and macOS, not on Windows; there, use it inside WSL 2.")
        raise SystemExit(1)
    show_warnings_in_one_line()
    app(prog_name="fastload")


def _print_version(wanted: bool) -> None:
    if wanted:
        from fastload.format.writer import writer_name

        typer.echo(writer_name())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
