"""The summary of a run as plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from effllm.metrics import METRICS, Metric, metric_of_tag
from effllm.records.framework_figures import FIGURES, MFU_RATIO
from effllm.records.identity import Identity
from effllm.records.job import EnergySummary, GoodputSummary, Summary, Value
from effllm.records.plain_text import one_line
from effllm.records.rank import Profile
from effllm.records.values import ValueSummary
from effllm.records.verdict import Audit, StragglerVerdict, Verdict
from effllm.views.text.numbers import duration, energy_unit, errors_text, percent, readable, rounded_up, shares_text

WIDTH = 78
#: Maximum number of names of instruments' values in the table.
MAX_SHOWN_NAMES = 40


def errors_of_metric(tag: str, value: Value, *, brief: bool = False) -> str:
    """Return the text of the errors of a metric's value; "" for the value 0."""
    if not value.value:
        return ""
    entry = metric_of_tag(tag)
    timing_name = "sampling" if entry is not None and entry.is_sampled else "timing"
    ratios = ((error or 0.0) / abs(value.value) for error in (value.error, value.sensor_error))
    return errors_text(*ratios, brief=brief, timing_name=timing_name)


def status_text(status: str) -> str:
    return {"interrupted": "stopped by Ctrl-C", "ended": "ended, exit status not visible"}.get(status, status)


def summary_text(summary: Summary, facts: Iterable[tuple[str, str]] = ()) -> str:
    """Return the content of summary.txt; it begins with the facts of the end of the console."""
    return "".join(f"{line}\n" for line in _lines(summary, facts))


