"""Every record that flows, in the order it is made: reading this file is reading the architecture.

    Slot, Sample -> DeviceWindow -> RankReport -> ClusterReport -> sink

Times named ``_ns`` are readings of the monotonic clock of one host; ``time_s`` is unix time;
``None`` always means *not measured*.  Records that cross the wire are encoded as arrays, so fields
may only be appended, never moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, defstruct

from effllm.records.counters import FIELDS, Counters
from effllm.records.energy import NOT_MEASURED, Amount, EnergyAmount

#: Of the files in a run folder: one more when a field of theirs changes its meaning or goes away.
SCHEMA_VERSION = 2

# What may come over the wire: bounds are checked as a frame is decoded, at next to no cost.  Every comparison with
# nan is false, so a bounded number is never nan; and sums of what is below 1e30 never become infinite.
Count = Annotated[int, Meta(ge=0, lt=2**62)]
MAX_EVENT_COUNT = 2**32  # of one event from an agent
EventCount = Annotated[int, Meta(ge=1, lt=2**62)]
Position = Annotated[int, Meta(gt=-(2**62), lt=2**62)]  # a number that people count iterations by
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]  # what is never summed
Word = Annotated[str, Meta(max_length=255)]  # a name, of a host, a device, a phase
MAX_TEXT = 8000
Sentence = Annotated[str, Meta(max_length=MAX_TEXT)]
Sentences = Annotated[tuple[Sentence, ...], Meta(max_length=64)]
Amounts = Annotated[dict[Word, Amount], Meta(max_length=64)]
Fact = str | int | float | bool | list[str] | None
MAX_ROWS = 256  # rows in one frame: about 110 kB of plain ones
MAX_DEVICES = 64  # of one rank: its GPUs, and the sensors of its node

if TYPE_CHECKING:
    Counted = Counters
    CountedOnWire = Counters
else:  # bases of the records with counters, which come after a record's own fields; only those of one rank are bounded
    Counted = defstruct("Counted", [(name, int, 0) for name in FIELDS], kw_only=True)
    CountedOnWire = defstruct("CountedOnWire", [(name, Count, 0) for name in FIELDS], kw_only=True)

EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
OTHER = "other"
GENERATION = "generation"
STARTUP = "startup"
SHUTDOWN = "shutdown"

#: The phases that a training loop can mark, in the order of their running totals in a ring slot.
MARKED_PHASES = (EVALUATION, CHECKPOINT, OTHER, GENERATION)


class Phase(Struct, frozen=True, gc=False):
    """A stretch of time that is not iteration: evaluation, checkpoint or other, as the loop marked it."""

    name: str
    start_ns: int
    end_ns: int


#: Where a device's energy comes from, in the order in which they are preferred.
COUNTER = "counter"  # the sensor's own energy counter
INSTANT = "instant power"  # power of the moment, integrated
AVERAGE = "average power"  # power averaged by the driver, its lag removed, integrated
METHODS = (COUNTER, INSTANT, AVERAGE)

#: What a power reading is the power of, from the narrowest to the widest.
GPU, MODULE, CPU, NODE_PSU = "gpu", "module", "cpu", "node-psu"

#: Half-width (95 %) of the gain of a board's sensor that nobody has calibrated: -5.8 % to +5 % were seen
#: on most boards against an external meter (arXiv 2312.02741).
UNCALIBRATED_GAIN_ERROR = 0.05


class Sensor(Struct, frozen=True, array_like=True):
    """How the energy sensor of a device behaves, and from where that is known."""

    tick_s: Amount = 0.0  # between two moves of the counter; 0: it moves all the time
    tick_error_s: Amount = 0.0  # half-width of what is open about it
    lag_s: Number = 0.0  # what is read now is the energy up to so long ago
    lag_error_s: Amount = 0.0
    duty: Amount = 1.0  # share of each tick in which power is really measured
    is_held: bool = False  # the power reading, too, changes at ticks only
    average_s: Amount = 1.0  # over which the averaged power is a mean
    gain_error: Amount = UNCALIBRATED_GAIN_ERROR  # half-width, 95 %, of one factor common to all readings
    call_s: Amount = 0.0  # what one reading takes
    source: Sentence = "assumed"  # or "measured ...", "cached ...", "table ..."


class Device(Struct, frozen=True):
    """What a rank samples: a GPU, a slice of one, the host, or the sensor of a node's power.

    ``shared`` says that memory and utilization are this rank's share of the device (the process tree
    of the rank, on the host), which add up over ranks; otherwise they are the whole device's, seen
    equally by every rank that sits on it.  Energy is always the whole device's; that of a MIG slice is
    its share of its GPU's.
    """

    key: Word  # UUID, never an index: what "the same device" means
    kind: Word  # the file in effllm/devices/ that reads it
    name: Word = ""
    is_gpu: bool = True
    shared: bool = False
    simulated: bool = False
    memory_total_bytes: Count | None = None
    power_limit_w: Amount | None = None
    energy_method: Word | None = None  # one of METHODS, or None: not measured
    power_scope: Word | None = None  # GPU, MODULE, CPU or NODE_PSU
    not_measured: Sentences = ()  # one per quantity that this device cannot give
    energy_key: Word = ""  # whose energy it is, where several devices show the same (a module's); else its own
    energy_note: Sentence = ""  # how the energy was come by, where that is not plain: "3/7 of its GPU's, ..."
    sensor: Sensor = Sensor()
    driver: Word = ""  # name and version of what it is read through
    only_power: bool = False  # it computes nothing: a sensor of the node
    baseline_w: Amount | None = None  # its mean power before the first iteration, where that was asked for


class Event(Struct, frozen=True):
    """Something that happened to the job, to a device, or to the measurement."""

    time_s: Number  # unix, when it happened, not when it was received, by the clock of its host
    kind: Annotated[str, Meta(pattern="^[a-z_]{1,40}$")]  # one of effllm.events.KINDS
    text: Sentence  # one line for a person
    rank: Count | None = None
    device: Word | None = None  # its key, where it happened to a device
    attempt: int = 0
    count: EventCount = 1  # how many events this line represents


class Sample(Struct, frozen=True, gc=False):
    """One reading of a device.

    ``utilization`` is the mean since the sample before, 0..1; ``energy_j`` is a counter that only its
    differences give meaning to; memory and power are the values at ``time_ns``.
    """

    time_ns: int
    memory_bytes: float | None = None
    utilization: float | None = None
    power_w: float | None = None  # of the moment, or of the sensor's last measuring window
    energy_j: float | None = None
    power_average_w: float | None = None  # mean of the driver's last second or so
    gauges: dict[str, float] = {}  # whatever else was read, by the names in GAUGES
    throttled_by: tuple[str, ...] | None = None  # NVML's clocks event reasons that hold now
    events: tuple[Event, ...] = ()  # Xid, ECC, ...
    energy_only: bool = False  # nothing else was asked, which is not to say that it failed


#: What a sample may hold beside the four quantities: name -> (unit, what it is).  Ratios are 0..1.
GAUGES: dict[str, tuple[str, str]] = {
    "sm_clock_hz": ("Hz", "clock of the streaming multiprocessors"),
    "memory_clock_hz": ("Hz", "clock of the memory"),
    "temperature_c": ("degC", "temperature of the chip"),
    "power_limit_w": ("W", "enforced power limit"),
    "memory_power_w": ("W", "power of the memory"),
    "module_power_w": ("W", "power of the whole module: GPU, CPU and memory"),
    "memory_reserved_bytes": ("bytes", "memory that the driver keeps for itself"),
    "sm_activity_ratio": ("ratio", "share of time and SMs in which a warp was resident (GPM); not utilization"),
    "tensor_activity_ratio": ("ratio", "share of time in which the tensor cores worked (GPM)"),
    "dram_activity_ratio": ("ratio", "share of the memory bandwidth in use (GPM)"),
}


class Integrals(Struct, frozen=True, array_like=True, gc=False):
    """Energy and time integrals over one stretch, each with the seconds that it covers.

    A quantity that was never measured in the stretch is ``None`` with zero seconds.
    """

    energy: EnergyAmount = NOT_MEASURED
    memory_byte_seconds: Amount | None = None
    memory_covered_s: Amount = 0.0
    utilization_seconds: Amount | None = None
    utilization_covered_s: Amount = 0.0


class Gauge(Struct, frozen=True, array_like=True, gc=False):
    """A gauge over a stretch: its time integral, the seconds that this covers, and its extremes."""

    value_seconds: Number
    covered_s: Amount
    least: Number
    most: Number


#: Bars of the histogram of power; what is above belongs to the last one: no GPU draws 4 kW.
NUM_POWER_BARS = 400
PowerBar = Annotated[int, Meta(ge=0, lt=NUM_POWER_BARS)]


class DeviceWindow(Struct, frozen=True, array_like=True, gc=False):
    """What one device did while one rank went through one window."""

    device: Word
    wall: Integrals  # over the whole row
    phases: Annotated[dict[Word, Integrals], Meta(max_length=32)] = {}  # the parts of it that are not iterations
    memory_peak_bytes: Amount | None = None
    power_peak_w: Amount | None = None
    energy_method: Word | None = None  # that was used here: one of METHODS
    gauges: Annotated[dict[Word, Gauge], Meta(max_length=64)] = {}
    throttled_s: Amounts = {}  # by reason; reasons may hold together; "any": of heat or the board
    throttle_covered_s: Amount = 0.0
    # Seconds by power, in steps of POWER_STEP_W.
    power_histogram_s: Annotated[dict[PowerBar, Amount], Meta(max_length=NUM_POWER_BARS)] = {}


#: Width of a bar of the histogram of power, from which percentiles are taken.
POWER_STEP_W = 10.0


class Profile(Struct, frozen=True):
    """What iterations under a profiler come to: sums, over however many iterations and ranks.

    ``time_s == exposed_s + computing_s + idle time``; kinds of communication may overlap.
    """

    iterations: Count = 0
    time_s: Amount = 0.0  # of these iterations
    communication_s: Amount = 0.0  # in which some communication ran ...
    exposed_s: Amount = 0.0  # ... and no computation did
    computing_s: Amount = 0.0  # in which some computation ran
    cost_s: Amount = 0.0  # of profiling, between the iterations
    # Communication and exposed, by timeline.KINDS.
    kinds: Annotated[dict[Word, tuple[Amount, Amount]], Meta(max_length=32)] = {}


class RankReport(CountedOnWire, Struct, frozen=True, array_like=True, gc=False):
    """One rank's window: from the end of its previous window to its own, wall time, with all energy.

    ``wall_s == busy_s + wait_s + sum(phases_s.values())``; iteration time is ``busy_s + wait_s``.
    """

    agent: Word  # random id of the sending agent; (agent, sequence) names a report for ever
    sequence: Count
    rank: Count
    # Equal on all ranks: ceil((ordinal + offset known at start) / LOG_INTERVAL); of joined windows one after the other.
    window: Count
    iteration_first: Count  # ordinals; first > last in a row that holds no iteration
    iteration_last: Count
    iteration_shown: Position  # the number that people know the last iteration by
    start_time_s: Number  # unix
    end_time_s: Number
    wall_s: Amount
    busy_s: Amount  # the steps: start to end
    wait_s: Amount  # between the steps, less the phases
    phases_s: Amounts
    loss: Finite | None = None  # the last of the window; None where it is not finite
    devices: Annotated[tuple[DeviceWindow, ...], Meta(max_length=MAX_DEVICES)] = ()
    final: bool = False  # the rank's last row
    reset: bool = False  # the run-to-date values start anew after this window
    iterations_overrun: Count = 0  # iterations whose detail the ring lost; their totals are in here
    generation_s: Amount = 0.0  # wherever it lay: in steps, in phases
    profile: Profile | None = None  # of its profiled iterations
    device_steps: Count = 0  # iterations that were timed on the device ...
    device_step_s: Amount = 0.0  # ... and how long they took there
    # Own time: of an iteration, from its start to where this rank first waits for others (`effllm.sync_point`).
    own_steps: Count = 0  # iterations of which it is known ...
    own_step_s: Amount = 0.0  # ... their sum ...
    own_median_s: Amount | None = None  # ... and median
    arrival_ns: Count = 0  # when the rank came there in the window's last iteration; 0: not known
    device_own_steps: Count = 0  # the same on the device
    device_own_step_s: Amount = 0.0
    # Where iterations keep step with a sensor: half-width (95 %) of the error of its energy, run to date, as a share.
    aliasing_error: Amount | None = None
    losses_not_finite: Count = 0  # losses that were NaN or infinite ...
    first_not_finite: Position | None = None  # ... and the number shown of the first such iteration

    @property
    def iterations(self) -> int:
        """Number of iterations that ended in the window."""
        return self.iteration_last - self.iteration_first + 1

    @property
    def time_s(self) -> float:
        """Iteration time: data wait and step, phases left out."""
        return self.busy_s + self.wait_s


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


if TYPE_CHECKING:

    class CountedJob(Counters, JobConstants, frozen=True):
        """Constants and counts of a job."""

else:
    CountedJob = defstruct("CountedJob", [(name, int, 0) for name in FIELDS], bases=(JobConstants,), kw_only=True)


class ClusterTotals(CountedJob, Struct, frozen=True):
    """What the whole job did on one time base: the argument of every metric.

    ``time_s`` is T, the maximum over ranks of their summed iteration times (on the job base: of their
    wall times).  The energy fields cover only windows whose coverage was sufficient.
    """

    iterations: int = 0
    time_s: float = 0.0
    slowest_step_s: float = 0.0  # of the rank with the largest mean step: its summed steps ...
    slowest_iterations: int = 0  # ... and how many they are
    wait_s: float = 0.0  # of the rank with the largest T
    generation_s: float = 0.0  # of the rank that generated for longest
    profile: Profile | None = None  # of all ranks
    device_steps: int = 0  # of the rank with the largest mean step on its device ...
    device_step_s: float = 0.0  # ... and their time there
    memory_mean_bytes: float | None = None  # mean over devices of their time-weighted means
    memory_min_bytes: float | None = None  # the smallest of those means
    memory_max_bytes: float | None = None
    memory_peak_bytes: float | None = None  # the largest single reading
    memory_error_bytes: float | None = None  # of memory_mean_bytes, from sampling: half-width, 95 %
    utilization_error: float | None = None  # of utilization_mean, the same; None where it is not sampled
    utilization_mean: float | None = None
    utilization_min: float | None = None
    utilization_max: float | None = None
    energy_j: float | None = None  # in covered windows
    energy_time_s: float = 0.0  # T of the covered windows
    energy_tokens: int = 0  # tokens of the covered windows
    energy_samples: int = 0
    energy_iterations: int = 0
    energy_complete: bool = False  # no window was left out: energy_j is the total
    energy_measured_j: float | None = None  # with the holes: never a total
    energy_gpus_j: float | None = None  # that GPUs drew in the covered windows, whatever the scope of energy_j
    energy_error_j: float | None = None  # of energy_j: random part, half-width, 95 %
    energy_gain_error_j: float | None = None  # of energy_j: the sensors' gain, half-width, 95 %
    energy_estimated_j: float | None = None  # the part of energy_j that fills gaps of counters from power
    power_peak_w: float | None = None  # the largest reading of one GPU
    power_histogram_s: dict[int, float] = {}  # GPU-seconds by power, in steps of POWER_STEP_W
    throttled_s: float | None = None  # GPU-seconds in which heat or the board slowed a clock down
    throttle_covered_s: float = 0.0
    temperature_max_c: float | None = None
    sm_clock_hz: float | None = None  # mean over time and GPUs, as are the activities
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    clock_error_s: float | None = None  # of the rank whose clock's offset is known worst, half-width, a bound
    straggling_s: float | None = None  # that all ranks waited for stragglers; None where no rank's own time is known
    straggling_gpu_s: float = 0.0  # the same, summed over the ranks that waited ...
    straggling_j: float | None = None  # ... and what their devices drew then
    stalled_s: float | None = None  # for which the job has stood, no rank moving, of its whole run
    stragglers: int = 0  # ranks that are named at the end of the window
    elapsed_s: float = 0.0  # of the whole job, over its attempts: effllm/aggregation/goodput.py
    class_s: dict[str, float] = {}  # where it went
    class_j: dict[str, float | None] = {}
    rank_seconds: float = 0.0  # elapsed, summed over ranks
    overhead: Overhead | None = None
    losses_not_finite: int = 0  # losses that were NaN or infinite, of all ranks


class Straggler(Struct, frozen=True):
    """The slowest rank of a window, where own times show that it is slow in window after window.

    Iterations show nothing of the kind: in synchronous training all take equally long, because the others wait.
    """

    rank: int
    time_s: float  # its own time of an iteration ...
    median_s: float  # ... and that of the median of its peers


#: What a verdict stands on, from the best to the weakest.
OWN_TIME = "own time"  # from an iteration's start to the sync point
PROFILE = "profile"  # computation in profiled iterations
DATA_WAIT = "data wait"  # waiting for data, while the others wait for the rank
ARRIVAL = "arrival"  # the order of arrival at the sync point, by aligned clocks
EVIDENCE = (OWN_TIME, PROFILE, DATA_WAIT, ARRIVAL)


class Verdict(Struct, frozen=True):
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
    """How much of the job the numbers stand on."""

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


#: What windows tell the `Spread` of: name -> what it is.
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
    """One window of the whole job."""

    attempt: int
    window: int
    iteration: int  # the number shown
    iteration_first: int  # ordinals within the attempt
    iteration_last: int
    time_s: float  # unix, end of the window on the last rank
    loss: float | None
    last: ClusterTotals  # this window alone
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
    stragglers: tuple[Verdict, ...] = ()  # those that are named now, the costliest first, at most 16
    spread: dict[str, Spread] = {}  # of the window: by the names in SPREADS


class ClusterReport(WindowReport, frozen=True, kw_only=True):
    """One window of the whole job, and the run to date: what every sink is given."""

    run: ClusterTotals  # run to date, after warm-up
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
    estimated_joules: float | None = None  # of the total: filled from power where a counter told nothing
    warmup_joules: float | None = None  # of the total: in the warm-up, which the run-to-date values leave out
    by_class: dict[str, float | None] = {}
    time_coverage: float | None = None  # share of the elapsed time without restart gaps that is in measured_joules ...
    iterations_coverage: float | None = None  # ... and of the iterations; both are means over devices


class Overhead(Struct, frozen=True):
    """What the measurement itself cost, in CPU seconds over all its processes of a kind."""

    recorder_cpu_s: float | None = None  # an estimate: what a call took at the start, times the calls
    agents_cpu_s: float | None = None
    aggregator_cpu_s: float | None = None  # of all that served the run, one after another
    sent_bytes: int | None = None  # by agents, as they say
    received_bytes: int | None = None  # by aggregators


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
    first: int | None = None  # by the numbers that people know them by
    last: int | None = None
    redone_iterations: int = 0  # that a later attempt did again


class GoodputSummary(Struct, frozen=True):
    """Where the elapsed time of a job went, over all attempts: the classes add up to it."""

    elapsed_s: float
    ratio: float | None  # kept and generation over elapsed
    seconds: dict[str, float]  # by class, mean over the ranks of each attempt
    rank_seconds: dict[str, float]  # summed over them
    joules: dict[str, float | None]  # measured
    redone_iterations: int | None = None  # None where a restart did not tell at which iteration it began
    attempts: tuple[AttemptSummary, ...] = ()


class Summary(Struct, frozen=True):
    """summary.json: the run as it stands, rewritten every minute and at the end."""

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
    stragglers: tuple[Verdict, ...] = ()  # that were ever named, each with all it cost, the costliest first
    slowest: dict[int, int] = {}  # rank -> windows in which it was the slowest; at most 64 ranks
    windows_compared: int = 0  # windows in which own times of ranks were compared
    goodput: GoodputSummary | None = None
    is_over: bool = True  # False: the run goes on, or stands, and this will be rewritten
    schema_version: int = SCHEMA_VERSION


class Parameters(Struct, frozen=True, array_like=True):
    """A parameter count: of the whole model, or (``is_share``) of what this rank alone contributes."""

    total: Count | None = None
    trainable: Count | None = None
    active: Count | None = None
    is_share: bool = False


# --- the wire -----------------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """An agent introduces its rank; sent again whenever a fact changes or the connection is new."""

    job: Word
    agent: Word
    rank: Count
    local_rank: Count
    world_size: Count
    host: Word
    role: Word
    devices: Annotated[tuple[Device, ...], Meta(max_length=MAX_DEVICES)]
    parameters: Parameters
    log_interval: Count
    trainer_pid: Count = 0
    offset: Position = 0  # iteration number shown = ordinal + offset
    total_iterations: Count | None = None
    flops_per_token: Amount | None = None
    facts: Annotated[dict[Word, Fact], Meta(max_length=500)] = {}
    version: Word = ""
    hardware_flops_per_token: Amount | None = None
    peer_group: Word = ""  # ranks of one role and group do equal work: those of a pipeline stage
    replica: Word = ""  # ranks of one replica wait for each other inside of an iteration: it is the model's
    is_numbered: bool = False  # the loop or a hook has said at which number the iterations began
    time_s: Number | None = None  # when it was sent, by the clock that its rows are stamped with
    start_time_s: Number | None = None  # when its first row begins, by the same


class Reports(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Windows of one rank, oldest first."""

    rows: Annotated[tuple[RankReport, ...], Meta(max_length=MAX_ROWS)]
    lost: Count = 0  # reports that the agent's full buffer dropped so far
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0  # so far, as are these
    recorder_cpu_s: Amount | None = None


