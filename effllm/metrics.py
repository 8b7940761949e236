"""Every metric, one function each: totals of the cluster in, a number or ``None`` (not measured) out.

The name of a function is the metric's name and its TensorBoard tag, its docstring the help, its
decorator the unit.  Console, TensorBoard, run folder and command line all walk `METRICS`.

Definitions: EfficientLLM, arXiv 2505.13840, section 5.1, equations 1 to 12; how they reach over a
cluster is effllm's own and stands in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effllm.schema import ClusterTotals

Formula = Callable[[ClusterTotals], float | None]

GIB = 2**30


@dataclass(frozen=True)
class Metric:
    """A formula with what every output needs to show it."""

    name: str
    unit: str
    help: str
    formula: Formula
    console: str | None  # label and format of its line in the block, for the contract's metrics
    group: str  # TensorBoard group; empty for the contract's own tags
    bases: tuple[str, ...]  # which totals it is shown on: run, window, job

    def tag(self, base: str) -> str:
        """Return the tag, without the prefix ``efficientllm/``, of this metric on one base."""
        if base == "run" or self.group:
            return f"{self.group}/{self.name}" if self.group else self.name
        return f"{base}/{self.name}"


METRICS: dict[str, Metric] = {}


def metric(
    unit: str, *, console: str | None = None, group: str = "", bases: Sequence[str] = ("run", "window", "job")
) -> Callable[[Formula], Formula]:
    """Enter a formula into the table that every sink walks.

    A metric of a ``group`` has one tag, so it is shown on one base, the first of ``bases``.

    Raises:
        ValueError: the name is taken, or the function explains nothing.
    """

    def enter(formula: Formula) -> Formula:
        name = formula.__name__
        if name in METRICS:
            raise ValueError(f"two metrics are named {name}")
        if not formula.__doc__:
            raise ValueError(f"metric {name} has no docstring, which is its help text")
        shown = tuple(bases[:1]) if group else tuple(bases)
        METRICS[name] = Metric(name, unit, formula.__doc__.strip(), formula, console, group, shown)
        return formula

    return enter


# --- the contract: the original's seven, in the order of its block -------------------------------


@metric("GB", console="AMU (GB): {:.2f}")
def amu_gb(totals: ClusterTotals) -> float | None:
    """Average memory utilization: memory in use, averaged over time and then over devices (2^30 bytes; Eq. 1)."""
    return None if totals.memory_mean_bytes is None else totals.memory_mean_bytes / GIB


@metric("ratio", console="PCU (Ratio): {:.3f}")
def pcu_ratio(totals: ClusterTotals) -> float | None:
    """Peak compute utilization: share of time in which the device was busy; despite its name a mean (Eq. 2)."""
    return totals.utilization_mean


@metric("s/iteration", console="AL (Seconds): {:.4f}")
def al_seconds(totals: ClusterTotals) -> float | None:
    """Average latency: computation and communication of a step, mean over steps, of the slowest rank (Eq. 3)."""
    return _ratio(totals.slowest_step_s, totals.slowest_iterations)


@metric("tokens/parameter/s", console="TT (Tokens/Param/Sec): {:.2e}")
def tt_tokens_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Token throughput of the whole job divided by its parameters (Eq. 4)."""
    return _per_parameter(totals.tokens, totals)


@metric("samples/parameter/s", console="ST (Samples/Param/Sec): {:.2e}")
def st_samples_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Sample throughput of the whole job divided by its parameters (Eq. 5)."""
    return _per_parameter(totals.samples, totals)


@metric("W", console="AEC (Watts): {:.2f}")
def aec_watts(totals: ClusterTotals) -> float | None:
    """Average energy consumption: mean power of the whole job, despite its name (Eq. 8)."""
    return _measured_ratio(totals.energy_j, totals.energy_time_s)


@metric("tokens/s", console="IT (Tokens/Sec): {:.2f}")
def it_tokens_per_sec(totals: ClusterTotals) -> float | None:
    """Inference throughput: generated tokens per second of generation, not divided by parameters (Eq. 6)."""
    return inference_throughput(totals.generated_tokens, totals.generation_s)


# --- beside the seven ----------------------------------------------------------------------------


@metric("W", group="energy", bases=("window",))
def watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Mean power of one GPU: the cluster's over the number of GPUs. What rankings use."""
    power = aec_watts(totals)
    return None if power is None else _ratio(power, totals.gpus)


@metric("J", group="energy", bases=("job",))
def total_joules(totals: ClusterTotals) -> float | None:
    """Energy of the run so far; no value where a part of it was not measured."""
    return totals.energy_j if totals.energy_complete else None


@metric("J", group="energy", bases=("job",))
def measured_joules(totals: ClusterTotals) -> float | None:
    """Energy that was measured, which is less than the total where there are holes."""
    return totals.energy_measured_j


@metric("J/token", group="energy", bases=("run",))
def joules_per_token(totals: ClusterTotals) -> float | None:
    """Energy of a token, run to date: the same windows above and below the line."""
    return _measured_ratio(totals.energy_j, totals.energy_tokens)


@metric("J/iteration", group="energy", bases=("run",))
def joules_per_iteration(totals: ClusterTotals) -> float | None:
    """Energy of an iteration of the whole job, run to date."""
    return _measured_ratio(totals.energy_j, totals.energy_iterations)


@metric("J/sample", group="energy", bases=("run",))
def joules_per_sample(totals: ClusterTotals) -> float | None:
    """Energy of a sample, run to date."""
    return _measured_ratio(totals.energy_j, totals.energy_samples)


