"""Every metric, one function each: totals of the cluster in, a number or ``None`` (not measured) out.

The name of a function is the metric's name and its TensorBoard tag, its docstring the help, its
decorator the unit.  Console, TensorBoard, run folder and command line all walk `METRICS`.

Definitions: EfficientLLM, arXiv 2505.13840, section 5.1, equations 1 to 12; how they reach over a
cluster is effllm's own and stands in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from effllm.records.job import ClusterTotals
from effllm.records.rank import POWER_STEP_W

Formula = Callable[[ClusterTotals], float | None]

GIB = 2**30
J_PER_WH = 3600.0
#: An energy, or what is derived from it, is not shown where its random error is a larger share of it.
MAX_SHOWN_ERROR = 0.2
#: Floats that are computed in two ways may differ by this share.
ROUNDING = 1e-9


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
    chart: bool  # False: another form of something that has a chart, or a part of it, for summaries alone
    error: Formula | None = None  # of a mean of samples: its random error, half-width, 95 %
    in_windows: bool = True  # False: another unit of a metric, for summaries alone

    def tag(self, base: str) -> str:
        """Return the tag, without the prefix ``efficientllm/``, of this metric on one base: no two bases have one."""
        if self.group:
            return f"{self.group}/{self.name}" if base == self.bases[0] else f"{base}_{self.group}/{self.name}"
        return self.name if base == "run" else f"{base}/{self.name}"

    @property
    def run_bases(self) -> tuple[str, ...]:
        """The bases that a summary has, which knows no window: what windows show is there of the run to date."""
        return tuple(
            dict.fromkeys(
                "run" if self.group and base == "window" else base
                for base in self.bases
                if self.group or base != "window"
            )
        )


METRICS: dict[str, Metric] = {}


def metric(
    unit: str,
    *,
    console: str | None = None,
    group: str = "",
    bases: Sequence[str] = ("run", "window", "job"),
    chart: bool = True,
    error: Formula | None = None,
    in_windows: bool = True,
) -> Callable[[Formula], Formula]:
    """Enter a formula into the table that every sink walks.

    A metric of a ``group`` has the tag ``group/name`` on the first of its bases, and ``base_group/name`` on others.

    Raises:
        ValueError: the name is taken, or the function explains nothing.
    """

    def enter(formula: Formula) -> Formula:
        name = formula.__name__
        if name in METRICS:
            raise ValueError(f"two metrics are named {name}")
        if not formula.__doc__:
            raise ValueError(f"metric {name} has no docstring, which is its help text")
        METRICS[name] = Metric(
            name, unit, formula.__doc__.strip(), formula, console, group, tuple(bases), chart, error, in_windows
        )
        return formula

    return enter


def _memory_error_gb(totals: ClusterTotals) -> float | None:
    return None if totals.devices.memory_error_bytes is None else totals.devices.memory_error_bytes / GIB


def _utilization_error(totals: ClusterTotals) -> float | None:
    return totals.devices.utilization_error


# --- the contract: the original's seven, in the order of its block -------------------------------


@metric("GB", console="AMU (GB): {:.2f}", error=_memory_error_gb)
def amu_gb(totals: ClusterTotals) -> float | None:
    """Average memory utilization: memory in use, averaged over time and then over devices (2^30 bytes; Eq. 1)."""
    return None if totals.devices.memory_mean_bytes is None else totals.devices.memory_mean_bytes / GIB


@metric("ratio", console="PCU (Ratio): {:.3f}", error=_utilization_error)
def pcu_ratio(totals: ClusterTotals) -> float | None:
    """Peak compute utilization: share of time in which the device was busy; despite its name a mean (Eq. 2)."""
    return totals.devices.utilization_mean


@metric("s/iteration", console="AL (Seconds): {:.4f}")
def al_seconds(totals: ClusterTotals) -> float | None:
    """Average latency: computation and communication of a step, mean over steps, of the slowest rank (Eq. 3)."""
    return _ratio(totals.loop.slowest_step_s, totals.loop.slowest_iterations)


@metric("tokens/parameter/s", console="TT (Tokens/Param/Sec): {:.2e}")
def tt_tokens_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Token throughput of the whole job divided by its parameters (Eq. 4)."""
    return _per_parameter(totals.counts.tokens, totals)


