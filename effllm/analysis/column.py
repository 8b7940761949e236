"""One column of a table of runs, with its documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Version of the columns of all tables; it is incremented when a column is removed or changes its meaning.
TABLES_VERSION = 1


class Column(NamedTuple):
    """A column; docs/run-folder.md is made from these fields."""

    name: str  # with the unit, unless the values are texts, counts or ratios
    type: str  # of DuckDB
    unit: str
    meaning: str
    sql: str = ""  # the value, as an expression over a line of the file; "" means the field with the column's name


def fields(columns: Iterable[Column]) -> str:
    """Return the columns for the argument ``columns`` of DuckDB's ``read_json``."""
    return "{" + ", ".join(f"'{one.name}': '{one.type}'" for one in columns) + "}"


def declaration(columns: Iterable[Column]) -> str:
    """Return the columns of a table for ``CREATE TABLE``."""
    return ", ".join(f'"{one.name}" {one.type}' for one in columns)
