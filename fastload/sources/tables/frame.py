"""A Frame, the columns of any table, becomes the columns of a listing: labels, targets, vectors, numbers, categories.

What a column means is decided here for CSV, JSON lines, Parquet, Arrow, named arrays and WebDataset alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.sources.assemble import Splits
from fastload.sources.listing import SPLITS, BoxForm, first_few, free_name
from fastload.sources.tables.read_table import Values, as_list
from fastload.system.advice import advice

IMAGES = tuple("image img x jpg jpeg png encoded pixel_values picture photo image_raw input".split())
"""Usual names of the column that holds images themselves, likeliest first."""

LABELS = (
    "label labels target targets class class_id classid class_idx class_index label_id category category_id classes "
    "class_name classname label_name diagnosis species breed tags finding_labels fine_label"
).split()
"""Usual names of the column of labels, likeliest first."""

_ABOUT_FILES = frozenset(
    "width height w h size filesize file_size bytes md5 sha1 sha256 hash url link author license licence date time "
    "timestamp source".split()
)
"""Names of columns about the image's file, which are no labels unless `--labels` says so."""

SPLIT_COLUMNS = (
    "split data_split dataset_split subset partition set phase fold is_valid is_val is_test is_train".split()
)
MASK_COLUMNS = (
    "mask mask_path mask_file mask_file_name mask_filename mask_name mask_id segmentation_path annotation"
).split()
MOST_SPLITS = 64  # most splits that a column names which is not called split

_MANY = 20  # rows from which on it is odd that none shares its label with another
_DECIMAL_COMMA = re.compile(r"-?\d+(,\d+)?")

MOST_TAGS = 1000  # most different tags in cells of several; more are run lengths or ids
_TAGS = {"|": re.compile(r"[^|]+(\|[^|]+)*"), ";": re.compile(r"[^;]+(;[^;]+)*"), " ": re.compile(r"\d+( \d+)*")}


class CellTable(Protocol):
    """Rows with named cells, as they are in files: where the first is, the columns, the file and number of a row in it
    (for messages), and the cells of a column as text, "" for empty ones.
    """

    @property
    def where(self) -> str: ...
    @property
    def names(self) -> Collection[str]: ...
    def location(self, row: int) -> str: ...
    def texts(self, name: str) -> list[str]: ...


@dataclass(frozen=True, eq=False)
class Frame:
    """The columns of a table, whatever it was read from, without image, mask and split columns."""

    columns: dict[str, Values]  # name -> values of R rows
    where: str  # the table, for messages
    splits: Splits  # of the N samples; if no row of a split has a label, the whole split has none (-1)
    labels: tuple[str, ...] = ()  # the columns that the user names as labels; (): found by their usual names
    location: Callable[[int], str] = "row {}".format  # returns the location of a row, for messages
    # int64 (R,), the sample of each row, if several rows are the boxes of one; None: each row is a sample
    sample: NDArray[np.int64] | None = None
    boxes: BoxForm = "auto"  # what the user says of boxes


def splits_by_column(table: CellTable, wanted: str, known: Sequence[str], notes: list[str]) -> tuple[list[str], str]:
    """Returns the split of each row by a column, and that column; [] and "" if there is none.

    `wanted` is the column that the user names; "": the first of the usual names in `known` that is there.

    Raises:
        SourceError: there is no such column; it is empty for some rows, or names too many splits.
    """
    if wanted and wanted not in table.names:
        raise SourceError(f"{table.where}: no column {wanted!r} for splits. There are {', '.join(table.names)}.")
    plain = {plain_name(column): column for column in table.names}
    for candidate in [plain_name(wanted)] if wanted else [name for name in known if name in plain]:
        column = wanted or plain[candidate]
        cells = table.texts(column)
        if candidate.startswith("is_"):  # true or false
            this, that = {"is_test": ("test", "train"), "is_train": ("train", "val")}.get(candidate, ("val", "train"))
            truth = dict.fromkeys(("1", "true", "1.0", "yes"), this) | dict.fromkeys(("0", "false", "0.0", "no"), that)
            said = [truth.get(cell.lower(), "") for cell in cells]
        else:
            said = [SPLITS.get(cell.lower(), "" if cell.lower() == "nan" else cell) for cell in cells]
        found = set(said) - {""}
        if not wanted and candidate in ("set", "partition", "phase", "fold", "subset") and len(found) > MOST_SPLITS:
            continue
        if len(found) > 255:
            raise SourceError(f"{table.where}: column {column!r} names {len(found)} splits; 255 can be.")
        if empty := [row for row, split in enumerate(said) if not split]:
            raise SourceError(
                f"{table.where}: rows without a split in column {column!r} ({len(empty)}): "
                f"{first_few([table.location(row) for row in empty[:6]])}. Fill them in, or name another column with "
                "`--split-column`."
            )
        notes.append(f"Splits by column {column!r}: {', '.join(sorted(found))}.")
        return said, column
    return [], ""