@metric("samples/parameter/s", console="ST (Samples/Param/Sec): {:.2e}")
def st_samples_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Sample throughput of the whole job divided by its parameters (Eq. 5)."""
    return _per_parameter(totals.counts.samples, totals)


@metric("W", console="AEC (Watts): {:.2f}")
def aec_watts(totals: ClusterTotals) -> float | None:
    """Average energy consumption: mean power of the whole job, despite its name (Eq. 8)."""
    return _energy_ratio(totals, totals.energy.joules, totals.energy.time_s)


@metric("tokens/s", console="IT (Tokens/Sec): {:.2f}")
def it_tokens_per_sec(totals: ClusterTotals) -> float | None:
    """Inference throughput: generated tokens per second of generation, not divided by parameters (Eq. 6)."""
    return inference_throughput(totals.counts.generated_tokens, totals.loop.generation_s)


# --- beside the seven ----------------------------------------------------------------------------


@metric("W", group="energy", bases=("window",))
def watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Mean power of one GPU, whatever else the scope of AEC holds. What rankings use."""
    power = _energy_ratio(totals, totals.energy.gpus_j, totals.energy.time_s)
    return None if power is None else _ratio(power, totals.constants.gpus)


@metric("W", group="energy", bases=("run",))
def p95_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Power that a GPU exceeds in a twentieth of the time, run to date: middle of a step of 10 W, at most the peak."""
    return power_percentile(totals, 0.95)


@metric("W", group="energy", bases=("run",), chart=False)
def median_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Power that a GPU exceeds half of the time, run to date: middle of a step of 10 W, at most the peak."""
    return power_percentile(totals, 0.5)


@metric("W", group="energy", bases=("run",), chart=False)
def peak_watts_per_gpu(totals: ClusterTotals) -> float | None:
    """Largest power reading of any GPU, run to date."""
    return totals.devices.power_peak_w


@metric("ratio", group="energy", bases=("window",), chart=False)
def power_limit_ratio(totals: ClusterTotals) -> float | None:
    """Mean power of the GPUs over their enforced power limits."""
    power = _energy_ratio(totals, totals.energy.gpus_j, totals.energy.time_s)
    return None if power is None or not totals.constants.power_limit_w else power / totals.constants.power_limit_w


@metric("ratio", group="energy", bases=("run",), chart=False)
def timing_error_ratio(totals: ClusterTotals) -> float | None:
    """Random part of the error of energy, run to date: where edges fall between readings (95 %)."""
    return _error_ratio(totals.energy.error_j, totals.energy.joules)


def is_energy_known(totals: ClusterTotals) -> bool:
    """Return whether energy is known well enough to be shown, as far as its random error says."""
    return (timing_error_ratio(totals) or 0.0) <= MAX_SHOWN_ERROR


@metric("ratio", group="energy", bases=("run",))
def sensor_error_ratio(totals: ClusterTotals) -> float | None:
    """Systematic part of the error of energy: the gain of the sensors (95 %); it does not average out."""
    return _error_ratio(totals.energy.gain_j, totals.energy.joules)


@metric("J", group="energy", bases=("job",))
def total_joules(totals: ClusterTotals) -> float | None:
    """Energy of the run so far; no value where a part of it was not measured."""
    return totals.energy.joules if totals.energy.is_complete else None


@metric("J", group="energy", bases=("job",))
def measured_joules(totals: ClusterTotals) -> float | None:
    """Energy that was measured, which is less than the total where there are holes."""
    return totals.energy.measured_j


@metric("J/token", group="energy", bases=("window", "run"))
def joules_per_token(totals: ClusterTotals) -> float | None:
    """Energy of a token: the same windows above and below the line."""
    return _energy_ratio(totals, totals.energy.joules, totals.energy.counts.tokens)


