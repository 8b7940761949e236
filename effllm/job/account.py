"""The sums of the reports of a window, the running sums of a job, and the totals for metrics. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from effllm.job.energy_account import EnergyTotals, WindowEnergy, is_covered
from effllm.job.joining import add_to, summed
from effllm.job.merged import LEVELS, GaugeSums, GpuReadings, Merged
from effllm.records.columns import Array, Table, fields_of, means, structs_of
from effllm.records.counters import FIELDS
from effllm.records.energy import NORMAL_95, NOT_MEASURED, EnergyAmount
from effllm.records.job import ClusterTotals, Counts, DeviceTotals, JobConstants, JobEnergy, LoopTimes
from effllm.records.rank import CLOCK_RATIO, TENSOR_CLOCK, Allocator, Profile, RankReport, ValueStatistics, add_profiles
from effllm.records.values import merge_by_name

_JOB = "job"  # key of the energy of all devices
ALLOCATOR = Allocator.__struct_fields__
_PERIOD_FIELDS = ("sequence", "iteration_first", "iteration_last", "iteration_shown", "start_time_s", "end_time_s")
SUMMED = ("generation_s", "device_steps", "device_step_s")  # further fields of reports that `RankSums` adds
#: Counts of tokens, from the largest.
TOKEN_COUNTS = ("tokens_processed", "tokens", "tokens_loss")
_COUNT_FIELDS = (*FIELDS, "losses_not_finite")


class Rows(list[RankReport]):
    """The reports of a window, with their sums."""

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks, in the order of the reports."""
        return [row.rank for row in self]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Columns of times in seconds and of iterations, by name; one row for each report."""
        names = (*_PERIOD_FIELDS, "final", "wall_s", "busy_s", "wait_s", *SUMMED)
        columns = dict(zip(names, fields_of(self, names).T, strict=True))
        columns["iterations"] = columns["iteration_last"] - columns["iteration_first"] + 1
        columns["time_s"] = columns["busy_s"] + columns["wait_s"]
        return columns

    @cached_property
    def token_counts(self) -> dict[str, list[int]]:
        """The counts of tokens of each report; a list for each count takes a quarter of the time of `fields_of`."""
        return {name: list(map(attrgetter(name), self)) for name in TOKEN_COUNTS}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Exact sums of the counts."""
        others = {name: sum(map(attrgetter(name), self)) for name in _COUNT_FIELDS if name not in TOKEN_COUNTS}
        return {**{name: sum(column) for name, column in self.token_counts.items()}, **others}

    @cached_property
    def max_iterations(self) -> int:
        """The largest number of iterations of a report."""
        return int(self.columns["iterations"].max(initial=0.0))

    @cached_property
    def loss(self) -> float | None:
        """The loss of the first report with a loss."""
        return next((loss for loss in map(attrgetter("loss"), self) if loss is not None), None)

    @cached_property
    def first_not_finite(self) -> int | None:
        """Displayed number of the first iteration whose loss was NaN or infinite."""
        numbers = [number for number in map(attrgetter("first_not_finite"), self) if number is not None]
        return min(numbers, default=None)

    @cached_property
    def profile(self) -> Profile | None:
        return add_profiles(*map(attrgetter("profile"), self))

    @cached_property
    def values(self) -> dict[str, ValueStatistics]:
        """Statistics of the values of instruments over all ranks, by name; also of the allocator's memory."""
        values = merge_by_name(filter(None, map(attrgetter("values"), self)))
        allocators = [allocator for allocator in map(attrgetter("allocator"), self) if allocator is not None]
        for name, sizes in zip(ALLOCATOR, structs_of(allocators, Allocator).T, strict=True) if allocators else ():
            squares = float(np.square(sizes - sizes.mean()).sum())
            least, most = float(sizes.min()), float(sizes.max())
            values[f"allocator/{name}"] = ValueStatistics(len(sizes), float(sizes.sum()), squares, least, most)
        return values

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase, summed over reports."""
        return summed(filter(None, map(attrgetter("phases_s"), self)))

    @cached_property
    def has_final_report(self) -> bool:
        return bool(self.columns["final"].any())

    def merge(self, more: Rows) -> Rows:
        """Return the sums of these reports and of ``more``, without the reports."""
        both = Rows()
        both.ranks = self.ranks + more.ranks
        both.columns = {name: np.concatenate((column, more.columns[name])) for name, column in self.columns.items()}
        both.counts = {name: count + more.counts[name] for name, count in self.counts.items()}
        both.max_iterations = max(self.max_iterations, more.max_iterations)
        both.loss = more.loss if self.loss is None else self.loss
        both.profile = add_profiles(self.profile, more.profile)
        both.values = merge_by_name((self.values, more.values))
        both.phases_s = summed((self.phases_s, more.phases_s))
        both.has_final_report = self.has_final_report or more.has_final_report
        return both

    @classmethod
    def in_rank_order(cls, rows: Mapping[int, RankReport], all_ranks: list[int] | None = None) -> Rows:
        """Return reports in the order of ranks; of all, `ranks` is ``all_ranks`` itself, which tables find faster."""
        ranks = all_ranks if all_ranks is not None and len(all_ranks) == len(rows) else sorted(rows)
        ordered = cls(map(rows.__getitem__, ranks))
        ordered.ranks = ranks
        return ordered


class RankSums(Table):
    """The running sums of each rank."""

    NAMES = (
        "iterations", "time_s", "busy_s", "wait_s",
        "energy_time_s",  # time of the windows whose energy is in the sum
        "generation_s",
        "device_steps",  # number of steps whose time on the device is known
        "device_step_s",  # time of these steps
    )  # fmt: skip


class DeviceSums(Table):
    """The running sums of each device."""

    NAMES = (*LEVELS, "memory_peak_bytes")  # the largest peak is nan if it is not measured
    NEW_ROW = (0.0, 0.0, 0.0, 0.0, np.nan)


class Account(GpuReadings):
    """The running sums of a job on one time base, with the readings of its GPUs.

    ``wall`` selects the base: the whole wall time of the reports, or only their iterations.
    """

    wall: bool = False
    ranks: RankSums = msgspec.field(default_factory=RankSums)
    devices: DeviceSums = msgspec.field(default_factory=DeviceSums)
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # sums of `Rows.counts`
    profile: Profile | None = None
    energy: EnergyTotals = msgspec.field(default_factory=EnergyTotals)  # energy of the covered windows
    energy_counts: dict[str, int] = msgspec.field(default_factory=dict)  # counts and iterations of the covered windows
    energy_windows: int = 0  # number of covered windows: those with enough coverage to be in the sum
    holes: int = 0  # number of windows whose energy is not in the sum
    partial: int = 0  # number of windows in which a device is missing or only partly measured, including the holes
    left_windows: int = 0  # number of windows in which a device is missing because its ranks had left
    covered_s: float = 0.0  # wall time with measured energy, mean over devices
    covered_iterations: float = 0.0  # the same in iterations
    measured_j: float = 0.0  # of all windows, also of those that are not covered
    gpus_j: float = 0.0  # energy of the GPUs in the covered windows, for any scope
    gpus_holes: int = 0  # number of covered windows in which the energy of the GPUs is unknown

    def add_rows(self, rows: Rows, has_hang: bool = False) -> None:
        """Add the times and counts of reports, each only once; after a hang, profiles are no sample of the steps."""
        names = ["iterations", "wall_s" if self.wall else "time_s", "busy_s", "wait_s", *SUMMED]
        added = np.stack([rows.columns[name] for name in names], axis=1)
        positions = self.ranks.find_or_add(rows.ranks)
        self.ranks.values[positions[:, None], _COLUMNS_OF_ROWS] += added
        add_to(self.counts, rows.counts)
        if not has_hang:
            self.profile = add_profiles(self.profile, rows.profile)

    def add_devices(self, merged: Merged, sign: int = 1) -> None:
        """Add the memory and utilization of a window's devices; a sign of -1 subtracts them, but keeps peaks."""
        levels = (merged.wall if self.wall else merged.iterations).levels
        positions = self.devices.find_or_add(merged.keys)
        self.devices.values[positions, : len(LEVELS)] += sign * np.nan_to_num(levels)
        peaks = self.devices.column("memory_peak_bytes")
        peaks[positions] = np.fmax(peaks[positions], merged.peaks)
        self.add_readings(merged.gpus, sign)

    def add_energy(self, window: int, energy: WindowEnergy, rows: Rows, min_coverage: float, sign: int = 1) -> None:
        """Add a window's energy, with its seconds and counts; with a low coverage, only joules and a hole.

        A sign of -1 subtracts these values again, before a late report is added.
        """
        amount = energy.wall if self.wall else energy.iterations
        self.measured_j += sign * (amount.joules or 0.0)
        has_all = is_covered(energy.coverage, min_coverage) and is_covered(energy.lowest_coverage, min_coverage)
        self.partial += sign * (not has_all or energy.num_left > 0)
        self.left_windows += sign * (energy.num_left > 0)
        self.covered_s += sign * energy.measured_share * float(rows.columns["wall_s"].max(initial=0.0))
        self.covered_iterations += sign * energy.measured_share * rows.max_iterations
        if not is_covered(energy.coverage, min_coverage):
            self.holes += sign
            return
        self.energy_windows += sign
        self.energy.add_window(window, (_JOB,), structs_of([amount], EnergyAmount), sign)
        self.gpus_j += sign * (energy.gpus_wall_j if self.wall else energy.gpus_iterations_j)
        self.gpus_holes += sign * (not is_covered(energy.gpus_coverage, min_coverage))
        positions = self.ranks.find_or_add(rows.ranks)
        self.ranks.column("energy_time_s")[positions] += sign * rows.columns["wall_s" if self.wall else "time_s"]
        add_to(self.energy_counts, {"iterations": rows.max_iterations, **rows.counts}, sign)

    def totals(self, constants: JobConstants, sample_s: float | None = None) -> ClusterTotals:
        """Return the totals: sums per rank, then the maximum over ranks; samples have a distance of ``sample_s``."""
        memory_sums, memory_s, utilization_sums, utilization_s, peaks = self.devices.values.T  # as in `DeviceSums`
        memory_mean, memory_min, memory_max = _mean_min_max(memory_sums, memory_s)
        utilization_mean, utilization_min, utilization_max = _mean_min_max(utilization_sums, utilization_s)
        ranks = dict(zip(RankSums.NAMES, self.ranks.values.T, strict=True))
        time_s = _max_or_0(ranks["time_s"])
        # If several ranks have the longest time, the longest wait of these ranks is used, in any order of the ranks.
        is_longest = ranks["time_s"] == time_s
        slowest_row = _row_of_slowest(ranks["busy_s"], ranks["iterations"])
        slowest_device_row = _row_of_slowest(ranks["device_step_s"], ranks["device_steps"])
        return ClusterTotals(
            counts=Counts(iterations=int(_max_or_0(ranks["iterations"])), **self.counts),
            loop=LoopTimes(
                time_s=time_s,
                slowest_step_s=_value_or_0(ranks["busy_s"], slowest_row),
                slowest_iterations=int(_value_or_0(ranks["iterations"], slowest_row)),
                wait_s=_max_or_0(ranks["wait_s"][is_longest]),
                generation_s=_max_or_0(ranks["generation_s"]),
                device_steps=int(_value_or_0(ranks["device_steps"], slowest_device_row)),
                device_step_s=_value_or_0(ranks["device_step_s"], slowest_device_row),
            ),
            energy=self._job_energy(),
            devices=DeviceTotals(
                memory_mean_bytes=memory_mean,
                memory_min_bytes=memory_min,
                memory_max_bytes=memory_max,
                memory_peak_bytes=None if np.isnan(peaks).all() else float(np.nanmax(peaks)),
                memory_error_bytes=self._sampling_error("memory", sample_s),
                utilization_mean=utilization_mean,
                utilization_min=utilization_min,
                utilization_max=utilization_max,
                utilization_error=self._sampling_error("utilization", sample_s) if constants.gpus else None,
                power_peak_w=self.power_peak_w,
                power_histogram_s=dict(self.power_histogram_s),
                throttled_s=self.throttled_s if self.throttle_covered_s > 0 else None,
                throttle_covered_s=self.throttle_covered_s,
                throttled_by_s={reason: seconds for reason, seconds in self.throttled_by_s.items() if reason != "any"},
                sm_clock_ratio=self._gauge(CLOCK_RATIO).mean,
                sm_clock_covered_s=self._gauge(CLOCK_RATIO).covered_s,
                sm_clock_error=self._clock_error(constants, sample_s),
                temperature_max_c=self._gauge("temperature_c").most,
                sm_clock_hz=self._gauge("sm_clock_hz").mean,
                sm_activity=self._gauge("sm_activity_ratio").mean,
                tensor_clock_hz=self._gauge(TENSOR_CLOCK).mean,
                tensor_clock_most_hz=self._gauge(TENSOR_CLOCK).most,
                tensor_clock_covered_s=self._gauge(TENSOR_CLOCK).covered_s,
                tensor_activity=self._gauge("tensor_activity_ratio").mean,
                dram_activity=self._gauge("dram_activity_ratio").mean,
            ),
            constants=constants,
            profile=self.profile,
        )

    def _job_energy(self) -> JobEnergy:
        """Return the energy, time and counts of the covered windows; ``measured_j`` is of all windows."""
        amount = self.energy.total() if self.energy_windows else NOT_MEASURED
        has_covered = amount.joules is not None
        return JobEnergy(
            *msgspec.structs.astuple(amount),
            time_s=_max_or_0(self.ranks.column("energy_time_s")),
            counts=Counts(**self.energy_counts),
            is_complete=has_covered and not self.partial,
            measured_j=self.measured_j if has_covered or self.measured_j else None,  # else no reading
            gpus_j=self.gpus_j if has_covered and not self.gpus_holes else None,  # a sum with a hole is too small
        )

    def _sampling_error(self, name: str, sample_s: float | None) -> float | None:
        """Return the sampling error of the mean of "memory" or "utilization" over devices; ``None`` if it is unknown.

        Devices of a job do the same work at the same time, so their errors do not cancel.
        """
        integral = "memory_byte_seconds" if name == "memory" else "utilization_seconds"
        sums, covered_s = self.devices.column(integral), self.devices.column(f"{name}_covered_s")
        is_measured = covered_s > 0
        if sample_s is None or not is_measured.any():
            return None
        mean = means(sums, covered_s)
        peaks = self.devices.column("memory_peak_bytes")[is_measured] if name == "memory" else 1.0
        error = float(error_of_mean(mean, peaks, covered_s[is_measured] / sample_s).mean())
        return None if np.isnan(error) else error

    def _clock_error(self, constants: JobConstants, sample_s: float | None) -> float | None:
        """Return the error of the mean ratio of the SM clock, as `_sampling_error`."""
        ratio = self._gauge(CLOCK_RATIO)
        if sample_s is None or ratio.mean is None or not constants.gpus_with_clock:
            return None
        samples_per_gpu = ratio.covered_s / constants.gpus_with_clock / sample_s
        return float(error_of_mean(ratio.mean, ratio.most or 0.0, samples_per_gpu))

    def _gauge(self, name: str) -> GaugeSums:
        return self.gauges.get(name) or GaugeSums()


