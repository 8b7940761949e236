"""Styled lines with exact widths on a terminal; untrusted text becomes printable."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from effllm.records.plain_text import one_line

#: Styles of a part of a line; the terminal maps each style to its attributes.
PLAIN, BOLD, DIM, GOOD, WARNING, BAD, REVERSE = range(7)

#: Parts of a line: text and style.
Line = Sequence[tuple[str, int]]

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.,-=+*#"


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return a clean text with exactly ``width`` cells; a longer text ends with "…"."""
    text = one_line(text)
    if (cells := cell_len(text)) > width:
        return _cut(text, width)
    blank = " " * (width - cells)
    return blank + text if right else text + blank


def _cut(text: str, width: int) -> str:
    return f"{set_cell_size(text, width - 1)}…" if width > 0 else ""


def clipped(line: Line, width: int) -> Line:
    """Return a line with at most ``width`` cells."""
    parts: list[tuple[str, int]] = []
    cells_left = width
    for text, style in line:
        cells = cell_len(text)
        if cells > cells_left:
            if cells_left:
                parts.append((_cut(text, cells_left), style))
            break
        parts.append((text, style))
        cells_left -= cells
    return parts


def plain(lines: Iterable[Line]) -> str:
    """Return lines as plain text."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def sparkline(values: Sequence[float | None], width: int, bars: str = BARS) -> str:
    """Return the newest values as bars, one cell per value, between the smallest and the largest of them.

    With more values than cells, each cell shows the largest of several values, so that no peak is lost.

    >>> sparkline([1.0, 2.0, None, 8.0], 10)
    '▁▂ █'
    """
    per_cell = -(-len(values) // width) if width > 0 and values else 1  # rounded up
    cells = []
    for first in range(0, len(values), per_cell):
        measured = [value for value in values[first : first + per_cell] if value is not None]
        cells.append(max(measured) if measured else None)
    shown = [value for value in cells if value is not None]
    if not shown:
        return ""
    least, most = min(shown), max(shown)
    scale = (len(bars) - 1) / (most - least) if most > least else 0.0
    return "".join(" " if value is None else bars[round((value - least) * scale)] for value in cells)


def local_time(form: str, time_s: float) -> str:
    """Return a unix time in the zone of this host; a question mark for a time that no calendar has.

    >>> local_time("%H:%M", 1e300)
    '?'
    """
    try:
        return time.strftime(form, time.localtime(time_s))
    except (OverflowError, OSError, ValueError):
        return "?"
