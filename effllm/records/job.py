"""The aggregator's results from the reports of all ranks: ClusterTotals -> ClusterReport -> sinks; and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_type_hints

from msgspec import Struct, defstruct
from msgspec.structs import fields

from effllm.records.counters import FIELDS, Counters
from effllm.records.energy import EnergyAmount
from effllm.records.forecast import Forecast
from effllm.records.host_lines import HostTime
from effllm.records.identity import Identity
from effllm.records.rank import Count, Duration, Ordinal, Profile
from effllm.records.values import ValueSummary
from effllm.records.verdict import (
    OF_RANKS,
    Audit,
    ClockLoss,
    LastRanks,
    MemoryPressureLoss,
    OutOfMemory,
    SlowIterations,
    Straggler,
    StragglerVerdict,
    Verdict,
    Waterfall,
)

#: Version of all files of runs, also of lines of the ledger; it is incremented when a field is removed or changes its
#: meaning. Files of another version are not read.
SCHEMA_VERSION = 5


def version_error(version: object) -> str:
    """Return why a file with this ``schema_version`` is not read; empty if it can be read."""
    remedy = f"this version of effllm reads only {SCHEMA_VERSION}: use the version of effllm that wrote it"
    return "" if version == SCHEMA_VERSION else f"it has schema_version {version}, and {remedy}"


if TYPE_CHECKING:
    Counted = Counters
    SummedEnergy = EnergyAmount
else:  # sums over all ranks have no bounds: a sum of many amounts can exceed the bounds of one amount in a frame
    # In a record, the counters follow the other fields.
    Counted = defstruct("Counted", [(name, int, 0) for name in FIELDS], kw_only=True)
    _PLAIN = get_type_hints(EnergyAmount)
    SummedEnergy = defstruct(
        "SummedEnergy",
        [(field.name, _PLAIN[field.name], field.default) for field in fields(EnergyAmount)],
        bases=(EnergyAmount,),
        frozen=True,
    )


class JobConstants(Struct, frozen=True, omit_defaults=True):
    """Constants of a job; they change only when a rank joins or a loop declares further values."""

    parameters: int | None = None
    gpus: int = 0
    world_size: int = 0
    peak_flops_per_s: float | None = None  # sum over all devices
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None  # recomputation included
    power_limit_w: float | None = None  # sum over all GPUs
    baseline_w: float | None = None  # idle power of all devices in the power scope
    carbon_g_per_kwh: float | None = None
    pue: float = 1.0
    price_per_kwh: float | None = None
    price_per_gpu_hour: float | None = None
    power_limit_default_w: float | None = None  # sum over all GPUs
    gpus_with_clock: int = 0  # GPUs with an SM clock and a reference clock
    has_shared_gpu: bool = False  # ranks use the same GPU although each of them sees several

    @property
    def devices(self) -> int:
        """The number of GPUs, or of ranks in a job without GPUs; 0 if it means little because ranks share a GPU."""
        return 0 if self.has_shared_gpu else self.gpus or self.world_size


class Counts(Counted, Struct, frozen=True):
    """Counts over all ranks, in the iterations of one or more windows."""

    iterations: int = 0
    losses_not_finite: int = 0  # losses that were NaN or infinite


class LoopTimes(Struct, frozen=True):
    """Times of the iterations.  Each field is of the slowest rank, which the field's comment defines."""

    time_s: float = 0.0  # T: maximum over ranks of the sum of iteration times (on the base job: of wall times)
    slowest_step_s: float = 0.0  # sum of the steps of the rank with the largest mean step
    slowest_iterations: int = 0  # number of these steps
    wait_s: float = 0.0  # data wait of the rank with the largest T
    generation_s: float = 0.0  # generation time of the rank with the longest generation
    device_steps: int = 0  # number of steps of the rank with the largest mean step on its device
    device_step_s: float = 0.0  # sum of these steps on the device


class JobEnergy(SummedEnergy, frozen=True, array_like=False, kw_only=True):
    """The energy of the windows with sufficient coverage, with the time and counts of these windows."""

    time_s: float = 0.0  # T of the windows with sufficient coverage
    counts: Counts = Counts()  # counts of the windows with sufficient coverage
    is_complete: bool = False  # whether all windows are included, so joules is the total
    measured_j: float | None = None  # energy in the time with readings, also estimated; without a gap it is the total
    gpus_j: float | None = None  # energy of the GPUs without other devices, in the same windows


