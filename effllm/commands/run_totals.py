"""``effllm runs --by KEY``: totals over many runs by outcome, project, user, account, configuration, node or month."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effllm.analysis.ledger import NOTHING, LedgerRow, Totals
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.store.summary_text import J_PER_KWH, readable, rounded_up

WIDTH = 80
MIN_GROUP, MAX_LOSS = 10, 24  # letters
#: Columns that a narrow table leaves out, in this order.
_DISPENSABLE = ("largest loss", "kg CO2", "cost", "±")
_TEXTS = ("largest loss", "started (UTC)", "status", "verdict")
MAX_ROWS, MAX_SKIPPED = 40, 5
MIN_ROWS = 3  # on a terminal, the table has as many rows as fit on one screen
_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


def print_totals(found: Totals, by: str, form: str) -> None:
    """Print totals as text, csv or json."""
    if form == "json":
        rows = [row._asdict() for row in found.rows]
        print(json.dumps({"by": by, "groups": rows, "total": found.total._asdict(), "skipped": found.skipped}))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(LedgerRow._fields)
        writer.writerows(map(csv_cell, row) for row in found.rows)
    else:
        _print(found, by)


def start_of(text: str, now_s: float) -> float:
    """Return the unix time of a date in UTC, or of a number of hours, days or weeks ago.

    Raises:
        ValueError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text):
        return now_s - float(match[1]) * _UNITS_S[match[2]]
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()


def csv_cell(value: str | float | None) -> str | float | None:
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
        "GPU-h": ["≥" * bool(row.without_hours or row.killed) + readable(row.gpu_hours) for row in everything],
        "wasted": [readable(None if row.goodput_ratio is None else row.wasted_gpu_hours) for row in everything],
        "goodput": ["-" if row.goodput_ratio is None else f"{100 * row.goodput_ratio:.1f} %" for row in everything],
        "kWh": [_energy(row) for row in everything],
        "±": [_error(row) for row in everything],
        "cost": [f"{readable(_cost(row))} {row.currency}".strip() for row in everything],
        "kg CO2": [readable(row.co2_kg) for row in everything],
        "slow in": [f"{row.slow_runs:,}" if by == "node" else "-" for row in everything],
        "largest loss": [short((row.cause or "-").replace("_", " ")) for row in everything],
    }
    columns = {name: cells for name, cells in columns.items() if set(cells) - {"-"}}
    print_columns(console, by, [row.group for row in everything], columns, _DISPENSABLE)
    for line in _notes(found, columns, count):
        console.print(Text(line), soft_wrap=True)


def print_columns(
    console: Console,
    first: str,
    names: Sequence[str],
    columns: dict[str, list[str]],
    dispensable: Sequence[str],
    min_width: int = MIN_GROUP,
) -> None:
    """Print a table; if it is too wide, columns are left out in the order of ``dispensable``.

    Args:
        console: where to print.
        first: header of the first column, whose cells are ``names``.
        names: names of the rows.
        columns: the cells of the other columns.
        dispensable: columns that may be left out.
        min_width: of the first column, which is folded.
    """
    left_out = [name for name in dispensable if min_width + _width(columns) > console.width and columns.pop(name, [])]
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold", min_width=min_width)
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    for index, name in enumerate(names):
        table.add_row(Text(name), *(Text(cells[index]) for cells in columns.values()))
    console.print(table)
    if left_out:
        console.print(Text(f"not shown: {', '.join(left_out)}; --csv and --json print all columns"))


def _width(columns: Mapping[str, list[str]]) -> int:
    return sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items())


def short(text: str) -> str:
    return text if len(text) <= MAX_LOSS else f"{text[: MAX_LOSS - 1]}…"


def _notes(found: Totals, columns: Iterable[str], count: int) -> Iterator[str]:
    if (more := len(found.rows) - count) > 0:
        yield f"{more:,} more groups: --csv and --json print all groups"
    if found.total.without_hours:
        yield f"≥ GPU-h: unknown in {_runs(found.total.without_hours)} (no summary.json, or no rank had reported)"
    if found.total.killed:
        yield f"≥ GPU-h: of {_runs(found.total.killed)} without an end, until the last report"
    if found.total.incomplete and found.total.joules is not None:
        yield f"≥ kWh: no total energy in {_runs(found.total.incomplete)}; the measured part is counted"
    if found.total.simulated:
        yield f"simulated: the GPUs of {_runs(found.total.simulated)} were simulated; their energy was not measured"
    if "wasted" in columns:
        yield "wasted: GPU-hours of losses that can be avoided: docs/ledger.md"
    if "±" in columns:
        yield "±: timing and sensor errors of the energy"
    yield from skipped_lines(found.skipped)


def skipped_lines(skipped: Sequence[str]) -> Iterator[str]:
    yield from (f"skipped: {one_line(line)}" for line in skipped[:MAX_SKIPPED])
    if (more := len(skipped) - MAX_SKIPPED) > 0:
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
