"""The judgements in summary.json: waterfall, verdict (largest loss, evidence, action), stragglers, memory and audit."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

#: Part -> meaning, in the order of the waterfall: time without training, other work, waits, steps, useful work.
PARTS: dict[str, str] = {
    "unused": "allocated GPUs that no rank used",
    "restart_gap": "time between two attempts",
    "startup": "time before the first iteration of an attempt",
    "shutdown": "time after the last iteration of an attempt",
    "hang": "time in which no rank made progress",
    "idle": "time before a rank joined or after a rank left",
    "unreported": "time that no report covers",
    "evaluation": "marked evaluation",
    "checkpoint": "marked checkpoint",
    "other": "other marked phases",
    "redone": "steps that a later attempt repeated",
    "data": "data wait between steps",
    "straggling": "time lost by slow ranks, of all ranks",
    "uneven_ranks": "waits of the ranks for each other without a slow rank",
    "slow_iterations": "long iterations, above the median",
    "warmup": "long first iterations, above the median",
    "generation": "marked generation: productive",
    "waits_in_communication": "steps: more waits of the ranks for each other, in communication of profiled iterations",
    "exposed_communication": "steps: communication alone",
    "device_idle": "steps: time without kernels and transfers",
    "clock_below_maximum": "steps: SM clock below the clock of the peak",
    "padding": "steps: FLOPs of padding at the peak",
    "recomputation": "steps: repeated FLOPs at the peak",
    "below_peak": "steps: remaining time, with computation below the peak",
    "steps": "whole steps with useful work",
    "useful": "steps: model FLOPs at the peak",
}
#: Units of device-seconds: the time of GPUs, or of ranks in a job without GPUs.
OF_GPUS, OF_RANKS = "GPU", "rank"
#: Parts that are work, not loss.
PRODUCTIVE = ("generation", "useful", "steps")
#: Parts that cannot be avoided as a whole: work, and steps at a usual speed.
NOT_AVOIDABLE = (*PRODUCTIVE, "below_peak", "recomputation", "clock_below_maximum")

HEALTHY, NONE_FOUND, NO_VERDICT, FAILED = "healthy", "none_found", "unknown", "failed"

#: Cause -> meaning: the values of `Verdict.cause`.  Thresholds: effllm/job/losses.py; explanations: docs/verdict.md.
CAUSES: dict[str, str] = {
    HEALTHY: "no loss is above its threshold, and the steps are split by a profile, or one rank keeps its GPU busy",
    NONE_FOUND: "no loss is above its threshold, and communication inside the steps is not split",
    NO_VERDICT: "too little is measured for a statement",
    FAILED: "the job ended with an error, or was killed",
    "data_loading": "all ranks wait for data between steps",
    "between_iterations": "time between iterations of a loop that calls effllm itself: no DataLoader was seen there",
    "straggler": "all ranks wait for ranks that are slower than their peers",
    "uneven_ranks": "the ranks wait for each other, and no rank is slower than its peers",
    "throttled": "GPUs run at a low clock: heat, hardware slowdown, power brake, or a locked clock",
    "power_limit": "GPUs run at a low clock, and their power limit is below their default limit or the limit of peers",
    "slow_iterations": "single iterations are much longer than the median: pauses, compilation, garbage collection",
    "warmup": "the first iterations of an attempt are much longer than the median",
    "exposed_communication": "communication that does not overlap with computation",
    "device_idle": "devices without work inside the steps",
    "padding": "steps compute positions that are padding",
    "memory_pressure": "memory pressure with allocator retries: torch frees all cached memory, and allocates again",
    "checkpoint": "time of checkpoints",
    "evaluation": "time of evaluation",
    "restarts": "gaps between attempts, start-ups of later attempts, and repeated steps",
    "startup": "time before the first iteration, in a job of at least half an hour",
    "shutdown": "time after the last iteration, in a job of at least half an hour",
    "idle": "ranks that joined late or left early, in a job of at least half an hour",
    "hang": "no rank made progress",
    "unused_gpus": "allocated GPUs that no rank used",
}

#: Values of `Verdict.confidence`: whether a larger loss can be hidden in device time that is not split.
HIGH, MEDIUM, NO_CONFIDENCE = "high", "medium", "none"


class LossWindows(Struct, frozen=True):
    """The windows of a loss.  Iterations are the numbers shown at the end of a window."""

    count: int
    first_iteration: int
    last_iteration: int
    worst_iteration: int | None = None  # of the window with the largest loss; None if the windows are not compared
    worst_share: float | None = None  # of the ranks' time in the iterations of this window


class Evidence(Struct, frozen=True, omit_defaults=True):
    """One statement that supports a verdict, with the place of its numbers."""

    claim: str
    source: str  # a file of the run folder and the path of the value in it
    share: float | None = None  # of all device time
    windows: LossWindows | None = None  # in windows-*.jsonl; None if no window can be named


class Verdict(Struct, frozen=True):
    """The verdict on a job, from its waterfall."""

    cause: str  # one of CAUSES
    text: str  # at most 62 letters, for the console
    why: str
    next: str  # the next action, in the words of the user's framework
    bound: float | None  # upper bound of the gain in tokens per device time if the loss is removed; 0.14 is 14 %
    confidence: str  # HIGH, MEDIUM or NO_CONFIDENCE
    evidence: tuple[Evidence, ...] = ()  # the largest losses, also below their thresholds


#: Maximum number of ranks in `LastRanks.by_rank`.
MAX_LAST = 64


class LastRanks(Struct, frozen=True):
    """The ranks for which all others waited longest, and the waits of the ranks for each other."""

    iterations: float = 0.0  # compared iterations
    by_rank: dict[int, float] = {}  # rank -> number of iterations in which it was the last one; at most 64 ranks
    max_waits_s: dict[int, float] = {}  # rank -> upper bound of the rank-seconds of waits for it in these iterations
    max_uneven_s: float = 0.0  # upper bound of the rank-seconds of waits without a slow rank
    profiled_s: float = 0.0  # rank-seconds of profiled iterations that are not long
    profiled_uneven_s: float = 0.0  # waits without a slow rank in them, also those inside communication

    @property
    def profiled_uneven_share(self) -> float:
        """Waits without a slow rank over the time of profiled iterations that are not long; 0 without profiles."""
        return self.profiled_uneven_s / self.profiled_s if self.profiled_s else 0.0

    @property
    def dominant_last_rank(self) -> tuple[int, float]:
        """The rank that was most often the last one, and the number of these iterations; -1 without any."""
        return max(self.by_rank.items(), key=lambda item: item[1], default=(-1, 0.0))

    def with_more(self, iterations: float, by_rank: Mapping[int, float], waits_s: Mapping[int, float]) -> LastRanks:
        """Return the counts with those of further iterations, for the ranks that were last most often."""
        counts = {rank: self.by_rank.get(rank, 0.0) + by_rank.get(rank, 0.0) for rank in {**self.by_rank, **by_rank}}
        counts = dict(sorted(counts.items(), key=lambda item: -item[1])[:MAX_LAST])
        max_waits_s = {rank: self.max_waits_s.get(rank, 0.0) + waits_s.get(rank, 0.0) for rank in counts}
        return replace(self, iterations=self.iterations + iterations, by_rank=counts, max_waits_s=max_waits_s)


class Straggler(Struct, frozen=True):
    """The slowest named rank.

    Iteration times cannot show a slow rank: in synchronous training, all ranks wait for the slowest rank.
    """

    rank: int
    time_s: float  # own time of the rank in an iteration
    median_s: float  # median of the own times of its peers


#: The evidence of a verdict, from the strongest to the weakest.
OWN_TIME = "own time"  # time from an iteration's start to the sync point
PROFILE = "profile"  # computation in profiled iterations
DATA_WAIT = "data wait"  # wait for data, during which other ranks wait for this rank
EVIDENCE = (OWN_TIME, PROFILE, DATA_WAIT)


class StragglerVerdict(Struct, frozen=True):
    """A rank that delays other ranks in many iterations, and the cost so far."""

    ranks: tuple[int, ...]  # one rank; or a group of ranks that wait for each other before the sync point
    host: str
    device: str
    since_iteration: int  # the number shown
    slowdown: float  # time of the rank over the median of its peers, minus one
    peers: int  # number of ranks in the comparison
    evidence: str  # one of EVIDENCE
    why: str = "unknown"
    gpu_seconds: float = 0.0  # waiting time of the other ranks
    joules: float | None = None  # energy of the waiting ranks' devices while they waited
    # Kinds of differences from the peers' devices: clock, throttled, power_limit, host.
    differences: tuple[str, ...] = ()
    own_seconds: float = 0.0  # time that the slow ranks would save themselves
    max_seconds: float = 0.0  # upper bound of both, if the ranks are as slow after the first wait for other ranks
    last_share: float | None = None  # share of the iterations in which the ranks were last; None without own times


class ClockLoss(Struct, frozen=True):
    """The time that ranks would save if the slowest GPU with one reason had the clock of the other GPUs."""

    rank_seconds: float  # only time with kernels, where iterations are profiled
    rank: int  # rank of the slowest GPU in the worst window
    worst_rank_seconds: float  # loss in the worst window
    why: str
    max_rank_seconds: float = 0.0  # upper bound: all own time in inverse proportion to the clock


class MemoryPressureLoss(Struct, frozen=True):
    """The cost of the retries of torch's allocator: each retry frees all cached memory and waits for the device."""

    retries: int  # of all ranks
    per_iteration: float  # retries per iteration of a rank
    windows: int  # number of windows with retries
    worst_iteration: int  # end of the window with the most retries
    first_iteration: int  # end of the first window with retries
    last_iteration: int  # end of the last window with retries
    rank_seconds: float | None = None  # steps of all ranks above usual windows; None if too few windows have no retry
    max_rank_seconds: float | None = None  # upper bound: above the fastest tenth of the windows without retries


