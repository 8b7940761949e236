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
    OWN_TIME: lambda: RankComparison(least=0.5),
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
    verdict: StragglerVerdict
    slow: dict[int, Slow]  # its slow ranks
    last: float = 0.0  # number of iterations in which one of its ranks was the last one
    iterations: float = 0.0


class _Window(NamedTuple):
    number: int
    shown: int  # displayed number of the last iteration
    iterations: int
    ranks: int
    time_s: float  # of the iterations of a rank


class Stragglers:
    """Judges the closed windows of a job, and adds the costs to ``totals``: earlier verdicts by their ranks."""

    def __init__(self, totals: dict[str, StragglerVerdict], last_ranks: LastRanks) -> None:
        self._totals, self.waits = totals, CountedWaits(last_ranks)
        self.peers = PeerGroups()
        self._comparisons: dict[tuple[str, str], RankComparison] = {}  # by group and evidence
        self._named: dict[Unit, _Named] = {}
        self._pending: dict[int, tuple[IterationMatrix, Sequence[RankReport]]] = {}
        self._reasons = Reasons(self.peers)
        self._earlier: deque[_Window] = deque(maxlen=MAX_WINDOWS)

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
        """Judge the next window; windows come in order, and wait until ``lost`` has their long iterations."""
        worked, straggling = self.peers.reports_with_iterations(rows), Straggling()
        if matrix is not None and len(worked) == len(rows) > 1:
            self._pending[matrix.window] = matrix, worked
            if len(self._pending) > MAX_PENDING:
                del self._pending[min(self._pending)]
            straggling = Straggling(0.0 if (matrix.own is not None and self.peers.has_peers) or self._named else None)
        elif len(worked) > 1:
            straggling = self._judge(worked, None, ())
        for loss in lost:
            if loss.is_long and loss.window in self._pending:
                earlier, of_window = self._pending.pop(loss.window)
                more = self._judge(of_window, earlier, loss.is_long)
                straggling = more._replace(
                    rank_seconds=straggling.rank_seconds + more.rank_seconds,
                    joules=_known_sum(straggling.joules, more.joules, not straggling.rank_seconds),
                    lost=(*straggling.lost, *more.lost),
                    events=(*straggling.events, *more.events),
                )
        return straggling

    def _judge(self, rows: Sequence[RankReport], matrix: IterationMatrix | None, is_long: Sequence[bool]) -> Straggling:
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
        fresh = self._name_slow_ranks(slow)
        self._update_slowdowns()
        straggling = self._count_waits(rows, own, fresh)
        if profiles is not None:
            groups = list(self.peers.places_by_group(profiles.ranks).values())
            self.waits.count_profiles(profiles, own, rows, groups, self.named_ranks, any(is_long))
        self._count_data(rows, matrix, fresh)
        named, hosts = self.named_ranks, self.peers.hosts
        has_gpus, time_s = self.peers.known[rows[0].rank].is_gpu, rows[-1].end_time_s
        recovered = [entry.verdict for entry in cleared.values()]
        events = [
            *events_of("recovered", recovered, named, hosts, has_gpus, time_s),
            *events_of("straggler", [self._named[unit].verdict for unit in fresh], named, hosts, has_gpus, time_s),
        ]
        is_known = (own is not None and self.peers.has_peers) or bool(self._named)
        return straggling._replace(
            seconds=straggling.seconds if is_known else None,
            events=events,
            slowest=_slowest(self._named_for(OWN_TIME)),
        )

    # --- verdicts ---

    def _slow_ranks(self, evidence: str, times: Times) -> list[Slow]:
        slow: list[Slow] = []
        for group, places in self.peers.places_by_group(times.ranks).items():
            key = group, evidence
            if key not in self._comparisons:
                self._comparisons[key] = COMPARISONS[evidence]()
            is_whole = len(places) == len(times.ranks)
            ranks = times.ranks if is_whole else [times.ranks[place] for place in places]
            values = times.values if is_whole else times.values[places]
            slow += self._comparisons[key].add(ranks, values, times.weights, times.iterations_s, times.shown)
        return slow

    def _comparison(self, rank: int, evidence: str) -> RankComparison:
        return self._comparisons[self.peers.known[rank].group, evidence]

    def _name_slow_ranks(self, slow: Mapping[str, Sequence[Slow]]) -> list[Unit]:
        """Name slow ranks; return the newly named ones.

        Ranks of one replica wait for each other before the sync point, so their own times are long together: all ranks
        of the replica share one verdict, unless a profile or a wait for data identifies the slow rank.
        """
        fresh = []
        for evidence, candidates in slow.items():
            units: dict[Unit, dict[int, Slow]] = {}
            for candidate in self._with_slow_nodes(candidates, evidence):
                together = self.peers.replica_ranks(candidate.rank) if evidence == OWN_TIME else {candidate.rank}
                units.setdefault(tuple(sorted(together)), {})[candidate.rank] = candidate
            taken = self.named_ranks
            for unit, ranks in units.items():
                if not any(taken & self.peers.replica_ranks(rank) for rank in unit):
                    group = self.peers.groups[self.peers.known[min(ranks)].group]
                    verdict = _new_verdict(self.peers.known, unit, ranks, evidence, len(group) - 1)
                    self._named[unit] = _Named(verdict, ranks)
                    fresh.append(unit)
        return fresh

    def _with_slow_nodes(self, slow: Sequence[Slow], evidence: str) -> list[Slow]:
        """Return the slow ranks, and the other ranks of a node on which the mean excess of all ranks is large.

        One rank may be slow by chance, but not all ranks of a node.
        """
        by_rank = {candidate.rank: candidate for candidate in slow}
        for candidate in slow:
            peer = self.peers.known[candidate.rank]
            mates = self.peers.hosts[peer.host] & self.peers.groups[peer.group]
            comparison = self._comparison(candidate.rank, evidence)
            now = [comparison.now(rank, candidate.level, candidate.since) for rank in sorted(mates - by_rank.keys())]
            if all(mate is not None and comparison.excess_share(mate) >= SLOW for mate in now):
                by_rank |= {mate.rank: mate for mate in now if mate is not None}
        return list(by_rank.values())

    def _update_slowdowns(self) -> None:
        """Compute the slowdowns again, from all blocks since the ranks are slow."""
        for named in self._named.values():
            evidence = named.verdict.evidence
            for rank, slow in named.slow.items():
                now = self._comparison(rank, evidence).now(rank, slow.level, slow.since)
                named.slow[rank] = now or slow
            worst = max(named.slow.values(), key=lambda slow: slow.excess_s)
            named.verdict = replace(named.verdict, slowdown=_slowdown(worst, evidence))

    def _clear_recovered(self) -> dict[Unit, _Named]:
        """Remove and return the verdicts on ranks that are no longer slow."""
        cleared = {}
        for unit, named in self._named.items():
            evidence = named.verdict.evidence
            if all(self._comparison(rank, evidence).has_recovered(rank, one.level) for rank, one in named.slow.items()):
                cleared[unit] = named
        for unit, named in cleared.items():
            for rank in named.slow:
                self._comparison(rank, named.verdict.evidence).forget((rank,))
            del self._named[unit]
        return cleared

    # --- cost ---

    def _count_waits(self, rows: Sequence[RankReport], own: Times | None, fresh: Sequence[Unit]) -> Straggling:
        """Record the waits of this window, and the waits for newly named ranks in earlier windows."""
        lost: list[LostTime] = []
        seconds = bound_s = 0.0
        if own is not None:
            slow = {rank for unit in self._named_for(OWN_TIME) for rank in unit}
            since = min((self._named[unit].verdict.since_iteration for unit in fresh), default=None)
            groups = list(self.peers.places_by_group(own.ranks).values())
            lost, seconds, bound_s = self.waits.count(own, groups, len(rows), slow, since)
            for unit, named in self._named.items():
                named.last += sum(self.waits.last.get(rank, 0.0) for rank in unit)
                named.iterations += float(own.weights.sum())
        straggling_s = sum(loss.straggling_s for loss in lost) / len(rows)
        for_work = self._named_for(OWN_TIME) | self._named_for(PROFILE)
        profiled = [self._profiled_excess_s(slow) for named in for_work.values() for slow in named.slow.values()]
        profiled_s = max(profiled, default=0.0) * rows[0].iterations
        if profiled_s > seconds:  # the own times on the host do not show the whole excess
            more_s, seconds = profiled_s - seconds, profiled_s
            straggling_s, bound_s = straggling_s + more_s, bound_s + more_s
            lost.append(LostTime(rows[0].window, straggling_s=more_s * len(rows)))
        of_profiles = self._named_for(PROFILE)
        lost += (
            before := list(_waits_before([of_profiles[unit] for unit in fresh if unit in of_profiles], self._earlier))
        )
        before_s = sum(loss.straggling_s for loss in before) / len(rows)
        straggling_s, bound_s = straggling_s + before_s, bound_s + before_s
        row = rows[0]
        self._earlier.append(_Window(row.window, row.iteration_shown, row.iterations, len(rows), row.time_s))
        rank_seconds, joules = self._divide(rows, straggling_s, max(bound_s, straggling_s))
        return Straggling(seconds, rank_seconds, joules, [loss for loss in lost if loss.straggling_s or loss.uneven_s])

    def _profiled_excess_s(self, slow: Slow) -> float:
        """Return the excess of a slow rank in profiled iterations; 0 if it is not known."""
        comparison = self._comparisons.get((self.peers.known[slow.rank].group, PROFILE))
        profiled = comparison.now(slow.rank, 0, slow.since, NUM_BLOCKS[0]) if comparison is not None else None
        return profiled.excess_s if profiled is not None and _is_usual(profiled, self._earlier) else 0.0

    def _count_data(self, rows: Sequence[RankReport], matrix: IterationMatrix | None, fresh: Sequence[Unit]) -> None:
        """Record the waits for ranks that wait longer for data; of earlier windows, by their mean waits."""
        for unit, named in self._named_for(DATA_WAIT).items():
            (slow,) = named.slow.values()
            before = max(rows[0].iteration_shown - rows[0].iterations + 1 - slow.since, 0) if unit in fresh else 0
            seconds = slow.excess_s * (before + rows[0].iterations)
            if matrix is not None:
                removed = np.array([place for place, row in enumerate(matrix.rows) if row.rank in unit], np.intp)
                seconds = slow.excess_s * before + float(matrix.lost_to_data(removed) @ matrix.weights)
            reason = self._reasons.add_readings_and_explain(named.verdict, slow)
            assert reason is not None
            named.verdict = replace(named.verdict, why=reason.text)
            self._add_cost(
                unit,
                has_reason=True,
                joules=None,
                gpu_seconds=seconds * (len(rows) - 1),
                own_seconds=seconds,
                max_seconds=seconds * len(rows),
            )

    def _named_for(self, evidence: str) -> dict[Unit, _Named]:
        return {unit: named for unit, named in self._named.items() if named.verdict.evidence == evidence}

    def _divide(self, rows: Sequence[RankReport], straggling_s: float, bound_s: float) -> tuple[float, float | None]:
        """Divide the waits among the verdicts, in proportion to their excess; return the rank-seconds and joules."""
        for_work = self._named_for(OWN_TIME) | self._named_for(PROFILE)
        excess = {unit: max(max(one.excess_s for one in named.slow.values()), 0.0) for unit, named in for_work.items()}
        num_named = sum(map(len, excess))
        others, whole_s = max(len(rows) - num_named, 0), sum(excess.values())
        power = mean_waiting_w(self.peers, rows, self.named_ranks) if for_work else None
        self._reasons.begin_window(rows, self._named)
        for unit, named in for_work.items():
            share = excess[unit] / whole_s if whole_s else 0.0
            reason = self._reasons.add_readings_and_explain(named.verdict, next(iter(named.slow.values())))
            if reason is not None:
                named.verdict = replace(named.verdict, why=reason.text, differences=reason.kinds)
            waits_s = share * straggling_s * others
            self._add_cost(
                unit,
                reason is not None,
                gpu_seconds=waits_s,
                own_seconds=share * straggling_s * num_named,
                max_seconds=share * bound_s * (others + num_named),
                joules=None if power is None else waits_s * power,
            )
        rank_seconds = straggling_s * others if excess else 0.0
        return rank_seconds, None if power is None else rank_seconds * power

    def _add_cost(self, unit: Unit, has_reason: bool, joules: float | None, **seconds: float) -> None:
        named = self._named[unit]
        last = named.last / named.iterations if named.iterations else None
        named.verdict = _with_cost(replace(named.verdict, last_share=last), joules, seconds)
        _add_to_total(self._totals, named.verdict, has_reason, joules, seconds)


