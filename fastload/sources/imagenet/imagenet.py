"""ImageNet ILSVRC2012, extracted or in its original archives, and other sets whose classes are named by wnid.

    train/n01440764/*.JPEG, val/n01440764/*.JPEG                extracted; also class folders without splits
    val/ILSVRC2012_val_00000001.JPEG                            flat: classes from the devkit or Kaggle's table
    ILSVRC/Data/CLS-LOC/{train,val,test}/, LOC_*.{txt,csv}      Kaggle
    ILSVRC2012_img_train.tar, ..._val.tar, ..._devkit_t12...    the original archives, read in place
    n01440764.tar, ...                                          the train archive unpacked once
    train/n01443537/images/*.JPEG, val/images/val_0.JPEG        Tiny ImageNet
    n01440764_tench.JPEG, ...                                   flat: the class begins the name

The class of an image is the rank of its wnid among the sorted wnids, as for torchvision.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.format.column import Column
from fastload.sources.assemble import recognised_note
from fastload.sources.imagenet.devkit import (
    DEVKIT,
    GROUND_TRUTH,
    META,
    SOLUTION,
    SYNSETS,
    TINY,
    WNID,
    WORDS,
    parse_ground_truth,
    parse_meta,
    parse_solution,
    parse_synsets,
    parse_words,
    read_devkit,
)
from fastload.sources.imagenet.parts import (
    ARCHIVE,
    CLASS_ARCHIVE,
    NUMBERED,
    PREFIXED,
    ImageOrigin,
    NamedImage,
    find_parts,
    named_images,
)
from fastload.sources.listing import (
    SPLIT_ORDER,
    SPLITS,
    Files,
    Listing,
    OnError,
    SourceOptions,
    first_few,
    require_unique,
)
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import JoinedFiles
from fastload.sources.tree import Tree, is_image, key_of

IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}
"""Number of images in each split of ILSVRC2012."""


def imagenet_evidence(tree: Tree) -> list[str]:
    """Returns the files of a tree that are ImageNet's archives or tables; else class folders, if all are wnids."""
    if tree.file:
        return []
    bases = {name.rpartition("/")[2]: name for name in tree.names if not is_image(name)}
    found = [name for base, name in bases.items() if ARCHIVE.fullmatch(base) or base in (SYNSETS[0], SOLUTION, TINY)]
    found += [name for base, name in bases.items() if CLASS_ARCHIVE.fullmatch(base)][:3]
    if not found:
        found = _class_folders(tree)
    if not found and not tree.folders:
        first = [tree.names[i] for i in tree.images()[:20].tolist()]
        if first and all(PREFIXED.fullmatch(name) or NUMBERED.fullmatch(name) for name in first):
            found = first[:3]
    return [key_of(name) for name in found]


def _class_folders(tree: Tree) -> list[str]:
    """Returns the first class folders, if all folders with images are named by wnid or are flat splits of ImageNet."""
    parents = {folder.rpartition("/")[0] for folder in tree.folders}
    leaves = [folder for folder in tree.folders if folder not in parents]
    classes = [folder for folder in leaves if WNID.fullmatch(folder.rpartition("/")[2])]
    others = set(leaves).difference(classes)
    for name in tree.names if others else ():
        folder, _, base = name.rpartition("/")
        if folder in others and is_image(name) and not NUMBERED.fullmatch(base):
            if SPLITS.get(folder.rpartition("/")[2].lower()) != "test":
                return []
        elif folder in others and is_image(name) and not classes:
            classes = [name]
    return classes[:3]


