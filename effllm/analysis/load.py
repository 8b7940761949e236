"""``effllm.load``: runs as tables of DuckDB."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.analysis.column import COLUMNS
from effllm.analysis.database import Database, Progress, Tags
from effllm.analysis.run_folders import Paths, UnreadableRun, find_runs
from effllm.analysis.run_row import Document, Form, Unreadable, read_record
from effllm.records.identity import Identity
from effllm.records.job import Summary
from effllm.views.text.numbers import count_text

#: For an unknown table, DuckDB mostly suggests one of its internal tables.
_GUESS = re.compile(r" Did you mean \"(pg|duckdb|sqlite|information_schema)[^\"]*\"\?")
#: Number of rows that are fetched together.
_ROWS = 1000

__all__ = ["Run", "Runs", "UnreadableRun", "load", "load_errors"]


def load(path: Paths, *, tags: Tags = (), progress: Progress = lambda *_: None) -> Runs:
    """Read runs as tables: one run as a `Run`, or several runs as `Runs`.

    The tables are read at their first use and do not change afterwards: call this function again for a run that
    continues. Incomplete last lines and missing files are accepted; ``skipped`` names what was not read, also files of
    another version.

    Args:
        path: a run folder, a folder of runs, a glob of these, or a list of these.
        tags: only runs with all these tags: values by name, or a list of words and ``name=value``.
        progress: a function that is called with the number of run folders that were read, and of all that must be
            read: rows in the cache are not read again.

    Raises:
        UnreadableRun: a path has no run folder.
        ImportError: DuckDB is not installed.
    """
    runs = find_runs(path)
    is_one = False
    if isinstance(path, (str, os.PathLike)) and len(runs) == 1:
        real = Path(os.path.realpath(path))
        is_one = runs[0].folder in (real, real.parent)  # the path is the run folder or a file in it
    return (Run if is_one else Runs)(runs, tags, progress=progress)


def load_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors of `load` and of the tables; each message is meant for users."""
    try:
        import duckdb
    except ImportError:
        return UnreadableRun, ImportError, OSError
    return UnreadableRun, ImportError, OSError, duckdb.Error


class Runs(Database):
    """Several runs as tables; `load` makes it.

    Tables are relations of DuckDB: ``runs.windows.df()`` for pandas, ``.pl()`` for polars, ``.arrow()`` for Arrow.
    """

    def __len__(self) -> int:
        return len(self.folders)

    def __iter__(self) -> Iterator[Run]:
        """Yield each run."""
        for folder in self.folders:
            yield Run(find_runs(folder))

    def __repr__(self) -> str:
        skipped = f", {count_text(len(self.skipped), 'file')} skipped" if self.skipped else ""
        return f"<{type(self).__name__} of {count_text(len(self), 'run folder')}{skipped}>"

    @property
    def runs(self) -> Any:
        """The table `runs`: one row per run, with its identity, its result and its metrics."""
        return self.table("runs")

    @property
    def windows(self) -> Any:
        """The table `windows`: one row per window of a run, with its sums and its metrics."""
        return self.table("windows")

    @property
    def ranks(self) -> Any:
        """The table `ranks`: one row per rank and window, with the readings of the rank's first device."""
        return self.table("ranks")

    @property
    def events(self) -> Any:
        """The table `events`: one row per event."""
        return self.table("events")


class Run(Runs):
    """One run as tables, with its documents."""

    @property
    def folder(self) -> Path:
        """The run folder.

        Raises:
            UnreadableRun: no file of the run can be read.
        """
        if not self.folders:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in self.skipped)
            raise UnreadableRun(f"the run cannot be read: {reasons or 'it has not the wanted tags'}")
        return self.folders[0]

    @property
    def facts(self) -> Document:
        """The content of run.json; empty if there is no such file.

        Raises:
            UnreadableRun: the file cannot be read.
        """
        return self._record("run.json", Document) or {}

    @property
    def identity(self) -> Identity:
        """The identity of the run; unknown fields are ``None``.

        Raises:
            UnreadableRun: the file run.json cannot be read.
        """
        row = self.runs.select("run_id").fetchone()
        return msgspec.structs.replace(self._record("run.json", Identity) or Identity(), run_id=row[0])

    @property
    def summary(self) -> Summary | None:
        """The content of summary.json; ``None`` if there is no such file yet.

        Raises:
            UnreadableRun: the file cannot be read.
        """
        return self._record("summary.json", Summary)

    def _record(self, name: str, form: type[Form]) -> Form | None:
        try:
            return read_record(self.folder / name, form)
        except Unreadable as error:
            raise UnreadableRun(f"{self.folder / name} cannot be read: {error}") from error


class QueryError(ValueError):
    """A query is wrong or not allowed; the message is one line."""


class QueryResult(NamedTuple):
    """The result of a query."""

    columns: list[str]
    types: list[str]  # of DuckDB
    rows: Iterator[tuple[Any, ...]]


def run_query(runs: Runs, query: str) -> QueryResult:
    """Run one query that reads the tables of runs; afterwards the connection can neither read nor write a file."""
    import duckdb

    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise QueryError(_one_line_message(error)) from error
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
        raise QueryError(_one_line_message(error)) from error
    return QueryResult([column[0] for column in described], [str(column[1]) for column in described], _rows(relation))


def _rows(relation: Any) -> Iterator[tuple[Any, ...]]:
    import duckdb

    try:
        while rows := relation.fetchmany(_ROWS):
            yield from rows
    except duckdb.Error as error:
        raise QueryError(_one_line_message(error)) from error


def _one_line_message(error: Exception) -> str:
    """Return DuckDB's message in one line, with the tables if a table is unknown."""
    text = " ".join(str(error).split("LINE 1:")[0].split()).rstrip(": ")
    text = _GUESS.sub("", text)
    return f"{text} (tables: {', '.join(COLUMNS)})" if "Catalog Error" in text or "does not exist" in text else text
