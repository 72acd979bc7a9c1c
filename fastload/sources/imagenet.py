"""ImageNet ILSVRC2012, extracted or in the archives it comes in, and sets that name their classes as it does.

    train/n01440764/*.JPEG, val/n01440764/*.JPEG                extracted; also one class folder beside the other
    val/ILSVRC2012_val_00000001.JPEG                            flat: classes from the devkit or Kaggle's table
    ILSVRC/Data/CLS-LOC/{train,val,test}/, LOC_*.{txt,csv}      Kaggle
    ILSVRC2012_img_train.tar, ..._val.tar, ..._devkit_t12...    the original archives, read in place
    n01440764.tar, ...                                          the train archive unpacked once, or itself
    train/n01443537/images/*.JPEG, val/images/val_0.JPEG        Tiny ImageNet
    n01440764_tench.JPEG, ...                                   flat: the class begins the name

The class of an image is the rank of its wnid among the sorted wnids, as for torchvision.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.ilsvrc_truth import (
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
from fastload.sources.imagenet_parts import (
    ARCHIVE,
    CLASS_ARCHIVE,
    NUMBERED,
    PREFIXED,
    NamedImage,
    Part,
    find_parts,
    tell,
)
from fastload.sources.joined import JoinedFiles
from fastload.sources.listing import Column, Files, Listing, OnError, first_few, require_unique
from fastload.sources.options import SourceOptions
from fastload.sources.tree import Tree, is_image, key_of, open_tree

IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}
"""How many images ILSVRC2012 has."""


def imagenet_evidence(tree: Tree) -> list[str]:
    """The names by which ImageNet is told: its archives and tables, or nothing but wnids as class folders."""
    if tree.file:
        return []
    bases = {name.rpartition("/")[2]: name for name in tree.names if not is_image(name)}
    telling = [name for base, name in bases.items() if ARCHIVE.fullmatch(base) or base in (SYNSETS[0], SOLUTION, TINY)]
    telling += [name for base, name in bases.items() if CLASS_ARCHIVE.fullmatch(base)][:3]
    if not telling:
        telling = _class_folders(tree)
    if not telling and not tree.folders:
        first = [tree.names[i] for i in tree.images()[:20].tolist()]
        if first and all(PREFIXED.fullmatch(name) or NUMBERED.fullmatch(name) for name in first):
            telling = first[:3]
    return [key_of(name) for name in telling]


def _class_folders(tree: Tree) -> list[str]:
    """The first class folders, if all folders with images are named by wnids, or are flat splits of ImageNet."""
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
    """The listing of ImageNet's images, split by split, each in the order of folders and names.

    Column `labels`: int64 (N,), rank of the image's wnid among the sorted ones, -1 in the test split; attributes
    `names` (the wnids) and, where a file tells them, `words`. The classes are those of the table of classes where
    one is there (1000, whatever part of the images is), else those that have images.

    Raises:
        SourceError: validation images whose classes nothing tells, an image in no class, a damaged archive.
        MissingExtraError: SciPy is needed to read the devkit and is not installed.
    """
    tree = open_tree(source)
    evidence = imagenet_evidence(tree)
    notes = [f"Layout imagenet, told by {first_few(evidence, 3)}." if evidence else "Layout imagenet, as asked for."]
    skipped: list[tuple[str, str]] = []
    parts = find_parts(tree, on_error, notes, skipped)
    keys = [key_of(part.prefix + part.tree.names[i]) for part in parts for i in part.rows.tolist()]
    if not keys:
        raise SourceError(
            f"{tree.path} holds no image of ImageNet: neither images nor ILSVRC2012_img_*.tar nor n01440764.tar, ... "
            f"(found {first_few(list(map(key_of, tree.names))) or 'nothing'}). Is it the right folder?"
        )
    require_unique(keys, str(tree.path))
    images = [image for part in parts for image in tell(part)]
    _refuse_strays(tree, keys, images)
    truth = _Truth(tree, notes)
    wnids = _wnids(tree, keys, images, truth, on_error, notes)
    classes = _classes(set(wnids) - {""}, truth, notes)
    rank = {wnid: i for i, wnid in enumerate(classes)} | {"": -1}
    labels = np.fromiter(map(rank.__getitem__, wnids), np.int64, len(wnids))
    split_names = tuple(name for name in (*ORDER, "all") if any(image.split == name for image in images))
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


def _files(part: Part) -> Files:
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


class _Truth:
    """What tells classes: tables and the devkit, each read when it is asked for."""

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
        # Tiny ImageNet's, of all synsets of WordNet: it tells words, but not which classes there are.
        self.more_words = parse_words(tree.read_text(self.at[WORDS])) if WORDS in self.at and not self.words else {}
        if not self.words and not self.more_words:
            notes.append(f"There is no {SYNSETS[0]} and no devkit to be read: classes are known by their wnids alone.")

    def where(self, base: str) -> str:
        """A file, for messages."""
        return f"{self.tree.path}: {key_of(self.tree.names[self.at[base]]) if base in self.at else base}"

    def meta(self) -> dict[int, tuple[str, str]]:
        """ILSVRC2012_ID -> (wnid, words)."""
        if not self._meta:
            self._meta = parse_meta(self.devkit[META], self.where(META))
        return self._meta

    def by_stem(self) -> dict[str, str]:
        """Validation image without its suffix -> its wnid; empty when nothing tells it."""
        for base in (SOLUTION, TINY):
            if base in self.at:
                return parse_solution(self.tree.read_text(self.at[base]), self.where(base))
        if GROUND_TRUTH in self.devkit and META in self.devkit:
            return parse_ground_truth(self.devkit[GROUND_TRUTH], self.meta(), self.where(GROUND_TRUTH))
        return {}


def _wnids(
    tree: Tree, keys: list[str], images: list[NamedImage], truth: _Truth, on_error: OnError, notes: list[str]
) -> list[str]:
    """wnid of each image, "" where it has none."""
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
        why = f"nothing tells the classes of {len(lacking)} validation images: {first_few(lacking, 3)}"
        if on_error == "fail":
            raise SourceError(
                f"{tree.path}: {why}. Put {what} beside them and give the folder that holds both; or pack them "
                "without labels: `--on-error skip` (label -1)."
            )
        notes.append(f"The label of what has no class is -1: {why}.")
    absent = sorted(set(known) - flat)
    if absent:
        notes.append(
            f"Validation images without a file, though their classes are told ({len(absent)}): {first_few(absent)}."
        )
    return [image.wnid or (known.get(image.stem, "") if image.split == "val" else "") for image in images]


def _classes(seen: set[str], truth: _Truth, notes: list[str]) -> list[str]:
    unknown = sorted(seen - set(truth.words))
    if truth.words and unknown:
        notes.append(f"Classes that the table of classes does not know ({len(unknown)}): {first_few(unknown)}.")
    return sorted(seen.union(truth.words))


def _count(
    tree: Tree,
    parts: list[Part],
    split: NDArray[np.uint8],
    split_names: tuple[str, ...],
    labels: NDArray[np.int64],
    classes: list[str],
    on_error: OnError,
    notes: list[str],
) -> None:
    """Say what is there and what is not.

    Raises:
        SourceError: a class folder or archive is empty.
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
