"""effllm/agent/track.py: the readings of a sampler are collected in a series; each edge is requested once."""

import threading
import time

import pytest
from builders import NS
from fake_reader import LONG_INTERVAL_S, FakeReader, woken
from jobs import until

from effllm.agent import sampler as sampler_module
from effllm.agent.sampler import Sampler
from effllm.agent.track import DeviceTrack
from effllm.records.rank import COUNTER, INSTANT, Device, Event, Sample, Sensor


class Gpu(FakeReader):
    """A GPU with a power of 100 W; its energy counter changes every ``tick_s``, or continuously if this is 0."""

    def __init__(self, method=COUNTER, tick_s=0.0, **traits):
        super().__init__(**traits)
        self._tick_s = tick_s
        self.device = Device("GPU-0", "fake", energy_method=method, power_limit_w=700.0)

    def read(self):
        sample, failures = super().read()
        shown_s = sample.time_ns / NS
        if self._tick_s:
            shown_s = shown_s // self._tick_s * self._tick_s
        return Sample(sample.time_ns, power_w=100.0, energy_j=100.0 * shown_s), failures


@pytest.fixture
def tracked(wake):
    """Return a function that starts a track for a reader and waits for the first sample."""
    started = []

    def tracked(reader, interval_s=1.0, **facts):
        sampler = Sampler(lambda: reader, LONG_INTERVAL_S, lambda _event: None, wake, **facts)
        started.append(sampler)
        sampler.start()
        sampler.request_calibration()
        woken(wake)
        return DeviceTrack(sampler, interval_s)

    yield tracked
    for sampler in started:
        assert sampler.stop(5.0)


def test_first_sample_begins_the_series_and_is_reported_once(tracked):
    track = tracked(Gpu())
    assert track.series is None
    assert track.is_settled(time.monotonic_ns()), "an edge does not wait for a first sample"

    assert track.take_samples()
    assert track.series.device.key == "GPU-0"
    assert track.series.newest_ns > 0
    assert not track.take_samples()


def test_each_window_edge_is_requested_once(tracked, wake):
    reader = Gpu()
    track = tracked(reader)
    track.take_samples()
    edge_ns = time.monotonic_ns()
    assert not track.is_settled(edge_ns)
    for _ in range(5):
        track.request_samples(edge_ns)
    woken(wake)
    track.take_samples()

    assert track.is_settled(edge_ns)
    track.request_samples(edge_ns)
    time.sleep(0.05)
    assert reader.reads == 2
    track.request_samples(edge_ns + 1)
    woken(wake)
    assert reader.reads == 3


def test_counter_with_ticks_is_read_several_times_at_an_edge(tracked, wake):
    # The phase of the ticks is unknown, so the counter is read eight times per tick of 40 ms, for a little more than
    # two ticks.
    def learn(device, read, wait):
        return Sensor(tick_s=0.04)

    reader = Gpu(tick_s=0.04)
    track = tracked(reader, calibrate=learn)
    until(lambda: reader.device.sensor.tick_s)
    assert track.take_samples(), "the calibration is reported"
    assert track.series.device.sensor.tick_s == 0.04
    edge_ns = time.monotonic_ns()
    track.request_samples(edge_ns)
    woken(wake)
    track.take_samples()

    assert track.is_settled(edge_ns)
    assert track.series.newest_ns >= edge_ns + 2 * 40_000_000
    assert 2 < reader.reads <= 19  # if a busy machine misses several reads, only the last is made


def test_frequent_edges_cause_fewer_reads_per_edge(tracked, wake):
    def learn(device, read, wait):
        return Sensor(tick_s=0.04)

    reader = Gpu()
    track = tracked(reader, calibrate=learn)
    until(lambda: reader.device.sensor.tick_s)
    track.take_samples()
    edge_ns = time.monotonic_ns()
    track.request_samples(edge_ns)
    woken(wake)
    before = reader.reads
    track.request_samples(edge_ns + 10_000_000)  # for this edge, which is only 10 ms later, one read is enough
    woken(wake)

    assert reader.reads - before == 1


def test_energy_of_an_edge_is_final_after_one_read_of_power(tracked, wake):
    track = tracked(Gpu(INSTANT))
    track.take_samples()
    edge_ns = time.monotonic_ns()
    track.request_samples(edge_ns)
    woken(wake)
    track.take_samples()

    assert track.is_settled(edge_ns)


def test_rarely_read_sensor_is_not_read_at_edges(tracked):
    reader = Gpu()
    track = tracked(reader, interval_s=30.0)
    track.take_samples()

    track.request_samples(time.monotonic_ns())

    time.sleep(0.05)
    assert reader.reads == 1


def test_existing_series_uses_a_later_calibration(tracked):
    learnt = threading.Event()

    def learn(device, read, wait):
        learnt.wait(5.0)
        return Sensor(tick_s=0.04)

    reader = Gpu()
    track = tracked(reader, calibrate=learn)
    track.take_samples()
    edge_ns = track.series.newest_ns
    assert len(track.series.energy.timing.reads_for(edge_ns)) == 1
    learnt.set()
    until(lambda: reader.device.sensor.tick_s)

    assert track.take_samples(), "the calibration is reported"
    assert track.series.device.sensor.tick_s == 0.04
    assert len(track.series.energy.timing.reads_for(edge_ns)) == 18


