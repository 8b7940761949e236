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
    """The ranks of a job by group, host and replica, which `Peer` explains; only ranks that have sent a HELLO."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Peer] = {}
        self.groups: dict[str, set[int]] = {}  # group -> its ranks
        self.hosts: dict[str, set[int]] = {}
        self.replicas: dict[str, set[int]] = {}

    def hello(self, message: Hello) -> None:
        computing = next((device for device in message.devices if not device.only_power), None)
        peer = Peer(
            group=f"{message.role} {message.peer_group}".rstrip(),
            host=message.host,
            device=computing.key if computing is not None else "",
            replica=f"{message.role} {message.replica}" if message.replica else "",
            is_gpu=computing is not None and computing.is_gpu,
        )
        self.set_peer(message.rank, peer)

    def set_peer(self, rank: int, peer: Peer) -> None:
        earlier = self.by_rank.get(rank)
        self.by_rank[rank] = peer
        for ranks_by_name, field in ((self.groups, "group"), (self.hosts, "host"), (self.replicas, "replica")):
            if earlier is not None:
                ranks_by_name[getattr(earlier, field)].discard(rank)
            ranks_by_name.setdefault(getattr(peer, field), set()).add(rank)

    def replica_ranks(self, rank: int) -> set[int]:
        """Return the ranks of this rank's replica, itself included, which wait for each other before the sync point."""
        replica = self.by_rank[rank].replica
        return self.replicas[replica] if replica else {rank}

    @property
    def has_peers(self) -> bool:
        return any(len(group) > 1 for group in self.groups.values())

    def reports_with_iterations(self, rows: Sequence[RankReport]) -> Sequence[RankReport]:
        """Return the reports that contain an iteration, of ranks that have sent a HELLO."""
        # In most windows these are all reports: then their object is returned, which has computed its columns.
        if isinstance(rows, Rows) and (rows.columns["iterations"] > 0).all() and set(rows.ranks) <= self.by_rank.keys():
            return rows
        return [row for row in rows if row.iterations > 0 and row.rank in self.by_rank]

    def places_by_group(self, ranks: Sequence[int]) -> dict[str, Positions]:
        """Return for each group with at least two of these ranks their places, which are indices in ``ranks``."""
        groups = [group for group, members in self.groups.items() if members]
        if len(groups) == 1:
            return {groups[0]: np.arange(len(ranks))} if len(ranks) > 1 else {}
        by_group: dict[str, list[int]] = {}
        for place, rank in enumerate(ranks):
            by_group.setdefault(self.by_rank[rank].group, []).append(place)
        return {group: np.array(places, np.intp) for group, places in by_group.items() if len(places) > 1}
