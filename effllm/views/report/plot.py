"""The charts of a report as SVG; the labels are HTML, so that the width of the screen does not change their size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from effllm.analysis.window_curves import LOSS
from effllm.views.report.markup import Markup, element
from effllm.views.text.numbers import readable, scaled

#: Size of the drawing; the browser stretches it to the width of the page.
WIDTH, HEIGHT = 1000, 300
_X_LABELS = 4  # intervals between the labels below a chart
#: The axis begins at zero if the smallest value is below this share of the largest value.
_FROM_ZERO = 0.6
_MIN_RANGE = 0.02  # of the axis, as a share of the largest value, so that noise does not fill a chart
Points = tuple[Sequence[float], Sequence[float]]


class Line(Struct, frozen=True):
    """A curve of a chart."""

    tag: str
    label: str
    factor: float = 1.0  # of the values, beside the factor of the chart


class Chart(Struct, frozen=True):
    """A chart over the iterations; with several runs, each run has only the first line."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    factor: float = 1.0  # from the base unit of the curves to the unit of the chart
    instead: Chart | None = None  # if no run has the first line: no GPUs, or no count of tokens
    note: str = ""
    x: str = "iteration"  # what the horizontal axis has; another one is only for several runs


class _Charts(Struct, frozen=True):
    """The content of charts.toml."""

    first: tuple[Chart, ...]
    more: tuple[Chart, ...]


CHARTS = msgspec.toml.decode(Path(__file__).with_name("charts.toml").read_bytes(), type=_Charts)
#: The tags of all curves.
TAGS = tuple(
    dict.fromkeys(
        line.tag
        for chart in (*CHARTS.first, *CHARTS.more)
        for line in (*chart.lines, *(chart.instead.lines if chart.instead else ()))
    )
)


class RunCurves(NamedTuple):
    """The thinned curves of a run, by tag."""

    name: str  # of the run, or of its configuration
    points: dict[str, Points]
    style: int = 0  # of the lines of a run beside others: the number of its configuration

    def has(self, tag: str) -> bool:
        return any(map(math.isfinite, self.points[tag][1]))


class DrawnLine(NamedTuple):
    """A line of a chart: the run's number, the tag of the curve, its label and the factor of its values."""

    run: int
    tag: str
    label: str
    factor: float
    style: int


def drawn_charts(charts: Sequence[Chart], runs: Sequence[RunCurves]) -> Iterator[tuple[Chart, list[DrawnLine]]]:
    """Yield each chart with its lines; a chart without any value has no lines."""
    has_many = len(runs) > 1
    for wanted in charts:
        has_first = any(run.has(wanted.lines[0].tag) for run in runs)
        chart = wanted if has_first or wanted.instead is None else wanted.instead
        drawn: list[DrawnLine] = []
        for number, run in enumerate(runs):
            lines = _distinct_lines(chart, run)
            if has_many and lines:
                drawn.append(DrawnLine(number, lines[0].tag, run.name, chart.factor * lines[0].factor, run.style))
            elif not has_many and chart.x == "iteration":
                drawn += [
                    DrawnLine(number, line.tag, line.label, chart.factor * line.factor, style)
                    for style, line in enumerate(lines)
                ]
        yield chart, drawn


def _distinct_lines(chart: Chart, run: RunCurves) -> list[Line]:
    """Return the measured lines; of lines with equal values, such as percentiles of one rank, only the first."""
    lines: list[Line] = []
    for line in chart.lines:
        if run.has(line.tag) and not any(_are_equal(run, line, earlier) for earlier in lines):
            lines.append(line)
    return lines


def _are_equal(run: RunCurves, line: Line, earlier: Line) -> bool:
    values, others = (np.multiply(run.points[curve.tag][1], curve.factor) for curve in (line, earlier))
    return len(values) == len(others) and np.allclose(values, others, rtol=1e-6, atol=0.0, equal_nan=True)


class ValueAxis(NamedTuple):
    """The vertical axis: from ``low`` to ``high`` in equal intervals."""

    low: float
    high: float
    intervals: int

    @classmethod
    def of(cls, values: Sequence[float]) -> ValueAxis:
        """Return the axis for some finite values."""
        low, high = min(values), max(values)
        if 0 <= low < _FROM_ZERO * high:
            low = 0.0
        if (widening := _MIN_RANGE * max(abs(high), abs(low)) - (high - low)) >= 0:
            margin = widening / 2 or 1.0  # 1.0: all values are 0
            low, high = low - margin, high + margin
        step = _axis_step((high - low) / 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)  # 1e-9: errors of the division
        return cls(first * step, last * step, max(last - first, 1))

    def start_note(self) -> str:
        """Return a note with the start of the axis if it is above zero, else an empty string."""
        return f"axis from {self.labels()[-1]}" if self.low > 0 else ""

    def labels(self) -> list[str]:
        """Return the labels from the top to the bottom."""
        step = (self.high - self.low) / self.intervals
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += abs(round(step, digits) - step) > 1e-9 * step  # 2.5 times a power of ten
        numbers = [self.low + step * n for n in range(self.intervals, -1, -1)]
        if step >= 1e-4 and max(map(abs, numbers)) < 1e7:
            return [f"{number + 0.0:,.{digits}f}" for number in numbers]  # + 0.0: -0.0 becomes 0.0
        return ["0" if abs(number) < step / 2 else f"{number:.3g}" for number in numbers]


