"""Samples of a loop that hangs for a day are folded into sums: memory is constant, and no value changes."""

import math
import random

import pytest
from builders import gpu, looping
from pytest import approx

from effllm.agent.series import Series
from effllm.agent.window import WindowCutter
from effllm.energy.readings import runs_between
from effllm.energy.sensor_timing import MIN_MARGIN_NS
from effllm.records.rank import Integrals, Sample, Sensor

NS = 10**9
DAY_S = 86_400
FOLD_EVERY_S = 30


class Device:
    """A GPU whose power changes every 30 s; its energy counter has ten ticks per second."""

    def __init__(self, seed: int = 0) -> None:
        luck = random.Random(seed)
        self._levels_w = [luck.choice((80.0, 210.0, 400.0, 690.0)) for _ in range(2 * DAY_S // 30)]
        self._total_j = [0.0]
        for watts in self._levels_w:
            self._total_j.append(self._total_j[-1] + 30 * watts)

    def joules(self, at_s: float) -> float:
        index = int(at_s // 30)
        return self._total_j[index] + (at_s - 30 * index) * self._levels_w[index]

    def sample(self, at_s: float, counter: bool = True) -> Sample:
        watts = self._levels_w[int(at_s // 30)]
        tick_s = math.floor(at_s * 10 + 1e-6) / 10
        return Sample(
            time_ns=round(at_s * NS),
            memory_bytes=1e9 + 1e6 * (at_s % 977),
            utilization=watts / 700,
            power_w=watts,
            energy_j=self.joules(tick_s) if counter else None,
            gauges={"temperature_c": 40 + watts / 20, "sm_clock_hz": 1e9 + 1e6 * watts},
            throttled_by=("power",) if watts > 600 else (),
        )


def series(**changes) -> Series:
    sensor = Sensor(tick_s=0.1, tick_error_s=1e-4, is_held=True)
    return Series(gpu(sensor=sensor, power_limit_w=700.0, sm_clock_reference_hz=2e9, **changes), max_gap_s=5.0)


def fed(one: Series, device: Device, until_s: float, folding: bool, edges_ns=(), counter=lambda at_s: True) -> int:
    """Add a sample every four seconds from 10 s on; return the largest number of kept samples."""
    most, at_s = 0, 10.0
    while at_s <= until_s:
        one.add_sample(device.sample(at_s, counter(at_s)))
        if folding and int(at_s) // FOLD_EVERY_S != int(at_s - 4) // FOLD_EVERY_S:
            one.compact(edges_ns, round(at_s * NS))
        most = max(most, len(one.samples))
        at_s += 4.0
    return most


def alike(first: Integrals, second: Integrals, rel: float = 1e-8) -> None:
    for one, other in ((first, second), (first.energy, second.energy)):
        for name in set(one.__struct_fields__) - {"energy"}:
            assert getattr(one, name) == (approx(getattr(other, name), rel=rel, abs=1e-6)), name


@pytest.mark.long
def test_day_of_samples_needs_no_more_memory_than_a_minute():
    device, edges_ns = Device(), [12 * NS + 300_000_000, 15 * NS + 700_000_000]
    plain, folding = series(), series()
    fed(plain, device, DAY_S, folding=False)
    most = fed(folding, device, DAY_S, folding=True, edges_ns=edges_ns)
    end_ns = DAY_S * NS - 400_000_000  # an unannounced edge

    assert len(plain.samples) == len(range(10, DAY_S + 1, 4))
    assert most < 120
    assert len(folding.energy.readings) < 240
    whole, kept = (one.take_window(edges_ns[0], end_ns, {}) for one in (folding, plain))
    alike(whole.wall, kept.wall)
    assert whole.wall.energy.joules == approx(
        device.joules(end_ns / NS) - device.joules(12.3), rel=1e-4
    )  # the edges are between readings
    assert whole.power_histogram_s == approx(kept.power_histogram_s)
    assert whole.throttled_s == approx(kept.throttled_s)
    assert whole.throttle_covered_s == approx(kept.throttle_covered_s)
    assert (whole.power_peak_w, whole.memory_peak_bytes) == (kept.power_peak_w, kept.memory_peak_bytes)
    assert (whole.energy_method, kept.energy_method) == ("counter", "counter")
    for name, gauge in kept.gauges.items():
        assert tuple(getattr(whole.gauges[name], field) for field in gauge.__struct_fields__) == approx(
            tuple(getattr(gauge, field) for field in gauge.__struct_fields__)
        )


@pytest.mark.parametrize(
    ("edges_s", "end_s", "left_out", "fails", "method"),
    [
        ((12.3, 100.05, 333.33, 334.0, 1000.71), 1999, (), (), "counter"),
        ((12,), 5999, (), (500, 4500), "counter"),
        ((12,), 5999, (), (500, 4500), "instant power"),
        ((12,), 2999, (1000, 1600), (), "instant power"),
    ],
    ids=["several edges", "a counter that fails", "power", "a gap"],
)
def test_folding_does_not_change_values_at_announced_edges(edges_s, end_s, left_out, fails, method):
    device, edges_ns = Device(2), [round(at_s * NS) for at_s in edges_s]
    plain, folding = series(energy_method=method), series(energy_method=method)
    for at_s in range(10, end_s + 2):
        if at_s not in range(*left_out or (0, 0)):
            for one in (plain, folding):
                one.add_sample(device.sample(float(at_s), at_s not in range(*fails or (0, 0))))
        if at_s % FOLD_EVERY_S == 0:
            folding.compact(edges_ns, at_s * NS)
    assert len(folding.samples) < 600

    for start_ns, end_ns in ((a, b) for a in edges_ns for b in [*edges_ns, end_s * NS] if a < b):
        found = folding.integrals(start_ns, end_ns)
        alike(found, plain.integrals(start_ns, end_ns), rel=1e-7)
    if left_out:
        assert found.memory_covered_s == approx(2999 - 12 - 601)


def test_integrals_split_a_folded_block_in_proportion_to_time():
    one = series(energy_method=None)
    for at_s in range(10, 1011):
        one.add_sample(Sample(at_s * NS, memory_bytes=1000.0))
    one.compact([10 * NS], 1010 * NS)
    assert len(one.samples) < 50

    assert one.integrals(10 * NS, 510 * NS).memory_byte_seconds == approx(500 * 1000.0)
    assert one.integrals(510 * NS, 1010 * NS).memory_byte_seconds == approx(500 * 1000.0)


def test_folded_block_shorter_than_a_gap_is_counted_once():
    one = series(energy_method=None)
    for at_s in range(10, 61):
        one.add_sample(Sample(at_s * NS, memory_bytes=1000.0))
    one.compact([10 * NS, 34 * NS, 60 * NS], 60 * NS)  # only samples at 21-23 and 45-49 s are over 10 s from an edge

    assert len(one.samples) == 51 - 1 - 3
    assert one.integrals(10 * NS, 60 * NS).memory_byte_seconds == approx(50 * 1000.0)


def test_folding_does_not_change_the_window_of_a_long_hang():
    device = Device(4)
    rows = []
    for folding in (False, True):
        one = series()
        with looping() as loop:
            cutter = WindowCutter("agent", 0, log_interval=10, offset=0, origin_ns=11 * NS, unix_minus_monotonic_s=0.0)
            ended = set()
            at_s = 10.0
            while at_s <= 6_000:
                ordinal = int((at_s - 20) // 2) + 1  # iterations take 2 s, from 20 s on; the seventh hangs at 33 s
                if 1 <= ordinal <= 6 and ordinal not in ended and at_s >= 20 + 2 * ordinal:
                    ended.add(ordinal)
                if at_s in (20, 22, 24, 26, 28, 30, 32):
                    if at_s > 20:
                        loop.end(round(at_s * NS) - 100, 100, 2)
                    loop.start(round(at_s * NS))
                for slot in loop.slots():
                    cutter.add_record(slot)
                one.add_sample(device.sample(at_s))
                if folding and at_s % 30 == 0:
                    one.compact([*cutter.possible_bounds_ns, 32 * NS], round(at_s * NS))
                at_s += 1.0
            for ordinal in range(4):
                loop.end(5_990 * NS + ordinal * 2 * NS, 100, 2)
                loop.start(5_990 * NS + ordinal * 2 * NS + 10)
            for slot in loop.slots():
                cutter.add_record(slot)
            rows.append(cutter.take_report([one]))
            assert len(one.samples) < (200 if folding else 6_000)
    plain, folded = rows

    assert (folded.wall_s, folded.busy_s, folded.iteration_last) == (plain.wall_s, plain.busy_s, 10)
    alike(folded.devices[0].wall, plain.devices[0].wall)
    alike(folded.devices[0].phases["startup"], plain.devices[0].phases["startup"])


def test_newest_samples_and_samples_near_edges_are_not_folded():
    times = list(range(0, 1000, 10))
    runs = list(runs_between(times, [500], 990, 100))

    assert [(times[run.start], times[run.stop - 1]) for run in runs] == [(610, 880), (10, 390)]
    assert list(runs_between(times, range(0, 1000, 50), 990, 100)) == []
    assert list(runs_between([], [5], 10, 1)) == []


def test_more_readings_near_an_edge_are_kept_for_slow_sensors():
    fast = Series(gpu(sensor=Sensor(tick_s=0.1)), 5.0)
    slow = Series(gpu(sensor=Sensor(tick_s=30.0, lag_s=5.0)), 5.0)

    assert fast.energy.timing.margin_ns == MIN_MARGIN_NS
    assert slow.energy.timing.margin_ns == 186 * NS
