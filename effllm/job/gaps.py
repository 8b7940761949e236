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
        low = tags_too_low(tags, self.rejected, self.is_uneven, of_window=False)
        return dict.fromkeys(low, "; ".join(self.reasons))


def gaps_in_counts(ledger: Ledger, is_over: bool) -> CountGaps:
    """Return the gaps in the counts of the run so far; ``is_over`` means the job has ended."""
    lost, uncounted = ledger.reports_lost, ledger.num_uncounted(is_over)
    iterations = ledger.whole.ranks.column("iterations")
    return CountGaps(
        missing=_missing_report_texts(lost, uncounted),
        rejected=ledger.whole.counts.get("counts_rejected", 0),
        is_uneven=bool(lost or uncounted) and (len(iterations) < ledger.world_size or len(set(iterations)) > 1),
    )


def _missing_report_texts(lost: int, unfinished: int) -> tuple[str, ...]:
    reports = [f"{count_text(lost, 'report')} never arrived"] if lost > 0 else []
    last = [f"the last report of {count_text(unfinished, 'rank')} never arrived"] if unfinished > 0 else []
    return (*reports, *last)


def tags_too_low(tags: Collection[str], rejected: int, has_missing: bool, *, of_window: bool) -> list[str]:
    """Return the tags of values that are too low: counts were rejected, or reports of ranks are missing.

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
    expected = sum(last * ranks for last, ranks in reached)
    measured = float(ledger.whole.ranks.column("iterations").sum())
    return sum(last for last, _ in reached), min(measured / expected, 1.0) if expected else None


def energy_gaps(ledger: Ledger, is_over: bool) -> list[str]:
    """Return the reasons why the total energy is unknown; empty for a known total."""
    account = ledger.whole
    elsewhere, left = account.partial - account.left_windows, count_text(account.left_windows, "window")
    reasons = [
        (elsewhere, f"not every device was measured in {count_text(elsewhere, 'window')}"),
        (account.left_windows, f"devices of ranks that left were missing in {left}"),
    ]
    missing = _missing_report_texts(ledger.reports_lost, ledger.num_unfinished(is_over))
    return [*missing, *(text for count, text in reasons if count > 0)]


def energy_coverage(ledger: Ledger, goodput: GoodputSummary) -> tuple[float | None, float | None]:
    """Return the measured share of time without restart gaps, and of iterations, as means over devices."""
    seconds = goodput.elapsed_s - goodput.seconds[RESTART_GAP]
    iterations, _ = iterations_reached(ledger)
    shares = (ledger.whole.covered_s, seconds), (ledger.whole.covered_iterations, float(iterations))
    time, count = (min(max(above, 0.0) / below, 1.0) if below > 0 else None for above, below in shares)
    return time, count


def not_measured(
    whole: ClusterTotals,
    ledger: Ledger,
    roster: Roster,
    gaps: CountGaps,
    measured: float | None,
    lacking: Sequence[str],
    shares: tuple[float | None, float | None],
    ended: bool,
) -> Iterator[str]:
    """Yield a sentence for each quantity that the devices or the loop do not give, or not completely."""
    yield from roster.job.not_measured
    if gaps.reasons and (whole.counts.tokens or whole.counts.samples):
        part = f"{_percent_text(measured)} of the iterations were measured; " if gaps.missing else ""
        yield f"total tokens and samples: {part}{'; '.join(gaps.reasons)}"
    if lacking and whole.energy.measured_j is not None and roster.job.measures_energy:
        parts = f"{_percent_text(shares[0])} of the time and {_percent_text(shares[1])} of the iterations were measured"
        yield f"total energy: {parts}; {'; '.join(lacking)}"
    yield from _unmeasured_part_texts(whole, ledger, roster, ended)
    if ended and (text := why_mfu_unchecked(whole, roster.job.known_job)):
        yield text
    if text := roster.job.unknown_tick_share:
        yield text
    if ledger.host_lines.failed:
        yield f"lines of code: {ledger.host_lines.failed}"


def _unmeasured_part_texts(whole: ClusterTotals, ledger: Ledger, roster: Roster, ended: bool) -> Iterator[str]:
    """Yield a sentence for each part of the job without a measurement."""
    if ended and (absent := ledger.world_size - len(ledger.ranks)) > 0:
        yield f"{absent:,} of {ledger.world_size:,} ranks: no report before all other ranks had ended"
    if blind := sum(not hello.devices for hello in roster.hellos.values()):
        yield f"devices of {count_text(blind, 'rank')}: none is read; events.jsonl, kind agent, has the reason"
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
