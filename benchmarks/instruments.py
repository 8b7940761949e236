"""The cost of the instruments in a training loop with an active run, compared with tools of torch and Megatron."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from statistics import fmean

import psutil

import effllm
from benchmarks.figure import Figure, median
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer

ROUNDS, CALLS = 20, 1000
ITERATIONS, ITERATION_S = 600, 0.02
PARTS = ("data", "forward", "backward", "optimizer", "logging")
METRICS = ("loss", "learning_rate", "grad_norm", "reward", "kl_divergence")


def measure() -> list[Figure]:
    """Time each call in turns, stand-alone and in a run; then time loops with iterations of 20 ms."""
    alone = {name: _cost_ns(call) for name, call in _calls()}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EFFICIENTLLM_RUN_DIR"] = folder
        os.environ["EFFICIENTLLM_SINKS"] = "none"
        collector = effllm.initialize_efficientllm_metrics(1_000_000)
        in_run = {name: _cost_ns(call) for name, call in _calls()}
        profiled_s, _, _ = _loop(collector, has_metrics=False)
        spent_s, agent_mb, agent_share = _loop(collector, has_metrics=True)
        effllm.finalize_efficientllm_metrics()
    figures = [
        Figure(f"{name}, in a run", cost / 1000, "us", detail={"stand_alone_us": alone[name] / 1000})
        for name, cost in in_run.items()
    ]
    figures += [Figure(name, _cost_ns(call) / 1000, "us") for name, call in _others()]
    return [
        *figures,
        Figure("ComprehensiveProfiler with five timers, share of 20 ms", profiled_s / ITERATION_S * 100, "%", goal=1),
        Figure("also five metrics and four scores, share of 20 ms", spent_s / ITERATION_S * 100, "%"),
        Figure("the same: the agent's share of a core", agent_share * 100, "%"),
        Figure("the same: the agent's resident memory", agent_mb, "MB", goal=40),
    ]


def _calls() -> Iterator[tuple[str, Callable[[], None]]]:
    tracker, timer, memory = MetricTracker(), TrainingTimer(), GPUMemoryProfiler()
    throughput, scores, groups = ThroughputTracker(), ScoreDistributionTracker(), GRPOMetricsTracker()

    def timed() -> None:
        timer.start("forward")
        timer.stop("forward")

    yield "MetricTracker.update", lambda: tracker.update("loss", 1.5)
    yield "TrainingTimer.start and stop", timed
    yield "ThroughputTracker.update", lambda: throughput.update(8, 4096)
    yield "GPUMemoryProfiler.measure", lambda: memory.measure("end") and None
    yield "ScoreDistributionTracker.update, 8 scores", lambda: scores.update([0.0, 1.0, 0.5, 1.0] * 2)
    yield "GRPOMetricsTracker.update_group_rewards, 8 rewards", lambda: groups.update_group_rewards([0.0, 1.0] * 4)


def _others() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the calls of other tools that can be imported."""
    try:
        profiler = import_module("torch.profiler")
    except ImportError:
        return

    def recorded() -> None:
        with profiler.record_function("forward"):
            pass

    yield "torch.profiler.record_function, without a profiler", recorded
    try:
        timers = import_module("megatron.core.timers").Timers(log_level=2, log_option="max")
    except ImportError:
        return

    def megatron() -> None:
        timers("forward", log_level=0).start()
        timers("forward").stop()

    try:
        megatron()
    except (RuntimeError, AssertionError):  # Megatron's timers need a GPU: each start and stop waits for it
        return
    yield "Megatron's timers, start and stop", megatron


def _loop(collector: effllm.MetricsCollector, *, has_metrics: bool) -> tuple[float, float, float]:
    """Return the seconds of all calls in an iteration, and the agent's memory in MB and share of a core."""
    profiler, tracker, scores = ComprehensiveProfiler(), MetricTracker(), ScoreDistributionTracker()
    (agent,) = psutil.Process().children()
    before, began_s = sum(agent.cpu_times()[:2]), time.monotonic()
    clock, spent_s = time.perf_counter, []
    for step in range(ITERATIONS):
        collector.record_iteration_start()
        at = clock()
        profiler.start_iteration()
        for part in PARTS:
            profiler.timer.start(part)
        first_s = clock() - at
        time.sleep(ITERATION_S)
        at = clock()
        for part in PARTS:
            profiler.timer.stop(part)
        if has_metrics:
            tracker.update_batch(dict.fromkeys(METRICS, 0.5), step)
            scores.update([0.0, 1.0, 0.5, 1.0])
        profiler.end_iteration(8, 4096)
        spent_s.append(first_s + clock() - at)
        collector.record_iteration_end(4096, 8)
    share = (sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - began_s)
    return fmean(spent_s[-ITERATIONS // 2 :]), agent.memory_info().rss / 1e6, share


def _cost_ns(call: Callable[[], None]) -> float:
    """Return the median time of a call, without the time of an empty call."""
    costs: dict[Callable[[], None], list[float]] = {_nothing: [], call: []}
    clock = time.perf_counter_ns
    for _ in range(ROUNDS):
        for one, collected in costs.items():
            spent = []
            for _ in range(CALLS):
                began = clock()
                one()
                spent.append(clock() - began)
            collected.append(median(spent))
    return median(costs[call]) - median(costs[_nothing])


def _nothing() -> None:
    pass
