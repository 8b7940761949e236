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
#: Numbers of the newest blocks over which means are taken; the last one is also the number of kept blocks.
NUM_BLOCKS = (6, 12, 24)
#: The load of a rank may drift for minutes: its excess must be this multiple of the usual deviation in longer blocks.
#: Until enough of these blocks are known, it must be at least `SLOW_AT_FIRST`.
DRIFTS, SLOW_AT_FIRST = 4.0, 0.075
#: In a spell a rank's excess reaches this share of an iteration, until it is below `RECOVERED`.  A slow rank has this
#: number of spells, or more.
IN_SPELL, SPELLS = 2 * SLOW, 4
#: Largest probability that noise makes any rank of a group slow, in all looks of a job: each tests all ranks once.
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
    level: int  # of the blocks in which the rank is slow


class _Block(NamedTuple):
    ranks: Sequence[int]
    means: Array  # of the compared time, in the order of the ranks, in seconds per iteration
    iteration_s: float  # mean duration of an iteration
    shown: int  # displayed number of its first iteration
    weight: float  # number of iterations


class _Level:
    """The newest blocks of one length."""

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque(maxlen=NUM_BLOCKS[-1])
        self.parts: list[_Block] = []  # blocks of the level below that are not a whole block yet
        self.num_looks = 0
        self._usual_s: float | None = None  # cache of `usual_s`, until the next block

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
        self.ranks = ranks  # in the order of the arrays; times are sums over all iterations
        self._num_spells, self._since = np.zeros((2, len(ranks)), np.int64)  # since: displayed iteration, first spell
        self._are_in_spell = np.zeros(len(ranks), bool)
        self._excess_s, self._peers_s = np.zeros((2, len(ranks)))
        self._num_blocks, self._iterations, self._iterations_s = 0, 0.0, 0.0

    def add_block(self, block: _Block, base_s: Callable[[Array, float], Array]) -> list[Slow]:
        """Add a block; return the ranks that are slow again and again, if a spell has begun."""
        if block.iteration_s <= 0:
            return []
        means = _means_of(block, self.ranks)
        excess = means - medians_of_others(means)
        share = excess / base_s(means - excess, block.iteration_s)
        begins = (share >= IN_SPELL) & ~self._are_in_spell
        self._are_in_spell = (share >= IN_SPELL) | (self._are_in_spell & (share >= RECOVERED))
        self._since = np.where(begins & (self._num_spells == 0), block.shown, self._since)
        self._num_spells += begins
        self._excess_s += block.weight * excess
        self._peers_s += block.weight * (means - excess)
        self._num_blocks, self._iterations = self._num_blocks + 1, self._iterations + block.weight
        self._iterations_s += block.weight * block.iteration_s
        return list(self._slow_ranks(base_s)) if begins.any() and self._num_spells.max() >= SPELLS else []

    def _slow_ranks(self, base_s: Callable[[Array, float], Array]) -> Iterator[Slow]:
        """Yield the ranks that are slow in the mean, and have too many of the spells of all ranks for noise."""
        iteration_s, total_spells = self._iterations_s / self._iterations, int(self._num_spells.sum())
        excess_s, peers_s = self._excess_s / self._iterations, self._peers_s / self._iterations
        is_slow = (self._num_spells >= SPELLS) & (excess_s >= SLOW * base_s(peers_s, iteration_s))
        for i in np.flatnonzero(is_slow).tolist():
            num_spells = int(self._num_spells[i])
            if len(self.ranks) * _max_probability(num_spells, total_spells, 1 / len(self.ranks)) < FALSE_ALARMS:
                # Its blocks are so long that `has_recovered`, which reads six of them, reads about two spells.
                block_length = 2 * self._num_blocks / num_spells / NUM_BLOCKS[0]  # in blocks of the first level
                level = min(max(math.ceil(math.log(block_length, GROWTH)), 0), LEVELS - 1)
                times_s = float(excess_s[i]), float(peers_s[i]), iteration_s
                yield Slow(self.ranks[i], *times_s, int(self._since[i]), level)

    def forget(self, rank: int) -> None:
        if rank in self.ranks:
            i = self.ranks.index(rank)
            self._num_spells[i], self._excess_s[i] = 0, 0.0


