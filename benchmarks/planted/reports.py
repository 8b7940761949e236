"""The messages of a planted job's agents, with virtual times, through the real aggregator; returns its summary.

The records are those that agents send for the course of the job.  No process, no socket and no real time is used, so a
job of an hour takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.planted.job import Shape
from benchmarks.planted.timeline import CHECKPOINT, EVALUATION, Course, Timeline
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.records.clock import Now
from effllm.records.energy import EnergyAmount
from effllm.records.iteration_times import IterationTimes
from effllm.records.job import Summary
from effllm.records.rank import (
    CLOCK_RATIO,
    Allocator,
    Device,
    DeviceWindow,
    Gauge,
    Integrals,
    ParameterCount,
    Profile,
    RankReport,
    ValueStatistics,
)
from effllm.records.ring import BETWEEN, STARTUP, STATE_NAMES, STEP
from effllm.records.wire import Bye, Heartbeat, Hello, Reports

UNIX_S, MONO_S = 1.7e9, 1e4
LATENCY_S, TICK_S = 0.02, 2.0
HEARTBEAT_S, MAX_HEARTBEATS = 5.0, 20_000
#: The simulated GPU: an H100 with its default power limit.
GPU, MAX_CLOCK_HZ, LIMIT_W, PEAK = "NVIDIA H100 80GB HBM3", 1.98e9, 700.0, 989e12
PEAK_CLOCK_HZ = 1.83e9  # at this clock, the H100 has its peak
FLOPS_PER_TOKEN = 6 * 7e9
STEP_W, WAIT_W, PHASE_W = 550.0, 150.0, 300.0
GIB = 2**30
REASONS = ("sw_thermal", "hw_thermal", "hw_slowdown", "power_brake")
STARTUP_PHASE, SHUTDOWN_PHASE = "startup", "shutdown"


def summary_of_planted(found: Timeline) -> Summary:
    """Return the aggregator's summary of a planted job."""
    shape = found.job.shape
    config = Config(log_interval=shape.log_interval)
    aggregator: Aggregator | None = None
    for course in found.attempts:
        ledger = None
        if aggregator is not None:
            ledger = restore(aggregator.snapshot())
            ledger.begin_next_attempt(f"job-{course.number}")
        begin = _now(course.begin_s)
        aggregator = Aggregator(config, f"job-{course.number}", course.number, begin.unix_s, ledger, "boot")
        _run(aggregator, found, course)
    assert aggregator is not None
    return aggregator.summary(_now(found.attempts[-1].end_s + 0.2).unix_s, ended=True)


def _now(at_s: float) -> Now:
    return Now(MONO_S + at_s, UNIX_S + at_s)


def _run(aggregator: Aggregator, found: Timeline, course: Course) -> None:
    """Pass the messages of one attempt to the aggregator, in the order of their times."""
    shape = found.job.shape
    messages = [one for rank in range(shape.ranks) for one in _messages(found, course, rank)]
    messages.sort(key=lambda one: one[0])
    tick_s = course.begin_s + TICK_S
    for at_s, message in messages:
        while tick_s < at_s:
            aggregator.tick(_now(tick_s))
            aggregator.closed_windows.take_windows()
            tick_s += TICK_S
        now = _now(at_s)
        if isinstance(message, Reports):
            assert aggregator.reports(message, now)
        elif isinstance(message, Heartbeat):
            aggregator.heartbeat(message, now)
        elif isinstance(message, Hello):
            refused = aggregator.hello(message, now)
            assert not refused, refused
        else:
            aggregator.bye(message, now)
    aggregator.tick(_now(course.end_s + 0.1))
    aggregator.close_all()


