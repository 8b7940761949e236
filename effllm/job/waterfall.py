"""Splits the device-seconds and joules of a job into parts that add up to the whole. No I/O.

The classes of goodput add up to the elapsed time of all ranks.  The time of kept steps is split further, by the profile
and by FLOPs over the peak.  Definitions: docs/goodput.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from effllm.job.goodput_attempt import HANG, KEPT, REDONE, STRAGGLING, UNKNOWN
from effllm.job.losses import profile_period
from effllm.job.waterfall_evidence import ONE_ATTEMPT, Sources, errors_of, evidence_of
from effllm.records.job import ClusterTotals, GoodputSummary, JobConstants
from effllm.records.rank import Profile
from effllm.records.waterfall import OF_GPUS, PARTS, PRODUCTIVE, Waterfall, WaterfallPart

#: Class of goodput -> part, where the names differ.
RENAMED = {UNKNOWN: "unreported"}
NO_PROFILE = (
    "exposed communication and idle devices inside steps: no iteration was profiled; EFFICIENTLLM_PROFILE_EVERY={} "
    "measures them"
)
NO_FLOPS = (
    "useful work: the FLOPs per token are unknown; initialize_efficientllm_metrics(flops_per_token=...) sets them"
)
NO_PEAK = "useful work: the peak FLOP/s of the device is unknown; EFFICIENTLLM_PEAK_TFLOPS sets it"
NO_TOKENS = "useful work: the loop counted no tokens; effllm.count(tokens=...) counts them"
ABOVE_PEAK = "useful work: the FLOPs of the tokens exceed the time of the steps at the peak, so FLOPs or peak are wrong"
NO_CLOCK = "clock below maximum: no GPU reports its SM clock and its maximum SM clock"
OTHER_DEVICES = "useful work: the ranks of an attempt had no GPU, and its tokens are not counted separately"
NOT_STATED = (
    "allocated GPUs that no rank used: known if all ranks have joined, and Slurm or a Kubernetes device plugin states "
    "the GPUs of each rank"
)
NO_GPUS = "time of attempts whose ranks had no GPU: {} of {} attempts; it is not in the GPU time, but its joules are"
LITTLE_CLOCK = "clock below maximum: the SM clock was measured in less than half of the time of iterations"
#: Smallest share of the time of iterations in which the clock must be measured.
MIN_CLOCK_COVERAGE = 0.5


class _Steps(NamedTuple):
    """The device-seconds of kept steps by part, and texts about the unknown parts."""

    seconds: dict[str, float]
    unknown: tuple[str, ...]
    errors: Mapping[str, float] = MappingProxyType({})  # sampling errors of parts in device-seconds: half-width, 95 %


def waterfall(goodput: GoodputSummary, whole: ClusterTotals, sources: Sources = ONE_ATTEMPT) -> Waterfall | None:
    """Return the waterfall of a job; ``None`` before any time was reported.

    Args:
        goodput: the elapsed time and joules by class.
        whole: the totals of the whole job, on the base ``job``.
        sources: the reports from which the classes are computed.
    """
    if not whole.constants.world_size or not sum(goodput.device_seconds.values()):
        return None
    is_of_gpus = goodput.unit == OF_GPUS
    without_gpus = sum(one.gpus == 0 for one in goodput.attempts) if is_of_gpus else 0
    classes = dict(goodput.device_seconds)
    kept = classes.pop(KEPT, 0.0)
    steps = _split(kept, classes, whole, is_mixed=without_gpus > 0)
    seconds = {RENAMED.get(name, name): value for name, value in classes.items()} | steps.seconds
    used_s = sum(seconds.values())
    seconds["unused"] = goodput.unused_gpu_seconds
    joules = _joules(goodput.joules, steps.seconds, kept)
    total = sum(seconds.values())
    evidence = evidence_of(sources, whole, _iterations(kept, classes), kept_share=_kept_share(kept, classes))
    price = whole.constants.price_per_gpu_hour if is_of_gpus else None
    parts = tuple(
        WaterfallPart(
            name=name,
            device_seconds=seconds.get(name, 0.0),
            share=seconds.get(name, 0.0) / total,
            joules=joules.get(name),
            is_split_by_time=name in steps.seconds and len(steps.seconds) > 1 and joules.get(name) is not None,
            cost=None if price is None else seconds.get(name, 0.0) / 3600.0 * price,
            # Without another part, the job is shorter, and so is the time of unused GPUs.
            max_gain=_gain(seconds.get(name, 0.0), total if name == "unused" else used_s)
            if name not in PRODUCTIVE
            else None,
            evidence=evidence.get(name, ""),
            error_share=steps.errors[name] / total if name in steps.errors else None,
        )
        for name in PARTS
        if seconds.get(name, 0.0) > 0.0 or (joules.get(name) or 0.0) > 0.0  # joules without time: see `_joules`
    )
    unknown = [*steps.unknown]
    if any(one.unused_gpus is None for one in goodput.attempts):
        unknown.append(NOT_STATED)
    if without_gpus:
        unknown.append(NO_GPUS.format(without_gpus, len(goodput.attempts)))
    measured = [part.joules for part in parts if part.joules is not None]
    return Waterfall(
        device_seconds=total,
        joules=sum(measured) if measured else None,
        parts=parts,
        unknown=tuple(unknown),
        unit=goodput.unit,
    )


def _split(kept: float, classes: Mapping[str, float], whole: ClusterTotals, is_mixed: bool) -> _Steps:
    """Split the device-seconds of kept steps."""
    if not kept:
        return _Steps({}, ())
    seconds = _profiled(kept, classes, whole.profile)
    period = profile_period(whole.counts.iterations, whole.constants.world_size)
    unknown = () if whole.profile is not None and whole.profile.time_s else (NO_PROFILE.format(period),)
    computing = kept - sum(seconds.values())
    clock, why_no_clock = _below_clock(computing, kept, classes, whole)
    flops, why_no_flops = ({}, (OTHER_DEVICES,)) if is_mixed else _useful(computing, kept, classes, whole)
    # The clock is a mean of samples: it must not take time that the FLOPs need at the peak.
    clock = min(clock, max(computing - sum(flops.values()), 0.0))
    rest = max(computing - clock - sum(flops.values()), 0.0)
    seconds |= {"clock_below_maximum": clock} if clock else {}
    seconds |= flops | {"below_peak" if flops else "steps": rest}
    errors = errors_of(seconds, whole, kept + classes.get(STRAGGLING, 0.0), computing)
    return _Steps(seconds, (*unknown, *why_no_flops, *why_no_clock), errors)


def _below_clock(
    computing: float, kept: float, classes: Mapping[str, float], whole: ClusterTotals
) -> tuple[float, Sequence[str]]:
    """Return the device-seconds that a clock below the reference takes, and the reason for an unknown clock.

    Computation at a share r of the clock takes 1/r of the time, so 1 - r of this time would be saved.
    """
    devices, constants = whole.devices, whole.constants
    if not constants.gpus:
        return 0.0, ()
    if devices.sm_clock_ratio is None or not constants.gpus_with_clock:
        return 0.0, (NO_CLOCK,)
    share = constants.gpus_with_clock / constants.gpus
    if devices.sm_clock_covered_s < MIN_CLOCK_COVERAGE * share * _iterations(kept, classes):
        return 0.0, (LITTLE_CLOCK,)
    return computing * share * max(1.0 - devices.sm_clock_ratio, 0.0), ()


def _kept_share(kept: float, classes: Mapping[str, float]) -> float:
    return kept / (kept + classes.get(REDONE, 0.0)) if kept else 1.0


def _iterations(kept: float, classes: Mapping[str, float]) -> float:
    return kept + sum(classes.get(name, 0.0) for name in (REDONE, STRAGGLING, HANG))


def _useful(
    computing: float, kept: float, classes: Mapping[str, float], whole: ClusterTotals
) -> tuple[dict[str, float], Sequence[str]]:
    """Return the device-seconds of the FLOPs of kept steps at the peak, and the reason for unknown FLOPs."""
    flops = _at_peak(whole.constants, whole.counts.tokens, whole.counts.tokens_processed)
    if isinstance(flops, str):
        return {}, (flops,)
    # The counts include redone iterations; tokens are assumed to be as dense in redone steps as in kept steps.
    flops = {name: value * _kept_share(kept, classes) for name, value in flops.items()}
    return ({}, (ABOVE_PEAK,)) if sum(flops.values()) > computing else (flops, ())


def _profiled(kept: float, classes: Mapping[str, float], profile: Profile | None) -> dict[str, float]:
    """Return exposed communication and idle time, from the shares in profiled iterations."""
    if profile is None or not profile.time_s:
        return {}
    # A rank that waits for a straggler waits in its communication: this time is already in the class ``straggling``.
    steps = kept + classes.get(STRAGGLING, 0.0)
    exposed = min(profile.exposed_s / profile.time_s, 1.0) * steps - classes.get(STRAGGLING, 0.0)
    idle = max(1.0 - (profile.exposed_s + profile.computing_s) / profile.time_s, 0.0) * steps
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
    """Return the joules of each part; the joules of kept steps are split in proportion to time.

    A class can have joules without device time: its time is a rounding error, or its ranks had no GPU.
    """
    joules = {RENAMED.get(name, name): value for name, value in by_class.items() if name != KEPT}
    kept_j = by_class.get(KEPT)
    if not steps:
        joules["steps"] = kept_j
    for name, seconds in steps.items():
        joules[name] = None if kept_j is None else kept_j * seconds / kept
    return joules


def _gain(seconds: float, total: float) -> float | None:
    return total / (total - seconds) - 1.0 if seconds < total else None
