"""The devices of one rank: its GPUs and, on the first rank of a host, the power sensors of the node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace

from effllm.agent.sampler import ALREADY_OPEN, Sampler
from effllm.agent.series import Series
from effllm.agent.track import EDGE_WAIT_S, DeviceTrack
from effllm.agent.trainer import Trainer
from effllm.config.settings import cache_folder
from effllm.devices import DeviceUnavailable, Reader, Site, open_device
from effllm.devices import node as node_power
from effllm.energy.calibration import cached_or_assumed, calibrate, calibration_delay_s
from effllm.records.facts import RankFacts
from effllm.records.rank import Device, Event, Sample, Sensor

DEVICE_WAIT_S = 3.0
CALIBRATION_S = 3.0  # maximum wait for a calibration before a window is cut
WITHOUT_ITERATION_S = 120.0  # time after which sensors are calibrated although no iteration has ended


class RankDevices:
    """Opens and samples the devices of a rank; the threads of samplers also call ``report``."""

    def __init__(self, trainer: Trainer, report: Callable[[Event], None]) -> None:
        self._trainer, self._report = trainer, report
        # Written when requested samples are complete.
        self.wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interval_s = trainer.config.collection_interval_s
        self._calibration_folder = cache_folder() / "calibration"
        self._tracks = self._new_tracks()
        self._node_tracks: list[DeviceTrack] = []
        self._candidates: list[DeviceTrack] = []  # tracks of GPUs that may replace the first tracks
        self._gpu_choice = _gpu_choice(trainer.facts)
        # The turn of this rank, see `calibrate_when_due`; with a pause for measuring idle power, it comes at once.
        self._calibrate_at_s = 0.0 if trainer.config.baseline_seconds else time.monotonic() + WITHOUT_ITERATION_S
        self._has_begun = False  # whether the first iteration has ended, or an instrument has measured a span
        self._has_changed = False  # whether a device was opened or calibrated since `take_has_changed`
        self.has_baseline = False  # whether the idle power of the devices was measured

    def start_samplers(self) -> None:
        """Open the devices; wait at most `DEVICE_WAIT_S` for their first samples."""
        until_s = time.monotonic() + DEVICE_WAIT_S
        for track in self._tracks:
            track.sampler.start()
        self._wait_for_samples(until_s)  # reports begin when all devices have samples
        self._start_node_sensors()
        # When the job's first window closes, the scope of the job's power is chosen from the open devices.
        self._wait_for_samples(until_s)
        self.calibrate_when_due(has_begun=False)

    def _wait_for_samples(self, until_s: float) -> None:
        self.take_samples()
        while not all(track.series or track.sampler.unavailable for track in self._all_tracks):
            if time.monotonic() > until_s:
                return
            poll = select.poll()
            poll.register(self.wake_descriptor, select.POLLIN)
            if poll.poll(50):
                os.eventfd_read(self.wake_descriptor)
            self.take_samples()

    def open_other_gpus(self) -> None:
        """Open the GPUs that the training process uses, if they are others than it seemed before."""
        if (choice := _gpu_choice(self._trainer.facts)) != self._gpu_choice:
            self._gpu_choice = choice
            self._stop_tracks(self._candidates)
            open_keys = [track.series.device.key if track.series else "" for track in self._tracks]
            self._candidates = self._new_tracks(open_keys)
            for track in self._candidates:
                track.sampler.start()

    def calibrate_when_due(self, *, has_begun: bool) -> None:
        """Request the calibration of each open sensor once, when it is this rank's turn; before, do nothing.

        The turn is some time after the loop has begun.  Before, the training allocates its memory, and the calls of a
        calibration may hold the same lock of the driver.
        """
        if has_begun and not self._has_begun:
            self._has_begun = True
            self._calibrate_at_s = time.monotonic() + calibration_delay_s(self._trainer.place.local_rank)
        if time.monotonic() >= self._calibrate_at_s:
            for track in self._tracks:
                track.calibrate_once()

    def _adopt_candidates(self) -> bool:
        """Replace the tracks by those of other GPUs as soon as these are open; return whether a track has changed."""
        if not self._candidates or any(track.sampler.is_opening for track in self._candidates):
            return False
        tracks = [
            old if old is not None and new.sampler.unavailable == ALREADY_OPEN else new  # the old one has this GPU open
            for old, new in zip_longest(self._tracks[: len(self._candidates)], self._candidates)
        ]
        before, self._tracks, self._candidates = self._tracks, tracks, []
        self._stop_tracks([track for track in before if track not in tracks])
        return tracks != before

    @property
    def _all_tracks(self) -> list[DeviceTrack]:
        return [*self._tracks, *self._node_tracks]

    @property
    def series(self) -> list[Series]:
        return [track.series for track in self._all_tracks if track.series is not None]

    @property
    def has_all_gpus(self) -> bool:
        """Whether all GPUs of the rank are open, and none of them is simulated."""
        devices = [series.device for series in self.series]
        return sum(device.is_gpu and not device.simulated for device in devices) >= len(self._tracks)

    @property
    def torch_indices(self) -> dict[str, int]:
        """Key of each open GPU -> its index in torch, which counts the visible GPUs from 0."""
        indices = _visible_gpus(self._trainer.facts) or [_torch_index(self._trainer)]
        devices = [track.series.device if track.series is not None else None for track in self._tracks]
        return {device.key: index for device, index in zip(devices, indices, strict=False) if device and device.is_gpu}

    @property
    def unavailable(self) -> list[str]:
        """Reasons why devices of the rank were not opened."""
        return [why for track in self._all_tracks if (why := track.sampler.unavailable)]

    @property
    def is_calibrating(self) -> bool:
        return any(track.sampler.is_calibrating for track in self._all_tracks)

    @property
    def newest_of_first_device(self) -> Sample | None:
        series = self._tracks[0].series
        return series.newest if series else None

    def take_samples(self) -> None:
        """Take new samples, and report events of the devices."""
        changed = [self._adopt_candidates(), *(track.take_samples() for track in self._all_tracks)]
        if len(idle_ns := self._trainer.facts.baseline_ns) == 2 and not self.has_baseline:
            self.has_baseline = all(track.measure_baseline(*idle_ns) for track in self._all_tracks if track.series)
            changed.append(self.has_baseline)
        self._has_changed = self._has_changed or any(changed)
        now_ns, time_s = time.monotonic_ns(), time.time()
        for track in self._all_tracks:
            for event in track.take_events(now_ns, time_s):
                self._report(event)

    def take_has_changed(self) -> bool:
        """Return whether devices were opened or calibrated, or their idle power measured, since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    @property
    def patience_s(self) -> float:
        """Seconds after an edge for which a window waits for the samples of its devices."""
        wait_s = max((track.patience_s for track in self._all_tracks), default=EDGE_WAIT_S)
        return max(wait_s, CALIBRATION_S) if self.is_calibrating else wait_s

    def request_samples(self, edge_ns: int, *, is_forced: bool = False) -> None:
        for track in self._all_tracks:
            track.request_samples(edge_ns, is_forced=is_forced)

    def is_settled(self, edge_ns: int) -> bool:
        return all(track.is_settled(edge_ns) for track in self._all_tracks)

    def stop(self) -> None:
        """Stop sampling; a thread in a hanging device call is not joined."""
        self._stop_tracks([*self._all_tracks, *self._candidates])

    def _stop_tracks(self, tracks: Sequence[DeviceTrack]) -> None:
        for track in tracks:
            track.sampler.stop(0.2)

    def _new_tracks(self, open_keys: Sequence[str] = ()) -> list[DeviceTrack]:
        """Return a track for each GPU of the process; a GPU is not opened again if its key is at its place here."""
        indices: list[int | None] = [*_visible_gpus(self._trainer.facts)] or [None]
        keys = [*open_keys, *[""] * len(indices)]  # "": no GPU is open at this place
        first, *others = zip(indices, keys, strict=False)  # index and key
        openers = [partial(self._open, *first), *(partial(self._open_other, *other) for other in others)]
        samplers = (
            Sampler(opener, self._interval_s, self._report, self.wake_descriptor, self._calibrate) for opener in openers
        )
        return [DeviceTrack(sampler, self._interval_s) for sampler in samplers]

    def _open_other(self, index: int | None, open_key: str) -> Reader:
        """Open a further GPU: unlike the first device, it is not replaced by the host."""
        reader = self._open(index, open_key)
        if not reader.device.is_gpu:
            reader.close()
            raise DeviceUnavailable(f"there is no GPU {index} here")
        return reader

    def _open(self, index: int | None, open_key: str) -> Reader:
        """Open the visible GPU number ``index``, or the rank's only GPU, unless it has the key ``open_key``."""
        facts = self._trainer.facts
        if facts.unclear_gpu:
            raise DeviceUnavailable(facts.unclear_gpu)
        site = Site(
            local_rank=self._trainer.place.local_rank if index is None else index,
            trainer_pid=self._trainer.pid,
            host=facts.host,
            cuda_uuid=facts.cuda_uuid if index is None else "",
            cuda_pci_bus_id=facts.cuda_pci_bus_id if index is None else "",
            visible_devices=facts.visible_devices,
            hip_visible_devices=facts.hip_visible_devices,
            rocr_visible_devices=facts.rocr_visible_devices,
            excluded_pids=frozenset((os.getpid(),)),
        )
        reader = open_device(self._trainer.config.device, site)
        if reader.device.key == open_key:
            reader.close()
            raise DeviceUnavailable(ALREADY_OPEN)
        reader.device = replace(reader.device, sensor=cached_or_assumed(reader.device, self._calibration_folder))
        return reader

    def _calibrate(self, device: Device, read: Callable[[], Sample], wait: Callable[[float], None]) -> Sensor:
        def report(text: str) -> None:
            self._report(Event(time.time(), "energy_calibration", f"{device.key}: {text}", device=device.key))

        return calibrate(device, read, self._calibration_folder, wait=wait, report=report)

    def _start_node_sensors(self) -> None:
        """Start the node's power sensors: on one rank per node, and not with a simulated device."""
        first_device, config = self._tracks[0].sampler.device, self._trainer.config
        if not self._trainer.is_first_of_host or (first_device is not None and first_device.simulated):
            return
        credentials = Path(config.node_power_credentials) if config.node_power_credentials else None
        for opener in node_power.openers(config.node_power, self._trainer.facts.host, credentials):
            if opener.name == "cpu" and first_device is not None and first_device.kind == "host":
                continue  # the host device already reads the power of the CPUs
            interval_s = max(opener.interval_s, self._interval_s)
            sampler = Sampler(opener.open, interval_s, self._report, self.wake_descriptor, is_node_sensor=True)
            self._node_tracks.append(DeviceTrack(sampler, interval_s))
            sampler.start()


def _torch_index(trainer: Trainer) -> int:
    """Return the index in torch of the rank's first device, which `RankDevices` opens."""
    facts = trainer.facts
    if facts.cuda_index is not None:
        return facts.cuda_index
    lists = [facts.visible_devices, facts.hip_visible_devices, facts.rocr_visible_devices]
    sees_one_gpu = any(text is not None and "," not in text for text in lists)
    return 0 if sees_one_gpu else trainer.place.local_rank


def _visible_gpus(facts: RankFacts) -> list[int]:
    """Return the stated GPUs for which CUDA_VISIBLE_DEVICES has an entry; without this variable, all stated GPUs."""
    visible = facts.visible_devices
    return [index for index in facts.gpus if visible is None or index < len(visible.split(","))]


def _gpu_choice(facts: RankFacts) -> tuple[object, ...]:
    """Return the facts that decide which GPUs are opened: if they change, GPUs are opened again."""
    return facts.cuda_uuid, facts.cuda_pci_bus_id, facts.gpus, facts.unclear_gpu
