"""Reason of a straggler, and power of the waiting ranks, from windows of devices. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from effllm.job.health.diagnosis import MAX_PEERS, NO_REASON, Reason, explain, power_w
from effllm.job.health.evidence import PeerGroups
from effllm.job.health.outliers import Look
from effllm.records.job import DATA_WAIT, StragglerVerdict
from effllm.records.rank import DeviceWindow, RankReport

MAX_POWERS = 1024  # maximum number of ranks whose power is read in a window


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


def reason(
    peers: PeerGroups, verdict: StragglerVerdict, look: Look | None, rows: Sequence[RankReport], named: Collection[int]
) -> Reason:
    """Return the reason of a slow rank from its window and the windows of its peers, or `NO_REASON`.

    Args:
        peers: the ranks of the job.
        verdict: verdict on the slow rank.
        look: data waits of the window, if the verdict is based on data waits.
        rows: reports of the window.
        named: ranks with a verdict, which are not compared with the slow rank.
    """
    by_rank = {row.rank: row for row in rows}
    if verdict.evidence == DATA_WAIT:
        row = by_rank.get(verdict.ranks[0])
        if look is None or row is None:
            return NO_REASON
        own_s = row.wait_s / row.iterations
        return Reason(f"data wait {1e3 * own_s:,.1f} ms per iteration, peers {1e3 * look.median_s:,.1f} ms")
    if len(verdict.ranks) > 1 or verdict.ranks[0] not in by_rank:
        return NO_REASON
    rank = verdict.ranks[0]
    peer = peers.known[rank]

    def windows(ranks: Iterable[int]) -> list[DeviceWindow]:
        chosen = [by_rank[one] for one in sorted(ranks) if one in by_rank and one not in named]
        chosen = chosen[:: max(len(chosen) // MAX_PEERS, 1)]
        found = (_device_of(row, peers.known[row.rank].device) for row in chosen)
        return [one for one in found if one is not None and one.device != peer.device]

    own = _device_of(by_rank[rank], peer.device)
    in_group, on_host = windows(peers.groups[peer.group]), windows(peers.hosts[peer.host])
    return explain(own, in_group, on_host, peer.is_gpu, verdict.slowdown)


def _device_of(row: RankReport, key: str) -> DeviceWindow | None:
    return next((one for one in row.devices if one.device == key), None)
