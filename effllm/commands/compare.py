"""``effllm compare``: which of two or more configurations is better."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from effllm.analysis.compared_metrics import ComparedMetric, compared_metrics
from effllm.analysis.comparison import EarlierRuns, compare
from effllm.analysis.conditions import answer, exit_status, parse_condition
from effllm.analysis.difference import ALPHA
from effllm.analysis.earlier_runs import earlier_runs, runs_at, runs_beside
from effllm.analysis.fairness import settings, unfair
from effllm.analysis.inside import compare_inside
from effllm.analysis.load import load_errors
from effllm.analysis.run_folders import UnreadableRun, find_runs
from effllm.analysis.sides import find_sides, read_runs
from effllm.commands.progress import ReadingProgress
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import this_process
from effllm.records.plain_text import one_line
from effllm.views.comparison_text import Compared, ComparisonPage, ComparisonScreen, document, markdown

WIDTH = 110


class CompareRequest(NamedTuple):
    """The arguments of the command."""

    sides: Sequence[str]
    by: str
    baseline: str
    metrics: Sequence[str]
    conditions: Sequence[str]
    ledger: str
    runs: str
    inside: str
    form: str  # text, markdown or json


def main(request: CompareRequest) -> int:
    """Print a comparison; return the exit status."""
    try:
        page = comparison_page(request)
    except comparison_errors() as error:
        return fail(str(error))
    if request.form == "json":
        print(document(page))
    elif request.form == "markdown":
        print(markdown(page))
    else:
        console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else WIDTH)
        console.print(ComparisonScreen(page))
    return exit_status(page.answers)


def comparison_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors of `comparison_page`; each message is meant for users."""
    return (*load_errors(), ConfigError, ValueError)


def fail(line: str) -> int:
    print(f"effllm compare: {one_line(line)}", file=sys.stderr)
    return 2


def comparison_page(request: CompareRequest) -> ComparisonPage:
    """Return all results of a comparison.

    Raises:
        UnreadableRun: a path or a tag has no run, or the runs do not make two sides.
        ConfigError: a setting is invalid.
        ImportError: SciPy is not installed.
        ValueError: an argument is wrong.
    """
    try:
        import scipy.special  # noqa: F401
    except ImportError:
        raise ImportError("a comparison needs SciPy: pip install 'effllm[analysis]'") from None
    conditions = [parse_condition(text) for text in request.conditions]
    # Metrics of conditions are named in advance: with conditions alone, only these metrics are in Holm's correction.
    names = dict.fromkeys([*request.metrics, *(one.metric for one in conditions)])
    metrics = compared_metrics(list(names))
    if request.inside:
        return _inside(request, metrics)
    sides, left_out = find_sides(
        request.sides, request.by, request.runs or read_config(this_process()).run_dir, request.baseline
    )
    if request.ledger == "none":
        ledger = EarlierRuns([])
    else:
        earlier = runs_at(Path(request.ledger)) if request.ledger else runs_beside(sides)
        ledger = EarlierRuns(earlier_runs(earlier, sides, ReadingProgress()))
    # All answers together are right at the level of the comparison.
    alpha = ALPHA / max(len(conditions) * (len(sides) - 1), 1)
    found = compare(sides, metrics, ledger, alpha)
    others = [Compared(side, rows, unfair(sides[0], side), settings(sides[0], side)) for side, rows in found]
    answers = [answer(condition, one.side.name, one.metrics) for one in others for condition in conditions]
    return ComparisonPage(sides[0], others, left_out, answers, 1 - alpha)


def _inside(request: CompareRequest, metrics: list[ComparedMetric]) -> ComparisonPage:
    left_out: list[str] = []
    runs = read_runs(find_runs(list(request.sides)), left_out)
    if len(runs) != 1 or request.by or request.conditions:
        raise UnreadableRun("--inside needs one run, and neither --by nor --fail-if")
    first, second, rows = compare_inside(runs[0], request.inside, metrics)
    return ComparisonPage(first, [Compared(second, rows, [], [])], left_out, [], 1 - ALPHA / max(len(rows), 1))
