"""YOLO: images, and for each a text file of the same name, a line for each object in it.

    images/train/a.jpg, labels/train/a.txt        as Ultralytics has it
    train/images/a.jpg, train/labels/a.txt        as Roboflow exports it
    obj_train_data/a.jpg, obj_train_data/a.txt    as Darknet and CVAT have it
    data.yaml (or any other .yaml), obj.data      splits, names of the classes, keypoints
    classes.txt, obj.names, _darknet.labels       names of the classes
    train.txt, val.txt                            splits, by the paths of the images

A line is a class and a box (`0 0.5 0.4 0.2 0.1`: middle, width and height as parts of the image's), or a class and the
corners of a polygon or oriented box, whose bounds are the box then; with `kpt_shape` in data.yaml points follow a box.
An image without a file, or with an empty one, has no object.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import ImageError, MissingExtraError, SourceError
from fastload.format.ragged import Column
from fastload.options.pack import BoxForm, SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits, header_of, split_path, stem_of
from fastload.sources.boxes import BoxSlots, keypoints_column
from fastload.sources.listing import SPLITS, first_few, in_split_order, split_of_parts
from fastload.sources.manifest import in_class_folders, is_table
from fastload.sources.tree import Tree, key_of

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PLAIN = re.compile(rf"\d{{1,9}}(\s+{_NUMBER}){{4,}}")
_ONE_NUMBER = re.compile(_NUMBER)
_DECIMAL_COMMAS = re.compile(r"\S+(\s+-?\d*,\d+){4,}")
_HEAD = 2**12
_LOOKED_AT = 16  # files of labels, to see whether they are YOLO's
_TOLERANCE = 1e-3  # parts of an image by which boxes may leave it, since they are written with few digits
_ALIKE = 0.02  # parts of an image by which a box and the bounds of its polygon may differ

_CLASS_FILES = re.compile(r"(.*/)?(classes\.txt|[^/]*\.names|_darknet\.labels)")
_OF_OTHERS = re.compile(r"\.xml$|(^|/)(instances_|_annotations\.coco)[^/]*\.json$", re.IGNORECASE)
_IS_DATASET = re.compile(rb"^names\s*:", re.MULTILINE), re.compile(rb"^(train|val|path)\s*:", re.MULTILINE)

_SIX_COLUMNS = (
    r". If the last is a confidence, remove it: `sed -ri 's/^((\S+\s+){4}\S+)\s+\S+\s*$/\1/' LABELS`. If it is "
    "an angle, write the four corners"
)
_OTHER_FORMATS = (
    (re.compile(r"[A-Za-z_]+( -?[\d.]+){14,15}"), "KITTI's lines have 14 numbers, of which four are corners in pixels"),
    (re.compile(r"(-?[\d.]+[ ,]+){8}\S*[^\d\s.].*"), "DOTA's and ICDAR's lines have eight numbers first, in pixels"),
    (re.compile(r"\S+"), "for classes of whole images, write a table of images and classes"),
)
"""Lines that other formats have in files of labels."""


class _Object(NamedTuple):
    """An object of an image; all numbers but the class are parts of the image's width and height."""

    label: int
    box: list[float]  # x, y, width, height
    points: list[float]  # x, y, visibility of each keypoint; [] if there are none


class _Pairs(NamedTuple):
    """The images of a tree and their files of labels, by their positions."""

    images: list[int]  # those that belong to the dataset
    labels: dict[int, int]  # image -> its file of labels
    lone: list[int]  # files of labels without an image
    named: bool  # whether a folder called labels shows it, else the lines alone do


@dataclass
class _About:
    """A dataset's facts in a data.yaml, or in the files of other programs in its place."""

    names: tuple[str, ...] = ()  # of the classes
    points: tuple[int, int] = (0, 0)  # keypoints of an object, and numbers of each (2, or 3 with its visibility)
    point_names: tuple[str, ...] = ()  # of the keypoints
    flip_pairs: tuple[int, ...] = ()  # for each keypoint its number in a mirrored image
    entries: list[tuple[str, str]] = field(default_factory=list)  # split, and its folder or list of images
    file: str = ""  # the file that says so


