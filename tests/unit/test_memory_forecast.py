"""effllm/memory: forecasts of growth and of the longest micro-batch, and leaks."""

import pytest
from cases import repeats

from benchmarks import memory_forecast as benchmark
from effllm.memory.watch import FORECAST, LEAK, OUT_OF_MEMORY, DeviceWatch, LeakWatch, MemoryReading

GB, MB = 1e9, 1e6


def reading(iteration, allocated, peak, *, after="steps", reserved=0.0, positions=0.0, **counts):
    known = {"fragmented": 0.0, "retries": 0.0, "out_of_memory": 0.0, **counts}
    reserved = reserved or peak
    return MemoryReading(after, iteration, allocated, peak, reserved, reserved, positions=positions, **known)


def warned(watch, readings, capacity, max_positions=0):
    """Return the iteration, kind and text of each warning; each reading ends a window."""
    found = []
    for one in readings:
        new = [*watch.add_reading(one, is_window_end=True), *watch.new_warnings(capacity, max_positions)]
        found += [(one.iteration, each.kind, each.text) for each in new]
    return found


@pytest.fixture(scope="module")
def grown():
    return [benchmark.growth(seed) for seed in range(repeats(6, 12))]


def test_growth_is_foretold_50_iterations_ahead(grown):
    assert min(found.lead or 0 for found in grown) >= benchmark.LEAD


def test_intervals_of_most_forecasts_contain_the_end(grown):
    assert sum(found.is_inside for found in grown) >= 0.8 * len(grown)


def test_healthy_fragmented_runs_have_no_alarm():
    assert [one for seed in range(repeats(4, 12)) for one in benchmark.healthy(seed)] == []


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
        list(watch.add_reading(reading(number, used, peak), is_window_end=True))
        text += "".join(one.text for one in watch.new_warnings(32 * GB))
        if number % 20 == 10:
            peak = used + 12 * GB
            list(watch.add_reading(reading(number, used, peak, after="evaluation"), is_window_end=False))

    assert "at an evaluation" in text


@pytest.mark.parametrize(
    ("used", "num_readings", "capacity"),
    [
        *[
            pytest.param(lambda at, cache=cache: 10 * GB + 4 * GB * (1 - 2.718 ** (-at / cache)), 3000, 24 * GB,
                         id=f"a cache that fills in {cache} iterations")
            for cache in (30, 100, 400)
        ],
        pytest.param(
            lambda at: 10 * GB + 3 * GB * (at > 100) + 2 * GB * (at > 300) + 1 * GB * (at > 400), 800, 22 * GB,
            id="few jumps",
        ),
    ],
)  # fmt: skip
def test_memory_that_does_not_grow_on_is_neither_a_leak_nor_a_forecast(used, num_readings, capacity):
    readings = [reading(at, used(at), used(at) + 5 * GB) for at in range(1, num_readings)]

    assert warned(DeviceWatch(), readings, capacity) == []


def test_reserved_memory_near_the_limit_alone_is_no_alarm():
    readings = [reading(at, 30 * GB, 60 * GB, reserved=79.9 * GB) for at in range(1, 400)]

    assert warned(DeviceWatch(), readings, 80 * GB) == []


@pytest.mark.parametrize("stops_at", [150, 180, 250, 400, 700])
def test_growth_that_has_stopped_is_not_foretold(stops_at):
    """A cache grows by 50 MB per iteration, and stays; the memory has room for 1.3 times as many iterations."""
    used = [10 * GB + 50 * MB * min(at, stops_at) for at in range(1, 3 * stops_at)]
    readings = [reading(at, one, one + 5 * GB) for at, one in enumerate(used, start=1)]
    found = warned(DeviceWatch(), readings, 15 * GB + 2.3 * stops_at * 50 * MB)

    assert FORECAST not in [kind for _, kind, _ in found]


def test_growth_that_goes_on_after_a_pause_is_foretold():
    """The memory grows by 50 MB per iteration, but not from 400 to 440: 80 GB are full at iteration 1,340."""
    used = [10 * GB + 50 * MB * (min(at, 400) + max(at - 440, 0)) for at in range(1, 1300)]
    readings = [reading(at, one, one + 5 * GB) for at, one in enumerate(used, start=1)]
    at = [iteration for iteration, kind, _ in warned(DeviceWatch(), readings, 80 * GB) if kind == FORECAST]

    assert [440 < one < 800 for one in at] == [True]