class DeviceTotals(Struct, frozen=True):
    """The readings of all devices."""

    memory_mean_bytes: float | None = None  # mean over devices of the time-weighted means
    memory_min_bytes: float | None = None  # smallest time-weighted mean of a device
    memory_max_bytes: float | None = None
    memory_peak_bytes: float | None = None  # the largest reading, or level between two readings at a window's edge
    memory_error_bytes: float | None = None  # sampling error of memory_mean_bytes: half-width, 95 %
    utilization_mean: float | None = None
    utilization_min: float | None = None
    utilization_max: float | None = None
    utilization_error: float | None = None  # sampling error of utilization_mean; None if there is no GPU
    power_peak_w: float | None = None  # the largest reading of one GPU
    power_histogram_s: dict[int, float] = {}  # bin -> GPU-seconds; a bin is POWER_STEP_W wide
    throttled_s: float | None = None  # GPU-seconds in which heat or the board lowered the clock
    throttle_covered_s: float = 0.0
    temperature_max_c: float | None = None
    sm_clock_hz: float | None = None  # mean over time and GPUs; the next three fields are such means, too
    sm_activity: float | None = None
    tensor_clock_hz: float | None = None  # mean of tensor activity times SM clock, in whole readings in iterations
    tensor_clock_most_hz: float | None = None  # of one reading
    tensor_clock_covered_s: float = 0.0
    tensor_activity: float | None = None
    dram_activity: float | None = None
    # GPU-seconds by clocks event reason; reasons may overlap, and include reasons that are no fault, such as power_cap.
    throttled_by_s: dict[str, float] = {}
    # SM clock over the clock of the peak FLOP/s, in iterations while the GPU was busy; mean over time and GPUs.
    sm_clock_ratio: float | None = None
    sm_clock_covered_s: float = 0.0  # GPU-seconds with this ratio
    sm_clock_error: float | None = None  # sampling error of the ratio: half-width, 95 %


class HealthTotals(Struct, frozen=True):
    """Stragglers and stalls."""

    straggling_s: float | None = None  # time in which ranks waited for stragglers; None if no rank has an own time
    straggling_gpu_s: float = 0.0  # time that ranks waited for stragglers, summed over the waiting ranks
    straggling_j: float | None = None  # energy of the waiting ranks' devices while they waited
    stalled_s: float | None = None  # time of the whole run in which no rank made progress
    stragglers: int = 0  # number of stragglers at the end of the window


class GoodputTotals(Struct, frozen=True):
    """The elapsed time of a job by class; see effllm/job/goodput.py."""

    elapsed_s: float = 0.0  # over all attempts
    class_s: dict[str, float] = {}
    class_j: dict[str, float | None] = {}
    rank_seconds: float = 0.0  # elapsed time, summed over ranks


class Overhead(Struct, frozen=True):
    """The cost of measurement: CPU seconds, summed over the processes of each kind."""

    recorder_cpu_s: float | None = None  # estimated: duration of a call (measured at the start) times number of calls
    agents_cpu_s: float | None = None
    aggregator_cpu_s: float | None = None  # sum over all consecutive aggregators of the run
    sent_bytes: int | None = None  # counted by the agents
    received_bytes: int | None = None  # counted by aggregators


class ClusterTotals(Struct, frozen=True):
    """Totals of the whole job on one base; every metric is computed from such totals."""

    counts: Counts = Counts()
    loop: LoopTimes = LoopTimes()
    energy: JobEnergy = JobEnergy()
    devices: DeviceTotals = DeviceTotals()
    health: HealthTotals = HealthTotals()
    goodput: GoodputTotals = GoodputTotals()
    constants: JobConstants = JobConstants()  # the same object in all totals of a report
    profile: Profile | None = None  # of all ranks
    overhead: Overhead | None = None


class Coverage(Struct, frozen=True):
    """The part of the job that the values cover."""

    ranks_expected: int
    ranks_reporting: int
    gpus_expected: int
    gpus_measured: int
    reports_lost: int
    reports_late: int
    missing_ranks: tuple[int, ...] = ()
    energy: float | None = None  # measured share of the window's device-seconds
    memory: float | None = None
    utilization: float | None = None


