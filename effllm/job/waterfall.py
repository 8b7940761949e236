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
    """The device-seconds of kept steps by part, and a sentence for each reason why parts are unknown."""

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
    attempts_without_gpus = sum(attempt.gpus == 0 for attempt in goodput.attempts) if is_of_gpus else 0
    classes_s = dict(goodput.device_seconds)  # of all classes but kept
    kept_s = classes_s.pop(KEPT, 0.0)
    others = _OtherInSteps.of(goodput, whole.health.straggling_gpu_s)
    profiled_s = _profiled_parts(kept_s, whole.profile, others, uneven_share, classes_s.get(UNEVEN, 0.0))
    steps = _split_kept_steps(kept_s, classes_s, whole, attempts_without_gpus > 0, kept_s + sum(others), profiled_s)
    seconds = dict.fromkeys(PARTS, 0.0) | steps.seconds
    seconds |= {RENAMED.get(name, name): class_s for name, class_s in classes_s.items()}
    used_s = sum(seconds.values())
    seconds["unused"] = goodput.unused_gpu_seconds
    joules = _parts_j(goodput.joules, steps.seconds, kept_s)
    total_s = sum(seconds.values())
    # The counters and windows from which each part is computed.
    evidence = _evidence_of_classes(sources, whole) | _evidence_of_clock(whole, _iterations_s(kept_s, classes_s))
    evidence |= _evidence_of_steps(whole, _kept_share(kept_s, classes_s))
    price = whole.constants.price_per_gpu_hour if is_of_gpus else None
    parts = tuple(
        WaterfallPart(
            name=name,
            device_seconds=seconds[name],
            share=seconds[name] / total_s,
            joules=joules.get(name),
            is_split_by_time=name in steps.seconds and len(steps.seconds) > 1 and joules.get(name) is not None,
            cost=None if price is None else seconds[name] / 3600.0 * price,
            # Without another part, the job is shorter, and so is the time of unused GPUs.
            max_gain=None if name in PRODUCTIVE else _max_gain(seconds[name], total_s if name == "unused" else used_s),
            evidence=evidence.get(name, ""),
            error_share=steps.errors[name] / total_s if name in steps.errors else None,
        )
        for name in PARTS
        if seconds[name] > 0.0 or (joules.get(name) or 0.0) > 0.0  # joules without time: see `_parts_j`
    )
    unknown = [*steps.unknown]
    if any(attempt.unused_gpus is None for attempt in goodput.attempts):
        unknown.append(NOT_STATED)
    if attempts_without_gpus:
        unknown.append(NO_GPUS.format(attempts_without_gpus, len(goodput.attempts)))
    parts_j = [part.joules for part in parts if part.joules is not None]
    total_j = sum(parts_j) if parts_j else None
    return Waterfall(device_seconds=total_s, joules=total_j, parts=parts, unknown=tuple(unknown), unit=goodput.unit)


def _split_kept_steps(
    kept_s: float,
    classes_s: Mapping[str, float],
    whole: ClusterTotals,
    has_attempt_without_gpus: bool,
    all_steps_s: float,
    profiled_s: Mapping[str, float],
) -> _Steps:
    """Split the device-seconds of kept steps, of which profiles show parts; ``all_steps_s`` has other classes too."""
    if not kept_s:
        return _Steps({}, ())
    seconds = dict(profiled_s)
    period = profile_period(whole.counts.iterations, whole.constants.world_size)
    unknown = () if whole.profile is not None and whole.profile.time_s else (NO_PROFILE.format(period),)
    computing_s = kept_s - sum(seconds.values())
    clock_s, why_no_clock = _lost_to_clock(computing_s, kept_s, classes_s, whole)
    flops_s, why_no_flops = _parts_by_flops(computing_s, kept_s, classes_s, whole)
    if has_attempt_without_gpus:
        flops_s, why_no_flops = {}, (OTHER_DEVICES,)
    # The clock is a mean of samples: it must not take time that the FLOPs need at the peak.
    clock_s = min(clock_s, max(computing_s - sum(flops_s.values()), 0.0))
    remaining_s = max(computing_s - clock_s - sum(flops_s.values()), 0.0)
    seconds |= {"clock_below_maximum": clock_s} if clock_s else {}
    seconds |= flops_s | {"below_peak" if flops_s else "steps": remaining_s}
    errors = errors_of(seconds, whole, all_steps_s, computing_s)
    return _Steps(seconds, (*unknown, *why_no_flops, *why_no_clock), errors)


