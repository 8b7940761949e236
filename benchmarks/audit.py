"""The share of the audit in the aggregator's CPU time: ``python -m benchmarks audit``.

The pure aggregator handles the reports of 1,000 ranks.  No frame is decoded and nothing is written, so the share in a
real aggregator is smaller.  The audit is timed inside the same windows, by the CPU time of the thread.  Rank 0 records
three figures of a framework in every window, as torchtitan does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from benchmarks.figure import Figure, interval_95, median
from effllm.commands.simulation import SimulatedRank
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.audit import watch
from effllm.job.audit.token_counts import CountSums
from effllm.records.clock import Now
from effllm.records.framework_figures import MFU_RATIO, TFLOPS_PER_GPU, TOKENS_PER_S_PER_GPU
from effllm.records.rank import ValueStatistics
from effllm.records.wire import Reports

RANKS, WINDOWS, LOG_INTERVAL, MAX_SHARE = 1000, 40, 10, 0.02
FIRST = 12  # the first windows make tables and judge figures for the first time; they are left out
FIGURES = {TOKENS_PER_S_PER_GPU: 1000.0, TFLOPS_PER_GPU: 400.0, MFU_RATIO: 0.4}


def measure() -> list[Figure]:
    shares = [_shares(with_figures=with_figures) for with_figures in (False, True)]
    return [
        Figure(name, median(found), "ratio", MAX_SHARE, interval_95(found, median))
        for name, found in zip(("audit, 1,000 ranks", "audit, with three figures of a framework"), shares, strict=True)
    ]


def _shares(*, with_figures: bool) -> list[float]:
    """Return, for each window, the CPU time of the audit over the CPU time of the aggregator."""
    spent_s = [0.0]
    originals = [(CountSums, "add"), (watch.AuditWatch, "check"), (watch.AuditWatch, "close")]
    kept = [(holder, name, getattr(holder, name)) for holder, name in originals]
    for holder, name, function in kept:
        setattr(holder, name, _timed(function, spent_s))
    try:
        return _run(spent_s, with_figures=with_figures)
    finally:
        for holder, name, function in kept:
            setattr(holder, name, function)


def _timed(function: Callable[..., Any], spent_s: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        start_s = time.thread_time()
        result = function(*args, **named)
        spent_s[0] += time.thread_time() - start_s
        return result

    return call


def _run(spent_s: list[float], *, with_figures: bool) -> list[float]:
    aggregator = Aggregator(Config(peak_tflops=1000.0), "job", 1, 1000.0)
    ranks = [SimulatedRank(rank, RANKS, "job", f"agent-{rank}", LOG_INTERVAL) for rank in range(RANKS)]
    for rank in ranks:
        aggregator.hello(replace(rank.hello(), flops_per_token=1e9), Now(0.0, 1000.0))
    shares = []
    for window in range(WINDOWS):
        rows = [rank.next_row(float(window), window + 1.0, 1000.0) for rank in ranks]
        if with_figures:
            values = {name: ValueStatistics(1, value, 0.0, value, value) for name, value in FIGURES.items()}
            rows[0] = replace(rows[0], values=values)
        before_s, spent_s[0] = time.thread_time(), 0.0
        for row in rows:
            aggregator.reports(Reports((row,)), Now(window + 1.0, 1001.0 + window))
        aggregator.tick(Now(window + 1.0, 1001.0 + window))
        aggregator.closed.take(), aggregator.events.take()
        if window >= FIRST:
            shares.append(spent_s[0] / (time.thread_time() - before_s))
    return shares
