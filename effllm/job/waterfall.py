"""Splits the device-seconds and joules of a job into parts that add up to the whole. No I/O.

The classes of goodput add up to the elapsed time of all ranks.  The time of kept steps is split further, by the profile
and by FLOPs over the peak.  Definitions: docs/goodput.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from effllm.job.goodput_attempt import KEPT, REDONE, STRAGGLING, UNKNOWN
from effllm.records.job import ClusterTotals, GoodputSummary, JobConstants
from effllm.records.rank import Profile
from effllm.records.waterfall import PARTS, PRODUCTIVE, Waterfall, WaterfallPart

#: Class of goodput -> part, where the names differ.
RENAMED = {UNKNOWN: "unreported"}
NO_PROFILE = "exposed communication and idle devices inside steps: EFFICIENTLLM_PROFILE_EVERY=500 measures them"
NO_FLOPS = (
    "useful work: the FLOPs per token are unknown; initialize_efficientllm_metrics(flops_per_token=...) sets them"
)
NO_PEAK = "useful work: the peak FLOP/s of the device is unknown; EFFICIENTLLM_PEAK_TFLOPS sets it"
NO_TOKENS = "useful work: the loop counted no tokens; effllm.count(tokens=...) counts them"
ABOVE_PEAK = "useful work: the FLOPs of the tokens exceed the time of the steps at the peak, so FLOPs or peak are wrong"
UNUSED = "allocated GPUs that no rank used: these GPUs are not detected"


class _Steps(NamedTuple):
    """The device-seconds of kept steps by part, and texts about the unknown parts."""

    seconds: dict[str, float]
    unknown: tuple[str, ...]


def waterfall(goodput: GoodputSummary, whole: ClusterTotals) -> Waterfall | None:
    """Return the waterfall of a job; ``None`` before any time was reported.

    Args:
        goodput: the elapsed time and joules by class.
        whole: the totals of the whole job, on the base ``job``.
    """
    devices = whole.constants.gpus or whole.constants.world_size
    ranks = whole.constants.world_size
    if not ranks or not sum(goodput.rank_seconds.values()):
        return None
    per_rank = devices / ranks
    classes = {name: seconds * per_rank for name, seconds in goodput.rank_seconds.items()}
    kept = classes.pop(KEPT, 0.0)
    steps = _split(kept, classes, whole)
    seconds = {RENAMED.get(name, name): value for name, value in classes.items()} | steps.seconds
    joules = _joules(goodput.joules, steps.seconds, kept)
    total = sum(seconds.values())
    price = whole.constants.price_per_gpu_hour if whole.constants.gpus else None
    parts = tuple(
        WaterfallPart(
            name=name,
            device_seconds=seconds[name],
            share=seconds[name] / total,
            joules=joules.get(name),
            is_split_by_time=name in steps.seconds and len(steps.seconds) > 1 and joules.get(name) is not None,
            cost=None if price is None else seconds[name] / 3600.0 * price,
            max_gain=_gain(seconds[name], total) if name not in PRODUCTIVE else None,
        )
        for name in PARTS
        if seconds.get(name, 0.0) > 0.0
    )
    measured = [part.joules for part in parts if part.joules is not None]
    return Waterfall(total, sum(measured) if measured else None, parts, (*steps.unknown, UNUSED))


def _split(kept: float, classes: Mapping[str, float], whole: ClusterTotals) -> _Steps:
    """Split the device-seconds of kept steps."""
    if not kept:
        return _Steps({}, ())
    seconds = _profiled(kept, classes, whole.profile)
    unknown = () if whole.profile is not None and whole.profile.time_s else (NO_PROFILE,)
    rest = kept - sum(seconds.values())
    flops = _at_peak(whole.constants, whole.counts.tokens, whole.counts.tokens_processed)
    if isinstance(flops, str):
        return _Steps(seconds | {"steps": rest}, (*unknown, flops))
    # The counts include redone iterations; tokens are assumed to be as dense in redone steps as in kept steps.
    redone = classes.get(REDONE, 0.0)
    flops = {name: value * kept / (kept + redone) for name, value in flops.items()}
    if sum(flops.values()) > rest:
        return _Steps(seconds | {"steps": rest}, (*unknown, ABOVE_PEAK))
    return _Steps(seconds | flops | {"below_peak": rest - sum(flops.values())}, unknown)


def _profiled(kept: float, classes: Mapping[str, float], profile: Profile | None) -> dict[str, float]:
    """Return exposed communication and idle time, from the shares in profiled iterations."""
    if profile is None or not profile.time_s:
        return {}
    # A rank that waits for a straggler waits in its communication: this time is already in the class ``straggling``.
    steps = kept + classes.get(STRAGGLING, 0.0)
    exposed = min(profile.exposed_s / profile.time_s, 1.0) * steps - classes.get(STRAGGLING, 0.0)
    idle = max(1.0 - (profile.exposed_s + profile.computing_s) / profile.time_s, 0.0) * kept
    exposed = min(max(exposed, 0.0), kept)
    return {"exposed_communication": exposed, "device_idle": min(idle, kept - exposed)}


def _at_peak(constants: JobConstants, tokens: int, processed: int) -> dict[str, float] | str:
    """Return the device-seconds of the FLOPs of all iterations at the peak, by part; a sentence if they are unknown."""
    if constants.flops_per_token is None:
        return NO_FLOPS
    if not constants.peak_flops_per_s:
        return NO_PEAK
    if not tokens:
        return NO_TOKENS
    per_device = constants.peak_flops_per_s / (constants.gpus or constants.world_size)
    hardware = constants.hardware_flops_per_token or constants.flops_per_token
    return {
        "useful": tokens * constants.flops_per_token / per_device,
        "padding": max(processed - tokens, 0) * constants.flops_per_token / per_device,
        "recomputation": tokens * max(hardware - constants.flops_per_token, 0.0) / per_device,
    }


def _joules(by_class: Mapping[str, float | None], steps: Mapping[str, float], kept: float) -> dict[str, float | None]:
    """Return the joules of each part; the joules of kept steps are split in proportion to time."""
    joules = {RENAMED.get(name, name): value for name, value in by_class.items() if name != KEPT}
    kept_j = by_class.get(KEPT)
    for name, seconds in steps.items():
        joules[name] = None if kept_j is None else kept_j * seconds / kept
    return joules


def _gain(seconds: float, total: float) -> float | None:
    return total / (total - seconds) - 1.0 if seconds < total else None
