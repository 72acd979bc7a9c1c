"""Signs that a tree is no plain folder of images: structure that class folders or images alone would lose.

Any tree with images is a folder of images, so a layout that is not recognised would be packed as one, with wrong labels
and without its boxes, masks or splits. `refuse_by_signs` refuses it instead, names what was seen and what would be
right. Signs are general, never names of datasets. Whoever asks for `--layout folder` knows, and is not asked.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from os.path import splitext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.options.pack import SourceOptions
from fastload.remote.urls import ObjectPath
from fastload.sources.assemble import Draft, header_of, stem_of
from fastload.sources.folder import (
    IMAGE_FOLDERS,
    ClassFolders,
    list_folder,
    number_and_word,
    share_folders,
    split_word,
    word_of,
)
from fastload.sources.listing import first_few
from fastload.sources.tables import JSON_LINES
from fastload.sources.tree import Tree, key_of

_TEXTS = (
    ".txt",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".ndjson",
    ".xml",
    ".yaml",
    ".yml",
    ".html",
    ".htm",
    ".lst",
    ".tab",
    ".odgt",
    ".list",
    ".ann",
)
_OF_PROGRAMS = {".mat": "MATLAB"} | dict.fromkeys((".xlsx", ".xls", ".ods"), "a spreadsheet program")
_BESIDE = (*_TEXTS, *_OF_PROGRAMS, ".npy", ".npz", ".pts", ".pkl", ".pickle", ".h5")
"""Suffixes of files that hold annotations: of texts, which are looked into; and of those that lie one by one image."""

_DATA = re.compile(r"\.(h5|hdf5?|parquet|arrow|np[yz]|tfrecords?|mds)$|\d\.tar$")
"""Names, in lower case, of files that other layouts read."""

_DATA_NOTED = 0.1  # of the bytes of the images, from which on they are said; as many as the images refuse a folder
_PART = 0.5  # of files of one suffix that are called like images, from which on they belong to them
_LOOKED_AT = 1000  # names of a folder that tell whether it is worth to look at all
_NAMED_BY_WORD = 0.9  # of the images of a folder, from which on words in their names are labels
_OF_CAMERAS = frozenset(
    "img image images pic picture photo foto bild dsc dscn dscf dscx sam pxl mvi mov vid video gopr gh gx dji cimg "
    "imag frame frames screenshot screen scan scene seq sequence shot page capture snap still clip cam camera webcam "
    "left right front back rear top bottom side wa whatsapp untitled download thumb tile patch crop slice".split()
)
"""Words, in lower case, that names of files begin with, and that say how an image came about, not its content."""
_ABOUT = re.compile(r"(licen[cs]e|readme|copying|credits|attribution|notice)\b", re.IGNORECASE)
"""The beginning of names of files that are about their folder, and say nothing of images."""

_HEAD = 2**18
_MOST_READ = 48  # text files that are looked into
_A_FOLDER = 8  # of them, of one suffix in one folder
_MOST_VERSIONS = 8  # folders that may be versions of one dataset
_NAMED = 3  # images that a text names, from which on it is about them
_TOKENS = re.compile(r"[\s,;|\"'<>()\[\]{}=#]+")
_CELLS = re.compile(r"[,;|\t\"'<>]+")
_NUMBER_LINE = re.compile(r"[\d\s.,;eE+-]*\d[\d\s.,;eE+-]*")


@dataclass(frozen=True)
class Sign:
    """One thing in a tree that a folder of images would lose or mistake."""

    seen: str  # the files found, and their likely meaning, as the end of a sentence
    ways: tuple[str, ...] = ()  # commands, or what to do, that would be right
    folders: frozenset[str] = frozenset()  # those whose files it is about, which need no sign of their own

    def __str__(self) -> str:
        return f"{self.seen}. What would be right: {'; or '.join(self.ways)}."


def refuse_by_signs(
    tree: Tree, further: Iterable[Sign] = (), *, classes: Collection[str] = (), level: bool = False
) -> None:
    """Raises SourceError if anything, `further` signs first, speaks against packing a tree as a folder of images.

    `classes`: of a packed file, to which one may be added. `level`: whether it was said which folders are the classes.
    """
    found = [*further, *signs_against_folder(tree, classes, level=level)]
    if not found:
        return
    ways = dict.fromkeys(way for sign in found for way in sign.ways)
    raise SourceError(
        f"{tree.given}: not packed as a folder of images, which would lose or mistake what is there: "
        f"{' '.join(f'({i}) {sign.seen}.' for i, sign in enumerate(found, 1))} What would be right: "
        f"{'; '.join((*ways, *_as_folder(tree)))}."
    )


def _as_folder(tree: Tree) -> list[str]:
    """Returns what packs a tree as a folder of images, and what becomes of it; [] if that cannot be."""
    try:
        samples = list_folder(Draft("folder", tree), tree, SourceOptions())
    except SourceError:
        return []
    classes = samples.columns["labels"].attrs["names"] if samples.columns else ()
    becomes = f"the classes {first_few(classes, 3)}" if classes else "images without labels"
    return [f"or, if it is no more than a folder of images, `--layout folder`, which packs {becomes}"]


def passed_over(tree: Tree, layout: str, known: NDArray[np.bool_]) -> list[str]:
    """Returns notes on what a layout has passed over: images, annotations and data that are not `known`.

    `known`, bool (F,), says which files it has read, or has spoken of.
    """
    notes = []
    if images := np.setdiff1d(tree.images, np.flatnonzero(known)).tolist():
        folders = Counter(tree.names[i].rpartition("/")[0] for i in images)
        shown = first_few([f"{key_of(folder) or '.'}/ ({count})" for folder, count in folders.items()])
        first = key_of(tree.names[images[0]])
        notes = [f"images that layout {layout} does not list ({len(images)}): {shown}, e.g. {first}"]
    if others := [(i, name) for i, name in tree.not_images if not known[i]]:
        found = ClassFolders.of(tree)
        signs = (*_data(tree, others, _DATA_NOTED), *_files_beside(found, others))
        notes += [f"{sign.seen}. The packed file has none of it" for sign in signs]
    return [f"NOT READ: {note}." for note in notes]


def around_source(tree: Tree) -> list[str]:
    """Returns notes on texts next to the folder or archive that was given, outside of it, which name its images."""
    above = tree.path.absolute().parent
    if tree.file or isinstance(tree.path, ObjectPath) or above == tree.path:
        return []
    texts = list[Path]()
    with suppress(OSError):
        texts = sorted(path for path in above.iterdir() if path.suffix.lower() in _TEXTS and path.is_file())
    if not texts:
        return []
    names, notes = _Names.of(ClassFolders.of(tree)), []
    for path in texts[:_A_FOLDER]:
        head = b""
        with suppress(OSError), path.open("rb") as file:
            head = file.read(_HEAD)
        kind, line = names.kind_of(head, whole=len(head) < _HEAD)
        if kind == _IMAGES:
            table = path.suffix.lower() in (".csv", ".tsv", *JSON_LINES)
            way = pack_command(path, f"--root {shlex.quote(str(tree.path))}") if table else pack_command(above)
            seen = f"NOT READ: {path}, next to what was given, names its images ({line[:60]!r})"
            notes.append(f"{seen}. {way} reads both.")
    return notes


def signs_against_folder(tree: Tree, classes: Collection[str] = (), *, level: bool = False) -> list[Sign]:
    """Returns what in a tree with images speaks against a folder of images; `classes` are those it is added to."""
    folders = ClassFolders.of(tree)
    found = [*_data(tree, tree.not_images, 1), *_files_beside(folders, tree.not_images)]
    known = {folder for sign in found for folder in sign.folders}
    doubts = [] if level else [*_splits_or_versions(folders)] or [*_classes_in_doubt(folders, classes)]
    doubts += [] if level else _classes_by_name(folders)
    return [*found, *_other_folders(folders, known), *doubts]


def pack_command(source: str | Path, *options: str) -> str:
    """Returns a command to show."""
    return f"`fastload pack {' '.join([shlex.quote(str(source)), 'OUT.h5', *options])}`"


def _table_way(tree: Tree) -> str:
    return (
        f"a table with the header `file_name,label` (also split, or xmin, ymin, xmax, ymax), a row an image or box: "
        f"`fastload pack TABLE.csv OUT.h5 --root {shlex.quote(str(tree.path))}`"
    )


def _which(names: Collection[str]) -> str:
    """Returns the first of some files, and the verb behind them."""
    return f"{first_few(map(key_of, names), 2)} {'are' if len(names) > 1 else 'is'}"


def _data(tree: Tree, others: Iterable[tuple[int, str]], part: float) -> Iterator[Sign]:
    """Yields which of the other files are data of another layout, if they hold this part of the images' bytes."""
    found = [(i, name) for i, name in others if _DATA.search(name.lower())]
    if found and int(tree.sizes[[i for i, _ in found]].sum()) >= part * int(tree.sizes[tree.images].sum()):
        names = [name for _, name in found]
        way = f"the file alone, if it is the dataset: {pack_command(tree.path / names[0])}"
        yield Sign(f"{_which(names)} of a format of arrays, tables or samples", (way,), _folders_of(names))


