"""Spans: an agent returns to its training process the readings of the devices between two times."""

import itertools
import statistics

import pytest
from nvml_library import GIB, Gpu, flat, square

NS = 1e-9
LOOP = "span_loop.py"


def parts(truth):
    """Return the part of each span of the chain; each span has one part."""
    chained = [span for span in truth["spans"] if span["number"] in truth["asked"]]
    assert [span["number"] for span in chained] == truth["asked"]
    return [part for span in chained for part in span["parts"]]


def error_j(part):
    """Return the half-width of the 95 % interval of the random error."""
    return 1.96 * (part["start_j2"] + part["end_j2"] + part["inside_j2"]) ** 0.5


@pytest.fixture
def traced(launch, trace):
    """Return a function that runs the loop on a GPU of a trace, and returns its output."""

    def traced(gpu, iterations, step_s, **settings):
        trace.write(gpu)
        chosen = {"device": "nvml", "collection_interval": 0.2, "log_interval": 5, **settings}
        return launch.python(LOOP, iterations, step_s, environ=trace.environment(), **chosen).done().output()

    return traced


def test_energy_of_a_span_agrees_with_the_trace(traced):
    gpu = Gpu("GPU-a", "0:01:00", power=square(180.0, 620.0, 0.83, 0.6), memory=flat(40.0 * GIB), tick_s=0.0)
    truth = traced(gpu, 12, 0.3)
    found = parts(truth)
    truths_j = [gpu.energy_j(part["start_ns"] * NS, part["end_ns"] * NS) for part in found]
    wrong_j = [abs(part["joules"] - true) for part, true in zip(found, truths_j, strict=True)]

    assert len(found) == 12
    assert all(one["end_ns"] == other["start_ns"] for one, other in itertools.pairwise(found))
    assert (truth["lost"], truth["waiting"]) == (0, 0)
    assert all(part["covered_s"] == pytest.approx((part["end_ns"] - part["start_ns"]) * NS) for part in found)
    assert sum(wrong <= error_j(part) + 0.5 for wrong, part in zip(wrong_j, found, strict=True)) >= 10
    assert statistics.fmean(wrong_j) < 0.02 * statistics.fmean(truths_j)
    assert sum(part["joules"] for part in found) == pytest.approx(sum(truths_j), rel=0.01)


def test_power_temperature_utilization_and_memory_are_in_a_span(traced):
    gpu = Gpu("GPU-a", "0:01:00", power=flat(300.0), memory=flat(40.0 * GIB), utilization=flat(0.5))
    truth = traced(gpu, 4, 0.5)
    part = parts(truth)[2]

    assert part["joules"] / part["covered_s"] == pytest.approx(300.0, rel=0.02)
    assert (part["power_min_w"], part["power_max_w"]) == (pytest.approx(300.0), pytest.approx(300.0))
    assert part["temperature_c_seconds"] / part["temperature_covered_s"] == pytest.approx(50.0)
    assert part["temperature_max_c"] == pytest.approx(50.0)
    assert part["utilization_seconds"] / part["utilization_covered_s"] == pytest.approx(0.5)
    assert part["memory_byte_seconds"] / part["memory_covered_s"] == pytest.approx(40.0 * GIB)
    assert truth["devices"][0]["name"] == "Traced"


def test_energy_of_a_span_in_the_past_is_measured(traced):
    gpu = Gpu("GPU-a", "0:01:00", power=flat(300.0))
    truth = traced(gpu, 6, 0.3, log_interval=1000)
    (part,) = next(span["parts"] for span in truth["spans"] if span["number"] == truth["alone"])

    assert part["joules"] == pytest.approx(300.0 * 0.4, rel=0.02)


def test_requests_for_spans_do_not_wait_for_the_agent(launch):
    held_s = launch.python(LOOP, 200, 0.002).done().output()["held_s"]

    assert statistics.median(held_s) < 0.5e-3
