"""Folders of images: one folder for each class, with or without train, val and test above; or images alone.

    photos/cat/1.jpg                labels by folder, one split "all"
    photos/train/cat/1.jpg          labels and splits
    photos/test/1.jpg               a split without labels: -1, if other splits have them
    photos/1.jpg                    no labels at all

The same in a .zip or .tar; a single folder that holds everything is skipped there. Splits may be spelled otherwise
(`training_set`, `seg_train`) where the folders below say that they are splits. `signs` says what speaks against it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.foreign import foreign_format
from fastload.sources.listing import SPLIT_ORDER, SPLITS, first_few
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, key_of

IMAGE_FOLDERS = frozenset("image images img imgs input inputs jpegimages".split())
"""Names, in lower case, of a folder that holds all images while its siblings hold annotations."""

ANNOTATION_FOLDERS = frozenset(
    "mask masks label labels annotation annotations annot gt groundtruth ground_truth segmentation segmentations "
    "segmentationclass seg target targets".split()
)
"""Names, in lower case, of such siblings."""

_WORD = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?:set|data|images?|imgs?)?\d*")
_WORD_NUMBER = re.compile(r"([^\W\d_]+(?:[\W_]+[^\W\d_]+)*)[\W_]*\d[\d\W_]*")
_NUMBER_WORD = re.compile(r"(\d[\d\W_]*)[\W_]([^\W\d_]{3,}(?:[\W_]+[^\W\d_]+)*)")
_ARCHIVE = re.compile(r"\.(zip|rar|7z|tgz|tar(\.\w+)?)$", re.IGNORECASE)
_COMMON = 0.5  # part of the smaller of two sets of folders that splits, or versions, of one dataset share


def folder_evidence(tree: Tree) -> list[str]:
    """Returns the first images of a tree: any tree with images is a folder of images."""
    return [key_of(tree.names[i]) for i in tree.images[:3].tolist()]


def list_folder(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns images in class folders, split by split, class by class, in sorted order.

    Column `labels`: int64 (N,), index into the sorted names of the classes of all splits; -1 in a split without class
    folders; no such column if no split has class folders. `options.labels` may say which folder is the class: ("top",),
    the outermost below the split, which is the default; ("deepest",), the whole path to the image; ("last",), the
    folder it lies in; ("none",). With ("names",) it is no folder, but the words next to the number in an image's name:
    `cat.0.jpg`, `12_great_dane.jpg`.
    """
    level = options.labels or ("top",)
    if level not in (("top",), ("deepest",), ("last",), ("names",), ("none",)):
        raise OptionError(
            f"`--labels {','.join(level)}`: {tree.given} is a folder of images, whose labels are its folders' names: "
            "`top` (the outermost, the default), `deepest` (the path to the image), `last` (the folder "
            "that it lies in) or `none`; or `names`, the words "
            "next to the number in an image's name."
        )
    draft.leave_out_broken(tree)
    rows = find_images(tree)
    if len(rows) < len(tree.names):
        draft.note("Ignored, since they are no images by their suffix", [key_of(name) for _, name in tree.not_images])
    found = ClassFolders.of(tree)
    packed = {split_word(_ARCHIVE.sub("", name))[0]: name for _, name in tree.not_images if _ARCHIVE.search(name)}
    further = [key_of(name) for split, name in packed.items() if split and found.named and split not in found.named]
    draft.note("NOT READ: archives of further splits; unpack them here", further)
    if found.around:
        draft.notes.append(f"Everything lies in {key_of(found.around)}, which is no class.")
    _require_apart(draft, found)
    split = [next(name for name, at in found.splits.items() if folder.startswith(at)) for folder in tree.image_folders]
    tops = [folder[len(found.splits[of]) :].rstrip("/") for folder, of in zip(tree.image_folders, split, strict=True)]
    if level in (("none",), ("names",)):
        tops = [""] * len(tops)
    elif level == ("top",):
        tops = [top.partition("/")[0] for top in tops]
    elif level == ("last",):
        tops = [top.rpartition("/")[2] for top in tops]
    present = {name: {top for top, of in zip(tops, split, strict=True) if of == name} for name in found.splits}
    for name, here in present.items():
        if "" in here and len(here) > 1:
            at = found.splits[name]
            direct = [key_of(tree.names[i][len(at) :]) for i in tree.image_folders[at].tolist()]
            raise SourceError(
                f"{_place(tree, at)}: images lie next to class folders ({len(direct)}): {first_few(direct)}. Move each "
                "into its class, or away: their class is not known."
            )
    classes = _classes(draft, found, {name: here - {""} for name, here in present.items()})
    number = {name: i for i, name in enumerate(classes)}
    counts = [len(images) for images in tree.image_folders.values()]
    labels = np.repeat(np.array([number.get(top, -1) for top in tops], np.int64), counts)
    splits = Splits.of(split)
    splits = Splits(np.repeat(splits.index, counts), splits.names)
    images = np.concatenate(list(tree.image_folders.values()))
    if level == ("names",):
        classes, labels = _words(draft, tree, images)
    order = np.lexsort((labels, splits.index))  # stable: within a class, the order of the tree remains
    shown = tuple(map(key_of, classes))
    said = f"classes by {'name' if level == ('names',) else 'folder'} ({len(shown)}): {first_few(shown)}."
    if not shown:
        said = "images without class folders, so without labels." if level == ("top",) else "images, without labels."
    if found.named:
        folders = ", ".join(f"{name} (folder {key_of(top)})" for name, top in found.named.items())
        said += f" Splits: {folders}."
    draft.title = f"Layout folder: {said}"
    if shown and all(name.isdecimal() for name in shown) and [*map(int, shown)] != [*range(len(shown))]:
        other = next(i for i, name in enumerate(shown) if int(name) != i)
        draft.notes.append(
            f"Labels are not the numbers that folders are called by: they count the sorted names from 0, so that "
            f"{shown[other]} is {other}; `names` has them."
        )
    columns = {"labels": Column(labels[order], {"names": shown})} if classes else {}
    return Samples.in_tree(tree, images[order], Splits(splits.index[order], splits.names), columns)


