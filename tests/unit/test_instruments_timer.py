"""Times of parts of an iteration, throughput, and the profiler of both."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from fake_cuda import FakeTorch

from effllm.instruments import profiling as profiling_module
from effllm.instruments.profiling import ComprehensiveProfiler, ThroughputTracker, TrainingTimer

S = 1_000_000_000


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of timers and throughput; add seconds with ``clock.move``."""
    now = SimpleNamespace(ns=5 * S)
    fake = SimpleNamespace(monotonic_ns=lambda: now.ns, monotonic=lambda: now.ns / S)
    monkeypatch.setattr(profiling_module, "time", fake)
    now.move = lambda seconds: setattr(now, "ns", now.ns + round(seconds * S))
    return now


def test_timers_of_different_names_may_overlap(clock):
    timer = TrainingTimer("cpu")
    timer.start("a")
    clock.move(1.0)
    timer.start("b")
    clock.move(1.0)

    assert timer.stop("a") == pytest.approx(2.0)
    clock.move(1.0)
    assert timer.stop("b") == pytest.approx(2.0)


def test_summary_has_statistics_and_shares(clock):
    timer = TrainingTimer("cpu")
    for seconds in (0.1, 0.2, 0.3):
        timer.start("iteration")
        with timer.time("forward"):
            clock.move(seconds / 2)
        clock.move(seconds / 2)
        timer.stop("iteration")
    summary = timer.get_summary()

    expected = {"count": 3, "mean_sec": 0.2, "std_sec": 0.1, "p50_sec": 0.2, "p95_sec": 0.29, "min_sec": 0.1}
    expected |= {"max_sec": 0.3, "total_sec": 0.6}
    assert {name: summary["iteration"][name] for name in expected} == pytest.approx(expected)
    assert summary["forward"]["share_of_iteration"] == pytest.approx(0.5)


def decorated(timer, clock):
    step = timer.time("a")(lambda: clock.move(1.0))
    step(), step()


def nested(timer, clock):
    with timer.time("a"), timer.time("a"):
        clock.move(2.0)


def raising(timer, clock):
    with pytest.raises(KeyError), timer.time("a"):
        clock.move(2.0)
        raise KeyError


@pytest.mark.parametrize(("block", "count"), [(decorated, 2), (nested, 1), (raising, 1)])
def test_time_of_a_block_is_counted_once(clock, block, count):
    timer = TrainingTimer("cpu")
    block(timer, clock)

    found = timer.get_summary()["a"]
    assert (found["count"], found["total_sec"]) == (count, pytest.approx(2.0))


def test_second_start_replaces_the_first_start_and_gives_a_warning(clock):
    timer = TrainingTimer("cpu")
    timer.start("a")
    clock.move(100.0)
    with pytest.warns(UserWarning, match="started twice"):
        timer.start("a")
    clock.move(1.0)
    assert timer.stop("a") == pytest.approx(1.0)

    timer.start("b")
    clock.move(100.0)
    with pytest.warns(UserWarning, match="started twice"), timer.time("b"):
        clock.move(1.0)
    with timer.time("b"):
        clock.move(1.0)
    found = timer.get_summary()["b"]
    assert (found["count"], found["total_sec"]) == (2, pytest.approx(2.0))


def test_stop_without_start_is_ignored_and_gives_one_warning():
    timer = TrainingTimer("cpu")
    with pytest.warns(UserWarning, match="without a start"):
        assert math.isnan(timer.stop("a"))

    assert math.isnan(timer.stop("a"))
    assert timer.get_summary() == {}


@pytest.fixture
def cuda(monkeypatch):
    """Return the second of two GPUs, which has reached no event."""
    fake = FakeTorch(2, (1,))
    fake.cuda.done_ms = -1.0
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake.cuda


def time_forward(timer, cuda):
    """Time a part that takes 1 ms."""
    timer.start("forward")
    cuda.now_ms += 1.0
    return timer.stop("forward")


