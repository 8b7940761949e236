"""effllm/agent/sampler.py: samples are taken in time and on request; a hanging device does not block others."""

import select
import threading
import time

import pytest
from builders import NS
from fake_reader import LONG_INTERVAL_S, FakeReader, woken
from jobs import until

from effllm.agent import sampler as sampler_module
from effllm.agent.sampler import Sampler
from effllm.devices import DeviceUnavailable
from effllm.records.rank import Device, Sample, Sensor


@pytest.fixture
def start(wake):
    """Return a function that starts a sampler of a reader; the samplers are stopped at the end of the test."""
    started = []

    def start(reader, interval_s=LONG_INTERVAL_S, report=lambda _event: None, **facts):
        sampler = Sampler(lambda: reader, interval_s, report, wake, **facts)
        started.append(sampler)
        sampler.start()
        sampler.request_calibration()
        return sampler

    yield start
    for sampler in started:
        assert sampler.stop(30.0)


def texts(events):
    return [event.text for event in events]


def test_the_first_sample_is_taken_at_once(start, wake):
    sampler = start(FakeReader())
    woken(wake)

    assert len(sampler.take_samples()) == 1
    assert sampler.device.key == "GPU-0"
    assert sampler.take_samples() == []


def test_periodic_samples_do_not_wake_the_agent(start, wake):
    reader = FakeReader()
    start(reader, interval_s=0.01)
    woken(wake)
    deadline_s = time.monotonic() + 30.0
    while reader.reads < 5 and time.monotonic() < deadline_s:
        select.select([], [], [], 0.01)

    assert reader.reads >= 5
    assert not select.select([wake], [], [], 0)[0]


def test_samples_are_at_or_just_after_the_requested_times(start, wake):
    sampler = start(FakeReader())
    woken(wake)
    now_ns = time.monotonic_ns()
    requested_ns = [now_ns + ms * 1_000_000 for ms in (-5, 20, 45, 70)]
    sampler.request_samples(requested_ns)
    woken(wake)

    samples = sampler.take_samples()[1:]  # the first sample was taken at the start
    assert len(samples) == 4
    for moment_ns, sample in zip(requested_ns, samples, strict=True):
        assert moment_ns <= sample.time_ns < moment_ns + 2 * NS
    assert samples[0].time_ns < requested_ns[1], "a past moment is read at once"


