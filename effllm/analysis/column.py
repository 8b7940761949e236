"""Columns of the tables of runs, with their documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

TEXT, WHOLE, NUMBER, BOOL, TIME, JSON = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN", "TIMESTAMP", "JSON"
TEXTS, NUMBERS = "VARCHAR[]", "DOUBLE[]"
TEXT_BY_NAME, NUMBER_BY_NAME, WHOLE_BY_NAME = (f"MAP(VARCHAR, {one})" for one in (TEXT, NUMBER, WHOLE))


class Column(NamedTuple):
    """A column; the tables of docs/run-folder.md are made from these fields."""

    name: str  # with the unit, unless the values are texts, counts or ratios
    type: str  # of DuckDB
    unit: str
    meaning: str
    path: str = ""  # the field of a line, as "field" or "object.field"; "" is the field with the column's name
    default: str = ""  # value of a missing field; "" is null, or an empty map
    sql: str = ""  # an expression instead of a field


class LinesTable(NamedTuple):
    """A table of the lines of JSON Lines files."""

    name: str
    files: str  # glob of the names of the files in a run folder
    required: tuple[str, ...]  # columns without which a line is invalid
    columns: tuple[Column, ...]

    def fields(self) -> dict[str, str]:
        """Return the fields of a line that the columns need, with their types."""
        known: dict[str, str] = {}
        objects: dict[str, dict[str, str]] = {}
        for column in self.columns:
            group, dot, name = (column.path or column.name).partition(".")
            if dot and not column.sql:
                objects.setdefault(group, {})[name] = column.type
            elif not column.sql:
                known[group] = column.type
        return known | {group: f"STRUCT({_typed(names)})" for group, names in objects.items()}


def value(column: Column) -> str:
    """Return the SQL of a column's value in a line."""
    sql = column.sql or ".".join(map(quoted, (column.path or column.name).split(".", 1)))
    if column.type == NUMBER:  # an invalid file may contain NaN; null means not measured
        sql = f"CASE WHEN isfinite({sql}) THEN {sql} END"
    default = column.default or ("MAP {}" if column.type.startswith("MAP") else "")
    return f"coalesce({sql}, {default})" if default else sql


#: The first columns of each table of lines.
KEYS = (
    Column("folder", TEXT, "", "path of the run folder, as in the table `runs`", sql="folder"),
    Column("run_id", TEXT, "", "name of the run folder", sql="run_id"),
)


def quoted(name: str) -> str:
    """Return an identifier for SQL.

    >>> quoted("partition")
    '"partition"'
    """
    return '"' + name.replace('"', '""') + '"'


def declaration(columns: Iterable[Column]) -> str:
    """Return the columns of a table for ``CREATE TABLE``."""
    return _typed({one.name: one.type for one in columns})


def _typed(names: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in names.items())


def text(value: object) -> str:
    """Return a text for SQL.

    >>> text("Alice's runs")
    "'Alice''s runs'"
    """
    return "'" + str(value).replace("'", "''") + "'"


def file_to_read(path: object) -> str:
    """Return the path of a file as a text for SQL; DuckDB finds no glob in it."""
    return text("".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path)))


def read_json(file: str, fields: Mapping[str, str]) -> str:
    """Return a call of ``read_json`` for JSON Lines in a file, which is an SQL expression.

    An incomplete line is a row of nulls, and a value of a wrong type is null.
    """
    types = ", ".join(f"'{name}': '{kind}'" for name, kind in fields.items())
    return (
        f"read_json({file}, format='newline_delimited', ignore_errors=true, hive_partitioning=false, filename=true, "
        f"columns={{{types}}})"
    )
