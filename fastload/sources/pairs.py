"""Images paired with masks by their name, as the layouts of segmentation datasets do it.

In a split that has masks, an image without its mask is contradictory; a split without any is packed without.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastload.format.column import Column
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits
from fastload.sources.tree import Tree, key_of

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Pairs(Generic[K]):
    """Images and masks by the key that pairs them: a stem, or the parts of a path that end in it."""

    tree: Tree  # holds the files
    images: Mapping[K, int]  # key -> position of the image
    masks: Mapping[K, int]  # key -> position of the mask
    splits: Mapping[K, str]  # key -> split of the image

    def splits_without_masks(self) -> list[str]:
        """Returns the splits of which no image has a mask, in the order of images."""
        having = {split for key, split in self.splits.items() if key in self.masks}
        return [split for split in dict.fromkeys(self.splits.values()) if split not in having]

    def complete(
        self, draft: Draft, lacking: str = "has no mask", *, every_split: bool = False, lone_masks: bool = True
    ) -> list[K]:
        """Returns the keys of the images to list; those `lacking` their mask are left out, and `lone_masks`.

        A split without any mask is listed, unless `every_split` must have them.
        """
        without = [] if every_split else self.splits_without_masks()
        kept = []
        for key, position in self.images.items():
            if key in self.masks or self.splits[key] in without:
                kept.append(key)
            else:
                draft.leave_out(key_of(self.tree.names[position]), lacking)
        for key, position in self.masks.items() if lone_masks else ():
            stem = key[-1] if isinstance(key, tuple) else key
            if key not in self.images and stem not in draft.unreadable:
                draft.leave_out(key_of(self.tree.names[position]), "is a mask without its image")
        return kept

    def note_others(self, draft: Draft) -> None:
        """Notes the images of the tree that belong to no pair."""
        used = {*self.images.values(), *self.masks.values()}
        others = [key_of(self.tree.names[i]) for i in self.tree.images().tolist() if i not in used]
        draft.note("Ignored images outside the pairs of folders", others)

    def positions(self, keys: Iterable[K]) -> list[int]:
        """Returns the position of the mask of each key, -1 for none."""
        return [self.masks.get(key, -1) for key in keys]

    def samples(
        self,
        keys: Collection[K],
        columns: dict[str, Column] | None = None,
        *,
        masked: bool = True,
        names: tuple[str, ...] = (),
        ignore_index: int | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> Samples:
        """Returns the images with these keys, split by split, sorted by name; columns are in the order of keys.

        Their masks are packed if they are `masked`; what these mean is said as in `listing.Masks`.
        """
        masks = MaskFiles(self.positions(keys), names, ignore_index, attrs or {}) if masked else None
        images, splits = [self.images[key] for key in keys], Splits.of([self.splits[key] for key in keys])
        return Samples.in_tree(self.tree, images, splits, columns, masks, by_name=True)
