"""Splits the device-seconds and joules of a job into parts that add up to the whole. No I/O.

The classes of goodput add up to the elapsed time of all ranks.  The time of kept steps is split further, by the profile
and by FLOPs over the peak.  Definitions: docs/goodput.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from effllm.job.account import error_of_mean
from effllm.job.goodput_attempt import HANG, KEPT, REDONE, SLOW, STRAGGLING, UNEVEN, UNKNOWN, WARMUP
from effllm.job.losses import profile_period
from effllm.records.job import ClusterTotals, GoodputSummary, JobConstants
from effllm.records.rank import Profile
from effllm.records.verdict import OF_GPUS, PARTS, PRODUCTIVE, Waterfall, WaterfallPart

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


class Sources(NamedTuple):
    """The reports from which the classes of goodput are computed."""

    windows: int = 0  # closed windows of the last attempt
    attempts: int = 1
    iterations_compared: int = 0  # iterations in which own times of ranks were compared
    unused: str = ""  # the nodes with unused GPUs


ONE_ATTEMPT = Sources()


class _Steps(NamedTuple):
    """The device-seconds of kept steps by part, and texts about the unknown parts."""

    seconds: dict[str, float]
    unknown: tuple[str, ...]
    errors: Mapping[str, float] = MappingProxyType({})  # sampling errors of parts in device-seconds: half-width, 95 %


def waterfall(
    goodput: GoodputSummary, whole: ClusterTotals, sources: Sources = ONE_ATTEMPT, uneven_share: float = 0.0
) -> Waterfall | None:
    """Return the waterfall of a job from its totals on the base ``job``; ``None`` before any time was reported.

    ``uneven_share`` is the share of waits of the ranks for each other in profiled iterations that are not long.
    """
    if not whole.constants.world_size or not sum(goodput.device_seconds.values()):
        return None
    is_of_gpus = goodput.unit == OF_GPUS
    without_gpus = sum(attempt.gpus == 0 for attempt in goodput.attempts) if is_of_gpus else 0
    classes = dict(goodput.device_seconds)
    kept = classes.pop(KEPT, 0.0)
    inside = _OtherInSteps.of(goodput, whole.health.straggling_gpu_s)
    profiled = _profiled_parts(kept, whole.profile, inside, uneven_share, classes.get(UNEVEN, 0.0))
    steps = _split_kept_steps(kept, classes, whole, without_gpus > 0, kept + sum(inside), profiled)
    seconds = {RENAMED.get(name, name): value for name, value in classes.items()} | steps.seconds
    used_s = sum(seconds.values())
    seconds["unused"] = goodput.unused_gpu_seconds
    joules = _parts_j(goodput.joules, steps.seconds, kept)
    total = sum(seconds.values())
    # The counters and windows from which each part is computed.
    evidence = _evidence_of_classes(sources, whole) | _evidence_of_clock(whole, _iterations_s(kept, classes))
    evidence |= _evidence_of_steps(whole, _kept_share(kept, classes))
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
            max_gain=_max_gain(seconds.get(name, 0.0), total if name == "unused" else used_s)
            if name not in PRODUCTIVE
            else None,
            evidence=evidence.get(name, ""),
            error_share=steps.errors[name] / total if name in steps.errors else None,
        )
        for name in PARTS
        if seconds.get(name, 0.0) > 0.0 or (joules.get(name) or 0.0) > 0.0  # joules without time: see `_parts_j`
    )
    unknown = [*steps.unknown]
    if any(attempt.unused_gpus is None for attempt in goodput.attempts):
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


def _split_kept_steps(
    kept: float,
    classes: Mapping[str, float],
    whole: ClusterTotals,
    is_mixed: bool,
    profiled_steps: float,
    profiled: Mapping[str, float],
) -> _Steps:
    """Split the device-seconds of kept steps; ``profiled`` are parts of them by profiled iterations."""
    if not kept:
        return _Steps({}, ())
    seconds = dict(profiled)
    period = profile_period(whole.counts.iterations, whole.constants.world_size)
    unknown = () if whole.profile is not None and whole.profile.time_s else (NO_PROFILE.format(period),)
    computing = kept - sum(seconds.values())
    clock_s, why_no_clock = _lost_to_clock(computing, kept, classes, whole)
    flops_s, why_no_flops = ({}, (OTHER_DEVICES,)) if is_mixed else _parts_by_flops(computing, kept, classes, whole)
    # The clock is a mean of samples: it must not take time that the FLOPs need at the peak.
    clock_s = min(clock_s, max(computing - sum(flops_s.values()), 0.0))
    rest = max(computing - clock_s - sum(flops_s.values()), 0.0)
    seconds |= {"clock_below_maximum": clock_s} if clock_s else {}
    seconds |= flops_s | {"below_peak" if flops_s else "steps": rest}
    errors = errors_of(seconds, whole, profiled_steps, computing)
    return _Steps(seconds, (*unknown, *why_no_flops, *why_no_clock), errors)


def _lost_to_clock(
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
    if devices.sm_clock_covered_s < MIN_CLOCK_COVERAGE * share * _iterations_s(kept, classes):
        return 0.0, (LITTLE_CLOCK,)
    return computing * share * max(1.0 - devices.sm_clock_ratio, 0.0), ()


def _kept_share(kept: float, classes: Mapping[str, float]) -> float:
    return kept / (kept + classes.get(REDONE, 0.0)) if kept else 1.0


def _iterations_s(kept: float, classes: Mapping[str, float]) -> float:
    return kept + sum(classes.get(name, 0.0) for name in (REDONE, STRAGGLING, UNEVEN, HANG))


def _parts_by_flops(
    computing: float, kept: float, classes: Mapping[str, float], whole: ClusterTotals
) -> tuple[dict[str, float], Sequence[str]]:
    """Return the device-seconds of the FLOPs of kept steps at the peak, and the reason for unknown FLOPs."""
    flops_s = _seconds_at_peak(whole.constants, whole.counts.tokens, whole.counts.tokens_processed)
    if isinstance(flops_s, str):
        return {}, (flops_s,)
    # The counts include redone iterations; tokens are assumed to be as dense in redone steps as in kept steps.
    flops_s = {name: value * _kept_share(kept, classes) for name, value in flops_s.items()}
    return ({}, (ABOVE_PEAK,)) if sum(flops_s.values()) > computing else (flops_s, ())


class _OtherInSteps(NamedTuple):
    """Device-seconds inside the steps that belong to other classes than kept."""

    waits_s: float  # for other ranks: a waiting rank waits in its communication
    long_s: float  # what long iterations take above the median: then the devices have hardly any work
    slow_s: float  # what slow ranks lose themselves

    @classmethod
    def of(cls, goodput: GoodputSummary, straggling_gpu_s: float) -> _OtherInSteps:
        """Return these seconds; ``straggling_gpu_s`` are the waits for slow ranks, in rank-seconds."""
        classes, straggling_s = goodput.device_seconds, goodput.rank_seconds.get(STRAGGLING, 0.0)
        straggling = classes.get(STRAGGLING, 0.0)
        waiting = straggling * min(straggling_gpu_s / straggling_s, 1.0) if straggling_s else 0.0
        waits = waiting + classes.get(UNEVEN, 0.0) + goodput.data_in_steps_s
        return cls(waits, sum(classes.get(name, 0.0) for name in (SLOW, WARMUP)), straggling - waiting)


def _profiled_parts(
    kept: float, profile: Profile | None, inside: _OtherInSteps, uneven_share: float, counted: float
) -> dict[str, float]:
    """Return waits in communication, exposed communication and idle time, from the shares in profiled iterations.

    ``uneven_share`` is the share of waits of the ranks for each other in profiled iterations, without waits for slow
    ranks; own times show ``counted`` device-seconds of these waits in all iterations.
    """
    if profile is None or not profile.time_s:
        return {}
    steps = kept + sum(inside)
    exposed = min(profile.exposed_s / profile.time_s, 1.0) * steps - inside.waits_s
    idle = max(1.0 - (profile.exposed_s + profile.computing_s) / profile.time_s, 0.0) * steps - inside.long_s
    # If a pause of one rank makes an iteration long, the others wait in their communication.
    exposed = min(max(exposed + min(idle, 0.0), 0.0), kept)
    waits = min(max(uneven_share * (steps - inside.long_s) - counted, 0.0), exposed)
    idle = min(max(idle, 0.0), kept - exposed)
    return {"waits_in_communication": waits, "exposed_communication": exposed - waits, "device_idle": idle}


def _seconds_at_peak(constants: JobConstants, tokens: int, processed: int) -> dict[str, float] | str:
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


def _parts_j(by_class: Mapping[str, float | None], steps: Mapping[str, float], kept: float) -> dict[str, float | None]:
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


def _max_gain(seconds: float, total: float) -> float | None:
    return total / (total - seconds) - 1.0 if seconds < total else None


def _evidence_of_classes(sources: Sources, whole: ClusterTotals) -> dict[str, str]:
    """Return the evidence of each class of goodput; ``sources`` are the reports of the classes."""
    ranks = whole.constants.world_size
    windows = f"windows 1-{sources.windows:,}" if sources.windows > 1 else "window 1"
    reports = f"reports of {windows}" if sources.windows else "reports"
    if sources.attempts > 1:
        reports = f"reports of {sources.attempts:,} attempts, the last with {windows}"
    from_reports = ("startup", "shutdown", "evaluation", "checkpoint", "other", "redone", "data", "generation")
    return dict.fromkeys(from_reports, reports) | {
        "restart_gap": f"ends and starts of {sources.attempts} attempts",
        "hang": "positions of all ranks in heartbeats",
        "idle": f"first and last messages of {ranks:,} ranks",
        "unreported": "time of the job without reports",
        "unused": sources.unused or "allocation of the scheduler",
        **dict.fromkeys(("data", "slow_iterations", "warmup"), f"times of iterations in {reports}"),
        **dict.fromkeys((STRAGGLING, UNEVEN), f"own times of ranks in {sources.iterations_compared:,} iterations"),
    }


def _evidence_of_clock(whole: ClusterTotals, iterations: float) -> dict[str, str]:
    """Return the evidence of the clock; ``iterations`` are device-seconds."""
    devices, constants = whole.devices, whole.constants
    if devices.sm_clock_ratio is None or not constants.gpus_with_clock:
        return {}
    clocked = iterations * constants.gpus_with_clock / max(constants.gpus, 1)
    covered = min(devices.sm_clock_covered_s / clocked, 1.0) if clocked else 0.0
    text = f"SM clock {100 * devices.sm_clock_ratio:.1f} % of the peak's"
    text += f"; {constants.gpus_with_clock:,} of {constants.gpus:,} GPUs, {100 * covered:.0f} % of the time"
    return {"clock_below_maximum": text if whole.profile is not None else f"{text}; communication included"}


def _evidence_of_steps(whole: ClusterTotals, kept_share: float) -> dict[str, str]:
    """Return the evidence of the parts of kept steps; the tokens of the other steps are left out."""
    constants, counts, profile = whole.constants, whole.counts, whole.profile
    profiled = f"{profile.iterations:,} profiled iterations, summed over ranks" if profile is not None else ""
    texts = dict.fromkeys(("waits_in_communication", "exposed_communication", "device_idle"), profiled)
    texts |= dict.fromkeys(("below_peak", "steps"), "rest of the steps")
    flops, hardware = constants.flops_per_token, constants.hardware_flops_per_token
    if flops is not None and constants.peak_flops_per_s:
        per_device = constants.peak_flops_per_s / (constants.gpus or constants.world_size)
        peak = f"at {per_device / 1e12:.4g} TFLOP/s"
        if kept_share < 1.0:
            peak += f", {100 * kept_share:.1f} % of them in kept steps"
        padding = max(counts.tokens_processed - counts.tokens, 0)
        texts["useful"] = f"{counts.tokens:.4g} tokens x {flops:.4g} FLOPs {peak}"
        texts["padding"] = f"{padding:.4g} positions x {flops:.4g} FLOPs {peak}"
        texts["recomputation"] = f"{counts.tokens:.4g} tokens x {max((hardware or 0.0) - flops, 0.0):.4g} FLOPs {peak}"
    return texts


def errors_of(seconds: Mapping[str, float], whole: ClusterTotals, steps: float, computing: float) -> dict[str, float]:
    """Return the sampling error (half-width, 95 %) of parts in device-seconds; parts without samples are left out.

    The shares in profiled iterations were applied to ``steps`` device-seconds, the clock to ``computing`` ones.
    """
    errors, profile, devices = {}, whole.profile, whole.devices
    if profile is not None and profile.time_s:
        idle_s, ranks = profile.time_s - profile.exposed_s - profile.computing_s, whole.constants.world_size
        for name, part_s in (("exposed_communication", profile.exposed_s), ("device_idle", idle_s)):
            share = min(max(part_s / profile.time_s, 0.0), 1.0)
            # All ranks do the same work in the same iteration, so they do not increase the number of samples.
            errors[name] = steps * float(error_of_mean(share, 1.0, profile.iterations / max(ranks, 1)))
    if devices.sm_clock_error is not None and "clock_below_maximum" in seconds:
        clocked = whole.constants.gpus_with_clock / max(whole.constants.gpus, 1)
        errors["clock_below_maximum"] = computing * clocked * devices.sm_clock_error
    if errors:
        rest = math.sqrt(sum(error**2 for error in errors.values()))
        errors |= {name: rest for name in ("below_peak", "steps") if name in seconds}
    return {name: error for name, error in errors.items() if name in seconds}
