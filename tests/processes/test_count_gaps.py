"""Counts of a run are totals, or say that a part is missing."""

import pytest

LOOP = """
import time
import effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(number):
    collector.record_iteration_start()
    if sleep_s:
        time.sleep(sleep_s)
    collector.record_iteration_end(-5 if iteration == wrong else 100, 2)
effllm.finalize_efficientllm_metrics()
"""
RATES = ("tt_tokens_per_param_per_sec", "st_samples_per_param_per_sec", "run_throughput/tokens_per_second")


def run(launch, number, sleep_s, wrong=-1, **settings):
    """Run a loop; the iteration ``wrong`` has an invalid count."""
    script = f"number, sleep_s, wrong = {number}, {sleep_s}, {wrong}{LOOP}"
    return launch.code(script, **settings).done().ledger.summary


def test_rejected_count_is_a_gap(launch):
    summary = run(launch, 60, 0.005, 30, log_interval=10)

    assert (summary.iterations, summary.tokens, summary.samples) == (60, None, None)
    assert (summary.measured_tokens, summary.measured_samples) == (5900, 118)
    assert all("1 count was rejected" in summary.metrics[tag].doubt for tag in RATES)
    assert summary.metrics["al_seconds"].doubt is None
    assert any(text.startswith("total tokens and samples: 1 count was rejected") for text in summary.not_measured)


@pytest.mark.fault("late-aggregator")
@pytest.mark.parametrize(
    ("number", "sleep_s", "settings"),
    [(3000, 0.0012, {"history_size": 16, "log_interval": 1}), (1_000_000, 0.0, {"log_interval": 100})],
    ids=["sixteen reports in the buffer", "a million iterations"],
)
def test_counts_are_exact_or_have_a_gap(launch, number, sleep_s, settings):
    summary = run(launch, number, sleep_s, **settings)

    assert (summary.status, summary.iterations) == ("completed", number)
    assert summary.measured_tokens == pytest.approx(100 * number * summary.measured_iterations_ratio)
    if summary.measured_iterations_ratio == 1.0:
        assert (summary.tokens, summary.samples, summary.coverage.reports_lost) == (100 * number, 2 * number, 0)
    else:
        assert (summary.tokens, summary.samples) == (None, None)
        assert any("never arrived" in text for text in summary.not_measured)
        assert all(summary.metrics[tag].doubt is None for tag in RATES), "tokens and time are of the same windows"
