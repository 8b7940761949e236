"""List runs, the newest first; or sum, query or export them.

Failed and killed runs are included. A project is the value of the tag project, else the account of the scheduler. A
configuration is the value of the tag config, else the model and the devices. With --by node, a run on several hosts
is divided equally between its hosts.

The tables of --sql are runs (one row per run), windows, ranks and events; docs/run-folder.md lists all columns. The
query can only read these tables. --export adds the runs to a CSV file or a Parquet dataset, in which known runs are
replaced, or writes JSON Lines. Needs: pip install 'effllm[analysis]'

\b
Examples:
  effllm runs                                   # of EFFICIENTLLM_RUN_DIR
  effllm runs /project/ledger --by user --since 7d --wasted
  effllm runs efficientllm_runs --by node       # always the same?
  effllm runs RUN --sql "SELECT text FROM events WHERE kind = 'xid'"
  effllm runs 'runs/llama-*' --export llama.csv

Exit status: 0 success, 1 no runs, a wrong query, or a file that cannot be written, 2 wrong use.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effllm.analysis.ledger import KEYS, KILLED, NOTHING, LedgerRow, LedgerRun, Totals, read_ledger, totals
from effllm.analysis.load import load_errors
from effllm.analysis.run_row import utc
from effllm.commands.output import ReadingProgress, complain, form_of
from effllm.commands.run_query import export_runs, print_query
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.views.text.numbers import J_PER_KWH, count_text, readable, rounded_up

WIDTH = 80
_ID_WIDTH = len("20260101-120000-1a2b3c4d")  # letters of a run_id
MIN_GROUP, MAX_LOSS = 10, 24  # letters of a group, and of the name of a loss
MAX_ROWS, MAX_SKIPPED = 40, 5  # on a terminal or in a text
MIN_ROWS = 3  # on a terminal, the table of totals has as many rows as fit on one screen
#: Columns that a narrow table leaves out, in this order.
_SPARE_OF_RUNS = ("started (UTC)", "cost", "GPU-h", "J/token", "kWh", "MFU")
_SPARE_OF_TOTALS = ("largest loss", "kg CO2", "cost", "±")
_LEFT_ALIGNED = ("largest loss", "started (UTC)", "status", "verdict")
_SECONDS_OF_UNIT = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


def main(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Run folders, folders of runs, globs, or the folder or a file of "
            "EFFICIENTLLM_LEDGER. [default: RUN_DIR]",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Sum by outcome, project, user, account, config, node or month.")
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only runs that started since: 36h, 7d, 4w, or a date.")
    ] = "",
    wasted: Annotated[bool, typer.Option("--wasted", help="With --by: order by wasted GPU-hours.")] = False,
    sql: Annotated[str, typer.Option(metavar="QUERY", help="Print the result of a query of DuckDB.")] = "",
    export: Annotated[
        str, typer.Option(metavar="FILE", help="Write the runs: FILE.csv, FILE.jsonl, or a folder of Parquet files.")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with all columns and digits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all columns and digits.")] = False,
) -> int:
    """Print or write runs; return the exit status."""
    form = form_of(csv=as_csv, json=as_json)
    form_of(by=bool(by), sql=bool(sql), export=bool(export))  # raises if two are given
    if by and by not in KEYS:
        raise typer.BadParameter(f"{by}: the keys are {', '.join(KEYS)}", param_hint="--by")
    try:
        since_s = unix_time_of(since, time.time()) if since else None
    except ValueError:
        expected = "a number of hours, days or weeks (36h, 7d, 4w), or a date"
        return complain("runs", f"--since {since}: expected {expected}", 2)
    try:
        paths = paths or [read_config(process_environ()).run_dir]
    except ConfigError as error:
        return complain("runs", str(error), 2)
    if sql or export:
        if since or (export and form != "text"):
            return complain("runs", "--since is not for --sql and --export, and --csv and --json not for --export", 2)
        return print_query(paths, sql, form) if sql else export_runs(paths, export)
    try:
        runs, skipped = read_ledger([Path(path) for path in paths], since_s, ReadingProgress())
    except load_errors() as error:
        return complain("runs", str(error), 1)
    if by:
        _print_totals(totals(runs, by, skipped, wasted), by, form)
    else:
        _print_runs(sorted(runs, key=lambda run: -(run.started_time_s or 0.0)), skipped, form)
    return 0


def unix_time_of(text: str, now_s: float) -> float:
    """Return the unix time of a date in UTC, or of a number of hours, days or weeks ago."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text):
        return now_s - float(match[1]) * _SECONDS_OF_UNIT[match[2]]
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()


