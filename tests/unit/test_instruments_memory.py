"""Memory of a process, and growth over iterations."""

import math
import random

import pytest
from cases import cases, repeats

from effllm.instruments import memory, profiling
from effllm.instruments._device import UnknownDevice
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler

MB = 1e6


class Allocator:
    """Supplies the readings of a profiler."""

    def __init__(self, monkeypatch):
        self.used = 1000 * MB
        monkeypatch.setattr(memory, "_process_memory", lambda: (self.used, 2 * self.used, self.used, 2 * self.used))


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def healthy(random_numbers, iteration, level):
    """Return the memory of a loop without a leak: batches of several lengths, and rare jumps."""
    if random_numbers.random() < 0.01:
        level[0] += random_numbers.choice((-1, 1)) * random_numbers.uniform(20, 200) * MB
    warm_up = 300 * MB * min(iteration / 20, 1.0)
    return level[0] + warm_up + random_numbers.expovariate(1.0) * 50 * MB + random_numbers.gauss(0.0, 1.0) * MB


def test_peak_remains_after_memory_is_freed(allocator):
    profiler = GPUMemoryProfiler("cpu")
    assert profiler.measure("after_forward") == {
        "allocated_gb": 1.0, "reserved_gb": 2.0, "max_allocated_gb": 1.0, "max_reserved_gb": 2.0
    }  # fmt: skip
    allocator.used = 500 * MB

    assert profiler.measure()["max_allocated_gb"] == 1.0
    assert (profiler.get_summary()["peak_allocated_gb"], profiler.get_summary()["mean_allocated_gb"]) == (1.0, 0.75)


def test_memory_of_this_process_is_positive():
    measured = GPUMemoryProfiler("cpu").measure()

    assert 0.001 < measured["allocated_gb"] <= measured["reserved_gb"] <= measured["max_reserved_gb"]


def leaking(allocator, seed):
    """Return a profiler after 200 iterations with a leak of 1 MB each, and noise."""
    chance, profiler = random.Random(seed), GPUMemoryProfiler("cpu")
    profiler.set_baseline()
    for iteration in range(200):
        allocator.used = 1000 * MB + iteration * MB + chance.expovariate(1.0) * 10 * MB
        profiler.measure("end")
    return profiler


def test_leak_of_1_mb_per_iteration_is_found_in_200_iterations(allocator):
    profilers = [leaking(allocator, seed) for seed in range(200)]
    trends = [profiler.trend("end") for profiler in profilers]

    assert all(profiler.detect_leak() for profiler in profilers)
    assert all(found.is_growing for found in trends)
    assert [found.growth_bytes for found in trends] == pytest.approx([1000 * MB] * 200, rel=0.1)
    # With a probability of 0.95, one set of 200 intervals in 170 has fewer than 182; the seeds are fixed.
    assert sum(found.low_bytes <= 1000 * MB <= found.high_bytes for found in trends) >= 182


@cases("seed", range(repeats(10, 50)))
def test_fragmented_memory_is_not_reported_as_a_leak(allocator, seed):
    chance, level = random.Random(1000 + seed), [1000 * MB]
    profiler = GPUMemoryProfiler("cpu")
    profiler.set_baseline()
    for iteration in range(1000):
        allocator.used = healthy(chance, iteration, level)
        profiler.measure("end")
        if iteration % 10 == 9:
            assert not profiler.detect_leak(threshold_gb=0.001)


def test_three_jumps_of_allocated_memory_are_not_reported_as_leak(allocator):
    profiler = GPUMemoryProfiler("cpu")
    for iteration in range(400):
        allocator.used = (1000 + 100 * (iteration // 110)) * MB
        profiler.measure("end")
        assert not profiler.detect_leak(threshold_gb=0.001)


def test_memory_at_different_places_of_a_loop_is_not_compared(allocator):
    profiler = GPUMemoryProfiler("cpu")
    for _ in range(200):
        for tag, used in (("forward", 2000 * MB), ("backward", 1000 * MB)):
            allocator.used = used
            profiler.measure(tag)

    assert not profiler.trend().is_growing


def test_leak_is_found_if_memory_is_rarely_checked(allocator):
    profiler = GPUMemoryProfiler("cpu")
    found = []
    for _ in range(12):
        allocator.used += 100 * MB
        found.append(profiler.detect_leak(threshold_gb=0.5))

    assert found[-1]
    assert not any(found[:8])


def test_baseline_formula_is_used_if_it_is_requested_by_name(allocator):
    profiler = GPUMemoryProfiler("cpu")
    with pytest.raises(ValueError, match="set_baseline"):
        profiler.detect_leak(method="baseline")
    profiler.set_baseline()
    allocator.used += 600 * MB

    assert profiler.detect_leak(threshold_gb=0.5, method="baseline")
    assert not profiler.detect_leak(threshold_gb=0.5)


@cases("device", [-1, "cuda:x", "gpu", 1.5, True])
def test_impossible_device_raises_an_error(device):
    with pytest.raises(UnknownDevice, match="device="):
        GPUMemoryProfiler(device)


@cases("device", [0, "cuda:1", "cpu", None])
def test_memory_of_the_process_is_measured_without_cuda(device):
    assert GPUMemoryProfiler(device).memory_of == "process"


def test_memory_that_the_system_does_not_show_is_not_measured(monkeypatch):
    monkeypatch.setattr(memory, "_process_memory", lambda: (math.nan,) * 4)
    profiler = GPUMemoryProfiler("cpu")

    assert all(math.isnan(value) for value in profiler.measure().values())
    assert math.isnan(profiler.get_summary()["peak_allocated_gb"])
    assert profiler.get_summary()["memory_of"] == "process"
    assert not profiler.detect_leak(threshold_gb=0.0)


def test_tags_are_bounded(allocator):
    profiler = GPUMemoryProfiler("cpu")
    for number in range(2 * memory.MAX_TAGS):
        for _ in range(200):
            profiler.measure(f"tag {number}")

    assert profiler.trend(f"tag {memory.MAX_TAGS - 1}") is not None
    assert profiler.trend(f"tag {memory.MAX_TAGS}") is None


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time only the test changes."""
    now_s = [1000.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now_s[0])
    return now_s


def test_memory_is_read_four_times_a_second_after_256_iterations(allocator, clock, monkeypatch):
    reads, measured = [], ComprehensiveProfiler("cpu")
    monkeypatch.setattr(measured.memory, "measure", lambda _tag, iteration: reads.append(iteration))
    for _ in range(356):
        measured.start_iteration()
        clock[0] += 1 / 32
        measured.end_iteration()

    assert reads[:256] == list(range(1, 257))
    assert reads[256:] == list(range(264, 357, 8))


@pytest.mark.parametrize("iteration_s", [0.001, 0.02, 1.0])
def test_profiler_finds_a_1_mb_leak_within_200_iterations(allocator, clock, iteration_s):
    measured = ComprehensiveProfiler("cpu")
    for _ in range(200):
        measured.start_iteration()
        clock[0] += iteration_s
        allocator.used += MB
        measured.end_iteration()

    assert measured.memory.detect_leak()
