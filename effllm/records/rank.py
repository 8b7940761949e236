"""The records of one rank's agent: Sample -> DeviceWindow -> RankReport.

Times named ``_ns`` are readings of the monotonic clock of one host. ``time_s`` is unix time. ``None`` always means
*not measured*. Most records on the wire are encoded as arrays.
"""

from __future__ import annotations

from functools import reduce
from operator import add, sub
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, defstruct

from effllm.records.counters import FIELDS, Counters
from effllm.records.energy import MAX_AMOUNT, MIN_COVERED_S, NOT_MEASURED, Amount, EnergyAmount
from effllm.records.iteration_times import IterationTimes

# Types on the wire. Their bounds are checked when a frame is decoded, at almost no cost. Every comparison with nan is
# false, so a bounded number is never nan. Sums of numbers below 1e30 never become infinite.
MAX_COUNT = 2**62 - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MAX_EVENT_COUNT = 2**32  # maximal count in one event from an agent
ReportCount = Annotated[int, Meta(ge=0, le=10**9)]  # reports of an agent: one a second for 30 years
Ordinal = Annotated[int, Meta(ge=0, le=10**12)]  # of an iteration: one in a millisecond for 30 years
MAX_TIME_S = 5 * 365 * 86400.0
Duration = Annotated[float, Meta(ge=0.0, le=MAX_TIME_S)]  # of a report: a longer one would spoil the totals of the job
EventCount = Annotated[int, Meta(ge=1, lt=2**62)]
Position = Annotated[int, Meta(gt=-(2**62), lt=2**62)]  # the number of an iteration, as shown to users
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]  # never summed
Word = Annotated[str, Meta(max_length=255)]  # the name of a host, a device or a phase
MAX_TEXT = 8000
Sentence = Annotated[str, Meta(max_length=MAX_TEXT)]
Sentences = Annotated[tuple[Sentence, ...], Meta(max_length=64)]
Amounts = Annotated[dict[Word, Amount], Meta(max_length=64)]
Durations = Annotated[dict[Word, Duration], Meta(max_length=64)]
MAX_DEVICES = 64  # maximal number of devices of one rank: its GPUs and the sensors of its node


if TYPE_CHECKING:
    CountedOnWire = Counters
else:  # base of records with counters; in a record, the counters follow the other fields
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
    """A period that the loop has marked as outside the iterations: evaluation, checkpoint, generation or other."""

    name: str
    start_ns: int
    end_ns: int


#: Sources of a device's energy, in order of preference.
COUNTER = "counter"  # the sensor's own energy counter
INSTANT = "instant power"  # instantaneous power, integrated
AVERAGE = "average power"  # the driver's average power, corrected for its lag and integrated
METHODS = (COUNTER, INSTANT, AVERAGE)

#: Scopes of a power reading, from the narrowest to the widest.
GPU, MODULE, CPU, NODE_PSU = "gpu", "module", "cpu", "node-psu"

#: Half-width (95 %) of the gain error of a board's sensor without calibration: an external meter showed -5.8 % to +5 %
#: on most boards (arXiv 2312.02741).
UNCALIBRATED_GAIN_ERROR = 0.05


class Sensor(Struct, frozen=True, array_like=True):
    """The behaviour of a device's energy sensor, and the source of these values."""

    tick_s: Amount = 0.0  # time between two changes of the counter; 0: the counter changes continuously
    tick_error_s: Amount = 0.0  # half-width of the error of the tick
    lag_s: Number = 0.0  # delay: a reading shows the energy up to a time `lag_s` before the reading
    lag_error_s: Amount = 0.0
    duty: Amount = 1.0  # share of each tick in which the sensor measures power
    is_held: bool = False  # whether the power reading also changes only at ticks
    average_s: Amount = 1.0  # time over which averaged power is a mean
    gain_error: Amount = UNCALIBRATED_GAIN_ERROR  # relative, half-width, 95 %; the same error in all readings
    call_s: Amount = 0.0  # duration of one reading
    source: Sentence = "assumed"  # source of these values: "assumed", "measured ...", "cached ..." or "table ..."


