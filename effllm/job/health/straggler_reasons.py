"""Reasons of stragglers, and power of the waiting ranks, from windows of devices. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from effllm.job.health.comparison import Slow
from effllm.job.health.diagnosis import MAX_PEERS, UNKNOWN, ComparedReadings, Reason, power_w
from effllm.job.health.peers import PeerGroups
from effllm.records.job import DATA_WAIT, StragglerVerdict
from effllm.records.rank import DeviceWindow, Event, RankReport

MAX_LINES = 8  # maximum number of events per kind and window; further verdicts are only counted

MAX_POWERS = 1024  # maximum number of ranks whose power is read in a window
MAX_REASONS = 64  # maximum number of slow ranks whose readings are compared

Unit = tuple[int, ...]  # the ranks of a verdict


class Reasons:
    """The reasons of slow ranks, by their readings in all windows in which they had a verdict.

    Args:
        peers: the ranks of the job.
    """

    def __init__(self, peers: PeerGroups) -> None:
        self._peers = peers
        self._readings: dict[Unit, ComparedReadings] = {}
        self._rows: dict[int, RankReport] = {}
        self._named: Collection[int] = ()
        self._windows: dict[str, list[DeviceWindow]] = {}  # of peers, by group or host

    def open(self, rows: Sequence[RankReport], units: Collection[Unit]) -> None:
        """Begin a window.

        Args:
            rows: reports of the window.
            units: all verdicts; their ranks are not compared with a slow rank.
        """
        self._rows, self._windows = {row.rank: row for row in rows}, {}
        self._named = {rank for unit in units for rank in unit}
        for unit in units:
            if unit not in self._readings and len(self._readings) >= MAX_REASONS:
                over = next((one for one in self._readings if one not in units), None)
                if over is None:
                    break
                del self._readings[over]
            self._readings.setdefault(unit, ComparedReadings())

    def of(self, verdict: StragglerVerdict, slow: Slow) -> Reason | None:
        """Add the window's readings of a slow rank; return its reason, or ``None`` if there are no readings so far.

        Args:
            verdict: verdict on the slow rank.
            slow: its slow rank.
        """
        if verdict.evidence == DATA_WAIT:
            own_s, them = slow.peers_s + slow.excess_s, "its peer" if verdict.peers == 1 else "peers"
            return Reason(f"data wait {1e3 * own_s:,.1f} ms per iteration, {them} {1e3 * slow.peers_s:,.1f} ms")
        readings = self._readings.get(verdict.ranks)
        row = self._rows.get(verdict.ranks[0])
        if readings is None or len(verdict.ranks) > 1:
            return None
        peer = self._peers.known[verdict.ranks[0]]
        own = _device_of(row, peer.device) if row is not None else None
        if own is not None:
            in_group = self._of_peers(f"group {peer.group}", self._peers.groups[peer.group])
            on_host = self._of_peers(f"host {peer.host}", self._peers.hosts[peer.host])
            if others := [one for one in in_group if one.device != peer.device]:
                readings.add_windows(own, others, [one for one in on_host if one.device != peer.device])
        return readings.reason(peer.is_gpu, verdict.slowdown) if readings else None

    def _of_peers(self, name: str, ranks: Iterable[int]) -> list[DeviceWindow]:
        """Return the device windows of at most about `MAX_PEERS` ranks without a verdict."""
        if name not in self._windows:
            chosen = [self._rows[one] for one in sorted(ranks) if one in self._rows and one not in self._named]
            chosen = chosen[:: max(len(chosen) // MAX_PEERS, 1)]
            found = (_device_of(row, self._peers.known[row.rank].device) for row in chosen)
            self._windows[name] = [one for one in found if one is not None]
        return self._windows[name]


def waiting_w(peers: PeerGroups, rows: Sequence[RankReport], named: Collection[int]) -> float | None:
    """Return the mean power of a waiting rank in watts, with each device once; ``None`` if a device is not measured."""
    powers: dict[str, float | None] = {}
    waiting = [row for row in rows if row.rank not in named]
    waiting = waiting[:: max(len(waiting) // MAX_POWERS, 1)]
    for row in waiting:
        device = peers.known[row.rank].device
        if device not in powers:
            one = _device_of(row, device)
            powers[device] = power_w(one) if one is not None else None
    known = [power for power in powers.values() if power is not None]
    return sum(known) / len(waiting) if known and len(known) == len(powers) else None


def _device_of(row: RankReport, key: str) -> DeviceWindow | None:
    return next((one for one in row.devices if one.device == key), None)


def events_of(
    kind: str,
    verdicts: Sequence[StragglerVerdict],
    named: Collection[int],
    hosts: Mapping[str, Collection[int]],
    has_gpus: bool,
    time_s: float,
) -> list[Event]:
    """Return the events of verdicts.

    Args:
        kind: ``straggler`` or ``recovered``.
        verdicts: new verdicts, or verdicts that have just ended.
        named: all ranks with a current verdict.
        hosts: ranks by host.
        has_gpus: whether the cost is in GPU-seconds, not rank-seconds.
        time_s: unix time of the events.
    """
    left, events = {verdict.ranks: verdict for verdict in verdicts}, []
    for host in sorted({verdict.host for verdict in verdicts} - {""}):
        mates = sorted(hosts[host])
        of_node = [left[rank,] for rank in mates if (rank,) in left]
        is_whole = len(of_node) == len(mates) or (kind != "recovered" and set(mates) <= set(named))
        if of_node and is_whole and len(mates) > 1:
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
    shown = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
    cost = f"cost {shown} {'GPU-s' if has_gpus else 'rank-s'}"
    cost += f", {_joules_text(joules)}" if joules is not None else ""
    if kind == "recovered":
        return f"recovered: {who} no longer delays its peers; {cost}"
    worst = max(verdicts, key=lambda one: one.slowdown)
    others = worst.peers + 1 - len(verdicts)
    peers = f"{others} peers" if others > 1 else "peer"
    reasons = [one.why for one in verdicts if one.why != UNKNOWN]
    why = max(reasons, key=reasons.count) if reasons else f"reason {UNKNOWN}"
    percent = f"{100 * worst.slowdown:.1f} %"
    what = f"{percent} slower than its {peers}"
    if worst.evidence == DATA_WAIT:
        what = f"makes its {peers} wait for {percent} of an iteration"
    since = min(one.since_iteration for one in verdicts)
    shares = [one.last_share for one in verdicts if one.last_share is not None]
    last = f", last in {100 * sum(shares):.0f} % of the iterations" if shares else ""
    return f"straggler: {who} {what} since iteration {since}{last}: {why}; {cost}"


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


def _joules_text(joules: float) -> str:
    for size, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if joules >= size:
            return f"{joules / size:.2g} {unit}" if joules < 100 * size else f"{joules / size:.0f} {unit}"
    return f"{joules:.2g} J" if joules < 100 else f"{joules:.0f} J"
