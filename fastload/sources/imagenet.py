"""ImageNet ILSVRC2012, extracted or in its original archives, and other sets whose classes are named by wnid.

    train/n01440764/*.JPEG, val/n01440764/*.JPEG                extracted; also class folders without splits
    val/ILSVRC2012_val_00000001.JPEG                            flat: classes from the devkit or Kaggle's table
    ILSVRC/Data/CLS-LOC/{train,val,test}/, LOC_*.{txt,csv}      Kaggle
    ILSVRC2012_img_train.tar, ..._val.tar                       the original archives, read in place
    n01440764.tar, ...                                          the train archive unpacked once
    train/n01443537/images/*.JPEG, val/images/val_0.JPEG        Tiny ImageNet
    n01440764_tench.JPEG, ...                                   flat: the class begins the name

The class of an image is the rank of its wnid (WordNet id) among the sorted wnids, as for torchvision. Tables:

    ILSVRC2012_devkit_t12.tar.gz    the devkit, packed or unpacked: data/meta.mat, data/..._ground_truth.txt
    LOC_synset_mapping.txt          Kaggle: `n01440764 tench, Tinca tinca`; Caffe's synset_words.txt is the same
    LOC_val_solution.csv            Kaggle: `ILSVRC2012_val_00000001,n01751748 111 108 441 193`
    val_annotations.txt             Tiny ImageNet: `val_0.JPEG n03444034 0 32 44 62`, with tabs

The devkit's ground truth holds ILSVRC2012_IDs, 1 to 1000, which follow no order of names; only meta.mat maps them.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.archives import headers, list_inner_tar, with_parents
from fastload.sources.assemble import Draft, Samples, Splits, split_path, stem_of
from fastload.sources.listing import SPLITS, first_few, split_of_parts
from fastload.sources.spans import JoinedFiles
from fastload.sources.tree import Line, Tree, is_image, key_of

WNID = re.compile(r"n\d{8}")
DEVKIT = re.compile(r"ILSVRC2012_devkit_t12\.(tar\.gz|tgz|tar)", re.IGNORECASE)
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
SYNSETS = ("LOC_synset_mapping.txt", "synset_words.txt")
SOLUTION = "LOC_val_solution.csv"
TINY = "val_annotations.txt"
WORDS = "words.txt"
TABLES = (*SYNSETS, SOLUTION, TINY, WORDS, META, GROUND_TRUTH)

_MAX_DEVKIT = 2**26  # bytes when unpacked; the real devkit has 8 million
_MAX_SECONDS = 120  # to start SciPy and read meta.mat, which takes a few seconds

_READ_META = """
import io, json, sys
from scipy.io import loadmat
synsets = loadmat(io.BytesIO(sys.stdin.buffer.read()), variable_names=["synsets"], squeeze_me=True)["synsets"]
leaves = [synset for synset in synsets.reshape(-1) if int(synset["num_children"]) == 0]
print(json.dumps([[int(one["ILSVRC2012_ID"]), str(one["WNID"]), str(one["words"])] for one in leaves]))
"""


class GroundTruth:
    """The tables and the devkit of a tree that hold words and classes, each read when it is needed."""

    def __init__(self, draft: Draft, tree: Tree) -> None:
        self.tree = tree
        self.at = {name.rpartition("/")[2]: i for i, name in tree.not_images}
        devkit = next((i for base, i in self.at.items() if DEVKIT.fullmatch(base)), None)
        self.devkit = {} if devkit is None else read_devkit(tree, devkit)
        self.devkit |= {base: tree.read_text(self.at[base]) for base in (META, GROUND_TRUTH) if base in self.at}
        self.words: dict[str, str] = {}  # wnid -> words of the classes of ImageNet; empty if unknown
        if table := next((base for base in SYNSETS if base in self.at), ""):
            for line in tree.lines(self.at[table]):
                wnid, _, words = line.text.partition(" ")
                if not WNID.fullmatch(wnid) or wnid in self.words:
                    why = "occurs twice" if wnid in self.words else "is no wnid such as n01440764"
                    raise line.error(f"{key_of(wnid)[:40]!r} {why}. Fix the line or remove the file.")
                self.words[wnid] = key_of(words.strip())
        elif META in self.devkit:
            try:
                self.words = dict(self.meta.values())
            except MissingExtraError as exc:
                draft.notes.append(f"The words of the classes stay unknown. {exc}")
        # Tiny ImageNet's table lists all synsets of WordNet: it has the words, but not which classes there are.
        lines = tree.lines(self.at[WORDS]) if WORDS in self.at and not self.words else []
        parts = (line.text.partition("\t") for line in lines)
        self.more_words = {wnid: key_of(words.strip()) for wnid, _, words in parts if WNID.fullmatch(wnid)}
        if not self.words and not self.more_words:
            draft.notes.append(f"There is no {SYNSETS[0]} and no readable devkit: classes have only wnids as names.")

    def where(self, base: str) -> str:
        """Returns the path of a file, which may lie in the packed devkit, for messages."""
        return self.tree.where(self.at[base]) if base in self.at else f"{self.tree.path}: {base}"

    @cached_property
    def meta(self) -> dict[int, tuple[str, str]]:
        """ILSVRC2012_ID -> (wnid, words)."""
        return parse_meta(self.devkit[META], self.where(META))

    def by_stem(self) -> dict[str, str]:
        """Returns stem of each validation image -> wnid; empty without a table or devkit."""
        if SOLUTION in self.at:
            lines = self.tree.lines(self.at[SOLUTION])
            return parse_solution([(line, _cells(line)) for line in lines])
        if TINY in self.at:
            rows = [(line, line.text.split("\t")) for line in self.tree.lines(self.at[TINY])]
            return parse_solution([(line, [stem_of(row[0]), row[1]]) for line, row in rows if len(row) > 1])
        if GROUND_TRUTH in self.devkit and META in self.devkit:
            return parse_ground_truth(self.devkit[GROUND_TRUTH], self.meta, self.where(GROUND_TRUTH))
        return {}


def _cells(line: Line) -> list[str]:
    """Returns the cells of a line, which may be quoted."""
    try:
        return next(csv.reader([line.text]))
    except (csv.Error, StopIteration) as exc:
        raise line.error(f"{key_of(line.text)[:60]!r} is no line of a table ({exc}). Fetch the file again.") from exc


def read_devkit(tree: Tree, position: int) -> dict[str, bytes]:
    """Returns base name -> content of meta.mat and the ground truth in a packed devkit, as far as they are in it."""
    where = f"{tree.path}: {key_of(tree.names[position])}"
    data = tree.read_text(position)
    try:
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(_MAX_DEVKIT + 1)
        if len(data) > _MAX_DEVKIT:
            raise SourceError(f"{where} holds more than {_MAX_DEVKIT} bytes: this is not the devkit. Fetch it again.")
    except (OSError, EOFError, zlib.error) as exc:
        raise SourceError(f"{where} is damaged or cut short ({exc}). Copy or download it again.") from exc
    found = {}
    for info, _ in headers(io.BytesIO(data), where):
        base, end = info.name.rpartition("/")[2], info.offset_data + info.size
        if base in (META, GROUND_TRUTH) and info.isfile() and not info.issparse():
            if end > len(data):
                raise SourceError(f"{where} is cut short within {base}. Copy or download it again.")
            found[base] = data[info.offset_data : end]
    return found


def parse_meta(data: bytes, where: str) -> dict[int, tuple[str, str]]:
    """Returns ILSVRC2012_ID -> (wnid, words) of the 1000 classes, from meta.mat; needs SciPy (MissingExtraError)."""
    if importlib.util.find_spec("scipy") is None:
        raise MissingExtraError(
            f"{where}: SciPy reads this file, which holds the classes of the validation images, and is not installed. "
            "Install it with `pip install scipy`."
        )
    try:
        # In a process of its own: a damaged file makes SciPy crash (segmentation fault in SciPy 1.17).
        read = subprocess.run(
            [sys.executable, "-P", "-c", _READ_META], input=data, capture_output=True, timeout=_MAX_SECONDS, check=False
        )
        rows = json.loads(read.stdout) if read.returncode == 0 else []
        said = read.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        rows, said = [], f"not read within {_MAX_SECONDS} seconds"
    found = {number: (wnid, words) for number, wnid, words in rows}
    if not found or not all(WNID.fullmatch(wnid) for wnid, _ in found.values()):
        raise SourceError(
            f"{where} is not the devkit's table of classes: no wnids such as n01440764 in it"
            f"{f' ({said})' if said else ''}. Fetch the devkit again."
        )
    return found


def parse_ground_truth(data: bytes, meta: dict[int, tuple[str, str]], where: str) -> dict[str, str]:
    """Returns stem of each validation image -> wnid; refuses a line that is no ID of `meta`."""
    wnids: dict[str, str] = {}
    for number, line in enumerate(data.split(), 1):
        known = meta.get(int(line)) if line.isdigit() and len(line) < 9 else None
        if known is None:
            shown = line[:40].decode("utf-8", "backslashreplace")
            raise SourceError(
                f"{where}, line {number}: {shown!r} is not an ILSVRC2012_ID of {META} ({min(meta)} to {max(meta)}). "
                "Fetch the devkit again."
            )
        wnids[f"ILSVRC2012_val_{number:08d}"] = known[0]
    return wnids


def parse_solution(rows: Iterable[tuple[Line, list[str]]]) -> dict[str, str]:
    """Returns stem of each image -> wnid, from the lines of a table and their cells: the image, then its boxes."""
    wnids: dict[str, str] = {}
    for line, cells in rows:
        image, *boxes = cells or [""]
        if image == "ImageId":
            continue
        # Each wnid is followed by the four numbers of a box.
        found = set(boxes[0].split()[::5]) if len(boxes) == 1 else set()
        (wnid,) = found if len(found) == 1 else ("",)
        if not WNID.fullmatch(wnid) or image in wnids:
            why = "occurs twice" if image in wnids else "has not one wnid such as n01440764 before its boxes"
            raise line.error(f"{key_of(image)[:60]!r} {why}. Fix the line or fetch the file again.")
        wnids[image] = wnid
    return wnids


IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}
"""Number of images in each split of ILSVRC2012."""

_ARCHIVE = re.compile(r"ILSVRC2012_img_(train|val|test)(_v10102019)?\.tar", re.IGNORECASE)
_CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
_NUMBERED = re.compile(r"((?:ILSVRC2012_)?(val|test)_\d+)\.\w+")
_PREFIXED = re.compile(r"(n\d{8})_[^/]*")


class _ImageSet(NamedTuple):
    """Images of the tree given, or of one archive in it; `prefix`: of their keys; `rows`: their positions.

    The split of all of them and the class of all of them are "" if their folders or names say it.
    """

    prefix: str
    tree: Tree
    rows: NDArray[np.int64]
    split: str = ""
    wnid: str = ""


class _NamedImage(NamedTuple):
    """Split and class of an image by its path."""

    split: str  # its split
    wnid: str  # its class; "" if the path does not say it
    stem: str = ""  # without a class: its name in tables of classes; "" if it is not named like the images in these


def imagenet_evidence(tree: Tree) -> list[str]:
    """Returns the files of a tree that are ImageNet's archives or tables; else class folders, if all are wnids."""
    if tree.file:
        return []
    bases = {name.rpartition("/")[2]: name for _, name in tree.not_images}
    found = [name for base, name in bases.items() if _ARCHIVE.fullmatch(base) or base in (SYNSETS[0], SOLUTION, TINY)]
    found += [name for base, name in bases.items() if _CLASS_ARCHIVE.fullmatch(base)][:3]
    if not found and not tree.folders:
        first = [tree.names[i] for i in tree.images[:20].tolist()]
        found = first[:3] if all(_PREFIXED.fullmatch(name) or _NUMBERED.fullmatch(name) for name in first) else []
    return [key_of(name) for name in found or _class_folders(tree)]