def _axis_step(rough: float) -> float:
    """Return the next larger of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def plot(chart: Chart, lines: Sequence[DrawnLine], runs: Sequence[RunCurves], chart_index: int) -> Markup:
    """Return a chart with its axis, its legend and a hidden cursor for the script."""
    curves = [_scaled_points(line, runs) for line in lines]
    axis = value_axis(lines, runs)
    first, last = x_range(lines, runs)
    paths = [
        element("path", class_=f"line s{line.style}", d=_svg_path(xs, ys, (first, last), axis))
        for line, (xs, ys) in zip(lines, curves, strict=True)
    ]
    grid = "".join(f"M0 {HEIGHT * n / axis.intervals:g}h{WIDTH}" for n in range(axis.intervals + 1))
    drawing = element(
        "svg",
        element("path", class_="grid", d=grid),
        reversed(paths),  # the first line is on top
        element("path", class_="cursor", d=""),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}, {chart.unit}: {'; '.join(line.label for line in lines)}. The numbers follow.",
    )
    ticks = [first + (last - first) * n / _X_LABELS for n in range(_X_LABELS + 1)]
    texts = (f"{x:,.0f}" if chart.x == "iteration" else " ".join(scaled(x)).strip() for x in ticks)
    x_labels = list(dict.fromkeys(texts))
    return element(
        "div",
        element("div", [element("span", label) for label in axis.labels()], class_="y", aria_hidden="true"),
        element("div", drawing, class_="canvas"),
        element("div", [element("span", label) for label in x_labels], class_="x", aria_hidden="true"),
        element(
            "label",
            f"{chart.x} ",
            element("input", type="range", min=0, max=1000, value=1000, aria_label=f"Cursor of {chart.title}"),
            hidden=True,
        ),
        element("output", class_="readout"),
        class_="plot",
        data_chart=chart_index,
    )


def value_axis(lines: Sequence[DrawnLine], runs: Sequence[RunCurves]) -> ValueAxis:
    """Return the vertical axis of a chart."""
    return ValueAxis.of([y for line in lines for y in _scaled_points(line, runs)[1] if math.isfinite(y)])


def legend(lines: Sequence[DrawnLine]) -> Markup:
    """Return the names of the lines with their marks."""
    names = {(line.style, line.label): None for line in lines}  # repeats of a configuration have one name
    items = []
    for style, label in names:
        mark = element("path", class_=f"line s{style}", d="M0 5h24")
        items.append(
            element("li", element("svg", mark, viewBox="0 0 24 10", class_="swatch", aria_hidden="true"), label)
        )
    return element("ul", items, class_="legend")


def _has_own_axis(tag: str) -> bool:  # a loss over tokens or time, not over iterations
    return tag.startswith(f"{LOSS}/")


def x_range(lines: Sequence[DrawnLine], runs: Sequence[RunCurves]) -> tuple[float, float]:
    """Return the ends of the horizontal axis: of lines with an own axis, else of all curves over the iterations."""
    own_tags = {line.tag for line in lines if _has_own_axis(line.tag)}
    curves = [(tag, xy) for run in runs for tag, xy in run.points.items()]
    points = [xy for tag, xy in curves if (tag in own_tags if own_tags else not _has_own_axis(tag))]
    ends = [end for xs, _ in points if len(xs) for end in (min(xs), max(xs))]
    first, last = min(ends, default=0.0), max(ends, default=1.0)
    return (first, last) if last > first else (first - 1, last + 1)


def _svg_path(xs: Sequence[float], ys: Sequence[float], x_axis: tuple[float, float], axis: ValueAxis) -> str:
    """Return the path of a curve, with gaps where a value was not measured or the iterations begin again."""
    x_scale, y_scale = WIDTH / (x_axis[1] - x_axis[0]), HEIGHT / (axis.high - axis.low)
    parts: list[str] = []
    is_drawing, previous_x = False, -math.inf
    for x, y in zip(xs, ys, strict=True):
        if math.isnan(y):
            is_drawing = False
            continue
        is_drawing = is_drawing and x >= previous_x
        point = f"{(x - x_axis[0]) * x_scale:.4g} {HEIGHT - (y - axis.low) * y_scale:.4g}"
        # A line of no length after each start shows a single point as a dot.
        parts.append(f"L{point}" if is_drawing else f"M{point}h0")
        is_drawing, previous_x = True, x
    return "".join(parts)


def _scaled_points(line: DrawnLine, runs: Sequence[RunCurves]) -> Points:
    xs, ys = runs[line.run].points[line.tag]
    return xs, [y * line.factor for y in ys]


def number_rows(lines: Sequence[DrawnLine], runs: Sequence[RunCurves]) -> list[list[str]]:
    """Return a row for each line: label, smallest and largest value with their iterations, and last value."""
    rows = []
    for line in lines:
        points = [(x, y) for x, y in zip(*_scaled_points(line, runs), strict=True) if y == y]
        low, high = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
        cells = [line.label, readable(low[1]), _place_text(low[0]), readable(high[1]), _place_text(high[0])]
        rows.append([*cells, readable(points[-1][1])])
    return rows


def _place_text(x: float) -> str:
    return f"{x:,.0f}" if abs(x) < 1e7 else f"{x:.4g}"


def json_curves(runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Return the curves of each run for JSON; a gap is null."""
    return [
        {
            tag: [
                [int(x) if x == int(x) else x for x in xs],
                [float(f"{y:.6g}") if math.isfinite(y) else None for y in ys],
            ]
            for tag, (xs, ys) in run.points.items()
            if run.has(tag)
        }
        for run in runs
    ]
