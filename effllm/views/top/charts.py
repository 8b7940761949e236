"""The windows of a run as curves: a line each, or charts with axes on a large screen; and ranks by window as a map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

from rich.cells import cell_len

from effllm.records.job import WindowReport
from effllm.views.text.numbers import readable, scaled
from effllm.views.top.frame import SECONDS_TAG, RankTimes, TopFrame
from effllm.views.top.text import BAD, BARS, DIM, PLAIN, WARNING, Line, fit, local_time, sparkline

MAX_CURVES = 4
CHART_HEIGHT = 7  # with the line of its name and the one of its times
_LABEL_WIDTH = 8  # width of the numbers of an axis
_NAME_WIDTH, _MIN_CURVE_WIDTH = 10, 10
_TWO_COLUMNS_WIDTH = 70  # from this width on, the lines of curves are in two columns
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a letter of Braille: rows, columns
#: Ratio of a rank's own time to the median of the ranks, from which a cell of the map has this letter, ASCII, style.
_MAP_CELLS = ((1.1, "█", "#", BAD), (1.05, "▓", "+", WARNING), (1.02, "░", "-", PLAIN), (0.0, "·", ".", DIM))


class _Curve(NamedTuple):
    name: str
    tag: str  # of the values of a window; "" is its loss
    text_of: Callable[[float], str]


_CURVES = (
    _Curve("loss", "", readable),
    _Curve("tok/s/GPU", "throughput/tokens_per_second_per_gpu", lambda value: "".join(scaled(value))),
    _Curve("W/GPU", "energy/watts_per_gpu", readable),
    _Curve("MFU %", "throughput/mfu_ratio", lambda value: readable(100 * value)),
    _Curve("s/it", SECONDS_TAG, readable),
)


def _drawable(frame: TopFrame) -> list[tuple[_Curve, list[float | None]]]:
    """Return the first curves with at least two values."""
    has_gpus = frame.coverage is None or frame.coverage.gpus_expected > 0
    curves = _CURVES if has_gpus else [curve._replace(name=curve.name.replace("GPU", "rank")) for curve in _CURVES]
    series = (
        (curve, [point.values.get(curve.tag) if curve.tag else point.loss for point in frame.points])
        for curve in curves
    )
    return list(islice((pair for pair in series if sum(value is not None for value in pair[1]) > 1), MAX_CURVES))


def spark_lines(frame: TopFrame, width: int, bars: str) -> list[Line]:
    """Return the curves as lines, each with its lowest and highest value, in one or two columns."""
    columns = 2 if width >= _TWO_COLUMNS_WIDTH else 1
    curves = (_spark_cells(curve, values, width // columns - 1, bars) for curve, values in _drawable(frame))
    cells = list(filter(None, curves))  # without those for which there is no room
    return [[part for cell in cells[n : n + columns] for part in cell] for n in range(0, len(cells), columns)]


def _spark_cells(curve: _Curve, values: Sequence[float | None], width: int, bars: str) -> list[tuple[str, int]]:
    measured = [value for value in values if value is not None]
    limits = f" {curve.text_of(min(measured))} to {curve.text_of(max(measured))}"
    room = width - _NAME_WIDTH - cell_len(limits)
    if room < _MIN_CURVE_WIDTH:
        return []
    text = sparkline(values, room, bars)
    limits = fit(limits, width - _NAME_WIDTH - cell_len(text) + 1)
    return [(fit(curve.name, _NAME_WIDTH), DIM), (text, PLAIN), (limits, DIM)]


def chart_lines(frame: TopFrame, width: int, bars: str) -> list[Line]:
    """Return charts of `CHART_HEIGHT` lines in two columns, with the values and the times of their axes."""
    charts = [_chart_rows(curve, values, frame.points, width // 2 - 1, bars) for curve, values in _drawable(frame)]
    lines: list[Line] = []
    for first in range(0, len(charts), 2):
        pair = charts[first : first + 2]
        lines += [[part for chart in pair for part in chart[row]] for row in range(CHART_HEIGHT)]
    return lines


def _chart_rows(
    curve: _Curve, values: Sequence[float | None], points: Sequence[WindowReport], width: int, bars: str
) -> list[list[tuple[str, int]]]:
    measured = [value for value in values if value is not None]
    least, most = min(measured), max(measured)
    room, height = width - _LABEL_WIDTH - 1, CHART_HEIGHT - 2
    drawn = braille(values, room, height) if bars == BARS else [sparkline(values, room, bars)] * height
    lines = [[(fit(f"{curve.name}: {curve.text_of(measured[-1])}", width + 1), DIM)]]
    labels = {0: curve.text_of(most), height - 1: curve.text_of(least)}
    for row, text in enumerate(drawn):
        lines.append([(fit(labels.get(row, ""), _LABEL_WIDTH, right=True) + " ", DIM), (fit(text, room + 1), PLAIN)])
    begin, end = (local_time("%H:%M:%S", point.time_s) for point in (points[0], points[-1]))
    times = f"{begin}{end:>{max(room - len(begin), 0)}}"
    return [*lines, [(" " * (_LABEL_WIDTH + 1) + fit(times, room + 1), DIM)]]


def braille(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """Return a curve as lines of letters of Braille, each with two columns and four rows of dots.

    >>> braille([0.0, 1.0, 2.0, 3.0], 2, 1)
    ['⡠⠊']
    """
    measured = [value for value in values if value is not None]
    least = min(measured)
    scale = (4 * height - 1) / (max(measured) - least) if max(measured) > least else 0.0
    cells = [[0] * width for _ in range(height)]
    previous_row: int | None = None  # rows of dots from the top
    for column in range(2 * width):
        value = values[round(column * (len(values) - 1) / max(2 * width - 1, 1))]
        if value is None:
            previous_row = None
            continue
        row = 4 * height - 1 - round((value - least) * scale)
        # A steep part is drawn without gaps.
        first = row
        if previous_row is not None and abs(previous_row - row) > 1:
            first = previous_row + (1 if row > previous_row else -1)
        for dot in range(min(first, row), max(first, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        previous_row = row
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def rank_map_lines(rank_times: RankTimes, width: int, height: int, bars: str) -> list[Line]:
    """Return the ranks that are slowest against the median of each window, window by window; empty without a median.

    Another set of letters than `BARS` means a terminal with ASCII alone.
    """
    room = width - 13  # beside the names of the ranks
    windows = [(times, median(times.values())) for times in rank_times if len(times) > 2][-room:]
    ratios = [{rank: time_s / median_s for rank, time_s in times.items()} for times, median_s in windows if median_s]
    if not ratios or height < 2:
        return []
    excess: dict[int, float] = {}
    for by_rank in ratios:
        for rank, ratio in by_rank.items():
            excess[rank] = excess.get(rank, 0.0) + max(ratio - 1.0, 0.0)
    shown = sorted(excess, key=lambda rank: (-excess[rank], rank))[: height - 1]
    cells = [(ratio, letter if bars == BARS else in_ascii, style) for ratio, letter, in_ascii, style in _MAP_CELLS]
    key = ", ".join(f"{letter} +{100 * (ratio - 1):.0f} %" for ratio, letter, _ in cells[:-1])
    head = f"own time of ranks against the median of each window, newest right: {key}"
    lines: list[Line] = [[(fit(head, width), DIM)]]
    for rank in sorted(shown):
        line: list[tuple[str, int]] = [(fit(f"rank {rank}", 12, right=True) + " ", PLAIN)]
        for by_rank in ratios:
            own_ratio = by_rank.get(rank)
            if own_ratio is None:
                text, style = " ", DIM
            else:
                text, style = next((letter, style) for ratio, letter, style in cells if own_ratio >= ratio)
            if line[-1][1] == style and len(line) > 1:  # neighbours of one style are one part
                line[-1] = line[-1][0] + text, style
            else:
                line.append((text, style))
        lines.append(line)
    return lines
