"""Energy of the devices of this rank between any two times, measured by the rank's agent.

The monitor runs in the training process, but reads no device: it requests spans of time, and reads the answers of the
agent from shared memory. The monitor has no thread, and its calls wait only if an argument requests a wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from effllm.instruments._device import cuda_index, parse_device, torch_cuda
from effllm.instruments._energy import BYTES_PER_MB, J_PER_WH, Baseline, SpanReadings, checked, energy_amounts
from effllm.instruments._number import UserWarnings
from effllm.records.clock import unix_minus_monotonic_ns
from effllm.records.plain_text import one_line
from effllm.trainer.collector import MetricsCollector, get_metrics_collector
from effllm.trainer.session import wait_until
from effllm.trainer.spans import SpanChain

Facts = Sequence[Mapping[str, Any]]  # of each device of the rank, as the agent publishes them

BASELINE_S = 5.0
MIN_BASELINE_S = 0.2  # with less covered time, there is no baseline
MAX_KEPT = 10_000  # number of newest spans kept for `get_metrics_since_timestamp`; the total has all spans
MAX_MARKERS = 1000
FEW_SPANS = 10  # if more spans than this have no energy, a warning gives the reason
ANSWER_S = 2.0  # maximum wait for the last answers after the end of the monitoring
_NEAR_NS = 20_000_000  # a span that began this long before a timestamp counts as a span after the timestamp


class MonitoredDevices:
    """The devices that a monitor was asked for; the argument is that of `RobustGPUMonitor`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._is_cpu, self._index = parse_device(device)  # torch's index of a GPU; None: all
        self._shares_gpu = False  # whether torch has one GPU, which several ranks may share
        if self._index is not None:  # without an index, torch would start CUDA to return its current device
            cuda_index(device)
            cuda = torch_cuda()
            self._shares_gpu = cuda is not None and cuda.device_count() == 1

    def positions(self, facts: Facts) -> list[int]:
        """Return the positions in ``facts`` of the devices to measure; power sensors of the node are left out.

        Without a GPU, the sensors of the host are measured for any device, as by the other instruments. They do not
        stand for a GPU that cannot be read, if this GPU was asked for.
        """
        measured = [n for n, device in enumerate(facts) if device and not device.get("only_power")]
        gpus = [n for n in measured if facts[n].get("is_gpu")]
        if self._device is None:
            return measured
        if self._is_cpu or not gpus:
            has_unread_gpu = not self._is_cpu and any(_reasons_about_gpus(facts[n]) for n in measured)
            return [] if has_unread_gpu else [n for n in measured if n not in gpus]
        if self._index is None or self._shares_gpu:
            return gpus
        return [n for n in gpus if facts[n].get("torch_index") == self._index]

    def names(self, facts: Facts) -> str:
        return ", ".join(dict.fromkeys(str(facts[n].get("name", "")) for n in self.positions(facts)))

    def why_unmeasured(self, facts: Facts, unavailable: Sequence[str]) -> str:
        """Return why no energy was measured, in one line."""
        chosen = self.positions(facts)
        measured = [device for device in facts if device and not device.get("only_power")]
        if not chosen and not measured:
            return one_line("; ".join(unavailable)) or "this rank has no device that effllm can read"
        if not chosen:
            texts = [text for device in measured for text in _reasons_about_gpus(device)]
            names = ", ".join(dict.fromkeys(_name_with_index(device) for device in measured))
            return one_line(texts[0] if texts else f"device={self._device!r} was requested; the agent reads {names}")
        unmeasured = [str(text) for n in chosen for text in facts[n].get("not_measured", ())]
        # A reason about the GPU comes first, because it explains why the sensors of the host were read.
        reasons = [text for n in chosen for text in _reasons_about_gpus(facts[n])]
        reasons += [text for text in unmeasured if "energy" in text]
        unknown = f"{self.names(facts)} has no reading of energy here"
        return one_line(reasons[0].removeprefix("energy: ") if reasons else unknown)


