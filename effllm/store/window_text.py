"""A window of the job as text: two or three lines for a terminal, and the block for scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from effllm import metrics
from effllm.records.job import ClusterReport
from effllm.store.summary_text import duration, errors_text, readable, rounded_up

MAX_NAMED = 8

#: A smaller share of estimated energy is not shown.
_ESTIMATED = 0.001

_WATCHED: tuple[tuple[metrics.Formula, Callable[[float], str], str], ...] = (
    (metrics.throughput.seconds_per_iteration, readable, "{} s/{step}"),
    (metrics.throughput.tokens_per_second_per_gpu, readable, "{} tok/s/{device}"),
    (metrics.throughput.mfu_ratio, lambda ratio: readable(100 * ratio), "MFU {} %"),
    (metrics.energy.watts_per_gpu, readable, "{} W/GPU"),
    (metrics.energy.joules_per_token, readable, "{} J/token"),
    (metrics.health.peak_gb, readable, "peak {} GB"),
    (metrics.throughput.data_wait_ratio, lambda ratio: f"{100 * ratio:.0f}", "data {} %"),
    (metrics.throughput.exposed_communication_ratio, lambda ratio: f"{100 * ratio:.0f}", "exposed comm {} %"),
)

_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def scaled(value: float) -> tuple[str, str]:
    """Return a number with three digits, and the prefix of its unit.

    >>> scaled(10_512.0), scaled(0.02904), scaled(304.2)
    (('10.5', 'k'), ('29.0', 'm'), ('304', ''))
    """
    scale, prefix = next(((s, p) for s, p in _SCALES if abs(value) >= 0.9995 * s), _SCALES[-1])
    return readable(value / scale), prefix


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}" if ratio >= 0.0995 else f"{100 * ratio:.2g}"


# --- the short form ------------------------------------------------------------------------------


def short_lines(report: ClusterReport, width: int, *, lost_before: int) -> tuple[list[str], str]:
    """Return two lines of a window, and a third line with the window's problems or ""; no line is wider than ``width``.

    ``lost_before`` is the number of lost reports at the previous window.
    """
    lines = [_window_line(report, width), _contract_line(report, width)]
    problems = list(_problems(report, lost_before))
    return lines, ("  !! " + "; ".join(problems))[:width] if problems else ""


def fitted(texts: Sequence[str], between: str, width: int, *, kept: int = 0) -> str:
    """Join texts; if the line is wider than ``width``, omit texts from the end, but never the last ``kept`` texts."""
    head, tail = list(texts[: len(texts) - kept]), list(texts[len(texts) - kept :])
    while len(line := between.join([*head, *tail])) > width and len(head) > 1:
        head.pop()
    return line[:width]


def _window_line(report: ClusterReport, width: int) -> str:
    """Return the values of the window; the least important values are omitted until the line fits."""
    parts = list(_window_parts(report))
    while len(line := "  ".join(text for _, text in parts)) > width and len(parts) > 1:
        parts.remove(max(parts, key=lambda part: part[0]))
    return line[:width]


def _window_parts(report: ClusterReport) -> Iterator[tuple[int, str]]:
    """Yield the parts of the window's line, each with a number: the part with the highest number is omitted first."""
    last = report.last
    device = "GPU" if last.constants.gpus else "rank"

    def value(formula: metrics.Formula) -> float | None:
        found = formula(last)
        return found if found is not None and math.isfinite(found) else None

    yield 0, ("it " if report.style == "Iteration" else "step ") + _place(report)
    if (step_s := value(metrics.throughput.seconds_per_iteration)) is not None:
        yield 1, f"{readable(step_s)}s"
    if (rate := value(metrics.throughput.tokens_per_second_per_gpu)) is not None:
        number, prefix = scaled(rate)
        yield 2, f"{number}{prefix} tok/s/{device}"
    if (mfu := value(metrics.throughput.mfu_ratio)) is not None:
        yield 3, f"MFU {_percent(mfu)}%"
    if last.constants.gpus and (busy := value(metrics.contract.pcu_ratio)) is not None:
        yield 4, f"busy {_percent(busy)}%"
    if (watts := value(metrics.energy.watts_per_gpu)) is not None:
        yield 5, f"{readable(watts)}W"
    if (joules := value(metrics.energy.joules_per_token)) is not None:
        number, prefix = scaled(joules)
        yield 6, f"{number}{prefix}J/token"
    if report.loss is not None and math.isfinite(report.loss):
        yield 8, f"loss {report.loss:.4g}"
    if (wait := value(metrics.throughput.data_wait_ratio)) is not None:
        yield (3 if wait >= 0.1 else 10), f"data {_percent(wait)}%"
    if report.remaining_s is not None:
        yield 9, f"eta {duration(report.remaining_s)}"