def _files_beside(found: ClassFolders, others: Iterable[tuple[int, str]]) -> Iterator[Sign]:
    """Yields which of the other files are annotations: one for each image, texts that name images, lists of numbers."""
    tree = found.tree
    others = list(others)
    yield from _same_files(found, [name for _, name in others])
    images = {stem_of(tree.names[i]) for i in tree.images.tolist()} if others else set()
    others = [(i, name) for i, name in others if name.lower().endswith(_BESIDE) or name.rpartition("/")[2] in images]
    # The form of an answer to a competition names images, and says nothing of them.
    others = [(i, name) for i, name in others if not stem_of(name).lower().startswith("sample_sub")]
    if not others:
        return
    names = _Names.of(found)
    by_suffix: dict[str, list[tuple[int, str]]] = {}
    for i, name in others:
        by_suffix.setdefault(splitext(name)[1].lower(), []).append((i, name))
    texts: list[tuple[int, str]] = []
    for suffix, files in by_suffix.items():
        # `a.jpg.json` is called like a.jpg, too.
        alike = [name for _, name in files if stem_of(name) in names.stems or stem_of(name) in names.bases]
        if alike and len(alike) >= _PART * len(files) and (len(alike) > 1 or len(names.stems) < 2 * _NAMED):
            of = f"{suffix} files" if suffix else "files without a suffix"
            more = f" and {len(alike) - 1} more {of} are" if alike[1:] else " is"
            looks = _LOOKS.get(suffix, "labels or boxes")
            seen = f"{key_of(alike[0])}{more} called like images, as annotations of them are ({looks})"
            yield Sign(seen, (*_ways_of(tree, suffix, alike), _table_way(tree)), _folders_of(alike))
        elif suffix in _OF_PROGRAMS:
            tables = [name for _, name in files]
            seen = f"{_which(tables)} of {_OF_PROGRAMS[suffix]}, as labels, boxes or splits are kept"
            yield Sign(seen, (_table_way(tree),), _folders_of(tables))
        elif suffix in _TEXTS:
            texts += files
    yield from _texts_beside(tree, texts, names)


