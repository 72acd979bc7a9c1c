"""Where images come from: one module a layout, each a function from a path to a Listing, chosen from a plain dict.

To add a layout: one new file here with `list_NAME` and `NAME_evidence`, its mirrored test, one entry in LAYOUTS, which
stands in `layouts`. That module is imported when something of it is asked for: it brings all the others, a tenth of a
second that `fastload info` does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.sources.listing import Arrays, Column, Files, Listing, Masks, OnError, Pictures
from fastload.sources.options import SourceOptions

if TYPE_CHECKING:
    from fastload.sources.layouts import LAYOUTS, Layout, Source, detect_layout, list_source

__all__ = [
    "LAYOUTS",
    "Arrays",
    "Column",
    "Files",
    "Layout",
    "Listing",
    "Masks",
    "OnError",
    "Pictures",
    "Source",
    "SourceOptions",
    "detect_layout",
    "list_source",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fastload.sources import layouts

        return getattr(layouts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
