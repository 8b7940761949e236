"""What the aggregator makes of the reports of all ranks: ClusterTotals -> ClusterReport -> sink, and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_type_hints

from msgspec import Struct, defstruct
from msgspec.structs import fields

from effllm.records.counters import FIELDS, Counters
from effllm.records.energy import EnergyAmount
from effllm.records.rank import Profile

#: Of the files in a run folder: one more when a field of theirs changes its meaning or goes away.
SCHEMA_VERSION = 3


if TYPE_CHECKING:
    Counted = Counters
    SummedEnergy = EnergyAmount
else:  # sums over all ranks: they have no bounds, for many amounts within those of a frame add up to more
    # Counters come after the record's own fields.
    Counted = defstruct("Counted", [(name, int, 0) for name in FIELDS], kw_only=True)
    _PLAIN = get_type_hints(EnergyAmount)
    SummedEnergy = defstruct(
        "SummedEnergy",
        [(one.name, _PLAIN[one.name], one.default) for one in fields(EnergyAmount)],
        bases=(EnergyAmount,),
        frozen=True,
    )


class JobConstants(Struct, frozen=True, omit_defaults=True):
    """What holds for all windows of a job, until another rank joins or a loop declares more."""

    parameters: int | None = None
    gpus: int = 0
    world_size: int = 0
    peak_flops_per_s: float | None = None  # of the whole job
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None  # recomputation included
    power_limit_w: float | None = None  # of all GPUs
    baseline_w: float | None = None  # of all devices in scope, idle
    carbon_g_per_kwh: float | None = None
    pue: float = 1.0
    price_per_kwh: float | None = None
    price_per_gpu_hour: float | None = None


class Counts(Counted, Struct, frozen=True):
    """What the iterations of some windows counted, over all ranks."""

    iterations: int = 0
    losses_not_finite: int = 0  # losses that were NaN or infinite


class LoopTimes(Struct, frozen=True):
    """Where the time of the iterations went, on the ranks that took longest."""

    time_s: float = 0.0  # T: maximum over ranks of their summed iteration times (on the base job: of their wall times)
    slowest_step_s: float = 0.0  # of the rank with the largest mean step: its summed steps ...
    slowest_iterations: int = 0  # ... and how many they are
    wait_s: float = 0.0  # of the rank with the largest T
    generation_s: float = 0.0  # of the rank that generated for longest
    device_steps: int = 0  # of the rank with the largest mean step on its device ...
    device_step_s: float = 0.0  # ... and their time there


class JobEnergy(SummedEnergy, frozen=True, array_like=False, kw_only=True):
    """The energy of the windows of which enough was measured, and what these windows did."""

    time_s: float = 0.0  # T of these windows
    counts: Counts = Counts()  # of these windows
    is_complete: bool = False  # no window was left out: this is the total
    measured_j: float | None = None  # with the windows that were left out: never a total
    gpus_j: float | None = None  # that GPUs drew in these windows, whatever the scope of the energy


class DeviceTotals(Struct, frozen=True):
    """The readings of all devices."""

    memory_mean_bytes: float | None = None  # mean over devices of their time-weighted means
    memory_min_bytes: float | None = None  # the smallest of those means
    memory_max_bytes: float | None = None
    memory_peak_bytes: float | None = None  # the largest single reading
    memory_error_bytes: float | None = None  # of memory_mean_bytes, from sampling: half-width, 95 %
    utilization_mean: float | None = None
    utilization_min: float | None = None
    utilization_max: float | None = None
    utilization_error: float | None = None  # of utilization_mean, from sampling; None where it is not sampled
    power_peak_w: float | None = None  # the largest reading of one GPU
    power_histogram_s: dict[int, float] = {}  # GPU-seconds by power, in steps of POWER_STEP_W
    throttled_s: float | None = None  # GPU-seconds in which heat or the board slowed a clock down
    throttle_covered_s: float = 0.0
    temperature_max_c: float | None = None
    sm_clock_hz: float | None = None  # mean over time and GPUs, as are the activities
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None


class HealthTotals(Struct, frozen=True):
    """The waiting of ranks for each other."""

    clock_error_s: float | None = None  # of the rank whose clock's offset has the largest error: half-width, a bound
    straggling_s: float | None = None  # that all ranks waited for stragglers; None where no rank's own time is known
    straggling_gpu_s: float = 0.0  # the same, summed over the ranks that waited ...
    straggling_j: float | None = None  # ... and what their devices drew then
    stalled_s: float | None = None  # in which no rank of the job made progress, of its whole run
    stragglers: int = 0  # ranks that are named at the end of the window


class GoodputTotals(Struct, frozen=True):
    """The elapsed time of a job by class: effllm/job/goodput.py."""

    elapsed_s: float = 0.0  # over all attempts
    class_s: dict[str, float] = {}
    class_j: dict[str, float | None] = {}
    rank_seconds: float = 0.0  # elapsed, summed over ranks


class Overhead(Struct, frozen=True):
    """What the measurement itself cost, in CPU seconds over all its processes of a kind."""

    recorder_cpu_s: float | None = None  # an estimate: what a call took at the start, times the calls
    agents_cpu_s: float | None = None
    aggregator_cpu_s: float | None = None  # of all that served the run, one after another
    sent_bytes: int | None = None  # by agents, as they count them
    received_bytes: int | None = None  # by aggregators


class ClusterTotals(Struct, frozen=True):
    """What the whole job did on one time base: the argument of every metric."""

    counts: Counts = Counts()
    loop: LoopTimes = LoopTimes()
    energy: JobEnergy = JobEnergy()
    devices: DeviceTotals = DeviceTotals()
    health: HealthTotals = HealthTotals()
    goodput: GoodputTotals = GoodputTotals()
    constants: JobConstants = JobConstants()  # one object in all totals of a report
    profile: Profile | None = None  # of all ranks
    overhead: Overhead | None = None


class Straggler(Struct, frozen=True):
    """The slowest rank of a window, where own times show that it is slow in window after window.

    Iterations show nothing of the kind: in synchronous training all take equally long, because the others wait.
    """

    rank: int
    time_s: float  # its own time of an iteration ...
    median_s: float  # ... and that of the median of its peers


#: The evidence of a verdict, from the best to the weakest.
OWN_TIME = "own time"  # from an iteration's start to the sync point
PROFILE = "profile"  # computation in profiled iterations
DATA_WAIT = "data wait"  # waiting for data, while the others wait for the rank
ARRIVAL = "arrival"  # the order of arrival at the sync point, by aligned clocks
EVIDENCE = (OWN_TIME, PROFILE, DATA_WAIT, ARRIVAL)


class StragglerVerdict(Struct, frozen=True):
    """A rank that holds the others up, window after window, and what that has cost so far."""

    ranks: tuple[int, ...]  # one; of ranks that wait for each other before the sync point, all of them
    host: str
    device: str
    since_iteration: int  # the number shown
    slowdown: float  # its time over the median of its peers, less one
    z: float  # the same in robust standard deviations
    peers: int  # that it is compared with
    evidence: str  # one of EVIDENCE
    why: str = "unknown"
    gpu_seconds: float = 0.0  # that others waited for it
    joules: float | None = None  # that their devices drew then


class Coverage(Struct, frozen=True):
    """How much of the job the numbers cover."""

    ranks_expected: int
    ranks_reporting: int
    gpus_expected: int
    gpus_measured: int
    reports_lost: int
    reports_late: int
    missing_ranks: tuple[int, ...] = ()
    energy: float | None = None  # measured device-seconds over expected ones, in the window
    memory: float | None = None
    utilization: float | None = None


#: The values that windows have a `Spread` of: name -> what it is.
STEP_SECONDS, GPU_WATTS, UTILIZATION_RATIO = "step_seconds", "gpu_watts", "utilization_ratio"
SPREADS: dict[str, str] = {
    STEP_SECONDS: "mean step of a rank in the window, over ranks",
    GPU_WATTS: "mean power of a GPU in the window's iterations, over GPUs",
    UTILIZATION_RATIO: "utilization of a GPU in the window's iterations, over GPUs",
}


class Spread(Struct, frozen=True):
    """How one value of each rank or GPU lies over all of them, exactly."""

    count: int  # of values
    least: float
    p5: float
    median: float
    p95: float
    most: float


class WindowReport(Struct, frozen=True, omit_defaults=True):
    """One window of the whole job, without its totals."""

    attempt: int
    window: int
    iteration: int  # the number shown
    iteration_first: int  # ordinals within the attempt
    iteration_last: int
    time_s: float  # unix, end of the window on the last rank
    loss: float | None
    values: dict[str, float]  # tag without its prefix -> value; what is not measured is not in it
    coverage: Coverage
    straggler: Straggler | None = None  # None where no rank is slower than noise explains, or no own time is known
    total_iterations: int | None = None  # where the job's length is known
    remaining_s: float | None = None
    style: str = "Iteration"  # or "Step"
    simulated: bool = False
    power_scope: str | None = None
    warming_up: bool = False
    final: bool = False
    correction: bool = False  # not a new window: totals after a late report
    energy_by_class: dict[str, float | None] = {}
    time_by_class: dict[str, float] = {}
    energy_doubtful: bool = False  # the window's energy has a random error of more than 5 %
    stragglers: tuple[StragglerVerdict, ...] = ()  # those that are named now, the costliest first, at most 16
    spread: dict[str, Spread] = {}  # of the window: by the names in SPREADS


class ClusterReport(WindowReport, frozen=True, kw_only=True):
    """One window of the whole job, and the run to date: what every sink is given."""

    run: ClusterTotals  # run to date, after warm-up
    last: ClusterTotals  # this window alone
    job: ClusterTotals  # whole wall time of the run, start-up, phases and warm-up included


class Value(Struct, frozen=True, omit_defaults=True):
    """A metric in summary.json."""

    value: float
    unit: str
    error: float | None = None  # random part, half-width of a 95 % interval
    sensor_error: float | None = None  # systematic part: the gain of the sensors, half-width, 95 %


class EnergySummary(Struct, frozen=True):
    """The energy of a run, as summary.json holds it."""

    total_joules: float | None = None  # None where a part was not measured
    measured_joules: float | None = None
    error_joules: float | None = None
    gain_error: float | None = None
    scope: str | None = None
    method: str | None = None
    joules_per_token: float | None = None
    by_device: dict[str, float] = {}
    error_by_device: dict[str, float] = {}  # random part, half-width, 95 %
    estimated_joules: float | None = None  # of the total: filled from power where a counter gave nothing
    warmup_joules: float | None = None  # of the total: in the warm-up, which the run-to-date values leave out
    by_class: dict[str, float | None] = {}
    time_coverage: float | None = None  # share of the elapsed time without restart gaps that is in measured_joules ...
    iterations_coverage: float | None = None  # ... and of the iterations; both are means over devices


class AttemptSummary(Struct, frozen=True):
    """One start of a job, as summary.json has it."""

    attempt: int
    status: str
    start_time_s: float  # unix
    end_time_s: float
    elapsed_s: float
    gap_before_s: float  # since the attempt before had ended
    world_size: int
    iterations: int
    first: int | None = None  # by the numbers shown
    last: int | None = None
    redone_iterations: int | None = 0  # that a later attempt did again; None where a number is missing that shows it


class GoodputSummary(Struct, frozen=True):
    """Where the elapsed time of a job went, over all attempts: the classes add up to it."""

    elapsed_s: float
    ratio: float | None  # kept and generation over elapsed
    seconds: dict[str, float]  # by class, mean over the ranks of each attempt
    rank_seconds: dict[str, float]  # summed over them
    joules: dict[str, float | None]  # measured
    redone_iterations: int | None = None  # None where a restart did not state at which iteration it began
    attempts: tuple[AttemptSummary, ...] = ()


class Summary(Struct, frozen=True):
    """summary.json: the run so far, rewritten every minute and at the end."""

    status: str  # running, completed, failed, interrupted (Ctrl-C), killed, stalled
    iterations: int
    attempts: int
    parameters: int | None
    parameters_kind: str
    metrics: dict[str, Value]
    energy: EnergySummary
    coverage: Coverage
    overhead: Overhead
    started_time_s: float
    updated_time_s: float
    elapsed_s: float
    time_by_class: dict[str, float] = {}
    simulated: bool = False
    not_measured: tuple[str, ...] = ()
    tokens: int | None = None  # None where the loop counted none
    samples: int | None = None
    loss: float | None = None  # the last; None where it is not finite
    losses_not_finite: int = 0  # losses that were NaN or infinite, of all ranks
    first_not_finite: int | None = None  # the iteration of the first such loss, by the number shown
    events: dict[str, int] = {}  # how many of each kind
    peak: str = ""  # of a device, that MFU is measured against, and from where it is known
    profile: Profile | None = None  # run to date, of all ranks
    left_out: dict[str, int] = {}  # windows that a sink has not written, by sink: it was too slow, or its disk full
    stragglers: tuple[StragglerVerdict, ...] = ()  # that were ever named, each with all it cost, the costliest first
    slowest: dict[int, int] = {}  # rank -> windows in which it was the slowest; at most 64 ranks
    windows_compared: int = 0  # windows in which own times of ranks were compared
    goodput: GoodputSummary | None = None
    is_over: bool = True  # False: the run goes on, or is stalled, and this will be rewritten
    schema_version: int = SCHEMA_VERSION
