"""GPUs without an energy counter: power is read ten times a second and integrated, with a stated error."""

import math
import os
import random
import statistics
from itertools import pairwise

import pytest
from cases import cases, repeats
from fake_reader import FakeReader
from jobs import until
from msgspec.structs import replace
from nvml_library import bursts, flat, sine, square, steps
from sensor_model import BEGIN_S, NS, Telegraph

from effllm.agent.sampler import NEVER_NS, POWER_EVERY_S, Sampler
from effllm.energy.calibration import assumed_sensor, with_power_measurement
from effllm.energy.device_energy import EnergyLedger
from effllm.records.rank import COUNTER, INSTANT, Device, Sample

GPU = Device("GPU-0", "nvml", energy_method=INSTANT, power_limit_w=700.0)


def levels(chance):
    return chance.uniform(70, 200), chance.uniform(420, 690)


TRACES = {
    "square": lambda chance: square(*levels(chance), chance.uniform(1.2, 2.6), chance.uniform(0.35, 0.65)),
    "fast square": lambda chance: square(*levels(chance), chance.uniform(0.22, 0.45), chance.uniform(0.35, 0.65)),
    "sine": lambda chance: sine(*levels(chance), chance.uniform(1.5, 4.0)),
    "bursts": lambda chance: bursts(*levels(chance), chance.uniform(0.7, 1.6), 0.15, chance.randrange(9999)),
    "steps": lambda chance: steps(*levels(chance), chance.uniform(0.35, 0.8), chance.randrange(9999)),
    "telegraph": lambda chance: Telegraph(*levels(chance), 0.5, chance.randrange(40)),
}


class PowerSensor:
    """Returns the current power; with ``held_s`` it returns the mean power of the last tick."""

    def __init__(self, power, held_s, phase_s):
        self.power, self._held_s, self._phase_s = power, held_s, phase_s

    def at(self, time_s):
        if not self._held_s:
            return self.power.at(time_s)
        tick_s = self._phase_s + (time_s - self._phase_s) // self._held_s * self._held_s
        return self.power.integral(tick_s - self._held_s, tick_s) / self._held_s

    def sample(self, time_s):
        time_ns = round(time_s * NS)
        return Sample(time_ns, power_w=self.at(time_ns / NS))


def windows(power, seed, *, held_s=0.0, window_s=1.0, count=30):
    """Return (relative error, relative half-width) of windows; reads have the same times as in the sampler."""
    chance = random.Random(seed)
    sensor = PowerSensor(power, held_s, chance.uniform(0, 1))
    dense = [sensor.sample(BEGIN_S + 0.0021 * number) for number in range(950)]
    one = EnergyLedger(replace(GPU, sensor=with_power_measurement(assumed_sensor(GPU), dense)), 5.0)
    begin_s = BEGIN_S + 3.0 + chance.uniform(0, 5)
    edges_s = [begin_s + 1.0]
    for _ in range(count):
        edges_s.append(edges_s[-1] + window_s * chance.uniform(0.9, 1.1))
    reads_s = [at_ns / NS for edge_s in edges_s for at_ns in one.timing.reads_for(round(edge_s * NS))]
    at_s = begin_s
    while at_s < edges_s[-1] + 1.0:
        reads_s.append(at_s)
        at_s += POWER_EVERY_S * chance.uniform(0.9, 1.1)
    for read_s in sorted(reads_s):
        one.add(sensor.sample(read_s + chance.uniform(5e-5, 4e-4)))
    found = []
    for start_s, end_s in pairwise(edges_s):
        energy, truth_j = one.energy(round(start_s * NS), round(end_s * NS)), power.integral(start_s, end_s)
        deviation_j = math.sqrt(energy.start_j2 + energy.end_j2 + energy.inside_j2)
        found.append((energy.joules / truth_j - 1, 1.96 * deviation_j / truth_j))
    return found


@pytest.mark.parametrize("held_s", [0.0, 0.02, 0.1])
def test_mean_error_for_a_square_wave_of_2_s_is_below_5_percent(held_s):
    found = [one for seed in range(12) for one in windows(square(100.0, 500.0, 2.0), seed, held_s=held_s)]

    assert statistics.fmean(abs(error) for error, _ in found) < 0.05


@pytest.mark.parametrize("held_s", [0.0, pytest.param(0.02, marks=pytest.mark.long), 0.1])
@pytest.mark.parametrize("trace", TRACES)
def test_stated_intervals_cover_the_energy_of_each_kind_of_trace(trace, held_s):
    for window_s in (0.2, 1.0, 5.0):
        found = []
        for seed in range(repeats(5, 10)):
            power = TRACES[trace](random.Random(seed))
            found += windows(power, seed, held_s=held_s, window_s=window_s, count=20)
        assert statistics.fmean(abs(error) <= half_width for error, half_width in found) >= 0.93


def test_energy_of_constant_power_is_exact():
    assert max(abs(error) for error, _ in windows(flat(400.0), 1)) < 1e-6


@pytest.mark.parametrize(("held_s", "lag_s"), [(0.02, 0.02), (0.1, 0.1)])
def test_tick_of_held_power_is_found_from_its_changes(held_s, lag_s):
    for seed in range(5):
        sensor = PowerSensor(square(100.0, 500.0, 0.93), held_s, 0.0137 * seed)
        seen = with_power_measurement(
            assumed_sensor(GPU), [sensor.sample(BEGIN_S + 0.0021 * number) for number in range(950)]
        )

        assert seen.lag_s == pytest.approx(lag_s, rel=0.05)
        assert seen.lag_error_s <= 0.6 * held_s


@cases("period_s", [0.2, 0.31, 0.93, 2.0])
def test_changing_load_is_not_mistaken_for_a_tick(period_s):
    sensor = PowerSensor(square(100.0, 500.0, period_s), 0.0, 0.0)
    dense = [sensor.sample(BEGIN_S + 0.0021 * number) for number in range(950)]

    seen = with_power_measurement(assumed_sensor(GPU), dense)

    assert seen.lag_error_s >= 0.07, "the lag of a reading must remain as uncertain as before"


# --- the sampler ---


def test_power_is_read_between_the_samples():
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    reader = FakeReader()
    reader.device = GPU
    sampler = Sampler(lambda: reader, 3600.0, lambda _event: None, wake)
    sampler.start()
    try:
        until(lambda: reader.reads >= 5)
    finally:
        assert sampler.stop(5.0)
        os.close(wake)


@pytest.mark.parametrize("traits", [{"energy_method": COUNTER}, {"is_gpu": False}, {"only_power": True}])
def test_power_is_read_often_only_if_it_is_integrated(traits):
    sampler = Sampler(lambda: FakeReader(), 1.0, lambda _event: None, -1)

    assert sampler._next_power_ns(replace(GPU, **traits)) == NEVER_NS
    assert sampler._next_power_ns(GPU) < NEVER_NS


def test_power_is_read_less_often_if_calls_are_slow(monkeypatch):
    sampler = Sampler(lambda: FakeReader(), 1.0, lambda _event: None, -1)
    monkeypatch.setattr("effllm.agent.sampler.time.monotonic_ns", lambda: 0)
    sampler.driver.energy_s = 0.0024

    assert sampler._next_power_ns(GPU) >= 0.9 * 0.0025 / 0.003 * NS