def columns_of(frame: Frame, notes: list[str]) -> tuple[dict[str, Column], dict[int, str]]:
    """Returns the columns of a listing, made of the columns of a frame whose rows are samples.

    Labels are the columns that the user names; else one with a usual name; else all columns, if there is only one or
    all hold only 0 and 1. Labels that are integers stay as they are, text becomes its index among the sorted classes,
    several columns of 0 and 1 become a vector, so do cells of several tags, and floats become `targets`. Every other
    column of numbers or of recurring text keeps its name.

    Returns:
        The columns; row -> reason, for rows without a label. Notes are appended.

    Raises:
        SourceError: a column that the user names does not exist, or cannot hold labels.
    """
    columns: dict[str, Column] = {}
    bad: dict[int, str] = {}
    ignored = {name: "empty" for name, values in frame.columns.items() if values.missing.all()}
    other = [name for name, values in frame.columns.items() if values.kind == "other"]
    ignored |= dict.fromkeys(other, "nested, or neither numbers nor text")
    for name in [name for name, values in frame.columns.items() if _are_objects(values)]:
        ignored[name] = "objects of JSON"
        notes.append(f"NOT READ: objects of JSON in column {name!r}, e.g. {frame.columns[name].texts()[0][:60]!r}.")
    usable = {name: values for name, values in frame.columns.items() if name not in ignored}
    labels = _label_columns(frame, usable, notes)
    if labels:
        columns, bad = _labels(frame, {name: usable[name] for name in labels}, notes)
    for name, values in usable.items():
        if name in labels:
            continue
        array, attrs = values.values, {"names": values.names} if values.names else {}
        if _is_free_text(values):
            ignored[name] = "text, mostly different in each row"
            continue
        if values.kind == "list" and array.ndim == 1:
            ignored[name] = "lists of different lengths"
            continue
        if values.kind == "int" and values.missing.any():
            array = np.where(values.missing, -1 if attrs else np.nan, array)
        if values.kind in ("int", "float") and array.dtype == np.float64:
            array = array.astype(np.float32)
        made = categories(values) if values.kind == "text" else Column(array, attrs if values.kind == "int" else {})
        if values.missing.any():
            gap = "NaN" if made.values.dtype.kind == "f" else "-1"
            notes.append(f"Column {name!r} lacks {int(values.missing.sum())} values: {gap} there.")
        columns[field_name(name, columns)] = made
    for name in ignored if not labels else ():
        if plain_name(name) in LABELS:
            notes.append(f"NOT READ: labels in column {name!r}, which is {ignored[name]}. Write one class a row.")
    if ignored:
        shown = first_few([f"{name} ({why})" for name, why in ignored.items()], 8)
        notes.append(f"Columns ignored: {shown}.")
    return columns, bad


def field_name(name: str, used: Mapping[str, Any]) -> str:
    """Returns the name of a column as a field of the packed file, different from those used."""
    return free_name(re.sub(r"[/\0]+", "_", name).strip(" .") or "column", used)


def plain_name(name: str) -> str:
    """Returns a column's name for comparison: `Image ID` and `image-id` become image_id."""
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())


def usual_names(names: Iterable[str], known: Iterable[str], plain: Callable[[str], str] = plain_name) -> list[str]:
    """Returns the names that are among the known ones once they are made plain, in the order of these.

    An underscore makes no difference: `LabelName` is label_name, too.
    """
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(plain(name).replace("_", ""), []).append(name)
    return list(dict.fromkeys(name for one in known for name in by_plain.get(one.replace("_", ""), ())))


