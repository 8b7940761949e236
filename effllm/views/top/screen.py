"""The screen as lines of text: the head with verdict, values and curve, one pane, and the keys. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from effllm.records.forecast import REMAINING_S
from effllm.records.plain_text import one_line
from effllm.records.verdict import HEALTHY, NO_VERDICT, NONE_FOUND
from effllm.views.text.closing import forecast_texts
from effllm.views.text.numbers import count_text, duration, energy_amount, readable, scaled
from effllm.views.text.summary import verdict_lines
from effllm.views.top.charts import chart_lines, spark_lines
from effllm.views.top.frame import BROKEN, TopFrame
from effllm.views.top.panes import pane_lines, table_height
from effllm.views.top.text import BAD, BARS, BOLD, DIM, GOOD, PLAIN, REVERSE, WARNING, Line, clipped, fit, local_time
from effllm.views.top.view_state import RANKS, SPEEDS, TopView

CELL_WIDTH = 20  # width of a value with its name
MAX_COLUMNS = 6
MIN_WIDTH, MIN_HEIGHT = 20, 6
CHARTS_FROM = (120, 40)  # from this size on, curves are charts
MAX_RANKS_WITH_REPORTS = 256  # in jobs above this size, the run folder has only the reports of outliers
_KEYS = "q quit  ? help  e events  w waterfall  g hosts  s sort  / filter  space replay"
_STYLE_OF_STATUS = {"completed": GOOD, "running": GOOD, "interrupted": WARNING, "ended": WARNING, "no_update": WARNING}


class Cell(NamedTuple):
    """One value: its name, and the tags of which the first with a value is shown."""

    name: str
    tags: tuple[str, ...]
    text_of: Callable[[float], str]


def _scaled(value: float) -> str:
    return " ".join(scaled(value)).rstrip()


def _percent_text(value: float) -> str:
    return f"{readable(100 * value)} %"


CELLS = (
    Cell("tok/s/GPU", ("throughput/tokens_per_second_per_gpu",), _scaled),
    Cell("MFU", ("throughput/mfu_ratio",), _percent_text),
    Cell("per token", ("energy/joules_per_token", "run_energy/joules_per_token"), lambda value: f"{_scaled(value)}J"),
    Cell("goodput", ("goodput/ratio",), _percent_text),
    Cell("iteration", ("throughput/seconds_per_iteration",), lambda value: f"{readable(value)} s"),
    Cell("data wait", ("throughput/data_wait_ratio",), _percent_text),
    Cell("power", ("energy/watts_per_gpu",), lambda value: f"{readable(value)} W"),
    Cell("peak mem", ("memory/peak_gb",), lambda value: f"{readable(value)} GB"),
    Cell("tok/s", ("throughput/tokens_per_second",), _scaled),
    Cell("busy", ("window/pcu_ratio", "pcu_ratio"), _percent_text),
    Cell("energy", ("energy/total_joules",), energy_amount),
    Cell("exposed", ("throughput/exposed_communication_ratio",), _percent_text),
)


def value_lines(frame: TopFrame, width: int) -> list[Line]:
    """Return the values in as many columns as fit."""
    columns = max(min(width // CELL_WIDTH, MAX_COLUMNS), 1)
    cells = list(_styled_cells(frame))
    return [[part for cell in cells[n : n + columns] for part in cell] for n in range(0, len(cells), columns)]


def _styled_cells(frame: TopFrame) -> Iterator[list[tuple[str, int]]]:
    has_gpus = frame.coverage is None or frame.coverage.gpus_expected > 0
    for cell in CELLS:
        tag = next((tag for tag in cell.tags if math.isfinite(frame.values.get(tag, math.nan))), None)
        name = cell.name if has_gpus else cell.name.replace("GPU", "rank")
        text, style = ("-", PLAIN) if tag is None else (cell.text_of(frame.values[tag]), BOLD)
        if tag in frame.doubtful:
            text, style = f"{text}?", WARNING
        yield [(f"{name} ", DIM), (fit(text, CELL_WIDTH - len(name) - 2), style), (" ", PLAIN)]


def render(frame: TopFrame, view: TopView, width: int, height: int, notice: str = "", bars: str = BARS) -> list[Line]:
    """Return the lines of a screen: at most ``height`` lines of at most ``width`` cells.

    ``notice`` is a line about the source, such as a disk that does not answer; ``bars`` are the letters of curves.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return [clipped([("terminal too small", PLAIN)], width)][:height]
    head = head_lines(frame, width, height, bars)
    foot = list(_foot_lines(frame, view, width, notice))
    room = max(height - len(head) - len(foot), 0)
    body = pane_lines(frame, view, width, room, bars)[:room]
    blank: list[Line] = [[]] * (room - len(body))
    return [clipped(line, width) for line in [*head, *body, *blank, *foot]][:height]


def page_height(frame: TopFrame, width: int, height: int, view: TopView) -> int:
    """Return the number of lines of the pane that the screen shows, without the header of the pane."""
    room = height - len(head_lines(frame, width, height)) - len(list(_foot_lines(frame, view, width, "")))
    return max((table_height(room) if view.pane == RANKS else room) - 1, 1)


