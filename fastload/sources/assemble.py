"""The end of every layout: a Draft collects notes and samples left out, Samples hold the rest, `assemble` lists them.

Also files by their stem, images paired with masks by their name, absent masks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.images.image_header import ImageHeader, header_of_pixels, open_image, pillow_silenced, probe_image
from fastload.options.pack import OnError
from fastload.sources.listing import (
    Arrays,
    Files,
    Listing,
    Masks,
    Pictures,
    Reader,
    first_few,
    in_split_order,
    require_unique,
)
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, key_of

_PART = re.compile(r"(.*-)(\d{5,6})-of-(\d{5,6})(?:-[0-9a-f]+)?(\.\w+)?", re.DOTALL)


@dataclass
class Draft:
    """A listing in the making: what a layout has to say about a dataset, and the samples that it leaves out."""

    layout: str  # a key of LAYOUTS
    tree: Tree | None  # None for an object
    on_error: OnError = "fail"  # whether samples that do not fit, such as an image without its mask, are left out
    where: str = ""  # what was given, for messages; the tree's if there is one
    further: str = ""  # a way out, where samples are contradicted, as the end of a sentence
    title: str = ""  # the first note; "": it says by which names the layout was recognised
    notes: list[str] = field(default_factory=list)  # further sentences for the user
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (key, reason) of each sample left out
    trees: list[Tree] = field(default_factory=list)  # trees that are read; the listing's notes end with theirs
    # Stems of the files that cannot be read at all: a list or mask that names one is not reported a second time.
    unreadable: frozenset[str] = frozenset()
    _known: set[str] = field(default_factory=set)  # keys of what `leave_out` noted

    def __post_init__(self) -> None:
        if self.tree:
            self.where, self.trees = str(self.tree.given), [self.tree]

    def note(self, what: str, names: Collection[str]) -> None:
        """Notes names of the dataset as "what (N): the first few."; nothing if there are none."""
        if names:
            self.notes.append(f"{what} ({len(names)}): {first_few(names)}.")

    def leave_out(self, key: str, reason: str) -> None:
        """Notes a sample and why it is left out; the first reason counts."""
        if key not in self._known:
            self._known.add(key)
            self.skipped.append((key, reason))

    def leave_out_broken(self, tree: Tree, prefix: str = "") -> None:
        """Leaves out the images of a tree that cannot be read at all, or refuses them; keys begin with `prefix`."""
        if tree.broken and self.on_error == "fail":
            way = f"Fix or remove them{_skip(len(tree.images) > 0)}."
            said = f"images that cannot be read ({len(tree.broken)}): {_reasons(tree.broken)}"
            raise SourceError(f"{tree.path}: {said}. {way}")
        self.unreadable |= {stem_of(key_of(name)) for name, _ in tree.broken}
        for name, reason in tree.broken:
            self.leave_out(prefix + key_of(name), reason)

    def leave_out_all(self, found: Sequence[tuple[str, str]], which: str, fix: str, of: int) -> None:
        """Leaves out samples, by key and reason, that a layout found all at once among `of`, or refuses them."""
        if found and self.on_error == "fail":
            way = f"{fix}{_skip(len(found) < of)}."
            raise SourceError(f"{self.where}: {which} ({len(found)}): {_reasons(found)}. {way}")
        self.skipped += found

    def require_parts(self, names: Sequence[str]) -> None:
        """Refuses files of a tree of which some are missing by the numbers in their names (00000-of-00257)."""
        parts: dict[tuple[str, str, str], set[int]] = {}
        for found in filter(None, map(_PART.fullmatch, names)):
            before, number, of, suffix = found.groups("")
            parts.setdefault((before, of, suffix), set()).add(int(number))
        lacking = [
            key_of(f"{before}{number:0{len(of)}d}-of-{of}{suffix}")
            for (before, of, suffix), there in parts.items()
            for number in (range(min(int(of), 100_000)) if len(there) < int(of) else ())
            if number not in there
        ]
        if lacking and self.on_error == "fail" and not (self.tree and self.tree.file):
            raise SourceError(
                f"{self.where}: files that are missing by the names of the others ({len(lacking)}): "
                f"{first_few(lacking)}. Fetch them, or pack what is there with `--on-error skip`."
            )
        self.note("Files are missing by the names of the others", lacking)

    def refuse_left_out(self, left: int) -> None:
        """Raises SourceError if samples are left out and on_error is "fail"; `left`: how many others there are."""
        if self.skipped and self.on_error == "fail":
            raise SourceError(
                f"{self.where}: samples that the dataset contradicts ({len(self.skipped)}): {_reasons(self.skipped)}. "
                f"Fix the lists or the files{_skip(left > 0)}{self.further}."
            )


def _skip(some: bool) -> str:
    """Returns the advice to leave samples out, where `some` others are left."""
    return ", or leave those out with `--on-error skip`" if some else ""


def _reasons(found: Sequence[tuple[str, str]]) -> str:
    return first_few([f"{key_of(key)} {reason}" for key, reason in found])


@dataclass(frozen=True, eq=False)
class Splits:
    """The split of each sample."""

    index: NDArray[np.uint8]  # uint8 (N,), index into names
    names: tuple[str, ...] = ("all",)  # train, val and test first, then others by name

    @classmethod
    def of(cls, splits: Sequence[str]) -> Splits:
        """Returns the splits of samples by name; "" stands for the split `all`."""
        names = in_split_order(split or "all" for split in set(splits)) or ("all",)
        index = {name: i for i, name in enumerate(names)}
        index[""] = index.get("all", 0)
        return cls(np.fromiter(map(index.__getitem__, splits), np.uint8, len(splits)), names)

    @classmethod
    def one(cls, count: int) -> Splits:
        """Returns the splits of a dataset that has none: all samples are `all`."""
        return cls(np.zeros(count, np.uint8))


@dataclass(frozen=True, eq=False)
class MaskFiles:
    """The masks of samples that are files of the same tree as their images; the rest as in `listing.Masks`."""

    positions: Sequence[int] | NDArray[np.int64]  # of the masks in the tree, -1 for none
    names: tuple[str, ...] = ()
    ignore_index: int | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    dtype: np.dtype[Any] | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a dataset, one row each."""

    keys: Sequence[str]  # unique name of each sample
    files: Reader | None  # reads the images; None for a dataset without images
    sizes: NDArray[np.int64]  # int64 (N,), bytes of each sample's file
    mtimes_ns: NDArray[np.int64]  # int64 (N,), time of modification of each file
    splits: Splits  # split of each sample
    columns: dict[str, Column] = field(default_factory=dict)  # fields other than pixels, N rows each
    masks: Masks | None = None  # reads the masks; None if there are none
    rows: NDArray[np.integer[Any]] | None = None  # those that are listed, in order; None: all
    declared: NDArray[np.int64] | None = None  # sizes of images by their annotations, as in Listing

    @classmethod
    def in_tree(
        cls,
        tree: Tree,
        positions: Sequence[int] | NDArray[np.int64],
        splits: Splits,
        columns: dict[str, Column] | None = None,
        masks: MaskFiles | None = None,
        *,
        by_name: bool = False,
    ) -> Samples:
        """Returns the samples whose images lie at these positions of a tree; everything is in their order.

        They are listed in this order too, or, with `by_name`, split by split, sorted by name.
        """
        at = np.asarray(positions, np.int64)
        tree.known[at] = True
        names = [tree.names[i] for i in at.tolist()]
        rows = None
        if by_name:
            order = list(zip(splits.index.tolist(), names, strict=True))
            rows = np.array(sorted(range(len(order)), key=order.__getitem__), np.int64)
        keys, files = list(map(key_of, names)), tree.files.take(at)
        samples = cls(keys, files, tree.sizes[at], tree.mtimes_ns[at], splits, columns or {}, rows=rows)
        if masks is None:
            return samples
        # A sample without a mask stands for any file: it is never read.
        mask_at, present = np.maximum(masks.positions, 0), np.asarray(masks.positions, np.int64) >= 0
        tree.known[mask_at[present]] = True
        files, further = tree.files.take(mask_at), (of[mask_at] * present for of in (tree.sizes, tree.mtimes_ns))
        packed = Masks(files, present, masks.names, masks.ignore_index, masks.attrs, dtype=masks.dtype)
        return replace(samples, masks=packed).made_also_of(*further)

    def without(self, left_out: Collection[int]) -> Samples:
        """Returns the samples other than some rows, in their order."""
        if not left_out:
            return self
        return replace(self, rows=np.delete(np.arange(len(self.keys)), list(left_out)))

    def made_also_of(self, sizes: NDArray[np.int64] | np.int64, mtimes_ns: NDArray[np.int64] | np.int64) -> Samples:
        """Returns the samples with further files counted in, by their bytes and latest time for each sample.

        A resume notices if these change, as it does for images.
        """
        return replace(self, sizes=self.sizes + sizes, mtimes_ns=np.maximum(self.mtimes_ns, mtimes_ns))


