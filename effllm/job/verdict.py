"""The verdict on a job: its largest avoidable loss, "healthy", or "unknown". No I/O.  Explanations: docs/verdict.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from effllm.job.causes import AVOIDABLE, MIN_ITERATIONS, remedy
from effllm.job.goodput import Goodput
from effllm.job.goodput_attempt import PARTS, STRAGGLING
from effllm.job.host_lines import data_wait_share, place_text, place_text_of_slow
from effllm.job.losses import (
    STEP_PARTS,
    STRAGGLERS,
    Loss,
    busy_share,
    is_profiled,
    is_reported,
    losses,
    profile_period,
    seconds_of,
)
from effllm.job.slow_clocks import LOCKED
from effllm.records.job import Summary
from effllm.records.verdict import (
    FAILED,
    HEALTHY,
    HIGH,
    MEDIUM,
    NO_CONFIDENCE,
    NO_VERDICT,
    NONE_FOUND,
    Evidence,
    LossWindows,
    OutOfMemory,
    Verdict,
    Waterfall,
)

#: A loss in a smaller share of the iterations is concentrated, and the worst window is named.
MAX_RARE_SHARE = 0.1


class _End(NamedTuple):
    why: str
    next: str


#: By status of a job: the reason if no event has one, and the next action.
_END_TEXTS = {
    "failed": _End("an exception of the script", "the log of this rank has the exception"),
    "killed": _End("no exception: a signal, or the end of the machine", "dmesg, and the log of the scheduler"),
}
#: Kinds of events that may be the reason of an end.
_EVENT_REASONS = {
    "memory_leak": "growing memory",
    "memory_forecast": "memory that will run out",
    "loss_not_finite": "a loss that is NaN or infinite",
    "xid": "an Xid error of a GPU",
    "ecc": "memory errors of a GPU",
}
_MEMORY_GROWTH_KINDS = frozenset(("memory_leak", "memory_forecast"))
#: Names of causes in texts, where the name differs from the cause.
_NAMES = {"unused_gpus": "unused GPUs"}
#: Without reports for this share of the device time, a job is neither healthy nor is a smaller loss its primary cause.
MAX_UNREPORTED = 0.1
MAX_EVIDENCE, MIN_EVIDENCE_SHARE = 5, 0.01  # number of statements; share of the device time of a loss in one
LARGE_GAIN = 10.0  # from this gain on, the share of a loss has no decimals
#: Retries of the allocator per iteration of a rank from which on they are the cause, if no loss is above its threshold.
MIN_RETRIES = 0.1
MAX_NAMED = 4  # ranks in the text of a verdict
#: Training threads that wait for a core for at least this share of the time make the times of ranks unequal.
MIN_CORE_WAIT = 0.05
#: Causes that waits for a core may have.
_CAUSED_BY_CORES = frozenset((
    "data_loading", "between_iterations", "straggler", "uneven_ranks", "slow_iterations", "exposed_communication",
    "device_idle",
))  # fmt: skip


def windows_of(loss: Loss, summary: Summary, goodput: Goodput) -> LossWindows | None:
    """Return the windows with a loss above its threshold; ``None`` if no window can be named."""
    if loss.cause == "memory_pressure":
        return windows_of_retries(summary)
    part = STRAGGLING if loss.source.startswith(STRAGGLERS) else AVOIDABLE[loss.cause].part
    return goodput.windows_of(part, AVOIDABLE[loss.cause].share) if part in PARTS else None


def windows_of_retries(summary: Summary) -> LossWindows | None:
    pressure = summary.memory_pressure
    if pressure is None:
        return None
    return LossWindows(pressure.windows, pressure.first_iteration, pressure.last_iteration, pressure.worst_iteration)


def _worst_iteration_text(windows: LossWindows | None, iterations: int) -> str:
    """Return a text about the iteration with the largest loss, if the loss is in few iterations; else nothing."""
    if windows is None or windows.worst_iteration is None:
        return ""
    is_rare = windows.last_iteration - windows.first_iteration < MAX_RARE_SHARE * iterations
    return f", most at iteration {windows.worst_iteration:,}" if is_rare else ""


def verdict_of(
    summary: Summary,
    facts: Mapping[str, Any] = MappingProxyType({}),
    goodput: Goodput | None = None,
    profile_every: int = 0,
    ends: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Verdict | None:
    """Return the verdict on a job; ``None`` before any time was reported.

    The primary cause is the loss with the most device time among the losses above their thresholds.  A job that ended
    in a stall has the cause ``hang``.  ``facts`` are those of run.json, ``ends`` the ranks of a job that is over, by
    their final status; ``profile_every`` is 0 for no profiles.
    """
    waterfall = summary.waterfall
    if waterfall is None:
        return None
    all_losses = losses(summary, waterfall, str(facts.get("framework", "")))
    reported = [loss for loss in all_losses if is_reported(loss, summary)]
    if summary.status == "stalled":
        reported = [loss for loss in all_losses if loss.cause == "hang"] or reported
    unit, goodput = waterfall.unit, goodput or Goodput()
    shown = [loss for loss in all_losses[:MAX_EVIDENCE] if loss.share >= MIN_EVIDENCE_SHARE]
    other_evidence = (*_evidence_of_cores(summary), *_evidence_of_locked_clocks(summary))
    shown = shown[: MAX_EVIDENCE - len(other_evidence)]
    evidence = (*(_evidence_of_loss(loss, summary, unit, goodput) for loss in shown), *other_evidence)
    if summary.out_of_memory is not None and summary.status not in ("running", "completed"):
        return _verdict_out_of_memory(summary.out_of_memory, facts, evidence)
    if summary.status in _END_TEXTS and ends.get(summary.status):
        return _verdict_failed(summary, ends[summary.status], evidence, bool(reported))
    unreported_share = seconds_of(waterfall, "unreported") / waterfall.device_seconds
    if reported and reported[0].share >= unreported_share:
        return _verdict_on_loss(reported[0], summary, facts, unit, evidence, goodput)
    on_retries = _verdict_on_retries(summary, facts, evidence)
    if unreported_share < MAX_UNREPORTED and not reported and on_retries is not None:
        return on_retries
    if unreported_share >= MAX_UNREPORTED or reported:
        return _verdict_unreported(unreported_share, summary, unit, evidence)
    if summary.iterations < MIN_ITERATIONS:
        text = f"only {summary.iterations:,} iterations"
        action = f"run at least {MIN_ITERATIONS} iterations"
        return _verdict_unknown(text, "single iterations are no evidence", action, evidence)
    # No loss is reported, so a loss above its threshold is in a job that is too short for this threshold.
    in_short_job = [loss for loss in all_losses if loss.share >= AVOIDABLE[loss.cause].share][:1]
    short_text = "".join(f"{_name(loss.cause)} {100 * loss.share:.1f} % (short job); " for loss in in_short_job)
    if not is_profiled(summary):
        step_share = seconds_of(waterfall, *STEP_PARTS) / waterfall.device_seconds
        why = f"{short_text}{100 * step_share:.1f} % of {unit} time is in steps"
        busy = busy_share(summary, waterfall)
        if busy is None or summary.coverage.ranks_expected > 1:
            text = "no loss found; communication inside steps not split"
            action = _profile_action(summary, profile_every)
            return Verdict(NONE_FOUND, text, why, action, None, MEDIUM, evidence)
        return _verdict_healthy(f"the GPU runs a kernel in {100 * busy:.0f} % of the iterations; {why}", evidence)
    largest = f"largest: {evidence[0].claim}" if evidence else "no loss was found"
    return _verdict_healthy(short_text + largest, evidence)


def _verdict_unreported(share: float, summary: Summary, unit: str, evidence: tuple[Evidence, ...]) -> Verdict:
    """Return the verdict "unknown" on a job without reports for a share of its time."""
    if summary.coverage.reports_lost or "rank_lost" in summary.events:
        why, action = "ranks or their reports were lost", "events.jsonl: rank_lost and reports_lost"
    elif summary.status == "running":
        why, action = "the newest window is not complete", "`effllm inspect` again in a minute"
    else:
        why, action = "ranks began late, ended early, or sent no report", "events.jsonl: joined and left of each rank"
    return _verdict_unknown(f"{100 * share:.1f} % of {unit} time has no report", why, action, evidence)


def _core_wait_share(summary: Summary) -> float:
    """Return the share of the ranks' time in which their training threads could run and had no CPU core."""
    if summary.goodput is None or not any(summary.goodput.rank_seconds.values()):
        return 0.0
    return min((summary.goodput.core_wait_s or 0.0) / sum(summary.goodput.rank_seconds.values()), 1.0)


