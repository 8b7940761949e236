"""The page of a report: one file without access to a network, of limited size."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm import __version__
from effllm.analysis.configurations import Configurations
from effllm.analysis.recorded_run import RecordedRun
from effllm.records.job import Summary
from effllm.views.comparison_text import ComparisonPage
from effllm.views.report import details, verdicts
from effllm.views.report.host_time import host_time
from effllm.views.report.markup import Child, Markup, element, sentences, together
from effllm.views.report.plot import CHARTS, TAGS, RunCurves, drawn_charts, json_curves, x_range
from effllm.views.text.summary import status_text

SCHEMA_VERSION = 3
MAX_BYTES = 1_500_000
MAX_RUNS = 8
MAX_BUCKETS, MIN_BUCKETS = 400, 40  # of a curve: of each bucket of windows two points are drawn
#: Size of all curves, and of the two points of a bucket, as a path and as data.
_CURVE_BYTES, _BUCKET_BYTES = 800_000, 50
MAX_EVENTS, MAX_STACKS = 150, 8  # in one report
MAX_EMBEDDED = 64  # entries of a list of the embedded summary


class ReportTooLarge(Exception):
    """The runs do not fit into one report; the message is one sentence."""


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read run folders with all curves of a report; the runs share the room for events and stacks."""
    count = len(folders)
    return [RecordedRun(folder, TAGS, MAX_EVENTS // count, max(MAX_STACKS // count, 1)) for folder in folders]


class ComparedRuns(NamedTuple):
    """The comparison of several runs."""

    page: ComparisonPage | str | None = None  # or why it is missing
    table: Configurations | None = None
    sides: Mapping[Path, str] = {}  # folder of a run -> its configuration, if one has several runs


def report_html(runs: Sequence[RecordedRun], compared: ComparedRuns) -> str:
    """Return the page of at most `MAX_BYTES` in UTF-8; `ReportTooLarge` if the texts of the runs alone are larger."""
    num_curves = sum(curve.count > 0 for run in runs for curve in run.curves.curves.values())
    buckets = min(_CURVE_BYTES // (_BUCKET_BYTES * max(num_curves, 1)), MAX_BUCKETS)
    while True:
        page = _page(runs, compared, max(buckets, MIN_BUCKETS))
        if len(page.encode()) <= MAX_BYTES:
            return page
        if buckets <= MIN_BUCKETS:
            raise ReportTooLarge(f"the report would be larger than {MAX_BYTES / 1e6:g} MB: name fewer runs")
        buckets //= 2


def _page(runs: Sequence[RecordedRun], compared: ComparedRuns, buckets: int) -> str:
    sides = list(dict.fromkeys(compared.sides.values()))
    curves = []
    for number, run in enumerate(runs):
        side = compared.sides.get(run.folder)
        name, style = (verdicts.run_label(runs, run), number) if side is None else (side, sides.index(side))
        curves.append(RunCurves(name, {tag: curve.thinned(buckets) for tag, curve in run.curves.curves.items()}, style))
    first, more = (list(drawn_charts(charts, curves)) for charts in (CHARTS.first, CHARTS.more))
    empty_charts = [chart.title for chart, lines in (*first, *more) if not lines]
    first_charts, more_charts = ([(chart, lines) for chart, lines in group if lines] for group in (first, more))
    charts = [*first_charts, *more_charts]
    summaries = [run.summary for run in runs if run.summary is not None]
    of_runs = functools.partial(verdicts.section_of_runs, runs)
    # The keys are the names in the navigation, and in lower case the anchors.
    sections = {
        "Verdict": of_runs("verdict", "Verdict", verdicts.verdict),
        "Comparison": verdicts.comparison(compared.page, compared.table),
        "Curves": details.curves("curves", "Curves over the iterations", first_charts, curves, 0),
        "Waterfall": of_runs("waterfall", "Where the device time went", verdicts.waterfall),
        "Host": of_runs("host", "Where the host was", host_time),
        "Ranks": of_runs("ranks", "Ranks", details.ranks),
        "Devices": details.curves("devices", "Steps and devices", more_charts, curves, len(first_charts)),
        "Stragglers": of_runs("stragglers", "Stragglers", details.stragglers),
        "Time and energy": of_runs("time-and-energy", "Time and energy by class", details.goodput),
        "Metrics": verdicts.metrics(runs),
        "What ran": of_runs("what-ran", "What ran", verdicts.facts_of_run),
        "Stalls": of_runs("stalls", "Stalls", details.stalls),
        "Events": of_runs("events", "Events", details.events),
        "Not measured": of_runs(
            "not-measured", "Not measured, and why", lambda run: sentences(verdicts.not_measured(run, empty_charts))
        ),
        "Definitions": details.definitions(summaries),
    }
    links = [
        element("li", element("a", name, href=f"#{name.lower().replace(' ', '-')}"))
        for name, content in sections.items()
        if content is not None
    ]
    navigation = element("nav", element("ul", links), aria_label="Sections")
    shown_tags = {line.tag for _, lines in charts for line in lines}
    data = {
        "schema_version": SCHEMA_VERSION,
        "effllm": __version__,
        "made_time_s": time.time(),
        "charts": [
            {
                "unit": chart.unit,
                "over": chart.x,
                "x": x_range(lines, curves),
                "lines": [row._asdict() for row in lines],
            }
            for chart, lines in charts
        ],
        "runs": [
            {"summary": _shortened(run.summary), "curves": {tag: xy for tag, xy in by_tag.items() if tag in shown_tags}}
            for run, by_tag in zip(runs, json_curves(curves), strict=True)
        ],
    }
    body = together(_header(runs), navigation, element("main", sections.values(), id="main"))
    return _html_document(runs, body, data)


def _shortened(summary: Summary | None) -> Summary | None:
    """Return a summary without the energy of very many devices, and with the first entries of its longest lists."""
    if summary is None:
        return None
    energy = summary.energy
    if len(energy.by_device) > MAX_EMBEDDED:
        energy = msgspec.structs.replace(energy, by_device={}, error_by_device={})
    return msgspec.structs.replace(
        summary,
        energy=energy,
        stragglers=summary.stragglers[:MAX_EMBEDDED],
        instruments=dict(list(summary.instruments.items())[:MAX_EMBEDDED]),
    )


def _header(runs: Sequence[RecordedRun]) -> Markup:
    notes: list[Child] = []
    simulated = [run.name for run in runs if run.is_simulated]
    if simulated:
        names = "" if len(simulated) == len(runs) else f" ({', '.join(simulated)})"
        text = f"SIMULATED{names}: no hardware was measured; these numbers mean nothing beyond a test."
        notes.append(element("p", element("strong", text), class_="banner"))
    for run in runs:
        if run.summary is not None and not run.summary.is_over:
            state = "continues" if run.continues else "has not ended, and its summary is old: it may have been killed"
            updated = details.utc_text(run.summary.updated_time_s)
            notes.append(element("p", f"{run.name} {state}; its summary is of {updated} UTC.", class_="banner"))
    made_by = f"Made by effllm {__version__} on {details.utc_text(time.time())} UTC."
    return element("header", element("h1", _title(runs)), together(*notes), element("p", made_by, class_="note"))


def _title(runs: Sequence[RecordedRun]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    [run] = runs
    status = f", {status_text(run.summary.status)}" if run.summary is not None else ""
    return f"Run {run.name}{status}"


def _html_document(runs: Sequence[RecordedRun], body: Markup, data: Any) -> str:
    here = files("effllm.views.report")
    style, script = (Markup((here / f"report.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{_title(runs)} · effllm"),
        element("style", style),
    )
    scripts = together(
        element("script", _embedded_json(data), type="application/json", id="effllm-data"), element("script", script)
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body, scripts), lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded_json(data: Any) -> Markup:
    """Return JSON of printable ASCII letters that contains no tag and no entity."""
    return Markup(_SPECIAL.sub(_json_escape, msgspec.json.encode(data).decode()))


_SPECIAL = re.compile(r"[<>&]|[^\x20-\x7e]")


def _json_escape(letter: re.Match[str]) -> str:
    units = letter[0].encode("utf-16-be")
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True))
