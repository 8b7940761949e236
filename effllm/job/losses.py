"""The avoidable losses of a job by cause, from its waterfall and its stragglers. No I/O.

A loss is device time that the user can save; its threshold is the share from which it is reported.  The thresholds are
choices: a smaller loss is usual in healthy jobs.  docs/verdict.md explains each threshold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from effllm.job.causes import AVOIDABLE, SLOW_DATA
from effllm.job.health.own_times import UNLIKE
from effllm.job.health.straggler_reasons import CLOCK, HOST, POWER_LIMIT, THROTTLED, UNKNOWN
from effllm.job.slow_clocks import LOCKED
from effllm.metrics import METRICS
from effllm.records.job import Summary
from effllm.records.verdict import DATA_WAIT, OF_GPUS, PROFILE, SlowIterations, StragglerVerdict, Waterfall

#: Profiled iterations, summed over ranks, below which the split of the steps is no evidence.
MIN_PROFILED = 5
#: Losses are estimates: parts of windows are redone, and a wait for the slowest rank is longer than a mean wait.  In
#: planted jobs the bound of the gain was too low by at most 0.8 % of the loss without this margin.
BOUND_MARGIN = 0.02
#: Waits for data are those of few ranks if waits for stragglers with slow data are at least this share of them.
OF_FEW = 0.5
#: Period of profiles in a long job.
USUAL_PERIOD = 500
#: Share of padding in the processed positions below which padding is usual.
MIN_PADDING_RATIO = 0.15
#: Parts of the waterfall that divide the time of steps.
STEP_PARTS = (
    "waits_in_communication", "exposed_communication", "device_idle", "clock_below_maximum", "padding", "recomputation",
    "below_peak", "steps", "useful",
)  # fmt: skip

#: Start of the source of a loss by stragglers.
STRAGGLERS = "summary.json: stragglers"
#: Causes whose device time is counted only in kept steps.
_IN_STEPS = frozenset(
    ("straggler", "uneven_ranks", "throttled", "power_limit", "exposed_communication", "device_idle", "padding")
)

#: Classes of goodput that are the time of iterations.
ITERATION_CLASSES = ("kept", "redone", "data", "straggling", "uneven_ranks", "slow_iterations", "warmup")


class Loss(NamedTuple):
    """Avoidable device time with one cause."""

    cause: str
    seconds: float  # device-seconds
    why: str
    source: str  # place of the numbers in the run folder
    max_ratio: float = 1.0  # upper bound of the saved device time over `seconds`
    action: str = ""  # the next action, if it is not the usual action for the cause
    share: float = 0.0  # of all device time

    @property
    def likely_share(self) -> float:
        """The share; of slow and uneven ranks, which have a lower bound, the geometric mean with the upper bound."""
        return self.share * (math.sqrt(self.max_ratio) if self.cause in ("straggler", "uneven_ranks") else 1.0)

    @property
    def gain(self) -> float | None:
        """Upper bound of the gain in tokens per device time; ``None`` if all time is lost."""
        saved_share = self.share * self.max_ratio * (1.0 + BOUND_MARGIN)
        return saved_share / (1.0 - saved_share) if saved_share < 1.0 else None


def losses(summary: Summary, waterfall: Waterfall, framework: str = "") -> list[Loss]:
    """Return all losses of a job, the most important first, also those below their thresholds.

    ``framework`` is empty for a loop that calls effllm itself.
    """
    entries = [
        *_losses_of_parts(summary, waterfall, framework),
        *_losses_by_stragglers(summary, waterfall),
        *_loss_by_uneven_ranks(summary, waterfall),
        *_loss_by_restarts(summary, waterfall),
        *_losses_by_clocks(summary, waterfall),
        *_losses_by_profile(summary, waterfall),
        *_loss_by_padding(summary, waterfall),
        *_loss_by_idle_gpus(summary, waterfall),
        *_loss_by_retries(summary, waterfall),
    ]
    by_cause: dict[str, Loss] = {}
    for loss in (_with_share_of_job(loss, waterfall) for loss in entries if loss.seconds > 0):
        # Waits for a throttled GPU are measured, and they are a part of the loss by its clock: the larger loss counts.
        earlier = by_cause.get(loss.cause, loss)
        larger = max(earlier, loss, key=lambda each: each.seconds)
        max_saved_s = max(each.seconds * each.max_ratio for each in (earlier, loss))
        by_cause[loss.cause] = larger._replace(max_ratio=max_saved_s / larger.seconds)
    in_order = sorted(by_cause.values(), key=lambda loss: -loss.likely_share)
    slow, idle = by_cause.get("straggler"), by_cause.get("device_idle")
    is_of_host = any(HOST in verdict.differences for verdict in summary.stragglers[:1])
    if slow is not None and idle is not None and is_of_host and in_order.index(idle) < in_order.index(slow):
        in_order.remove(idle)  # the GPU of a slow host is idle because of the host
        in_order.insert(in_order.index(slow) + 1, idle)
    return in_order


def is_reported(loss: Loss, summary: Summary) -> bool:
    """Whether a loss is above its threshold in a job that is long enough."""
    limit = AVOIDABLE[loss.cause]
    is_long = summary.iterations >= limit.min_iterations and summary.elapsed_s >= limit.min_elapsed_s
    return loss.likely_share >= limit.share and is_long


def profile_period(iterations: int, ranks: int) -> int:
    """Return a period of profiles that gives twice `MIN_PROFILED` profiled iterations in a job of this length.

    >>> profile_period(100_000, 8), profile_period(60, 4), profile_period(60, 1)
    (500, 20, 6)
    """
    profiles_per_rank = max(math.ceil(2 * MIN_PROFILED / max(ranks, 1)), 2)
    return min(max(iterations // profiles_per_rank, 1), USUAL_PERIOD)


def is_profiled(summary: Summary) -> bool:
    """Whether enough iterations were profiled to split the steps, and they are about as long as the mean iteration."""
    profile, goodput = summary.profile, summary.goodput
    if profile is None or profile.iterations < MIN_PROFILED or profile.time_s <= 0:
        return False
    classes_s = goodput.seconds if goodput else {}
    steps_s = sum(classes_s.get(name, 0.0) for name in ("kept", "redone", "straggling", "uneven_ranks"))
    mean_step_s = steps_s / summary.iterations if summary.iterations else 0.0
    return not mean_step_s or 1 / UNLIKE < profile.time_s / profile.iterations / mean_step_s < UNLIKE


def seconds_of(waterfall: Waterfall, *names: str) -> float:
    """Return the device-seconds of these parts."""
    return sum(part.device_seconds for part in waterfall.parts if part.name in names)


def _source(name: str) -> str:
    return f"summary.json: waterfall.parts, name {name}"


def _with_share_of_job(loss: Loss, waterfall: Waterfall) -> Loss:
    """Return a loss with its share; its removal also shortens repeated steps, and the time of unused GPUs."""
    loss = loss._replace(share=loss.seconds / waterfall.device_seconds)
    used_s, steps_s = _used_device_seconds(waterfall), seconds_of(waterfall, "straggling", "uneven_ranks", *STEP_PARTS)
    if loss.cause == "unused_gpus" or used_s <= 0:
        return loss
    repeats = 1.0 + seconds_of(waterfall, "redone") / steps_s if loss.cause in _IN_STEPS and steps_s else 1.0
    return loss._replace(max_ratio=loss.max_ratio * repeats * waterfall.device_seconds / used_s)


def _used_device_seconds(waterfall: Waterfall) -> float:
    return sum(part.device_seconds for part in waterfall.parts if part.name != "unused")


def _losses_of_parts(summary: Summary, waterfall: Waterfall, framework: str) -> Iterator[Loss]:
    """Yield the losses that are parts of the waterfall: `Cause.part` in `AVOIDABLE`, and the first start-up."""
    data_text, data_s = "the ranks wait for data between steps", seconds_of(waterfall, AVOIDABLE["data_loading"].part)
    if summary.goodput is not None and summary.iterations:
        # Means over ranks and all iterations, as the loss: the metrics are of the slowest rank, without the warm-up.
        means_s = {name: time_s / summary.iterations for name, time_s in summary.goodput.seconds.items()}
        wait_s, iteration_s = means_s.get("data", 0.0), sum(means_s.get(name, 0.0) for name in ITERATION_CLASSES)
        wait_name = "data wait" if framework else "time between iterations"
        data_text = f"{wait_name} {_ms_text(wait_s)} of {_ms_text(iteration_s)} ms per iteration"
    if summary.rare_waits is not None:
        data_text += f"; {_how_often(summary.rare_waits)}, up to {_ms_text(summary.rare_waits.longest_s)} ms"
    of_few = [verdict for verdict in summary.stragglers if verdict.evidence == DATA_WAIT]
    is_of_few = _devices_per_rank(summary, waterfall) * sum(map(_cost_in_rank_s, of_few)) >= OF_FEW * data_s > 0
    if is_of_few:
        data_text += f"; {_slow_ranks_text(max(of_few, key=_cost_in_rank_s), len(of_few) - 1)}"
    evidence = {part.name: part.evidence for part in waterfall.parts}
    texts = {
        "data_loading": data_text,
        "between_iterations": data_text,
        "slow_iterations": _slow_text(summary.slow_iterations),
        "warmup": "the first iterations are longer than the median",
        "checkpoint": "the steps stop during checkpoints",
        "evaluation": "the steps stop during evaluation",
        "shutdown": "time after the last iteration",
        "idle": "ranks joined late or left early",
        "hang": _hang_text(summary),
        "unused_gpus": evidence.get("unused") or "GPUs of the allocation are used by no rank",
    }
    other_cause = "between_iterations" if framework else "data_loading"  # both have the same part
    for cause, part in ((cause, row.part) for cause, row in AVOIDABLE.items() if row.part):
        if cause != other_cause:
            seconds, action = seconds_of(waterfall, part), SLOW_DATA.text if part == "data" and is_of_few else ""
            max_ratio = _max_ratio_of_part(summary, waterfall, cause, seconds)
            yield Loss(cause, seconds, texts[cause], _source(part), max_ratio, action)
    # The start-ups of later attempts belong to the restarts.
    seconds = (1.0 - _later_startups_share(summary)) * seconds_of(waterfall, "startup")
    yield Loss("startup", seconds, "time before the first iteration", _source("startup"))


def _later_startups_share(summary: Summary) -> float:
    """Return the share of the start-ups of all attempts but the first in the device-seconds of all start-ups."""
    attempts = summary.goodput.attempts if summary.goodput is not None else ()
    startups_s = [attempt.startup_s * attempt.devices for attempt in attempts]
    return sum(startups_s[1:]) / sum(startups_s) if sum(startups_s) > 0 else 0.0


def _max_ratio_of_part(summary: Summary, waterfall: Waterfall, cause: str, seconds: float) -> float:
    """Return `Loss.max_ratio` of a part of the waterfall, from its device-seconds."""
    if cause == "slow_iterations" and summary.slow_iterations is not None and seconds:
        return summary.slow_iterations.max_ratio + seconds_of(waterfall, "warmup") / seconds
    if cause in ("data_loading", "between_iterations") and summary.goodput is not None and seconds:
        return 1.0 + summary.goodput.hidden_data_s * _devices_per_rank(summary, waterfall) / seconds
    # At most, the ranks wait for a last checkpoint of few ranks after their last iteration.
    return 1.0 + seconds_of(waterfall, "shutdown") / seconds if cause == "checkpoint" and seconds else 1.0


def _ms_text(seconds: float) -> str:
    """Return a time in ms with three digits, or as a whole number if it has more digits."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def _hang_text(summary: Summary) -> str:
    seconds = summary.goodput.seconds.get("hang", 0.0) if summary.goodput is not None else 0.0
    text = f"no rank made progress for {seconds:,.0f} s" if seconds >= 1 else "no rank made progress"
    return text + (", and the job ended so" if summary.status == "stalled" else "")