def yolo_evidence(tree: Tree) -> list[str]:
    """Returns an image of a tree and its file of labels, if that is YOLO's; or the data.yaml of a dataset.

    In a folder called labels one line of a class and four numbers is enough: wrong lines are an error of their own.
    Text files elsewhere must hold parts of an image.
    """
    pairs = _pair(tree)
    some = [at for at in [*pairs.labels.values(), *(pairs.lone if pairs.named else ())] if tree.sizes[at]][:_LOOKED_AT]
    if any(_looks_like_boxes(tree, at, strict=not pairs.named) for at in some):
        return [key_of(tree.names[i]) for i in next(iter(pairs.labels.items()), (some[0],))]
    if not len(tree.images) or any(is_table(name) for _, name in tree.not_images):
        return []
    sets = [i for i in _yamls(tree) if all(sign.search(_head(tree, i)) for sign in _IS_DATASET)]
    return [key_of(tree.names[sets[0]])] if sets and not in_class_folders(tree) else []


def list_yolo(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images with their boxes, split by split, in the order of their names.

    Columns: `boxes` float32 (N, M, 4) as x, y, width, height in pixels of the upright image, `box_labels` int64 (N, M),
    -1 behind the last, `num_boxes` int64 (N,); with `kpt_shape` in data.yaml, `keypoints` float32 (N, M, K, 3) as x, y
    and visibility (0: not labelled, 1: hidden, 2: visible).
    """
    draft.leave_out_broken(tree)
    pairs = _pair(tree)
    if not pairs.labels:
        images = first_few([key_of(tree.names[i]) for i in tree.images.tolist()], 2) or "none"
        texts = first_few([key_of(name) for _, name in tree.not_images if name[-4:].lower() == ".txt"], 2) or "none"
        raise SourceError(
            f"{tree.given}: no image has a file of labels, as images/a.jpg has labels/a.txt. Images: {images}. Text "
            f"files: {texts}. Give the folder that holds both, with equal names; or pack the images without boxes: "
            "`--layout folder`."
        )
    about = _read_about(draft, tree)
    reader = _LabelReader(tree, about, options.boxes)
    found, wrong = dict[int, tuple[list[_Object], int, int]](), list[str]()  # image -> objects, width, height
    for i in pairs.images:
        try:
            objects = reader.read(pairs.labels[i]) if i in pairs.labels else []
            header = header_of(tree.files, i) if objects else None
            found[i] = objects, *((header.width, header.height) if header else (0, 0))
        except ImageError as error:
            draft.leave_out(key_of(tree.names[i]), str(error))
        except SourceError:
            raise
        except ValueError as error:  # of a line
            wrong.append(str(error))
            draft.leave_out(key_of(tree.names[i]), f"is labelled by {error}")
    if wrong and not any(objects for objects, _, _ in found.values()):
        raise SourceError(
            f"{tree.given}: no file of labels can be read ({len(wrong)} are wrong), e.g. {wrong[0]}. A line of YOLO's "
            "is a class, x and y of the middle, width and height, all four as parts of the image. Convert them; or "
            "pack the images without boxes: `--layout folder`."
        )
    for at in pairs.lone:
        if stem_of(tree.names[at]) not in draft.unreadable:
            draft.leave_out(key_of(tree.names[at]), "has labels, but no image of its name")
    _note_unlabelled(draft, tree, pairs)
    draft.notes += reader.notes()
    kept, splits = _splits(draft, tree, about, pairs.images, list(found))
    columns = _columns(draft, about, [found[i] for i in kept])
    return Samples.in_tree(tree, kept, splits, columns, by_name=True)


def _columns(draft: Draft, about: _About, found: list[tuple[list[_Object], int, int]]) -> dict[str, Column]:
    every = [one for objects, _, _ in found for one in objects]
    sample = np.repeat(np.arange(len(found)), [len(objects) for objects, _, _ in found])
    slots = BoxSlots.of(sample, len(found), draft.where)
    sizes = np.array([size for _, *size in found], np.float64).reshape(-1, 2)[sample]
    boxes = np.array([one.box for one in every], np.float64).reshape(-1, 4) * np.tile(sizes, 2)
    labels = np.array([one.label for one in every], np.int64)
    about_labels = {"names": about.names} if about.names else {}
    columns = slots.columns(boxes.astype(np.float32), Column(labels, about_labels))
    if count := about.points[0]:
        points = np.array([one.points for one in every], np.float64).reshape(len(every), count, 3)
        points[..., :2] *= sizes[:, None]
        named, flips = about.point_names, about.flip_pairs
        columns["keypoints"] = keypoints_column(slots, points.astype(np.float32), named, flip_pairs=flips)
    if without := int((slots.counts == 0).sum()):
        draft.notes.append(f"Images without an object were kept ({without}).")
    return columns


def _key(name: str, folders: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the parts of a path without suffix and without its last folder of these names; () if it lies in none."""
    *above, base = name.split("/")
    at = next((at for at in reversed(range(len(above))) if above[at].lower() in folders), -1)
    return (*above[:at], *above[at + 1 :], base.rpartition(".")[0] or base) if at >= 0 else ()


def _pair(tree: Tree) -> _Pairs:
    """Returns the images and their files of labels by the first of these ways that finds a pair.

    Both have one path but for a folder images and one labels (or image, label); else one name, which no other file
    has, in such folders; else a folder labels lies next to the images; else the files lie in one folder; else they have
    one name in any folders. The last three only without annotations of VOC or COCO, which such trees mostly are.
    """
    names, images = tree.names, tree.images.tolist()
    texts = [i for i, name in tree.not_images if name[-4:].lower() == ".txt" and not _CLASS_FILES.fullmatch(name)]
    in_labels = {i: key for i in texts if (key := _key(names[i], ("labels", "label")))}
    in_images = {i: key for i in images if (key := _key(names[i], ("images", "image")))} if in_labels else {}
    ways: list[tuple[dict[int, Any], dict[int, Any], bool]] = [
        (in_images, in_labels, True),
        (_stems(tree, in_images), _stems(tree, in_labels), True),
    ]
    others = any(_OF_OTHERS.search(name) for _, name in tree.not_images)
    if 100 * len(texts) > len(images) and not others:  # a few texts among many images are notes
        stems = [{i: names[i].rpartition(".")[0] for i in files} for files in (images, texts)]
        ways += [({i: tuple(path.split("/")) for i, path in stems[0].items()}, in_labels, True)] if in_labels else []
        ways += [(stems[0], stems[1], False), (_stems(tree, images), _stems(tree, texts), False)]
    for image_keys, text_keys, named in ways:
        text_of = {key: i for i, key in text_keys.items()}
        if labels := {i: text_of[key] for i, key in image_keys.items() if key in text_of}:
            used = set(labels.values())
            own = {split_path(names[at])[0] for at in used}
            lone = [at for at in (in_labels if named else texts) if at not in used]
            if not named:  # lists and notes may lie there, too
                lone = [
                    at for at in lone if split_path(names[at])[0] in own and _looks_like_boxes(tree, at, strict=True)
                ]
            return _Pairs(list(in_images) if in_images.keys() >= labels.keys() else images, labels, lone, named)
    return _Pairs([], {}, [] if others else list(in_labels), bool(in_labels))


def _stems(tree: Tree, files: Iterable[int]) -> dict[int, str]:
    """Returns the base name without suffix of each file, unless files in other folders have the same."""
    folders: dict[str, set[str]] = defaultdict(set)
    files = list(files)
    for i in files:
        folders[stem_of(tree.names[i])].add(split_path(tree.names[i])[0])
    return {i: stem for i in files if len(folders[stem := stem_of(tree.names[i])]) == 1}


def _head(tree: Tree, i: int) -> bytes:
    try:
        return tree.files.read_head(i, _HEAD)
    except ImageError:
        return b""


def _looks_like_boxes(tree: Tree, i: int, *, strict: bool) -> bool:
    """Whether a line at the beginning of a file is a class and four numbers or more, if strict from 0 to 1."""
    for line in _text_lines(_head(tree, i))[:4]:
        first, *rest = _plain(line).split() or [""]
        numbers = [float(word) for word in rest if _ONE_NUMBER.fullmatch(word)]
        if len(numbers) >= 4 and (
            not strict or (len(numbers) == len(rest) and first[:1].isalnum() and all(0 <= n <= 1 for n in numbers[:4]))
        ):
            return True
    return False


def _text_lines(data: bytes) -> list[str]:
    """Returns the lines of a file of labels, as any program ends them."""
    text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    return [line.strip() for line in re.split(r"\r\n|\r|\n", text.lstrip("\ufeff"))]


def _plain(line: str) -> str:
    """Returns a line with spaces between its numbers, and points within them."""
    if "," not in line and ";" not in line:
        return line
    return line.replace(",", ".") if _DECIMAL_COMMAS.fullmatch(line) else re.sub(r"[,;]", " ", line)


@dataclass
class _LabelReader:
    """Reads files of labels, and collects notes about their lines."""

    tree: Tree
    about: _About
    form: BoxForm
    odd: dict[str, list[str]] = field(default_factory=dict)  # unusual way of writing -> where
    lengths: Counter[int] = field(default_factory=Counter)  # numbers of an object with more than four -> objects
    within: int = 0  # objects whose further numbers are points in the box that the first four would be
    boxed: int = 0  # objects with a box and its polygon
    repeated: int = 0  # objects that are given twice

    def read(self, at: int) -> list[_Object]:
        """Returns the objects of a file of labels; ValueError names the malformed line."""
        found: list[_Object] = []
        seen = set[str]()
        for number, line in enumerate(_text_lines(self.tree.read_text(at)), 1):
            if line:
                where = f"{key_of(self.tree.names[at])}, line {number}"
                try:
                    found.append(self._object(line, where))
                except ValueError as error:
                    labels = shlex.quote(str(Path(self.tree.where(at)).parent)) + "/*.txt"
                    raise ValueError(f"{where} {error}".replace("LABELS", labels)) from None
                self.repeated += line in seen
                seen.add(line)
        return found

    def notes(self) -> list[str]:
        """Returns the notes about all lines that were read; SourceError if they are hardly polygons."""
        notes = [
            f"Lines of labels were read that YOLO writes otherwise: {what} ({len(places)}, first {places[0]})."
            for what, places in self.odd.items()
        ]
        polygons = sum(self.lengths.values())
        odd = [n for n in self.lengths if n > 8]
        if len(self.lengths) == 1 and odd and self.within == polygons > 2 and not self.boxed:
            raise SourceError(
                f"{self.tree.given}: each object has {odd[0]} numbers behind its class, and those behind the first 4 "
                "lie in the box that these are: this looks like keypoints. Say how many there are in data.yaml "
                f"(`kpt_shape: [{(odd[0] - 4) // 2}, 2]`). If they are polygons, leave the first four numbers out."
            )
        if polygons:
            notes.append(f"Objects given by polygons ({polygons}): packed as the boxes around them.")
            notes.append("NOT READ: corners of polygons and of oriented boxes.")
        if self.repeated:
            notes.append(f"Objects that are given twice were kept ({self.repeated}).")
        return notes

    def _object(self, line: str, where: str) -> _Object:
        names = self.about.names
        plain = line
        if not _PLAIN.fullmatch(line):
            plain = self._lenient(line, where)
        first, *rest = plain.split()
        label, numbers = int(first), list(map(float, rest))
        if names and label >= len(names):
            hint = "" if label > len(names) else "; classes count from 0"
            raise ValueError(f"has class {label}, and only {len(names)} have names{hint}")
        count, (kinds, dims) = len(numbers), self.about.points
        if kinds:
            if count != 4 + kinds * dims:
                raise ValueError(
                    f"has {count} numbers behind the class; kpt_shape [{kinds}, {dims}] needs {4 + kinds * dims}"
                )
            return _Object(label, self._box(numbers[:4], self.form), self._points(numbers[4:]))
        if count == 4:
            return _Object(label, self._box(numbers, self.form), [])
        if count % 2:
            more = _SIX_COLUMNS if count == 5 else ""
            raise ValueError(f"has {count} numbers behind the class: neither a box nor the corners of a polygon{more}")
        self.lengths[count] += 1
        box, bounds = numbers[:4], _bounds(numbers[4:])
        corners = [box[0] - box[2] / 2, box[1] - box[3] / 2, box[0] + box[2] / 2, box[1] + box[3] / 2]
        if count > 8 and all(abs(a - b) < _ALIKE for a, b in zip(corners, bounds, strict=True)):
            self.boxed += 1
            return _Object(label, self._box(box, "auto"), [])
        pairs = zip((1, 1, -1, -1), corners, bounds, strict=True)
        inside = all(sign * corner <= sign * bound for sign, corner, bound in pairs)
        self.within += inside and min(corners) >= 0 and max(corners) <= 1
        return _Object(label, self._box(_bounds(numbers), "xyxy", "polygon"), [])

    def _lenient(self, line: str, where: str) -> str:
        """Returns a line as YOLO writes it, of one that means the same; ValueError for any other."""
        plain = _plain(line)
        first, *rest = plain.split()
        names = self.about.names
        shown = repr(line[:60])
        if len(rest) < 4 or not all(map(_ONE_NUMBER.fullmatch, rest)):
            other = next((said for sign, said in _OTHER_FORMATS if sign.fullmatch(line)), "")
            raise ValueError(f"is no class with four numbers: {shown}" + (f" ({other})" if other else ""))
        if plain != line:
            self.odd.setdefault("semicolons" if ";" in line else "commas", []).append(where)
        if _ONE_NUMBER.fullmatch(first) and 0 <= float(first) < 2**31 and float(first).is_integer():
            if not first.isdecimal():
                self.odd.setdefault("classes as 0.0", []).append(where)
            return " ".join([str(int(float(first))), *rest])
        if names.count(first) != 1:
            fix = f"Known are {first_few(names)}" if names else "Write its number, and the names into classes.txt"
            fix = next((said for sign, said in _OTHER_FORMATS[:2] if sign.fullmatch(line)), fix)
            raise ValueError(f"has the class {first!r}, which is no number of a class: {shown}. {fix}")
        self.odd.setdefault("names in place of classes", []).append(where)
        return " ".join([str(names.index(first)), *rest])

    def _box(self, numbers: list[float], form: BoxForm, what: str = "box") -> list[float]:
        """Returns a box as x, y, width, height within the image, of one in this form; ValueError if it leaves it."""
        a, b, c, d = numbers
        low, high = (a - c / 2, b - d / 2), (a + c / 2, b + d / 2)
        if form == "xyxy":
            low, high = (a, b), (c, d)
        elif form == "yxyx":
            low, high = (b, a), (d, c)
        elif form == "xywh":
            low, high = (a, b), (a + c, b + d)
        if min(low) < -_TOLERANCE or max(high) > 1 + _TOLERANCE or high[0] < low[0] or high[1] < low[1]:
            hint = ""
            if max(numbers) > 2:
                hint = "; these look like pixels, and YOLO's numbers are parts of the image, from 0 to 1"
            elif form == "auto" and 0 <= a < c <= 1 and 0 <= b < d <= 1:
                hint = "; as two corners it would fit: `--boxes xyxy` takes all boxes so"
            said = " ".join(f"{number:g}" for number in numbers)
            raise ValueError(f"has a {what} outside of the image, or of negative size: {said}{hint}")
        (x, y), (right, bottom) = ([min(max(side, 0.0), 1.0) for side in corner] for corner in (low, high))
        return [x, y, right - x, bottom - y]

    def _points(self, numbers: list[float]) -> list[float]:
        """Returns the keypoints of an object as x, y, visibility; ValueError for what can be none."""
        dims, found = self.about.points[1], list[float]()
        for at in range(0, len(numbers), dims):
            x, y, seen = *numbers[at : at + 2], numbers[at + 2] if dims == 3 else 2.0 * (min(numbers[at : at + 2]) >= 0)
            if seen not in (0, 1, 2):
                raise ValueError(f"has a keypoint of visibility {seen:g}, which is neither 0, 1 nor 2")
            if seen and (min(x, y) < -_TOLERANCE or max(x, y) > 1 + _TOLERANCE):
                raise ValueError(f"has a keypoint outside of the image: {x:g} {y:g}")
            found += [x, y, seen] if seen else [0.0, 0.0, 0.0]
        return found


def _bounds(numbers: list[float]) -> list[float]:
    """Returns the corners of the box around points x, y, x, y, ..."""
    return [min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])]


