"""The command `fastload`: each command parses its arguments, calls one function of the library, and prints the result.

One module for each command (`merge`, `append` and `export` are in `repack`, `layouts` in `pack`, `preview` in `info`;
`cache` has three of its own); `command_line` parses, `output` and `live` print. A command's module is imported when it
is called, and the library only then, so that `fastload info` starts in a tenth of a second.
Nothing but `fastload.__main__` imports this package.
"""

from __future__ import annotations

import atexit
import gc
import sys

import click

from fastload.cli.command_line import Commands
from fastload.cli.output import print_error, show_warnings_in_one_line

__all__ = ["app", "main"]

_GARBAGE = 100_000
"""Objects after which Python looks for garbage; 700 by default."""
_SHELLS = ("bash", "zsh", "fish")
_COMMANDS = {
    "pack": (
        "pack:pack",
        "fastload pack photos/ photos.h5\nfastload pack photos.zip small.h5 --size 224 --on-error skip",
    ),
    "layouts": ("pack:layouts", "fastload layouts"),
    "info": ("info:info", "fastload info photos.h5\nfastload info photos.h5 --stores"),
    "verify": ("verify:verify", "fastload verify photos.h5\nfastload verify photos.h5 --source photos/"),
    "preview": ("info:preview", "fastload preview photos.h5 -o photos.png"),
    "export": ("repack:export", "fastload export photos.h5 photos-again/ --split train"),
    "repack": ("repack:repack", "fastload repack photos.h5 some.h5 --split train --without 'bad/*'"),
    "append": ("repack:append", "fastload append photos.h5 new-photos/"),
    "merge": ("repack:merge", "fastload merge a.h5 b.h5 -o both.h5 --shuffle"),
    "index": ("repack:index", "fastload index out/a.h5 out/b.h5 -o out/all.h5"),
    "bench": ("bench:bench", "fastload bench photos.h5 --batch-size 64 --step sim:0.8x"),
    "tune": ("tune:tune", "fastload tune photos.h5 --batch-size 64"),
    "doctor": (
        "doctor:doctor",
        "fastload doctor -- python train.py\nfastload doctor --seconds 60 --report why.html -- torchrun train.py",
    ),
    "cache": ("cache:cache", ""),
}


def main() -> None:
    """Runs the command; a FastloadError ends it with one line and exit code 1, wrong usage with 2, Ctrl-C with 130."""
    if sys.platform == "win32":
        print_error("fastload runs on Linux and macOS, not on Windows; there, use it inside WSL 2.")
        raise SystemExit(1)
    show_warnings_in_one_line()
    # To look through all that was imported for garbage, again and again and once more at the end, took a fifth of a
    # short command.
    gc.set_threshold(_GARBAGE)
    atexit.register(gc.freeze)
    app(prog_name="fastload")


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from fastload.format.writer import writer_name
        from fastload.system.native import described

        click.echo(f"{writer_name()}, compiled loops {described()}")
        context.exit()


def _print_completion(context: click.Context, _option: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        from click.shell_completion import get_completion_class

        kind = get_completion_class(shell)
        assert kind is not None, "click completes these shells"
        click.echo(kind(app, {}, "fastload", "_FASTLOAD_COMPLETE").source())
        context.exit()


def _begin(version: bool, completion: str | None) -> None:
    from fastload.system.threads import forked_workers

    click.get_current_context().with_resource(forked_workers())


app = Commands(
    "fastload",
    help="Pack an image dataset into one HDF5 file, and train from it in PyTorch without the GPU waiting.",
    functions={name: (f"fastload.cli.{place}", examples) for name, (place, examples) in _COMMANDS.items()},
    callback=_begin,
    params=[
        click.Option(
            ["-V", "--version"], is_flag=True, is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
        click.Option(
            ["--completion"],
            type=click.Choice(_SHELLS),
            is_eager=True,
            callback=_print_completion,
            help="Print what makes a shell complete fastload's words: bash, zsh or fish.",
        ),
    ],
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
