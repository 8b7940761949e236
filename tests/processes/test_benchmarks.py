"""Benchmarks still run on today's code; their figures are not tested."""

from benchmarks import latency


def test_latency_is_measured_from_report_to_console():
    (figure,) = latency.measure(ranks=3, windows=8)

    assert figure.unit == "ms"
    assert figure.value > 0
