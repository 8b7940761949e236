"""Finds ranks that are slower than the median of their peers, by means over blocks of iterations. No I/O.

A rank is slow if its mean over some of the newest blocks exceeds the median of the other ranks' means by `SLOW` of an
iteration, and the scatter of the blocks does not explain this.  Blocks have 5 iterations or more, and each further
level has blocks of 4 times the length: a load that lasts several short blocks is constant in them, and varies between
long blocks.  A rank that is slow again and again, as a GPU that becomes hot, scatters in blocks of all lengths: it is
slow if these spells are nearly all its own.  Thresholds and false alarms: docs/stragglers.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from effllm.records.columns import Array

#: A rank is slow if its mean excess is at least this share of an iteration, until it is below `RECOVERED`.
SLOW, RECOVERED = 0.05, 0.025
#: A block of the first level has at least this number of iterations, and lasts at least this time: the load of a host
#: changes about every second.
BLOCK, BLOCK_S = 5, 0.25
GROWTH, LEVELS = 4, 6
#: Numbers of the newest blocks over which means are taken; the last one is the number of kept blocks.
NUM_BLOCKS = (6, 12, 24)
#: The load of a rank may drift for minutes: its excess must be this multiple of the usual deviation in longer blocks.
#: Until enough of these blocks are known, it must be at least `SLOW_AT_FIRST`.
DRIFTS, SLOW_AT_FIRST = 4.0, 0.075
#: In a spell a rank's excess reaches this share of an iteration, until it is below `RECOVERED`.  A slow rank has this
#: number of spells, or more.
IN_SPELL, SPELLS = 2 * SLOW, 4
#: Largest probability that noise makes any rank of a group slow, in all looks of a job together.
FALSE_ALARMS = 1e-3
#: Ratio of the standard deviation to the median absolute deviation of a normal distribution.
MAD_SIGMA = 1.4826


class Slow(NamedTuple):
    """A slow rank; times are means per iteration."""

    rank: int
    excess_s: float  # over the median of its peers
    peers_s: float
    iteration_s: float
    since: int  # displayed number of the first iteration of the slow blocks
    level: int


class _Block(NamedTuple):
    ranks: Sequence[int]
    means: Array  # by rank, in seconds per iteration
    iteration_s: float
    shown: int  # displayed number of its first iteration
    weight: float  # number of iterations


class _Level:
    """The newest blocks of one length."""

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque(maxlen=NUM_BLOCKS[-1])
        self.parts: list[_Block] = []  # blocks of the level below that are not a whole block yet
        self.looks = 0
        self._usual_s: float | None = None

    def means(self, ranks: Sequence[int]) -> Array:
        """Return the means of ranks in the blocks (ranks x blocks); a missing rank has the median of its block."""
        return np.stack([_means_of(block, ranks) for block in self.blocks], axis=1)

    def add_block(self, block: _Block) -> None:
        self.blocks.append(block)
        self._usual_s = None

    def usual_s(self, ranks: Sequence[int]) -> float:
        """Return the usual deviation of a rank's excess in a block from its median; infinite for few blocks."""
        if self._usual_s is None:
            self._usual_s = math.inf
            if len(self.blocks) >= NUM_BLOCKS[0]:
                means = self.means(ranks)
                excess = means - medians_of_others(means)
                from_usual = np.abs(excess - np.median(excess, axis=1, keepdims=True))
                self._usual_s = MAD_SIGMA * float(np.median(from_usual))
        return self._usual_s


