"""Curves of a report: thinning keeps extremes and gaps, with bounded memory."""

import math
import random

import pytest

from effllm.analysis import window_curves as curves
from effllm.analysis.window_curves import Curve
from effllm.metrics import METRICS
from effllm.records.job import SPREADS, Spread
from effllm.views.report.plot import TAGS, ValueAxis


def made(values, start=1):
    curve = Curve()
    for x, y in enumerate(values, start=start):
        curve.add(x, y)
    return curve


def test_short_curve_is_complete():
    assert made([3.0, 1.0, 2.0]).thinned(100) == ([1.0, 2.0, 3.0], [3.0, 1.0, 2.0])
    assert made([1.0, 1e300, math.inf, 2.0]).count == 2, "what is too large for a drawing counts as missing"
    empty = made([math.nan] * 10)
    assert (empty.count, empty.thinned(5)) == (0, ([], []))


def test_every_bucket_has_its_own_extremes():
    _, ys = made([float(at % 100) for at in range(1000)]).thinned(10)

    assert (ys.count(99.0), ys.count(0.0)) == (10, 10)


def test_last_point_is_kept_exactly(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 64)
    xs, ys = made([5.0, 1.0] * 500 + [3.0]).thinned(10)

    assert (xs[-1], ys[-1]) == (1001.0, 3.0)


def test_thinned_curve_has_the_extremes_at_their_places():
    values = [random.Random(7).gauss(100, 1) for _ in range(10_000)]
    values[1234], values[8765] = 900.0, -5.0

    xs, ys = made(values).thinned(50)

    assert len(xs) <= 100
    assert (xs[ys.index(max(ys))], max(ys)) == (1235, 900.0)
    assert (xs[ys.index(min(ys))], min(ys)) == (8766, -5.0)
    assert xs == sorted(xs)


def test_curve_above_the_limit_is_folded_and_keeps_extremes(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 64)
    values = [math.sin(at) for at in range(5000)]
    values[3], values[4999] = 7.0, -7.0
    curve = made(values)

    xs, ys = curve.thinned(20)

    assert (curve.count, curve.last) == (5000, -7.0)
    assert len(xs) <= 64
    assert (xs[ys.index(7.0)], xs[ys.index(-7.0)]) == (4.0, 5000.0)


def test_gap_of_the_measurement_stays_a_gap():
    _, ys = made([1.0] * 500 + [math.nan] * 500 + [2.0] * 500).thinned(30)

    assert (ys[0], any(map(math.isnan, ys)), ys[-1]) == (1.0, True, 2.0)


@pytest.mark.parametrize("attempts", [3, 400])
def test_restarts_do_not_multiply_the_points(attempts):
    curve = Curve()
    for _ in range(attempts):
        for x in range(100):
            curve.add(x, 1.0 + x)

    xs, ys = curve.thinned(40)

    assert len(xs) <= 4 * 40
    assert (min(ys), max(ys)) == (1.0, 100.0)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.0478, 0.0573), ["0.0575", "0.0550", "0.0525", "0.0500", "0.0475"]),
        ((0.0, 9.3), ["10.0", "7.5", "5.0", "2.5", "0.0"]),
        ((0.0, 1930.0), ["2,000", "1,500", "1,000", "500", "0"]),
    ],
)
def test_labels_of_an_axis_are_the_exact_values_of_its_lines(values, labels):
    assert ValueAxis.of(values).labels() == labels


def test_every_line_of_a_chart_has_a_tag_of_a_window():
    metrics = {entry.tag(base) for entry in METRICS.values() for base in entry.bases}
    spreads = {f"spread/{name}/{field}" for name in SPREADS for field in Spread.__struct_fields__}
    losses = {curves.LOSS, curves.OVER_TOKENS, curves.OVER_JOULES, curves.OVER_SECONDS}

    assert [tag for tag in TAGS if tag not in metrics | spreads | losses] == []
