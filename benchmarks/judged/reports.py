"""Passes a job through the real aggregator in virtual time, as the messages that its agents would send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.judged.job import GENERATION, PHASES, Course, Job, Seconds, courses
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

UNIX_S, MONO_S = 1.75e9, 5e3
LATENCY_S, TICK_S, HEARTBEAT_S = 0.01, 2.0, 5.0
PARAMETERS = 7_000_000_000
FLOPS_PER_TOKEN = 6.0 * PARAMETERS
PEAK, PEAK_CLOCK_HZ, MAX_CLOCK_HZ, LIMIT_W, GIB = 989.4e12, 1.83e9, 1.98e9, 700.0, 2.0**30


def summary_of_job(job: Job) -> Summary:
    """Return the aggregator's summary of a job."""
    config = Config(log_interval=job.interval, profile_every=job.profile_every, min_window_s=job.min_window_s)
    aggregator: Aggregator | None = None
    found = courses(job)
    for course in found:
        before = None
        if aggregator is not None:
            before = restore(aggregator.snapshot())
            before.begin_next_attempt(f"attempt-{course.number}")
        begin = _now(course.begin_s)
        aggregator = Aggregator(config, f"attempt-{course.number}", course.number, begin.unix_s, before, "boot")
        _run(aggregator, job, course, is_last=course is found[-1])
    assert aggregator is not None
    return aggregator.summary(_now(found[-1].end_s + float(job.stay_s.max()) + 0.5).unix_s, ended=True)


def _now(at_s: float) -> Now:
    return Now(MONO_S + at_s, UNIX_S + at_s)


def _run(aggregator: Aggregator, job: Job, course: Course, *, is_last: bool) -> None:
    agents = [_Agent(job, course, rank, is_last) for rank in range(job.ranks)]
    messages = sorted((one for agent in agents for one in agent.messages()), key=lambda one: one[0])
    tick_s = course.begin_s + TICK_S
    for at_s, message in messages:
        while tick_s < at_s:
            aggregator.tick(_now(tick_s))
            aggregator.closed_windows.take_windows()
            tick_s += TICK_S
        if isinstance(message, Reports):
            assert aggregator.reports(message, _now(at_s))
        elif isinstance(message, Heartbeat):
            aggregator.heartbeat(message, _now(at_s))
        elif isinstance(message, Hello):
            refused = aggregator.hello(message, _now(at_s))
            assert not refused, refused
        else:
            aggregator.bye(message, _now(at_s))
    aggregator.tick(_now(messages[-1][0] + 0.1))
    aggregator.close_all()


