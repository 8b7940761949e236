"""Detects slow ranks, with their reasons and costs, from the windows of ranks. No I/O.

In synchronous training all ranks have equal iteration times, because fast ranks wait for slow ranks.  So ranks are
compared by their own time until the first wait for other ranks, by the time of profiled iterations without waits, and
by their waits for data; each rank only with its peers, which do the same work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from effllm.job.health.comparison import NUM_BLOCKS, SLOW, RankComparison, Slow
from effllm.job.health.own_times import UNLIKE, CountedWaits, Times, by_iteration, by_window, data_waits, in_profiles
from effllm.job.health.peers import Peer, PeerGroups
from effllm.job.health.straggler_reasons import Reasons, Unit, events_of, mean_waiting_w
from effllm.job.iteration_losses import IterationMatrix, LostTime
from effllm.records.rank import Event, RankReport
from effllm.records.verdict import DATA_WAIT, OWN_TIME, PROFILE, LastRanks, Straggler, StragglerVerdict

#: Maximum number of verdicts in a report, and of verdicts with totals.
MAX_VERDICTS, MAX_KEPT = 16, 64
#: Maximum number of windows whose long iterations are not known yet, and of windows to which waits are added later.
MAX_PENDING, MAX_WINDOWS = 64, 512
_SECONDS = ("gpu_seconds", "own_seconds", "max_seconds")  # costs of a verdict


#: Evidence -> comparison.  An own time that ends at ``backward`` is a part of the work: a rank that is slow in it is
#: mostly slow in the rest, too.  A profile is one iteration.
COMPARISONS: Mapping[str, Callable[[], RankComparison]] = {
    OWN_TIME: lambda: RankComparison(min_base=0.5),
    PROFILE: lambda: RankComparison(1, 0.0),
    DATA_WAIT: RankComparison,
}


class Straggling(NamedTuple):
    """The slow ranks of one window, and the waits of the ranks for each other."""

    seconds: float | None = None  # wait of each rank for the slowest named rank; None if no rank measures its own time
    rank_seconds: float = 0.0  # sum of the waits of the ranks that are not named
    joules: float | None = None  # energy of the waiting ranks' devices during these waits
    lost: Sequence[LostTime] = ()  # waits of all ranks, also corrections of earlier windows for newly named ranks
    events: Sequence[Event] = ()
    slowest: Straggler | None = None  # the slowest named rank


class _Named(Struct):
    verdict: StragglerVerdict  # current
    slow: dict[int, Slow]  # its slow ranks
    last: float = 0.0  # number of iterations in which one of its ranks was the last one
    iterations: float = 0.0  # number of iterations with own times since the verdict


class _Window(NamedTuple):
    number: int
    shown: int  # displayed number of the last iteration
    iterations: int
    num_ranks: int
    time_s: float  # of the iterations of a rank


class Stragglers:
    """Judges the closed windows of a job, and adds the costs to ``totals``: earlier verdicts by their ranks."""

    def __init__(self, totals: dict[str, StragglerVerdict], last_ranks: LastRanks) -> None:
        self._totals, self.waits = totals, CountedWaits(last_ranks)
        self.peers = PeerGroups()
        self._comparisons: dict[tuple[str, str], RankComparison] = {}  # by group and evidence
        self._named: dict[Unit, _Named] = {}  # current verdicts
        self._pending: dict[int, tuple[Sequence[RankReport], IterationMatrix]] = {}  # by number: windows to judge later
        self._reasons = Reasons(self.peers)
        self._earlier: deque[_Window] = deque(maxlen=MAX_WINDOWS)  # judged windows

    @property
    def verdicts(self) -> tuple[StragglerVerdict, ...]:
        """Current verdicts, at most `MAX_VERDICTS`, the costliest first."""
        costliest = sorted((named.verdict for named in self._named.values()), key=lambda verdict: -verdict.gpu_seconds)
        return tuple(costliest[:MAX_VERDICTS])

    @property
    def named_ranks(self) -> set[int]:
        return {rank for unit in self._named for rank in unit}

    def judge_window(
        self, rows: Sequence[RankReport], matrix: IterationMatrix | None, lost: Sequence[LostTime] = ()
    ) -> Straggling:
        """Judge windows: this one, or earlier ones that wait until ``lost`` has their long iterations; in order."""
        worked, straggling = self.peers.reports_with_iterations(rows), Straggling()
        if matrix is not None and len(worked) == len(rows) > 1:
            self._pending[matrix.window] = worked, matrix
            if len(self._pending) > MAX_PENDING:
                del self._pending[min(self._pending)]
            straggling = Straggling(0.0 if (matrix.own is not None and self.peers.has_peers) or self._named else None)
        elif len(worked) > 1:
            straggling = self._judge(worked, None, ())
        for loss in lost:
            if loss.is_long and loss.window in self._pending:
                more = self._judge(*self._pending.pop(loss.window), loss.is_long)
                straggling = more._replace(
                    rank_seconds=straggling.rank_seconds + more.rank_seconds,
                    joules=_known_sum(straggling.joules, more.joules, not straggling.rank_seconds),
                    lost=(*straggling.lost, *more.lost),
                    events=(*straggling.events, *more.events),
                )
        return straggling

    def _judge(self, rows: Sequence[RankReport], matrix: IterationMatrix | None, is_long: Sequence[bool]) -> Straggling:
        """Update the verdicts by a window, whose iterations ``is_long`` describes, and count its waits."""
        own = by_window(rows, is_on_device=True)
        if own is None and matrix is not None:
            own = by_iteration(matrix, is_long)
        own = own or by_window(rows, is_on_device=False)
        waits, profiles = data_waits(rows, matrix), in_profiles(rows)
        slow = {
            evidence: self._slow_ranks(evidence, times)
            for evidence, times in ((OWN_TIME, own), (PROFILE, profiles), (DATA_WAIT, waits))
            if times is not None
        }
        slow[PROFILE] = [profiled for profiled in slow.get(PROFILE, ()) if _is_usual(profiled, self._earlier)]
        cleared = self._clear_recovered()
        new_units = self._name_slow_ranks(slow)
        self._update_slowdowns()
        straggling = self._count_waits(rows, own, new_units)
        if profiles is not None:
            groups = list(self.peers.places_by_group(profiles.ranks).values())
            self.waits.count_profiles(profiles, own, rows, groups, self.named_ranks, any(is_long))
        self._count_data(rows, matrix, new_units)
        named, hosts = self.named_ranks, self.peers.hosts
        has_gpus, time_s = self.peers.by_rank[rows[0].rank].is_gpu, rows[-1].end_time_s
        events = [
            *events_of("recovered", cleared, named, hosts, has_gpus, time_s),
            *events_of("straggler", [self._named[unit].verdict for unit in new_units], named, hosts, has_gpus, time_s),
        ]
        is_known = (own is not None and self.peers.has_peers) or bool(self._named)
        return straggling._replace(
            seconds=straggling.seconds if is_known else None,
            events=events,
            slowest=_slowest(self._named_for(OWN_TIME)),
        )

    # --- verdicts ---

    def _slow_ranks(self, evidence: str, times: Times) -> list[Slow]:
        """Add times to the comparisons; return the ranks that are slow now, of all groups."""
        slow: list[Slow] = []
        for group, places in self.peers.places_by_group(times.ranks).items():
            key = group, evidence
            if key not in self._comparisons:
                self._comparisons[key] = COMPARISONS[evidence]()
            is_whole = len(places) == len(times.ranks)
            ranks = times.ranks if is_whole else [times.ranks[place] for place in places]
            values = times.values if is_whole else times.values[places]
            slow += self._comparisons[key].add_times(ranks, values, times.weights, times.iterations_s, times.shown)
        return slow

    def _comparison(self, rank: int, evidence: str) -> RankComparison:
        return self._comparisons[self.peers.by_rank[rank].group, evidence]

    def _name_slow_ranks(self, slow: Mapping[str, Sequence[Slow]]) -> list[Unit]:
        """Give new verdicts to slow ranks, by evidence; return their units: a unit is the ranks of one verdict.

        Ranks of one replica wait for each other before the sync point, so their own times are long together: all ranks
        of the replica share one verdict, unless a profile or a wait for data identifies the slow rank.
        """
        new_units = []
        for evidence, candidates in slow.items():
            units: dict[Unit, dict[int, Slow]] = {}
            for candidate in self._with_slow_nodes(candidates, evidence):
                ranks = self.peers.replica_ranks(candidate.rank) if evidence == OWN_TIME else {candidate.rank}
                units.setdefault(tuple(sorted(ranks)), {})[candidate.rank] = candidate
            already_named = self.named_ranks
            for unit, by_rank in units.items():
                if not any(already_named & self.peers.replica_ranks(rank) for rank in unit):
                    group = self.peers.groups[self.peers.by_rank[min(by_rank)].group]
                    verdict = _new_verdict(self.peers.by_rank, unit, by_rank, evidence, len(group) - 1)
                    self._named[unit] = _Named(verdict, by_rank)
                    new_units.append(unit)
        return new_units

    def _with_slow_nodes(self, slow: Sequence[Slow], evidence: str) -> list[Slow]:
        """Return the slow ranks, and the other ranks of their nodes, if the mean excess of all of these is large.

        One rank may be slow by chance, but not all ranks of a node.
        """
        by_rank = {candidate.rank: candidate for candidate in slow}
        for candidate in slow:
            peer = self.peers.by_rank[candidate.rank]
            mates = self.peers.hosts[peer.host] & self.peers.groups[peer.group]
            comparison = self._comparison(candidate.rank, evidence)
            others = sorted(mates - by_rank.keys())
            excess = [comparison.excess_now(rank, candidate.level, candidate.since) for rank in others]
            if all(mate is not None and comparison.excess_share(mate) >= SLOW for mate in excess):
                by_rank |= {mate.rank: mate for mate in excess if mate is not None}
        return list(by_rank.values())

    def _update_slowdowns(self) -> None:
        """Compute the slowdowns again, from all blocks since the ranks are slow."""
        for named in self._named.values():
            evidence = named.verdict.evidence
            for rank, slow in named.slow.items():
                named.slow[rank] = self._comparison(rank, evidence).excess_now(rank, slow.level, slow.since) or slow
            named.verdict = replace(named.verdict, slowdown=_slowdown(_worst(named.slow), evidence))

    def _clear_recovered(self) -> list[StragglerVerdict]:
        """Remove and return the verdicts on ranks that are no longer slow."""
        cleared = []
        for named in self._named.values():
            evidence, slow_ranks = named.verdict.evidence, named.slow.items()
            if all(self._comparison(rank, evidence).has_recovered(rank, slow.level) for rank, slow in slow_ranks):
                cleared.append(named)
        for named in cleared:
            for rank in named.slow:
                self._comparison(rank, named.verdict.evidence).forget((rank,))
            del self._named[named.verdict.ranks]
        return [named.verdict for named in cleared]

    # --- cost ---

    def _count_waits(self, rows: Sequence[RankReport], own: Times | None, new_units: Sequence[Unit]) -> Straggling:
        """Record the waits of this window, and the waits for newly named ranks in earlier windows."""
        lost: list[LostTime] = []
        seconds = bound_s = 0.0  # wait of each rank for slow ranks in this window; upper bound, also of earlier windows
        if own is not None:
            slow = {rank for unit in self._named_for(OWN_TIME) for rank in unit}
            since = min((self._named[unit].verdict.since_iteration for unit in new_units), default=None)
            groups = list(self.peers.places_by_group(own.ranks).values())
            lost, seconds, bound_s = self.waits.count_waits(own, groups, len(rows), slow, since)
            for unit, named in self._named.items():
                named.last += sum(self.waits.last.get(rank, 0.0) for rank in unit)
                named.iterations += float(own.weights.sum())
        straggling_s = sum(loss.straggling_s for loss in lost) / len(rows)  # also in earlier windows
        for_work = self._named_for(OWN_TIME) | self._named_for(PROFILE)
        profiled = [self._profiled_excess_s(slow) for named in for_work.values() for slow in named.slow.values()]
        profiled_s = max(profiled, default=0.0) * rows[0].iterations
        if profiled_s > seconds:  # the own times on the host do not show the whole excess
            more_s, seconds = profiled_s - seconds, profiled_s
            straggling_s, bound_s = straggling_s + more_s, bound_s + more_s
            lost.append(LostTime(rows[0].window, straggling_s=more_s * len(rows)))
        newly_named = [named for unit, named in self._named_for(PROFILE).items() if unit in new_units]
        earlier_lost = list(_earlier_waits(newly_named, self._earlier))
        lost += earlier_lost
        earlier_s = sum(loss.straggling_s for loss in earlier_lost) / len(rows)
        straggling_s, bound_s = straggling_s + earlier_s, bound_s + earlier_s
        row = rows[0]
        self._earlier.append(_Window(row.window, row.iteration_shown, row.iterations, len(rows), row.time_s))
        rank_seconds, joules = self._divide(rows, straggling_s, max(bound_s, straggling_s))
        return Straggling(seconds, rank_seconds, joules, [loss for loss in lost if loss.straggling_s or loss.uneven_s])

    def _profiled_excess_s(self, slow: Slow) -> float:
        """Return the excess of a slow rank in profiled iterations; 0 if it is not known."""
        comparison = self._comparisons.get((self.peers.by_rank[slow.rank].group, PROFILE))
        profiled = comparison.excess_now(slow.rank, 0, slow.since, NUM_BLOCKS[0]) if comparison is not None else None
        return profiled.excess_s if profiled is not None and _is_usual(profiled, self._earlier) else 0.0

    def _count_data(self, rows: Sequence[RankReport], matrix: IterationMatrix | None, units: Sequence[Unit]) -> None:
        """Record the waits for ranks that wait longer for data; for new ``units``, also earlier ones, by mean waits."""
        for unit, named in self._named_for(DATA_WAIT).items():
            (slow,) = named.slow.values()
            first_shown = rows[0].iteration_shown - rows[0].iterations + 1
            num_earlier = max(first_shown - slow.since, 0) if unit in units else 0  # slow iterations before this window
            seconds = slow.excess_s * (num_earlier + rows[0].iterations)
            if matrix is not None:
                places = np.array([place for place, row in enumerate(matrix.rows) if row.rank in unit], np.intp)
                seconds = slow.excess_s * num_earlier + float(matrix.lost_to_data(places) @ matrix.weights)
            reason = self._reasons.add_readings_and_explain(named.verdict, slow)
            assert reason is not None
            named.verdict = replace(named.verdict, why=reason.text)
            costs = {"gpu_seconds": seconds * (len(rows) - 1), "own_seconds": seconds}
            self._add_cost(unit, has_reason=True, joules=None, max_seconds=seconds * len(rows), **costs)

    def _named_for(self, evidence: str) -> dict[Unit, _Named]:
        return {unit: named for unit, named in self._named.items() if named.verdict.evidence == evidence}

    def _divide(self, rows: Sequence[RankReport], straggling_s: float, bound_s: float) -> tuple[float, float | None]:
        """Divide the waits among verdicts by their excess; return the sum of the other ranks' waits, and its joules."""
        for_work = self._named_for(OWN_TIME) | self._named_for(PROFILE)
        excess_s = {unit: max(_worst(named.slow).excess_s, 0.0) for unit, named in for_work.items()}
        num_named = sum(map(len, excess_s))
        num_others, total_s = max(len(rows) - num_named, 0), sum(excess_s.values())
        watts = mean_waiting_w(self.peers, rows, self.named_ranks) if for_work else None
        self._reasons.begin_window(rows, self._named)
        for unit, named in for_work.items():
            share = excess_s[unit] / total_s if total_s else 0.0
            reason = self._reasons.add_readings_and_explain(named.verdict, next(iter(named.slow.values())))
            if reason is not None:
                named.verdict = replace(named.verdict, why=reason.text, differences=reason.kinds)
            waits_s = share * straggling_s * num_others
            joules = None if watts is None else waits_s * watts
            own_s, max_s = share * straggling_s * num_named, share * bound_s * (num_others + num_named)
            self._add_cost(unit, reason is not None, joules, gpu_seconds=waits_s, own_seconds=own_s, max_seconds=max_s)
        rank_seconds = straggling_s * num_others if excess_s else 0.0
        return rank_seconds, None if watts is None else rank_seconds * watts

    def _add_cost(self, unit: Unit, has_reason: bool, joules: float | None, **seconds: float) -> None:
        """Add costs, ``seconds`` by their names in `_SECONDS`, to a verdict and to the total of its ranks."""
        named = self._named[unit]
        last_share = named.last / named.iterations if named.iterations else None
        named.verdict = _with_cost(replace(named.verdict, last_share=last_share), joules, seconds)
        _add_to_total(self._totals, named.verdict, has_reason, joules, seconds)


