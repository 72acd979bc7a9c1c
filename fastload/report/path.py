"""Whether a report can be made and written, checked before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastload.errors import MissingExtraError, OptionError
from fastload.new_file import check_new_file

NEEDED = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}
"""Modules that a page is made with, and what people call them."""


def check_report_path(path: str | Path, *, force: bool = False) -> None:
    """Fail now, not after minutes of measuring, if a report could not be written to `path`.

    Args:
        path: file to be written.
        force: whether a file that exists may be replaced.

    Raises:
        OptionError: the name is none of a page.
        OutputError: as `check_new_file`.
        MissingExtraError: what draws the report is not installed.
    """
    check_new_file(path, force=force)
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"{path}: a report is a page; give it a name that ends in .html.")
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{path}: a report is made with {' and '.join(missing)}, not installed here. "
            "Install with `pip install 'fastload[report]'`."
        )