@metric("J/iteration", group="energy", bases=("window",), chart=False)
def joules_per_iteration(totals: ClusterTotals) -> float | None:
    """Energy of an iteration of the whole job."""
    return _energy_ratio(totals, totals.energy.joules, totals.energy.counts.iterations)


@metric("J/sample", group="energy", bases=("window",), chart=False)
def joules_per_sample(totals: ClusterTotals) -> float | None:
    """Energy of a sample."""
    return _energy_ratio(totals, totals.energy.joules, totals.energy.counts.samples)


@metric("J/token", group="energy", bases=("job",), chart=False)
def joules_per_generated_token(totals: ClusterTotals) -> float | None:
    """Energy of the whole run over the tokens that it generated; no value where a part of it was not measured."""
    return _measured_ratio(total_joules(totals), totals.counts.generated_tokens)


@metric("Wh", group="energy", bases=("job",), chart=False, in_windows=False)
def total_wh(totals: ClusterTotals) -> float | None:
    """Energy of the run so far in watt-hours; no value where a part of it was not measured."""
    joules = total_joules(totals)
    return None if joules is None else joules / J_PER_WH


@metric("J/10k tokens", group="energy", bases=("window",), chart=False, in_windows=False)
def joules_per_10k_tokens(totals: ClusterTotals) -> float | None:
    """Energy of ten thousand tokens."""
    joules = joules_per_token(totals)
    return None if joules is None else 1e4 * joules


@metric("tokens/J", group="energy", bases=("window",), chart=False, in_windows=False)
def tokens_per_joule(totals: ClusterTotals) -> float | None:
    """Tokens of a joule."""
    return (
        _ratio(totals.energy.counts.tokens, totals.energy.joules)
        if totals.energy.counts.tokens and totals.energy.joules
        else None
    )


@metric("J", group="energy", bases=("run",), chart=False)
def joules_above_baseline(totals: ClusterTotals) -> float | None:
    """Energy above what the idle devices drew before the first iteration; beside the energy, never instead of it."""
    if totals.energy.joules is None or totals.constants.baseline_w is None:
        return None
    return totals.energy.joules - totals.constants.baseline_w * totals.energy.time_s


@metric("kg CO2e", group="energy", bases=("job",))
def co2_kg(totals: ClusterTotals) -> float | None:
    """Emissions of the energy so far: kWh times PUE times the carbon intensity that was given."""
    if total_joules(totals) is None or totals.constants.carbon_g_per_kwh is None:
        return None
    return _site_kwh(totals) * totals.constants.carbon_g_per_kwh / 1e3


@metric("money", group="energy", bases=("job",), chart=False)
def electricity_cost(totals: ClusterTotals) -> float | None:
    """Price of the energy so far, in the currency of the price that was given: kWh times PUE times it."""
    if total_joules(totals) is None or totals.constants.price_per_kwh is None:
        return None
    return _site_kwh(totals) * totals.constants.price_per_kwh


@metric("money", group="energy", bases=("job",), chart=False)
def gpu_cost(totals: ClusterTotals) -> float | None:
    """Rent of the GPUs so far, in the currency of the price that was given."""
    if totals.constants.price_per_gpu_hour is None or not totals.constants.gpus:
        return None
    return totals.constants.gpus * totals.loop.time_s / 3600 * totals.constants.price_per_gpu_hour


@metric("tokens/s", group="throughput", bases=("window",))
def tokens_per_second(totals: ClusterTotals) -> float | None:
    """Tokens of the whole job per second, padding left out where the loop counts it."""
    return _counted_ratio(totals.counts.tokens, totals.loop.time_s)


@metric("tokens/s", group="throughput", bases=("window",))
def tokens_per_second_per_gpu(totals: ClusterTotals) -> float | None:
    """Tokens per second and GPU; per rank where there are no GPUs."""
    return _counted_ratio(
        totals.counts.tokens, totals.loop.time_s * (totals.constants.gpus or totals.constants.world_size)
    )


@metric("samples/s", group="throughput", bases=("window",))
def samples_per_second(totals: ClusterTotals) -> float | None:
    """Samples of the whole job per second."""
    return _counted_ratio(totals.counts.samples, totals.loop.time_s)


