"""The foretold end of a job: the rate so far, and an interval that contains the end of jobs with drift and pauses."""

import itertools
import math
import random

import pytest
from sink_examples import complete_totals

from effllm.job.forecast import MAX_MARKS, Mark, Progress, foretold
from effllm.records.energy import EnergyAmount  # noqa: F401 - the totals need its module
from effllm.records.forecast import FORECAST, Foretold, foretold_values
from effllm.views.text.closing import forecast_texts


def job(seed, *, drift, has_pauses):
    """Return the ends of the windows of a job of 2,000 iterations: noise, evaluations and checkpoints."""
    luck = random.Random(seed)
    pauses = {
        luck.randrange(50, 200): luck.uniform(2.0, 40.0),  # every so many iterations, as long as so many iterations
        luck.randrange(50, 200): luck.uniform(0.5, 5.0),
    }
    ends, seconds = [], 0.0
    for iteration in range(1, 2001):
        seconds += luck.gauss(1.0, 0.03) * (1 + drift * iteration / 2000)
        seconds += sum(length for every, length in pauses.items() if has_pauses and iteration % every == 0)
        if iteration % 10 == 0:
            ends.append((iteration, seconds))
    return ends


@pytest.mark.parametrize("drift", [0.0, 0.2, -0.2])
@pytest.mark.parametrize("has_pauses", [True, False])
def test_end_of_a_job_with_drift_and_pauses_is_inside_the_interval(drift, has_pauses):
    inside = total = 0
    for seed in range(20):
        ends = job(seed, drift=drift, has_pauses=has_pauses)
        for share in (0.1, 0.2, 0.4, 0.6, 0.8, 0.95):
            at = round(share * len(ends))
            found = foretold(ends[:at], 2000 - ends[at - 1][0])
            assert found.low <= found.value <= found.high
            inside += found.low <= ends[-1][1] - ends[at - 1][1] <= found.high
            total += 1

    assert inside >= 0.9 * total


def test_clear_trend_is_in_the_value():
    ends = job(1, drift=0.3, has_pauses=False)
    found = foretold(ends[:100], 1000)

    assert found.value == pytest.approx(ends[-1][1] - ends[99][1], rel=0.02)


def test_steady_rate_has_an_exact_end():
    found = foretold([(10 * at, 5.0 * at) for at in range(1, 30)], 100)

    assert (found.value, found.low, found.high) == (pytest.approx(50.0),) * 3


def test_few_windows_have_no_interval():
    assert foretold([(10, 5.0), (20, 10.0), (30, 15.0)], 100) == Foretold(50.0)


@pytest.mark.parametrize(("total", "marks"), [(None, 9), (5000, 1)])
def test_nothing_is_foretold_without_the_length_or_the_rate(total, marks):
    progress = Progress()
    for at in range(marks):
        progress.add_mark(Mark(10 * at, 5.0 * at, None))

    assert progress.forecast(total, complete_totals()) == {}


def test_long_job_keeps_few_marks_and_its_rate():
    progress = Progress()
    for at in range(10_000):
        progress.add_mark(Mark(at, 2.0 * at, 600.0 * at))
    found = progress.forecast(20_000, complete_totals())

    assert len(progress.marks) <= MAX_MARKS
    steps = {later.iteration - before.iteration for before, later in itertools.pairwise(progress.marks)}
    assert len(steps) == 1, "the marks are even, from the start of the job on"
    remaining = found["remaining_seconds"]
    assert (remaining.value, remaining.low, remaining.high) == (pytest.approx(2.0 * (20_000 - 9_999)),) * 3


def test_energy_co2_and_cost_of_the_whole_run_grow_with_its_rate():
    whole = complete_totals()
    progress = Progress()
    for at in range(1, 11):
        progress.add_mark(Mark(10 * at, 5.0 * at, whole.energy.joules * at / 10))
    found = progress.forecast(200, whole)

    assert found["end_energy_joules"].value == pytest.approx(2 * whole.energy.joules)
    assert set(found) == set(FORECAST)
    assert all(one.low <= one.value <= one.high for one in found.values())
    assert set(foretold_values(found)) == {f"{name}{end}" for name in FORECAST for end in ("", "_low", "_high")}


@pytest.mark.parametrize(
    ("unknown", "is_foretold"), [((1,), True), ((3,), True), ((10,), False), (range(1, 10), False)]
)
def test_energy_is_foretold_from_the_windows_after_the_last_unknown_one(unknown, is_foretold):
    progress = Progress()
    for at in range(1, 11):
        progress.add_mark(Mark(10 * at, 5.0 * at, None if at in unknown else 100.0 * at))

    assert ("end_energy_joules" in progress.forecast(200, complete_totals())) is is_foretold


@pytest.mark.parametrize("again", [Mark(1, 51.0, 1e6), Mark(110, 55.0, 3.0)])
def test_marks_begin_again_with_the_iterations_or_the_energy(again):
    progress = Progress()
    for at in range(1, 11):
        progress.add_mark(Mark(10 * at, 5.0 * at, 100.0 * at))
    progress.add_mark(again)
    assert progress.forecast(200, complete_totals()) == {}
    progress.add_mark(again._replace(iteration=again.iteration + 10, time_s=again.time_s + 1.0))

    assert progress.forecast(again.iteration + 20, complete_totals())["remaining_seconds"].value == pytest.approx(1.0)


def test_window_without_a_new_iteration_or_time_changes_nothing():
    progress = Progress()
    for mark in (Mark(10, 5.0, None), Mark(20, 10.0, None), Mark(20, 11.0, None), Mark(30, 10.0, None)):
        progress.add_mark(mark)

    assert [one.iteration for one in progress.marks] == [10, 20]


def test_text_has_each_interval_with_its_unit():
    found = {
        "remaining_seconds": Foretold(7200.0, 6600.0, math.nextafter(7800.0, 0)),
        "end_energy_joules": Foretold(84 * 3.6e6, 80 * 3.6e6, 90 * 3.6e6),
        "end_gpu_cost": Foretold(25.0),
    }

    assert list(forecast_texts(found, "EUR")) == [
        "in 2 h 0 min (110 min to 2 h 10 min)", "84.0 kWh (80.0 to 90.0)", "25.0 EUR",
    ]  # fmt: skip
