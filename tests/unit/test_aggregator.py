"""effllm/job/aggregator.py: closing of windows, totals, and replies to ranks."""

import math
import random
from itertools import count

import msgspec
import pytest
from builders import GIB, Job, amount, device_window, full, gpu, hello, reports, row
from cases import cases, repeats
from hypothesis import given
from hypothesis import strategies as st

from effllm import metrics
from effllm.job.closed_windows import MAX_RECENT
from effllm.job.ledger import restore
from effllm.job.open_windows import MAX_LATE, MAX_PENDING_BYTES
from effllm.job.presence import ABSENT_AFTER_S, LOST_AFTER_S
from effllm.network.transport import Outbox
from effllm.records.clock import Now
from effllm.records.energy import NORMAL_95, NOT_MEASURED
from effllm.records.iteration_times import IterationTimes, codes_of
from effllm.records.job import SCHEMA_VERSION, JobConstants
from effllm.records.rank import ParameterCount, RankReport, Sensor, ValueStatistics
from effllm.server.messages import Acknowledgement

# --- late ranks --------------------------------------------------------------------------------


def test_new_agent_after_the_end_of_rank_0_joins_the_next_attempt():
    job = Job(3).join(0, 1)

    assert job.aggregator.roster.is_too_late(hello(1, 3, agent="another"))
    assert job.aggregator.roster.is_too_late(hello(2, 3))
    assert not job.aggregator.roster.is_too_late(hello(1, 3)), "it is known"
    job.bye(0, "killed")
    assert job.aggregator.roster.is_too_late(hello(2, 3))


def test_late_agent_of_a_short_job_belongs_to_that_job():
    job = Job()
    assert not job.aggregator.roster.is_too_late(hello(0, 2)), "the trainer ended before any agent joined"

    job.join(0).bye(0)
    assert not job.aggregator.roster.is_too_late(hello(1, 2)), "the trainer completed"


# --- closing -----------------------------------------------------------------------------------


def test_window_closes_when_every_rank_has_reported():
    job = Job().join()

    job.send(row(0))
    assert job.closed() == []
    job.send(row(1))

    (report,) = job.closed()
    assert (report.window, report.iteration, report.iteration_first, report.iteration_last) == (1, 10, 1, 10)
    assert report.run.counts.tokens == report.last.counts.tokens == report.job.counts.tokens == 2000
    assert report.values["aec_watts"] == pytest.approx(200.0)
    assert (report.coverage.ranks_reporting, report.coverage.gpus_measured, report.coverage.energy) == (2, 2, 1.0)


def test_overdue_window_closes_and_lists_missing_ranks():
    job = Job(3).join()
    job.send(*(row(rank, busy_s=0.9, wait_s=0.1) for rank in range(3)))
    job.closed(), job.events()

    job.send(row(0, 2), row(2, 2))
    job.wait(5, 0, 1, 2)  # the deadline is three windows of 1 s, but at least 5 s
    assert job.closed() == []
    job.wait(1, 0, 1, 2)

    (report,) = job.closed()
    assert (report.coverage.missing_ranks, report.coverage.ranks_reporting) == ((1,), 2)
    assert [event.text for event in job.events("missing")] == ["window 2 closed without rank 1"]


def test_rank_that_skipped_a_window_is_not_waited_for():
    job = Job().join()
    job.send(row(0, 1), row(1, 2))  # rank 1 sends no report of window 1: its records were overwritten
    job.wait(1, 0, 1)

    assert [report.coverage.missing_ranks for report in job.closed()] == [(1,)]


def test_lost_rank_is_not_waited_for_and_may_return():
    job = Job().join()
    job.send(row(0))
    job.wait(int(LOST_AFTER_S), 0)
    assert job.closed() == []
    job.wait(1, 0)

    assert [report.window for report in job.closed()] == [1]
    assert [event.rank for event in job.events("rank_lost")] == [1]
    job.beat(1)
    assert [event.rank for event in job.events("back")] == [1]
    job.send(row(0, 2))
    assert job.closed() == [], "it is waited for again"


def test_gpu_of_a_departed_rank_is_not_expected():
    job = Job().join()
    job.send(row(0), row(1))
    job.bye(1)
    job.send(row(0, 2))

    first, second = job.closed()
    assert (first.coverage.gpus_expected, second.coverage.gpus_expected) == (2, 1)
    assert second.coverage.energy == 1.0
    # The first window has two GPUs at 100 W for 10 s. In the second window, the energy of one of the GPUs is missing.
    energy = job.summary().energy
    assert (energy.total_joules, energy.measured_joules) == (None, pytest.approx(3000.0))
    assert energy.iterations_coverage == pytest.approx(0.75)
    assert second.run.energy.joules == pytest.approx(3000.0), "the windows have their sums"


def test_absent_rank_is_waited_for_during_startup():
    job = Job().join(0)
    job.send(row(0))
    job.wait(int(ABSENT_AFTER_S), 0)
    assert job.closed() == []
    job.wait(1, 0)

    (report,) = job.closed()
    assert report.coverage.missing_ranks == (1,)
    assert report.coverage.gpus_expected == 2
    assert report.run.energy.joules is None, "the energy of an absent rank is unknown"
    assert report.run.counts.tokens == 1000
    job.send(row(0, 2))
    job.wait(1, 0)
    assert [report.window for report in job.closed()] == [2], "it is waited for no more"


def test_bye_closes_windows_that_wait_for_the_rank():
    job = Job().join()
    job.send(row(0, 1), row(0, 2), row(1, 1))
    assert job.bye(1, "failed")

    assert [(report.window, report.coverage.missing_ranks) for report in job.closed()] == [(1, ()), (2, ())]
    assert not job.aggregator.is_finished(job.now_s)
    job.bye(0)
    assert job.aggregator.is_finished(job.now_s)


def test_no_rank_is_expected_to_join_after_a_rank_has_left():
    job = Job().join(0)
    job.send(row(0))
    job.bye(0)
    assert not job.aggregator.is_finished(job.now_s)
    job.wait(3)

    assert [report.window for report in job.closed()] == [1]
    assert job.aggregator.is_finished(job.now_s)


def test_bye_of_an_unknown_rank_is_rejected():
    job = Job().join(0)

    assert not job.bye(1)
    assert not job.aggregator.is_finished(job.now_s)
    assert job.aggregator.garbage == 1


def test_open_windows_close_in_order_at_the_end():
    job = Job().join()
    job.send(row(0, 2), row(0, 3), row(1, 3))
    job.aggregator.close_all()

    assert [report.window for report in job.closed()] == [2, 3]


def test_job_is_lost_when_every_remaining_rank_is_lost():
    job = Job().join()
    job.bye(0)
    assert not job.aggregator.presence.all_lost(job.now_s)
    job.wait(16)

    assert job.aggregator.presence.all_lost(job.now_s)


# --- late reports and duplicates -----------------------------------------------------------------


def late_job(values=None, **settings):
    """Return a job whose first window closed without rank 1, and the report of that window."""
    job = Job(**settings).join()
    job.send(row(0, values=values))
    job.wait(31, 0, 1)
    (report,) = job.closed()
    return job, report


