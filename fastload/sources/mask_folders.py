"""Images and masks in sibling folders, or side by side in one folder, paired by the names of the files.

images/a.jpg, masks/a.png                        one split, `all`
images/train/a.jpg, masks/train/a.png            splits below
train/images/a.jpg, train/masks/a.png            splits above
train/a.jpg, train_masks/a_mask.gif              siblings named after the images' folder
a.jpg, a_mask.png                                in one folder

Which images are the masks of which others is found by names that agree, and by what the files show, whatever their
folders are called. The folders of a tree become groups: a folder, or a pattern of many (`seq1/Images`, `seq2/Images`
are `*/Images`), and in it the files of one beginning or end (`x.png` and `x_mask.png` in one folder are two groups).
Two groups are a pair if the stems of the smaller one, without one constant beginning and end on each side, are stems of
the other, and if one shows photographs and the other masks. Names in use only decide between several groups of masks,
and let masks be known that do not look like any, such as JPEGs. Only a few names of each group are compared, and only a
few files of groups that agree are read.

Groups of photographs whose names agree may be pairs, too, such as an image and a sharper one: `pairs_of_photos` tells
them from classes whose images are numbered alike, by names that no counter makes, or by what a few files show.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError, OptionError, SourceError
from fastload.images.image_header import open_image, pillow_silenced
from fastload.options.masks import Palette, parse_palette
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, fill_value, split_path, stem_of, values_in_masks
from fastload.sources.folder import folder_around, folders_in, split_word
from fastload.sources.listing import SPLITS, first_few, split_of_parts
from fastload.sources.mask_classes import COLOURS
from fastload.sources.paired import Found, MaskKind, Paired, add_file, list_paired
from fastload.sources.signs import Sign, pack_command
from fastload.sources.tree import Tree, is_image, key_of, walk_order
from fastload.sources.webdataset import webdataset_evidence
from fastload.system.advice import advice

_MASK_WORDS = frozenset(
    "mask masks label labels lab annotation annotations annot annots ann anns anno gt gts groundtruth groundtruths "
    "truth seg segs segmentation segmentations segmented semantic semantics trimap trimaps parsing manual matte mattes "
    "target targets depth depths disparity disparities lr l".split()
)
_IMAGE_WORDS = frozenset(
    "image images im img imgs input inputs photo photos picture pictures pic pics rgb original originals frame frames "
    "sat jpegimages pngimages".split()
)
# Of several masks of an image, those with such a word are not the first choice.
_LESSER = frozenset(
    "instance instances inst object objects panoptic color colors colour colours colored coloured rgb vis viz "
    "visualization visualizations visualisation overlay overlays edge edges boundary boundaries border human part "
    "parts preview blend".split()
)
_JOINED = re.compile(r"(.+?)(annot|masks?|labels?|gt|seg)")  # trainannot
_LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".mpo")
_TAIL = re.compile(r"(?:[_\-. ]+[A-Za-z][A-Za-z0-9]*|(?<=\d)[A-Za-z]+)$")
_HEAD = re.compile(r"^[A-Za-z]+(?:[_\-. ]+|(?=\d))")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

_MANY = 12  # folders side by side, above which they are classes or sequences, and not kinds of images
_MOST_GROUPS = 48
_MOST_ENDS = 8  # groups in one folder, above which beginnings or ends of names do not distinguish kinds of images
_SAMPLED = 24  # names of a group that are looked at
_AGREE, _AGREE_BY_NAME = 0.75, 0.5  # part of the sampled stems of the smaller group that the other one must have
_PROBED = 3  # files of a group that are read
_FEW = 64  # values in a mask, at most
_FLAT = 0.7  # part of the neighbouring pixels of a mask that are equal, at least
_LARGE = 2**16  # pixels
_TOO_LARGE = 2**28  # bytes of a file that is not read to see what it shows
_ROWS = 64  # rows of an image that are looked at
_THIN = 6  # pixels, on average, of a line in a drawing, at most
_BLURRED = 0.95  # part of the pixels of a mask in JPEG that have one of four values
_STRAY, _STRAYS = 0.01, 3  # part, and number, of the images at the top that may belong to no pair
_SAME = 0.01  # difference of aspect ratios up to which two files show the same

_MOST_VIEWS = 4  # groups of photographs with the same names, above which they are classes
_EQUAL = 0.95  # part of the names, and of the number, of such groups that must agree
_COMPARED = 8  # pairs of photographs that are compared
_SPARSE = 1000  # so many times as large as their count are numbers that no counter gives
_DETAIL = 32  # pixels, of height and width, at which photographs are compared
_VIEWS = (("a", "b"), ("lr", "hr"), ("sketch", "photo"), ("sketches", "photos"), ("source", "target"))
"""Words by which the two images of a pair are called in folders that classes would not be called by."""

Shows = Literal["photo", "mask", "lines", "colours", "perhaps", ""]
"""The content of a file: a photograph; a mask of few numbers, also of thin lines, or of few colours; perhaps a mask, as
a JPEG of few colours, or few numbers at random, or regions of many numbers of 16 bits; "" if it is unreadable.
"""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Group:
    """Images of one kind: of a folder or pattern of folders, and of one beginning or end of their names."""

    pattern: str  # path of the folder, with `*` for what differs; "" is the top
    places: dict[tuple[str, ...], str]  # what stands for each `*` -> the folder
    head: str = ""
    tail: str = ""
    others: tuple[tuple[str, str], ...] = ()  # heads and tails of the other groups of the folder
    lossy: bool | None = None  # whether it is the files of lossy formats, or the others; None: both
    chosen: tuple[str, bool] | None = None  # a pattern of paths, and whether it is the files that fit it
    sample: Sequence[str] = ()  # paths of some of its files
    count: int = 0  # number of its files, estimated

    @cached_property
    def place_of(self) -> dict[str, tuple[str, ...]]:
        """Folder -> what stands for each `*` of the pattern."""
        return {folder: place for place, folder in self.places.items()}

    @cached_property
    def ends(self) -> list[tuple[str, str]]:
        """Beginnings and ends that the stems of all of its files may have in common, the shortest first."""
        stems = [stem_of(name) for name in self.sample]
        first = stems[0]
        before, behind = _in_common(stems), _in_common([stem[::-1] for stem in stems])
        cuts = [at for at in range(1, len(first)) if _is_border(first[at - 1], first[at])]
        heads = ["", *(first[:at] for at in cuts if at <= before)][:4]
        tails = ["", *(first[at:] for at in reversed(cuts) if len(first) - at <= behind)][:5]
        ends = [(head, tail) for head in heads for tail in tails]
        return sorted(ends, key=lambda ends: (len(ends[0] + ends[1]), ends))

    @property
    def shown(self) -> str:
        """The paths of its files, for messages."""
        suffix = "" if self.lossy is None else ".jpg" if self.lossy else ".png"
        folder = f"{self.pattern}/" if self.pattern else ""
        base = f"{self.head}*{self.tail}{suffix}" if self.head or self.tail or suffix or not folder else ""
        return key_of(folder + base)

    def has(self, name: str) -> bool:
        """Whether a file in its folders belongs to it."""
        if self.lossy is not None and name.lower().endswith(_LOSSY) != self.lossy:
            return False
        if self.chosen and fnmatch.fnmatchcase(name, self.chosen[0]) != self.chosen[1]:
            return False
        if not (self.head or self.tail):
            return not any(_core(name, *ends) for ends in self.others)
        return bool(_core(name, self.head, self.tail))


class Match(NamedTuple):
    """Two groups whose stems agree."""

    image: Group
    mask: Group
    image_ends: tuple[str, str]  # beginning and end of the images' stems, outside the part that agrees
    mask_ends: tuple[str, str]  # the same of the masks' stems
    files: list[tuple[int, int]]  # positions of some images and their masks

    def image_core(self, name: str) -> str:
        """Returns the part of an image's stem that its mask's stem shares; the stem itself if it is no such image."""
        return _core(name, *self.image_ends) or stem_of(name)

    def mask_core(self, name: str) -> str:
        """Returns the part of a mask's stem that its image's stem shares; the stem itself if it is no such mask."""
        return _core(name, *self.mask_ends) or stem_of(name)

    def words(self) -> tuple[set[str], set[str]]:
        """Returns the words that only paths of images have, and the words that only paths of masks have."""
        here, there = _different(self.image.pattern, self.mask.pattern)
        image = _words(" ".join((*here, self.image.head, self.image.tail, *self.image_ends)))
        mask = _words(" ".join((*there, self.mask.head, self.mask.tail, *self.mask_ends)))
        return image - mask, mask - image

    def distance(self) -> tuple[int, int]:
        """Returns by how many folders, and words, the paths of both differ."""
        here, there = _different(self.image.pattern, self.mask.pattern)
        return len(here) + len(there), sum(map(len, self.words()))

    def glob(self) -> str:
        """Returns a pattern of the paths of such masks, of other splits too, for `--mask-files`."""
        folder = "/".join(_different(self.image.pattern, self.mask.pattern)[1])
        above = "" if self.mask.pattern.startswith(folder) else "*/"
        end = f"{self.mask.head}*{self.mask.tail}" + (".*" if self.mask.tail else "")
        return key_of(f"{above}{folder}/{end}" if folder else f"*{self.mask.tail}.*" if self.mask.tail else end)


@dataclass
class Pairing:
    """The pairs found in a tree."""

    pairs: list[Match] = field(default_factory=list)  # one for each group of images that has masks
    without: list[Group] = field(default_factory=list)  # images of a split without masks
    passed: list[str] = field(default_factory=list)  # shown groups of other masks, which are not read
    doubts: list[Sign] = field(default_factory=list)  # why it is not certain that these are the pairs
    unclear: list[Sign] = field(default_factory=list)  # why masks cannot be chosen, though pairs are asked for
    colours: bool = False  # whether masks are colours


_FOUND: WeakKeyDictionary[Tree, Pairing] = WeakKeyDictionary()  # several layouts ask for one tree's


def find_pairs(tree: Tree, mask_files: str = "") -> Pairing:
    """Returns the pairs of a tree.

    Args:
        mask_files: a pattern of the paths of all masks, in which `*` stands for any characters; "": they are found.
    """
    if mask_files:
        return _MaskSearch(_Groups(tree, mask_files)).search()
    if tree not in _FOUND:
        _FOUND[tree] = _MaskSearch(_Groups(tree)).search()
    return _FOUND[tree]


def pairs_of_photos(tree: Tree) -> list[Sign]:
    """Returns why two folders, or ends of names, are likely pairs of photographs, such as LR and HR; [] if none are."""
    return list(_PhotoSearch(_Groups(tree)).search())


def files_of(tree: Tree, group: Group) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields the place (a key of `group.places`) and position of each file of a group."""
    for place, folder in group.places.items():
        for i in _span(tree, folder):
            if is_image(tree.names[i]) and group.has(tree.names[i]):
                yield place, i


