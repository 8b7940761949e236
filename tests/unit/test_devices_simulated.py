"""effllm/devices/simulated.py: other tests use the integrals of simulated devices as true values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.devices import Site, open_device
from effllm.devices.simulated import Waveform, waveform_of
from effllm.devices.simulated import open_device as open_simulated

WAVE = Waveform(period_s=4.0, power_mean_w=400.0, power_amplitude_w=100.0)

PAIRS = [("power_w", "energy_j"), ("memory_bytes", "memory_byte_seconds"), ("utilization", "utilization_seconds")]


def test_energy_of_a_whole_and_of_a_half_period_is_that_of_a_sine():
    assert WAVE.power_w(1.0) == pytest.approx(500.0)
    assert WAVE.energy_j(1.3, 5.3) == pytest.approx(400.0 * 4.0)
    # The half wave of a sine of amplitude 1 and period 4 has the area 2 * 4 / (2 pi) = 4 / pi.
    assert WAVE.energy_j(0.0, 2.0) == pytest.approx(400.0 * 2.0 + 100.0 * 4.0 / math.pi)


@pytest.mark.parametrize(("value", "integral"), PAIRS)
def test_integral_equals_the_sum_over_small_intervals(value, integral):
    wave = waveform_of(3)
    steps = 2000
    width = 7.0 / steps

    total = sum(getattr(wave, value)(2.0 + (i + 0.5) * width) * width for i in range(steps))

    assert getattr(wave, integral)(2.0, 9.0) == pytest.approx(total, rel=1e-6)


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100))
def test_integrals_of_two_adjacent_intervals_add_up(start, first, second):
    middle, end = start + first, start + first + second

    total = WAVE.energy_j(start, middle) + WAVE.energy_j(middle, end)

    assert total == pytest.approx(WAVE.energy_j(start, end), rel=1e-6, abs=1e-6)


def test_device_is_marked_as_simulated():
    device = open_device("simulated", Site(host="node1", local_rank=2)).device

    assert (device.key, device.name, device.simulated) == ("SIM-node1-2", "simulated GPU", True)
    assert (device.is_gpu, device.shared, device.energy_method) == (True, False, "counter")
    assert device.memory_total_bytes == 80 * 2**30
    assert (device.sm_clock_max_hz, device.sm_clock_reference_hz, device.power_limit_default_w) == (
        1.98e9,
        1.98e9,
        650.0,
    )


def test_samples_have_the_values_of_the_wave():
    times = iter([5_000_000_000, 7_500_000_000])
    reader = open_simulated(Site(local_rank=1), clock_ns=lambda: next(times))
    wave = reader.waveform

    first, _ = reader.read()
    second, failures = reader.read()

    assert failures == {}
    assert first.utilization is None  # no earlier sample exists
    assert (second.time_ns, second.power_w) == (7_500_000_000, wave.power_w(7.5))
    assert second.memory_bytes == wave.memory_bytes(7.5)
    assert second.gauges == {"sm_clock_hz": wave.clock_hz(7.5)}
    assert second.utilization == pytest.approx(wave.utilization_seconds(5.0, 7.5) / 2.5)
    assert second.energy_j - first.energy_j == pytest.approx(wave.energy_j(5.0, 7.5))


def test_ranks_have_different_values_at_the_same_time():
    assert len({round(waveform_of(rank).power_w(1.0), 6) for rank in range(8)}) == 8


@given(st.floats(0, 1e6), st.integers(0, 1000))
def test_values_of_a_simulated_device_stay_within_bounds(t, rank):
    wave = waveform_of(rank)

    assert 0 < wave.power_w(t) <= 650.0
    assert 0 <= wave.utilization(t) <= 1
    assert 0 < wave.memory_bytes(t) < 80 * 2**30
    assert 0 < wave.clock_hz(t) < 1.98e9


def test_two_reads_at_one_time_return_the_same_value():
    reader = open_simulated(Site(), clock_ns=lambda: 1_000_000_000)

    reader.read()
    sample, _ = reader.read()

    assert sample.utilization == reader.waveform.utilization(1.0)