@pytest.mark.fault("duplicates")
def test_late_report_corrects_totals_but_not_its_window():
    job, report = late_job()
    shown = msgspec.json.encode(report)
    job.send(row(1, busy_s=12.0))

    (closed,) = job.aggregator.closed_windows.take_windows()
    correction = closed.report
    assert [one.rank for one in closed.rows] == [1]
    assert msgspec.json.encode(report) == shown
    assert (correction.correction, correction.window, correction.run.counts.tokens) == (True, 1, 2000)
    assert (correction.run.loop.time_s, report.run.loop.time_s) == (13.0, 10.0)
    assert not [tag for tag in correction.values if tag.startswith("window/")]
    assert (correction.coverage.reports_late, correction.coverage.gpus_measured) == (1, 2)
    assert correction.time_by_class == {"iterations": 11.5}, "the mean of 10 and 13"
    assert job.aggregator.ledger.reports == 2
    assert [event.rank for event in job.events("late")] == [1]


def test_values_of_a_late_or_repeated_report_are_counted_once():
    values = {"loss": ValueStatistics(2, 3.0, 0.5, 1.0, 2.0, (1, 0, 0), ((1.0, 1), (2.0, 1)))}
    job, report = late_job(values=values)
    assert report.instruments["loss"].total == 3.0
    for _ in range(2):
        job.send(row(1, busy_s=12.0, values=values))

    (correction,) = job.closed()
    loss = job.summary().instruments["loss"]
    assert correction.instruments == {}
    assert (loss.count, loss.total, loss.not_finite) == (4, 6.0, {"nan": 2})


def test_late_report_completes_the_energy_of_its_window():
    job, report = late_job()
    assert (report.run.energy.joules, report.run.energy.measured_j) == (None, 1000.0)
    job.send(row(1))

    run = job.closed()[0].run
    # Two GPUs draw 100 W each for 10 s; the divisor of J/token has the tokens of both ranks.
    assert (run.energy.joules, run.energy.measured_j, run.energy.is_complete) == (2000.0, 2000.0, True)
    assert (run.energy.counts.tokens, run.energy.counts.samples, run.energy.time_s) == (2000, 20, 10.0)
    assert job.summary().energy.by_device == {"GPU-0": 1000.0, "GPU-1": 1000.0}
    assert job.summary().energy.by_class == {"iterations": 2000.0}


def test_late_report_adds_joules_to_a_window_above_min_coverage():
    job, report = late_job(min_coverage=0.5)
    assert (report.run.energy.joules, report.run.energy.counts.tokens) == (1000.0, 1000)
    job.send(row(1))

    run = job.closed()[0].run
    assert (run.energy.joules, run.energy.counts.tokens, run.energy.counts.iterations) == (2000.0, 2000, 10)


def test_ranks_on_one_gpu_by_mistake_have_no_values_per_gpu():
    job = Job().join(devices=(gpu("GPU-0"),))
    (report,) = run_of(job, 1, devices=(device_window("GPU-0"),))

    assert report.run.constants.has_shared_gpu and report.run.constants.devices == 0
    assert "throughput/tokens_per_second_per_gpu" not in report.values


def test_late_rank_on_a_shared_gpu_adds_tokens_and_no_energy():
    job = Job().join(devices=(gpu(),))
    job.send(row(0))
    job.wait(31, 0, 1)
    job.send(row(1, devices=(device_window("GPU-0"),)))

    run = job.closed()[-1].run
    assert (run.energy.joules, run.energy.measured_j) == (1000.0, 1000.0)
    assert (run.energy.counts.tokens, run.counts.tokens) == (2000, 2000)


def test_late_report_of_a_rank_completes_the_memory_of_its_host():
    host = gpu("node0", kind="host", is_gpu=False, shared=True)
    job = Job().join(devices=(host,))
    job.send(row(0, devices=(device_window("node0"),)))
    job.wait(31, 0, 1)
    assert job.closed()[0].run.devices.memory_mean_bytes is None
    job.send(row(1, devices=(device_window("node0"),)))

    assert job.closed()[0].run.devices.memory_mean_bytes == pytest.approx(2 * GIB)


def test_late_report_after_a_reset_counts_only_in_totals_of_the_job():
    job = Job().join()
    job.send(row(0, reset=True))
    job.wait(31, 0, 1)
    job.send(row(1), row(0, 2), row(1, 2))

    report = job.closed()[-1]
    assert (report.run.counts.tokens, report.job.counts.tokens) == (2000, 4000)
    assert (report.run.energy.joules, report.run.energy.is_complete) == (2000.0, True)
    assert job.summary().energy.warmup_joules == 0.0


def test_late_report_of_the_warm_up_is_in_its_energy_and_not_in_the_run():
    job, _ = late_job(warmup="10")
    assert job.summary().energy.warmup_joules == 1000.0
    job.send(row(1))

    (correction,) = job.closed()
    assert (correction.run.counts.tokens, correction.job.counts.tokens) == (0, 2000)
    assert job.summary().energy.warmup_joules == 2000.0


def test_tokens_of_a_very_late_report_are_counted():
    job, _ = late_job()
    job.join(1, agent="agent-1")
    for window in range(2, MAX_RECENT + 3):
        job.send(row(0, window))
        job.send(row(1, window, sequence=window + 100, agent="agent-1"))
    job.closed()
    job.send(row(1, 1, sequence=999))

    (correction,) = job.closed()
    assert correction.run.counts.tokens == 1000 * 2 * (MAX_RECENT + 2)
    assert not correction.run.energy.is_complete
    assert correction.coverage.gpus_measured == 2, "the coverage is that of the last window"


@pytest.mark.fault("duplicates")
def test_duplicate_report_is_counted_once():
    job = Job().join()
    job.send(row(0), row(0), row(1))
    job.send(row(0), row(1))

    assert job.aggregator.duplicates == job.summary().events["duplicate"] == 3
    assert [report.run.counts.tokens for report in job.closed()] == [2000]


def test_lost_reports_of_an_agent_are_counted_once():
    job = Job().join()
    job.beat(0, lost=3)
    job.beat(0, lost=3)
    job.send(row(0, sequence=5), lost=4)
    job.send(row(1), agent_cpu_s=1.5)

    assert job.closed()[0].coverage.reports_lost == 4
    assert [event.text[:20] for event in job.events("reports_lost")] == ["rank 0 lost 3 report", "rank 0 lost 1 report"]
    assert job.summary().overhead.agents_cpu_s == 1.5


# --- admission -----------------------------------------------------------------------------------


def test_impossible_statements_of_a_rank_change_no_total():
    """Rank 1 states years of iterations, and more lost reports than it can have sent."""
    job = Job(2).join()
    year_s = 365 * 86_400.0
    job.send(row(0), row(0, 2, final=True))
    job.send(row(1), row(1, 2, busy_s=year_s), row(1, 3, wall_s=4 * year_s), lost=10**8)
    job.beat(1, lost=10**8)
    job.bye(1, lost=10**9)
    job.aggregator.close_all()
    summary = job.summary(ended=True)

    assert summary.elapsed_s < 100.0
    assert summary.iterations == 20
    assert summary.coverage.reports_lost == 2, "its two impossible reports"
    assert summary.measured_tokens == 3000
    assert summary.metrics["run_throughput/seconds_per_iteration"].value == pytest.approx(1.0)
    (text,) = [event.text for event in job.events("implausible")]
    assert text.startswith("rank 1 stated 100,000,000 lost reports, which is not possible")
    assert summary.events["implausible"] == 7


