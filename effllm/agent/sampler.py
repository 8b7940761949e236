"""The thread of the agent that reads a device, so that a call that hangs holds up nothing else."""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from effllm.devices import DeviceUnavailable, Reader
from effllm.records.rank import INSTANT, Device, Event, Sample, Sensor

NS = 1e-9

#: Of a core: what the extra reads around the edges of windows may cost, a wake-up of Python included.
MAX_EDGE_SHARE = 0.005
WAKE_S = 110e-6  # measured at 10 Hz: 0.11 % of a core
#: Of a core: what plain sampling may cost; slower devices are read less often.
MAX_SAMPLING_SHARE = 0.001
#: A GPU that has no energy counter is asked for its power so often, within so much of a core.
POWER_EVERY_S, MAX_POWER_SHARE = 0.09, 0.003
#: A call that took so long may be holding the driver's lock, on which kernel launches wait too.
SLOW_CALL_S = 0.020
MAX_INTERVAL_S = 30.0
NEVER_NS = 2**63 - 1
#: How quickly what calls take is believed to have grown, or shrunk: nearer to the slow ones than to the mean.
CALL_RISE, CALL_FALL, MAX_COUNTED_S = 0.2, 0.05, 0.2
#: A read that has not come back after so long makes the device stale.
STALE_AFTER_S = 5.0
#: Requests that wait for a read that hangs: the oldest beyond them are dropped, and their edges are not measured.
MAX_REQUESTS = 64

#: Takes the device as it was opened, what reads it, and whether readings contradict the calibration before.
Calibrate = Callable[[Device, Callable[[], Sample], bool], Sensor]


