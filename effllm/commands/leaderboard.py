"""``effllm leaderboard``: the table of the EfficientLLM paper for one's own runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from effllm.analysis.leaderboard import boards, weights_of
from effllm.analysis.sides import find_groups
from effllm.commands.compare import comparison_errors
from effllm.commands.messages import complain
from effllm.config.settings import read_config
from effllm.config.switches import this_process
from effllm.views.comparison_text import grouped
from effllm.views.leaderboard_text import LeaderboardScreen, as_csv, markdown

WIDTH = 120


class LeaderboardRequest(NamedTuple):
    """The arguments of the command."""

    runs: Sequence[str]
    by: str
    weights: Sequence[str]
    quality: str
    floor: float
    form: str  # text, markdown or csv


def main(request: LeaderboardRequest) -> int:
    """Print the leaderboard; return the exit status."""
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        return complain("leaderboard", "this command needs SciPy: pip install 'effllm[analysis]'", 2)
    try:
        weights = weights_of(request.weights)
        sides, left_out = find_groups(request.runs, request.by, read_config(this_process()).run_dir)
        found = boards(sides, weights, request.quality, request.floor)
    except comparison_errors() as error:
        return complain("leaderboard", str(error), 2)
    if request.form == "csv":
        print(as_csv(found), end="")
    elif request.form == "markdown":
        print(markdown(found, request.quality))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        for board in found:
            console.print(LeaderboardScreen(board, request.quality))
    for line in grouped(left_out):
        print(f"left out: {line}", file=sys.stderr)
    return 0