def test_rejected_reports_take_no_room_of_the_later_ones():
    job = Job(2, history_size=4).join()
    for sequence in range(1, 7):
        assert job.send(row(1, sequence, wall_s=365 * 86_400.0))
    assert job.send(row(1, 7), row(1, 8))

    assert not job.send(row(1, 9), row(1, 10), row(1, 11)), "4 reports of open windows are the limit"


def test_rank_of_another_job_is_rejected_with_the_reason():
    job = Job().join(0)

    assert job.hello(1, job="another") == "the agent belongs to another job"
    assert job.hello(2) == "rank 2 lies outside a world of 2"
    assert job.hello(-1) == "rank -1 lies outside a world of 2"
    assert job.hello(1, world_size=4) == "the agent's world has 4 ranks, but the job has 2 ranks"
    assert job.hello(1, log_interval=20) == "LOG_INTERVAL is 20 for this rank, but 10 for the job"
    assert job.hello(1, offset=5) == "the first iteration is 5 on this rank, but 0 on rank 0"
    assert job.hello(0, agent="another") == "rank 0 already has an agent"
    assert job.hello(1, log_interval=0) == "LOG_INTERVAL is 0 for this rank, but 10 for the job"
    assert job.hello(0, world_size=0) == "rank 0 lies outside a world of 0"
    assert job.hello(0, world_size=2**40) == f"a world of {2**40} ranks exceeds the limit of {2**20}"
    assert len(job.events("rejected")) == 10
    assert job.hello(1, offset=30) == "", "boundaries agree"


@pytest.mark.fault("duplicates")
def test_report_without_a_hello_is_not_counted():
    job = Job().join(0)
    job.send(row(1), row(0, agent="another"))

    assert (job.aggregator.garbage, job.aggregator.duplicates) == (2, 0)
    assert job.summary().tokens is None


def test_new_agent_replaces_a_lost_or_departed_agent():
    job = Job().join()
    job.bye(1)
    job.join(1, agent="second")
    job.wait(16)
    job.join(0, agent="second")

    job.send(row(0, agent="second"), row(1, agent="second"))
    assert [report.run.counts.tokens for report in job.closed()] == [2000]


def test_agent_may_send_its_hello_again():
    job = Job().join().join()

    assert len(job.events("joined")) == 2


def test_aggregator_without_a_job_accepts_the_job_of_the_first_agent():
    job = Job(name="").join(0, job="first")

    assert job.aggregator.ledger.job == "first"
    assert job.hello(1, job="second") == "the agent belongs to another job"


def test_later_counts_of_parameters_give_one_event_and_are_not_used():
    job = Job(3).join(0).join(1, parameters=ParameterCount(total=2000)).join(2, parameters=ParameterCount(total=3000))

    (event,) = job.events("disagreement")
    assert "ranks 0 and 1 disagree" in event.text
    assert job.aggregator.roster.job.parameters == 1000


def test_rank_may_correct_its_count_of_parameters():
    job = Job().join(0, parameters=ParameterCount()).join(0).join(0, parameters=ParameterCount(total=5000))

    assert job.aggregator.roster.job.parameters == 5000
    assert job.events("disagreement") == []


def test_parameter_shares_are_summed_when_all_ranks_joined():
    job = Job(3).join(0, parameters=ParameterCount(100, 90, 80, is_share=True))
    job.join(1, parameters=ParameterCount(0, 0, 0, is_share=True))
    assert job.aggregator.roster.job.parameters is None
    job.join(2, parameters=ParameterCount(200, is_share=True))

    assert job.aggregator.roster.job.parameters == 300


@pytest.mark.parametrize(("kind", "expected"), [("total", 300), ("trainable", 30), ("active", None)])
def test_throughput_is_divided_by_the_configured_kind_of_parameters(kind, expected):
    job = Job(parameters=kind).join(0, parameters=ParameterCount(100, 10, 5, is_share=True))
    job.join(1, parameters=ParameterCount(200, 20, is_share=True))

    assert job.aggregator.roster.job.parameters == expected
    assert job.summary().parameters_kind == kind


def test_host_energy_is_covered_if_one_rank_measures_it():
    blind = gpu("node0", is_gpu=False, shared=True, energy_method=None)
    job = Job(3).join(devices=(blind,)).join(1, devices=(gpu("node0", is_gpu=False, shared=True),))

    (report,) = run_of(job, 1, devices=(device_window("node0"),))
    assert report.coverage.energy == 1.0


def test_device_errors_with_equal_texts_are_all_recorded_and_counted():
    job = Job().join()
    for text in ("Xid 79", "Xid 79", "Xid 48"):
        job.event(0, "xid", text)
    job.event(0, "xid", "Xid 1", agent="another")

    assert [event.text for event in job.events("xid")] == ["rank 0: Xid 79", "rank 0: Xid 79", "rank 0: Xid 48"]
    assert job.summary().events["xid"] == 3


@cases(("event_s", "time_s"), [(1030.0, 1030.0), (9e9, 3000.0), (-1e30, 1000.0)])
def test_event_after_an_outage_keeps_its_time_within_the_job_its_rank_and_device(event_s, time_s):
    job = Job().join()
    job.now_s = 2000.0
    job.event(1, "xid", "Xid 79", event_s, device="GPU-7", count=2)

    (event,) = job.events("xid")
    assert (event.time_s, event.rank, event.device, event.count) == (time_s, 1, "GPU-7", 2)


@pytest.mark.fault("hostile-frames")
def test_event_storm_is_limited_to_100_lines_a_minute_and_a_count():
    job = Job()
    for minute in (1, 2):
        for _ in range(2000):
            job.aggregator.reject_frame(1000.0, "no frame")
        job.wait(61)

        lines = job.events("garbage")
        assert len(lines) == 101
        assert sum(line.count for line in lines) == 2000
        assert job.summary().events["garbage"] == job.summary().events["rejected"] == 2000 * minute
    assert job.aggregator.garbage == 4000


def test_million_events_of_many_ranks_need_less_than_10_megabytes():
    job = Job(200).join()
    for number in range(200):
        for rank in range(200):
            job.event(rank, "ecc", f"{number} uncorrected memory errors", device=f"GPU-{rank}", count=25)
    job.wait(61, *range(200))

    lines = job.events("ecc")
    assert sum(len(msgspec.json.encode(line)) + 1 for line in lines) < 10e6
    assert sum(line.count for line in lines) == job.summary().events["ecc"] == 1_000_000


def test_suppressed_events_are_counted_at_the_end_of_the_job():
    job = Job().join()
    for _ in range(250):
        job.event(1, "ecc", "1 uncorrected memory errors")
    job.aggregator.close_all()

    last = job.events("ecc")[-1]
    assert (last.rank, last.count) == (1, 150)


