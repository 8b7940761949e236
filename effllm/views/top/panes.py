"""The panes of the screen: the table of ranks or hosts, the events, the waterfall, and the help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import islice

from rich.cells import cell_len

from effllm.records.events import is_problem
from effllm.records.plain_text import one_line
from effllm.views.text.numbers import readable
from effllm.views.top.charts import rank_map_lines
from effllm.views.top.frame import TopFrame
from effllm.views.top.ranks import REASONS, HostLine, RankLine
from effllm.views.top.text import BAD, BARS, BOLD, DIM, PLAIN, WARNING, Line, fit, local_time
from effllm.views.top.view_state import EVENTS, HELP, KEYS, RANKS, WATERFALL, TopView
from effllm.views.waterfall_text import WaterfallUnits, waterfall_header, waterfall_notes, waterfall_row

#: Columns of the table: name and width; the reason has the rest of the line.
_COLUMNS = {"step s": 7, "wait": 4, "W": 5, "GB": 5}
#: Column -> its part of the maximum of the GPU.
_RATIOS = {"busy": "busy_ratio", "W": "power_ratio", "GB": "memory_ratio"}
_WIDE_COLUMNS = {**_COLUMNS, "busy": 5, "degC": 4}
_WIDE = 100  # from this width on, the table has more columns, and hosts have more room
_WHOLE_REASONS = 6  # number of lines of the table, from its start, in which reasons are shown as a whole
#: From a height on, the map of the ranks and the newest events are below the table: height, and number of their lines.
_SPLIT_HEIGHTS, _MAP_LINES = ((30, 16), (18, 7)), 7
_BARS_WIDTH = 120  # from this width on, numbers have bars, and the map is shown
_BAR = 6  # width of a bar
_BAD_REASONS = ("lost", "failed", "device_error", "missing")
_WARNING_REASONS = ("straggler", "throttled")


def pane_lines(frame: TopFrame, view: TopView, width: int, height: int, bars: str = BARS) -> Sequence[Line]:
    """Return the header and the lines of the pane that the view shows."""
    if view.pane == RANKS:
        room = table_height(height)
        table = _table_lines(frame, view, width, room, bars)
        if room == height:
            return table
        below = rank_map_lines(frame.rank_times, width, _MAP_LINES, bars) if width >= _BARS_WIDTH else []
        num_events = height - room - 1 - len(below)
        below += _event_lines(frame, width)[:num_events] if num_events > 1 else []
        blank: list[Line] = [[]] * (room - len(table) + 1)
        return [*table, *blank, *below]
    lines = pane_content(frame, view, width)
    return [lines[0], *lines[1 + view.offset : view.offset + height]] if lines else []


def table_height(height: int) -> int:
    """Return the number of lines of the table with its header, in a pane of this height."""
    return next((height - lines - 1 for min_height, lines in _SPLIT_HEIGHTS if height >= min_height), height)


def num_lines_of(frame: TopFrame, view: TopView, width: int) -> int:
    """Return the number of lines of the pane, without its header."""
    return len(frame.lines) if view.pane == RANKS else len(pane_content(frame, view, width)) - 1


def pane_content(frame: TopFrame, view: TopView, width: int) -> list[Line]:
    """Return the header and all lines of a pane other than the table."""
    return {EVENTS: _event_lines, WATERFALL: _waterfall_lines, HELP: _help_lines}[view.pane](frame, width)


def _table_lines(frame: TopFrame, view: TopView, width: int, height: int, bars: str = BARS) -> list[Line]:
    columns, host_width = (_WIDE_COLUMNS, 32) if width >= _WIDE else (_COLUMNS, 14)
    if has_bars := width >= _BARS_WIDTH:
        columns, host_width = {name: cells + (_BAR + 1) * (name in _RATIOS) for name, cells in columns.items()}, 20
    shown = frame.lines[view.offset : view.offset + height - 1]
    if view.order.by_host:
        head = fit("host", host_width + 1) + fit("ranks", 6, right=True)
    else:
        head = fit("rank", 6, right=True) + " " + fit("host", host_width)
    head += "".join(fit(name, cells + 1, right=True) for name, cells in columns.items())
    lines: list[Line] = [[(head, DIM), ("  reason" if view.order.sort == "reason" else f"  by {view.order.sort}", DIM)]]
    for line in shown:
        numbers = "".join(
            fit(_number_text(line, name) + (_ratio_bar(line, name, bars) if has_bars else ""), cells + 1, right=True)
            for name, cells in columns.items()
        )
        text, worst = (_host_reason(line), line.worst) if isinstance(line, HostLine) else (line.text, line)
        style = BAD if worst.reason in _BAD_REASONS else WARNING if worst.reason in _WARNING_REASONS else PLAIN
        start = f"{_rank_and_host(line, host_width)}{numbers}  "
        room = max(width - cell_len(start), 20)
        parts = textwrap.wrap(one_line(text), room, max_lines=3, placeholder=" …") or [""]
        lines.append([(start, PLAIN), (parts[0], style)])
        if len(lines) <= _WHOLE_REASONS:  # the reasons of the worst have several lines
            lines += [[(" " * cell_len(start), PLAIN), (part, style)] for part in parts[1:]]
        elif len(parts) > 1:
            lines[-1] = [(start, PLAIN), (one_line(text), style)]
    if not shown:
        lines.append([("no rank contains the filter" if view.order.text else "no rank is known yet", DIM)])
    return lines[:height]


def _rank_and_host(line: RankLine | HostLine, host_width: int) -> str:
    if isinstance(line, HostLine):
        return fit(line.host, host_width + 1) + fit(str(line.ranks), 6, right=True)
    return fit(str(line.rank), 6, right=True) + " " + fit(line.host or "-", host_width)


def _host_reason(line: HostLine) -> str:
    count = line.num_with_reason
    return f"{count} of {line.ranks}: rank {line.worst.rank} {line.worst.text}" if count else ""


def _number_text(line: RankLine | HostLine, column: str) -> str:
    value, text = {
        "step s": (line.step_s, readable),
        "wait": (line.wait_ratio, "{:.0%}".format),
        "busy": (line.busy_ratio, "{:.0%}".format),
        "W": (line.watts, "{:.0f}".format),
        "GB": (line.memory_gb, "{:.1f}".format),
        "degC": (line.temperature_c, "{:.0f}".format),
    }[column]
    return "-" if value is None else text(value)


def _ratio_bar(line: RankLine | HostLine, column: str, bars: str) -> str:
    """Return the part of a number in its maximum as a bar; blanks if it is not known."""
    if column not in _RATIOS:
        return ""
    ratio = getattr(line, _RATIOS[column], None) or 0.0
    return f" {bars[-1] * round(_BAR * min(max(ratio, 0.0), 1.0)):<{_BAR}}"


def _event_lines(frame: TopFrame, width: int) -> list[Line]:
    lines: list[Line] = [[(fit("time     kind            event, newest first", width), DIM)]]
    for event in frame.events:
        style = BAD if is_problem(event.kind) else PLAIN
        head = f"{local_time('%H:%M:%S', event.time_s)} {fit(event.kind, 15)} "
        text = one_line(event.text) + (f" ({event.count} times)" if event.count > 1 else "")
        parts = textwrap.wrap(text, max(width - cell_len(head), 20)) or [""]
        lines.append([(head, DIM), (parts[0], style)])
        lines += [[(" " * cell_len(head), PLAIN), (part, style)] for part in islice(parts, 1, 4)]
    if not frame.events:
        lines.append([("no event yet; joined and left ranks are not listed", DIM)])
    return lines


def _waterfall_lines(frame: TopFrame, width: int) -> list[Line]:
    waterfall = frame.waterfall
    if waterfall is None:
        return [[("waterfall", DIM)], [("none yet: the aggregator writes it after a minute", PLAIN)]]
    units = WaterfallUnits.of(waterfall)
    rows = [waterfall_header(units), *(waterfall_row(part, units) for part in waterfall.parts)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    bar_room = max(width - sum(widths) - 2 * len(widths) - 2, 0)
    lines: list[Line] = []
    for number, row in enumerate(rows):  # 0: the header
        text = fit(row[0], widths[0]) + "".join(
            "  " + fit(cell, cells, right=True) for cell, cells in zip(row[1:], widths[1:], strict=True)
        )
        share = waterfall.parts[number - 1].share if number else 0.0
        bar = "#" * min(round(share * bar_room), bar_room)
        lines.append([(text, PLAIN if number else DIM), ("  ", PLAIN), (bar, BOLD)])
    for note in waterfall_notes(waterfall):
        lines += [[(part, DIM)] for part in textwrap.wrap(note, width)]
    return lines


def _help_lines(_frame: TopFrame, _width: int) -> list[Line]:
    lines: list[Line] = [[("keys", DIM)]]
    lines += [[(fit(key, 12), BOLD), (meaning, PLAIN)] for key, meaning in KEYS.items()]
    lines += [[], [("reasons, the worst first", DIM)]]
    lines += [[(fit(name.replace("_", " "), 13), BOLD), (meaning, PLAIN)] for name, meaning in REASONS.items()]
    lines += [[], [("?: after a value: the value depends on a count that failed a check (docs/audit.md)", DIM)]]
    return lines
