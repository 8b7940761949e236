"""``effllm report``: one HTML file about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from effllm.analysis.run_folders import UnreadableRun, find_runs
from effllm.commands.compare import comparison_errors, comparison_page
from effllm.commands.output import complain
from effllm.records.plain_text import one_line
from effllm.store.own_files import replace_file
from effllm.views.comparison_text import ComparisonPage
from effllm.views.report.page import MAX_RUNS, ReportTooLarge, read_runs, report_html


def main(runs: Sequence[str], output: Path | None) -> int:
    """Write the report of runs; return the exit status."""
    try:
        found = find_runs(runs)
        if len(found) > MAX_RUNS:
            too_many = f"{len(found):,} runs were found, and a report has at most {MAX_RUNS}: name fewer runs"
            return complain("report", too_many, 1)
        folders = [run.folder for run in found]
        comparison = _comparison(list(runs) if len(runs) > 1 else list(map(str, folders)), len(folders))
        read = read_runs(folders)
        page = report_html(read, comparison).encode()
        path = output or Path(f"report-{read[0].folder.name if len(read) == 1 else f'{len(read)}-runs'}.html")
        replace_file(path, page, durable=False)
    except (UnreadableRun, ReportTooLarge) as error:
        return complain("report", str(error), 1)
    except OSError as error:
        return complain("report", f"{error.filename or output}: {error.strerror or error}", 1)
    for run in read:
        for problem in run.problems:
            complain("report", f"{run.folder}: {problem}")
    print(f"{one_line(str(path))}: {len(page) / 1e6:.2f} MB, {len(read)} run{'s' * (len(read) > 1)}")
    return 0


def _comparison(sides: list[str], count: int) -> ComparisonPage | str | None:
    """Return the comparison of several runs, or why it is missing; ``None`` for one run."""
    if count < 2:
        return None
    try:
        return comparison_page(sides)
    except comparison_errors() as error:
        return str(error)