def _ways_of(tree: Tree, suffix: str, names: list[str]) -> tuple[str, ...]:
    """Returns how files that are called like images are read as annotations, judged by the first of them."""
    if suffix == ".xml":
        return (_VOC,)
    head = b""
    with suppress(ImageError):
        head = tree.files.read_head(tree.names.index(names[0]), _HEAD)
    if not suffix and head.lstrip().startswith(b"<annotation"):
        return (f"{_VOC} once they are called .xml",)
    lines = head.decode("utf-8", "replace").split("\n")
    if suffix == ".txt" and any(map(str.strip, lines)) and not all(map(_NUMBER_LINE.fullmatch, filter(None, lines))):
        return ("for captions a table with the header `file_name,caption` in place of `file_name,label`",)
    return ()


def _texts_beside(tree: Tree, texts: list[tuple[int, str]], names: _Names) -> Iterator[Sign]:
    """Yields the texts that name images or some of the classes, and texts of numbers alone next to images alone."""
    seen: Counter[tuple[str, str]] = Counter()
    kinds: dict[str, dict[str, str]] = {}
    coco: list[str] = []
    for i, name in sorted(texts, key=lambda one: (one[1].count("/"), not split_word(stem_of(one[1]))[0], one[1])):
        place = name.rpartition("/")[0], name[-4:].lower()
        seen[place] += 1
        if seen[place] > _A_FOLDER or sum(min(n, _A_FOLDER) for n in seen.values()) > _MOST_READ:
            continue
        with suppress(ImageError):
            head = tree.files.read_head(i, _HEAD)
            if name.lower().endswith(".json") and all(f'"{key}"'.encode() in head for key in ("images", "file_name")):
                coco.append(name)
                continue
            kind, line = names.kind_of(head, whole=len(head) >= int(tree.sizes[i]))
            if kind:
                kinds.setdefault(kind, {})[name] = line
    if coco:
        theirs = (
            "for boxes, masks or captions COCO's names, annotations/instances_FOLDER.json for the images in FOLDER/"
        )
        ways = f"{theirs}, or captions_FOLDER.json", f"for classes of images {_table_way(tree)}"
        yield Sign(f"{_which(coco)} written as COCO's annotations, under another name", ways, _folders_of(coco))
    for kind, found in kinds.items():
        shown = first_few([f"{key_of(name)} ({line[:60]!r})" for name, line in found.items()], 2)
        first, rest = kind.split(" ", 1)
        verb = kind if len(found) > 1 else f"{first}s {rest}"
        yield Sign(f"{shown} {verb}", (_table_way(tree),), _folders_of(found))