class Device(Struct, frozen=True):
    """A device that a rank samples: a GPU, a MIG slice, the host, or a power sensor of the node.

    With ``shared``, memory and utilization are this rank's share of the device (on the host: the share of the rank's
    process tree), and the shares add up over ranks. Without ``shared``, memory and utilization are values of the whole
    device, and equal on every rank that uses the device. Energy is always the energy of the whole device; a MIG slice
    has its share of the energy of its GPU.
    """

    key: Word  # identifies the device: a UUID, never an index
    kind: Word  # the file in effllm/devices/ that reads the device
    name: Word = ""
    is_gpu: bool = True
    shared: bool = False
    simulated: bool = False
    memory_total_bytes: Count | None = None
    power_limit_w: Amount | None = None
    energy_method: Word | None = None  # one of METHODS, or None: not measured
    power_scope: Word | None = None  # GPU, MODULE, CPU or NODE_PSU
    not_measured: Sentences = ()  # a sentence for each quantity that this device cannot measure
    energy_key: Word = ""  # common to all devices that report the energy of one module; empty for other devices
    energy_note: Sentence = ""  # derivation of the energy, if it is not read directly: "3/7 of its GPU's, ..."
    sensor: Sensor = Sensor()
    driver: Word = ""  # name and version of the interface to the device
    only_power: bool = False  # whether this is a power sensor of the node, without memory and utilization
    baseline_w: Amount | None = None  # mean power before the first iteration, if measured
    sm_clock_max_hz: Amount | None = None  # maximum SM clock
    # Clock at which the device reaches its peak FLOP/s: of the table of devices, or else the maximum SM clock.
    sm_clock_reference_hz: Amount | None = None
    power_limit_default_w: Amount | None = None  # the power limit after a restart of the driver
    power_profiles: Word | None = None  # names of the enforced workload power profiles; "none" without a profile


class Event(Struct, frozen=True):
    """An event of the job, of a device, or of the measurement."""

    time_s: Number  # unix time of the event (not of its receipt), by the clock of the event's host
    kind: Annotated[str, Meta(pattern="^[a-z_]{1,40}$")]  # one of effllm.records.events.KINDS
    text: Sentence  # one line
    rank: Count | None = None
    device: Word | None = None  # key of the device, if the event concerns a device
    attempt: int = 0
    count: EventCount = 1  # number of events that this line represents


class Sample(Struct, frozen=True, gc=False):
    """One reading of a device.

    ``utilization`` is the mean since the previous sample, 0..1. ``energy_j`` is a counter: only differences of two
    samples have a meaning. Memory and power are the values at ``time_ns``.
    """

    time_ns: int
    memory_bytes: float | None = None
    utilization: float | None = None
    power_w: float | None = None  # instantaneous power, or mean of the sensor's last measurement period
    energy_j: float | None = None
    power_average_w: float | None = None  # the driver's mean power, over about one second
    gauges: dict[str, float] = {}  # other readings, by the names in GAUGES
    throttled_by: tuple[str, ...] | None = None  # NVML's current clocks event reasons
    events: tuple[Event, ...] = ()  # Xid, ECC, ...
    energy_only: bool = False  # whether only energy and power were read; then other quantities are no failures