def _messages(found: Timeline, course: Course, rank: int) -> Iterator[tuple[float, Any]]:
    shape, agent = found.job.shape, f"agent-{course.number}-{rank}"
    joined_s = course.begin_s + min(1.0, 0.5 * course.startup_s) + 1e-4 * rank
    yield joined_s, hello_of(found, course, rank, agent, joined_s)
    for row in rows_of(found, course, rank, agent):
        yield row.end_time_s - UNIX_S + LATENCY_S, Reports((row,))
    yield from _heartbeats(course, rank, agent, joined_s, shape)
    status = "completed" if course.status == "completed" else "killed"
    ended = len(course.wait_s) - (course.status == "stalled")
    yield course.end_s + 2 * LATENCY_S, Bye(agent, rank, status, ended, end_time_s=UNIX_S + course.end_s)


def hello_of(found: Timeline, course: Course, rank: int, agent: str, joined_s: float) -> Hello:
    """Return the HELLO of a rank with one GPU."""
    shape = found.job.shape
    return Hello(
        job=f"job-{course.number}",
        agent=agent,
        rank=rank,
        local_rank=rank % shape.ranks_per_host,
        world_size=shape.ranks,
        host=f"node{rank // shape.ranks_per_host}",
        role="trainer",
        devices=(_device(found, rank),),
        parameters=ParameterCount(total=7_000_000_000),
        log_interval=shape.log_interval,
        offset=course.first - 1,
        flops_per_token=FLOPS_PER_TOKEN,
        hardware_flops_per_token=FLOPS_PER_TOKEN * shape.hardware_flops,
        is_numbered=True,
        time_s=UNIX_S + joined_s,
        start_time_s=UNIX_S + course.begin_s,
        stated_gpus=_stated_gpus(found, rank),
        gpus_source="SLURM_GPUS_ON_NODE",
        facts={"framework": "torch"},
    )


def _stated_gpus(found: Timeline, rank: int) -> int:
    """Return the allocated GPUs of the rank's host; the last host has the unused GPUs."""
    shape = found.job.shape
    first = rank - rank % shape.ranks_per_host
    is_last = first + shape.ranks_per_host >= shape.ranks
    return min(shape.ranks_per_host, shape.ranks - first) + (found.unused if is_last else 0)


def _device(found: Timeline, rank: int) -> Device:
    return Device(
        key=f"GPU-{rank}",
        kind="nvml",
        name=GPU,
        memory_total_bytes=80 * GIB,
        power_limit_w=limit_w(found, rank),
        energy_method="counter",
        power_scope="gpu",
        sm_clock_max_hz=MAX_CLOCK_HZ,
        sm_clock_reference_hz=PEAK_CLOCK_HZ,
        power_limit_default_w=LIMIT_W,
    )


def limit_w(found: Timeline, rank: int) -> float:
    """Return the power limit of a GPU: the power of the chip is assumed to fall with the square of its clock."""
    if found.job.find("power_limit") is None:
        return LIMIT_W
    return LIMIT_W * max(float(found.clocks[rank] / found.job.shape.clock) ** 2, 0.2)


# --- reports ---


