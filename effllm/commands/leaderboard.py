"""``effllm leaderboard``: the table of the EfficientLLM paper for one's own runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from effllm.analysis.leaderboard import boards, weights_of
from effllm.analysis.sides import find_groups
from effllm.commands.compare import comparison_errors
from effllm.commands.output import complain, form_of
from effllm.config.settings import read_config
from effllm.config.switches import this_process
from effllm.views.comparison_text import grouped
from effllm.views.leaderboard_text import LeaderboardScreen, csv_text, markdown

WIDTH = 120


def main(
    runs: Sequence[str],
    by: str,
    weight: Sequence[str] | None,
    quality: str,
    floor: float,
    as_markdown: bool,
    as_csv: bool,
) -> int:
    """Print the leaderboard; return the exit status."""
    form = form_of(csv=as_csv, markdown=as_markdown)
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        return complain("leaderboard", "this command needs SciPy: pip install 'effllm[analysis]'", 2)
    try:
        weights = weights_of(weight or ())
        sides, left_out = find_groups(runs, by, read_config(this_process()).run_dir)
        found = boards(sides, weights, quality, floor)
    except comparison_errors() as error:
        return complain("leaderboard", str(error), 2)
    if form == "csv":
        print(csv_text(found), end="")
    elif form == "markdown":
        print(markdown(found, quality))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        for board in found:
            console.print(LeaderboardScreen(board, quality))
    for line in grouped(left_out):
        print(f"left out: {line}", file=sys.stderr)
    return 0
