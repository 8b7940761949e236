"""``effllm runs``: lists, sums, queries or exports runs."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from effllm.analysis.ledger import KEYS, KILLED, LedgerRun, read_runs, totals
from effllm.analysis.load import load_errors
from effllm.analysis.run_row import utc
from effllm.commands.output import ReadingProgress, complain, form_of
from effllm.commands.run_export import export as export_runs
from effllm.commands.run_query import print_query
from effllm.commands.run_totals import csv_cell, print_columns, print_totals, short, skipped_lines, start_of
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import this_process
from effllm.records.plain_text import one_line
from effllm.store.summary_text import J_PER_KWH, readable

WIDTH = 80
_NAME = len("20260101-120000-1a2b3c4d")  # letters of a run_id
MAX_ROWS = 40  # of the list on a terminal or in a text
#: Columns that a narrow table leaves out, in this order.
_DISPENSABLE = ("started (UTC)", "cost", "GPU-h", "J/token", "kWh", "MFU")


def main(
    paths: Sequence[str] | None,
    by: str,
    since: str,
    wasted: bool,
    sql: str,
    export: str,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Print or write runs; return the exit status."""
    form = form_of(csv=as_csv, json=as_json)
    form_of(by=bool(by), sql=bool(sql), export=bool(export))
    if by and by not in KEYS:
        raise typer.BadParameter(f"{by}: the keys are {', '.join(KEYS)}", param_hint="--by")
    try:
        since_s = start_of(since, time.time()) if since else None
    except ValueError:
        expected = "a number of hours, days or weeks (36h, 7d, 4w), or a date"
        return complain("runs", f"--since {since}: expected {expected}", 2)
    try:
        paths = paths or [read_config(this_process()).run_dir]
    except ConfigError as error:
        return complain("runs", str(error), 2)
    if sql or export:
        if since or (export and form != "text"):
            return complain("runs", "--since is not for --sql and --export, and --csv and --json not for --export", 2)
        return print_query(paths, sql, form) if sql else export_runs(paths, export)
    try:
        found, skipped = read_runs([Path(path) for path in paths], since_s, ReadingProgress())
    except load_errors() as error:
        return complain("runs", str(error), 1)
    if by:
        print_totals(totals(found, by, skipped, wasted), by, form)
    else:
        _print_list(sorted(found, key=lambda run: -(run.started_time_s or 0.0)), skipped, form)
    return 0


def _print_list(runs: Sequence[LedgerRun], skipped: Sequence[str], form: str) -> None:
    if form == "json":
        print(json.dumps(msgspec.to_builtins(runs)))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        names = LedgerRun.__struct_fields__
        writer.writerow(names)
        for run in runs:
            values = (getattr(run, name) for name in names)
            writer.writerow([csv_cell(" ".join(one) if isinstance(one, tuple) else one) for one in values])
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        shown = runs[:MAX_ROWS]
        columns = {
            "started (UTC)": [(utc(run.started_time_s) or "-")[5:16] for run in shown],
            "status": [one_line(run.status) for run in shown],
            "verdict": [short((one_line(run.cause or "-")).replace("_", " ")) for run in shown],
            "tok/s/GPU": [readable(run.tokens_per_second_per_gpu) for run in shown],
            "MFU": ["-" if run.mfu_ratio is None else f"{100 * run.mfu_ratio:.1f} %" for run in shown],
            "J/token": [readable(run.joules_per_token) for run in shown],
            "GPU-h": [_hours(run) for run in shown],
            "kWh": [_energy(run) for run in shown],
            "cost": [_cost(run) for run in shown],
        }
        columns = {name: cells for name, cells in columns.items() if set(cells) - {"-"}}
        print_columns(console, "run", [one_line(run.run_id) for run in shown], columns, _DISPENSABLE, _NAME)
        if len(runs) > len(shown):
            console.print(Text(f"{len(runs) - len(shown):,} older runs: --csv and --json print all runs"))
        for line in skipped_lines(skipped):
            console.print(Text(line), soft_wrap=True)


def _hours(run: LedgerRun) -> str:
    hours = None if run.gpus == 0 else run.gpu_hours
    return "≥" * (run.status in KILLED and hours is not None) + readable(hours)


def _cost(run: LedgerRun) -> str:
    cost = run.gpu_cost if run.gpu_cost is not None else run.electricity_cost
    return readable(cost) + (f" {one_line(run.currency)}" if run.currency and cost is not None else "")


def _energy(run: LedgerRun) -> str:
    return "-" if run.joules is None else "≥" * (run.total_joules is None) + readable(run.joules / J_PER_KWH)