def test_times_on_a_gpu_are_read_later_without_a_wait(cuda):
    timer = TrainingTimer("cuda:1")
    assert math.isnan(time_forward(timer, cuda))
    found = timer.get_summary()["forward"]
    assert (found["count"], found["not_measured"]) == (0, 1)
    cuda.done_ms = cuda.now_ms

    found = timer.get_summary()["forward"]
    assert found["mean_sec"] == pytest.approx(0.001)
    assert "not_measured" not in found


def test_stop_with_sync_waits_and_returns_the_time_on_the_gpu(cuda):
    timer, cuda.may_wait = TrainingTimer(1, sync=True), True

    assert time_forward(timer, cuda) == pytest.approx(0.001)
    assert cuda.waits == 1


def test_gpu_events_are_reused_and_their_number_is_bounded(cuda):
    timer = TrainingTimer("cuda:1")
    for _ in range(2 * profiling_module.MAX_PENDING):
        time_forward(timer, cuda)

    assert timer.get_summary()["forward"]["not_measured"] == 2 * profiling_module.MAX_PENDING
    cuda.done_ms = cuda.now_ms
    assert timer.get_summary()["forward"]["count"] == profiling_module.MAX_PENDING


def test_nothing_is_recorded_while_a_cuda_graph_is_captured(cuda):
    timer, cuda.captured = TrainingTimer("cuda:1"), {0, 1}
    time_forward(timer, cuda)

    assert cuda.made == 0
    assert timer.get_summary()["forward"]["not_measured"] == 1


def test_current_throughput_covers_only_the_newest_updates(clock):
    tracker = ThroughputTracker(window_size=2)
    tracker.start()
    for seconds in (10.0, 1.0, 1.0):
        clock.move(seconds)
        tracker.update(num_samples=8, num_tokens=1000)

    assert tracker.get_current_throughput() == pytest.approx({"samples_per_sec": 8.0, "tokens_per_sec": 1000.0})
    assert tracker.get_average_throughput() == pytest.approx({"samples_per_sec": 2.0, "tokens_per_sec": 250.0})


def test_rate_without_start_is_measured_from_the_first_update(clock):
    tracker = ThroughputTracker()
    assert math.isnan(tracker.get_current_throughput()["samples_per_sec"])
    tracker.update(num_samples=1000)
    assert math.isnan(tracker.get_current_throughput()["samples_per_sec"])
    clock.move(2.0)
    tracker.update(num_samples=8)
    rates = tracker.get_current_throughput()

    assert rates["samples_per_sec"] == pytest.approx(4.0)
    assert math.isnan(rates["tokens_per_sec"]), "never given"


@pytest.mark.parametrize("count", [-1, 1.5, "many", float("nan"), None])
def test_rate_is_not_measured_if_a_count_is_unknown(clock, count, recwarn):
    tracker = ThroughputTracker(window_size=1)
    tracker.start()
    for _ in range(2):
        clock.move(1.0)
        tracker.update(num_samples=count, num_tokens=10)
        assert math.isnan(tracker.get_current_throughput()["samples_per_sec"])

    clock.move(1.0)
    tracker.update(num_samples=8, num_tokens=10)

    assert tracker.get_current_throughput() == pytest.approx({"samples_per_sec": 8.0, "tokens_per_sec": 10.0})
    average = tracker.get_average_throughput()
    assert math.isnan(average["samples_per_sec"])
    assert average["tokens_per_sec"] == pytest.approx(10.0)
    assert ["a count below 0" in str(one.message) for one in recwarn] == [True]


def test_export_without_iterations_has_null_for_unmeasured_values(tmp_path):
    path = ComprehensiveProfiler("cpu").export_to_json(tmp_path / "profiling.json")

    assert json.loads(path.read_text())["memory"]["peak_allocated_gb"] is None
    assert [one.name for one in tmp_path.iterdir()] == ["profiling.json"]
