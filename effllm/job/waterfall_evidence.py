"""The evidence of the parts of the waterfall: counters and windows, and sampling errors. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from effllm.records.energy import NORMAL_95
from effllm.records.job import ClusterTotals
from effllm.records.rank import Profile


class Sources(NamedTuple):
    """The reports from which the classes of goodput are computed."""

    windows: int = 0  # closed windows of the last attempt
    attempts: int = 1
    windows_compared: int = 0  # windows in which own times of ranks were compared
    unused: str = ""  # the nodes with unused GPUs


ONE_ATTEMPT = Sources()


def evidence_of(sources: Sources, whole: ClusterTotals, iterations: float, kept_share: float = 1.0) -> dict[str, str]:
    """Return a short text for each part, with the counters and windows from which the part is computed.

    Args:
        sources: the reports of the classes.
        whole: the totals of the job.
        iterations: device-seconds of iterations.
        kept_share: share of kept steps in all steps; the tokens of the other steps are left out.
    """
    return _of_classes(sources, whole) | _of_clock(whole, iterations) | _of_steps(whole, kept_share)


def _of_classes(sources: Sources, whole: ClusterTotals) -> dict[str, str]:
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
        "straggling": f"own times of ranks in {sources.windows_compared:,} windows",
    }


def _of_clock(whole: ClusterTotals, iterations: float) -> dict[str, str]:
    devices, constants = whole.devices, whole.constants
    if devices.sm_clock_ratio is None or not constants.gpus_with_clock:
        return {}
    clocked = iterations * constants.gpus_with_clock / max(constants.gpus, 1)
    covered = min(devices.sm_clock_covered_s / clocked, 1.0) if clocked else 0.0
    text = f"SM clock {100 * devices.sm_clock_ratio:.1f} % of the peak's"
    text += f"; {constants.gpus_with_clock:,} of {constants.gpus:,} GPUs, {100 * covered:.0f} % of the time"
    return {"clock_below_maximum": text if whole.profile is not None else f"{text}; communication included"}


def _of_steps(whole: ClusterTotals, kept_share: float) -> dict[str, str]:
    constants, counts, profile = whole.constants, whole.counts, whole.profile
    profiled = f"{profile.iterations:,} profiled iterations, summed over ranks" if profile is not None else ""
    texts = dict.fromkeys(("exposed_communication", "device_idle"), profiled)
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

    Args:
        seconds: the device-seconds of the parts of steps.
        whole: the totals of the job.
        steps: device-seconds to which the shares in profiled iterations were applied.
        computing: device-seconds to which the clock was applied.
    """
    errors, profile, devices = {}, whole.profile, whole.devices
    if profile is not None and profile.time_s:
        idle_s = profile.time_s - profile.exposed_s - profile.computing_s
        for name, part_s in (("exposed_communication", profile.exposed_s), ("device_idle", idle_s)):
            errors[name] = steps * _share_error(part_s / profile.time_s, profile, whole.constants.world_size)
    if devices.sm_clock_error is not None and "clock_below_maximum" in seconds:
        clocked = whole.constants.gpus_with_clock / max(whole.constants.gpus, 1)
        errors["clock_below_maximum"] = computing * clocked * devices.sm_clock_error
    if errors:
        rest = math.sqrt(sum(error**2 for error in errors.values()))
        errors |= {name: rest for name in ("below_peak", "steps") if name in seconds}
    return {name: error for name, error in errors.items() if name in seconds}


def _share_error(share: float, profile: Profile, ranks: int) -> float:
    """Return the error of a mean share of iterations.

    A share of an iteration lies between 0 and 1, so its variance with mean m is at most m (1 - m) (Bhatia and Davis,
    2000).  All ranks do the same work in the same iteration, so the ranks do not increase the number of samples.
    """
    share = min(max(share, 0.0), 1.0)
    return NORMAL_95 * math.sqrt(share * (1.0 - share) / max(profile.iterations / max(ranks, 1), 1.0))