class Sampler:
    """Reads one device every ``interval_s`` seconds on average, and at the moments that are asked for.

    Args:
        open_reader: opens the device, in the thread, because a driver may take its time even for that.
        interval_s: seconds between samples.
        report: takes an event whenever a quantity stops being measured, and one when it is again.
        wake_descriptor: an eventfd that is written after the first sample and after the last of each request.
        calibrate: learns how the device's sensor behaves, after the first sample.
        is_node_sensor: slow by nature; where there is none, that is no event.
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
        self.device: Device | None = None  # None until it is open
        self.unavailable = ""  # why there is no device
        self.is_calibrating = False
        self._open_reader = open_reader
        self._interval_s = interval_s
        self._report = report
        self._wake_descriptor = wake_descriptor
        self._calibrate = calibrate
        self._is_node_sensor = is_node_sensor
        self._samples: queue.SimpleQueue[Sample | Device] = queue.SimpleQueue()
        # The thread sleeps in it too: an event with a time-out costs it 25 us more a wake-up.
        self._requests: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._due: list[tuple[int, bool, bool]] = []  # asked moments: is it its request's first, its last
        self._stopped = False
        self._learns_again = False
        self._failing: dict[str, str] = {}
        self._call_s = 0.0  # what calls take
        self._reading_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Open the device and begin to sample; the first sample is taken at once."""
        self._thread.start()

    def ask(self, times_ns: Sequence[int] = (), within_s: float = 1.0) -> None:
        """Have samples taken at moments of the monotonic clock, those that have passed at once.

        Nothing is asked of a device that is not there, and a call that hangs leaves at most ``MAX_REQUESTS`` waiting.
        Where calls are so slow, or requests so frequent, that all of them would cost too much, the
        first alone is taken.

        Args:
            times_ns: the moments, soonest first; none is now.
            within_s: seconds between such requests.
        """
        if self.unavailable:
            return  # its thread has ended
        while self._requests.qsize() >= MAX_REQUESTS:
            with contextlib.suppress(queue.Empty):  # the thread may take it first
                self._requests.get_nowait()
        times = times_ns or (time.monotonic_ns(),)
        affordable = int(MAX_EDGE_SHARE * within_s / (self._call_s + WAKE_S))
        if self._call_s > SLOW_CALL_S or affordable < 2:
            times = times[:1]
        elif affordable < len(times):
            times = [times[0], *times[len(times) - affordable + 1 :]]
        self._requests.put(times)

    def learn_again(self) -> None:
        """Calibrate the sensor once more, because readings contradict its calibration."""
        self.is_calibrating = self._learns_again = self._calibrate is not None
        self._requests.put(())

    def take(self) -> list[Sample | Device]:
        """Return the samples since the last call, oldest first; a device among them has its calibration."""
        taken = []
        while not self._samples.empty():  # no other thread takes any
            taken.append(self._samples.get_nowait())
        return taken

    def stale_s(self) -> float | None:
        """Return for how long a read has not come back, if that is so long that the device counts as stale."""
        since_s = self._reading_since_s
        allowed_s = 3 * self._interval_s if self._is_node_sensor else 0.0
        if since_s is None or time.monotonic() - since_s < max(STALE_AFTER_S, allowed_s):
            return None
        return time.monotonic() - since_s

    @property
    def is_opening(self) -> bool:
        """Whether it is not known yet if there is such a device."""
        return self.device is None and not self.unavailable

    @property
    def slowed_s(self) -> float | None:
        """Seconds between samples where that is more than the interval, for calls are slow; else ``None``."""
        if self._call_s <= SLOW_CALL_S or self._is_node_sensor:
            return None
        return min(max(self._interval_s, self._call_s / MAX_SAMPLING_SHARE / 10), MAX_INTERVAL_S)

    def stop(self, timeout_s: float) -> bool:
        """Stop sampling; ``False`` where the device did not answer in time and its thread is left behind."""
        self._stopped = True
        self._requests.put(())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread ---

    def _run(self) -> None:
        self._reading_since_s = time.monotonic()
        try:
            reader = self._open_reader()
        except DeviceUnavailable as error:
            self._set_unavailable(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a device file may be a plug-in, and no caller above would see it
            self._set_unavailable(f"its file has an error: {type(error).__name__}: {error}")
            return
        self.device = opened = reader.device
        self._read(reader)
        os.eventfd_write(self._wake_descriptor, 1)
        self._learn(reader, opened, is_suspect=False)
        turn_s = time.monotonic() + self._interval_s
        next_ns = int(turn_s / NS)
        power_ns = self._next_power_ns(opened)
        while not self._stopped:
            now_ns = self._sleep_until(min(next_ns, power_ns))
            is_time, is_power_time = now_ns >= next_ns, now_ns >= power_ns
            if not self._stopped and (is_time or is_power_time or self._due):
                if self._answer(reader, now_ns, is_time) is None and is_power_time:
                    self._read(reader, energy_only=True)
                power_ns = self._next_power_ns(opened) if is_time or is_power_time else power_ns
            if not self._stopped and self._learns_again:
                self._learns_again = False
                self._learn(reader, opened, is_suspect=True)
            while next_ns <= now_ns:
                turn_s += self.slowed_s or self._interval_s
                # Somewhere in its turn, for iterations of a second, or of half of one, would show one moment of theirs.
                next_ns = int((turn_s + random.random() * self._interval_s) / NS)  # noqa: S311 - it is no secret
                now_ns = time.monotonic_ns()  # a slow read leaves ticks out, it does not pile them up
        reader.close()

    def _next_power_ns(self, device: Device) -> int:
        """Return when power is to be read next for its integral alone; never where a counter does that."""
        if device.energy_method != INSTANT or not device.is_gpu or device.only_power or self._call_s > SLOW_CALL_S:
            return NEVER_NS
        apart_s = max(POWER_EVERY_S, (self._call_s + WAKE_S) / MAX_POWER_SHARE)
        # Not evenly, for iterations that keep step with the reads would show some moments of theirs alone.
        return time.monotonic_ns() + int(apart_s * random.uniform(0.9, 1.1) / NS)  # noqa: S311 - it is no secret

    def _answer(self, reader: Reader, now_ns: int, is_time: bool) -> Sample | None:
        """Take the reading that is due, if one is: all there is at its time and at an edge, energy alone elsewhere."""
        if not self._due:
            return self._read(reader) if is_time else None
        due = self._due_at(now_ns)
        if not (due or is_time):
            return None
        sample = self._read(reader, energy_only=not is_time and not any(is_first for _, is_first, _ in due))
        if any(is_last for _, _, is_last in due):
            os.eventfd_write(self._wake_descriptor, 1)
        return sample

    def _learn(self, reader: Reader, opened: Device, *, is_suspect: bool) -> None:
        if self._calibrate is None:
            return
        self.is_calibrating = True
        next_s = time.monotonic() + self._interval_s

        def read() -> Sample:
            """Take one of many readings; now and then, and where an edge asks for it, a whole one."""
            nonlocal next_s
            now_ns = self._sleep_until(0)
            is_time = now_ns * NS >= next_s
            next_s += self._interval_s if is_time else 0.0
            return self._answer(reader, now_ns, is_time) or self._read(reader, energy_only=True)

        try:
            sensor = self._calibrate(opened, read, is_suspect)
        except Exception as error:  # noqa: BLE001 - what is known without it is enough to go on with
            self._event(f"its sensor could not be learnt: {type(error).__name__}: {error}", reader.device.key)
        else:
            self.device = reader.device = replace(reader.device, sensor=sensor)
            self._samples.put(self.device)
        self.is_calibrating = False

    def _read(self, reader: Reader, *, energy_only: bool = False) -> Sample:
        began_s = self._reading_since_s = time.monotonic()
        sample, failures = getattr(reader, "read_energy", reader.read)() if energy_only else reader.read()
        self._reading_since_s = None
        took_s = time.monotonic() - began_s
        # Slow to change: one reading in a hundred is delayed by other processes on the core.
        took_s = min(took_s, MAX_COUNTED_S)  # a call that hung once is no reason to be slow for an hour
        self._call_s += (took_s - self._call_s) * (CALL_RISE if took_s > self._call_s else CALL_FALL)
        self._samples.put(sample)
        if (failures or self._failing) and not energy_only:  # what was not read has not failed
            self._report_failures(reader.device.key, failures)
        return sample

    def _sleep_until(self, next_ns: int) -> int:
        """Sleep until then, or until an asked moment, or until something is asked; return the moment it is."""
        until_ns = min(self._due[0][0], next_ns) if self._due else next_ns
        sleep_s = (until_ns - time.monotonic_ns()) * NS
        try:
            while True:
                times = self._requests.get(sleep_s > 0, sleep_s)
                sleep_s = 0.0
                for at_ns in times:
                    heapq.heappush(self._due, (at_ns, at_ns == times[0], at_ns == times[-1]))
        except queue.Empty:
            return time.monotonic_ns()

    def _due_at(self, now_ns: int) -> list[tuple[int, bool, bool]]:
        """Take the asked moments that have come."""
        due = []
        while self._due and self._due[0][0] <= now_ns:
            due.append(heapq.heappop(self._due))
        return due

    def _set_unavailable(self, why: str) -> None:
        self._reading_since_s = None
        self.unavailable = why
        if not self._is_node_sensor:
            self._event(f"no device is sampled: {why}")
        os.eventfd_write(self._wake_descriptor, 1)

    def _event(self, text: str, key: str | None = None) -> None:
        self._report(Event(time.time(), "agent", f"{key}: {text}" if key else text, device=key))

    def _report_failures(self, key: str, failures: dict[str, str]) -> None:
        for field, reason in failures.items():
            if field not in self._failing:
                self._event(f"{field} is not measured: {reason}", key)
        for field in self._failing:
            if field not in failures:
                self._event(f"{field} is measured again", key)
        self._failing = failures
