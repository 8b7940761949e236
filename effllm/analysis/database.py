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

from effllm.analysis.column import TEXT, Column, LinesTable, declaration, quoted, read_json
from effllm.analysis.line_rows import LineFile, insert_lines
from effllm.analysis.line_tables import LINE_TABLES
from effllm.analysis.run_cache import RunCache
from effllm.analysis.run_folders import FoundRun, files_of
from effllm.analysis.run_row import FILES, Document, Unreadable, read_document, run_row
from effllm.analysis.runs_table import run_columns

#: Settings of DuckDB: no extension is loaded from the network.
SETTINGS = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
}
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
    return duckdb.connect(":memory:", config={**SETTINGS, "temp_directory": spill_folder()})


def database_errors() -> tuple[type[Exception], ...]:
    """Return DuckDB's class of errors, if DuckDB is installed."""
    try:
        import duckdb
    except ImportError:
        return ()
    return (duckdb.Error,)


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
        self.read_tables_of(query)
        return self.connection.sql(query)

    def read_tables_of(self, query: str) -> None:
        """Read the tables whose names are words of a query."""
        for name in TABLES:
            if re.search(rf"\b{name}\b", query, re.IGNORECASE):
                self.read(name)

    def read(self, name: str) -> None:
        """Read a table, unless it was read before."""
        if name in self._unread:
            self._insert_lines(LINE_TABLES[name])
            self._unread.remove(name)

    def _insert_runs(self, found: Sequence[FoundRun]) -> None:
        execute = self.connection.execute
        execute(
            "CREATE TEMP TABLE wanted AS SELECT unnest($1::VARCHAR[]) AS folder, unnest($2::VARCHAR[]) AS state, "
            "generate_subscripts($1::VARCHAR[], 1) AS position",
            [[str(run.folder) for run in found], [run.state for run in found]],
        )
        cache = RunCache(self.connection, found)
        known = cache.read()
        types = {"state": TEXT, **{one.name: one.type for one in run_columns()}}
        names = ", ".join(map(quoted, types))
        # A file, because DuckDB reads a file eight times as fast as a parameter.
        with tempfile.NamedTemporaryFile(dir=spill_folder(), suffix=".jsonl") as file:
            for run in found:
                if str(run.folder) not in known and (line := self._line(run)):
                    file.write(line)
            file.flush()
            execute(f"CREATE TEMP TABLE fresh AS SELECT {names} FROM {read_json(types)}", [file.name])
        execute(
            "INSERT INTO runs SELECT * EXCLUDE (state, position) FROM (FROM cached UNION ALL FROM fresh) "
            "JOIN (SELECT folder, position FROM wanted) USING (folder) ORDER BY position"
        )
        cache.write()
        execute("DROP TABLE cached; DROP TABLE fresh; DROP TABLE wanted")

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
        state = "" if unread else run.state  # an unreadable file is reported each time
        line = msgspec.json.encode({"state": state, **run_row(run.folder, *documents)}) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            return line
        self.skipped.append(Skipped(run.folder, f"its documents have more than {MAX_LINE_BYTES >> 20} MiB"))
        return b""

    def _select(self, tags: Tags) -> None:
        for tag in tags.items() if isinstance(tags, Mapping) else map(_name_and_value, tags):
            self.connection.execute("DELETE FROM runs WHERE (tags[$1] = $2) IS NOT true", list(tag))

    def _insert_lines(self, table: LinesTable) -> None:
        files: list[LineFile] = []
        for folder, run_id in self.connection.execute("SELECT folder, run_id FROM runs ORDER BY rowid").fetchall():
            for path, problem in files_of(Path(folder), table.files):
                if problem:
                    self.skipped.append(Skipped(path, problem))
                else:
                    files.append(LineFile(folder, run_id, path))
        for path, count in insert_lines(self.connection, table, files, spill_folder()):
            self.skipped.append(Skipped(path, f"{count} incomplete or invalid line{'s' * (count > 1)}"))


def _name_and_value(tag: str) -> tuple[str, str]:
    name, _, value = tag.partition("=")
    return name, value
