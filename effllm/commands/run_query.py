"""``effllm runs --sql QUERY`` and ``--export FILE``: a query over the tables of runs, and runs as files."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from effllm.analysis.export import export_csv, export_json, export_parquet
from effllm.analysis.load import QueryError, QueryResult, Runs, load, load_errors, run_query
from effllm.commands.output import ReadingProgress, complain
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.views.text.numbers import readable

WIDTH = 80
MAX_CELL, MAX_SKIPPED = 40, 5  # letters of a value; printed names of skipped files
MAX_ROWS = 1000  # of a table for people; --csv and --json print all rows


def print_query(runs: Sequence[str], query: str, form: str) -> int:
    """Print the result of a query as text, csv or json; return the exit status."""
    errors: tuple[type[Exception], ...] = (QueryError, *load_errors())
    try:
        loaded = load(runs, progress=ReadingProgress())
        result = run_query(loaded, query)
        _PRINTERS[form](result)
    except BrokenPipeError:  # an OSError of stdout, not of the runs
        raise
    except errors as error:
        return complain("runs", str(error), 1)
    _warn_of_skipped(loaded)
    return 0


def _warn_of_skipped(runs: Runs) -> None:
    for path, reason in runs.skipped[:MAX_SKIPPED]:
        complain("runs", f"skipped {path}: {reason}")
    if (more := len(runs.skipped) - MAX_SKIPPED) > 0:
        complain("runs", f"skipped {more} more files")


def export_runs(runs: Sequence[str], file: str) -> int:
    """Write runs to a file: CSV, JSON Lines, or else a folder of Parquet; return the exit status."""
    form = Path(file).suffix
    errors: tuple[type[Exception], ...] = (csv_file.OtherColumns, *load_errors())
    try:
        loaded = load(runs, progress=ReadingProgress())
        if form == ".csv":
            print(_appended_text(export_csv(loaded, Path(file)), len(loaded), file))
        elif form in (".jsonl", ".json"):
            print(f"{export_json(loaded, Path(file)):,} runs were written to {one_line(file)}")
        else:
            files = export_parquet(loaded, Path(file))
            print(f"{len(loaded):,} runs: {files:,} files in {one_line(file)}")
    except OSError as error:
        is_of_file = error.filename and error.strerror
        return complain("runs", f"{error.filename}: {error.strerror}" if is_of_file else str(error), 1)
    except errors as error:
        return complain("runs", str(error), 1)
    _warn_of_skipped(loaded)
    return 0


def _appended_text(num_rows: int, num_runs: int, path: str) -> str:
    appended = f"{num_rows:,} row was" if num_rows == 1 else f"{num_rows:,} rows were"
    present = num_runs - num_rows
    more = f"; {present:,} {'was' if present == 1 else 'were'} in the file already" if present else ""
    return f"{appended} appended to {one_line(path)}{more}"


def _print_text(result: QueryResult) -> None:
    rows = list(itertools.islice(result.rows, MAX_ROWS + 1))
    letters = MAX_CELL if len(result.columns) > 1 else WIDTH
    cells = [[_text_cell(value, letters) for value in row] for row in rows[:MAX_ROWS]]
    headers = [one_line(name) for name in result.columns]
    are_numbers = [kind in ("NUMBER", "DOUBLE", "FLOAT") or kind.endswith("INT") for kind in result.types]
    for lines in _tables_of_width(headers, cells, are_numbers):
        print("\n".join(lines))
    count = f"the first {MAX_ROWS:,} rows; --csv prints all rows" if len(rows) > MAX_ROWS else f"{len(rows):,} rows"
    print(f"({'1 row' if len(rows) == 1 else count})")


def _tables_of_width(headers: list[str], cells: list[list[str]], are_numbers: list[bool]) -> Iterator[list[str]]:
    """Yield tables, each as lines of at most `WIDTH` letters; further columns follow in further tables."""
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    pad = [str.rjust if is_number else str.ljust for is_number in are_numbers]
    start = 0
    while start < len(headers):
        end, used = start + 1, widths[start]
        while end < len(headers) and used + 2 + widths[end] <= WIDTH:
            used += 2 + widths[end]
            end += 1
        rows = [headers, ["-" * width for width in widths], *cells]
        lines = ["  ".join(pad[i](row[i], widths[i]) for i in range(start, end)).rstrip() for row in rows]
        yield lines + [""] * (end < len(headers))  # an empty line before the next table
        start = end


def _text_cell(value: Any, letters: int) -> str:
    """Return a value in one short line; terminal escapes are never printed."""
    if value is None or isinstance(value, float):
        return readable(value)
    text = one_line(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
    if not isinstance(value, (str, list, dict)) and text.startswith('"'):
        text = text[1:-1]  # the quotation marks of JSON around a date or time
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _print_csv(result: QueryResult) -> None:
    write = csv.writer(sys.stdout, lineterminator="\n").writerow
    write(map(one_line, result.columns))
    for row in result.rows:
        write(["" if cell is None else _csv_cell(cell) for cell in row])


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str):
        return csv_file.cell(one_line(value))
    return json.dumps(_without_nan(value), default=str) if isinstance(value, (list, dict)) else value


def _print_json(result: QueryResult) -> None:
    rows = (dict(zip(result.columns, row, strict=True)) for row in result.rows)
    print("[" + ",\n ".join(json.dumps(_without_nan(row), default=str) for row in rows) + "]")


def _without_nan(value: Any) -> Any:
    """Return a value without NaN and infinite numbers, which are not JSON."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


_PRINTERS: dict[str, Callable[[QueryResult], None]] = {"text": _print_text, "csv": _print_csv, "json": _print_json}
