"""An NVIDIA GPU or MIG slice, read through NVML and identified by its UUID."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml

from effllm.devices import DeviceUnavailable, Site
from effllm.devices._nvml_call import repoint
from effllm.devices._nvml_chip import Chip, EventPoller, default_limit_w, max_clock_hz, power_profiles, throttle_reasons
from effllm.devices._nvml_identity import Slice, find_handle, gpu_of_slice, module_key, name_of, slice_of, text_of
from effllm.devices._nvml_power import NvmlPower
from effllm.devices.known.hardware import peak_clock_hz
from effllm.records.rank import MODULE, Device, Event, Sample

NS = 1e-9
#: Minimal time between the two samples of a pair (NVML documentation of nvmlGpmMetricsGet).
MIN_GPM_APART_S = 0.1
#: A busy GPU may read a little above 100 %, which counts as 100 %; a higher value is no reading.
MAX_GPM_PERCENT = 110.0

_GPM_METRICS = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: "sm_activity_ratio",
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_activity_ratio",
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_activity_ratio",
}

__all__ = ["NvmlReader", "open_device"]

_ADVICE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is missing: install the NVIDIA driver, "
    "or start the container with the driver capability 'utility'",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it, or choose another device",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded driver differ in version: "
    "reload the driver or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver: grant access to /dev/nvidia*",
}

# Initialising NVML on a broken driver can take seconds, so the delay between retries doubles.
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0


class NvmlReader:
    """An open GPU; every read of a lost GPU fails, and `_reopen` retries with growing delays."""

    def __init__(self, handle: Any, site: Site, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retry_at_s = clock()
        self._retry_delay_s = _FIRST_RETRY_S
        self._is_open = True
        self._handle = handle
        self._slice = slice_of(handle)
        self._gpu = self._slice.gpu if self._slice else handle
        self._share = self._slice.share if self._slice else 1.0
        self._chip = Chip(handle, self._gpu)
        self._power = NvmlPower(self._gpu, name_of(self._gpu) or name_of(handle), bool(self._slice), self._share)
        self._gpm = open_gpm(self._gpu, self._slice)
        self._event_poller = EventPoller(self._gpu, clock())
        self.device = self._make_device(site)

    def read(self) -> tuple[Sample, dict[str, str]]:
        sample, failures, is_there = self._read_all()
        if not is_there and self._reopen():
            sample, failures, is_there = self._read_all(sample.events)
        if is_there:
            self._retry_delay_s = _FIRST_RETRY_S
        return sample, failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return only energy and power, which are read in one call; used at the edges of windows."""
        failures: dict[str, str] = {}
        values, time_ns = self._power.read_power(failures, energy_only=True)
        power_w, average_w, energy_j = (values.get(field) for field in ("power_w", "power_average_w", "energy_j"))
        sample = Sample(time_ns, power_w=power_w, energy_j=energy_j, power_average_w=average_w, energy_only=True)
        return sample, failures

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._shut_down()

    def _make_device(self, site: Site) -> Device:
        power, limit_w = self._power, self._event_poller.limit_w
        is_module = power.scope == MODULE
        name, max_hz = name_of(self._handle), max_clock_hz(self._gpu)
        default_w = default_limit_w(self._gpu)
        notes = [self._slice.note if self._slice else "", power.note]
        return Device(
            key=text_of(pynvml.nvmlDeviceGetUUID(self._handle)),
            kind="nvml",
            name=name,
            memory_total_bytes=self._chip.memory_total_bytes,
            # NVML's limit applies to the GPU; its module may draw more.
            power_limit_w=None if limit_w is None or is_module else limit_w * self._share,
            energy_method=power.method,
            power_scope=power.scope if power.method else None,
            not_measured=self._not_measured(),
            energy_key=module_key(self._gpu, site.host) if is_module else "",
            energy_note="; ".join(note for note in notes if note),
            driver=text_of(pynvml.nvmlSystemGetDriverVersion()),
            sm_clock_max_hz=max_hz,
            sm_clock_reference_hz=max_hz and (peak_clock_hz(name) or max_hz),
            power_limit_default_w=None if default_w is None or is_module else default_w * self._share,
            power_profiles=power_profiles(self._gpu),
        )

    def _not_measured(self) -> tuple[str, ...]:
        sentences = []
        if not self._chip.has_memory:
            sentences.append("memory: not reported by NVML for this GPU")
        elif self._chip.memory_includes_reserve:
            sentences.append("memory apart from the driver's reserve: nvmlDeviceGetMemoryInfo_v2 does not work here")
        if self._slice:
            sentences.append("utilization: not reported by NVML for a MIG slice")
        elif not self._chip.has_utilization:
            sentences.append("utilization: not reported by NVML for this GPU")
        if not self._power.names & {"power_w", "power_average_w"}:
            sentences.append("power: not reported by NVML for this GPU")
        if self._power.method is None:
            sentences.append("energy: NVML gives neither an energy counter nor the power of this GPU")
        if not self._event_poller.has_xids:
            sentences.append("Xid errors: NVML does not report them here")
        return tuple(sentences)

    def _read_all(self, events: tuple[Event, ...] = ()) -> tuple[Sample, dict[str, str], bool]:
        """Return a sample that also has the given events, the failures, and whether the GPU answers."""
        failures: dict[str, str] = {}
        values, time_ns = self._power.read_power(failures)
        power_w = values.get("power_w")
        self._chip.read_memory_and_utilization(values, failures)
        is_there = bool(values) or not failures
        if is_there:  # a lost GPU has no further readings
            self._chip.read_gauges(values, failures)
            self._add_gauges(values, power_w, failures, time_ns)
        reasons = values.pop("throttled_by", None)
        sample = Sample(
            time_ns=time_ns,
            memory_bytes=values.pop("memory_bytes", None),
            utilization=values.pop("utilization", None),
            power_w=values.pop("power_w", None),
            energy_j=values.pop("energy_j", None),
            power_average_w=values.pop("power_average_w", None),
            gauges=values,  # all remaining values
            throttled_by=None if reasons is None else throttle_reasons(reasons),
            events=events + self._event_poller.poll(self._clock(), is_there),
        )
        return sample, failures, is_there

    def _add_gauges(
        self, gauges: dict[str, float], power_w: float | None, failures: dict[str, str], time_ns: int
    ) -> None:
        if self._power.scope == MODULE and power_w is not None:
            gauges["module_power_w"] = power_w
        if self._event_poller.limit_w is not None:
            gauges["power_limit_w"] = self._event_poller.limit_w * self._share
        if self._gpm:
            self._gpm.add_activities(gauges, failures, time_ns)

    def _reopen(self) -> bool:
        """Initialise NVML again when a retry is due: the handle of a lost GPU never works again."""
        now_s = self._clock()
        if not self._is_open or now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(2 * self._retry_delay_s, _LAST_RETRY_S)
        self._shut_down()
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(self.device.key)
            gpu = gpu_of_slice(handle) if self._slice else handle
        except pynvml.NVMLError:
            self._shut_down()  # the old handle is invalid after nvmlShutdown: no call may use it
            return False  # the caller reports the failures of the reading
        # The quantities found at the first opening are kept, because a restarting driver first rejects many calls.
        repoint(self._handle, handle)
        repoint(self._gpu, gpu)
        self._event_poller.open()
        if self._gpm:
            self._gpm.open()
        return True

    def _shut_down(self) -> None:
        if self._gpm:
            self._gpm.close()
        self._event_poller.close()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def open_device(site: Site, *, clock: Callable[[], float] = time.monotonic) -> NvmlReader:
    """Open the GPU or slice that this rank computes on.

    Raises:
        DeviceUnavailable: NVML does not work here, or there is no GPU for this rank.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceUnavailable(_ADVICE.get(error.value, f"NVML does not start: {error}")) from error
    try:
        return NvmlReader(find_handle(site), site, clock)
    except (pynvml.NVMLError, DeviceUnavailable) as error:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        failure = error
        if not isinstance(failure, DeviceUnavailable):
            failure = DeviceUnavailable(f"NVML finds no readable GPU for local rank {site.local_rank}: {error}")
        failure.driver_works = True
        raise failure from error


class Gpm:
    """The activity of SMs, tensor cores and memory of a Hopper or later GPU, or of a GPU instance, since the last read.

    GPM is a separate unit in the GPU and takes no lock that a profiler needs.  The compute instances of a GPU instance
    of a MIG slice (``instance``) have no activity of their own.
    """

    def __init__(self, handle: Any, instance: int | None) -> None:
        self._handle, self._instance = handle, instance
        self._samples: list[Any] = []  # memory of two samples, the newer one first
        self._last_s: float | None = None  # time of the last sample
        self._request = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(_GPM_METRICS)
        )
        for place, metric in enumerate(_GPM_METRICS):
            self._request.metrics[place].metricId = metric
        self._answers = [(self._request.metrics[place], name) for place, name in enumerate(_GPM_METRICS.values())]

    def open(self) -> None:
        self._last_s = None
        with suppress(pynvml.NVMLError):
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]

    def add_activities(self, gauges: dict[str, float], failures: dict[str, str], time_ns: int) -> None:
        """Add the activities since the last read to ``gauges``; the first read, and a read too soon, add nothing."""
        now_s = time_ns * NS
        if not self._samples or (self._last_s is not None and now_s - self._last_s < MIN_GPM_APART_S):
            return
        before, now = self._samples  # the older sample is overwritten
        try:
            if self._instance is None:
                pynvml.nvmlGpmSampleGet(self._handle, now)
            else:
                pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, now)
            is_first, self._last_s = self._last_s is None, now_s
            self._samples = [now, before]
            if not is_first:
                self._request.sample1, self._request.sample2 = before, now
                pynvml.nvmlGpmMetricsGet(self._request)
                for answer, name in self._answers:
                    percent = answer.value
                    if answer.nvmlReturn == pynvml.NVML_SUCCESS and 0.0 <= percent <= MAX_GPM_PERCENT:  # false for nan
                        gauges[name] = min(percent, 100.0) / 100
        except pynvml.NVMLError as error:
            failures["gpm"] = str(error)

    def close(self) -> None:
        for sample in self._samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []


def open_gpm(gpu: Any, mig_slice: Slice | None) -> Gpm | None:
    """Open the activities of a GPU or slice; ``None`` if NVML reports none, or not the GPU instance of the slice."""
    if mig_slice is not None and mig_slice.instance is None:
        return None
    with suppress(pynvml.NVMLError):
        if pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            gpm = Gpm(gpu, mig_slice.instance if mig_slice is not None else None)
            gpm.open()
            return gpm
    return None