@metric("s/iteration", group="throughput", bases=("window",))
def seconds_per_iteration(totals: ClusterTotals) -> float | None:
    """Iteration time: data wait and step, from the end of one iteration to the end of the next."""
    return _ratio(totals.loop.time_s, totals.counts.iterations)


@metric("ratio", group="throughput", bases=("window",))
def data_wait_ratio(totals: ClusterTotals) -> float | None:
    """Share of iteration time spent between steps, waiting for data."""
    return _ratio(totals.loop.wait_s, totals.loop.time_s)


@metric("ratio", group="throughput", bases=("window",))
def exposed_communication_ratio(totals: ClusterTotals) -> float | None:
    """Share of the profiled iterations' time in which communication ran and no computation, over all ranks."""
    return None if totals.profile is None else _ratio(totals.profile.exposed_s, totals.profile.time_s)


@metric("s/iteration", group="throughput", bases=("window",), chart=False)
def exposed_seconds(totals: ClusterTotals) -> float | None:
    """Part of AL in which communication runs and no computation: AL times its share of the profiled iterations."""
    return _part_of_al(totals, exposed_communication_ratio(totals))


@metric("s/iteration", group="throughput", bases=("window",), chart=False)
def computation_seconds(totals: ClusterTotals) -> float | None:
    """AL less exposed communication, so that the two add up; what is idle and no communication is in it."""
    exposed = exposed_communication_ratio(totals)
    return None if exposed is None else _part_of_al(totals, 1.0 - exposed)


@metric("s/iteration", group="throughput", bases=("window",), chart=False)
def communication_seconds(totals: ClusterTotals) -> float | None:
    """Part of AL in which communication runs, hidden by computation or not; never to be added to computation."""
    profile = totals.profile
    return None if profile is None else _part_of_al(totals, _ratio(profile.communication_s, profile.time_s))


@metric("s/iteration", group="throughput", bases=("window",), chart=False)
def device_step_seconds(totals: ClusterTotals) -> float | None:
    """Step on the CUDA device, between events on its stream; mean over steps, of the slowest rank."""
    return _ratio(totals.loop.device_step_s, totals.loop.device_steps)


@metric("s", group="throughput", bases=("window",), chart=False)
def profiling_seconds(totals: ClusterTotals) -> float | None:
    """What a profiled iteration costs its rank beside itself: starting, stopping and reading the profiler."""
    return None if totals.profile is None else _ratio(totals.profile.cost_s, totals.profile.iterations)


@metric("ratio", group="throughput", bases=("window",))
def padding_ratio(totals: ClusterTotals) -> float | None:
    """Share of the processed positions that are padding; no value where the loop counted no padding."""
    if not totals.counts.tokens or totals.counts.tokens_processed <= totals.counts.tokens:
        return None
    return 1.0 - totals.counts.tokens / totals.counts.tokens_processed


@metric("TFLOP/s", group="throughput", bases=("window",))
def tflops_per_gpu(totals: ClusterTotals) -> float | None:
    """Model TFLOP/s of one device, from the FLOPs per token that the loop or a hook declared."""
    devices = totals.constants.gpus or totals.constants.world_size
    if totals.constants.flops_per_token is None or not devices:
        return None
    rate = _counted_ratio(totals.counts.tokens, totals.loop.time_s)
    return None if rate is None else rate * totals.constants.flops_per_token / devices / 1e12


@metric("ratio", group="throughput", bases=("window",))
def mfu_ratio(totals: ClusterTotals) -> float | None:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): model FLOP/s over the job's peak."""
    return _possible(share_of_peak(totals, totals.constants.flops_per_token))


@metric("ratio", group="throughput", bases=("window",))
def hfu_ratio(totals: ClusterTotals) -> float | None:
    """Hardware FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): recomputation counts as well."""
    return _possible(share_of_peak(totals, totals.constants.hardware_flops_per_token))


@metric("GB", group="memory", bases=("run",))
def peak_gb(totals: ClusterTotals) -> float | None:
    """Largest memory reading on any device, run to date (2^30 bytes)."""
    return None if totals.devices.memory_peak_bytes is None else totals.devices.memory_peak_bytes / GIB


