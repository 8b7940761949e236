"""The course of a planted job in time, and the device time that each cause takes: the truth for tests of the verdict.

The ranks train in lockstep: each rank waits for its data, computes, and waits at the all-reduce for the slowest rank.
The exposed part of the all-reduce follows; evaluation and checkpoints follow after some iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.planted.job import (
    HEALTHY,
    MAX_SECOND,
    MIN_PADDING,
    SLOW_RANKS,
    THRESHOLDS,
    Planted,
    PlantedJob,
    chance_of,
    draw,
    shortened,
)

Seconds = NDArray[np.float64]
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
CALIBRATIONS = 8
MAX_REDRAWS = 200


@dataclass
class Course:
    """One attempt; the arrays have a row for each iteration and, for a quantity of ranks, a column for each rank."""

    number: int
    first: int  # number of the first iteration, from 1
    begin_s: float
    startup_s: float
    wait_s: Seconds  # data wait
    own_s: Seconds  # from the start of a step to the all-reduce
    kernel_s: Seconds  # part of `own_s` with kernels
    communication_s: Seconds  # exposed, the same on all ranks
    phases_s: dict[str, Seconds]  # after an iteration
    retry_s: Seconds  # time of allocator retries, a part of `own_s`
    is_slow: NDArray[np.bool_]  # whether a rank is slow because of a planted cause
    hang_at: int = -1  # index of the iteration in which the first rank of `hanging` stops
    hang_s: float = 0.0
    hanging: int = 0
    status: str = "completed"  # or killed, or stalled
    shutdown_s: float = 0.0
    kept: int = 0  # number of iterations that no later attempt repeats

    @property
    def lengths_s(self) -> Seconds:
        """Duration of each iteration, from the start of the data wait to the end of the step."""
        longest: Seconds = (self.wait_s + self.own_s).max(axis=1) + self.communication_s
        return longest

    @property
    def ends_s(self) -> Seconds:
        """Time at the end of each iteration, without its phases."""
        phases = sum(self.phases_s.values(), np.zeros(len(self.wait_s)))
        until: Seconds = self.begin_s + self.startup_s + np.cumsum(self.lengths_s + phases) - phases
        return until

    @property
    def end_s(self) -> float:
        """End of the attempt; the last iteration of a stalled attempt never ends."""
        last_s = sum(float(one[-1]) for one in self.phases_s.values())
        return float(self.ends_s[-1]) + last_s + self.shutdown_s


@dataclass
class Timeline:
    """All attempts of a job, and the true device-seconds of each cause."""

    job: PlantedJob
    attempts: list[Course]
    unused: int
    padding: float  # share of the processed positions
    clocks: Seconds  # SM clock of each rank while the cause acts, as a share of the maximum
    truth: dict[str, float] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        return self.attempts[-1].end_s - self.attempts[0].begin_s

    @property
    def device_seconds(self) -> float:
        return self.elapsed_s * (self.job.shape.ranks + self.unused)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the device time of the job, by cause."""
        return {cause: seconds / self.device_seconds for cause, seconds in self.truth.items()}

    @property
    def primary(self) -> str:
        """The cause with the most device time among those above their threshold, or healthy."""
        shares = self.shares
        above = [cause for cause, share in shares.items() if share >= THRESHOLDS[cause]]
        if self.padding < MIN_PADDING and "padding" in above:
            above.remove("padding")
        if self.attempts[-1].status == "stalled" and "hang" not in above:
            above.append("hang")
        return max(above, key=lambda cause: shares[cause], default="healthy")


