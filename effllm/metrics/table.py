"""The table of metrics, the decorator that adds a metric to it, the values and errors of all metrics, and the contract.

The metrics of the contract are in the order of the console block: EfficientLLM, arXiv 2505.13840, section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effllm.records.job import ClusterTotals

Formula = Callable[[ClusterTotals], float | None]
#: A random and a systematic error: half-widths of 95 % intervals.
Error = tuple[float, float]
#: Totals and the metric's value -> the error of the value, or ``None`` if it is unknown.
ErrorFormula = Callable[[ClusterTotals, float], Error | None]
GB, GIB = 1e9, 2**30
#: Largest relative random error of a shown energy; values from an energy with a larger error are not shown either.
MAX_SHOWN_ERROR = 0.2


@dataclass(frozen=True)
class Metric:
    """A formula with its description for all outputs."""

    name: str
    unit: str
    needs: tuple[str, ...]  # inputs without which the metric has no value
    help: str
    formula: Formula
    console: str | None  # label and format of a line in the console block; only metrics of the contract
    group: str  # TensorBoard group; empty for metrics of the contract
    bases: tuple[str, ...]  # totals on which the metric is evaluated: run, window, job
    chart: bool  # False: no chart, because the chart of another metric has the same information
    error: ErrorFormula
    in_windows: bool = True  # False: only in summaries, because another metric has the same value in another unit

    def tag(self, base: str) -> str:
        """Return the tag of this metric for one base, without the prefix ``efficientllm/``."""
        if self.group:
            return f"{self.group}/{self.name}" if base == self.bases[0] else f"{base}_{self.group}/{self.name}"
        return self.name if base == "run" else f"{base}/{self.name}"

    @property
    def is_sampled(self) -> bool:
        """Whether a random error of the metric is that of a mean of samples, not of the times of readings."""
        return not {"energy", "power"}.intersection(self.needs)

    @property
    def summary_bases(self) -> tuple[str, ...]:
        """The bases without the window, which a summary does not have; a metric with a group has the run instead."""
        if self.group:
            return tuple(dict.fromkeys("run" if base == "window" else base for base in self.bases))
        return tuple(base for base in self.bases if base != "window")


METRICS: dict[str, Metric] = {}


def metric(
    unit: str,
    *,
    needs: Sequence[str],
    console: str | None = None,
    group: str = "",
    bases: Sequence[str] = ("run", "window", "job"),
    chart: bool = True,
    error: ErrorFormula | None = None,
    in_windows: bool = True,
) -> Callable[[Formula], Formula]:
    """Add a formula to the table that all sinks use.

    Without an ``error``, a metric that needs energy has the relative error of the energy, and others have no error.
    A metric with a ``group`` has the tag ``group/name`` for the first of its bases, and ``base_group/name`` for others.

    Raises:
        ValueError: another metric has this name, or the function has no docstring.
    """

    def add_to_table(formula: Formula) -> Formula:
        name = formula.__name__
        if name in METRICS:
            raise ValueError(f"two metrics are named {name}")
        if not formula.__doc__:
            raise ValueError(f"metric {name} has no docstring, which is its help text")
        METRICS[name] = Metric(
            name=name,
            unit=unit,
            needs=tuple(needs),
            help=formula.__doc__.strip(),
            formula=formula,
            console=console,
            group=group,
            bases=tuple(bases),
            chart=chart,
            error=error or (energy_error if "energy" in needs else no_error),
            in_windows=in_windows,
        )
        return formula

    return add_to_table


def contract_metrics() -> Iterable[Metric]:
    """Return the metrics of the contract, in the order of the console block."""
    return (entry for entry in METRICS.values() if entry.console)


def metric_of_tag(tag: str) -> Metric | None:
    """Return the metric of a tag of any base, or ``None`` if the tag is not of a metric."""
    return METRICS.get(tag.rpartition("/")[2])


def is_energy_precise(totals: ClusterTotals) -> bool:
    """Whether the random error of the energy is small enough to show the energy; also true without an energy."""
    return (error_share(totals.energy.error_j, totals.energy.joules) or 0.0) <= MAX_SHOWN_ERROR


def quotient(numerator: float, denominator: float) -> float | None:
    """Return a quotient, or ``None`` if the denominator is not above 0."""
    return numerator / denominator if denominator > 0 else None


def measured_quotient(numerator: float | None, denominator: float) -> float | None:
    """Return a quotient, or ``None`` if the numerator was not measured or the denominator is not above 0."""
    return None if numerator is None else quotient(numerator, denominator)


def energy_quotient(totals: ClusterTotals, joules: float | None, denominator: float) -> float | None:
    """Return a quotient of an energy, or ``None`` if the random error of the energy is too large."""
    return measured_quotient(joules, denominator) if is_energy_precise(totals) else None


def error_share(error: float, value: float | None) -> float | None:
    """Return an error as a share of a value, or ``None`` if the value is unknown or 0."""
    return error / value if value else None


def counted_quotient(count: float, denominator: float) -> float | None:
    """Return a quotient of a count, or ``None`` if the count is 0, because then the loop does not report this count."""
    return quotient(count, denominator) if count > 0 else None


def window_values(run: ClusterTotals, window: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return the measured values of a window, for each metric and base: tag -> value."""
    totals = {"run": run, "window": window, "job": job}
    evaluated = [(entry, base) for entry in METRICS.values() if entry.in_windows for base in entry.bases]
    values = {entry.tag(base): entry.formula(totals[base]) for entry, base in evaluated}
    return {tag: value for tag, value in values.items() if value is not None}


