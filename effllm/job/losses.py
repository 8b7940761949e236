"""The avoidable losses of a job by cause, from its waterfall and its stragglers. No I/O.

A loss is device time that the user can save; its threshold is the share from which it is reported.  The thresholds are
choices: a smaller loss is usual in healthy jobs.  docs/verdict.md explains each threshold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from effllm.job.health.diagnosis import CLOCK, POWER_LIMIT, THROTTLED, UNKNOWN
from effllm.job.remedies import SLOW_DATA
from effllm.metrics import METRICS
from effllm.records.job import ARRIVAL, DATA_WAIT, OWN_TIME, PROFILE, AttemptSummary, StragglerVerdict, Summary
from effllm.records.verdict import OF_GPUS, SlowIterations, Waterfall


class Threshold(NamedTuple):
    """The smallest loss that is reported."""

    share: float  # of all device time
    min_iterations: int = 0
    min_elapsed_s: float = 0.0


#: Below this number of iterations, the time of single iterations is no evidence.
MIN_ITERATIONS = 20
#: Profiled iterations, summed over ranks, below which the split of the steps is no evidence.
MIN_PROFILED = 5
#: Profiled iterations that are shorter or longer than the mean by this factor say nothing about the others.
UNLIKE = 1.25
#: Losses are estimates: parts of windows are redone, and a wait for the slowest rank is longer than a mean wait.  In
#: planted jobs the bound of the gain was too low by at most 0.8 % of the loss without this margin.
BOUND_MARGIN = 0.02
#: Period of profiles in a long job.
USUAL_PERIOD = 500
#: In a shorter job, a long start is usual.
MIN_ELAPSED_S = 1800.0
#: Share of padding in the processed positions below which padding is usual.
MIN_PADDING_RATIO = 0.15


THRESHOLDS: dict[str, Threshold] = {
    "data_loading": Threshold(0.05, MIN_ITERATIONS),
    "between_iterations": Threshold(0.05, MIN_ITERATIONS),
    "slow_iterations": Threshold(0.05, MIN_ITERATIONS),
    "warmup": Threshold(0.10, MIN_ITERATIONS),
    "straggler": Threshold(0.05, MIN_ITERATIONS),
    "throttled": Threshold(0.05, MIN_ITERATIONS),
    "power_limit": Threshold(0.05, MIN_ITERATIONS),
    "exposed_communication": Threshold(0.15, MIN_ITERATIONS),
    "device_idle": Threshold(0.15, MIN_ITERATIONS),
    "padding": Threshold(0.05, MIN_ITERATIONS),
    "memory_pressure": Threshold(0.05, MIN_ITERATIONS),
    "checkpoint": Threshold(0.05, MIN_ITERATIONS),
    "evaluation": Threshold(0.10, MIN_ITERATIONS),
    "restarts": Threshold(0.05),
    "startup": Threshold(0.10, min_elapsed_s=MIN_ELAPSED_S),
    "idle": Threshold(0.10, min_elapsed_s=MIN_ELAPSED_S),
    "hang": Threshold(0.02),
    "unused_gpus": Threshold(0.02),
}
#: Cause -> part of the waterfall, where one part is the loss.
_PARTS = {
    "data_loading": "data",
    "slow_iterations": "slow_iterations",
    "warmup": "warmup",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "idle": "idle",
    "hang": "hang",
    "unused_gpus": "unused",
}
#: Parts of the waterfall that divide the time of steps.
STEP_PARTS = (
    "exposed_communication", "device_idle", "clock_below_maximum", "padding", "recomputation", "below_peak", "steps",
    "useful",
)  # fmt: skip

#: Start of the source of a loss by stragglers.
STRAGGLERS = "summary.json: stragglers"
#: Causes whose device time is counted only in kept steps.
_IN_STEPS = frozenset(("straggler", "throttled", "power_limit", "exposed_communication", "device_idle", "padding"))

#: Classes of goodput that are the time of iterations.
ITERATION_CLASSES = ("kept", "redone", "data", "straggling", "slow_iterations", "warmup")


class Loss(NamedTuple):
    """Avoidable device time with one cause."""

    cause: str
    seconds: float  # device-seconds
    share: float  # of all device time
    why: str
    source: str  # place of the numbers in the run folder
    factor: float = 1.0  # saved device time over `seconds`
    action: str = ""  # the next action, if it is not the usual action for the cause

    @property
    def gain(self) -> float | None:
        """Upper bound of the gain in tokens per device time; ``None`` if all time is lost."""
        saved = self.share * self.factor * (1.0 + BOUND_MARGIN)
        return saved / (1.0 - saved) if saved < 1.0 else None


def losses(summary: Summary, found: Waterfall, framework: str = "") -> list[Loss]:
    """Return all losses of a job, the largest first, also those below their thresholds.

    Args:
        summary: the summary of the job.
        found: its waterfall.
        framework: the framework whose loop is measured; empty for a loop that calls effllm itself.
    """
    made = [*_of_parts(summary, found, framework), *_of_stragglers(summary, found), *_of_restarts(summary, found)]
    made += [*_of_clocks(summary, found), *_of_profile(summary, found), *_of_padding(summary, found)]
    made += _of_busy_share(summary, found)
    made += _of_memory(summary, found)
    by_cause: dict[str, Loss] = {}
    for one in made:
        loss = _with_rest_of_job(one, found)
        cause, seconds = loss.cause, loss.seconds
        known = by_cause.get(cause)
        # Waits for a throttled GPU are measured, and they are a part of the loss by its clock: the larger loss counts.
        if seconds > 0 and (known is None or loss.seconds > known.seconds):
            by_cause[cause] = loss
    return sorted(by_cause.values(), key=lambda one: -one.seconds)


def is_reported(loss: Loss, summary: Summary) -> bool:
    """Whether a loss is above its threshold in a job that is long enough."""
    limit = THRESHOLDS[loss.cause]
    is_long = summary.iterations >= limit.min_iterations and summary.elapsed_s >= limit.min_elapsed_s
    return loss.share >= limit.share and is_long


def profile_period(iterations: int, ranks: int) -> int:
    """Return a period of profiles that gives twice `MIN_PROFILED` profiled iterations in a job of this length.

    >>> profile_period(100_000, 8), profile_period(60, 4), profile_period(60, 1)
    (500, 20, 6)
    """
    each = max(math.ceil(2 * MIN_PROFILED / max(ranks, 1)), 2)
    return min(max(iterations // each, 1), USUAL_PERIOD)


def is_profiled(summary: Summary) -> bool:
    """Whether enough iterations were profiled to split the steps, and they are about as long as the mean iteration."""
    profile, goodput = summary.profile, summary.goodput
    if profile is None or profile.iterations < MIN_PROFILED or profile.time_s <= 0:
        return False
    steps_s = sum(goodput.seconds.get(name, 0.0) for name in ("kept", "redone", "straggling")) if goodput else 0.0
    mean_s = steps_s / summary.iterations if summary.iterations else 0.0
    return not mean_s or 1 / UNLIKE < profile.time_s / profile.iterations / mean_s < UNLIKE


def seconds_of(found: Waterfall, *names: str) -> float:
    return sum(part.device_seconds for part in found.parts if part.name in names)


#: Cause, device-seconds, why, source; then factor and action as in `Loss`.
_Made = tuple[str, float, str, str] | tuple[str, float, str, str, float] | tuple[str, float, str, str, float, str]


def _part(name: str) -> str:
    return f"summary.json: waterfall.parts, name {name}"


def _with_rest_of_job(made: _Made, found: Waterfall) -> Loss:
    """Return a loss; its removal also shortens repeated steps, and the time of unused GPUs."""
    cause, seconds, why, source, *more = made
    loss = Loss(cause, seconds, seconds / found.device_seconds, why, source, *more)
    used_s, steps_s = _used_seconds(found), seconds_of(found, "straggling", *STEP_PARTS)
    if cause == "unused_gpus" or used_s <= 0:
        return loss
    repeated = 1.0 + seconds_of(found, "redone") / steps_s if cause in _IN_STEPS and steps_s else 1.0
    return loss._replace(factor=loss.factor * repeated * found.device_seconds / used_s)


def _used_seconds(found: Waterfall) -> float:
    """Return the time of the devices that ranks use."""
    return sum(part.device_seconds for part in found.parts if part.name != "unused")


def _of_parts(summary: Summary, found: Waterfall, framework: str) -> Iterator[_Made]:
    what = "data wait" if framework else "time between iterations"
    waits, data_s = "the ranks wait for data between steps", seconds_of(found, _PARTS["data_loading"])
    # The longer waits of a straggler, which its peers do not have, are a part of the loss by the straggler.
    share = max(1.0 - _waits_of_stragglers(summary, found) / data_s, 0.0) if data_s else 1.0
    if summary.goodput is not None and summary.iterations:
        # Means over ranks and all iterations, as the loss: the metrics are of the slowest rank, without the warm-up.
        each = {name: one / summary.iterations for name, one in summary.goodput.seconds.items()}
        wait, iteration = share * each.get("data", 0.0), sum(each.get(name, 0.0) for name in ITERATION_CLASSES)
        waits = f"{what} {_ms(wait)} of {_ms(iteration)} ms per iteration"
        waits += ", without the longer waits of stragglers" if share < 1.0 else ""
    if summary.rare_waits is not None:
        waits += f"; {_often(summary.rare_waits)}, up to {_ms(summary.rare_waits.longest_s)} ms"
    evidence = {part.name: part.evidence for part in found.parts}
    texts = {
        "data_loading": waits,
        "slow_iterations": _slow_text(summary.slow_iterations),
        "warmup": "the first iterations are longer than the median",
        "checkpoint": "the steps stop during checkpoints",
        "evaluation": "the steps stop during evaluation",
        "idle": "ranks joined late or left early",
        "hang": _hang_text(summary),
        "unused_gpus": evidence.get("unused") or "GPUs of the allocation are used by no rank",
    }
    for cause, part in _PARTS.items():
        seconds = seconds_of(found, part) * (share if cause == "data_loading" else 1.0)
        is_own = cause == "data_loading" and not framework
        yield "between_iterations" if is_own else cause, seconds, texts[cause], _part(part)
    # The start-ups of later attempts belong to the restarts.
    attempts = summary.goodput.attempts if summary.goodput is not None else ()
    total = sum(map(_startup_s, attempts))
    first = _startup_s(attempts[0]) / total if attempts and total > 0 else 1.0
    yield "startup", first * seconds_of(found, "startup"), "time before the first iteration", _part("startup")


def _ms(seconds: float) -> str:
    """Return a time in ms, with three digits or as a whole number."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def _hang_text(summary: Summary) -> str:
    seconds = summary.goodput.seconds.get("hang", 0.0) if summary.goodput is not None else 0.0
    text = f"no rank made progress for {seconds:,.0f} s" if seconds >= 1 else "no rank made progress"
    return text + (", and the job ended so" if summary.status == "stalled" else "")


