"""Metrics of energy, power and their cost."""

from __future__ import annotations

from effllm.metrics.table import (
    Error,
    counted_quotient,
    energy_error,
    energy_quotient,
    error_share,
    gain_error,
    measured_quotient,
    metric,
    no_error,
    quotient,
)
from effllm.records.job import ClusterTotals
from effllm.records.rank import POWER_STEP_W

J_PER_WH = 3600.0


@metric("W", needs=("gpu", "energy", "iterations"), group="energy", bases=("window",))
def watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Mean power of one GPU, independent of the power scope of AEC: jobs with different scopes can be compared."""
    power = energy_quotient(totals, totals.energy.gpus_j, totals.energy.time_s)
    return None if power is None or not totals.constants.gpus else quotient(power, totals.constants.devices)


@metric("W", needs=("gpu", "power"), group="energy", bases=("run",), error=gain_error)
def p95_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Power that a GPU exceeds in 5 % of the time, run to date: the middle of a bin of 10 W, at most the peak."""
    return power_percentile(totals, 0.95)


@metric("W", needs=("gpu", "power"), group="energy", bases=("run",), chart=False, error=gain_error)
def median_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Power that a GPU exceeds in half of the time, run to date: the middle of a bin of 10 W, at most the peak."""
    return power_percentile(totals, 0.5)


def _error_of_peak(totals: ClusterTotals, value: float) -> Error | None:
    """Return the error of a peak, which is a power reading, or else the mean power of the counters."""
    return gain_error(totals, value) if value == totals.devices.power_peak_w else energy_error(totals, value)


@metric("W", needs=("gpu", "power"), group="energy", bases=("run",), chart=False, error=_error_of_peak)
def peak_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Largest power reading of any GPU, run to date, or the mean power of the counters if that is larger."""
    peak_w, mean_w = totals.devices.power_peak_w, watts_per_gpu(totals)
    return peak_w if peak_w is None or mean_w is None else max(peak_w, mean_w)


@metric("ratio", needs=("gpu", "energy", "power limit", "iterations"), group="energy", bases=("window",), chart=False)
def power_limit_ratio(totals: ClusterTotals) -> float | None:
    """Mean power of the GPUs divided by their enforced power limits."""
    power = energy_quotient(totals, totals.energy.gpus_j, totals.energy.time_s)
    return None if power is None or not totals.constants.power_limit_w else power / totals.constants.power_limit_w


@metric("ratio", needs=("energy",), group="energy", bases=("run",), chart=False, error=no_error)
def timing_error_ratio(totals: ClusterTotals) -> float | None:
    """Random error of the run-to-date energy as a share (95 %), because windows begin and end between two readings."""
    return error_share(totals.energy.error_j, totals.energy.joules)


@metric("ratio", needs=("energy",), group="energy", bases=("run",), error=no_error)
def sensor_error_ratio(totals: ClusterTotals) -> float | None:
    """Systematic error of the energy as a share (95 %), from the gain of the sensors. It does not average out."""
    return error_share(totals.energy.gain_j, totals.energy.joules)


@metric("J", needs=("energy",), group="energy", bases=("job",))
def total_joules(totals: ClusterTotals) -> float | None:
    """Energy of the run so far; no value if a part of the energy was not measured."""
    return totals.energy.joules if totals.energy.is_complete else None


@metric("J", needs=("energy",), group="energy", bases=("job",))
def measured_joules(totals: ClusterTotals) -> float | None:
    """Energy of the run so far in the time with readings, also estimated from power; without a gap, the total."""
    return totals.energy.measured_j


@metric("J/token", needs=("energy", "tokens"), group="energy", bases=("window", "run"))
def joules_per_token(totals: ClusterTotals) -> float | None:
    """Energy per token; energy and tokens are sums over the same windows."""
    return energy_quotient(totals, totals.energy.joules, totals.energy.counts.tokens)


@metric("J/iteration", needs=("energy",), group="energy", bases=("window",), chart=False)
def joules_per_iteration(totals: ClusterTotals) -> float | None:
    """Energy per iteration of the whole job."""
    return energy_quotient(totals, totals.energy.joules, totals.energy.counts.iterations)