def summary_values(run: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return the measured values of a summary: tag -> value."""
    totals = {"run": run, "job": job}
    evaluated = [(entry, base) for entry in METRICS.values() for base in entry.summary_bases]
    values = {entry.tag(base): entry.formula(totals[base]) for entry, base in evaluated}
    return {tag: value for tag, value in values.items() if value is not None}


def errors(run: ClusterTotals, job: ClusterTotals) -> dict[str, Error]:
    """Return the errors of a summary's values: tag -> (random, systematic), half-widths of 95 % intervals."""
    totals = {"run": run, "job": job}
    by_tag = {}
    for entry in METRICS.values():
        for base in entry.summary_bases:
            value = entry.formula(totals[base])
            error = None if value is None else entry.error(totals[base], value)
            if error is not None:
                by_tag[entry.tag(base)] = error
    return by_tag


def energy_error(totals: ClusterTotals, value: float) -> Error | None:
    """Return the error of a value that is proportional to the energy."""
    energy = totals.energy
    if not energy.joules or not (energy.error_j or energy.gain_j):
        return None
    return abs(value) * energy.error_j / energy.joules, abs(value) * energy.gain_j / energy.joules


def gain_error(totals: ClusterTotals, value: float) -> Error | None:
    """Return the error of a power reading: no random error, and the relative gain error of the sensor's energy."""
    gain_j, joules = totals.energy.gain_j, totals.energy.joules
    return (0.0, abs(value) * gain_j / joules) if gain_j and joules else None


def error_of_mean(random_error: float | None) -> Error | None:
    """Return the error of a mean of samples, which has no systematic part."""
    return None if random_error is None else (random_error, 0.0)


def no_error(*_: object) -> None:
    """Return no error: it is unknown, or the value is itself an error."""


# --- the contract ---


@metric(
    "GiB",
    needs=("memory",),
    console="AMU (GB): {:.2f}",
    error=lambda totals, _: error_of_mean(measured_quotient(totals.devices.memory_error_bytes, GIB)),
)
def amu_gb(totals: ClusterTotals) -> float | None:
    """Average memory utilization: memory in use, averaged over time and then over devices (Eq. 1)."""
    return measured_quotient(totals.devices.memory_mean_bytes, GIB)


@metric(
    "ratio",
    needs=("utilization",),
    console="PCU (Ratio): {:.3f}",
    error=lambda totals, _: error_of_mean(totals.devices.utilization_error),
)
def pcu_ratio(totals: ClusterTotals) -> float | None:
    """Peak compute utilization: share of time in which the device was busy; a mean, despite the name (Eq. 2)."""
    return totals.devices.utilization_mean


@metric("s/iteration", needs=("iterations",), console="AL (Seconds): {:.4f}")
def al_seconds(totals: ClusterTotals) -> float | None:
    """Average latency: step time with computation and communication, mean over steps of the slowest rank (Eq. 3)."""
    return quotient(totals.loop.slowest_step_s, totals.loop.slowest_iterations)


@metric("tokens/parameter/s", needs=("iterations", "tokens", "parameters"), console="TT (Tokens/Param/Sec): {:.2e}")
def tt_tokens_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Token throughput of the whole job divided by its parameters (Eq. 4)."""
    return _rate_per_parameter(totals.counts.tokens, totals)


@metric("samples/parameter/s", needs=("iterations", "samples", "parameters"), console="ST (Samples/Param/Sec): {:.2e}")
def st_samples_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Sample throughput of the whole job divided by its parameters (Eq. 5)."""
    return _rate_per_parameter(totals.counts.samples, totals)


@metric("W", needs=("energy", "iterations"), console="AEC (Watts): {:.2f}")
def aec_watts(totals: ClusterTotals) -> float | None:
    """Average energy consumption: mean power of the whole job; a power, despite the name (Eq. 8)."""
    return energy_quotient(totals, totals.energy.joules, totals.energy.time_s)


@metric("tokens/s", needs=("generated tokens",), console="IT (Tokens/Sec): {:.2f}")
def it_tokens_per_sec(totals: ClusterTotals) -> float | None:
    """Inference throughput: generated tokens per second of generation, not divided by parameters (Eq. 6)."""
    return inference_throughput(totals.counts.generated_tokens, totals.loop.generation_s)


def inference_throughput(generated_tokens: float, time_s: float) -> float | None:
    """Return IT in tokens/s (Eq. 6); ``None`` if nothing was generated or no time passed."""
    return counted_quotient(generated_tokens, time_s)


def model_compression_ratio(
    original_bytes: float, compressed_bytes: float, original_score: float, compressed_score: float
) -> float:
    """Return MCR (Eq. 9): original size / compressed size x compressed score / original score.

    Raises:
        ValueError: a size or the original score is not above 0.
    """
    if not (original_bytes > 0 and compressed_bytes > 0 and original_score > 0):
        raise ValueError("sizes and the original score must be above 0")
    return (original_bytes / compressed_bytes) * (compressed_score / original_score)


def _rate_per_parameter(count: int, totals: ClusterTotals) -> float | None:
    rate = counted_quotient(count, totals.loop.time_s)
    return None if rate is None or not totals.constants.parameters else rate / totals.constants.parameters
