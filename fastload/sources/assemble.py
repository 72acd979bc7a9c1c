"""What several layouts share: the listing of a tree's images, contradictory samples, absent masks, joined files.

A layout that pairs images with masks, annotations or lists collects what does not fit in Contradictions, and ends in
`assemble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column
from fastload.sources.listing import Files, Listing, Masks, OnError, first_few, in_split_order, require_unique
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, key_of


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
    """Returns the listing of images of a tree, sorted by split (train, val, test, then others by name) and name.

    Args:
        tree: holds images and masks.
        layout: a key of LAYOUTS.
        images: position in the tree of each sample's image.
        splits: split of each sample.
        columns: in the order of images.
        notes: sentences for the user, the first about what was recognised.
        skipped: (key, reason) of what was left out.
        masks: in the order of images.
        mask_positions: position in the tree of each sample's mask, -1 for none; None if masks are not files of the
            tree.

    Raises:
        SourceError: no sample is left, or a key occurs twice.
    """
    if not len(images):
        reasons = f" Left out: {first_few([f'{key} {reason}' for key, reason in skipped])}." if skipped else ""
        raise SourceError(
            f"{tree.given}: no sample is left to pack as layout {layout}.{reasons} Is it the whole dataset?"
        )
    names = in_split_order(splits)
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


def recognised_note(layout: str, evidence: list[str], count: int = 3) -> str:
    """Returns the first note of a listing: its layout, and the first files by which that was recognised."""
    how = f"recognised by {first_few(evidence, count)}" if evidence else "as asked for"
    return f"Layout {layout}, {how}."


def leave_out_broken(tree: Tree, on_error: OnError) -> tuple[tuple[str, str], ...]:
    """Returns (key, reason) of the images of a tree that cannot be read at all, if such may be skipped.

    Raises:
        SourceError: there are some and on_error is "fail".
    """
    broken = tuple((key_of(name), reason) for name, reason in tree.broken)
    if broken and on_error == "fail":
        shown = first_few([f"{key} {reason}" for key, reason in broken])
        raise SourceError(
            f"{tree.path}: images that cannot be read ({len(broken)}): {shown}. "
            "Fix or remove them, or leave them out with `--on-error skip`."
        )
    return broken


class Contradictions:
    """Collects samples that do not fit together, such as an image without its mask, and the unreadable ones.

    Attributes:
        unreadable: stems of the files that cannot be read at all. A list or mask that names one of these is not
            reported a second time.
    """

    def __init__(self, tree: Tree, on_error: OnError) -> None:
        """Starts with the broken files of a tree.

        Raises:
            SourceError: there are some and on_error is "fail".
        """
        self._tree = tree
        self._on_error = on_error
        self._found = dict(leave_out_broken(tree, on_error))
        self.unreadable = frozenset(map(stem_of, self._found))

    def add(self, key: str, reason: str) -> None:
        """Notes a sample and why it is left out; the first reason counts."""
        self._found.setdefault(key, reason)

    def as_skipped(self) -> tuple[tuple[str, str], ...]:
        """Returns (key, reason) of all samples noted, if such may be skipped.

        Raises:
            SourceError: there are some and on_error is "fail".
        """
        if self._found and self._on_error == "fail":
            shown = first_few([f"{key} {reason}" for key, reason in self._found.items()])
            raise SourceError(
                f"{self._tree.given}: samples that the dataset contradicts ({len(self._found)}): {shown}. "
                "Fix the lists or the files, or leave those samples out with `--on-error skip`."
            )
        return tuple(self._found.items())


def children(tree: Tree, folder: str, suffix: str = "") -> dict[str, int]:
    """Returns stem -> position of the images directly in a folder (`a/b/`), or of its files with a given suffix.

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


def split_path(name: str) -> tuple[str, str]:
    """Returns the folder of a path, ending in `/` ("" for none), and its base name."""
    cut = name.rfind("/") + 1
    return name[:cut], name[cut:]


def stem_of(name: str) -> str:
    """Returns the base name of a path without its suffix."""
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] or base


