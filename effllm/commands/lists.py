"""``effllm metrics`` and ``effllm events``: all metrics, and all kinds of events."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from effllm.metrics import METRICS
from effllm.metrics.output_names import chart_tag
from effllm.records.events import KINDS, Kind


def print_metrics() -> None:
    for entry in METRICS.values():
        over = ", ".join(entry.bases) + ("" if entry.chart else "; no chart")
        _print(chart_tag(entry.tag(entry.bases[0])), f" {entry.unit} ({over})", entry.help)


def print_events(*, as_markdown: bool) -> None:
    if as_markdown:
        rows = [f"| `{name}` | {_place(kind)} | {kind.help} |" for name, kind in KINDS.items()]
        print("\n".join(["| kind | where | meaning |", "|---|---|---|", *rows]))
        return
    for name, kind in KINDS.items():
        _print(name, f" ({_place(kind)})", kind.help)


def _print(name: str, about: str, text: str) -> None:
    console = Console(highlight=False)
    console.print(Text(name, style="cyan").append(about, style="default"), soft_wrap=True)
    console.print(Padding(Text(text), (0, 0, 0, 4)))


def _place(kind: Kind) -> str:
    return kind.level + (", coloured" if kind.is_problem else "")
