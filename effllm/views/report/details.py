"""The later sections of a report: curves, ranks, goodput, stragglers, stalls, events, definitions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from effllm.analysis.recorded_run import MAX_TIMED_RANKS, RankMeans, RecordedRun
from effllm.analysis.run_row import utc
from effllm.metrics import METRICS
from effllm.records.events import KINDS, is_problem
from effllm.records.job import SPREADS, GoodputSummary, Summary
from effllm.records.rank import Event
from effllm.records.verdict import CAUSES, StragglerVerdict
from effllm.store.run_folder import MAX_ROWS
from effllm.views.report.markup import (
    Child,
    Markup,
    collapsed,
    element,
    facts,
    lines,
    section,
    sentences,
    table,
    together,
    with_exact_value,
)
from effllm.views.report.plot import WIDTH, Chart, DrawnLine, RunCurves, legend, number_rows, plot, value_axis
from effllm.views.report.verdicts import bar
from effllm.views.text.numbers import duration, readable
from effllm.views.text.summary import slowest_text

_ROW = 14  # height of a rank in the heat map
_FULL_COLOUR_EXCESS = 0.25  # excess of a step time over the median that has the full colour
MAX_RANK_ROWS = 24
MAX_STRAGGLERS = 32
MAX_LETTERS, MAX_STALL_LETTERS = 400, 2000  # of the text of an event


_ALL_POINTS = (
    "Each point is a window of iterations. Where a chart has more windows than room, the smallest and the largest "
    "value of neighbouring windows are drawn, so that no extreme is lost."
)


def curves(
    anchor: str, title: str, charts: Sequence[tuple[Chart, list[DrawnLine]]], runs: Sequence[RunCurves], offset: int
) -> Markup:
    """Return a section of charts, each with its numbers as a table; ``offset``: number of earlier charts."""
    if not charts:
        return section(anchor, title, element("p", "No curves: no window has been recorded."))
    figures = [_chart_figure(chart, drawn, runs, index) for index, (chart, drawn) in enumerate(charts, offset)]
    note = None if offset else element("p", _ALL_POINTS)  # above the first chart of the page
    return section(anchor, title, note, element("div", figures, class_="figures"))


def _chart_figure(chart: Chart, drawn: list[DrawnLine], runs: Sequence[RunCurves], chart_index: int) -> Markup:
    x_text = "" if chart.x == "iteration" else f"horizontal: {chart.x}"
    axes = ", ".join(filter(None, (chart.unit, x_text, value_axis(drawn, runs).start_note())))
    header = ("line", "smallest", f"at {chart.x}", "largest", f"at {chart.x}", "last")
    return element(
        "figure",
        element("figcaption", element("b", chart.title), " ", axes),
        legend(drawn),
        plot(chart, drawn, runs, chart_index),
        element("p", chart.note, class_="note") if chart.note else None,
        collapsed("Numbers", table(f"{chart.title}, {chart.unit}", header, number_rows(drawn, runs))),
    )


def ranks(run: RecordedRun) -> Child:
    """Return the distribution over ranks."""
    reports = run.ranks
    world_size = run.summary.coverage.ranks_expected if run.summary is not None else len(reports.ranks)
    if not reports.ranks:
        return together(
            _spread_table(run),
            sentences(["No reports of single ranks were recorded.", *_limit_sentences(run, world_size)]),
        )
    has_all = world_size <= MAX_ROWS  # the run folder of a larger job has only the reports of outliers
    order = sorted(reports.ranks.items(), key=lambda item: -((item[1].step_s or 0.0) if has_all else item[1].reports))
    shown = order[:MAX_RANK_ROWS]
    longest_s = max((sums.step_s or 0.0 for _, sums in shown), default=0.0)
    rows = [_rank_row(rank, sums, longest_s) for rank, sums in shown]
    what = "the slowest ranks first" if has_all else "the ranks that were most often an outlier first"
    notes = [
        f"Means over the windows that end in the iterations {reports.first_end_iteration:,} to "
        f"{reports.last_end_iteration:,}.",
        *_limit_sentences(run, world_size),
    ]
    if run.summary is not None and run.summary.last_ranks.by_rank:
        notes.append(f"Slowest: {slowest_text(run.summary)}.")
    return together(
        heat_map(run),
        _spread_table(run),
        table(f"{len(shown):,} of {world_size:,} ranks, {what}", _RANK_HEADER, rows, range(4)),
        sentences(notes),
    )


def heat_map(run: RecordedRun) -> Markup | None:
    """Return by how much each rank takes longer than the median, by window; ``None`` for a single rank or window."""
    times = run.ranks.times
    ranks = sorted({rank for _, by_rank in times.columns for rank in by_rank})
    if len(ranks) < 2 or len(times.columns) < 2:
        return None
    width, y_of = WIDTH / len(times.columns), {rank: _ROW * row for row, rank in enumerate(ranks)}
    cells, largest = [], 0.0
    for column, (end, by_rank) in enumerate(times.columns):
        means_s = {rank: seconds / count for rank, (seconds, count) in by_rank.items() if count}
        median_s = statistics.median(means_s.values()) if means_s else 0.0
        for rank, mean_s in means_s.items():
            excess = max(mean_s / median_s - 1, 0.0) if median_s > 0 else 0.0
            largest = max(largest, excess)
            text = f"rank {rank}, to iteration {end:,}: {1000 * mean_s:,.1f} ms, {100 * excess:.0f} % above the median"
            place = {"x": f"{column * width:.5g}", "y": y_of[rank], "width": f"{width - 1:.5g}", "height": _ROW - 1}
            colour = {"class_": "lost", "fill_opacity": f"{max(min(excess / _FULL_COLOUR_EXCESS, 1.0), 0.04):.2g}"}
            cells.append(element("rect", element("title", text), **place, **colour))
    what = "own time, from the start of a step to the first wait for other ranks" if times.has_own else "step time"
    limit = f" The first {MAX_TIMED_RANKS} ranks." if len(ranks) == MAX_TIMED_RANKS else ""
    label = f"Each rank's {what}, against the median of the ranks, over the windows"
    text = (
        f"{label}: at most {100 * largest:.0f} % longer; the full colour is {100 * _FULL_COLOUR_EXCESS:.0f} %. "
        f"Rank {ranks[0]} is at the top, rank {ranks[-1]} at the bottom.{limit}"
    )
    size = f"0 0 {WIDTH} {len(ranks) * _ROW}"
    drawing = element("svg", cells, viewBox=size, preserveAspectRatio="none", role="img", aria_label=label)
    return together(element("p", text), element("div", drawing, class_="heat"))


def _spread_table(run: RecordedRun) -> Markup | None:
    rows = []
    for name, spread in run.curves.last_spread.items():
        values = (spread.least, spread.p5, spread.median, spread.p95, spread.most)
        meaning = SPREADS.get(name, name)
        rows.append([meaning, f"{spread.count:,}", *(with_exact_value(readable(value), value) for value in values)])
    header = ("value", "number", "least", "5th percentile", "median", "95th percentile", "most")
    return table("Distribution over all ranks or GPUs in the last window", header, rows) if rows else None


def _limit_sentences(run: RecordedRun, world_size: int) -> Iterator[str]:
    if world_size > MAX_ROWS:
        yield (
            f"Of a job above {MAX_ROWS} ranks, only the reports of outliers are kept: the means of a rank are over its "
            "windows as an outlier. The percentiles in the curves are over all ranks."
        )
    if run.ranks.unread_bytes:
        yield f"{run.ranks.unread_bytes / 2**20:,.0f} MiB of older rank reports were not read."


_RANK_HEADER = (
    "rank", "host", "device", "mean step", "step, s", "data wait, %", "power, W", "utilization, %", "peak memory, GB",
    "reports",
)  # fmt: skip


def _rank_row(rank: int, sums: RankMeans, longest_s: float) -> list[Child]:
    def cell(value: float | None, factor: float = 1.0) -> Child:
        return "–" if value is None else with_exact_value(readable(value * factor), value * factor)

    return [
        str(rank),
        sums.host or "–",
        sums.device or "–",
        bar(0.0, sums.step_s / longest_s, "own") if sums.step_s and longest_s else None,
        cell(sums.step_s),
        cell(sums.wait_ratio, 100),
        cell(sums.power_w),
        cell(sums.utilization, 100),
        cell(sums.memory_peak_bytes, 1e-9),
        f"{sums.reports:,}",
    ]


def goodput(run: RecordedRun) -> Child:
    """Return the elapsed time and the energy by class, and the attempts."""
    summary = run.summary.goodput if run.summary is not None else None
    if summary is None:
        return element("p", "Not recorded.")
    ratio = "unknown" if summary.ratio is None else f"{100 * summary.ratio:.1f} %"
    total_j = sum(value for value in summary.joules.values() if value)
    rows = [
        [
            name.replace("_", " "),
            with_exact_value(readable(seconds), seconds),
            _share_text(seconds, summary.elapsed_s),
            *_joules_cells(summary, name, total_j),
        ]
        for name, seconds in sorted(summary.seconds.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    caption = f"Goodput {ratio} of {duration(summary.elapsed_s)}: kept iterations and generation"
    header = ("class", "seconds (mean over ranks)", "of the time", "J (all ranks)", "of the energy")
    return together(table(caption, header, rows), _attempts_table(summary))


def _joules_cells(summary: GoodputSummary, name: str, total_j: float) -> list[Child]:
    joules = summary.joules.get(name)
    return ["–", ""] if joules is None else [with_exact_value(readable(joules), joules), _share_text(joules, total_j)]


def _share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""


def _attempts_table(summary: GoodputSummary) -> Markup | None:
    if len(summary.attempts) < 2:
        return None
    header = ("attempt", "status", "start", "elapsed", "gap before", "ranks", "iterations", "repeated later")
    rows = [
        [str(row.attempt), row.status, utc_text(row.start_time_s), duration(row.elapsed_s), duration(row.gap_before_s),
         f"{row.world_size:,}", f"{row.iterations:,}",
         "unknown" if row.redone_iterations is None else f"{row.redone_iterations:,}"]
        for row in summary.attempts[-MAX_RANK_ROWS:]
    ]  # fmt: skip
    return table(f"The last {len(rows)} of {len(summary.attempts):,} attempts", header, rows, range(3))


def stragglers(run: RecordedRun) -> Child:
    """Return the ranks that delayed other ranks."""
    verdicts = run.summary.stragglers if run.summary is not None else ()
    if not verdicts:
        compared = run.summary.last_ranks.iterations if run.summary is not None else 0.0
        text = f"No slow rank was found; own times of ranks were compared in {compared:,.0f} iterations."
        return element("p", text if compared else "Not looked for: no loop of the ranks has a sync point.")
    rows = [_straggler_row(verdict) for verdict in verdicts[:MAX_STRAGGLERS]]
    caption = f"{len(rows)} of {len(verdicts):,} stragglers, the costliest first"
    header = ("rank", "host", "reason", "evidence", "since iteration", "slower by", "cost, GPU-s", "cost, J")
    return table(caption, header, rows, range(4))


def _straggler_row(slow: StragglerVerdict) -> list[Child]:
    names = ", ".join(map(str, slow.ranks[:8])) + (f" and {len(slow.ranks) - 8} more" if len(slow.ranks) > 8 else "")
    joules = "–" if slow.joules is None else with_exact_value(readable(slow.joules), slow.joules)
    cost = with_exact_value(readable(slow.gpu_seconds), slow.gpu_seconds)
    since, slower = f"{slow.since_iteration:,}", f"{100 * slow.slowdown:.1f} %"
    return [names, slow.host, slow.why, slow.evidence, since, slower, cost, joules]


def stalls(run: RecordedRun) -> Child:
    """Return the stalls with the stacks of the stalled ranks."""
    shown = list(run.events.stalls)
    if not shown and not run.stacks:
        return element("p", "No stall was recorded.")
    more = run.num_stack_files - len(run.stacks)
    return together(
        _event_table("Stalls, oldest first", shown, MAX_STALL_LETTERS) if shown else None,
        [
            collapsed(f"Stacks: {name}", element("pre", lines(text.splitlines()), tabindex=0))
            for name, text in run.stacks
        ],
        element("p", f"{more:,} older stack files are in the run folder.") if more > 0 else None,
    )


def events(run: RecordedRun) -> Child:
    """Return the newest events and the number of each kind."""
    counts = run.summary.events if run.summary is not None and run.summary.events else run.events.counts
    if not counts:
        return element("p", "No events were recorded.")
    shown = run.events.shown
    left_out = sum(counts.values()) - sum(event.count for event in shown)
    kinds = [
        [kind, f"{count:,}", KINDS[kind].help if kind in KINDS else "not a known kind"]
        for kind, count in sorted(counts.items(), key=lambda item: (not is_problem(item[0]), -item[1]))
    ]
    notes = []
    if left_out > 0:
        notes.append(
            f"{left_out:,} more events are not listed: the list has the newest problems and the newest others."
        )
    if run.events.unread_bytes:
        notes.append(f"{run.events.unread_bytes / 2**20:,.0f} MiB of older events were not read.")
    return together(
        _event_table(f"{len(shown):,} events, oldest first; problems are bold", shown, MAX_LETTERS),
        sentences(notes),
        collapsed("Number of events by kind", table("Problems first", ("kind", "events", "meaning"), kinds, (0, 2))),
    )


def _event_table(caption: str, shown: Sequence[Event], letters: int) -> Markup:
    rows = [
        [
            element("span", utc_text(event.time_s), class_="whole"),
            element("strong", event.kind) if is_problem(event.kind) else event.kind,
            "" if event.rank is None else str(event.rank),
            (event.text[:letters] + ("…" if len(event.text) > letters else ""))
            + (f" ({event.count:,} times)" if event.count > 1 else ""),
        ]
        for event in shown
    ]
    return table(caption, ("time (UTC)", "kind", "rank", "text"), rows, texts=range(4))


def utc_text(time_s: float) -> str:
    """Return a unix time as date and time in UTC; a time that is no date is shown as a number."""
    return (utc(time_s) or f"{time_s:g} s")[: len("2026-01-01 00:00:00")]


def definitions(summaries: Sequence[Summary]) -> Markup:
    """Return the meaning of the metrics and of the verdicts' causes."""
    names = {tag.rpartition("/")[2] for summary in summaries for tag in summary.metrics}
    metrics = [(entry.name, f"{entry.help} Unit: {entry.unit}.") for entry in METRICS.values() if entry.name in names]
    return section(
        "definitions",
        "Definitions",
        collapsed("Metrics", facts(metrics)),
        collapsed("Causes of verdicts", facts((name.replace("_", " "), text) for name, text in CAUSES.items())),
    )