def test_nan_losses_give_one_event_per_change_and_are_all_counted():
    job = Job(1).join()
    for window, bad in enumerate((0, 0, 4, 10, 10, 0, 0), 1):
        first = window * 10 - 3 if bad else None
        loss = None if bad else 2.0
        job.send(row(0, window, loss=loss, losses_not_finite=bad, first_not_finite=first))

    events = [(event.kind, event.text) for event in job.events() if event.kind.startswith("loss")]
    text = "the loss is finite again at iteration 60, after 24 losses of the run that were NaN or infinite"
    assert events == [("loss_not_finite", "the loss is NaN or infinite at iteration 27"), ("loss_finite", text)]
    summary = job.summary()
    assert (summary.losses_not_finite, summary.first_not_finite, summary.loss) == (24, 27, 2.0)
    assert [report.last.counts.losses_not_finite for report in job.closed()] == [0, 0, 4, 10, 10, 0, 0]


def test_job_without_losses_has_no_loss_event():
    job = Job(1).join()
    run_of(job, 4, loss=None)

    assert [event.kind for event in job.events()] == ["joined"]


@pytest.mark.parametrize(("is_gpu", "expected"), [(True, ["gpus_idle"]), (False, [])])
def test_idle_gpus_give_one_event(is_gpu, expected):
    job = Job(1).join(0, devices=(gpu(is_gpu=is_gpu),))
    run_of(job, 29, devices=(device_window(wall=full(10.0, utilization=0.05)),))

    assert [event.kind for event in job.events() if event.kind != "joined"] == expected


def test_event_kinds_above_a_hundred_are_counted_together():
    job = Job().join()
    for number in range(300):
        kind = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        job.event(0, kind, "text")

    counts = job.summary().events
    assert len(counts) <= 102
    assert sum(counts.values()) == 300 + counts["joined"]


# --- the run to date -----------------------------------------------------------------------------


def run_of(job, windows, **changes):
    for window in range(1, windows + 1):
        for rank in range(job.world_size):
            job.send(row(rank, window, **changes))
    return job.closed()


def test_warm_up_iterations_are_rounded_up_to_whole_windows():
    closed = run_of(Job(warmup="15").join(), 3)

    assert [report.warming_up for report in closed] == [True, True, False]
    assert [report.run.counts.tokens for report in closed] == [0, 0, 2000]
    assert [report.job.counts.tokens for report in closed] == [2000, 4000, 6000]
    assert "aec_watts" not in closed[0].values
    assert closed[0].values["job/aec_watts"] == pytest.approx(200.0)
    assert closed[0].values["window/aec_watts"] == pytest.approx(200.0)


def test_warm_up_in_seconds_counts_only_iteration_time():
    closed = run_of(Job(warmup="15s").join(), 3, phases_s={"evaluation": 100.0})

    # Windows of 10 s and an evaluation: the second window begins at 10 s, within the warm-up of 15 s.
    assert [report.run.counts.tokens for report in closed] == [0, 0, 2000]


def test_reset_restarts_the_run_after_the_current_window():
    job = Job().join()
    job.send(row(0, 1), row(1, 1, reset=True), row(0, 2), row(1, 2))

    assert [report.run.counts.tokens for report in job.closed()] == [2000, 2000]
    assert job.summary().tokens == 4000


def test_base_job_uses_wall_time_and_base_run_uses_iteration_time():
    (report,) = run_of(Job().join(), 1, phases_s={"evaluation": 5.0})

    assert (report.run.loop.time_s, report.job.loop.time_s) == (10.0, 15.0)
    assert report.time_by_class == {"iterations": 10.0, "evaluation": 5.0}


def test_remaining_time_follows_from_remaining_iterations():
    job = Job().join(total_iterations=100)
    report = run_of(job, 3)[-1]

    assert (report.total_iterations, report.forecast["remaining_seconds"].value) == (100, pytest.approx(70.0))


def test_slowest_rank_is_that_of_the_costliest_verdict():
    job = Job(3).join()
    for window in range(1, 8):
        for rank, own_s in enumerate((0.5, 0.5, 0.6)):  # an iteration takes 1 s: a rank waits when its own time is over
            job.send(row(rank, window, own_steps=10, own_step_s=10 * own_s))

    slowest = [report.straggler for report in job.closed()]
    assert slowest[:5] == [None] * 5, "six blocks of iterations are needed"
    assert (slowest[-1].rank, slowest[-1].time_s, slowest[-1].median_s) == (2, pytest.approx(0.6), pytest.approx(0.5))
    last = job.summary().last_ranks
    assert (last.iterations, last.by_rank) == (70.0, {2: 70.0})
    assert last.max_uneven_s == pytest.approx(3 * 70 * 1.0), "of means: others may be long in turn"


def test_means_of_iterations_are_stated_as_not_measured():
    job = Job(1).join()
    job.send(row(0, times=IterationTimes(codes_of([1.0] * 5), each=2)))

    (text,) = [one for one in job.summary().not_measured if one.startswith("single iterations")]
    assert text.startswith("single iterations: of 10 iterations only means are known, so their losses are lower bounds")


def test_report_has_style_and_scope_and_is_marked_as_simulated():
    job = Job(1).join(devices=(gpu(simulated=True),), style="Step")
    (report,) = run_of(job, 1)

    assert (report.simulated, report.style, report.power_scope) == (True, "Step", "gpu")
    assert job.summary().simulated


def test_loss_is_from_the_first_report_with_a_loss():
    job = Job().join()
    job.send(row(0), row(1, loss=3.5), row(0, 2), row(1, 2))

    assert [report.loss for report in job.closed()] == [3.5, None]
    assert job.summary().loss == 3.5


def test_window_without_iterations_has_no_window_values():
    job = Job(1).join()
    run_of(job, 1)
    rest = device_window("GPU-0", 2.0, phases={"shutdown": full(2.0)})
    times = {"busy_s": 0.0, "wait_s": 0.0, "phases_s": {"shutdown": 2.0}}
    job.send(row(0, 2, iteration_last=10, tokens=0, final=True, devices=(rest,), **times))

    (report,) = job.closed()
    assert report.final
    assert not [tag for tag in report.values if tag.startswith("window/")]
    assert report.values["aec_watts"] == pytest.approx(100.0)


@cases(
    ("byes", "status"),
    [
        (("completed", "completed"), "completed"),
        (("completed", "failed"), "failed"),
        (("killed", "failed"), "failed"),
        (("completed", "killed"), "killed"),
        (("interrupted", "killed"), "interrupted"),
        (("interrupted", "failed"), "failed"),
        (("completed",), "ended"),
        ((), "killed"),
    ],
)
def test_run_is_completed_only_if_every_rank_completed(byes, status):
    job = Job().join()
    run_of(job, 1)
    for rank, word in enumerate(byes):
        job.bye(rank, word)

    assert job.summary().status == "running"
    assert job.summary(ended=True).status == status


@cases("status", ["completed", "failed", "killed"])
def test_absent_rank_is_listed_and_the_job_has_the_status_of_the_others(status):
    job = Job().join(0)
    job.bye(0, status)
    summary = job.summary(ended=True)

    assert summary.status == status
    assert any(text.startswith("1 of 2 ranks") for text in summary.not_measured)


