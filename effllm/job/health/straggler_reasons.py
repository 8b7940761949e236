"""Reasons of stragglers, from readings of their devices, their events, and the power of waiting ranks. No I/O.

A waiting rank spins in a communication kernel, at full utilization, full clock and low power. So a low clock, a clocks
event reason that the peers do not have, a lower power limit or an idle GPU indicate the slow rank. If no reading
differs, the reason is "unknown".  Readings are compared over all windows so far, because a clock may be low by chance
in a single window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from effllm.job.health.comparison import Slow
from effllm.job.health.peers import PeerGroups
from effllm.records.rank import DeviceWindow, Event, RankReport
from effllm.records.verdict import DATA_WAIT, StragglerVerdict
from effllm.views.text.numbers import energy_amount

UNKNOWN = "unknown"

#: Kinds of differences, as in `StragglerVerdict.differences`.
CLOCK, THROTTLED, POWER_LIMIT, HOST = "clock", "throttled", "power_limit", "host"

#: Maximum number of compared peers: their median is as good as the median of all peers.
MAX_PEERS = 64

#: Minimum differences from the peers, in this order: SM clock (relative), power limit (relative), throttled share of
#: time, busy share of time, and temperature in degrees.
SLOWER_CLOCK, LOWER_LIMIT, MORE_THROTTLED, LESS_BUSY, HOTTER_C = 0.02, 0.02, 0.1, 0.05, 8.0

#: Smallest part of a slowdown that a lower clock must explain to be its reason.
MIN_EXPLAINED = 0.5

#: Display names of clocks event reasons.
REASON_NAMES = {
    "power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal": "thermal slowdown",
    "hw_thermal": "thermal slowdown by hardware",
    "power_brake": "power brake",
    "board_limit": "limit of the board's power supply",
    "reliability": "limit of the voltage",
}

#: Names of the compared readings; those of clocks event reasons are the name of the reason with the prefix `_REASON`.
_CLOCK, _LIMIT, _CELSIUS, _BUSY, _REASON = "sm_clock_hz", "power_limit_w", "temperature_c", "utilization", "reason "

MAX_EVENTS = 8  # maximum number of events per kind and window; further verdicts are only counted

MAX_POWERS = 1024  # maximum number of ranks whose power is read in a window
MAX_COMPARED = 64  # maximum number of slow ranks whose readings are compared

Unit = tuple[int, ...]  # the ranks of a verdict


class Reason(NamedTuple):
    """The differences between the device of a slow rank and the devices of its peers."""

    text: str
    kinds: tuple[str, ...] = ()


NO_REASON = Reason(UNKNOWN)


class ReadingSums(Struct):
    """One reading of a slow rank and of its peers: sums over windows of the value times the weight of the window."""

    weight: float = 0.0  # the weight of a window is the time with a reading of the slow rank
    own: float = 0.0
    peers: float = 0.0  # of the median of the peers
    node_weight: float = 0.0  # of the windows in which other devices of the node have this reading
    node: float = 0.0  # of the median of these devices

    @property
    def means(self) -> tuple[float, float]:
        """Mean of the slow rank, and mean of the peers' medians."""
        return self.own / self.weight, self.peers / self.weight

    @property
    def node_mean(self) -> float | None:
        return self.node / self.node_weight if self.node_weight else None


