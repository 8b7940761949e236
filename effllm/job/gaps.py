"""Gaps of a run: what is missing in its counts and in its energy, and sentences about it. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct

from effllm.job.audit import why_mfu_unchecked
from effllm.job.goodput_attempt import RESTART_GAP
from effllm.job.ledger import Ledger
from effllm.job.roster import Roster
from effllm.metrics.measurable import dependent_tags
from effllm.records.job import ClusterTotals, GoodputSummary
from effllm.views.text.numbers import count_text

#: Inputs of metrics that the training loop counts.
COUNTED = frozenset(("tokens", "samples", "generated tokens"))


class CountGaps(Struct, frozen=True):
    """What is missing in the counts of a run. Counts with a gap are no totals."""

    missing: tuple[str, ...] = ()  # why reports with iterations are missing
    rejected: int = 0  # calls whose counts were rejected
    is_uneven: bool = False  # whether ranks miss different iterations, so that counts divided by time are too low

    @property
    def reasons(self) -> tuple[str, ...]:
        noun = "count was" if self.rejected == 1 else "counts were"
        why = f"{self.rejected:,} {noun} rejected, because a count is a whole number of at least 0"
        return (*self.missing, why) if self.rejected else self.missing

    def doubts_by_tag(self, tags: Collection[str]) -> dict[str, str]:
        """Return the tags of run-to-date values that are too low because of a gap, with the reasons."""
        too_low = tags_too_low(tags, self.rejected, self.is_uneven, of_window=False)
        return dict.fromkeys(too_low, "; ".join(self.reasons))


def gaps_in_counts(ledger: Ledger, is_over: bool) -> CountGaps:
    """Return the gaps in the counts of the run so far; ``is_over`` means the job has ended."""
    lost, uncounted = ledger.reports_lost, ledger.num_uncounted(is_over)
    iterations = ledger.whole.ranks.column("iterations")
    return CountGaps(
        missing=_missing_report_texts(lost, uncounted),
        rejected=ledger.whole.counts.get("counts_rejected", 0),
        is_uneven=bool(lost or uncounted) and (len(iterations) < ledger.world_size or len(set(iterations)) > 1),
    )


def _missing_report_texts(num_lost: int, num_unfinished: int) -> tuple[str, ...]:
    """Return sentences about lost reports, and about ranks without a last report."""
    lost = [f"{count_text(num_lost, 'report')} never arrived"] if num_lost > 0 else []
    last = [f"the last report of {count_text(num_unfinished, 'rank')} never arrived"] if num_unfinished > 0 else []
    return (*lost, *last)


def tags_too_low(tags: Collection[str], rejected: int, has_missing: bool, *, of_window: bool) -> list[str]:
    """Return the tags of values, of a window or to date, that are too low: counts were rejected, or reports missing.

    A missing report changes no energy per token, because its energy and its tokens are of the same windows.
    """
    if not rejected and not has_missing:
        return []
    by_tag = dependent_tags(COUNTED)
    chosen = (tag for tag in tags if tag in by_tag and (by_tag[tag].base == "window") is of_window)
    return [tag for tag in chosen if rejected or not by_tag[tag].needs_energy]


def iterations_reached(ledger: Ledger) -> tuple[int, float | None]:
    """Return the iterations of all attempts, up to the last one of a report or a BYE; and their measured share."""
    reached = [(max(attempt.last, attempt.reached), attempt.world_size) for attempt in ledger.goodput.attempts]
    expected = sum(iterations * num_ranks for iterations, num_ranks in reached)  # of all ranks
    measured = float(ledger.whole.ranks.column("iterations").sum())
    return sum(iterations for iterations, _ in reached), min(measured / expected, 1.0) if expected else None


def energy_gaps(ledger: Ledger, is_over: bool) -> list[str]:
    """Return the reasons why the total energy is unknown; empty for a known total."""
    reasons = list(_missing_report_texts(ledger.reports_lost, ledger.num_unfinished(is_over)))
    num_left = ledger.whole.left_windows
    if (num_others := ledger.whole.partial - num_left) > 0:
        reasons.append(f"not every device was measured in {count_text(num_others, 'window')}")
    if num_left > 0:
        reasons.append(f"devices of ranks that left were missing in {count_text(num_left, 'window')}")
    return reasons


def energy_coverage(ledger: Ledger, goodput: GoodputSummary) -> tuple[float | None, float | None]:
    """Return the measured share of time without restart gaps, and of iterations, as means over devices."""
    running_s = goodput.elapsed_s - goodput.seconds[RESTART_GAP]
    iterations, _ = iterations_reached(ledger)
    parts = (ledger.whole.covered_s, running_s), (ledger.whole.covered_iterations, float(iterations))
    of_time, of_iterations = (min(max(part, 0.0) / total, 1.0) if total > 0 else None for part, total in parts)
    return of_time, of_iterations


def not_measured(
    whole: ClusterTotals,
    ledger: Ledger,
    roster: Roster,
    gaps: CountGaps,
    measured_share: float | None,  # of the iterations
    energy_reasons: Sequence[str],  # `energy_gaps`
    energy_shares: tuple[float | None, float | None],  # `energy_coverage`
    is_over: bool,
) -> Iterator[str]:
    """Yield a sentence for each quantity that the devices or the loop do not give, or not completely."""
    yield from roster.job.not_measured
    if gaps.reasons and (whole.counts.tokens or whole.counts.samples):
        part = f"{_percent_text(measured_share)} of the iterations were measured; " if gaps.missing else ""
        yield f"total tokens and samples: {part}{'; '.join(gaps.reasons)}"
    if energy_reasons and whole.energy.measured_j is not None and roster.job.measures_energy:
        of_time, of_iterations = map(_percent_text, energy_shares)
        parts = f"{of_time} of the time and {of_iterations} of the iterations were measured"
        yield f"total energy: {parts}; {'; '.join(energy_reasons)}"
    yield from _unmeasured_part_texts(whole, ledger, roster, is_over)
    if is_over and (text := why_mfu_unchecked(whole, roster.job.known_job)):
        yield text
    if text := roster.job.unknown_tick_share:
        yield text
    if ledger.host_lines.failed:
        yield f"lines of code: {ledger.host_lines.failed}"


def _unmeasured_part_texts(whole: ClusterTotals, ledger: Ledger, roster: Roster, is_over: bool) -> Iterator[str]:
    """Yield a sentence for each part of the job without a measurement."""
    if is_over and (absent := ledger.world_size - len(ledger.ranks)) > 0:
        yield f"{absent:,} of {ledger.world_size:,} ranks: no report before all other ranks had ended"
    if without_device := sum(not hello.devices for hello in roster.hellos.values()):
        yield f"devices of {count_text(without_device, 'rank')}: none is read; events.jsonl, kind agent, has the reason"
    # A hook may measure iterations from step to step, including evaluation between steps.
    has_evaluation = any(hello.evaluation_in_iterations for hello in roster.hellos.values())
    if has_evaluation and whole.counts.iterations and not ledger.time_by_class().get("evaluation"):
        yield (
            "evaluation: no period from the model's eval() to its train() was seen; other evaluation between steps is "
            "counted in AL; `with effllm.phase('evaluation'):` excludes an evaluation from AL"
        )
    if in_means := round(ledger.iteration_losses.in_means):
        yield (
            f"single iterations: of {in_means:,} iterations only means are known, so their losses are lower bounds; a "
            "smaller EFFICIENTLLM_LOG_INTERVAL measures them"
        )
    if whole.counts.iterations and any(hello.iterations_not_measured for hello in roster.hellos.values()):
        yield "first iteration: not measured, because the metrics began at its optimizer step"
    counts = whole.counts
    missing = [] if counts.generated_tokens else [name for name in ("tokens", "samples") if not getattr(counts, name)]
    if counts.iterations and missing:
        calls = ", ".join(f"{name}=..." for name in missing)
        yield f"{' and '.join(missing)}: the training loop counted none; effllm.count({calls}) counts them"


def _percent_text(share: float | None) -> str:
    """Return a share as a percentage, rounded down and below 100 %."""
    return "an unknown part" if share is None else f"{math.floor(1000 * min(share, 0.999)) / 10:g} %"
