"""A fake device whose readings can fail, block or take long, and functions that wait for its sampler."""

import os
import select
import threading
import time

from effllm.records.rank import Device, Sample

LONG_INTERVAL_S = 3600.0


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class FakeReader:
    """A fake device; ``failures`` has one dictionary per reading."""

    def __init__(self, failures=(), hold=None, call_s=0.0):
        self.device = Device("GPU-0", "fake")
        self._failures = iter(failures)
        self._hold = hold  # every reading after the first waits for this event
        self.holding = threading.Event()
        self._call_s = call_s  # duration of every reading after the first
        self.reads = 0
        self.closed = False

    def read(self):
        self.reads += 1
        if self._hold and self.reads > 1:
            self.holding.set()
            self._hold.wait()
        if self._call_s and self.reads > 1:
            time.sleep(self._call_s)
        return Sample(time.monotonic_ns()), next(self._failures, {})

    def close(self):
        self.closed = True


def woken(wake, within_s=30.0):
    assert select.select([wake], [], [], within_s)[0], "no sample was taken"
    os.eventfd_read(wake)
