"""A report for people: what was measured, as one HTML file that needs nothing else to be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastload.measured import Measured
from fastload.new_file import save_text
from fastload.report.path import check_report_path

__all__ = ["check_report_path", "write_report"]


def write_report(measured: Measured | Sequence[Measured], path: str | Path, *, force: bool = False) -> None:
    """Write one self-contained HTML file: verdict, steps over time, rates, utilization, stages, environment, raw JSON.

    It loads nothing from anywhere, follows the reader's light or dark mode, fits a phone, and prints on A4. What was
    not measured is named with its reason. The file appears complete or not at all.

    Args:
        measured: one run, or several to be shown side by side.
        path: file to write; what is there already stays unless `force`.

    Raises:
        OutputError: as `check_report_path`; or the disk is full.
        MissingExtraError: matplotlib or Jinja2 is absent.
    """
    check_report_path(path, force=force)
    # Imported here: the plots need matplotlib, while checking a path before a run must stay quick.
    from fastload.report.page import make_page

    runs = (measured,) if isinstance(measured, Measured) else tuple(measured)
    save_text(make_page(runs), Path(path), force=force)