@metric("GB", group="memory", bases=("window",))
def smallest_mean_gb(totals: ClusterTotals) -> float | None:
    """Memory of the device that uses least of it, mean over the window (2^30 bytes)."""
    return None if totals.devices.memory_min_bytes is None else totals.devices.memory_min_bytes / GIB


@metric("GB", group="memory", bases=("window",))
def largest_mean_gb(totals: ClusterTotals) -> float | None:
    """Memory of the device that uses most of it, mean over the window (2^30 bytes)."""
    return None if totals.devices.memory_max_bytes is None else totals.devices.memory_max_bytes / GIB


@metric("ratio", group="health", bases=("window",))
def least_utilization_ratio(totals: ClusterTotals) -> float | None:
    """Utilization of the least busy device in the window."""
    return totals.devices.utilization_min


@metric("ratio", group="health", bases=("window",))
def throttled_ratio(totals: ClusterTotals) -> float | None:
    """Share of GPU time in which heat or the board slowed a clock down; the power limit does not count."""
    return _measured_ratio(totals.devices.throttled_s, totals.devices.throttle_covered_s)


@metric("degC", group="health", bases=("window",))
def hottest_c(totals: ClusterTotals) -> float | None:
    """Highest temperature reading of any GPU in the window."""
    return totals.devices.temperature_max_c


@metric("MHz", group="health", bases=("window",))
def sm_clock_mhz(totals: ClusterTotals) -> float | None:
    """Clock of the streaming multiprocessors, mean over the window and the GPUs."""
    return None if totals.devices.sm_clock_hz is None else totals.devices.sm_clock_hz / 1e6


@metric("ratio", group="health", bases=("window",))
def sm_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of SMs and time with work on them (GPM, Hopper and later); utilization tells only that some kernel ran."""
    return totals.devices.sm_activity


@metric("ratio", group="health", bases=("window",))
def tensor_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of time in which tensor cores worked (GPM, Hopper and later)."""
    return totals.devices.tensor_activity


@metric("ratio", group="health", bases=("window",))
def dram_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of the memory's bandwidth in use (GPM, Hopper and later)."""
    return totals.devices.dram_activity


@metric("s", group="health", bases=("window",), chart=False)
def clock_error_s(totals: ClusterTotals) -> float | None:
    """Bound of the error of clocks' offsets to the aggregator's, of the rank where it is largest."""
    return totals.health.clock_error_s


@metric("s", group="health", bases=("job",))
def stalled_s(totals: ClusterTotals) -> float | None:
    """Time for which the whole job stood, no rank's loop moving: it is told of while it lasts."""
    return totals.health.stalled_s


# --- what measuring costs -------------------------------------------------------------------------