def _are_objects(values: Values) -> bool:
    """Whether all cells are objects, as JSON writes them: the shapes of boxes, for example."""
    texts = values.values[~values.missing].tolist() if values.kind == "text" else []
    return bool(texts) and all(text[:1] == "{" and text[-1:] == "}" for text in texts)


def _is_free_text(values: Values) -> bool:
    """Whether text is captions, names or ids and not classes: there are more than half as many texts as rows."""
    texts = values.values.tolist() if values.kind == "text" else []
    return len(set(texts)) * 2 > len(texts) and (len(texts) >= 20 or max(map(len, texts)) > 40)


def _label_columns(frame: Frame, usable: dict[str, Values], notes: list[str]) -> list[str]:
    for name in frame.labels:
        if name not in frame.columns:
            others = f"There are {', '.join(frame.columns)}."
            there = others if frame.columns else "All columns have another meaning already."
            raise SourceError(f"{frame.where}: there is no column {name!r} for labels. {there}")
        if name not in usable or usable[name].values.ndim > 1:
            raise SourceError(f"{frame.where}: the column {name!r} can be no label: it is empty or nested.")
    if frame.labels:
        return list(frame.labels)
    if named := usual_names([name for name, values in usable.items() if values.values.ndim == 1], LABELS):
        # With `label` (numbers) and `class_name` (text), the first is the label, the other stays a column.
        return named[:1]
    classes = [name for name, values in usable.items() if values.names]
    if len(classes) == 1:
        return classes
    left = []
    for name, values in usable.items():
        # The index that pandas writes only numbers the rows.
        counts = plain_name(name) in ("unnamed:_0", "index", "idx", "id", "image_id", "row") and values.kind == "int"
        flat = bool(name) and values.values.ndim == 1 and plain_name(name) not in _ABOUT_FILES
        if flat and not _is_free_text(values) and not (counts and len(set(values.values.tolist())) == len(values)):
            left.append(name)
    if len(left) == 1 or (len(left) > 1 and all(usable[name].is_binary() for name in left)):
        return left
    if len(left) > 1 and frame.sample is None:
        notes.append(advice("labels", names=first_few(left)))
    return []


def _labels(frame: Frame, table: dict[str, Values], notes: list[str]) -> tuple[dict[str, Column], dict[int, str]]:
    names, shown = tuple(table), first_few(table)
    infinite = {name: np.isinf(values.values) for name, values in table.items() if values.kind == "float"}
    table |= {name: replace(table[name], missing=table[name].missing | rows) for name, rows in infinite.items()}
    bad: dict[int, str] = {}
    unlabelled = np.zeros(len(frame.splits.index), np.bool_)
    missing = np.logical_or.reduce([values.missing for values in table.values()])
    for i, name in enumerate(frame.splits.names):
        rows = frame.splits.index == i
        if rows.any() and all(values.missing[rows].all() for values in table.values()) and not missing.all():
            unlabelled |= rows
            notes.append(f"The split {name!r} has no labels: they are -1 there (NaN where they are floats).")
    for row in np.flatnonzero(missing & ~unlabelled).tolist():
        bad[row] = f"lacks its {next(name for name, values in table.items() if values.missing[row])}: empty or NaN"
    for name, rows in infinite.items():
        bad |= dict.fromkeys(np.flatnonzero(rows).tolist(), f"has an infinite {name}")
    labelled = np.flatnonzero(~missing)
    if len(names) > 1 and all(values.is_binary(labelled) for values in table.values()):
        bad |= dict.fromkeys(np.flatnonzero(unlabelled).tolist(), "has empty labels")
        vectors = np.stack([values.values == 1 for values in table.values()], axis=1).astype(np.uint8)
        notes.append(f"Labels are the columns {shown}: vectors of 0 and 1.")
        return {"labels": Column(vectors, {"names": names})}, bad
    if len(names) > 1 and all(values.kind == "float" for values in table.values()):
        notes.append(f"Targets are the columns {shown}.")
        stacked = np.stack([values.values for values in table.values()], axis=1).astype(np.float32)
        return {"targets": Column(stacked, {"names": names})}, bad
    columns: dict[str, Column] = {}
    for name, values in table.items():
        column, kind = _label(frame, name, values, notes)
        columns[kind if len(names) == 1 else field_name(name, columns)] = column
    if len(names) > 1:
        notes.append(f"They are of several kinds, and so stored as {', '.join(map(repr, columns))}; none is `labels`.")
    if len(names) == 1 and "labels" in columns and columns["labels"].values.ndim > 1:
        bad |= dict.fromkeys(np.flatnonzero(unlabelled).tolist(), "has empty labels")
    return columns, bad