def _evidence_of_cores(summary: Summary) -> tuple[Evidence, ...]:
    """Return the evidence that the CPU cores are not enough, if there is any."""
    share = _core_wait_share(summary)
    text = f"training threads wait {100 * share:.0f} % of the time for a CPU core"
    return (Evidence(text, "summary.json: goodput.core_wait_s", share),) if share >= MIN_CORE_WAIT else ()


def _evidence_of_locked_clocks(summary: Summary) -> tuple[Evidence, ...]:
    locked = summary.slow_clocks.get(LOCKED)
    return () if locked is None else (Evidence(locked.why, f"summary.json: slow_clocks.{LOCKED}"),)


def _verdict_healthy(why: str, evidence: tuple[Evidence, ...]) -> Verdict:
    text = f"{HEALTHY}: no loss is above its threshold"
    return Verdict(HEALTHY, text, why, "nothing to do", None, HIGH, evidence)


def _verdict_failed(
    summary: Summary, ranks: Sequence[int], evidence: tuple[Evidence, ...], has_loss_above_threshold: bool
) -> Verdict:
    """Return the verdict on a job that ended with an error or was killed; ``ranks`` are those that ended so."""
    ranks_text = ",".join(map(str, ranks[:MAX_NAMED])) + (",..." if len(ranks) > MAX_NAMED else "")
    text = f"{summary.status}: rank {ranks_text} after iteration {summary.iterations:,}"
    event_reasons = [f"{_EVENT_REASONS[kind]} was reported" for kind in _EVENT_REASONS if summary.events.get(kind)]
    largest = f"largest loss: {evidence[0].claim}" if evidence and has_loss_above_threshold else ""
    why = "; ".join(filter(None, [*event_reasons, largest])) or _END_TEXTS[summary.status].why
    action = "events.jsonl: memory_leak, memory_forecast" if _MEMORY_GROWTH_KINDS & summary.events.keys() else ""
    return Verdict(FAILED, text, why, action or _END_TEXTS[summary.status].next, None, HIGH, evidence)


