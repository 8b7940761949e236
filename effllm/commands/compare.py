"""Compare configurations: better, worse, the same, or unknown.

The unit is the run: windows of one run share its node, board and temperature. The values of the runs are compared
by Welch's test. With one run a side, the outcome is "unknown". Throughput (tokens/s, or what was measured instead)
is tested first at 5 %, then the other quantities with Holm's correction. A metric that is named with --metric is
tested alone. The needed packages are in the extra analysis.

Differences that make a comparison unfair are listed: hardware, boards, driver, power limit and profile, sequence
length, batch, precision, kind of parameters, coverage, warm-up, length and clock.

\b
Examples:
  effllm compare runs/base runs/new             # one or several runs a side
  effllm compare 'runs/base-*' 'runs/new-*' --metric joules_per_token
  effllm compare lr=1e-4 lr=3e-4                # tags, EFFICIENTLLM_TAGS
  effllm compare runs --by git_commit --markdown
  effllm compare main new --fail-if 'joules_per_token > +2%'
  effllm compare A B --json | jq '.comparisons[].metrics[].outcome'
  effllm compare runs --by config --latex       # means with 95 % intervals
  effllm compare runs --paper                   # AMU to AEC, and the score

Exit status: 0 compared, and no condition is true; 1 a condition is true, or no runs; 2 wrong use; 3 no condition is
true, and one is unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from effllm.analysis.compared_metrics import compared_metrics
from effllm.analysis.comparison import ALPHA, answer_to, compare, exit_status, parse_condition
from effllm.analysis.configurations import configurations
from effllm.analysis.fairness import setting_differences, unfair_differences
from effllm.analysis.load import load_errors
from effllm.analysis.run_folders import NoRun
from effllm.analysis.sides import find_configurations, find_sides
from effllm.commands.output import complain, form_of
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.views import configurations_text
from effllm.views.comparison_text import ComparedSide, ComparisonPage, document, left_out_lines, markdown

WIDTH = 110


def main(
    sides: Annotated[
        list[str],
        typer.Argument(metavar="A B...", help="Sides: run folders, folders of runs, globs or tags. A is first."),
    ],
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Make a side of all runs with the same tag, identity or fact KEY.")
    ] = "",
    baseline: Annotated[str, typer.Option(metavar="SIDE", help="Name of side A. [default: the first]")] = "",
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare only this metric; can be repeated.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Exit status 1 if true, 3 if unknown; only its metric is compared."),
    ] = None,
    runs: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder in which tags are searched. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print the table of configurations for LaTeX.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table of configurations with all digits.")] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print the table of the EfficientLLM paper, with its score.")
    ] = False,
) -> int:
    """Print a comparison, or only the table of configurations; return the exit status."""
    form = form_of(json=as_json, markdown=as_markdown, latex=as_latex, csv=as_csv)
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        if paper or form in ("latex", "csv"):
            if form == "json" or fail_if or baseline:
                raise ValueError(
                    "--paper, --latex and --csv print a table without outcomes, and have no --json, --fail-if, "
                    "--baseline"
                )
            return _print_configurations(form, console, sides, by, metric or (), runs, is_paper=paper)
        page = comparison_page(sides, by, baseline, metric, fail_if, runs)
        table = None
        if by or len(page.others) > 1:
            table = configurations([page.first, *(other.side for other in page.others)], is_paper=False)
    except NoRun as error:
        return complain("compare", str(error), 1)
    except comparison_errors() as error:
        return complain("compare", str(error), 2)
    if form == "json":
        print(document(page))
    elif form == "markdown":
        tables = [] if table is None else [configurations_text.markdown(table)]
        print(*tables, markdown(page), sep="\n\n")
    else:
        if table is not None and table.metrics:
            configurations_text.print_table(table, console)
            console.print()
        console.print(page)
    return exit_status(page.answers)


def _print_configurations(
    form: str, console: Console, runs: Sequence[str], by: str, metrics: Sequence[str], folder: str, *, is_paper: bool
) -> int:
    _require_scipy()
    sides, left_out = find_configurations(runs, by, folder or read_config(process_environ()).run_dir)
    table = configurations(sides, is_paper=is_paper, names=metrics)
    if form == "text":
        configurations_text.print_table(table, console)
    else:
        texts = configurations_text
        print({"csv": texts.csv_text, "latex": texts.latex, "markdown": texts.markdown}[form](table))
    for line in left_out_lines(left_out):
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
    """Return all results of a comparison."""
    _require_scipy()
    conditions = [parse_condition(text) for text in fail_if or ()]
    names = [*(metric or ()), *(condition.metric for condition in conditions)]
    metrics = compared_metrics(names)
    runs_folder = runs or read_config(process_environ()).run_dir
    (first, *others), left_out = find_sides(sides, by, runs_folder, baseline)
    # Bonferroni: the probability that any of the answers is wrong is at most ALPHA.
    alpha = ALPHA / max(len(conditions) * len(others), 1)
    compared = []
    for side in others:
        rows = compare(first, side, metrics, are_primary=bool(names), alpha=alpha, comparisons=len(others))
        compared.append(ComparedSide(side, rows, unfair_differences(first, side), setting_differences(first, side)))
    answers = [answer_to(condition, other.side.name, other.metrics) for other in compared for condition in conditions]
    return ComparisonPage(first, compared, left_out, answers, 1 - alpha)
