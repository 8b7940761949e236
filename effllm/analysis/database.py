"""The tables of runs in a DuckDB database in memory; a table is read from the files of the runs at its first use."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.analysis.column import (
    COLUMNS,
    LINE_TABLES,
    TEXT,
    WHOLE,
    Column,
    LinesTable,
    columns_sql,
    path_sql,
    quoted,
    read_json_sql,
    text_sql,
    value_sql,
)
from effllm.analysis.run_folders import FILES, FoundRun, files_of
from effllm.analysis.run_row import Document, Unreadable, read_document, run_row
from effllm.config.settings import cache_folder
from effllm.records.job import SCHEMA_VERSION
from effllm.store import own_files
from effllm.store.regular_file import MAX_LINE_BYTES, lines_of
from effllm.views.text.numbers import count_text

#: Fewer runs are read as fast without a cache.
MIN_RUNS = 50
#: The file is replaced if more rows are new; so the reader of some running jobs does not write it each time.
MAX_NEW_ROWS, MAX_NEW_SHARE = 20, 0.02
#: Maximum number of files; the oldest file is removed.
MAX_FILES = 32
#: Files of lines are copied into files of about this size, because DuckDB needs 1 to 5 ms for each file.
MAX_COPY_BYTES = 256 * 2**20
#: Settings of DuckDB: no extension is loaded from the network.
SETTINGS = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
}

Tags = Mapping[str, str] | Iterable[str]
Progress = Callable[[int, int], None]  # number of run folders that were read, and of all that must be read


class Skipped(NamedTuple):
    """A file that was not read, or not completely, and the reason."""

    path: Path
    reason: str


def connect() -> Any:
    """Return a connection to a new database in memory, which loads no extension from the network."""
    try:
        import duckdb
    except ImportError:
        raise ImportError("effllm.load needs DuckDB: pip install 'effllm[analysis]'") from None
    return duckdb.connect(":memory:", config={**SETTINGS, "temp_directory": spill_folder()})


@cache
def spill_folder() -> str:
    """Return a private folder for data that does not fit into memory; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="effllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _temporary_file(lines: Iterable[bytes]) -> Iterator[str]:
    """Give the path of a temporary file of lines, as a text for SQL."""
    # A file, because DuckDB reads a file eight times as fast as a parameter. DuckDB imports pandas for the first
    # parameter of a query, so the path is a text.
    try:
        with tempfile.NamedTemporaryFile(dir=spill_folder(), suffix=".jsonl") as file:
            file.writelines(lines)
            file.flush()
            yield path_sql(file.name)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        # The error of a write to a full disk names no file.
        raise OSError(error.errno, f"{error.strerror} (TMPDIR sets another folder)", spill_folder()) from error


class _LineFile(NamedTuple):
    folder: str  # path of the run folder
    run_id: str
    path: Path


