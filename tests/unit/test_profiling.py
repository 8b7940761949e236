"""effllm/sensor_profile finds the known properties of simulated sensors.

The GPU of these tests uses virtual time; the edges of its load have exact times in nanoseconds.
Tolerances: ticks to 0.1 %, lags to 2 ms, measured windows to 2 ms.
"""

import random
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from cases import cases, repeats
from msgspec.structs import replace
from sensed_gpu import IDLE_W, LOADED_W, NS, SensedGpu

from effllm.energy.device_energy import EnergyLedger
from effllm.records.rank import AVERAGE, INSTANT
from effllm.sensor_profile import profile, to_calibration
from effllm.sensor_profile.estimates import Load, ticks_of
from effllm.sensor_profile.load import LoadUnavailable, load_pattern_s
from effllm.sensor_profile.record import LoadEdge

LAG_S, WINDOW_S, TICK = 0.002, 0.002, 1e-3


def profiled(gpu, seconds=40.0, open_load=None):
    return profile(gpu, open_load or (lambda: gpu), seconds, clock=gpu.clock)


# --- planted, and found again ---


@cases("tick_s", [0.106, 0.02, 0.1, 0.25][: repeats(1, 4)])
def test_ticks_of_counter_and_power_are_found(tick_s):
    found = profiled(SensedGpu(tick_s=tick_s, tick_phase_s=0.37 * tick_s))

    assert found.counter.period_s == pytest.approx(tick_s, rel=TICK)
    assert found.power.period_s == pytest.approx(tick_s, rel=TICK)
    assert abs(found.sensor.tick_s - tick_s) <= found.sensor.tick_error_s


@cases("measured_s", [0.025, 0.1])
@cases("lag_s", [0.04, 0.0, 0.1][: repeats(1, 3)])
def test_lag_and_measured_part_of_a_tick_are_found_separately(lag_s, measured_s):
    found = profiled(SensedGpu(tick_s=0.1, tick_phase_s=0.03, lag_s=lag_s, duty_s=measured_s % 0.1))

    # Power from the last 25 ms of a tick is used for the whole 100 ms: the value is 37.5 ms early on average.
    assert found.sensor.lag_s == pytest.approx(lag_s - (0.1 - measured_s) / 2, abs=LAG_S)
    assert abs(found.sensor.lag_s - lag_s + (0.1 - measured_s) / 2) <= found.sensor.lag_error_s < 0.01
    assert found.counter_response.window_s == pytest.approx(measured_s, abs=WINDOW_S)
    assert found.counter_response.ends_s == pytest.approx(lag_s, abs=LAG_S)
    assert found.sensor.duty == pytest.approx(measured_s / 0.1, abs=0.02)


@cases("average_s", [0.5, 1.0][: repeats(1, 2)])
def test_window_of_averaged_power_is_found(average_s):
    found = profiled(SensedGpu(tick_s=0.1, average_s=average_s))

    assert found.sensor.average_s == pytest.approx(average_s, abs=WINDOW_S)
    assert found.average_response.ends_s == pytest.approx(0.0, abs=LAG_S)


@pytest.mark.long
@cases("lag_s", [0.04, 0.0])
def test_lag_is_found_with_power_noise_and_tick_jitter(lag_s):
    # Ticks are up to 4 ms early or late: a standard deviation of 4 / sqrt(3) = 2.3 ms.
    found = profiled(SensedGpu(tick_s=0.1, duty_s=0.025, lag_s=lag_s, noise_w=6.0, tick_jitter_s=0.004), seconds=60.0)

    assert found.counter.jitter_s == pytest.approx(0.0023, abs=0.0004)
    assert found.counter.period_s == pytest.approx(0.1, rel=TICK)
    assert found.sensor.lag_s == pytest.approx(lag_s - 0.0375, abs=0.004)
    assert found.sensor.duty == pytest.approx(0.25, abs=0.04)