#: The gauges that cover no phases and are in no sample: they are computed from the samples of a window.
CLOCK_RATIO, TENSOR_CLOCK = "sm_clock_ratio", "tensor_clock_hz"
#: Further readings of a sample: name -> (unit, meaning).  Ratios are 0..1.
GAUGES: dict[str, tuple[str, str]] = {
    "sm_clock_hz": ("Hz", "clock of the streaming multiprocessors"),
    "memory_clock_hz": ("Hz", "clock of the memory"),
    "temperature_c": ("degC", "temperature of the chip"),
    "power_limit_w": ("W", "enforced power limit"),
    "memory_power_w": ("W", "power of the memory"),
    "module_power_w": ("W", "power of the whole module: GPU, CPU and memory"),
    "memory_reserved_bytes": ("bytes", "memory that the driver keeps for itself"),
    "sm_activity_ratio": ("ratio", "share of SMs with a resident warp, mean over time (GPM); not utilization"),
    "tensor_activity_ratio": ("ratio", "share of time in which the tensor cores worked (GPM)"),
    "dram_activity_ratio": ("ratio", "share of the memory bandwidth in use (GPM)"),
    CLOCK_RATIO: ("ratio", "SM clock over the clock of the peak FLOP/s, in iterations while the GPU was busy"),
    TENSOR_CLOCK: ("Hz", "tensor activity times SM clock, in readings that lie wholly in iterations (GPM)"),
}


class Integrals(Struct, frozen=True, array_like=True, gc=False):
    """Energy and time integrals over one period, each with its covered seconds.

    A quantity that was not measured in the period is ``None`` with zero seconds.
    """

    energy: EnergyAmount = NOT_MEASURED
    memory_byte_seconds: Amount | None = None
    memory_covered_s: Amount = 0.0
    utilization_seconds: Amount | None = None
    utilization_covered_s: Amount = 0.0

    def __add__(self, later: Integrals) -> Integrals:
        """Return the integrals over this period and a later period; the periods share no edge."""
        return Integrals(self.energy + later.energy, *self._memory_and_utilization_with(later))

    def then(self, later: Integrals) -> Integrals:
        """Return the integrals over this period and the next period; the periods share an edge."""
        return Integrals(self.energy.then(later.energy), *self._memory_and_utilization_with(later))

    def __sub__(self, part: Integrals) -> Integrals:
        """Return the integrals over this period without a part inside it."""
        memory = _rest(self.memory_byte_seconds, self.memory_covered_s, part.memory_byte_seconds, part.memory_covered_s)
        utilization = _rest(
            self.utilization_seconds, self.utilization_covered_s, part.utilization_seconds, part.utilization_covered_s
        )
        return Integrals(self.energy - part.energy, *memory, *utilization)

    def _memory_and_utilization_with(self, later: Integrals) -> tuple[float | None, float, float | None, float]:
        return (
            _sum_of_measured(self.memory_byte_seconds, later.memory_byte_seconds),
            self.memory_covered_s + later.memory_covered_s,
            _sum_of_measured(self.utilization_seconds, later.utilization_seconds),
            self.utilization_covered_s + later.utilization_covered_s,
        )


def _sum_of_measured(value: float | None, other: float | None) -> float | None:
    if value is None or other is None:
        return other if value is None else value
    return value + other


def _rest(whole: float | None, whole_s: float, part: float | None, part_s: float) -> tuple[float | None, float]:
    if whole is None or part is None:
        return whole, whole_s
    covered_s = whole_s - part_s  # by the integral without the part
    return (max(whole - part, 0.0), covered_s) if covered_s > MIN_COVERED_S else (None, 0.0)


class Gauge(Struct, frozen=True, array_like=True, gc=False):
    """A gauge over a period: its time integral, the seconds covered, and its extremes."""

    value_seconds: Number
    covered_s: Amount
    least: Number
    most: Number

    def __add__(self, other: Gauge) -> Gauge:
        """Return the gauge over the union of the two periods."""
        value_seconds, covered_s = self.value_seconds + other.value_seconds, self.covered_s + other.covered_s
        return Gauge(value_seconds, covered_s, min(self.least, other.least), max(self.most, other.most))


#: Bins of the power histogram, from which percentiles are computed: their width and their number; the last bin also has
#: all higher powers (no GPU draws 4 kW).
POWER_STEP_W, NUM_POWER_BINS = 10.0, 400
PowerBin = Annotated[int, Meta(ge=0, lt=NUM_POWER_BINS)]


