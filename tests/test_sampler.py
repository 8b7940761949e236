"""effllm/sampler.py: samples come in time and on demand, and a device that hangs holds up nobody."""

import os
import select
import threading
import time

import pytest

from effllm.devices import DeviceUnavailable
from effllm.sampler import Sampler
from effllm.schema import Device, Sample

SELDOM_S = 3600.0


class FakeReader:
    """A device whose failures are listed beforehand, one dictionary per reading."""

    def __init__(self, failures=(), hold=None):
        self.device = Device("GPU-0", "fake")
        self._failures = iter(failures)
        self._hold = hold  # an event that every reading after the first waits for
        self.holding = threading.Event()
        self.reads = 0
        self.closed = False

    def read(self):
        self.reads += 1
        if self._hold and self.reads > 1:
            self.holding.set()
            self._hold.wait()
        return Sample(time.monotonic_ns()), next(self._failures, {})

    def close(self):
        self.closed = True


@pytest.fixture
def wake():
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(wake):
    """Return what starts a sampler of a reader; it is stopped in the end, whatever happened."""
    started = []

    def start(reader, interval_s=SELDOM_S, log=lambda _line: None):
        sampler = Sampler(lambda: reader, interval_s, log, wake)
        started.append(sampler)
        sampler.start()
        return sampler

    yield start
    for sampler in started:
        assert sampler.stop(5.0)


def woken(wake, within_s=5.0):
    assert select.select([wake], [], [], within_s)[0], "no sample came"
    os.eventfd_read(wake)


def test_the_first_sample_is_taken_at_once(start, wake):
    sampler = start(FakeReader())
    woken(wake)

    assert len(sampler.take()) == 1
    assert sampler.device.key == "GPU-0"
    assert sampler.take() == []


def test_a_sample_that_is_asked_for_comes_long_before_its_time(start, wake):
    sampler = start(FakeReader())
    woken(wake)
    sampler.ask()
    woken(wake)

    first, second = sampler.take()
    assert first.time_ns < second.time_ns < time.monotonic_ns()


def test_samples_come_by_themselves_and_wake_nobody(start, wake):
    reader = FakeReader()
    start(reader, interval_s=0.01)
    woken(wake)
    deadline_s = time.monotonic() + 5.0
    while reader.reads < 5 and time.monotonic() < deadline_s:
        select.select([], [], [], 0.01)

    assert reader.reads >= 5
    assert not select.select([wake], [], [], 0)[0]


def test_a_quantity_that_fails_is_told_once_and_once_when_it_is_back(start, wake):
    lines = []
    broken = {"power_w": "GPU is lost"}
    sampler = start(FakeReader([{}, broken, broken, {**broken, "utilization": "no permission"}, {}]), log=lines.append)
    woken(wake)
    for _ in range(4):
        sampler.ask()
        woken(wake)

    assert lines == [
        "GPU-0: power_w is not measured: GPU is lost",
        "GPU-0: utilization is not measured: no permission",
        "GPU-0: power_w is measured again",
        "GPU-0: utilization is measured again",
    ]


def test_a_device_that_cannot_be_opened_is_told_and_no_sample_comes(wake):
    def refuse():
        raise DeviceUnavailable("there is no driver")

    lines = []
    sampler = Sampler(refuse, SELDOM_S, lines.append, wake)
    sampler.start()
    woken(wake)

    assert (sampler.device, sampler.unavailable) == (None, "there is no driver")
    assert lines == ["no device is sampled: there is no driver"]
    assert sampler.take() == []
    assert sampler.stop(5.0)


def test_a_device_that_hangs_does_not_hold_up_the_end(wake):
    answer = threading.Event()
    reader = FakeReader(hold=answer)
    sampler = Sampler(lambda: reader, SELDOM_S, lambda _line: None, wake)
    sampler.start()
    woken(wake)
    sampler.ask()
    assert reader.holding.wait(5.0)

    began_s = time.monotonic()
    assert not sampler.stop(0.05)
    assert time.monotonic() - began_s < 2.0
    assert len(sampler.take()) == 1, "what was read before is there"
    answer.set()
    assert sampler.stop(5.0)
    assert reader.closed


def test_a_driver_that_hangs_while_it_is_opened_holds_up_nobody(wake):
    answer, reader = threading.Event(), FakeReader()

    def open_slowly():
        answer.wait()
        return reader

    sampler = Sampler(open_slowly, SELDOM_S, lambda _line: None, wake)
    sampler.start()
    sampler.ask()

    assert sampler.device is None
    assert not sampler.stop(0.05)
    answer.set()
    assert sampler.stop(5.0)


def test_constructing_is_not_starting(wake):
    before = threading.active_count()
    reader = FakeReader()

    Sampler(lambda: reader, SELDOM_S, lambda _line: None, wake)

    assert (threading.active_count(), reader.reads) == (before, 0)


def test_a_stopped_sampler_closes_its_device_and_stops_at_once(wake):
    reader = FakeReader()
    sampler = Sampler(lambda: reader, SELDOM_S, lambda _line: None, wake)
    sampler.start()
    woken(wake)

    assert sampler.stop(5.0)
    assert reader.closed
