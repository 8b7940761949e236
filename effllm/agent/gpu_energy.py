"""The energy of all visible GPUs, for callers without an agent."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping

from effllm.agent.sampler import Sampler
from effllm.agent.track import EDGE_WAIT_S, DeviceTrack
from effllm.devices import DeviceUnavailable, Reader, Site, open_named_or_any_gpu

_MAX_GPUS = 64
_OPENED_WITHIN_S = 3.0


class GpuEnergy:
    """Samples every GPU in CUDA_VISIBLE_DEVICES; a GPU that is listed twice is sampled once.

    ``device`` is a name of `effllm.devices`; ``auto`` means the GPUs of any vendor.
    """

    def __init__(self, device: str, environ: Mapping[str, str], interval_s: float) -> None:
        self._device = device
        self._environ, self._interval_s = environ, interval_s
        self._tracks: list[DeviceTrack] = []
        self._eventfd = -1  # written by the samplers; nothing waits for it
        self.why_not = ""  # reason of missing energy
        self.is_simulated = False

    @property
    def num_gpus(self) -> int:
        """Number of GPUs with energy; GPUs of one module count once."""
        return len(self._tracks_by_energy_key())

    def start_samplers(self) -> None:
        """Open the GPUs, and wait for their first samples."""
        readers = self._open_readers()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for reader in readers:
            sampler = Sampler(lambda reader=reader: reader, self._interval_s, lambda _event: None, self._eventfd)  # type: ignore[misc]
            self._tracks.append(DeviceTrack(sampler, self._interval_s))
            sampler.start()
        until_s = time.monotonic() + _OPENED_WITHIN_S
        while any(t.series is None and not t.sampler.unavailable for t in self._tracks) and time.monotonic() < until_s:
            time.sleep(0.01)
            self._take_samples()
        if readers and not self.num_gpus:
            self.why_not = "these GPUs report neither energy nor power"

    def take_joules(self, start_s: float, end_s: float) -> float | None:
        """Return the energy between two monotonic times; ``None`` if a GPU lacks more than 1 %.  Drop older samples."""
        end_ns = int(end_s * 1e9)
        for track in self._tracks:
            track.request_samples(end_ns, is_forced=True)
        until_s = time.monotonic() + EDGE_WAIT_S
        while True:
            self._take_samples()
            if all(track.is_settled(end_ns) for track in self._tracks) or time.monotonic() > until_s:
                break
            time.sleep(0.01)
        total_j = 0.0
        for track in self._tracks_by_energy_key().values():
            if track.series is None:  # the first read of the device has not returned
                return None
            amount = track.series.integrals(int(start_s * 1e9), end_ns).energy
            track.series.forget_before(end_ns)
            if amount.joules is None or amount.covered_s < 0.99 * (end_s - start_s):
                return None
            total_j += amount.joules
        return total_j if self._tracks_by_energy_key() else None

    def close(self) -> None:
        for track in self._tracks:
            track.sampler.stop(1.0)
        self._tracks = []
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def _open_readers(self) -> list[Reader]:
        """Return the GPUs that can be opened; without one, set `why_not`."""
        readers: dict[str, Reader] = {}
        device_name = self._device
        if device_name == "host":
            self.why_not = "EFFICIENTLLM_DEVICE=host is no GPU"
            return []
        for rank in range(_MAX_GPUS):
            site = Site(
                local_rank=rank,
                trainer_pid=os.getpid(),
                host=platform.node(),
                visible_devices=self._environ.get("CUDA_VISIBLE_DEVICES"),
                hip_visible_devices=self._environ.get("HIP_VISIBLE_DEVICES"),
                rocr_visible_devices=self._environ.get("ROCR_VISIBLE_DEVICES"),
            )
            try:
                reader = open_named_or_any_gpu(device_name, site)
            except DeviceUnavailable as error:
                self.why_not = "" if readers else str(error)
                break
            if reader.device.key in readers:  # with one visible GPU, every local rank opens this GPU
                reader.close()
                break
            readers[reader.device.key] = reader
            device_name = reader.device.kind  # for ``auto``: all GPUs are of the vendor of the first
            self.is_simulated = reader.device.simulated
            if self.is_simulated:
                break  # any number of simulated devices could be opened
        return list(readers.values())

    def _take_samples(self) -> None:
        for track in self._tracks:
            track.take_samples()

    def _tracks_by_energy_key(self) -> dict[str, DeviceTrack]:
        """Return one track for each energy key; devices without energy are left out."""
        tracks: dict[str, DeviceTrack] = {}
        for track in self._tracks:
            device = track.sampler.device
            if device is not None and device.energy_method is not None:
                tracks.setdefault(device.energy_key or device.key, track)
        return tracks