class RankComparison:
    """Compares the ranks of one group by one kind of time.

    Args:
        block: minimum number of iterations of a block.
        block_s: minimum duration of a block.
        min_base: an excess is a share of the peers' time, or of this share of the iteration if the peers' time is less.
    """

    def __init__(self, block: int = BLOCK, block_s: float = BLOCK_S, min_base: float = 1.0) -> None:
        self._block, self._block_s, self._min_base = block, block_s, min_base
        self._ranks: Sequence[int] = ()
        self._parts: list[_Block] = []  # columns that are not a whole block yet
        self._levels = [_Level() for _ in range(LEVELS)]
        self._spells = _Spells(())

    def add_times(
        self, ranks: Sequence[int], values: Array, weights: Array, iterations_s: Array, shown: int
    ) -> list[Slow]:
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
        has_new_block, by_rank = [False] * LEVELS, dict[int, Slow]()
        for block in self._take_whole_blocks(values, weights, iterations_s, shown):
            self._add_block(0, block, has_new_block)
            by_rank |= {slow.rank: slow for slow in self._spells.add_block(block, self._base_s)}
        for number, level in enumerate(self._levels):
            if has_new_block[number]:  # a rank that is slow in several levels has the first one
                by_rank = {slow.rank: slow for slow in self._slow_ranks_of_level(number, level)} | by_rank
        return list(by_rank.values())

    def _take_whole_blocks(self, values: Array, weights: Array, iterations_s: Array, shown: int) -> Iterator[_Block]:
        """Add columns to the block of the first level that is not whole yet; yield the blocks that are whole now."""
        start, ends = 0, np.cumsum(weights)  # number of iterations up to the end of each column
        while start < len(weights):
            before = float(ends[start - 1]) if start else 0.0
            num_present = sum(part.weight for part in self._parts)
            present_s = sum(part.weight * part.iteration_s for part in self._parts)
            usual_s = float(np.median(iterations_s))
            missing_by_time = (self._block_s - present_s) / usual_s if usual_s > 0 else math.inf
            num_missing = max(self._block - num_present, missing_by_time, 1e-9)  # iterations; at least one column
            end = min(int(np.searchsorted(ends, before + num_missing)) + 1, len(weights))
            columns = slice(start, end)
            means = np.average(values[:, columns], axis=1, weights=weights[columns])
            iteration_s = float(np.average(iterations_s[columns], weights=weights[columns]))
            weight = float(weights[columns].sum())
            self._parts.append(_Block(self._ranks, means, iteration_s, shown + round(before), weight))
            if ends[end - 1] - before >= num_missing:
                parts, self._parts = self._parts, []
                yield _joined_block(parts)
            start = end

    def _add_block(self, number: int, block: _Block, has_new_block: list[bool]) -> None:
        """Add a block to a level; after `GROWTH` blocks, also their mean to the next level."""
        level = self._levels[number]
        level.add_block(block)
        has_new_block[number] = True
        if number + 1 < LEVELS:
            above = self._levels[number + 1]
            above.parts.append(block)
            if len(above.parts) == GROWTH:
                parts, above.parts = above.parts, []
                self._add_block(number + 1, _joined_block(parts), has_new_block)

    def _slow_ranks_of_level(self, number: int, level: _Level) -> Iterator[Slow]:
        """Yield the ranks that are slow in the newest blocks; each number of blocks counts as a look."""
        means = None
        for count in NUM_BLOCKS:
            if len(level.blocks) < count:
                return
            level.num_looks += 1
            means = level.means(self._ranks) if means is None else means
            newest, blocks = means[:, -count:], list(level.blocks)[-count:]
            iteration_s = sum(block.iteration_s for block in blocks) / count
            overall = newest.mean(axis=1)
            # At most half of the ranks are slower than the median: most windows need only this.
            if iteration_s <= 0 or overall.max() - np.median(overall) < SLOW * self._min_base * iteration_s / 2:
                continue
            excess = overall - medians_of_others(overall)
            usual_s = [above.usual_s(self._ranks) for above in self._levels[min(number + 1, LEVELS - 1) :]]
            drifts_s = [DRIFTS * deviation_s for deviation_s in usual_s if deviation_s < math.inf]
            bases = self._base_s(overall - excess, iteration_s)
            min_excess = np.maximum(SLOW * bases, max(drifts_s) if drifts_s else SLOW_AT_FIRST * bases)
            recent = newest[:, -NUM_BLOCKS[0] :].mean(axis=1)
            is_still_slow = recent - medians_of_others(recent) >= RECOVERED * bases
            is_slow = (excess >= min_excess) & is_still_slow
            if not is_slow.any():
                continue
            by_block = newest - medians_of_others(newest)
            # The sum of 1 / (n (n + 1)) over all looks n is 1.
            chance = FALSE_ALARMS / LEVELS / len(self._ranks) / (level.num_looks * (level.num_looks + 1))
            sigmas = {i: deviations(excess[i], by_block[i]) for i in np.flatnonzero(is_slow).tolist()}
            if max(sigmas.values()) < _min_sigmas(chance):
                continue
            # Beside a rank that is slow for certain, other slow ranks are no surprise.
            limit = _min_sigmas(FALSE_ALARMS / len(self._ranks))
            excess_by_block = means - medians_of_others(means)
            for i in (i for i in sigmas if sigmas[i] >= limit):
                first_block = _first_slow(excess_by_block[i] >= excess[i] / 2, means.shape[1] - count)
                since, peers_s = level.blocks[first_block].shown, float(overall[i] - excess[i])
                yield Slow(self._ranks[i], float(excess[i]), peers_s, iteration_s, since, number)

    def _base_s(self, peers_s: Array, iteration_s: float) -> Array:
        """Return the times of which an excess is a share."""
        return np.clip(peers_s, self._min_base * iteration_s, iteration_s)

    def excess_share(self, slow: Slow) -> float:
        """Return the excess as a share, as `SLOW` and `RECOVERED` are."""
        return slow.excess_s / float(self._base_s(np.array(slow.peers_s), slow.iteration_s))

    def excess_now(self, rank: int, level: int, since: int, min_blocks: int = 1) -> Slow | None:
        """Return a rank's mean excess in a level's blocks since iteration ``since``; ``None`` with too few blocks."""
        blocks = [block for block in self._levels[level].blocks if block.shown >= since]
        if len(blocks) < min_blocks or rank not in self._ranks:
            return None
        i = self._ranks.index(rank)
        means = np.mean([_means_of(block, self._ranks) for block in blocks], axis=0)
        excess_s, iteration_s = means[i] - medians_of_others(means)[i], np.mean([block.iteration_s for block in blocks])
        return Slow(rank, float(excess_s), float(means[i] - excess_s), float(iteration_s), since, level)

    def has_recovered(self, rank: int, level: int) -> bool:
        """Whether the mean excess of a rank in the newest blocks of a level is small."""
        blocks = list(self._levels[level].blocks)[-NUM_BLOCKS[0] :]
        slow = self.excess_now(rank, level, blocks[0].shown) if blocks else None
        return slow is not None and self.excess_share(slow) < RECOVERED

    def forget(self, ranks: Collection[int]) -> None:
        """Replace the times of ranks by the medians of their blocks."""
        for rank in ranks:
            self._spells.forget(rank)
        for level in self._levels:
            for block in (*level.blocks, *level.parts):
                places = [place for place, rank in enumerate(block.ranks) if rank in ranks]
                block.means[places] = np.median(block.means)


