"""Captions: the texts of each image as the columns `caption` and `num_captions`, whatever file says them.

    annotations/captions_train2017.json                  COCO's, alone or next to instances_train2017.json
    dataset_flickr8k.json                                Karpathy's, with splits
    results_20130124.token, Flickr8k.token.txt           lines `a.jpg#0<TAB>text`
    captions.txt                                         lines `a.jpg,text` below a header, as on Kaggle
    Flickr_8k.html                                       the page that torchvision's Flickr8k reads
    SBU_captioned_photo_dataset_{urls,captions}.txt      the same lines of two files

Tables and shards have them in a column (`caption_column`) or a field; they all end in `caption_columns`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column
from fastload.format.texts import CAPTION, count_name, text_arrays
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits, stem_of
from fastload.sources.image_index import ImageIndex, folder_splits
from fastload.sources.listing import SPLITS, first_few
from fastload.sources.tables import plain_name
from fastload.sources.tree import Tree, key_of
from fastload.system.machine import available_memory
from fastload.system.text import text_of, walk_json

_LARGE = 2**28  # bytes of a column from which on it is compared with what its texts take
_MOST_TIMES = 16  # their bytes that a large column may have: COCO's take 6.5, Flickr30k's 9
_HEAD = 2**16

_USUAL = "caption captions text texts sentence sentences comment comments description descriptions alt_text".split()
"""Usual names of a column of captions, likeliest first; any but the first two may hold classes as well."""


INSTANCES = re.compile(
    r"(?:^|/)(?:(?:instances|(?P<keypoints>person_keypoints))_([^/]+)\.json|(?:([^/]+)/)?_annotations\.coco\.json)$"
)
"""Names of the files, with the split in the name or in the folder."""
PANOPTIC = re.compile(r"(?:^|/)panoptic_([^/]+)\.json$")
"""Names of panoptic files."""


# Captions as columns.


def caption_columns(
    draft: Draft, texts: Sequence[Sequence[str]], options: SourceOptions, name_of: Callable[[int], str]
) -> dict[str, Column]:
    """Returns the columns of the texts of N samples, none where no sample has any; `name_of` gives a sample's name.

    Raises:
        SourceError: a text ends in a zero byte, which HDF5 drops; or a few long ones would make the column many times
            as large as its texts.
    """
    if options.captions == "none" or not any(texts):
        return {}
    rows, cut = [[text.encode(errors="backslashreplace") for text in row] for row in texts], 0
    if options.captions != "all":
        limit = int(options.captions)
        cut = sum(len(text) > limit for row in rows for text in row)
        rows = [[text[:limit].decode(errors="ignore").encode() for text in row] for row in rows]
    for number, row in enumerate(rows):
        if any(text.endswith(b"\0") for text in row):
            raise SourceError(
                f"{draft.where}: a caption of {name_of(number)} ends in a zero byte, which no HDF5 text holds. Remove "
                f"it, or leave captions out with `--captions none`."
            )
    counts, lengths = [len(row) for row in rows], [len(text) for row in rows for text in row]
    most, longest, own = max(counts), max(lengths), sum(lengths)
    needed = len(rows) * most * max(1, longest)
    if needed > _LARGE and (needed > _MOST_TIMES * own or needed > available_memory() // 3):
        usual = int(np.quantile(lengths, 0.999)) + 1
        raise SourceError(
            f"{draft.where}: captions would take {needed:,} bytes, their texts {own:,}: each of {len(rows):,} images "
            f"gets room for {most} texts (as {name_of(counts.index(most))} has) of {longest:,} bytes (the longest). "
            f"Cut long ones with `--captions {usual}` (bytes of UTF-8), or leave them out with `--captions none`."
        )
    said = f"{min(counts)} to {most}" if min(counts) < most else str(most)
    draft.notes.append(
        f"Captions: {len(lengths):,} of {len(rows):,} images, {said} each, the longest of {longest} bytes"
        + (f"; cut to {options.captions} bytes: {cut:,}." if options.captions != "all" else ".")
    )
    values, numbers = text_arrays(rows)
    return {CAPTION: Column(values), count_name(CAPTION): Column(numbers)}


def caption_column(columns: Mapping[str, Sequence[Any]], others: Sequence[str] = ()) -> str:
    """Returns the column of a table that holds captions, by its usual name and its cells; "" if none does.

    `others` are columns that the user says to be something else.
    """
    plain = {plain_name(name): name for name in reversed(list(columns)) if name not in others}
    for usual in _USUAL:
        cells = [cell for cell in columns[plain[usual]] if cell not in (None, "", [])] if usual in plain else []
        if not cells or not all(isinstance(cell, str) or _are_texts(cell) for cell in cells):
            continue
        texts = [text for cell in cells for text in texts_in(cell)]
        if not any(any(map(str.isalpha, text)) for text in texts):
            continue  # numbers of captions
        # Sentences, each another one, are no classes, however few there are.
        spoken = len(set(texts)) == len(texts) > 1 and all(len(text.split()) > 2 for text in texts)
        free = 2 * len(set(texts)) > len(texts) and (len(texts) >= 20 or max(map(len, texts)) > 40)
        free |= spoken
        if usual in _USUAL[:2] or free or any(isinstance(cell, list) for cell in cells):
            return plain[usual]
    return ""


def maybe_captions(name: str) -> bool:
    """Whether a column may hold captions, by its name."""
    return plain_name(name) in _USUAL


def texts_in(cell: Any) -> list[str]:
    """Returns the texts of one cell: a text, a list of texts, or such a list as JSON; none in an empty cell."""
    if isinstance(cell, str) and cell.startswith("["):
        try:
            found = json.loads(cell)
        except ValueError:
            found = None
        cell = found if _are_texts(found) else cell
    return list(cell) if isinstance(cell, list) else [cell] if cell else []


def _are_texts(cell: Any) -> bool:
    return isinstance(cell, list) and all(isinstance(text, str) for text in cell)


# Files of captions.


class _Caption(NamedTuple):
    """One text of a file."""

    image: str  # path or name of its image; or the beginning of its name, up to `_`
    text: str
    split: str = ""  # of the image; "" if it is not said here


_Reader = Callable[[Tree, int], Iterator[_Caption]]


def _coco(tree: Tree, at: int) -> Iterator[_Caption]:
    names: dict[Any, str] = {}
    texts: list[tuple[Any, Any]] = []
    split = _split_of(tree, at)
    for where, number, item in _elements(tree, at):
        if where == "images":
            names[_get(tree, at, item, "id", f"images[{number}]")] = _get(tree, at, item, "file_name", "images")
        elif where == "annotations":
            texts.append((item.get("image_id"), _get(tree, at, item, CAPTION, f"annotations[{number}]")))
    for image, text in texts:
        if image not in names:
            raise SourceError(
                f"{tree.where(at)}: a caption is of the image {image!r}, which is not among its images. Ids are whole "
                f"numbers, the same in both lists. Fetch the file again."
            )
        yield _Caption(names[image], text, split)


def _karpathy(tree: Tree, at: int) -> Iterator[_Caption]:
    for where, number, item in _elements(tree, at):
        for sentence in item.get("sentences", ()) if where == "images" else ():
            name = _get(tree, at, item, "filename", f"images[{number}]")
            text = _get(tree, at, sentence, "raw", "sentences")
            folder, split = str(item.get("filepath", "")), str(item.get("split", ""))
            yield _Caption(f"{folder}/{name}" if folder else name, text, SPLITS.get(split, split))


def _elements(tree: Tree, at: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields the objects in the lists of a JSON file: the list's name, number and the object."""
    try:
        for where, number, item in walk_json(tree.read_text(at).decode("utf-8-sig")):
            if number >= 0 and isinstance(item, dict):
                yield where, number, item
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{tree.where(at)} is not well-formed JSON: {exc}. Fetch it again.") from exc


