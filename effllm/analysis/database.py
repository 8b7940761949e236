"""The tables of runs in a DuckDB database in memory; a table is read from the files of the runs at its first use."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.analysis.column import Column, Table, declaration, quoted, read_json, value
from effllm.analysis.line_tables import LINE_TABLES
from effllm.analysis.run_folders import FoundRun, files_of
from effllm.analysis.run_row import FILES, Document, Unreadable, read_document, run_row
from effllm.analysis.runs_table import run_columns

MAX_LINE_BYTES = 15 * 2**20  # DuckDB's own limit of a line is 16 MiB

Tags = Mapping[str, str] | Iterable[str]


class Skipped(NamedTuple):
    """A file that was not read, or not completely, and the reason."""

    path: Path
    reason: str


def columns_of(name: str) -> tuple[Column, ...]:
    """Return the columns of a table."""
    return LINE_TABLES[name].columns if name in LINE_TABLES else run_columns()


#: The names of all tables.
TABLES = ("runs", *LINE_TABLES)


def connect() -> Any:
    """Return a connection to a new database in memory, which loads no extension from the network.

    Raises:
        ImportError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError:
        raise ImportError("effllm.load needs DuckDB: pip install 'effllm[analysis]'") from None
    config = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "temp_directory": spill_folder(),
    }
    return duckdb.connect(":memory:", config=config)


@cache
def spill_folder() -> str:
    """Return a private folder for data that does not fit into memory; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="effllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Database:
    """The tables of some runs.

    Args:
        found: the run folders.
        tags: only runs with all these tags are read: values by name, or words and ``name=value``.
    """

    def __init__(self, found: Sequence[FoundRun], tags: Tags = ()) -> None:
        self.connection = connect()
        self.skipped: list[Skipped] = []
        self._unread = set(LINE_TABLES)
        for name in TABLES:
            self.connection.execute(f"CREATE TABLE {name} ({declaration(columns_of(name))})")
        self._insert_runs(found)
        self._select(tags)
        self.folders = [
            Path(folder) for (folder,) in self.connection.execute("SELECT folder FROM runs ORDER BY rowid").fetchall()
        ]

    def table(self, name: str) -> Any:
        """Return a table as a relation of DuckDB."""
        self.read(name)
        return self.connection.table(name)

    def sql(self, query: str) -> Any:
        """Return the result of a query as a relation of DuckDB; ``None`` for a statement without a result."""
        for name in TABLES:
            if re.search(rf"\b{name}\b", query, re.IGNORECASE):
                self.read(name)
        return self.connection.sql(query)

    def read(self, name: str) -> None:
        """Read a table, unless it was read before."""
        if name in self._unread:
            self._insert_lines(LINE_TABLES[name])
            self._unread.remove(name)

    def _insert_runs(self, found: Sequence[FoundRun]) -> None:
        # A file, because DuckDB reads a file eight times as fast as a parameter.
        columns = run_columns()
        with tempfile.NamedTemporaryFile(dir=spill_folder(), suffix=".jsonl") as file:
            for run in found:
                if line := self._line(run):
                    file.write(line)
            file.flush()
            names = ", ".join(quoted(one.name) for one in columns)
            read = read_json({one.name: one.type for one in columns})
            self.connection.execute(f"INSERT INTO runs SELECT {names} FROM {read}", [file.name])

    def _line(self, run: FoundRun) -> bytes:
        """Return the row of a run as a line; empty if no file can be read."""
        documents: list[Document] = []
        unread = 0
        for name in FILES:
            try:
                documents.append(read_document(run.folder / name))
            except FileNotFoundError:
                documents.append({})
            except Unreadable as error:
                documents.append({})
                unread += 1
                self.skipped.append(Skipped(run.folder / name, str(error)))
        if unread and not any(documents):
            return b""
        line = msgspec.json.encode(run_row(run.folder, *documents)) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            return line
        self.skipped.append(Skipped(run.folder, f"its documents have more than {MAX_LINE_BYTES >> 20} MiB"))
        return b""

    def _select(self, tags: Tags) -> None:
        for tag in tags.items() if isinstance(tags, Mapping) else map(_name_and_value, tags):
            self.connection.execute("DELETE FROM runs WHERE (tags[$1] = $2) IS NOT true", list(tag))

    def _insert_lines(self, table: Table) -> None:
        files = {}
        for folder in self.folders:
            for path, problem in files_of(folder, table.files):
                if problem:
                    self.skipped.append(Skipped(path, problem))
                else:
                    files[str(path)] = str(folder)
        if not files:
            return
        values = ", ".join(f"{value(one)} AS {quoted(one.name)}" for one in table.columns)
        execute = self.connection.execute
        execute("CREATE OR REPLACE TEMP TABLE files AS SELECT unnest($1) AS filename, unnest($2) AS folder",
                [list(files), list(files.values())])  # fmt: skip
        execute(
            f"INSERT INTO {table.name} SELECT {values} FROM {read_json(table.fields())} "
            "JOIN (SELECT filename, folder, run_id FROM files JOIN runs USING (folder)) USING (filename)",
            [[_literal(path) for path in files]],
        )
        invalid = " OR ".join(f"{quoted(name)} IS NULL" for name in table.required)
        counts = execute(
            f"SELECT folder, count(*) FROM {table.name} WHERE {invalid} GROUP BY ALL ORDER BY 1"
        ).fetchall()
        for folder, count in counts:
            self.skipped.append(Skipped(Path(folder, table.files), f"{count} incomplete or invalid lines"))
        if counts:
            execute(f"DELETE FROM {table.name} WHERE {invalid}")


def _literal(path: str) -> str:
    """Return a path in which DuckDB's characters of globs are escaped."""
    return re.sub(r"[\[*?]", r"[\g<0>]", path)


def _name_and_value(tag: str) -> tuple[str, str]:
    name, _, value = tag.partition("=")
    return name, value
