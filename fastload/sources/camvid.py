"""CamVid as in the SegNet tutorial: driving frames in a folder, their masks in a sibling folder.

    train/0001TP_006690.png, trainannot/0001TP_006690.png       also val, valannot, test, testannot
    train.txt                                                    rows `/SegNet/CamVid/train/x.png .../trainannot/x.png`

Masks are 8-bit: 0..10 are classes, 11 is void. The lists may be absent. A list that is there must agree with the
folders; only the last folder and the name in its paths count.
"""

from __future__ import annotations

import re

from fastload.sources.assemble import Draft, Samples, split_path, stem_of
from fastload.sources.listing import SourceOptions
from fastload.sources.paired import Found, Key, MaskKind, Paired, list_paired
from fastload.sources.tree import Tree, is_image, key_of

CLASSES = tuple("Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist Void".split())
VOID = 11

_FRAME = re.compile(r"(?:^|/)(\w+)annot/(?:0001TP|0006R0|0016E5|Seq05VD)_\w+\.png$")


def camvid_evidence(tree: Tree) -> list[str]:
    """Returns the folders of masks (`trainannot/`) of a tree that hold files named as CamVid's frames."""
    found = dict.fromkeys(split_path(name)[0] for name in tree.names if "annot/" in name and _FRAME.search(name))
    return [key_of(folder) for folder in found]


def list_camvid(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns CamVid's frames, split by split, in the order of their names.

    Masks: 0..10 are classes, 11 is void and `ignore_index`. There are no columns.

    Raises:
        SourceError: there are no pairs of folders; a frame without mask, a mask without frame, a line of a list
            without its files, a frame without a line (unless skipped).
    """
    return list_paired(draft, tree, options, _CAMVID)


def _listed(draft: Draft, tree: Tree, found: Found, kept: list[Key]) -> list[Key]:
    """Returns the frames that the lists of their splits name, if there are lists."""
    for folder in sorted({folder for folder, _ in found.images}):
        listed = _read_list(tree, f"{folder}/", draft)
        if listed is None:
            continue
        name = f"{key_of(folder)}.txt"
        unlisted = {key for key in kept if key[0] == folder and key[1] not in listed}
        for key in sorted(unlisted):
            draft.leave_out(key_of(tree.names[found.images[key]]), f"is not listed in {name}")
        kept = [key for key in kept if key not in unlisted]
        for stem, frame in listed.items():
            if (folder, stem) not in found.images and stem not in draft.unreadable:
                draft.leave_out(frame, f"is listed in {name}, but has no file")
    return kept


_FILE = r"/(?P<key>[^/]+)\.[^/.]+"
_CAMVID = Paired(
    image=re.compile(rf"(?P<place>(?:.*/)?(?P<split>[^/]+)){_FILE}", re.DOTALL),
    kinds=(
        MaskKind(
            "annot", re.compile(rf"(?P<place>(?:.*/)?(?P<split>[^/]+))annot{_FILE}", re.DOTALL), names=CLASSES,
            ignore_index=VOID, note=f"Masks: {len(CLASSES) - 1} classes, {VOID} = void and ignored.",
        ),
    ),
    absent="there is no folder of frames with a sibling of masks (train/ and trainannot/). Give the folder or archive "
    "that holds both.",
    every_split=True,
    check=_listed,
)  # fmt: skip


def _read_list(tree: Tree, folder: str, draft: Draft) -> dict[str, str] | None:
    """Returns stem -> key of the frames that a split's list names; None if there is no list."""
    name = f"{folder[:-1]}.txt"
    if name not in tree.names:
        return None
    listed: dict[str, str] = {}
    for line in tree.lines(tree.names.index(name)):
        frame, *mask = line.text.split()
        if not all(map(is_image, (frame, *mask))) or len(mask) > 1:
            raise line.error(f"{line.text!r}, expected an image and its mask. Fix the line, or remove the list.")
        stem = stem_of(frame)
        if mask and stem_of(mask[0]) != stem:
            raise line.error(
                f"{key_of(frame)} is listed with the mask of another frame, {key_of(mask[0])}. "
                "Fix the line, or remove the list to pair by name."
            )
        if stem in listed:
            raise line.error(f"{key_of(frame)} is listed twice. Remove one of the lines.")
        listed[stem] = key_of(folder + split_path(frame)[1])
    draft.notes.append(f"Checked against {key_of(name)} ({len(listed)} rows).")
    return listed