def _class_folders(tree: Tree) -> list[str]:
    """Returns the first class folders, if all folders with images are named by wnid or are flat splits of ImageNet."""
    parents = {folder.rpartition("/")[0] for folder in tree.folders}
    leaves = [folder for folder in tree.folders if folder not in parents]
    classes = [folder for folder in leaves if WNID.fullmatch(folder.rpartition("/")[2])]
    others = set(leaves).difference(classes)
    for name in tree.names if others else ():
        folder, _, base = name.rpartition("/")
        if folder not in others or not is_image(name):
            continue
        if _NUMBERED.fullmatch(base):
            classes = classes or [name]
        elif SPLITS.get(folder.rpartition("/")[2].lower()) != "test":
            return []
    return classes[:3]


def list_imagenet(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns ImageNet's images, split by split, each in the order of folders and names.

    Column `labels`: int64 (N,), rank of the image's wnid among the sorted wnids, -1 in the test split; attributes
    `names` (the wnids) and, if a file has them, `words`. The classes come from the table of classes if there is one
    (1000, even if only part of the images is there), else from the images.
    """
    parts = _find_parts(draft, tree)
    draft.trees += [part.tree for part in parts if part.tree is not tree]
    keys = [key_of(part.prefix + part.tree.names[i]) for part in parts for i in part.rows.tolist()]
    if not keys:
        raise SourceError(
            f"{tree.path} holds no image of ImageNet: neither images nor ILSVRC2012_img_*.tar nor n01440764.tar, ... "
            f"(found {first_few(map(key_of, tree.names)) or 'nothing'}). Is it the right folder?"
        )
    images = [image for part in parts for image in _named_images(part)]
    _refuse_strays(tree, keys, images)
    truth = GroundTruth(draft, tree)
    wnids = _wnids(draft, tree, keys, images, truth)
    classes = sorted({*wnids, *truth.words} - {""})  # from the table of classes, if there is one, and the images
    if truth.words and (unknown := [wnid for wnid in classes if wnid not in truth.words]):
        draft.note("Classes that the table of classes does not list", unknown)
    draft.notes.append(f"Classes by wnid ({len(classes)}): {first_few(classes, 3)}; label = rank of the sorted wnid.")
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
    return Samples(
        keys=keys,
        files=files[0][0] if len(files) == 1 else JoinedFiles.of(files),
        sizes=np.concatenate([part.tree.sizes[part.rows] for part in parts]),
        mtimes_ns=np.concatenate([part.tree.mtimes_ns[part.rows] for part in parts]),
        splits=splits,
        columns={"labels": Column(labels, attrs)},
        rows=np.argsort(splits.index, kind="stable"),
    )


def _find_parts(draft: Draft, tree: Tree) -> list[_ImageSet]:
    """Returns the images of the tree itself, of archives of whole splits, and of archives of one class each."""
    draft.leave_out_broken(tree)
    own = _ImageSet("", tree, tree.images)
    tree.known[own.rows] = True
    parts = [own] if len(own.rows) else []
    files = [(i, name, split_path(name)[1]) for i, name in tree.not_images]
    unpacked, classes, others = set(tree.folders), list[int](), list[str]()
    have = {image.split for image in _named_images(own)} if any(_of_split(base) for _, _, base in files) else set()
    for i, name, base in files:
        match, split = _CLASS_ARCHIVE.fullmatch(base), _of_split(base)
        if (match and name.removesuffix(".tar") in unpacked) or split in have:
            place = match[1] if match else repr(split)
            draft.notes.append(f"Read the images of {place} in its folder, not {key_of(name)}.")
            others.append(name)
        elif match:
            classes.append(i)
        elif split:  # an original archive of a split, which holds archives of classes (train) or images
            whole = _opened(draft, tree, i, "", split, "")
            inside = [i for i, name in enumerate(whole.tree.names) if _CLASS_ARCHIVE.fullmatch(split_path(name)[1])]
            parts += [whole] * bool(len(whole.rows)) + _class_archives(draft, whole.tree, inside, whole.prefix, split)
            draft.notes.append(f"Read the images of {split!r} in {key_of(name)}.")
        elif base not in TABLES and not DEVKIT.fullmatch(base):
            others.append(name)
    parts += _class_archives(draft, tree, classes, "", _of_split(tree.path.name) if tree.archive else "")
    draft.note("Ignored, since they are no images by their suffix", others)
    return parts


def _of_split(base: str) -> str:
    """Returns the split that ImageNet's original archive of this name holds; "" for any other file."""
    match = _ARCHIVE.fullmatch(base)
    return match[1].lower() if match else ""


def _class_archives(draft: Draft, tree: Tree, positions: list[int], prefix: str, split: str) -> list[_ImageSet]:
    """Returns the images of archives of one class each."""
    parts = []
    for position in positions:
        try:
            parts.append(_opened(draft, tree, position, prefix, split, stem_of(tree.names[position])))
        except SourceError as exc:
            if draft.on_error == "fail":
                raise
            name = key_of(prefix + tree.names[position])
            draft.leave_out(name, f"the archive of a whole class cannot be read: {exc}")
    return parts


def _opened(draft: Draft, tree: Tree, position: int, prefix: str, split: str, wnid: str) -> _ImageSet:
    """Returns the images of an archive inside a tree."""
    inner, name = list_inner_tar(tree, position), prefix + tree.names[position]
    draft.leave_out_broken(inner, f"{key_of(name)}/")
    return _ImageSet(f"{name}/", inner, inner.images, split or split_of_parts(name.split("/")[:-1]), wnid)


def _named_images(part: _ImageSet) -> Iterator[_NamedImage]:
    """Yields split and class of each image by its path, in order."""
    by_folder: dict[str, _NamedImage] = {}
    for i in part.rows.tolist():
        folder, _, base = part.tree.names[i].rpartition("/")
        if (image := by_folder.get(folder)) is None:
            steps = folder.split("/")
            wnid = part.wnid or next((step for step in reversed(steps) if WNID.fullmatch(step)), "")
            image = by_folder[folder] = _NamedImage(part.split or split_of_parts(steps) or "all", wnid)
        if image.wnid:
            yield image
        elif match := _NUMBERED.fullmatch(base):
            yield _NamedImage(match[2], "", match[1])
        elif match := _PREFIXED.fullmatch(base):
            yield _NamedImage(image.split, match[1])
        else:
            yield image


def _refuse_strays(tree: Tree, keys: list[str], images: list[_NamedImage]) -> None:
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


def _wnids(draft: Draft, tree: Tree, keys: list[str], images: list[_NamedImage], truth: GroundTruth) -> list[str]:
    """Returns the wnid of each image, "" if it is unknown."""
    flat = {image.stem for image in images if image.split == "val" and image.stem}
    if not flat:
        return [image.wnid for image in images]
    known = truth.by_stem()
    unknown = flat.difference(known)
    if unknown:
        lacking = [key for key, image in zip(keys, images, strict=True) if image.stem in unknown]
        what = f"{SOLUTION}, or ILSVRC2012_devkit_t12.tar.gz (with meta.mat and {GROUND_TRUTH} in it)"
        if known:
            what = f"a whole {next((base for base in (SOLUTION, TINY) if base in truth.at), GROUND_TRUTH)}"
        why = f"no file lists the classes of {len(lacking)} validation images: {first_few(lacking, 3)}"
        if draft.on_error == "fail":
            raise SourceError(
                f"{tree.path}: {why}. Put {what} next to them and give the folder that holds both; or pack them "
                "without labels: `--on-error skip` (label -1)."
            )
        draft.notes.append(f"Images without a class have the label -1: {why}.")
    draft.note("Validation images that are listed with a class, but have no file", sorted(set(known) - flat))
    return [image.wnid or (known.get(image.stem, "") if image.split == "val" else "") for image in images]


def _refuse_empty_classes(draft: Draft, tree: Tree, parts: list[_ImageSet]) -> None:
    """Refuses class folders and archives without an image, or notes them if they may be skipped."""
    holders = {folder for folder in tree.folders if WNID.fullmatch(folder.rpartition("/")[2])}
    empty = [part.prefix[:-1] for part in parts if part.wnid and len(part.rows) == 0]
    full = {tree.names[i].rpartition("/")[0] for part in parts if part.tree is tree for i in part.rows.tolist()}
    inside = {above for folder in full for above in with_parents(folder)}
    empty += sorted(folder for folder in holders - inside if "Annotations/" not in folder)
    draft.note("Classes without an image", list(map(key_of, empty)))
    if empty and draft.on_error == "fail":
        raise SourceError(f"{tree.path}: {draft.notes[-1]} Put their images back, or remove the folder or archive.")


def _note_counts(draft: Draft, splits: Splits, labels: NDArray[np.int64], num_classes: int) -> None:
    """Appends notes about the number of images and classes in each split, and about missing ones."""
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
