"""Stragglers in the aggregator: verdicts, events and totals from reports and heartbeats, also with a new aggregator."""

import pytest
from builders import device_window, full, gpu, hello, reports, row

import effllm
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.health.clock import DRIFT
from effllm.job.ledger import restore
from effllm.network.transport import decode_from_aggregator, encode
from effllm.records.clock import Now
from effllm.records.job import StragglerVerdict
from effllm.records.wire import Bye, Clock, Heartbeat
from effllm.store.summary_text import summary_text
from effllm.trainer import collector as module


class Job:
    """Four ranks on two nodes; one rank computes for 0.6 s per iteration, the other ranks for 0.5 s."""

    def __init__(self, snapshot=None, ranks=4, **hellos):
        self.aggregator = Aggregator(Config(), "job", 1, 1000.0, snapshot)
        self.ranks = range(ranks)
        for rank in self.ranks:
            changes = {name: value(rank) for name, value in hellos.items()}
            message = hello(rank, ranks, host=f"node{rank // 2}", **changes)
            assert self.aggregator.hello(message, Now(0.0, 1000.0)) == ""

    def run(self, first, last, slow=2, own_s=0.6):
        for window in range(first, last + 1):
            for rank in self.ranks:
                own = own_s if rank == slow else 0.5 + 0.001 * rank
                one = row(rank, window, own_steps=10, own_step_s=10 * own, own_median_s=own)
                self.aggregator.reports(reports(one), Now(10.0 * window, 1000.0 + 10.0 * window))
        return self

    def closed(self):
        return [one.report for one in self.aggregator.closed.take()]

    def events_of(self, *kinds):
        return [event for event in self.aggregator.events.take() if event.kind in kinds]

    def summary(self):
        return self.aggregator.summary(2000.0, ended=True)

    def heartbeat(self, rank, now_s, offset_s, error_s):
        message = Heartbeat(f"agent-{rank}", rank, 1, "", 0.0, offset_s=offset_s, offset_error_s=error_s)
        self.aggregator.heartbeat(message, Now(now_s, 1000.0 + now_s))


def test_straggler_is_in_events_reports_totals_and_summary():
    job = Job().run(1, 8)
    reports_of = job.closed()

    (event,) = job.events_of("straggler")
    assert event.rank == 2
    assert event.text.startswith("straggler: rank 2 (node node1, GPU-2) 19.")
    (verdict,) = reports_of[-1].stragglers
    assert (verdict.ranks, verdict.host, verdict.device, verdict.peers) == ((2,), "node1", "GPU-2", 3)
    # The median of 0.5, 0.501, 0.503 and 0.6 is 0.502: in ten iterations three ranks at 100 W wait for 0.98 s.
    assert reports_of[-1].last.health.straggling_s == pytest.approx(0.98)
    assert reports_of[-1].values["straggler/waiting_ratio"] == pytest.approx(0.098)
    summary = job.summary()
    assert summary.stragglers == (verdict,)
    assert verdict.gpu_seconds == pytest.approx(8 * 3 * 0.98)
    assert verdict.joules == pytest.approx(8 * 3 * 0.98 * 100)
    assert summary.metrics["straggler/waiting_gpu_seconds"].value == pytest.approx(verdict.gpu_seconds)
    assert summary.metrics["straggler/waiting_joules"].value == pytest.approx(verdict.joules)
    assert summary.goodput.rank_seconds["straggling"] == pytest.approx(verdict.gpu_seconds)


def test_closing_table_names_the_straggler():
    lines = summary_text(Job().run(1, 8).summary(), None, None).splitlines()

    assert "  stragglers    GPU time of waiting ranks: rank 2 (24 s)" in lines  # 8 * 3 * 0.98 s


def test_new_aggregator_keeps_totals_and_names_the_straggler_again():
    job = Job().run(1, 8)
    before = job.summary().stragglers[0].gpu_seconds

    after = Job(restore(job.aggregator.snapshot())).run(9, 16)

    assert len(after.events_of("straggler")) == 1
    assert after.summary().stragglers[0].gpu_seconds == pytest.approx(before + 8 * 3 * 0.98)


def test_ranks_of_other_groups_and_roles_are_not_peers():
    stages = Job(peer_group=lambda rank: f"stage {rank // 2}").run(1, 8)  # of two ranks, one must be much slower
    assert stages.events_of("straggler") == []
    roles = Job(role=lambda rank: "trainer" if rank == 2 else "rollout").run(1, 8)
    assert roles.events_of("straggler") == []


def test_a_sensor_of_the_node_is_not_the_device_of_a_rank():
    psu = gpu("PSU", only_power=True, is_gpu=False)
    job = Job(devices=lambda rank: (psu, gpu(f"GPU-{rank}"))).run(1, 8)

    assert job.summary().stragglers[0].device == "GPU-2"


