"""`fastload layouts`: what `fastload pack` recognises."""

from __future__ import annotations

import typer


def layouts() -> None:
    """List the layouts of datasets that `fastload pack` takes, each with one line.

    They are told in this order of kinds: datasets by name, then formats, then folders of images.
    """
    from fastload.sources import LAYOUTS

    width = max(map(len, LAYOUTS))
    for kind in ("dataset", "format", "folder"):
        for name, layout in LAYOUTS.items():
            if layout.kind == kind:
                typer.echo(f"{typer.style(name.ljust(width), bold=True)}  {layout.line}")
