"""Tables: files become cells, the cells of a column values of one type, and columns the columns of a listing.

Tables are delimited text, JSON lines or Parquet. A Frame, the columns of any table, becomes labels, targets, vectors,
numbers and categories: a column's meaning is decided here for CSV, JSON lines, Parquet, Arrow, named arrays and
WebDataset alike.
"""

from __future__ import annotations

import ast
import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.format.ragged import Column
from fastload.options.pack import BoxForm
from fastload.sources.assemble import Splits
from fastload.sources.listing import SPLITS, first_few, free_name
from fastload.system.advice import advice
from fastload.system.text import read_json

DELIMITED = (".csv", ".tsv", ".txt")
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"

_MANY_CELLS = 10**7
_HEAD_ROWS = 50  # rows by which the delimiter is found
_UTF16_MARKS = b"\xff\xfe", b"\xfe\xff"  # little endian, big endian

ESCAPED = "escaped_by_apostrophe"
"""A column that says: an apostrophe was put before each cell and title that a spreadsheet would run as a formula."""

# What a spreadsheet takes for a formula, also behind spaces, and in the wide forms of East Asian keyboards.
_FORMULA = re.compile(r"[\s']*[=+\-@\uff1d\uff0b\uff0d\uff20]|[ ']*[\t\r\n]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)

Kind = Literal["int", "float", "text", "list", "other"]

_EMPTY = {"", "nan"}  # in any column; "none" and "NA" may well be classes
_NO_NUMBER = _EMPTY | {"na", "n/a", "null", "none", "-"}  # in a column that is otherwise numbers


@dataclass(frozen=True, eq=False)
class ParsedTable:
    """The R rows of one table, by column."""

    path: str  # of the file, for messages
    names: tuple[str, ...]  # of the C columns; empty for delimited text, whose header is found later
    columns: list[list[Any]]  # C lists of R cells: text of delimited text, else any JSON value
    lines: list[int]  # line on which each row begins, from 1; for Parquet the number of the row
    notes: tuple[str, ...] = ()  # sentences about anything unusual
    legacy: str = ""  # the encoding, if it is an 8-bit one, in which file names may be written


def read_rows(data: bytes, path: str, *, head: bool = False) -> ParsedTable:
    """Returns the rows of a table: JSON lines, Parquet or delimited text by its suffix.

    With `head`, data is only the beginning of the file; its last, incomplete line is left out.

    Raises:
        SourceError: a row has another number of cells than the first, a quote is never closed, a line of JSON is
            broken, the content is binary; the message names the line.
        MissingExtraError: the table is Parquet, and pyarrow is not installed.
    """
    if path.lower().endswith(PARQUET):
        return _parquet(data, path)
    if head and data[:2] in _UTF16_MARKS:
        at = data.rfind(b"\n\0" if data[:2] == _UTF16_MARKS[0] else b"\0\n")
        data = data[: at + 2] if at > 0 else data[: len(data) // 2 * 2]
    elif head:
        data = data[: data.rfind(b"\n") + 1] or data
    text, legacy, notes = _decode(data, path)
    if path.lower().endswith(JSON_LINES):
        return _json_lines(text, path, legacy, notes)
    return _delimited(text, path, legacy, notes, head)


def escape_formula(cell: str) -> str:
    """Returns a cell with an apostrophe before it if a spreadsheet would run it; numbers stay as they are."""
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def without_escapes(table: ParsedTable) -> ParsedTable:
    """Returns a table, whose names are known, as it was before `escape_formula`; unchanged if it has no `ESCAPED`."""
    if ESCAPED not in table.names:
        return table

    def plain(cell: str) -> str:
        return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell

    kept = [(name, cells) for name, cells in zip(table.names, table.columns, strict=True) if name != ESCAPED]
    names, columns = tuple(plain(name) for name, _ in kept), [list(map(plain, cells)) for _, cells in kept]
    return replace(table, names=names, columns=columns)


def _decode(data: bytes, path: str) -> tuple[str, str, list[str]]:
    """Returns the text; its encoding, if that is an 8-bit one, else ""; and notes about it."""
    if data[:2] in _UTF16_MARKS:
        try:
            return data.decode("utf-16"), "", [f"{path} is UTF-16."]
        except UnicodeDecodeError as exc:
            raise SourceError(f"{path} is damaged: no valid UTF-16 ({exc.reason}). Save it as UTF-8.") from exc
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise SourceError(
            f"{path}, line {line}: holds a zero byte, so it is no table of text, or UTF-16 without its mark. "
            "Save it as UTF-8."
        )
    try:
        return data.decode("utf-8-sig"), "", []
    except UnicodeDecodeError as exc:
        start = exc.start
    try:
        text, legacy = data.decode("cp1252"), "cp1252"
    except UnicodeDecodeError:
        text, legacy = data.decode("latin-1"), "latin-1"
    line = data.count(b"\n", 0, start) + 1
    word = text[max(0, start - 12) : start + 12].replace("\r", " ").replace("\n", " ")
    note = f"{path} is not UTF-8 (line {line}): read as {legacy}, e.g. {word!r}. If wrong, save as UTF-8."
    return text, legacy, [note]


def _delimited(text: str, path: str, legacy: str, notes: list[str], head: bool) -> ParsedTable:
    stream = io.StringIO(text, newline="")  # LF, CRLF or CR, and kept as they are within quotes
    lines = list(itertools.islice(stream, _HEAD_ROWS))
    hint = lines[0].strip() if lines else ""
    first = int(hint.lower().startswith("sep=") and len(hint) == 5)  # Excel's line that names the separator
    quote = "'" if hint[:1] == hint[-1:] == "'" else '"'
    delimiter = hint[-1] if first else _delimiter(lines, path)
    stream.seek(len(lines[0]) if first else 0)
    reader = csv.reader(stream, delimiter=delimiter, quotechar=quote, strict=True, skipinitialspace=True)
    width = 0
    cells: list[Any] = []  # of all rows
    numbers: list[int] = []
    begin = first + 1  # the line on which the next row begins
    try:
        for row in reader:
            line, begin = begin, first + reader.line_num + 1
            if delimiter == " ":
                row = [cell for cell in row if cell]  # any number of spaces
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            width = width or len(row)
            if len(row) != width:
                raise SourceError(
                    f"{path}, line {line}: {len(row)} cells, but the first row has {width} (separator "
                    f"{delimiter!r}). Fix the line; a cell that holds the separator must stand in quotes."
                )
            cells += row
            numbers.append(line)
    except csv.Error as exc:
        if not (head and cells):  # else the end of data lies in a quoted cell
            why = f"{exc}. Is a quote not closed, or within a quoted cell not doubled?"
            raise SourceError(f"{path}, line {begin}: {why}") from exc
    if not cells:
        raise SourceError(f"{path} holds no rows. Fetch it again, or give the folder of images without it.")
    return ParsedTable(path, (), [cells[at::width] for at in range(width)], numbers, tuple(notes), legacy)


def _delimiter(lines: list[str], path: str) -> str:
    """Returns the separator that splits most of the first rows into equally many cells, more than one; else a comma."""
    best, best_share = ",", 0.0
    candidates = "\t;,|" if not path.lower().endswith(".tsv") else "\t,;|"
    for delimiter in candidates + (" " if path.lower().endswith(".txt") else ""):
        try:
            # Not strict: the last line may end within a quoted cell.
            rows = [row for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row]
        except csv.Error:
            continue
        widths = Counter(len([cell for cell in row if cell]) if delimiter == " " else len(row) for row in rows)
        if not widths:
            continue
        width, count = widths.most_common(1)[0]
        if width > 1 and count / len(rows) > best_share:
            best, best_share = delimiter, count / len(rows)
    return best


def _json_lines(text: str, path: str, legacy: str, notes: list[str]) -> ParsedTable:
    records: dict[int, dict[str, Any]] = {}  # by the number of the line
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = read_json(line)
        except ValueError as exc:
            raise SourceError(
                f"{path}, line {number}: is not JSON ({exc}). Each line must hold one object; fix or remove it."
            ) from exc
        if not isinstance(record, dict):
            raise SourceError(
                f"{path}, line {number}: holds {type(record).__name__}, expected an object with named values. "
                "Fix or remove it."
            )
        records[number] = record
    if not records:
        raise SourceError(f"{path} holds no rows. Fetch it again, or give the folder of images without it.")
    names = tuple(dict.fromkeys(name for record in records.values() for name in record))
    if mostly_empty(len(names) * len(records), sum(map(len, records.values()))):
        raise SourceError(
            f"{path}: its {len(records)} lines have {len(names)} different names, almost none on more than a few "
            "lines, so it is no table. Give each line the same names."
        )
    columns = [[record.get(name) for record in records.values()] for name in names]
    return ParsedTable(path, names, columns, list(records), tuple(notes), legacy)


def mostly_empty(cells: int, given: int) -> bool:
    """Whether a table of so many cells would take far more memory than the cells that have a value."""
    return cells > _MANY_CELLS and cells > 1000 * given


def require_pyarrow(path: str | Path) -> None:
    """Raises MissingExtraError if pyarrow is not installed, which reads the file at path."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError(f"{path}: pyarrow reads this, and is not installed: `pip install pyarrow`.") from exc


def _parquet(data: bytes, path: str) -> ParsedTable:
    require_pyarrow(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
        columns = [column.to_pylist() for column in table.columns]
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise SourceError(f"{path} cannot be read: {str(exc).splitlines()[0]}. Fetch it again.") from exc
    names = tuple(table.column_names)
    if not table.num_rows or len(set(names)) < len(names):
        why = "has two columns of one name" if table.num_rows else "holds no rows"
        raise SourceError(f"{path} {why}. Fetch it again, or give the folder of images without it.")
    return ParsedTable(path, names, columns, list(range(1, table.num_rows + 1)))


@dataclass(frozen=True, eq=False)
class Values:
    """One column of R cells."""

    kind: Kind  # of all cells that are not missing; "other" for what a packed file cannot hold (nested objects, dates)
    # (R,) of int64, float64, str objects or list objects; lists of numbers of one length are (R, ...) of any numeric
    # dtype. Missing cells are 0, NaN, "" or [].
    values: NDArray[Any]
    missing: NDArray[np.bool_]  # (R,), True for cells without a value
    names: tuple[str, ...] = ()  # of the classes that integers stand for, if the table itself has them

    def __len__(self) -> int:
        return len(self.missing)

    def texts(self) -> list[str]:
        """Returns every cell as text; "" for missing ones."""
        return ["" if gone else str(value) for value, gone in zip(self.values.tolist(), self.missing, strict=True)]

    def is_binary(self, rows: NDArray[np.int64] | slice = slice(None)) -> bool:
        """Whether no cell (of some rows) is missing and all are 0 or 1, or all are -1 or 1."""
        values = self.values[rows]
        if self.kind != "int" or values.ndim > 1 or bool(self.missing[rows].any()) or self.names:
            return False
        return bool(np.isin(values, (-1 if values.min(initial=0) < 0 else 0, 1)).all())


def values_of(cells: Sequence[Any]) -> Values:
    """Returns the values of a column of JSON values, or of text as in CSV. None is missing.

    Text becomes numbers if all cells can be read as such; "1_000", which Python would read, stays text.
    """
    every = set(map(type, cells))
    kinds = every - {type(None)}
    if kinds == {str}:
        if every == kinds:
            with suppress(ValueError, OverflowError):
                found = np.array(list(map(int, cells)), np.int64)
                if not any("_" in cell for cell in cells):
                    return Values("int", found, np.zeros(len(cells), np.bool_))
        return _numbers_or_text(cells)
    if kinds <= {bool, int}:
        return _integers(cells)
    if kinds <= {bool, int, float}:
        numbers = np.array([math.nan if cell is None else _as_float(cell) for cell in cells], np.float64)
        return Values("float", numbers, np.isnan(numbers))
    if kinds == {list}:
        return _lists(cells)
    if kinds & {list, dict}:
        return other(len(cells))
    return _numbers_or_text([None if cell is None else str(cell) for cell in cells])


def as_list(cell: Any) -> Any:
    """Returns a cell of text that is a list, as Python or JSON writes it, as the list; any other as it is."""
    if isinstance(cell, str) and cell[:1] == "[" and cell[-1:] == "]":
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(cell)
    return cell


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the largest float
        return math.inf if value > 0 else -math.inf


def other(rows: int) -> Values:
    """Returns the values of a column that cannot be packed."""
    return Values("other", np.zeros(rows, np.int64), np.zeros(rows, np.bool_))


def nothing(rows: int) -> Values:
    """Returns the values of a column whose cells are all missing."""
    return Values("int", np.zeros(rows, np.int64), np.ones(rows, np.bool_))


def _integers(cells: Sequence[Any]) -> Values:
    missing = np.fromiter((cell is None for cell in cells), np.bool_, len(cells))
    try:
        return Values("int", np.array([0 if cell is None else int(cell) for cell in cells], np.int64), missing)
    except OverflowError:  # integers beyond 64 bits are ids
        return _text(["" if cell is None else str(cell) for cell in cells], missing)


def _numbers_or_text(cells: Sequence[str | None]) -> Values:
    plain = ["" if cell is None else cell.strip() for cell in cells]
    low = [cell.lower() for cell in plain]
    empty = np.fromiter((cell in _EMPTY for cell in low), np.bool_, len(cells))
    if empty.all():
        return nothing(len(cells))
    if set(low) <= {"true", "false"}:
        return _integers([cell == "true" for cell in low])
    missing = np.fromiter((cell in _NO_NUMBER for cell in low), np.bool_, len(cells))
    given = [cell for cell, gone in zip(plain, missing.tolist(), strict=True) if not gone]
    if not given or any("_" in cell for cell in given):
        return _text(plain, empty)
    for cast, dtype, fill in ((int, np.int64, 0), (float, np.float64, math.nan)):
        values = np.full(len(cells), fill, dtype)
        try:
            values[~missing] = list(map(cast, given))
        except (ValueError, OverflowError):
            continue
        return Values("int" if cast is int else "float", values, missing)
    return _text(plain, empty)


def _text(cells: list[str], missing: NDArray[np.bool_]) -> Values:
    values = np.empty(len(cells), object)
    values[:] = cells
    values[missing] = ""
    return Values("text", values, missing)


def _lists(cells: Sequence[Any]) -> Values:
    missing = np.fromiter((cell is None for cell in cells), np.bool_, len(cells))
    with suppress(ValueError, OverflowError):  # of different lengths, or with None among them
        array = np.array(cells)
        if array.ndim > 1 and array.size and array.dtype.kind in "iufb":
            return Values("list", array.astype(np.uint8) if array.dtype.kind == "b" else array, missing)
    values = np.empty(len(cells), object)
    for i, cell in enumerate(cells):
        values[i] = [] if cell is None else cell
    return Values("list", values, missing)


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow is one of lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def fixed_lists(column: Any) -> NDArray[Any] | None:
    """Returns lists as a numeric array (N, L, ...) if all lists of a level have one length; else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shape = [len(column)]
    while is_list(column.type):
        lengths = set(pc.unique(pc.list_value_length(column)).to_pylist())
        if column.null_count or len(lengths) != 1 or not (length := lengths.pop()):
            return None
        shape.append(length)
        column = pc.list_flatten(column)
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    if column.null_count or not any(fits(column.type) for fits in kinds):
        return None
    numbers = column.to_numpy()
    return np.asarray(numbers.astype(np.uint8) if numbers.dtype == np.bool_ else numbers).reshape(shape)


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
        fix = f"{example}, which may be decimals or two classes. Write decimals with points, classes as `1|5`."
        raise SourceError(f"{where}: the column {name!r} holds numbers with commas, e.g. {fix}")
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
