"""Columns of the tables of runs, with their documentation: how a column is read from a line, and the tables.

The table `runs` has one row per run, from run.json and summary.json. The tables `windows`, `ranks` and `events` have
one row per line of the JSON Lines files of runs. A missing field of a line is its default, as in store/reader.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from effllm.metrics import METRICS
from effllm.records.rank import GAUGES

TEXT, WHOLE, NUMBER, BOOL, JSON = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN", "JSON"
NUMBER_BY_NAME = f"MAP({TEXT}, {NUMBER})"


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
        types: dict[str, str] = {}
        objects: dict[str, dict[str, str]] = {}
        for column in self.columns:
            group, dot, name = (column.path or column.name).partition(".")
            if dot and not column.sql:
                objects.setdefault(group, {})[name] = column.type
            elif not column.sql:
                types[group] = column.type
        return types | {group: f"STRUCT({_typed(names)})" for group, names in objects.items()}


def value_sql(column: Column) -> str:
    """Return the SQL of a column's value in a line."""
    sql = column.sql or ".".join(map(quoted, (column.path or column.name).split(".", 1)))
    if column.type == NUMBER:  # an invalid file may contain NaN; null means not measured
        sql = f"CASE WHEN isfinite({sql}) THEN {sql} END"
    default = column.default or ("MAP {}" if column.type.startswith("MAP") else "")
    return f"coalesce({sql}, {default})" if default else sql


def quoted(name: str) -> str:
    """Return an identifier for SQL.

    >>> quoted("partition")
    '"partition"'
    """
    return '"' + name.replace('"', '""') + '"'


def columns_sql(columns: Iterable[Column]) -> str:
    """Return the columns of a table for ``CREATE TABLE``."""
    return _typed({column.name: column.type for column in columns})


def _typed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())


def text_sql(value: object) -> str:
    """Return a text for SQL.

    >>> text_sql("Alice's runs")
    "'Alice''s runs'"
    """
    return "'" + str(value).replace("'", "''") + "'"


def path_sql(path: object) -> str:
    """Return the path of a file as a text for SQL; DuckDB finds no glob in it."""
    return text_sql("".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path)))


def read_json_sql(file: str, fields: Mapping[str, str]) -> str:
    """Return a call of ``read_json`` for JSON Lines in a file, which is an SQL expression.

    An incomplete line is a row of nulls, and a value of a wrong type is null.
    """
    types = ", ".join(f"'{name}': '{kind}'" for name, kind in fields.items())
    return (
        f"read_json({file}, format='newline_delimited', ignore_errors=true, hive_partitioning=false, filename=true, "
        f"columns={{{types}}})"
    )


_BASES = {"window": "this window", "run": "run to date", "job": "whole wall time"}


def metric_columns(*, in_windows: bool = False) -> dict[str, Column]:
    """Return the column of each metric of a summary or of a window, by tag.

    The name of a column is the tag with ``_`` for ``/``.
    """
    return {
        tag: Column(
            column_of(tag),
            NUMBER,
            entry.unit,
            f"{' '.join(entry.help.split())} Base: {_BASES[base]}{' so far' * (in_windows and base == 'job')}.",
            f"values.{tag}" if in_windows else "",
        )
        for entry in METRICS.values()
        if entry.in_windows or not in_windows
        for base in (entry.bases if in_windows else entry.summary_bases)
        for tag in [entry.tag(base)]
    }


def column_of(tag: str) -> str:
    """Return the name of a metric's column.

    >>> column_of("run_energy/joules_per_token")
    'run_energy_joules_per_token'
    """
    return tag.replace("/", "_")


_ROWS = {
    part: tuple(Column(name, *row) for name, row in rows.items())
    for part, rows in msgspec.toml.decode(
        Path(__file__).with_name("columns.toml").read_bytes(), type=dict[str, dict[str, list[str]]]
    ).items()
}
#: Columns with a value of run.json or summary.json, besides the metrics.
DOCUMENTED = _ROWS["runs"]
#: The first columns of each table of lines.
_KEYS = (
    Column("folder", TEXT, "", "path of the run folder, as in the table `runs`", sql="folder"),
    Column("run_id", TEXT, "", "name of the run folder", sql="run_id"),
)
_GAUGE_MEANS = (
    Column(f"{name}_mean", NUMBER, unit, f"mean: {meaning}", sql=f"gauges['{name}'].mean")
    for name, (unit, meaning) in GAUGES.items()
)
_WINDOWS = (*_KEYS, *_ROWS["windows"], *metric_columns(in_windows=True).values())
_RANKS = (*_KEYS, *_ROWS["ranks"], *_GAUGE_MEANS, *_ROWS["ranks_after_gauges"])
LINE_TABLES = {
    "windows": LinesTable("windows", "windows-*.jsonl", ("attempt", "window_number", "end_time_s"), _WINDOWS),
    "ranks": LinesTable("ranks", "ranks-*.jsonl", ("attempt", "rank", "window_number", "end_time_s"), _RANKS),
    "events": LinesTable("events", "events.jsonl", ("time_s", "kind"), (*_KEYS, *_ROWS["events"])),
}
#: The columns of all tables.
COLUMNS = {
    "runs": (*DOCUMENTED, *metric_columns().values(), *_ROWS["runs_after_metrics"]),
    **{name: table.columns for name, table in LINE_TABLES.items()},
}
