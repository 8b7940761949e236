"""Benchmarks still run on today's code; their figures are not tested."""

from benchmarks import compare, latency


def test_latency_benchmark_returns_a_time_in_milliseconds():
    (figure,) = latency.measure(ranks=3, windows=8)

    assert figure.unit == "ms"
    assert figure.value > 0


def test_comparison_benchmark_counts_words_of_simulated_pairs():
    table = compare.of_line(4, (0.5, 0.2))

    assert table["effllm 1+1, no ledger"].counts == {"better": 0, "worse": 0, "not distinguishable": 0, "unknown": 4}
    assert {words.total for words in table.values()} == {4}