def test_summary_has_units_and_energy_by_class():
    job = Job().join()
    run_of(job, 1, phases_s={"evaluation": 5.0})
    job.send(*(row(rank, 2, phases_s={"evaluation": 5.0}, final=True) for rank in range(2)))
    summary = job.summary(ended=True)

    assert summary.metrics["aec_watts"].unit == "W"
    assert summary.metrics["job/al_seconds"].unit == "s/iteration"
    assert (summary.iterations, summary.tokens, summary.samples) == (20, 4000, 40)
    assert summary.energy.total_joules == pytest.approx(2 * 2 * 15 * 100.0)
    assert summary.energy.joules_per_token == pytest.approx(1.5)
    assert (summary.energy.scope, summary.energy.method) == ("gpu", "counter")
    assert msgspec.json.decode(msgspec.json.encode(summary))["status"] == "killed"


def test_no_energy_sensor_gives_no_energy_and_no_scope():
    job = Job(1).join(devices=(gpu(energy_method=None, power_scope=None, not_measured=("no power here",)),))
    wall = device_window("GPU-0").wall
    blind = device_window("GPU-0", wall=msgspec.structs.replace(wall, energy=NOT_MEASURED))
    (report,) = run_of(job, 1, devices=(blind,))
    energy = job.summary().energy

    assert "aec_watts" not in report.values
    assert (report.power_scope, report.coverage.energy, report.energy_by_class) == (None, None, {})
    assert (energy.total_joules, energy.measured_joules, energy.by_class) == (None, None, {})
    assert job.summary().not_measured == ("no power here",)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_reasons_for_missing_metrics_do_not_depend_on_join_order(order):
    host = {"name": "host:vm", "is_gpu": False, "shared": True, "energy_method": None, "power_scope": None}
    job = Job(3)
    reasons = {0: ("energy: no RAPL",), 2: ("memory: no cgroup",)}  # only local rank 0 opens the sensor of the node
    for rank in order:
        job.join(rank, devices=(gpu(**host, not_measured=reasons.get(rank, ())),))

    assert job.summary().not_measured == ("energy: no RAPL", "memory: no cgroup")


@cases(
    ("counted", "reasons"),
    [
        ({"tokens": 100, "samples": 2}, []),
        ({"tokens": 100, "samples": 0}, ["samples: the training loop counted none"]),
        ({"tokens": 0, "tokens_processed": 0, "samples": 0}, ["tokens and samples: the training loop counted none"]),
        ({"tokens": 0, "samples": 0, "generated_tokens": 50, "generation_s": 1.0}, []),
    ],
)
def test_missing_counts_of_the_loop_are_null_with_a_reason(counted, reasons):
    job = Job(1).join()
    run_of(job, 1, **counted)
    summary = job.summary()

    assert (summary.tokens, summary.samples) == (counted["tokens"] or None, counted["samples"] or None)
    assert [text.partition(";")[0] for text in summary.not_measured] == reasons


@cases(
    ("name", "source", "is_open"),
    [
        ("NVIDIA A100-SXM4-80GB", "measured here", True),
        ("NVIDIA H100 80GB HBM3", "measured 2026-11-01, kept in the cache", True),
        ("Tesla V100-SXM2-16GB", "hardware table", True),
        ("NVIDIA X1000", "measured here", True),
        ("NVIDIA H100 80GB HBM3", "profiled 2026-11-01, kept in the cache", False),
        ("NVIDIA L40S", "measured here", False),
        ("Tesla T4", "measured here", False),
    ],
)
def test_unknown_tick_share_is_reported_once_per_job(name, source, is_open):
    sensor = Sensor(tick_s=0.1, tick_error_s=1e-4, lag_error_s=0.1, source=source)
    job = Job(4)
    for rank in range(4):
        job.join(rank, devices=(gpu(f"GPU-{rank}", name=name, sensor=sensor),))
    run_of(job, 1)

    sentences = [text for text in job.summary().not_measured if text.startswith("share of each tick")]

    assert len(sentences) == is_open
    assert all(name in text and "`effllm profile`" in text for text in sentences)


def test_no_tick_share_is_needed_for_a_counter_without_ticks():
    device = gpu("GPU-0", name="NVIDIA X1000", sensor=Sensor(tick_s=0.0))

    assert Job(1).join(devices=(device,)).summary().not_measured == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_energy_read_by_one_rank_is_not_listed_as_missing(order):
    job = Job(2)
    for rank in order:
        method, why = ("counter", ()) if rank == 0 else (None, ("energy: no permission",))
        job.join(rank, devices=(gpu("host:vm", energy_method=method, not_measured=why),))

    assert job.summary().not_measured == ()


# --- another aggregator --------------------------------------------------------------------------


def test_saved_state_leaves_out_reports_of_open_windows():
    job = Job().join()
    job.send(row(0, 1), row(0, 2))
    job.bye(0)
    second = Job(ledger=job.ledger()).join()

    second.send(row(1, 1))
    second.wait(5, 0, 1)
    assert second.closed() == [], "rank 0 is waited for: its bye must be sent again"
    second.send(row(0, 1))
    assert [report.run.counts.tokens for report in second.closed()] == [2000]
    assert second.aggregator.duplicates == 0


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_state_of_another_version_is_rejected(version):
    state = msgspec.json.encode({**msgspec.json.decode(Job().join().aggregator.snapshot()), "schema_version": version})

    with pytest.raises(
        msgspec.ValidationError, match=rf"schema_version {version}, .* reads only {SCHEMA_VERSION}: use"
    ):
        restore(state)


def test_restored_aggregator_does_not_wait_for_a_departed_rank():
    job = Job().join()
    job.bye(0)
    second = Job(ledger=job.ledger()).join(1)
    second.send(row(1))

    assert [report.window for report in second.closed()] == [1]


@pytest.mark.fault("disk-full", "duplicates")
def test_new_aggregator_counts_a_gap_in_reports_once():
    job = Job().join()
    job.send(row(0, 1), row(1, 1))
    job.send(row(0, 4))  # reports 2 and 3 are missing; window 4 is open
    assert [event.text for event in job.events("reports_lost")] == [
        "rank 0 lost 2 reports: an aggregator died before it wrote them"
    ]
    second = Job(ledger=job.ledger()).join()
    second.send(row(0, 4), row(1, 4))

    assert second.summary().coverage.reports_lost == 2 + 2, "and as many of rank 1"


def test_next_attempt_keeps_sums_and_starts_with_new_ranks():
    first = Job(warmup="10").join()
    run_of(first, 2)
    second = Job(1, first.next_ledger("second job"), "second job", warmup="10").join(0, agent="new")
    closed = run_of(second, 2, agent="new")

    assert [(report.attempt, report.window, report.warming_up) for report in closed] == [(2, 1, True), (2, 2, False)]
    assert [report.run.counts.tokens for report in closed] == [2000, 3000]
    assert [report.job.counts.tokens for report in closed] == [5000, 6000]
    assert second.summary(ended=True).attempts == 2


@pytest.mark.parametrize("warmup", ["0", "15s"])
def test_next_attempt_has_its_own_warm_up_and_ignores_an_old_reset(warmup):
    first = Job(1, warmup=warmup).join()
    first.send(row(0, 1), row(0, 2), row(0, 3, reset=True))
    second = Job(1, first.next_ledger("job"), warmup=warmup).join()
    second.send(row(0, 1), row(0, 2), row(0, 3))

    # Windows of 10 s: two windows begin within 15 s.
    expected = [0, 0, 1000] if warmup == "15s" else [1000, 2000, 3000]
    assert [report.run.counts.tokens for report in second.closed()] == expected