def _get(tree: Tree, at: int, item: Any, name: str, where: str) -> Any:
    """Returns a value of an object in a JSON file: text, but for an id."""
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str) and (name != "id" or not isinstance(value, int)):
        raise SourceError(f"{tree.where(at)}: {where} has {name} {value!r:.80}. Fix the file, or fetch it again.")
    return text_of(value) if isinstance(value, str) else value


def _token(tree: Tree, at: int) -> Iterator[_Caption]:
    for number, line in _lines(tree, at):
        name, tab, text = line.partition("\t")
        image, mark, _ = name.rpartition("#")
        if not (tab and mark and image):
            raise SourceError(f"{tree.where(at)}, line {number}: {line[:60]!r} is not `image.jpg#0<TAB>text`. Fix it.")
        yield _Caption(image, text)


def _listed(tree: Tree, at: int) -> Iterator[_Caption]:
    for number, line in _lines(tree, at):
        image, *rest = next(csv.reader([line]))  # a comma in the text needs no quotes
        if not rest:
            raise SourceError(f"{tree.where(at)}, line {number}: {line[:60]!r} is not `image.jpg,text`. Fix it.")
        if number > 1 or not re.fullmatch(r"(?i)images?(_?(name|id))?|file_?name", image.strip()):
            yield _Caption(image.strip(), ",".join(rest))


