"""Rows of ranks to the totals of the cluster, pure: each token, joule and second counted once.

A device is known by its key alone, so one that several ranks sit on enters once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from effllm.energy_account import EnergySums, Stretch, WindowEnergy, stretch_of, sum_of
from effllm.power_scope import Scope
from effllm.schema import GAUGES, NODE_PSU, ClusterTotals, Device, DeviceWindow, Integrals, Profile, RankReport
from effllm.window import add_profiles, iterations_only

#: Coverage is a quotient of sums of floats; this much below is still full.
ROUNDING = 1e-6


class MergedDevice(Struct, frozen=True):
    """What one device did in one window, from the rows of all ranks that sit on it."""

    device: Device
    wall: Integrals
    iterations: Integrals
    phases_j: dict[str, float | None]
    span_s: float  # of the row that its energy is from
    memory_peak_bytes: float | None
    window: DeviceWindow  # of that row

    @property
    def is_measured(self) -> bool:
        """Whether anything of it was measured."""
        return self.wall.memory_covered_s + self.wall.utilization_covered_s + self.wall.energy_covered_s > 0

    @property
    def energy_coverage(self) -> float:
        """Share of its span in which its energy was measured."""
        return min(self.wall.energy_covered_s / self.span_s, 1.0) if self.span_s > 0 else 0.0


def merge_devices(
    rows: Sequence[RankReport], devices: Mapping[str, Device], members: Mapping[str, set[int]]
) -> dict[str, MergedDevice]:
    """Return each device of a window once.

    Whole-device readings are taken from the rank that covers most of its row, of equals from the first: one
    and the same from window to window, whose rows meet.  Shares of a shared device add up, and with a rank
    missing they are not measured, for a sum with a hole in it is not a sum.

    Args:
        rows: the window's rows.
        devices: every known device by its key.
        members: the ranks that sit on each device.
    """
    seen: dict[str, list[tuple[RankReport, DeviceWindow]]] = {}
    for row in rows:
        for one in row.devices:
            seen.setdefault(one.device, []).append((row, one))
    return {key: _merge(pairs, devices[key], members.get(key, set())) for key, pairs in seen.items() if key in devices}


def _merge(pairs: list[tuple[RankReport, DeviceWindow]], device: Device, members: set[int]) -> MergedDevice:
    row, best = min(pairs, key=lambda pair: (*_least_covered(*pair), pair[0].rank))
    peaks = [one.memory_peak_bytes for _, one in pairs if one.memory_peak_bytes is not None]
    wall, iterations = best.wall, iterations_only(best)
    if device.shared:
        whole = members <= {row.rank for row, _ in pairs}
        wall = _add_shares(wall, [one.wall for _, one in pairs], whole)
        iterations = _add_shares(iterations, [iterations_only(one) for _, one in pairs], whole)
        peaks = [sum(peaks)] if whole and len(peaks) == len(pairs) else []
    return MergedDevice(
        device=device,
        wall=wall,
        iterations=iterations,
        phases_j={name: part.energy_j for name, part in best.phases.items()},
        span_s=row.wall_s,
        memory_peak_bytes=max(peaks, default=None),
        window=best,
    )


def _least_covered(row: RankReport, one: DeviceWindow) -> tuple[float, float]:
    """Return the uncovered shares of a row, without the digits in which equal ones differ by rounding."""
    covered = one.wall.energy_covered_s, one.wall.memory_covered_s
    energy, memory = (round(1 - seconds / row.wall_s, 5) if row.wall_s > 0 else 1.0 for seconds in covered)
    return energy, memory


def _add_shares(best: Integrals, shares: Sequence[Integrals], whole: bool) -> Integrals:
    memory = [(share.memory_byte_seconds, share.memory_covered_s) for share in shares]
    utilization = [(share.utilization_seconds, share.utilization_covered_s) for share in shares]
    memory_sum, memory_s = _sum_of_means(memory) if whole else (None, 0.0)
    utilization_sum, utilization_s = _sum_of_means(utilization) if whole else (None, 0.0)
    return replace(
        best,
        memory_byte_seconds=memory_sum,
        memory_covered_s=memory_s,
        utilization_seconds=utilization_sum,
        utilization_covered_s=utilization_s,
    )


def _sum_of_means(shares: Sequence[tuple[float | None, float]]) -> tuple[float | None, float]:
    # The rows of the ranks span slightly different stretches, so their means add up, not their integrals.
    covered_s = min(seconds for _, seconds in shares)
    if covered_s <= 0:
        return None, 0.0
    return sum((value or 0.0) / seconds for value, seconds in shares) * covered_s, covered_s


def window_energy(
    merged: Mapping[str, MergedDevice],
    devices: Mapping[str, Device],
    absent: int,
    blind: int = 0,
    scope: Scope | None = None,
) -> WindowEnergy:
    """Return the energy of a window and how much of it was measured.

    Args:
        merged: the window's devices.
        devices: every device that the window should hold.
        absent: ranks of which nothing is known.
        blind: ranks without a device, though they are there.
        scope: whose energy is the job's; ``None`` for that of all devices.
    """
    in_scope = [key for key in devices if scope is None or key in scope.keys]
    lacking = absent + (scope.lacking if scope else 0) + (0 if scope and scope.choice == NODE_PSU else blind)
    is_measurable = any(device.energy_method for device in devices.values()) if scope is None else bool(scope.label)
    shown = _shown(merged, devices, in_scope)
    measured = {owner: one for owner, one in shown.items() if one is not None and one.wall.energy_j is not None}
    wall = {owner: stretch_of(one.device, one.wall) for owner, one in measured.items()}
    iterations = {owner: stretch_of(one.device, one.iterations) for owner, one in measured.items()}
    phases_j: dict[str, float] = {}
    for one in measured.values():
        for name, joules in one.phases_j.items():
            phases_j[name] = phases_j.get(name, 0.0) + (joules or 0.0)
    gpus = _shown(merged, devices, [key for key, device in devices.items() if device.is_gpu])
    return WindowEnergy(
        coverage=_coverage(shown, merged, lacking) if is_measurable else None,
        wall=sum_of(wall),
        iterations=sum_of(iterations),
        phases_j=phases_j,
        by_device=wall,
        gpus_coverage=_coverage(gpus, merged, absent + blind) if gpus else None,
        gpus_wall_j=sum(one.wall.energy_j or 0.0 for one in gpus.values() if one),
        gpus_iterations_j=sum(one.iterations.energy_j or 0.0 for one in gpus.values() if one),
    )


def _shown(
    merged: Mapping[str, MergedDevice], devices: Mapping[str, Device], keys: Iterable[str]
) -> dict[str, MergedDevice | None]:
    """Return whose energy is to be measured, each once, and the device that shows it best in this window."""
    shown: dict[str, MergedDevice | None] = {}
    for key in sorted(keys):
        owner, one = devices[key].energy_key or key, merged.get(key)
        best = shown.setdefault(owner, one)
        if one is not None and (best is None or one.energy_coverage > best.energy_coverage + ROUNDING):
            shown[owner] = one
    return shown


def _coverage(shown: Mapping[str, MergedDevice | None], merged: Mapping[str, MergedDevice], lacking: int) -> float:
    """Return measured over expected device-seconds."""
    if not merged:
        return 0.0
    span_s = max(one.span_s for one in merged.values())
    expected_s = sum(one.span_s if one else span_s for one in shown.values()) + lacking * span_s
    covered_s = sum(one.energy_coverage * one.span_s for one in shown.values() if one)
    return covered_s / expected_s if expected_s > 0 else float(span_s <= 0)  # of no time nothing is missing


def is_covered(coverage: float | None, least: float) -> bool:
    """Whether a window's energy may enter sums."""
    return coverage is not None and coverage >= least - ROUNDING