def split_of_folder(folder: str) -> str:
    """Returns the split that a part of a path is, or, if none is, that a word in it names; "" if none does."""
    parts = folder.split("/")
    words = {split_of_parts([word]) for part in parts for word in _WORD.findall(part)} - {""}
    return split_of_parts(parts) or (words.pop() if len(words) == 1 else "")


class _Groups:
    """The groups of a tree's images, and which of them agree by the names of their files."""

    def __init__(self, tree: Tree, mask_files: str = "") -> None:
        self.tree, self.mask_files = tree, mask_files
        self.look = cache(partial(_look, tree))  # position -> what the file shows, its height and width
        self.all = self._found()

    def _found(self) -> list[Group]:
        """Returns the groups of the tree; [] if they are too many to be kinds of images."""
        if len(self.tree.images) < 2:
            return []
        many, patterns = _MANY, _patterns(self.tree, _MANY)
        while len(patterns) > _MOST_GROUPS and many > 1:
            many //= 2
            patterns = _patterns(self.tree, many)
        found = [group for pattern, places in patterns.items() for group in self._groups_of(pattern, places)]
        return found if len(found) <= 2 * _MOST_GROUPS else []

    def _groups_of(self, pattern: str, places: dict[tuple[str, ...], str]) -> list[Group]:
        """Returns the groups of the files in the folders of a pattern."""
        names, total = list[str](), 0
        looked = _spread(list(places.values()), 4)
        for folder in looked:
            span = _span(self.tree, folder)
            # Neighbours, too: a mask may lie next to its image.
            at = {i + j for i in _spread(span, _SAMPLED) for j in range(4) if i + j < span.stop}
            names += [name for i in sorted(at) if is_image(name := self.tree.names[i])]
            total += len(span)
        if not names:
            return []
        total = total * len(places) // len(looked)
        kinds: list[Group] = []
        if self.mask_files:
            kinds = [Group(pattern, places, chosen=(self.mask_files, fits)) for fits in (False, True)]
        else:
            ends = _kinds_of_ends(names)
            kinds = [Group(pattern, places, others=ends), *(Group(pattern, places, *each) for each in ends)]
        found = []
        for kind in kinds:
            mine = [name for name in names if kind.has(name)]
            by_form = {form: [name for name in mine if name.lower().endswith(_LOSSY) == form] for form in (False, True)}
            both = all(by_form.values()) and not self.mask_files
            for lossy, of in by_form.items() if both else [(None, mine)]:
                if of:
                    count = total * len(of) // len(names)
                    found.append(replace(kind, lossy=lossy, sample=_spread(of, _SAMPLED), count=max(count, 1)))
        return found

    def may_be_masks(self, group: Group) -> bool:
        """Whether a group's files may be masks, by their form or name."""
        if group.chosen:
            return group.chosen[1]
        return any(not name.lower().endswith(_LOSSY) for name in group.sample) or self.named(group)

    def named(self, group: Group) -> bool:
        """Whether a group is called as masks are, or was chosen as masks."""
        return bool(group.chosen or _words(f"{group.pattern} {group.head} {group.tail}") & _MASK_WORDS)

    def position(self, name: str) -> int:
        """Returns the position of a file in the tree."""
        return bisect_left(self.tree.names, walk_order(name), key=walk_order)

    def match(self, image: Group, mask: Group, *, photos: bool = False) -> Match | None:
        """Returns the match of two groups; None if their stems do not agree. `photos`: both show photographs."""
        if image.places.keys().isdisjoint(mask.places) or (image.chosen and image.chosen[1]):
            return None
        few, many = (mask, image) if mask.count <= image.count else (image, mask)
        best: Match | None = None
        lone = min(len(few.sample), len(many.sample)) == 1
        tried = sorted(((mine, theirs) for mine in few.ends for theirs in many.ends), key=_length)
        for mine, theirs in tried:
            # One name tells no constant end; and one side with a beginning, the other with an end, are no names in use.
            if any(mine) and any(theirs) and (lone or bool(mine[0]) != bool(theirs[0])):
                continue
            pairs = []
            for n, name in enumerate(few.sample):
                if (at := self._find(many, few, name, mine, theirs)) is not None:
                    pairs.append(at)
                    # The first file rules out most: classes may all have the same names.
                    shown = at[0 if few is mask else 1]
                    if not photos and not self.named(mask) and self.look(shown)[0] == "photo":
                        return None
                elif n == 2 and not pairs:
                    break
            if len(pairs) > (len(best.files) if best else 0):
                ends = (theirs, mine) if few is mask else (mine, theirs)
                best = Match(image, mask, *ends, pairs if few is image else [(b, a) for a, b in pairs])
            if len(pairs) == len(few.sample):
                break
        if best is None:
            return None
        by_image, by_mask = best.words()
        named = by_mask & _MASK_WORDS and not by_image & _MASK_WORDS
        needed = _EQUAL if photos else _AGREE_BY_NAME if named or self.mask_files else _AGREE
        return best if len(best.files) >= needed * len(few.sample) else None

    def _find(
        self, many: Group, few: Group, name: str, mine: tuple[str, str], theirs: tuple[str, str]
    ) -> tuple[int, int] | None:
        """Returns the positions of a file of the group `few` and of the file of `many` that its name fits."""
        folder, core = split_path(name)[0][:-1], _core(name, *mine)
        place = few.place_of[folder]
        if not core or place not in many.places:
            return None
        stem, names = theirs[0] + core + theirs[1], self.tree.names
        other = many.places[place]
        start = bisect_left(names, (other, f"{stem}."), key=walk_order)
        for at in range(start, min(start + 8, len(names))):
            there = split_path(names[at])[0][:-1] == other and stem_of(names[at]) == stem and names[at] != name
            if there and is_image(names[at]) and many.has(names[at]):
                return self.position(name), at
        return None


