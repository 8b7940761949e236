"""The spread of a window's values over ranks and GPUs, compared with hand calculation, numpy and statistics."""

import random
import statistics

import numpy as np
import pytest
from builders import Job, device_window, gpu, row
from cases import cases

from effllm.job.reporting import spread_of
from effllm.records.energy import NOT_MEASURED
from effllm.records.job import Spread
from effllm.records.rank import Integrals


def window_of(rows, world_size, devices=lambda rank: (gpu(f"GPU-{rank}"),)):
    job = Job(world_size)
    for rank in range(world_size):
        job.join(rank, devices=devices(rank))
    job.send(*rows)
    (report,) = job.closed()
    return report


@cases(
    ("values", "spread"),
    [
        # The fifth percentile of five values is at 0.05 * 4 = 0.2 of the way from the first to the second value.
        ([30.0, 10.0, 50.0, 20.0, 40.0], Spread(5, 10.0, 12.0, 30.0, 48.0, 50.0)),
        ([7.0], Spread(1, 7.0, 7.0, 7.0, 7.0, 7.0)),
        ([], None),
    ],
)
def test_percentiles_are_interpolated(values, spread):
    assert spread_of(np.array(values)) == spread


@cases("count", [2, 101, 9_999, 10_000])
def test_spread_of_10000_values_matches_numpy_and_statistics(count):
    chance = random.Random(count)
    values = [chance.lognormvariate(0.0, 0.3) for _ in range(count)]

    found = spread_of(np.array(values))

    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert (found.count, found.least, found.most) == (count, min(values), max(values))
    assert found.median == statistics.median(values)
    assert (found.p5, found.p95) == (pytest.approx(cuts[0], rel=1e-12), pytest.approx(cuts[-1], rel=1e-12))
    assert [found.p5, found.median, found.p95] == pytest.approx(np.quantile(values, [0.05, 0.5, 0.95]), rel=1e-12)


def test_window_has_the_spread_of_steps_power_and_utilization():
    # Each of three ranks has ten iterations in 10 s; the steps take 0.8, 0.9 and 1.0 s, and the power is 100, 200 and
    # 300 W.
    rows = [
        row(
            rank,
            busy_s=8.0 + rank,
            wait_s=2.0 - rank,
            devices=(device_window(f"GPU-{rank}", 10.0, 100.0 * (rank + 1)),),
        )
        for rank in range(3)
    ]

    report = window_of(rows, 3)

    steps = report.spread["step_seconds"]
    assert (steps.count, steps.least, steps.median, steps.most) == (3, 0.8, 0.9, 1.0)
    assert steps.most == report.values["window/al_seconds"]
    power = report.spread["gpu_watts"]
    assert (power.least, power.median, power.p95, power.most) == (100.0, 200.0, pytest.approx(290.0), 300.0)
    assert 3 * report.values["energy/watts_per_gpu"] == pytest.approx(600.0), "the sum over the GPUs"
    assert report.spread["utilization_ratio"] == Spread(3, 0.5, 0.5, 0.5, 0.5, 0.5)


def test_spread_omits_unmeasured_ranks_and_ranks_without_steps():
    blind = device_window("GPU-0", wall=Integrals(NOT_MEASURED, 5.0, 10.0))
    idle = row(1, iteration_first=11, iteration_last=10, busy_s=0.0, wait_s=0.0, phases_s={"evaluation": 10.0})

    report = window_of([row(0, devices=(blind,)), idle, row(2)], 3)

    assert report.spread["step_seconds"].count == 2
    assert report.spread["utilization_ratio"].count == 2
    assert report.spread["gpu_watts"].count == 2


def test_power_of_a_module_with_two_dies_is_counted_once():
    report = window_of([row(0), row(1)], 2, lambda rank: (gpu(f"GPU-{rank}", energy_key="module"),))

    assert report.spread["gpu_watts"].count == 1
    assert report.spread["utilization_ratio"].count == 2


def test_only_the_spread_of_steps_is_reported_without_gpus():
    report = window_of([row(0), row(1)], 2, lambda rank: (gpu(f"GPU-{rank}", is_gpu=False),))

    assert list(report.spread) == ["step_seconds"]


def test_correction_has_no_spread():
    job = Job().join()
    job.send(row(0))
    job.tick(100.0).send(row(1))

    first, correction = job.closed()

    assert first.spread["step_seconds"].count == 1
    assert (correction.correction, correction.spread) == (True, {})
