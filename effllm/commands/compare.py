"""``effllm compare``: which of two or more configurations is better."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from effllm.analysis.compared_metrics import compared_metrics
from effllm.analysis.comparison import ALPHA, answer, compare, exit_status, parse_condition
from effllm.analysis.configurations import configurations
from effllm.analysis.fairness import settings, unfair
from effllm.analysis.load import load_errors
from effllm.analysis.run_folders import NoRun
from effllm.analysis.sides import find_groups, find_sides
from effllm.commands.output import complain, form_of
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import this_process
from effllm.views import configurations_text
from effllm.views.comparison_text import Compared, ComparisonPage, document, grouped, markdown

WIDTH = 110


def main(
    as_json: bool, as_markdown: bool, as_latex: bool = False, as_csv: bool = False, paper: bool = False, **options: Any
) -> int:
    """Print a comparison; return the exit status. The other options are those of `comparison_page`."""
    form = form_of(json=as_json, markdown=as_markdown, latex=as_latex, csv=as_csv)
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        if paper or form in ("latex", "csv"):
            return _print_table(form, console, is_paper=paper, **options)
        page = comparison_page(**options)
        table = None
        if options.get("by") or len(page.others) > 1:
            table = configurations([page.first, *(one.side for one in page.others)], is_paper=False)
    except NoRun as error:
        return complain("compare", str(error), 1)
    except comparison_errors() as error:
        return complain("compare", str(error), 2)
    if form == "json":
        print(document(page))
    elif form == "markdown":
        print(*(configurations_text.markdown(one) for one in filter(None, [table])), markdown(page), sep="\n\n")
    else:
        if table is not None and table.metrics:
            configurations_text.print_table(table, console)
            console.print()
        console.print(page)
    return exit_status(page.answers)


def _print_table(form: str, console: Console, *, is_paper: bool, **options: Any) -> int:
    """Print only the table of configurations; return the exit status."""
    if form == "json" or options.get("fail_if") or options.get("baseline"):
        raise ValueError(
            "--paper, --latex and --csv print a table without outcomes, and have no --json, --fail-if, --baseline"
        )
    _require_scipy()
    runs_folder = options.get("runs") or read_config(this_process()).run_dir
    sides, left_out = find_groups(options["sides"], options.get("by", ""), runs_folder)
    table = configurations(sides, is_paper=is_paper, names=options.get("metric") or ())
    if form == "text":
        configurations_text.print_table(table, console)
    else:
        texts = configurations_text
        print({"csv": texts.csv_text, "latex": texts.latex, "markdown": texts.markdown}[form](table))
    for line in grouped(left_out):
        print(f"left out: {line}", file=sys.stderr)
    return 0


def _require_scipy() -> None:
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        raise ImportError("a comparison needs SciPy: pip install 'effllm[analysis]'") from None


def comparison_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors of `comparison_page`; each message is meant for users."""
    return (*load_errors(), ConfigError, ValueError)


def comparison_page(
    sides: Sequence[str],
    by: str = "",
    baseline: str = "",
    metric: Sequence[str] | None = None,
    fail_if: Sequence[str] | None = None,
    runs: str = "",
) -> ComparisonPage:
    """Return all results of a comparison.

    Raises:
        UnreadableRun: a path or a tag has no run, or the runs do not make two sides.
        ConfigError: a setting is invalid.
        ImportError: SciPy is not installed.
        ValueError: an argument is wrong.
    """
    _require_scipy()
    conditions = [parse_condition(text) for text in fail_if or ()]
    names = [*(metric or ()), *(one.metric for one in conditions)]
    metrics = compared_metrics(names)
    runs_folder = runs or read_config(this_process()).run_dir
    (first, *others), left_out = find_sides(sides, by, runs_folder, baseline)
    # All answers together are right at the level of the comparison.
    alpha = ALPHA / max(len(conditions) * len(others), 1)
    found = []
    for side in others:
        rows = compare(first, side, metrics, are_primary=bool(names), alpha=alpha, comparisons=len(others))
        found.append(Compared(side, rows, unfair(first, side), settings(first, side)))
    answers = [answer(condition, one.side.name, one.metrics) for one in found for condition in conditions]
    return ComparisonPage(first, found, left_out, answers, 1 - alpha)
