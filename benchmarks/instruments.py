"""The cost of the instruments in a training loop with an active run, compared with tools of torch and Megatron."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from statistics import fmean

import psutil

import effllm
from benchmarks.figure import Figure, interval_95, median
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer

ROUNDS, CALLS = 20, 1000
ITERATION_S, WARM_ITERATIONS, BLOCKS, BLOCK_ITERATIONS = 0.02, 300, 12, 50
NUM_VALUES, LARGE = 10_000, 2**24
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
        loops = _Loops(collector)
        loops.run()
        effllm.finalize_efficientllm_metrics()
    figures = [
        Figure(f"{name}, in a run", cost / 1000, "us", detail={"stand_alone_us": alone[name] / 1000})
        for name, cost in in_run.items()
    ]
    return [
        *figures,
        *_others(),
        *(Figure(name, cost, "ms") for name, cost in _results()),
        *(figure for wait in _WAITS for figure in loops.shares(wait)),
        Figure("with all of them: the agent's share of a core", loops.agent_share * 100, "%"),
        Figure("with all of them: the agent's resident memory", loops.agent_mb, "MB", goal=40),
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


def _others() -> list[Figure]:
    """Measure the calls of other tools that can be imported."""
    try:
        profiler = import_module("torch.profiler")
    except ImportError:
        return []

    def recorded() -> None:
        with profiler.record_function("forward"):
            pass

    figures = [Figure("torch.profiler.record_function, without a profiler", _cost_ns(recorded) / 1000, "us")]
    try:
        timers = import_module("megatron.core.timers").Timers(log_level=2, log_option="max")
    except ImportError:
        return figures

    def megatron() -> None:
        timers("forward", log_level=0).start()
        timers("forward").stop()

    name, cost_us, note = "Megatron's timers, start and stop", None, ""
    try:
        megatron()
        cost_us = _cost_ns(megatron) / 1000
    except (RuntimeError, AssertionError):  # each start and stop calls torch.cuda.synchronize, also without a barrier
        note = "needs CUDA"
    return [*figures, Figure(name, cost_us, "us", note=note)]


def _results() -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of calls that return results, with `NUM_VALUES` different values of each name."""
    chance = random.Random(1)
    timer, folder = TrainingTimer("cpu"), tempfile.TemporaryDirectory()
    logger = TrainingLogger(folder.name, "cost")
    for step in range(NUM_VALUES):
        logger.log_step(step, {name: chance.random() for name in METRICS}, [0.0, 1.0])
        for part in PARTS:
            timer.start(part)
            timer.stop(part)
    values = f"{NUM_VALUES:,} values"
    yield f"MetricTracker.get_summary of one metric, {values}", _cpu_ms(lambda: logger.metrics.get_summary("loss"))
    yield f"TrainingTimer.get_summary of five timers, {values} each", _cpu_ms(timer.get_summary)
    yield f"TrainingLogger.export_all of five metrics, {values} each", _cpu_ms(logger.export_all)
    folder.cleanup()


def _cpu_ms(call: Callable[[], object]) -> float:
    """Return the median CPU time of a call."""
    spent_s = []
    for _ in range(9):
        began_s = time.thread_time()
        call()
        spent_s.append(time.thread_time() - began_s)
    return median(spent_s) * 1000


def _sleep() -> None:
    time.sleep(ITERATION_S)


def _compute(_source: bytearray = bytearray(LARGE), _target: bytearray = bytearray(LARGE)) -> None:  # noqa: B008
    until_s = time.perf_counter() + ITERATION_S
    while time.perf_counter() < until_s:
        _target[:] = _source


#: What an iteration does, and the clock of its calls. A loop that computes leaves other data in the caches, as a
#: training does; its clock is the CPU time, so that other processes do not count. A loop that sleeps begins its calls
#: on a core that may have been idle; its clock is the elapsed time.
_WAITS = {"computes": (_compute, time.thread_time), "sleeps": (_sleep, time.perf_counter)}
_NAMES = {
    "recorder": "the recorder's start and end alone",
    "profiler": "also ComprehensiveProfiler with five timers",
    "all": "also five metrics and four scores",
    "early": "all of them, in the first 256 iterations, each of which reads memory",
}


