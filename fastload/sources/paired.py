"""What the sources of images with masks, boxes or id lists share: contradictions, pairs of files, one listing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.absent_masks import values_of_masks
from fastload.sources.folder import ORDER, leave_out_broken
from fastload.sources.listing import Column, Listing, Masks, OnError, first_few, require_unique
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, key_of


class Contradictions:
    """Samples that the dataset itself contradicts, by key; what cannot be read at all is among them from the start.

    Attributes:
        unreadable: the stems of what cannot be read at all: whatever names them is not contradicted a second time.
    """

    def __init__(self, tree: Tree, on_error: OnError) -> None:
        """Begin with the broken files of a tree.

        Raises:
            SourceError: there are some and on_error is "fail".
        """
        self._tree = tree
        self._on_error = on_error
        self._found = dict(leave_out_broken(tree, on_error))
        self.unreadable = frozenset(map(stem_of, self._found))

    def add(self, key: str, reason: str) -> None:
        """Note a sample; the first reason counts."""
        self._found.setdefault(key, reason)

    def settle(self) -> tuple[tuple[str, str], ...]:
        """(key, reason) of all of them, when they may be skipped.

        Raises:
            SourceError: they may not.
        """
        if self._found and self._on_error == "fail":
            shown = first_few([f"{key} {reason}" for key, reason in self._found.items()])
            raise SourceError(
                f"{self._tree.given}: samples that the dataset contradicts ({len(self._found)}): {shown}. "
                "Mend the lists or the files, or leave those samples out with `--on-error skip`."
            )
        return tuple(self._found.items())


def told_by(layout: str, evidence: list[str]) -> str:
    """The first note of a listing: what was recognised, and by which names."""
    return f"Layout {layout}, told by {first_few(evidence, 3)}." if evidence else f"Layout {layout}, as asked for."


def split_path(name: str) -> tuple[str, str]:
    """Folder, ending in `/` (empty for none), and base name of a path."""
    cut = name.rfind("/") + 1
    return name[:cut], name[cut:]


def stem_of(name: str) -> str:
    """The base name of a path without its suffix."""
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] or base


def children(tree: Tree, folder: str, suffix: str = "") -> dict[str, int]:
    """Stem -> position of the images that lie directly in a folder (`a/b/`), or of its files with a suffix.

    Raises:
        SourceError: two of them have the same stem.
    """
    ends = suffix or IMAGE_SUFFIXES
    found: dict[str, int] = {}
    for i, name in enumerate(tree.names):
        if name.startswith(folder) and "/" not in name[len(folder) :] and name.lower().endswith(ends):
            stem = stem_of(name)
            if stem in found:
                raise SourceError(
                    f"{tree.given}: {key_of(tree.names[found[stem]])} and {key_of(name)} differ only in their suffix, "
                    "so that it is not known which one is meant. Move one of them away."
                )
            found[stem] = i
    return found


def text_lines(tree: Tree, position: int) -> list[tuple[int, str]]:
    """(number from 1, text without spaces around it) of each line that is not blank; undecodable bytes as surrogates.

    Raises:
        SourceError: the file cannot be read.
    """
    text = tree.read_text(position).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def values_seen(tree: Tree, positions: Sequence[int]) -> NDArray[np.int64]:
    """The sorted values in some of the masks at these positions, evenly chosen; without those that are no index masks.

    The packer reads every mask and says what is wrong with one; this only tells how they are numbered.
    """
    return values_of_masks(tree.files, positions)


def assemble(
    tree: Tree,
    layout: str,
    *,
    images: Sequence[int],
    splits: Sequence[str],
    columns: dict[str, Column],
    notes: Sequence[str],
    skipped: tuple[tuple[str, str], ...] = (),
    masks: Masks | None = None,
    mask_positions: Sequence[int] | None = None,
) -> Listing:
    """The listing of images of a tree, sorted by split (train, val, test, then others by name) and key.

    Args:
        tree: holds images and masks.
        layout: a key of LAYOUTS.
        images: position in the tree of each sample's image.
        splits: the split of each.
        columns: in the order of images.
        notes: the first says what was recognised.
        skipped: what was left out.
        masks: in the order of images.
        mask_positions: position in the tree of each sample's mask, -1 for none; None where masks are no files of it.

    Raises:
        SourceError: no sample is left, or a key occurs twice.
    """
    if not len(images):
        reasons = f" Left out: {first_few([f'{key} {reason}' for key, reason in skipped])}." if skipped else ""
        raise SourceError(
            f"{tree.given}: no sample is left to pack as layout {layout}.{reasons} Is it the whole dataset?"
        )
    names = tuple(name for name in ORDER if name in splits) + tuple(sorted(set(splits) - set(ORDER)))
    split = np.array([names.index(name) for name in splits], np.uint8)
    keys = [key_of(tree.names[i]) for i in images]
    require_unique(keys, str(tree.given))
    rows = np.asarray(images, np.int64)
    sizes, mtimes = tree.sizes[rows], tree.mtimes_ns[rows]
    if mask_positions is not None:
        at = np.asarray(mask_positions, np.int64)
        # A resume notices a changed mask as it notices a changed image: both make the sample.
        sizes = sizes + np.where(at < 0, 0, tree.sizes[at])
        mtimes = np.where(at < 0, mtimes, np.maximum(mtimes, tree.mtimes_ns[at]))
    listing = Listing(
        layout=layout,
        keys=tuple(keys),
        split=split,
        split_names=names,
        columns=columns,
        notes=(*notes, *tree.notes),
        sizes=sizes,
        mtimes_ns=mtimes,
        files=tree.files.take(rows),
        skipped=skipped,
        masks=masks,
    )
    order = sorted(range(len(keys)), key=lambda row: (split[row], tree.names[images[row]]))
    return listing.take(np.array(order, np.int64))


def masks_at(
    tree: Tree,
    positions: Sequence[int],
    *,
    names: tuple[str, ...] = (),
    ignore_index: int | None = None,
    attrs: dict[str, Any] | None = None,
) -> Masks:
    """The masks at these positions of a tree, -1 for a sample without one."""
    at = np.asarray(positions, np.int64)
    return Masks(
        # Where there is none, any file will do: it is never asked for.
        files=tree.files.take(np.maximum(at, 0)),
        present=at >= 0,
        names=names,
        ignore_index=ignore_index,
        attrs=attrs or {},
    )