def _contract_line(report: ClusterReport, width: int) -> str:
    """Return the six metrics, run to date, with the ranks and GPUs that they cover."""
    texts = (
        ["run-to-date values start after the warm-up"]
        if report.warming_up
        else list(contract_parts(report.values, report.doubtful))
    )
    seen = report.coverage
    ranks = _share(seen.ranks_reporting, seen.ranks_expected)
    gpus = _share(seen.gpus_measured, seen.gpus_expected)
    simulated = " simulated" if report.simulated else ""
    if not seen.gpus_expected:
        tails = [f"{ranks} ranks{simulated}", f"{ranks}r{simulated[:4]}"]
    else:
        tails = [f"{ranks} ranks {gpus} GPUs{simulated}", f"{ranks}r {gpus}GPU{simulated[:4]}"]
        tails += [f"{ranks}r+GPU{simulated[:4]}"] if ranks == gpus else []
        is_equal = seen.ranks_reporting == seen.gpus_measured
        tails += [f"{seen.ranks_reporting}r{'+' if is_equal else f' {seen.gpus_measured}'}GPU"]
    forms = [(between, tail) for tail in tails for between in ("  ", " ")]
    between, tail = next((form for form in forms if len(form[0].join(["", *texts, form[1]])) <= width), forms[-1])
    return fitted(["", *texts, tail], between, width, kept=1)


def _share(have: int, expected: int) -> str:
    return f"{have}" if have == expected else f"{have}/{expected}"


def contract_parts(values: Mapping[str, float], doubtful: Collection[str] = ()) -> Iterator[str]:
    """Yield the metrics of the contract, run to date, in short form; values with a tag in ``doubtful`` have a mark."""
    for entry in metrics.headline():
        value = values.get(entry.tag("run"))
        if value is None or not math.isfinite(value):
            continue
        name, unit = entry.name.partition("_")[0].upper(), entry.unit
        name += "!" if entry.tag("run") in doubtful else ""
        if unit in ("W", "tokens/s"):
            number, prefix = scaled(value)
            yield f"{name} {number}{prefix}{unit.replace('tokens', 'tok')}"
        elif unit.endswith("/parameter/s"):
            digits, _, exponent = f"{value:.2e}".partition("e")
            yield f"{name} {digits}e{int(exponent)}"
        else:
            yield f"{name} {readable(value)}" + {"GiB": "GiB", "s/iteration": "s"}.get(unit, "")


def _problems(report: ClusterReport, lost_before: int) -> Iterator[str]:
    seen = report.coverage
    if not is_loss_finite(report):
        yield "loss is not finite"
    if seen.missing_ranks:
        yield f"no report of rank {_named(seen.missing_ranks)}"
    if seen.gpus_measured < seen.gpus_expected and not seen.missing_ranks:
        yield f"{seen.gpus_expected - seen.gpus_measured} of {seen.gpus_expected} GPUs not measured"
    if report.doubtful:
        yield _in_doubt(report)
    if seen.reports_lost > lost_before:
        yield f"{seen.reports_lost - lost_before} reports lost"
    yield from _slowest(report)


def is_loss_finite(report: ClusterReport) -> bool:
    """Return whether all losses of the window were finite."""
    return not report.last.counts.losses_not_finite and (report.loss is None or math.isfinite(report.loss))


