"""Benchmarks still run on today's code; their figures are not tested."""

from benchmarks import latency


def test_latency_benchmark_returns_a_time_in_milliseconds():
    (figure,) = latency.measure(ranks=3, windows=8)

    assert figure.unit == "ms"
    assert figure.value > 0
