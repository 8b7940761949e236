"""The waterfall: the device-seconds of a job in parts that add up to the whole."""

from __future__ import annotations

from msgspec import Struct

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
    "straggling": "waits for the slowest rank",
    "generation": "marked generation: productive",
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