class Database:
    """The tables of some runs.

    ``skipped`` has the files that were not read, or not completely, each with the reason. ``connection`` is that to the
    database of the tables; tables that were not used are empty in it.

    Only runs with all the ``tags`` are read: values by name, or words and ``name=value``. Of the table `runs`, only the
    ``columns`` with its keys and tags are read; by default all.
    """

    def __init__(
        self,
        runs: Sequence[FoundRun],
        tags: Tags = (),
        columns: Sequence[str] = (),
        progress: Progress = lambda *_: None,
    ) -> None:
        self.connection = connect()
        self.skipped: list[Skipped] = []
        self._unread_tables = set(LINE_TABLES)
        kept = {"folder", "run_id", "tags", *columns}
        self._columns = [column for column in COLUMNS["runs"] if column.name in kept or not columns]
        self.connection.execute(f"CREATE TABLE runs ({columns_sql(self._columns)})")
        for name in LINE_TABLES:
            self.connection.execute(f"CREATE TABLE {name} ({columns_sql(COLUMNS[name])})")
        self._insert_runs([run for run in runs if self._has_utf8_path(run)], progress)
        for tag in tags.items() if isinstance(tags, Mapping) else (tag.partition("=")[::2] for tag in tags):
            self.connection.execute("DELETE FROM runs WHERE (tags[$1] = $2) IS NOT true", list(tag))

    @cached_property
    def folders(self) -> list[Path]:
        """The run folders."""
        rows = self.connection.execute("SELECT folder FROM runs ORDER BY rowid").fetchall()
        return [Path(folder) for (folder,) in rows]

    def table(self, name: str) -> Any:
        """Return a table as a relation of DuckDB."""
        self.load_table(name)
        return self.connection.table(name)

    def sql(self, query: str) -> Any:
        """Return the result of a query over the tables as a relation of DuckDB; ``None`` without a result."""
        self.read_tables_of(query)
        return self.connection.sql(query)

    def read_tables_of(self, query: str) -> None:
        """Read the tables whose names are words of a query."""
        for name in COLUMNS:
            if re.search(rf"\b{name}\b", query, re.IGNORECASE):
                self.load_table(name)

    def load_table(self, name: str) -> None:
        """Read a table, unless it was read before."""
        if name in self._unread_tables:
            self._insert_lines(LINE_TABLES[name])
            self._unread_tables.remove(name)

    def _has_utf8_path(self, run: FoundRun) -> bool:
        try:
            str(run.folder).encode()
        except UnicodeEncodeError:  # DuckDB's texts are UTF-8
            self.skipped.append(Skipped(run.folder, "its path is not UTF-8"))
            return False
        return True

    def _insert_runs(self, runs: Sequence[FoundRun], progress: Progress) -> None:
        """Insert the rows of runs in their order: of unchanged runs from the cache, of all others from their files."""
        self._make_table(
            "wanted",
            {"folder": TEXT, "state": TEXT, "position": WHOLE},
            (
                msgspec.json.encode({"folder": str(run.folder), "state": run.state, "position": position}) + b"\n"
                for position, run in enumerate(runs)
            ),
        )
        cache = RunCache(self.connection, runs)
        cached = cache.load_columns(self._columns)
        types = {"state": TEXT, **{column.name: column.type for column in COLUMNS["runs"]}}
        self._make_table("fresh", types, self._rows([run for run in runs if str(run.folder) not in cached], progress))
        names = ", ".join(quoted(column.name) for column in self._columns)
        self.connection.execute(
            f"INSERT INTO runs SELECT {names} FROM (SELECT {names} FROM cached UNION ALL SELECT {names} FROM fresh) "
            "JOIN (SELECT folder, position FROM wanted) USING (folder) ORDER BY position"
        )
        cache.write()
        self.connection.execute("DROP TABLE cached; DROP TABLE fresh; DROP TABLE wanted")

    def _make_table(self, table: str, types: Mapping[str, str], lines: Iterable[bytes]) -> None:
        names = ", ".join(map(quoted, types))
        with _temporary_file(lines) as path:
            self.connection.execute(f"CREATE TEMP TABLE {table} AS SELECT {names} FROM {read_json_sql(path, types)}")

    def _rows(self, runs: Sequence[FoundRun], progress: Progress) -> Iterator[bytes]:
        for number, run in enumerate(runs):
            progress(number, len(runs))
            yield self._row(run)
        progress(len(runs), len(runs))

    def _row(self, run: FoundRun) -> bytes:
        """Return the row of a run as a line; empty if no file can be read."""
        documents: list[Document] = []
        num_unreadable = 0
        for name in FILES:
            try:
                documents.append(read_document(run.folder / name) or {})
            except Unreadable as error:
                documents.append({})
                num_unreadable += 1
                self.skipped.append(Skipped(run.folder / name, str(error)))
        if num_unreadable and not any(documents):
            return b""
        state = "" if num_unreadable else run.state  # an unreadable file is reported each time
        line = msgspec.json.encode({"state": state, **run_row(run.folder, *documents)}) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            return line
        self.skipped.append(Skipped(run.folder, f"its documents have more than {MAX_LINE_BYTES >> 20} MiB"))
        return b""

    def _insert_lines(self, table: LinesTable) -> None:
        """Insert the lines of all runs into a table, in order; incomplete and invalid lines are left out."""
        files: list[_LineFile] = []
        for folder, run_id in self.connection.execute("SELECT folder, run_id FROM runs ORDER BY rowid").fetchall():
            for path, problem in files_of(Path(folder), table.files):
                if problem:
                    self.skipped.append(Skipped(path, problem))
                else:
                    files.append(_LineFile(folder, run_id, path))
        # A line of a hostile run must not name another run, so the name of the field is a secret.
        index_field = f"run_{secrets.token_hex(8)}"
        values = ", ".join(f"{value_sql(column)} AS {quoted(column.name)}" for column in table.columns)
        valid = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in ("folder", *table.required))
        execute = self.connection.execute
        while files:
            line_counts: list[int] = []
            with _temporary_file(_lines_with_file_index(files, index_field, line_counts)) as copy:
                # Lists of the folders instead of a join, because a join changes the order of the lines.
                execute(
                    f"CREATE OR REPLACE TEMP TABLE lines AS SELECT file, {values} FROM (SELECT *, "
                    f"{index_field} AS file, ($1::VARCHAR[])[{index_field} + 1] AS folder, "
                    f"($2::VARCHAR[])[{index_field} + 1] AS run_id "
                    f"FROM {read_json_sql(copy, {**table.fields(), index_field: WHOLE})})",
                    [[file.folder for file in files], [file.run_id for file in files]],
                )
            execute(f"INSERT INTO {table.name} SELECT * EXCLUDE (file) FROM lines WHERE {valid}")
            num_valid = dict(execute(f"SELECT file, count(*) FROM lines WHERE {valid} GROUP BY file").fetchall())
            execute("DROP TABLE lines")
            for index, (file, count) in enumerate(zip(files, line_counts, strict=False)):
                if invalid := count - num_valid.get(index, 0):
                    reason = count_text(invalid, "incomplete or invalid line")
                    self.skipped.append(Skipped(file.path, reason))
            files = files[len(line_counts) :]  # the first ones were copied


