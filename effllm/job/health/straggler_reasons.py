"""Reasons of stragglers, and power of the waiting ranks, from windows of devices. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from effllm.job.health.diagnosis import MAX_PEERS, ComparedReadings, ReadingSums, Reason, power_w
from effllm.job.health.evidence import PeerGroups
from effllm.job.health.outliers import Look
from effllm.records.job import DATA_WAIT, StragglerVerdict
from effllm.records.rank import DeviceWindow, RankReport

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

    def of(self, verdict: StragglerVerdict, look: Look | None) -> Reason | None:
        """Add the window's readings of a slow rank; return its reason, or ``None`` if there are no readings so far.

        Args:
            verdict: verdict on the slow rank.
            look: data waits of the window, if the verdict is based on data waits.
        """
        readings = self._readings.get(verdict.ranks)
        row = self._rows.get(verdict.ranks[0])
        if readings is None:
            return None
        if verdict.evidence == DATA_WAIT:
            if look is not None and row is not None:
                readings.add(DATA_WAIT, row.iterations, row.wait_s / row.iterations, look.median_s)
            waits = readings.find(DATA_WAIT)
            return _data_wait(waits, verdict.peers) if waits is not None else None
        if len(verdict.ranks) > 1:
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


def _data_wait(waits: ReadingSums, peers: int) -> Reason:
    own_s, peers_s = waits.means
    others = "its peer" if peers == 1 else "peers"
    return Reason(f"data wait {1e3 * own_s:,.1f} ms per iteration, {others} {1e3 * peers_s:,.1f} ms")


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