_LOOKS = {".txt": "YOLO's boxes, or captions", ".xml": "VOC's boxes", ".json": "LabelMe's polygons, or tags"}
_VOC = "VOC's layout, if they are: images in JPEGImages/, boxes in Annotations/, called so in one folder, are read"
_IMAGES, _SOME, _FOLDERS, _NUMBERS = (
    "name images, as a list of splits, labels, boxes or captions does",
    "name some of the class folders, as a list of splits does",
    "give each folder one of few values, as labels of patients or products are kept",
    "hold numbers alone, as labels in the order of the images are kept",
)


@dataclass(frozen=True)
class _Names:
    """The names that a text may give images and classes of a tree."""

    bases: set[str]  # `1.jpg`
    stems: set[str]  # `1`, or the `1` of `1_red` and `1_blue`
    paths: set[str]  # `cat/1`, the last folder and the stem
    classes: set[str]  # as `_bare` returns them
    count: int  # of images

    @classmethod
    def of(cls, found: ClassFolders) -> _Names:
        """Returns the names of the images and class folders of a tree."""
        names = [found.tree.names[i] for i in found.tree.images.tolist()]
        bases = {name.rpartition("/")[2] for name in names}
        stems = set(map(stem_of, bases))
        # Where each image is several files, as one a channel, a text names their common beginning.
        begins = Counter(stem.rpartition("_")[0] for stem in stems)
        stems |= {begin for begin, count in begins.items() if begin and count > 1}
        paths = {"/".join(name.rpartition(".")[0].split("/")[-2:]) for name in names if "/" in name}
        classes = {_bare(top) for tops in found.classes.values() for top in tops}
        return cls(bases, stems, paths, classes, len(names))

    def image_in(self, name: str) -> str:
        """Returns the image that a word or cell of a text names, without suffix; "" if it names none."""
        base, end = name.rpartition("/")[2], "/".join(name.split("/")[-2:])
        if base in self.bases:
            return end.rpartition(".")[0]
        # 17 or cat are too little to be the name of an image in a text; with their folder they are enough.
        says = len(base) > 3 and any(map(str.isdigit, base))
        return end if base in self.stems and (says or end in self.paths) else ""

    def kind_of(self, head: bytes, *, whole: bool) -> tuple[str, str]:
        """Returns what a text is, and the first line that shows it; ("", "") if it is not about these images.

        Of a text about images most lines name one, or one line (as of JSON) many; a manual may mention some.
        """
        lines = [line.strip() for line in head.decode("utf-8", "replace").replace("\\", "/").splitlines()]
        lines = [line for line in (lines if whole else lines[:-1] or lines) if line]
        lines = (_entries(head) if whole else []) or lines
        images, classes, alone, about = dict[str, str](), dict[str, str](), 0, 0
        for line in lines:
            # A name may have spaces, which also separate: cells are looked up whole, and word by word.
            cells = [cell.strip() for cell in (*_CELLS.split(line), *line.split('"'))]
            here = list(filter(None, map(self.image_in, {*cells, *_TOKENS.split(line)})))
            about += bool(here)
            for name in here:
                images.setdefault(name, line)
            alone += bool(self.image_in(line))
            if (first := _bare(next(iter(_TOKENS.split(line)), ""))) in self.classes:
                classes.setdefault(first, line)
        if len(images) >= min(_NAMED, self.count or 1) and (2 * about >= len(lines) or len(lines) == 1):
            only_names = whole and alone == len(lines) == self.count  # a list of all images says nothing more
            return ("", "") if only_names else (_IMAGES, next(iter(images.values())))
        if whole and max(2, len(lines) - 1) <= len(classes) < len(self.classes):
            return _SOME, next(iter(classes.values()))
        values = [cells[1].strip() for line in classes.values() if len(cells := _CELLS.split(line)) > 1]
        ids = sum(any(map(str.isdigit, one)) for one in self.classes)  # words are classes, which may be of few kinds
        most = max(_NAMED, len(self.classes), len(lines) - 1)
        if whole and 2 * ids > len(self.classes) and most <= len(values) >= 2 * len(set(values)):
            return _FOLDERS, next(iter(classes.values()))
        if not self.classes and len(lines) > 1 and all(map(_NUMBER_LINE.fullmatch, lines)):
            return _NUMBERS, lines[0]
        return "", ""


