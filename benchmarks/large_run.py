"""Writes the run folder of a running job of thousands of ranks: simulated reports, the real aggregator and store.

Time is virtual: no process and no socket is used.  A rank is slow by its own time, a host waits for data, a GPU is
throttled, and a rank is lost.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from msgspec.structs import replace

from effllm.commands.simulate_ranks import SimulatedRank
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.records.clock import Now
from effllm.records.orders import Orders
from effllm.records.rank import RankReport
from effllm.records.wire import Reports
from effllm.server.run_facts import RunFacts
from effllm.store.run_folder import RunFolder

MONO_S = 1e4
WINDOW_S, LOG_INTERVAL = 10.0, 10
SLOW, SLOWER_BY = 1377, 0.12
WAITING = range(2000, 2008)  # the ranks of a host
THROTTLED = 77
LOST, LOST_FROM = 4242, 0.7  # share of the windows


class LargeRun:
    """A job whose windows are written one by one.

    Args:
        folder: the run folder.
        ranks: number of ranks.
        began_s: unix time of the start of the job.
    """

    def __init__(self, folder: Path, ranks: int, began_s: float) -> None:
        self._unix_s = began_s - MONO_S
        self._aggregator = Aggregator(Config(log_interval=LOG_INTERVAL), "job", 1, began_s, None, "boot")
        self._facts = RunFacts(Orders(config=Config(), job="job", endpoint="", folder=str(folder)))
        self._ranks = [SimulatedRank(rank, ranks, "job", f"agent-{rank}", LOG_INTERVAL) for rank in range(ranks)]
        self.window = 0
        for rank in self._ranks:
            hello = rank.hello()
            assert not self._aggregator.hello(hello, self._now(0.0))
            self._facts.add_hello(hello)
        self._facts.add_times(began_s)
        facts = self._facts.take_facts(1e9, 0.0, lambda: None) or {}
        self._store = RunFolder(folder, {**facts, "run_id": folder.name, "user": "alice"})

    def _now(self, at_s: float) -> Now:
        return Now(MONO_S + at_s, self._unix_s + MONO_S + at_s)

    def write_window(self, *, without_lost: bool = False) -> None:
        """Write the next window of all ranks, or of all without the lost rank."""
        start_s, end_s = self.window * WINDOW_S, (self.window + 1) * WINDOW_S
        self.window += 1
        for rank in self._ranks:
            row = rank.next_report(MONO_S + start_s, MONO_S + end_s, self._unix_s)
            if not (without_lost and rank.rank == LOST):
                self._aggregator.reports(Reports((_with_causes(row),)), self._now(end_s + 0.5))
        self._aggregator.tick(self._now(end_s + 1.0))
        self._aggregator.tick(self._now(end_s + 9.0))
        for closed in self._aggregator.closed_windows.take_windows():
            self._store.write(closed.report, closed.kept)
        if events := self._aggregator.events.take_events():
            self._store.write_events(events)

    def write_summary(self) -> None:
        summary = self._aggregator.summary(self._now(self.window * WINDOW_S + 9.5).unix_s, ended=False)
        self._store.write_summary(replace(summary, run_id="large", user="alice"))

    def close(self) -> None:
        self._store.close()


def _with_causes(row: RankReport) -> RankReport:
    """Return a report with an own time, and with the planted cause of its rank."""
    own_s = 0.9 * row.busy_s * (1 + 0.004 * ((row.rank * 7919 + row.window * 104729) % 11 - 5) / 5)
    own_s *= 1 + SLOWER_BY if row.rank == SLOW else 1.0
    changes = {"own_steps": row.iterations, "own_step_s": own_s}
    if row.rank in WAITING:
        wait_s = 0.25 * row.wall_s
        changes |= {"wait_s": wait_s, "busy_s": row.wall_s - wait_s}
    if row.rank == THROTTLED:
        device = replace(row.devices[0], throttled_s={"any": 0.6 * row.wall_s, "hw_thermal": 0.6 * row.wall_s})
        changes |= {"devices": (device,), "busy_s": 1.02 * row.busy_s, "wait_s": row.wall_s - 1.02 * row.busy_s}
    return replace(row, **changes)


def large_run(folder: Path, ranks: int = 8192, windows: int = 30) -> LargeRun:
    """Write a running job whose newest window has just ended; further windows can be written."""
    run = LargeRun(folder, ranks, time.time() - windows * WINDOW_S)
    for window in range(windows):
        run.write_window(without_lost=window >= LOST_FROM * windows)
    run.write_summary()
    return run


if __name__ == "__main__":
    large_run(Path(sys.argv[1]), *map(int, sys.argv[2:])).close()