def word_of(name: str) -> str:
    """Returns the words in the name of a file, where it is words and a number, in either order; else ""."""
    stem = name[name.rfind("/") + 1 :].rpartition(".")[0]
    if found := _WORD_NUMBER.fullmatch(stem):
        return found[1]
    return number_and_word(stem)[1]


def number_and_word(stem: str) -> tuple[str, str]:
    """Returns the number that the name of a file begins with and the words that end it; "" if it is not made so."""
    found = _NUMBER_WORD.fullmatch(stem)
    return (found[1], found[2]) if found else ("", "")


def _words(draft: Draft, tree: Tree, images: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """Returns the sorted words in names, and which of them each image's has; -1 for none."""
    words = [word_of(tree.names[i]) for i in images.tolist()]
    if not any(words):
        raise SourceError(
            f"{tree.given}: `--labels names`, but no image is called by a word and a number, such as cat.0.jpg or "
            f"001_cat.jpg; {key_of(tree.names[images[0]])} is not. Leave it out."
        )
    without = [key_of(tree.names[i]) for i, word in zip(images.tolist(), words, strict=True) if not word]
    draft.note("Names that are not a word and a number have the label -1", without)
    classes = sorted(set(words) - {""})
    number = {word: i for i, word in enumerate(classes)}
    return classes, np.array([number.get(word, -1) for word in words], np.int64)


def find_images(tree: Tree) -> NDArray[np.int64]:
    """Returns the positions of the images in a tree, at least one; else SourceError names the files found."""
    rows = tree.images
    if len(rows):
        return rows
    looked = " ".join(IMAGE_SUFFIXES)
    if not tree.names:
        why = f"it is empty but for folders ({len(tree.folders)})" if tree.folders else "it is empty"
        if amiss := tree.broken or tree.passed:
            why = f"{key_of(amiss[0][0])} {amiss[0][1]}, and there is nothing else"
        raise SourceError(f"{tree.path} holds no image: {why}. Give the folder or archive of the images ({looked}).")
    if refused := foreign_format(tree):
        raise SourceError(refused)
    found = Counter(Path(name).suffix.lower() or "no suffix" for name in tree.names)
    listed = first_few([f"{count} {suffix}" for suffix, count in found.most_common()])
    hint = "Is it the right folder?"
    if packed := [key_of(name) for name in tree.names if name.lower().endswith((".zip", ".tar"))]:
        archive = tree.path / packed[0]
        hint = f"To pack an archive that lies in it, give the archive itself: {archive}."
        if tree.archive:
            hint = f"To pack the archive that lies in it ({packed[0]}), unpack {tree.path} first."
        elif table := next((key_of(name) for name in tree.names if name.endswith((".csv", ".tsv", ".jsonl"))), ""):
            hint += f" If {table} names its images: `fastload pack {tree.path / table} OUT.h5 --root {archive}`."
    raise SourceError(f"{tree.path} holds no image: looked for {looked} (in any case), found only {listed}. {hint}")


@dataclass(frozen=True, eq=False)
class ClassFolders:
    """A tree of images as class folders: what holds everything, and the splits below it."""

    tree: Tree
    around: str  # the innermost folder (ending in `/`) that holds all images and is neither split nor class; "" if none
    named: dict[str, str]  # split -> its folder in `around`, without `/`; empty if there are no splits
    splits: dict[str, str]  # split -> the folder (ending in `/`, or "") whose folders are its classes

    @classmethod
    def of(cls, tree: Tree) -> ClassFolders:
        """Returns how a tree with images reads; of two folders that are the same split the first counts."""
        around = folder_around(tree)
        tops = folders_in(tree, around)
        folders = _loose_splits(tree, around, tops) or exact_splits(tops)
        found = {split: top for top, split in reversed(folders.items())}
        named = {split: found[split] for split in SPLIT_ORDER if split in found}
        splits = {split: _unwrapped(tree, f"{around}{top}/") for split, top in named.items()}
        return cls(tree, around, named, splits or {"all": around})

    @cached_property
    def classes(self) -> dict[str, dict[str, list[str]]]:
        """For each split, the folders with images (ending in `/`) in or below each class folder."""
        found: dict[str, dict[str, list[str]]] = {split: {} for split in self.splits}
        for folder in self.tree.image_folders:
            split = next((split for split, at in self.splits.items() if folder.startswith(at)), "")
            if split and (top := folder[len(self.splits[split]) :].partition("/")[0]):
                found[split].setdefault(top, []).append(folder)
        return found

    def without_images(self) -> dict[str, list[str]]:
        """Returns, for each split, the names of the folders in it that hold no image, and are no class of another."""
        found, classes = {}, {top for tops in self.classes.values() for top in tops}
        for split, at in self.splits.items():
            below = [folder[len(at) :] for folder in self.tree.folders if folder.startswith(at)]
            found[split] = [name for name in below if name and "/" not in name and name not in classes]
        return found

    @cached_property
    def with_images(self) -> set[str]:
        """The folders that have any image in or below them; each ends in `/`."""
        return _with_parents(self.tree.image_folders)

    @cached_property
    def with_files(self) -> set[str]:
        """The folders in `around` that have any file in or below them; each ends in `/`."""
        found = _with_parents([folder for folder in self.tree.spans if folder.startswith(self.around)])
        return {folder for folder in found if folder.startswith(self.around)}

    def below(self, split: str, top: str) -> list[str]:
        """Returns the names of the folders directly in a class folder in or below which images lie, sorted."""
        begin = len(self.splits[split]) + len(top) + 1
        return sorted({folder[begin:].partition("/")[0] for folder in self.classes[split][top]} - {""})


def _with_parents(folders: Collection[str]) -> set[str]:
    """Returns paths of folders, which end in `/`, and of the folders that hold them."""
    found = set[str]()
    for folder in folders:
        while folder and folder not in found:
            found.add(folder)
            folder = folder[: folder.rfind("/", 0, -1) + 1]
    return found


def folders_in(tree: Tree, folder: str) -> list[str]:
    """Returns the names of the folders in a folder (ending in `/`, or "") in or below which images lie, sorted."""
    below = {name[len(folder) :].partition("/")[0] for name in tree.image_folders if name.startswith(folder)}
    return sorted(below - {""})


def folder_around(tree: Tree) -> str:
    """Returns the innermost folder (ending in `/`) that holds all images and is neither split nor class; "" if none."""
    around = ""
    while around not in tree.image_folders and len(tops := folders_in(tree, around)) == 1:
        below = f"{around}{tops[0]}/"
        # The outermost folder of an archive only wraps it. Any other counts only if it holds folders and no images:
        # with images in it, it is a single class, as for torchvision.
        wraps = tree.archive and not around
        if tops[0].lower() in SPLITS or (below in tree.image_folders and not wraps):
            break
        around = below
    return around


def exact_splits(names: Collection[str]) -> dict[str, str]:
    """Returns folder -> split of those folders that are called as a split is."""
    return {name: SPLITS[name.lower()] for name in names if name.lower() in SPLITS}


def split_word(name: str) -> tuple[str, str]:
    """Returns the split that is a word of a folder's name (`seg_train`, `Final_Test`), and the name without it.

    "" if there is none, or several.
    """
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
    found = [(SPLITS[match[1]], word) for word in words if (match := _WORD.fullmatch(word.lower()))]
    if len(found) != 1:
        return "", name
    return found[0][0], " ".join(word for word in words if word != found[0][1]).lower()


def share_folders(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two folders hold folders of the same names, or share most names of the smaller one."""
    common = len(set(one) & set(other))
    return common > 0 and common >= _COMMON * min(len(one), len(other))


def _loose_splits(tree: Tree, around: str, tops: list[str]) -> dict[str, str]:
    """Returns folder -> split of folders that are splits spelled otherwise; {} unless all of them are.

    They are where the folders in them are the same, or where nothing else in their names differs.
    """
    words = {top: split_word(top) for top in tops}
    if len(tops) < 2 or not all(split for split, _ in words.values()) or around in tree.image_folders:
        return {}
    if len({split for split, _ in words.values()}) < len(tops):
        return {}
    inside = {top: folders_in(tree, _unwrapped(tree, f"{around}{top}/")) for top in tops}
    classed = [folders for folders in inside.values() if folders]
    same = len(classed) > 1 and all(share_folders(classed[0], other) for other in classed[1:])
    if same or len({rest for _, rest in words.values()}) == 1:
        return {top: split for top, (split, _) in words.items()}
    return {}


def _unwrapped(tree: Tree, folder: str) -> str:
    """Returns a split's folder, or the only folder in it where that is called `images` or as the split itself."""
    while folder not in tree.image_folders and len(inside := folders_in(tree, folder)) == 1:
        if inside[0].lower() not in {*IMAGE_FOLDERS, folder[:-1].rpartition("/")[2].lower()}:
            break
        folder += f"{inside[0]}/"
    return folder


def _require_apart(draft: Draft, found: ClassFolders) -> None:
    """Refuses images next to splits, in other folders or in none; notes splits without an image."""
    if not found.named:
        return
    tree, where, shown = found.tree, _place(found.tree, found.around), first_few(sorted(found.named.values()))
    outside = [top for top in folders_in(tree, found.around) if top not in found.named.values()]
    if twice := exact_splits(outside):
        top, split = next(iter(twice.items()))
        raise SourceError(
            f"{where}: the folders {key_of(found.named[split])} and {key_of(top)} are both the split {split!r}. Merge "
            "them, or rename one."
        )
    if outside:
        first = min(found.named.values())
        raise SourceError(
            f"{where}: the folders {shown} look like splits, but there are images in "
            f"{first_few(map(key_of, outside))} too. Move those away; or, if all of them are classes, rename {first} "
            "so that it is not taken for a split."
        )
    if found.around in tree.image_folders:
        direct = [key_of(tree.names[i][len(found.around) :]) for i in tree.image_folders[found.around].tolist()]
        fix = "Move each into a split, or away."
        raise SourceError(f"{where}: images lie next to the splits {shown} ({len(direct)}): {first_few(direct)}. {fix}")
    below = [folder.removeprefix(found.around) for folder in tree.folders if folder.startswith(found.around)]
    empty = [key_of(name) for name in below if name.lower() in SPLITS and name not in found.named.values()]
    draft.note("Folders of splits without an image were ignored", empty)


def _classes(draft: Draft, found: ClassFolders, present: dict[str, set[str]]) -> list[str]:
    """Returns the sorted names of all class folders, given each split's that hold images; [] for none."""
    classes = sorted(set().union(*present.values()))
    if not classes:
        return []
    annotations, others = set[str](), list[str]()
    for split, names in found.without_images().items():
        at = found.splits[split]
        annotations |= {key_of(name) for name in names if name.lower() in ANNOTATION_FOLDERS}
        names = [name for name in names if name.lower() not in ANNOTATION_FOLDERS]
        others += [f"{key_of(at + name)}/" for name in names if f"{at}{name}/" in found.with_files]
        empty = [key_of(name) for name in names if f"{at}{name}/" not in found.with_files]
        if empty and present[split]:
            raise SourceError(
                f"{_place(found.tree, at)}: class folders without an image ({len(empty)}): {first_few(empty)}. Remove "
                "these empty folders, or put their images back: a class that nothing belongs to cannot be learned."
            )
    draft.note("NOT READ: folders without an image, but with other files, next to the classes", others)
    if annotations and len(classes) == 1 and classes[0].lower() in IMAGE_FOLDERS:
        neighbours = first_few(sorted(annotations))
        draft.notes.append(f"{key_of(classes[0])} is no class, as it lies next to {neighbours}.")
        return []
    for split, here in present.items():
        if here:
            draft.note(f"Classes without an image in {split!r}", [key_of(name) for name in classes if name not in here])
        else:
            draft.notes.append(f"The split {split!r} has no class folders: its labels are -1.")
    return classes


def _place(tree: Tree, folder: str) -> str:
    return f"{tree.path}: {key_of(folder)}" if folder else str(tree.path)
