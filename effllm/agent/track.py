"""One device of a rank: its sampler and the series of its samples."""

from __future__ import annotations

from msgspec.structs import replace

from effllm.agent.sampler import Sampler
from effllm.agent.series import Series
from effllm.records.rank import Device, Event, Sample

MAX_GAP_INTERVALS = 5
MIN_INTERVAL_S = 0.2
#: Devices with a longer interval are not read at edges, because their values also change rarely.
MAX_EDGE_INTERVAL_S = 2.0
#: Timeout of the samples for an edge.
EDGE_WAIT_S = 1.0
#: After this time a slow device is read for an edge that no later reading has settled; then another second may pass, so
#: that the window is closed before the aggregator's shortest deadline of 5 s.
FORCE_AFTER_S = 2.0


class DeviceTrack:
    """A sampler, and the series of its samples, which are ``interval_s`` apart."""

    def __init__(self, sampler: Sampler, interval_s: float) -> None:
        self.sampler = sampler
        self._is_read_at_edges = interval_s <= MAX_EDGE_INTERVAL_S
        self.series: Series | None = None  # None until the device is open
        self._max_gap_s = MAX_GAP_INTERVALS * max(interval_s, MIN_INTERVAL_S)
        self._requested_ns = 0  # last requested edge
        self._forced_ns = 0  # last edge for which a reading was made in any case
        self._is_stale = False
        self._is_calibration_requested = False

    def take_samples(self) -> bool:
        """Take new samples; return whether the device was opened or calibrated."""
        has_changed = False
        if self.series is not None and self.sampler.slow_interval_s is not None:
            self.series.allow_gap(MAX_GAP_INTERVALS * self.sampler.slow_interval_s)
        for item in self.sampler.take_samples():
            if self.series is None and self.sampler.device is not None:
                self.series = Series(self.sampler.device, self._max_gap_s)
                has_changed = True
            if isinstance(item, Sample) and self.series is not None:
                self.series.add_sample(item)
            elif isinstance(item, Device) and self.series is not None:
                self.series.set_calibration(item)
                has_changed = True
        return has_changed

    def calibrate_once(self) -> None:
        """Request the calibration of the device's sensor, at the first call with an open device."""
        if self.series is not None and not self._is_calibration_requested:
            self._is_calibration_requested = True
            self.sampler.request_calibration()

    @property
    def patience_s(self) -> float:
        """Seconds after an edge for which a window waits for a sample: a slow device is not read at each edge."""
        slow_s = max(self.sampler.driver.edge_apart_s, self.sampler.slow_interval_s or 0.0)
        return EDGE_WAIT_S + (min(slow_s, FORCE_AFTER_S + EDGE_WAIT_S) if self._is_read_at_edges else 0.0)

    def request_samples(self, edge_ns: int, *, is_forced: bool = False) -> None:
        """Request the samples for an edge, once per edge; edges must be in ascending order.

        ``is_forced``: a reading is made in any case, because this edge is the last one or has waited for long.
        """
        if edge_ns <= (self._forced_ns if is_forced else self._requested_ns) or not self._is_read_at_edges:
            return
        self._forced_ns = edge_ns if is_forced else self._forced_ns
        since_s = (edge_ns - self._requested_ns) * 1e-9 if self._requested_ns else 1.0
        self._requested_ns = max(edge_ns, self._requested_ns)
        times = self.series.energy.timing.reads_for(edge_ns) if self.series else [edge_ns]
        self.sampler.request_samples(times, since_s=max(since_s, 0.0), is_forced=is_forced)

    def is_settled(self, edge_ns: int) -> bool:
        """Whether the value at an edge is final, or the device is stale."""
        if self.series is None:
            return True
        if self.sampler.is_calibrating and self.sampler.stale_s() is None:
            return False  # values from before and after a calibration are not consistent
        return self.series.is_settled(edge_ns) or self.sampler.stale_s() is not None

    def measure_baseline(self, start_ns: int, end_ns: int) -> bool:
        """Measure the idle power in a period before the first iteration; ``False`` if later samples are needed."""
        if self.series is None or not self.is_settled(end_ns):
            return False
        idle = self.series.integrals(start_ns, end_ns).energy
        if idle.joules is not None:
            self.series.device = replace(self.series.device, baseline_w=idle.joules / idle.covered_s)
        return True

    def take_events(self, now_ns: int, time_s: float) -> list[Event]:
        """Return the events of the device since the last call; the times are now, monotonic and unix time."""
        events = []
        if self.series is not None:
            sample_time_s = time_s - max(now_ns - self.series.newest_ns, 0) * 1e-9
            events, self.series.events = [*self.series.events, *self.series.energy.take_events(sample_time_s)], []
        stale_s, was_stale = self.sampler.stale_s(), self._is_stale
        self._is_stale = stale_s is not None
        key = self.series.device.key if self.series else None
        name = key or "the device"
        if stale_s is not None and not was_stale:
            text = f"{name} is stale: a read has not returned for {stale_s:.0f} s"
            events.append(Event(time_s, "stale", text))
        elif was_stale and stale_s is None:
            events.append(Event(time_s, "stale", f"{name} answers again"))
        return [
            replace(event, text=event.text if name in event.text else f"{name}: {event.text}", device=key)
            for event in events
        ]