class _Noise:
    """The random numbers of a job, by iteration number; a repeated iteration has the same numbers."""

    def __init__(self, job: PlantedJob) -> None:
        chance, shape = chance_of(job.kind, job.seed, "noise"), job.shape
        size = (shape.iterations, shape.ranks)
        self.own = 1 + shape.jitter * chance.standard_normal(size)
        self.own *= np.clip(1 + shape.varies * chance.standard_normal(shape.iterations), 0.3, 2.0)[:, None]
        delayed = chance.random(shape.iterations) < shape.tail
        self.own[np.flatnonzero(delayed), chance.integers(0, shape.ranks, delayed.sum())] *= chance.uniform(1.1, 1.8)
        common = chance.gamma(8.0, 1 / 8.0, shape.iterations)[:, None]
        self.wait = common * np.clip(1 + 0.02 * chance.standard_normal(size), 0.5, 2.0)
        self.communication = np.clip(1 + 0.1 * chance.standard_normal(shape.iterations), 0.5, 2.0)
        self.idle = np.clip(1 + 0.05 * chance.standard_normal(shape.iterations), 0.5, 2.0)[:, None]
        self.idle = self.idle * np.clip(1 + 0.01 * chance.standard_normal(size), 0.5, 2.0)
        self.phase = np.clip(1 + 0.05 * chance.standard_normal(shape.iterations), 0.5, 2.0)
        self.ranks = chance.permutation(shape.ranks)
        self.start = int(chance.uniform() * shape.late_start * shape.iterations)
        self.hang_at = int(chance.uniform(0.3, 0.9) * shape.iterations)
        self.crashes = np.sort(chance.choice(np.arange(1, 20), 4, replace=False)) / 20
        self.split = chance.uniform(0.2, 0.6, 4)
        self.is_tight = chance.random(shape.windows) < chance.uniform(0.3, 0.7)  # windows with allocator retries
        self.retries = chance.random(shape.iterations) < chance.uniform(0.2, 0.8)


def planned(kind: str, seed: int, is_short: bool = False) -> PlantedJob:
    """Return the job of a cause and a seed, drawn again until it is what it is meant to be.

    ``is_short`` means a job of seconds for real processes.

    A draw is rejected if the named cause is not the true primary cause, or if the second cause is above `MAX_SECOND`
    together with its usual part.
    """
    for redraw in range(MAX_REDRAWS):
        job = draw(kind, seed, redraw)
        if is_short:
            job = shortened(job)
            if not job.causes and kind != HEALTHY:
                continue
        found = timeline(job)
        shares = found.shares
        seconds = [shares[one.cause] for one in job.causes[1:]]
        if found.primary == kind and all(share <= MAX_SECOND * shares[kind] for share in seconds):
            return job
    raise ValueError(f"{kind} {seed}: no valid job in {MAX_REDRAWS} draws")


def timeline(job: PlantedJob, fixed: str = "") -> Timeline:
    """Return the course of a job in time.

    Args:
        job: the job.
        fixed: a cause that is removed; everything else stays, also the noise.
    """
    noise, shape = _Noise(job), job.shape
    elapsed_s = shape.iterations * shape.step_s * 1.05
    amounts = {one.cause: one.share * elapsed_s for one in job.causes}
    usual = _simulate(job, noise, {}).truth
    for _ in range(CALIBRATIONS):
        found = _simulate(job, noise, amounts)
        for number, one in enumerate(job.causes):
            # The drawn share of the first cause contains its usual part; a second cause is added to its usual part.
            wanted = one.share * found.device_seconds - (usual[one.cause] if number == 0 else 0.0)
            planted = found.truth[one.cause] - usual[one.cause]
            step = wanted / planted if planted > 0 else 1.5
            amounts[one.cause] = max(amounts[one.cause] * min(max(step, 0.3), 3.0), 1e-6)
    if fixed:
        amounts.pop(fixed)
    return _simulate(job, noise, amounts)


def _simulate(job: PlantedJob, noise: _Noise, amounts: dict[str, float]) -> Timeline:
    """Return the course of the job if each cause takes this many seconds of elapsed time."""
    shape = job.shape
    number = shape.iterations
    whole_s = number * shape.step_s

    def each_s(cause: str) -> float:
        return amounts.get(cause, 0.0) / number

    base_s = shape.step_s * (1 - shape.communication - shape.idle)
    useful_s = base_s * (1 - shape.padding)
    padding = each_s("padding") / (base_s + each_s("padding")) if "padding" in amounts else shape.padding
    kernel_s = useful_s / (1 - padding) * noise.own
    idle_s = (shape.step_s * shape.idle + each_s("device_idle")) * noise.idle
    retry_s = _retries(noise, shape.log_interval, amounts.get("memory_pressure", 0.0))
    slow_s, is_slow, clocks = _slow_ranks(job, noise, amounts, kernel_s)
    wait_s = (shape.step_s * shape.data + each_s("data_loading")) * noise.wait
    is_by_data = any(one.by_data for one in job.causes)
    computing_s = kernel_s if is_by_data else kernel_s + slow_s
    communication_s = (shape.step_s * shape.communication + each_s("exposed_communication")) * noise.communication
    phases_s = {
        EVALUATION: _phase(noise, shape.evaluation * whole_s, amounts.get("evaluation", 0.0), 10 * shape.step_s),
        CHECKPOINT: _phase(noise, shape.checkpoint * whole_s, amounts.get("checkpoint", 0.0), 3 * shape.step_s),
    }
    whole = Course(
        0, 1, 0.0, shape.startup_s, wait_s + slow_s if is_by_data else wait_s, computing_s + idle_s + retry_s[:, None],
        computing_s,
        communication_s,
        phases_s, retry_s, is_slow, shutdown_s=shape.shutdown_s, kept=number, hanging=int(noise.ranks[-1]),
    )  # fmt: skip
    attempts = _attempts(job, noise, amounts, whole)
    unused = job.find("unused_gpus")
    found = Timeline(job, attempts, unused.count if unused and "unused_gpus" in amounts else 0, padding, clocks)
    found.truth = _truth(found, whole, slow_s)
    return found


