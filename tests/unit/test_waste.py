"""effllm/job/health/watches.py: idle GPUs are reported once per state, and never in healthy jobs."""

import random

import msgspec
from cases import cases, repeats
from sink_examples import make_report, totals, with_keys

from effllm.job.health.watches import BUSY, IDLE, WasteWatch

REPORT = make_report()  # one report for all windows: the metrics of ninety thousand windows would take ten seconds


class Run:
    """A job whose windows the test makes one after another."""

    def __init__(self, events=None):
        self.reported = []
        self.watch = WasteWatch(events or {}, self.reported.append)
        self.ordinal = self.tokens = 0

    def window(self, busy=0.9, tokens=1000, time_s=10.0, gpus=8, **changes):
        self.ordinal += 10
        self.tokens += tokens
        last = with_keys(
            totals(10),
            time_s=time_s,
            tokens=tokens,
            utilization_mean=busy,
            energy_j=91.0 * gpus * time_s if gpus else None,
            energy_gpus_j=91.0 * gpus * time_s if gpus else None,
            energy_time_s=time_s,
            gpus=gpus,
            power_limit_w=700.0 * gpus,
            **changes.pop("last", {}),
        )
        report = msgspec.structs.replace(
            REPORT,
            window=self.ordinal // 10,
            iteration=self.ordinal,
            iteration_first=self.ordinal - 9,
            iteration_last=self.ordinal,
            last=last,
            coverage=msgspec.structs.replace(REPORT.coverage, gpus_measured=gpus, gpus_expected=gpus),
            job=with_keys(REPORT.job, tokens=self.tokens),
        )
        self.watch.judge_window(msgspec.structs.replace(report, **changes))

    def windows(self, number, **changes):
        for _ in range(number):
            self.window(**changes)
        return self

    @property
    def events(self):
        return [(event.kind, event.text) for event in self.reported]

    @property
    def kinds(self):
        return [event.kind for event in self.reported]


def healthy(seed):
    """Run a healthy job with random properties."""
    chance, run = random.Random(seed), Run()
    time_s, busy = chance.uniform(0.5, 60.0), chance.uniform(0.35, 1.0)
    gpus = chance.choice([0, 1, 8])
    busy = busy if gpus else chance.uniform(0.0, 0.1)
    checkpoint, evaluation, burst = chance.randint(3, 40), chance.randint(3, 40), chance.choice([1, 1, 4, 25])
    counts, generates = chance.random() < 0.8, chance.random() < 0.2
    flops = {"flops_per_token": 2e10 if counts else None}
    run.window(0.02, 0, 300.0, gpus, last=flops)  # start-up with compilation and the first batches
    for _ in range(chance.randint(0, 20)):
        run.window(0.05, 0, time_s, gpus, last=flops, warming_up=True)
    for number in range(1, 400):
        tokens = 1000 * burst if counts and number % burst == 0 else 0
        noisy = min(max(busy + chance.gauss(0.0, 0.03), 0.0), 1.0)
        window_s = time_s * chance.uniform(0.8, 1.2)
        if number % checkpoint == 0:  # checkpoint without a phase: the GPUs wait for the disk
            noisy, window_s = 0.02, window_s + 300.0
        if number % evaluation == 0:  # a window with only evaluation
            run.window(0.05, 0, 0.0, gpus, last={"iterations": 0, **flops})
        if generates and number % 50 < 10:
            run.window(0.05, 0, window_s, gpus, last={"generation_s": window_s / 2, **flops})
            continue
        run.window(noisy, tokens, window_s, gpus, last=flops)
    run.window(0.02, 0, 100.0, gpus, last=flops, final=True)
    return run


def test_healthy_runs_have_no_events():
    assert [seed for seed in range(repeats(4, 200)) if healthy(seed).events] == []


@cases("seed", range(repeats(4, 50)))
def test_idle_gpus_and_their_recovery_are_reported_once(seed):
    chance, run = random.Random(seed), Run()
    time_s = chance.uniform(0.2, 60.0)
    several = 6 + int(60.0 / time_s)
    run.windows(20, time_s=time_s)
    for _ in range(20 * several):
        run.window(busy=chance.uniform(0.0, 0.19), time_s=time_s)
    assert run.kinds == [IDLE]
    run.windows(20 * several, time_s=time_s)

    assert run.kinds == [IDLE, BUSY]


def test_idle_event_contains_power_and_data_wait():
    run = Run().windows(3)
    run.windows(6, busy=0.1, time_s=20.0, last={"wait_s": 16.0})

    assert run.events == [
        (
            IDLE,
            "the GPUs are idle: busy for 10 % of the last 5 windows (100 s of iterations); "
            "in the last window 91 of 700 W per GPU and 80 % of the time waiting for data",
        )
    ]


def test_gpus_that_change_between_idle_and_busy_cause_no_events():
    run = Run().windows(3)
    for number in range(1000):
        run.window(busy=0.1 if number % 4 else 0.5)

    assert run.events == []


def test_new_aggregator_keeps_the_saved_idle_state():
    run = Run({IDLE: 2, BUSY: 1})
    run.windows(50, busy=0.1)
    assert run.events == []
    run.windows(10)

    assert run.kinds == [BUSY]