def _print_runs(runs: Sequence[LedgerRun], skipped: Sequence[str], form: str) -> None:
    if form == "json":
        print(json.dumps(msgspec.to_builtins(runs)))
    elif form == "csv":
        names = LedgerRun.__struct_fields__
        _print_csv(names, ([getattr(run, name) for name in names] for run in runs))
    else:
        shown = runs[:MAX_ROWS]
        columns = {
            "started (UTC)": [(utc(run.started_time_s) or "-")[5:16] for run in shown],
            "status": [one_line(run.status) for run in shown],
            "verdict": [_cut((one_line(run.cause or "-")).replace("_", " ")) for run in shown],
            "tok/s/GPU": [readable(run.tokens_per_second_per_gpu) for run in shown],
            "MFU": [_percent_text(run.mfu_ratio) for run in shown],
            "J/token": [readable(run.joules_per_token) for run in shown],
            "GPU-h": [_gpu_hours_text(run) for run in shown],
            "kWh": [_kwh_text(run.joules, is_part=run.total_joules is None) for run in shown],
            "cost": [_cost_text(run) for run in shown],
        }
        console = _console()
        _print_columns(console, "run", [one_line(run.run_id) for run in shown], columns, _SPARE_OF_RUNS, _ID_WIDTH)
        if len(runs) > len(shown):
            console.print(Text(f"{len(runs) - len(shown):,} older runs: --csv and --json print all runs"))
        for line in _skipped_lines(skipped):
            console.print(Text(line), soft_wrap=True)


def _print_totals(sums: Totals, by: str, form: str) -> None:
    if form == "json":
        rows = [row._asdict() for row in sums.rows]
        print(json.dumps({"by": by, "groups": rows, "total": sums.total._asdict(), "skipped": sums.skipped}))
    elif form == "csv":
        _print_csv(LedgerRow._fields, sums.rows)
    else:
        console = _console()
        count = min(len(sums.rows), MAX_ROWS)
        if sys.stdout.isatty():
            while count > MIN_ROWS and _num_lines_of_totals(sums, by, count, console.width) >= console.height:
                count -= 1
        _print_totals_table(console, sums, by, count)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def _print_csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = (" ".join(value) if isinstance(value, tuple) else value for value in row)
        writer.writerow([csv_file.cell(cell) if isinstance(cell, str) and cell != NOTHING else cell for cell in cells])


def _num_lines_of_totals(sums: Totals, by: str, count: int, width: int) -> int:
    """Return the number of lines of the table with the first ``count`` groups, and of its notes, on a terminal."""
    text = io.StringIO()
    _print_totals_table(Console(file=text, width=width, highlight=False), sums, by, count)
    return sum(max(math.ceil(cell_len(line) / width), 1) for line in text.getvalue().splitlines())


def _print_totals_table(console: Console, sums: Totals, by: str, count: int) -> None:
    rows = [*sums.rows[:count], sums.total]
    columns = {
        "runs": [f"{row.runs:,}" for row in rows],
        "GPU-h": ["≥" * bool(row.without_hours or row.killed) + readable(row.gpu_hours) for row in rows],
        "wasted": [readable(None if row.goodput_ratio is None else row.wasted_gpu_hours) for row in rows],
        "goodput": [_percent_text(row.goodput_ratio) for row in rows],
        "kWh": [_kwh_text(row.joules, is_part=row.incomplete > 0) for row in rows],
        "±": [_energy_error_text(row) for row in rows],
        "cost": [f"{readable(_cost_of_group(row))} {row.currency}".strip() for row in rows],
        "kg CO2": [readable(row.co2_kg) for row in rows],
        "slow in": [f"{row.slow_runs:,}" if by == "node" else "-" for row in rows],
        "largest loss": [_cut((row.cause or "-").replace("_", " ")) for row in rows],
    }
    shown = _print_columns(console, by, [row.group for row in rows], columns, _SPARE_OF_TOTALS, MIN_GROUP)
    for line in _totals_notes(sums, shown, count):
        console.print(Text(line), soft_wrap=True)


