"""The devices of one rank: its GPUs and, on the first rank of a host, the power sensors of the node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from effllm.agent.sampler import Sampler
from effllm.agent.series import Series
from effllm.agent.track import DeviceTrack
from effllm.agent.trainer import Trainer
from effllm.config.settings import cache_folder
from effllm.devices import DeviceUnavailable, Reader, Site, open_device
from effllm.devices import node as node_power
from effllm.energy.calibration import assumed, calibrate
from effllm.records.rank import Device, Event, Sample, Sensor

DEVICE_WAIT_S = 3.0


class RankDevices:
    """Opens and samples the devices of a rank.

    Args:
        trainer: the rank's trainer.
        report: receives events, also from the threads of samplers.
    """

    def __init__(self, trainer: Trainer, report: Callable[[Event], None]) -> None:
        self._trainer, self._report = trainer, report
        self.wake_descriptor = os.eventfd(
            0, os.EFD_NONBLOCK | os.EFD_CLOEXEC
        )  # written when requested samples are complete
        self._interval_s = trainer.config.collection_interval_s
        self._calibrations = cache_folder() / "calibration"
        self._gpus = _visible_gpus(trainer.facts.gpus, trainer.facts.visible_devices)
        self._tracks = [self._track(self._open)]
        self._tracks += [self._track(partial(self._open_other, index)) for index in self._gpus[1:]]
        self._has_changed = False  # whether a device was opened or calibrated
        self._has_baseline = False

    def start(self) -> None:
        """Open the devices; wait at most `DEVICE_WAIT_S` for their first samples."""
        until_s = time.monotonic() + DEVICE_WAIT_S
        for track in self._tracks:
            track.sampler.start()
        self._wait(DEVICE_WAIT_S)
        while len(self._tracks) > 1 and time.monotonic() < until_s:  # reports begin when all devices have samples
            self.take()
            if all(track.series or track.sampler.unavailable for track in self._tracks):
                break
            self._wait(0.05)
        self._start_node_sensors()
        # When the job's first window closes, the scope of the job's power is chosen from the open devices.
        while any(track.sampler.is_opening for track in self._tracks) and time.monotonic() < until_s:
            self._wait(0.05)

    @property
    def series(self) -> list[Series]:
        return [track.series for track in self._tracks if track.series is not None]

    @property
    def has_all_gpus(self) -> bool:
        """Whether all GPUs of the rank are open, and none of them is simulated."""
        devices = [series.device for series in self.series]
        return sum(one.is_gpu and not one.simulated for one in devices) >= max(len(self._gpus), 1)

    @property
    def torch_indices(self) -> dict[str, int]:
        """Key of each open GPU -> its index in torch, which counts the visible GPUs from 0."""
        indices = self._gpus or [_torch_index(self._trainer)]
        devices = [track.series.device if track.series is not None else None for track in self._tracks]
        return {one.key: n for one, n in zip(devices, indices, strict=False) if one is not None and one.is_gpu}

    @property
    def unavailable(self) -> list[str]:
        """Reasons why devices of the rank were not opened."""
        return [why for track in self._tracks if (why := track.sampler.unavailable)]

    @property
    def is_calibrating(self) -> bool:
        return any(track.sampler.is_calibrating for track in self._tracks)

    @property
    def newest(self) -> Sample | None:
        series = self._tracks[0].series
        return series.newest if series else None

    @property
    def missing_baseline(self) -> bool:
        """Whether the idle power of the devices is not measured yet."""
        return not self._has_baseline

    def take(self) -> None:
        """Take new samples, and report events of the devices."""
        changed = [track.take() for track in self._tracks]
        if len(idle_ns := self._trainer.facts.baseline_ns) == 2 and not self._has_baseline:
            self._has_baseline = all(track.note_baseline(*idle_ns) for track in self._tracks if track.series)
            changed.append(self._has_baseline)
        self._has_changed = self._has_changed or any(changed)
        now_ns, time_s = time.monotonic_ns(), time.time()
        for track in self._tracks:
            for event in track.take_events(now_ns, time_s):
                self._report(event)

    def take_changed(self) -> bool:
        """Return whether a device was opened or calibrated since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def ask(self, edge_ns: int) -> None:
        for track in self._tracks:
            track.ask(edge_ns)

    def is_settled(self, edge_ns: int) -> bool:
        return all(track.is_settled(edge_ns) for track in self._tracks)

    def stop(self) -> None:
        """Stop sampling; a thread in a hanging device call is not joined."""
        for track in self._tracks:
            track.sampler.stop(0.2)

    def _track(self, open_reader: Callable[[], Reader]) -> DeviceTrack:
        sampler = Sampler(open_reader, self._interval_s, self._report, self.wake_descriptor, self._calibrate)
        return DeviceTrack(sampler, self._interval_s)

    def _open_other(self, index: int) -> Reader:
        reader = self._open(index)
        if not reader.device.is_gpu:
            reader.close()
            raise DeviceUnavailable(f"there is no GPU {index} here")
        return reader

    def _open(self, index: int | None = None) -> Reader:
        """Open the visible GPU number ``index``; ``None`` is the rank's only or first GPU."""
        if index is None and self._gpus:
            index = self._gpus[0]
        facts = self._trainer.facts
        site = Site(
            local_rank=self._trainer.place.local_rank if index is None else index,
            trainer_pid=self._trainer.pid,
            host=facts.host,
            cuda_uuid=facts.cuda_uuid if index is None else "",
            cuda_pci_bus_id=facts.cuda_pci_bus_id if index is None else "",
            visible_devices=facts.visible_devices,
            hip_visible_devices=facts.hip_visible_devices,
            rocr_visible_devices=facts.rocr_visible_devices,
            power_scope=self._trainer.config.power_scope,
            excluded_pids=frozenset((os.getpid(),)),
        )
        reader = open_device(self._trainer.config.device, site)
        reader.device = replace(reader.device, sensor=assumed(reader.device))
        return reader

    def _calibrate(self, device: Device, read: Callable[[], Sample], is_suspect: bool) -> Sensor:
        def report(text: str) -> None:
            self._report(Event(time.time(), "energy_calibration", f"{device.key}: {text}", device=device.key))

        return calibrate(device, read, self._calibrations, is_suspect=is_suspect, report=report)

    def _start_node_sensors(self) -> None:
        """Start the node's power sensors: on one rank per node, and not with a simulated device."""
        own, config = self._tracks[0].sampler.device, self._trainer.config
        if not self._trainer.is_first_of_host or (own is not None and own.simulated):
            return
        credentials = Path(config.node_power_credentials) if config.node_power_credentials else None
        for opener in node_power.openers(config.node_power, self._trainer.facts.host, credentials):
            if opener.name == "cpu" and own is not None and own.kind == "host":
                continue  # the host device already reads the power of the CPUs
            interval_s = max(opener.interval_s, self._interval_s)
            sampler = Sampler(opener.open, interval_s, self._report, self.wake_descriptor, is_node_sensor=True)
            self._tracks.append(DeviceTrack(sampler, interval_s))
            sampler.start()

    def _wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self.wake_descriptor, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            os.eventfd_read(self.wake_descriptor)


def _torch_index(trainer: Trainer) -> int:
    """Return the index in torch of the rank's first device, which `RankDevices` opens."""
    facts = trainer.facts
    if facts.cuda_index is not None:
        return facts.cuda_index
    lists = [facts.visible_devices, facts.hip_visible_devices, facts.rocr_visible_devices]
    return 0 if any(one is not None and "," not in one for one in lists) else trainer.place.local_rank


def _visible_gpus(gpus: Sequence[int], visible: str | None) -> list[int]:
    """Return the indices of ``gpus`` for which the list ``visible`` has an entry; without a list, all indices."""
    return [index for index in gpus if visible is None or index < len(visible.split(","))]
