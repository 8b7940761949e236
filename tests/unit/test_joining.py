"""effllm/job/joining.py: short windows are joined to windows of 1 s, with the same edges on all ranks."""

import math
import random
import statistics

import msgspec
import pytest
from builders import Job, device_window, full, reports, row
from cases import cases, repeats

from effllm.config.settings import MIN_WINDOW_S, Config, read_config
from effllm.job.account import Rows
from effllm.job.joining import MAX_WAIT_S, WindowJoiner, join
from effllm.job.open_windows import MAX_PENDING_BYTES
from effllm.records.energy import EnergyAmount
from effllm.records.rank import Allocator, Gauge, Integrals


def short(rank, window, window_s=0.01, **changes):
    """Return a report of ten iterations in `window_s`."""
    end_s = 1000.0 + window * window_s
    values = {
        "start_time_s": end_s - window_s,
        "end_time_s": end_s,
        "wall_s": window_s,
        "busy_s": 0.9 * window_s,
        "wait_s": 0.1 * window_s,
        "phases_s": {},
        "devices": (device_window(f"GPU-{rank}", window_s),),
        "sequence": window,
    }
    return row(rank, window, **{**values, **changes})


def joining(world_size, ledger=None, min_window_s=MIN_WINDOW_S):
    return Job(world_size, ledger, min_window_s=min_window_s).join()


def test_windows_are_joined_only_if_the_interval_is_unset():
    assert read_config({}).min_window_s == MIN_WINDOW_S
    assert read_config({"EFFICIENTLLM_LOG_INTERVAL": "auto"}) == read_config({})
    assert read_config({"EFFICIENTLLM_LOG_INTERVAL": "10"}) == Config(log_interval=10)


def test_windows_of_10_ms_become_one_window_per_second():
    job = joining(2)
    for window in range(1, 1001):
        job.send(short(0, window), short(1, window))

    windows = job.closed()

    assert 9 <= len(windows) <= 10
    assert [one.window for one in windows] == list(range(1, len(windows) + 1))
    assert all(one.iteration_last - one.iteration_first + 1 == 10 * 100 for one in windows)


def test_windows_of_a_second_are_not_joined():
    joined, plain = joining(2), joining(2, min_window_s=0.0)
    for window in range(501, 520):
        for job in (joined, plain):
            job.send(short(0, window, 1.1), short(1, window, 1.1))

    shown = [
        [(one.report.window, one.report.values, one.rows) for one in job.aggregator.closed_windows.take_windows()]
        for job in (joined, plain)
    ]

    assert len(shown[0]) == 19
    assert shown[0] == shown[1]


