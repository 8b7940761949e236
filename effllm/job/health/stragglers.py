"""Detects stragglers, with their reasons and costs, from the windows of ranks. No I/O.

In synchronous training all ranks have equal iteration times, because fast ranks wait for slow ranks.  So a rank is
judged by four kinds of evidence: own time until its first wait for other ranks, computation in profiled iterations,
data wait, and order of arrival.  A rank is compared by robust z with its peers only, which are the ranks with the same
work.  A rank is named if it is an outlier in several windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from effllm.job.health.change_point import Slowdown
from effllm.job.health.clock import Offset
from effllm.job.health.evidence import Key, Peer, PeerGroups, gather, iteration_s
from effllm.job.health.outliers import HISTORY, PERSIST, WINDOWS, Z_CLEAR, Look, OutlierTrack
from effllm.job.health.slowest import Slowest
from effllm.job.health.straggler_reasons import Reasons, Unit, events_of, waiting_w
from effllm.records.job import ARRIVAL, DATA_WAIT, EVIDENCE, OWN_TIME, PROFILE, Straggler, StragglerVerdict
from effllm.records.rank import Event, RankReport

#: Maximum number of verdicts in a report, and of verdicts with totals.
MAX_VERDICTS, MAX_KEPT = 16, 64


class Straggling(NamedTuple):
    """The stragglers of one window, and their costs."""

    seconds: float | None = None  # wait of each rank for the slowest named rank; None if no rank measures its own time
    rank_seconds: float = 0.0  # sum of the waits of all ranks
    joules: float | None = None  # energy of the waiting ranks' devices during these waits
    by_window: Mapping[int, float] = {}  # rank-seconds by window, also earlier windows of newly named ranks
    events: Sequence[Event] = ()
    slowest: Straggler | None = None  # the slowest rank of the window
    is_compared: bool = False  # whether own times of ranks were compared


class _Named(Struct):
    """A current verdict."""

    verdict: StragglerVerdict
    lows: deque[bool]  # whether z was low, for each of the last windows


class Stragglers:
    """Judges the closed windows of a job.

    Args:
        totals: earlier verdicts by their ranks, to which costs are added.
    """

    def __init__(self, totals: dict[str, StragglerVerdict] | None = None) -> None:
        self._totals = {} if totals is None else totals
        self._peers = PeerGroups()
        self._tracks: dict[Key, OutlierTrack] = {}
        self._named: dict[Unit, _Named] = {}
        self._lately: dict[int, int] = {}  # rank -> last window in which it was named
        self._counted_s: dict[int, float] = {}  # rank-seconds of the last windows, by window
        self._reasons = Reasons(self._peers)
        self._slowdown = Slowdown()
        self._slowest: dict[str, Slowest] = {}  # by group

    def meet(self, rank: int, peer: Peer) -> None:
        self._peers.meet(rank, peer)

    @property
    def verdicts(self) -> tuple[StragglerVerdict, ...]:
        """Current verdicts, at most `MAX_VERDICTS`, the costliest first."""
        return tuple(_costliest(one.verdict for one in self._named.values())[:MAX_VERDICTS])

    @property
    def num_named(self) -> int:
        return sum(map(len, self._named))

    def totals(self) -> tuple[StragglerVerdict, ...]:
        """Return all verdicts so far with their cost, the costliest first."""
        return tuple(_costliest(self._totals.values()))

    def close(self, rows: Sequence[RankReport], offsets: Mapping[int, Offset] | None = None) -> Straggling:
        """Judge the next window; windows come in ascending order.

        Args:
            rows: one report per rank.
            offsets: known offsets of the ranks' clocks from the aggregator's clock.
        """
        worked = self._peers.at_work(rows)
        if len(worked) < 2:
            return Straggling()
        window, whole_s = worked[0].window, iteration_s(worked)
        is_named_for_data = any(one.verdict.evidence == DATA_WAIT for one in self._named.values())
        for group, members in self._peers.grouped(worked).items():
            if len(members) > 1:
                gather(self._tracks, group, members, whole_s, offsets or {}, is_named_for_data)
        newest = {key: track.looks[-1] for key, track in self._tracks.items() if track.looks}
        looks = {key: look for key, look in newest.items() if look.window == window}
        cleared = self._clear(looks)
        fresh = self._name(looks, window)
        straggling = self._count(looks, worked, fresh)
        own = [look.median_s for (_, evidence), look in looks.items() if evidence == OWN_TIME]
        slower = self._slowdown.add(worked[0], whole_s, sum(own) / len(own) if own else None, bool(self._named))
        hosts, has_gpus = self._peers.hosts, self._peers.known[worked[0].rank].is_gpu
        time_s = rows[-1].end_time_s
        events = [
            *events_of("recovered", [one.verdict for one in cleared.values()], hosts, has_gpus, time_s),
            *events_of("straggler", [self._named[unit].verdict for unit in fresh], hosts, has_gpus, time_s),
            *([slower] if slower else []),
        ]
        is_known = bool(own or self._named)
        return straggling._replace(
            seconds=straggling.seconds if is_known else None,
            events=events,
            slowest=self._slowest_of(looks),
            is_compared=bool(own),
        )

    def _slowest_of(self, looks: Mapping[Key, Look]) -> Straggler | None:
        """Return the slowest rank of all groups in a window."""
        found = []
        for (group, evidence), look in looks.items():
            if evidence == OWN_TIME:
                # In a replica of several ranks, own times contain waits for other ranks of the replica.
                skipped = self._peers.in_replicas()
                found.append(self._slowest.setdefault(group, Slowest()).add(look.ranks, look.values, skipped))
        return max(filter(None, found), key=lambda one: one.time_s / one.median_s, default=None)

    # --- verdicts ---

    def _look_of(self, rank: int, evidence: str, looks: Mapping[Key, Look]) -> Look | None:
        return looks.get((self._peers.known[rank].group, evidence))

    def _track_of(self, rank: int, evidence: str) -> OutlierTrack:
        return self._tracks[self._peers.known[rank].group, evidence]

    def _name(self, looks: Mapping[Key, Look], window: int) -> list[Unit]:
        """Name the ranks that are outliers in enough windows; return the newly named ranks.

        Ranks of one replica wait for each other before the sync point, so they are late together. Unless computation or
        data wait identifies the slow rank, all ranks of the replica share one verdict.
        """
        self._lately = {rank: last for rank, last in self._lately.items() if window - last <= HISTORY}
        found: list[tuple[Unit, str]] = []
        together: dict[tuple[str, str], list[int]] = {}
        for evidence in EVIDENCE:
            for (group, kind), look in looks.items():
                if kind != evidence or not look.flags:
                    continue
                track = self._tracks[group, kind]
                for rank in self._with_node(track, track.candidates(self._lately)):
                    if len(self._peers.mates(rank)) > 1 and evidence in (OWN_TIME, ARRIVAL):
                        together.setdefault((self._peers.known[rank].replica, evidence), []).append(rank)
                    else:
                        found.append(((rank,), evidence))
        found += [(tuple(sorted(ranks)), evidence) for (_, evidence), ranks in together.items()]
        fresh = []
        taken = {rank for unit in self._named for rank in unit}
        for unit, evidence in found:
            if not any(taken & self._peers.mates(rank) for rank in unit):
                self._named[unit] = _Named(self._verdict(unit, evidence), deque(maxlen=WINDOWS))
                taken |= {*unit}
                fresh.append(unit)
        self._lately.update(dict.fromkeys(taken, window))
        return fresh

    def _with_node(self, track: OutlierTrack, ranks: list[int]) -> list[int]:
        """Return the candidates, and all ranks of a node if each was an outlier in at least ``PERSIST - 1`` windows."""
        found = dict.fromkeys(ranks)
        for host in {self._peers.known[rank].host for rank in ranks}:
            mates = self._peers.hosts[host]
            if len(mates) > 1 and all(track.times(mate) >= PERSIST - 1 for mate in mates):
                found.update(dict.fromkeys(sorted(mates)))
        return list(found)

    def _verdict(self, unit: Unit, evidence: str) -> StragglerVerdict:
        of = {rank: self._track_of(rank, evidence) for rank in unit}
        worst = max(unit, key=lambda rank: of[rank].slowdown(rank))
        hosts = {self._peers.known[rank].host for rank in unit}
        return StragglerVerdict(
            ranks=unit,
            host=hosts.pop() if len(hosts) == 1 else "",
            device=self._peers.known[worst].device if len(unit) == 1 else "",
            since_iteration=min(track.outlier_looks(rank)[0].shown for rank, track in of.items()),
            slowdown=of[worst].slowdown(worst),
            z=of[worst].z(worst),
            peers=len(of[worst].looks[-1].ranks) - 1,
            evidence=evidence,
        )

    def _clear(self, looks: Mapping[Key, Look]) -> dict[Unit, _Named]:
        """Remove and return the verdicts on ranks that are no longer outliers."""
        cleared = {}
        for unit, named in self._named.items():
            distances = [
                excess_s / look.scale_s
                for rank in unit
                if (look := self._look_of(rank, named.verdict.evidence, looks)) is not None
                and (excess_s := look.excess_s(rank)) is not None
            ]
            if distances:
                named.lows.append(max(distances) < Z_CLEAR)
                if named.lows[-1] and sum(named.lows) >= PERSIST:
                    cleared[unit] = named
        for unit in cleared:
            del self._named[unit]
        return cleared

    # --- cost ---

    def _count(self, looks: Mapping[Key, Look], rows: Sequence[RankReport], fresh: Sequence[Unit]) -> Straggling:
        """Record the costs of named ranks in this window, and of newly named ranks in earlier windows too.

        All ranks wait for the slowest rank. The named ranks share the cost of this wait in proportion to their excess.
        """
        if not self._named:
            return Straggling(0.0)
        excess = {
            unit: self._excess_s(unit, named.verdict.evidence, looks, rows) for unit, named in self._named.items()
        }
        own = dict(excess)
        waited = len(rows) - len(self._named)
        seconds = max(excess.values())
        by_window = {rows[0].window: seconds * waited}
        whole_s = sum(excess.values())
        shares = {unit: seconds * waited * one / whole_s if whole_s > 0 else 0.0 for unit, one in excess.items()}
        for unit in fresh:
            for window, late_s in self._late_before(unit, rows[0].window).items():
                counted_s = self._counted_s.get(window, 0.0) + by_window.get(window, 0.0)
                more_s = max(late_s * waited - counted_s, 0.0)
                by_window[window] = by_window.get(window, 0.0) + more_s
                shares[unit] += more_s
                own[unit] += late_s if more_s else 0.0
        for window, late_s in by_window.items():
            self._counted_s[window] = self._counted_s.get(window, 0.0) + late_s
        self._counted_s = {
            window: late_s for window, late_s in self._counted_s.items() if window > rows[0].window - WINDOWS
        }
        power = waiting_w(self._peers, rows, {rank for unit in self._named for rank in unit})
        self._reasons.open(rows, self._named)
        for unit, share in shares.items():
            self._enter(unit, share, own[unit], None if power is None else share * power, looks)
        rank_seconds = sum(by_window.values())
        return Straggling(seconds, rank_seconds, None if power is None else rank_seconds * power, by_window)

    def _late_before(self, unit: Unit, window: int) -> dict[int, float]:
        """Return for each earlier window the excess of the slowest of these ranks, in seconds."""
        late_s: dict[int, float] = {}
        for rank in unit:
            for look in self._track_of(rank, self._named[unit].verdict.evidence).outlier_looks(rank):
                if look.window < window:
                    late_s[look.window] = max(late_s.get(look.window, 0.0), look.flags[rank] * look.iterations)
        return late_s

    def _excess_s(self, unit: Unit, evidence: str, looks: Mapping[Key, Look], rows: Sequence[RankReport]) -> float:
        """Return the excess of the slowest of these ranks in a window, in seconds; 0 if no rank is slow.

        Windows between profiled iterations have the excess of the last profile.
        """
        max_s = 0.0
        for rank in unit:
            look = self._look_of(rank, evidence, looks)
            if look is None and evidence == PROFILE:
                look = self._track_of(rank, evidence).recent(rows[0].window, rows[0].iterations)
            excess_s = look.excess_s(rank) if look is not None else None
            if look is not None and excess_s is not None and excess_s >= Z_CLEAR * look.scale_s:
                max_s = max(max_s, excess_s * look.iterations)
        return max_s

    def _enter(
        self,
        unit: Unit,
        rank_seconds: float,
        own_s: float,
        joules: float | None,
        looks: Mapping[Key, Look],
    ) -> None:
        named, key = self._named[unit], ",".join(map(str, unit))
        verdict = named.verdict
        look = self._look_of(unit[0], verdict.evidence, looks)
        found = self._reasons.of(verdict, look)
        if found is not None:
            verdict = replace(verdict, why=found.text, differences=found.kinds)
        if len(unit) == 1 and look is not None and unit[0] in look.flags:
            track = self._track_of(unit[0], verdict.evidence)
            verdict = replace(verdict, slowdown=track.slowdown(unit[0]), z=track.z(unit[0]))
        named.verdict = replace(
            verdict,
            gpu_seconds=verdict.gpu_seconds + rank_seconds,
            own_seconds=verdict.own_seconds + own_s,
            joules=_sum(verdict.joules, joules, not verdict.gpu_seconds),
        )
        kept = self._totals.get(key)
        self._totals[key] = _with(kept, named.verdict, found is not None, rank_seconds, own_s, joules)
        if len(self._totals) > MAX_KEPT:
            cheapest = min(self._totals, key=lambda one: self._totals[one].gpu_seconds)
            del self._totals[cheapest]


def _with(
    total: StragglerVerdict | None,
    verdict: StragglerVerdict,
    has_reason: bool,
    rank_seconds: float,
    own_s: float,
    joules: float | None,
) -> StragglerVerdict:
    """Return the total of all verdicts on the same ranks, with the costs of one more window."""
    if total is None:
        return replace(verdict, gpu_seconds=rank_seconds, own_seconds=own_s, joules=joules)
    reason = verdict if has_reason else total
    return replace(
        verdict,
        since_iteration=total.since_iteration,
        why=reason.why,
        differences=reason.differences,
        gpu_seconds=total.gpu_seconds + rank_seconds,
        own_seconds=total.own_seconds + own_s,
        joules=_sum(total.joules, joules, False),
    )


def _costliest(verdicts: Iterable[StragglerVerdict]) -> list[StragglerVerdict]:
    return sorted(verdicts, key=lambda one: -one.gpu_seconds)


def _sum(before: float | None, more: float | None, is_first: bool) -> float | None:
    """Return a sum, or ``None`` if a part is missing."""
    if is_first:
        return more
    return None if before is None or more is None else before + more