class _MaskSearch:
    """The search for the images and masks among the groups of a tree."""

    def __init__(self, groups: _Groups) -> None:
        self.groups, self.pairing = groups, Pairing()

    def search(self) -> Pairing:
        """Returns the pairs found."""
        if len(self.groups.all) > 1 and any(map(self.groups.may_be_masks, self.groups.all)):
            self._pair()
        return self.pairing

    def _pair(self) -> None:
        """Finds the pairs among the groups."""
        found: dict[Group, list[Match]] = {}  # mask -> its images
        photos: list[Match] = []
        for mask in filter(self.groups.may_be_masks, self.groups.all):
            for image in self.groups.all:
                match = self.groups.match(image, mask) if image is not mask else None
                if match is None:
                    continue
                verdict = self._verdict(match)
                if verdict == "pair":
                    found.setdefault(mask, []).append(match)
                elif verdict == "photos":
                    photos.append(match)
        best = [min(matches, key=self._far) for matches in found.values()]
        for match in best:
            alike = [other.image.shown for other in found[match.mask] if self._far(other) == self._far(match)]
            if len(set(alike)) > 1 and not match.words()[0] & _IMAGE_WORDS:
                seen = f"{match.mask.shown} may be masks of {' or of '.join(alike)}, which have the same names"
                self.pairing.unclear.append(Sign(seen, ("move those away that are not the images",)))
        masks = {match.mask for match in best}
        chosen: dict[Group, list[Match]] = {}
        for match in best:
            if match.image not in masks:
                chosen.setdefault(match.image, []).append(match)
        for matches in chosen.values():
            self._choose(matches)
        if not self.pairing.pairs:
            self._without_pairs(photos)
        else:
            self._note_rest(masks)

    def _verdict(self, match: Match) -> Literal["pair", "photos", ""]:
        """Returns whether a match is one of images and masks, or of photographs by names of images and masks."""
        if self.groups.mask_files:
            return "pair"
        by_image, by_mask = match.words()
        named = bool(by_mask & _MASK_WORDS) and not by_image & _MASK_WORDS
        both_named = named and bool(by_image & _IMAGE_WORDS)
        masks, images, same = set[Shows](), set[Shows](), True
        for image, mask in _spread(match.files, _PROBED):
            shows, size = self.groups.look(mask)
            masks.add(shows)
            if shows == "photo" and not both_named:
                return ""
            of_image, whole = self.groups.look(image)
            images.add(of_image)
            same &= 0 in (*size, *whole) or abs(size[1] * whole[0] / (size[0] * whole[1]) - 1) <= _SAME
        if "photo" in masks and (not both_named or "photo" in images):
            return "photos" if both_named else ""
        drawn = masks <= {"mask", "lines", "colours"} and not by_image & _MASK_WORDS - by_mask
        alike = "photo" in images and drawn and same
        return "pair" if named or alike else ""

    def _far(self, match: Match) -> tuple[int, ...]:
        """Returns a value that is the smaller, the more likely the images of a match belong to its masks."""
        words, (folders, different) = match.words()[0], match.distance()
        shown = bool(words & _LESSER - _IMAGE_WORDS)  # pictures of masks
        photo = self.groups.look(match.files[0][0])[0] == "photo"
        return not photo, shown, folders, not words & _IMAGE_WORDS, different

    def _shows(self, match: Match) -> set[Shows]:
        return {self.groups.look(mask)[0] for _, mask in _spread(match.files, _PROBED)}

    def _choose(self, matches: list[Match]) -> None:
        """Adds the match of one group of images, of several with groups of masks."""

        def rank(match: Match) -> tuple[bool, ...]:
            words = match.words()[1]
            return bool(words & _LESSER), not words & _MASK_WORDS, "colours" in self._shows(match)

        matches = sorted(matches, key=rank)
        first, *rest = matches
        if rest and rank(rest[0]) == rank(first):
            shown = first_few([match.mask.shown for match in matches])
            ways = [f"`--mask-files '{match.glob()}'`" for match in matches[:2]]
            none = "`--layout mask-folders --masks none`, which packs the images without"
            seen = f"{first.image.shown} has several kinds of masks, {shown}, and it is not known which are meant"
            if all(doubt.ways[: len(ways)] != tuple(ways) for doubt in self.pairing.unclear):
                self.pairing.unclear.append(Sign(seen, (*ways, none)))
        words = first.words()
        thin = "lines" in self._shows(first)
        if not words[1] & _MASK_WORDS and (thin or first.image.pattern != first.mask.pattern):
            what = "masks, or drawings," if thin else "masks"
            seen = f"{first.mask.shown} looks like {what} of the images in {first.image.shown}, of the same names"
            ways = ["`--layout mask-folders`, if they are"]
            ways += [f"`--mask-files '{first.glob()}'`, likewise"] * thin
            self.pairing.doubts.append(Sign(seen, tuple(ways)))
        self.pairing.passed += [match.mask.shown for match in rest]
        self.pairing.colours |= "colours" in self._shows(first)
        image, mask = first.image, first.mask
        if (image.pattern, image.head, image.tail) != (mask.pattern, mask.head, mask.tail):
            # Files that differ only in their form are images of this group, too, and then named as ambiguous.
            first = first._replace(image=replace(image, lossy=None))
        self.pairing.pairs.append(first)

    def _note_rest(self, masks: set[Group]) -> None:
        """Finds out what becomes of the groups that are neither the images nor the masks of a pair."""
        paired, rest = self.pairing.pairs, list[Group]()
        used = {match.mask for match in paired}
        of_images = {(match.image.pattern, match.image.head, match.image.tail) for match in paired}
        splits = {split_of_folder(match.image.pattern) for match in paired}
        kinds = [_words(match.image.pattern) - SPLITS.keys() for match in paired]
        for group in self.groups.all:
            words, split = _words(f"{group.pattern} {group.head} {group.tail}"), split_of_folder(group.pattern)
            if group in used or (group.pattern, group.head, group.tail) in of_images:
                continue
            if group in masks or words & _LESSER - _IMAGE_WORDS:
                self.pairing.passed.append(group.shown)
            elif split and split not in splits and words - SPLITS.keys() in kinds:
                self.pairing.without.append(group)
            else:
                rest.append(group)
        self.pairing.passed = list(dict.fromkeys(self.pairing.passed))
        strays = max(_STRAYS, _STRAY * sum(match.image.count for match in paired))
        if any(group.pattern for group in rest) or sum(group.count for group in rest) > strays:
            shown, one = first_few([group.shown for group in rest]), paired[0]
            seen = f"{one.image.shown} and {one.mask.shown} are images and masks, but {shown} next to them has none"
            leave = f"`--layout mask-folders`, which packs the pairs and leaves {shown} out"
            self.pairing.doubts.append(Sign(seen, (leave, f"move {shown} away, if it is no part of the dataset")))

    def _without_pairs(self, photos: list[Match]) -> None:
        """Notes what looks like pairs by its names."""
        if photos:
            sign = _sign_of_views(self.groups.tree, photos[0], "are called as images and masks are")
            own = f"to pack {photos[0].image.shown} alone, give that folder itself"
            self.pairing.doubts.append(replace(sign, ways=(*sign.ways, own)))
            return
        for mask in filter(self.groups.named, self.groups.all):
            near = next((group for group in self.groups.all if _is_beside(group, mask)), None)
            if near and self.groups.look(self.groups.position(mask.sample[0]))[0] in ("mask", "lines", "colours"):
                a, b = (key_of(split_path(group.sample[0])[1]) for group in (near, mask))
                seen = (
                    f"{mask.shown} looks like masks of the images in {near.shown}, but names do not agree "
                    f"({a} and {b}), or each image has several"
                )
                name = "give each image one mask of its name; all masks may have one beginning or end more"
                self.pairing.doubts.append(Sign(seen, (name, f"to pack {near.shown} alone, give that folder itself")))
                return


