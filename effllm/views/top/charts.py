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
_NAME, _MIN_SPARK, _TWO_COLUMNS = 10, 10, 70  # widths: of a name and of a curve; from the last on, two columns
#: Own time of a rank in the median of its peers from which a cell has the letter and the style.
_MAP_CELLS = ((1.1, "█", "#", BAD), (1.05, "▓", "+", WARNING), (1.02, "░", "-", PLAIN), (0.0, "·", ".", DIM))
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a letter of Braille: rows, columns


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
    columns = 2 if width >= _TWO_COLUMNS else 1
    curves = (_spark_cells(curve, values, width // columns - 1, bars) for curve, values in _drawable(frame))
    cells = list(filter(None, curves))  # without those for which there is no room
    return [[part for cell in cells[at : at + columns] for part in cell] for at in range(0, len(cells), columns)]


def _spark_cells(curve: _Curve, values: Sequence[float | None], width: int, bars: str) -> list[tuple[str, int]]:
    measured = [value for value in values if value is not None]
    limits = f" {curve.text_of(min(measured))} to {curve.text_of(max(measured))}"
    room = width - _NAME - cell_len(limits)
    if room < _MIN_SPARK:
        return []
    text = sparkline(values, room, bars)
    return [(fit(curve.name, _NAME), DIM), (text, PLAIN), (fit(limits, width - _NAME - cell_len(text) + 1), DIM)]


def chart_lines(frame: TopFrame, width: int, bars: str) -> list[Line]:
    """Return charts of `CHART_HEIGHT` lines in two columns, with the values and the times of their axes."""
    charts = [_chart_rows(curve, values, frame.points, width // 2 - 1, bars) for curve, values in _drawable(frame)]
    lines: list[Line] = []
    for at in range(0, len(charts), 2):
        pair = charts[at : at + 2]
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
    before: int | None = None
    for column in range(2 * width):
        at = column * (len(values) - 1) / max(2 * width - 1, 1)
        value = values[round(at)]
        if value is None:
            before = None
            continue
        row = 4 * height - 1 - round((value - least) * scale)
        # A steep part is drawn without gaps.
        first = row if before is None or abs(before - row) < 2 else before + (1 if row > before else -1)
        for dot in range(min(first, row), max(first, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def rank_map_lines(rank_times: RankTimes, width: int, height: int, bars: str) -> list[Line]:
    """Return the ranks that are slowest against the median of each window, window by window; empty without a median.

    Another set of letters than `BARS` means a terminal with ASCII alone.
    """
    room = width - 13
    windows = [(times, median(times.values())) for times in rank_times if len(times) > 2][-room:]
    ratios = [{rank: time / middle for rank, time in times.items()} for times, middle in windows if middle]
    if not ratios or height < 2:
        return []
    excess: dict[int, float] = {}
    for by_rank in ratios:
        for rank, ratio in by_rank.items():
            excess[rank] = excess.get(rank, 0.0) + max(ratio - 1.0, 0.0)
    shown = sorted(excess, key=lambda rank: (-excess[rank], rank))[: height - 1]
    letter = 1 if bars == BARS else 2
    key = ", ".join(f"{cell[letter]} +{100 * (cell[0] - 1):.0f} %" for cell in _MAP_CELLS[:-1])
    head = f"own time of ranks against the median of each window, newest right: {key}"
    lines: list[Line] = [[(fit(head, width), DIM)]]
    for rank in sorted(shown):
        line: list[tuple[str, int]] = [(fit(f"rank {rank}", 12, right=True) + " ", PLAIN)]
        for by_rank in ratios:
            own = by_rank.get(rank)
            if own is None:
                text, style = " ", DIM
            else:
                cell = next(cell for cell in _MAP_CELLS if own >= cell[0])
                text, style = str(cell[letter]), cell[3]
            if line[-1][1] == style and len(line) > 1:
                line[-1] = line[-1][0] + text, style
            else:
                line.append((text, style))
        lines.append(line)
    return lines