class _Agent:
    """The agent of one rank in one attempt."""

    def __init__(self, job: Job, course: Course, rank: int, is_last: bool) -> None:
        self.job, self.course, self.rank = job, course, rank
        self.name = f"agent-{course.number}-{rank}"
        self.at = slice(course.attempt.start, course.attempt.stop)
        self.starts, self.ends = course.starts[:, rank], course.ends[:, rank]
        self.begin_s = course.begin_s + (float(job.late_s[rank]) if course.number == 1 else 0.0)
        self.end_s = course.end_s + (float(job.stay_s[rank]) if is_last else 0.0)
        self.phases = {name: job.phases[name][self.at, rank] for name in PHASES if name in job.phases}

    def of(self, array: Seconds) -> Seconds:
        found: Seconds = array[self.at, self.rank]
        return found

    def messages(self) -> Iterator[tuple[float, Any]]:
        attempt, joined_s = self.course.attempt, self.begin_s + 1e-4 * (1 + self.rank)
        yield joined_s, self.hello(joined_s)
        for row in self.rows():
            yield row.end_time_s - UNIX_S + LATENCY_S, Reports((row,))
        yield from self.heartbeats(joined_s)
        status = "killed" if attempt.status == "stalled" else attempt.status
        bye = Bye(self.name, self.rank, status, len(self.ends), end_time_s=UNIX_S + self.end_s)
        yield self.end_s + 2 * LATENCY_S, bye

    def hello(self, joined_s: float) -> Hello:
        job, rank = self.job, self.rank
        first = rank - rank % job.per_host
        is_last = first + job.per_host >= job.ranks
        device = Device(
            key=f"GPU-{rank}", kind="nvml", name="NVIDIA H100 80GB HBM3", memory_total_bytes=int(80 * GIB),
            power_limit_w=LIMIT_W * float(job.limit[rank]), energy_method="counter", power_scope="gpu",
            sm_clock_max_hz=MAX_CLOCK_HZ, sm_clock_reference_hz=PEAK_CLOCK_HZ, power_limit_default_w=LIMIT_W,
        )  # fmt: skip
        return Hello(
            job=f"attempt-{self.course.number}", agent=self.name, rank=rank, local_rank=rank % job.per_host,
            world_size=job.ranks, host=f"host{rank // job.per_host}", role="trainer", devices=(device,),
            parameters=ParameterCount(total=PARAMETERS), log_interval=job.interval, offset=self.course.attempt.start,
            flops_per_token=FLOPS_PER_TOKEN, hardware_flops_per_token=FLOPS_PER_TOKEN, is_numbered=True,
            time_s=UNIX_S + joined_s, start_time_s=UNIX_S + self.begin_s,
            stated_gpus=min(job.per_host, job.ranks - first) + (job.unused if is_last else 0),
            gpus_source="SLURM_GPUS_ON_NODE", facts={"framework": job.way.framework} if job.way.framework else {},
        )  # fmt: skip

    # --- reports ---

    def rows(self) -> Iterator[RankReport]:
        """Yield a report for each window; the last one has the time after the last iteration."""
        interval, offset, count = self.job.interval, self.course.attempt.start, len(self.ends)
        stops = [*range(interval - offset % interval, count + 1, interval), count]
        start, start_s = 0, self.begin_s
        for sequence, stop in enumerate(stops, 1):
            is_last = sequence == len(stops)
            end_s = self.end_s if is_last else float(self.ends[stop - 1])
            yield self.row(start, stop, start_s, end_s, sequence, is_last)
            start, start_s = stop, end_s

    def row(self, start: int, stop: int, start_s: float, end_s: float, sequence: int, is_last: bool) -> RankReport:
        job, at = self.job, slice(start, stop)
        waits, steps = self.of(job.wait)[at], self.ends[at] - self.starts[at]
        own_s = (
            (self.of(job.forward) + (job.way.own == "all") * self.of(job.backward))[at].tolist() if job.way.own else []
        )
        inside = slice(max(start - 1, 0), stop if is_last else max(stop - 1, 0))  # later phases: of the next window
        named = {name: float(seconds[inside].sum()) for name, seconds in self.phases.items()}
        wait_s, busy_s = float(waits.sum()), float(steps.sum())
        rest_s = end_s - start_s - wait_s - busy_s - sum(named.values())
        if start == 0:
            named["startup"] = float(self.starts[0] - self.begin_s - self.of(job.wait)[0])
            rest_s -= named["startup"]
        if is_last:
            named["shutdown"] = max(rest_s, 0.0)
        named = {name: seconds for name, seconds in named.items() if seconds > 0}
        count = stop - start
        tokens = self.tokens() * count
        generated = round(named.get(GENERATION, 0.0) * 1000)
        retries = float(job.retries[self.at][at].sum()) if job.retries is not None else 0.0
        counts: dict[str, Any] = {
            "tokens": tokens, "tokens_processed": round(tokens / (1 - job.padding)), "tokens_loss": tokens,
            "samples": count, "generated_tokens": generated, "prompt_tokens": generated // 4,
        }  # fmt: skip
        return RankReport(
            agent=self.name, sequence=sequence, rank=self.rank,
            window=-(-(max(stop, start + 1) + self.course.attempt.start) // job.interval),
            iteration_first=start + 1, iteration_last=stop, iteration_shown=stop + self.course.attempt.start,
            start_time_s=UNIX_S + start_s, end_time_s=UNIX_S + end_s, wall_s=wait_s + busy_s + sum(named.values()),
            busy_s=busy_s, wait_s=wait_s, phases_s=named, final=is_last,
            generation_s=named.get(GENERATION, 0.0), **counts,
            devices=(self.device(at, named, wait_s, busy_s),), profile=self.profile(start, stop),
            own_steps=len(own_s), own_step_s=sum(own_s), allocator=Allocator(50 * GIB, 60 * GIB, GIB),
            times=IterationTimes.of(steps.tolist(), waits.tolist(), own_s),
            values={"allocator/retries": ValueStatistics(1, retries, 0.0, retries, retries)} if retries else None,
        )  # fmt: skip

    def tokens(self) -> int:
        """Return the tokens of an iteration: the FLOPs are a share of the peak in the time of useful kernels."""
        return max(round(self.job.mfu * PEAK * self.job.step_s * 0.8 / FLOPS_PER_TOKEN), 1)

    def profile(self, start: int, stop: int) -> Profile | None:
        job, every = self.job, self.job.profile_every
        at = [one for one in range(start, stop) if every and (one + self.course.attempt.start + 1) % every == 0]
        if not at:
            return None
        steps_s = float((self.ends[at] - self.starts[at]).sum())
        work_s = float(self.of(job.work)[at].sum())
        exposed_s, hidden_s = max(steps_s - work_s, 0.0), 0.1 * work_s
        return Profile(
            len(at), steps_s, exposed_s + hidden_s, exposed_s, work_s - float(self.of(job.idle)[at].sum()),
            kinds={"all_reduce": (exposed_s + hidden_s, exposed_s)},
        )  # fmt: skip

    def device(self, at: slice, named: dict[str, float], wait_s: float, busy_s: float) -> DeviceWindow:
        """Return the readings of the GPU: it is idle in waits for data, and busy in waits for other ranks."""
        job, in_iterations_s = self.job, wait_s + busy_s
        idle_s = float(self.of(job.idle)[at].sum())
        used = max(busy_s - idle_s, 0.0) / in_iterations_s if in_iterations_s else 0.0
        phases = {name: _integrals(seconds, 300.0, 0.5) for name, seconds in named.items()}
        wall = sum(phases.values(), _integrals(in_iterations_s, 120.0 + 480.0 * used, used))
        wall_s = in_iterations_s + sum(named.values())
        clock = float(self.of(job.clock)[at].mean()) * MAX_CLOCK_HZ if in_iterations_s else MAX_CLOCK_HZ
        hot = {name: float(self.of(one)[at].mean()) for name, one in job.reasons.items() if in_iterations_s}
        gauges = {"sm_clock_hz": clock, "temperature_c": 60.0 + 26.0 * hot.get("any", 0.0)}
        gauges["power_limit_w"] = LIMIT_W * float(job.limit[self.rank])
        levels = {name: Gauge(value * wall_s, wall_s, value, value) for name, value in gauges.items()}
        if in_iterations_s:
            ratio = clock / PEAK_CLOCK_HZ
            levels[CLOCK_RATIO] = Gauge(ratio * in_iterations_s * used, in_iterations_s * used, ratio, ratio)
        return DeviceWindow(
            f"GPU-{self.rank}", wall, phases=phases, memory_peak_bytes=60 * GIB, power_peak_w=600.0,
            energy_method="counter", gauges=levels, throttle_covered_s=wall_s,
            throttled_s={name: share * in_iterations_s for name, share in hot.items() if share > 0},
            power_histogram_s={60: wall_s},
        )  # fmt: skip

    # --- heartbeats ---

    def heartbeats(self, joined_s: float) -> Iterator[tuple[float, Heartbeat]]:
        """Yield the position of the rank every five seconds."""
        times = np.arange(joined_s + 0.3 + HEARTBEAT_S * self.rank / self.job.ranks, self.end_s, HEARTBEAT_S)
        for at_s, done in zip(times.tolist(), np.searchsorted(self.ends, times).tolist(), strict=True):
            since_s = float(self.ends[done - 1]) if done else joined_s
            state, ordinal = STATE_NAMES[BETWEEN if done else STARTUP], done
            is_stuck = done == len(self.ends) and self.course.attempt.stuck_s > 0
            if is_stuck or (done < len(self.ends) and at_s >= self.starts[done]):
                state, ordinal = STATE_NAMES[STEP], done + 1
                since_s = since_s if is_stuck else float(self.starts[done])
            elif done:
                state, since_s = self.phase_at(done - 1, at_s, since_s, state)
            beat = Heartbeat(self.name, self.rank, ordinal, state, max(at_s - since_s, 0.0), time_s=UNIX_S + at_s)
            yield at_s + LATENCY_S / 2, beat

    def phase_at(self, index: int, at_s: float, since_s: float, state: str) -> tuple[str, float]:
        for name, seconds in self.phases.items():
            if since_s <= at_s < since_s + seconds[index]:
                return name, since_s
            since_s += float(seconds[index])
        return state, min(since_s, at_s)


def _integrals(seconds: float, watts: float, used: float) -> Integrals:
    joules = watts * seconds
    energy = EnergyAmount(joules, seconds, gain_j=0.05 * joules)
    return Integrals(energy, 55 * GIB * seconds, seconds, used * seconds, seconds)


def named_ranks(summary: Summary) -> Sequence[int]:
    """Return all ranks that were named as slow."""
    return sorted({rank for one in summary.stragglers for rank in one.ranks})
