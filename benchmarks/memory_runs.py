"""Draws training runs with a torch allocator: their memory in each iteration, and the readings of the recorder.

A run follows from its kind and its seed.  The memory that stays allocated has caches that fill, jumps and noise; a step
needs temporary memory by its number of positions; evaluations and checkpoints have other peaks; free memory is partly
fragmented.  The run ends when a peak, with a random part of the fragmented memory, exceeds the capacity.  A healthy run
does not end so; in one of the kind PLATEAU, a cache grows at a constant rate until it is full.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effllm.memory.watch import STARTUP, STEPS, MemoryReading

GROWTH, LENGTH, HEALTHY, PLATEAU = "growth", "length", "healthy", "plateau"
GB = 1e9
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
#: Number of windows and of iterations of the shortest run with growth, before the memory is full.
MIN_WINDOWS, MIN_ITERATIONS = 24, 150
Numbers = NDArray[np.float64]


@dataclass
class Run:
    """One run.  Arrays have a value for each iteration."""

    kind: str
    seed: int
    interval: int  # iterations of a window
    capacity: float  # bytes that the allocator can have
    stays: Numbers  # bytes allocated at the end of the iteration
    temporary: Numbers  # temporary bytes of the step
    positions: Numbers
    fragmented: Numbers
    phases: dict[str, tuple[int, float]]  # phase -> it follows every Nth iteration, and its temporary bytes
    startup_peak: float
    hit: float  # part of the fragmented memory that an allocation cannot use
    max_positions: int
    longest_needs: float  # bytes of a step with the longest possible micro-batch
    stops_at: int = 0  # iteration in which the growth of a plateau stops

    @property
    def ends_at(self) -> int | None:
        """The iteration in which the memory runs out, from 1; ``None`` if it does not."""
        need = self.stays + self.temporary
        for every, temporary in self.phases.values():
            at = np.arange(every - 1, len(need), every)
            need[at] = np.maximum(need[at], self.stays[at] + temporary)
        over = np.flatnonzero(need + self.hit * self.fragmented > self.capacity)
        return int(over[0]) + 1 if len(over) else None

    def readings(self) -> Iterator[tuple[MemoryReading, bool]]:
        """Yield the readings until the run ends, and whether each is at the end of a window."""
        last, peak = self.ends_at or len(self.stays) + 1, self.startup_peak
        start, reserved = 0, 0.0
        reading = self._reading(STARTUP, 0, self.stays[0], peak, peak, 0.0)
        yield reading, False
        for iteration in range(1, last):
            at = iteration - 1
            peak = max(peak, self.stays[at] + self.temporary[at])
            reserved = min(max(reserved, peak + self.fragmented[at]), self.capacity)
            if iteration % self.interval == 0:
                longest = float(self.positions[start:iteration].max())
                yield self._reading(STEPS, iteration, self.stays[at], peak, reserved, longest), True
                start = iteration
            for phase, (every, temporary) in self.phases.items():
                if iteration % every == 0:
                    yield self._reading(STEPS, iteration, self.stays[at], peak, reserved, 0.0), False
                    peak = max(peak, self.stays[at] + temporary)
                    reserved = min(max(reserved, peak + self.fragmented[at]), self.capacity)
                    yield self._reading(phase, iteration, self.stays[at], peak, reserved, 0.0), False

    def _reading(
        self, after: str, iteration: int, allocated: float, peak: float, reserved: float, positions: float
    ) -> MemoryReading:
        fragmented = float(self.fragmented[max(iteration - 1, 0)])
        return MemoryReading(
            after, iteration, float(allocated), float(peak), float(reserved), float(reserved), fragmented, 0.0, 0.0,
            positions,
        )  # fmt: skip


def draw(kind: str, seed: int) -> Run:
    """Return a run of a kind; draws that do not have the property of the kind are repeated."""
    chance = np.random.default_rng([zlib.crc32(kind.encode()), seed])
    while True:
        run = _draw(kind, seed, chance)
        ends = run.ends_at
        if kind in (HEALTHY, PLATEAU) and ends is None:
            return run
        shortest = max(MIN_WINDOWS * run.interval + 60, MIN_ITERATIONS)
        if kind == GROWTH and ends is not None and ends >= shortest:
            return run
        if kind == LENGTH and len(set(run.positions)) > 1:
            return run


def _draw(kind: str, seed: int, chance: np.random.Generator) -> Run:
    interval = int(chance.choice([1, 2, 5, 10, 20]))
    number = int(np.exp(chance.uniform(np.log(40 * interval + 200), np.log(max(6000, 80 * interval)))))
    capacity = float(chance.choice([24, 40, 80, 141])) * GB * float(chance.uniform(0.93, 0.99))
    at = np.arange(number, dtype=np.float64)
    stays = np.full(number, capacity * float(chance.uniform(0.2, 0.6)))
    stays += _caches(chance, at, capacity)
    stays += _jumps(chance, number, capacity)
    stays += float(chance.uniform(0.0, 0.001)) * capacity * np.abs(chance.standard_normal(number))
    texts = _Texts(chance)
    positions = texts.positions(chance, number)
    if kind == GROWTH:  # the run ends by its growth, not by one very long micro-batch
        positions = np.minimum(positions, np.quantile(positions, 0.99))
    step = _Step(chance, texts, capacity)
    temporary = step.temporary(positions) * (1 + 0.003 * chance.standard_normal(number))
    fragmented = capacity * np.clip(
        chance.uniform(0.0, 0.05) + np.cumsum(chance.standard_normal(number)) * 0.0005, 0.0, 0.1
    )
    phases = {}
    for name, largest in ((EVALUATION, 0.25), (CHECKPOINT, 0.1)):
        if chance.random() < 0.6:
            every = max(int(chance.uniform(0.03, 0.4) * number), 1)
            phases[name] = (every, float(chance.uniform(0.0, largest)) * capacity)
    run = Run(
        kind, seed, interval, capacity, stays, temporary, positions, fragmented, phases,
        startup_peak=float(stays[0] * chance.uniform(0.8, 1.3)), hit=float(chance.uniform(0.0, 1.0)),
        max_positions=int(texts.limit), longest_needs=float(stays.max() + step.temporary(np.array([texts.limit]))[0]),
    )  # fmt: skip
    if kind == GROWTH:
        _leak(chance, run)
    elif kind == LENGTH:
        _tight(chance, run, texts, step)
    else:
        if kind == PLATEAU:
            _fill(chance, run)
        _fit(chance, run)
    return run


def _caches(chance: np.random.Generator, at: Numbers, capacity: float) -> Numbers:
    """Return caches that fill: in a few iterations, or slowly in a part of the run."""
    found = np.zeros(len(at))
    for _ in range(int(chance.integers(0, 4))):
        size = float(chance.uniform(0.002, 0.05)) * capacity
        speed = float(np.exp(chance.uniform(np.log(3), np.log(max(len(at) / 8, 10)))))
        found += size * (1 - np.exp(-at / speed))
    return found


def _jumps(chance: np.random.Generator, number: int, capacity: float) -> Numbers:
    """Return a few jumps up and down: buffers that are made late, states that are freed."""
    steps = np.zeros(number)
    count = int(chance.integers(0, 12))
    steps[chance.integers(0, number, count)] = chance.choice([-1, 1], count) * chance.uniform(0.001, 0.02, count)
    return np.cumsum(steps) * capacity


class _Texts:
    """Texts of log-normal lengths, or packed ones of one length: cut at a maximum, and padded in their micro-batch."""

    def __init__(self, chance: np.random.Generator) -> None:
        self._batch, self._multiple = int(chance.choice([1, 2, 8])), int(chance.choice([1, 8, 64]))
        self._spread, self._is_packed = float(chance.uniform(0.3, 0.8)), bool(chance.random() < 0.15)
        self._cut = float(chance.choice([512, 1024, 2048, 4096, 8192]))
        self.limit = self._cut * self._batch

    def positions(self, chance: np.random.Generator, number: int) -> Numbers:
        """Return the positions of the largest micro-batch of each iteration."""
        if self._is_packed:
            return np.full(number, self.limit)
        longest = self.uncut(chance, number) / self._batch
        found: Numbers = np.minimum(np.ceil(longest / self._multiple) * self._multiple, self._cut) * self._batch
        return found

    def uncut(self, chance: np.random.Generator, number: int) -> Numbers:
        """Return the positions as they would be without the maximum and without padding to a multiple."""
        found: Numbers = chance.lognormal(6, self._spread, (number, self._batch)).max(axis=1) * self._batch
        return found


class _Step:
    """The temporary bytes of a step: linear in the positions, and in some models with a quadratic part."""

    def __init__(self, chance: np.random.Generator, texts: _Texts, capacity: float) -> None:
        self._usual = float(np.quantile(texts.uncut(np.random.default_rng(0), 1000), 0.99))
        self._square = float(chance.choice([0.0, chance.uniform(0.0, 0.7)]))
        self._most = float(chance.uniform(0.1, 0.35)) * capacity

    def temporary(self, positions: Numbers) -> Numbers:
        share = positions / self._usual
        found: Numbers = self._most * (0.1 + 0.9 * ((1 - self._square) * share + self._square * share**2))
        return found


def _leak(chance: np.random.Generator, run: Run) -> None:
    """Add a growth, so that the memory is full in the course of the run."""
    number = len(run.stays)
    room = run.capacity - float((run.stays + run.temporary).max())
    first = max(MIN_WINDOWS * run.interval + 60, MIN_ITERATIONS)
    full = chance.uniform(min(first, 0.9 * number), 0.95 * number)
    rate = max(room, 0.02 * run.capacity) / full
    each = rate * (np.ones(number) if chance.random() < 0.5 else chance.gamma(1.0, 1.0, number))
    run.stays = run.stays + np.cumsum(each)


def _fill(chance: np.random.Generator, run: Run) -> None:
    """Add a cache that grows at a constant rate, with or without noise, and then stays."""
    number = len(run.stays)
    run.stops_at = int(chance.uniform(min(24 * run.interval, 0.3 * number), 0.9 * number))
    each = np.ones(run.stops_at) if chance.random() < 0.5 else chance.gamma(1.0, 1.0, run.stops_at)
    grown = np.concatenate([np.cumsum(each), np.full(number - run.stops_at, each.sum())])
    run.stays = run.stays + float(chance.uniform(0.05, 0.5)) * run.capacity * grown / run.stops_at


def _fit(chance: np.random.Generator, run: Run) -> None:
    """Change the capacity so that the run fits, often closely, also with the longest possible micro-batch."""
    most = float((run.stays + run.temporary + run.hit * run.fragmented).max())
    for _, temporary in run.phases.values():
        most = max(most, float((run.stays + run.fragmented).max()) + temporary)
    run.capacity = max(most, run.longest_needs) * float(chance.uniform(1.005, 1.4))


def _tight(chance: np.random.Generator, run: Run, texts: _Texts, step: _Step) -> None:
    """Remove caches, growth and phases; a micro-batch that occurs about once in N iterations does not fit.

    N has each magnitude between 20 iterations and 20 runs with the same probability.
    """
    number = len(run.stays)
    run.stays, run.phases, run.fragmented = np.full(number, float(run.stays.mean())), {}, np.zeros(number)
    others = texts.uncut(chance, int(np.exp(chance.uniform(np.log(20), np.log(20 * number)))))
    longest = float(others.max()) * float(chance.uniform(0.99, 1.01))
    run.capacity = float(run.stays[0] + step.temporary(np.array([longest]))[0])
    run.longest_needs = float(run.stays[0] + step.temporary(np.array([texts.limit]))[0])
