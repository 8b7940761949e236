"""Reads the JSON Lines files of many runs into a table of DuckDB."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from effllm.analysis.column import WHOLE, LinesTable, quoted, read_json, value

#: A smaller file is copied into one file with others, because DuckDB needs 1 to 5 ms for each file.
MAX_COPIED_BYTES = 4 * 2**20
#: Size at which the copied files are read.
MAX_COPY_BYTES = 256 * 2**20


class LineFile(NamedTuple):
    """A JSON Lines file of a run."""

    folder: str  # path of the run folder
    run_id: str
    path: Path


class InvalidLines(NamedTuple):
    """The number of lines of a file that are no rows."""

    path: Path
    lines: int


def insert_lines(connection: Any, table: LinesTable, files: Sequence[LineFile], folder: str) -> Iterator[InvalidLines]:
    """Insert the lines of files into a table, in order, and yield the files with incomplete or invalid lines.

    Args:
        connection: the connection to a database with the table.
        table: the table.
        files: the files, by run.
        folder: a private folder for a temporary file.

    Raises:
        OSError: a file cannot be read, or the temporary file cannot be written.
    """
    start = 0
    while start < len(files):
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".jsonl") as copy:
            # A line of a hostile run must not name another run, so the name of the field is a secret.
            key = f"run_{secrets.token_hex(8)}"
            counts = _copy(files[start:], copy, key)
            if counts:
                yield from _insert(connection, table, files[start : start + len(counts)], counts, copy.name, key)
                start += len(counts)
            else:
                yield from _insert(connection, table, files[start : start + 1], [], _literal(files[start].path), key)
                start += 1


def _copy(files: Sequence[LineFile], copy: IO[bytes], key: str) -> list[int]:
    """Copy the first small files, each line with the index of its file; return the number of lines of each file."""
    counts: list[int] = []
    size = 0
    for index, one in enumerate(files):
        with one.path.open("rb") as file:
            text = file.read(MAX_COPIED_BYTES + 1)
        if len(text) > MAX_COPIED_BYTES or size > MAX_COPY_BYTES:
            break
        lines = [line for line in text.split(b"\n") if line and not line.isspace()]
        begin = b'{"%b":%d,' % (key.encode(), index)
        size += copy.write(
            b"".join(b"%b%b\n" % (begin, line[1:]) if line.startswith(b'{"') else b"null\n" for line in lines)
        )
        counts.append(len(lines))
    copy.flush()
    return counts


def _insert(
    connection: Any, table: LinesTable, files: Sequence[LineFile], counts: Sequence[int], path: str, key: str
) -> Iterator[InvalidLines]:
    # The index of the file; all lines of a file that is not copied are of files[0].  Lists instead of a join, because
    # a join changes the order of the lines.
    index = key if counts else "0"
    values = ", ".join(f"{value(one)} AS {quoted(one.name)}" for one in table.columns)
    read = read_json("$1", {**table.fields(), key: WHOLE})
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE lines AS SELECT file, {values} FROM (SELECT *, {index} AS file, "
        f"($2::VARCHAR[])[{index} + 1] AS folder, ($3::VARCHAR[])[{index} + 1] AS run_id FROM {read})",
        [path, [one.folder for one in files], [one.run_id for one in files]],
    )
    valid = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in ("folder", *table.required))
    connection.execute(f"INSERT INTO {table.name} SELECT * EXCLUDE (file) FROM lines WHERE {valid}")
    if not counts:
        counts = [connection.execute("SELECT count(*) FROM lines").fetchone()[0]]
    known = dict(connection.execute(f"SELECT file, count(*) FROM lines WHERE {valid} GROUP BY file").fetchall())
    connection.execute("DROP TABLE lines")
    for number, (one, count) in enumerate(zip(files, counts, strict=True)):
        if invalid := count - known.get(number, 0):
            yield InvalidLines(one.path, invalid)


def _literal(path: Path) -> str:
    """Return a path in which DuckDB's characters of globs are escaped."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path))
