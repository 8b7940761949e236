"""The thread of the agent that reads the device, so that a call that hangs holds up nothing else."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from effllm.devices import DeviceUnavailable, Reader
from effllm.schema import Device, Sample


class Sampler:
    """Reads one device every ``interval_s`` seconds, and at once when asked.

    Args:
        open_reader: opens the device, in the thread, because a driver may take its time even for that.
        interval_s: seconds between samples.
        log: takes one line whenever a quantity stops being measured, and one when it is again.
        wake_descriptor: an eventfd that is written after the first sample and after each that was asked for.
    """

    def __init__(
        self, open_reader: Callable[[], Reader], interval_s: float, log: Callable[[str], None], wake_descriptor: int
    ) -> None:
        self.device: Device | None = None  # None until it is open
        self.unavailable = ""  # why there is no device
        self._open_reader = open_reader
        self._interval_s = interval_s
        self._log = log
        self._wake_descriptor = wake_descriptor
        self._samples: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self._asked = threading.Event()
        self._stopped = False
        self._failing: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Open the device and begin to sample; the first sample is taken at once."""
        self._thread.start()

    def ask(self) -> None:
        """Have a sample taken now, for the edge of a window."""
        self._asked.set()

    def take(self) -> list[Sample]:
        """Return the samples since the last call, oldest first."""
        samples = []
        while True:
            try:
                samples.append(self._samples.get_nowait())
            except queue.Empty:
                return samples

    def stop(self, timeout_s: float) -> bool:
        """Stop sampling; ``False`` where the device did not answer in time and its thread is left behind."""
        self._stopped = True
        self._asked.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            reader = self._open_reader()
        except DeviceUnavailable as error:
            self.unavailable = str(error)
            self._log(f"no device is sampled: {error}")
            os.eventfd_write(self._wake_descriptor, 1)
            return
        self.device = reader.device
        next_s = time.monotonic()
        first = True
        while not self._stopped:
            asked = self._asked.is_set()
            self._asked.clear()
            sample, failures = reader.read()
            self._samples.put(sample)
            self._tell(reader.device.key, failures)
            if asked or first:
                os.eventfd_write(self._wake_descriptor, 1)
                first = False
            now_s = time.monotonic()
            while next_s <= now_s:  # a slow read leaves ticks out, it does not pile them up
                next_s += self._interval_s
            self._asked.wait(next_s - now_s)
        reader.close()

    def _tell(self, key: str, failures: dict[str, str]) -> None:
        for field, reason in failures.items():
            if field not in self._failing:
                self._log(f"{key}: {field} is not measured: {reason}")
        for field in self._failing:
            if field not in failures:
                self._log(f"{key}: {field} is measured again")
        self._failing = failures