def test_energy_of_edges_is_not_final_during_calibration(tracked):
    learnt = threading.Event()

    def learn(device, read, wait):
        learnt.wait(5.0)
        return Sensor()

    track = tracked(Gpu(), calibrate=learn)
    until(lambda: track.sampler.is_calibrating)
    track.take_samples()
    past_ns = track.series.newest_ns - 1

    assert not track.is_settled(past_ns)
    learnt.set()
    until(lambda: not track.sampler.is_calibrating)
    assert track.is_settled(past_ns)


def test_hanging_device_is_reported_once_and_its_energy_is_complete(tracked, wake, monkeypatch):
    monkeypatch.setattr(sampler_module, "STALE_AFTER_S", 0.05)
    answer = threading.Event()
    reader = Gpu(hold=answer)
    track = tracked(reader)
    track.take_samples()
    start_ns, edge_ns = track.series.newest_ns, time.monotonic_ns()
    track.request_samples(edge_ns)
    assert reader.holding.wait(5.0)
    assert not track.is_settled(edge_ns)
    until(lambda: track.sampler.stale_s() is not None)

    assert track.is_settled(edge_ns), "a window does not wait for this device"
    assert events_of(track) == [("stale", "GPU-0 is stale: a read has not returned for 0 s")]
    assert events_of(track) == []
    answer.set()
    until(lambda: track.sampler.stale_s() is None)
    assert events_of(track) == [("stale", "GPU-0 answers again")]
    woken(wake)
    track.take_samples()
    end_ns = track.series.newest_ns
    assert end_ns > edge_ns
    assert track.series.integrals(start_ns, end_ns).energy.joules == pytest.approx(100.0 * (end_ns - start_ns) / NS)


def events_of(track):
    return [(event.kind, event.text) for event in track.take_events(time.monotonic_ns(), time.time())]


def test_events_have_the_name_of_the_device_their_time_and_count(tracked, wake):
    class Reset(Gpu):
        def read(self):
            sample, failures = super().read()
            energy_j = 1e6 if self.reads == 1 else 5.0
            events = (Event(910.0, "xid", "a critical error: Xid 79", count=3),) if self.reads == 2 else ()
            return Sample(sample.time_ns, power_w=100.0, energy_j=energy_j, events=events), failures

    track = tracked(Reset())
    track.sampler.request_samples()
    woken(wake)
    track.take_samples()
    xid, reset = track.take_events(time.monotonic_ns(), 1000.0)

    assert (xid.kind, xid.text) == ("xid", "GPU-0: a critical error: Xid 79")
    assert (xid.time_s, xid.device, xid.count) == (910.0, "GPU-0", 3)
    assert reset.kind == "energy_counter"
    assert reset.text.startswith("GPU-0: the energy counter is not used: a decrease of 999995 J;")
    assert events_of(track) == []


def test_time_between_samples_above_five_intervals_is_a_gap(tracked):
    track = tracked(Gpu(INSTANT), interval_s=0.01)
    track.take_samples()
    first_ns = track.series.newest_ns
    for at_s in (0.9, 1.8, 2.9):  # a gap is longer than five times the minimum interval of 0.2 s
        track.series.add_sample(Sample(first_ns + round(at_s * NS), power_w=100.0))

    found = track.series.integrals(first_ns, first_ns + round(2.9 * NS))
    assert found.energy.covered_s == pytest.approx(1.8)


def test_baseline_power_is_the_mean_of_the_baseline_time(tracked):
    track = tracked(Gpu())
    assert not track.measure_baseline(0, NS), "there is no series"
    track.take_samples()
    first_ns = track.series.newest_ns
    assert not track.measure_baseline(first_ns, first_ns + 2 * NS), "the baseline time has not ended"
    track.series.add_sample(Sample(first_ns + 2 * NS, power_w=60.0, energy_j=100.0 * first_ns / NS + 120.0))

    assert track.measure_baseline(first_ns, first_ns + 2 * NS)
    assert track.series.device.baseline_w == pytest.approx(60.0)


def test_slow_device_causes_no_gaps_between_samples(tracked):
    track = tracked(Gpu(INSTANT), interval_s=1.0)
    track.take_samples()
    begin_ns = track.series.newest_ns
    track.sampler._interval_s, track.sampler.driver.full_s = 1.0, 0.01  # 0.1 % of 10 s

    track.take_samples()
    for second in (10, 20):
        track.series.add_sample(Sample(begin_ns + second * NS, power_w=100.0))

    covered = track.series.integrals(begin_ns, begin_ns + 20 * NS)
    assert (covered.energy.joules, covered.energy.covered_s) == (pytest.approx(2000.0), pytest.approx(20.0))