# --- the long form -------------------------------------------------------------------------------


def block_lines(report: ClusterReport, width: int = 0) -> list[str]:
    """Return the lines of a window that users' scripts parse; with ``width`` 0 no line is broken."""
    lines = _folded(list(watched(report)), " · ", width)
    if report.warming_up:
        lines.append("  (warming up: run-to-date values start later)")
    else:
        lines += block(report)
    return lines + [f"  {line}" for line in _folded(list(coverage_parts(report)), "  ", width and width - 2)]


def watched(report: ClusterReport) -> Iterator[str]:
    """Yield the parts of the last window's line; unknown values are omitted."""
    last = report.last
    words = {
        "step": "it" if report.style == "Iteration" else "step",
        "device": "GPU" if last.constants.gpus else "rank",
    }
    yield report.style.lower() + " " + _place(report)
    if not is_loss_finite(report):
        yield "loss is not finite"
    energy = metrics.energy
    errors = errors_text(energy.timing_error_ratio(last), energy.sensor_error_ratio(last))
    # Energy and power have the same errors: if there is no energy per token, the errors are written after the power.
    with_errors = energy.watts_per_gpu if energy.joules_per_token(last) is None else energy.joules_per_token
    for formula, to_text, template in _WATCHED:
        value = formula(last)
        if value is not None and math.isfinite(value):
            text = template.format(to_text(value), **words)
            yield f"{text} {errors}" if errors and formula is with_errors else text
    yield from _slowest(report)
    if report.remaining_s is not None:
        yield f"eta {duration(report.remaining_s)}"


def block(report: ClusterReport) -> Iterator[str]:
    """Yield the lines that users' scripts parse: fixed labels and formats, no line for an unknown value."""
    yield f"[EfficientLLM Metrics] {report.style} {report.iteration}:"
    if report.loss is not None and math.isfinite(report.loss):
        yield f"  Loss: {report.loss:.6f}"
    for entry in metrics.headline():
        value = report.values.get(entry.tag("run"))
        if entry.console and value is not None and math.isfinite(value):
            yield "  " + entry.console.format(value)


def coverage_parts(report: ClusterReport) -> Iterator[str]:
    """Yield the parts of the coverage line of the block."""
    seen, run = report.coverage, report.run
    yield f"Ranks: {seen.ranks_reporting}/{seen.ranks_expected}"
    yield f"GPUs: {seen.gpus_measured}/{seen.gpus_expected}"
    yield f"lost {seen.reports_lost}"
    yield f"late {seen.reports_late}"
    if report.power_scope and (report.last.energy.measured_j is not None or run.energy.measured_j is not None):
        yield f"scope {report.power_scope}"
    if run.energy.joules and (share := run.energy.estimated_j / run.energy.joules) >= _ESTIMATED:
        yield f"estimated {rounded_up(100 * share)} %"
    if seen.missing_ranks:
        yield f"missing {_named(seen.missing_ranks)}"
    if report.doubtful:
        yield _in_doubt(report)
    if report.simulated:
        yield "simulated"


def _in_doubt(report: ClusterReport) -> str:
    """Return the number of values of the window that depend on a failed check of the audit."""
    return f"{len(report.doubtful)} values in doubt"


def _slowest(report: ClusterReport) -> Iterator[str]:
    slowest = report.straggler
    if slowest is not None:
        yield f"slowest rank {slowest.rank} +{100 * (slowest.time_s / slowest.median_s - 1):.0f} %"


def _named(ranks: Sequence[int]) -> str:
    return ",".join(str(rank) for rank in ranks[:MAX_NAMED]) + ("…" if len(ranks) > MAX_NAMED else "")


def _place(report: ClusterReport) -> str:
    return f"{report.iteration}/{report.total_iterations}" if report.total_iterations else str(report.iteration)


def _folded(parts: Sequence[str], between: str, width: int) -> list[str]:
    """Join parts into lines of at most ``width``, broken between parts; 0 means one line."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width and len(lines[-1]) + len(between) + len(part) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += between + part
    return lines
