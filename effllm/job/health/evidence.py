"""The four kinds of evidence by which a rank is compared with its peers in a window. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from msgspec import Struct

from effllm.job.health.clock import NS, Offset
from effllm.job.health.outliers import FLOOR, OutlierTrack, Z
from effllm.job.health.robust import median
from effllm.job.rows import Rows
from effllm.records.columns import fields_of
from effllm.records.job import ARRIVAL, DATA_WAIT, OWN_TIME, PROFILE
from effllm.records.rank import RankReport

#: An arrival is late if its delay is at least this many clock errors.
CLOCK_ERRORS = 3.0
#: From this group size on, arrivals are judged in every 4th window, because aligning clocks takes most of the CPU time.
LARGE_GROUP, ARRIVALS_EVERY = 1024, 4

_OWN, _PROFILE, _ARRIVAL = attrgetter("own_median_s"), attrgetter("profile"), attrgetter("arrival_ns")

Key = tuple[str, str]  # a group, and a kind of evidence


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
        self._max_rank = -1  # the largest known rank
        self.groups: dict[str, set[int]] = {}
        self.hosts: dict[str, set[int]] = {}
        self.replicas: dict[str, set[int]] = {}

    def meet(self, rank: int, peer: Peer) -> None:
        old = self.known.get(rank)
        self.known[rank] = peer
        self._max_rank = max(self._max_rank, rank)
        for sets, name in ((self.groups, "group"), (self.hosts, "host"), (self.replicas, "replica")):
            if old is not None:
                sets[getattr(old, name)].discard(rank)
            sets.setdefault(getattr(peer, name), set()).add(rank)

    def mates(self, rank: int) -> set[int]:
        """Return the ranks of this rank's replica, which wait for each other before the sync point."""
        replica = self.known[rank].replica
        return self.replicas[replica] if replica else {rank}

    def in_replicas(self) -> set[int]:
        """Return the ranks that wait for another rank before the sync point."""
        return {rank for name, ranks in self.replicas.items() if name and len(ranks) > 1 for rank in ranks}

    def at_work(self, rows: Sequence[RankReport]) -> Sequence[RankReport]:
        """Return the reports of known ranks that contain an iteration."""
        if isinstance(rows, Rows) and rows.numbers["iterations"].min(initial=1) > 0 and self._has_all(rows.ranks):
            return rows
        return [row for row in rows if row.iterations > 0 and row.rank in self.known]

    def _has_all(self, ranks: Sequence[int]) -> bool:
        return len(self.known) == self._max_rank + 1 > max(ranks, default=0) or self.known.keys() >= set(ranks)

    def grouped(self, rows: Sequence[RankReport]) -> Mapping[str, Sequence[RankReport]]:
        groups = [group for group, ranks in self.groups.items() if ranks]
        if len(groups) == 1:
            return {groups[0]: rows}
        members: dict[str, list[RankReport]] = {group: [] for group in groups}
        for row in rows:
            members[self.known[row.rank].group].append(row)
        return members


def iteration_s(rows: Sequence[RankReport]) -> float:
    """Return the median iteration time of about 100 ranks: synchronous training has equal times on all ranks."""
    return median(sorted(row.time_s / row.iterations for row in rows[:: max(len(rows) // 101, 1)]))


def gather(
    tracks: dict[Key, OutlierTrack],
    group: str,
    rows: Sequence[RankReport],
    whole_s: float,
    offsets: Mapping[int, Offset],
    is_named_for_data: bool,
) -> None:
    """Judge a group's window by all available evidence.

    Args:
        tracks: tracks to which the results are added.
        group: name of the group.
        rows: reports of at least two ranks, each with at least one iteration.
        whole_s: duration of an iteration.
        offsets: known offsets of the ranks' clocks from the aggregator's clock.
        is_named_for_data: whether a rank is named for its data wait, so that data waits must be judged.
    """
    # Ten thousand reports take only a few milliseconds, because of the maps and the early checks for missing evidence.
    measured, values = own_times(rows)
    if len(measured) > 1:
        _track(tracks, group, OWN_TIME).look(measured, values)
    has_profiles = rows.profile is not None if isinstance(rows, Rows) else any(map(_PROFILE, rows))
    profiles = [(row, row.profile) for row in rows if row.profile is not None] if has_profiles else []
    profiles = [(row, profile) for row, profile in profiles if profile.iterations and profile.computing_s]
    if len(profiles) > 1:
        computing = [profile.computing_s / profile.iterations for _, profile in profiles]
        _track(tracks, group, PROFILE).look([row for row, _ in profiles], computing)
    _look_at_data(_track(tracks, group, DATA_WAIT), rows, whole_s, is_named_for_data)
    if not offsets or (len(rows) >= LARGE_GROUP and rows[0].window % ARRIVALS_EVERY) or not any(map(_ARRIVAL, rows)):
        return
    last = rows[0].iteration_last
    came = [row for row in rows if row.arrival_ns and row.iteration_last == last and row.rank in offsets]
    if len(came) > 2:
        _look_at_arrivals(_track(tracks, group, ARRIVAL), came, whole_s, offsets)


def own_times(rows: Sequence[RankReport]) -> tuple[Sequence[RankReport], Sequence[float]]:
    """Return the reports with own times, and the own time per iteration of each report.

    Own times on the device are used if all reports have them.  An own time on the host is the median of the window, so
    a disturbed iteration has no effect.
    """
    if all(row.device_own_steps for row in rows):
        return rows, [row.device_own_step_s / row.device_own_steps for row in rows]
    medians = list(map(_OWN, rows))
    if None not in medians:
        return rows, medians
    measured = [row for row in rows if row.own_median_s is not None]
    return measured, [row.own_median_s for row in measured if row.own_median_s is not None]


def _track(tracks: dict[Key, OutlierTrack], group: str, evidence: str) -> OutlierTrack:
    return tracks.setdefault((group, evidence), OutlierTrack())


def _look_at_data(track: OutlierTrack, rows: Sequence[RankReport], whole_s: float, is_needed: bool) -> None:
    if isinstance(rows, Rows):
        iterations, wait_s, busy_s = (rows.numbers[name] for name in ("iterations", "wait_s", "busy_s"))
    else:
        iterations, wait_s, busy_s = fields_of(rows, ("iterations", "wait_s", "busy_s")).T
    waits = wait_s / iterations
    # Of two ranks, small waits are needed too: they are a part of the usual difference.
    if len(rows) > 2 and float(waits.max()) < Z * FLOOR * whole_s and not is_needed:
        track.pass_by(rows)
        return
    busy = (busy_s / iterations).tolist()
    others_busy_s = median(sorted(busy)) if len(busy) > 2 else max(busy)
    # During a rank's data wait the other ranks wait in their steps, so the steps of this rank are shorter.
    track.look(rows, waits.tolist(), whole_s, lambda index, excess_s: others_busy_s - busy[index] >= excess_s / 2)


def _look_at_arrivals(
    track: OutlierTrack, rows: Sequence[RankReport], whole_s: float, offsets: Mapping[int, Offset]
) -> None:
    known = [offsets[row.rank] for row in rows]
    times = [row.arrival_ns * NS + offset.offset_s for row, offset in zip(rows, known, strict=True)]
    first_s = min(times)
    error_s = median(sorted(offset.error_s for offset in known))
    track.look(
        rows,
        [time_s - first_s for time_s in times],
        whole_s,
        lambda index, excess_s: excess_s >= CLOCK_ERRORS * (known[index].error_s + error_s),
    )