class ComparedReadings(dict[str, ReadingSums]):
    """The readings of one slow rank and of its peers by name, over the windows so far."""

    def add(self, name: str, weight: float, own: float | None, peers: float | None, node: float | None = None) -> None:
        """Add a reading of a window of ``weight`` seconds: of the slow rank, and medians of its peers and its node."""
        if own is None or peers is None or weight <= 0:
            return
        sums = self.setdefault(name, ReadingSums())
        sums.weight += weight
        sums.own += weight * own
        sums.peers += weight * peers
        if node is not None:
            sums.node_weight += weight
            sums.node += weight * node

    def add_windows(self, own: DeviceWindow, peers: Sequence[DeviceWindow], node: Sequence[DeviceWindow] = ()) -> None:
        """Add one window of the slow rank's device, its peers, and its node's devices without those of slow ranks."""
        for name in (_CLOCK, _LIMIT, _CELSIUS):
            gauge = own.gauges.get(name)
            if gauge is not None:
                values = (mean_gauge(own, name), _median(peers, mean_gauge, name), _median(node, mean_gauge, name))
                self.add(name, gauge.covered_s, *values)
        self.add(_BUSY, own.wall.utilization_covered_s, _utilization(own), _median(peers, _utilization))
        # A reason that is not active now counts with its share of 0.
        names = (name.removeprefix(_REASON) for name in self if name.startswith(_REASON))
        for reason in {*REASON_NAMES, *own.throttled_s, *names} - {"any"}:
            share, others = _throttled_share(own, reason), _median(peers, _throttled_share, reason)
            self.add(_REASON + reason, own.throttle_covered_s, share, others)

    def reason(self, is_gpu: bool = True, slowdown: float = 0.0) -> Reason:
        """Return the differences between a slow rank's device and other devices, or `NO_REASON`.

        If nothing else differs, an idle GPU shows a slow host.  The slowdown is the time over the peers', minus one.
        """
        differences = {CLOCK: self._clock_text(), THROTTLED: self._throttle_texts(), POWER_LIMIT: self._limit_text()}
        kinds = tuple(kind for kind, texts in differences.items() if texts)
        if CLOCK in kinds and not self._clock_explains(slowdown):
            kinds = tuple(kind for kind in kinds if kind != CLOCK)
        reasons = [text for texts in differences.values() for text in texts]
        reasons += self._temperature_text() if reasons else []
        if not reasons and is_gpu and (reasons := self._host_text()):
            kinds = (HOST,)
        return Reason(", ".join(reasons), kinds) if reasons else NO_REASON

    def _clock_text(self) -> list[str]:
        reading = self.get(_CLOCK)
        if reading is None or reading.means[0] >= (1 - SLOWER_CLOCK) * reading.means[1]:
            return []
        (own, peers), node = reading.means, reading.node_mean
        also = " (also low on other GPUs of the node)" if node is not None and node < (1 - SLOWER_CLOCK) * peers else ""
        return [f"SM clock {own / 1e9:.2f} GHz against {peers / 1e9:.2f}{also}"]

    def _clock_explains(self, slowdown: float) -> bool:
        """Whether the lower clock can cause at least `MIN_EXPLAINED` of the slowdown: clocks of equal GPUs differ."""
        reading = self.get(_CLOCK)
        return reading is not None and reading.own > 0 and reading.peers / reading.own - 1 >= MIN_EXPLAINED * slowdown

    def _throttle_texts(self) -> list[str]:
        texts = []
        for name, reading in sorted(self.items()):
            reason = name.removeprefix(_REASON)
            if name.startswith(_REASON) and reading.means[0] >= reading.means[1] + MORE_THROTTLED:
                texts.append(REASON_NAMES.get(reason, reason.replace("_", " ")))
        return texts

    def _limit_text(self) -> list[str]:
        reading = self.get(_LIMIT)
        if reading is None or reading.means[0] >= (1 - LOWER_LIMIT) * reading.means[1]:
            return []
        return ["power limit {:.0f} W against {:.0f}".format(*reading.means)]

    def _temperature_text(self) -> list[str]:
        reading = self.get(_CELSIUS)
        if reading is None or reading.means[0] < reading.means[1] + HOTTER_C:
            return []
        (own, peers), node = reading.means, reading.node_mean
        also = " (also high on other GPUs of the node)" if node is not None and node >= peers + HOTTER_C else ""
        return [f"{own:.0f} degC against {peers:.0f}{also}"]

    def _host_text(self) -> list[str]:
        reading = self.get(_BUSY)
        if reading is None or reading.means[0] > reading.means[1] - LESS_BUSY:
            return []
        own, peers = reading.means
        return [f"slow host: the GPU is busy {100 * own:.0f} % of the time, GPUs of peers {100 * peers:.0f} %"]


def mean_gauge(window: DeviceWindow, name: str) -> float | None:
    gauge = window.gauges.get(name)
    return gauge.value_seconds / gauge.covered_s if gauge is not None and gauge.covered_s > 0 else None


def mean_power_w(window: DeviceWindow) -> float | None:
    energy = window.wall.energy
    return energy.joules / energy.covered_s if energy.joules is not None and energy.covered_s > 0 else None


def _utilization(window: DeviceWindow) -> float | None:
    wall = window.wall
    is_measured = wall.utilization_seconds is not None and wall.utilization_covered_s > 0
    return wall.utilization_seconds / wall.utilization_covered_s if is_measured else None  # type: ignore[operator]