def _bare(name: str) -> str:
    """Returns the name of a folder without the zeros before a number, which a table may lack."""
    return (name.lstrip("0") or "0") if name.isdecimal() else name


def _entries(head: bytes) -> list[str]:
    """Returns the lines of a file that is one object of JSON, of numbers and texts by name; [] for any other."""
    try:
        found = json.loads(head) if head.lstrip()[:1] == b"{" else None
    except ValueError:
        return []
    if not isinstance(found, dict) or not all(isinstance(value, (str, int, float)) for value in found.values()):
        return []
    return [f"{name},{value}" for name, value in found.items()]


def _folders_of(names: Iterable[str]) -> frozenset[str]:
    """Returns the folders of files, and those above them, which end in `/`."""
    found = set[str]()
    for name in names:
        while (name := name.rpartition("/")[0]) and f"{name}/" not in found:
            found.add(f"{name}/")
    return frozenset(found)


def _same_files(found: ClassFolders, others: Iterable[str]) -> Iterator[Sign]:
    """Yields which of the other files are of one name, and lie in most of the class folders, next to the images."""
    tree = found.tree
    places = Counter[str]()
    around = {folder[: folder.rfind("/", 0, -1) + 1] for folder in tree.image_folders}
    for name in others:
        folder = name[: name.rfind("/") + 1]
        if _ABOUT.match(name[len(folder) :]):
            continue
        if folder in tree.image_folders:
            places[name[len(folder) :]] += 1
        elif folder and (above := folder[: folder.rfind("/", 0, -1) + 1]) in around and folder not in found.with_images:
            places[name[len(above) :]] += 1
    same = [name for name, count in places.items() if count > 1 and count >= _PART * len(tree.image_folders)]
    if same:
        shown = f"most folders of images also hold, or have next to them, {first_few(map(key_of, same), 3)}"
        yield Sign(f"{shown}: calibration, scenes or labels, which a class has not", (_table_way(tree),))