def _sbu(tree: Tree, at: int) -> Iterator[_Caption]:
    other = tree.names[at].replace("_urls.", "_captions.")
    if other not in tree.names:
        raise SourceError(f"{tree.where(at)}: its captions, {key_of(other)}, are not there. Fetch that file, too.")
    urls, texts = (list(_lines(tree, part, blank=True)) for part in (at, tree.names.index(other)))
    if len(urls) != len(texts):
        raise SourceError(f"{tree.where(at)} has {len(urls):,} lines, {key_of(other)} {len(texts):,}. Fetch both.")
    for (_, url), (_, text) in zip(urls, texts, strict=True):
        yield _Caption(url.strip().rpartition("/")[2], text.rstrip())  # as torchvision's SBU reads it


class _Page(HTMLParser):
    """The page of Flickr8k: an address with the number of each photo, and a list of its captions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Caption] = []
        self._tag, self._photo = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "a" and (match := re.search(r"/(\d+)/?\s*$", data)):
            self._photo = match[1]
        elif data.strip() == "Image Not Found":
            self._photo = ""
        elif self._tag == "li" and self._photo and data.strip():
            self.found.append(_Caption(f"{self._photo}_", data.strip()))


def _page(tree: Tree, at: int) -> Iterator[_Caption]:
    page = _Page()
    page.feed(tree.read_text(at).decode("utf-8", "replace"))
    page.close()
    yield from page.found


def _lines(tree: Tree, at: int, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file with their numbers, without the marks that end them."""
    try:
        text = tree.read_text(at).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise SourceError(f"{tree.where(at)} is not UTF-8 ({exc.reason} at byte {exc.start}). Save it so.") from exc
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if lines[-1:] == [""] else lines, 1):
        if blank or line.strip():
            yield number, line.removesuffix("\r")


# In the order in which they are looked for: where several kinds are there, they say the same.
_FILES: tuple[tuple[re.Pattern[str], bytes, _Reader], ...] = (
    (re.compile(r"dataset_(coco|flickr8k|flickr30k)\.json"), rb'"sentences"', _karpathy),
    (re.compile(r"captions_[^/]+\.json"), rb'"images"|"caption"', _coco),
    (re.compile(r"results(_\d+)?\.token|flickr_?8k\.token\.txt", re.IGNORECASE), rb"^[^\t\n]+#\d\t", _token),
    (re.compile(r"captions\.txt", re.IGNORECASE), rb"(?im)^[^,\n]+\.(jpe?g|png),", _listed),
    (re.compile(r"flickr[^/]*\.html?", re.IGNORECASE), rb"(?i)<li>|<table", _page),
    (re.compile(r"SBU_captioned_photo_dataset_urls\.txt"), rb"^https?://", _sbu),
)
_SUFFIXES = (".json", ".token", ".txt", ".htm", ".html")  # of all these
_YEAR = re.compile(r"_?\d{4}$")
_OF_SPLIT = re.compile(r"flickr_?(?:8k|30k)[._](train|dev|test)images\.txt", re.IGNORECASE)


def _split_of(tree: Tree, at: int) -> str:
    """Returns the split that COCO's file is named after: captions_train2017.json."""
    name = _YEAR.sub("", stem_of(tree.names[at]).partition("_")[2])
    return SPLITS.get(name.lower(), name)


def _caption_files(tree: Tree, *, by_name: bool = False) -> tuple[list[int], _Reader | None, list[str]]:
    """Returns the files of captions of the first kind that is there, their reader, and the names of other kinds.

    `by_name`: their beginning need not look like it.
    """
    found: list[int] = []
    reader, others = None, list[str]()
    likely = [(at, name) for at, name in tree.not_images if name.lower().endswith(_SUFFIXES)]
    for pattern, sign, read in _FILES:
        for at, name in likely:
            if not pattern.fullmatch(name.rpartition("/")[2]):
                continue
            try:
                fits = by_name or re.search(sign, tree.files.read_head(at, _HEAD)) is not None
            except ImageError:
                continue
            if fits and reader in (None, read):
                found, reader = [*found, at], read
            elif fits:
                others.append(key_of(name))
    return found, reader, others


