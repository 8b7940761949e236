"""A recorder that also profiles every Nth iteration, and times all iterations on the device by CUDA events.

`WatchedRecorder` replaces `Recorder` only if iterations are profiled or timed on a device, because `Recorder` must stay
fast.
"""

from __future__ import annotations

import time
from typing import Any

from effllm.records import ring
from effllm.records.timeline import KINDS
from effllm.trainer.device_time import DeviceTime
from effllm.trainer.recorder import Recorder
from effllm.trainer.torch_profile import Profiled, TorchProfile

_NS = 1e-9


class WatchedRecorder(Recorder):
    """A `Recorder` that also records the profiles and device times of iterations.

    Args:
        arguments: arguments of `Recorder`.
        profile_every: an iteration is profiled if this number divides the iteration number; 0 for no profiles.
        torch: the torch module, if it is imported.
        named: keyword arguments of `Recorder`.
    """

    __slots__ = ("_device", "_profile")

    def __init__(self, *arguments: Any, profile_every: int = 0, torch: Any = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._profile = TorchProfile(profile_every, self._warn, torch) if profile_every else None
        cuda = getattr(torch, "cuda", None)
        self._device = DeviceTime(cuda) if hasattr(cuda, "Event") else None

    def start(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the start of an iteration; the profiler starts before the stamp."""
        if not self.is_on:
            return
        if self._profile is not None:
            self._profile.start(self.ordinal + 1 + self._offset)
        super().start(_now)
        if self._device is not None:
            try:
                self._device.start()
            except Exception as error:  # noqa: BLE001 - no exception from CUDA may end a training step
                self._without_device(error)

    def end(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = 0,
        _now: Any = time.monotonic_ns,
    ) -> None:
        """Stamp the end of an iteration, as `Recorder.end`; the profiler stops after the stamp."""
        if not self.is_on:
            return
        if self._device is not None:
            try:
                self._device.end()
            except Exception as error:  # noqa: BLE001 - as above
                self._without_device(error)
            if (self.ordinal + 1 + self._offset) % self._log_interval == 0:
                self._put_device(self.ordinal + 1)  # before the record that ends the window is written
        step_ns = self._step_ns
        super().end(tokens_processed, samples, tokens, tokens_loss, _now)
        if self._profile is not None and (found := self._profile.end(self._end_ns)) is not None:
            self._put_profile(found, self._step_ns - step_ns)

    def sync_point(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the sync point, as `Recorder.sync_point`, on the host and on the device."""
        super().sync_point(_now)
        if self._device is not None and self._own_ns:
            try:
                self._device.sync_point()
            except Exception as error:  # noqa: BLE001 - as above
                self._without_device(error)

    def finish(self, status: str = "completed") -> None:
        """Record the final status of the loop, and stop profiling."""
        if self.is_on:
            if self._profile is not None:
                self._profile.close(failed=status != "completed")
            self._put_device(self.ordinal)
        super().finish(status)

    def _put_profile(self, found: Profiled, step_ns: int) -> None:
        split, duration_ns = found.split, found.split.duration_ns
        if not found.is_of_device:  # AL excludes phases and data waits inside the iteration
            duration_ns = max(step_ns, split.exposed_ns + split.computing_ns)
        begin_ns, end_ns = self._end_ns - duration_ns, self._end_ns
        for what, communication_ns, exposed_ns in (
            (ring.WHOLE, split.communication_ns, split.exposed_ns),
            *((KINDS.index(kind), *times) for kind, times in split.kinds.items()),
        ):
            self.put(ring.PROFILE, what, communication_ns, begin_ns, end_ns, exposed_ns * _NS)
        self.put(ring.PROFILE, ring.COMPUTING, split.computing_ns, begin_ns, end_ns, found.cost_ns * _NS)

    def _put_device(self, ordinal: int) -> None:
        if self._device is not None and self._device.iterations:
            total_s = self._device.total_ns * _NS
            self.put(ring.DEVICE_TIME, 0, self._device.iterations, 0, 0, total_s, ordinal)
            if self._device.own_iterations:
                self.put(ring.OWN_TIME, 0, self._device.own_iterations, 0, 0, self._device.own_ns * _NS, ordinal)

    def _without_device(self, error: Exception) -> None:
        self._device = None
        self._warn(f"iterations are not timed on the device any more: {type(error).__name__}: {error}")