@metric("ratio", group="health", bases=("job",), chart=False)
def agent_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the agents over the elapsed time of their ranks: a share of one core each."""
    spent = totals.overhead
    return None if spent is None else _measured_ratio(spent.agents_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", group="health", bases=("job",), chart=False)
def recorder_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds in the loops' own calls, estimated from what one took at the start, over the ranks' elapsed time."""
    spent = totals.overhead
    return None if spent is None else _measured_ratio(spent.recorder_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", group="health", bases=("job",), chart=False)
def aggregator_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the aggregator and its sinks over the elapsed time: a share of one core."""
    spent = totals.overhead
    return None if spent is None else _measured_ratio(spent.aggregator_cpu_s, totals.goodput.elapsed_s)


@metric("bytes/s", group="health", bases=("job",), chart=False)
def sent_bytes_per_second(totals: ClusterTotals) -> float | None:
    """Bytes that an agent sends, over the elapsed time, mean over ranks."""
    spent = totals.overhead
    return None if spent is None else _measured_ratio(spent.sent_bytes, totals.goodput.rank_seconds)


# --- where the elapsed time of the job went: docs/goodput.md --------------------------------------


@metric("ratio", group="goodput", bases=("job",))
def ratio(totals: ClusterTotals) -> float | None:
    """Goodput: share of the elapsed time, over all attempts, in iterations that were kept and in generation."""
    return _ratio(
        sum(totals.goodput.class_s.get(name, 0.0) for name in ("kept", "generation")), totals.goodput.elapsed_s
    )


@metric("ratio", group="goodput", bases=("job",), chart=False)
def redone_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time in iterations that were lost and done again after a restart."""
    return _share_of_elapsed(totals, "redone")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def restart_gap_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time between the end of an attempt and the beginning of the next."""
    return _share_of_elapsed(totals, "restart_gap")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def startup_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time before the first iteration of each attempt."""
    return _share_of_elapsed(totals, "startup")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def checkpoint_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time in checkpoints."""
    return _share_of_elapsed(totals, "checkpoint")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def unknown_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time of which no report tells."""
    return _share_of_elapsed(totals, "unknown")


@metric("J", group="goodput", bases=("job",), chart=False)
def lost_joules(totals: ClusterTotals) -> float | None:
    """Measured energy of what was lost: iterations done again, straggling, hangs."""
    lost = [totals.goodput.class_j.get(name) for name in ("redone", "straggling", "hang")]
    return None if None in lost else sum(joules for joules in lost if joules is not None)


@metric("ranks", group="straggler", bases=("window",), chart=False)
def named_ranks(totals: ClusterTotals) -> float | None:
    """Ranks that are named as stragglers at the end of the window; no value where no rank has a sync point."""
    return None if totals.health.straggling_s is None else float(totals.health.stragglers)


@metric("ratio", group="straggler", bases=("window",), chart=False)
def waiting_ratio(totals: ClusterTotals) -> float | None:
    """Share of iteration time in which the job waited for whoever is named as a straggler."""
    return _measured_ratio(totals.health.straggling_s, totals.loop.time_s)


@metric("GPU-s", group="straggler", bases=("job",), chart=False)
def waiting_gpu_seconds(totals: ClusterTotals) -> float | None:
    """What all ranks together have waited for stragglers, once they stood out."""
    return None if totals.health.straggling_s is None else totals.health.straggling_gpu_s


@metric("J", group="straggler", bases=("job",), chart=False)
def waiting_joules(totals: ClusterTotals) -> float | None:
    """What the devices of those that waited have drawn for it, by their mean power in those windows."""
    return None if totals.health.straggling_s is None else totals.health.straggling_j


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
    """Return what a window shows, every metric on each of its bases: tag -> value, without what is not measured."""
    bases = {"run": run, "window": window, "job": job}
    shown = [(entry, base) for entry in METRICS.values() if entry.in_windows for base in entry.bases]
    values = {entry.tag(base): entry.formula(bases[base]) for entry, base in shown}
    return {tag: value for tag, value in values.items() if value is not None}


def evaluate_run(run: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return what a summary shows: tag -> value, without what is not measured."""
    bases = {"run": run, "job": job}
    shown = [(entry, base) for entry in METRICS.values() for base in entry.run_bases]
    values = {entry.tag(base): entry.formula(bases[base]) for entry, base in shown}
    return {tag: value for tag, value in values.items() if value is not None}


def errors(run: ClusterTotals, job: ClusterTotals) -> dict[str, tuple[float, float]]:
    """Return the random and the systematic error of what a summary shows: tag -> half-widths, 95 %.

    Of energy and power each is what the metric would change by if the energy were off by its own error; means of
    samples have a random error alone.
    """
    bases = {"run": run, "job": job}
    found: dict[str, tuple[float, float]] = {}
    for entry in METRICS.values():
        for base in entry.run_bases:
            totals = bases[base]
            value = entry.formula(totals)
            if value is not None and entry.error is not None and (error := entry.error(totals)) is not None:
                found[entry.tag(base)] = (error, 0.0)
            if value is None or not totals.energy.joules:
                continue
            shares = (totals.energy.error_j / totals.energy.joules, totals.energy.gain_j / totals.energy.joules)
            random = _moved(entry.formula, totals, value, shares[0], gain=False)
            systematic = _moved(entry.formula, totals, value, shares[1], gain=True)
            if random or systematic:
                found[entry.tag(base)] = (random, systematic)
    return found


def _moved(formula: Formula, totals: ClusterTotals, value: float, share: float, gain: bool) -> float:
    scale = 1 + share
    energy, devices = totals.energy, totals.devices
    moved = replace(
        totals,
        energy=replace(
            energy,
            joules=_scaled(energy.joules, scale),
            gpus_j=_scaled(energy.gpus_j, scale),
            measured_j=_scaled(energy.measured_j, scale),
            gain_j=energy.gain_j * scale,
            start_j2=energy.start_j2 * scale**2,
            end_j2=energy.end_j2 * scale**2,
            inside_j2=energy.inside_j2 * scale**2,
        ),
    )
    if gain:  # the power readings of the same sensors have the same factor
        moved = replace(
            moved,
            constants=replace(totals.constants, baseline_w=_scaled(totals.constants.baseline_w, scale)),
            devices=replace(
                devices,
                power_peak_w=_scaled(devices.power_peak_w, scale),
                power_histogram_s={(bar + 0.5) * scale - 0.5: s for bar, s in devices.power_histogram_s.items()},
            ),
        )
    after = formula(moved)
    change = 0.0 if after is None else abs(after - value)
    return change if change > ROUNDING * abs(value) else 0.0


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def power_percentile(totals: ClusterTotals, share: float) -> float | None:
    """Return the power below which GPUs spent a share of their time: the middle of a bar, at most the peak."""
    whole_s = sum(totals.devices.power_histogram_s.values())
    passed_s = 0.0
    for step, seconds in sorted(totals.devices.power_histogram_s.items()):
        passed_s += seconds
        if passed_s >= share * whole_s:
            middle_w = (step + 0.5) * POWER_STEP_W
            return middle_w if totals.devices.power_peak_w is None else min(middle_w, totals.devices.power_peak_w)
    return None


def share_of_peak(totals: ClusterTotals, flops_per_token: float | None) -> float | None:
    """Return FLOP/s over the job's peak, by the FLOPs of a token: a utilization, unless one of these is wrong."""
    rate = _counted_ratio(totals.counts.tokens, totals.loop.time_s)
    if rate is None or flops_per_token is None or not totals.constants.peak_flops_per_s:
        return None
    return rate * flops_per_token / totals.constants.peak_flops_per_s


def headline() -> Iterable[Metric]:
    """Yield the metrics of the contract, in the order of the block."""
    return (entry for entry in METRICS.values() if entry.console)


def describe(tag: str) -> Metric | None:
    """Return the metric behind a tag, or ``None`` for a tag that is not a metric's."""
    return METRICS.get(tag.rpartition("/")[2])


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _share_of_elapsed(totals: ClusterTotals, name: str) -> float | None:
    return _ratio(totals.goodput.class_s[name], totals.goodput.elapsed_s) if name in totals.goodput.class_s else None


def _part_of_al(totals: ClusterTotals, share: float | None) -> float | None:
    step = al_seconds(totals)
    return None if step is None or share is None else share * step


def _measured_ratio(above: float | None, below: float) -> float | None:
    return None if above is None else _ratio(above, below)


def _energy_ratio(totals: ClusterTotals, joules: float | None, below: float) -> float | None:
    return _measured_ratio(joules, below) if is_energy_known(totals) else None


def _error_ratio(error: float, value: float | None) -> float | None:
    return error / value if value else None


def _possible(share: float | None) -> float | None:
    return share if share is not None and share <= 1.0 else None


def _site_kwh(totals: ClusterTotals) -> float:
    return (totals.energy.joules or 0.0) / (1e3 * J_PER_WH) * totals.constants.pue


def _counted_ratio(count: float, below: float) -> float | None:
    # A loop that never counted tokens has processed an unknown number of them, not zero.
    return _ratio(count, below) if count > 0 else None


def _per_parameter(count: int, totals: ClusterTotals) -> float | None:
    rate = _counted_ratio(count, totals.loop.time_s)
    return None if rate is None or not totals.constants.parameters else rate / totals.constants.parameters