def assemble(draft: Draft, samples: Samples) -> Listing:
    """Returns the listing of samples, with the notes of a draft and what it left out; refuses an empty one."""
    left = len(samples.keys if samples.rows is None else samples.rows)
    draft.refuse_left_out(left)
    if not left:
        why = f" Left out: {_reasons(draft.skipped)}." if draft.skipped else ""
        raise SourceError(f"{draft.where}: no sample is left to pack as {draft.layout}.{why} Is it the whole dataset?")
    draft.notes[:0] = _outside_splits(samples)
    listing = Listing(
        layout=draft.layout,
        keys=tuple(samples.keys),
        split=samples.splits.index,
        split_names=samples.splits.names,
        columns=samples.columns,
        notes=(draft.title, *draft.notes, *dict.fromkeys(note for tree in draft.trees for note in tree.notes)),
        sizes=samples.sizes,
        mtimes_ns=samples.mtimes_ns,
        files=samples.files,
        skipped=tuple(draft.skipped),
        masks=samples.masks,
        declared=samples.declared,
    )
    if samples.rows is not None:
        listing = listing.take(samples.rows)
    require_unique(listing.keys, draft.where)
    return listing


def _outside_splits(samples: Samples) -> list[str]:
    """Returns a note of the samples that are in no split, where the dataset has splits."""
    names, rows = samples.splits.names, slice(None) if samples.rows is None else samples.rows
    if "all" not in names or len(names) == 1:
        return []
    split = samples.splits.index[rows]
    outside = np.arange(len(samples.keys))[rows][split == names.index("all")].tolist()
    if len(outside) in (0, len(split)):
        return []
    others = ", ".join(name for name in names if name != "all")
    shown = first_few([samples.keys[row] for row in outside])
    return [f"In none of the splits ({others}), and packed as split `all` ({len(outside)} of {len(split)}): {shown}."]


