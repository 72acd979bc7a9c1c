"""Whether the images of a tree lie in class folders."""

from __future__ import annotations

from fastload.sources.folder import ANNOTATIONS, IMAGES, SPLITS, folder_around
from fastload.sources.tree import Tree


def in_class_folders(tree: Tree) -> int:
    """How many images lie in class folders, as far as their names tell: several in a place, and none called images."""
    names = [tree.names[i] for i in tree.images().tolist()]
    around = folder_around(names, tree.archive)
    groups: dict[str, list[str]] = {}
    for name in names:
        top, _, rest = name[len(around) :].partition("/")
        split = top if rest and top.lower() in SPLITS else ""
        groups.setdefault(split, []).append(rest if split else name[len(around) :])
    count = 0
    for inside in groups.values():
        tops = {name.partition("/")[0].lower() for name in inside if "/" in name}
        if len(tops) > 1 and all("/" in name for name in inside) and tops.isdisjoint(IMAGES | ANNOTATIONS):
            count += len(inside)
    return count
