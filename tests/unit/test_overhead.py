"""The cost of measuring is a metric, summed over processes and attempts."""

import pytest
from builders import hello, reports, row

from effllm import metrics
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.records.clock import Now
from effllm.records.wire import Bye
from effllm.trainer.recorder import pair_s


def served(ledger=None, job="job"):
    return Aggregator(Config(), job, ledger.attempt if ledger else 1, 1000.0, ledger)


def test_overhead_of_agents_is_summed_and_never_decreases():
    aggregator = served()
    for rank in range(2):
        assert aggregator.hello(hello(rank), Now(0.0, 1000.0)) == ""
    aggregator.reports(reports(row(0), agent_cpu_s=1.0, sent_bytes=1000, recorder_cpu_s=0.25), Now(10.0, 1010.0))
    aggregator.reports(reports(row(1), agent_cpu_s=2.0, sent_bytes=3000, recorder_cpu_s=0.5), Now(10.0, 1010.0))
    aggregator.reports(reports(row(1), agent_cpu_s=1.5, sent_bytes=2000), Now(10.0, 1010.0))  # sent again
    aggregator.bye(Bye("agent-0", 0, "completed", 10, 0, 1.25, 1500, 0.375), Now(11.0, 1011.0))
    spent = aggregator.summary(1011.0, True).overhead

    assert (spent.agents_cpu_s, spent.sent_bytes, spent.recorder_cpu_s) == (3.25, 4500, 0.875)


def test_overhead_of_all_agents_and_attempts_is_summed():
    first = served()
    first.hello(hello(0, 1), Now(0.0, 1000.0))
    first.reports(reports(row(0), agent_cpu_s=1.0, sent_bytes=100), Now(10.0, 1010.0))
    first.ledger.note_own(5.0, 110)

    second = served(restore(first.snapshot()))
    second.hello(hello(0, 1), Now(11.0, 1011.0))
    second.reports(reports(row(0, 2), agent_cpu_s=1.5, sent_bytes=150), Now(20.0, 1020.0))
    second.ledger.note_own(0.5, 60)
    second.bye(Bye("agent-0", 0, "killed", 20, 0, 1.75, 175), Now(20.0, 1020.0))
    second.hello(hello(0, 1, agent="other"), Now(21.0, 1021.0))
    second.reports(reports(row(0, 3, agent="other"), agent_cpu_s=0.25, sent_bytes=25), Now(30.0, 1030.0))

    third = served(restore(second.snapshot()).next_attempt("again"), "again")
    third.hello(hello(0, 1, job="again", agent="new"), Now(31.0, 1031.0))
    third.reports(reports(row(0, agent="new"), agent_cpu_s=2.0, sent_bytes=200), Now(41.0, 1041.0))
    third.ledger.note_own(1.0, 210)
    spent = third.summary(1041.0, True).overhead

    assert spent.agents_cpu_s == 1.75 + 0.25 + 2.0
    assert spent.sent_bytes == 175 + 25 + 200
    assert (spent.aggregator_cpu_s, spent.received_bytes) == (5.0 + 0.5 + 1.0, 110 + 60 + 210)
    assert spent.recorder_cpu_s is None, "no agent has reported it"


def test_waits_for_a_core_are_summed_over_ranks_and_attempts():
    first = served()
    for rank in range(2):
        first.hello(hello(rank), Now(0.0, 1000.0))
    assert first.summary(1000.0, False).goodput.core_wait_s is None, "no agent has reported it"
    first.reports(reports(row(0), core_wait_s=1.0), Now(10.0, 1010.0))
    first.bye(Bye("agent-1", 1, "completed", 10, core_wait_s=2.0), Now(11.0, 1011.0))

    second = served(restore(first.snapshot()).next_attempt("again"), "again")
    second.hello(hello(0, 1, job="again"), Now(31.0, 1031.0))
    second.reports(reports(row(0), core_wait_s=0.5), Now(41.0, 1041.0))

    assert second.summary(1041.0, True).goodput.core_wait_s == 3.5


def test_each_window_has_the_overhead_as_metrics():
    aggregator = served()
    aggregator.hello(hello(0, 1), Now(0.0, 1000.0))
    aggregator.ledger.note_own(0.5, 0)
    aggregator.reports(reports(row(0), agent_cpu_s=1.0, sent_bytes=100, recorder_cpu_s=0.001), Now(10.0, 1010.0))
    ((report, *_),) = aggregator.closed.take_windows()

    # The ratios are shares of the ten seconds of one rank.
    assert report.values["health/agent_cpu_ratio"] == 0.1
    assert report.values["health/recorder_cpu_ratio"] == pytest.approx(0.0001)
    assert report.values["health/aggregator_cpu_ratio"] == 0.05
    assert report.values["health/sent_bytes_per_second"] == 10.0
    assert report.values["goodput/ratio"] == pytest.approx(0.9)
    assert metrics.describe("health/recorder_cpu_ratio").unit == "ratio"


def test_time_needed_for_two_timestamps_is_measured():
    assert 0.0 < pair_s() < 0.01
