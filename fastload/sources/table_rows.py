"""The rows of several tables as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.sources.table_files import Table, text_cells
from fastload.sources.tree import key_of


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of all tables behind one another.

    Attributes:
        tables: where they come from.
        table: int64 (R,), the table of each row.
        images: what each row calls its image.
        cells: the other columns, each with R cells.
        lines: the line that each row begins on.
    """

    tables: list[Table]
    table: NDArray[np.int64]
    images: list[str]
    cells: dict[str, list[Any]]
    lines: list[int]

    def place(self, row: int) -> str:
        """Where a row stands, for messages."""
        table = self.tables[int(self.table[row])]
        return f"line {self.lines[row]} of {key_of(table.name)}"


def join_rows(tables: list[Table]) -> TableRows:
    """The rows of several tables; a column that one of them lacks is empty there."""
    names = dict.fromkeys(name for table in tables for name in table.rows.names if name != table.image)
    cells: dict[str, list[Any]] = {name: [] for name in names}
    image: list[str] = []
    for table in tables:
        count = len(table.rows.lines)
        columns = dict(zip(table.rows.names, table.rows.columns, strict=True))
        image += text_cells(columns.pop(table.image))
        for name in names:
            cells[name] += columns.get(name) or [None] * count
    return TableRows(
        tables=tables,
        table=np.repeat(np.arange(len(tables)), [len(table.rows.lines) for table in tables]),
        images=image,
        cells=cells,
        lines=[line for table in tables for line in table.rows.lines],
    )
