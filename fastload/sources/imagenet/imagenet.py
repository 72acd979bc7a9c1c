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
from fastload.sources.assemble import Draft, Samples, Splits, assemble
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
from fastload.sources.listing import SPLITS, Listing, OnError, SourceOptions, first_few
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
    draft = Draft("imagenet", tree, on_error, evidence=imagenet_evidence(tree))
    parts = find_parts(draft, tree)
    draft.trees += [part.tree for part in parts if part.tree is not tree]
    keys = [key_of(part.prefix + part.tree.names[i]) for part in parts for i in part.rows.tolist()]
    if not keys:
        raise SourceError(
            f"{tree.path} holds no image of ImageNet: neither images nor ILSVRC2012_img_*.tar nor n01440764.tar, ... "
            f"(found {first_few(list(map(key_of, tree.names))) or 'nothing'}). Is it the right folder?"
        )
    images = [image for part in parts for image in named_images(part)]
    _refuse_strays(tree, keys, images)
    truth = _GroundTruth(draft, tree)
    wnids = _wnids(draft, tree, keys, images, truth)
    classes = _classes(draft, set(wnids) - {""}, truth)
    rank = {wnid: i for i, wnid in enumerate(classes)} | {"": -1}
    labels = np.fromiter(map(rank.__getitem__, wnids), np.int64, len(wnids))
    splits = Splits.of([image.split for image in images])
    _refuse_empty_classes(draft, tree, parts)
    _note_counts(draft, splits, labels, len(classes))
    attrs: dict[str, object] = {"names": tuple(classes)}
    words = truth.words or truth.more_words
    if any(words.get(wnid) for wnid in classes):
        attrs["words"] = tuple(words.get(wnid, "") for wnid in classes)
    files = [(part.tree.files.take(part.rows), len(part.rows)) for part in parts]
    samples = Samples(
        keys=keys,
        files=files[0][0] if len(files) == 1 else JoinedFiles.of(files),
        sizes=np.concatenate([part.tree.sizes[part.rows] for part in parts]),
        mtimes_ns=np.concatenate([part.tree.mtimes_ns[part.rows] for part in parts]),
        splits=splits,
        columns={"labels": Column(labels, attrs)},
        rows=np.argsort(splits.index, kind="stable"),
    )
    return assemble(draft, samples)


def _refuse_strays(tree: Tree, keys: list[str], images: list[NamedImage]) -> None:
    named = list(zip(keys, images, strict=True))
    if strays := [key for key, image in named if not image.wnid and not image.stem and image.split != "test"]:
        raise SourceError(
            f"{tree.path}: images in no class ({len(strays)}): {first_few(strays)}. ImageNet's lie in folders or "
            "archives such as n01440764. Move these away, or pack with `--layout folder`."
        )
    others = sorted({image.split for image in images} - {"all"})
    if others and (outside := [key for key, image in named if image.split == "all"]):
        raise SourceError(
            f"{tree.path}: images lie outside the splits {', '.join(others)} ({len(outside)}): {first_few(outside)}. "
            "Move them into a split, or away."
        )


class _GroundTruth:
    """The tables and the devkit of a tree that hold words and classes, each read when it is needed.

    Attributes:
        words: wnid -> words of the classes of ImageNet; empty if unknown.
        more_words: the same from a table that lists more than ImageNet's classes.
    """

    def __init__(self, draft: Draft, tree: Tree) -> None:
        self.tree = tree
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
                draft.notes.append(f"The words of the classes stay unknown. {exc}")
        # Tiny ImageNet's table lists all synsets of WordNet: it has the words, but not which classes there are.
        self.more_words = parse_words(tree.read_text(self.at[WORDS])) if WORDS in self.at and not self.words else {}
        if not self.words and not self.more_words:
            draft.notes.append(
                f"There is no {SYNSETS[0]} and no readable devkit: classes have only their wnids as names."
            )

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