def _profile_action(summary: Summary, profile_every: int) -> str:
    """Return the next action for enough profiles to split the steps."""
    period = profile_period(summary.iterations, summary.coverage.ranks_expected)
    if 0 < profile_every <= period:  # the job was long enough
        return "few profiles: the log of the ranks has the reason"
    return f"EFFICIENTLLM_PROFILE_EVERY={period} splits the steps by a profile"


def _verdict_out_of_memory(failure: OutOfMemory, facts: Mapping[str, Any], evidence: tuple[Evidence, ...]) -> Verdict:
    ranks = ",".join(map(str, failure.ranks[:MAX_NAMED])) + (",..." if len(failure.ranks) > MAX_NAMED else "")
    windows = LossWindows(1, failure.iteration, failure.iteration) if failure.iteration else None
    sizes = {name.removesuffix("_peak"): size for name, size in failure.bytes.items() if name.endswith("_peak")}
    parts = [f"{name} {size / 1e9:.2f} GB" for name, size in sorted(sizes.items()) if name != "startup"]
    why = f"peaks: {', '.join(parts)}; " if parts else ""
    why += f"{failure.bytes.get('reserved', 0.0) / 1e9:.2f} GB reserved, "
    why += f"{failure.bytes.get('fragmented', 0.0) / 1e9:.2f} GB fragmented; {failure.retries:,} allocator retries"
    first = Evidence(why, "summary.json: out_of_memory", windows=windows)
    return _verdict_on_memory(f"out of memory on rank {ranks}", why, HIGH, facts, (first, *evidence))


def _verdict_on_memory(
    text: str, why: str, confidence: str, facts: Mapping[str, Any], evidence: tuple[Evidence, ...]
) -> Verdict:
    """Return a verdict on memory; the gain is not known, so it has no bound."""
    text, action = f"{_name('memory_pressure')}: {text}", remedy("memory_pressure", facts).text
    return Verdict("memory_pressure", text, why, action, None, confidence, evidence[:MAX_EVIDENCE])


