"""CamVid as in the SegNet tutorial: driving frames in a folder, their masks in a sibling folder.

    train/0001TP_006690.png, trainannot/0001TP_006690.png       also val, valannot, test, testannot
    train.txt                                                    rows `/SegNet/CamVid/train/x.png .../trainannot/x.png`

Masks are 8-bit: 0..10 are classes, 11 is void. The lists may be absent. A list that is there must agree with the
folders; only the last folder and the name in its paths count.
"""

from __future__ import annotations

import re

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, Pairs, Samples, children, split_path, stem_of
from fastload.sources.listing import SPLITS, SourceOptions
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
    draft.leave_out_broken(tree)
    folders = {split_path(tree.names[i])[0] for i in tree.images().tolist()}
    folder_of: dict[str, str] = {}  # split -> its folder of frames, which has a sibling of masks
    for folder in sorted(folder for folder in folders if folder and f"{folder[:-1]}annot/" in folders):
        name = split_path(folder[:-1])[1]
        split = SPLITS.get(name.lower(), key_of(name))
        if split in folder_of:
            raise SourceError(
                f"{tree.given}: {key_of(folder_of[split])} and {key_of(folder)} are both the split {split!r}. Give one."
            )
        folder_of[split] = folder
    if not folder_of:
        raise SourceError(
            f"{tree.given}: there is no folder of frames with a sibling of masks (train/ and trainannot/). "
            "Give the folder or archive that holds both."
        )
    images, masks = (
        {
            (split, stem): at
            for split, of in folder_of.items()
            for stem, at in children(tree, f"{of[:-1]}{end}/").items()
        }
        for end in ("", "annot")
    )
    pairs = Pairs(tree, images, masks, {key: key[0] for key in images})
    kept = pairs.complete(draft, every_split=True)
    for split, folder in folder_of.items():
        listed = _read_list(tree, folder, draft)
        if listed is None:
            continue
        name = f"{key_of(folder[:-1])}.txt"
        unlisted = {key for key in kept if key[0] == split and key[1] not in listed}
        for key in sorted(unlisted):
            draft.leave_out(key_of(tree.names[images[key]]), f"is not listed in {name}")
        kept = [key for key in kept if key not in unlisted]
        for stem, frame in listed.items():
            if (split, stem) not in images and stem not in draft.unreadable:
                draft.leave_out(frame, f"is listed in {name}, but has no file")
    pairs.note_others(draft)
    masked = options.masks != "none"
    if masked:
        draft.notes.append(f"Masks: {len(CLASSES) - 1} classes, 11 = void and ignored.")
    return pairs.samples(kept, masked=masked, names=CLASSES, ignore_index=VOID)


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