def list_imagenet(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of ImageNet's images, split by split, each in the order of folders and names.

    Column `labels`: int64 (N,), rank of the image's wnid among the sorted wnids, -1 in the test split; attributes
    `names` (the wnids) and, if a file has them, `words`. The classes are those of the table of classes if there is one
    (1000, even if only part of the images is there), else those of the images.

    Raises:
        SourceError: the classes of validation images are unknown, an image lies in no class, an archive is damaged.
        MissingExtraError: SciPy is needed to read the devkit, and is not installed.
    """
    tree = open_tree(source)
    evidence = imagenet_evidence(tree)
    notes = [recognised_note("imagenet", evidence)]
    skipped: list[tuple[str, str]] = []
    parts = find_parts(tree, on_error, notes, skipped)
    keys = [key_of(part.prefix + part.tree.names[i]) for part in parts for i in part.rows.tolist()]
    if not keys:
        raise SourceError(
            f"{tree.path} holds no image of ImageNet: neither images nor ILSVRC2012_img_*.tar nor n01440764.tar, ... "
            f"(found {first_few(list(map(key_of, tree.names))) or 'nothing'}). Is it the right folder?"
        )
    require_unique(keys, str(tree.path))
    images = [image for part in parts for image in named_images(part)]
    _refuse_strays(tree, keys, images)
    truth = _GroundTruth(tree, notes)
    wnids = _wnids(tree, keys, images, truth, on_error, notes)
    classes = _classes(set(wnids) - {""}, truth, notes)
    rank = {wnid: i for i, wnid in enumerate(classes)} | {"": -1}
    labels = np.fromiter(map(rank.__getitem__, wnids), np.int64, len(wnids))
    split_names = tuple(name for name in (*SPLIT_ORDER, "all") if any(image.split == name for image in images))
    index = {name: i for i, name in enumerate(split_names)}
    split = np.fromiter((index[image.split] for image in images), np.uint8, len(images))
    _count(tree, parts, split, split_names, labels, classes, on_error, notes)
    order = np.argsort(split, kind="stable")
    attrs: dict[str, object] = {"names": tuple(classes)}
    words = truth.words or truth.more_words
    if any(words.get(wnid) for wnid in classes):
        attrs["words"] = tuple(words.get(wnid, "") for wnid in classes)
    files: Files = JoinedFiles.of([(_files(part), len(part.rows)) for part in parts])
    if len(parts) == 1:
        files = _files(parts[0])
    used = {name for part in parts for name in part.tree.notes}
    return Listing(
        layout="imagenet",
        keys=tuple(keys),
        split=split,
        split_names=split_names,
        columns={"labels": Column(labels, attrs)},
        notes=(*notes, *dict.fromkeys((*tree.notes, *sorted(used)))),
        sizes=np.concatenate([part.tree.sizes[part.rows] for part in parts]),
        mtimes_ns=np.concatenate([part.tree.mtimes_ns[part.rows] for part in parts]),
        files=files,
        skipped=tuple(skipped),
    ).take(order)


def _files(part: ImageOrigin) -> Files:
    return part.tree.files.take(part.rows)


def _refuse_strays(tree: Tree, keys: list[str], images: list[NamedImage]) -> None:
    strays = [
        key
        for key, image in zip(keys, images, strict=True)
        if not image.wnid and not image.stem and image.split != "test"
    ]
    if strays:
        raise SourceError(
            f"{tree.path}: images in no class ({len(strays)}): {first_few(strays)}. ImageNet's lie in folders or "
            "archives such as n01440764. Move these away, or pack with `--layout folder`."
        )
    splits = {image.split for image in images}
    outside = [key for key, image in zip(keys, images, strict=True) if image.split == "all"]
    if outside and len(splits) > 1:
        raise SourceError(
            f"{tree.path}: images lie outside the splits {', '.join(sorted(splits - {'all'}))} ({len(outside)}): "
            f"{first_few(outside)}. Move them into a split, or away."
        )


class _GroundTruth:
    """The tables and the devkit of a tree that hold words and classes, each read when it is needed.

    Attributes:
        words: wnid -> words of the classes of ImageNet; empty if unknown.
        more_words: the same from a table that lists more than ImageNet's classes.
    """

    def __init__(self, tree: Tree, notes: list[str]) -> None:
        self.tree = tree
        self.notes = notes
        self.at = {name.rpartition("/")[2]: i for i, name in enumerate(tree.names) if not is_image(name)}
        devkit = next((i for base, i in self.at.items() if DEVKIT.fullmatch(base)), None)
        self.devkit = {} if devkit is None else read_devkit(tree, devkit)
        self.devkit |= {base: tree.read_text(self.at[base]) for base in (META, GROUND_TRUTH) if base in self.at}
        self.words: dict[str, str] = {}
        self._meta: dict[int, tuple[str, str]] = {}
        table = next((base for base in SYNSETS if base in self.at), "")
        if table:
            self.words = parse_synsets(tree.read_text(self.at[table]), self.where(table))
        elif META in self.devkit:
            try:
                self.words = dict(self.meta().values())
            except MissingExtraError as exc:
                notes.append(f"The words of the classes stay unknown. {exc}")
        # Tiny ImageNet's table lists all synsets of WordNet: it has the words, but not which classes there are.
        self.more_words = parse_words(tree.read_text(self.at[WORDS])) if WORDS in self.at and not self.words else {}
        if not self.words and not self.more_words:
            notes.append(f"There is no {SYNSETS[0]} and no readable devkit: classes have only their wnids as names.")

    def where(self, base: str) -> str:
        """Returns the path of a file, for messages."""
        return f"{self.tree.path}: {key_of(self.tree.names[self.at[base]]) if base in self.at else base}"

    def meta(self) -> dict[int, tuple[str, str]]:
        """Returns ILSVRC2012_ID -> (wnid, words)."""
        if not self._meta:
            self._meta = parse_meta(self.devkit[META], self.where(META))
        return self._meta

    def by_stem(self) -> dict[str, str]:
        """Returns stem of each validation image -> wnid; empty without a table or devkit."""
        for base in (SOLUTION, TINY):
            if base in self.at:
                return parse_solution(self.tree.read_text(self.at[base]), self.where(base))
        if GROUND_TRUTH in self.devkit and META in self.devkit:
            return parse_ground_truth(self.devkit[GROUND_TRUTH], self.meta(), self.where(GROUND_TRUTH))
        return {}


def _wnids(
    tree: Tree, keys: list[str], images: list[NamedImage], truth: _GroundTruth, on_error: OnError, notes: list[str]
) -> list[str]:
    """Returns the wnid of each image, "" if it is unknown.

    Raises:
        SourceError: the classes of validation images are unknown (unless skipped: their labels are -1).
    """
    flat = {image.stem for image in images if image.split == "val" and image.stem}
    if not flat:
        return [image.wnid for image in images]
    known = truth.by_stem()
    unknown = flat.difference(known)
    lacking = [key for key, image in zip(keys, images, strict=True) if image.stem in unknown]
    if not known or lacking:
        what = f"{SOLUTION}, or ILSVRC2012_devkit_t12.tar.gz (with {META} and {GROUND_TRUTH} in it)"
        if known:
            what = f"a whole {next((base for base in (SOLUTION, TINY) if base in truth.at), GROUND_TRUTH)}"
        why = f"no file lists the classes of {len(lacking)} validation images: {first_few(lacking, 3)}"
        if on_error == "fail":
            raise SourceError(
                f"{tree.path}: {why}. Put {what} next to them and give the folder that holds both; or pack them "
                "without labels: `--on-error skip` (label -1)."
            )
        notes.append(f"Images without a class have the label -1: {why}.")
    absent = sorted(set(known) - flat)
    if absent:
        notes.append(
            f"Validation images that are listed with a class, but have no file ({len(absent)}): {first_few(absent)}."
        )
    return [image.wnid or (known.get(image.stem, "") if image.split == "val" else "") for image in images]


def _classes(seen: set[str], truth: _GroundTruth, notes: list[str]) -> list[str]:
    unknown = sorted(seen - set(truth.words))
    if truth.words and unknown:
        notes.append(f"Classes that the table of classes does not list ({len(unknown)}): {first_few(unknown)}.")
    return sorted(seen.union(truth.words))


def _count(
    tree: Tree,
    parts: list[ImageOrigin],
    split: NDArray[np.uint8],
    split_names: tuple[str, ...],
    labels: NDArray[np.int64],
    classes: list[str],
    on_error: OnError,
    notes: list[str],
) -> None:
    """Appends notes about the number of images and classes in each split, and about what is missing.

    Raises:
        SourceError: a class folder or archive is empty (unless skipped).
    """
    notes.append(f"Classes by wnid ({len(classes)}): {first_few(classes, 3)}; label = rank of the sorted wnid.")
    holders = {folder for folder in tree.folders if WNID.fullmatch(folder.rpartition("/")[2])}
    empty = [part.prefix[:-1] for part in parts if part.wnid and len(part.rows) == 0]
    full = {tree.names[i].rpartition("/")[0] for part in parts if part.tree is tree for i in part.rows.tolist()}
    inside = {"/".join(steps[:n]) for folder in full for steps in [folder.split("/")] for n in range(1, len(steps) + 1)}
    empty += sorted(folder for folder in holders - inside if "Annotations/" not in folder)
    if empty and on_error == "fail":
        raise SourceError(
            f"{tree.path}: classes without an image ({len(empty)}): {first_few(list(map(key_of, empty)))}. "
            "Put their images back, or remove the folder or archive."
        )
    if empty:
        notes.append(f"Classes without an image: {first_few(list(map(key_of, empty)))}.")
    for i, name in enumerate(split_names):
        here = labels[split == i]
        lacking = len(classes) - len(np.unique(here[here >= 0]))
        said = f"{name}: {len(here)} images"
        if len(classes) == 1000 and name in IMAGES and len(here) != IMAGES[name]:
            said += f" of the {IMAGES[name]} of ILSVRC2012"
        if (here >= 0).any() and lacking:
            said += f", none of {lacking} classes"
        notes.append(f"{said}{', without labels (-1)' if (here < 0).all() else ''}.")
    if "all" not in split_names:
        absent = [name for name in ("train", "val") if name not in split_names]
        notes.extend(f"There is no split {name!r}." for name in absent)