def _note_unlabelled(draft: Draft, tree: Tree, pairs: _Pairs) -> None:
    """Notes images whose files of labels are shared, and folders in which no image has one."""
    owners = defaultdict[int, list[str]](list)
    for i, at in pairs.labels.items():
        owners[at].append(key_of(tree.names[i]))
    shared = [name for these in owners.values() if these[1:] for name in these]
    draft.note("Images that share one file of labels", shared)
    folders = Counter(split_path(tree.names[i])[0] for i in pairs.images)
    labelled = {split_path(tree.names[i])[0] for i in pairs.labels}
    bare = [f"{key_of(folder) or 'the top'} ({count})" for folder, count in folders.items() if folder not in labelled]
    if bare:
        draft.notes.append(
            f"NOT LABELLED: no image in {first_few(bare)} has a file of labels. They are packed as images without an "
            "object; move them away if their labels are missing."
        )


def _splits(draft: Draft, tree: Tree, about: _About, images: list[int], kept: list[int]) -> tuple[list[int], Splits]:
    """Returns which of the images kept to list, and their splits: by data.yaml or lists, else by names of folders.

    An image that several entries name is of its folder's split, else of the first. One that none names is left alone,
    unless its folder is named after a split.
    """
    by_end = defaultdict[str, list[int]](list)
    for i in images:
        by_end[split_path(tree.names[i])[1]].append(i)
    said: dict[int, list[str]] = {}
    lost = list[str]()
    for split, entry in about.entries:
        named = _images_of(draft, tree, entry, images, by_end)
        for i in named:
            said.setdefault(i, []).append(split)
        lost += [] if named else [f"{split}: {entry}"]
    if lost:
        draft.notes.append(
            f"NOT READ: {first_few(lost)} in {about.file}, which names no images here: the names of folders say the "
            "splits there."
        )
    chosen: dict[int, str] = {}
    several, alone, moved = list[str](), list[str](), set[str]()
    differ = any(len(set(splits)) == 1 for splits in said.values())  # else train and val are the same images
    for i in kept:
        folder, entries = split_of_parts(tree.names[i].split("/")[:-1]), list(dict.fromkeys(said.get(i, ())))
        if not entries and not folder and differ:
            alone.append(key_of(tree.names[i]))
            continue
        if len(entries) > 1:
            several.append(key_of(tree.names[i]))
        chosen[i] = folder if folder in entries or not entries or not differ else entries[0]
        moved |= {chosen[i]} - {folder}
    if moved:
        draft.notes.append(f"Splits by {about.file}: {', '.join(in_split_order(moved))}.")
    said_twice = "are in the first of them" if differ else "are in none of them"
    draft.note(f"Images that {about.file} names for several splits {said_twice}", several)
    draft.note(f"Images that {about.file} does not name were left alone", alone)
    return list(chosen), Splits.of(list(chosen.values()))


