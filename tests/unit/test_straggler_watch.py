"""Stragglers in the aggregator: verdicts, events and totals from reports, also with a new aggregator."""

import pytest
from builders import Job, device_window, full, gpu, row

import effllm
from effllm.job.causes import SLOW_DATA
from effllm.records.iteration_times import IterationTimes
from effllm.records.verdict import DATA_WAIT, LastRanks, StragglerVerdict
from effllm.trainer import collector as module
from effllm.views.text.summary import summary_text


class Stragglers(Job):
    """Four ranks on two nodes; one rank computes for 0.6 s per iteration, the other ranks for 0.5 s."""

    def __init__(self, ledger=None, ranks=4, **hellos):
        super().__init__(ranks, ledger)
        for rank in range(ranks):
            self.join(rank, host=f"node{rank // 2}", **{name: value(rank) for name, value in hellos.items()})

    def run(self, first, last, own_s=lambda rank: 0.6 if rank == 2 else 0.5 + 0.001 * rank, **changes):
        """Send windows; ``changes`` are functions of the rank."""
        for window in range(first, last + 1):
            self.now_s = 10.0 * window
            for rank in range(self.world_size):
                known = {name: value(rank) for name, value in changes.items()}
                self.send(row(rank, window, own_steps=10, own_step_s=10 * own_s(rank), **known))
        return self


def test_stacks_of_a_new_straggler_and_of_a_peer_are_recorded_once():
    job = Stragglers().run(1, 8)
    assert job.aggregator.closed_windows.take_ranks_to_record()[-2:] == [2, 0]
    job.run(9, 12)

    assert job.aggregator.closed_windows.take_ranks_to_record() == []


def test_straggler_is_in_events_reports_totals_and_summary():
    job = Stragglers().run(1, 8)
    reports_of = job.closed()

    (event,) = job.events("straggler")
    assert event.rank == 2
    assert event.text.startswith("straggler: rank 2 (node node1, GPU-2) 19.")
    (verdict,) = reports_of[-1].stragglers
    assert (verdict.ranks, verdict.host, verdict.device, verdict.peers) == ((2,), "node1", "GPU-2", 3)
    # The next rank takes 0.503 s: in ten iterations, the three ranks at 100 W wait for the slow rank for 0.97 s.
    assert reports_of[-1].last.health.straggling_s == pytest.approx(0.97)
    assert reports_of[-1].values["straggler/waiting_ratio"] == pytest.approx(0.097)
    summary = job.summary(ended=True)
    assert summary.stragglers == (verdict,)
    assert verdict.gpu_seconds == pytest.approx(8 * 3 * 0.97)
    assert verdict.joules == pytest.approx(8 * 3 * 0.97 * 100)
    assert summary.metrics["straggler/waiting_gpu_seconds"].value == pytest.approx(verdict.gpu_seconds)
    assert summary.metrics["straggler/waiting_joules"].value == pytest.approx(verdict.joules)
    assert summary.goodput.rank_seconds["straggling"] == pytest.approx(8 * 4 * 0.97), "the slow rank saves it too"


def test_closing_table_names_the_straggler():
    lines = summary_text(Stragglers().run(1, 8).summary(ended=True)).splitlines()

    assert "  stragglers    GPU time of waiting ranks: rank 2 (23 s)" in lines  # 8 * 3 * 0.97 s


def test_new_aggregator_keeps_totals_and_names_the_straggler_again():
    job = Stragglers().run(1, 8)
    before = job.summary(ended=True).stragglers[0].gpu_seconds

    after = Stragglers(job.ledger()).run(9, 16)

    assert len(after.events("straggler")) == 1
    assert after.summary(ended=True).stragglers[0].gpu_seconds == pytest.approx(before + 8 * 3 * 0.97)


@pytest.mark.parametrize(
    "hello",
    [
        {"peer_group": lambda rank: f"stage {rank}"},
        {"role": lambda rank: "trainer" if rank == 2 else "rollout"},
    ],
    ids=["group", "role"],
)
def test_ranks_of_other_groups_and_roles_are_not_peers(hello):
    assert Stragglers(**hello).run(1, 8).events("straggler") == []


def test_a_sensor_of_the_node_is_not_the_device_of_a_rank():
    psu = gpu("PSU", only_power=True, is_gpu=False)
    job = Stragglers(devices=lambda rank: (psu, gpu(f"GPU-{rank}"))).run(1, 8)

    assert job.summary(ended=True).stragglers[0].device == "GPU-2"


def test_no_straggler_metric_is_reported_without_own_times():
    job = Stragglers()
    job.send(*map(row, range(4)))

    (report,) = job.closed()
    assert report.last.health.straggling_s is None
    assert not any(tag.startswith("straggler/") for tag in report.values)
    assert (report.straggler, job.summary().last_ranks) == (None, LastRanks())


def test_thermal_slowdown_is_found_in_reports():
    def device(rank):
        hot = {"throttled_s": {"sw_thermal": 9.0, "any": 9.0}} if rank == 2 else {}
        return (device_window(f"GPU-{rank}", throttle_covered_s=10.0, **hot),)

    (event,) = Stragglers().run(1, 8, devices=device).events("straggler")
    assert " since iteration 1, last in 100 % of the iterations: thermal slowdown; cost " in event.text


def test_number_of_verdicts_is_bounded_for_many_slow_ranks():
    job = Stragglers(ranks=100).run(1, 8, own_s=lambda rank: 0.6 if rank < 40 else 0.5)

    last = job.closed()[-1]
    assert len(last.stragglers) == 16 and last.last.health.stragglers == 40
    assert all(isinstance(one, StragglerVerdict) for one in last.stragglers)
    assert len(job.events("straggler")) == 20, "a line for each node of two"


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


def test_longer_waits_of_one_rank_are_data_loading_with_the_rank_and_its_own_action():
    """Of 10 s, rank 1 waits 4 s for data and rank 0 waits 0.3 s."""
    job = Stragglers(ranks=2, facts=lambda rank: {"framework": "torch"})
    for window in range(1, 31):
        job.now_s = 10.0 * window
        for rank, wait_s in enumerate((0.3, 4.0)):
            busy = device_window(f"GPU-{rank}", wall=full(10.0, utilization=1.0))
            times = IterationTimes.of([1.0 - wait_s / 10] * 10, [wait_s / 10] * 10, [])
            job.send(row(rank, window, busy_s=10.0 - wait_s, wait_s=wait_s, devices=(busy,), times=times))
    for rank in (0, 1):
        job.bye(rank, last_ordinal=300)

    summary = job.summary(ended=True)

    assert (summary.verdict.cause, summary.verdict.next) == ("data_loading", SLOW_DATA.text)
    assert summary.verdict.why.endswith("rank 1 (node0): data wait 400.0 ms per iteration, its peer 29.9 ms")
    (verdict,) = summary.stragglers
    assert (verdict.ranks, verdict.evidence) == ((1,), DATA_WAIT)
    assert verdict.gpu_seconds == verdict.own_seconds == pytest.approx(30 * 3.7, rel=0.01)
    assert summary.verdict.evidence[0].share == pytest.approx(0.4, rel=0.01)
    assert summary.goodput.seconds.get("straggling", 0.0) == 0.0