class DeviceWindow(Struct, frozen=True, array_like=True, gc=False):
    """The readings of one device in one window of one rank."""

    device: Word
    wall: Integrals  # over the whole window
    phases: Annotated[dict[Word, Integrals], Meta(max_length=32)] = {}  # parts of the window outside its iterations
    memory_peak_bytes: Amount | None = None
    power_peak_w: Amount | None = None
    energy_method: Word | None = None  # source of the energy in this window: one of METHODS
    gauges: Annotated[dict[Word, Gauge], Meta(max_length=64)] = {}
    throttled_s: Amounts = {}  # reason -> seconds; reasons may overlap; "any": at least one heat or board reason
    throttle_covered_s: Amount = 0.0
    # Bin of the power histogram -> seconds; a bin is POWER_STEP_W wide.
    power_histogram_s: Annotated[dict[PowerBin, Amount], Meta(max_length=NUM_POWER_BINS)] = {}

    @property
    def iterations(self) -> Integrals:
        """The integrals over the iterations of the window: the window without its phases."""
        return reduce(sub, self.phases.values(), self.wall)


class Profile(Struct, frozen=True):
    """Sums over profiled iterations, of one or more ranks.

    ``time_s == exposed_s + computing_s + idle time``; kinds of communication may overlap.
    """

    iterations: Count = 0
    time_s: Amount = 0.0  # time of these iterations
    communication_s: Amount = 0.0  # time with communication
    exposed_s: Amount = 0.0  # time with communication and without computation
    computing_s: Amount = 0.0  # time with computation
    cost_s: Amount = 0.0  # cost of profiling, between the iterations
    # Kind of timeline.KINDS -> communication and exposed communication.
    kinds: Annotated[dict[Word, tuple[Amount, Amount]], Meta(max_length=32)] = {}

    def __add__(self, other: Profile) -> Profile:
        """Return the sums, limited to the bounds of the fields: a written profile must be readable again."""
        kinds = dict(self.kinds)
        for kind, (communication_s, exposed_s) in other.kinds.items():
            before = kinds.get(kind, (0.0, 0.0))
            kinds[kind] = (min(before[0] + communication_s, MAX_AMOUNT), min(before[1] + exposed_s, MAX_AMOUNT))
        return Profile(
            iterations=min(self.iterations + other.iterations, MAX_COUNT),
            time_s=min(self.time_s + other.time_s, MAX_AMOUNT),
            communication_s=min(self.communication_s + other.communication_s, MAX_AMOUNT),
            exposed_s=min(self.exposed_s + other.exposed_s, MAX_AMOUNT),
            computing_s=min(self.computing_s + other.computing_s, MAX_AMOUNT),
            cost_s=min(self.cost_s + other.cost_s, MAX_AMOUNT),
            kinds=kinds,
        )


def add_profiles(*profiles: Profile | None) -> Profile | None:
    """Return the sum of the profiles that are not ``None``; ``None`` if there is no such profile."""
    measured = [profile for profile in profiles if profile is not None]
    return reduce(add, measured) if measured else None


#: Maximal number of names of values in one report; a report with this many names and full digests has 100 kB of values.
MAX_NAMES = 200
#: Limits of the centroids of a name: in the report of a rank, and in sums over ranks and windows.
WINDOW_CENTROIDS, SUM_CENTROIDS = 32, 100
Weight = Annotated[int, Meta(ge=1, le=2**53)]
Centroids = Annotated[tuple[tuple[Number, Weight], ...], Meta(max_length=SUM_CENTROIDS)]