@cases("seed", range(repeats(1, 5)))
def test_joined_windows_have_exact_totals_and_equal_edges(seed):
    chance = random.Random(seed)
    ranks, last = chance.choice([1, 2, 3]), 160
    job, plain = joining(ranks), joining(ranks, min_window_s=0.0)
    lengths_s = [chance.choice([0.01, 0.05, 0.3, 1.5]) for _ in range(last // 20)]
    left = {rank: list(range(1, last + 1)) for rank in range(ranks)}
    ends_s = [0.0]
    for window in range(last):
        ends_s.append(ends_s[-1] + lengths_s[window // 20])
    while any(left.values()):
        rank = chance.choice([rank for rank in left if left[rank]])
        windows = [left[rank].pop(0) for _ in range(min(chance.randint(1, 30), len(left[rank])))]
        rows = [
            short(
                rank, window, ends_s[window] - ends_s[window - 1], final=window == last,
                start_time_s=1000.0 + ends_s[window - 1], end_time_s=1000.0 + ends_s[window],
            )
            for window in windows
        ]  # fmt: skip
        job.send(*rows)
        plain.send(*rows)
    for one in (job, plain):
        for rank in range(ranks):
            one.bye(rank)
        one.tick()

    windows, expected = (one.aggregator.closed_windows.take_windows() for one in (job, plain))

    assert job.aggregator.is_finished(job.now_s)
    assert not job.aggregator.summary(1000.0, ended=True).events.get("missing")
    for one in windows:
        assert len(one.rows) == ranks
        assert len({(row.iteration_first, row.iteration_last) for row in one.rows}) == 1
        span_s = min(row.end_time_s - row.start_time_s for row in one.rows)
        assert span_s >= 0.999 or one is windows[-1]
    ours, theirs = windows[-1].report, expected[-1].report
    assert ours.run.counts.tokens == theirs.run.counts.tokens == ranks * last * 1000
    assert (ours.run.counts.iterations, ours.iteration_last) == (theirs.run.counts.iterations, theirs.iteration_last)
    assert ours.run.energy.joules == pytest.approx(theirs.run.energy.joules)
    assert ours.run.energy.error_j == pytest.approx(theirs.run.energy.error_j)
    for base in ("run", "job"):
        sums = [msgspec.structs.asdict(getattr(one, base)) for one in (ours, theirs)]
        numbers = [{name: value for name, value in one.items() if isinstance(value, (int, float))} for one in sums]
        assert numbers[0] == pytest.approx(numbers[1])


def test_each_report_is_counted_once_after_a_restart():
    job = joining(2)
    rows = {rank: [short(rank, window, final=window == 400) for window in range(1, 401)] for rank in (0, 1)}
    for at in range(0, 230, 10):
        job.send(*rows[0][at : at + 10])
        job.send(*rows[1][at : at + 10])
    safe = job.aggregator.open_windows.safe_sequences()
    assert len(job.closed()) == 2
    assert safe == {0: 200, 1: 200}

    second = joining(2, job.ledger())
    for rank in (0, 1):
        second.send(*rows[rank][150:])  # reports 151 to 200 are already acknowledged
        second.bye(rank)
    second.tick()

    report = second.closed()[-1]
    assert report.run.counts.tokens == 2 * 400 * 1000
    assert report.run.counts.iterations == 4000
    assert report.run.energy.joules == pytest.approx(2 * 400 * full(0.01).energy.joules)
    assert report.window > 2


@pytest.mark.parametrize(("first", "second"), [((0,), (1,)), ((0, 1), (2,))], ids=["two ranks", "three ranks"])
def test_reports_are_acknowledged_after_their_joined_window_closes(first, second):
    job = joining(len(first + second))
    job.send(*(short(rank, window) for rank in first for window in range(1, 121)))
    assert set(job.aggregator.open_windows.safe_sequences().values()) == {0}
    job.send(*(short(rank, window) for rank in second for window in range(1, 121)))
    assert set(job.aggregator.open_windows.safe_sequences().values()) == {100}


def test_window_closes_after_the_maximum_wait_without_a_report():
    job = joining(2)
    job.send(*(short(rank, window) for rank in (0, 1) for window in range(1, 31)))
    assert not job.tick(MAX_WAIT_S - 0.1).closed()
    assert [one.iteration_last for one in job.tick(0.2).closed()] == [300]


def test_all_reports_of_a_late_rank_are_counted():
    job = joining(3)
    job.send(*(short(rank, window) for window in range(1, 101) for rank in (0, 1)))
    job.send(*(short(2, window) for window in range(1, 41)))
    job.wait(100)
    assert [one.last.counts.tokens for one in job.closed()] == [240 * 1000]
    job.send(*(short(2, window) for window in range(41, 101)))
    job.tick(1.0)
    job.send(*(short(rank, window) for window in range(101, 202) for rank in range(3)))

    report = job.closed()[-1]
    assert report.run.counts.tokens == 600 * 1000
    assert report.run.energy.joules == pytest.approx(600 * full(0.01).energy.joules)


def test_rank_far_ahead_does_not_delay_other_ranks():
    job = joining(3)
    job.send(*(short(2, window, 1000.0) for window in range(10**9, 10**9 + 50)))
    for window in range(1, 1001):
        job.send(short(0, window), short(1, window))
        job.tick()

    assert [one.iteration_last for one in job.closed()] == list(range(1000, 10_001, 1000))


def test_rank_with_a_full_buffer_loses_no_report():
    job = joining(1)
    for window in range(1, 1501):
        one = reports(short(0, window, 0.0001))
        assert job.aggregator.reports(one, job.now, MAX_PENDING_BYTES // 100)
    job.aggregator.close_all()
    assert job.closed()[-1].run.counts.tokens == 1500 * 1000


def test_joined_report_has_the_sums_of_its_parts():
    one = short(0, 1, loss=2.0, own_steps=2, own_step_s=1.0, reset=True, phases_s={"evaluation": 1.0})
    two = short(0, 2, loss=None, own_steps=3, own_step_s=3.0, final=True, losses_not_finite=1, first_not_finite=7)
    device = device_window(
        "GPU-0", 0.01, gauges={"temperature_c": Gauge(0.5, 0.01, 40.0, 60.0)}, power_histogram_s={10: 0.01},
        throttled_s={"any": 0.005}, throttle_covered_s=0.01, power_peak_w=300.0,
        wall=Integrals(EnergyAmount(1.0, 0.01, start_j2=4.0, end_j2=9.0, inside_j2=1.0)),
    )  # fmt: skip

    whole = join([short(0, 1, devices=(device,)), short(0, 2, devices=(device,))], 5)
    [both] = whole.devices
    assert (whole.window, whole.sequence, whole.iteration_first, whole.iteration_last) == (5, 1, 1, 20)
    assert both.wall == Integrals(EnergyAmount(2.0, 0.02, start_j2=4.0, end_j2=9.0, inside_j2=2.0))
    assert both.gauges == {"temperature_c": Gauge(1.0, 0.02, 40.0, 60.0)}
    assert (both.power_histogram_s, both.throttled_s, both.throttle_covered_s) == ({10: 0.02}, {"any": 0.01}, 0.02)

    whole = join([one, two], 2)
    assert (whole.loss, whole.own_steps, whole.own_step_s, whole.reset, whole.final) == (None, 5, 4.0, True, True)
    assert (whole.losses_not_finite, whole.first_not_finite, whole.phases_s) == (1, 7, {"evaluation": 1.0})
    assert math.isclose(whole.wall_s, 0.02)


def test_missing_report_adds_no_iterations():
    whole = join([short(0, 1), short(0, 3)], 3)

    assert (whole.iterations, whole.iteration_last, whole.tokens) == (20, 30, 2000)


def test_joined_report_has_the_largest_memory_of_the_allocator():
    memory = [Allocator(3.0, 9.0, 1.0), None, Allocator(5.0, 8.0, 0.0)]

    assert join([row(0, number, allocator=one) for number, one in enumerate(memory)], 1).allocator == Allocator(5, 9, 1)
    assert join([row(0, number) for number in (1, 2)], 1).allocator is None


def test_memory_of_the_allocator_is_in_the_values_of_a_window():
    sizes = [3e9, 5e9, 10e9]
    rows = Rows(row(rank, allocator=Allocator(size, 12e9, 0.0)) for rank, size in enumerate(sizes))

    found = rows.values["allocator/allocated_bytes"]
    assert (found.count, found.total, found.least, found.most) == (3, 18e9, 3e9, 10e9)
    assert found.squares / 2 == pytest.approx(statistics.variance(sizes))
    assert rows.values["allocator/reserved_bytes"].squares == 0.0
    assert Rows([row(3)]).values == {}


def test_only_the_whole_part_of_a_rank_passes_the_joiner_at_once():
    joiner = WindowJoiner(1.0)

    def add(rank, window, window_s):
        joiner.add_report(short(rank, window, window_s), 1, 0, has_many=False, now_s=0.0)

    add(0, 1, 0.6)
    add(1, 1, 0.6)
    add(0, 2, 0.6)  # windows 1 and 2 are one joined window
    assert joiner.number_if_single(short(2, 2, 0.6)) == 0  # the report of window 1 is missing
    add(0, 3, 1.0)
    assert joiner.number_if_single(short(2, 3, 1.0)) == 2
    assert joiner.number_if_single(short(1, 3, 1.0)) == 0  # a report of window 1 waits