class RankSums(Struct):
    """The running sums of one rank."""

    iterations: int = 0
    time_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    energy_time_s: float = 0.0  # of the windows whose energy is in the sum
    generation_s: float = 0.0
    device_steps: int = 0
    device_step_s: float = 0.0


class DeviceSums(Struct):
    """The running sums of one device."""

    memory_byte_seconds: float = 0.0
    memory_covered_s: float = 0.0
    memory_peak_bytes: float | None = None
    utilization_seconds: float = 0.0
    utilization_covered_s: float = 0.0


class GaugeSums(Struct):
    """The running sums of a gauge, over all GPUs that have it."""

    value_seconds: float = 0.0
    covered_s: float = 0.0
    most: float | None = None

    @property
    def mean(self) -> float | None:
        """Mean over time and devices."""
        return self.value_seconds / self.covered_s if self.covered_s > 0 else None


class Account(Struct):
    """The running sums of a job on one time base.

    ``wall`` chooses the base: the whole wall time of the rows, or their iterations alone.
    """

    wall: bool = False
    ranks: dict[int, RankSums] = {}
    devices: dict[str, DeviceSums] = {}
    tokens: int = 0
    tokens_processed: int = 0
    tokens_loss: int = 0
    samples: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    profile: Profile | None = None
    energy: EnergySums = msgspec.field(default_factory=EnergySums)  # of the covered windows
    energy_tokens: int = 0
    energy_samples: int = 0
    energy_iterations: int = 0
    energy_windows: int = 0
    holes: int = 0  # windows whose energy is not in the sum
    measured_j: float = 0.0
    gpus_j: float = 0.0  # what GPUs drew in the covered windows, whatever the scope ...
    gpus_holes: int = 0  # ... and in how many of these that is not known
    gauges: dict[str, GaugeSums] = {}
    throttled_s: float = 0.0
    throttle_covered_s: float = 0.0
    power_histogram_s: dict[int, float] = {}
    power_peak_w: float | None = None

    def add_rows(self, rows: Iterable[RankReport]) -> None:
        """Add the times and counts of rows, each of which may be added once."""
        for row in rows:
            sums = self.ranks.setdefault(row.rank, RankSums())
            sums.iterations += row.iterations
            sums.time_s += row.wall_s if self.wall else row.time_s
            sums.busy_s += row.busy_s
            sums.wait_s += row.wait_s
            self.tokens += row.tokens
            self.tokens_processed += row.tokens_processed
            self.tokens_loss += row.tokens_loss
            self.samples += row.samples
            sums.generation_s += row.generation_s
            self.generated_tokens += row.generated_tokens
            self.prompt_tokens += row.prompt_tokens
            self.profile = add_profiles(self.profile, row.profile)
            sums.device_steps += row.device_steps
            sums.device_step_s += row.device_step_s

    def add_devices(self, merged: Mapping[str, MergedDevice], sign: int = 1) -> None:
        """Add the memory and utilization of a window's devices; with a sign of -1 take them back."""
        for key, one in merged.items():
            integrals = one.wall if self.wall else one.iterations
            sums = self.devices.setdefault(key, DeviceSums())
            sums.memory_byte_seconds += sign * (integrals.memory_byte_seconds or 0.0)
            sums.memory_covered_s += sign * integrals.memory_covered_s
            sums.utilization_seconds += sign * (integrals.utilization_seconds or 0.0)
            sums.utilization_covered_s += sign * integrals.utilization_covered_s
            if one.memory_peak_bytes is not None:
                sums.memory_peak_bytes = max(one.memory_peak_bytes, sums.memory_peak_bytes or 0.0)
            if one.device.is_gpu:
                self._add_gauges(one.window, sign)

    def _add_gauges(self, window: DeviceWindow, sign: int) -> None:
        for name in GAUGES.keys() & window.gauges.keys():
            gauge = window.gauges[name]
            sums = self.gauges.setdefault(name, GaugeSums())
            sums.value_seconds += sign * gauge.value_seconds
            sums.covered_s += sign * gauge.covered_s
            sums.most = gauge.most if sums.most is None else max(sums.most, gauge.most)
        self.throttled_s += sign * window.throttled_s.get("any", 0.0)
        self.throttle_covered_s += sign * window.throttle_covered_s
        for step, seconds in window.power_histogram_s.items():
            self.power_histogram_s[step] = self.power_histogram_s.get(step, 0.0) + sign * seconds
        if window.power_peak_w is not None:
            self.power_peak_w = max(window.power_peak_w, self.power_peak_w or 0.0)

    def add_energy(
        self, window: int, energy: WindowEnergy, rows: Sequence[RankReport], least_coverage: float, sign: int = 1
    ) -> None:
        """Add a window's energy, with the seconds and counts it belongs to, if enough of it was measured.

        With a sign of -1 take it back, for a late row changes all of it.
        """
        stretch: Stretch = energy.wall if self.wall else energy.iterations
        self.measured_j += sign * stretch.joules
        if not is_covered(energy.coverage, least_coverage):
            self.holes += sign
            return
        self.energy_windows += sign
        self.energy.add(window, stretch, sign)
        self.gpus_j += sign * (energy.gpus_wall_j if self.wall else energy.gpus_iterations_j)
        self.gpus_holes += sign * (not is_covered(energy.gpus_coverage, least_coverage))
        self.energy_iterations += sign * max((row.iterations for row in rows), default=0)
        for row in rows:
            sums = self.ranks.setdefault(row.rank, RankSums())
            sums.energy_time_s += sign * (row.wall_s if self.wall else row.time_s)
            self.energy_tokens += sign * row.tokens
            self.energy_samples += sign * row.samples

    def totals(self, **known: Any) -> ClusterTotals:
        """Return what every metric is computed from: sums per rank first, the maximum over ranks last.

        Args:
            known: fields of the totals that are not sums: parameters, number of GPUs, peak, prices.
        """
        memory = [d.memory_byte_seconds / d.memory_covered_s for d in self.devices.values() if d.memory_covered_s > 0]
        busy = [
            d.utilization_seconds / d.utilization_covered_s
            for d in self.devices.values()
            if d.utilization_covered_s > 0
        ]
        peaks = [d.memory_peak_bytes for d in self.devices.values() if d.memory_peak_bytes is not None]
        longest = max(self.ranks.values(), key=lambda sums: sums.time_s, default=RankSums())
        worked = [sums for sums in self.ranks.values() if sums.iterations]
        slowest = max(worked, key=lambda sums: sums.busy_s / sums.iterations, default=RankSums())
        timed = [sums for sums in self.ranks.values() if sums.device_steps]
        slowest_device = max(timed, key=lambda sums: sums.device_step_s / sums.device_steps, default=RankSums())
        return ClusterTotals(
            iterations=max((sums.iterations for sums in self.ranks.values()), default=0),
            time_s=longest.time_s,
            slowest_step_s=slowest.busy_s,
            slowest_iterations=slowest.iterations,
            wait_s=longest.wait_s,
            tokens=self.tokens,
            tokens_processed=self.tokens_processed,
            tokens_loss=self.tokens_loss,
            samples=self.samples,
            generated_tokens=self.generated_tokens,
            generation_s=max((sums.generation_s for sums in self.ranks.values()), default=0.0),
            prompt_tokens=self.prompt_tokens,
            profile=self.profile,
            device_steps=slowest_device.device_steps,
            device_step_s=slowest_device.device_step_s,
            memory_mean_bytes=sum(memory) / len(memory) if memory else None,
            memory_min_bytes=min(memory, default=None),
            memory_max_bytes=max(memory, default=None),
            memory_peak_bytes=max(peaks, default=None),
            utilization_mean=sum(busy) / len(busy) if busy else None,
            utilization_min=min(busy, default=None),
            utilization_max=max(busy, default=None),
            energy_j=self.energy.joules if self.energy_windows else None,
            energy_gpus_j=self.gpus_j if self.energy_windows and not self.gpus_holes else None,
            energy_error_j=self.energy.error_j if self.energy_windows else None,
            energy_gain_error_j=self.energy.gain_j if self.energy_windows else None,
            energy_estimated_j=self.energy.estimated_j if self.energy_windows else None,
            energy_time_s=max((sums.energy_time_s for sums in self.ranks.values()), default=0.0),
            energy_tokens=self.energy_tokens,
            energy_samples=self.energy_samples,
            energy_iterations=self.energy_iterations,
            energy_complete=self.energy_windows > 0 and not self.holes,
            energy_measured_j=self.measured_j if self.energy_windows or self.measured_j else None,
            power_peak_w=self.power_peak_w,
            power_histogram_s=dict(self.power_histogram_s),
            throttled_s=self.throttled_s if self.throttle_covered_s > 0 else None,
            throttle_covered_s=self.throttle_covered_s,
            temperature_max_c=self._gauge("temperature_c").most,
            sm_clock_hz=self._gauge("sm_clock_hz").mean,
            sm_activity=self._gauge("sm_activity_ratio").mean,
            tensor_activity=self._gauge("tensor_activity_ratio").mean,
            dram_activity=self._gauge("dram_activity_ratio").mean,
            **known,
        )

    def _gauge(self, name: str) -> GaugeSums:
        return self.gauges.get(name) or GaugeSums()