def test_no_straggler_metric_is_reported_without_own_times():
    job = Job()
    for rank in job.ranks:
        job.aggregator.reports(reports(row(rank)), Now(10.0, 1010.0))

    (report,) = job.closed()
    assert report.last.health.straggling_s is None
    assert not any(tag.startswith("straggler/") for tag in report.values)


def test_clock_errors_grow_with_age_and_the_largest_is_published():
    job = Job()
    job.heartbeat(0, 1.0, 1e6, 1e-5)
    job.heartbeat(1, 2.0, -1e6, 2e-5)
    job.heartbeat(2, 21.0, 0.0, 1e-5)
    job.run(1, 1)

    (report,) = job.closed()
    assert report.values["health/clock_error_s"] == pytest.approx(1e-5 + 20 * DRIFT)  # of rank 0


def test_clock_error_of_a_rank_is_dropped_with_its_old_agent():
    job = Job()
    job.heartbeat(0, 1.0, 1e6, 1e-5)
    job.aggregator.hello(hello(0, 4, agent="another"), Now(100.0, 1100.0))
    job.run(1, 1)  # rank 0's new agent sends no report
    job.aggregator.close_all()

    assert "health/clock_error_s" not in job.closed()[0].values


def test_thermal_slowdown_is_found_in_reports():
    job = Job()
    for window in range(1, 9):
        for rank in job.ranks:
            hot = {"throttled_s": {"sw_thermal": 9.0, "any": 9.0}} if rank == 2 else {}
            one = row(
                rank,
                window,
                own_steps=10,
                own_median_s=0.6 if rank == 2 else 0.5,
                devices=(device_window(f"GPU-{rank}", throttle_covered_s=10.0, **hot),),
            )
            job.aggregator.reports(reports(one), Now(10.0 * window, 1000.0))

    (event,) = job.events_of("straggler")
    assert " since iteration 1: thermal slowdown; cost " in event.text


def test_decoded_clock_answer_equals_the_encoded_answer():
    assert decode_from_aggregator(encode(Clock(1, 2, 3))) == Clock(1, 2, 3)


def test_number_of_verdicts_is_bounded_for_many_slow_ranks():
    job = Job(ranks=100)
    for window in range(1, 9):
        for rank in job.ranks:
            own = 0.6 if rank < 40 else 0.5
            one = row(rank, window, own_steps=10, own_median_s=own)
            job.aggregator.reports(reports(one), Now(10.0 * window, 1000.0))

    last = job.closed()[-1]
    assert len(last.stragglers) == 16 and last.last.health.stragglers == 40
    assert all(isinstance(one, StragglerVerdict) for one in last.stragglers)
    assert len(job.events_of("straggler")) == 20, "a line for each node of two"


def test_sync_point_and_peer_group_are_accepted_without_metrics(monkeypatch):
    monkeypatch.setattr(module, "_collector", None)

    effllm.sync_point()
    effllm.set_peer_group("stage 3", "replica 0")

    facts = effllm.get_metrics_collector().declared.facts
    assert (facts.peer_group, facts.replica) == ("stage 3", "replica 0")


@pytest.mark.parametrize("name", [None, 7, "x" * 10_000, object()])
def test_any_peer_group_name_becomes_a_short_string(monkeypatch, name):
    monkeypatch.setattr(module, "_collector", None)
    effllm.set_peer_group(name)

    group = effllm.get_metrics_collector().declared.facts.peer_group
    assert isinstance(group, str) and len(group) <= 200


def test_windows_of_a_straggler_by_data_are_not_windows_of_data_loading():
    """Of 10 s, rank 1 waits 4 s for data and rank 0 waits 0.3 s; rank 1 is named in the fifth of 30 windows."""
    job = Job(ranks=2)
    for window in range(1, 31):
        for rank in job.ranks:
            wait_s = 4.0 if rank else 0.3
            busy = device_window(f"GPU-{rank}", wall=full(10.0, utilization=1.0))
            one = row(rank, window, busy_s=10.0 - wait_s, wait_s=wait_s, devices=(busy,))
            job.aggregator.reports(reports(one), Now(10.0 * window, 1000.0 + 10.0 * window))
    for rank in job.ranks:
        job.aggregator.bye(Bye(f"agent-{rank}", rank, "completed", 300), Now(300.0, 1300.0))

    verdict = job.summary().verdict

    assert verdict.cause == "straggler"
    assert verdict.why == "rank 1 (node0): data wait 400.0 ms per iteration, its peer 30.0 ms, in 26 of 30 windows"
    assert verdict.evidence[0].windows.worst_share == pytest.approx(3.7 / 20)
    assert verdict.evidence[0].share == pytest.approx(3.7 / 20, rel=0.01)
    (data,) = verdict.evidence[1:]
    assert (data.share, data.windows.count) == (pytest.approx(0.03, rel=0.01), 4)