class OutOfMemory(Struct, frozen=True):
    """The memory of the ranks whose last iterations had an out-of-memory error of torch: maxima over these ranks."""

    ranks: tuple[int, ...]  # at most 16
    bytes: dict[str, float]  # allocated, reserved, fragmented; peaks of the run: steps_peak, evaluation_peak, ...
    retries: int  # of all ranks, in the whole run
    iteration: int = 0  # shown at the end of the window of the error; 0 if unknown


class SlowIterations(Struct, frozen=True):
    """The iterations that take more than 2.5 times the median, or those with nearly all waits for data."""

    count: int
    of: int  # number of compared iterations
    median_s: float
    longest_s: float
    longest: int  # number of the longest iteration, as shown
    every: int = 0  # distance between them, if it is always the same
    max_ratio: float = 1.0  # upper bound of the lost time over the lost time: iterations may be nearly long


class ComparedFigure(Struct, frozen=True):
    """A framework's own figure that differs from the figure from the counts of all ranks, over the same windows."""

    name: str  # a name of FIGURES, with its unit
    framework: float
    own: float  # from tokens without padding, over iteration time
    factor: float  # framework / own
    windows: int  # number of compared windows


class Audit(Struct, frozen=True, omit_defaults=True):
    """The result of all checks of the numbers of a run against each other."""

    figures: tuple[ComparedFigure, ...] = ()
    doubts: tuple[str, ...] = ()  # failed checks of own figures: counts of tokens, MFU
    windows: int = 0  # number of windows whose counts were checked