def _earlier_waits(newly_named: Iterable[_Named], windows: Sequence[_Window]) -> Iterator[LostTime]:
    """Yield the waits in earlier windows for ranks that profiles name now."""
    slow = [candidate for named in newly_named for candidate in named.slow.values()]
    for window in windows if slow else ():
        excess_s = max((candidate.excess_s for candidate in slow if window.shown >= candidate.since), default=0.0)
        yield LostTime(window.number, straggling_s=excess_s * window.iterations * window.num_ranks)


def _is_usual(profiled: Slow, windows: Sequence[_Window]) -> bool:
    """Whether profiled iterations last about as long as all others: long ones may have the period of the profiles."""
    since = [window for window in windows if window.shown >= profiled.since]
    total_s, iterations = sum(window.time_s for window in since), sum(window.iterations for window in since)
    return profiled.iteration_s * iterations <= UNLIKE * total_s


def _slowest(named_units: Mapping[Unit, _Named]) -> Straggler | None:
    """Return the slowest of the ranks that are named for their own time."""
    candidates = [slow for named in named_units.values() for slow in named.slow.values()]
    worst = max(candidates, key=lambda slow: slow.excess_s / slow.iteration_s, default=None)
    return None if worst is None else Straggler(worst.rank, worst.peers_s + worst.excess_s, worst.peers_s)