class ValueStatistics(Struct, frozen=True, array_like=True, gc=False):
    """Exact statistics of the values of one name, and a digest for percentiles."""

    count: Count = 0  # number of finite values
    total: Finite = 0.0
    squares: Finite = 0.0  # sum of squared differences from the mean
    least: Finite = 0.0  # 0 without values
    most: Finite = 0.0
    not_finite: tuple[Count, Count, Count] = (0, 0, 0)  # numbers of NaN, infinite and negative infinite values
    centroids: Centroids = ()  # (mean, number of values); empty if the library of digests is not installed


class Allocator(Struct, frozen=True, array_like=True, gc=False):
    """The memory of torch's allocator at the end of a window; of several windows, the largest of each quantity."""

    allocated_bytes: Amount
    reserved_bytes: Amount
    fragmented_bytes: Amount  # reserved and free, in blocks of which another part is in use


class SeldomOnWire(CountedOnWire, Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The fields that most reports lack; an encoded report ends after its last field that is not a default."""

    final: bool = False  # the rank's last report
    reset: bool = False  # the run-to-date values restart after this window
    iterations_overrun: Count = 0  # iterations overwritten in the ring; this report includes their totals
    generation_s: Duration = 0.0  # generation time in steps and in phases
    profile: Profile | None = None  # sums over the profiled iterations
    device_steps: Count = 0  # number of iterations timed on the device
    device_step_s: Amount = 0.0  # sum of the iteration times on the device
    # Own time: from the start of an iteration to the first wait for other ranks (`effllm.sync_point`).
    own_steps: Count = 0  # number of iterations with an own time
    own_step_s: Amount = 0.0  # sum of the own times
    device_own_steps: Count = 0  # number of iterations with an own time on the device
    device_own_step_s: Amount = 0.0
    # Relative error (half-width, 95 %) of the energy run to date, if iterations are synchronous with a sensor's ticks.
    aliasing_error: Amount | None = None
    losses_not_finite: Count = 0  # number of losses that were NaN or infinite
    first_not_finite: Position | None = None  # number, as shown, of the first iteration with such a loss
    # Statistics of the values of instruments, by name.
    values: Annotated[dict[Word, ValueStatistics], Meta(max_length=MAX_NAMES)] | None = None


class RankReport(SeldomOnWire, Struct, frozen=True, array_like=True, gc=False):
    """One window of one rank: the wall time since the end of its previous window, with all energy in this time.

    ``wall_s == busy_s + wait_s + sum(phases_s.values())``; iteration time is ``busy_s + wait_s``.
    """

    agent: Word  # random id of the sending agent; (agent, sequence) identifies a report
    sequence: ReportCount
    rank: Count
    # Number of the window, equal on all ranks: ceil((ordinal + offset at start) / LOG_INTERVAL); 1, 2, 3, ... after
    # windows are joined.
    window: Ordinal
    iteration_first: Ordinal  # first > last in a report without iterations
    iteration_last: Ordinal
    iteration_shown: Position  # the number of the last iteration, as shown
    start_time_s: Number  # unix
    end_time_s: Number
    wall_s: Duration
    busy_s: Duration  # time in the steps, from start to end
    wait_s: Duration  # time between the steps, without the phases
    phases_s: Durations
    loss: Finite | None = None  # the last loss of the window; None if it is not finite
    devices: Annotated[tuple[DeviceWindow, ...], Meta(max_length=MAX_DEVICES)] = ()
    allocator: Allocator | None = None  # None without CUDA
    times: IterationTimes | None = None  # of the iterations; None if a record was overwritten

    @property
    def iterations(self) -> int:
        """Number of iterations that ended in the window."""
        return self.iteration_last - self.iteration_first + 1

    @property
    def time_s(self) -> float:
        """Iteration time: data waits and steps, without phases."""
        return self.busy_s + self.wait_s


class ParameterCount(Struct, frozen=True, array_like=True):
    """A parameter count of the whole model, or (``is_share``) of this rank's share."""

    total: Count | None = None
    trainable: Count | None = None
    active: Count | None = None
    is_share: bool = False