#: The values of a window that have a `Spread`: name -> meaning.
STEP_SECONDS, GPU_WATTS, UTILIZATION_RATIO = "step_seconds", "gpu_watts", "utilization_ratio"
SPREADS: dict[str, str] = {
    STEP_SECONDS: "mean step time of a rank in the window, over ranks",
    GPU_WATTS: "mean power of a GPU in the window's iterations, over GPUs",
    UTILIZATION_RATIO: "utilization of a GPU in the window's iterations, over GPUs",
}


class Spread(Struct, frozen=True):
    """The exact distribution of one value over all ranks or GPUs."""

    count: int  # number of values
    least: float
    p5: float
    median: float
    p95: float
    most: float


class WindowReport(Struct, frozen=True, omit_defaults=True):
    """One window of the whole job, without its totals."""

    attempt: Count
    window: Count
    iteration: int  # the number shown
    iteration_first: Ordinal  # within the attempt
    iteration_last: Ordinal
    time_s: float  # unix time at which the last rank ended the window
    loss: float | None
    values: dict[str, float]  # tag without its prefix -> value; metrics that were not measured are absent
    coverage: Coverage
    straggler: Straggler | None = None  # None if noise explains all differences, or no rank has an own time
    total_iterations: int | None = None  # None if the length of the job is unknown
    forecast: Forecast = {}  # of the end of the job; empty without its length
    style: str = "Iteration"  # or "Step"
    simulated: bool = False
    power_scope: str | None = None
    warming_up: bool = False
    final: bool = False
    correction: bool = False  # True: new totals after a late report, not a new window
    energy_by_class: dict[str, float | None] = {}
    time_by_class: dict[str, float] = {}
    energy_doubtful: bool = False  # the window's energy has a random error of more than 5 %
    stragglers: tuple[StragglerVerdict, ...] = ()  # current stragglers, at most 16, the costliest first
    instruments: dict[str, ValueSummary] = {}  # values of instruments in the window, by name
    doubtful: tuple[str, ...] = ()  # tags of values that depend on counts with a failed check, or with a gap
    spread: dict[str, Spread] = {}  # distributions over ranks or GPUs in the window, by name in SPREADS


class ClusterReport(WindowReport, frozen=True, kw_only=True):
    """One window of the whole job, and the run to date; every sink receives these reports."""

    run: ClusterTotals  # run to date, after warm-up
    last: ClusterTotals  # this window only
    job: ClusterTotals  # whole wall time of the run, with start-up, phases and warm-up
    gpu_seconds: dict[str, float] = {}  # of all attempts, by part of the waterfall; empty without GPUs
    gpus_unused: int | None = None  # allocated GPUs that no rank uses; None if no scheduler states them on all nodes


class Value(Struct, frozen=True, omit_defaults=True):
    """A metric in summary.json."""

    value: float
    unit: str
    error: float | None = None  # random part of the error, half-width of a 95 % interval
    sensor_error: float | None = None  # systematic part of the error: the gain of the sensors, half-width, 95 %
    doubt: str | None = None  # the failed check of the audit, or what is missing in the counts of the value


class EnergySummary(Struct, frozen=True):
    """The energy of a run in summary.json."""

    total_joules: float | None = None  # None if a part was not measured
    measured_joules: float | None = None
    error_joules: float | None = None
    gain_error: float | None = None
    scope: str | None = None
    method: str | None = None
    joules_per_token: float | None = None
    by_device: dict[str, float] = {}
    error_by_device: dict[str, float] = {}  # random part of the error, half-width, 95 %
    estimated_joules: float | None = None  # part of the total, estimated from power because a counter had no value
    warmup_joules: float | None = None  # part of the total, used in the warm-up; run-to-date values exclude this part
    by_class: dict[str, float | None] = {}
    time_coverage: float | None = None  # measured share of the elapsed time (without restart gaps), mean over devices
    iterations_coverage: float | None = None  # measured share of the iterations, mean over devices


class AttemptSummary(Struct, frozen=True):
    """One attempt of a job in summary.json."""

    attempt: int
    status: str
    start_time_s: float  # unix
    end_time_s: float
    elapsed_s: float
    gap_before_s: float  # time since the end of the previous attempt
    world_size: int
    iterations: int
    first: int | None = None  # the number shown
    last: int | None = None
    redone_iterations: int | None = 0  # iterations that a later attempt repeated; None if unknown
    startup_s: float = 0.0  # time before the first iteration, mean over ranks
    gpus: int | None = None  # GPUs of the ranks that joined; None if no window of the attempt has closed
    unused_gpus: int | None = None  # allocated GPUs that no rank uses; None if no scheduler states them on all nodes
    # GPUs of all ranks, estimated from the ranks that joined; ranks in a job without GPUs.
    devices: float = 0.0
    # Waits and phases between the repeated iterations, mean over ranks: an estimate, and an upper bound.
    redone_around_s: float = 0.0
    max_redone_around_s: float = 0.0