def _retries(noise: _Noise, interval: int, planted_s: float) -> Seconds:
    """Return the seconds of allocator retries of each iteration, in about half of the windows, on all ranks."""
    found = np.zeros(len(noise.phase))
    windows = np.arange(len(found)) // interval
    at = np.flatnonzero(noise.is_tight[windows] & noise.retries)
    if planted_s > 0 and len(at):
        found[at] = noise.phase[at] / noise.phase[at].sum() * planted_s
    return found


def _slow_ranks(
    job: PlantedJob, noise: _Noise, amounts: dict[str, float], kernel_s: Seconds
) -> tuple[Seconds, NDArray[np.bool_], Seconds]:
    """Return the additional seconds of slow ranks, which ranks are slow, and the clocks."""
    shape = job.shape
    is_slow, clocks = np.zeros(kernel_s.shape, dtype=bool), np.full(shape.ranks, shape.clock)
    slow = next((one for one in job.causes if one.cause in SLOW_RANKS and one.cause in amounts), None)
    if slow is None:
        return np.zeros(kernel_s.shape), is_slow, clocks
    ranks = noise.ranks[: slow.count]
    if 1 < slow.count < shape.ranks:  # the ranks of one host
        host = int(noise.ranks[0]) // shape.ranks_per_host
        ranks = np.arange(shape.ranks)[np.arange(shape.ranks) // shape.ranks_per_host == host]
    is_slow[noise.start :, ranks] = True
    more = amounts[slow.cause] / float(kernel_s[noise.start :].mean() * (len(kernel_s) - noise.start))
    if slow.cause != "straggler":
        clocks[ranks] = shape.clock / (1 + more)
    return np.where(is_slow, more * kernel_s, 0.0), is_slow, clocks


def _phase(noise: _Noise, usual_s: float, planted_s: float, one_s: float) -> Seconds:
    """Return the seconds of a phase after each iteration; a planted phase is run too often.

    Args:
        noise: the random numbers of the job.
        usual_s: usual seconds of all phases of this kind.
        planted_s: planted seconds.
        one_s: duration of a phase, if it is planted.
    """
    number = len(noise.phase)
    found = np.zeros(number)
    whole_s = usual_s + planted_s
    if whole_s <= 0:
        return found
    times = min(max(round(whole_s / one_s), 3), number // 2) if planted_s else 4
    at = np.linspace(number / times, number, times).astype(int) - 1
    found[at] = noise.phase[at] * whole_s / times
    return found


def _attempts(job: PlantedJob, noise: _Noise, amounts: dict[str, float], whole: Course) -> list[Course]:
    """Cut the whole job into attempts, and add gaps, start-ups and repeated iterations; add the hang."""
    shape = job.shape
    restarts = job.find("restarts") if "restarts" in amounts else None
    count = restarts.count if restarts else 0
    each_s = amounts["restarts"] / count if count else 0.0
    iteration_s = float(whole.lengths_s.mean())
    starts, stops, startups, gaps = [0], [], [shape.startup_s], [0.0]
    for one in range(count):
        startup_s = min(shape.startup_s, 0.3 * each_s)
        stop = max(int(noise.crashes[one * 4 // count] * shape.iterations), starts[-1] + 1)
        redone = min(round(noise.split[one] * each_s / iteration_s), stop - starts[-1] - 1)
        stops.append(stop)
        starts.append(stop - redone)
        startups.append(startup_s)
        gaps.append(max(each_s - startup_s - redone * iteration_s, 0.5))
    stops.append(shape.iterations)
    attempts: list[Course] = []
    now_s = 0.0
    for one, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        is_last = one == count
        now_s += gaps[one]
        course = _cut(whole, one + 1, start, stop, now_s, startups[one])
        course.status = "completed" if is_last else "killed"
        course.shutdown_s = shape.shutdown_s if is_last else 0.05
        course.kept = stop - start if is_last else starts[one + 1] - start
        attempts.append(course)
        _hang(job, noise, amounts, course)
        now_s = course.end_s
    return attempts


def _cut(whole: Course, number: int, start: int, stop: int, begin_s: float, startup_s: float) -> Course:
    part = slice(start, stop)
    return Course(
        number, start + 1, begin_s, startup_s, whole.wait_s[part].copy(), whole.own_s[part].copy(),
        whole.kernel_s[part].copy(), whole.communication_s[part],
        {name: seconds[part] for name, seconds in whole.phases_s.items()}, whole.retry_s[part], whole.is_slow[part],
        hanging=whole.hanging,
    )  # fmt: skip


def _hang(job: PlantedJob, noise: _Noise, amounts: dict[str, float], course: Course) -> None:
    """Add the hang to the attempt that executes its iteration last."""
    hang = job.find("hang") if "hang" in amounts else None
    if hang is None:
        return
    stalls = _ends_stalled(job, hang)
    at = (job.shape.iterations if stalls else noise.hang_at + 1) - course.first
    if not 0 <= at < course.kept:
        return
    course.hang_at, course.hang_s = at, amounts["hang"]
    course.own_s[at, course.hanging] += course.hang_s
    if stalls:
        course.status, course.shutdown_s = "stalled", 0.0
        course.phases_s = {name: np.append(seconds[:-1], 0.0) for name, seconds in course.phases_s.items()}


def _ends_stalled(job: PlantedJob, hang: Planted) -> bool:
    return job.causes[0] is hang and hang.spread < 0.5


def _truth(found: Timeline, whole: Course, slow_s: Seconds) -> dict[str, float]:
    """Return the true device-seconds of each cause."""
    ranks = found.job.shape.ranks
    truth = dict.fromkeys(THRESHOLDS, 0.0)
    idle_s = whole.own_s - whole.kernel_s - whole.retry_s[:, None]
    without_s = (whole.wait_s + whole.own_s - slow_s).max(axis=1) + whole.communication_s
    extra_s = whole.lengths_s - without_s  # of each iteration, because of slow ranks
    cause = next((one.cause for one in found.job.causes if one.cause in SLOW_RANKS), "straggler")
    by_data_s = slow_s if any(one.by_data for one in found.job.causes) else np.zeros_like(slow_s)
    for course in found.attempts:
        kept = slice(course.first - 1, course.first - 1 + course.kept)
        truth["data_loading"] += float((whole.wait_s - by_data_s)[kept].sum())
        truth[cause] += float(extra_s[kept].sum()) * ranks
        truth["exposed_communication"] += float(whole.communication_s[kept].sum()) * ranks
        truth["device_idle"] += float(idle_s[kept].sum())
        truth["memory_pressure"] += float(whole.retry_s[kept].sum()) * ranks
        truth["padding"] += found.padding * float(whole.kernel_s[kept].sum())
        truth["hang"] += course.hang_s * ranks
        for name, seconds in course.phases_s.items():
            truth[name] += float(seconds[: course.kept].sum()) * ranks
        redone = slice(course.kept, None)
        truth["restarts"] += float(course.lengths_s[redone].sum()) * ranks
        truth["restarts"] += sum(float(one[redone].sum()) for one in course.phases_s.values()) * ranks
        if course.number > 1:
            truth["restarts"] += course.startup_s * ranks
    gaps = zip(found.attempts, found.attempts[1:], strict=False)
    truth["restarts"] += sum(after.begin_s - before.end_s for before, after in gaps) * ranks
    truth["unused_gpus"] = found.unused * found.elapsed_s
    return truth