def _lost_to_clock(
    computing_s: float, kept_s: float, classes_s: Mapping[str, float], whole: ClusterTotals
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
    if devices.sm_clock_covered_s < MIN_CLOCK_COVERAGE * share * _iterations_s(kept_s, classes_s):
        return 0.0, (LITTLE_CLOCK,)
    return computing_s * share * max(1.0 - devices.sm_clock_ratio, 0.0), ()


def _kept_share(kept_s: float, classes_s: Mapping[str, float]) -> float:
    """Return the share of kept steps in all kept and redone steps."""
    return kept_s / (kept_s + classes_s.get(REDONE, 0.0)) if kept_s else 1.0


def _iterations_s(kept_s: float, classes_s: Mapping[str, float]) -> float:
    """Return the device-seconds of kept and redone steps, with waits for other ranks and hangs in them."""
    return kept_s + sum(classes_s.get(name, 0.0) for name in (REDONE, STRAGGLING, UNEVEN, HANG))


def _parts_by_flops(
    computing_s: float, kept_s: float, classes_s: Mapping[str, float], whole: ClusterTotals
) -> tuple[dict[str, float], Sequence[str]]:
    """Return the device-seconds of the FLOPs of kept steps at the peak, and the reason for unknown FLOPs."""
    flops_s = _seconds_at_peak(whole.constants, whole.counts.tokens, whole.counts.tokens_processed)
    if isinstance(flops_s, str):
        return {}, (flops_s,)
    # The counts include redone iterations; tokens are assumed to be as dense in redone steps as in kept steps.
    flops_s = {name: part_s * _kept_share(kept_s, classes_s) for name, part_s in flops_s.items()}
    return ({}, (ABOVE_PEAK,)) if sum(flops_s.values()) > computing_s else (flops_s, ())


class _OtherInSteps(NamedTuple):
    """Device-seconds inside the steps that belong to other classes than kept."""

    waits_s: float  # for other ranks: a waiting rank waits in its communication
    long_s: float  # what long iterations take above the median: then the devices have hardly any work
    slow_s: float  # what slow ranks lose themselves

    @classmethod
    def of(cls, goodput: GoodputSummary, straggling_gpu_s: float) -> _OtherInSteps:
        """Return these seconds; ``straggling_gpu_s`` are the waits for slow ranks, in rank-seconds."""
        classes_s, straggling_rank_s = goodput.device_seconds, goodput.rank_seconds.get(STRAGGLING, 0.0)
        straggling_s = classes_s.get(STRAGGLING, 0.0)
        for_slow_s = straggling_s * min(straggling_gpu_s / straggling_rank_s, 1.0) if straggling_rank_s else 0.0
        waits_s = for_slow_s + classes_s.get(UNEVEN, 0.0) + goodput.data_in_steps_s
        return cls(waits_s, sum(classes_s.get(name, 0.0) for name in (SLOW, WARMUP)), straggling_s - for_slow_s)


def _profiled_parts(
    kept_s: float, profile: Profile | None, others: _OtherInSteps, uneven_share: float, counted_s: float
) -> dict[str, float]:
    """Return waits in communication, exposed communication and idle time, from the shares in profiled iterations.

    ``uneven_share`` is the share of waits of the ranks for each other in profiled iterations, without waits for slow
    ranks; own times show ``counted_s`` device-seconds of these waits in all iterations.
    """
    if profile is None or not profile.time_s:
        return {}
    steps_s = kept_s + sum(others)
    exposed_s = min(profile.exposed_s / profile.time_s, 1.0) * steps_s - others.waits_s
    idle_share = max(1.0 - (profile.exposed_s + profile.computing_s) / profile.time_s, 0.0)
    idle_s = idle_share * steps_s - others.long_s
    # If a pause of one rank makes an iteration long, the others wait in their communication: idle_s is negative.
    exposed_s = min(max(exposed_s + min(idle_s, 0.0), 0.0), kept_s)
    waits_s = min(max(uneven_share * (steps_s - others.long_s) - counted_s, 0.0), exposed_s)
    idle_s = min(max(idle_s, 0.0), kept_s - exposed_s)
    return {"waits_in_communication": waits_s, "exposed_communication": exposed_s - waits_s, "device_idle": idle_s}


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


def _parts_j(class_j: Mapping[str, float | None], steps_s: dict[str, float], kept_s: float) -> dict[str, float | None]:
    """Return the joules of each part; the joules of kept steps are split in proportion to time.

    A class can have joules without device time: its time is a rounding error, or its ranks had no GPU.
    """
    joules = {RENAMED.get(name, name): value for name, value in class_j.items() if name != KEPT}
    kept_j = class_j.get(KEPT)
    if not steps_s:
        joules["steps"] = kept_j
    for name, seconds in steps_s.items():
        joules[name] = None if kept_j is None else kept_j * seconds / kept_s
    return joules


def _max_gain(seconds: float, total_s: float) -> float | None:
    """Return how much faster the job were without a part of it; ``None`` if it has no other part."""
    return total_s / (total_s - seconds) - 1.0 if seconds < total_s else None


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


def _evidence_of_clock(whole: ClusterTotals, iterations_s: float) -> dict[str, str]:
    """Return the evidence of the clock; ``iterations_s`` are device-seconds."""
    devices, constants = whole.devices, whole.constants
    if devices.sm_clock_ratio is None or not constants.gpus_with_clock:
        return {}
    with_clock_s = iterations_s * constants.gpus_with_clock / max(constants.gpus, 1)
    covered_share = min(devices.sm_clock_covered_s / with_clock_s, 1.0) if with_clock_s else 0.0
    text = f"SM clock {100 * devices.sm_clock_ratio:.1f} % of the peak's"
    text += f"; {constants.gpus_with_clock:,} of {constants.gpus:,} GPUs, {100 * covered_share:.0f} % of the time"
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


def errors_of(seconds: dict[str, float], whole: ClusterTotals, steps_s: float, computing_s: float) -> dict[str, float]:
    """Return the sampling error (half-width, 95 %) of parts in device-seconds; parts without samples are left out.

    The shares in profiled iterations were applied to ``steps_s`` device-seconds, the clock to ``computing_s``.
    """
    errors, profile, devices = {}, whole.profile, whole.devices
    if profile is not None and profile.time_s:
        idle_s, ranks = profile.time_s - profile.exposed_s - profile.computing_s, whole.constants.world_size
        for name, part_s in (("exposed_communication", profile.exposed_s), ("device_idle", idle_s)):
            share = min(max(part_s / profile.time_s, 0.0), 1.0)
            # All ranks do the same work in the same iteration, so they do not increase the number of samples.
            errors[name] = steps_s * float(error_of_mean(share, 1.0, profile.iterations / max(ranks, 1)))
    if devices.sm_clock_error is not None and "clock_below_maximum" in seconds:
        clock_share = whole.constants.gpus_with_clock / max(whole.constants.gpus, 1)
        errors["clock_below_maximum"] = computing_s * clock_share * devices.sm_clock_error
    if errors:  # what remains has the errors of all other parts
        error_of_rest = math.sqrt(sum(error**2 for error in errors.values()))
        errors |= {name: error_of_rest for name in ("below_peak", "steps") if name in seconds}
    return {name: error for name, error in errors.items() if name in seconds}