class _PhotoSearch:
    """The search for pairs of photographs among the groups of a tree."""

    def __init__(self, groups: _Groups) -> None:
        self.groups = groups
        self.features = cache(partial(_edge_features, groups.tree))

    def search(self) -> Iterator[Sign]:
        """Yields groups of photographs that are pairs by their names or what they show, of which classes know nothing.

        More than `_MOST_VIEWS` groups side by side are classes; so are those whose numbers of files differ.
        """
        seen = set[Group]()
        for image in self.groups.all:
            near = [other for other in self.groups.all if other is not image and self._may_be_view(image, other)]
            for other in near if len(near) < _MOST_VIEWS else ():
                match = self.groups.match(image, other, photos=True) if other not in seen else None
                if match and (why := self._why_views(match, alone=len(near) == 1)):
                    if self._same_bytes(match):
                        yield Sign(
                            f"{image.shown} and {other.shown} hold the same files, which would be packed twice",
                            ("move one of the copies away",),
                        )
                        return
                    yield _sign_of_views(self.groups.tree, match, why)
                    return
            seen.add(image)

    def _may_be_view(self, image: Group, other: Group) -> bool:
        """Whether two groups lie side by side, in one split, and have equally many files."""
        few, many = sorted((image.count, other.count))
        counted = image.pattern != other.pattern  # of ends in one folder the sample tells about how many
        return (
            few >= (_EQUAL if counted else _AGREE_BY_NAME) * many
            and max(map(len, _different(image.pattern, other.pattern))) <= 2
            and split_of_folder(image.pattern) == split_of_folder(other.pattern)
        )

    def _same_bytes(self, match: Match) -> bool:
        """Whether all compared files of two groups are copies of one another."""
        sizes, files = self.groups.tree.sizes, _spread(match.files, _COMPARED)
        if any(sizes[a] != sizes[b] for a, b in files):
            return False
        try:
            return all(self.groups.tree.files.read(a) == self.groups.tree.files.read(b) for a, b in files)
        except ImageError:
            return False

    def _why_views(self, match: Match, *, alone: bool) -> str:
        """Returns why two groups with equal names are pairs of photographs; "" if they are not."""
        files = _spread(match.files, _COMPARED)
        details = [(self.features(a), self.features(b)) for a, b in files]
        known = [(one, other) for one, other in details if one and other]
        if len(known) < 2 or not all(_same_view(*one.size, *other.size) for one, other in known):
            return ""
        names = match.image.pattern.rpartition("/")[2], match.mask.pattern.rpartition("/")[2]
        words = [_words(" ".join(ends)) for ends in zip(names, (match.image.tail, match.mask.tail), strict=True)]
        if alone and any(one in words[at] and other in words[1 - at] for one, other in _VIEWS for at in (0, 1)):
            return "are called as the two images of pairs are"
        if alone and _no_counter(
            [match.image_core(self.groups.tree.names[a]) for a, _ in match.files], match.image.count
        ):
            return "have names that agree by no chance"
        return "show the same" if _alike(known) else ""


