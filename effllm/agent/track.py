"""One device of a rank: its sampler and the series of its samples."""

from __future__ import annotations

from msgspec.structs import replace

from effllm.agent.sampler import Sampler
from effllm.agent.series import Series
from effllm.records.rank import Device, Event, Sample

MAX_GAP_INTERVALS = 5
MIN_INTERVAL_S = 0.2
#: Devices with a longer interval are not read at edges, because their values also change rarely.
MAX_PROMPT_S = 2.0
#: Timeout of the samples for an edge.
EDGE_WAIT_S = 1.0
#: After this time a slow device is read for an edge that no later reading has settled; then another second may pass, so
#: that the window is closed before the aggregator's shortest deadline of 5 s.
PAY_AFTER_S = 2.0


class DeviceTrack:
    """A sampler, and the series of its samples.

    Args:
        sampler: reads the device.
        interval_s: seconds between samples.
    """

    def __init__(self, sampler: Sampler, interval_s: float) -> None:
        self.sampler = sampler
        self._is_prompt = interval_s <= MAX_PROMPT_S
        self.series: Series | None = None  # None until the device is open
        self._max_gap_s = MAX_GAP_INTERVALS * max(interval_s, MIN_INTERVAL_S)
        self._asked_ns = 0  # last requested edge
        self._paid_ns = 0  # last edge for which a reading was made in any case
        self._is_stale = False
        self._has_learnt = False

    def take_samples(self) -> bool:
        """Take new samples; return whether the device was opened or calibrated."""
        is_new = False
        if self.series is not None and self.sampler.slowed_s is not None:
            self.series.allow_gap(MAX_GAP_INTERVALS * self.sampler.slowed_s)
        for item in self.sampler.take_samples():
            if self.series is None and self.sampler.device is not None:
                self.series = Series(self.sampler.device, self._max_gap_s)
                is_new = True
            if isinstance(item, Sample) and self.series is not None:
                self.series.add_sample(item)
            elif isinstance(item, Device) and self.series is not None:
                self.series.calibrate(item)
                is_new = True
        return is_new

    def learn(self) -> None:
        """Calibrate the device's sensor, once."""
        if self.series is not None and not self._has_learnt:
            self._has_learnt = True
            self.sampler.learn()

    @property
    def patience_s(self) -> float:
        """Seconds after an edge until a sample must have come: a slow device is not read at each edge."""
        slow_s = max(self.sampler.driver.edge_apart_s, self.sampler.slowed_s or 0.0)
        return EDGE_WAIT_S + (min(slow_s, PAY_AFTER_S + EDGE_WAIT_S) if self._is_prompt else 0.0)

    def ask(self, edge_ns: int, *, is_last: bool = False) -> None:
        """Request the samples for an edge, once per edge; edges must be in ascending order.

        ``is_last``: a reading is made in any case, because this edge is the last one or has waited for long.
        """
        if edge_ns <= (self._paid_ns if is_last else self._asked_ns) or not self._is_prompt:
            return
        self._paid_ns = edge_ns if is_last else self._paid_ns
        since_s = (edge_ns - self._asked_ns) * 1e-9 if self._asked_ns else 1.0
        self._asked_ns = max(edge_ns, self._asked_ns)
        times = self.series.energy.timing.reads_for(edge_ns) if self.series else [edge_ns]
        self.sampler.ask(times, within_s=max(since_s, 0.0), is_last=is_last)

    def is_settled(self, edge_ns: int) -> bool:
        """Whether the value at an edge is final, or the device is stale."""
        if self.series is None:
            return True
        if self.sampler.is_calibrating and self.sampler.stale_s() is None:
            return False  # values from before and after a calibration are not consistent
        return self.series.is_settled(edge_ns) or self.sampler.stale_s() is not None

    def note_baseline(self, start_ns: int, end_ns: int) -> bool:
        """Measure the idle power in a period before the first iteration; ``False`` if later samples are needed."""
        if self.series is None or not self.is_settled(end_ns):
            return False
        idle = self.series.integrals(start_ns, end_ns).energy
        if idle.joules is not None:
            self.series.device = replace(self.series.device, baseline_w=idle.joules / idle.covered_s)
        return True

    def take_events(self, now_ns: int, time_s: float) -> list[Event]:
        """Return the events of the device since the last call.

        Args:
            now_ns: current monotonic time.
            time_s: current unix time.
        """
        events = []
        if self.series is not None:
            events = self.series.take_events(time_s - max(now_ns - self.series.newest_ns, 0) * 1e-9)
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
            replace(one, text=one.text if name in one.text else f"{name}: {one.text}", device=key) for one in events
        ]