def _throttled_share(window: DeviceWindow, reason: str) -> float | None:
    if window.throttle_covered_s <= 0:
        return None
    return window.throttled_s.get(reason, 0.0) / window.throttle_covered_s


def _median(windows: Sequence[DeviceWindow], reading_of: Callable[..., float | None], *names: str) -> float | None:
    """Return the median of ``reading_of(window, *names)`` over windows that have this reading."""
    values = [value for window in windows[:MAX_PEERS] if (value := reading_of(window, *names)) is not None]
    return statistics.median(values) if values else None


class Reasons:
    """The reasons of slow ranks, by their readings in all windows in which they had a verdict."""

    def __init__(self, peers: PeerGroups) -> None:
        self._peers = peers
        self._readings: dict[Unit, ComparedReadings] = {}
        self._rows: dict[int, RankReport] = {}  # reports of the current window by rank
        self._named: Collection[int] = ()  # ranks with a verdict
        self._windows: dict[str, list[DeviceWindow]] = {}  # cache of `_peer_windows` in the current window, by name

    def begin_window(self, rows: Sequence[RankReport], units: Collection[Unit]) -> None:
        """Begin a window; the ranks of all verdicts, ``units``, are not compared with a slow rank."""
        # Without a verdict the reports are not needed; 10,000 of them have 30 MiB.
        self._rows, self._windows = {row.rank: row for row in rows} if units else {}, {}
        self._named = {rank for unit in units for rank in unit}
        for unit in units:
            if unit not in self._readings and len(self._readings) >= MAX_COMPARED:
                recovered = next((other for other in self._readings if other not in units), None)
                if recovered is None:
                    break
                del self._readings[recovered]
            self._readings.setdefault(unit, ComparedReadings())

    def add_readings_and_explain(self, verdict: StragglerVerdict, slow: Slow) -> Reason | None:
        """Add the window's readings of a slow rank; return its reason, or ``None`` if there are no readings so far."""
        if verdict.evidence == DATA_WAIT:
            own_s, peers = slow.peers_s + slow.excess_s, "its peer" if verdict.peers == 1 else "peers"
            return Reason(f"data wait {1e3 * own_s:,.1f} ms per iteration, {peers} {1e3 * slow.peers_s:,.1f} ms")
        readings = self._readings.get(verdict.ranks)
        row = self._rows.get(verdict.ranks[0])
        if readings is None or len(verdict.ranks) > 1:
            return None
        peer = self._peers.by_rank[verdict.ranks[0]]
        own = _device_window(row, peer.device) if row is not None else None
        if own is not None:
            in_group = self._peer_windows(f"group {peer.group}", self._peers.groups[peer.group])
            on_host = self._peer_windows(f"host {peer.host}", self._peers.hosts[peer.host])
            if others := [window for window in in_group if window.device != peer.device]:
                readings.add_windows(own, others, [window for window in on_host if window.device != peer.device])
        return readings.reason(peer.is_gpu, verdict.slowdown) if readings else None

    def _peer_windows(self, group_name: str, ranks: Iterable[int]) -> list[DeviceWindow]:
        """Return the device windows of at most about `MAX_PEERS` of these ranks, without ranks that have a verdict."""
        if group_name not in self._windows:
            chosen = [self._rows[rank] for rank in sorted(ranks) if rank in self._rows and rank not in self._named]
            chosen = chosen[:: max(len(chosen) // MAX_PEERS, 1)]
            windows = (_device_window(row, self._peers.by_rank[row.rank].device) for row in chosen)
            self._windows[group_name] = [window for window in windows if window is not None]
        return self._windows[group_name]


def mean_waiting_w(peers: PeerGroups, rows: Sequence[RankReport], named: Collection[int]) -> float | None:
    """Return the mean power of a waiting rank in watts, with each device once; ``None`` if a device is not measured."""
    watts_by_device: dict[str, float | None] = {}
    waiting = [row for row in rows if row.rank not in named]
    waiting = waiting[:: max(len(waiting) // MAX_POWERS, 1)]
    for row in waiting:
        device = peers.by_rank[row.rank].device
        if device not in watts_by_device:
            window = _device_window(row, device)
            watts_by_device[device] = mean_power_w(window) if window is not None else None
    watts = [device_w for device_w in watts_by_device.values() if device_w is not None]
    return sum(watts) / len(waiting) if watts and len(watts) == len(watts_by_device) else None


def _device_window(row: RankReport, key: str) -> DeviceWindow | None:
    return next((window for window in row.devices if window.device == key), None)


def events_of(
    kind: str,
    verdicts: Sequence[StragglerVerdict],
    named: Collection[int],
    hosts: Mapping[str, Collection[int]],
    has_gpus: bool,
    time_s: float,
) -> list[Event]:
    """Return the events of verdicts, of the kind ``straggler`` or ``recovered``; a whole node has one event.

    All ranks with a current verdict are ``named``.  If the job ``has_gpus``, the cost is in GPU-seconds.
    """
    by_unit, events = {verdict.ranks: verdict for verdict in verdicts}, []  # verdicts without an event so far
    for host in sorted({verdict.host for verdict in verdicts} - {""}):
        mates = sorted(hosts[host])
        of_node = [by_unit[rank,] for rank in mates if (rank,) in by_unit]
        is_whole_node = len(of_node) == len(mates) or (kind != "recovered" and set(mates) <= set(named))
        if of_node and is_whole_node and len(mates) > 1:
            name = f"node {host} (all of its ranks: {ranks_text(mates)})"
            events.append(Event(time_s, kind, _event_text(kind, name, of_node, has_gpus)))
            by_unit = {unit: verdict for unit, verdict in by_unit.items() if verdict.host != host}
    for unit, verdict in list(by_unit.items())[:MAX_EVENTS]:
        text = _event_text(kind, _ranks_name(verdict), [verdict], has_gpus)
        events.append(Event(time_s, kind, text, unit[0] if len(unit) == 1 else None))
    if len(by_unit) > MAX_EVENTS:
        text = f"{kind}: {len(by_unit) - MAX_EVENTS} more; the costliest stragglers are in summary.json"
        events.append(Event(time_s, kind, text))
    return events


def _ranks_name(verdict: StragglerVerdict) -> str:
    host_and_device = ", ".join(filter(None, (f"node {verdict.host}" if verdict.host else "", verdict.device)))
    if len(verdict.ranks) == 1:
        return f"rank {verdict.ranks[0]} ({host_and_device})"
    in_brackets = f" ({host_and_device})" if host_and_device else ""
    return f"one of ranks {ranks_text(verdict.ranks)}, which wait for each other{in_brackets},"


def _event_text(kind: str, name: str, verdicts: Sequence[StragglerVerdict], has_gpus: bool) -> str:
    """Return the text of an event about the ranks with this name and these verdicts."""
    seconds, parts_j = sum(verdict.gpu_seconds for verdict in verdicts), [verdict.joules for verdict in verdicts]
    joules = None if None in parts_j else sum(part_j or 0.0 for part_j in parts_j)
    seconds_text = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
    cost = f"cost {seconds_text} {'GPU-s' if has_gpus else 'rank-s'}"
    cost += f", {energy_amount(joules)}" if joules is not None else ""
    if kind == "recovered":
        return f"recovered: {name} no longer delays its peers; {cost}"
    worst = max(verdicts, key=lambda verdict: verdict.slowdown)
    num_peers = worst.peers + 1 - len(verdicts)  # of a whole node, its ranks are no peers
    peers = f"{num_peers} peers" if num_peers > 1 else "peer"
    reasons = [verdict.why for verdict in verdicts if verdict.why != UNKNOWN]
    why = max(reasons, key=reasons.count) if reasons else f"reason {UNKNOWN}"
    percent = f"{100 * worst.slowdown:.1f} %"
    what = f"{percent} slower than its {peers}"
    if worst.evidence == DATA_WAIT:
        what = f"makes its {peers} wait for {percent} of an iteration"
    since = min(verdict.since_iteration for verdict in verdicts)
    shares = [verdict.last_share for verdict in verdicts if verdict.last_share is not None]
    last = f", last in {100 * sum(shares):.0f} % of the iterations" if shares else ""
    return f"straggler: {name} {what} since iteration {since}{last}: {why}; {cost}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text with ranges.

    >>> ranks_text((1, 2, 3, 7))
    '1-3, 7'
    """
    ranges: list[list[int]] = []  # first and last rank
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
