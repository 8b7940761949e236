"""A cache of the rows of the table `runs`: a Parquet file of the user for each folder of runs.

A row is used again while run.json and summary.json have the same sizes, times and inodes.  On a network file system, a
look at these is much cheaper than reading two files per run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from effllm.analysis.column import Column, declaration, quoted, text
from effllm.analysis.run_folders import FoundRun
from effllm.analysis.runs_table import run_columns
from effllm.config.settings import cache_folder
from effllm.records.job import SCHEMA_VERSION
from effllm.store import own_files

#: Fewer runs are read as fast without a cache.
MIN_RUNS = 50
#: The file is replaced if more rows are new; so the reader of some running jobs does not write it each time.
MAX_NEW_ROWS, MAX_NEW_SHARE = 20, 0.02
#: Maximum number of files; the oldest file is removed.
MAX_FILES = 32


class RunCache:
    """The cached rows of some runs.

    The cache is an optimization: a cache that cannot be read or written is not used.

    Args:
        connection: the connection to a database with the table `wanted`: folder and state of each run.
        found: the run folders.
    """

    def __init__(self, connection: Any, found: Sequence[FoundRun]) -> None:
        self._connection = connection
        self._is_used = len(found) >= MIN_RUNS
        self._path = _path(found) if self._is_used else Path()
        self._num_runs = len(found)

    def read(self, columns: Sequence[Column]) -> set[str]:
        """Make the table `cached` with columns of the unchanged runs; return their folders."""
        import duckdb

        execute = self._connection.execute
        execute(f"CREATE TEMP TABLE cached ({declaration(columns)})")
        if not self._is_used:
            return set()
        names = ", ".join(f"rows.{quoted(one.name)}" for one in columns)
        with contextlib.suppress(OSError, duckdb.Error), self._rows(names) as rows:
            execute(f"INSERT INTO cached {rows}")
            return {folder for (folder,) in execute("SELECT folder FROM cached").fetchall()}
        return set()

    def write(self) -> None:
        """Replace the file with the rows of unchanged runs and of the table `fresh`, if enough rows are fresh."""
        import duckdb

        new = self._connection.execute("SELECT count(*) FROM fresh WHERE state <> ''").fetchone()[0]
        if not self._is_used or new <= max(MAX_NEW_ROWS, MAX_NEW_SHARE * self._num_runs):
            return
        fresh = "SELECT * FROM fresh WHERE state <> ''"
        with contextlib.suppress(OSError, duckdb.Error):
            try:
                with self._rows("rows.*") as rows:
                    self._replace(f"{rows} AND folder NOT IN (SELECT folder FROM fresh) UNION ALL {fresh}")
            except (OSError, duckdb.Error):  # no file yet, or a damaged file
                self._replace(fresh)

    @contextlib.contextmanager
    def _rows(self, names: str) -> Iterator[str]:
        """Give a query of the rows of unchanged runs in the file, which stays open."""
        file = own_files.open_file(self._path, os.O_RDONLY)
        try:
            yield (
                f"SELECT {names} FROM read_parquet('/proc/self/fd/{file}', hive_partitioning=false) AS rows "
                "JOIN (SELECT folder, state FROM wanted) USING (folder, state) WHERE state <> ''"
            )
        finally:
            os.close(file)

    def _replace(self, rows: str) -> None:
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        own_files.make_folder(self._path.parent)
        try:
            self._connection.execute(f"COPY ({rows}) TO {text(draft)} (FORMAT parquet, COMPRESSION zstd)")
            draft.chmod(0o600)
            own_files.rename_file(draft, self._path.name)
        finally:
            draft.unlink(missing_ok=True)
        _remove_oldest(self._path.parent)


def _path(found: Sequence[FoundRun]) -> Path:
    """Return the file for the runs; another version of the files or other columns have another file."""
    root = os.path.commonpath([run.folder for run in found])
    key = f"{SCHEMA_VERSION}\n{declaration(run_columns())}\n{root}"
    return cache_folder() / "runs" / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.parquet"


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-MAX_FILES]:
        path.unlink(missing_ok=True)