def _lines_with_file_index(files: Sequence[_LineFile], index_field: str, line_counts: list[int]) -> Iterator[bytes]:
    """Yield the lines of the first files, each with the index of its file; append the number of lines of each file."""
    copied_bytes = 0
    for index, file in enumerate(files):
        if copied_bytes > MAX_COPY_BYTES:
            return
        file_index = b'{"%b":%d,' % (index_field.encode(), index)
        line_counts.append(0)
        for line in lines_of(file.path):
            if not line.isspace():
                is_usable = line.startswith(b'{"') and len(line) < MAX_LINE_BYTES
                # null: the caller counts it as an invalid line
                indexed = b"%b%b\n" % (file_index, line[1:].rstrip(b"\n")) if is_usable else b"null\n"
                copied_bytes += len(indexed)
                line_counts[-1] += 1
                yield indexed


class RunCache:
    """The cached rows of the table `runs` of some runs: a Parquet file of the user for each folder of runs.

    A row is used again while run.json and summary.json have the same sizes, times and inodes: on a network file system,
    this is much cheaper than reading both. A cache that cannot be read or written is not used. The database has the
    table `wanted`: folder and state of each run.
    """

    def __init__(self, connection: Any, runs: Sequence[FoundRun]) -> None:
        self._connection = connection
        self._is_used = len(runs) >= MIN_RUNS
        self._cache_path = _cache_path(runs) if self._is_used else Path()
        self._num_runs = len(runs)

    def load_columns(self, columns: Sequence[Column]) -> set[str]:
        """Make the table `cached` with columns of the unchanged runs; return their folders."""
        import duckdb

        execute = self._connection.execute
        execute(f"CREATE TEMP TABLE cached ({columns_sql(columns)})")
        if not self._is_used:
            return set()
        names = ", ".join(f"rows.{quoted(column.name)}" for column in columns)
        with contextlib.suppress(OSError, duckdb.Error), self._cached_rows_query(names) as rows:
            execute(f"INSERT INTO cached {rows}")
            return {folder for (folder,) in execute("SELECT folder FROM cached").fetchall()}
        return set()

    def write(self) -> None:
        """Replace the file with the rows of unchanged runs and of the table `fresh`, if enough rows are fresh."""
        import duckdb

        num_new = self._connection.execute("SELECT count(*) FROM fresh WHERE state <> ''").fetchone()[0]
        if not self._is_used or num_new <= max(MAX_NEW_ROWS, MAX_NEW_SHARE * self._num_runs):
            return
        fresh = "SELECT * FROM fresh WHERE state <> ''"
        with contextlib.suppress(OSError, duckdb.Error):
            try:
                with self._cached_rows_query("rows.*") as rows:
                    self._replace_file(f"{rows} AND folder NOT IN (SELECT folder FROM fresh) UNION ALL {fresh}")
            except (OSError, duckdb.Error):  # no file yet, or a damaged file
                self._replace_file(fresh)

    @contextlib.contextmanager
    def _cached_rows_query(self, names: str) -> Iterator[str]:
        """Give a query of the rows of unchanged runs in the file, which stays open."""
        descriptor = own_files.open_file(self._cache_path, os.O_RDONLY)
        try:
            yield (
                f"SELECT {names} FROM read_parquet('/proc/self/fd/{descriptor}', hive_partitioning=false) AS rows "
                "JOIN (SELECT folder, state FROM wanted) USING (folder, state) WHERE state <> ''"
            )
        finally:
            os.close(descriptor)

    def _replace_file(self, query: str) -> None:
        own_files.make_folder(self._cache_path.parent)
        with own_files.replaced(self._cache_path) as draft:
            self._connection.execute(f"COPY ({query}) TO {text_sql(draft)} (FORMAT parquet, COMPRESSION zstd)")
        files = sorted(self._cache_path.parent.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-MAX_FILES]:
            path.unlink(missing_ok=True)


def _cache_path(runs: Sequence[FoundRun]) -> Path:
    """Return the file for the runs; another version of the files or other columns have another file."""
    root = os.path.commonpath([run.folder for run in runs])
    key = f"{SCHEMA_VERSION}\n{columns_sql(COLUMNS['runs'])}\n{root}"
    return cache_folder() / "runs" / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.parquet"
