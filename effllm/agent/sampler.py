"""The thread that reads a device, so that a hanging call does not block the agent."""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from effllm.devices import DeviceUnavailable, Reader
from effllm.energy.readings import NS
from effllm.records.rank import INSTANT, Device, Event, Sample, Sensor

#: Period of the power readings of GPUs without an energy counter.
POWER_EVERY_S = 0.09
NEVER_NS = 2**63 - 1
ALREADY_OPEN = "the device is already open"  # a reason without an event
#: Duration of an unfinished read after which the device is stale.
STALE_AFTER_S = 5.0
#: Maximum number of requests during a hanging read; the oldest requests are dropped without a sample.
MAX_REQUESTS = 64
#: The time in calls of the driver, as shares of a core: of full readings, of readings at window edges, and of power
#: readings of GPUs without an energy counter.
FULL_SHARE, EDGE_SHARE, POWER_SHARE = 0.001, 0.0005, 0.0005
#: Maximum CPU time of the additional reads at window edges, including the thread's wake-ups, as a share of a core.
MAX_EDGE_SHARE = 0.005
WAKE_S = 160e-6  # CPU time of a wake-up (110 us, measured at 10 Hz) and of Python in a reading
#: Time of a reading that is not counted: of a GPU, what may be Python's and not the driver's; of another device, which
#: holds no lock that the training needs, more.
UNCOUNTED_GPU_S, UNCOUNTED_OTHER_S = 100e-6, 0.020
#: Unused time for readings at edges that is kept, in seconds: several edges may follow each other.
KEPT_CREDIT_S = 20.0
MAX_INTERVAL_S = 30.0
#: Weights of a new reading in the average duration, after first readings of equal weight: one for slower and one for
#: faster readings than the average, because slow devices are read rarely.  Longer calls count as calls of the third.
SLOWER_WEIGHT, FASTER_WEIGHT, MAX_COUNTED_S = 0.05, 0.2, 0.1
#: Arguments: the opened device, a function that samples it, and one that waits until a monotonic time in seconds.
Calibrate = Callable[[Device, Callable[[], Sample], Callable[[float], None]], Sensor]


class _RequestedTime(NamedTuple):
    time_ns: int
    is_first: bool  # whether it begins its request
    is_last: bool  # whether it ends its request


class DriverTime:
    """Average durations of the readings of one device, and the number of readings that the budget allows.

    Calls may hold a lock that the training needs, so slow devices are read less often: values between two readings are
    interpolated, and the error of an energy grows.
    """

    def __init__(self) -> None:
        self.full_s = self.energy_s = 0.0  # average durations of full readings, and of energy alone
        self._num_full = self._num_energy = 0
        self._credit_s, self._earned_until_s = KEPT_CREDIT_S * EDGE_SHARE, time.monotonic()  # for readings at edges

    def add_reading(self, took_s: float, *, is_gpu: bool, energy_only: bool) -> None:
        # The average counts, not the maximum: other processes on the core delay about one reading in a hundred.
        driver_s = max(took_s - (UNCOUNTED_GPU_S if is_gpu else UNCOUNTED_OTHER_S), 0.0)
        driver_s = min(driver_s, MAX_COUNTED_S)  # after one hanging call, sampling must not be slow for an hour
        if energy_only:
            self._num_energy += 1
            self.energy_s += (driver_s - self.energy_s) * max(SLOWER_WEIGHT, 1 / self._num_energy)
            return
        self._num_full += 1
        if self._num_full > 1:  # the first reading of a driver may take long
            weight = SLOWER_WEIGHT if driver_s > self.full_s else FASTER_WEIGHT
            self.full_s += (driver_s - self.full_s) * max(weight, 1 / (self._num_full - 1))

    def pay_for_readings(self, wanted: int, since_s: float, *, is_limited: bool) -> int:
        """Return how many of the ``wanted`` readings at an edge are allowed, and charge the credit with their time.

        ``since_s``: time since the previous edge.  The CPU time limits them, but not to less than one; if
        ``is_limited``, the credit of time in the driver limits them, too.
        """
        by_cpu_time = min(wanted, max(int(MAX_EDGE_SHARE * since_s / (self.energy_s + WAKE_S)), 1))
        if not is_limited:
            return by_cpu_time
        now_s = time.monotonic()
        earned_s = EDGE_SHARE * (now_s - self._earned_until_s)
        kept_s = max(KEPT_CREDIT_S * EDGE_SHARE, self.energy_s)  # a slow device is read, too
        self._credit_s, self._earned_until_s = min(self._credit_s + earned_s, kept_s), now_s
        by_credit = min(wanted, int(self._credit_s / self.energy_s)) if self.energy_s else wanted
        self._credit_s -= by_credit * self.energy_s
        return min(by_cpu_time, by_credit)

    @property
    def edge_apart_s(self) -> float:
        """Mean seconds between the readings at edges that the budget allows; 0 if calls take no time."""
        return min(self.energy_s / EDGE_SHARE, MAX_INTERVAL_S)