def _images_of(draft: Draft, tree: Tree, entry: str, images: list[int], by_end: dict[str, list[int]]) -> list[int]:
    """Returns the images that an entry of a data.yaml means: those below a folder, or in a list of paths; or none.

    Paths count by their end, as they may begin anywhere: `/content/data/images/train`, `../train/images`.
    """
    parts = _parts(entry)
    if not entry.lower().endswith(".txt"):
        for at in range(len(parts) or 1):
            end = "/".join(parts[at:])
            found = [folder for folder in ("", *tree.folders) if f"/{folder}".endswith(f"/{end}")]
            if len(found) == 1 and (not at or at < len(parts) - 1 or parts[at - 1] == tree.path.name):
                return [i for i in images if tree.names[i].startswith(f"{found[0]}/" if found[0] else "")]
        return []
    lists = [(i, name) for i, name in tree.not_images if split_path(name)[1] == (parts or [""])[-1]]
    best = max((_alike(parts, _parts(name)) for _, name in lists), default=0)
    lists = [(i, name) for i, name in lists if _alike(parts, _parts(name)) == best]
    if len(lists) != 1:
        return []
    listed, gone = list[int](), list[tuple[str, str]]()
    for line in tree.lines(lists[0][0]):
        path = _parts(line.text)
        ends = {i: _alike(path, _parts(tree.names[i])) for i in by_end.get((path or [""])[-1], ())}
        chosen = [i for i, alike in ends.items() if alike == max(ends.values())]
        if len(chosen) == 1:
            listed += chosen
        elif stem_of(line.text) not in draft.unreadable:
            why = f"may be {first_few([key_of(tree.names[i]) for i in chosen])}" if chosen else "is not there"
            gone.append((key_of(line.text), f"({key_of(lists[0][1])}, line {line.number}) {why}"))
    for key, why in gone if listed else ():
        draft.leave_out(key, why)
    return listed


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[\\/]+", path.strip()) if part not in ("", ".", "..") and part[-1:] != ":"]