@pytest.mark.long
@cases(
    ("traits", "lag_s", "duty"),
    [
        ({"tick_s": 0.1, "duty_s": 0.025, "call_s": 0.012}, 0.0025, 0.25),  # a slow driver
        ({"tick_s": 0.1, "duty_s": 0.025, "call_s": 0.0024}, 0.0025, 0.25),
        ({"tick_s": 0.0, "power_mode": "exact"}, 0.04, 1.0),  # a continuous counter
    ],
)
def test_lag_is_found_with_a_slow_driver_or_a_continuous_counter(traits, lag_s, duty):
    found = profiled(SensedGpu(lag_s=0.04, **traits))

    assert found.sensor.lag_s == pytest.approx(lag_s, abs=LAG_S)
    assert found.sensor.duty == pytest.approx(duty, abs=0.02)
    assert found.sensor.call_s == pytest.approx(traits.get("call_s", found.sensor.call_s))
    assert (found.sensor.tick_s == 0.0) is (traits["tick_s"] == 0.0)


@cases(
    ("traits", "is_held"),
    [
        ({}, True),
        ({"lag_s": 0.04}, False),  # the power reading changes between two changes of the counter
        ({"lag_s": 0.1}, False),  # the power reading changes with the counter, but its value belongs to the next tick
        ({"duty_s": 0.025}, True),
        ({"power_mode": "exact"}, False),
    ][: repeats(2, 5)],
)
def test_power_that_is_held_between_ticks_is_found(traits, is_held):
    assert profiled(SensedGpu(tick_s=0.1, **traits)).sensor.is_held is is_held


# --- properties that cannot be found ---


def test_lag_is_unknown_if_readings_do_not_follow_the_load():
    gpu, other = SensedGpu(tick_s=0.1), SensedGpu(tick_s=0.1)
    other.clock = gpu.clock

    found = profiled(gpu, open_load=lambda: other)

    assert not found.measured_lag
    assert (found.counter_response, found.power_response, found.average_response) == (None, None, None)
    assert found.sensor.lag_error_s == found.sensor.tick_s == pytest.approx(0.1, rel=TICK)
    assert "lag and window of the energy counter: this reading does not follow the load" in found.unmeasured


class EndedLoad(SensedGpu):
    """A GPU whose load ends at once."""

    def take_edges(self):
        raise LoadUnavailable("it has ended")


def test_idle_values_are_measured_if_there_is_no_load():
    def unavailable():
        raise LoadUnavailable("torch is not installed")

    found = profiled(SensedGpu(tick_s=0.1), open_load=unavailable)

    assert found.unmeasured == ["lag, windows and the loaded GPU: torch is not installed"]
    assert found.counter.period_s == pytest.approx(0.1, rel=TICK)
    assert (found.measured_lag, found.sensor.source) == (False, "measured here")


@cases(("kind", "has_ended"), [(EndedLoad, True), (SensedGpu, False)])
def test_load_is_closed(kind, has_ended):
    gpu = kind(tick_s=0.1)
    found = profiled(gpu, seconds=12.0)

    assert ("lag, windows and the loaded GPU: it has ended" in found.unmeasured) is has_ended
    assert gpu.closed == 1


@pytest.mark.parametrize(("method", "has"), [(INSTANT, ("power", "average")), (AVERAGE, ("average",))])
def test_gpu_without_a_counter_is_profiled_with_its_power(method, has):
    gpu = SensedGpu(tick_s=0.05, average_s=0.8, has=has)
    gpu.device = replace(gpu.device, energy_method=method)

    found = profiled(gpu)

    assert found.counter is None
    assert found.sensor.tick_s == pytest.approx(0.05, rel=TICK)
    assert found.sensor.average_s == pytest.approx(0.8, abs=WINDOW_S)
    assert to_calibration(found).measured_lag


def test_no_calibration_is_returned_for_a_gpu_without_readings():
    found = profiled(SensedGpu(tick_s=0.1, has=()), seconds=12.0)

    assert to_calibration(found) is None
    assert found.counter is found.power is found.average is None


def test_other_work_on_the_gpu_causes_a_warning():
    gpu = SensedGpu(tick_s=0.1)
    gpu.utilization = 0.3

    found = profiled(gpu, seconds=12.0)

    assert found.warnings[0].startswith("the GPU was 30 % busy before its load began")


def test_report_contains_no_uuid_and_no_host_name():
    gpu = SensedGpu(tick_s=0.1)
    gpu.device = replace(gpu.device, key="GPU-01234567-89ab-cdef-0123-456789abcdef", energy_key="module:host7:SERIAL")

    text = repr(profiled(gpu, seconds=12.0))

    assert not [word for word in ("01234567", "abcdef", "host7", "SERIAL") if word in text]


# --- its use for windows ---