class CrashingJob:
    """Agents that resend unacknowledged reports, and an aggregator that is killed and replaced."""

    def __init__(self, rows, min_coverage):
        self.rows = rows  # per rank
        self.settings = {"min_coverage": min_coverage}
        self.state = b""  # newest state on the disk
        self.acknowledged = dict.fromkeys(rows, 0)
        self.start(0.0)

    def start(self, now_s):
        self.sent = dict(self.acknowledged)
        self.job = Job(len(self.rows), restore(self.state) if self.state else None, **self.settings)
        self.job.now_s = now_s
        self.queued, self.written = [], []  # states
        self.server = Acknowledgement(
            self.job.aggregator, 1000, lambda closed: None, lambda *state: self.queued.append(state), self.take_acks
        )
        self.job.join()
        self.server.save_state()

    def take_acks(self, sequences):
        for rank, sequence in sequences.items():
            self.acknowledged[rank] = max(self.acknowledged[rank], sequence)

    def send(self, rank):
        if self.sent[rank] < len(self.rows[rank]):
            self.job.send(self.rows[rank][self.sent[rank]])
            self.sent[rank] += 1

    def bye(self, rank):
        if self.sent[rank] == len(self.rows[rank]):
            self.job.bye(rank)

    def write_windows_and_state(self):
        self.server.write_windows_and_state(Now(self.job.now_s, self.job.now_s + 1000.0))

    def write(self):
        """Write the oldest queued state."""
        if self.queued:
            self.state, sequences = self.queued.pop(0)
            self.written.append(sequences)

    def acknowledge(self):
        if self.written:
            self.server.acknowledge_saved(self.written.pop(0))

    def crash(self):
        self.start(self.job.now_s)

    def play(self, steps, data, is_late=lambda: False):
        """Let random ranks send, and the aggregator write and crash; all windows may be overdue before it hands out."""
        for step in steps:
            rank = data.draw(st.sampled_from(sorted(self.rows)))
            if step in ("send", "bye"):
                getattr(self, step)(rank)
            elif step == "write_windows_and_state" and is_late():
                self.job.wait(31, *self.rows)
            else:
                getattr(self, step)()
        return self

    def finish(self):
        for rank, rows in self.rows.items():
            for _ in rows:
                self.send(rank)
        for rank in self.rows:
            self.job.bye(rank)
        if not self.job.aggregator.is_finished(self.job.now_s):
            self.job.wait(1)  # late reports are accepted a few milliseconds apart
        assert self.job.aggregator.is_finished(self.job.now_s)
        kept = restore(self.job.aggregator.snapshot())
        return self.job.summary(ended=True), tuple(one.totals(JobConstants()) for one in (kept.run, kept.whole))


@st.composite
def jobs(draw):
    """Return the reports of one to three ranks, by rank; a rank has up to five windows."""
    ranks, windows = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    return {
        rank: [
            row(
                rank,
                window,
                busy_s=draw(st.integers(1, 20)) * 0.7,
                tokens=draw(st.integers(0, 10**6)),
                reset=draw(st.integers(0, 9)) == 0,
                loss=draw(st.none() | st.floats(0, 10)),
            )
            for window in range(1, windows + 1)
        ]
        for rank in range(ranks)
    }


SERVED = ["write_windows_and_state", "write_windows_and_state", "write", "write", "acknowledge"]
STEPS = st.lists(st.sampled_from(["send"] * 6 + SERVED + ["bye", "crash"]), max_size=40)


@given(jobs(), STEPS, st.data(), st.sampled_from([0.4, 1.0]))
@pytest.mark.fault("duplicates")
def test_a_crash_at_any_point_changes_no_total(rows, steps, data, min_coverage):
    steady, crashing = CrashingJob(rows, min_coverage), CrashingJob(rows, min_coverage).play(steps, data)
    (expected, expected_totals), (found, totals) = steady.finish(), crashing.finish()

    assert totals == expected_totals
    assert found.status == expected.status == "completed"
    assert found.energy == expected.energy
    assert found.time_by_class == expected.time_by_class
    assert (found.tokens, found.loss) == (expected.tokens, expected.loss)
    assert found.coverage.reports_late == 0


@given(jobs(), STEPS, st.data())
@pytest.mark.fault("duplicates")
def test_crash_with_late_reports_loses_and_doubles_no_report(rows, steps, data):
    crashing = CrashingJob(rows, 1.0).play(steps, data, lambda: data.draw(st.booleans()))
    summary, (_, whole) = crashing.finish()

    assert (summary.measured_tokens or 0) == sum(one.tokens for of_rank in rows.values() for one in of_rank)
    assert whole.loop.time_s == pytest.approx(max(sum(one.wall_s for one in of_rank) for of_rank in rows.values()))
    energies = [one.devices[0].wall.energy.joules for of_rank in rows.values() for one in of_rank]
    assert whole.energy.measured_j is None or whole.energy.measured_j <= sum(energies) * (1 + 1e-9)


@pytest.mark.fault("duplicates")
def test_waiting_late_reports_are_counted_once_after_a_crash(monkeypatch):
    monkeypatch.setattr("effllm.job.aggregator.is_large", lambda world_size: True)
    rows = {rank: [row(rank, window, tokens=1) for window in (1, 2)] for rank in range(2)}
    crashing = CrashingJob(rows, 1.0)
    crashing.send(0)
    crashing.job.wait(31, 0, 1)  # window 1 is overdue
    for rank in (1, 1, 0):  # the first report of rank 1 is late; the other two reports close window 2
        crashing.send(rank)
    crashing.write_windows_and_state()
    for _ in range(2):
        crashing.write()
        crashing.acknowledge()
    crashing.crash()
    summary, _ = crashing.finish()

    assert summary.measured_tokens == 4
    assert summary.coverage.reports_late == 1


@given(jobs(), st.randoms(use_true_random=False))
def test_arrival_order_of_ranks_does_not_change_a_report(rows, random):
    reports_of = []
    for shuffle in (False, True):
        job = Job(len(rows)).join()
        for window in range(len(rows[0])):
            order = sorted(rows)
            if shuffle:
                random.shuffle(order)
            for rank in order:
                job.send(rows[rank][window])
        reports_of.append(job.closed())

    assert reports_of[0] == reports_of[1]
    assert len(reports_of[0]) == len(rows[0])


def test_ten_thousand_ranks_give_reports_of_the_usual_size():
    ranks = 10_000
    job, numbers = Job(ranks).join(), count(1)
    for window in (1, 2, 3):
        for rank in range(ranks):
            if (window, rank) != (3, 4711):
                job.send(row(rank, window, sequence=next(numbers)))
    job.aggregator.close_all()
    closed = job.closed()

    assert [report.run.counts.tokens for report in closed] == [10_000_000, 20_000_000, 29_999_000]
    assert closed[-1].coverage.missing_ranks == (4711,)
    assert max(len(msgspec.json.encode(report)) for report in closed) < 10_000
    assert len(closed[-1].values) <= 60


def test_missing_event_lists_only_the_first_eight_ranks():
    job = Job(1000).join(0)
    job.send(row(0))
    job.wait(31, 0)

    (event,) = job.events("missing")
    assert event.text == "window 1 closed without rank 1, 2, 3, 4, 5, 6, 7, 8, ..."


