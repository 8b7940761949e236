"""The tables of runs in a DuckDB database in memory; a table is read from the files of the runs at its first use."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.analysis.column import declaration, fields
from effllm.analysis.run_folders import FoundRun
from effllm.analysis.run_row import FILES, Document, Unreadable, read_document, run_row
from effllm.analysis.runs_table import run_columns

TABLES = ("runs",)
MAX_LINE_BYTES = 15 * 2**20  # DuckDB's own limit of a line is 16 MiB
Tags = Mapping[str, str] | Iterable[str]


class Skipped(NamedTuple):
    """A file that was not read, or not completely, and the reason."""

    path: Path
    reason: str


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
        "temp_directory": _spill_folder(),
    }
    return duckdb.connect(":memory:", config=config)


@cache
def _spill_folder() -> str:
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
        self.connection.execute(f"CREATE TABLE runs ({declaration(run_columns())})")
        self._insert_runs(found)
        self._select(tags)
        self.folders = [
            Path(folder) for (folder,) in self.connection.execute("SELECT folder FROM runs ORDER BY rowid").fetchall()
        ]

    def table(self, name: str) -> Any:
        """Return a table as a relation of DuckDB."""
        return self.connection.table(name)

    def sql(self, query: str) -> Any:
        """Return the result of a query as a relation of DuckDB; ``None`` for a statement without a result."""
        return self.connection.sql(query)

    def _insert_runs(self, found: Sequence[FoundRun]) -> None:
        # A file, because DuckDB reads a file eight times as fast as a parameter.
        with tempfile.NamedTemporaryFile(dir=_spill_folder(), suffix=".jsonl") as file:
            for run in found:
                if line := self._line(run):
                    file.write(line)
            file.flush()
            read = f"read_json($1, format='newline_delimited', ignore_errors=true, columns={fields(run_columns())})"
            self.connection.execute(f"INSERT INTO runs SELECT * FROM {read}", [file.name])

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
        for name, value in tags.items() if isinstance(tags, Mapping) else map(_name_and_value, tags):
            self.connection.execute("DELETE FROM runs WHERE (tags[$1] = $2) IS NOT true", [name, value])


def _name_and_value(tag: str) -> tuple[str, str]:
    name, _, value = tag.partition("=")
    return name, value
