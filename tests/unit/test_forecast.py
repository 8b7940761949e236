"""The foretold end of a job: the rate so far, and an interval that contains the end of jobs with drift and pauses."""

import math
import random

import pytest
from sink_examples import complete_totals

from effllm.job.forecast import MAX_MARKS, Mark, Progress, foretold
from effllm.records.board import FORETOLD
from effllm.records.energy import EnergyAmount  # noqa: F401 - the totals need its module
from effllm.records.forecast import FORECAST, Foretold, foretold_values
from effllm.store.closing_text import forecast_texts


def job(seed, *, drift=0.0):
    """Return the ends of the windows of a job of 2,000 iterations: noise, evaluations and checkpoints."""
    luck = random.Random(seed)
    pauses = {
        luck.randrange(50, 200): luck.uniform(2.0, 40.0),  # every so many iterations, as long as so many iterations
        luck.randrange(50, 200): luck.uniform(0.5, 5.0),
    }
    ends, seconds = [], 0.0
    for iteration in range(1, 2001):
        seconds += luck.gauss(1.0, 0.05) * (1 + drift * iteration / 2000)
        seconds += sum(length for every, length in pauses.items() if iteration % every == 0)
        if iteration % 10 == 0:
            ends.append((iteration, seconds))
    return ends


@pytest.mark.parametrize("drift", [0.0, 0.15, -0.15])
def test_end_of_a_job_with_drift_and_pauses_is_inside_the_interval(drift):
    inside = total = 0
    for seed in range(20):
        ends = job(seed, drift=drift)
        for share in (0.1, 0.3, 0.6, 0.9):
            at = round(share * len(ends))
            found = foretold(ends[:at], 2000 - ends[at - 1][0])
            inside += found.low <= ends[-1][1] - ends[at - 1][1] <= found.high
            total += 1

    assert inside >= 0.9 * total


def test_steady_rate_has_an_exact_end():
    found = foretold([(10 * at, 5.0 * at) for at in range(1, 30)], 100)

    assert (found.value, found.low, found.high) == (pytest.approx(50.0),) * 3


def test_few_windows_have_no_interval():
    assert foretold([(10, 5.0), (20, 10.0), (30, 15.0)], 100) == Foretold(50.0)


@pytest.mark.parametrize(("total", "marks"), [(None, 9), (5000, 1)])
def test_nothing_is_foretold_without_the_length_or_the_rate(total, marks):
    progress = Progress()
    for at in range(marks):
        progress.add(Mark(10 * at, 5.0 * at, None))

    assert progress.forecast(total, complete_totals()) == {}


def test_long_job_keeps_few_marks_and_its_rate():
    progress = Progress()
    for at in range(10_000):
        progress.add(Mark(at, 2.0 * at, 600.0 * at))
    found = progress.forecast(20_000, complete_totals())

    assert len(progress.marks) <= MAX_MARKS
    assert found["remaining_seconds"].value == pytest.approx(2.0 * (20_000 - 9_999))


def test_energy_co2_and_cost_of_the_whole_run_grow_with_its_rate():
    whole = complete_totals()
    progress = Progress()
    for at in range(1, 11):
        progress.add(Mark(10 * at, 5.0 * at, whole.energy.joules * at / 10))
    found = progress.forecast(200, whole)

    assert found["end_energy_joules"].value == pytest.approx(2 * whole.energy.joules)
    assert set(found) == set(FORECAST)
    assert all(one.low <= one.value <= one.high for one in found.values())
    assert set(foretold_values(found)) == {f"{name}{end}" for name in FORECAST for end in ("", "_low", "_high")}


def test_unmeasured_energy_is_not_foretold():
    progress = Progress()
    for at in range(1, 11):
        progress.add(Mark(10 * at, 5.0 * at, None if at == 3 else 100.0 * at))

    assert "end_energy_joules" not in progress.forecast(200, complete_totals())


def test_trackers_have_a_key_for_each_value():
    assert FORETOLD.keys() == FORECAST.keys()


def test_text_has_each_interval_with_its_unit():
    found = {
        "remaining_seconds": Foretold(7200.0, 6600.0, math.nextafter(7800.0, 0)),
        "end_energy_joules": Foretold(84 * 3.6e6, 80 * 3.6e6, 90 * 3.6e6),
        "end_gpu_cost": Foretold(25.0),
    }

    assert list(forecast_texts(found, "EUR")) == [
        "in 2 h 0 min (110 min to 2 h 10 min)", "84.0 kWh (80.0 to 90.0)", "25.0 EUR",
    ]  # fmt: skip