def _label(frame: Frame, name: str, values: Values, notes: list[str]) -> tuple[Column, str]:
    """Returns a column of labels, and the name it gets: `labels` or `targets`."""
    given = ~values.missing
    if values.kind == "float":
        whole = values.values[given]
        # pandas writes integers as 1.0 where some are missing.
        is_whole = bool((np.isfinite(whole) & (whole == np.round(whole)) & (np.abs(whole) < 2**53)).all())
        if is_whole and (frame.labels or plain_name(name) in LABELS):
            labels = _signed_labels(np.where(given, values.values, -1).astype(np.int64), given, name, notes)
            notes.append(f"Labels are the column {name!r}, whole numbers written as floats.")
            return Column(labels), "labels"
        notes.append(f"Targets are the column {name!r}, of floats.")
        return Column(values.values.astype(np.float32)), "targets"
    values = _lists_of_text(values)
    mark = _tag_mark(values, name, frame.where)
    if values.kind == "list" and values.values.ndim > 1:
        if values.values.dtype.kind == "f":
            notes.append(f"Targets are the column {name!r}, of lists of floats.")
            return Column(values.values.astype(np.float32)), "targets"
        if not np.isin(values.values, (0, 1)).all():
            raise SourceError(
                f"{frame.where}: the cells of {name!r} are lists of numbers that recur within a cell, e.g. "
                f"{values.values[0].tolist()}: neither classes nor a vector of 0 and 1. Name another column with "
                "`--labels`, or give each number a column of its own."
            )
        notes.append(f"Labels are the column {name!r}: vectors of 0 and 1, as they are written.")
        return Column(values.values.astype(np.uint8)), "labels"
    if values.kind == "list" or mark:
        return _tags(values, mark, name, frame.where, notes), "labels"
    given_texts = values.values[given].tolist()
    if len(given_texts) >= _MANY and len(set(given_texts)) == len(given_texts):
        notes.append(advice("labels of their own", count=len(given_texts), name=name, first=given_texts[0]))
    if values.kind == "int":
        labels = np.where(given, values.values, -1)
        if not values.names:  # classes with names are numbered from 0, and -1 is none
            labels = _signed_labels(labels, given, name, notes)
        known = np.unique(labels[given])
        extent = "" if values.names else f", kept as they are: {known[0]} to {known[-1]}, {len(known)} different"
        notes.append(f"Labels are the column {name!r}{extent}.")
        return Column(labels, {"names": values.names} if values.names else {}), "labels"
    column = categories(values)
    notes.append(f"Labels are the column {name!r}: {first_few(column.attrs['names'])}.")
    marks = ",; " if plain_name(name) == "tags" else ",;"
    if several := [cell for cell in column.attrs["names"] if any(mark in cell for mark in marks)] or _phrases(
        column, name
    ):
        notes.append(f"CHECK: cells like {several[0]!r} are one class each; several classes are written `cat|dog`.")
    return column, "labels"