class _Spells:
    """The times in which single ranks of a job are slow, and between which they are not.

    Noise makes each rank of R as often slow as any other.  So k spells of one rank among n of all ranks have at most
    the probability exp(-n D), where D is the divergence of k/n from 1/R (Chernoff's bound).
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._counts, self._since = np.zeros((2, len(ranks)), np.int64)
        self._are_in_spell = np.zeros(len(ranks), bool)
        self._excess_s = np.zeros(len(ranks))  # sum over all iterations
        self._peers_s = np.zeros(len(ranks))
        self._num_blocks, self._iterations, self._whole_s = 0, 0.0, 0.0

    def add_block(self, block: _Block, base_s: Callable[[Array, float], Array]) -> list[Slow]:
        """Add a block; return the ranks that are slow again and again, if a spell has begun."""
        if block.iteration_s <= 0:
            return []
        means = _means_of(block, self.ranks)
        excess = means - medians_of_others(means)
        share = excess / base_s(means - excess, block.iteration_s)
        begins = (share >= IN_SPELL) & ~self._are_in_spell
        self._are_in_spell = (share >= IN_SPELL) | (self._are_in_spell & (share >= RECOVERED))
        self._since = np.where(begins & (self._counts == 0), block.shown, self._since)
        self._counts += begins
        self._excess_s += block.weight * excess
        self._peers_s += block.weight * (means - excess)
        self._num_blocks, self._iterations = self._num_blocks + 1, self._iterations + block.weight
        self._whole_s += block.weight * block.iteration_s
        return list(self._slow(base_s)) if begins.any() and self._counts.max() >= SPELLS else []

    def _slow(self, base_s: Callable[[Array, float], Array]) -> Iterator[Slow]:
        whole_s, num_spells = self._whole_s / self._iterations, int(self._counts.sum())
        excess, peers = self._excess_s / self._iterations, self._peers_s / self._iterations
        is_slow = (self._counts >= SPELLS) & (excess >= SLOW * base_s(peers, whole_s))
        for at in np.flatnonzero(is_slow).tolist():
            count = int(self._counts[at])
            if len(self.ranks) * _max_probability(count, num_spells, 1 / len(self.ranks)) < FALSE_ALARMS:
                # Of this level, six blocks have two spells.
                blocks = 2 * self._num_blocks / count / NUM_BLOCKS[0]
                level = min(max(math.ceil(math.log(blocks, GROWTH)), 0), LEVELS - 1)
                yield Slow(self.ranks[at], float(excess[at]), float(peers[at]), whole_s, int(self._since[at]), level)

    def forget(self, rank: int) -> None:
        if rank in self.ranks:
            at = self.ranks.index(rank)
            self._counts[at], self._excess_s[at] = 0, 0.0


class RankComparison:
    """Compares the ranks of one group by one kind of time.

    Args:
        block: minimum number of iterations of a block.
        block_s: minimum duration of a block.
        least: smallest share of the iteration of which the excess is a share; if the peers' time is longer, it counts.
    """

    def __init__(self, block: int = BLOCK, block_s: float = BLOCK_S, least: float = 1.0) -> None:
        self._block, self._block_s, self._least = block, block_s, least
        self._ranks: Sequence[int] = ()
        self._open: list[_Block] = []  # columns that are not a whole block yet
        self._levels = [_Level() for _ in range(LEVELS)]
        self._spells = _Spells(())

    def add(self, ranks: Sequence[int], values: Array, weights: Array, iterations_s: Array, shown: int) -> list[Slow]:
        """Add the next times; return all ranks that are slow now.

        Args:
            ranks: at least two ranks.
            values: times per iteration, ranks x columns.
            weights: number of iterations of each column.
            iterations_s: duration of an iteration in each column.
            shown: displayed number of the first iteration.
        """
        if ranks != self._ranks:
            self._ranks = ranks
            if not set(ranks) <= set(self._spells.ranks):
                self._spells = _Spells(ranks)
        fresh, by_rank = [False] * LEVELS, dict[int, Slow]()
        for block in self._take_whole_blocks(values, weights, iterations_s, shown):
            self._add_block(0, block, fresh)
            by_rank |= {slow.rank: slow for slow in self._spells.add_block(block, self._base_s)}
        for number, level in enumerate(self._levels):
            if fresh[number]:
                by_rank = {slow.rank: slow for slow in self._slow_ranks_of_level(number, level)} | by_rank
        return list(by_rank.values())

    def _take_whole_blocks(self, values: Array, weights: Array, iterations_s: Array, shown: int) -> Iterator[_Block]:
        start, ends = 0, np.cumsum(weights)
        while start < len(weights):
            before = float(ends[start - 1]) if start else 0.0
            have = sum(part.weight for part in self._open)
            have_s = sum(part.weight * part.iteration_s for part in self._open)
            usual_s = float(np.median(iterations_s))
            more_s = (self._block_s - have_s) / usual_s if usual_s > 0 else math.inf
            more = max(self._block - have, more_s, 1e-9)
            end = min(int(np.searchsorted(ends, before + more)) + 1, len(weights))
            of = slice(start, end)
            means, iteration_s = np.average(values[:, of], axis=1, weights=weights[of]), iterations_s[of]
            weight = float(weights[of].sum())
            whole_s = float(np.average(iteration_s, weights=weights[of]))
            self._open.append(_Block(self._ranks, means, whole_s, shown + round(before), weight))
            if ends[end - 1] - before >= more:
                parts, self._open = self._open, []
                yield _joined_block(parts)
            start = end

    def _add_block(self, number: int, block: _Block, fresh: list[bool]) -> None:
        level = self._levels[number]
        level.add_block(block)
        fresh[number] = True
        if number + 1 < LEVELS:
            above = self._levels[number + 1]
            above.parts.append(block)
            if len(above.parts) == GROWTH:
                parts, above.parts = above.parts, []
                self._add_block(number + 1, _joined_block(parts), fresh)

    def _slow_ranks_of_level(self, number: int, level: _Level) -> Iterator[Slow]:
        """Yield the ranks that are slow in the newest blocks; each number of blocks counts as a look."""
        means = None
        for count in NUM_BLOCKS:
            if len(level.blocks) < count:
                return
            level.looks += 1
            means = level.means(self._ranks) if means is None else means
            newest, blocks = means[:, -count:], list(level.blocks)[-count:]
            whole_s = sum(block.iteration_s for block in blocks) / count
            overall = newest.mean(axis=1)
            # At most half of the ranks are slower than the median: most windows need only this.
            if whole_s <= 0 or overall.max() - np.median(overall) < SLOW * self._least * whole_s / 2:
                continue
            excess = overall - medians_of_others(overall)
            usual_s = [above.usual_s(self._ranks) for above in self._levels[min(number + 1, LEVELS - 1) :]]
            known_s = [DRIFTS * deviation_s for deviation_s in usual_s if deviation_s < math.inf]
            bases = self._base_s(overall - excess, whole_s)
            drift_s = max(known_s) if known_s else SLOW_AT_FIRST * bases
            recent = newest[:, -NUM_BLOCKS[0] :].mean(axis=1)
            is_recent = recent - medians_of_others(recent) >= RECOVERED * bases
            is_slow = (excess >= np.maximum(SLOW * bases, drift_s)) & is_recent
            if not is_slow.any():
                continue
            by_block = newest - medians_of_others(newest)
            chance = FALSE_ALARMS / LEVELS / len(self._ranks) / (level.looks * (level.looks + 1))
            sure = {at: deviations(excess[at], by_block[at]) for at in np.flatnonzero(is_slow).tolist()}
            if max(sure.values()) < _min_sigmas(chance):
                continue
            # Beside a rank that is slow for certain, other slow ranks are no surprise.
            limit = _min_sigmas(FALSE_ALARMS / len(self._ranks))
            whole = means - medians_of_others(means)
            for at in (at for at, sigmas in sure.items() if sigmas >= limit):
                since = _first_slow(whole[at] >= excess[at] / 2, means.shape[1] - count)
                shown = level.blocks[since].shown
                peers_s = float(overall[at] - excess[at])
                yield Slow(self._ranks[at], float(excess[at]), peers_s, whole_s, shown, number)

    def _base_s(self, peers_s: Array, whole_s: float) -> Array:
        """Return the times of which an excess is a share."""
        return np.clip(peers_s, self._least * whole_s, whole_s)

    def excess_share(self, slow: Slow) -> float:
        """Return the excess as a share, as `SLOW` and `RECOVERED` are."""
        return slow.excess_s / float(self._base_s(np.array(slow.peers_s), slow.iteration_s))

    def now(self, rank: int, level: int, since: int, min_blocks: int = 1) -> Slow | None:
        """Return a rank's excess in the newest blocks of a level that began at iteration ``since`` or later."""
        blocks = [block for block in self._levels[level].blocks if block.shown >= since]
        if len(blocks) < min_blocks or rank not in self._ranks:
            return None
        at = self._ranks.index(rank)
        means = np.mean([_means_of(block, self._ranks) for block in blocks], axis=0)
        excess_s, whole_s = means[at] - medians_of_others(means)[at], np.mean([block.iteration_s for block in blocks])
        return Slow(rank, float(excess_s), float(means[at] - excess_s), float(whole_s), since, level)

    def has_recovered(self, rank: int, level: int) -> bool:
        """Whether the mean excess of a rank in the newest blocks of a level is small."""
        blocks = list(self._levels[level].blocks)[-NUM_BLOCKS[0] :]
        slow = self.now(rank, level, blocks[0].shown) if blocks else None
        return slow is not None and self.excess_share(slow) < RECOVERED

    def forget(self, ranks: Collection[int]) -> None:
        """Replace the times of ranks by the medians of their blocks."""
        for rank in ranks:
            self._spells.forget(rank)
        for level in self._levels:
            for block in (*level.blocks, *level.parts):
                at = [place for place, rank in enumerate(block.ranks) if rank in ranks]
                block.means[at] = np.median(block.means)


