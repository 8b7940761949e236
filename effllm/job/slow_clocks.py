"""The time that low SM clocks cost, for GPUs with a reason: heat or hardware, or a lowered power limit. No I/O.

All ranks of synchronous training wait for the slowest rank.  So the slowest GPU with a reason sets the loss of a
window: its time with kernels is inversely proportional to its clock, and all ranks would save the difference.  Time
without kernels does not depend on the clock.  Where no iteration is profiled, and for the upper bound, all of the step
counts.

Memory-bound kernels hardly depend on the clock, so the loss is at most what times show, where they can: the own time of
the slow rank beside ranks without a reason, or else the iterations beside windows without a reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from effllm.job.account import Rows
from effllm.job.health.straggler_reasons import REASON_NAMES, mean_gauge
from effllm.records.rank import CLOCK_RATIO, Device, DeviceWindow, Profile, RankReport
from effllm.records.verdict import ClockLoss
from effllm.records.wire import Hello

THROTTLED, POWER_LIMIT, LOCKED = "throttled", "power_limit", "locked"
#: A reason counts if it holds for at least this share of the time.
MIN_REASON_SHARE = 0.2
#: A GPU with a reason for less than this share of the time has no reason.
FREE_SHARE = 0.01
#: A power limit is lowered below this share of the default limit.
LOWERED_BELOW = 0.98
#: In jobs of more than this number of ranks, every nth one is read for GPUs without a reason: less than twice as many.
MAX_OTHERS = 64
#: What times show is an estimate: its upper bound is this factor.
UNSURE = 1.25
#: Clocks are locked if all of them are below this share of the maximum, and the lowest is this share of the highest.
LOCKED_BELOW, STEADY = 0.9, 0.99
#: Windows without a reason from which on they are a base of comparison, and maximum number of kept windows.
MIN_USUAL, MAX_USUAL = 5, 128


class _SlowGpu(NamedTuple):
    """A GPU with a reason for a low clock, in one window of its rank."""

    row: RankReport
    window: DeviceWindow
    device: Device
    clock: float  # as a share of the maximum clock


class SlowClocks(Struct):
    """The losses of all windows so far, by reason."""

    by_cause: dict[str, ClockLoss] = {}  # THROTTLED or POWER_LIMIT -> loss
    free_clock: float = 0.0  # highest clock of a GPU without a reason so far, as a share of the maximum clock
    min_clock: float = 1.0  # lowest clock of such GPUs
    usual_s: list[float] = []  # iteration times of windows without a reason

    def add_window(self, rows: Rows, devices: Mapping[str, Device], hellos: Mapping[int, Hello]) -> None:
        """Add the loss of a window for each reason, by the slowest GPU with this reason."""
        slowest: dict[str, _SlowGpu] = {}
        slow_ranks: set[int] = set()  # with a reason
        for row in rows:
            for window in row.devices:
                if not window.throttled_s or row.iterations <= 0:
                    continue
                device = devices.get(window.device)
                cause = _cause(window, device) if device is not None else ""
                clock = _clock_share(window, device) if cause and device is not None else None
                if clock is not None and device is not None:
                    slow_ranks.add(row.rank)
                    if cause not in slowest or clock < slowest[cause].clock:
                        slowest[cause] = _SlowGpu(row, window, device, clock)
        free_clocks = list(_free_clocks(rows, devices, slow_ranks))
        max_clock = max(free_clocks, default=0.0)
        self.free_clock, self.min_clock = max(self.free_clock, max_clock), min([self.min_clock, *free_clocks])
        if not slowest and rows.max_iterations:
            self.usual_s = [*self.usual_s[1 - MAX_USUAL :], _iteration_s(rows[0])]
        for cause, gpu in slowest.items():
            hello = hellos.get(gpu.row.rank)
            text = _reason_text(cause, gpu, hello.host if hello is not None else "")
            longer_s = self._longer_s(gpu, rows, slow_ranks)
            self._add_loss(cause, gpu, max_clock or self.free_clock, len(rows), text, longer_s)

    def summary(self) -> dict[str, ClockLoss]:
        """Return the losses by reason; clocks that are always low and equal, without a reason, as `LOCKED`."""
        is_locked = self.min_clock >= STEADY * self.free_clock and 0.0 < self.free_clock < LOCKED_BELOW
        if not is_locked or self.by_cause or len(self.usual_s) < MIN_USUAL:
            return dict(self.by_cause)
        why = f"the SM clocks of all GPUs are locked at {100 * self.free_clock:.0f} % of the maximum"
        return {LOCKED: ClockLoss(0.0, -1, 0.0, f"{why}: nvidia-smi -q -d CLOCK")}

    def _longer_s(self, gpu: _SlowGpu, rows: Rows, slow_ranks: Collection[int]) -> float | None:
        """Return how much longer an iteration is for the slow GPU than without a reason; ``None`` if it is unknown."""
        others_s = [own_s for row in rows if row.rank not in slow_ranks and (own_s := _own_s(row)) is not None]
        own_s = _own_s(gpu.row)
        if others_s and own_s is not None:
            return own_s - statistics.median(others_s)
        if len(self.usual_s) < MIN_USUAL:
            return None
        own_share = own_s * gpu.row.iterations / gpu.row.busy_s if own_s is not None and gpu.row.busy_s else 1.0
        return own_share * (_iteration_s(gpu.row) - statistics.median(self.usual_s))

    def _add_loss(
        self, cause: str, gpu: _SlowGpu, free_clock: float, num_ranks: int, why: str, longer_s: float | None
    ) -> None:
        """Add what the slowest GPU costs all ranks, beside a clock without a reason (0 if no GPU has one)."""
        # Without a GPU that has no reason, the clock is at least that of the peak, and at most the maximum.
        peak_clock = (gpu.device.sm_clock_reference_hz or 0.0) / (gpu.device.sm_clock_max_hz or 1.0) or 1.0
        max_clock = 1.0
        if cause == POWER_LIMIT:  # the clock rises at most in proportion to the power
            max_clock = gpu.clock * (gpu.device.power_limit_default_w or 0.0) / _limit_w(gpu)
        row = gpu.row
        own_s = row.own_step_s if row.own_steps == row.iterations else row.busy_s
        lost_share, max_lost_share = (
            max(1.0 - gpu.clock / min(clock, max_clock), 0.0) for clock in (free_clock or peak_clock, free_clock or 1.0)
        )
        max_seconds = num_ranks * row.busy_s * max_lost_share
        seconds = _kernel_share(row.profile) * num_ranks * row.busy_s * lost_share
        if longer_s is not None:
            # A rank that is slow before its first wait for other ranks is slow after it too.
            by_times_s = max(num_ranks * longer_s * row.iterations, 0.0) * row.busy_s / own_s
            seconds, max_seconds = min(seconds, by_times_s), min(max_seconds, UNSURE * by_times_s)
        if seconds <= 0:
            return
        earlier = self.by_cause.get(cause)
        added = ClockLoss(seconds, row.rank, seconds, why, max_seconds)
        if earlier is not None:
            worst = added if seconds > earlier.worst_rank_seconds else earlier
            sum_s, max_sum_s = earlier.rank_seconds + seconds, earlier.max_rank_seconds + max_seconds
            added = replace(worst, rank_seconds=sum_s, max_rank_seconds=max_sum_s)
        self.by_cause[cause] = added


def _own_s(row: RankReport) -> float | None:
    """Return the time of an iteration until a rank waits for others, on the device if it is known there."""
    if row.device_own_steps:
        return row.device_own_step_s / row.device_own_steps
    return row.own_step_s / row.own_steps if row.own_steps else None


def _iteration_s(row: RankReport) -> float:
    return row.busy_s / row.iterations if row.iterations else 0.0


def _cause(window: DeviceWindow, device: Device, min_share: float = MIN_REASON_SHARE) -> str:
    """Return the reason of a low clock that holds for at least this share of the time, or an empty string."""
    min_s = min_share * window.throttle_covered_s
    if window.throttled_s.get("any", 0.0) >= min_s > 0:
        return THROTTLED
    if window.throttled_s.get("power_cap", 0.0) < min_s or not device.power_limit_default_w:
        return ""
    limit_w = mean_gauge(window, "power_limit_w") or device.power_limit_w
    return POWER_LIMIT if limit_w and limit_w < LOWERED_BELOW * device.power_limit_default_w else ""


def _clock_share(window: DeviceWindow, device: Device) -> float | None:
    """Return the mean SM clock in iterations as a share of the maximum clock; ``None`` without a clock above 0."""
    ratio = mean_gauge(window, CLOCK_RATIO)
    if not ratio or ratio < 0 or not device.sm_clock_reference_hz or not device.sm_clock_max_hz:
        return None
    return min(ratio * device.sm_clock_reference_hz / device.sm_clock_max_hz, 1.0)


def _free_clocks(rows: Sequence[RankReport], devices: Mapping[str, Device], slow_ranks: set[int]) -> Iterator[float]:
    """Yield the clocks of GPUs without a reason, in large jobs of every nth rank."""
    for row in rows[:: max(len(rows) // MAX_OTHERS, 1)]:
        for window in row.devices if row.rank not in slow_ranks and row.iterations > 0 else ():
            device = devices.get(window.device)
            if device is None or not device.is_gpu or (window.throttled_s and _cause(window, device, FREE_SHARE)):
                continue
            if (clock := _clock_share(window, device)) is not None:
                yield clock


def _kernel_share(profile: Profile | None) -> float:
    """Return the share of kernels in the time without waits in profiled iterations; 1, its bound, without a profile."""
    if profile is None or profile.time_s <= profile.exposed_s:
        return 1.0
    return min(profile.computing_s / (profile.time_s - profile.exposed_s), 1.0)


def _limit_w(gpu: _SlowGpu) -> float:
    return mean_gauge(gpu.window, "power_limit_w") or gpu.device.power_limit_w or float("inf")


def _reason_text(cause: str, gpu: _SlowGpu, host: str) -> str:
    rank = f"rank {gpu.row.rank} ({host})" if host else f"rank {gpu.row.rank}"
    max_hz = gpu.device.sm_clock_max_hz or 0.0
    clock = f"SM clock {gpu.clock * max_hz / 1e9:.2f} GHz, maximum {max_hz / 1e9:.2f}"
    if cause == POWER_LIMIT:
        limits = f"power limit {_limit_w(gpu):.0f} W, default {gpu.device.power_limit_default_w:.0f}"
        return f"{rank}: {limits}; {clock}"
    reasons = {name: seconds for name, seconds in gpu.window.throttled_s.items() if name not in ("any", "power_cap")}
    worst = max(reasons, key=lambda name: reasons[name], default="")
    return f"{rank}: {REASON_NAMES.get(worst, worst.replace('_', ' ')) or 'throttled'}; {clock}"