@metric("tokens/s", group="throughput", bases=("window",))
def tokens_per_second(totals: ClusterTotals) -> float | None:
    """Tokens of the whole job per second, padding left out where the loop counts it."""
    return _counted_ratio(totals.tokens, totals.time_s)


@metric("tokens/s", group="throughput", bases=("window",))
def tokens_per_second_per_gpu(totals: ClusterTotals) -> float | None:
    """Tokens per second and GPU; per rank where there are no GPUs."""
    return _counted_ratio(totals.tokens, totals.time_s * (totals.gpus or totals.world_size))


@metric("samples/s", group="throughput", bases=("window",))
def samples_per_second(totals: ClusterTotals) -> float | None:
    """Samples of the whole job per second."""
    return _counted_ratio(totals.samples, totals.time_s)


@metric("s/iteration", group="throughput", bases=("window",))
def seconds_per_iteration(totals: ClusterTotals) -> float | None:
    """Iteration time: data wait and step, from the end of one iteration to the end of the next."""
    return _ratio(totals.time_s, totals.iterations)


@metric("ratio", group="throughput", bases=("window",))
def data_wait_ratio(totals: ClusterTotals) -> float | None:
    """Share of iteration time spent between steps, waiting for data."""
    return _ratio(totals.wait_s, totals.time_s)


@metric("ratio", group="throughput", bases=("window",))
def padding_ratio(totals: ClusterTotals) -> float | None:
    """Share of the processed positions that are padding, where both counts are known."""
    if not totals.tokens or totals.tokens_processed < totals.tokens:
        return None
    return 1.0 - totals.tokens / totals.tokens_processed


@metric("TFLOP/s", group="throughput", bases=("window",))
def tflops_per_gpu(totals: ClusterTotals) -> float | None:
    """Model TFLOP/s of one device, from the FLOPs per token that the loop or a hook declared."""
    devices = totals.gpus or totals.world_size
    if totals.flops_per_token is None or not devices:
        return None
    rate = _counted_ratio(totals.tokens, totals.time_s)
    return None if rate is None else rate * totals.flops_per_token / devices / 1e12


@metric("ratio", group="throughput", bases=("window",))
def mfu_ratio(totals: ClusterTotals) -> float | None:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): model FLOP/s over the job's peak."""
    if totals.flops_per_token is None or not totals.peak_flops_per_s:
        return None
    rate = _counted_ratio(totals.tokens, totals.time_s)
    utilization = None if rate is None else rate * totals.flops_per_token / totals.peak_flops_per_s
    return utilization if utilization is not None and utilization <= 1.0 else None


@metric("GB", group="memory", bases=("run",))
def peak_gb(totals: ClusterTotals) -> float | None:
    """Largest memory reading on any device, run to date (2^30 bytes)."""
    return None if totals.memory_peak_bytes is None else totals.memory_peak_bytes / GIB


@metric("GB", group="memory", bases=("window",))
def smallest_mean_gb(totals: ClusterTotals) -> float | None:
    """Memory of the device that uses least of it, mean over the window (2^30 bytes)."""
    return None if totals.memory_min_bytes is None else totals.memory_min_bytes / GIB


@metric("GB", group="memory", bases=("window",))
def largest_mean_gb(totals: ClusterTotals) -> float | None:
    """Memory of the device that uses most of it, mean over the window (2^30 bytes)."""
    return None if totals.memory_max_bytes is None else totals.memory_max_bytes / GIB


@metric("ratio", group="health", bases=("window",))
def least_utilization_ratio(totals: ClusterTotals) -> float | None:
    """Utilization of the least busy device in the window."""
    return totals.utilization_min


# --- for single requests and for sets of runs: not in any report ---------------------------------


def inference_throughput(generated_tokens: float, time_s: float) -> float | None:
    """Return IT in tokens/s (Eq. 6); ``None`` where nothing was generated or no time passed."""
    return _counted_ratio(generated_tokens, time_s)


def model_compression_ratio(
    original_bytes: float, compressed_bytes: float, original_score: float, compressed_score: float
) -> float:
    """Return MCR (Eq. 9): how much smaller, times the share of the performance that was kept.

    Raises:
        ValueError: a size or the original's score is not above 0.
    """
    if not (original_bytes > 0 and compressed_bytes > 0 and original_score > 0):
        raise ValueError("sizes and the original's score must be above 0")
    return (original_bytes / compressed_bytes) * (compressed_score / original_score)


def evaluate(run: ClusterTotals, window: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return every metric on every base that it is shown on: tag -> value, without what is not measured."""
    bases = {"run": run, "window": window, "job": job}
    values: dict[str, float] = {}
    for entry in METRICS.values():
        for base in entry.bases:
            value = entry.formula(bases[base])
            if value is not None:
                values[entry.tag(base)] = value
    return values


def headline() -> Iterable[Metric]:
    """Yield the metrics of the contract, in the order of the block."""
    return (entry for entry in METRICS.values() if entry.console)


def describe(tag: str) -> Metric | None:
    """Return the metric behind a tag, or ``None`` for a tag that is not a metric's."""
    return METRICS.get(tag.rpartition("/")[2])


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _measured_ratio(above: float | None, below: float) -> float | None:
    return None if above is None else _ratio(above, below)


def _counted_ratio(count: float, below: float) -> float | None:
    # A loop that never counted tokens has processed an unknown number of them, not zero.
    return _ratio(count, below) if count > 0 else None


def _per_parameter(count: int, totals: ClusterTotals) -> float | None:
    rate = _counted_ratio(count, totals.time_s)
    return None if rate is None or not totals.parameters else rate / totals.parameters
