"""The texts of a comparison: table, Markdown and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from effllm.analysis.comparison import ALPHA, POWER, SAME, STRICT_ALPHA, UNKNOWN, ConditionAnswer, MetricComparison
from effllm.analysis.fairness import Dissimilarity
from effllm.analysis.sides import Side, names_of
from effllm.records.plain_text import one_line
from effllm.views.text.numbers import readable

#: Marks of Markdown and HTML, mentions, and the marks that make an address a link.
_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#!|~$&@]|(?<=\w):(?=//)|(?<=www)\.)")

SCHEMA_VERSION = 1
MAX_SETTINGS = 12  # shown differing settings of a side
MAX_WIDTH = 1000  # in which the width of a table is measured
NARROW_NAME = 20  # letters of the name of a metric in a line of a narrow table
MAX_NAMES = 10  # shown runs that were left out for one reason


class ComparedSide(NamedTuple):
    """One side (the runs of one configuration) against the first side."""

    side: Side
    metrics: Sequence[MetricComparison]
    unfair: Sequence[Dissimilarity]
    settings: Sequence[Dissimilarity]


class ComparisonPage(NamedTuple):
    """All results of a comparison, which rich's console can print."""

    first: Side
    others: Sequence[ComparedSide]
    left_out: Sequence[str]  # "folder: reason" of each run
    answers: Sequence[ConditionAnswer]
    level: float  # of the intervals

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for other in self.others:
            for line in side_lines(self.first, other.side):
                yield Text(line)
            table = _wide_table(other.metrics)
            if Measurement.get(console, options.update(max_width=MAX_WIDTH), table).maximum > options.max_width:
                table = _narrow_table(other.metrics)
            yield table
            for line in note_lines(other):
                yield Text(line)
        for line in closing_lines(self):
            yield Text(line)


def _wide_table(rows: Sequence[MetricComparison]) -> Table:
    table = Table(*HEADER, box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, metric_cells(row)))
    return table


def _narrow_table(rows: Sequence[MetricComparison]) -> Table:
    """Return a table with two lines for each metric, so that no number is cut on a terminal of 80 columns."""
    table = _wide_table([])
    table.padding, table.columns[0].no_wrap, table.columns[0].overflow = (0, 1, 0, 0), False, "fold"
    for row in rows:
        metric, a, b, difference, outcome = metric_cells(row)
        parts = (_in_two_lines(metric), a, b, difference.replace(" (", "\n(", 1), outcome.replace(" ", "\n", 1))
        table.add_row(*map(Text, parts))
    return table


def _in_two_lines(name: str) -> str:
    """Return a name with a line break after the last underscore of its first `NARROW_NAME` letters."""
    end = name.rfind("_", 0, NARROW_NAME) + 1 if len(name) > NARROW_NAME else 0
    return f"{name[:end]}\n{name[end:]}" if end else name


#: Names of the columns of a table of metrics.
HEADER = ("metric", "A", "B", "B - A", "outcome")


def markdown(page: ComparisonPage) -> str:
    """Return the page as Markdown."""
    lines: list[str] = []
    for other in page.others:
        lines += [f"**{markdown_text(line)}**  " for line in side_lines(page.first, other.side)]
        lines += ["", *markdown_table(HEADER, [metric_cells(row) for row in other.metrics]), ""]
        lines += [f"- {markdown_text(line)}" for line in note_lines(other)]
        lines.append("")
    lines += [f"- {markdown_text(line)}" for line in closing_lines(page)]
    return "\n".join(lines)


def document(page: ComparisonPage) -> str:
    """Return the page as JSON: shares are of the value of side A."""
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "interval_level": page.level,
        "a": _side_document(page.first),
        "comparisons": [
            {
                "b": _side_document(other.side),
                "metrics": [row._asdict() for row in other.metrics],
                "unfair": [difference._asdict() for difference in other.unfair],
                "settings": [difference._asdict() for difference in other.settings],
            }
            for other in page.others
        ],
        "left_out": list(map(one_line, page.left_out)),
        "warnings": _warnings(page),
        "conditions": [answer._asdict() for answer in page.answers],
    }
    return json.dumps(fields, indent=1, allow_nan=False)


def _side_document(side: Side) -> dict[str, Any]:
    runs = [{name: run.row.get(name) for name in ("run_id", "folder", "status", "simulated")} for run in side.runs]
    return {"name": side.name, "runs": runs}


def side_lines(a: Side, b: Side) -> list[str]:
    """Return the names of both sides, each with its runs."""
    lines = []
    for letter, side in (("A", a), ("B", b)):
        names = list(names_of(side.runs).values())
        runs = f"{len(names)} runs" if len(names) > 1 else f"1 run, {names[0]}"
        lines.append(f"{letter}: {one_line(side.name)} ({runs})")
    return lines


def note_lines(other: ComparedSide) -> list[str]:
    """Return the evidence, the unfair differences and the differing settings, each as a sentence."""
    unfair = [f"unfair: {diff.name}: A {diff.a}; B {diff.b}" for diff in other.unfair]
    return [*_evidence_lines(other.metrics), *unfair, *_setting_lines(other)]


def metric_cells(row: MetricComparison) -> list[str]:
    """Return the cells of a metric in a table with `HEADER`; a metric of the quantity above it has no outcome."""
    name = row.metric if row.outcome else f"  {row.metric}"
    return [name, readable(row.a), readable(row.b), _difference(row), row.outcome or ""]


def _difference(row: MetricComparison) -> str:
    if row.share is None:
        return ""
    if row.low is None or row.high is None:
        return _percent(row.share)
    return f"{_percent(row.share)} ({_percent_digits(row.low, '+')} to {_percent_digits(row.high, '+')})"


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %" if abs(share) < 1 else f"{_percent_digits(share, '+')} %"


