"""What the agent of one rank records: Sample -> DeviceWindow -> RankReport.

Times named ``_ns`` are readings of the monotonic clock of one host; ``time_s`` is unix time;
``None`` always means *not measured*.  Records that cross the wire are encoded as arrays, so fields
may only be appended, never moved.
"""

from __future__ import annotations

from functools import reduce
from operator import add, sub
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, defstruct

from effllm.records.counters import FIELDS, Counters
from effllm.records.energy import MAX_AMOUNT, MIN_COVERED_S, NOT_MEASURED, Amount, EnergyAmount

# What may come over the wire: bounds are checked as a frame is decoded, at next to no cost.  Every comparison with
# nan is false, so a bounded number is never nan; and sums of what is below 1e30 never become infinite.
MAX_COUNT = 2**62 - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
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
MAX_DEVICES = 64  # of one rank: its GPUs, and the sensors of its node


if TYPE_CHECKING:
    CountedOnWire = Counters
else:  # base of a record with counters, which come after its own fields
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

#: Half-width (95 %) of the gain of a board's sensor that is not calibrated: -5.8 % to +5 % were seen
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
    kind: Annotated[str, Meta(pattern="^[a-z_]{1,40}$")]  # one of effllm.records.events.KINDS
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
    energy_only: bool = False  # nothing else was read, and nothing else has failed


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

    def __add__(self, later: Integrals) -> Integrals:
        """Return the integrals over this stretch and a later one that does not begin where this one ends."""
        return Integrals(self.energy + later.energy, *self._levels_with(later))

    def then(self, later: Integrals) -> Integrals:
        """Return the integrals over this stretch and the one that begins where this one ends."""
        return Integrals(self.energy.then(later.energy), *self._levels_with(later))

    def __sub__(self, part: Integrals) -> Integrals:
        """Return the integrals over what is left without a part that lies inside."""
        memory = _left(self.memory_byte_seconds, self.memory_covered_s, part.memory_byte_seconds, part.memory_covered_s)
        utilization = _left(
            self.utilization_seconds, self.utilization_covered_s, part.utilization_seconds, part.utilization_covered_s
        )
        return Integrals(self.energy - part.energy, *memory, *utilization)

    def _levels_with(self, later: Integrals) -> tuple[float | None, float, float | None, float]:
        return (
            _sum(self.memory_byte_seconds, later.memory_byte_seconds),
            self.memory_covered_s + later.memory_covered_s,
            _sum(self.utilization_seconds, later.utilization_seconds),
            self.utilization_covered_s + later.utilization_covered_s,
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def _left(whole: float | None, whole_s: float, part: float | None, part_s: float) -> tuple[float | None, float]:
    if whole is None or part is None:
        return whole, whole_s
    covered_s = whole_s - part_s
    return (max(whole - part, 0.0), covered_s) if covered_s > MIN_COVERED_S else (None, 0.0)


class Gauge(Struct, frozen=True, array_like=True, gc=False):
    """A gauge over a stretch: its time integral, the seconds that this covers, and its extremes."""

    value_seconds: Number
    covered_s: Amount
    least: Number
    most: Number

    def __add__(self, other: Gauge) -> Gauge:
        """Return the gauge over both stretches."""
        value_seconds, covered_s = self.value_seconds + other.value_seconds, self.covered_s + other.covered_s
        return Gauge(value_seconds, covered_s, min(self.least, other.least), max(self.most, other.most))


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

    @property
    def iterations(self) -> Integrals:
        """What the device did in the iterations of the window: everything less the phases."""
        return reduce(sub, self.phases.values(), self.wall)


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

    def __add__(self, other: Profile) -> Profile:
        """Return the sums of both, within the bounds of the fields: what is written with them is read again."""
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
    """Return the sum of those that are known; ``None`` where none is."""
    known = [profile for profile in profiles if profile is not None]
    return reduce(add, known) if known else None


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
    iteration_shown: Position  # the number shown of the last iteration
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


class ParameterCount(Struct, frozen=True, array_like=True):
    """A parameter count: of the whole model, or (``is_share``) of what this rank alone contributes."""

    total: Count | None = None
    trainable: Count | None = None
    active: Count | None = None
    is_share: bool = False
