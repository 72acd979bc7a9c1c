"""Writes measurements as one self-contained HTML page.

In: one or several `Measured` (`fastload.timing.results`). Out: an HTML file with verdict, plots, tables and the raw
data as JSON, which loads nothing from elsewhere.

Read this module first (checks and writing), then `page` with `page.html` (the template; text and tables of one run),
`plots` (inline SVG, drawn once for all widths; long runs in few columns). Needs Jinja2, which is imported only when a
page is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fastload.errors import MissingExtraError, OptionError
from fastload.system.files import check_new_file, save_text
from fastload.timing.results import Measured

__all__ = ["check_report_path", "write_report"]


def write_report(measured: Measured | Sequence[Measured], path: str | Path, *, force: bool = False) -> None:
    """Writes one self-contained HTML file: verdict, steps over time, rates, utilization, stages, environment, raw JSON.

    It loads nothing from elsewhere, follows the reader's light or dark mode, fits a phone, and prints on A4. What was
    not measured is named with the reason. The file appears complete or not at all.

    Args:
        measured: one run, or several to be shown side by side.
        path: file to write; an existing file is kept unless `force`.

    Raises:
        OutputError: as `check_report_path`; or the disk is full.
        MissingExtraError: Jinja2 is missing.
    """
    check_report_path(path, force=force)
    # Imported here: the page needs Jinja2, while checking a path before a run must stay quick.
    from fastload.profiling.report.page import make_page

    runs = (measured,) if isinstance(measured, Measured) else tuple(measured)
    save_text(make_page(runs), Path(path), force=force)


def check_report_path(path: str | Path, *, force: bool = False) -> None:
    """Raises an error now, not after minutes of measuring, if a report cannot be written to `path`.

    Raises:
        OptionError: the name does not end in .html.
        OutputError: as `check_new_file`.
        MissingExtraError: Jinja2 is not installed.
    """
    check_new_file(path, force=force)
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"{path}: a report is a page; give it a name that ends in .html.")
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError(
            f"{path}: a report is made with Jinja2, which is not installed here. Install it with `pip install jinja2`."
        )