class GoodputSummary(Struct, frozen=True):
    """The elapsed time of a job over all attempts, split into classes; the sum of the classes is the elapsed time."""

    elapsed_s: float
    ratio: float | None  # kept and generation time over elapsed time
    seconds: dict[str, float]  # by class, mean over the ranks of each attempt
    rank_seconds: dict[str, float]  # by class, sum over the ranks
    joules: dict[str, float | None]  # measured
    redone_iterations: int | None = None  # None if a restart did not report its first iteration
    attempts: tuple[AttemptSummary, ...] = ()
    device_seconds: dict[str, float] = {}  # by class: rank-seconds times the devices of a rank, of each attempt
    unit: str = OF_RANKS  # of these seconds; OF_GPUS if a rank of any attempt has a GPU
    core_wait_s: float | None = None  # rank-seconds in which training threads could run and had no CPU core
    hidden_data_s: float = 0.0  # rank-seconds by which waits for data may cost more: only means of iterations are known
    data_in_steps_s: float = 0.0  # device-seconds of the class data in which ranks waited in steps for others' data
    unused_gpu_seconds: float = 0.0  # of allocated GPUs that no rank uses, over all attempts and the gaps between them


class Summary(Identity, Struct, frozen=True, kw_only=True):
    """The content of summary.json: the identity of the run, and the run so far; written every minute and at the end."""

    status: str  # running, completed, failed, interrupted (Ctrl-C), killed, stalled, ended (exit status not visible)
    iterations: Count
    attempts: Count
    parameters: int | None
    parameters_kind: str
    metrics: dict[str, Value]
    energy: EnergySummary
    coverage: Coverage
    overhead: Overhead
    updated_time_s: float
    elapsed_s: Duration
    time_by_class: dict[str, float] = {}
    simulated: bool = False
    not_measured: tuple[str, ...] = ()
    tokens: int | None = None  # None if the loop counted no tokens, or if a part is missing
    samples: int | None = None
    measured_tokens: int | None = None  # counted tokens, also if a part is missing
    measured_samples: int | None = None
    token_source: str = ""  # how the tokens of a batch were counted; empty without batches, as after `effllm.count`
    measured_iterations_ratio: float | None = None  # share of the iterations of all ranks that are in the counts
    loss: float | None = None  # the last loss; None if it is not finite
    losses_not_finite: int = 0  # number of losses of all ranks that were NaN or infinite
    first_not_finite: int | None = None  # number, as shown, of the first iteration with such a loss
    events: dict[str, int] = {}  # kind -> number of events
    peak: str = ""  # peak FLOP/s of a device for MFU, with its source
    profile: Profile | None = None  # sums over the run to date and all ranks
    left_out: dict[str, int] = {}  # sink -> windows not written, because the sink was too slow or its disk was full
    stragglers: tuple[StragglerVerdict, ...] = ()  # all stragglers of the run, with total costs, the costliest first
    last_ranks: LastRanks = LastRanks()
    goodput: GoodputSummary | None = None
    instruments: dict[str, ValueSummary] = {}  # values of instruments in the whole run, by name
    waterfall: Waterfall | None = None
    host: HostTime | None = None  # lines of code in which the hosts were; None without a recording of stacks
    # Losses by low SM clocks with a reason: throttled, power_limit; without one, and without a known loss: locked.
    slow_clocks: dict[str, ClockLoss] = {}
    slow_iterations: SlowIterations | None = None  # None without long iterations
    rare_waits: SlowIterations | None = None  # None if waits for data are frequent
    memory_pressure: MemoryPressureLoss | None = None  # retries of torch's allocator; None without retries
    out_of_memory: OutOfMemory | None = None  # None if the job has not ended with an out-of-memory error
    verdict: Verdict | None = None
    audit: Audit | None = None
    forecast: Forecast = {}  # of the end of a running job
    currency: str = ""  # of the costs; empty if it is not set
    is_over: bool = True  # False: the run continues or is stalled, and this file will be written again
    schema_version: int = SCHEMA_VERSION
