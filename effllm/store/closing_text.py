"""The closing table of a run on the console: at most 20 lines, the verdict last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from effllm.records.events import FILE, level_of
from effllm.records.job import Summary, Value
from effllm.records.plain_text import one_line
from effllm.store.summary_text import (
    WIDTH,
    audit_texts,
    duration,
    energy_text,
    errors_text,
    fact_lines,
    goodput_text,
    loss_text,
    outcome,
    readable,
    shares,
    slowest_text,
    stragglers_text,
    tensorboard_line,
    value_of,
    verdict_lines,
)
from effllm.store.window_text import contract_parts, fitted, scaled

#: Maximum number of lines about missing measurements and slow ranks; summary.txt has all lines.
MAX_DOUBTS = 3
#: A rank that was last in a smaller share of the iterations is only in summary.txt.
MIN_LAST_SHARE = 0.5


def closing_text(summary: Summary, folder: Path | None, tensorboard_dir: Path | None) -> str:
    """Return the closing table of the console; summary.txt in the run folder has all values."""
    return "".join(f"{line}\n" for line in _lines(summary, folder, tensorboard_dir))


def _lines(summary: Summary, folder: Path | None, tensorboard_dir: Path | None) -> Iterator[str]:
    yield "=" * WIDTH
    yield f"[EfficientLLM] Run {outcome(summary.status)}" + " (SIMULATED: no hardware was measured)" * summary.simulated
    slow = list(_slow_ranks(summary))
    audit = _audit(summary, folder, max_lines=1 if slow else 2)
    if (room := MAX_DOUBTS - len(slow) - len(audit)) > 0:
        yield from _not_measured(summary, folder, room)
    if problems := _events(summary):
        yield _fact("events", problems)
    yield from slow
    yield from audit
    yield _fact("ran", _ran(summary), max_lines=2)
    doubtful = [tag for tag, value in summary.metrics.items() if value.doubt]
    if six := list(contract_parts({tag: value.value for tag, value in summary.metrics.items()}, doubtful)):
        yield fitted(["", *six], "  ", WIDTH)
    seen = summary.coverage
    lost = f", {seen.reports_lost:,} reports lost" if seen.reports_lost else ""
    covered = f"{seen.ranks_reporting} of {seen.ranks_expected} ranks"
    covered += f", {seen.gpus_measured} of {seen.gpus_expected} GPUs" if seen.gpus_expected else ""
    yield _fact("coverage", covered + lost)
    if text := loss_text(summary):
        yield _fact("last loss", text)
    if summary.goodput is not None and summary.goodput.ratio is not None:
        yield _fact("goodput", goodput_text(summary.goodput))
    elif summary.time_by_class:
        yield _fact("time", shares(summary.time_by_class))
    if text := energy_text(summary.energy):
        yield _fact("energy", text)
    if value := value_of(summary, "joules_per_token"):
        number, prefix = scaled(value.value)
        timing, sensor = ((error or 0.0) / abs(value.value or 1.0) for error in (value.error, value.sensor_error))
        yield _fact("per token", f"{number} {prefix}J {errors_text(timing, sensor)}".rstrip() + _mark(value))
    if text := "; ".join(_throughput(summary)):
        yield _fact("throughput", text)
    if tensorboard_dir is not None:
        yield tensorboard_line(folder, tensorboard_dir)
    if folder is not None:
        yield f"  Run folder: {folder}"
    if summary.verdict is not None:
        # On a terminal, the last lines stay visible.
        yield from (_fact(name, text) for name, text in verdict_lines(summary.verdict))


def _throughput(summary: Summary) -> Iterator[str]:
    if value := value_of(summary, "tokens_per_second_per_gpu"):
        unit = "GPU" if summary.coverage.gpus_expected else "rank"
        yield f"{readable(value.value)} tokens/s per {unit}{_mark(value)}"
    if value := value_of(summary, "mfu_ratio"):
        yield f"MFU {readable(100 * value.value)} %{_mark(value)}" + (f" of {summary.peak}" if summary.peak else "")


def _mark(value: Value) -> str:
    return " (in doubt)" if value.doubt else ""


def _audit(summary: Summary, folder: Path | None, max_lines: int) -> list[str]:
    """Return lines about the failed check, or the difference from a framework's own figure, or their number."""
    texts = list(audit_texts(summary.audit)) if summary.audit is not None else []
    if len(texts) > 1:
        texts = [f"{len(texts)} differences" + (", see summary.txt" if folder is not None else "")]
    return _fact("audit", texts[0], max_lines).splitlines() if texts else []


def _slow_ranks(summary: Summary) -> Iterator[str]:
    if summary.stragglers:
        yield _fact("stragglers", stragglers_text(summary.stragglers))
    last = summary.last_ranks
    if summary.coverage.ranks_expected > 2 and last.most[1] > MIN_LAST_SHARE * last.iterations:
        yield _fact("slowest rank", slowest_text(summary))


def _not_measured(summary: Summary, folder: Path | None, max_lines: int) -> Iterator[str]:
    sentences = summary.not_measured
    shown = len(sentences) if len(sentences) <= max_lines else max_lines - 1
    for sentence in sentences[:shown]:
        yield _fact("not measured", sentence)
    if more := len(sentences) - shown:
        text = f"{more} more" if shown else f"{more} quantities"
        yield _fact("not measured", text + (", see summary.txt" if folder is not None else ""))


def _events(summary: Summary) -> str:
    """Return the counts of the events that are shown on the console."""
    shown = [kind for kind in summary.events if level_of(kind) != FILE and kind != "not_measured"]
    return ", ".join(f"{kind} {summary.events[kind]:,}" for kind in shown)


def _ran(summary: Summary) -> str:
    parts = [f"{summary.iterations:,} iterations{_numbers(summary)} in {duration(summary.elapsed_s)}"]
    if summary.attempts > 1:
        parts.append(f"{summary.attempts} attempts")
    for total, measured, what in (
        (summary.tokens, summary.measured_tokens, "tokens" + " from the batches" * bool(summary.token_source)),
        (summary.samples, summary.measured_samples, "samples"),
    ):
        if measured:
            parts.append(f"{'at least ' if total is None else ''}{_count(measured)} {what}")
    if summary.parameters:
        parts.append(f"{_count(summary.parameters)} parameters")
    return ", ".join(parts)


def _numbers(summary: Summary) -> str:
    """Return the numbers of the first and the last iteration of one attempt, unless they begin with 1."""
    attempts = summary.goodput.attempts if summary.goodput is not None else ()
    if len(attempts) != 1 or attempts[0].first in (None, 1):
        return ""
    return f" ({attempts[0].first:,} to {attempts[0].last:,})"


def _count(number: int) -> str:
    """Return a whole number, exact below a million.

    >>> _count(160_000), _count(7_241_732_096)
    ('160,000', '7.24G')
    """
    return f"{number:,}" if number < 1_000_000 else "".join(scaled(number))


def _fact(name: str, text: str, max_lines: int = 1) -> str:
    return "\n".join(fact_lines(name, one_line(text), max_lines))
