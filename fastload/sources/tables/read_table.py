"""Reads tables (delimited text, JSON lines, Parquet) into cells, and the cells of a column into values of one type."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
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
