"""A window of the job as text: one line, or the block that users' scripts parse."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from effllm import metrics
from effllm.records.forecast import REMAINING_S
from effllm.records.job import ClusterReport
from effllm.views.text.numbers import duration, readable, rounded_up, scaled

MAX_NAMED = 8  # missing ranks

#: A smaller share of estimated energy is not shown.
_MIN_ESTIMATED = 0.001
_IMPORTANT_WAIT = 0.05  # a larger wait for data is more important than the loss

# --- one line ------------------------------------------------------------------------------------


def console_line(report: ClusterReport, width: int) -> str:
    """Return the values of a window as one line; the least important ones are left out until it fits ``width``."""
    parts = list(_window_parts(report))
    while parts:
        texts = [text for _, text in parts]
        line = next((line for blanks in ("  ", " ") if len(line := blanks.join(texts)) <= width), "")
        if line or len(parts) == 1:
            return line or texts[0][:width]
        parts.remove(max(parts, key=lambda part: part[0]))
    return ""


def _window_parts(report: ClusterReport) -> Iterator[tuple[int, str]]:
    """Yield the parts of the window's line, each with a number: the part with the highest number is left out first."""
    device = "GPU" if report.last.constants.gpus else "rank"

    def value(formula: metrics.Formula) -> float | None:
        result = formula(report.last)
        return result if result is not None and math.isfinite(result) else None

    def mark(formula: metrics.Formula) -> str:
        entry = metrics.METRICS[formula.__name__]
        return "!" if {entry.tag(base) for base in entry.bases}.intersection(report.doubtful) else ""

    of_total = f"/{report.total_iterations}" if report.total_iterations else ""
    yield 0, f"{'it' if report.style == 'Iteration' else 'step'} {report.iteration}{of_total}"
    if text := "; ".join(_missing_parts(report)):
        yield 0, text
    rate = value(metrics.throughput.tokens_per_second_per_gpu)
    if rate is not None:
        number, prefix = scaled(rate)
        yield 1, f"{number}{prefix} tok/s/{device}{mark(metrics.throughput.tokens_per_second_per_gpu)}"
    if (step_s := value(metrics.throughput.seconds_per_iteration)) is not None:
        number, prefix = scaled(step_s)
        yield (1 if rate is None else 9), f"{number} {prefix}s"
    if (mfu := value(metrics.throughput.mfu_ratio)) is not None:
        yield 3, f"MFU {100 * mfu:.1f}%{mark(metrics.throughput.mfu_ratio)}"
    if (watts := value(metrics.energy.watts_per_gpu)) is not None:
        yield 4, f"{readable(watts)} W/GPU"
    if (joules := value(metrics.energy.joules_per_token)) is not None:
        number, prefix = scaled(joules)
        yield 2, f"{number} {prefix}J/tok{mark(metrics.energy.joules_per_token)}"
    if (wait := value(metrics.throughput.data_wait_ratio)) is not None:
        yield (5 if wait >= _IMPORTANT_WAIT else 8), f"data {100 * wait:.0f}%"
    if not is_loss_finite(report):
        yield 0, "loss is not finite"
    elif report.loss is not None:
        loss = f"{report.loss:#.4g}"  # with its zeros, so that the columns of several lines agree
        yield 6, f"loss {loss.rstrip('.')}"
    if (remaining := report.forecast.get(REMAINING_S)) is not None:
        yield 7, f"eta {duration(remaining.value)}".replace(" min", "m").replace(" s", "s").replace(" h", "h")


def _missing_parts(report: ClusterReport) -> Iterator[str]:
    """Yield the ranks and GPUs that are not in the values of the window."""
    coverage = report.coverage
    if coverage.missing_ranks:
        yield f"{coverage.ranks_reporting}/{coverage.ranks_expected} ranks"
    elif coverage.gpus_measured < coverage.gpus_expected:
        yield f"{coverage.gpus_measured}/{coverage.gpus_expected} GPUs"


def contract_parts(values: Mapping[str, float], doubtful: Collection[str] = ()) -> Iterator[str]:
    """Yield the metrics of the contract, run to date, in short form; values with a tag in ``doubtful`` have a mark."""
    for entry in metrics.contract_metrics():
        value = values.get(entry.tag("run"))
        if value is None or not math.isfinite(value):
            continue
        name, unit = entry.name.partition("_")[0].upper(), entry.unit  # amu_gb -> AMU
        name += "!" if entry.tag("run") in doubtful else ""
        if unit in ("W", "tokens/s"):
            number, prefix = scaled(value)
            yield f"{name} {number}{prefix}{unit.replace('tokens', 'tok')}"
        elif unit.endswith("/parameter/s"):
            digits, _, exponent = f"{value:.2e}".partition("e")
            yield f"{name} {digits}e{int(exponent)}"
        else:
            yield f"{name} {readable(value)}" + {"GiB": "GiB", "s/iteration": "s"}.get(unit, "")


def is_loss_finite(report: ClusterReport) -> bool:
    """Return whether all losses of the window were finite."""
    return not report.last.counts.losses_not_finite and (report.loss is None or math.isfinite(report.loss))


# --- the block -----------------------------------------------------------------------------------


def block_lines(report: ClusterReport, width: int = 0) -> list[str]:
    """Return the lines of a window that users' scripts parse; with ``width`` 0 no line is broken."""
    coverage_lines = _joined_in_lines(list(coverage_parts(report)), width - 2 if width else 0)
    return [*fixed_lines(report), *(f"  {line}" for line in coverage_lines)]


def fixed_lines(report: ClusterReport) -> Iterator[str]:
    """Yield the lines that users' scripts parse: fixed labels and formats, no line for an unknown value."""
    yield f"[EfficientLLM Metrics] {report.style} {report.iteration}:"
    if report.loss is not None and math.isfinite(report.loss):
        yield f"  Loss: {report.loss:.6f}"
    if report.warming_up:
        yield "  (warming up: values of the run to date start later)"
        return
    for entry in metrics.contract_metrics():
        value = report.values.get(entry.tag("run"))
        if entry.console and value is not None and math.isfinite(value):
            yield "  " + entry.console.format(value)


def coverage_parts(report: ClusterReport) -> Iterator[str]:
    """Yield the parts of the coverage line of the block."""
    coverage, run = report.coverage, report.run
    yield f"Ranks: {coverage.ranks_reporting}/{coverage.ranks_expected}"
    yield f"GPUs: {coverage.gpus_measured}/{coverage.gpus_expected}"
    yield f"lost {coverage.reports_lost}"
    yield f"late {coverage.reports_late}"
    if report.power_scope and (report.last.energy.measured_j is not None or run.energy.measured_j is not None):
        yield f"scope {report.power_scope}"
    if run.energy.joules and (share := run.energy.estimated_j / run.energy.joules) >= _MIN_ESTIMATED:
        yield f"estimated {rounded_up(100 * share)} %"
    if coverage.missing_ranks:
        more = "…" * (len(coverage.missing_ranks) > MAX_NAMED)
        yield f"missing {','.join(map(str, coverage.missing_ranks[:MAX_NAMED]))}{more}"
    if report.doubtful:  # values of the window that depend on a failed check of the audit
        yield f"{len(report.doubtful)} values in doubt"
    if not is_loss_finite(report):
        yield "loss is not finite"
    if report.simulated:
        yield "simulated"


def _joined_in_lines(parts: Sequence[str], width: int) -> list[str]:
    """Join parts into lines of at most ``width``, broken between parts; 0 means one line."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width and len(lines[-1]) + 2 + len(part) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += f"  {part}"
    return lines