def _alike(parts: list[str], others: list[str]) -> int:
    """Returns how many parts at the end of two paths are the same."""
    pairs = zip(reversed(parts), reversed(others), strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(parts), len(others)))


def _yamls(tree: Tree) -> list[int]:
    """Returns the .yaml files of a tree that lie no deeper than the outermost files and one folder."""
    found = [i for i, name in tree.not_images if name.endswith((".yaml", ".yml"))]
    at_top = min((name.count("/") for name in tree.names), default=0) + 1 if found else 0
    return [i for i in found if tree.names[i].count("/") <= at_top]


def _read_about(draft: Draft, tree: Tree) -> _About:
    """Returns what the first data.yaml with names of classes says, else Darknet's files; with a note."""
    yamls = _yamls(tree)
    for i in yamls:
        content = _read_yaml(tree, i)
        names = content.get("names")
        if names is None:
            continue
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        if not isinstance(listed, dict) or sorted(map(str, listed)) != sorted(map(str, range(len(listed)))):
            raise SourceError(f"{tree.where(i)}: `names` is no list of classes 0, 1, ...: {str(names)[:80]}. Fix it.")
        draft.notes.append(f"Classes by {key_of(tree.names[i])} ({len(listed)}).")
        by_number = {int(number): str(name) for number, name in listed.items()}
        if content.get("nc", len(listed)) != len(listed):
            raise SourceError(f"{tree.where(i)}: `nc` is {content['nc']}, {len(listed)} classes have names. Fix it.")
        about = _About(tuple(by_number[number] for number in range(len(by_number))), file=key_of(tree.names[i]))
        about.entries = _entries(content)
        if content.get("kpt_shape") is not None:
            _read_keypoints(about, content, tree.where(i))
        return about
    about = _About()
    files = [(i, name) for i, name in tree.not_images if _CLASS_FILES.fullmatch(name)]
    contents = {tuple(key_of(line.text) for line in tree.lines(i)): name for i, name in files}
    if len(contents) > 1:
        raise SourceError(
            f"{tree.given}: {first_few([key_of(name) for name in contents.values()])} name different classes. Remove "
            "those that do not count."
        )
    for names, name in contents.items():
        about.names = names
        draft.notes.append(f"Classes by {key_of(name)} ({len(names)}).")
    if not about.names:
        looked = first_few([key_of(tree.names[i]) for i in yamls]) or "no .yaml, no classes.txt"
        draft.notes.append(f"The classes have no names ({looked}).")
    for i, name in tree.not_images:
        if name.endswith(".data"):
            pairs = (line.text.partition("=") for line in tree.lines(i))
            about.entries = _entries({key.strip(): value.strip() for key, _, value in pairs})
            about.file = key_of(name)
    if not about.entries:
        about.entries = _entries({stem_of(name): name for _, name in tree.not_images if name.endswith(".txt")})
        about.file = first_few([key_of(entry) for _, entry in about.entries])
    return about


