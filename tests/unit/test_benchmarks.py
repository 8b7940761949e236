"""Benchmarks still run on today's code; their figures are not tested."""

import time

import pytest

from benchmarks import compare, large_run, latency
from effllm.commands.top_folder import FolderSource


def test_latency_benchmark_returns_a_time_in_milliseconds():
    (figure,) = latency.measure(ranks=3, windows=8)

    assert figure.unit == "ms"
    assert figure.value > 0


def test_comparison_benchmark_counts_outcomes_of_simulated_pairs():
    table = compare.outcomes_of(4, 1, (0.5, 0.2))

    assert table["effllm 1+1, primary"].counts == {"better": 0, "worse": 0, "not distinguishable": 0, "unknown": 4}
    assert {outcomes.total for outcomes in table.values()} == {4}


@pytest.mark.long
def test_job_of_the_screen_benchmark_has_its_planted_ranks_first(tmp_path):
    large_run.large_run(tmp_path / "large", ranks=4300, windows=12).close()
    source = FolderSource(tmp_path / "large")
    source.refresh()
    while source.has_more:  # on a busy machine, one call reads only a part of the events
        source.refresh()
    source.refresh_hosts()
    worst = source.frame(time.time()).ranks.lines_with_reason()

    assert [(line.rank, line.reason) for line in worst[:2]] == [(4242, "lost"), (2000, "straggler")]
    assert {line.rank for line in worst if line.reason == "straggler"} == {1377, *range(2000, 2008)}
    assert worst[0].host == "node00530"
