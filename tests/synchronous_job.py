"""A random model of synchronous training with a seed: each rank computes, and waits for the slowest rank.

Computation has jitter of a few percent and a heavy tail: occasionally an iteration of one rank takes up to twice as
long.  All ranks wait at a barrier in every iteration; then they communicate for COMMUNICATION_S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from effllm.job.health.peers import Peer
from effllm.job.health.stragglers import Stragglers, Straggling
from effllm.job.iteration_losses import IterationLosses, IterationMatrix
from effllm.records.energy import EnergyAmount
from effllm.records.iteration_times import IterationTimes
from effllm.records.rank import DeviceWindow, Event, Gauge, Integrals, RankReport
from effllm.records.verdict import LastRanks, StragglerVerdict

ITERATION_S = 0.5
COMMUNICATION_S = 0.05


def gpu_window(
    rank: int,
    wall_s: float,
    watts: float = 500.0,
    clock_hz: float = 1.7e9,
    celsius: float = 65.0,
    utilization: float = 1.0,
    throttled: Mapping[str, float] | None = None,
) -> DeviceWindow:
    """Return a window of a GPU with constant readings; ``throttled`` has the share of time for each reason."""
    gauges = {"sm_clock_hz": clock_hz, "temperature_c": celsius, "power_limit_w": 700.0}
    return DeviceWindow(
        device=f"GPU-{rank}",
        wall=Integrals(EnergyAmount(watts * wall_s, wall_s), 1e9 * wall_s, wall_s, utilization * wall_s, wall_s),
        gauges={name: Gauge(value * wall_s, wall_s, value, value) for name, value in gauges.items()},
        throttled_s={reason: share * wall_s for reason, share in (throttled or {}).items()},
        throttle_covered_s=wall_s,
    )


@dataclass
class SynchronousJob:
    """Ranks that train in lockstep.

    ``slow(rank, window)`` is a factor of a rank's computation time. ``waits(rank, window)`` is its data wait in seconds
    per iteration. ``weight(rank)`` is the work of its pipeline stage, as a share of the work of a full stage.
    """

    ranks: int
    seed: int = 0
    jitter: float = 0.02
    tail: float = 0.005  # share of iterations that take longer
    iterations: int = 10
    slow: Callable[[int, int], float] = lambda rank, window: 1.0
    waits: Callable[[int, int], float] = lambda rank, window: 0.001
    weight: Callable[[int], float] = lambda rank: 1.0
    group: Callable[[int], str] = lambda rank: "trainer"
    host: Callable[[int], str] = lambda rank: f"node{rank // 8}"
    replica: Callable[[int], str] = lambda rank: ""
    device: Callable[[int, int, float], DeviceWindow] | None = None
    has_sync_point: bool = True  # whether ranks have a sync point
    window: int = 0
    seen: list[Straggling] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._luck = np.random.default_rng(self.seed)
        self._totals: dict[str, StragglerVerdict] = {}
        self.stragglers, self.losses = Stragglers(self._totals, LastRanks()), IterationLosses()
        for rank in range(self.ranks):
            peer = Peer(self.group(rank), self.host(rank), f"GPU-{rank}", self.replica(rank), True)
            self.stragglers.peers.set_peer(rank, peer)

    def run(self, windows: int) -> SynchronousJob:
        """Train for this many windows."""
        for _ in range(windows):
            self.seen.append(self.close(self.rows()))
        return self

    def close(self, rows: Sequence[RankReport]) -> Straggling:
        """Judge the reports of a window."""
        matrix = IterationMatrix.of(rows)
        return self.stragglers.judge_window(rows, matrix, self.losses.add_window(matrix) if matrix is not None else [])

    def rows(self) -> list[RankReport]:
        """Train for a window; return the reports of the ranks."""
        self.window += 1
        shape = (self.ranks, self.iterations)
        factors = np.array([self.slow(rank, self.window) * self.weight(rank) for rank in range(self.ranks)])
        own = ITERATION_S * factors[:, None] * (1 + self.jitter * self._luck.standard_normal(shape))
        own *= np.where(self._luck.random(shape) < self.tail, self._luck.uniform(1.2, 2.0, shape), 1.0)
        wait = np.array([self.waits(rank, self.window) for rank in range(self.ranks)])[:, None]
        wait = wait * self._luck.uniform(0.5, 1.5, shape)
        took = (own + wait).max(axis=0) + COMMUNICATION_S  # duration of each iteration, the same for all ranks
        wall_s = float(took.sum())
        sums, waits = own.sum(axis=1).tolist(), wait.sum(axis=1).tolist()
        last = self.window * self.iterations
        return [
            RankReport(
                agent="",
                sequence=self.window,
                rank=rank,
                window=self.window,
                iteration_first=last - self.iterations + 1,
                iteration_last=last,
                iteration_shown=last,
                start_time_s=0.0,
                end_time_s=0.0,
                wall_s=wall_s,
                busy_s=wall_s - waits[rank],
                wait_s=waits[rank],
                phases_s={},
                tokens=0,
                tokens_processed=0,
                tokens_loss=0,
                samples=0,
                devices=() if self.device is None else (self.device(rank, self.window, wall_s),),
                own_steps=self.iterations if self.has_sync_point else 0,
                own_step_s=sums[rank] if self.has_sync_point else 0.0,
                times=IterationTimes.of(
                    (took - wait[rank]).tolist(),
                    wait[rank].tolist(),
                    own[rank].tolist() if self.has_sync_point else [],
                ),
            )
            for rank in range(self.ranks)
        ]

    def events(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, or of all kinds."""
        return [one for seen in self.seen for one in seen.events if not kinds or one.kind in kinds]

    @property
    def totals(self) -> list[StragglerVerdict]:
        """All verdicts so far with their cost, the costliest first."""
        return sorted(self._totals.values(), key=lambda one: -one.gpu_seconds)

    @property
    def named_ranks(self) -> set[int]:
        """Ranks that were named as stragglers at least once."""
        return {rank for verdict in self.totals for rank in verdict.ranks}


def ranks_of(verdicts: Sequence[Any]) -> list[int]:
    """Return the ranks of the verdicts, sorted."""
    return sorted(rank for verdict in verdicts for rank in verdict.ranks)
