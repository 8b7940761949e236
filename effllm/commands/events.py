"""``effllm events``: every kind of event, where it is shown, and its meaning."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from effllm.records.events import KINDS, Kind


def main(*, as_markdown: bool) -> None:
    """Print the registry of kinds, as text or as the table of docs/events.md."""
    if as_markdown:
        print("\n".join(_markdown()))
        return
    console = Console(highlight=False)
    for name, kind in KINDS.items():
        console.print(Text(name, style="cyan").append(f" ({_place(kind)})", style="default"), soft_wrap=True)
        console.print(Padding(Text(kind.help), (0, 0, 0, 4)))


def _place(kind: Kind) -> str:
    return kind.level + (", coloured" if kind.is_problem else "")


def _markdown() -> list[str]:
    rows = [f"| `{name}` | {_place(kind)} | {kind.help} |" for name, kind in KINDS.items()]
    return ["| kind | where | meaning |", "|---|---|---|", *rows]
