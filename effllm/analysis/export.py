"""Writes runs to files for other programs: a partitioned Parquet dataset, CSV, JSON Lines.

No half file is ever visible: a file is written beside its place and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from effllm.analysis.column import COLUMNS, JSON, path_sql, text_sql
from effllm.analysis.load import Runs
from effllm.records.job import SCHEMA_VERSION
from effllm.store import csv_file, own_files, regular_file

#: Hive's name of the partition of an unknown value; engines read it as null.
UNKNOWN = "__HIVE_DEFAULT_PARTITION__"
MAX_PARTITION_LETTERS = 200
LOCK_TIMEOUT_S = 600.0


def export_csv(runs: Runs, path: Path) -> int:
    """Append one row per run to a CSV file; return the number of new rows.

    A run whose row is in the file already is left out. Lists, maps and JSON are JSON in a cell.
    """
    relation = runs.runs
    names = relation.columns
    rows = [
        {name: json.dumps(cell, ensure_ascii=False) if isinstance(cell, (list, dict)) else cell for name, cell in row}
        for row in (zip(names, values, strict=True) for values in relation.fetchall())
    ]
    return csv_file.append_rows(path, names, rows, skip_existing=True)


def export_json(runs: Runs, path: Path) -> int:
    """Replace a file with one JSON object per run, one per line; return the number of runs."""
    with own_files.replaced(path) as draft:
        runs.connection.execute(f"COPY runs TO {text_sql(draft)} (FORMAT json, ARRAY false)")
    return len(runs)


def export_parquet(runs: Runs, folder: Path) -> int:
    """Add all tables of runs to a dataset; return the number of written files.

    The dataset has one file per table, project and month: ``v5/runs/project=P/month=2026-01/data.parquet``. The rows of
    runs that the dataset already contains are replaced.
    """
    version = folder / f"v{SCHEMA_VERSION}"
    _make_folders(version)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with regular_file.locked(descriptor, folder, LOCK_TIMEOUT_S):
        for name in COLUMNS:
            runs.read_tables_of(name)
        execute = runs.connection.execute
        month_sql = "CASE WHEN year(started_utc) BETWEEN 1970 AND 9999 THEN strftime(started_utc, '%Y-%m') END"
        execute(f"CREATE OR REPLACE TEMP TABLE parts AS SELECT folder, project, {month_sql} AS month FROM runs")
        parts = execute("SELECT DISTINCT project, month FROM parts ORDER BY ALL").fetchall()
        files = [(table, project, month) for table in COLUMNS for project, month in parts]
        for table, project, month in files:
            partition = version / table / f"project={_partition_name(project)}" / f"month={_partition_name(month)}"
            _make_folders(partition)
            _write_part(runs.connection, table, project, month, partition / "data.parquet")
    return len(files)


def _write_part(connection: Any, table: str, project: str | None, month: str | None, path: Path) -> None:
    """Replace the file of a partition: the rows of the loaded runs, and the old rows of other runs."""
    values = ", ".join(
        f'"{column.name}"::VARCHAR AS "{column.name}"' if column.type == JSON else f'"{column.name}"'
        for column in COLUMNS[table]
        if (table, column.name) != ("runs", "project")  # a value of the path
    )
    rows = (
        f"SELECT {values} FROM {table} WHERE folder IN "
        f"(SELECT folder FROM parts WHERE project IS NOT DISTINCT FROM $1 AND month IS NOT DISTINCT FROM $2)"
    )
    if path.exists():
        rows += (
            f" UNION ALL BY NAME SELECT * FROM read_parquet({path_sql(path)}, hive_partitioning=false) "
            "WHERE folder NOT IN (SELECT folder FROM parts)"
        )
    with own_files.replaced(path) as draft:
        connection.execute(
            f"COPY ({rows}) TO {text_sql(draft)} (FORMAT parquet, COMPRESSION zstd, "
            f"KV_METADATA {{effllm_schema_version: '{SCHEMA_VERSION}'}})",
            [project, month],
        )


def _partition_name(value: str | None) -> str:
    """Return a value as the name of a folder, escaped as Hive and Spark do it."""
    if value is None:
        return UNKNOWN
    text = quote(value, safe=" ")
    if len(text) <= MAX_PARTITION_LETTERS:
        return text
    # The cut may be inside of an escaped character such as %C3: its beginning is removed.
    return text[:MAX_PARTITION_LETTERS].rpartition("%")[0] + hashlib.sha256(value.encode()).hexdigest()[:16]


def _make_folders(folder: Path) -> None:
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