def _slow_text(slow: SlowIterations | None) -> str:
    if slow is None:
        return "single iterations are longer than the median"
    extent = f"up to {_ms_text(slow.longest_s)} ms (iteration {slow.longest:,})"
    return f"{_how_often(slow)}, {extent}, median {_ms_text(slow.median_s)} ms"


def _how_often(slow: SlowIterations) -> str:
    return f"every {slow.every:,}th iteration" if slow.every else f"{slow.count:,} of {slow.of:,} iterations"


def _devices_per_rank(summary: Summary, waterfall: Waterfall) -> float:
    """Return device-seconds over rank-seconds, with which a loss in rank-seconds is multiplied."""
    rank_seconds = sum(summary.goodput.rank_seconds.values()) if summary.goodput is not None else 0.0
    return _used_device_seconds(waterfall) / rank_seconds if rank_seconds else 1.0


def _losses_by_clocks(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    """Yield the losses by low SM clocks with a reason, in device-seconds."""
    devices = _devices_per_rank(summary, waterfall)
    for cause, clock in summary.slow_clocks.items():
        if cause == LOCKED:
            continue
        max_ratio = max(clock.max_rank_seconds / clock.rank_seconds, 1.0) if clock.rank_seconds > 0 else 1.0
        yield Loss(cause, devices * clock.rank_seconds, clock.why, f"summary.json: slow_clocks.{cause}", max_ratio)


def _losses_by_stragglers(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    """Yield the time that slow ranks cost, divided among the causes in proportion to the costs of their verdicts."""
    named = [verdict for verdict in summary.stragglers if verdict.evidence != DATA_WAIT]
    straggling_s, total_cost_s = seconds_of(waterfall, "straggling"), sum(map(_cost_in_rank_s, named))
    by_cause: dict[str, list[StragglerVerdict]] = {}
    for verdict in named if total_cost_s else ():
        by_cause.setdefault(_cause_of_straggler(verdict), []).append(verdict)
    for cause, verdicts in by_cause.items():
        worst, cost_s = max(verdicts, key=_cost_in_rank_s), sum(map(_cost_in_rank_s, verdicts))
        seconds = straggling_s * cost_s / total_cost_s
        # A rank is named only in some windows: in others, the waits for it are waits without a slow rank.
        last_s = sum(summary.last_ranks.max_waits_s.get(rank, 0.0) for verdict in verdicts for rank in verdict.ranks)
        max_ratio = max(sum(verdict.max_seconds for verdict in verdicts) / cost_s, last_s / cost_s, 1.0)
        source = f"{STRAGGLERS}, ranks {','.join(map(str, worst.ranks))}"
        yield Loss(cause, seconds, _slow_ranks_text(worst, len(verdicts) - 1), source, max_ratio)


def _cost_in_rank_s(verdict: StragglerVerdict) -> float:
    """Return the rank-seconds that slow ranks cost: the waits of the others for them, and their own time."""
    return verdict.gpu_seconds + verdict.own_seconds


def _slow_ranks_text(verdict: StragglerVerdict, more: int = 0) -> str:
    """Return a verdict on slow ranks as text, with the number of further verdicts (``more``)."""
    why = verdict.why
    if why == UNKNOWN:
        how = "computation takes {} longer than" if verdict.evidence == PROFILE else "{} slower than"
        peers = "its peer" if verdict.peers == 1 else f"{verdict.peers:,} peers"
        why = f"{how.format(f'{100 * verdict.slowdown:.1f} %')} {peers}, reason unknown"
    if verdict.last_share is not None and verdict.evidence != DATA_WAIT:
        why += f", last in {100 * verdict.last_share:.0f} % of the iterations"
    host = f" ({verdict.host})" if verdict.host else ""
    return f"rank {','.join(map(str, verdict.ranks))}{host}: {why}" + (f"; and {more} more" if more else "")


def _loss_by_uneven_ranks(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    """Yield the waits of the ranks for each other without a slow rank."""
    seconds, last = seconds_of(waterfall, "uneven_ranks"), summary.last_ranks
    devices = _devices_per_rank(summary, waterfall)
    if is_profiled(summary):  # at most, a slow rank is as slow after its first wait for others
        for_slow_s = sum(max(verdict.max_seconds - _cost_in_rank_s(verdict), 0.0) for verdict in summary.stragglers)
        seconds += max(seconds_of(waterfall, "waits_in_communication") - for_slow_s * devices, 0.0)
    rank_seconds = seconds / devices
    text = "the ranks wait for each other, and no rank is named as slow"
    if last.by_rank and last.iterations:
        rank, count = last.dominant_last_rank
        text += f" (most often last: rank {rank}, in {100 * count / last.iterations:.0f} % of the iterations)"
    max_ratio = max(last.max_uneven_s / rank_seconds, 1.0) if rank_seconds else 1.0
    yield Loss("uneven_ranks", seconds, text, _source("uneven_ranks"), max_ratio)


def _cause_of_straggler(verdict: StragglerVerdict) -> str:
    if POWER_LIMIT in verdict.differences:
        return "power_limit"
    return "throttled" if {CLOCK, THROTTLED} & set(verdict.differences) else "straggler"


def _loss_by_restarts(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    """Yield the gaps between attempts, the start-ups of later attempts, and repeated work."""
    if summary.goodput is None or summary.attempts < 2:
        return
    attempts = summary.goodput.attempts
    seconds = seconds_of(waterfall, "restart_gap") + _later_startups_share(summary) * seconds_of(waterfall, "startup")
    # Repeated iterations also repeat their data waits, waits for stragglers, evaluations and checkpoints.
    around_s = sum(attempt.redone_around_s * attempt.devices for attempt in attempts)
    hidden_s = sum(attempt.max_redone_around_s * attempt.devices for attempt in attempts) - around_s
    seconds += seconds_of(waterfall, "redone") + around_s
    redone, gaps_s = summary.goodput.redone_iterations, sum(attempt.gap_before_s for attempt in attempts)
    ends = Counter(attempt.status for attempt in attempts[:-1])
    details = f" ({', '.join(f'{count:,} {status}' for status, count in ends.most_common(2))})" if ends else ""
    details += f", gaps {gaps_s:,.0f} s" if gaps_s >= 1 else ""
    details += f", {redone:,} repeated iterations" if redone else ""
    # At most, all of the time after the last iterations belongs to attempts that would not have ended.
    max_ratio = 1.0 + (seconds_of(waterfall, "shutdown") + hidden_s) / seconds if seconds else 1.0
    why = f"{summary.attempts} attempts{details}"
    yield Loss("restarts", seconds, why, "summary.json: goodput.attempts", max_ratio)


def _losses_by_profile(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    if not is_profiled(summary):
        return
    profile = summary.profile
    assert profile is not None
    texts = {
        "exposed_communication": f"in {profile.iterations:,} profiled iterations, summed over ranks",
        "device_idle": f"the devices have no work, in {profile.iterations:,} profiled iterations",
    }
    for cause, why in texts.items():
        seconds = seconds_of(waterfall, cause)
        if cause == "device_idle":  # during a retry of the allocator, the device has no work
            seconds -= min(_retries_cost_s(summary, waterfall), seconds)
        yield Loss(cause, seconds, why, _source(cause))


def busy_share(summary: Summary, waterfall: Waterfall) -> float | None:
    """Return the share of the iterations in which the GPUs ran a kernel; ``None`` without a real GPU."""
    return _run_value(summary, "pcu_ratio") if waterfall.unit == OF_GPUS and not summary.simulated else None


def _loss_by_idle_gpus(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    """Yield the time in which no kernel runs: a lower bound, because kernels that communicate count as busy."""
    busy = busy_share(summary, waterfall)
    if busy is None:
        return
    other_losses_s = seconds_of(waterfall, "data", "slow_iterations", "warmup")  # idle time in other losses
    iterations_s = other_losses_s + seconds_of(waterfall, "redone", "straggling", "uneven_ranks", *STEP_PARTS)
    other_losses_s += _retries_cost_s(summary, waterfall)  # during a retry of the allocator, the device has no work
    text = f"the GPUs run a kernel in {100 * busy:.0f} % of the iterations"
    tag = METRICS["pcu_ratio"].tag("run")
    yield Loss("device_idle", (1.0 - busy) * iterations_s - other_losses_s, text, f"summary.json: metrics, {tag}")


def _loss_by_retries(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    pressure = summary.memory_pressure
    if pressure is None or not pressure.rank_seconds:
        return
    why = f"{pressure.retries:,} allocator retries in {pressure.windows:,} windows, which are slower than the others"
    seconds, source = _retries_cost_s(summary, waterfall), "summary.json: memory_pressure"
    max_ratio = max((pressure.max_rank_seconds or 0.0) / pressure.rank_seconds, 1.0)
    yield Loss("memory_pressure", seconds, why, source, max_ratio)


def _retries_cost_s(summary: Summary, waterfall: Waterfall) -> float:
    """Return the time that retries of the allocator cost, in device-seconds."""
    pressure = summary.memory_pressure
    return _devices_per_rank(summary, waterfall) * (pressure.rank_seconds or 0.0) if pressure is not None else 0.0


def _loss_by_padding(summary: Summary, waterfall: Waterfall) -> Iterator[Loss]:
    ratio = _run_value(summary, "padding_ratio")
    if ratio is not None and ratio >= MIN_PADDING_RATIO:
        # At most, the time of a step is proportional to the number of its positions.
        text = f"{100 * ratio:.0f} % of the processed positions are padding"
        tag = METRICS["padding_ratio"].tag("run")
        yield Loss("padding", ratio * seconds_of(waterfall, *STEP_PARTS), text, f"summary.json: metrics, {tag}")


def _run_value(summary: Summary, name: str) -> float | None:
    """Return the run-to-date value of a metric; ``None`` if it was not measured."""
    metric = summary.metrics.get(METRICS[name].tag("run"))
    return None if metric is None else metric.value