class Sampler:
    """Reads one device: every ``interval_s`` seconds on average, and at requested times.

    Args:
        open_reader: opens the device; called in the thread, because a driver may be slow.
        wake_descriptor: an eventfd, written after the first sample and after the last sample of each request.
        is_node_sensor: whether the device may be slow; a missing node sensor is not reported as an event.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        interval_s: float,
        report: Callable[[Event], None],
        wake_descriptor: int,
        calibrate: Calibrate | None = None,
        is_node_sensor: bool = False,
    ) -> None:
        self.device: Device | None = None  # None until the device is open
        self.unavailable = ""  # reason why no device was opened
        self.is_calibrating = False
        self._open_reader, self._calibrate, self._is_node_sensor = open_reader, calibrate, is_node_sensor
        self._interval_s, self._report, self._wake_descriptor = interval_s, report, wake_descriptor
        self._samples: queue.SimpleQueue[Sample | Device] = queue.SimpleQueue()  # until `take_samples`
        # The thread sleeps in this queue's get(): an event with a timeout takes 25 us more per wake-up.
        self._requests: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._due_times: list[_RequestedTime] = []  # a heap of the times from the queue, without a reading so far
        self._is_stopped = False
        self._failures: dict[str, str] = {}  # of the last full reading: field -> reason
        self.driver = DriverTime()
        self._last_full_ns = 0  # end of the last full reading
        self._reading_since_s: float | None = None  # start of a call that has not returned
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens the device and takes the first sample at once."""
        self._thread.start()

    def request_samples(self, times_ns: Sequence[int] = (), since_s: float = 1.0, *, is_forced: bool = False) -> None:
        """Request samples at monotonic times; samples for past times are taken at once.

        Requests to a missing device are ignored.  At most ``MAX_REQUESTS`` requests wait during a hanging call.  If
        calls are slow or requests are frequent, fewer samples are taken, or none.

        Args:
            times_ns: the times in ascending order; empty means the current time.
            since_s: seconds since the previous request.
            is_forced: whether the readings are taken in any case, at the end of the run or after a long wait.
        """
        if self.unavailable:
            return  # the thread has ended
        while self._requests.qsize() >= MAX_REQUESTS:
            with contextlib.suppress(queue.Empty):  # the thread may have removed the last request
                self._requests.get_nowait()
        times = times_ns or (time.monotonic_ns(),)
        is_limited = not self._is_node_sensor and not is_forced
        affordable = self.driver.pay_for_readings(len(times), since_s, is_limited=is_limited)
        if affordable < 2:
            times = times[:affordable]
        elif affordable < len(times):  # the first and the last ones
            times = [times[0], *times[len(times) - affordable + 1 :]]
        if times:
            self._requests.put(times)

    def request_calibration(self) -> None:
        """Let the thread calibrate the sensor; `take_samples` has the result."""
        if self._calibrate is not None and not self.unavailable:
            self.is_calibrating = True
            self._requests.put(())

    def take_samples(self) -> list[Sample | Device]:
        """Return the samples since the last call, oldest first; a `Device` in the list has a new calibration."""
        taken = []
        while not self._samples.empty():  # no other thread removes samples
            taken.append(self._samples.get_nowait())
        return taken

    def stale_s(self) -> float | None:
        """Return the duration of the unfinished read if the device is stale, else ``None``."""
        since_s = self._reading_since_s
        allowed_s = 3 * self._interval_s if self._is_node_sensor else 0.0
        if since_s is None or time.monotonic() - since_s < max(STALE_AFTER_S, allowed_s):
            return None
        return time.monotonic() - since_s

    @property
    def is_opening(self) -> bool:
        return self.device is None and not self.unavailable

    @property
    def slow_interval_s(self) -> float | None:
        """Seconds between samples of a device with slow calls; ``None`` if calls are fast enough for the interval."""
        slow_s = min(self.driver.full_s / FULL_SHARE, MAX_INTERVAL_S)  # the budget allows these full readings
        return None if slow_s <= self._interval_s or self._is_node_sensor else slow_s

    def stop(self, timeout_s: float) -> bool:
        """Stop sampling; return ``False`` if the thread has not ended, because a device call hangs."""
        self._is_stopped = True
        self._requests.put(())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:  # this and the next functions run in the thread
        self._reading_since_s = time.monotonic()
        try:
            reader = self._open_reader()
        except DeviceUnavailable as error:
            self._set_unavailable(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a device file may be a plug-in, and the thread has no caller
            self._set_unavailable(f"the device file has an error: {type(error).__name__}: {error}")
            return
        self.device = device = reader.device
        self._read_device(reader)
        os.eventfd_write(self._wake_descriptor, 1)
        interval_start_s = time.monotonic() + self._interval_s  # of the interval of the next full reading
        full_ns = int(interval_start_s / NS)  # time of the next full reading
        power_ns = self._next_power_ns(device)
        while not self._is_stopped:
            now_ns = self._sleep_until(min(full_ns, power_ns))
            is_full_due, is_power_due = now_ns >= full_ns, now_ns >= power_ns
            if not self._is_stopped and (is_full_due or is_power_due or self._due_times):
                if self._read_if_due(reader, now_ns, is_full_due) is None and is_power_due:
                    self._read_device(reader, energy_only=True)
                power_ns = self._next_power_ns(device) if is_full_due or is_power_due else power_ns
            if not self._is_stopped and self.is_calibrating:
                self._run_calibration(reader, device)
            while full_ns <= now_ns:
                interval_start_s += self.slow_interval_s or self._interval_s
                # A random time: samples in step with iterations would always show the same part of an iteration.
                full_ns = int((interval_start_s + random.random() * self._interval_s) / NS)  # noqa: S311 - not a secret
                now_ns = time.monotonic_ns()  # samples that were missed during a slow read are skipped
        reader.close()

    def _next_power_ns(self, device: Device) -> int:
        """Return the time of the next power-only reading; `NEVER_NS` for a device with an energy counter."""
        if device.energy_method != INSTANT or not device.is_gpu or device.only_power:
            return NEVER_NS
        apart_s = max(POWER_EVERY_S, self.driver.energy_s / POWER_SHARE)
        # Random intervals: readings in step with iterations would always show the same part of an iteration.
        return time.monotonic_ns() + int(apart_s * random.uniform(0.9, 1.1) / NS)  # noqa: S311 - not a secret

    def _read_if_due(self, reader: Reader, now_ns: int, is_full_due: bool) -> Sample | None:
        """Take a reading if it is due: a full reading at regular times, otherwise only energy.

        The first reading of a request is full if there is time for a full reading: it then has the level of memory.
        """
        if not self._due_times:
            return self._read_device(reader) if is_full_due else None
        due = []
        while self._due_times and self._due_times[0].time_ns <= now_ns:
            due.append(heapq.heappop(self._due_times))
        if not (due or is_full_due):
            return None
        has_time = now_ns - self._last_full_ns >= self.driver.full_s / FULL_SHARE / NS
        is_full = is_full_due or (has_time and any(requested.is_first for requested in due))
        sample = self._read_device(reader, energy_only=not is_full)
        if any(requested.is_last for requested in due):
            os.eventfd_write(self._wake_descriptor, 1)
        return sample

    def _run_calibration(self, reader: Reader, device: Device) -> None:
        assert self._calibrate is not None
        next_full_s = time.monotonic() + self._interval_s

        def read() -> Sample:
            """Take a reading for the calibration; a full reading if it is due or requested."""
            nonlocal next_full_s
            now_ns = self._sleep_until(0)  # no sleep: it takes new requests from the queue
            is_full_due = now_ns * NS >= next_full_s
            next_full_s += self._interval_s if is_full_due else 0.0
            return self._read_if_due(reader, now_ns, is_full_due) or self._read_device(reader, energy_only=True)

        def wait(until_s: float) -> None:
            """Wait until a time, and take the readings that are requested meanwhile."""
            while (now_ns := self._sleep_until(int(until_s / NS))) * NS < until_s - 1e-6:
                self._read_if_due(reader, now_ns, is_full_due=False)

        try:
            sensor = self._calibrate(device, read, wait)
        except Exception as error:  # noqa: BLE001 - the assumed sensor is used instead
            why = f"{type(error).__name__}: {error}"
            self._report_event(f"the sensor could not be calibrated: {why}", reader.device.key)
        else:
            self.device = reader.device = replace(reader.device, sensor=sensor)
            self._samples.put(self.device)
        self.is_calibrating = False

    def _read_device(self, reader: Reader, *, energy_only: bool = False) -> Sample:
        began_s = self._reading_since_s = time.monotonic()
        sample, failures = getattr(reader, "read_energy", reader.read)() if energy_only else reader.read()
        self._reading_since_s = None
        ended_s = time.monotonic()
        self.driver.add_reading(ended_s - began_s, is_gpu=reader.device.is_gpu, energy_only=energy_only)
        if not energy_only:
            self._last_full_ns = int(ended_s / NS)
        self._samples.put(sample)
        if (failures or self._failures) and not energy_only:  # an energy-only reading has no other quantities
            self._report_failures(reader.device.key, failures)
        return sample

    def _sleep_until(self, next_ns: int) -> int:
        """Sleep until ``next_ns``, the next requested time or a new request, and take it; return the current time."""
        until_ns = min(self._due_times[0].time_ns, next_ns) if self._due_times else next_ns
        sleep_s = (until_ns - time.monotonic_ns()) * NS
        try:
            while True:
                times = self._requests.get(sleep_s > 0, sleep_s)
                sleep_s = 0.0
                for at_ns in times:
                    heapq.heappush(self._due_times, _RequestedTime(at_ns, at_ns == times[0], at_ns == times[-1]))
        except queue.Empty:
            return time.monotonic_ns()

    def _set_unavailable(self, why: str) -> None:
        self._reading_since_s = None
        self.unavailable = why
        if not self._is_node_sensor and why != ALREADY_OPEN:
            self._report_event(f"no device is sampled: {why}")
        os.eventfd_write(self._wake_descriptor, 1)

    def _report_event(self, text: str, key: str | None = None) -> None:
        self._report(Event(time.time(), "agent", f"{key}: {text}" if key else text, device=key))

    def _report_failures(self, key: str, failures: dict[str, str]) -> None:
        for field, reason in failures.items():
            if field not in self._failures:
                self._report_event(f"{field} is not measured: {reason}", key)
        for field in self._failures:
            if field not in failures:
                self._report_event(f"{field} is measured again", key)
        self._failures = failures