class _Loops:
    """Loops with iterations of 20 ms in turns: without calls, the recorder, the profiler, and all instruments."""

    def __init__(self, collector: effllm.MetricsCollector) -> None:
        self._collector = collector
        self._profilers = {kind: ComprehensiveProfiler() for kind in ("profiler", "all")}
        self._tracker, self._scores = MetricTracker(), ScoreDistributionTracker()
        self._spent_s: dict[tuple[str, str], list[float]] = {}  # mean time of all calls in an iteration, of each block
        self._cpu_s: dict[tuple[str, str], list[float]] = {}  # CPU time of an iteration, of each block
        self._step = 0
        (self._agent,) = psutil.Process().children()
        self.agent_share = self.agent_mb = 0.0

    def run(self) -> None:
        """Run the blocks; in the first blocks a profiler measures memory in each iteration, so they do not count."""
        for kind in self._profilers:
            for _ in range(WARM_ITERATIONS):
                self._iteration(kind, *_WAITS["sleeps"])
        agent_s = all_s = 0.0
        for _ in range(BLOCKS):
            for wait, kind in product(_WAITS, ("nothing", *_NAMES)):
                self._profilers["early"] = ComprehensiveProfiler()
                agent_began, began_s, cpu_s = self._agent_cpu_s(), time.monotonic(), time.thread_time()
                spent_s = [self._iteration(kind, *_WAITS[wait]) for _ in range(BLOCK_ITERATIONS)]
                self._cpu_s.setdefault((wait, kind), []).append((time.thread_time() - cpu_s) / BLOCK_ITERATIONS)
                self._spent_s.setdefault((wait, kind), []).append(fmean(spent_s))
                if kind == "all":
                    agent_s += self._agent_cpu_s() - agent_began
                    all_s += time.monotonic() - began_s
        self.agent_share, self.agent_mb = agent_s / all_s, self._agent.memory_info().rss / 1e6

    def shares(self, wait: str) -> Iterator[Figure]:
        """Yield the time of all calls as a share of an iteration: the median over blocks of the mean time."""
        for kind, name in _NAMES.items():
            shares = self._percent(self._spent_s, wait, kind)
            detail = {"blocks": len(shares)}
            if wait == "sleeps":  # a loop that computes for 20 ms uses a whole core with and without calls
                detail["cpu_percent"] = median(self._percent(self._cpu_s, wait, kind))
            goal = None if kind == "recorder" else 1
            title = f"{name}, share of 20 ms, a loop that {wait}"
            yield Figure(title, median(shares), "%", goal, interval_95(shares, median), detail)

    @staticmethod
    def _percent(times_s: dict[tuple[str, str], list[float]], wait: str, kind: str) -> list[float]:
        """Return the time of each block, less that of the block without calls beside it, in percent of 20 ms."""
        pairs = zip(times_s[wait, kind], times_s[wait, "nothing"], strict=True)
        return [(one - bare) / ITERATION_S * 100 for one, bare in pairs]

    def _agent_cpu_s(self) -> float:
        return sum(self._agent.cpu_times()[:2])

    def _iteration(self, kind: str, wait: Callable[[], None], clock: Callable[[], float]) -> float:
        """Run one iteration; return the seconds of all calls."""
        profiler, has_recorder = self._profilers.get(kind), kind != "nothing"
        at_s = clock()
        if has_recorder:
            self._collector.record_iteration_start()
        if profiler is not None:
            profiler.start_iteration()
            for part in PARTS:
                profiler.timer.start(part)
        first_s = clock() - at_s
        wait()
        at_s = clock()
        if profiler is not None:
            for part in PARTS:
                profiler.timer.stop(part)
            if kind != "profiler":
                self._step += 1
                self._tracker.update_batch(dict.fromkeys(METRICS, 0.5 + self._step), self._step)
                self._scores.update([0.0, 1.0, 0.5, 1.0])
            profiler.end_iteration(8, 4096)
        if has_recorder:
            self._collector.record_iteration_end(4096, 8)
        return first_s + clock() - at_s


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