def _joined_block(parts: Sequence[_Block]) -> _Block:
    """Return the weighted mean of consecutive blocks, with the ranks of the last one."""
    if len(parts) == 1:
        return parts[0]
    ranks, weights = parts[-1].ranks, [part.weight for part in parts]
    means = np.average([_means_of(part, ranks) for part in parts], axis=0, weights=weights)
    iteration_s = float(np.average([part.iteration_s for part in parts], weights=weights))
    return _Block(ranks, means, iteration_s, parts[0].shown, sum(weights))


def _means_of(block: _Block, ranks: Sequence[int]) -> Array:
    """Return the means of a block for these ranks; a rank that is not in the block has the median."""
    if block.ranks is ranks or block.ranks == ranks:
        return block.means
    by_rank, median_s = dict(zip(block.ranks, block.means.tolist(), strict=True)), float(np.median(block.means))
    return np.array([by_rank.get(rank, median_s) for rank in ranks])


def _first_slow(is_slow: Array, i: int) -> int:
    """Return the first block of the slow ones around block ``i``; if this one is not slow, the next slow block."""
    while i > 0 and is_slow[i - 1] and is_slow[i]:
        i -= 1
    while not is_slow[i] and i + 1 < len(is_slow):
        i += 1
    return i


def medians_of_others(values: Array) -> Array:
    """Return for each value the median of the other values on the first axis, which has at least two.

    A median that includes the value itself is nearer to the value, and hides a slow rank in a group of three or four.

    >>> medians_of_others(np.array([1.0, 4.0, 2.0])), medians_of_others(np.array([3.0, 2.0]))
    (array([3. , 1.5, 2.5]), array([2., 3.]))
    """
    ordered, others = np.sort(values, axis=0), len(values) - 1
    # Index i of the other values is index i + 1 of all values, unless the left out value comes later.
    low, high = (np.where(values > ordered[i], ordered[i], ordered[i + 1]) for i in ((others - 1) // 2, others // 2))
    medians: Array = (low + high) / 2
    return medians


def deviations(mean: float, blocks: Array) -> float:
    """Return a mean as a multiple of its standard error from its blocks, with the tail probability of a normal value.

    With few blocks the quotient has Student's distribution (Wallace's approximation: Annals of Math. Stat. 30, 1959).
    """
    freedom = len(blocks) - 1
    error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks))
    if error <= 0 or mean <= 0:
        return math.inf if mean > 0 else 0.0
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p((mean / error) ** 2 / freedom))


def _max_probability(count: int, total: int, chance: float) -> float:
    """Return an upper bound of the probability of at least ``count`` of ``total``, each with probability ``chance``."""
    share = count / total
    if share <= chance:
        return 1.0
    of_others = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return math.exp(-total * (share * math.log(share / chance) + of_others))


def _min_sigmas(chance: float) -> float:
    """Return how many standard deviations noise exceeds with this probability."""
    return -NormalDist().inv_cdf(chance)