# --- doubtful values -------------------------------------------------------------------------------


def uncertain(rank=0, number=1, error_j=100.0, **changes):
    """Return a report of 1000 J with this random error (half-width); the whole error is at the window's edges."""
    edge_j2 = (error_j / NORMAL_95) ** 2 / 2
    wall = msgspec.structs.replace(full(10.0), energy=amount(1000.0, 10.0, start_j2=edge_j2, end_j2=edge_j2))
    return row(rank, number, devices=(device_window(f"GPU-{rank}", wall=wall),), **changes)


def test_windows_with_an_error_above_5_percent_are_marked():
    job = Job(1).join()
    job.send(*(uncertain(number=number, error_j=error_j) for number, error_j in enumerate((100.0, 100.0, 49.0), 1)))
    job.send(row(0, 4, devices=()), uncertain(number=5, error_j=500.0, final=True))

    assert [report.energy_doubtful for report in job.closed()] == [True, True, False, False, True]
    assert job.events("energy_doubtful") == []


def test_energy_with_an_error_above_20_percent_is_not_shown():
    job = Job(1).join()
    job.send(uncertain(number=1, error_j=190.0), uncertain(number=2, error_j=210.0))
    known, unknown = job.closed()

    assert known.values["energy/watts_per_gpu"] == 100.0
    assert "energy/watts_per_gpu" not in unknown.values
    assert "window/aec_watts" not in unknown.values
    assert unknown.last.energy.joules == 1000.0, "what was measured stays in the files"
    assert metrics.energy.joules_per_token(unknown.last) is None
    assert metrics.energy.joules_per_token(known.last) is not None


@cases("num_ranks", [1, 8])
def test_advice_on_doubtful_energy_does_not_vary_between_runs(num_ranks):
    texts = set()
    for seed in range(repeats(5, 50)):
        chance = random.Random(seed)
        job = Job(num_ranks).join()
        for number in range(1, 16):
            error_j = chance.uniform(200.0, 900.0) * math.sqrt(num_ranks)
            job.send(*(uncertain(rank, number, error_j=error_j) for rank in range(num_ranks)))
        (event,) = job.events("energy_doubtful")
        texts.add(event.text)

    (text,) = texts
    assert "exceeds ±20 %" in text and "windows four times as long (EFFICIENTLLM_LOG_INTERVAL)" in text


def test_large_error_of_every_third_window_raises_no_event():
    for seed in range(repeats(5, 50)):
        chance = random.Random(seed)
        job = Job(1).join()
        for number in range(1, 30):
            job.send(uncertain(number=number, error_j=400.0 if number % 3 == 0 else chance.uniform(1.0, 190.0)))
        assert job.events("energy_doubtful") == []


# --- iterations that keep step with a sensor ---


@cases(("errors", "num_events"), [([0.2, None, 0.31, 1.4], 1), ([None] * 4, 0)])
def test_aliasing_gives_one_event_per_job(errors, num_events):
    job = Job(4).join()
    for number in range(1, 10):
        job.send(*(row(rank, number, aliasing_error=error) for rank, error in enumerate(errors)))

    events = job.events("energy_aliasing")
    assert len(events) == num_events
    for event in events:
        assert event.rank is None
        assert event.text.startswith("on 3 of 4 ranks") and "by up to 100 % in the run to date" in event.text


def test_short_aliasing_raises_no_event():
    job = Job(1).join()
    for number in range(1, 20):
        job.send(row(0, number, aliasing_error=0.2 if number % 3 else None))

    assert job.events("energy_aliasing") == []


def test_relative_error_is_ten_times_smaller_for_100_gpus():
    job = Job(100).join()
    job.send(*(uncertain(rank, error_j=400.0) for rank in range(100)))

    # The errors are independent: 40 % for each GPU are 4 % for a hundred GPUs.
    assert not job.closed()[0].energy_doubtful


@cases(
    ("flops", "hardware_flops", "text"),
    [(9e12, None, ""), (12e12, None, "MFU would be 1.2, which is impossible"), (9e12, 12e12, "HFU would be 1.2")],
)
def test_mfu_or_hfu_above_one_gives_an_event(flops, hardware_flops, text):
    # 2000 tokens in 10 s on two devices of 1000 TFLOP/s: MFU is 1 at 1e13 FLOPs per token.
    job = Job(peak_tflops=1000.0).join(flops_per_token=flops, hardware_flops_per_token=hardware_flops)
    closed = run_of(job, 2)

    assert closed[-1].values.get("throughput/mfu_ratio") == (pytest.approx(0.9) if flops < 1e13 else None)
    assert [event.text.startswith(text) for event in job.events("mfu")] == [True] * bool(text)


def test_peak_is_from_the_hardware_table_if_all_gpus_are_listed():
    known, unknown = gpu("GPU-0", name="NVIDIA H100 80GB HBM3"), gpu("GPU-1", name="NVIDIA H101")
    job = Job(1).join(devices=(known,), flops_per_token=1e12)
    (report,) = run_of(job, 1)

    assert report.last.constants.peak_flops_per_s == pytest.approx(989.4e12)
    assert job.summary().peak == "989.4 TFLOP/s per GPU, dense BF16, NVIDIA H100 80GB HBM3 in the hardware table"
    other = Job(1).join(devices=(known, unknown), flops_per_token=1e12)
    assert run_of(other, 1)[0].last.constants.peak_flops_per_s is None
    assert other.summary().peak == ""


def test_summary_has_run_values_and_no_window_values():
    job = Job(peak_tflops=1000.0).join(flops_per_token=5e12)
    run_of(job, 2)
    metrics = job.summary().metrics

    assert metrics["run_throughput/mfu_ratio"].value == pytest.approx(0.5)
    assert metrics["run_energy/watts_per_gpu"].value == pytest.approx(100.0)
    assert not [tag for tag in metrics if tag.startswith("window/")]


def test_energy_error_of_a_run_comes_from_its_two_outer_edges():
    job = Job(1).join()
    job.send(*[uncertain(number=number, error_j=40.0) for number in (1, 2, 3, 4)])
    summary = job.summary()

    # The errors at edges between windows cancel: an error of 40 J in 4000 J remains.
    assert summary.energy.error_joules == pytest.approx(40.0)
    assert summary.energy.error_by_device == {"GPU-0": pytest.approx(40.0)}
    assert summary.energy.gain_error == pytest.approx(0.05)
    aec = summary.metrics["aec_watts"]
    assert (aec.value, aec.error, aec.sensor_error) == pytest.approx((100.0, 1.0, 5.0))


def test_total_energy_includes_the_separately_shown_warm_up_energy():
    job = Job(1, warmup="15").join()
    job.send(row(0, 1), row(0, 2), row(0, 3), row(0, 4))
    energy = job.summary().energy

    assert (energy.total_joules, energy.warmup_joules) == (4000.0, 2000.0)
    assert job.closed()[-1].run.energy.joules == 2000.0
    assert Job(1).join().summary().energy.warmup_joules == 0.0