@cases("traits", [{"duty_s": 0.025, "lag_s": 0.1}, {"duty_s": 0.025}, {"lag_s": 0.1}][: repeats(1, 3)])
def test_energy_of_windows_that_end_at_power_jumps_is_unbiased(traits):
    gpu = SensedGpu(tick_s=0.1, tick_phase_s=0.043, **traits)
    profile_of_it = profiled(gpu).sensor
    sensors = (profile_of_it, replace(profile_of_it, lag_s=0.0, is_held=True))
    ledgers = [EnergyLedger(replace(gpu.device, sensor=sensor), 5.0) for sensor in sensors]

    edges = jumps(gpu)
    while gpu.clock.now_ns < edges[-1].time_ns + NS:
        sample, _ = gpu.read_energy()
        for ledger in ledgers:
            ledger.add(sample)
        gpu.clock.sleep(0.02)

    # Every window starts without load and ends 150 ms after the start of a load, at changing phases of the tick.
    windows = [(rest.time_ns + NS // 3, load.time_ns + 150_000_000) for rest, load in pairwise(edges) if load.is_on]
    truths_j = [gpu.power.integral(start_ns / NS, end_ns / NS) for start_ns, end_ns in windows]
    ours, others = (
        mean(ledger.energy(*window).joules - truth_j for window, truth_j in zip(windows, truths_j, strict=True))
        for ledger in ledgers
    )
    # A lag L causes a bias of (90 W - 620 W) L: +20 J for -37.5 ms, -53 J for 100 ms.
    assert others == pytest.approx((IDLE_W - LOADED_W) * profile_of_it.lag_s, abs=8.0)
    assert abs(ours) < 5.0


def jumps(gpu):
    """Switch the load of the GPU 120 times; return the edges."""
    chance, at_ns, edges = random.Random(5), gpu.clock.now_ns + NS, []
    for number in range(120):
        edges.append(LoadEdge(at_ns, number % 2 == 0))
        at_ns += round(chance.uniform(0.7, 1.3) * NS)
    gpu.power.switch(edges)
    return edges


# --- by hand ---


@cases(
    ("edges", "ends_s", "window_s", "shares"),
    [
        ([2, 3, 5, 6], [0.0, 1.0, 1.25, 3.0, 9.0], 1.0, [0.0, 0.5, 0.75, 0.0, 0.0]),
        ([2, 3, 5, 6], [3.0], 3.0, [1 / 3]),
        ([2], [0.5, 1.0, 9.0], 1.0, [0.0, 0.5, 1.0]),  # the load was not switched off
    ],
)
def test_load_of_a_window_is_the_share_of_time_with_load(edges, ends_s, window_s, shares):
    """Edges are in seconds; from the origin, the first loads are from 1 to 2 and from 4 to 5."""
    load = Load([LoadEdge(at_s * NS, number % 2 == 0) for number, at_s in enumerate(edges)], origin_ns=NS)

    assert load.loaded_share(np.array(ends_s), window_s=window_s) == pytest.approx(shares)


def test_ticks_without_a_change_are_counted():
    # Ticks are every 10 ms, reads every 2 ms; the value does not change at ticks 3 and 4.
    values = [0.0, 1.0, 2.0, 2.0, 2.0, 5.0, 6.0, 7.0, 8.0]
    readings = [(0.001 + 0.002 * step, values[step // 5]) for step in range(45)]

    rhythm, ticks = ticks_of(readings)

    assert rhythm.period_s == pytest.approx(0.010)
    assert [tick.number for tick in ticks] == [0, 1, 4, 5, 6, 7]
    assert [tick.at_s for tick in ticks] == pytest.approx([0.01, 0.02, 0.05, 0.06, 0.07, 0.08])


def test_no_period_is_found_for_irregular_changes():
    chance, at_s, readings = random.Random(3), 0.0, []
    for value in range(40):
        readings += [(at_s + 0.001 * step, value) for step in range(9)]
        at_s += chance.uniform(0.01, 0.5)

    assert ticks_of(readings) is None


@cases("tick_s", [0.0, 0.02, 0.1, 2.0])
def test_load_pattern_has_the_given_length_and_different_phases(tick_s):
    stretches = load_pattern_s(51.0, tick_s)

    assert 51.0 <= sum(stretches) <= 56.0
    assert len({stretch % 0.1 for stretch in stretches}) == len(stretches)
    assert load_pattern_s(51.0, tick_s) == stretches
