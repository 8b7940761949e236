"""The cost of measuring is a metric, summed over processes and attempts."""

import pytest
from builders import Job, row

from effllm import metrics
from effllm.trainer.recorder import measured_pair_s


def test_overhead_of_agents_is_summed_and_never_decreases():
    job = Job().join()
    job.send(row(0), agent_cpu_s=1.0, sent_bytes=1000, recorder_cpu_s=0.25)
    job.send(row(1), agent_cpu_s=2.0, sent_bytes=3000, recorder_cpu_s=0.5)
    job.send(row(1), agent_cpu_s=1.5, sent_bytes=2000)  # sent again
    job.bye(0, agent_cpu_s=1.25, sent_bytes=1500, recorder_cpu_s=0.375)
    spent = job.summary(True).overhead

    assert (spent.agents_cpu_s, spent.sent_bytes, spent.recorder_cpu_s) == (3.25, 4500, 0.875)


def test_overhead_of_all_agents_and_attempts_is_summed():
    first = Job(1).join()
    first.send(row(0), agent_cpu_s=1.0, sent_bytes=100)
    first.aggregator.ledger.note_aggregator_costs(5.0, 110)

    second = Job(1, first.ledger()).join()
    second.send(row(0, 2), agent_cpu_s=1.5, sent_bytes=150)
    second.aggregator.ledger.note_aggregator_costs(0.5, 60)
    second.bye(0, "killed", agent_cpu_s=1.75, sent_bytes=175)
    second.join(agent="other").send(row(0, 3, agent="other"), agent_cpu_s=0.25, sent_bytes=25)

    third = Job(1, second.next_ledger("again"), "again").join(agent="new")
    third.send(row(0, agent="new"), agent_cpu_s=2.0, sent_bytes=200)
    third.aggregator.ledger.note_aggregator_costs(1.0, 210)
    spent = third.summary(True).overhead

    assert spent.agents_cpu_s == 1.75 + 0.25 + 2.0
    assert spent.sent_bytes == 175 + 25 + 200
    assert (spent.aggregator_cpu_s, spent.received_bytes) == (5.0 + 0.5 + 1.0, 110 + 60 + 210)
    assert spent.recorder_cpu_s is None, "no agent has reported it"


def test_waits_for_a_core_are_summed_over_ranks_and_attempts():
    first = Job().join()
    assert first.summary().goodput.core_wait_s is None, "no agent has reported it"
    first.send(row(0), core_wait_s=1.0)
    first.bye(1, core_wait_s=2.0)

    second = Job(1, first.next_ledger("again"), "again").join()
    second.send(row(0), core_wait_s=0.5)

    assert second.summary(True).goodput.core_wait_s == 3.5


def test_each_window_has_the_overhead_as_metrics():
    job = Job(1).join()
    job.aggregator.ledger.note_aggregator_costs(0.5, 0)
    job.tick(10.0).send(row(0), agent_cpu_s=1.0, sent_bytes=100, recorder_cpu_s=0.001)
    (report,) = job.closed()

    # The ratios are shares of the ten seconds of one rank.
    assert report.values["health/agent_cpu_ratio"] == 0.1
    assert report.values["health/recorder_cpu_ratio"] == pytest.approx(0.0001)
    assert report.values["health/aggregator_cpu_ratio"] == 0.05
    assert report.values["health/sent_bytes_per_second"] == 10.0
    assert report.values["goodput/ratio"] == pytest.approx(0.9)
    assert metrics.metric_of_tag("health/recorder_cpu_ratio").unit == "ratio"


def test_time_needed_for_two_timestamps_is_measured():
    assert 0.0 < measured_pair_s() < 0.01