@metric("J/sample", needs=("energy", "samples"), group="energy", bases=("window",), chart=False)
def joules_per_sample(totals: ClusterTotals) -> float | None:
    """Energy per sample."""
    return energy_quotient(totals, totals.energy.joules, totals.energy.counts.samples)


@metric("J/token", needs=("energy", "generated tokens"), group="energy", bases=("job",), chart=False)
def joules_per_generated_token(totals: ClusterTotals) -> float | None:
    """Energy of the whole run per generated token; no value if a part of the energy was not measured."""
    return measured_quotient(total_joules(totals), totals.counts.generated_tokens)


@metric("Wh", needs=("energy",), group="energy", bases=("job",), chart=False, in_windows=False)
def total_wh(totals: ClusterTotals) -> float | None:
    """Energy of the run so far in watt-hours; no value if a part of the energy was not measured."""
    return measured_quotient(total_joules(totals), J_PER_WH)


@metric("J/10k tokens", needs=("energy", "tokens"), group="energy", bases=("window",), chart=False, in_windows=False)
def joules_per_10k_tokens(totals: ClusterTotals) -> float | None:
    """Energy per ten thousand tokens."""
    joules = joules_per_token(totals)
    return None if joules is None else 1e4 * joules


@metric("tokens/J", needs=("energy", "tokens"), group="energy", bases=("window",), chart=False, in_windows=False)
def tokens_per_joule(totals: ClusterTotals) -> float | None:
    """Tokens per joule."""
    return counted_quotient(totals.energy.counts.tokens, totals.energy.joules or 0.0)


def _error_above_baseline(totals: ClusterTotals, value: float) -> Error | None:
    """Return the random error of the whole energy, because the baseline adds nothing to it, and the gain error."""
    error = energy_error(totals, value)
    return None if error is None else (totals.energy.error_j, error[1])


@metric("J", needs=("energy", "baseline"), group="energy", bases=("run",), chart=False, error=_error_above_baseline)
def joules_above_baseline(totals: ClusterTotals) -> float | None:
    """Energy minus idle power times time; the idle power was measured before the first iteration."""
    if totals.energy.joules is None or totals.constants.baseline_w is None:
        return None
    return totals.energy.joules - totals.constants.baseline_w * totals.energy.time_s


@metric("kg CO2e", needs=("energy", "carbon intensity"), group="energy", bases=("job",))
def co2_kg(totals: ClusterTotals) -> float | None:
    """CO2 emissions of the energy so far: kWh times PUE times the carbon intensity in the settings."""
    if total_joules(totals) is None or totals.constants.carbon_g_per_kwh is None:
        return None
    return _site_kwh(totals) * totals.constants.carbon_g_per_kwh / 1e3


@metric("money", needs=("energy", "price"), group="energy", bases=("job",), chart=False)
def electricity_cost(totals: ClusterTotals) -> float | None:
    """Cost of the energy so far: kWh times PUE times the price in the settings, in the currency of the price."""
    if total_joules(totals) is None or totals.constants.price_per_kwh is None:
        return None
    return _site_kwh(totals) * totals.constants.price_per_kwh


@metric("money", needs=("gpu", "rent"), group="energy", bases=("job",), chart=False)
def gpu_cost(totals: ClusterTotals) -> float | None:
    """Cost of rented GPUs so far, in the currency of the price in the settings."""
    if totals.constants.price_per_gpu_hour is None or not totals.constants.gpus or totals.constants.has_shared_gpu:
        return None
    return totals.constants.gpus * totals.loop.time_s / 3600 * totals.constants.price_per_gpu_hour


def power_percentile(totals: ClusterTotals, share: float) -> float | None:
    """Return the power that GPUs did not exceed in a share of their time; ``None`` without readings of power."""
    total_s = sum(totals.devices.power_histogram_s.values())
    passed_s = 0.0
    for bin_index, seconds in sorted(totals.devices.power_histogram_s.items()):
        passed_s += seconds
        if passed_s >= share * total_s:
            middle_w = (bin_index + 0.5) * POWER_STEP_W
            return middle_w if totals.devices.power_peak_w is None else min(middle_w, totals.devices.power_peak_w)
    return None


def _site_kwh(totals: ClusterTotals) -> float:
    return (totals.energy.joules or 0.0) / (1e3 * J_PER_WH) * totals.constants.pue