def test_agent_is_woken_after_the_last_requested_moment(start, wake):
    reader = FakeReader()
    sampler = start(reader)
    woken(wake)
    now_ns = time.monotonic_ns()
    sampler.request_samples([now_ns, now_ns + NS // 2])
    until(lambda: reader.reads == 2)

    assert not select.select([wake], [], [], 0)[0]
    woken(wake)
    assert reader.reads == 3
    assert len(sampler.take_samples()) == 3


def test_two_requests_at_once_are_both_answered(start, wake):
    reader = FakeReader()
    sampler = start(reader)
    woken(wake)
    now_ns = time.monotonic_ns()
    sampler.request_samples([now_ns + NS // 10, now_ns + 2 * NS // 10])
    sampler.request_samples([now_ns, now_ns + 15 * NS // 100])
    woken(wake)
    until(lambda: reader.reads == 5)
    woken(wake)

    times_ns = [sample.time_ns for sample in sampler.take_samples()]
    assert times_ns == sorted(times_ns)


def test_requested_samples_after_the_first_have_only_energy(start, wake):
    class TwoCalls(FakeReader):
        edges = 0

        def read_energy(self):
            self.edges += 1
            return Sample(time.monotonic_ns(), energy_only=True), {}

    reader = TwoCalls()
    sampler = start(reader)
    woken(wake)
    now_ns = time.monotonic_ns()
    sampler.request_samples([now_ns, now_ns + NS // 50, now_ns + 2 * NS // 50])
    woken(wake)

    assert (reader.reads, reader.edges) == (2, 2)
    assert [sample.energy_only for sample in sampler.take_samples()] == [False, False, True, True]


class SlowEnergy(FakeReader):
    """A device whose energy takes 5 ms; the budget at edges, 0.05 % of a core, has 10 ms at the start."""

    edges = 0

    def read_energy(self):
        self.edges += 1
        time.sleep(0.005)
        return Sample(time.monotonic_ns(), energy_only=True), {}


def test_edges_of_a_slow_device_are_read_as_often_as_the_budget_allows(start, wake):
    reader = SlowEnergy(call_s=0.5)  # a full reading
    sampler = start(reader)
    woken(wake)
    sampler.driver.full_s = 0.5
    for _ in range(20):
        sampler.request_samples()
        time.sleep(0.01)
    until(lambda: reader.edges + reader.reads >= 3)
    time.sleep(0.1)
    assert reader.edges <= 3, "the first has no known duration"
    assert 8 < sampler.driver.edge_apart_s < 30

    before = reader.edges + reader.reads
    sampler.request_samples(is_forced=True)
    until(lambda: reader.edges + reader.reads == before + 1)


def test_device_whose_energy_is_slower_than_all_credit_is_still_read(start, wake):
    reader = SlowEnergy(call_s=0.5)
    sampler = start(reader)
    woken(wake)
    sampler.driver.full_s, sampler.driver.energy_s, sampler.driver._num_energy = 0.5, 0.02, 5
    sampler.driver._earned_until_s -= 100.0  # 0.05 % of 100 s are more than 20 ms
    sampler.request_samples()

    until(lambda: reader.edges == 1)


def test_one_slow_reading_does_not_slow_the_next_minutes(start, wake):
    sampler = start(FakeReader(), interval_s=1.0)
    woken(wake)
    assert (sampler.driver.full_s, sampler.slow_interval_s) == (0.0, None), (
        "the first reading of a driver may take long"
    )

    sampler.driver._num_full, seconds = 100, 0.0
    sampler.driver.full_s += 0.1 * 0.05  # one reading of 0.1 s or more
    while sampler.slow_interval_s is not None:
        seconds += sampler.slow_interval_s
        sampler.driver.full_s *= 0.8
    assert seconds < 30


def test_edge_is_read_in_full_only_if_full_readings_have_time(start, wake):
    class SlowRead(SlowEnergy):
        def read(self):
            time.sleep(0.02)
            return super().read()

        def read_energy(self):
            return Sample(time.monotonic_ns(), energy_only=True), {}

    reader = SlowRead()
    sampler = start(reader, interval_s=60.0)
    woken(wake)
    for _ in range(2):
        sampler.request_samples()
        woken(wake)

    # The duration of the first reading is not counted.
    assert [sample.energy_only for sample in sampler.take_samples()] == [False, False, True]
    sampler._interval_s = 1.0
    assert sampler.slow_interval_s >= 14.0, "20 ms are 0.1 % of 20 s; on a busy machine a reading takes longer"


@pytest.mark.parametrize(("since_s", "expected"), [(0.0, [0]), (0.04, [0]), (0.1, [0, 15, 16, 17]), (1.0, range(18))])
def test_too_frequent_requests_are_skipped(start, wake, monkeypatch, since_s, expected):
    # The limit is 0.5 % of a core, which is 4 wake-ups of 110 us within 0.1 s, including the first and the last
    # wake-up.
    monkeypatch.setattr(sampler_module, "WAKE_S", 110e-6)
    sampler = start(FakeReader())
    woken(wake)
    sampler.driver.energy_s = 0.0
    requested_ns = [time.monotonic_ns() + 50_000_000 + i * 1_000_000 for i in range(18)]
    sampler.request_samples(requested_ns, since_s=since_s)
    woken(wake)

    found = [sample.time_ns for sample in sampler.take_samples()[1:]]
    assert len(found) <= len(expected)  # one reading is enough for all requested times that have passed
    assert found[0] >= requested_ns[0]
    assert found[-1] >= requested_ns[expected[-1]]
    if len(expected) < 18:
        assert not [
            at_ns for at_ns in found if requested_ns[0] + 10_000_000 < at_ns < requested_ns[expected[-1]] - 3_000_000
        ]


def test_call_that_may_delay_kernel_launches_is_made_less_often(start, wake):
    slow, quick = FakeReader(call_s=0.025), FakeReader()
    start(slow, interval_s=0.01)
    start(quick, interval_s=0.01)
    until(lambda: quick.reads >= 80)

    assert slow.reads <= 15  # a slow call (25 ms) is made every 2.5 s, not continuously


def test_slow_node_sensor_is_read_at_its_interval(start, wake):
    reader = FakeReader(call_s=0.025)
    start(reader, interval_s=0.01, is_node_sensor=True)

    until(lambda: reader.reads >= 10)


def test_samples_are_at_random_times_within_their_intervals(start, wake):
    # Samples at full seconds would always be at the same point of 1 s iterations.
    reader = FakeReader()
    sampler = start(reader, interval_s=0.02)
    until(lambda: reader.reads >= 60)
    taken = sampler.take_samples()[2:]
    phases = sorted(sample.time_ns % (NS // 50) / (NS // 50) for sample in taken)

    assert phases[0] < 0.25
    assert phases[-1] > 0.75
    assert sum(0.25 < phase < 0.75 for phase in phases) > 10
    # There is one sample in each interval; a busy machine may skip intervals.
    assert (taken[-1].time_ns - taken[0].time_ns) / len(taken) > 0.015 * NS


def test_device_is_stale_while_a_read_hangs(start, wake, monkeypatch):
    monkeypatch.setattr(sampler_module, "STALE_AFTER_S", 0.05)
    answer = threading.Event()
    reader = FakeReader(hold=answer)
    sampler = start(reader)
    woken(wake)
    assert sampler.stale_s() is None
    sampler.request_samples()
    assert reader.holding.wait(30.0)
    until(lambda: sampler.stale_s() is not None)

    assert sampler.stale_s() >= 0.05
    assert len(sampler.take_samples()) == 1
    sampler.request_samples()  # returns at once
    answer.set()
    until(lambda: sampler.stale_s() is None)
    until(lambda: reader.reads >= 3)
    time.sleep(0.1)
    assert sampler.stale_s() is None, "nothing is being read"


def test_failure_and_recovery_of_a_quantity_are_each_reported_once(start, wake):
    events = []
    broken = {"power_w": "GPU is lost"}
    sampler = start(
        FakeReader([{}, broken, broken, {**broken, "utilization": "no permission"}, {}]), report=events.append
    )
    woken(wake)
    for _ in range(4):
        sampler.request_samples()
        woken(wake)

    assert texts(events) == [
        "GPU-0: power_w is not measured: GPU is lost",
        "GPU-0: utilization is not measured: no permission",
        "GPU-0: power_w is measured again",
        "GPU-0: utilization is measured again",
    ]


@pytest.mark.parametrize(
    ("error", "is_node_sensor", "reason", "reported"),
    [
        (DeviceUnavailable("no driver"), False, "no driver", ["no device is sampled: no driver"]),
        (DeviceUnavailable("no RAPL here"), True, "no RAPL here", []),
        (
            *(ValueError("bad"), False, "the device file has an error: ValueError: bad"),
            ["no device is sampled: the device file has an error: ValueError: bad"],
        ),
    ],
    ids=["device", "node sensor", "error in a device file"],
)
def test_device_that_cannot_be_opened_is_reported(wake, error, is_node_sensor, reason, reported):
    def refuse():
        raise error

    events = []
    sampler = Sampler(refuse, LONG_INTERVAL_S, events.append, wake, is_node_sensor=is_node_sensor)
    sampler.start()
    woken(wake)

    assert (sampler.device, sampler.unavailable, texts(events)) == (None, reason, reported)
    assert (sampler.take_samples(), sampler.is_opening, sampler.stale_s()) == ([], False, None)
    assert sampler.stop(30.0)


# --- calibration ---


def test_calibration_result_is_returned_after_its_samples(start, wake):
    def learn(device, read, wait):
        for _ in range(3):
            assert isinstance(read(), Sample)
        return Sensor(tick_s=0.1)

    sampler = start(FakeReader(), calibrate=learn)
    woken(wake)
    until(lambda: sampler.device.sensor.tick_s == 0.1)
    until(lambda: not sampler.is_calibrating)
    sampler.request_samples()
    woken(wake)

    kinds = [type(item).__name__ for item in sampler.take_samples()]
    assert kinds == ["Sample"] * 4 + ["Device", "Sample"]


def test_requests_are_answered_during_calibration(start, wake):
    answered = threading.Event()

    def learn(device, read, wait):
        while not answered.wait(0.002):
            read()
        return Sensor()

    sampler = start(FakeReader(), calibrate=learn)
    woken(wake)
    until(lambda: sampler.is_calibrating)
    sampler.request_samples()

    woken(wake)
    assert sampler.is_calibrating
    answered.set()


def test_failed_calibration_loses_no_sample(start, wake):
    def learn(device, read, wait):
        raise RuntimeError("Could not determine home directory.")

    events = []
    sampler = start(FakeReader(), report=events.append, calibrate=learn)
    woken(wake)
    until(lambda: events)
    sampler.request_samples()
    woken(wake)

    assert texts(events) == [
        "GPU-0: the sensor could not be calibrated: RuntimeError: Could not determine home directory."
    ]
    assert len(sampler.take_samples()) == 2
    assert not sampler.is_calibrating


# --- the end ---


def test_hanging_device_does_not_delay_the_end(wake):
    answer = threading.Event()
    reader = FakeReader(hold=answer)
    sampler = Sampler(lambda: reader, LONG_INTERVAL_S, lambda _event: None, wake)
    sampler.start()
    woken(wake)
    sampler.request_samples()
    assert reader.holding.wait(30.0)

    began_s = time.monotonic()
    assert not sampler.stop(0.05)
    assert time.monotonic() - began_s < 10.0
    assert len(sampler.take_samples()) == 1, "earlier readings are kept"
    answer.set()
    assert sampler.stop(30.0)
    assert reader.closed


def test_driver_that_hangs_on_opening_does_not_block_the_agent(wake):
    answer, reader = threading.Event(), FakeReader()

    def open_slowly():
        answer.wait()
        return reader

    sampler = Sampler(open_slowly, LONG_INTERVAL_S, lambda _event: None, wake)
    sampler.start()
    sampler.request_samples()

    assert sampler.device is None
    assert not sampler.stop(0.05)
    answer.set()
    assert sampler.stop(30.0)


def test_constructor_starts_nothing(wake):
    before = threading.active_count()
    reader = FakeReader()

    Sampler(lambda: reader, LONG_INTERVAL_S, lambda _event: None, wake)

    assert (threading.active_count(), reader.reads) == (before, 0)


def test_sampler_stops_at_once_and_closes_its_device(wake):
    reader = FakeReader()
    sampler = Sampler(lambda: reader, LONG_INTERVAL_S, lambda _event: None, wake)
    sampler.start()
    woken(wake)

    assert sampler.stop(30.0)
    assert reader.closed


def test_device_without_a_driver_is_not_slowed_by_a_long_reading(start, wake):
    reader = FakeReader(call_s=0.01)
    reader.device = Device("host:vm", "host", is_gpu=False)
    sampler = start(reader, interval_s=0.02)
    until(lambda: reader.reads >= 10)

    assert (sampler.slow_interval_s, sampler.driver.edge_apart_s) == (None, 0.0)
