"""``effllm explain``: what a metric, an event, a cause of a verdict or a setting means."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from effllm.commands.output import complain, form_of
from effllm.config.settings import ALL_VARIABLES
from effllm.config.switches import PREFIX
from effllm.job.remedies import REMEDIES, remedy
from effllm.metrics import METRICS
from effllm.metrics.output_names import chart_tag
from effllm.records.events import KINDS, Kind
from effllm.records.verdict import CAUSES

WIDTH = 80


class Entry(NamedTuple):
    """A name that effllm shows."""

    name: str
    what: str  # metric, event, cause or setting
    about: str  # the unit of a metric, the output of an event
    text: str
    metric: str = ""  # its name in summary.json


def main(names: Sequence[str] | None, as_json: bool, as_markdown: bool) -> int:
    """Print entries, or one line of each without a name; return the exit status."""
    form = form_of(json=as_json, markdown=as_markdown)
    if form == "markdown":
        rows = [f"| `{name}` | {_place(kind)} | {kind.help} |" for name, kind in KINDS.items()]
        print("\n".join(["| kind | where | meaning |", "|---|---|---|", *rows]))
        return 0
    found = list(_entries())
    for name in names or ():
        if not _named(found, name):
            names_of_all = [_short(one.metric or one.name) for one in found]
            near = difflib.get_close_matches(name.lower(), names_of_all, 3)
            return complain("explain", f"{name!r} has no entry" + f"; near: {', '.join(near)}" * bool(near), 1)
    shown = [entry for name in names for entry in _named(found, name)] if names else found
    if form == "json":
        print(json.dumps([entry._asdict() for entry in shown], indent=1))
        return 0
    console = Console(highlight=False)
    for entry in shown:
        about = f", {entry.about}" if entry.about else ""
        console.print(Text(entry.name, style="cyan").append(f" ({entry.what}{about})", style="default"), soft_wrap=True)
        console.print(Padding(Text(entry.text), (0, 0, 0, 4)))
    return 0


def _named(found: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries of a name: a tag of a chart, or with another letter case or separator, has the same ones."""
    if exact := [one for one in found if one.name.lower() == name.lower()]:
        return exact
    short = name.lower().replace("-", "_").replace(" ", "_").rpartition("/")[2]
    return [one for one in found if short in (_short(one.name), _short(one.name.removeprefix(PREFIX)), one.metric)]


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


def _entries() -> Iterator[Entry]:
    for metric in METRICS.values():
        bases = ", ".join(metric.bases) + ("" if metric.chart else "; no chart")
        text = f"{metric.help} Of: {bases}."
        yield Entry(chart_tag(metric.tag(metric.bases[0])), "metric", metric.unit, text, metric.name)
    for name, kind in KINDS.items():
        yield Entry(name, "event", _place(kind), kind.help)
    for cause, meaning in CAUSES.items():
        following = f" Next: {remedy(cause, {}).text}." if cause in REMEDIES else ""
        yield Entry(cause, "cause", "", f"{meaning}.{following}")
    for one in ALL_VARIABLES:
        yield Entry(PREFIX + one.name, "setting", one.group, f"{one.meaning} Allowed: {one.value_type.allowed}.")


def _place(kind: Kind) -> str:
    return kind.level + (", coloured" if kind.is_problem else "")