def _percent_digits(share: float, sign: str = "") -> str:
    """Return a share in percent with two digits or more, and without an exponent unless it is absurd."""
    if abs(share) > 1e4:
        return f"{100 * share:{sign}.1e}"
    return f"{100 * share:{sign},.0f}" if abs(share) >= 0.995 else f"{100 * share:{sign}.2g}"


def _evidence_lines(rows: Sequence[MetricComparison]) -> list[str]:
    """Return the evidence in sentences; metrics with the same sentence share a line."""
    metrics_by_sentence: dict[str, list[str]] = {}
    for row in rows:
        metrics_by_sentence.setdefault(_evidence_sentence(row), []).append(row.metric)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in metrics_by_sentence.items() if sentence]


def _evidence_sentence(row: MetricComparison) -> str:
    if row.outcome is None:
        return ""
    if row.outcome == UNKNOWN:
        return f"unknown: {row.reason}"
    parts = [row.reason] if row.reason else []
    if row.detectable_share is not None and (row.is_primary or row.outcome == SAME):
        runs = f"{row.runs_a} runs a side" if row.runs_a == row.runs_b else f"{row.runs_a} and {row.runs_b} runs"
        effect = f"{_percent_digits(row.detectable_share)} %"
        parts.append(f"with {runs} a difference of {effect} would be found in {100 * POWER:.0f} % of comparisons")
    return "; ".join(parts)


def _setting_lines(other: ComparedSide) -> list[str]:
    shown = [f"differs: {one_line(diff.name)}: A {diff.a}; B {diff.b}" for diff in other.settings[:MAX_SETTINGS]]
    num_more = len(other.settings) - len(shown)
    return [*shown, f"{num_more} more settings differ (--json lists them)"] if num_more > 0 else shown


def left_out_lines(left_out: Sequence[str]) -> list[str]:
    """Return a line for each run that was left out; runs with the same reason share a line with their names."""
    folders_by_reason: dict[str, list[str]] = {}
    for line in left_out:
        folder, _, reason = line.partition(": ")
        folders_by_reason.setdefault(reason, []).append(folder)
    lines = []
    for reason, folders in folders_by_reason.items():
        names = ", ".join(Path(folder).name for folder in folders[:MAX_NAMES])
        more = f" and {len(folders) - MAX_NAMES:,} more" if len(folders) > MAX_NAMES else ""
        text = f"{len(folders):,} runs: {reason} ({names}{more})" if len(folders) > 1 else f"{folders[0]}: {reason}"
        lines.append(one_line(text))
    return lines


def closing_lines(page: ComparisonPage) -> list[str]:
    """Return the sentences about the whole comparison."""
    lines = [f"left out: {line}" for line in left_out_lines(page.left_out)]
    lines += _warnings(page)
    lines += [f"--fail-if {row.condition}: {row.answer} for {one_line(row.side)}: {row.reason}" for row in page.answers]
    if any(len(side.runs) > 1 for side in (page.first, *(other.side for other in page.others))):
        lines.append("A and B are geometric means of the runs; a table of configurations has arithmetic means.")
    return [*lines, *_level_sentences(page)]


def _warnings(page: ComparisonPage) -> list[str]:
    sides = (page.first, *(other.side for other in page.others))
    lines = [line for side in sides if (line := _unfinished_campaign_text(side))]
    if any(run.row.get("simulated") for side in sides for run in side.runs):
        lines.append("SIMULATED: the values of simulated devices mean nothing beyond a test")
    return lines


def _unfinished_campaign_text(side: Side) -> str:
    """Return a sentence if a campaign has planned more repeats than a side has; "" if not."""
    repeats = [repeat for run in side.runs if (repeat := run.repeat_and_planned())]
    planned = max((num_planned for _, num_planned in repeats), default=0)
    if len(repeats) >= planned:
        return ""
    return (
        f"{one_line(side.name)} has {len(repeats)} of {planned} planned repeats: a false difference is more frequent "
        "if the comparison is repeated after every run"
    )


def _level_sentences(page: ComparisonPage) -> list[str]:
    """Return sentences about the errors of the outcomes; none for fewer than two tests."""
    tested = [row for other in page.others for row in other.metrics if row.level is not None]
    if len(tested) < 2:
        return []
    interval = f"An interval is for its metric alone, at {100 * page.level:.4g} %."
    if len({row.is_primary for row in tested}) == 1:
        return [f"All {len(tested)} outcomes hold together at {100 * (1 - ALPHA):.4g} %. {interval}"]
    usual, strict = (f"{100 * level / len(page.others):.3g} %" for level in (ALPHA, STRICT_ALPHA))
    return [
        f"Throughput is tested first, at {usual}. The other quantities are tested by Holm, at {usual} if throughput "
        f"differs and at {strict} if not. The probability of any false outcome is at most "
        f"{100 * (ALPHA + STRICT_ALPHA):.4g} %. {interval}",
        "A metric without an outcome is of the same quantity as the metric above it.",
    ]


def markdown_text(text: str) -> str:
    r"""Return a text that Markdown shows as it is: no link, no HTML, no further column, no mention.

    >>> markdown_text("a|b <script>")
    'a\\|b \\<script\\>'
    """
    return _SPECIAL.sub(r"\\\1", one_line(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the columns after the first are aligned to the right."""
    alignments = ["---", *["---:"] * (len(header) - 1)]
    names, *cells = [[markdown_text(cell) for cell in row] for row in [header, *rows]]
    return ["| " + " | ".join(row) + " |" for row in [names, alignments, *cells]]