def _joined_block(parts: Sequence[_Block]) -> _Block:
    """Return the weighted mean of consecutive blocks, with the ranks of the last one."""
    if len(parts) == 1:
        return parts[0]
    ranks, weights = parts[-1].ranks, [part.weight for part in parts]
    means = np.average([_means_of(part, ranks) for part in parts], axis=0, weights=weights)
    whole_s = float(np.average([part.iteration_s for part in parts], weights=weights))
    return _Block(ranks, means, whole_s, parts[0].shown, sum(weights))


def _means_of(block: _Block, ranks: Sequence[int]) -> Array:
    if block.ranks is ranks or block.ranks == ranks:
        return block.means
    by_rank, median_s = dict(zip(block.ranks, block.means.tolist(), strict=True)), float(np.median(block.means))
    return np.array([by_rank.get(rank, median_s) for rank in ranks])


def _first_slow(is_slow: Array, at: int) -> int:
    """Return the first of the slow blocks without a gap that end in the block ``at`` or begin after it."""
    while at > 0 and is_slow[at - 1] and is_slow[at]:
        at -= 1
    while not is_slow[at] and at + 1 < len(is_slow):
        at += 1
    return at


def medians_of_others(values: Array) -> Array:
    """Return for each value the median of the other values on the first axis, which has at least two.

    A median that includes the value itself is nearer to the value, and hides a slow rank in a group of three or four.

    >>> medians_of_others(np.array([1.0, 4.0, 2.0])), medians_of_others(np.array([3.0, 2.0]))
    (array([3. , 1.5, 2.5]), array([2., 3.]))
    """
    ordered, others = np.sort(values, axis=0), len(values) - 1
    low, high = (
        np.where(values > ordered[at], ordered[at], ordered[at + 1]) for at in ((others - 1) // 2, others // 2)
    )
    medians: Array = (low + high) / 2
    return medians


def deviations(mean: float, blocks: Array) -> float:
    """Return a mean as a multiple of its standard error from its blocks, with the tail probability of a normal value.

    With few blocks the quotient has Student's distribution (Wallace's approximation: Annals of Math. Stat. 30, 1959).
    """
    free = len(blocks) - 1
    error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks))
    if error <= 0 or mean <= 0:
        return math.inf if mean > 0 else 0.0
    return (8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p((mean / error) ** 2 / free))


def _max_probability(count: int, of: int, share: float) -> float:
    """Return an upper bound of the probability of at least ``count`` among ``of``, each with probability ``share``."""
    part = count / of
    if part <= share:
        return 1.0
    rest = (1 - part) * math.log((1 - part) / (1 - share)) if part < 1 else 0.0
    return math.exp(-of * (part * math.log(part / share) + rest))


def _min_sigmas(chance: float) -> float:
    return -NormalDist().inv_cdf(chance)
