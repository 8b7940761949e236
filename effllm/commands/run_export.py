"""``effllm runs --export FILE``: runs as files for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from effllm.analysis.export import export_csv, export_json, export_parquet
from effllm.analysis.load import load, load_errors
from effllm.commands.output import ReadingProgress, complain
from effllm.commands.run_query import warn_of_skipped
from effllm.records.plain_text import one_line
from effllm.store.csv_file import OtherColumns


def export(runs: Sequence[str], file: str) -> int:
    """Write runs to a file: CSV, JSON Lines, or else a folder of Parquet; return the exit status."""
    form = Path(file).suffix
    errors: tuple[type[Exception], ...] = (OtherColumns, *load_errors())
    try:
        loaded = load(runs, progress=ReadingProgress())
        if form == ".csv":
            print(_appended(export_csv(loaded, Path(file)), len(loaded), file))
        elif form in (".jsonl", ".json"):
            print(f"{export_json(loaded, Path(file)):,} runs were written to {one_line(file)}")
        else:
            files = export_parquet(loaded, Path(file), _progress if sys.stderr.isatty() else lambda *_: None)
            print(f"{len(loaded):,} runs: {files:,} files in {one_line(file)}")
    except errors as error:
        return complain("runs", _reason(error), 1)
    warn_of_skipped(loaded)
    return 0


def _appended(rows: int, runs: int, path: str) -> str:
    appended = f"{rows:,} row was" if rows == 1 else f"{rows:,} rows were"
    known = runs - rows
    more = f"; {known:,} {'was' if known == 1 else 'were'} in the file already" if known else ""
    return f"{appended} appended to {one_line(path)}{more}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _progress(written: int, files: int, table: str) -> None:
    end = "\n" if written == files else ""
    print(f"\r{written:,} of {files:,} files {table:<8}", end=end, file=sys.stderr, flush=True)