def _sign_of_views(tree: Tree, match: Match, why: str) -> Sign:
    """Returns the sign that two groups of photographs are pairs, with lines that pack them."""
    groups, lines, files = (match.image, match.mask), list[str](), list[str]()
    for group in groups:
        folder, _, base = group.shown.rpartition("/")
        name = (group.head + group.tail).strip("_-. ") or key_of(group.pattern.rpartition("/")[2])
        files.append(f"{name}.h5" if f"{name}.h5" not in files else f"{name}_2.h5")
        if base or "*" in folder:
            found = f"sorted(Path({str(tree.path)!r}).glob({group.shown + ('.*' if base else '*')!r}))"
            lines.append(f"`pack_images({found}, {files[-1]!r})`")
        else:
            lines.append(f"`fastload pack {shlex.quote(str(tree.path / group.pattern))} {shlex.quote(files[-1])}`")
    sizes = [seen.size for at in match.files[0] if (seen := _edge_features(tree, at))]
    sized = "of one size" if len(set(sizes)) == 1 else f"such as {' and '.join(f'{w}x{h}' for h, w in sizes)}"
    read = ", ".join(f"FastLoader({file!r}, 16, shuffle='full')" for file in files)
    return Sign(
        f"{groups[0].shown} and {groups[1].shown} hold photographs of the same names ({sized}), which {why}: "
        "pairs, as of an input and its target, which no classes are",
        (f"for pairs, a file of each, whose rows have one order: {' and '.join(lines)}, read by `zip({read})`",),
    )


