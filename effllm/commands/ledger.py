"""``effllm ledger``: totals over many runs by outcome, project, user, configuration, node or month."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effllm.analysis.ledger import KEYS, NOTHING, LedgerRow, Totals, totals
from effllm.analysis.load import load_errors
from effllm.commands.output import ReadingProgress, complain, form_of
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.store.summary_text import J_PER_KWH, readable, rounded_up

WIDTH = 80
MIN_GROUP, MAX_LOSS = 10, 24  # letters
#: Columns that a narrow table leaves out, in this order.
_DISPENSABLE = ("largest loss", "kg CO2", "cost", "±")
MAX_ROWS, MAX_SKIPPED = 40, 5
MIN_ROWS = 3  # on a terminal, the table has as many rows as fit on one screen
_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


def main(folder: Path, by: str, since: str, wasted: bool, as_csv: bool, as_json: bool) -> int:
    """Print the totals; return the exit status."""
    form = form_of(csv=as_csv, json=as_json)
    if by not in KEYS:
        raise typer.BadParameter(f"{by}: the keys are {', '.join(KEYS)}", param_hint="--by")
    try:
        since_s = start_of(since, time.time()) if since else None
    except ValueError:
        expected = "a number of hours, days or weeks (36h, 7d, 4w), or a date"
        return complain("ledger", f"--since {since}: expected {expected}", 2)
    try:
        found = totals(folder, by, since_s, wasted, ReadingProgress())
    except load_errors() as error:
        return complain("ledger", str(error), 1)
    if form == "json":
        rows = [row._asdict() for row in found.rows]
        print(json.dumps({"by": by, "groups": rows, "total": found.total._asdict(), "skipped": found.skipped}))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(LedgerRow._fields)
        writer.writerows(map(_cell, row) for row in found.rows)
    else:
        _print(found, by)
    return 0


def start_of(text: str, now_s: float) -> float:
    """Return the unix time of a date in UTC, or of a number of hours, days or weeks ago.

    Raises:
        ValueError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text):
        return now_s - float(match[1]) * _UNITS_S[match[2]]
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()


def _cell(value: str | float | None) -> str | float | None:
    return csv_file.cell(value) if isinstance(value, str) and value != NOTHING else value


def _print(found: Totals, by: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    count = min(len(found.rows), MAX_ROWS)
    if sys.stdout.isatty():
        while count > MIN_ROWS and _height(found, by, count, console.width) >= console.height:
            count -= 1
    _show(console, found, by, count)


def _height(found: Totals, by: str, count: int, width: int) -> int:
    """Return the number of lines on a terminal."""
    text = io.StringIO()
    _show(Console(file=text, width=width, highlight=False), found, by, count)
    return sum(max(math.ceil(cell_len(line) / width), 1) for line in text.getvalue().splitlines())


def _show(console: Console, found: Totals, by: str, count: int) -> None:
    everything = [*found.rows[:count], found.total]
    columns = {
        "runs": [f"{row.runs:,}" for row in everything],
        "GPU-h": ["≥" * bool(row.without_hours) + readable(row.gpu_hours) for row in everything],
        "wasted": [readable(None if row.goodput_ratio is None else row.wasted_gpu_hours) for row in everything],
        "goodput": ["-" if row.goodput_ratio is None else f"{100 * row.goodput_ratio:.1f} %" for row in everything],
        "kWh": [_energy(row) for row in everything],
        "±": [_error(row) for row in everything],
        "cost": [readable(_cost(row)) for row in everything],
        "kg CO2": [readable(row.co2_kg) for row in everything],
        "slow in": [f"{row.slow_runs:,}" if by == "node" else "-" for row in everything],
        "largest loss": [_cut((row.cause or "-").replace("_", " ")) for row in everything],
    }
    columns = {name: cells for name, cells in columns.items() if set(cells) - {"-"}}
    left_out = [name for name in _DISPENSABLE if _is_too_wide(columns, console.width) and columns.pop(name, [])]
    table = Table(box=None, pad_edge=False)
    table.add_column(by, overflow="fold", min_width=MIN_GROUP)
    for name in columns:
        table.add_column(name, justify="left" if name == "largest loss" else "right", no_wrap=True)
    for index, row in enumerate(everything):
        table.add_row(Text(row.group), *(Text(cells[index]) for cells in columns.values()))
    console.print(table)
    if left_out:
        console.print(Text(f"not shown: {', '.join(left_out)}; --csv and --json print all columns"))
    for line in _notes(found, columns, count):
        console.print(Text(line), soft_wrap=True)


def _is_too_wide(columns: Mapping[str, list[str]], width: int) -> bool:
    return MIN_GROUP + sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items()) > width


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LOSS else f"{text[: MAX_LOSS - 1]}…"


def _notes(found: Totals, columns: Iterable[str], count: int) -> Iterator[str]:
    if (more := len(found.rows) - count) > 0:
        yield f"{more:,} more groups: --csv and --json print all groups"
    if found.total.without_hours:
        yield f"≥ GPU-h: unknown in {_runs(found.total.without_hours)} (no summary.json, or no rank had reported)"
    if found.total.incomplete and found.total.joules is not None:
        yield f"≥ kWh: no total energy in {_runs(found.total.incomplete)}; the measured part is counted"
    if found.total.simulated:
        yield f"simulated: the GPUs of {_runs(found.total.simulated)} were simulated; their energy was not measured"
    if "wasted" in columns:
        yield "wasted: GPU-hours outside of kept steps and generation"
    if "±" in columns:
        yield "±: timing and sensor errors of the energy"
    yield from (f"skipped: {one_line(line)}" for line in found.skipped[:MAX_SKIPPED])
    if (more := len(found.skipped) - MAX_SKIPPED) > 0:
        yield f"skipped: {more:,} more"


def _runs(count: int) -> str:
    return f"{count:,} run{'s' * (count != 1)}"


def _cost(row: LedgerRow) -> float | None:
    known = [cost for cost in (row.gpu_cost, row.electricity_cost) if cost is not None]
    return max(known) if known else None  # the price of a GPU-hour includes the electricity


def _energy(row: LedgerRow) -> str:
    if row.joules is None:
        return "-"
    return ("≥" if row.incomplete else "") + readable(row.joules / J_PER_KWH)


def _error(row: LedgerRow) -> str:
    """Return an upper bound of the relative error: the timing and the sensor errors, added."""
    error = row.error_joules + row.gain_joules
    return f"{rounded_up(100 * error / row.joules)} %" if row.joules and error else "-"