def test_each_attempt_adds_its_own_warm_up():
    first = Job(1, warmup="10").join()
    first.send(row(0, 1), row(0, 2, final=True))
    second = Job(1, first.next_ledger("job"), warmup="10").join()
    run_of(second, 2)

    assert second.summary().energy.warmup_joules == 2000.0
    assert second.summary().energy.total_joules == 4000.0


# --- a total without a report has no value -----------------------------------------------------------


def whole_run(windows=4, without=()):
    """Return a job of two ranks at 100 W each, in windows of 10 s, without the reports of the given (rank, window)."""
    job = Job().join()
    for window in range(1, windows + 1):
        job.now_s += 10.0
        for rank in range(2):
            if (rank, window) not in without:
                job.send(row(rank, window, final=window == windows))
    job.aggregator.close_all()
    return job


def totals_in(summary):
    names = ("total_joules", "total_wh", "co2_kg", "electricity_cost")
    return [name for name in names if f"energy/{name}" in summary.metrics]


def test_total_energy_of_all_reports_has_a_value_and_full_coverage():
    job = whole_run()
    summary = job.summary(ended=True)

    assert summary.energy.total_joules == pytest.approx(8000.0)
    assert (summary.energy.time_coverage, summary.energy.iterations_coverage) == (1.0, 1.0)
    assert totals_in(summary) == ["total_joules", "total_wh"]
    assert not any(text.startswith("total energy") for text in summary.not_measured)


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ([(0, 2), (1, 2)], "2 reports never arrived"),
        ([(0, 1), (1, 1)], "2 reports never arrived"),
        ([(0, 4), (1, 4)], "the last report of 2 ranks never arrived"),
    ],
)
def test_missing_window_gives_energy_coverage_but_no_total_energy(without, reason):
    job = whole_run(without=without)
    for rank in range(2):
        job.bye(rank, "killed", 40, end_time_s=1040.0)
    summary = job.summary(ended=True)

    assert (summary.energy.total_joules, totals_in(summary)) == (None, [])
    assert summary.energy.measured_joules == pytest.approx(6000.0)
    assert summary.energy.time_coverage == pytest.approx(0.75)
    assert summary.energy.iterations_coverage == pytest.approx(0.75)
    (text,) = [text for text in summary.not_measured if text.startswith("total energy")]
    assert "75 % of the time and 75 % of the iterations were measured" in text
    assert reason in text
    assert "run_energy/joules_per_token" in summary.metrics, "the same windows in numerator and divisor"
    assert (summary.tokens, summary.samples, summary.iterations) == (None, None, 40)
    assert (summary.measured_tokens, summary.measured_iterations_ratio) == (6000, pytest.approx(0.75))
    assert f"total tokens and samples: 75 % of the iterations were measured; {reason}" in summary.not_measured
    assert not any(value.doubt for value in summary.metrics.values()), "tokens and time are of the same windows"


def test_totals_are_missing_and_rates_doubtful_if_a_rank_lacks_one_window():
    job = whole_run(without=[(1, 3)])
    summary = job.summary(ended=True)

    assert summary.energy.total_joules is None
    assert summary.energy.iterations_coverage == pytest.approx(0.875)
    assert (summary.tokens, summary.measured_tokens, summary.iterations) == (None, 7000, 40)
    doubtful = {tag for tag, value in summary.metrics.items() if value.doubt}
    assert {"tt_tokens_per_param_per_sec", "run_throughput/tokens_per_second"} <= doubtful
    assert not {"al_seconds", "run_throughput/seconds_per_iteration", "run_energy/joules_per_token"} & doubtful
    windows = ["throughput/tokens_per_second" in report.doubtful for report in job.closed()]
    assert windows == [False, False, True, False], "only the window without a report is a part"


def test_total_energy_is_missing_if_an_earlier_attempt_lost_reports():
    first = whole_run(without=[(0, 2), (1, 2)])
    second = Job(2, first.next_ledger("job")).join()
    second.send(row(0, 1, final=True), row(1, 1, final=True))
    summary = second.summary(ended=True)

    assert summary.energy.total_joules is None
    assert summary.coverage.reports_lost == 2


def test_reports_that_arrive_are_not_counted_as_lost():
    outbox, job = Outbox(2), Job(1).join()
    arriving = []
    for window in range(1, 6):  # no report is acknowledged, and each report is sent immediately
        outbox.add_report(row(0, window, final=window == 5))
        arriving += [msgspec.msgpack.decode(encoded, type=RankReport) for encoded in outbox.next_unsent()]
        outbox.mark_sent(1)
    job.send(*arriving, lost=outbox.num_lost)
    summary = job.summary(ended=True)

    assert (summary.coverage.reports_lost, summary.iterations) == (0, 50)
    assert summary.energy.total_joules == pytest.approx(5000.0)


# --- limits per rank ---------------------------------------------------------------------------------


def test_many_waiting_windows_close_a_few_at_a_time():
    job = Job(2).join()
    job.send(*(row(1, window) for window in range(1, 201)))
    job.bye(0)

    num_closed = [len(job.closed())]
    while job.aggregator.open_windows.has_more_to_close:
        job.aggregator.tick(job.now)
        num_closed.append(len(job.closed()))
    assert sum(num_closed) == 200
    assert max(num_closed) < 40
    assert job.summary().tokens == 200 * 1000


def test_waiting_reports_of_a_rank_are_bounded_in_number():
    job = Job(2, history_size=50).join()

    assert [job.send(row(1, window)) for window in range(1, 200)].count(True) == 50
    assert len(job.aggregator.open_windows._windows) == 50
    job.send(*(row(0, window) for window in range(1, 51)))
    # Reports that were not accepted are sent again.
    assert len(job.closed()) == 50
    assert job.send(*(row(1, window) for window in range(51, 101)))
    job.send(*(row(0, window) for window in range(51, 101)))
    assert job.summary().tokens == 2 * 100 * 1000
    assert job.summary().coverage.reports_lost == 0


def test_waiting_reports_of_a_rank_are_bounded_in_bytes():
    job = Job(2, history_size=1000).join()
    size = 100 * 1024
    taken = [job.aggregator.reports(reports(row(1, window)), job.now, size) for window in range(1, 200)]

    assert taken.count(True) == MAX_PENDING_BYTES // size


def test_rank_far_ahead_does_not_make_other_ranks_late():
    job = Job(3).join()
    job.send(*(row(2, window) for window in range(1, 500)))
    for window in range(1, 61):  # 60 windows of 1 s: longer than the deadline
        job.wait(1, 0, 1, 2).send(row(0, window), row(1, window))
    closed = job.closed()

    assert [report.window for report in closed] == list(range(1, 61))
    assert all(report.coverage.ranks_reporting == 3 for report in closed)
    assert job.summary().coverage.reports_late == 0


def test_many_late_reports_are_accepted_a_few_at_a_time():
    job = Job(2).join()
    for window in range(1, 201):
        job.send(row(0, window, final=window == 200))
    job.aggregator.close_all()
    job.aggregator.open_windows._max_late = MAX_LATE
    job.closed()
    job.send(*(row(1, window, final=window == 200) for window in range(1, 201)))

    assert len(job.closed()) == MAX_LATE
    job.aggregator.close_all()
    job.wait(1)
    assert len(job.closed()) == 200 - MAX_LATE
    assert job.summary().tokens == 400_000
