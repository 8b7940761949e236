"""Texts of straggler events: one per verdict, or one per node if all ranks of the node are slow. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from effllm.job.health.diagnosis import UNKNOWN
from effllm.records.job import ARRIVAL, DATA_WAIT, StragglerVerdict
from effllm.records.rank import Event

MAX_LINES = 8  # maximum number of events per kind and window; further verdicts are only counted


def events_of(
    kind: str, verdicts: Sequence[StragglerVerdict], hosts: Mapping[str, Collection[int]], has_gpus: bool, time_s: float
) -> list[Event]:
    """Return the events of verdicts.

    Args:
        kind: ``straggler`` or ``recovered``.
        verdicts: new verdicts, or verdicts that have just ended.
        hosts: ranks by host.
        has_gpus: whether the cost is in GPU-seconds, not rank-seconds.
        time_s: unix time of the events.
    """
    left, events = {verdict.ranks: verdict for verdict in verdicts}, []
    for host in sorted({verdict.host for verdict in verdicts} - {""}):
        mates = sorted(hosts[host])
        of_node = [left[rank,] for rank in mates if (rank,) in left]
        if len(of_node) == len(mates) > 1:
            who = f"node {host} (all of its ranks: {ranks_text(mates)})"
            events.append(Event(time_s, kind, _line(kind, who, of_node, has_gpus)))
            left = {ranks: verdict for ranks, verdict in left.items() if verdict.host != host}
    for ranks, verdict in list(left.items())[:MAX_LINES]:
        text = _line(kind, _names(verdict), [verdict], has_gpus)
        events.append(Event(time_s, kind, text, ranks[0] if len(ranks) == 1 else None))
    if len(left) > MAX_LINES:
        text = f"{kind}: {len(left) - MAX_LINES} more; the costliest stragglers are in summary.json"
        events.append(Event(time_s, kind, text))
    return events


def _names(verdict: StragglerVerdict) -> str:
    where = ", ".join(filter(None, (f"node {verdict.host}" if verdict.host else "", verdict.device)))
    if len(verdict.ranks) == 1:
        return f"rank {verdict.ranks[0]} ({where})"
    return f"one of ranks {ranks_text(verdict.ranks)}, which wait for each other{f' ({where})' if where else ''},"


def _line(kind: str, who: str, verdicts: Sequence[StragglerVerdict], has_gpus: bool) -> str:
    seconds = sum(one.gpu_seconds for one in verdicts)
    joules = None if any(one.joules is None for one in verdicts) else sum(one.joules or 0.0 for one in verdicts)
    cost = f"cost {_seconds_text(seconds)} {'GPU-s' if has_gpus else 'rank-s'}"
    cost += f", {_joules_text(joules)}" if joules is not None else ""
    if kind == "recovered":
        return f"recovered: {who} no longer delays its peers; {cost}"
    worst = max(verdicts, key=lambda one: one.slowdown)
    others = worst.peers + 1 - len(verdicts)
    peers = f"{others} peers" if others > 1 else "peer"
    reasons = [one.why for one in verdicts if one.why != UNKNOWN]
    why = max(reasons, key=reasons.count) if reasons else f"reason {UNKNOWN}"
    percent = f"{100 * worst.slowdown:.1f} %"
    what = {
        DATA_WAIT: f"makes its {peers} wait for {percent} of an iteration",
        ARRIVAL: f"arrives {percent} of an iteration later than its {peers}",
    }.get(worst.evidence, f"{percent} slower than its {peers}")
    since = min(one.since_iteration for one in verdicts)
    return f"straggler: {who} {what} since iteration {since}: {why}; {cost}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text with ranges.

    >>> ranks_text((1, 2, 3, 7))
    '1-3, 7'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"


def _joules_text(joules: float) -> str:
    for size, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if joules >= size:
            return f"{joules / size:.2g} {unit}" if joules < 100 * size else f"{joules / size:.0f} {unit}"
    return f"{joules:.2g} J" if joules < 100 else f"{joules:.0f} J"
