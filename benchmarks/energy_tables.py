"""The figures of energy.py, as tables of 80 columns and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.energy_judge import EACH, SUM, Measured
from benchmarks.energy_traces import REFERENCE, Group
from benchmarks.figure import median

OURS, PEER = "effllm", "Zeus"
RATIO_GOALS = {"5 s": 0.2, "1 s": 0.2, "0.2 s": 0.1}
SHARE_GOAL = (0.93, 0.98)
CPU_GOAL = 0.005


@dataclass(frozen=True)
class Goal:
    """A figure with a lower and an upper bound."""

    name: str
    value: float
    lowest: float
    highest: float

    @property
    def met(self) -> bool:
        return self.lowest <= self.value <= self.highest


def show(console: Console, measured: Sequence[Measured], node: Sequence[Group], lengths: Sequence[str]) -> None:
    console.print(_overview(measured, node, lengths))
    console.print(_by_trace(measured, node, lengths))
    console.print(_costs(measured, lengths))
    ours = [one for one in measured if one.tool == OURS]
    if ours:
        console.print(_intervals(ours[0], node, lengths))
        console.print(_goals(goals(measured, node, lengths)))


def to_dict(measured: Sequence[Measured], node: Sequence[Group], lengths: Sequence[str]) -> dict[str, Any]:
    """Return all results as plain values, for the results file."""
    return {
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals(measured, node, lengths)],
        "tools": [
            {
                "tool": one.tool,
                "version": one.version,
                "cpu_shares": one.cpu_shares,
                "blocked_ms": {length: median(one.blocked_s[length]) * 1e3 for length in lengths},
                "errors": [
                    {"trace": group, "of": whom, "length": length, **asdict(found)}
                    for group, whom, length, found in _rows(one, node, lengths)
                ],
            }
            for one in measured
        ],
        "traces": [{"name": group.name, "gpus": [gpu.line() for gpu in group.gpus]} for group in node],
    }


def goals(measured: Sequence[Measured], node: Sequence[Group], lengths: Sequence[str]) -> list[Goal]:
    """Return the goals of effllm, except goals that were not measured."""
    tools = {one.tool: one for one in measured}
    ours, peer = tools.get(OURS), tools.get(PEER)
    if ours is None:
        return []
    plain, planted = _split(node)
    found = []
    for length in lengths if peer else ():
        for name, groups, whom in (("each GPU", plain, EACH), ("sum of 8", _reference(node), SUM)):
            ratio = ours.errors(groups, whom, length).mean / peer.errors(groups, whom, length).mean
            found.append(Goal(f"error over {PEER}'s, {length}: {name}", ratio, 0.0, RATIO_GOALS[length]))
    for length in lengths:
        share = ours.errors(plain, EACH, length).in_random
        found.append(Goal(f"truth in the random interval, {length}", share or 0.0, *SHARE_GOAL))
    for length in lengths:
        share = ours.errors(planted, EACH, length).in_whole
        found.append(Goal(f"truth in the whole interval, gain +5 %, {length}", share or 0.0, SHARE_GOAL[0], 1.0))
    found += [Goal(f"agent's share of a core, {length}", ours.cpu_shares[length], 0.0, CPU_GOAL) for length in lengths]
    return found


def _split(node: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    return [group for group in node if not group.is_planted], [group for group in node if group.is_planted]


def _reference(node: Sequence[Group]) -> list[Group]:
    return [group for group in node if group.name == REFERENCE]


def _rows(one: Measured, node: Sequence[Group], lengths: Sequence[str]) -> Iterator[tuple[str, str, str, Any]]:
    plain, planted = _split(node)
    for length in lengths:
        yield "all", EACH, length, one.errors(plain, EACH, length)
        yield "all with a gain that is off", EACH, length, one.errors(planted, EACH, length)
        for group in node:
            for whom in (EACH, SUM) if len(group.gpus) > 1 else (EACH,):
                yield group.name, whom, length, one.errors([group], whom, length)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, padding=(0, 1), title_justify="left")
    table.add_column(first, no_wrap=first != "figure")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _overview(measured: Sequence[Measured], node: Sequence[Group], lengths: Sequence[str]) -> Table:
    title = "Error of a window's energy in %: mean, 95th percentile, worst"
    table = _table(title, "tool", [f"windows of {length}" for length in lengths])
    plain, _ = _split(node)
    for heading, groups, whom in (
        ("each GPU, all traces", plain, EACH),
        (f"sum of 8 GPUs, {REFERENCE}", _reference(node), SUM),
    ):
        table.add_row(f"[bold]{heading}")
        for one in measured:
            found = [one.errors(groups, whom, length) for length in lengths]
            table.add_row(one.tool, *(f"{_percent(e.mean)} {_percent(e.p95)} {_percent(e.worst)}" for e in found))
        table.add_section()
    return table


def _by_trace(measured: Sequence[Measured], node: Sequence[Group], lengths: Sequence[str]) -> Table:
    table = _table("Mean error in %, each GPU, by trace", "trace", [one.tool for one in measured])
    for length in lengths:
        table.add_row(f"[bold]windows of {length}")
        for group in node:
            table.add_row(group.name, *(_percent(one.errors([group], EACH, length).mean) for one in measured))
        table.add_section()
    return table


def _costs(measured: Sequence[Measured], lengths: Sequence[str]) -> Table:
    title = "% of a core, of a process (effllm: one per GPU); ms in both calls (median)"
    table = _table(title, "tool", [f"{unit} {length}" for unit in ("%", "ms") for length in lengths])
    for one in measured:
        shares = [f"{one.cpu_shares[length] * 100:.2f}" for length in lengths]
        table.add_row(one.tool, *shares, *(f"{median(one.blocked_s[length]) * 1e3:.3f}" for length in lengths))
    return table


def _intervals(ours: Measured, node: Sequence[Group], lengths: Sequence[str]) -> Table:
    title = f"{OURS}: % of windows with the truth in the stated interval, its half-width in %"
    table = _table(title, "trace", [f"windows of {length}" for length in lengths])
    plain, planted = _split(node)
    table.add_row("[bold]random parts")
    for name, groups in [("all", plain), *((group.name, [group]) for group in plain)]:
        found = [ours.errors(groups, EACH, length) for length in lengths]
        table.add_row(name, *(_interval(e.in_random, e.random_mean) for e in found))
    table.add_section()
    table.add_row("[bold]with the sensor's")
    for name, groups in [("all", planted), *((group.name, [group]) for group in planted)]:
        found = [ours.errors(groups, EACH, length) for length in lengths]
        table.add_row(name, *(_interval(e.in_whole, e.whole_mean) for e in found))
    return table


def _interval(share: float | None, half_width: float | None) -> str:
    return f"{(share or 0.0) * 100:.1f}  ±{_percent(half_width or 0.0)}"


def _goals(found: Sequence[Goal]) -> Table:
    table = _table("Goals", "figure", ["measured", "from", "to", ""])
    for goal in found:
        verdict = "met" if goal.met else "not met"
        table.add_row(goal.name, f"{goal.value:.4f}", f"{goal.lowest:g}", f"{goal.highest:g}", verdict)
    return table


def _percent(value: float) -> str:
    return f"{value * 100:.2f}" if value < 0.1 else f"{value * 100:.1f}"
