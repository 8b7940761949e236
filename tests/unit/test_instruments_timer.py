"""Times of parts of an iteration, throughput, and the profiler of both."""

import json
import math
import sys
import time
from types import SimpleNamespace

import pytest

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


def test_stop_returns_the_seconds_of_a_part(clock):
    timer = TrainingTimer("cpu")
    timer.start("forward")
    clock.move(0.125)

    assert timer.stop("forward") == pytest.approx(0.125)


def test_summary_has_statistics_and_shares(clock):
    timer = TrainingTimer("cpu")
    for seconds in (1.0, 2.0, 3.0):
        timer.start("iteration")
        with timer.time("forward"):
            clock.move(seconds / 2)
        clock.move(seconds / 2)
        timer.stop("iteration")
    summary = timer.get_summary()

    assert summary["iteration"]["count"] == 3
    assert summary["iteration"]["mean_sec"] == pytest.approx(2.0)
    assert summary["iteration"]["std_sec"] == pytest.approx(1.0)
    assert summary["iteration"]["p50_sec"] == pytest.approx(2.0)
    assert summary["iteration"]["p95_sec"] == pytest.approx(2.9)
    assert (summary["iteration"]["min_sec"], summary["iteration"]["max_sec"]) == pytest.approx((1.0, 3.0))
    assert summary["forward"]["share_of_iteration"] == pytest.approx(0.5)


def test_timer_measures_a_decorated_function(clock):
    timer = TrainingTimer("cpu")

    @timer.time("step")
    def step():
        clock.move(0.5)

    step()
    step()

    assert timer.get_summary()["step"]["total_sec"] == pytest.approx(1.0)


def test_timers_of_different_names_may_overlap(clock):
    timer = TrainingTimer("cpu")
    timer.start("a")
    clock.move(1.0)
    timer.start("b")
    clock.move(1.0)

    assert timer.stop("a") == pytest.approx(2.0)
    clock.move(1.0)
    assert timer.stop("b") == pytest.approx(2.0)


def test_only_the_outermost_of_nested_blocks_of_one_name_counts(clock):
    timer = TrainingTimer("cpu")
    with timer.time("a"):
        clock.move(1.0)
        with timer.time("a"):
            clock.move(1.0)

    assert timer.get_summary()["a"]["count"] == 1
    assert timer.get_summary()["a"]["total_sec"] == pytest.approx(2.0)


def test_second_start_replaces_the_first_start_and_gives_a_warning(clock):
    timer = TrainingTimer("cpu")
    timer.start("a")
    clock.move(100.0)
    with pytest.warns(UserWarning, match="started twice"):
        timer.start("a")
    clock.move(1.0)

    assert timer.stop("a") == pytest.approx(1.0)


def test_stop_without_start_is_ignored_and_gives_one_warning():
    timer = TrainingTimer("cpu")
    with pytest.warns(UserWarning, match="without a start"):
        assert math.isnan(timer.stop("a"))

    assert math.isnan(timer.stop("a"))
    assert timer.get_summary() == {}


def test_a_block_that_raises_is_measured(clock):
    timer = TrainingTimer("cpu")
    with pytest.raises(KeyError), timer.time("a"):
        clock.move(1.0)
        raise KeyError

    assert timer.get_summary()["a"]["count"] == 1


def test_blocks_are_timed_after_a_start_without_a_stop(clock):
    timer = TrainingTimer("cpu")
    timer.start("a")
    clock.move(100.0)
    with pytest.warns(UserWarning, match="started twice"), timer.time("a"):
        clock.move(1.0)
    with timer.time("a"):
        clock.move(1.0)

    assert timer.get_summary()["a"]["count"] == 2
    assert timer.get_summary()["a"]["total_sec"] == pytest.approx(2.0)


class FakeCuda:
    """A device that reaches events when ``passed`` is advanced; an event's time is its number in ms."""

    def __init__(self):
        self.recorded, self.passed, self.waits, self.capturing = 0, 0, 0, False

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def current_stream(self, index):
        return ("stream", index)

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing):
        assert enable_timing
        cuda = self

        class Event:
            def record(self, stream):
                assert stream == ("stream", 1)
                cuda.recorded += 1
                self.number = cuda.recorded

            def query(self):
                return cuda.passed >= self.number

            def synchronize(self):
                cuda.waits += 1
                cuda.passed = max(cuda.passed, self.number)

            def elapsed_time(self, end):
                return float(end.number - self.number)

        return Event()


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_times_on_a_gpu_are_read_later_without_a_wait(cuda):
    timer = TrainingTimer("cuda:1")
    timer.start("forward")
    assert math.isnan(timer.stop("forward"))
    assert timer.get_summary()["forward"]["count"] == 0
    assert timer.get_summary()["forward"]["not_measured"] == 1
    cuda.passed = 2

    assert timer.get_summary()["forward"]["mean_sec"] == pytest.approx(0.001)
    assert "not_measured" not in timer.get_summary()["forward"]
    assert cuda.waits == 0