def _totals_notes(sums: Totals, columns: Collection[str], count: int) -> Iterator[str]:
    """Yield the notes below a table with some columns and the first ``count`` groups."""
    total = sums.total
    if (more := len(sums.rows) - count) > 0:
        yield f"{more:,} more groups: --csv and --json print all groups"
    if total.without_hours:
        yield f"≥ GPU-h: unknown in {count_text(total.without_hours, 'run')} (no summary.json, or no rank had reported)"
    if total.killed:
        yield f"≥ GPU-h: of {count_text(total.killed, 'run')} without an end, until the last report"
    if total.incomplete and total.joules is not None:
        yield f"≥ kWh: no total energy in {count_text(total.incomplete, 'run')}; the measured part is counted"
    if total.simulated:
        yield f"simulated: GPUs of {count_text(total.simulated, 'run')} were simulated; their energy was not measured"
    if "wasted" in columns:
        yield "wasted: GPU-hours of losses that can be avoided: docs/ledger.md"
    if "±" in columns:
        yield "±: timing and sensor errors of the energy"
    yield from _skipped_lines(sums.skipped)


def _print_columns(
    console: Console,
    first: str,
    names: Sequence[str],
    columns: dict[str, list[str]],
    dispensable: Sequence[str],
    min_width: int,
) -> Collection[str]:
    """Print a table without columns that are unknown for all; return those that are shown.

    While the table is too wide, the next column of ``dispensable`` is left out; the first column is folded at
    ``min_width``.
    """
    columns = {name: cells for name, cells in columns.items() if set(cells) - {"-"}}
    spare, left_out = [name for name in dispensable if name in columns], []
    while spare and min_width + _width(columns) > console.width:
        left_out.append(spare.pop(0))
        del columns[left_out[-1]]
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold", min_width=min_width)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT_ALIGNED else "right", no_wrap=True)
    for index, name in enumerate(names):
        table.add_row(Text(name), *(Text(cells[index]) for cells in columns.values()))
    console.print(table)
    if left_out:
        console.print(Text(f"not shown: {', '.join(left_out)}; --csv and --json print all columns"))
    return columns


def _width(columns: Mapping[str, list[str]]) -> int:
    return sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LOSS else f"{text[: MAX_LOSS - 1]}…"


def _skipped_lines(skipped: Sequence[str]) -> Iterator[str]:
    yield from (f"skipped: {one_line(line)}" for line in skipped[:MAX_SKIPPED])
    if (more := len(skipped) - MAX_SKIPPED) > 0:
        yield f"skipped: {more:,} more"


def _gpu_hours_text(run: LedgerRun) -> str:
    hours = None if run.gpus == 0 else run.gpu_hours  # 0 hours of no GPU are not shown
    return "≥" * (run.status in KILLED and hours is not None) + readable(hours)


def _cost_text(run: LedgerRun) -> str:
    cost = run.gpu_cost if run.gpu_cost is not None else run.electricity_cost
    return readable(cost) + (f" {one_line(run.currency)}" if run.currency and cost is not None else "")


def _cost_of_group(row: LedgerRow) -> float | None:
    costs = [cost for cost in (row.gpu_cost, row.electricity_cost) if cost is not None]
    return max(costs) if costs else None  # the price of a GPU-hour includes the electricity


def _kwh_text(joules: float | None, *, is_part: bool) -> str:
    return "-" if joules is None else "≥" * is_part + readable(joules / J_PER_KWH)


def _percent_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _energy_error_text(row: LedgerRow) -> str:
    """Return an upper bound of the relative error: the timing and the sensor errors, added."""
    error = row.error_joules + row.gain_joules
    return f"{rounded_up(100 * error / row.joules)} %" if row.joules and error else "-"