def keys_in_shards(names: Sequence[str], counts: Sequence[int], all_paths: Sequence[str]) -> list[str]:
    """Returns the keys of the rows of shards: shard and path of a row, or its number.

    `all_paths`: the paths of all rows, [] for none; they count in a shard where they are unique, without their folder
    if that is enough.
    """
    keys: list[str] = []
    for name, count in zip(names, counts, strict=True):
        paths = all_paths[len(keys) : len(keys) + count]
        inner = [f"{row:08d}" for row in range(count)]
        if paths and "" not in paths and len(set(paths)) == count:
            inner = [path.replace("\\", "/").rpartition("/")[2] for path in paths]
            if len(set(inner)) < count:
                inner = [path.lstrip("/") for path in paths]
        keys += [f"{key_of(name)}/{key_of(path)}" for path in inner]
    return keys


def children(tree: Tree, folder: str, suffix: str = "") -> dict[str, int]:
    """Returns stem -> position of the images directly in a folder (`a/b/`), or of its files with a given suffix.

    Two of the same stem are refused.
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


def header_of(reader: Reader, i: int) -> ImageHeader:
    """Returns the header of image or mask i; ImageError says why it cannot be read."""
    if isinstance(reader, Arrays):
        return header_of_pixels(reader.shape, reader.dtype)
    if isinstance(reader, Pictures):
        return reader.header(i)
    return probe_image(partial(reader.read_head, i))


_PROBED = 32  # masks read to see how they are numbered: enough for a rare value to show, read in a moment

_SEARCHED = 4096  # masks read to find a value that none holds: some seconds, and only if masks are absent


def values_in_masks(files: Files, rows: Sequence[int], most: int = _PROBED) -> NDArray[np.int64]:
    """Returns the sorted values that occur in some of the masks of these rows, at most `most`, evenly chosen.

    Files that are no index masks are passed over: the packer reads every mask and reports those.
    """
    step = -(-max(1, len(rows)) // most)
    seen = np.zeros(1 << 16, np.bool_)
    for row in rows[::step]:
        try:
            with pillow_silenced(), open_image(files.read(row)) as image:
                if image.mode in ("1", "L", "P") or image.mode.startswith("I;16"):
                    seen[np.asarray(image).astype(np.uint16)] = True
        except Exception as exc:  # noqa: BLE001  # Pillow's plugins raise anything; the packer names the damaged file
            _ = exc
    return np.flatnonzero(seen)


def fill_value(draft: Draft, files: Files | NDArray[np.int64], present: NDArray[np.bool_]) -> int | None:
    """Returns the value that stands for absent masks (`ignore_index`), which is noted; None if none is absent.

    It is 255, or, if masks hold 255 (as foreground in masks of 0 and 255), the largest value that none holds; likewise
    65,535 if masks hold larger ones, or all 256. Instead of the masks by row the values in them may be given;
    `present`, bool (N,), says which rows have a mask.
    """
    if present.all():
        return None
    rows = np.flatnonzero(present).tolist()
    seen = files if isinstance(files, np.ndarray) else values_in_masks(files, rows, _SEARCHED)
    sampled = len(rows) > _SEARCHED and seen is not files
    top = 255 if seen.max(initial=0) <= 255 and len(seen) < 256 else 65_535
    free = np.setdiff1d(np.arange(top + 1), seen)
    absent = int((~present).sum())
    if not len(free):
        raise SourceError(
            f"{draft.where}: images have no mask ({absent}), and the other masks use all values from 0 to {top}, so "
            "none can stand for it. Add the masks, or leave all masks out with `--masks none`."
        )
    value = int(free[-1])
    looked = f" (of {_SEARCHED} masks or fewer that were looked at)" if sampled else ""
    why = f", as other masks hold {', '.join(map(str, range(top, value, -1)))}" if value < top else ""
    draft.notes.append(f"Images without a mask ({absent}): theirs are {value} throughout{why}{looked}.")
    return value
