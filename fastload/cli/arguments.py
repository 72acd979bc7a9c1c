"""Arguments that several commands share: their texts parsed, and their declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastload.cli.command_line import Argument
from fastload.options import Option
from fastload.options.parse import parse_file

PackedName = Annotated[Any, Argument("FILE", "A packed file, by its path or its URL.", parse_file)]


ImageFile = Annotated[Any, Argument("FILE", "A packed file or its URL, or another HDF5 file.", parse_file)]
AsJson = Annotated[bool, Option(names=("--json",), help="Print one JSON object.")]
Report = Annotated[Path | None, Option(metavar="OUT.html", help="Write a report as an HTML page.")]
Force = Annotated[
    bool,
    Option(
        names=(
            "--overwrite",
            "--force",
        ),
        help="Replace files that exist.",
    ),
]
