"""Write one HTML file about one or several runs.

The file begins with the verdict and the parts of the device time. It has the metrics with their errors, curves, the
ranks, stragglers, stalls with stacks, events, and what was not measured. Several runs are side by side, with the
outcomes of effllm compare. The file has at most 1.5 MB, needs no network, and shows its numbers without scripts.

\b
Examples:
  effllm report efficientllm_runs/20260101-120000-1a2b3c4d
  effllm report RUN -o /tmp/run.html
  effllm report runs/base runs/new -o base-and-new.html
  effllm report efficientllm_runs/my-campaign   # its configurations

Exit status: 0 written, 1 no run, or the file cannot be written, 2 wrong use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from effllm.analysis.configurations import configurations
from effllm.analysis.run_folders import UnreadableRun, find_runs
from effllm.analysis.sides import CONFIGURATION, find_configurations
from effllm.commands.compare import comparison_errors, comparison_page
from effllm.commands.output import complain
from effllm.config.settings import read_config
from effllm.config.switches import process_environ
from effllm.records.plain_text import one_line
from effllm.store.own_files import replace_file
from effllm.views.report.page import MAX_RUNS, ComparedRuns, ReportTooLarge, read_runs, report_html
from effllm.views.text.numbers import count_text


def main(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run folders, folders of runs, or globs.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The file. [default: report-RUN.html]")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Compare configurations: a tag or a setting. [default: the tag config]")
    ] = "",
) -> int:
    """Write the report of runs; return the exit status."""
    try:
        all_runs = find_runs(runs)
        if len(all_runs) > MAX_RUNS:
            too_many = f"{len(all_runs):,} runs were found, and a report has at most {MAX_RUNS}: name fewer runs"
            return complain("report", too_many, 1)
        folders = [run.folder for run in all_runs]
        # Each argument is a side; if there is only one, such as a campaign, each of its runs is a side.
        compared = _comparison(list(runs) if len(runs) > 1 else list(map(str, folders)), by, len(folders))
        read = read_runs(folders)
        page = report_html(read, compared).encode()
        path = output or Path(f"report-{read[0].folder.name if len(read) == 1 else f'{len(read)}-runs'}.html")
        replace_file(path, page, durable=False)
    except (UnreadableRun, ReportTooLarge) as error:
        return complain("report", str(error), 1)
    except OSError as error:
        return complain("report", f"{error.filename or output}: {error.strerror or error}", 1)
    for run in read:
        for problem in run.problems:
            complain("report", f"{run.folder}: {problem}")
    print(f"{one_line(str(path))}: {len(page) / 1e6:.2f} MB, {count_text(len(read), 'run')}")
    return 0


def _comparison(arguments: list[str], by: str, num_runs: int) -> ComparedRuns:
    """Return the comparison of several runs, or of configurations if a run has the tag ``config``."""
    if num_runs < 2:
        return ComparedRuns()
    try:
        sides, _ = find_configurations(arguments, by, read_config(process_environ()).run_dir)
        names = {run.folder: side.name for side in sides for run in side.runs}
        if len(names) == len(sides):  # each configuration has one run
            return ComparedRuns(comparison_page(arguments))
        table = configurations(sides, is_paper=False)
        return ComparedRuns(comparison_page(arguments, by=by or CONFIGURATION), table, names)
    except comparison_errors() as error:
        return ComparedRuns(str(error))