def _wnids(draft: Draft, tree: Tree, keys: list[str], images: list[NamedImage], truth: _GroundTruth) -> list[str]:
    """Returns the wnid of each image, "" if it is unknown.

    Raises:
        SourceError: the classes of validation images are unknown (unless skipped: their labels are -1).
    """
    flat = {image.stem for image in images if image.split == "val" and image.stem}
    if not flat:
        return [image.wnid for image in images]
    known = truth.by_stem()
    unknown = flat.difference(known)
    if unknown:
        lacking = [key for key, image in zip(keys, images, strict=True) if image.stem in unknown]
        what = f"{SOLUTION}, or ILSVRC2012_devkit_t12.tar.gz (with {META} and {GROUND_TRUTH} in it)"
        if known:
            what = f"a whole {next((base for base in (SOLUTION, TINY) if base in truth.at), GROUND_TRUTH)}"
        why = f"no file lists the classes of {len(lacking)} validation images: {first_few(lacking, 3)}"
        if draft.on_error == "fail":
            raise SourceError(
                f"{tree.path}: {why}. Put {what} next to them and give the folder that holds both; or pack them "
                "without labels: `--on-error skip` (label -1)."
            )
        draft.notes.append(f"Images without a class have the label -1: {why}.")
    if absent := sorted(set(known) - flat):
        draft.notes.append(
            f"Validation images that are listed with a class, but have no file ({len(absent)}): {first_few(absent)}."
        )
    return [image.wnid or (known.get(image.stem, "") if image.split == "val" else "") for image in images]


def _classes(draft: Draft, seen: set[str], truth: _GroundTruth) -> list[str]:
    """Returns the sorted wnids of the classes: those of the table of classes, if there is one, and of the images."""
    classes, unknown = sorted(seen.union(truth.words)), sorted(seen - set(truth.words))
    if truth.words and unknown:
        draft.notes.append(f"Classes that the table of classes does not list ({len(unknown)}): {first_few(unknown)}.")
    draft.notes.append(f"Classes by wnid ({len(classes)}): {first_few(classes, 3)}; label = rank of the sorted wnid.")
    return classes


def _refuse_empty_classes(draft: Draft, tree: Tree, parts: list[ImageOrigin]) -> None:
    """Refuses class folders and archives without an image, or notes them if they may be skipped."""
    holders = {folder for folder in tree.folders if WNID.fullmatch(folder.rpartition("/")[2])}
    empty = [part.prefix[:-1] for part in parts if part.wnid and len(part.rows) == 0]
    full = {tree.names[i].rpartition("/")[0] for part in parts if part.tree is tree for i in part.rows.tolist()}
    inside = {"/".join(steps[:n]) for folder in full for steps in [folder.split("/")] for n in range(1, len(steps) + 1)}
    empty += sorted(folder for folder in holders - inside if "Annotations/" not in folder)
    shown = first_few(list(map(key_of, empty)))
    if empty and draft.on_error == "fail":
        raise SourceError(
            f"{tree.path}: classes without an image ({len(empty)}): {shown}. "
            "Put their images back, or remove the folder or archive."
        )
    if empty:
        draft.notes.append(f"Classes without an image: {shown}.")


def _note_counts(draft: Draft, splits: Splits, labels: NDArray[np.int64], num_classes: int) -> None:
    """Appends notes about the number of images and classes in each split, and about what is missing."""
    for i, name in enumerate(splits.names):
        here = labels[splits.index == i]
        lacking = num_classes - len(np.unique(here[here >= 0]))
        said = f"{name}: {len(here)} images"
        if num_classes == 1000 and name in IMAGES and len(here) != IMAGES[name]:
            said += f" of the {IMAGES[name]} of ILSVRC2012"
        if (here >= 0).any() and lacking:
            said += f", none of {lacking} classes"
        draft.notes.append(f"{said}{', without labels (-1)' if (here < 0).all() else ''}.")
    if "all" not in splits.names:
        draft.notes += [f"There is no split {name!r}." for name in ("train", "val") if name not in splits.names]