def _slow_text(found: SlowIterations | None) -> str:
    if found is None:
        return "single iterations are longer than the median"
    longest = f"up to {_ms(found.longest_s)} ms (iteration {found.longest:,})"
    return f"{_often(found)}, {longest}, median {_ms(found.median_s)} ms"


def _often(found: SlowIterations) -> str:
    return f"every {found.every:,}th iteration" if found.every else f"{found.count:,} of {found.of:,} iterations"


def _startup_s(attempt: AttemptSummary) -> float:
    return attempt.startup_s * attempt.devices


def _waits_of_stragglers(summary: Summary, found: Waterfall) -> float:
    """Return the data waits by which stragglers waited longer than their peers, in device-seconds."""
    waits_s = sum(one.own_seconds for one in summary.stragglers if one.evidence == DATA_WAIT)
    return _devices_of_rank(summary, found) * waits_s


def _devices_of_rank(summary: Summary, found: Waterfall) -> float:
    rank_seconds = sum(summary.goodput.rank_seconds.values()) if summary.goodput is not None else 0.0
    return _used_seconds(found) / rank_seconds if rank_seconds else 1.0


def _of_clocks(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    """Yield the losses by low SM clocks with a reason, in device-seconds."""
    devices = _devices_of_rank(summary, found)
    for cause, clock in summary.slow_clocks.items():
        factor = max(clock.max_rank_seconds / clock.rank_seconds, 1.0) if clock.rank_seconds > 0 else 1.0
        yield cause, devices * clock.rank_seconds, clock.why, f"summary.json: slow_clocks.{cause}", factor


def _of_stragglers(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    seconds, total = seconds_of(found, "straggling"), sum(one.gpu_seconds for one in summary.stragglers)
    if not total:
        return
    by_cause: dict[str, list[StragglerVerdict]] = {}
    for one in summary.stragglers:
        by_cause.setdefault(cause_of(one), []).append(one)
    for cause, verdicts in by_cause.items():
        worst = max(verdicts, key=lambda one: one.gpu_seconds)
        ranks = ",".join(map(str, worst.ranks))
        why = _slower(worst) if worst.why == UNKNOWN else worst.why
        text = f"rank {ranks} ({worst.host}): {why}" if worst.host else f"rank {ranks}: {why}"
        source = f"{STRAGGLERS}, ranks {ranks}"
        waits = seconds * sum(one.gpu_seconds for one in verdicts) / total
        action = SLOW_DATA.text if worst.evidence == DATA_WAIT else ""
        factor = max(_with_own_time(summary, verdicts), _with_unnamed(summary, found, verdicts) / waits)
        yield cause, waits, text, source, factor, action


def _slower(verdict: StragglerVerdict) -> str:
    """Return by how much a rank is slower, for a straggler without a reason."""
    base = {PROFILE: "computation takes {} longer than", ARRIVAL: "arrives {} of an iteration later than"}
    peers = "its peer" if verdict.peers == 1 else f"{verdict.peers:,} peers"
    how = base.get(verdict.evidence, "{} slower than").format(f"{100 * verdict.slowdown:.1f} %")
    return f"{how} {peers}, reason unknown"


def _with_own_time(summary: Summary, verdicts: list[StragglerVerdict]) -> float:
    """Return the time that all ranks save without stragglers, over the waits of the other ranks.

    The slow ranks save the same time as the ranks that wait for them.  At most half of the ranks are slower than the
    median.
    """
    ranks, slow = summary.coverage.ranks_expected, len({rank for one in verdicts for rank in one.ranks})
    return ranks / max(ranks - slow, ranks / 2) if ranks else 1.0


def _with_unnamed(summary: Summary, found: Waterfall, verdicts: list[StragglerVerdict]) -> float:
    """Return the device-seconds that all ranks save if the stragglers were slow in all iterations.

    A straggler is named after some windows of an attempt, so its waits in a short attempt are not counted.
    """
    slowdowns = [one.slowdown for one in verdicts if one.evidence in (OWN_TIME, PROFILE)]
    if summary.attempts < 2 or not slowdowns:
        return 0.0
    slow = max(slowdowns)
    return seconds_of(found, "straggling", *STEP_PARTS) * slow / (1.0 + slow)


def cause_of(verdict: StragglerVerdict) -> str:
    """Return the cause of the loss by a straggler."""
    if POWER_LIMIT in verdict.differences:
        return "power_limit"
    return "throttled" if {CLOCK, THROTTLED} & set(verdict.differences) else "straggler"


def _of_restarts(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    if summary.goodput is None or summary.attempts < 2:
        return
    attempts = summary.goodput.attempts
    total = sum(map(_startup_s, attempts))
    later = sum(map(_startup_s, attempts[1:])) / total if total > 0 else 0.0
    seconds = seconds_of(found, "restart_gap") + later * seconds_of(found, "startup")
    # Repeated iterations also repeat their data waits, waits for stragglers, evaluations and checkpoints.
    around_s = sum(one.redone_around_s * one.devices for one in attempts)
    hidden_s = sum(one.max_redone_around_s * one.devices for one in attempts) - around_s
    seconds += seconds_of(found, "redone") + around_s
    redone, gaps_s = summary.goodput.redone_iterations, sum(one.gap_before_s for one in attempts)
    ends = Counter(one.status for one in attempts[:-1])
    details = f" ({', '.join(f'{count:,} {status}' for status, count in ends.most_common(2))})" if ends else ""
    details += f", gaps {gaps_s:,.0f} s" if gaps_s >= 1 else ""
    details += f", {redone:,} repeated iterations" if redone else ""
    # At most, all of the time after the last iterations belongs to attempts that would not have ended.
    factor = 1.0 + (seconds_of(found, "shutdown") + hidden_s) / seconds if seconds else 1.0
    yield "restarts", seconds, f"{summary.attempts} attempts{details}", "summary.json: goodput.attempts", factor


def _of_profile(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    if not is_profiled(summary):
        return
    profile = summary.profile
    assert profile is not None
    texts = {
        "exposed_communication": f"in {profile.iterations:,} profiles, including waits of ranks for each other",
        "device_idle": f"the devices have no work, in {profile.iterations:,} profiled iterations",
    }
    for cause, why in texts.items():
        seconds = seconds_of(found, cause)
        if cause == "device_idle":  # during a retry of the allocator, the device has no work
            seconds -= min(_lost_in_retries(summary, found), seconds)
        yield cause, seconds, why, _part(cause)


def busy_share(summary: Summary, found: Waterfall) -> float | None:
    """Return the share of the iterations in which the GPUs ran a kernel; ``None`` without a real GPU."""
    return _metric(summary, "pcu_ratio") if found.unit == OF_GPUS and not summary.simulated else None


def _of_busy_share(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    """Yield the time in which no kernel runs: a lower bound, because kernels that communicate count as busy."""
    busy = busy_share(summary, found)
    if busy is None:
        return
    counted_s = seconds_of(found, "data", "slow_iterations", "warmup")
    iterations_s = counted_s + seconds_of(found, "redone", "straggling", *STEP_PARTS)
    counted_s += _lost_in_retries(summary, found)  # during a retry of the allocator, the device has no work
    text = f"the GPUs run a kernel in {100 * busy:.0f} % of the iterations"
    tag = METRICS["pcu_ratio"].tag("run")
    yield "device_idle", (1.0 - busy) * iterations_s - counted_s, text, f"summary.json: metrics, {tag}"


def _of_memory(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    pressure = summary.memory_pressure
    if pressure is not None and pressure.rank_seconds:
        why = (
            f"{pressure.retries:,} allocator retries in {pressure.windows:,} windows, which are slower than the others"
        )
        factor = max((pressure.max_rank_seconds or 0.0) / pressure.rank_seconds, 1.0)
        yield "memory_pressure", _lost_in_retries(summary, found), why, "summary.json: memory_pressure", factor


def _lost_in_retries(summary: Summary, found: Waterfall) -> float:
    """Return the time that retries of the allocator cost, in device-seconds."""
    pressure = summary.memory_pressure
    return _devices_of_rank(summary, found) * (pressure.rank_seconds or 0.0) if pressure is not None else 0.0


def _of_padding(summary: Summary, found: Waterfall) -> Iterator[_Made]:
    ratio = _metric(summary, "padding_ratio")
    if ratio is not None and ratio >= MIN_PADDING_RATIO:
        # At most, the time of a step is proportional to the number of its positions.
        text = f"{100 * ratio:.0f} % of the processed positions are padding"
        tag = METRICS["padding_ratio"].tag("run")
        yield "padding", ratio * seconds_of(found, *STEP_PARTS), text, f"summary.json: metrics, {tag}"


def _metric(summary: Summary, name: str) -> float | None:
    found = summary.metrics.get(METRICS[name].tag("run"))
    return None if found is None else found.value
