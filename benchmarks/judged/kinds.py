"""What is planted: the kinds of jobs, with the causes that count as right.

Where two causes count as right, both describe the same planted loss: a rank that always waits for data is also a slow
rank; a pause of one rank in turn is a long iteration and an uneven one; work of one rank in one iteration of a window
is a slow rank, or a long iteration if it is long.

Own time that ends where backward begins shows only the forward part of a slow rank.  Without a profile the rest of the
loss is in communication that is not split: `none_found` is then right if the visible part is below the threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.judged import devices, process
from benchmarks.judged.job import CHECKPOINT, EVALUATION, WAYS, Job, Planted, Seconds, calibrated, chance_of, courses
from benchmarks.judged.shape import RANKS, at_times, clean_job, with_usual_losses

Chance = np.random.Generator
Plan = Callable[[Job, Chance, float], Planted]
MAX_SHARE = 0.45
ONE = (1, *RANKS)
API = tuple(name for name, way in WAYS.items() if way.is_api)
FRAMEWORKS = tuple(name for name, way in WAYS.items() if not way.is_api)
SYNCED = tuple(name for name, way in WAYS.items() if way.own)
FORWARD = tuple(name for name, way in WAYS.items() if way.own == "forward")
WHOLE = tuple(name for name, way in WAYS.items() if way.own == "all")
UNSYNCED = tuple(name for name, way in WAYS.items() if not way.own)
SHARDED = tuple(name for name, way in WAYS.items() if way.is_sharded)
TORCH = ("torch, ddp", "torch, sync point", "accelerate", "fabric")


@dataclass(frozen=True)
class Kind:
    """A kind of planted jobs: which causes are right, and from which share of the device time on."""

    plan: Plan
    right: tuple[str, ...]
    threshold: float
    ways: tuple[str, ...] = tuple(WAYS)
    ranks: tuple[int, ...] = RANKS
    without: tuple[str, ...] = ()  # usual losses that the job does not have, because they are of the planted kind
    profiled: bool | None = None
    lengths: tuple[tuple[float, int], ...] = ()  # step times with numbers of iterations; empty: all of `STEPS`
    second: bool = True  # whether jobs with odd seeds have marked checkpoints as a smaller second loss
    most: float = MAX_SHARE
    is_hidden: bool = False  # whether the loss is in communication that is not split
    is_locked: bool = False  # whether the driver has no reason for the low clock of a rank

    @property
    def is_in_own_time(self) -> bool:
        """Whether only own times or profiles show the loss."""
        return self.is_locked or bool(set(self.right) & {"straggler", "uneven_ranks"})


@dataclass(frozen=True)
class Case:
    """A planted job, with the truth about it."""

    job: Job
    right: tuple[str, ...]  # causes that count as right
    slow: frozenset[int]  # ranks that may be named as slow
    gain: float  # in kept tokens per device time, without the planted loss alone
    visible: float  # share of the device time that is lost outside of communication that is not split


def planted_case(kind: str, seed: int) -> Case:
    """Return the job of a kind and a seed."""
    about, chance = KINDS[kind], chance_of(kind, seed)
    step_s, count = about.lengths[seed % len(about.lengths)] if about.lengths else (0.0, 0)
    if not step_s:
        step_s = (0.001, 0.003, 0.01, 0.1, 1.0)[seed % 5] * float(chance.uniform(0.8, 1.3))
    way = WAYS[about.ways[int(chance.integers(len(about.ways)))]]
    job = clean_job(kind, seed, chance, way, about.ranks, step_s, count, about.profiled)
    low, high = 1.15 * about.threshold, min(5 * about.threshold, about.most)
    share = float(np.exp(chance.uniform(np.log(low), np.log(high))))
    if way.own == "forward" and about.is_in_own_time:
        share = min(2.2 * share, high)  # in half of these jobs, the part in forward alone is above the threshold
    planted = about.plan(job, chance, share)
    without = (*about.without, *(("wait",) if set(about.right) & {"data_loading", "between_iterations"} else ()))
    job = with_usual_losses(job, chance, float(chance.uniform(0.003, 0.015)), without)
    if seed % 2 and about.second and "phases" not in without and not planted.is_fixed:
        again = Planted({CHECKPOINT: at_times(job, int(chance.integers(3, 12)))})
        job = calibrated(again, job, share * float(chance.uniform(0.2, 0.45)))[0]
    return case_of(kind, planted, *calibrated(planted, job, share))


def case_of(kind: str, planted: Planted, made: Job, gain: float) -> Case:
    """Return a job with its truth; a small loss is hidden if own time ends before backward and nothing is profiled."""
    about = KINDS[kind]
    visible = 0.0 if planted.is_fixed or about.is_hidden else gain / (1 + gain)
    right = about.right if about.right != NONE else without_loss(made)
    if made.way.own == "forward" and not made.profile_every and about.is_in_own_time:
        visible = own_loss(made, planted.slow)
        right += ("none_found",) if visible < 1.15 * about.threshold else ()
    return Case(made, right, planted.slow, gain, visible)


def without_loss(job: Job) -> tuple[str, ...]:
    """Return the right verdict without a visible loss: `healthy` only if nothing can be hidden in communication."""
    return ("healthy",) if job.ranks == 1 or job.profile_every else ("none_found",)


def own_loss(job: Job, slow: frozenset[int]) -> float:
    """Return the share of the time by which the own times of slow ranks, or of the slowest rank, are longer."""
    own = job.forward if job.way.own == "forward" else job.forward + job.backward
    others = [rank for rank in range(job.ranks) if rank not in slow]
    base = own[:, others].max(axis=1) if slow and others else own.mean(axis=1)
    course = courses(job)[0]
    return float(np.maximum(own.max(axis=1) - base, 0).sum()) / (course.end_s - course.begin_s)


def work_of(job: Job, mask: Seconds, is_on_host: bool = False) -> dict[str, Seconds]:
    """Return the work of all parts of an iteration, where the mask is above 0; on a slow host, the device is idle."""
    adds = {name: mask * getattr(job, name) for name in ("forward", "backward", "optimizer")}
    return adds | ({"idle": adds["forward"] + adds["backward"]} if is_on_host else {})


# --- waits between iterations ---


def waits(pattern: str) -> Plan:
    def plan(job: Job, chance: Chance, _share: float) -> Planted:
        size, rank = job.wait.shape, int(chance.integers(job.ranks))
        tails = chance.lognormal(0, float(chance.uniform(0.2, 1.2)), size)
        slow = frozenset[int]()
        if pattern == "all":
            found = tails[:, :1] * chance.uniform(0.8, 1.0, size)
        elif pattern == "turn":
            found = tails * (np.arange(size[0])[:, None] % size[1] == np.arange(size[1]))
        elif pattern == "random":
            found = tails * (chance.random(size) < chance.uniform(0.05, 0.5))
        elif pattern == "bursts":
            found = at_times(job, int(chance.integers(4, 13))) * tails[:, :1] * chance.uniform(0.8, 1.0, size)
        elif pattern == "rank 0":
            rank, slow = 0, frozenset({0})
            found = at_times(job, int(chance.integers(4, 21))) * (np.arange(size[1]) == rank)
        else:
            slow = frozenset({rank})
            found = tails * (np.arange(size[1]) == rank)
        return Planted({"wait": found * job.step_s}, slow=slow)

    return plan


# --- long iterations ---


def long_times(job: Job, share: float, chance: Chance) -> int:
    """Return a number of long iterations of which each takes at least five usual ones."""
    return int(chance.integers(3, max(min(int(job.count * share / (1 - share) / 5), 40), 3) + 1))


def pauses(pattern: str) -> Plan:
    def plan(job: Job, chance: Chance, share: float) -> Planted:
        size, times = job.wait.shape, long_times(job, share, chance)
        found, part = np.zeros(size), str(chance.choice(["forward", "backward"]))
        at = np.sort(chance.choice(np.arange(12, size[0]), times, replace=False))
        each = chance.uniform(0.8, 1.25, times)
        if pattern == "all":
            found[at] = each[:, None]
        elif pattern == "turn":
            found[at, np.arange(times) % job.ranks] = each
        elif pattern == "compilations":  # each takes one or two iterations, and not equally long on all ranks
            found[at] = each[:, None] * chance.uniform(0.7, 1.0, (times, job.ranks))
            found[np.minimum(at + 1, size[0] - 1)] += found[at] * chance.uniform(0, 0.8)
        else:  # checkpoints or evaluations that nothing marks: after an optimizer step, at equal distances
            part, found = "forward", at_times(job, times) * (chance.uniform(0.8, 1.0))
            if pattern == "saves of rank 0":
                found *= np.arange(job.ranks) == 0
        slow = frozenset({0} if pattern == "saves of rank 0" else ())
        return Planted({part: found * job.step_s, "idle": found * job.step_s * (part == "forward")}, slow=slow)

    return plan


def warmup(job: Job, chance: Chance, _share: float) -> Planted:
    found = np.zeros(job.wait.shape)
    count = 1 if chance.random() < 0.5 else int(chance.integers(2, 10))
    found[:count] = np.geomspace(1, float(chance.uniform(0.3, 1)), count)[:, None]
    return Planted({"forward": found * job.step_s, "idle": found * job.step_s})


# --- slow and uneven ranks ---


def slow_ranks(pattern: str) -> Plan:
    def plan(job: Job, chance: Chance, _share: float) -> Planted:
        size = job.wait.shape
        count = {2: 1, 3: 1, 4: 2, 6: 3}.get(job.ranks, 2) if pattern == "several" else 1
        ranks = chance.choice(job.ranks, count, replace=False)
        mask = np.zeros(size)
        mask[:, ranks] = chance.uniform(0.85, 1.0, count)
        number = np.arange(size[0])
        if pattern == "third":
            job.interval = min(job.interval, max(job.count // 24, 1))
            every = 1 if chance.random() < 0.5 else job.interval  # iterations or windows
            mask *= (number // every % 3 == int(chance.integers(3)))[:, None]
        elif pattern == "late":
            first = int(chance.uniform(0.2, 0.6) * size[0])
            mask[:first] = 0
            if chance.random() < 0.5:
                mask[first + int(0.35 * size[0]) :] = 0
        elif pattern == "window":
            at = (job.interval - 1, 0, -1)[int(chance.integers(3))]
            place = chance.integers(0, job.interval, size[0] // job.interval + 1)[number // job.interval]
            mask *= (number % job.interval == (place if at < 0 else at))[:, None]
        return Planted(work_of(job, mask, chance.random() < 0.5), slow=frozenset(ranks.tolist()))

    return plan


def wandering(job: Job, chance: Chance, _share: float) -> Planted:
    size = job.wait.shape
    mask = np.zeros(size)
    mask[np.arange(size[0]), chance.integers(0, size[1], size[0])] = chance.uniform(0.5, 1.5, size[0])
    mask[chance.random(size[0]) > chance.uniform(0.4, 1.0)] = 0
    # The waits of the others, without the time of the slow rank itself, are above the threshold.
    return Planted(work_of(job, mask), least=1.15 * 0.05 * size[1] / (size[1] - 1))


def uneven(job: Job, chance: Chance, _share: float) -> Planted:
    """Batches of different length on each rank: forward and backward vary together."""
    lengths = chance.gamma(float(chance.uniform(2.0, 4.0)), 1.0, job.wait.shape)
    noise = lengths / lengths.mean(axis=1, keepdims=True) - 1
    return Planted({"forward": noise * job.forward, "backward": noise * job.backward})


# --- inside the steps ---


def communication(job: Job, chance: Chance, _share: float) -> Planted:
    job.communication = np.zeros(job.count)
    return Planted({"communication": job.step_s * chance.lognormal(0, float(chance.uniform(0.05, 0.4)), job.count)})


def idle_devices(job: Job, chance: Chance, _share: float) -> Planted:
    job.idle = np.zeros(job.wait.shape)
    gaps = job.step_s * chance.lognormal(0, 0.2, (job.count, 1)) * chance.uniform(0.98, 1.0, job.wait.shape)
    return Planted({"forward": gaps, "idle": gaps})


def padding(job: Job, _chance: Chance, _share: float) -> Planted:
    def other(made: Job, size: float) -> None:
        made.padding = size / (1 + size)

    return Planted({name: getattr(job, name) for name in ("forward", "backward", "idle")}, other)


def phase(name: str, rank: int | None = None) -> Plan:
    def plan(job: Job, chance: Chance, _share: float) -> Planted:
        found = at_times(job, int(chance.integers(3, 40))) * chance.uniform(0.9, 1.1, (job.count, 1))
        return Planted({name: job.step_s * found * (1.0 if rank is None else np.arange(job.ranks) == rank)})

    return plan


# --- the kinds ---

DATA, BETWEEN, SLOW = ("data_loading",), ("between_iterations",), ("straggler",)
NONE, LONG, UNEVEN = ("healthy", "none_found"), ("slow_iterations",), ("uneven_ranks",)
STEPS = ("pauses", "jitter")
HOURS = ((0.1, 20_000), (1.0, 2_200), (10.0, 220))
RETRYING = ((0.01, 4_000), (0.1, 900), (1.0, 400))

KINDS: dict[str, Kind] = {
    "loader_all": Kind(waits("all"), DATA, 0.05, FRAMEWORKS, ONE),
    "loader_turn": Kind(waits("turn"), DATA, 0.05, FRAMEWORKS),
    "loader_random": Kind(waits("random"), DATA, 0.05, FRAMEWORKS),
    "loader_bursts": Kind(waits("bursts"), DATA, 0.05, FRAMEWORKS, ONE),
    "loader_one_rank": Kind(waits("one"), DATA + SLOW, 0.05, FRAMEWORKS),
    "between_all": Kind(waits("all"), BETWEEN, 0.05, API, ONE),
    "between_saves": Kind(waits("bursts"), BETWEEN, 0.05, API, ONE),
    "between_rank_0": Kind(waits("rank 0"), BETWEEN + SLOW, 0.05, API),
    "saves_in_iterations": Kind(pauses("saves"), LONG, 0.05, TORCH, ONE, STEPS),
    "saves_of_rank_0": Kind(pauses("saves of rank 0"), LONG + SLOW, 0.05, TORCH, RANKS, STEPS),
    "pauses_all": Kind(pauses("all"), LONG, 0.05, ranks=ONE, without=STEPS),
    "pauses_turn": Kind(pauses("turn"), LONG + UNEVEN, 0.05, without=STEPS),
    "compilations": Kind(pauses("compilations"), LONG, 0.05, ranks=ONE, without=STEPS),
    "warmup": Kind(warmup, ("warmup",), 0.10, ranks=ONE, without=("warmup",)),
    "slow_rank": Kind(slow_ranks("always"), SLOW, 0.05, WHOLE, without=("jitter",)),
    "slow_rank_forward": Kind(slow_ranks("always"), SLOW, 0.05, FORWARD, most=0.3),
    "slow_third": Kind(slow_ranks("third"), SLOW, 0.05, SYNCED, most=0.3),
    "slow_several": Kind(slow_ranks("several"), SLOW, 0.05, SYNCED, (4, 6, 8), most=0.3),
    "slow_late": Kind(slow_ranks("late"), SLOW, 0.05, SYNCED, most=0.25),
    "slow_in_window": Kind(slow_ranks("window"), SLOW + LONG, 0.05, SYNCED, most=0.3),
    "slow_sharded": Kind(slow_ranks("always"), SLOW, 0.05, SHARDED, profiled=True, most=0.3),
    "slow_hidden": Kind(slow_ranks("always"), NONE, 0.05, UNSYNCED, profiled=False, second=False, is_hidden=True),
    "wandering": Kind(wandering, UNEVEN, 0.05, WHOLE, without=("jitter",), most=0.3),
    "uneven": Kind(uneven, UNEVEN, 0.05, WHOLE, without=("jitter",), most=0.2),
    "uneven_forward": Kind(uneven, UNEVEN, 0.05, FORWARD, without=("jitter",), most=0.2),
    "comm_profiled": Kind(communication, ("exposed_communication",), 0.15, profiled=True, most=0.5),
    "comm_hidden": Kind(communication, NONE, 0.1, profiled=False, second=False, most=0.5, is_hidden=True),
    "idle_duty": Kind(idle_devices, ("device_idle",), 0.15, ranks=ONE, profiled=False),
    "idle_profiled": Kind(idle_devices, ("device_idle",), 0.15, ranks=ONE, profiled=True),
    "throttled_one": Kind(devices.low_clock("heat", False), ("throttled",), 0.05, SYNCED, most=0.3),
    "throttled_all": Kind(devices.low_clock("heat", True), ("throttled",), 0.05, ranks=ONE, most=0.3),
    "limited_one": Kind(devices.low_clock("limit", False), ("power_limit",), 0.05, SYNCED, most=0.3),
    "limited_all": Kind(devices.low_clock("limit", True), ("power_limit",), 0.05, ranks=ONE, most=0.3),
    "locked_one": Kind(devices.low_clock("lock", False), ("throttled",), 0.05, SYNCED, most=0.3, is_locked=True),
    "cool_clocks": Kind(devices.cool, NONE, 0.05, ranks=ONE),
    "padding": Kind(padding, ("padding",), 0.14, ranks=ONE, most=0.4),
    "retries": Kind(process.retries(0.5), ("memory_pressure",), 0.05, ranks=ONE, lengths=RETRYING, most=0.2),
    "retries_always": Kind(process.retries(1.0), ("memory_pressure",), 0.05, ranks=ONE, lengths=RETRYING, second=False),
    "checkpoint": Kind(phase(CHECKPOINT), ("checkpoint",), 0.05, ranks=ONE, without=("phases", CHECKPOINT)),
    "checkpoint_rank_0": Kind(phase(CHECKPOINT, 0), ("checkpoint",), 0.05, without=("phases", CHECKPOINT)),
    "evaluation": Kind(phase(EVALUATION), ("evaluation",), 0.10, ranks=ONE, without=("phases", EVALUATION)),
    "restarts": Kind(process.restarts, ("restarts",), 0.05, ranks=ONE),
    "startup": Kind(process.startup, ("startup",), 0.10, ranks=(1, 2, 8), lengths=HOURS),
    "leave_early": Kind(process.leaving, ("idle", "shutdown"), 0.10, ranks=(2, 4, 8), lengths=HOURS),
    "join_late": Kind(process.joining, ("idle",), 0.10, ranks=(4, 8), lengths=HOURS, most=0.3),
    "hang": Kind(process.hang, ("hang",), 0.02, lengths=((0.1, 20_000), (1.0, 600), (3.0, 700)), most=0.4),
    "unused_gpus": Kind(process.unused, ("unused_gpus",), 0.02),
    "failed": Kind(process.failure, ("failed",), 0.05, ranks=ONE),
    "generation": Kind(process.generation, NONE, 0.05, ranks=ONE),
}