def rows_of(found: Timeline, course: Course, rank: int, agent: str) -> Iterator[RankReport]:
    """Yield the reports of a rank in one attempt, one per window; the last report has the shutdown."""
    shape, ended = found.job.shape, len(course.wait_s) - (course.status == "stalled")
    offset, interval = course.first - 1, shape.log_interval
    stops = [one for one in range(1, ended + 1) if (one + offset) % interval == 0]
    stops.append(ended)  # the last report; it may have no iterations
    start, start_s = 0, course.begin_s
    for sequence, stop in enumerate(stops, start=1):
        is_last = sequence == len(stops)
        end_s = course.end_s if is_last else float(course.ends_s[stop - 1])
        # A phase after the last iteration of a window belongs to the next window.
        inside = slice(max(start - 1, 0), stop if is_last else stop - 1)
        named = {name: float(seconds[inside].sum()) for name, seconds in course.phases_s.items()}
        if not start:
            named[STARTUP_PHASE] = course.startup_s
        wait_s = float(course.wait_s[start:stop, rank].sum())
        busy_s = float(course.lengths_s[start:stop].sum()) - wait_s
        if is_last:
            named[SHUTDOWN_PHASE] = max(end_s - start_s - wait_s - busy_s - sum(named.values()), 0.0)
        named = {name: seconds for name, seconds in named.items() if seconds > 0}
        yield _row(
            found, course, rank, (start, stop), named,
            agent=agent, sequence=sequence, window=-(-(max(stop, start + 1) + offset) // interval),
            start_time_s=UNIX_S + start_s, end_time_s=UNIX_S + end_s, wall_s=end_s - start_s, busy_s=busy_s,
            wait_s=wait_s, final=is_last,
        )  # fmt: skip
        start, start_s = stop, end_s


def _row(
    found: Timeline, course: Course, rank: int, part: tuple[int, int], phases_s: dict[str, float], **known: Any
) -> RankReport:
    shape, (start, stop) = found.job.shape, part
    own_s = course.own_s[start:stop, rank]
    tokens = tokens_of(shape) * (stop - start)
    return RankReport(
        rank=rank,
        iteration_first=start + 1,
        iteration_last=stop,
        iteration_shown=stop + course.first - 1,
        phases_s=phases_s,
        tokens=tokens,
        tokens_processed=round(tokens / (1 - found.padding)),
        tokens_loss=tokens,
        samples=stop - start,
        devices=(_window(found, course, rank, part, phases_s, known["busy_s"], known["wait_s"]),),
        profile=_profile(found, course, rank, part),
        own_steps=stop - start,
        own_step_s=float(own_s.sum()),
        values=_retries(course, part),
        allocator=Allocator(60.0 * GIB, 60.0 * GIB, 0.0),
        times=_times(course, rank, part),
        **known,
    )


def _times(course: Course, rank: int, part: tuple[int, int]) -> IterationTimes | None:
    at = slice(*part)
    waits_s = course.wait_s[at, rank]
    steps_s = course.lengths_s[at] - waits_s
    return IterationTimes.of(steps_s.tolist(), waits_s.tolist(), course.own_s[at, rank].tolist())


def tokens_of(shape: Shape) -> int:
    """Return the tokens of a rank in an iteration, without padding."""
    kernel_s = shape.step_s * (1 - shape.communication - shape.idle) * (1 - shape.padding)
    return round(shape.mfu * PEAK * kernel_s / FLOPS_PER_TOKEN)


def _retries(course: Course, part: tuple[int, int]) -> dict[str, ValueStatistics] | None:
    """Return the retries of torch's allocator: an iteration with lost time has one retry."""
    retries = float((course.retry_s[slice(*part)] > 0).sum())
    return {"allocator/retries": ValueStatistics(1, retries, 0.0, retries, retries)} if retries else None


def _profile(found: Timeline, course: Course, rank: int, part: tuple[int, int]) -> Profile | None:
    every, first = found.job.shape.profile_every, course.first
    at = [one for one in range(*part) if every and (one + first) % every == 0]
    if not at:
        return None
    steps_s = float((course.lengths_s[at] - course.wait_s[at, rank]).sum())
    own_s, kernel_s = float(course.own_s[at, rank].sum()), float(course.kernel_s[at, rank].sum())
    exposed_s = steps_s - own_s
    return Profile(
        iterations=len(at),
        time_s=steps_s,
        communication_s=exposed_s + 0.2 * kernel_s,
        exposed_s=exposed_s,
        computing_s=kernel_s,
        kinds={"all_reduce": (exposed_s + 0.2 * kernel_s, exposed_s)},
    )


def _window(
    found: Timeline, course: Course, rank: int, part: tuple[int, int], phases_s: dict[str, float], busy_s: float,
    wait_s: float,
) -> DeviceWindow:  # fmt: skip
    shape, at = found.job.shape, slice(*part)
    phases = {name: _integrals(seconds, PHASE_W, 0.5) for name, seconds in phases_s.items()}
    idle_s = float((course.own_s[at, rank] - course.kernel_s[at, rank]).sum())
    used = (busy_s - idle_s) / (busy_s + wait_s) if busy_s + wait_s > 0 else 0.0
    iterations = _integrals(busy_s + wait_s, WAIT_W + (STEP_W - WAIT_W) * used, used)
    wall = sum(phases.values(), iterations)
    wall_s = busy_s + wait_s + sum(phases_s.values())
    slow = float(course.is_slow[at, rank].mean()) if part[1] > part[0] else 0.0
    clock_hz = MAX_CLOCK_HZ * (slow * float(found.clocks[rank]) + (1 - slow) * shape.clock)
    is_hot = found.job.find("throttled") is not None and slow > 0
    gauges = {
        "sm_clock_hz": clock_hz,
        "temperature_c": 88.0 if is_hot else 62.0,
        "power_limit_w": limit_w(found, rank),
    }
    levels = {name: Gauge(value * wall_s, wall_s, value, value) for name, value in gauges.items()}
    if busy_s > 0:  # only in iterations
        ratio = clock_hz / PEAK_CLOCK_HZ
        levels[CLOCK_RATIO] = Gauge(ratio * (busy_s + wait_s), busy_s + wait_s, ratio, ratio)
    return DeviceWindow(
        f"GPU-{rank}",
        wall,
        phases=phases,
        memory_peak_bytes=60.0 * GIB,
        power_peak_w=STEP_W,
        energy_method="counter",
        gauges=levels,
        throttled_s=_throttled_s(found, slow, wall_s),
        throttle_covered_s=wall_s,
        power_histogram_s={int(STEP_W / 10): wall_s},
    )


def _throttled_s(found: Timeline, slow: float, wall_s: float) -> dict[str, float]:
    """Return the seconds of each clocks event reason; the power limit is a reason, but no fault of the GPU."""
    cap, seconds = found.job.shape.power_cap, {}
    if found.job.find("power_limit") is not None:
        cap = max(cap, 0.95 * slow)
    hot = found.job.find("throttled")
    if hot is not None and slow > 0:
        seconds = dict.fromkeys((REASONS[int(hot.spread * 1000) % len(REASONS)], "any"), 0.9 * slow * wall_s)
    return seconds | ({"power_cap": cap * wall_s} if cap > 0 else {})


def _integrals(seconds: float, watts: float, used: float) -> Integrals:
    joules = watts * seconds
    energy = EnergyAmount(joules, seconds, gain_j=0.05 * joules)
    return Integrals(energy, 60.0 * GIB * seconds, seconds, used * seconds, seconds)


# --- heartbeats ---


def _heartbeats(
    course: Course, rank: int, agent: str, joined_s: float, shape: Shape
) -> Iterator[tuple[float, Heartbeat]]:
    """Yield the heartbeats of a rank with its position; in a large job, fewer heartbeats are sent."""
    end_s = course.end_s
    often = max(HEARTBEAT_S, (end_s - joined_s) * shape.ranks / MAX_HEARTBEATS)
    times = np.arange(joined_s + 0.5 + often * rank / shape.ranks, end_s, min(often, 2.5 * HEARTBEAT_S))
    ends_s = course.ends_s
    steps_s = ends_s - course.lengths_s + course.wait_s[:, rank]
    for at_s, index in zip(times.tolist(), np.searchsorted(ends_s, times).tolist(), strict=True):
        ordinal, state, since_s = index, STATE_NAMES[BETWEEN], float(ends_s[index - 1]) if index else joined_s
        if index < len(steps_s) and at_s >= steps_s[index]:
            ordinal, state, since_s = index + 1, STATE_NAMES[STEP], float(steps_s[index])
        elif index == 0:
            state = STATE_NAMES[STARTUP]
        else:
            for name in (EVALUATION, CHECKPOINT):  # the evaluation comes first
                seconds = float(course.phases_s[name][index - 1])
                if since_s <= at_s < since_s + seconds:
                    state = name
                    break
                since_s += seconds
            else:
                since_s = min(since_s, at_s)
        beat = Heartbeat(agent, rank, ordinal, state, at_s - since_s, time_s=UNIX_S + at_s)
        yield at_s + LATENCY_S / 2, beat
