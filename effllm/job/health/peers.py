"""The ranks of a job by group, host and replica. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from effllm.job.account import Rows
from effllm.records.columns import Positions
from effllm.records.rank import RankReport
from effllm.records.wire import Hello


class Peer(Struct, frozen=True):
    """The properties of a rank for comparisons."""

    group: str = ""  # role and peer group; ranks of one group do the same work
    host: str = ""
    device: str = ""
    replica: str = ""  # ranks of one replica wait for each other before the sync point
    is_gpu: bool = True


class PeerGroups:
    """The ranks of a job by group, host and replica."""

    def __init__(self) -> None:
        self.known: dict[int, Peer] = {}
        self.groups: dict[str, set[int]] = {}
        self.hosts: dict[str, set[int]] = {}
        self.replicas: dict[str, set[int]] = {}

    def hello(self, message: Hello) -> None:
        own = next((device for device in message.devices if not device.only_power), None)
        peer = Peer(
            group=f"{message.role} {message.peer_group}".rstrip(),
            host=message.host,
            device=own.key if own is not None else "",
            replica=f"{message.role} {message.replica}" if message.replica else "",
            is_gpu=own is not None and own.is_gpu,
        )
        self.set_peer(message.rank, peer)

    def set_peer(self, rank: int, peer: Peer) -> None:
        old = self.known.get(rank)
        self.known[rank] = peer
        for sets, name in ((self.groups, "group"), (self.hosts, "host"), (self.replicas, "replica")):
            if old is not None:
                sets[getattr(old, name)].discard(rank)
            sets.setdefault(getattr(peer, name), set()).add(rank)

    def replica_ranks(self, rank: int) -> set[int]:
        """Return the ranks of this rank's replica, itself included, which wait for each other before the sync point."""
        replica = self.known[rank].replica
        return self.replicas[replica] if replica else {rank}

    @property
    def has_peers(self) -> bool:
        return any(len(group) > 1 for group in self.groups.values())

    def reports_with_iterations(self, rows: Sequence[RankReport]) -> Sequence[RankReport]:
        """Return the reports of known ranks that contain an iteration."""
        if (
            isinstance(rows, Rows)
            and rows.columns["iterations"].min(initial=1) > 0
            and self.known.keys() >= set(rows.ranks)
        ):
            return rows
        return [row for row in rows if row.iterations > 0 and row.rank in self.known]

    def places_by_group(self, ranks: Sequence[int]) -> dict[str, Positions]:
        """Return the places of the ranks of each group that has at least two of them."""
        groups = [group for group, members in self.groups.items() if members]
        if len(groups) == 1:
            return {groups[0]: np.arange(len(ranks))} if len(ranks) > 1 else {}
        places: dict[str, list[int]] = {}
        for place, rank in enumerate(ranks):
            places.setdefault(self.known[rank].group, []).append(place)
        return {group: np.array(members, np.intp) for group, members in places.items() if len(members) > 1}
