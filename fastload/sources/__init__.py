"""Where images come from: one module a layout, each a function from a path to a Listing, chosen from a plain dict.

To add a layout: one new file here, its mirrored test, one line in SOURCES, and in `detect_layout` how to tell it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fastload.errors import OptionError
from fastload.sources.celeba import celeba_evidence, list_celeba
from fastload.sources.folder import list_folder
from fastload.sources.listing import Column, Files, Listing, OnError
from fastload.sources.tree import Tree, open_tree

__all__ = ["SOURCES", "Column", "Files", "Listing", "OnError", "Source", "detect_layout", "list_source"]


class Source(Protocol):
    """Lists one layout of dataset: a function in this package, one line in SOURCES."""

    def __call__(self, source: str | Path | Tree, *, on_error: OnError = "fail") -> Listing:
        """The listing of the dataset at a path, or of its tree when that is at hand already.

        Raises:
            SourceError: the dataset cannot be packed as it is.
        """
        ...


SOURCES: dict[str, Source] = {"folder": list_folder, "celeba": list_celeba}


def detect_layout(path: str | Path | Tree) -> str:
    """The layout of the dataset at path, a key of SOURCES, told by names alone.

    CelebA is told by one of its text files or by img_align_celeba; everything else is a folder of images.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: it is neither a folder nor an archive that can be read.
    """
    return "celeba" if celeba_evidence(open_tree(path)) else "folder"


def list_source(path: str | Path, layout: str | None = None, on_error: OnError = "fail") -> Listing:
    """The listing of the dataset at path.

    Args:
        path: folder, .zip or uncompressed .tar.
        layout: a key of SOURCES; None: told by `detect_layout`.
        on_error: whether samples that the dataset itself contradicts (an annotated image without a file, a dangling
            link) stop the listing, or are left out and named in `Listing.skipped`.

    Raises:
        OptionError: there is no such layout.
        MissingFileError: there is nothing at path.
        SourceError: the dataset cannot be packed as it is.
    """
    if layout is not None and layout not in SOURCES:
        raise OptionError(f"There is no layout {layout!r}. Choose one of {', '.join(SOURCES)}, or leave it to be told.")
    tree = open_tree(path)
    return SOURCES[layout or detect_layout(tree)](tree, on_error=on_error)