def _waits_before(fresh: Iterable[_Named], windows: Sequence[_Window]) -> Iterator[LostTime]:
    """Yield the waits in earlier windows for ranks that profiles name now."""
    slow = [candidate for named in fresh for candidate in named.slow.values()]
    for window in windows if slow else ():
        excess_s = max((candidate.excess_s for candidate in slow if window.shown >= candidate.since), default=0.0)
        yield LostTime(window.number, straggling_s=excess_s * window.iterations * window.ranks)


def _is_usual(profiled: Slow, windows: Sequence[_Window]) -> bool:
    """Whether profiles do not hit only the long iterations: slow iterations may have the period of the profiles."""
    since = [window for window in windows if window.shown >= profiled.since]
    usual_s = sum(window.time_s for window in since)
    return profiled.iteration_s * sum(window.iterations for window in since) <= UNLIKE * usual_s


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
    reason, before = verdict if has_reason else total, {name: getattr(total, name) for name in (*_SECONDS, "joules")}
    kept = replace(verdict, since_iteration=total.since_iteration, why=reason.why, differences=reason.differences)
    totals[key] = _with_cost(replace(kept, **before), joules, seconds)
    if len(totals) > MAX_KEPT:
        del totals[min(totals, key=lambda ranks: totals[ranks].gpu_seconds)]


def _new_verdict(
    by_rank: Mapping[int, Peer], unit: Unit, slow: Mapping[int, Slow], evidence: str, peers: int
) -> StragglerVerdict:
    worst = max(slow.values(), key=lambda candidate: candidate.excess_s)
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