class WaterfallPart(Struct, frozen=True, omit_defaults=True):
    """One part of the waterfall; a part without time and joules is left out."""

    name: str  # a name of PARTS
    device_seconds: float
    share: float  # share of all device-seconds
    joules: float | None = None  # None if not measured
    is_split_by_time: bool = False  # whether the joules are a share of the joules of steps, in proportion to time
    cost: float | None = None  # cost in the currency of PRICE_PER_GPU_HOUR
    # Upper bound of the gain in throughput if this part were removed and its time became useful work.
    max_gain: float | None = None
    evidence: str = ""  # the counters and windows from which the part is computed
    # Half-width (95 %) of the sampling error of `share`; None if the part is not computed from samples.
    error_share: float | None = None


class Waterfall(Struct, frozen=True):
    """The device-seconds of a job: of GPUs, also of unused allocated GPUs, or of ranks in a job without GPUs."""

    device_seconds: float
    joules: float | None  # measured in the reports; None without a measurement
    parts: tuple[WaterfallPart, ...]  # in the order of PARTS; their device-seconds add up to the whole
    unit: str  # of the device-seconds: OF_GPUS or OF_RANKS
    unknown: tuple[str, ...] = ()  # what is not known, and the setting that resolves it

    @property
    def avoidable_seconds(self) -> float:
        """Device-seconds of the losses that can be avoided."""
        return sum(part.device_seconds for part in self.parts if part.name not in NOT_AVOIDABLE)
