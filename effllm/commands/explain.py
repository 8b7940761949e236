"""Explain a metric, event, cause, setting, column or GPU.

Without a name, all but the columns and GPUs are listed. A name may be a tag of a chart.

\b
Examples:
  effllm explain mfu_ratio
  effllm explain efficientllm/al_seconds device_idle xid LOG_INTERVAL
  effllm explain ranks.energy_j "NVIDIA H100 NVL"
  effllm explain | grep -A1 energy
  effllm explain --json | jq '.[] | select(.what == "metric") | .name'

Exit status: 0 success, 1 a name has no entry, 2 wrong use.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from effllm.analysis.column import COLUMNS
from effllm.commands.output import complain, form_of
from effllm.config.settings import ALL_VARIABLES
from effllm.config.switches import PREFIX
from effllm.devices.known.hardware import find_by_driver_name, find_by_typed_words
from effllm.job.causes import AVOIDABLE, remedy
from effllm.metrics import METRICS
from effllm.metrics.output_names import chart_tag
from effllm.records.events import KINDS, Kind
from effllm.records.verdict import CAUSES, PARTS

WIDTH = 80
_ON_SCREENS = {  # short names of metrics on screens
    "goodput": "goodput_ratio",
    "j/token": "joules_per_token",
    "j/tok": "joules_per_token",
    "tok/s/gpu": "tokens_per_second_per_gpu",
    "w/gpu": "watts_per_gpu",
}


class Entry(NamedTuple):
    """A name that effllm shows."""

    name: str
    what: str  # metric, event, cause, part of the waterfall, setting, column or GPU
    about: str  # the unit of a metric or a column, the output of an event
    text: str
    metric: str = ""  # its name in summary.json


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Metrics, events, causes, settings, columns or GPUs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/events.md.")] = False,
) -> int:
    """Print entries, or one line of each without a name; return the exit status."""
    form = form_of(json=as_json, markdown=as_markdown)
    if form == "markdown":
        rows = [f"| `{name}` | {_level_text(kind)} | {kind.help} |" for name, kind in KINDS.items()]
        print("\n".join(["| kind | where | meaning |", "|---|---|---|", *rows]))
        return 0
    entries = list(_all_entries())
    shown = [entry for name in names for entry in _entries_named(entries, name)] if names else entries
    status = 0
    for name in names or ():
        if not _entries_named(entries, name):
            names_of_all = dict.fromkeys(_ending(entry.metric or entry.name) for entry in entries)
            near = difflib.get_close_matches(name.lower(), names_of_all, 3)
            status = complain("explain", f"{name!r} has no entry" + f"; near: {', '.join(near)}" * bool(near), 1)
    if form == "json":
        print(json.dumps([entry._asdict() for entry in shown], indent=1))
        return status
    console = Console(highlight=False)
    for entry in shown:
        about = f", {entry.about}" if entry.about else ""
        console.print(Text(entry.name, style="cyan").append(f" ({entry.what}{about})", style="default"), soft_wrap=True)
        console.print(Padding(Text(entry.text), (0, 0, 0, 4)))
    return status


def _entries_named(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries of a name.

    A tag of a chart, or another letter case or separator, has the same entries; a metric may be named without its unit,
    as on the screens: AMU for amu_gb.
    """
    exact = [entry for entry in entries if entry.name.lower() == name.lower()]
    if any("/" in entry.name for entry in exact):  # a whole tag names one metric
        return exact
    key = name.lower().replace("-", "_").replace(" ", "_")
    key = _ON_SCREENS.get(key) or key.rpartition("/")[2]
    same = [row for row in entries if key in (_ending(row.name), _ending(row.name.removeprefix(PREFIX)), row.metric)]
    without_unit = [entry for entry in entries if entry.metric.startswith(f"{key}_")]
    return list(dict.fromkeys([*exact, *same, *without_unit])) or [*_columns_named(name)] or [*_gpu_named(name)]


def _ending(name: str) -> str:
    """Return the last part of a tag, in small letters."""
    return name.lower().rpartition("/")[2]


def _all_entries() -> Iterator[Entry]:
    """Yield all entries but those of columns and GPUs."""
    for metric in METRICS.values():
        bases = ", ".join(metric.bases) + ("" if metric.chart else "; no chart")
        text = f"{metric.help} Of: {bases}."
        name = metric.name if metric.name != "ratio" else f"{metric.group}_ratio"
        yield Entry(chart_tag(metric.tag(metric.bases[0])), "metric", metric.unit, text, name)
    for name, kind in KINDS.items():
        yield Entry(name, "event", _level_text(kind), kind.help)
    for cause, meaning in CAUSES.items():
        following = f" Next: {remedy(cause, {}).text}." if cause in AVOIDABLE else ""
        yield Entry(cause, "cause", "", f"{meaning}.{following}")
    yield from (Entry(part, "part of the waterfall", "", f"{text}.") for part, text in PARTS.items())
    for row in ALL_VARIABLES:
        yield Entry(PREFIX + row.name, "setting", row.group, f"{row.meaning} Allowed: {row.value_type.allowed}.")


def _columns_named(name: str) -> Iterator[Entry]:
    """Yield the columns with a name, of all tables or of one: energy_j, ranks.energy_j."""
    for table, columns in COLUMNS.items():
        for column in columns:
            if name.lower() in (column.name, f"{table}.{column.name}"):
                yield Entry(f"{table}.{column.name}", "column", f"{column.type} {column.unit}".strip(), column.meaning)


def _gpu_named(name: str) -> Iterator[Entry]:
    if row := find_by_driver_name(name) or find_by_typed_words(name):
        rates = ", ".join(f"{precision} {rate / 1e12:.6g}" for precision, rate in row.flops_per_s.items())
        text = f"Dense TFLOP/s: {rates or 'unknown'}. {row.note}".strip()
        if row.gain_measured:
            text += " Against a meter, its readings of power were off by {:+.1%} to {:+.1%}.".format(*row.gain_measured)
        text += f" Source ({row.source.evidence}): {row.source.title}, {row.source.url}"
        yield Entry(row.names[0], "GPU", row.architecture, text)


def _level_text(kind: Kind) -> str:
    return kind.level + (", coloured" if kind.is_problem else "")
