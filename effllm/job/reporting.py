"""Makes reports of windows and the summary, for sinks and the store, from the ledger and the roster. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from effllm import metrics
from effllm.job.account import Account, Rows
from effllm.job.audit import audit_of, doubts_by_tag
from effllm.job.energy_account import MAX_RANDOM_ERROR, WindowEnergy
from effllm.job.gaps import energy_coverage, energy_gaps, gaps_in_counts, iterations_reached, not_measured, tags_too_low
from effllm.job.ledger import Ledger
from effllm.job.merged import BUSY, BUSY_S, Expected, Merged
from effllm.job.roster import Roster
from effllm.job.waterfall import Sources, waterfall
from effllm.records.columns import Array, means
from effllm.records.energy import COVERED_S, JOULES
from effllm.records.job import (
    GPU_WATTS,
    STEP_SECONDS,
    UTILIZATION_RATIO,
    ClusterReport,
    ClusterTotals,
    Coverage,
    EnergySummary,
    GoodputSummary,
    GoodputTotals,
    Spread,
    Summary,
    Value,
)
from effllm.records.values import summaries
from effllm.records.verdict import OF_GPUS

#: A window's end may be at most this far in the future.  Clocks of nodes differ by much less, but the aggregator's
#: time may be old.
MAX_AHEAD_S = 5.0


class Window(Struct):
    """A closed window, or the late reports of one."""

    number: int
    rows: Rows
    merged: Merged | None = None  # None of late reports
    energy: WindowEnergy | None = None  # None if `merged` is None
    warming: bool = False


def goodput_of(ledger: Ledger, roster: Roster, is_over: bool = False, status: str = "running") -> GoodputSummary:
    """Record the GPUs of this attempt in the ledger; return the elapsed time by class."""
    attempt, ranks_joined = ledger.goodput.attempt, len(roster.hellos)
    if ranks_joined >= attempt.ranks_joined:  # a new aggregator with fewer ranks does not replace the number
        attempt.ranks_joined, attempt.gpus = ranks_joined, roster.job.num_gpus
    goodput = ledger.goodput.summary(is_over, roster.job.measures_energy, status)
    return replace(goodput, core_wait_s=ledger.core_wait_s(), hidden_data_s=ledger.iteration_losses.hidden_data_s)


def totals_to_date(
    ledger: Ledger, roster: Roster, goodput: GoodputSummary, has_gaps: bool
) -> tuple[ClusterTotals, ClusterTotals]:
    """Return the totals on the bases run and job; ``has_gaps`` means that energy or reports are missing."""
    constants, sample_s = roster.job.constants, roster.config.collection_interval_s
    health = ledger.health
    run, job = (
        replace(sums, health=health, energy=replace(sums.energy, is_complete=sums.energy.is_complete and not has_gaps))
        for sums in (account.totals(constants, sample_s) for account in (ledger.run, ledger.whole))
    )
    elapsed = GoodputTotals(goodput.elapsed_s, goodput.seconds, goodput.joules, sum(goodput.rank_seconds.values()))
    return run, replace(job, goodput=elapsed, overhead=ledger.overhead())


def report_of(
    window: Window, ledger: Ledger, roster: Roster, previous: ClusterReport | None, correction: bool
) -> ClusterReport:
    """Return the report of a closed window, or its correction by a late report; ``previous`` is the last report."""
    rows, columns = window.rows, window.rows.columns
    gaps, goodput = gaps_in_counts(ledger, is_over=False), goodput_of(ledger, roster)
    has_gaps = bool(ledger.reports_lost or ledger.num_unfinished(is_over=False))
    run, whole = totals_to_date(ledger, roster, goodput, has_gaps)
    health = replace(ledger.waited, stalled_s=ledger.hang_s)
    account = _window_account(window, roster.config.min_coverage)
    last = replace(account.totals(run.constants, roster.config.collection_interval_s), health=health)
    shown_of_window = last if last.counts.iterations > 0 and not correction else ClusterTotals()
    coverage = coverage_of(window, ledger, roster)
    if window.energy is None and previous:  # late: no other report of its window is in memory
        coverage = replace(previous.coverage, reports_late=ledger.late)
    values = metrics.window_values(run, shown_of_window, whole)
    rejected = rows.counts["counts_rejected"]
    too_low_in_window = tags_too_low(values, rejected, bool(coverage.missing_ranks), of_window=True)
    doubtful_tags = *doubts_by_tag(ledger.audit, values), *gaps.doubts_by_tag(values), *too_low_in_window
    breakdown = waterfall(goodput, whole, uneven_share=ledger.last_ranks.profiled_uneven_share)
    parts = breakdown.parts if breakdown is not None and breakdown.unit == OF_GPUS else ()
    return ClusterReport(
        attempt=ledger.attempt,
        window=window.number,
        iteration=ledger.iteration_shown if correction else int(columns["iteration_shown"].max()),
        iteration_first=int(columns["iteration_first"].min()),
        iteration_last=int(columns["iteration_last"].max()),
        time_s=_end_time_s(float(columns["end_time_s"].max()), ledger),
        loss=rows.loss,
        run=run,
        last=last,
        job=whole,
        values=values,
        doubtful=tuple(dict.fromkeys(doubtful_tags)),  # each once
        coverage=coverage,
        total_iterations=roster.job.total_iterations,
        style=roster.job.iteration_name,
        simulated=roster.job.is_simulated,
        power_scope=roster.job.scope.label if window.energy and window.energy.coverage is not None else None,
        warming_up=window.warming,
        final=rows.has_final_report,
        correction=correction,
        energy_by_class=ledger.energy_by_class() if roster.job.measures_energy else {},
        time_by_class=ledger.time_by_class(),
        spread={} if correction else window_spread(rows, window.merged, roster.expected_devices(rows.ranks)),
        instruments={} if correction else summaries(rows.values),
        energy_doubtful=(metrics.energy.timing_error_ratio(last) or 0.0) > MAX_RANDOM_ERROR,
        gpu_seconds={part.name: part.device_seconds for part in parts},
        gpus_unused=ledger.goodput.attempt.unused_gpus,
    )


def spread_of(values: Array) -> Spread | None:
    """Return the percentiles of values; ``None`` without values.

    A percentile between two values is interpolated linearly (Hyndman and Fan's definition 7, 1996), so that the
    50th percentile is the median.
    """
    if not len(values):
        return None
    return Spread(len(values), *np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0)).tolist())


def window_spread(rows: Rows, merged: Merged | None, expected: Expected) -> dict[str, Spread]:
    """Return the percentiles of the ranks' mean step times, and of the power and utilization of GPUs in iterations.

    Ranks without a completed iteration and GPUs that were not measured are left out.
    """
    iterations, busy_s = rows.columns["iterations"], rows.columns["busy_s"]
    worked = iterations > 0
    spreads = {STEP_SECONDS: spread_of(busy_s[worked] / iterations[worked])}
    if merged is not None:
        device_rows = expected.rows_in(merged)  # -1 for a device without a row
        is_gpu = expected.is_gpu & (device_rows >= 0)
        energy_rows = device_rows[is_gpu & expected.is_first_of_owner]  # one GPU per module with an energy counter
        energy, levels = merged.iterations.energy[energy_rows], merged.iterations.levels[device_rows[is_gpu]]
        spreads[GPU_WATTS] = spread_of(means(np.nan_to_num(energy[:, JOULES]), energy[:, COVERED_S]))
        spreads[UTILIZATION_RATIO] = spread_of(means(np.nan_to_num(levels[:, BUSY]), levels[:, BUSY_S]))
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _window_account(window: Window, min_coverage: float) -> Account:
    account = Account()
    account.add_rows(window.rows)
    if window.merged is not None:
        account.add_devices(window.merged)
    if window.energy:
        account.add_energy(window.number, window.energy, window.rows, min_coverage)
    return account


def coverage_of(window: Window | None, ledger: Ledger, roster: Roster) -> Coverage:
    """Return what was measured in a window; without a window, nothing was measured."""
    ranks: Sequence[int] = window.rows.ranks if window else ()
    merged = window.merged if window else None
    absent = roster.missing_ranks(ranks) if window else set()
    expected = roster.expected_devices(ranks) if window else Expected(roster.devices)
    gpus = int(expected.is_gpu.sum())
    # In a job with GPUs, a rank whose device is not known counts as a GPU.
    unknown_gpus = len((absent - roster.hellos.keys()) | roster.ranks_without_device(ranks)) if gpus else 0
    span_s, memory_s, busy_s = merged.covered_s() if merged is not None else (0.0, 0.0, 0.0)
    return Coverage(
        ranks_expected=ledger.world_size,
        ranks_reporting=len(ranks),
        gpus_expected=gpus + unknown_gpus,
        gpus_measured=merged.count_measured_gpus(expected) if merged is not None else 0,
        reports_lost=ledger.reports_lost,
        reports_late=ledger.late,
        missing_ranks=tuple(sorted(absent)),
        energy=window.energy.coverage if window and window.energy else None,
        memory=min(memory_s / span_s, 1.0) if span_s > 0 else None,
        utilization=min(busy_s / span_s, 1.0) if span_s > 0 else None,
    )


def summary_of(ledger: Ledger, roster: Roster, last: ClusterReport | None, time_s: float, ended: bool) -> Summary:
    gaps, reasons = gaps_in_counts(ledger, ended), energy_gaps(ledger, ended)  # reasons why the total energy is unknown
    status = ledger.status("killed" if roster.has_lost_host() else "ended") if ended else "running"
    goodput = goodput_of(ledger, roster, ended, status)
    run, whole = totals_to_date(ledger, roster, goodput, bool(reasons))
    energy_shares = energy_coverage(ledger, goodput) if reasons else (1.0, 1.0)  # measured, of time and of iterations
    (iterations, measured_ratio), counts = iterations_reached(ledger), whole.counts
    values = metrics.summary_values(run, whole)
    doubts = {**gaps.doubts_by_tag(values), **doubts_by_tag(ledger.audit, values)}
    sources = Sources(ledger.closed, ledger.attempt, round(ledger.last_ranks.iterations), roster.job.unused_text)
    return Summary(
        status=status,
        is_over=ended,
        iterations=max(iterations, counts.iterations) if gaps.missing else counts.iterations,
        attempts=ledger.attempt,
        parameters=run.constants.parameters,
        parameters_kind=roster.config.parameters,
        metrics=_values_with_errors(values, metrics.errors(run, whole), doubts),
        energy=_energy_summary(whole, ledger, roster, values, energy_shares),
        coverage=last.coverage if last else coverage_of(None, ledger, roster),
        overhead=ledger.overhead(),
        started_time_s=first_start_time_s(ledger),
        ended_time_s=ledger.goodput.end_time_s if ended else None,
        updated_time_s=time_s,
        elapsed_s=goodput.elapsed_s,
        time_by_class=ledger.time_by_class(),
        simulated=roster.job.is_simulated,
        not_measured=tuple(not_measured(whole, ledger, roster, gaps, measured_ratio, reasons, energy_shares, ended)),
        tokens=None if gaps.reasons else counts.tokens or None,
        samples=None if gaps.reasons else counts.samples or None,
        measured_tokens=counts.tokens or None,
        measured_samples=counts.samples or None,
        measured_iterations_ratio=measured_ratio if gaps.missing else None if measured_ratio is None else 1.0,
        loss=ledger.loss if ledger.is_loss_finite else None,
        losses_not_finite=whole.counts.losses_not_finite,
        first_not_finite=ledger.first_not_finite,
        events=dict(ledger.events),
        peak=roster.job.peak_source if run.constants.flops_per_token else "",
        profile=run.profile,
        stragglers=tuple(sorted(ledger.stragglers.values(), key=lambda verdict: -verdict.gpu_seconds)),
        last_ranks=ledger.last_ranks,
        goodput=goodput,
        instruments=summaries(ledger.values),
        waterfall=waterfall(goodput, whole, sources, ledger.last_ranks.profiled_uneven_share),
        host=ledger.host_lines.summary(),
        slow_clocks=ledger.slow_clocks.summary(),
        slow_iterations=ledger.iteration_losses.long_iterations(),
        rare_waits=ledger.iteration_losses.rare_waits(),
        memory_pressure=ledger.memory_pressure.loss(),
        out_of_memory=ledger.memory_pressure.out_of_memory(ledger.values),
        audit=audit_of(ledger.audit, roster.job.known_job),
        forecast=last.forecast if last is not None and not ended else {},
        currency=roster.config.currency,
    )


def _values_with_errors(
    values: Mapping[str, float], errors: Mapping[str, tuple[float, float]], doubts: Mapping[str, str]
) -> dict[str, Value]:
    results = {}
    for tag, value in values.items():
        if entry := metrics.metric_of_tag(tag):
            random_error, systematic_error = errors.get(tag) or (None, None)
            results[tag] = Value(value, entry.unit, random_error, systematic_error, doubts.get(tag))
    return results


def first_start_time_s(ledger: Ledger) -> float:
    """Return the unix time at which the first rank of the first attempt started."""
    return ledger.goodput.start_time_s or ledger.started_time_s


def _energy_summary(
    whole: ClusterTotals,
    ledger: Ledger,
    roster: Roster,
    values: Mapping[str, float],
    shares: tuple[float | None, float | None],  # measured shares of the time and of the iterations
) -> EnergySummary:
    energy, is_measured = whole.energy, roster.job.measures_energy
    has_total = is_measured and energy.joules is not None
    return EnergySummary(
        total_joules=energy.joules if energy.is_complete else None,
        measured_joules=energy.measured_j if is_measured else None,
        scope=roster.job.scope.label,
        method=roster.job.energy_method,
        joules_per_token=values.get("run_energy/joules_per_token"),
        by_device=ledger.devices.joules_by_key(),
        error_by_device=ledger.devices.errors_by_key_j(),
        error_joules=energy.error_j if has_total else None,
        gain_error=energy.gain_j / energy.joules if energy.joules else None,
        warmup_joules=ledger.warmup_j if is_measured else None,
        estimated_joules=energy.estimated_j if has_total else None,
        by_class=ledger.energy_by_class() if is_measured else {},
        time_coverage=shares[0] if energy.measured_j is not None else None,
        iterations_coverage=shares[1] if energy.measured_j is not None else None,
    )


def _end_time_s(end_s: float, ledger: Ledger) -> float:
    """Return the end of a window on the clock of its last rank, or the aggregator's time if that clock is ahead."""
    now_s = ledger.goodput.clock.time_s
    return now_s if ledger.goodput.clock.at_s is not None and end_s > now_s + MAX_AHEAD_S else end_s