def _lines(summary: Summary, facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"[EfficientLLM] Run {status_text(summary.status)}"
    yield "=" * WIDTH
    if summary.simulated:
        yield "  SIMULATED: no hardware was measured; these numbers mean nothing beyond a test."
        yield "-" * WIDTH
    yield from _lines_of_facts(facts)
    yield "-" * WIDTH
    yield from _lines_of_facts(what_ran(summary))
    yield "-" * WIDTH
    yield from _metric_table(summary.metrics)
    yield "-" * WIDTH
    yield from _lines_of_facts(how_measured(summary))
    for sentence in summary.not_measured:
        yield from textwrap.wrap(sentence, WIDTH, initial_indent="  not measured: ", subsequent_indent="    ")
    if summary.instruments:
        yield "-" * WIDTH
        yield from _instrument_table(summary.instruments)


def audit_texts(audit: Audit) -> Iterator[str]:
    """Yield the failed checks of a run, and the framework's own figures that differ from those of effllm."""
    yield from (one_line(f"IN DOUBT: {text}") for text in audit.doubts)
    for figure in audit.figures:
        scale = 100 if figure.name == MFU_RATIO else 1
        framework, own = (readable(scale * value) + " %" * (scale > 1) for value in (figure.framework, figure.own))
        label = FIGURES.get(figure.name, one_line(figure.name))
        yield f"{label}: framework {framework}, effllm {own}, factor {readable(figure.factor)}"


def what_ran(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the identity and the size of a run, as name and text."""
    yield from ((name, one_line(text)) for name, text in _identity(summary) if text)
    attempts = f" in {summary.attempts} attempts" if summary.attempts > 1 else ""
    yield "iterations", f"{summary.iterations:,}{attempts}"
    yield "elapsed", duration(summary.elapsed_s)
    if summary.measured_tokens:
        source = f", from the batches ({one_line(summary.token_source)})" if summary.token_source else ""
        yield "tokens", f"{'at least ' if summary.tokens is None else ''}{summary.measured_tokens:,}{source}"
    if summary.measured_samples:
        yield "samples", f"{'at least ' if summary.samples is None else ''}{summary.measured_samples:,}"
    if summary.parameters:
        yield "parameters", f"{summary.parameters:,} ({summary.parameters_kind})"
    if text := loss_text(summary, ".6f"):
        yield "last loss", text
    if summary.goodput is not None and summary.goodput.ratio is not None:
        yield "goodput", goodput_text(summary.goodput)
    elif summary.time_by_class:
        yield "time", shares_text(summary.time_by_class)
    if summary.stragglers:
        yield "stragglers", stragglers_text(summary.stragglers)
    if summary.last_ranks.by_rank:
        yield "slowest rank", slowest_text(summary)


def _identity(run: Identity) -> Iterator[tuple[str, str]]:
    """Yield the known facts of a run's identity, as name and text; an unknown fact has an empty text."""
    yield "run id", run.run_id or ""
    yield "user", run.user or ""
    job = (run.job_id, _named("name", run.job_name), _named("partition", run.partition), _named("account", run.account))
    yield "job id", ", ".join(part for part in job if part) if run.job_id else ""
    yield "hosts", _names_and_more(run.hosts, run.host_count)
    yield "GPU models", _names_and_more(run.gpu_models, run.gpu_model_count)
    yield "model", run.model or ""
    yield "git commit", run.git_commit or ""
    yield "tags", ", ".join(run.tags)


def verdict_lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the three lines of a verdict, as name and text."""
    yield "Verdict", one_line(verdict.text)
    yield "Why", one_line(verdict.why)
    yield "Next", one_line(verdict.next)


def _names_and_more(names: Sequence[str], count: int | None) -> str:
    more = (count or 0) - len(names)
    return ", ".join(names) + (f", and {more:,} more" if more > 0 else "")


def loss_text(summary: Summary, form: str = ".6g") -> str:
    """Return the last loss, and the number of losses that were not finite; empty without a loss."""
    finite = "" if summary.loss is None else f"{summary.loss:{form}}"
    if not summary.losses_not_finite:
        return finite
    count = f"{summary.losses_not_finite:,} losses, the first at iteration {summary.first_not_finite}"
    return f"{finite}; NaN or infinite: {count}" if finite else f"NaN or infinite: {count}"


def stragglers_text(verdicts: Sequence[StragglerVerdict]) -> str:
    """Return the costliest stragglers, each with the waiting time of the other ranks."""
    named = [f"rank {','.join(map(str, verdict.ranks))} ({duration(verdict.gpu_seconds)})" for verdict in verdicts[:3]]
    more = f", and {len(verdicts) - 3} more" if len(verdicts) > 3 else ""
    return f"GPU time of waiting ranks: {', '.join(named)}{more}"


def slowest_text(summary: Summary) -> str:
    """Return the rank that was most often the last one; the summary must contain such a rank."""
    rank, count = summary.last_ranks.dominant_last_rank
    return f"rank {rank}, last in {count:,.0f} of {summary.last_ranks.iterations:,.0f} iterations"


def goodput_text(goodput: GoodputSummary) -> str:
    """Return the share of kept work, and the classes of time, largest first."""
    ratio = f"{100 * (goodput.ratio or 0.0):.1f} % of {duration(goodput.elapsed_s)}"
    if goodput.redone_iterations:
        ratio += f", {goodput.redone_iterations:,} repeated iterations"
    elif goodput.redone_iterations is None:
        ratio += ", number of repeated iterations unknown (the first iteration of a restart has no number)"
    named = {name.replace("_", " "): seconds for name, seconds in goodput.seconds.items()}
    return f"{ratio}: {shares_text(named)}"


def _profile_text(profile: Profile) -> str:
    total, exposed = (100 * part_s / profile.time_s for part_s in (profile.communication_s, profile.exposed_s))
    return f"{profile.iterations:,} iterations, all ranks: communication time {total:.0f} %, exposed {exposed:.0f} %"


def how_measured(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the energy of a run, its source and the coverage of the values, as name and text."""
    energy, coverage = summary.energy, summary.coverage
    if text := energy_text(energy):
        yield "energy", text
    joules = energy.total_joules or energy.measured_joules or 0.0
    if energy.scope or energy.method:
        yield "power", ", ".join(filter(None, (_named("scope", energy.scope), _named("from", energy.method))))
    if energy.estimated_joules and joules:
        share = percent(energy.estimated_joules / joules)
        yield "estimated", f"{share} of the energy, computed from power in gaps of the counter"
    if any(energy.by_class.values()):
        yield "energy in", shares_text({name: joules for name, joules in energy.by_class.items() if joules is not None})
    if energy.warmup_joules and joules:
        share = f"{100 * energy.warmup_joules / joules:.1f} %"
        yield "warm-up", f"{share} of the energy, left out of run-to-date values"
    if summary.peak:
        yield "peak", summary.peak
    if summary.profile is not None and summary.profile.time_s > 0:
        yield "profiled", _profile_text(summary.profile)
    yield "ranks", f"{coverage.ranks_reporting} of {coverage.ranks_expected} reported"
    yield "GPUs", f"{coverage.gpus_measured} of {coverage.gpus_expected} measured"
    yield "reports", f"{coverage.reports_lost} lost, {coverage.reports_late} late"


def _metric_table(values: Mapping[str, Value]) -> Iterator[str]:
    group = ""
    yield f"  {'metric':<29}{'value':>12}  {'unit':<25}  over"
    for tag, entry, base in shown_metrics(values):
        if entry is None:
            yield _metric_row(tag, values[tag], "")
            continue
        if entry.group != group:
            group = entry.group
            yield f"  {group}"
        yield _metric_row(("  " if group else "") + entry.name, values[tag], base)
    if any(value.error or value.sensor_error for value in values.values()):
        yield "  ± (half-widths, 95 %): the first error is by timing, the second by sensor gain"
    if any(value.doubt for value in values.values()):
        yield "  !: in doubt, because a check of the counts failed, or a part of the counts is missing"


def shown_metrics(values: Collection[str]) -> Iterator[tuple[str, Metric | None, str]]:
    """Yield the tag, the metric and the base (run or job) of each metric that has a value, each metric once.

    Each metric is shown on its first base that has a value; summary.json has all bases. Unknown tags follow, without a
    metric and a base.
    """
    shown: set[str] = set()
    for entry in METRICS.values():
        shown.update(entry.tag(base) for base in entry.summary_bases)
        base = next((base for base in entry.summary_bases if entry.tag(base) in values), None)
        if base is not None:
            yield entry.tag(base), entry, "job" if base == "job" else "run"
    yield from ((tag, None, "") for tag in values if tag not in shown and metric_of_tag(tag) is None)


def _instrument_table(values: Mapping[str, ValueSummary]) -> Iterator[str]:
    """Yield a table of the values of instruments, only for the first names; summary.json has all names."""
    yield f"  {'instrument':<30}{'count':>9}{'mean':>9}{'p50':>9}{'p95':>9}{'most':>9}"
    for name, spread in islice(values.items(), MAX_SHOWN_NAMES):
        numbers = (spread.mean, spread.percentiles.get("p50"), spread.percentiles.get("p95"), spread.most)
        cells = "".join(f"{'' if number is None else f'{number:.4g}':>9}" for number in numbers)
        yield f"  {textwrap.shorten(one_line(name), 29, placeholder='…'):<30}{spread.count:>9,}{cells}".rstrip()
        if spread.not_finite:
            yield "    not finite: " + ", ".join(f"{count:,} {kind}" for kind, count in spread.not_finite.items())
    if len(values) > MAX_SHOWN_NAMES:
        yield f"  {len(values) - MAX_SHOWN_NAMES} more names are in summary.json"


def _metric_row(name: str, value: Value, base: str) -> str:
    unit_and_errors = f"{value.unit} {errors_of_metric(name.strip(), value, brief=True)}".rstrip()
    mark = "!" if value.doubt else " "
    return f"{mark} {name:<29}{readable(value.value):>12}  {unit_and_errors:<25}  {base}".rstrip()


def _lines_of_facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in pairs:
        yield from fact_lines(name, text)


def fact_lines(name: str, text: str, max_lines: int | None = None, column: int = 16) -> list[str]:
    """Return a name and a text, which begins at a column, as lines of `WIDTH`; more than ``max_lines`` are cut."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {name}".ljust(column),
        subsequent_indent=" " * column,
        max_lines=max_lines,
        placeholder=" …",
        break_on_hyphens=False,
    )


def value_of(summary: Summary, name: str) -> Value | None:
    """Return the value of a metric, on its first base that has a value."""
    tags = map(METRICS[name].tag, METRICS[name].summary_bases)
    return next((summary.metrics[tag] for tag in tags if tag in summary.metrics), None)


def energy_text(energy: EnergySummary) -> str:
    """Return the energy of a run with its errors; "" without measured energy."""
    if energy.total_joules is not None:
        return _energy_with_errors(energy.total_joules, energy.error_joules, energy.gain_error)
    if energy.measured_joules is not None:
        measured = _energy_with_errors(energy.measured_joules, None, energy.gain_error)
        return f"{measured}, measured only in part: no total"
    return ""


def _energy_with_errors(joules: float, error_joules: float | None, gain_error: float | None) -> str:
    unit, unit_j = energy_unit(joules)
    named = ((error_joules or 0.0, "timing"), ((gain_error or 0.0) * joules, "sensor"))
    errors = "".join(f" ±{rounded_up(error_j / unit_j)} {name}" for error_j, name in named if error_j)
    return f"{readable(joules / unit_j)} {unit}{errors}" + (f" ({readable(joules)} J)" if unit != "J" else "")


def _named(word: str, value: str | None) -> str:
    return f"{word} {value}" if value else ""
