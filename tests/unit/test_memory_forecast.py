"""effllm/memory: forecasts of growth, of long micro-batches, and leaks, on drawn runs and on runs of the test."""

import math

import numpy as np
import pytest

from benchmarks import memory_forecast as benchmark
from benchmarks.memory_runs import GROWTH, HEALTHY, draw
from effllm.memory.device_forecast import MemoryReading
from effllm.memory.lengths import LengthPeaks
from effllm.memory.watch import FORECAST, LEAK, OUT_OF_MEMORY, RISK, DeviceWatch, LeakWatch

GB, MB = 1e9, 1e6


def reading(iteration, allocated, peak, *, after="steps", reserved=0.0, positions=0.0, **counts):
    known = {"fragmented": 0.0, "retries": 0.0, "out_of_memory": 0.0, **counts}
    reserved = reserved or peak
    return MemoryReading(after, iteration, allocated, peak, reserved, reserved, positions=positions, **known)


def warned(watch, readings, capacity, max_positions=0):
    """Return the iteration, kind and text of each warning; each reading ends a window."""
    found = []
    for one in readings:
        new = [*watch.add(one, is_window_end=True), *watch.warnings(capacity, max_positions)]
        found += [(one.iteration, each.kind, each.text) for each in new]
    return found


@pytest.fixture(scope="module")
def grown():
    return [benchmark.growth(seed) for seed in range(12)]


def test_growth_is_foretold_50_iterations_ahead(grown):
    assert min(found.lead or 0 for found in grown) >= benchmark.LEAD


def test_intervals_of_most_forecasts_contain_the_end(grown):
    assert sum(found.is_inside for found in grown) >= 10


def test_healthy_fragmented_runs_have_no_alarm():
    alarms = [one for seed in range(12) for one in benchmark.healthy(seed) if one[1] != RISK]

    assert alarms == []


@pytest.mark.parametrize("seed", [60, 142])
def test_jumps_with_a_wide_interval_are_no_growth(seed):
    assert [one for one in benchmark.healthy(seed) if one[1] != RISK] == []


def test_drawn_runs_have_the_properties_of_their_kind():
    for seed in range(5):
        assert draw(HEALTHY, seed).ends_at is None
        assert draw(GROWTH, seed).ends_at >= 150


def test_forecast_has_the_time_the_growth_and_the_place():
    """Steps need 20 GB beside 10 GB that grow by 50 MB per iteration: 40 GB are full after 200 iterations."""
    grown = [10 * GB + number * 50 * MB for number in range(1, 200)]
    readings = [reading(at, used, used + 20 * GB) for at, used in enumerate(grown, start=1)]
    (iteration, kind, text), *_ = warned(DeviceWatch(), readings, 40 * GB)

    assert kind == FORECAST
    assert 12 <= iteration < 150
    assert f"runs out in about {200 - iteration} iterations" in text
    assert "in a step: the allocated memory grows by 50 MB per iteration (50 MB to 50 MB)" in text


def test_forecast_names_the_evaluation_with_the_largest_peak():
    watch, text, peak = DeviceWatch(), "", 0.0
    for number in range(1, 190):
        used = 10 * GB + number * 50 * MB
        peak = max(peak, used + 2 * GB)
        list(watch.add(reading(number, used, peak), is_window_end=True))
        text += "".join(one.text for one in watch.warnings(32 * GB))
        if number % 20 == 10:
            peak = used + 12 * GB
            list(watch.add(reading(number, used, peak, after="evaluation"), is_window_end=False))

    assert "at an evaluation" in text


def test_reserved_memory_near_the_limit_alone_is_no_alarm():
    readings = [reading(at, 30 * GB, 60 * GB, reserved=79.9 * GB) for at in range(1, 400)]

    assert warned(DeviceWatch(), readings, 80 * GB) == []


@pytest.mark.parametrize("cache", [30, 100, 400])
def test_cache_that_fills_is_neither_a_leak_nor_a_forecast(cache):
    used = [10 * GB + 4 * GB * (1 - 2.718 ** (-at / cache)) for at in range(1, 3000)]
    readings = [reading(at, one, one + 5 * GB) for at, one in enumerate(used, start=1)]

    assert warned(DeviceWatch(), readings, 24 * GB) == []


def test_few_jumps_of_the_memory_are_no_growth():
    used = [10 * GB + 3 * GB * (at > 100) + 2 * GB * (at > 300) + 1 * GB * (at > 400) for at in range(1, 800)]
    readings = [reading(at, one, one + 5 * GB) for at, one in enumerate(used, start=1)]

    assert warned(DeviceWatch(), readings, 22 * GB) == []


def test_leak_far_from_the_limit_is_a_leak_and_no_forecast():
    readings = [reading(at, 10 * GB + at * MB, 12 * GB + at * MB) for at in range(1, 800)]
    (found,) = warned(DeviceWatch(), readings, 80 * GB)

    assert found[:2] == (601, LEAK)
    assert "the allocated memory of the GPU grows steadily, by 1 MB per iteration" in found[2]