def _is_beside(image: Group, mask: Group) -> bool:
    """Whether a group is called like images, and lies where another, called like masks, has its own."""
    here, there = _different(image.pattern, mask.pattern)
    by_image, by_mask = _words(" ".join(here)), _words(" ".join(there))
    named = (by_mask - by_image) & _MASK_WORDS and not (by_image - by_mask) & _MASK_WORDS
    return bool(named and (by_image - by_mask) & _IMAGE_WORDS)


def _patterns(tree: Tree, many: int) -> dict[str, dict[tuple[str, ...], str]]:
    """Returns the patterns of a tree's folders, with the folders of each by what stands for each `*`.

    More than `many` folders side by side are one, `*`; those among them that are called like another with an end that
    masks have are `*_mask`.
    """
    below: dict[str, list[str]] = {}
    for folder in tree.folders:
        parent, _, name = folder.rpartition("/")
        below.setdefault(parent, []).append(name)
    level: dict[str, dict[tuple[str, ...], str]] = {"": {(): ""}}
    found = dict(level)
    while level:
        following: dict[str, dict[tuple[str, ...], str]] = {}
        for pattern, places in level.items():
            names = {name for folder in places.values() for name in below.get(folder, ())}
            merged = len(names) > many
            for place, folder in places.items():
                for name in below.get(folder, ()):
                    joined = _JOINED.fullmatch(name) if merged else None
                    base = joined[1].rstrip("_-. ") if joined else ""
                    base = base if base in names else name
                    part = f"*{name[len(base) :]}" if merged else name
                    at = following.setdefault(f"{pattern}/{part}".lstrip("/"), {})
                    at[(*place, base) if merged else place] = f"{folder}/{name}".lstrip("/")
        found |= following
        level = following
    return found


def _span(tree: Tree, folder: str) -> range:
    """Returns the positions of the files in a folder; they lie together."""
    start = bisect_left(tree.names, folder, key=_folder_of)
    return range(start, bisect_right(tree.names, folder, lo=start, key=_folder_of))


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _kinds_of_ends(names: list[str]) -> tuple[tuple[str, str], ...]:
    """Returns the beginnings or ends that distinguish kinds of files in one folder; () if there is one kind only."""
    stems = [stem_of(name) for name in names]
    for pattern in (_TAIL, _HEAD):
        ends = [match[0] if (match := pattern.search(stem)) else "" for stem in stems]
        count = Counter(ends)
        often = [end for end, n in count.items() if end and n >= len(stems) / 10]
        if masks := [end for end in often if _words(end) & _MASK_WORDS]:
            often = [end for end in often if end in masks or _words(end) & (_IMAGE_WORDS | _LESSER)]
        # Otherwise they are kinds only if what they stand at occurs with another of them, or alone.
        cut = Counter(stem.replace(end, "", 1) for stem, end in set(zip(stems, ends, strict=True)))
        agree = len(cut) >= len(count) and sum(cut.values()) >= 1.5 * len(cut)
        if len(count) > 1 and 0 < len(often) <= _MOST_ENDS and (masks or agree):
            return tuple(sorted(("", end) if pattern is _TAIL else (end, "") for end in often))
    return ()


def _core(name: str, head: str, tail: str) -> str:
    """Returns the stem of a file without a beginning and an end; "" if it lacks them, or is nothing else."""
    stem = stem_of(name)
    fits = stem.startswith(head) and stem.endswith(tail)
    return stem[len(head) : len(stem) - len(tail)] if fits else ""


def _is_border(before: str, behind: str) -> bool:
    """Whether a name may be cut between two characters: at a separator, or between a letter and a digit."""
    return before in "_-. " or behind in "_-. " or before.isalpha() != behind.isalpha()


def _in_common(texts: list[str]) -> int:
    """Returns how many characters all texts begin with."""
    one, other = min(texts), max(texts)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _length(ends: tuple[tuple[str, str], tuple[str, str]]) -> int:
    return sum(map(len, (*ends[0], *ends[1])))


def _different(one: str, other: str) -> tuple[list[str], list[str]]:
    """Returns the parts of two paths between those that they have in common at their beginning and end."""
    a, b = one.split("/"), other.split("/")
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def _words(text: str) -> set[str]:
    """Returns the words of a name, in lower case: `SegmentationClassPNG` has segmentation, class and png."""
    words = {word.lower() for word in _WORD.findall(text)}
    joined = (_JOINED.fullmatch(word) for word in words - _MASK_WORDS)
    return words | {word for match in joined if match for word in match.groups()}


