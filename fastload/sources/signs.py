"""What in a tree speaks against a folder of images: signs of a structure that class folders or images alone would lose.

Any tree with images is a folder of images, so a layout that is not recognised would be packed as one, with wrong labels
and without its boxes, masks or splits. `refuse_by_signs` refuses it instead, names what was seen and what would be
right. Signs are general, never names of datasets. Whoever asks for `--layout folder` knows, and is not asked.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastload.errors import ImageError, SourceError
from fastload.sources.assemble import stem_of
from fastload.sources.folder import IMAGE_FOLDERS, ClassFolders, share_folders, split_word
from fastload.sources.listing import first_few
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
)
_BESIDE = (*_TEXTS, ".mat", ".npy", ".npz", ".pts", ".pkl", ".pickle", ".h5")
"""Suffixes of files that hold annotations: of texts, which are looked into; and of those that lie one by one image."""

_PART = 0.5  # of files of one suffix that are called like images, from which on they belong to them
_HEAD = 2**14
_MOST_READ = 24  # text files that are looked into
_A_FOLDER = 2  # of them, of one suffix in one folder
_MOST_VERSIONS = 8  # folders that may be versions of one dataset
_NAMED = 3  # images that a text names, from which on it is about them
_TOKENS = re.compile(r"[\s,;|\"'<>()\[\]{}=#]+")
_CELLS = re.compile(r"[,;|\t\"'<>]+")


@dataclass(frozen=True)
class Sign:
    """One thing in a tree that a folder of images would lose or mistake."""

    seen: str  # what there is, and what it looks like, as the end of a sentence
    ways: tuple[str, ...] = ()  # commands, or what to do, that would be right


def refuse_by_signs(tree: Tree, further: Iterable[Sign] = ()) -> None:
    """Raises SourceError if anything, `further` signs first, speaks against packing a tree as a folder of images."""
    found = [*further, *signs_against_folder(tree)]
    if not found:
        return
    ways = dict.fromkeys(way for sign in found for way in sign.ways)
    tops = sorted({top for tops in ClassFolders.of(tree).classes.values() for top in tops})
    becomes = f"the classes {first_few(map(key_of, tops), 3)}" if tops else "images without labels"
    raise SourceError(
        f"{tree.given}: not packed as a folder of images, which would lose or mistake what is there: "
        f"{' '.join(f'({i}) {sign.seen}.' for i, sign in enumerate(found, 1))} What would be right: "
        f"{'; '.join((*ways, ''))}or, if it is no more than a folder of images, `--layout folder`, which packs "
        f"{becomes}."
    )


def signs_against_folder(tree: Tree) -> list[Sign]:
    """Returns what in a tree with images speaks against a folder of images."""
    folders = ClassFolders.of(tree)
    return [*_files_beside(tree), *_other_folders(folders), *_splits_or_versions(folders), *_classes_in_doubt(folders)]


def pack_command(source: str | Path, *options: str) -> str:
    """Returns a command to show."""
    return f"`fastload pack {' '.join([shlex.quote(str(source)), 'OUT.h5', *options])}`"


def _table_way(tree: Tree) -> str:
    return (
        f"a table with a line `file_name,label` (or split, xmin, ymin, xmax, ymax, ...) and a row an image or box: "
        f"`fastload pack TABLE.csv OUT.h5 --root {shlex.quote(str(tree.path))}`"
    )


def _files_beside(tree: Tree) -> Iterator[Sign]:
    """Yields the files of annotations, one for each image, and the texts that name images."""
    others = [(i, name) for i, name in tree.not_images if name.lower().endswith(_BESIDE)]
    if not others:
        return
    bases = {tree.names[i].rpartition("/")[2] for i in tree.images().tolist()}
    stems = {stem_of(base) for base in bases}
    by_suffix: dict[str, list[tuple[int, str]]] = {}
    for i, name in others:
        by_suffix.setdefault(Path(name).suffix.lower(), []).append((i, name))
    texts: list[tuple[int, str]] = []
    for suffix, found in by_suffix.items():
        # `a.jpg.json` is called like a.jpg, too.
        alike = [name for _, name in found if stem_of(name) in stems or stem_of(name) in bases]
        if alike and len(alike) >= _PART * len(found) and (len(alike) > 1 or len(stems) < 2 * _NAMED):
            yield Sign(
                f"{key_of(alike[0])}{f' and {len(alike) - 1} more' if alike[1:] else ''} {suffix} files are called "
                f"like images: they look like annotations of them ({_LOOKS.get(suffix, 'labels or boxes')})",
                (*_WAYS.get(suffix, ()), _table_way(tree)),
            )
        elif suffix == ".mat":
            yield Sign(
                f"{first_few([key_of(name) for _, name in found], 2)} of MATLAB, as labels, boxes or splits are kept",
                (_table_way(tree),),
            )
        elif suffix in _TEXTS:
            texts += found
    seen: Counter[tuple[str, str]] = Counter()
    named: list[str] = []
    for i, name in sorted(texts, key=lambda one: (one[1].count("/"), one[1])):
        place = name.rpartition("/")[0], name[-4:].lower()
        seen[place] += 1
        if seen[place] > _A_FOLDER or sum(min(n, _A_FOLDER) for n in seen.values()) > _MOST_READ:
            continue
        with suppress(ImageError):
            head = tree.files.read_head(i, _HEAD)
            if line := _naming_line(head, bases, stems, whole=len(head) >= int(tree.sizes[i])):
                named.append(f"{key_of(name)} ({line[:60]!r})")
    if named:
        verb = "name" if named[1:] else "names"
        yield Sign(
            f"{first_few(named, 2)} {verb} images, as a list of splits, labels or boxes does", (_table_way(tree),)
        )


_LOOKS = {
    ".txt": "YOLO's boxes, or captions",
    ".xml": "VOC's boxes",
    ".json": "LabelMe's polygons, or tags",
    ".mat": "of MATLAB",
}
_WAYS = {
    ".xml": ("VOC's own folders, JPEGImages/ and Annotations/, are read: `--layout voc`",),
    ".txt": ("YOLO's own folders, images/ and labels/, are read: `--layout yolo`",),
}


def _naming_line(head: bytes, bases: set[str], stems: set[str], *, whole: bool) -> str:
    """Returns the first line of a text that names an image, if it is a text about them; else ""."""
    text = head.decode("utf-8", "replace").replace("\\", "/")
    found: dict[str, str] = {}
    counted = alone = 0
    for line in text.splitlines() if whole else text.splitlines()[:-1] or [text]:
        if not line.strip():
            continue
        counted += 1
        # A name may have spaces, which also separate: cells are looked up whole, and word by word.
        cells = [cell.strip() for cell in _CELLS.split(line)]
        names = {cell.rpartition("/")[2] for cell in (*cells, *_TOKENS.split(line))}
        here = [name for name in names if name in bases or (name in stems and _is_name(name))]
        found |= {stem_of(name) if name in bases else name: line.strip() for name in here if name not in found}
        alone += line.strip().rpartition("/")[2] in here
    # In a text about images most lines name one, or one line (as of JSON) names many; a manual may mention some.
    if len(found) < min(_NAMED, len(bases)) or 2 * len(found) < counted > 1:
        return ""
    if whole and alone == counted == len(bases):
        return ""  # only a list of all images, which says nothing more
    return next(iter(found.values()))


def _is_name(stem: str) -> bool:
    """Whether a stem says enough to be the name of an image in a text, as 17 and cat do not."""
    return len(stem) > 3 and any(map(str.isdigit, stem))


def _other_folders(found: ClassFolders) -> Iterator[Sign]:
    """Yields the folders beside those of images that hold other files alone."""
    others = []
    for split, names in found.without_images().items():
        others += [path for name in names if (path := f"{found.splits[split]}{name}/") in found.with_files]
    if found.named:
        tops = {f"{path[: path.find('/', len(found.around)) + 1]}" for path in found.with_files - {found.around}}
        others += sorted(tops - found.with_images)
    if others:
        tree = found.tree
        suffixes = Counter(
            Path(name).suffix.lower() or "no suffix" for _, name in tree.not_images if name.startswith(tuple(others))
        )
        what = first_few([f"{count} {suffix}" for suffix, count in suffixes.most_common()], 3)
        shown, verb = first_few(list(map(key_of, dict.fromkeys(others))), 3), "hold" if others[1:] else "holds"
        yield Sign(
            f"{shown} beside folders of images {verb} no image, but {what} files: annotations, or no part of it",
            (_table_way(tree), "move what is no part of the dataset away"),
        )


def _splits_or_versions(found: ClassFolders) -> Iterator[Sign]:
    """Yields sibling folders that hold the same folders, so that their own names are no classes."""
    for split, at in found.splits.items():
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
        yield Sign(
            f"{first_few([key_of(at + top) for top in same], 4)} hold the same folders "
            f"({first_few(list(map(key_of, inside[same[0]])), 3)}), as "
            f"{'splits' if len(words) == len(same) and '' not in words else 'splits or versions of one dataset'} do, "
            f"not classes",
            (
                "for splits, folders called train, val and test, and nothing beside them",
                f"for versions, one of them: {pack_command(found.tree.path / at / same[0])}",
            ),
        )


def _classes_in_doubt(found: ClassFolders) -> Iterator[Sign]:
    """Yields what makes it doubtful that the folders are classes: one alone, images that lie deeper, names alike."""
    tree = found.tree
    tops = Counter(top for tops in found.classes.values() for top in tops)
    if not tops:
        return
    direct = [
        top for split, of in found.classes.items() for top in of if f"{found.splits[split]}{top}/" in tree.image_folders
    ]
    if not direct and not any(at in tree.image_folders for at in found.splits.values()):
        split, at = next((split, at) for split, at in found.splits.items() if found.classes[split])
        top = next(iter(found.classes[split]))
        inside = first_few(list(map(key_of, found.below(split, top))), 3)
        yield Sign(
            f"no image lies directly in a class folder: {key_of(at + top)}/ holds {inside}, so it is not known which "
            f"folder is the class",
            (
                "`--layout folder --labels top` takes the outermost, `--layout folder --labels deepest` the whole path "
                "to the image",
            ),
        )
    elif len(tops) == 1:
        top = next(iter(tops))
        at = next(found.splits[split] for split in found.classes if top in found.classes[split])
        what = (
            "images alone" if top.lower() in IMAGE_FOLDERS else "a class of which the others are missing, or no class"
        )
        yield Sign(
            f"all images lie in one folder, {key_of(at + top)}/: one class, from which nothing can be learned ({what})",
            (
                "`--layout folder --labels none` packs them without labels",
                f"`--layout folder` as the class {key_of(top)!r}",
            ),
        )
    yield from _names_alike(found, set(tops))


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
                yield Sign(
                    f"the folders {shown} differ {why}, and would be {len(names)} classes",
                    ("rename one as the other",),
                )
                return


def _composed(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).split())


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