class Beat(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A sign of life between windows, and where the rank stands."""

    agent: Word
    rank: Count
    ordinal: Count
    state: Word
    since_s: Amount
    lost: Count = 0
    sent_ns: Count = 0  # when, by the agent's clock, if the aggregator is to answer with its own; else 0
    offset_s: Number | None = None  # the aggregator's clock less the agent's, as the agent has it by now ...
    offset_error_s: Amount | None = None  # ... and a bound of the error of that
    utilization: Amount | None = None  # the newest of the rank's first device
    power_w: Amount | None = None
    process: Annotated[str, Meta(max_length=1)] = ""  # state of the trainer's process, as /proc has it: R, S, D, T, ...
    time_s: Number | None = None  # when it was sent, by the clock that rows are stamped with


class AgentEvent(Struct, frozen=True, array_like=True, tag=4):
    """An event that an agent reports."""

    agent: Word
    rank: Count
    event: Event


class Bye(Struct, frozen=True, array_like=True, tag=5):
    """The rank is over; every report it could send has been acknowledged or given up."""

    agent: Word
    rank: Count
    status: Word  # completed, failed, interrupted, killed
    last_ordinal: Count
    lost: Count = 0
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0
    recorder_cpu_s: Amount | None = None
    end_time_s: Number | None = None  # when its last row ends, by the clock that rows are stamped with


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The aggregator's answer to HELLO: the attempt is its to assign."""

    attempt: int
    run_folder: str = ""
    again: bool = False  # something was dropped: introduce yourself, and send what nobody has confirmed
    report_every_s: Amount = 0.0  # to be left between two frames of reports, beside what the agent leaves itself


class Ack(Struct, frozen=True, array_like=True, tag=7):
    """Every report of this agent up to ``sequence`` is safe; with it the newest headline values."""

    sequence: int
    iteration: int = 0
    values: dict[str, float] = {}
    report: int = 0  # counts cluster reports, so that each is shown once


class Refused(Struct, frozen=True, array_like=True, tag=8):
    """The aggregator wants nothing from this agent, and why."""

    reason: str
    again: bool = False  # not here and now: the agent waits for another address
    whole_job: bool = False  # nor from any other: rank 0 tells the person, and the connection is of no use


class ByeSeen(Struct, frozen=True, array_like=True, tag=9):
    """The aggregator has the rank's BYE: its agent may go."""

    rank: int


class Clock(Struct, frozen=True, array_like=True, tag=10):
    """The aggregator's answer to a beat that asks for it; by whose clock each stamp is, stands in health/clock.py."""

    sent_ns: Count  # of the beat
    received_ns: Count
    answered_ns: Count


class Supersede(Struct, frozen=True, array_like=True, tag=12):
    """An aggregator of the next attempt asks the one that holds the run folder to write its summary and let go."""

    run: Word  # what both know the job by: of the lock file
    job: Word  # of the one that asks


class Inspect(Struct, frozen=True, array_like=True, tag=11):
    """The aggregator wants to know what an agent's own trainer is doing; the answer is a `Stack`."""

    reason: str


#: Of the text of a `Stack`, in letters: with what MessagePack adds it fits into a frame.
MAX_STACK = 64 * 1024


class Stack(Struct, frozen=True, array_like=True, tag=13):
    """What a trainer that stands was doing: its state, the stacks of its threads, or why they cannot be had."""

    agent: Word
    rank: Count
    ordinal: Count
    text: Annotated[str, Meta(max_length=MAX_STACK)]
    top: Sentence = ""  # where its main thread stands, in a few words


FromAgent = Hello | Reports | Beat | AgentEvent | Bye | Supersede | Stack
FromAggregator = Welcome | Ack | Refused | ByeSeen | Clock | Inspect
