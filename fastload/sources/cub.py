"""CUB-200-2011: birds of 200 species, each with a box.

    images.txt                   1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
    image_class_labels.txt       1 1
    classes.txt                  1 001.Black_footed_Albatross
    train_test_split.txt         1 0          1: train, 0: test
    bounding_boxes.txt           1 60.0 27.0 325.0 304.0       x, y, width, height in pixels
    images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg

The lists of splits, boxes and classes may be absent. Parts and attributes are not read.
"""

from __future__ import annotations

import numpy as np

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits, split_path
from fastload.sources.boxes import SIZED
from fastload.sources.tree import Tree, key_of

IMAGES, LABELS, CLASSES = "images.txt", "image_class_labels.txt", "classes.txt"
SPLIT, BOXES = "train_test_split.txt", "bounding_boxes.txt"
_SPLITS = {"1": "train", "0": "test"}


def cub_evidence(tree: Tree) -> list[str]:
    """Returns the two lists of a tree that only CUB-200 has."""
    found = {split_path(name)[1]: name for _, name in tree.not_images if name.endswith((IMAGES, LABELS))}
    return [key_of(found[IMAGES]), key_of(found[LABELS])] if {IMAGES, LABELS} <= found.keys() else []


def list_cub(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images that images.txt lists, train before test, in the order of their names.

    Columns: `labels` int64 (N,); `bbox` float32 (N, 4) as x, y, width, height, if there is a list of them.
    """
    draft.leave_out_broken(tree)
    listed = _numbered(tree, IMAGES)
    root = split_path(next(name for name in tree.names if split_path(name)[1] == IMAGES))[0]
    names = {number: words[0] for number, words in listed.items()}
    labels = _numbered(tree, LABELS)
    classes = {number: words[0] for number, words in _numbered(tree, CLASSES, required=False).items()}
    splits, boxes = (_numbered(tree, base, required=False) for base in (SPLIT, BOXES))
    position_of = {tree.names[i]: i for i in tree.images.tolist()}
    kept, found, said, corners = list[int](), list[int](), list[str](), list[list[float]]()
    known = sorted(classes, key=int) or sorted({words[0] for words in labels.values()}, key=int)
    place = {number: at for at, number in enumerate(known)}
    for number, name in names.items():
        at, where = position_of.get(f"{root}images/{name}", -1), f"is number {number} of {IMAGES}, and"
        split = _SPLITS.get(splits.get(number, [""])[0], "") if splits else "all"
        wrong = {
            f"is listed in {IMAGES}, but has no file": at < 0,
            f"{where} has no class in {LABELS}": labels.get(number, [""])[0] not in place,
            f"{where} is neither 1 (train) nor 0 (test) in {SPLIT}": not split,
            f"{where} has no line in {BOXES}": bool(boxes) and number not in boxes,
        }
        if why := next((said for said, is_so in wrong.items() if is_so), ""):
            draft.leave_out(key_of(name), why)
            continue
        kept.append(at)
        found.append(place[labels[number][0]])
        said.append(split)
        corners.append([float(word) for word in boxes[number]] if boxes else [])
    named = {f"{root}images/{name}" for name in names.values()}
    for name, at in position_of.items():
        if name.startswith(f"{root}images/") and name not in named:
            draft.leave_out(key_of(tree.names[at]), f"is not listed in {IMAGES}")
    about = {"names": tuple(key_of(classes[number]) for number in known)} if classes else {}
    columns = {"labels": Column(np.array(found, np.int64), about)}
    if boxes:
        columns["bbox"] = Column(np.array(corners, np.float32).reshape(-1, 4), {"names": SIZED}, "xywh")
    draft.notes.append("NOT READ: parts and attributes of the birds.")
    return Samples.in_tree(tree, kept, Splits.of(said), columns, by_name=True)


def _numbered(tree: Tree, base: str, *, required: bool = True) -> dict[str, list[str]]:
    """Returns number -> the other words of each line of a list; {} if it is absent and need not be there."""
    at = next((i for i, name in enumerate(tree.names) if split_path(name)[1] == base), None)
    if at is None:
        if required:
            raise SourceError(f"{tree.given}: there is no {base}. Unpack the whole of CUB-200.")
        return {}
    found: dict[str, list[str]] = {}
    words = 5 if base == BOXES else 2
    for line in tree.lines(at):
        number, *rest = line.text.split(None, words - 1)
        numeric = base not in (IMAGES, CLASSES)
        if not number.isdigit() or len(rest) != words - 1 or (numeric and not all(map(_is_number, rest))):
            raise line.error(f"{line.text[:80]!r}, expected a number and {words - 1} more words. Fetch the file again.")
        if number in found:
            raise line.error(f"{number} stands in a second line. Remove one of them.")
        found[number] = rest
    return found


def _is_number(word: str) -> bool:
    try:
        return bool(np.isfinite(float(word)))
    except ValueError:
        return False