def head_lines(frame: TopFrame, width: int, height: int, bars: str = BARS) -> list[Line]:
    """Return the lines above the pane."""
    is_brief = height < 16  # a terminal that has no room for more
    max_shown = 1 if is_brief else 3  # lines of the verdict, and problems
    lines: list[Line] = [_title(frame, width), *_verdict_lines(frame)[:max_shown], *value_lines(frame, width)]
    if not is_brief:
        is_large = width >= CHARTS_FROM[0] and height >= CHARTS_FROM[1]
        lines += chart_lines(frame, width, bars) if is_large else spark_lines(frame, width, bars)
    lines += [[("!! " + one_line(problem.text), BAD)] for problem in frame.problems[:max_shown]]
    if (more := len(frame.problems) - max_shown) > 0 and not is_brief:
        lines.append([(f"!! {count_text(more, 'more problem')}: effllm top --once --json lists all", BAD)])
    return lines


class TitlePart(NamedTuple):
    """A part of the first line."""

    text: str
    style: int
    drop_order: int  # the part with the highest number is left out first


def _title(frame: TopFrame, width: int) -> Line:
    shown = [TitlePart(*part) for part in _title_parts(frame)]
    while sum(cell_len(part.text) + 2 for part in shown) > width and len(shown) > 2:  # 2: blanks, also after the last
        shown.remove(max(shown, key=lambda part: part.drop_order))
    name, *others = shown
    width_of_others = sum(cell_len(part.text) + 2 for part in others)
    line = [(fit(name.text, min(cell_len(name.text), max(width - width_of_others, 8))), name.style)]
    return line + [cell for part in others for cell in (("  ", PLAIN), (part.text, part.style))]


def _title_parts(frame: TopFrame) -> Iterator[tuple[str, int, int]]:
    """Yield the fields of each `TitlePart` of the first line."""
    head, coverage = frame.head, frame.coverage
    yield one_line(head.name), BOLD, 0
    status = one_line(head.status).replace("_", " ")
    yield status, BAD if head.status in BROKEN else _STYLE_OF_STATUS.get(head.status, PLAIN), 0
    if head.simulated:
        yield "SIMULATED", WARNING, 1
    if head.iteration is not None:
        of_total = f"/{head.total_iterations}" if head.total_iterations else ""
        yield f"{'it' if head.style == 'Iteration' else 'step'} {head.iteration}{of_total}", PLAIN, 2
    if coverage is not None:
        yield f"ranks {_of_expected(coverage.ranks_reporting, coverage.ranks_expected)}", PLAIN, 3
    if head.elapsed_s is not None:
        yield duration(head.elapsed_s), PLAIN, 4
    if (remaining := head.forecast.get(REMAINING_S)) is not None:
        yield f"eta {duration(remaining.value)}", PLAIN, 5
        yield f"at its end: {', '.join(forecast_texts(head.forecast, head.currency))}", DIM, 9
    if coverage is not None and coverage.gpus_expected:
        yield f"GPUs {_of_expected(coverage.gpus_measured, coverage.gpus_expected)}", PLAIN, 6
    if frame.over:
        yield frame.over, DIM, 4
    if head.user:
        yield one_line(head.user), DIM, 7
    if (head.attempt or 1) > 1:
        yield f"attempt {head.attempt}", PLAIN, 8


def _of_expected(have: int, expected: int) -> str:
    return f"{have:,}" if have == expected else f"{have:,}/{expected:,}"


def _verdict_lines(frame: TopFrame) -> list[Line]:
    if frame.verdict is None:
        why = "none in the summary" if frame.head.is_over else "none yet: the first one is written after some seconds"
        return [[("Verdict  ", DIM), (why, PLAIN)]]
    style = {HEALTHY: GOOD, NONE_FOUND: GOOD, NO_VERDICT: PLAIN}.get(frame.verdict.cause, WARNING)
    lines: list[Line] = []
    for name, text in verdict_lines(frame.verdict):
        is_first = name == "Verdict"
        note = f"  ({frame.verdict_note})" if is_first and frame.verdict_note else ""
        lines.append([(f"{name:<9}", DIM), (text, style if is_first else PLAIN), (note, DIM)])
    return lines


def _foot_lines(frame: TopFrame, view: TopView, width: int, notice: str) -> Iterator[Line]:
    if notice:
        yield [(one_line(notice), WARNING)]
    notes = [*frame.notes, *_outlier_note(frame)] if view.pane == RANKS else frame.notes
    for note in notes:
        yield [(one_line(note), DIM)]
    if view.is_typing or view.order.text:
        yield [("filter: ", DIM), (one_line(view.order.text), BOLD), ("_" if view.is_typing else "  (Esc clears)", DIM)]
    place = frame.place
    if not place.is_newest or view.is_playing:
        moment = "" if place.time_s is None else local_time(" %Y-%m-%d %H:%M:%S", place.time_s)
        speed = f"{SPEEDS[view.speed]} windows/s" if view.is_playing else "paused"
        text = f"replay{moment}  window {place.window}  {100 * place.share:.0f} %  {speed}  End: newest"
        yield [(fit(text, width), REVERSE)]
    else:
        yield [(fit(_KEYS, width), REVERSE)]


def _outlier_note(frame: TopFrame) -> Iterator[str]:
    """Yield a line if most ranks have no values in the run folder."""
    coverage = frame.coverage
    if coverage is not None and not frame.ranks.is_complete and frame.place.window is not None:
        count = sum(line.step_s is not None for line in frame.ranks.known_lines)
        why = ": above 256 ranks only outliers are kept" if coverage.ranks_expected > MAX_RANKS_WITH_REPORTS else ""
        yield f"values of {count:,} of {coverage.ranks_expected:,} ranks{why}"


def plain_frame(frame: TopFrame, width: int, height: int, bars: str = BARS) -> Sequence[Line]:
    """Return one screen without the line of the keys, for plain text."""
    lines = render(frame, TopView(), width, height + 1, bars=bars)[:-1]
    while lines and not lines[-1]:
        lines.pop()
    return lines