def captions_evidence(tree: Tree) -> list[str]:
    """Returns the files of captions in a tree of images; none where COCO's other annotations are there."""
    if not len(tree.images) or any(INSTANCES.search(name) or PANOPTIC.search(name) for _, name in tree.not_images):
        return []
    return [key_of(tree.names[at]) for at in _caption_files(tree)[0]]


def captions_by_image(draft: Draft, tree: Tree) -> tuple[dict[int, list[str]], dict[int, str], list[str]]:
    """Returns position in the tree -> its captions, and -> its split where that is said; images that are not there."""
    files, reader, others = _caption_files(tree, by_name=True)
    texts: dict[int, list[str]] = {}
    splits: dict[int, str] = {}
    absent: dict[str, None] = {}
    index = ImageIndex(tree)
    for at in files:
        assert reader is not None, "there is a file"
        found = list(reader(tree, at))
        names = list(dict.fromkeys((one.image, one.split) for one in found))
        place = _places(index, tree, at, [name for name, _ in names], [split for _, split in names])
        position_of = dict(zip(names, place, strict=True))
        for one in found:
            position = position_of[one.image, one.split]
            if position < 0:
                absent[one.image] = None
                continue
            texts.setdefault(position, []).append(one.text)
            if one.split:
                splits[position] = one.split
        if not found:
            draft.notes.append(f"{key_of(tree.names[at])} holds no captions.")
    draft.note("Files of the same captions were left alone", others)
    return texts, splits, list(absent)


def _places(index: ImageIndex, tree: Tree, at: int, names: list[str], splits: list[str]) -> list[int]:
    """Returns the position in the tree of each image, -1 for none; first in the folder that a file is named after."""
    if any(name.endswith("_") for name in names):  # numbers of photos
        stems = {tree.names[i].rpartition("/")[2].partition("_")[0]: i for i in tree.images.tolist()}
        return [stems.get(name.removesuffix("_"), -1) for name in names]
    known = [split if split in SPLITS.values() else "" for split in splits]
    folder = stem_of(tree.names[at]).partition("_")[2]
    found = np.full(len(names), -1, np.int64)
    for above in (*(f"{one}/" for one in (folder, _YEAR.sub("", folder)) if one), ""):
        lost = np.flatnonzero(found < 0).tolist()
        found[lost] = index.find([above + names[k] for k in lost], [known[k] for k in lost]).positions
    return found.tolist()


def captions_of(draft: Draft, tree: Tree, images: Sequence[int], options: SourceOptions) -> dict[str, Column]:
    """Returns the columns of captions of images by their positions in a tree, if there are files of captions."""
    if options.captions == "none":
        return {}
    texts, _, _ = captions_by_image(draft, tree)
    found = [texts.get(i, ()) for i in images]
    return caption_columns(draft, found, options, lambda row: key_of(tree.names[images[row]]))


def list_captions(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images that files of captions name, split by split, in the order of their names.

    Columns: `caption` (N, M), in the order of the files, and `num_captions` int64 (N,).
    """
    draft.leave_out_broken(tree)
    files = [tree.names[at] for at in _caption_files(tree, by_name=True)[0]]
    if not files:
        raise SourceError(f"{tree.given}: there is no file of captions. `fastload layouts` says which are read.")
    texts, splits, absent = captions_by_image(draft, tree)
    lost = [(key_of(name), f"is named in {first_few(map(key_of, files), 2)}, but has no file") for name in absent]
    draft.leave_out_all(lost, "captions without their image", "Put the images back", len(lost) + len(texts))
    said = {stem_of(line.text): split for split, lines in _lists_of_splits(tree) for line in lines}
    images = sorted(texts)
    by_folder = folder_splits([tree.names[i] for i in images])
    stems = [stem_of(tree.names[i]) for i in images]
    split_of = [splits.get(i) or said.get(stem) or at for i, stem, at in zip(images, stems, by_folder, strict=True)]
    columns = caption_columns(draft, [texts[i] for i in images], options, lambda row: key_of(tree.names[images[row]]))
    return Samples.in_tree(tree, images, Splits.of(split_of), columns, by_name=True)


def _lists_of_splits(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yields the split and lines of each list of images such as Flickr_8k.trainImages.txt."""
    for at, name in tree.not_images:
        if match := _OF_SPLIT.fullmatch(name.rpartition("/")[2]):
            yield SPLITS.get(match[1].lower(), "val"), tree.lines(at)