def _other_folders(found: ClassFolders, known: set[str]) -> Iterator[Sign]:
    """Yields the folders next to folders of images that hold other files alone, except those already in `known`."""
    others = []
    for split, names in found.without_images().items():
        others += [path for name in names if (path := f"{found.splits[split]}{name}/") in found.with_files]
    if found.named:
        tops = {f"{path[: path.find('/', len(found.around)) + 1]}" for path in found.with_files - {found.around}}
        others += sorted(tops - found.with_images)
    if others := [path for path in dict.fromkeys(others) if path not in known]:
        tree, inside = found.tree, tuple(others)
        suffixes = (Path(name).suffix.lower() for _, name in tree.not_images if name.startswith(inside))
        counts = Counter(suffix or "no suffix" for suffix in suffixes).most_common()
        what = first_few([f"{count} {suffix}" for suffix, count in counts], 3)
        shown, verb = first_few(map(key_of, others), 3), "hold" if others[1:] else "holds"
        seen = f"{shown} next to folders of images {verb} no image, but {what} files: annotations, or no part of it"
        yield Sign(seen, (_table_way(tree), "move what is no part of the dataset away"))


def _splits_or_versions(found: ClassFolders) -> Iterator[Sign]:
    """Yields sibling folders that hold the same folders, or are called as splits, so that they are no classes."""
    for split, at in found.splits.items():
        groups: dict[str, dict[str, str]] = {}
        for top in found.classes[split]:
            word, rest = split_word(top)
            groups.setdefault(rest, {}).setdefault(word, top)
        called = max(groups.values(), key=len, default={})
        left = [top for top in found.classes[split] if top not in called.values()]
        if left and len(called) > 1 and "" not in called:
            shown, others = (first_few([f"{key_of(at + top)}/" for top in tops]) for tops in (called.values(), left))
            yield Sign(
                f"{shown} are called as splits of one dataset are, not as classes, but {others} lies next to them",
                (f"move {others} away", "for a further split, folders called train, val and test"),
            )
            continue
        inside = {top: below for top in found.classes[split] if (below := found.below(split, top))}
        if not 1 < len(found.classes[split]) <= _MOST_VERSIONS:
            continue  # more are classes, each with the same folders in it
        same = [
            top
            for top, folders in inside.items()
            if any(share_folders(folders, other) for name, other in inside.items() if name != top and len(other) > 1)
        ]
        if len(same) < 2:
            continue
        words = {split_word(top)[0] for top in same}
        as_what = "splits" if len(words) == len(same) and "" not in words else "splits or versions of one dataset"
        shown, folders = first_few([key_of(at + top) for top in same], 4), first_few(map(key_of, inside[same[0]]), 3)
        yield Sign(
            f"{shown} hold the same folders ({folders}), as {as_what} do, not classes",
            (
                "for splits, folders called train, val and test, and nothing next to them",
                f"for versions, one of them: {pack_command(found.tree.path / at / same[0])}",
                "where the innermost folders are the classes, `--layout folder --labels last`",
            ),
        )