def _reasons_about_gpus(device: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the agent reads this device in place of a GPU."""
    return [str(text) for text in device.get("not_measured", ()) if str(text).startswith("GPU")]


def _name_with_index(device: Mapping[str, Any]) -> str:
    index = device.get("torch_index")
    return f"{device.get('name')} (cuda:{index})" if index is not None else str(device.get("name"))


@dataclass
class EnergyMetrics:
    """The energy of a span of time; a value that was not measured is ``nan``."""

    timestamp: float  # end of the span, in unix time
    step: int
    epoch: float
    power_avg_w: float
    power_max_w: float  # with several devices, the sum of the devices' maxima
    power_min_w: float
    energy_consumed_wh: float  # total energy; the energy above the baseline is a separate value
    temperature_avg_c: float
    temperature_max_c: float
    utilization_avg_percent: float
    memory_used_avg_mb: float  # 1 MB = 1,000,000 bytes
    gpu_name: str
    duration_s: float
    samples_count: int  # number of power readings


class RobustGPUMonitor:
    """Measures the energy of this rank's devices with the rank's agent, and starts an agent if no run is active.

    Args:
        sampling_interval: seconds between samples, if the monitor starts the agent; by default the setting
            ``EFFICIENTLLM_COLLECTION_INTERVAL``. A running agent keeps its interval. The energy at the edges of a span
            does not depend on the interval, because the agent reads the energy counter at each edge.
        enable_high_precision: measure the baseline, which is the mean power in the 5 s before the first span, or before
            the first step of a training. Only samples that exist are used; nothing waits. Such samples exist if the
            monitor is started some seconds before the training.
        baseline_wait_s: seconds that `start_monitoring` waits for samples of the baseline.
        device: an index, ``"cuda:1"`` or ``"cpu"``, as torch names the only device to measure; by default all GPUs of
            this rank, or the host's processors on a machine without a GPU. A device that the agent of this rank does
            not read is not measured, and a warning gives the reason.

    Raises:
        ValueError: an argument is not valid.
        UnknownDevice: the device cannot exist; this is a `ValueError`.
    """

    def __init__(
        self,
        sampling_interval: float | None = None,
        enable_high_precision: bool = True,
        *,
        baseline_wait_s: float = 0.0,
        device: Any = None,
    ) -> None:
        self._interval_s = None
        if sampling_interval is not None:
            self._interval_s = checked(sampling_interval, "sampling_interval", lambda s: s > 0, "a number above 0")
        self._baseline_wait_s = checked(baseline_wait_s, "baseline_wait_s", lambda s: 0 <= s <= 60, "from 0 to 60")
        self._devices = MonitoredDevices(device)
        self._has_baseline = bool(enable_high_precision)
        self._collector: MetricsCollector = get_metrics_collector()
        self._chain: SpanChain | None = None
        self.is_monitoring = False  #: whether the monitor was started and not stopped
        self._owns_agent = False  # whether this monitor started the agent
        self._begin_ns = 0  # of the first span, on the monotonic clock
        self._baseline_requests: set[int] = set()  # numbers of the spans of which the baseline is taken
        self._spans: deque[SpanReadings] = deque(maxlen=MAX_KEPT)  # the newest answered spans
        self._untaken: deque[SpanReadings] = deque(maxlen=MAX_KEPT)  # those that `take` has not returned yet
        self._warn_once = UserWarnings()
        self.baseline = Baseline()
        self.total = SpanReadings()  #: the readings of all spans with an answer
        self.markers: deque[dict[str, Any]] = deque(maxlen=MAX_MARKERS)

    # --- start and stop ---

    @property
    def lost(self) -> int:
        """Number of spans whose readings were lost, because the requests were not answered in time."""
        return self._chain.num_lost if self._chain is not None else 0

    def start_monitoring(self) -> bool:
        """Begin the first span; ``False`` if no energy can be measured. A second start does nothing."""
        if self.is_monitoring:
            return True
        if not self._collector.is_collecting:
            self._collector.lifecycle.configure(self._interval_s)
            self._collector.start_collection()
            self._owns_agent = self._collector.is_collecting
        if self._baseline_wait_s:
            time.sleep(self._baseline_wait_s)
        chain = SpanChain(self._collector.lifecycle)
        if not chain.begin():
            self._warn_once("energy is not measured: no agent of effllm runs in this process")
            return False
        self._chain, self.is_monitoring = chain, True
        self._spans.clear()
        self._untaken.clear()
        self._baseline_requests.clear()
        self.markers.clear()
        self.total, self.baseline = SpanReadings(), Baseline()
        self._begin_ns = chain.last_end_ns
        self.measure_baseline()
        return True

    def stop_monitoring(self, wait_s: float = ANSWER_S) -> EnergyMetrics:
        """End the last span; return the energy since the start.

        Args:
            wait_s: maximum wait for the last answers of the agent.
        """
        if self._chain is None or not self.is_monitoring:
            return self.metrics(self.total)
        self._chain.end_span()
        self.wait(wait_s)
        if self._owns_agent:
            self._collector.stop_collection()
            self._read_answers()
            self._owns_agent = False
        self.warn_if_unmeasured()
        self.is_monitoring = False
        return self.metrics(replace(self.total, start_ns=self._begin_ns, end_ns=self._chain.last_end_ns))

    # --- spans ---

    def cut_span(self) -> int:
        """End the running span and begin the next; return the number of the ended span, 0 without an agent."""
        return self._chain.end_span() if self._chain is not None and self.is_monitoring else 0

    def take_spans(self) -> list[SpanReadings]:
        """Return the readings of newly answered spans, oldest first, without waiting."""
        self._read_answers()
        answered = list(self._untaken)
        self._untaken.clear()
        return answered

    def _read_answers(self) -> None:
        """Add the readings of newly answered spans to the total, or take them as the baseline."""
        spans = self._chain.take_answers() if self._chain is not None else []
        chosen = self._devices.positions(self._device_facts) if spans else []
        for span in spans:
            parts = (part for part in span.parts if part.device in chosen)
            readings = SpanReadings.of(parts, span.start_ns, span.end_ns, span.number)
            if span.number in self._baseline_requests:
                self.baseline = Baseline.of(readings, MIN_BASELINE_S)
                continue
            self.total = self.total.then(readings)
            self._spans.append(readings)
            self._untaken.append(readings)
        if len(self._spans) > FEW_SPANS:
            self.warn_if_unmeasured()

    def measure_baseline(self) -> None:
        """Request the mean power in the last 5 s, from the samples that exist; nothing waits."""
        if self._chain is not None and self._has_baseline:
            end_ns = time.monotonic_ns()
            self._baseline_requests.add(self._chain.request_past_span(max(end_ns - int(BASELINE_S * 1e9), 1), end_ns))

    def wait(self, wait_s: float) -> None:
        """Wait for the answers of all requested spans, at most ``wait_s``; for use after the training."""
        wait_until(wait_s, self._has_all_answers)

    def _has_all_answers(self) -> bool:
        if self._chain is None or not self._collector.is_collecting:
            return True
        self._read_answers()
        return not self._chain.num_unanswered

    def add_sync_marker(self, name: str) -> float:
        """End the running span and begin the next span at the current time; return this time as unix time."""
        self.cut_span()
        edge_ns = self._chain.last_end_ns if self._chain is not None else time.monotonic_ns()
        edge_unix_s = unix_s(edge_ns)
        self.markers.append({"name": str(name), "timestamp": edge_unix_s})
        return edge_unix_s

    def get_metrics_since_timestamp(self, timestamp: float, wait_s: float = 0.0) -> EnergyMetrics:
        """Return the energy of the answered spans since a time; this call ends the running span and begins the next.

        Args:
            timestamp: unix time; the energy is exact if a span begins at this time, as after a marker or a call of this
                method. A span that began before this time is left out.
            wait_s: maximum wait for the agent's answer; without a wait, the newest span is usually missing, and
                ``duration_s`` is shorter by this span.
        """
        self.cut_span()
        if wait_s > 0:
            self.wait(wait_s)
        self._read_answers()
        since_ns = int(timestamp * 1e9) - unix_minus_monotonic_ns() - _NEAR_NS
        combined = SpanReadings()
        for readings in self._spans:
            if readings.start_ns >= since_ns:
                combined = combined.then(readings)
        return self.metrics(combined)

    def metrics(self, readings: SpanReadings, step: int = 0, epoch: float = 0.0) -> EnergyMetrics:
        return EnergyMetrics(
            timestamp=unix_s(readings.end_ns) if readings.end_ns else time.time(),
            step=step,
            epoch=epoch,
            power_avg_w=readings.power_w,
            power_max_w=readings.power_max_w,
            power_min_w=readings.power_min_w,
            energy_consumed_wh=readings.joules / J_PER_WH,
            temperature_avg_c=readings.temperature_c,
            temperature_max_c=readings.temperature_max_c,
            utilization_avg_percent=readings.utilization * 100.0,
            memory_used_avg_mb=readings.memory_bytes / BYTES_PER_MB,
            gpu_name=self.device_name,
            duration_s=readings.duration_s,
            samples_count=readings.num_readings,
        )

    # --- devices ---

    @property
    def device_name(self) -> str:
        """Names of the measured devices; empty before the first answer."""
        return self._devices.names(self._device_facts)

    def summary(self) -> dict[str, Any]:
        """Return the total, the baseline, the devices and the markers, for a JSON file."""
        return {
            "devices": [self._device_facts[n] for n in self._devices.positions(self._device_facts)],
            **energy_amounts(self.total, self.baseline),
            "baseline_power_w": self.baseline.power_w,
            "baseline_error_w": self.baseline.error_w,
            "baseline_covered_s": self.baseline.covered_s,
            "lost_spans": self.lost,
            "markers": list(self.markers),
        }

    @property
    def _device_facts(self) -> list[dict[str, Any]]:
        return self._chain.devices if self._chain is not None else []

    def warn_if_unmeasured(self) -> None:
        """Warn once with the reason, if spans were answered and no energy was measured."""
        if self._spans and not self.total.is_measured:
            unavailable = self._chain.unavailable if self._chain is not None else []
            self._warn_once(f"energy is not measured: {self._devices.why_unmeasured(self._device_facts, unavailable)}")


def unix_s(monotonic_ns: int) -> float:
    """Return a monotonic time as unix time, with the present offset between the two clocks."""
    return (monotonic_ns + unix_minus_monotonic_ns()) * 1e-9