def _add_to_total(
    totals: dict[str, StragglerVerdict],
    verdict: StragglerVerdict,
    has_reason: bool,
    joules: float | None,
    seconds: Mapping[str, float],
) -> None:
    """Add the costs of one window to the total of all verdicts on the same ranks."""
    key = ",".join(map(str, verdict.ranks))
    total = totals.get(key) or replace(verdict, **dict.fromkeys(_SECONDS, 0.0), joules=None)
    costs, reason = {name: getattr(total, name) for name in (*_SECONDS, "joules")}, verdict if has_reason else total
    newest = replace(verdict, since_iteration=total.since_iteration, why=reason.why, differences=reason.differences)
    totals[key] = _with_cost(replace(newest, **costs), joules, seconds)
    if len(totals) > MAX_KEPT:
        del totals[min(totals, key=lambda ranks: totals[ranks].gpu_seconds)]


def _new_verdict(
    by_rank: Mapping[int, Peer], unit: Unit, slow: Mapping[int, Slow], evidence: str, peers: int
) -> StragglerVerdict:
    worst = _worst(slow)
    hosts = {by_rank[rank].host for rank in unit}
    return StragglerVerdict(
        ranks=unit,
        host=hosts.pop() if len(hosts) == 1 else "",
        device=by_rank[worst.rank].device if len(unit) == 1 else "",
        since_iteration=min(candidate.since for candidate in slow.values()),
        slowdown=_slowdown(worst, evidence),
        peers=peers,
        evidence=evidence,
    )


def _worst(slow: Mapping[int, Slow]) -> Slow:
    return max(slow.values(), key=lambda candidate: candidate.excess_s)


def _slowdown(slow: Slow, evidence: str) -> float:
    """Return the excess as a share of the peers' time; that of waits for data as a share of the iteration."""
    base_s = slow.iteration_s if evidence == DATA_WAIT else slow.peers_s
    return slow.excess_s / base_s if base_s > 0 else 0.0


def _with_cost(verdict: StragglerVerdict, joules: float | None, seconds: Mapping[str, float]) -> StragglerVerdict:
    sums = {name: getattr(verdict, name) + value for name, value in seconds.items()}
    return replace(verdict, joules=_known_sum(verdict.joules, joules, not verdict.gpu_seconds), **sums)


def _known_sum(before: float | None, more: float | None, is_first: bool) -> float | None:
    """Return a sum, or ``None`` if a part is missing."""
    if is_first:
        return more
    return None if before is None or more is None else before + more
