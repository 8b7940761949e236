"""The texts of a leaderboard: table, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from effllm.analysis.comparison import BETTER, SAME, UNKNOWN, WORSE
from effllm.analysis.leaderboard import MCR, PAPER, Leaderboard, Standing
from effllm.metrics import METRICS
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.store.summary_text import readable
from effllm.views.comparison_text import markdown_table, markdown_text

_DIRECTIONS = {"AMU": "↓", "PCU": "↑", "AL": "↓", "TT": "↑", "ST": "↑", "IT": "↑", "AEC": "↓", MCR: "↑"}
MAX_WIDTH = 1000


class LeaderboardScreen(NamedTuple):
    """A board for rich's console; if the table is too wide, the outcomes against the next configuration are lines."""

    board: Leaderboard
    quality: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(title(self.board))
        header, rows = _cells(self.board, self.quality)
        wide = _table(header, rows)
        is_wide = Measurement.get(console, options.update(max_width=MAX_WIDTH), wide).maximum > options.max_width
        yield _table(header[:-1], [row[:-1] for row in rows], is_narrow=True) if is_wide else wide
        for row, following in itertools.pairwise(rows) if is_wide else ():
            yield Text(f"{row[0]} against {following[0]}: {row[-1]}")
        for line in notes(self.board):
            yield Text(line)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, is_narrow: bool = False) -> Table:
    found = Table(*map(escape, header), box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    # On a narrow terminal, names wrap, and no number is cut.
    found.columns[0].overflow, found.columns[0].min_width = "fold", 6
    for column in found.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def markdown(boards: Sequence[Leaderboard], quality: str) -> str:
    lines: list[str] = []
    for board in boards:
        header, rows = _cells(board, quality)
        lines += [f"**{markdown_text(title(board))}**", "", *markdown_table(header, rows), ""]
        lines += [f"- {markdown_text(line)}" for line in notes(board)]
        lines.append("")
    return "\n".join(lines)


def csv_text(boards: Sequence[Leaderboard]) -> str:
    """Return all boards as one CSV with full digits and the kind of the parameters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    named = [f"{name}_{METRICS[tag].unit.replace('/', '_per_')}" for name, tag in PAPER.items()] + [MCR]
    outcomes = [outcome.replace(" ", "_") for outcome in (BETTER, WORSE, SAME, UNKNOWN)]
    header = ["configuration", "runs", "parameters_kind", *named, "quality", "score"]
    writer.writerow([*header, *(f"next_{outcome}" for outcome in outcomes), "simulated", "in_doubt"])
    for board in boards:
        for one in board.standings:
            numbers = [one.values[name] for name in (*PAPER, MCR)]
            counts = [(one.next_outcomes or {}).get(outcome) for outcome in (BETTER, WORSE, SAME, UNKNOWN)]
            names = (csv_file.cell(one.side.name), len(one.side.runs), csv_file.cell(board.parameters_kind))
            about = (str(board.simulated).lower(), " ".join(one.in_doubt))
            writer.writerow([*names, *numbers, one.quality, one.score, *counts, *about])
    return out.getvalue()


def title(board: Leaderboard) -> str:
    plural = "s" if len(board.standings) != 1 else ""
    simulated = "SIMULATED devices, " * board.simulated
    return f"{simulated}{one_line(board.parameters_kind)} parameters, {len(board.standings)} configuration{plural}"


def notes(board: Leaderboard) -> list[str]:
    """Return sentences about the score and the outcomes."""
    lines = [f"score: {', '.join(board.scored)}, each from 0 (worst) to 1 (best); harmonic mean"]
    if not board.scored:
        lines = ["no score: the configurations differ in no metric, or there is only one configuration"]
    if any(one.in_doubt for one in board.standings):
        lines.append("!: in doubt, because a check of the counts failed")
    lines += [f"{one_line(one.side.name)}: {text}" for one in board.standings if (text := _unfinished(one))]
    lines += _not_scored(board) if board.scored or len(board.standings) > 1 else []
    zero = [one for one in board.standings if one.worst_in]
    if zero:
        lines.append(
            "a score is 0 if the configuration is the worst in any metric (the paper's formula); --floor 0.05 sets a "
            "smallest normalised value"
        )
    if any(one.next_outcomes and not one.next_outcomes[BETTER] for one in board.standings):
        lines.append("the order is not evidence: a configuration without a better quantity than the next may be worse")
    if len(board.standings) > 1:
        lines.append(
            "against next: quantities in which a configuration is better and worse than the next one (effllm compare)"
        )
    return lines


def _not_scored(board: Leaderboard) -> list[str]:
    """Return a line for each reason, with the metrics that are not in the score for this reason."""
    names: dict[str, list[str]] = {}
    for name, reason in board.not_scored.items():
        names.setdefault(reason, []).append(name)
    return [f"not in the score: {', '.join(of_reason)}: {reason}" for reason, of_reason in names.items()]


def _cells(board: Leaderboard, quality: str) -> tuple[list[str], list[list[str]]]:
    shown = [name for name in (*PAPER, MCR) if any(one.values[name] is not None for one in board.standings)]
    names = [f"{name} {_DIRECTIONS[name]}" for name in shown]
    header = ["configuration", "runs", *names, *([one_line(quality)] if quality else []), "score", "against next"]
    rows = []
    for one in board.standings:
        marked = (_number(one.values[name]) + "!" * (name in one.in_doubt) for name in shown)
        cells = [one_line(one.side.name), str(len(one.side.runs)), *marked]
        cells += [_number(one.quality)] if quality else []
        rows.append([*cells, "-" if one.score is None else f"{one.score:.3f}", _outcomes(one)])
    return header, rows


def _unfinished(one: Standing) -> str:
    """Return a sentence about the runs that did not complete; "" if all did."""
    statuses = Counter(str(run.row.get("status") or "unknown") for run in one.side.runs)
    others = [f"{count} {one_line(status)}" for status, count in sorted(statuses.items()) if status != "completed"]
    return f"status of its runs: {', '.join(others)}" if others else ""


def _number(value: float | None) -> str:
    return f"{value:.2e}" if value is not None and 0 < abs(value) < 0.01 else readable(value)


def _outcomes(one: Standing) -> str:
    if one.next_outcomes is None:
        return ""
    counts = one.next_outcomes
    if counts[BETTER] or counts[WORSE]:
        return f"{counts[BETTER]} better, {counts[WORSE]} worse"
    return UNKNOWN if counts[UNKNOWN] else SAME