def _classes_by_name(found: ClassFolders) -> Iterator[Sign]:
    """Yields images without class folders whose names are a number and one of a few words, as labels are."""
    tree = found.tree
    if len({top for tops in found.classes.values() for top in tops}) > 1:
        return
    for folder, rows in tree.image_folders.items():
        few = [word_of(tree.names[i]) for i in rows[:: -(-len(rows) // _LOOKED_AT)].tolist()]
        if sum(bool(word) and not _of_no_class(word) for word in few) < 0.9 * _NAMED_BY_WORD * len(few):
            continue
        examples, counts = dict[str, str](), Counter[str]()
        for name in (tree.names[i] for i in rows.tolist()):
            examples.setdefault(word := word_of(name), name)
            counts[word] += 1
        words = [word for word, count in counts.items() if word and count > 1 and not _of_no_class(word)]
        behind = [number for i in rows.tolist() if (number := number_and_word(stem_of(tree.names[i]))[0])]
        if len(set(behind)) < len(behind):  # pictures of several kinds of each number
            continue
        if len(words) > 1 and sum(counts[word] for word in words) >= _NAMED_BY_WORD * len(rows):
            shown = first_few([f"{word} ({counts[word]}, as {key_of(examples[word])})" for word in words], 3)
            named = f"{pack_command(tree.given, '--layout folder --labels names')} takes the words as labels"
            splits = all(split_word(word)[0] for word in words)
            yield Sign(
                f"names of images in {key_of(folder) or './'} are numbers with {len(words)} words: {shown}, as labels "
                "or splits in names are",
                ("for splits, folders called train, val and test" if splits else named,),
            )
            return


def _of_no_class(word: str) -> bool:
    """Whether cameras, programs or sensors begin names of files with a word."""
    return bool(_OF_CAMERAS & set(re.split(r"[\W_]+", word.lower())))


def _classes_in_doubt(found: ClassFolders, classes: Collection[str]) -> Iterator[Sign]:
    """Yields what makes it doubtful that the folders are classes: one alone, images that lie deeper, names alike."""
    tree = found.tree
    tops = Counter(top for tops in found.classes.values() for top in tops)
    if not tops:
        return
    placed = [(found.splits[split], top) for split, of in found.classes.items() for top in of]
    direct = [top for at, top in placed if f"{at}{top}/" in tree.image_folders]
    if not direct and not any(at in tree.image_folders for at in found.splits.values()):
        split, at = next((split, at) for split, at in found.splits.items() if found.classes[split])
        top = next(iter(found.classes[split]))
        inside = first_few(map(key_of, found.below(split, top)), 3)
        yield Sign(
            f"no image lies directly in a class folder: {key_of(at + top)}/ holds {inside}, so it is not known which "
            "folder is the class",
            (
                "`--layout folder --labels top` takes the outermost, `--layout folder --labels deepest` the whole path "
                "to the image, `--layout folder --labels last` the folder that it lies in",
            ),
        )
    elif len(tops) == 1 and len(direct) == len(tree.image_folders) and not any(found.without_images().values()):
        if classes:
            return  # what is added to other classes may be one
        top = next(iter(tops))
        at = next(found.splits[split] for split in found.classes if top in found.classes[split])
        what = "images alone" if top.lower() in IMAGE_FOLDERS else "a class without the others, or no class"
        yield Sign(
            f"all images lie in one folder, {key_of(at + top)}/: one class, from which nothing can be learned ({what})",
            ("`--layout folder --labels none` packs them without labels",),
        )
    yield from _names_alike(found, set(tops))
    if 1 < len(tops) <= _MOST_VERSIONS:
        yield from _other_kinds(found)


def _other_kinds(found: ClassFolders) -> Iterator[Sign]:
    """Yields class folders of which some begin with an image of 16 bits, as depth maps and scans have, others of 8."""
    tree, bits = found.tree, dict[int, list[str]]()
    for split, of in found.classes.items():
        for top, folders in of.items():
            first = int(tree.image_folders[folders[0]][0])
            with suppress(ImageError):
                bits.setdefault(header_of(tree.files, first).bits, []).append(f"{key_of(found.splits[split] + top)}/")
    if len(bits) > 1 and set(bits) == {8, 16}:
        eight, deep = (first_few(bits[n], 3) for n in (8, 16))
        seen = f"images in {deep} have 16 bits a channel, those in {eight} have 8: depth maps or scans"
        way = f"one of them alone: {pack_command(found.tree.path / bits[8][0])}"
        yield Sign(f"{seen} next to photographs, not classes", (way,))


def _names_alike(found: ClassFolders, tops: set[str]) -> Iterator[Sign]:
    """Yields names of classes that are one to a reader: they differ in Unicode form, spaces, or case between splits."""
    for plain, why in ((_composed, "only in their Unicode form or in spaces"), (_folded, "only in case")):
        groups: dict[str, set[str]] = {}
        for top in tops:
            groups.setdefault(plain(top), set()).add(top)
        for names in groups.values():
            # `A` and `a` may both be classes, as letters are; not if no split has both.
            together = plain is _folded and any(len(names & of.keys()) > 1 for of in found.classes.values())
            if len(names) > 1 and not together:
                shown = " and ".join(ascii(key_of(name)) for name in sorted(names)[:3])
                seen = f"the folders {shown} differ {why}, and would be {len(names)} classes"
                yield Sign(seen, ("rename one as the other",))
                return


def _composed(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).split())


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
