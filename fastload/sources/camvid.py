"""CamVid as in the SegNet tutorial: driving frames in a folder, their masks in a sibling folder.

    train/0001TP_006690.png, trainannot/0001TP_006690.png       also val, valannot, test, testannot
    train.txt                                                    rows `/SegNet/CamVid/train/x.png .../trainannot/x.png`

Masks are 8-bit: 0..10 are classes, 11 is void. The lists may be absent. A list that is there must agree with the
folders; only the last folder and the name in its paths count.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastload.errors import OptionError, SourceError
from fastload.sources.assemble import (
    Draft,
    MaskFiles,
    Samples,
    Splits,
    assemble,
    children,
    split_path,
    stem_of,
    text_lines,
)
from fastload.sources.listing import SPLITS, Listing, OnError, SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tree import Tree, is_image, key_of

CLASSES = tuple("Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist Void".split())
VOID = 11

_FRAME = re.compile(r"(?:^|/)(\w+)annot/(?:0001TP|0006R0|0016E5|Seq05VD)_\w+\.png$")


def camvid_evidence(tree: Tree) -> list[str]:
    """Returns the folders of masks (`trainannot/`) of a tree that hold files named as CamVid's frames."""
    found = dict.fromkeys(split_path(name)[0] for name in tree.names if "annot/" in name and _FRAME.search(name))
    return [key_of(folder) for folder in found]


def list_camvid(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of CamVid's frames, split by split, in the order of their names.

    Masks: 0..10 are classes, 11 is void and `ignore_index`. There are no columns.

    Raises:
        OptionError: instance masks are asked for, which CamVid does not have.
        SourceError: there are no pairs of folders; a frame without mask, a mask without frame, a line of a list
            without its files, a frame without a line (unless skipped).
    """
    options = options or SourceOptions()
    if options.masks == "instance":
        raise OptionError("CamVid has no instance masks. Accepted here: masks auto, semantic or none.")
    tree = open_tree(source)
    found = Draft("camvid", tree, on_error, evidence=camvid_evidence(tree))
    found.leave_out_broken(tree)
    notes = found.notes
    images: list[int] = []
    masks: list[int] = []
    splits: list[str] = []
    pairs = _folder_pairs(tree)
    for folder, split in pairs.items():
        frames, annotated = children(tree, folder), children(tree, f"{folder[:-1]}annot/")
        listed = _read_list(tree, folder, notes)
        for stem, position in frames.items():
            key = key_of(tree.names[position])
            if stem not in annotated:
                found.leave_out(key, "has no mask")
            elif listed is not None and stem not in listed:
                found.leave_out(key, f"is not listed in {key_of(folder[:-1])}.txt")
            else:
                images.append(position)
                masks.append(annotated[stem])
                splits.append(split)
        for stem, position in annotated.items():
            if stem not in frames and stem not in found.unreadable:
                found.leave_out(key_of(tree.names[position]), "is a mask without its image")
        for stem, key in (listed or {}).items():
            if stem not in frames and stem not in found.unreadable:
                found.leave_out(key, f"is listed in {key_of(folder[:-1])}.txt, but has no file")
    used = tuple(folder for name in pairs for folder in (name, f"{name[:-1]}annot/"))
    others = [key_of(tree.names[i]) for i in tree.images().tolist() if split_path(tree.names[i])[0] not in used]
    if others:
        notes.append(f"Ignored images outside the pairs of folders ({len(others)}): {first_few(others)}.")
    packed = None
    if options.masks != "none":
        notes.append(f"Masks: {len(CLASSES) - 1} classes, 11 = void and ignored.")
        packed = MaskFiles(masks, CLASSES, VOID)
    return assemble(found, Samples.in_tree(tree, images, Splits.of(splits), masks=packed, by_name=True))


def _folder_pairs(tree: Tree) -> dict[str, str]:
    """Returns folder of frames (ending in `/`) -> its split, for the folders with a sibling of masks."""
    folders = {split_path(tree.names[i])[0] for i in tree.images().tolist()}
    pairs: dict[str, str] = {}
    for folder in sorted(folders):
        name = split_path(folder[:-1])[1]
        if folder and f"{folder[:-1]}annot/" in folders:
            split = SPLITS.get(name.lower(), key_of(name))
            if split in pairs.values():
                other = next(key for key, value in pairs.items() if value == split)
                raise SourceError(
                    f"{tree.given}: {key_of(other)} and {key_of(folder)} are both the split {split!r}. Give one."
                )
            pairs[folder] = split
    if not pairs:
        raise SourceError(
            f"{tree.given}: there is no folder of frames with a sibling of masks (train/ and trainannot/). "
            "Give the folder or archive that holds both."
        )
    return pairs


def _read_list(tree: Tree, folder: str, notes: list[str]) -> dict[str, str] | None:
    """Returns stem -> key of the frames that a split's list names; None if there is no list."""
    name = f"{folder[:-1]}.txt"
    if name not in tree.names:
        return None
    where = f"{tree.path / key_of(name)}"
    listed: dict[str, str] = {}
    for number, line in text_lines(tree, tree.names.index(name)):
        parts = line.split()
        if not all(is_image(part) for part in parts) or len(parts) > 2:
            raise SourceError(
                f"{where}, line {number}: {line!r}, expected an image and its mask. Fix the line, or remove the list."
            )
        stem = stem_of(parts[0])
        if len(parts) == 2 and stem_of(parts[1]) != stem:
            raise SourceError(
                f"{where}, line {number}: {key_of(parts[0])} is listed with the mask of another frame, "
                f"{key_of(parts[1])}. Fix the line, or remove the list to pair by name."
            )
        if stem in listed:
            raise SourceError(f"{where}, line {number}: {key_of(parts[0])} is listed twice. Remove one of the lines.")
        listed[stem] = key_of(folder + split_path(parts[0])[1])
    notes.append(f"Checked against {key_of(name)} ({len(listed)} rows).")
    return listed
