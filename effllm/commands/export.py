"""``effllm export``: runs as files for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from effllm.analysis.export import export_csv, export_json, export_parquet
from effllm.analysis.load import load, load_errors
from effllm.commands.output import ReadingProgress, complain
from effllm.commands.sql import warn_of_skipped
from effllm.records.plain_text import one_line
from effllm.store.csv_file import OtherColumns


def main(runs: Sequence[str], parquet: str, csv: str, json: str) -> int:
    """Write runs to one of the three; return the exit status."""
    if sum(map(bool, (parquet, csv, json))) != 1:
        raise typer.BadParameter("one of --parquet, --csv and --json is needed", param_hint="--parquet")
    errors: tuple[type[Exception], ...] = (OtherColumns, *load_errors())
    try:
        loaded = load(runs, progress=ReadingProgress())
        if parquet:
            files = export_parquet(loaded, Path(parquet), _progress if sys.stderr.isatty() else lambda *_: None)
            print(f"{len(loaded):,} runs: {files:,} files in {one_line(parquet)}")
        elif csv:
            print(_appended(export_csv(loaded, Path(csv)), len(loaded), csv))
        else:
            print(f"{export_json(loaded, Path(json)):,} runs were written to {one_line(json)}")
    except errors as error:
        return complain("export", _reason(error), 1)
    warn_of_skipped(loaded, "export")
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
