"""Correct frameworks whose logs do not fit effllm's windows: no factor is stated."""

import random

import pytest
from audited import AuditedJob
from builders import row

from effllm.job.audit import excess_of_mean
from effllm.records.framework_figures import TOKENS_PER_ITERATION, TOKENS_PER_S
from effllm.records.moments import Moments
from effllm.records.rank import ValueStatistics


def statistics_of(numbers):
    found = Moments()
    for number in numbers:
        found.add_value(number)
    return ValueStatistics(
        count=found.count, total=found.total, squares=found.squares, least=found.minimum, most=found.maximum
    )


class Loop:
    """A job of two ranks with 400 iterations of about one second and 1,000 tokens of each rank.

    The framework logs every ``log`` iterations: its tokens/s and its tokens per iteration since its last log.
    """

    def __init__(self, log=10, window=10, noise=0.01, stall=(0, 0.0), wait=(0, 0.0), evaluation=(0, 0.0),
                 spread=0.0, uneven=0):  # fmt: skip
        self.draw, self.log, self.window = random.Random(1), log, window
        self.noise, self.stall, self.wait, self.evaluation = noise, stall, wait, evaluation
        self.spread, self.uneven = spread, uneven
        self.job = AuditedJob(2)
        self.figures = {TOKENS_PER_S: [], TOKENS_PER_ITERATION: []}
        self.sums = dict.fromkeys(("tokens", "busy", "wait", "phase"), 0.0)
        self.since = [0, 0.0]  # tokens of both ranks, and seconds
        for iteration in range(1, 401):
            self.iterate(iteration)

    def iterate(self, iteration):
        tokens = round(1000 * (1 + self.spread * self.draw.uniform(-1, 1)))
        tokens = tokens // 3 if self.uneven and not iteration % self.uneven else tokens
        busy_s = max(self.draw.gauss(1, self.noise), 0.2) + self.at(self.stall, iteration)
        wait_s = 0.05 * self.draw.random() + self.at(self.wait, iteration)
        phase_s = self.at(self.evaluation, iteration - 1)  # frameworks evaluate after their log
        spent = {"tokens": tokens, "busy": busy_s, "wait": wait_s, "phase": phase_s}
        self.sums = {name: self.sums[name] + one for name, one in spent.items()}
        self.since = [self.since[0] + 2 * tokens, self.since[1] + busy_s + wait_s]
        if iteration % self.log == 0:
            self.figures[TOKENS_PER_S].append(self.since[0] / self.since[1])
            self.figures[TOKENS_PER_ITERATION].append(self.since[0] / self.log)
            self.since = [0, 0.0]
        if iteration % self.window == 0:
            self.report(iteration)

    @staticmethod
    def at(event, iteration):
        return event[1] if event[0] and iteration and iteration % event[0] == 0 else 0.0

    def report(self, iteration):
        number, counted = iteration // self.window, self.sums
        values = {name: statistics_of(one) for name, one in self.figures.items() if one}
        changes = {
            "busy_s": counted["busy"], "wait_s": counted["wait"], "tokens": int(counted["tokens"]),
            "phases_s": {"evaluation": counted["phase"]} if counted["phase"] else {},
            "tokens_processed": int(counted["tokens"]), "iteration_first": iteration - self.window + 1,
            "iteration_last": iteration, "iteration_shown": iteration,
        }  # fmt: skip
        for rank in range(2):
            self.job.now_s = float(number)
            self.job.send(row(rank, number, devices=(), values=values if values and rank == 0 else None, **changes))
        self.sums = dict.fromkeys(self.sums, 0.0)
        self.figures = {name: [] for name in self.figures}


CLEAN = {
    "a log of each iteration": {"log": 1},
    "a log of each iteration, noisy": {"log": 1, "noise": 0.2},
    "a log of each iteration, very noisy": {"log": 1, "noise": 0.4},
    "a pause in the step every 10 iterations": {"log": 1, "stall": (10, 5.0)},
    "a pause in the step every 5 iterations": {"log": 1, "stall": (5, 1.0)},
    "a pause in the step, a log every 2 iterations": {"log": 2, "stall": (10, 5.0)},
    "a pause in the data wait": {"log": 1, "wait": (10, 5.0)},
    "an epoch's pause in the data wait": {"wait": (100, 60.0)},
    "an evaluation every 10 iterations": {"log": 1, "evaluation": (10, 5.0)},
    "an evaluation every 100 iterations": {"log": 1, "evaluation": (100, 20.0)},
    "an evaluation between two logs": {"evaluation": (30, 30.0), "window": 15},
    "rows of varied length": {"log": 1, "spread": 0.5},
    "a small last batch every 7 iterations": {"log": 1, "uneven": 7},
    "a small last batch every 25 iterations": {"uneven": 25},
    "a log every 3 iterations": {"log": 3},
    "a log every 7 iterations": {"log": 7},
    "a log every 25 iterations": {"log": 25},
    "a window of 7 iterations": {"window": 7},
    "a window of 9 iterations": {"window": 9},
    "a window of 11 iterations": {"window": 11},
}


@pytest.mark.parametrize("name", CLEAN)
def test_no_factor_of_a_correct_framework_is_stated(name):
    assert Loop(**CLEAN[name]).job.summary().audit.figures == ()


def test_excess_of_a_mean_is_that_over_the_harmonic_mean():
    """Nine iterations at 100 tokens/s, and one at 100/11: 1,000 tokens in 20 s are 50 tokens/s."""
    rates = [100.0] * 9 + [100.0 / 11]
    mean = sum(rates) / 10
    assert mean * (1 - excess_of_mean(statistics_of(rates))) == pytest.approx(50.0)


def test_excess_of_a_mean_is_never_too_small():
    draw = random.Random(1)
    for _ in range(500):
        rates = [draw.lognormvariate(0, draw.choice([0.01, 0.3, 1.0])) for _ in range(draw.randrange(2, 20))]
        mean, harmonic = sum(rates) / len(rates), len(rates) / sum(1 / one for one in rates)
        assert mean * (1 - excess_of_mean(statistics_of(rates))) <= harmonic * (1 + 1e-9)


def test_excess_of_one_value_or_equal_values_is_zero():
    assert excess_of_mean(statistics_of([5.0])) == excess_of_mean(statistics_of([5.0, 5.0])) == 0.0


@pytest.mark.parametrize(
    ("name", "spread", "windows"),
    [(TOKENS_PER_S, 0.2, [10]), (TOKENS_PER_S, 20.0, []), (TOKENS_PER_ITERATION, 20.0, [10])],
)
def test_rates_of_a_window_are_compared_if_they_are_similar(name, spread, windows):
    """The ten figures of a window are of one of four micro-batches."""
    job = AuditedJob()
    for number in range(1, 13):
        values = {name: statistics_of([25.0 + spread * (at - 4.5) / 10 for at in range(10)])}
        job.tick(1.0).send(row(0, number, devices=(), values=values))
    found = job.summary().audit.figures
    assert [one.windows for one in found] == windows
    assert [one.factor for one in found] == [pytest.approx(0.25)] * len(windows)
