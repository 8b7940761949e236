"""The first sections of a report: verdict, waterfall, comparison, what ran, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from effllm.analysis.configurations import Configurations
from effllm.analysis.recorded_run import RecordedRun
from effllm.records.job import Summary, Value
from effllm.records.verdict import HIGH, MEDIUM, PARTS, PRODUCTIVE
from effllm.views.comparison_text import HEADER, ComparisonPage, closing_lines, metric_cells, note_lines, side_lines
from effllm.views.configurations_text import table_rows
from effllm.views.report.markup import (
    Child,
    Markup,
    collapsed,
    element,
    facts,
    section,
    sentences,
    table,
    together,
    with_exact_value,
)
from effllm.views.text.numbers import J_PER_KWH, percent, readable
from effllm.views.text.summary import (
    MAX_SHOWN_NAMES,
    audit_texts,
    errors_of_metric,
    how_measured,
    shown_metrics,
    status_text,
    value_of,
    verdict_lines,
    what_ran,
)
from effllm.views.waterfall_text import WaterfallUnits, waterfall_header, waterfall_notes, waterfall_row

BAR = 100  # width of the drawing of a bar
MIN_J_PER_TOKEN = 0.1  # a smaller energy is shown in mJ

Runs = Sequence[RecordedRun]


def section_of_runs(runs: Runs, anchor: str, title: str, content: Callable[[RecordedRun], Child]) -> Markup:
    """Return a section with the content of each run, side by side; the names of several runs are shown."""
    names = [element("h3", run_label(runs, run)) if len(runs) > 1 else None for run in runs]
    cards = [element("div", name, content(run), class_="card") for name, run in zip(names, runs, strict=True)]
    return section(anchor, title, element("div", cards, class_="cards"))


def run_label(runs: Runs, run: RecordedRun) -> str:
    """Return the number and the name of a run."""
    return f"{runs.index(run) + 1}: {run.name}" if len(runs) > 1 else run.name


def verdict(run: RecordedRun) -> Child:
    """Return the three lines of a verdict, and the losses behind it."""
    result = run.summary.verdict if run.summary is not None else None
    if result is None:
        return element("p", f"No verdict: {_why_missing(run)}", class_="verdict unknown")
    kind = {"healthy": "healthy", "unknown": "unknown"}.get(result.cause, "loss")
    (first, text), *others = verdict_lines(result)
    evidence = [f"{fact.claim} ({fact.source})" for fact in result.evidence]
    return together(
        element("p", element("span", first, class_="name"), " ", text, class_=f"verdict {kind}"),
        facts(others),
        tiles(run),
        facts([("Confidence", _CONFIDENCE[result.confidence])]) if result.confidence in _CONFIDENCE else None,
        collapsed("Evidence", sentences(evidence)) if evidence else None,
    )


#: Label, metric, and factor of the numbers that are largest on the page.
_TILES = (
    ("tokens/s per GPU", "tokens_per_second_per_gpu", 1.0),
    ("% MFU", "mfu_ratio", 100.0),
    ("ms per iteration", "seconds_per_iteration", 1e3),
    ("J per token", "joules_per_token", 1.0),
    ("kWh", "total_joules", 1 / J_PER_KWH),
    ("W per GPU", "watts_per_gpu", 1.0),
)


def tiles(run: RecordedRun) -> Markup | None:
    """Return the numbers that people copy, with the larger one of their errors; ``None`` without any."""
    if (summary := run.summary) is None:
        return None
    values = {name: (value, factor) for name, metric, factor in _TILES if (value := value_of(summary, metric))}
    if "J per token" in values and values["J per token"][0].value < MIN_J_PER_TOKEN:
        values = {
            name.replace("J per", "mJ per"): (amount, factor * (1e3 if "J per" in name else 1.0))
            for name, (amount, factor) in values.items()
        }
    if summary.waterfall is not None and summary.coverage.gpus_expected:
        values["GPU-hours"] = Value(summary.waterfall.device_seconds / 3600, ""), 1.0
    if summary.goodput is not None and summary.goodput.ratio is not None:
        values["% goodput"] = Value(summary.goodput.ratio, ""), 100.0
    drawn = []
    for name, (amount, factor) in values.items():
        error = max(abs(amount.error or 0.0), abs(amount.sensor_error or 0.0))
        label = f"{name} ±{percent(error / abs(amount.value))}" if error and amount.value else name
        figure = element("b", with_exact_value(readable(factor * amount.value), factor * amount.value))
        drawn.append(element("div", figure, element("span", label), class_="tile"))
    return element("div", drawn, class_="tiles") if drawn else None


_CONFIDENCE = {
    HIGH: "high",
    MEDIUM: "medium: a larger loss can be hidden in time without report or in steps that are not split",
}


def _why_missing(run: RecordedRun) -> str:
    if run.summary is not None:
        return "no rank had reported any time."
    return next((problem for problem in run.problems if "summary.json" in problem), "no summary") + "."


def waterfall(run: RecordedRun) -> Child:
    """Return the parts of the device time."""
    whole = run.summary.waterfall if run.summary is not None else None
    if whole is None:
        return element("p", f"No waterfall: {_why_missing(run)}")
    units = WaterfallUnits.of(whole)
    header = waterfall_header(units)
    rows = []
    begin = 0.0
    for part in whole.parts:
        name, *values = waterfall_row(part, units)
        exact = [with_exact_value(values[0], part.share), with_exact_value(values[1], part.device_seconds), *values[2:]]
        kind = "work" if part.name in PRODUCTIVE else "lost"
        rows.append([element("span", name, title=PARTS.get(part.name)), bar(begin, part.share, kind), *exact])
        begin += part.share
    total = f"{readable(whole.device_seconds / units.time_unit_s)} {units.time_name}, in parts that add up to the whole"
    meanings = [
        f"{part.name.replace('_', ' ')}: {PARTS.get(part.name, '')}; from {part.evidence}" for part in whole.parts
    ]
    return together(
        element("p", _colour_key("work", "work"), " ", _colour_key("lost", "other time"), class_="keys"),
        table(total, [header[0], "of all device time", *header[1:]], rows, (0, 1)),
        sentences(waterfall_notes(whole)),
        collapsed("The parts and their evidence", sentences(meanings)),
    )


def bar(begin: float, share: float, kind: str) -> Markup:
    """Return a bar that begins at one share of its frame and is as wide as another; ``kind``: work, lost or own."""
    begin, share = (min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else 0.0 for ratio in (begin, share))
    width = max(BAR * share, 0.4)
    drawn = element("rect", x=f"{min(BAR * begin, BAR - width):.4g}", width=f"{width:.4g}", y=0, height=10, class_=kind)
    return element("svg", drawn, viewBox=f"0 0 {BAR} 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def _colour_key(kind: str, text: str) -> Markup:
    mark = element("rect", x=0, y=0, width=10, height=10, class_=kind)
    return element("span", element("svg", mark, viewBox="0 0 10 10", class_="key", aria_hidden="true"), text)


def comparison(page: ComparisonPage | str | None, configurations: Configurations | None = None) -> Markup | None:
    """Return the table of configurations and the outcomes of their comparison, or why it is missing.

    ``None`` for one run.
    """
    if page is None:
        return None
    if isinstance(page, str):
        return section("comparison", "Comparison", element("p", f"No comparison: {page}"))
    content: list[Child] = []
    if configurations is not None:
        head, *rows = table_rows(configurations)
        caption = "Configurations: means over their runs, with 95 % intervals"
        content = [table(caption, head, rows, (0,)), sentences(configurations.notes)]
    for other in page.others:
        names = side_lines(page.first, other.side)
        rows = [
            [*cells, element("strong", outcome, class_=outcome.partition(" ")[0])]
            for *cells, outcome in map(metric_cells, other.metrics)
        ]
        content += [
            element("p", [together(name, element("br")) for name in names]),
            table("Means over the runs of each side", HEADER, rows, (0, 3, 4)),
            sentences(note_lines(other)),
        ]
    return section("comparison", "Comparison", *content, sentences(closing_lines(page)))


def facts_of_run(run: RecordedRun) -> Child:
    """Return what ran, and how it was measured."""
    summary = run.summary
    pairs: list[tuple[str, Child]] = [("folder", str(run.folder))]
    if summary is not None:
        pairs += [("status", status_text(summary.status)), *what_ran(summary), *how_measured(summary)]
    command = run.facts.get("command")
    if isinstance(command, list):
        pairs.append(("command", element("code", " ".join(map(str, command)))))
    packages = run.facts.get("packages")
    if isinstance(packages, dict):
        pairs.append(("packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    pairs += [(name, str(run.facts[name])) for name in ("python", "kernel", "launcher") if run.facts.get(name)]
    return facts(pairs)


def metrics(runs: Runs) -> Markup:
    """Return the metrics of all runs, each with its errors."""
    summaries = [run.summary for run in runs if run.summary is not None]
    if not summaries:
        return section("metrics", "Metrics", element("p", "No metrics: there is no summary yet."))
    header, rows = _metric_table(runs, summaries)
    value_columns = range(1, len(header) - 2, 2)  # each is followed by its errors; the last two are unit and base
    caption = f"Metrics of the whole job: {', '.join(run_label(runs, run) for run in runs)}"
    notes = [
        "± are half-widths of 95 % intervals: timing errors average out over time, errors of the sensors' gain do not.",
        "Metrics are run to date, without the warm-up; those with “job” cover the whole wall time.",
        "Rest the pointer on a number for all its digits.",
    ]
    instruments = [_instrument_table(runs, run) for run in runs if run.summary is not None and run.summary.instruments]
    doubts = [text for summary in summaries if summary.audit is not None for text in audit_texts(summary.audit)]
    return section(
        "metrics",
        "Metrics",
        table(caption, header, rows, {*range(len(header))} - {*value_columns}),
        sentences([*notes, *doubts]),
        instruments,
    )


def _instrument_table(runs: Runs, run: RecordedRun) -> Markup:
    instruments = run.summary.instruments if run.summary is not None else {}
    rows: list[list[Child]] = []
    for name, spread in islice(instruments.items(), MAX_SHOWN_NAMES):
        values = (spread.mean, spread.percentiles.get("p50"), spread.percentiles.get("p95"), spread.most)
        cells = ["–" if value is None else with_exact_value(f"{value:.4g}", value) for value in values]
        rows.append([name, spread.unit, f"{spread.count:,}", *cells])
    more = f", {MAX_SHOWN_NAMES} of {len(instruments):,} names" if len(instruments) > MAX_SHOWN_NAMES else ""
    header = ("instrument", "unit", "count", "mean", "median", "95th percentile", "most")
    return table(f"Values of instruments: {run_label(runs, run)}{more}", header, rows, (0, 1))


def _metric_table(runs: Runs, summaries: Sequence[Summary]) -> tuple[list[str], list[list[Child]]]:
    header = ["metric"]
    for number in range(1, len(runs) + 1):
        header += [f"run {number}" if len(runs) > 1 else "value", "errors"]
    header += ["unit", "over"]
    last_values = {tag: value for summary in summaries for tag, value in summary.metrics.items()}
    rows: list[list[Child]] = []
    group = ""
    for tag, entry, base in shown_metrics(last_values):
        if entry is not None and entry.group != group:
            group = entry.group
            rows.append([group])
        name = element("span", tag if entry is None else entry.name, title=entry and entry.help)
        values = [None if run.summary is None else run.summary.metrics.get(tag) for run in runs]
        cells = [cell for value in values for cell in _value_cells(tag, value)]
        rows.append([name, *cells, last_values[tag].unit, base])
    return header, rows


def _value_cells(tag: str, value: Value | None) -> list[Child]:
    if value is None:
        return ["–", ""]
    mark = element("strong", " !", title=value.doubt) if value.doubt else None
    return [
        together(with_exact_value(readable(value.value), value.value), mark),
        element("span", errors_of_metric(tag, value), class_="whole"),
    ]


def not_measured(run: RecordedRun, without_curves: Sequence[str]) -> Iterator[str]:
    """Yield what was not measured, and everything of the folder that was not read."""
    summary = run.summary
    if summary is not None:
        yield from summary.not_measured
        if summary.waterfall is not None:
            yield from summary.waterfall.unknown
        coverage = summary.coverage
        yield (
            f"{coverage.ranks_reporting:,} of {coverage.ranks_expected:,} ranks reported; "
            f"{coverage.gpus_measured:,} of {coverage.gpus_expected:,} GPUs were measured; "
            f"{coverage.reports_lost:,} reports lost, {coverage.reports_late:,} late"
        )
        for sink, count in summary.left_out.items():
            yield f"{count:,} windows are not in {sink}, because it was too slow or its disk was full"
    if without_curves:
        yield f"no window has a value of these charts, which are left out: {', '.join(without_curves)}"
    yield from run.problems
