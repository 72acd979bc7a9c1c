"""The command `fastload`: each command parses its arguments, calls one function of the library, and prints the result.

One module for each command (`merge`, `append` and `export` are in `repack`, `layouts` in `pack`, `preview` in `info`;
`cache` has three of its own); `output` and `live` do the printing. Commands import the library only when they are
called, so that `fastload info` starts in a tenth of a second.
Nothing but `fastload.__main__` imports this package.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from fastload.cli.bench import bench
from fastload.cli.cache import cache
from fastload.cli.doctor import doctor
from fastload.cli.info import info, preview
from fastload.cli.output import print_error, show_warnings_in_one_line
from fastload.cli.pack import layouts, pack
from fastload.cli.repack import append, export, index, merge, repack
from fastload.cli.tune import tune
from fastload.cli.verify import verify
from fastload.system.threads import forked_workers

__all__ = ["app", "main"]

app = typer.Typer(
    name="fastload",
    help="Pack an image dataset into one HDF5 file, and train from it in PyTorch without the GPU waiting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GARBAGE = 100_000
"""Objects after which Python looks for garbage; 700 by default."""
_EXAMPLES: dict[Callable[..., None], str] = {
    pack: "fastload pack photos/ photos.h5\n\nfastload pack photos.zip small.h5 --size 224 --on-error skip",
    layouts: "fastload layouts",
    info: "fastload info photos.h5\n\nfastload info photos.h5 --stores",
    verify: "fastload verify photos.h5\n\nfastload verify photos.h5 --source photos/",
    preview: "fastload preview photos.h5 -o photos.png",
    export: "fastload export photos.h5 photos-again/ --split train",
    repack: "fastload repack photos.h5 some.h5 --split train --without 'bad/*'",
    append: "fastload append photos.h5 new-photos/",
    merge: "fastload merge a.h5 b.h5 -o both.h5 --shuffle",
    index: "fastload index out/a.h5 out/b.h5 -o out/all.h5",
    bench: "fastload bench photos.h5 --batch-size 64 --step sim:0.8x",
    tune: "fastload tune photos.h5 --batch-size 64",
    doctor: "fastload doctor -- python train.py\n\nfastload doctor --seconds 60 --report why.html -- torchrun train.py",
}
app.add_typer(cache, name="cache")
for _command, _examples in _EXAMPLES.items():
    app.command(epilog=f"Examples:\n\n{_examples}")(_command)


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


def _print_version(wanted: bool) -> None:
    if wanted:
        from fastload.format.writer import writer_name

        typer.echo(writer_name())
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.with_resource(forked_workers())