def _entries(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns split and path of the entries train, val, valid and test of a data.yaml."""
    found = [(SPLITS[key], value) for key, value in content.items() if key in SPLITS and value]
    return [(split, str(entry)) for split, value in found for entry in (value if isinstance(value, list) else [value])]


def _read_keypoints(about: _About, content: dict[str, Any], where: str) -> None:
    """Fills in how many keypoints an object has, with how many numbers, their names and pairs."""
    shape: Any = content["kpt_shape"]
    flips, names = content.get("flip_idx"), content.get("kpt_names")
    whole = isinstance(shape, list) and [type(n) for n in shape] == [int, int]
    if not whole or shape[0] < 1 or shape[1] not in (2, 3):
        raise SourceError(f"{where}: `kpt_shape` is {shape!r}, not [number of keypoints, 2 or 3]. Fix it.")
    about.points = shape[0], shape[1]
    if flips is not None:
        every = list(range(shape[0]))
        if not isinstance(flips, list) or sorted(flips, key=str) != sorted(every, key=str):
            raise SourceError(
                f"{where}: `flip_idx` is {flips!r}, which does not say for each of {shape[0]} keypoints which one it "
                "becomes in a mirrored image. Fix it."
            )
        about.flip_pairs = () if flips == every else tuple(flips)
    names = next(iter(names.values()), None) if isinstance(names, dict) else names
    if isinstance(names, list) and len(names) == shape[0]:
        about.point_names = tuple(map(str, names))


def _read_yaml(tree: Tree, i: int) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"{tree.where(i)}: PyYAML reads this file, which names the classes, and is not installed. Install it with "
            f"`pip install pyyaml`."
        ) from error
    try:
        text = tree.read_text(i)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            # A few lines of aliases of aliases can stand for more than any memory holds.
            raise SourceError(f"{tree.where(i)}: has YAML aliases (*name), which are not read. Write them out.")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SourceError(f"{tree.where(i)}: is no YAML ({' '.join(str(error).split())[:120]}). Fix it.") from error
    return content if isinstance(content, dict) else {}