def _spread(every: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` of them, evenly chosen."""
    if len(every) <= count:
        return list(every)
    return [every[i * (len(every) - 1) // (count - 1)] for i in range(count)]


def _look(tree: Tree, i: int) -> tuple[Shows, tuple[int, int]]:
    """Returns what file i shows, and its height and width; "" and (0, 0) if it cannot be read."""
    if tree.sizes[i] > _TOO_LARGE:
        return "", (0, 0)
    try:
        lossy = tree.names[i].lower().endswith(_LOSSY)
        data = tree.files.read(i)
        with pillow_silenced(), open_image(data) as image:
            size = image.height, image.width
            if image.format == "PNG" and len(data) > size[0] * size[1] > _LARGE:
                return "photo", size  # masks are compressed further; decoding this one would take long
            image.draft(None, (256, 256))  # a JPEG is decoded smaller
            deep = "I" in image.mode
            pixels = np.asarray(image if image.mode in ("1", "L", "P", "RGB") or deep else image.convert("RGB"))
    except Exception as exc:  # noqa: BLE001  # Pillow's plugins raise anything; the packer names the damaged file
        _ = exc
        return "", (0, 0)
    pixels = pixels[:: -(-len(pixels) // _ROWS)].astype(np.int64)
    if lossy:
        pixels >>= 5
    grey = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    if pixels.ndim == 3:
        pixels = pixels @ np.array([1 << 16, 1 << 8, 1])
    _, counts = np.unique(pixels, return_counts=True)
    flat = (pixels[:, 1:] == pixels[:, :-1]).mean() if pixels.shape[1] > 1 else 1.0
    if lossy:
        # Edges in a JPEG are blurred: only most of its pixels have few values.
        common = np.sort(counts)[-4:].sum() / counts.sum()
        return ("perhaps" if common >= _BLURRED and flat >= _FLAT else "photo"), size
    if len(counts) > _FEW:
        return ("perhaps" if deep and flat >= _FLAT else "photo"), size
    if flat < _FLAT and len(counts) > 2:
        return "perhaps", size
    return (("lines" if len(counts) == 2 and _are_thin(pixels) else "mask") if grey else "colours"), size


def _are_thin(pixels: NDArray[np.int64]) -> bool:
    """Whether the rarer of two values occurs in short runs only, as in drawings, and in masks of cracks or vessels."""
    rare = pixels == min(np.unique(pixels), key=lambda value: int((pixels == value).sum()))
    return 2 * int(rare.sum()) < _THIN * int((rare[:, 1:] != rare[:, :-1]).sum())


class _EdgeFeatures(NamedTuple):
    """Features of a photograph, to be compared with another of any size."""

    size: tuple[int, int]  # height, width
    edges: NDArray[np.float64]  # (2, E): differences of neighbouring pixels, and these without sign, of mean 0, norm 1


def _edge_features(tree: Tree, i: int) -> _EdgeFeatures | None:
    """Returns the details of an image file; None if it cannot be read, or shows one colour."""
    if tree.sizes[i] > _TOO_LARGE:
        return None
    try:
        with pillow_silenced(), open_image(tree.files.read(i)) as image:
            size = image.height, image.width
            image.draft("L", (4 * _DETAIL, 4 * _DETAIL))  # a JPEG is decoded smaller
            small = image.convert("F" if "I" in image.mode else "L").resize((_DETAIL, _DETAIL), Image.Resampling.BOX)
    except Exception as exc:  # noqa: BLE001  # Pillow's plugins raise anything; the packer names the damaged file
        _ = exc
        return None
    pixels = np.asarray(small, np.float64)
    steps = np.concatenate([np.diff(pixels, axis=axis).ravel() for axis in (0, 1)])
    edges = np.stack([steps, abs(steps)])
    edges -= edges.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(edges, axis=1, keepdims=True)
    return _EdgeFeatures(size, edges / norms) if norms.all() else None


def _same_view(height: int, width: int, other_height: int, other_width: int) -> bool:
    """Whether two heights and widths have one ratio, up to a pixel of the smaller."""
    return abs(height * other_width - width * other_height) <= max(height, width, other_height, other_width)


def _alike(pairs: list[tuple[_EdgeFeatures, _EdgeFeatures]]) -> bool:
    """Whether the two images of each pair are more alike than images of different pairs, by far or without exception.

    Images of different pairs are as much alike where all photographs are, as from one fixed camera.
    """
    likeness = np.max([[[float(a @ b) for a, b in zip(x.edges, y.edges, strict=True)] for _, y in pairs]
                       for x, _ in pairs], axis=2)  # fmt: skip
    own = np.diagonal(likeness)
    others = np.where(np.eye(len(pairs), dtype=bool), -1, likeness).max(axis=1)
    gain = own - others
    few = len(pairs) < 6
    return bool(np.median(gain) >= (0.3 if few else 0.1) and (gain > 0).mean() >= (1 if few else 0.85))


def _no_counter(cores: list[str], count: int) -> bool:
    """Whether two folders can hardly share such names by chance: letters that differ, or widely spaced numbers."""
    letters = {"".join(filter(str.isalpha, core)) for core in cores}
    sparse = all(map(str.isdecimal, cores)) and max(map(int, cores)) > _SPARSE * count
    return len(cores) > 2 and (2 * len(letters) > len(cores) or sparse)


def mask_folders_evidence(tree: Tree) -> list[str]:
    """Returns an image of a tree and its mask, if it is certain which images are masks of which."""
    found = find_pairs(tree)
    if not found.pairs or found.doubts or found.unclear or _in_a_table(tree, found):
        return []
    return [key_of(tree.names[i]) for i in found.pairs[0].files[0]]


def doubtful_pairs(tree: Tree) -> list[Sign]:
    """Returns why it is likely, but not certain, that a tree holds images and masks; [] for neither.

    Nothing is said if masks are certain, or if a table names them. A sign against the layout `folder`, which would pack
    masks as photographs.
    """
    found = find_pairs(tree)
    if found.pairs and _in_a_table(tree, found):
        return []
    return [*found.unclear, *found.doubts] or pairs_of_photos(tree) or _splits_of_several(tree)


def _splits_of_several(tree: Tree) -> list[Sign]:
    """Returns the sign that folders are called by a split and something else, such as trainA, trainB, testA, testB."""
    folders = folders_in(tree, folder_around(tree))
    words = {folder: split_word(folder) for folder in folders}
    splits, rests = ({pair[at] for pair in words.values()} for at in (0, 1))
    if "" in splits | rests or not len(folders) == len(splits) * len(rests) == len(set(words.values())) > 3:
        return []
    if min(len(splits), len(rests)) < 2:
        return []
    shown, of = first_few(map(key_of, folders)), first_few(map(key_of, sorted(rests)))
    seen = f"{shown} are splits of {of}, and not each a class"
    one, split = key_of(min(rests)), "train" if "train" in splits else min(splits)
    return [
        Sign(
            seen,
            (
                f"for classes, folders {split}/{one}",
                f"for domains, {one}/{split}, and a file of each: {pack_command(tree.path / one)}",
            ),
        )
    ]


_TABLES = (".csv", ".tsv", ".jsonl", ".parquet")


def _in_a_table(tree: Tree, found: Pairing) -> bool:
    """Whether a table names a mask, or samples of a WebDataset hold them: then these list the dataset."""
    tables = [i for i, name in tree.not_images if name.count("/") < 2 and name.lower().endswith(_TABLES)]
    mask = "/".join(tree.names[found.pairs[0].files[0][1]].split("/")[-2:]).encode("utf-8", "surrogateescape")
    # Parquet packs its cells; the names of its columns stand in it as they are.
    wanted = [b"mask" if tree.names[i].lower().endswith(".parquet") else mask for i in tables]
    return any(text in tree.files.read(i) for i, text in zip(tables, wanted, strict=True)) or (
        tree.archive and bool(webdataset_evidence(tree))
    )


def list_mask_folders(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns images with their masks, split by split, in the order of their names.

    The meaning of the masks' values is unknown: classes have no names. There is an `ignore_index` only if a whole
    split has no masks: a value that no mask holds, mostly 255, fills its rows.
    """
    draft.leave_out_broken(tree)
    found = find_pairs(tree, options.mask_files)
    if options.masks != "none" and found.unclear:
        raise SourceError(f"{tree.given}: {found.unclear[0]}")
    draft.note(advice("mask files"), found.passed)
    fits = f"no mask fits `--mask-files {options.mask_files}`" if options.mask_files else "no image has a mask"
    doubts = "".join(f" {doubt}" for doubt in found.doubts)
    absent = (
        f"{fits} of the same name in a sibling folder, as images/a.jpg and masks/a.png, or next to it, as a.jpg and "
        f"a_mask.png. The names of masks may have one beginning or end in common.{doubts}"
    )
    palette = _palette(draft, tree) if found.colours and options.masks != "none" else ()
    files = _found(tree, found)
    tails = {match.mask.tail for match in found.pairs} - {""}
    _without_second_masks(draft, tree, files, tails, masked=options.masks != "none")
    folders = dict.fromkeys(folder for folder, _ in files.images)
    inside = {"/".join(part for part in at.split("/") if not split_of_folder(part)): at for at in folders}
    if len(inside) > 1:
        draft.note("NOT READ: folders of images, as labels", [f"{key_of(folder)}/" for folder in inside.values()])
    spec = Paired((MaskKind(_MASKS, palette=palette),), absent, meaning=_meaning)
    return list_paired(draft, tree, options, spec, files)


_MASKS = "masks"
_LARGEST_PALETTE = 2**16  # bytes


def _meaning(draft: Draft, tree: Tree, kind: MaskKind, positions: list[int]) -> tuple[tuple[str, ...], int | None]:
    """Returns no names of classes, and the value for absent masks; notes values that masks hold."""
    at = np.array(positions, np.int64)
    fill = fill_value(draft, tree.files.take(np.maximum(at, 0)), at >= 0)
    if seen := [str(value) for value in values_in_masks(tree.files, at[at >= 0].tolist())]:
        draft.notes.append(f"Values in a sample of the masks: {first_few(seen, 24)}.")
    return (), fill


def _palette(draft: Draft, tree: Tree) -> Palette:
    """Returns the classes of a list of colours at the top, or one folder below, and notes it; () for none."""
    for i, name in tree.not_images:
        if name.count("/") < 2 and name.lower().endswith((".csv", ".txt")) and tree.sizes[i] < _LARGEST_PALETTE:
            with suppress(OptionError, ImageError):
                palette = parse_palette(tree.files.read(i), tree.where(i))
                known = {"count": len(palette), "file": key_of(name)}
                draft.notes.append(advice("other palette", colours=COLOURS, **known))
                return palette
    draft.notes.append(advice("palette", colours=COLOURS))
    return ()


def _found(tree: Tree, pairing: Pairing) -> Found:
    """Returns the images and masks of a pairing, by the images' folder and what their stems share."""
    found = Found({}, {}, {_MASKS: {}})
    for match in pairing.pairs:
        for place, i in files_of(tree, match.image):
            add_file(tree, found.images, (match.image.places[place], match.image_core(tree.names[i])), i)
        for place, i in files_of(tree, match.mask):
            folder = match.image.places.get(place, match.mask.places[place])
            add_file(tree, found.masks[_MASKS], (folder, match.mask_core(tree.names[i])), i)
    for group in pairing.without:
        for place, i in files_of(tree, group):
            add_file(tree, found.images, (group.places[place], stem_of(tree.names[i])), i)
    split_of = {folder: split_of_folder(folder) or "all" for folder in {folder for folder, _ in found.images}}
    found.splits.update({key: split_of[key[0]] for key in found.images})
    return found


def _without_second_masks(draft: Draft, tree: Tree, found: Found, tails: set[str], *, masked: bool) -> None:
    """Takes masks such as x_mask_1.png out of the images; if masks are packed, leaves out x.png, which has several."""
    for (folder, core), i in list(found.images.items()):
        for tail in tails:
            first = folder, core.partition(tail)[0]
            if tail not in core or first not in found.images:
                continue
            del found.images[folder, core]
            if masked:
                found.masks[_MASKS].pop(first, None)
                image = key_of(tree.names[found.images.pop(first)])
                draft.leave_out(image, f"has several masks, such as {key_of(tree.names[i])}: join them into one")
            break
