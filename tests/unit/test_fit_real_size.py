"""The trainings of real size that are compared on a GPU: drawn, and judged with written peaks."""

from dataclasses import replace

from benchmarks.memory.on_gpu import MODELS, MeasuredPeaks, RealSize, figures_of, real_sizes, rows_of
from effllm.memory.estimate import estimate

USABLE = 80e9
ONE = RealSize("llama-3.2-1b", 1, 512, "bf16", "adamw", "none", 0, 1, "sdpa")


def test_forty_different_trainings_of_all_models_fit_on_the_gpu():
    drawn = real_sizes(40, USABLE)

    assert len(set(drawn)) == 40
    assert {one.model for one in drawn} == set(MODELS)
    assert all(estimate(one.shape, one.plan).total.high < USABLE for one in drawn)


def test_small_gpu_gets_forty_smaller_trainings():
    assert all(estimate(one.shape, one.plan).total.high < 16e9 for one in real_sizes(40, 16e9))


def test_peak_inside_and_peak_outside_of_the_interval_are_counted():
    expected = estimate(ONE.shape, ONE.plan)
    inside = MeasuredPeaks(ONE, expected.allocated.expected, expected.reserved.expected, 5e8)
    outside = replace(inside, allocated=2 * expected.allocated.high)

    figures = {one.name: one for one in figures_of([inside, outside])}

    assert figures["memory, allocated: inside the 90 % interval"].value == 0.5
    assert figures["memory, reserved: inside the 90 % interval"].value == 1.0
    assert figures["memory, total: inside the 90 % interval"].value == 1.0


def test_failed_training_is_listed_and_not_counted():
    failed = MeasuredPeaks(ONE, failure="out of memory")

    [row] = rows_of([failed])
    figures = figures_of([failed])

    assert row["failure"] == "out of memory"
    assert all(one.value is None for one in figures)