def text_lines(tree: Tree, position: int) -> list[tuple[int, str]]:
    """Returns (number from 1, stripped text) of each line that is not blank; undecodable bytes become surrogates.

    Raises:
        SourceError: the file cannot be read.
    """
    text = tree.read_text(position).removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def masks_at(
    tree: Tree,
    positions: Sequence[int],
    *,
    names: tuple[str, ...] = (),
    ignore_index: int | None = None,
    attrs: dict[str, Any] | None = None,
) -> Masks:
    """Returns the masks of samples by their positions in a tree, -1 for a sample without one."""
    at = np.asarray(positions, np.int64)
    return Masks(
        # A sample without a mask stands for any file: it is never read.
        files=tree.files.take(np.maximum(at, 0)),
        present=at >= 0,
        names=names,
        ignore_index=ignore_index,
        attrs=attrs or {},
    )


_PROBED = 32  # masks read to see how they are numbered: enough for a rare value to show, read in a moment

_SEARCHED = 4096  # masks read to find a value that none holds: some seconds, and only if masks are absent


def values_in_masks(files: Files, rows: Sequence[int], most: int = _PROBED) -> NDArray[np.int64]:
    """Returns the sorted values that occur in some of the masks of these rows, at most `most`, evenly chosen.

    Files that are no index masks are passed over: the packer reads every mask and reports those.
    """
    # Imported here: most layouts need no Pillow.
    from fastload.images.image_header import open_image, pillow_silenced

    step = -(-max(1, len(rows)) // most)
    seen = np.zeros(256, np.bool_)
    for row in rows[::step]:
        try:
            with pillow_silenced(), open_image(files.read(row)) as image:
                if image.mode in ("1", "L", "P"):
                    seen[np.asarray(image).astype(np.uint8)] = True
        except Exception as exc:  # noqa: BLE001  # Pillow's plugins raise anything; the packer names the damaged file
            _ = exc
    return np.flatnonzero(seen)


def fill_value(files: Files, present: NDArray[np.bool_], where: str) -> tuple[int | None, list[str]]:
    """Returns the value that stands for absent masks (`ignore_index`) and a note about it; None if none is absent.

    It is 255, or, if masks hold 255 (as foreground in masks of 0 and 255), the largest value that none holds.

    Args:
        files: the masks, by row.
        present: bool (N,), which rows have a mask.
        where: the source, for messages.

    Raises:
        SourceError: the masks use all 256 values.
    """
    if present.all():
        return None, []
    rows = np.flatnonzero(present).tolist()
    seen = values_in_masks(files, rows, _SEARCHED)
    free = np.setdiff1d(np.arange(256), seen)
    absent = int((~present).sum())
    if not len(free):
        raise SourceError(
            f"{where}: images have no mask ({absent}), and the other masks use all values from 0 to 255, so none can "
            "stand for it. Add the masks, or leave all masks out with `--masks none`."
        )
    value = int(free[-1])
    why = f", as other masks hold {', '.join(map(str, range(255, value, -1)))}" if value < 255 else ""
    sampled = f" (of {_SEARCHED} masks or fewer that were looked at)" if len(rows) > _SEARCHED else ""
    return value, [f"Images without a mask ({absent}): theirs are {value} throughout{why}{sampled}."]


@dataclass(frozen=True, eq=False)
class JoinedFiles:
    """Reads the files of several folders or archives as one sequence: shards, train and val archives, images and masks.

    Attributes:
        parts: readers of the folders and archives.
        part: int32 (F,), the part that each file belongs to.
        index: int64 (F,), the index of each file in its part.
    """

    parts: tuple[Files, ...]
    part: NDArray[np.int32]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[tuple[Files, int]]) -> JoinedFiles:
        """Returns the files of all parts, one part behind the other; each is given with its number of files."""
        counts = [count for _, count in parts]
        return cls(
            parts=tuple(files for files, _ in parts),
            part=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            index=np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)]),
        )

    def read(self, i: int) -> bytes:
        """Returns all bytes of file i."""
        return self.parts[int(self.part[i])].read(int(self.index[i]))

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of file i."""
        return self.parts[int(self.part[i])].read_head(int(self.index[i]), size)

    def take(self, indices: NDArray[np.integer[Any]]) -> JoinedFiles:
        """Returns the files at these indices, in their order."""
        return JoinedFiles(self.parts, self.part[indices], self.index[indices])
