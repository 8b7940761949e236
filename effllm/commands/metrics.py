"""``effllm metrics``: the table of metrics."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from effllm.metrics import METRICS


def main() -> None:
    """Print every metric: its tag in TensorBoard, its unit, its bases, and its docstring."""
    console = Console(highlight=False)
    for entry in METRICS.values():
        tag = Text(f"efficientllm/{entry.tag(entry.bases[0])}", style="cyan")
        over = ", ".join(entry.bases) + ("" if entry.chart else "; no chart")
        console.print(tag.append(f" {entry.unit} ({over})", style="default"), soft_wrap=True)
        console.print(Padding(Text(entry.help), (0, 0, 0, 4)))