#: Positions in `RankSums` of the columns that `add_rows` adds.
_COLUMNS_OF_ROWS = [RankSums.NAMES.index(name) for name in ("iterations", "time_s", "busy_s", "wait_s", *SUMMED)]


def error_of_mean(mean: Any, peak: Any, samples: Any) -> Any:
    """Return the error (half-width, 95 %) of a mean of samples at independent times; numbers or arrays.

    A value between 0 and a peak p with mean m has a variance of at most m (p - m) (Bhatia and Davis, 2000).
    """
    return NORMAL_95 * np.sqrt(np.maximum(mean * (peak - mean), 0.0) / np.maximum(samples, 1.0))


def _mean_min_max(sums: Array, covered_s: Array) -> tuple[float | None, float | None, float | None]:
    """Return the mean, the minimum and the maximum over devices of the means over time."""
    values = means(sums, covered_s)
    return (float(values.mean()), float(values.min()), float(values.max())) if len(values) else (None, None, None)


def _max_or_0(column: Array) -> float:
    return float(column.max(initial=0.0))


def _row_of_slowest(seconds: Array, steps: Array) -> int:
    """Return the row of the rank with the longest mean step, or -1 without steps."""
    if not (steps > 0).any():
        return -1
    mean_s = np.full(len(steps), -1.0)
    np.divide(seconds, steps, out=mean_s, where=steps > 0)
    return int(mean_s.argmax())


def _value_or_0(column: Array, row: int) -> float:
    return float(column[row]) if row >= 0 else 0.0
