"""Reads tables into cells: delimited text, JSON lines and Parquet. Text is decoded and split, not interpreted."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fastload.errors import MissingExtraError, SourceError

DELIMITED = (".csv", ".tsv", ".txt")
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"

_HEAD_ROWS = 50  # rows by which the delimiter is found
_UTF16_MARKS = b"\xff\xfe", b"\xfe\xff"  # little endian, big endian


@dataclass(frozen=True, eq=False)
class ParsedTable:
    """The R rows of one table, by column."""

    path: str  # of the file, for messages
    names: tuple[str, ...]  # of the C columns; empty for delimited text, whose header is found later
    columns: list[list[Any]]  # C lists of R cells: text of delimited text, else any JSON value
    lines: list[int]  # line on which each row begins, from 1; for Parquet the number of the row
    notes: tuple[str, ...] = ()  # sentences about anything unusual
    legacy: str = ""  # the encoding, if it is an 8-bit one, whose bytes may be those of file names


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
    if head:
        data = _whole_lines(data)
    text, legacy, notes = _decode(data, path)
    if path.lower().endswith(JSON_LINES):
        return _json_lines(text, path, legacy, notes)
    return _delimited(text, path, legacy, notes, head)


def _whole_lines(data: bytes) -> bytes:
    mark = data[:2]
    if mark not in _UTF16_MARKS:
        return data[: data.rfind(b"\n") + 1] or data
    at = data.rfind(b"\n\0" if mark == _UTF16_MARKS[0] else b"\0\n")
    return data[: at + 2] if at > 0 else data[: len(data) // 2 * 2]


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
    delimiter = hint[-1] if first else _delimiter(lines, path)
    stream.seek(len(lines[0]) if first else 0)
    reader = csv.reader(stream, delimiter=delimiter, strict=True, skipinitialspace=True)
    rows: list[list[str]] = []
    numbers: list[int] = []
    begin = first + 1  # the line on which the next row begins
    try:
        for row in reader:
            line, begin = begin, first + reader.line_num + 1
            if delimiter == " ":
                row = [cell for cell in row if cell]  # any number of spaces
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            if rows and len(row) != len(rows[0]):
                raise SourceError(
                    f"{path}, line {line}: {len(row)} cells, but the first row has {len(rows[0])} (separator "
                    f"{delimiter!r}). Fix the line; a cell that holds the separator must stand in quotes."
                )
            rows.append(row)
            numbers.append(line)
    except csv.Error as exc:
        if not (head and rows):  # else the end of data lies in a quoted cell
            raise SourceError(
                f"{path}, line {begin}: {exc}. Is a quote not closed, or within a quoted cell not doubled?"
            ) from exc
    if not rows:
        raise SourceError(f"{path} holds no rows. Fetch it again, or give the folder of images without it.")
    columns: list[list[Any]] = [[row[at] for row in rows] for at in range(len(rows[0]))]
    return ParsedTable(path, (), columns, numbers, tuple(notes), legacy)


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
            record = json.loads(line)
        except (ValueError, RecursionError) as exc:
            reason = "nested too deeply" if isinstance(exc, RecursionError) else exc
            raise SourceError(
                f"{path}, line {number}: is not JSON ({reason}). Each line must hold one object; fix or remove it."
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
    columns = [[record.get(name) for record in records.values()] for name in names]
    return ParsedTable(path, names, columns, list(records), tuple(notes), legacy)


def _parquet(data: bytes, path: str) -> ParsedTable:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise MissingExtraError(
            f"{path}: pyarrow reads it, and is not installed. Install it with `pip install pyarrow`."
        ) from exc
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