def test_stop_with_sync_waits_and_returns_the_time_on_the_gpu(cuda):
    timer = TrainingTimer(1, sync=True)
    timer.start("forward")

    assert timer.stop("forward") == pytest.approx(0.001)
    assert cuda.waits == 1


def test_gpu_events_are_reused_and_their_number_is_bounded(cuda):
    timer = TrainingTimer("cuda:1")
    for _ in range(2 * profiling_module.MAX_PENDING):
        timer.start("a")
        timer.stop("a")

    assert timer.get_summary()["a"]["not_measured"] == 2 * profiling_module.MAX_PENDING
    cuda.passed = cuda.recorded
    assert timer.get_summary()["a"]["count"] == profiling_module.MAX_PENDING


def test_nothing_is_recorded_while_a_cuda_graph_is_captured(cuda):
    timer = TrainingTimer("cuda:1")
    cuda.capturing = True
    timer.start("a")
    timer.stop("a")

    assert cuda.recorded == 0
    assert timer.get_summary()["a"]["not_measured"] == 1


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
    tracker.update(num_samples=1000)
    clock.move(2.0)
    tracker.update(num_samples=8)
    rates = tracker.get_current_throughput()

    assert rates["samples_per_sec"] == pytest.approx(4.0)
    assert math.isnan(rates["tokens_per_sec"])


def test_throughput_before_two_updates_is_not_measured():
    assert math.isnan(ThroughputTracker().get_current_throughput()["samples_per_sec"])


@pytest.mark.parametrize("count", [-1, 1.5, "many", float("nan"), None])
def test_rate_is_not_measured_if_a_count_is_unknown(clock, count):
    tracker = ThroughputTracker(window_size=1)
    tracker.start()
    clock.move(1.0)
    with pytest.warns(UserWarning, match="a count below 0"):
        tracker.update(num_samples=count, num_tokens=10)
    assert math.isnan(tracker.get_current_throughput()["samples_per_sec"])

    clock.move(1.0)
    tracker.update(num_samples=8, num_tokens=10)

    assert tracker.get_current_throughput() == pytest.approx({"samples_per_sec": 8.0, "tokens_per_sec": 10.0})
    assert math.isnan(tracker.get_average_throughput()["samples_per_sec"])
    assert tracker.get_average_throughput()["tokens_per_sec"] == pytest.approx(10.0)


def test_unknown_counts_are_reported_once(recwarn):
    tracker = ThroughputTracker()
    for _ in range(3):
        tracker.update(num_samples=-1)

    assert len(recwarn) == 1


def test_count_that_was_never_given_is_not_measured(clock):
    tracker = ThroughputTracker()
    tracker.start()
    clock.move(1.0)
    tracker.update(num_tokens=10)

    assert math.isnan(tracker.get_current_throughput()["samples_per_sec"])
    assert tracker.get_current_throughput()["tokens_per_sec"] == pytest.approx(10.0)


def test_profiler_exports_memory_timing_and_throughput(tmp_path):
    profiler = ComprehensiveProfiler(device=0)
    profiler.memory.set_baseline()
    for _ in range(3):
        profiler.start_iteration()
        with profiler.timer.time("forward"):
            time.sleep(0.001)
        profiler.end_iteration(num_samples=4, num_tokens=100)
    path = profiler.export_to_json(tmp_path / "new" / "profiling.json")
    body = json.loads(path.read_text())

    assert {"timestamp", "device", "memory", "timing", "throughput"} <= set(body)
    assert body["device"] == 0
    assert {"peak_allocated_gb", "mean_allocated_gb", "baseline_gb"} <= set(body["memory"])
    assert body["timing"]["iteration"]["count"] == 3
    assert 0 < body["timing"]["forward"]["share_of_iteration"] <= 1
    assert body["throughput"]["tokens_per_sec"] == pytest.approx(25 * body["throughput"]["samples_per_sec"])


def test_export_without_iterations_has_null_for_unmeasured_values(tmp_path):
    path = ComprehensiveProfiler("cpu").export_to_json(tmp_path / "profiling.json")

    assert json.loads(path.read_text())["memory"]["peak_allocated_gb"] is None
    assert [one.name for one in tmp_path.iterdir()] == ["profiling.json"]