def test_leak_far_from_the_limit_is_a_leak_and_no_forecast():
    readings = [reading(at, 10 * GB + at * MB, 12 * GB + at * MB) for at in range(1, 800)]
    (found,) = warned(DeviceWatch(), readings, 80 * GB)

    assert found[:2] == (601, LEAK)
    assert "the allocated memory of the GPU grows steadily, by 1 MB per iteration" in found[2]


@pytest.mark.parametrize(("available", "text"), [(None, ""), (2 * GB, "the available 2.00 GB of the host are full in "
                                                              "about 2,000 iterations (2,000 to 2,000)")])  # fmt: skip
def test_leak_of_a_process_is_reported_once_with_the_time_until_the_host_is_full(available, text):
    watch, found = LeakWatch("private memory of the training process"), []
    for at in range(1, 2000):
        watch.add(at, 500 * MB + at * MB + (at % 7) * MB * (available is None))
        found += watch.new_warnings(*([lambda: available] if available else []))

    assert [(one.kind, text in one.text) for one in found] == [(LEAK, True)]


def steps(sizes):
    """Return readings of steps that need 10 MB for each position, beside 10 GB."""
    peaks = [10 * GB + max(sizes[:number]) * 10 * MB for number in range(1, len(sizes) + 1)]
    return [reading(at, 10 * GB, peaks[at - 1], positions=size) for at, size in enumerate(sizes, start=1)]


def test_longest_micro_batch_is_foretold():
    found = warned(DeviceWatch(), steps([300, 100, 500, 700, 900]), 25 * GB, max_positions=2000)

    assert found == [
        (
            3,
            FORECAST,
            "GPU memory runs out at the longest micro-batch, 2,000 positions: a step needs about 30.00 GB of at most "
            "25.00 GB, if memory grows with the length as it did from 300 to 500 positions",
        )
    ]


@pytest.mark.parametrize(
    ("sizes", "capacity", "max_positions"),
    [
        ([300, 500, 900], 31 * GB, 2000),  # fits
        ([300, 500, 900], 25 * GB, 0),  # no known maximum
        ([900, 900, 900], 25 * GB, 2000),  # one length shows no line
        ([880, 890, 900], 25 * GB, 2000),  # too similar lengths
        ([300, 2000, 900], 25 * GB, 2000),  # measured
    ],
)
def test_longest_micro_batch_is_not_foretold(sizes, capacity, max_positions):
    assert warned(DeviceWatch(), steps(sizes), capacity, max_positions) == []


def test_longest_micro_batch_in_a_window_without_a_new_peak_has_been_measured():
    """The peak of the startup is larger than that of the longest micro-batch; then the script resets the peak."""
    readings = [reading(1, 10 * GB, 24 * GB, after="startup"), reading(2, 10 * GB, 24 * GB, positions=2000)]

    assert warned(DeviceWatch(), [*readings, *steps([100, 300, 800])], 25 * GB, 2000) == []


def test_out_of_memory_event_has_peaks_retries_and_fragmentation():
    watch = DeviceWatch()
    before = [
        reading(0, 8 * GB, 9 * GB, after="startup"),
        reading(10, 10 * GB, 30 * GB, reserved=35 * GB),
        reading(10, 10 * GB, 36 * GB, after="evaluation", reserved=38 * GB),
    ]
    for one in before:
        assert list(watch.add_reading(one, is_window_end=False)) == []
    failed = reading(14, 10 * GB, 36 * GB, reserved=38 * GB, fragmented=3 * GB, retries=5.0, out_of_memory=1.0)
    (found,) = watch.add_reading(failed, is_window_end=False)

    assert found.kind == OUT_OF_MEMORY
    assert found.text == (
        "GPU out of memory: peak of steps 30.00 GB; peak of evaluation 36.00 GB; before the error 10.00 GB allocated, "
        "38.00 GB reserved; 3.00 GB fragmented (free, in partly used segments); 5 allocator retries so far; after "
        "iteration 14"
    )


def test_errors_before_the_first_reading_are_no_event():
    assert list(DeviceWatch().add_reading(reading(0, GB, GB, out_of_memory=2.0), is_window_end=False)) == []
