"""``effllm ledger``: totals over many runs by outcome, project, user, configuration, node or month."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from effllm.analysis.ledger import LedgerRow, Totals, totals
from effllm.analysis.load import load_errors
from effllm.commands.progress import ReadingProgress
from effllm.records.plain_text import one_line
from effllm.store.summary_text import readable, rounded_up

WIDTH = 80
#: Below this width, a table with more columns than this has no column of losses.
WIDE, MAX_NARROW = 100, 7
MAX_ROWS, MAX_SKIPPED = 40, 5
J_PER_KWH = 3.6e6
_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


class LedgerRequest(NamedTuple):
    """The arguments of the command."""

    folder: Path
    by: str
    since: str
    wasted: bool
    form: str  # text, csv or json


def main(request: LedgerRequest) -> int:
    """Print the totals; return the exit status."""
    try:
        since_s = start_of(request.since, time.time()) if request.since else None
    except ValueError:
        return _fail(f"--since {request.since}: expected a number of hours, days or weeks (36h, 7d, 4w), or a date", 2)
    try:
        found = totals(request.folder, request.by, since_s, request.wasted, ReadingProgress())
    except load_errors() as error:
        return _fail(str(error), 1)
    if request.form == "json":
        rows = [row._asdict() for row in found.rows]
        print(json.dumps({"by": request.by, "groups": rows, "total": found.total._asdict(), "skipped": found.skipped}))
    elif request.form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(LedgerRow._fields)
        writer.writerows([safe_cell(one) if isinstance(one, str) else one for one in row] for row in found.rows)
    else:
        _print(found, request)
    return 0


def start_of(text: str, now_s: float) -> float:
    """Return the unix time of a date in UTC, or of a number of hours, days or weeks ago.

    Raises:
        ValueError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text):
        return now_s - float(match[1]) * _UNITS_S[match[2]]
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()


def safe_cell(text: str) -> str:
    """Return a text that a spreadsheet does not interpret as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and len(text) > 1 else text


def _fail(line: str, status: int) -> int:
    print(f"effllm ledger: {one_line(line)}", file=sys.stderr)
    return status


def _print(found: Totals, request: LedgerRequest) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    everything = [*found.rows[:MAX_ROWS], found.total]
    columns = {
        "runs": [f"{row.runs:,}" for row in everything],
        "GPU-h": [readable(row.gpu_hours) for row in everything],
        "wasted": [_waste(row) for row in everything],
        "goodput": [_percent(row.goodput_ratio) for row in everything],
        "kWh": [_energy(row) for row in everything],
        "±": [_error(row) for row in everything],
        "cost": [_number(_cost(row)) for row in everything],
        "kg CO2": [_number(row.co2_kg) for row in everything],
        "slow in": [f"{row.slow_runs:,}" if request.by == "node" else "-" for row in everything],
        "largest loss": [(row.cause or "-").replace("_", " ") for row in everything],
    }
    columns = {name: cells for name, cells in columns.items() if set(cells) - {"-"}}
    if console.width < WIDE and len(columns) > MAX_NARROW:
        columns.pop("largest loss", None)
    table = Table(box=None, pad_edge=False)
    table.add_column(request.by, overflow="fold", min_width=10)
    for name in columns:
        table.add_column(name, justify="left" if name == "largest loss" else "right", no_wrap=True)
    for index, row in enumerate(everything):
        table.add_row(Text(row.group), *(Text(cells[index]) for cells in columns.values()))
    console.print(table)
    for line in _notes(found):
        console.print(Text(line))


def _notes(found: Totals) -> Iterator[str]:
    if (more := len(found.rows) - MAX_ROWS) > 0:
        yield f"{more:,} more groups: --csv and --json print all groups"
    if found.total.incomplete and found.total.joules is not None:
        yield f"≥: {found.total.incomplete:,} runs have no total energy; their measured part is counted"
    yield "wasted: GPU-hours outside of kept steps and generation; ±: timing and sensor errors"
    yield from (f"skipped: {one_line(line)}" for line in found.skipped[:MAX_SKIPPED])
    if (more := len(found.skipped) - MAX_SKIPPED) > 0:
        yield f"skipped: {more:,} more"


def _cost(row: LedgerRow) -> float | None:
    known = [cost for cost in (row.gpu_cost, row.electricity_cost) if cost is not None]
    return max(known) if known else None  # the price of a GPU-hour includes the electricity


def _waste(row: LedgerRow) -> str:
    return readable(row.wasted_gpu_hours) if row.goodput_ratio is not None else "-"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else readable(value)


def _energy(row: LedgerRow) -> str:
    if row.joules is None:
        return "-"
    return ("≥" if row.incomplete else "") + readable(row.joules / J_PER_KWH)


def _error(row: LedgerRow) -> str:
    """Return an upper bound of the relative error: the timing and the sensor errors, added."""
    error = row.error_joules + row.gain_joules
    return f"{rounded_up(100 * error / row.joules)} %" if row.joules and error else "-"