def _verdict_on_retries(summary: Summary, facts: Mapping[str, Any], evidence: tuple[Evidence, ...]) -> Verdict | None:
    """Return the verdict if the allocator retries often, and too few windows have no retry to measure the lost time."""
    pressure = summary.memory_pressure
    if pressure is None or pressure.rank_seconds is not None or summary.iterations < MIN_ITERATIONS:
        return None
    if pressure.per_iteration < MIN_RETRIES:
        return None
    why = f"{pressure.retries:,} allocator retries in {pressure.windows:,} windows; "
    why += "lost time unknown: no window without"
    first = Evidence(why, "summary.json: memory_pressure", windows=windows_of_retries(summary))
    text = f"{pressure.per_iteration:.2g} allocator retries per iteration"
    return _verdict_on_memory(text, why, MEDIUM, facts, (first, *evidence))


def _verdict_on_loss(
    loss: Loss, summary: Summary, facts: Mapping[str, Any], unit: str, evidence: tuple[Evidence, ...], goodput: Goodput
) -> Verdict:
    """Return the verdict that a loss is the primary cause; a lack of CPU cores can be behind it."""
    assert summary.waterfall is not None
    core_texts = [item.claim for item in _evidence_of_cores(summary)] if loss.cause in _CAUSED_BY_CORES else []
    is_of_cores = bool(core_texts) and 2 * _core_wait_share(summary) >= loss.share
    slow_ranks = summary.stragglers[0].ranks if loss.cause == "straggler" and summary.stragglers else ()
    line = place_text(summary.host, loss.cause, data_wait_share(summary.waterfall))  # the line of code with the loss
    if loss.cause == "slow_iterations" and is_of_cores:
        line = ""  # any line is long while its thread waits for a core
    line_of_slow = place_text_of_slow(summary.host, slow_ranks) if slow_ranks else ""
    why = loss.why + _worst_iteration_text(windows_of(loss, summary, goodput), summary.iterations)
    action = loss.action or remedy(loss.cause, facts).text
    is_of_line = line and loss.cause == "data_loading"  # such a line is slow with more cores, too
    if is_of_cores and not is_of_line:
        action = "more CPU cores, or fewer threads and DataLoader workers"
    # Another program of the allocation may use the GPUs that no rank uses.
    is_uncertain = loss.cause == "unused_gpus" or _hidden_share(summary, summary.waterfall) > loss.share
    return Verdict(
        cause=loss.cause,
        text=f"{_name(loss.cause)}: {_lost_text(loss, unit)}",
        why="; ".join(filter(None, (line, why, line_of_slow, *core_texts))),  # the console has only the beginning
        next=action,
        bound=loss.gain,
        confidence=MEDIUM if is_uncertain else HIGH,
        evidence=evidence,
    )


def _lost_text(loss: Loss, unit: str) -> str:
    """Return the share of the time and the bound of the gain; a large gain needs no decimals of the share."""
    if loss.gain is None:
        return f"{100 * loss.share:.1f} % of {unit} time"
    digits = 1 if loss.gain < LARGE_GAIN else 0
    gain = f"{100 * loss.gain:.3g}" if loss.gain < 1 else f"{100 * loss.gain:,.0f}"
    return f"{100 * loss.share:.{digits}f} % of {unit} time, gain at most {gain} %"


def _hidden_share(summary: Summary, waterfall: Waterfall) -> float:
    """Return the share of device time in which a loss can be hidden: without report, or in steps without a profile."""
    hidden_s = seconds_of(waterfall, "unreported")
    if not is_profiled(summary):
        hidden_s += seconds_of(waterfall, "below_peak", "steps")
    return hidden_s / waterfall.device_seconds


def _verdict_unknown(text: str, why: str, action: str, evidence: tuple[Evidence, ...]) -> Verdict:
    return Verdict(NO_VERDICT, f"{NO_VERDICT}: {text}", why, action, None, NO_CONFIDENCE, evidence)


def _evidence_of_loss(loss: Loss, summary: Summary, unit: str, goodput: Goodput) -> Evidence:
    limit = AVOIDABLE[loss.cause]
    threshold = f"threshold {100 * limit.share:g} %"
    if summary.elapsed_s < limit.min_elapsed_s:
        threshold += f" in jobs of {limit.min_elapsed_s / 60:g} min or more"
    claim = f"{_name(loss.cause)} {100 * loss.share:.1f} % of {unit} time ({threshold}): {loss.why}"
    return Evidence(claim, loss.source, loss.share, windows_of(loss, summary, goodput))


def _name(cause: str) -> str:
    return _NAMES.get(cause, cause.replace("_", " "))
