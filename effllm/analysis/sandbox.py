"""Queries that can only read the tables of the loaded runs: no other file, no network, no change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from effllm.analysis.database import TABLES
from effllm.analysis.load import Runs

#: DuckDB's guess of a name is mostly a table of its own.
_GUESS = re.compile(r" Did you mean \"(pg|duckdb|sqlite|information_schema)[^\"]*\"\?")
#: Number of rows that are fetched together.
_ROWS = 1000


class QueryError(ValueError):
    """A query is wrong or not allowed; the message is one line."""


class Answer(NamedTuple):
    """The result of a query."""

    columns: list[str]
    types: list[str]  # of DuckDB
    rows: Iterator[tuple[Any, ...]]


def answer(runs: Runs, query: str) -> Answer:
    """Run one query that reads the tables of runs; afterwards the connection can neither read nor write a file.

    Raises:
        QueryError: the query is wrong, changes something, or reads something else.
    """
    import duckdb

    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise QueryError(_line(error)) from error
    if len(statements) != 1 or statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise QueryError("only one query that reads is allowed: SELECT, DESCRIBE, SUMMARIZE, SHOW TABLES or EXPLAIN")
    runs.read_tables_of(query)
    connection = runs.connection
    # Python objects are no tables, no file or extension can be opened, and no later setting can change this.
    connection.execute("SET python_enable_replacements = false; SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    try:
        relation = connection.execute(query)
        described = relation.description
    except duckdb.Error as error:
        raise QueryError(_line(error)) from error
    return Answer([one[0] for one in described], [str(one[1]) for one in described], _rows(relation))


def _rows(relation: Any) -> Iterator[tuple[Any, ...]]:
    import duckdb

    try:
        while rows := relation.fetchmany(_ROWS):
            yield from rows
    except duckdb.Error as error:
        raise QueryError(_line(error)) from error


def _line(error: Exception) -> str:
    """Return DuckDB's message in one line, with the tables if a table is unknown."""
    text = " ".join(str(error).split("LINE 1:")[0].split()).rstrip(": ")
    text = _GUESS.sub("", text)
    return f"{text} (tables: {', '.join(TABLES)})" if "Catalog Error" in text or "does not exist" in text else text