def _signed_labels(labels: NDArray[Any], given: NDArray[np.bool_], name: str, notes: list[str]) -> NDArray[Any]:
    """Returns whole numbers (R,), of which -1 and 1, if they are all, became 0 and 1; notes others below 0."""
    known = np.unique(labels[given])
    if known.tolist() == [-1, 1]:
        notes.append(f"Column {name!r}: its -1 and 1 became 0 and 1, since -1 says that an image has no label.")
        return np.where(given, (labels + 1) // 2, -1)
    if known.size and known[0] < 0:
        notes.append(f"CHECK: labels below 0 in column {name!r}: -1 says that an image has none, others cannot be.")
    return labels


def _phrases(column: Column, name: str) -> list[str]:
    """Returns the names of classes that are several words, of which one is a class itself, and others consist too.

    The latter is not asked for where the column's name says that there are several.
    """
    plural = plain_name(name).endswith(("s", "es"))
    classes = set(column.attrs["names"])
    counts = Counter(word for name in classes for word in set(name.split(" ")))
    phrases = [name.split(" ") for name in sorted(classes) if " " in name]
    sure = [words for words in phrases if plural or all(counts[word] > 1 for word in words)]
    return [" ".join(words) for words in sure if classes & set(words)]


def categories(values: Values) -> Column:
    """Returns text as the index into its sorted different values, -1 for missing ones."""
    given = values.values[~values.missing].tolist()
    classes = {cell: i for i, cell in enumerate(sorted(set(given)))}
    labels = np.full(len(values), -1, np.int64)
    labels[~values.missing] = [classes[cell] for cell in given]
    return Column(labels, {"names": tuple(classes)})


def _lists_of_text(values: Values) -> Values:
    """Returns cells of text that are all lists, as Python or JSON writes them, as the lists; else the values.

    Lists of one length in which a number recurs, as [0, 1, 0], are a numeric array (N, L).
    """
    if values.kind != "text" or not any(cell[:1] == "[" for cell in values.values.tolist()):
        return values
    lists = [as_list(cell) if cell else [] for cell in values.values.tolist()]
    if not all(isinstance(cell, list) and all(isinstance(one, (int, float, str)) for one in cell) for cell in lists):
        return values
    made = np.empty(len(lists), object)
    made[:] = lists
    alike = len({len(cell) for cell in lists}) == 1
    if alike and any(len(set(cell)) < len(cell) or any(isinstance(one, float) for one in cell) for cell in lists):
        made = np.array(lists)
    return Values("list", made, values.missing) if made.dtype.kind in "Oiuf" else values


def _tag_mark(values: Values, name: str, where: str) -> str:
    """Returns the character between the tags of cells of text that hold several; "" if they do not."""
    cells = {cell for cell in values.values.tolist() if cell} if values.kind == "text" else set[str]()
    marks = (mark for mark in _TAGS if any(mark in cell for cell in cells))
    if mark := next((mark for mark in marks if all(map(_TAGS[mark].fullmatch, cells))), ""):
        return mark
    if any("," in cell for cell in cells) and all(map(_DECIMAL_COMMA.fullmatch, cells)):
        example = min(cell for cell in cells if "," in cell)
        raise SourceError(
            f"{where}: the column {name!r} holds numbers with commas, e.g. {example}, which may "
            "be decimals or two classes. Write decimals with points, classes as `1|5`."
        )
    # Names of classes may hold commas: `tench, Tinca tinca`. Tags recur, so that there are fewer of them than cells.
    for mark in ", " if plain_name(name) in ("tags", "labels", "finding_labels") else ",":
        tags = {tag.strip() for cell in cells for tag in cell.split(mark)}
        if any(mark in cell for cell in cells) and len(tags) < len(cells):
            return mark
    return ""


def _tags(values: Values, mark: str, name: str, where: str, notes: list[str]) -> Column:
    """Returns cells of several tags ("0 3 7", "cat|dog", [0, 3]) as vectors of 0 and 1, uint8 (N, tags)."""
    cells: list[Any] = values.values.tolist()
    if mark:
        cells = [[tag.strip() for tag in text.split(mark) if tag.strip()] for text in cells]
        if mark in " ," and all(tag.isdecimal() for tags in cells for tag in tags):
            cells = [list(map(int, tags)) for tags in cells]
    try:
        tags = sorted({tag for cell in cells for tag in cell})
    except TypeError:
        tags = []
    if not tags or not all(isinstance(tag, (int, str)) for tag in tags) or len(tags) > MOST_TAGS:
        raise SourceError(
            f"{where}: the cells of {name!r} hold several values, {len(tags)} different ones, which are no labels that "
            "can be packed. Name another column with `--labels`."
        )
    index = {tag: i for i, tag in enumerate(tags)}
    vectors = np.zeros((len(cells), len(tags)), np.uint8)
    for row, cell in enumerate(cells):
        vectors[row, [index[tag] for tag in cell]] = 1
    named = all(isinstance(tag, int) and 0 <= tag < len(values.names) for tag in tags)
    shown = [values.names[tag] if named else str(tag) for tag in tags]
    notes.append(f"Labels are the column {name!r}, several tags a cell: vectors of 0 and 1 for {first_few(shown)}.")
    return Column(vectors, {"names": tuple(shown)})