def test_leak_of_a_process_is_reported_once():
    watch, found = LeakWatch("private memory of the training process"), []
    for at in range(1, 2000):
        watch.add(at, 500 * MB + at * MB + (at % 7) * MB)
        found += watch.warnings()

    assert [one.kind for one in found] == [LEAK]


def test_leak_of_a_process_has_the_time_until_the_host_is_full():
    watch, found = LeakWatch("private memory of the training process"), []
    for at in range(1, 800):
        watch.add(at, 500 * MB + at * MB)
        found += watch.warnings(lambda: 2 * GB)

    assert "the available 2.00 GB of the host are full in about 2,000 iterations (2,000 to 2,000)" in found[0].text


def test_longest_micro_batch_of_a_known_maximum_is_foretold():
    sizes = [100, 300, 200, 500, 400, 700, 600, 900]
    peak, readings = 0.0, []
    for at, size in enumerate(sizes, start=1):
        peak = max(peak, 10 * GB + size * 10 * MB)
        readings.append(reading(at, 10 * GB, peak, positions=size))
    (found,) = warned(DeviceWatch(), readings, 25 * GB, max_positions=2000)

    assert found[1] == FORECAST
    assert "runs out at the longest micro-batch, 2,000 positions: a step needs 30.00 GB" in found[2]
    assert warned(DeviceWatch(), readings, 60 * GB, max_positions=2000) == []


def test_probabilities_of_longer_micro_batches_are_calibrated():
    """In each bin, memory runs out as often as stated, within three standard errors or a fifth of the probability.

    The statements about one run depend on each other, so the first one of each run is taken.
    """
    runs = [benchmark.length(seed).get("probabilities", []) for seed in range(9000, 9800)]
    bins = benchmark.calibration([run[0] for run in runs if run])

    assert sum(one["count"] for one in bins) > 400
    for one in bins:
        stated = one["foretold"]
        error = 3 * math.sqrt(stated * (1 - stated) / one["count"])
        assert one["happened"] == pytest.approx(stated, abs=max(error, stated / 5))


def chances(values, length):
    """Return the probability of a longer micro-batch in as many windows."""
    lengths = LengthPeaks()
    for one in values:
        lengths.add(float(one), None)
    return lengths.probability(length, len(values))


def test_probability_of_a_new_maximum_is_almost_a_half():
    """Of 2 n windows in any order, the longest is in the later n with probability 1/2, if there is no limit."""
    chance = np.random.default_rng(1)
    runs = [chance.lognormal(6, 0.5, 40) for _ in range(100)]

    assert 0.37 < np.mean([chances(run, run.max()) for run in runs]) < 0.5


def test_lengths_with_a_limit_have_no_longer_micro_batch():
    assert chances([min(100 + 37 * (at % 11), 400) for at in range(60)], 401.0) < 0.01


def test_padding_to_a_multiple_is_no_limit():
    """Of lengths between 640 and 960, padded to multiples of 64, two have the same largest one by chance."""
    padded = [64 * (10 + at % 5) for at in range(38)] + [960, 960]

    assert chances(padded, 1000.0) > 0.05


def test_next_bucket_may_follow_buckets_that_are_filled():
    assert chances([1024] * 10 + [2048] * 30, 3000.0) > 0.05


def test_probability_is_larger_if_lengths_grow_with_time():
    values = [500 + 10 * at + 7 * (at % 5) for at in range(40)]
    mixed = list(np.random.default_rng(0).permutation(values))

    assert chances(values, 950.0) > 0.6
    assert chances(mixed, 950.0) < 0.3


def test_probability_is_unknown_before_20_windows():
    lengths = LengthPeaks()
    for at in range(19):
        lengths.add(100.0 + at, None)

    assert lengths.probability(200.0, 10) is None


def test_out_of_memory_event_has_peaks_retries_and_fragmentation():
    watch = DeviceWatch()
    before = [
        reading(0, 8 * GB, 9 * GB, after="startup"),
        reading(10, 10 * GB, 30 * GB, reserved=35 * GB),
        reading(10, 10 * GB, 36 * GB, after="evaluation", reserved=38 * GB),
    ]
    for one in before:
        assert list(watch.add(one, is_window_end=False)) == []
    failed = reading(14, 10 * GB, 36 * GB, reserved=38 * GB, fragmented=3 * GB, retries=5.0, out_of_memory=1.0)
    (found,) = watch.add(failed, is_window_end=False)

    assert found.kind == OUT_OF_MEMORY
    assert found.text == (
        "GPU out of memory: peak of steps 30.00 GB; peak of evaluation 36.00 GB; before the error 10.00 GB allocated, "
        "38.00 GB reserved; 3.00 GB fragmented (free, in partly used segments); 5 allocator retries so far; after "
        "iteration 14"
    )


def test_errors_before_the_first_reading_are_no_event():
    assert list(DeviceWatch().add(reading(0, GB, GB, out_of_memory=2.0), is_window_end=False)) == []
