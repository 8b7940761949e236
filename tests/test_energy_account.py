"""effllm/energy/energy_account.py: what windows and GPUs together may be off by, by hand and as properties."""

import math

import msgspec
import pytest
from builders import device_window, gpu, row
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm import metrics
from effllm.aggregation.account import Account, merge_devices, window_energy
from effllm.energy.energy_account import (
    OPEN_WINDOWS,
    EnergySums,
    Stretch,
    difference_error,
    stretch_of,
    sum_of,
)
from effllm.schema import NORMAL_95, ClusterTotals, Integrals, Sensor


def stretch(joules=1000.0, start=9.0, end=16.0, inside=4.0, gain=0.05, estimated=0.0):
    return Stretch(joules, start, end, inside, gain * joules, estimated)


def summed(*windows, sums=None):
    sums = sums or EnergySums()
    for number, one in windows:
        sums.add(number, one)
    return sums


def variance(sums):
    return (sums.error_j / NORMAL_95) ** 2


# --- one after the other -------------------------------------------------------------------------


def test_a_window_alone_has_the_error_of_its_two_ends_and_of_what_lies_inside():
    assert stretch().error_j == pytest.approx(1.96 * math.sqrt(9 + 16 + 4))
    assert summed((7, stretch())).error_j == pytest.approx(stretch().error_j)


def test_windows_that_follow_each_other_have_the_error_of_the_two_outer_ends_and_of_all_that_lies_inside():
    sums = summed((1, stretch(end=16.0)), (2, stretch(start=25.0, end=36.0)), (3, stretch(start=49.0, end=64.0)))

    # 9 at the start of the first, 64 at the end of the last, three times 4 within
    assert variance(sums) == pytest.approx(9 + 64 + 3 * 4)
    assert sums.joules == 3000.0


def test_a_hole_between_windows_leaves_four_ends():
    sums = summed((1, stretch(start=1.0, end=2.0)), (3, stretch(start=3.0, end=4.0)))

    assert variance(sums) == pytest.approx(1 + 2 + 3 + 4 + 2 * 4)


def test_a_late_window_that_fills_the_hole_makes_two_ends_of_four():
    sums = summed((1, stretch(start=1.0)), (3, stretch(end=4.0)), (2, stretch()))

    assert variance(sums) == pytest.approx(1 + 4 + 3 * 4)


@pytest.mark.parametrize("first", [1, 3], ids=["from the start", "where the last one ended"])
def test_the_first_window_of_the_next_attempt_meets_none_of_the_last(first):
    sums = summed((1, stretch(start=1.0)), (2, stretch(end=2.0)))
    sums.close()
    summed((first, stretch(start=3.0)), (first + 1, stretch()), (first + 2, stretch(end=4.0)), sums=sums)

    assert variance(sums) == pytest.approx(1 + 2 + 3 + 4 + 5 * 4)


def test_a_window_whose_edges_are_final_can_still_be_taken_back_and_added_again():
    sums = summed(*[(number, stretch()) for number in range(1, 3 * OPEN_WINDOWS)])
    before = fields(sums)

    sums.add(2, stretch(), -1)
    sums.add(2, stretch())

    assert fields(sums) == {name: pytest.approx(value) for name, value in before.items()}


def test_a_thousand_windows_are_hardly_less_certain_than_one():
    one = stretch(inside=0.0)
    sums = summed(*[(number, one) for number in range(1, 1001)])

    assert sums.error_j == pytest.approx(one.error_j)
    assert sums.error_j / sums.joules == pytest.approx(one.error_j / one.joules / 1000)
    assert len(sums.edges) <= OPEN_WINDOWS + 1


def test_the_gain_and_what_is_estimated_add_up_and_never_average_out():
    sums = summed(*[(number, stretch(estimated=1.0)) for number in range(1, 101)])

    assert sums.gain_j / sums.joules == pytest.approx(0.05)
    assert sums.estimated_j == pytest.approx(100.0)


VARIANCES = st.floats(0, 1e4)
STRETCHES = st.builds(stretch, st.floats(0, 1e6), VARIANCES, VARIANCES, VARIANCES, st.floats(0, 0.2), st.floats(0, 10))


def fields(sums):
    return {name: getattr(sums, name) for name in ("joules", "gain_j", "estimated_j", "error_j")}


@settings(deadline=None)
@given(st.lists(STRETCHES, min_size=1, max_size=30), st.data())
def test_taking_a_window_back_and_adding_it_again_changes_nothing_but_a_rounding(windows, data):
    sums = summed(*enumerate(windows, start=1))
    before = fields(sums)
    back = data.draw(st.integers(max(1, len(windows) - 3 * OPEN_WINDOWS), len(windows)))

    sums.add(back, windows[back - 1], -1)
    sums.add(back, windows[back - 1])

    assert fields(sums) == {name: pytest.approx(value, rel=1e-6, abs=1e-3) for name, value in before.items()}


@settings(deadline=None)
@given(st.lists(STRETCHES, min_size=1, max_size=OPEN_WINDOWS), st.randoms(use_true_random=False))
def test_the_order_in_which_windows_come_does_not_matter(windows, random):
    numbered = list(enumerate(windows, start=1))

    in_order, shuffled = summed(*numbered), summed(*random.sample(numbered, len(numbered)))

    assert fields(shuffled) == {name: pytest.approx(value, rel=1e-9) for name, value in fields(in_order).items()}


@settings(deadline=None)
@given(st.lists(STRETCHES, min_size=1, max_size=40), st.sets(st.integers(1, 40)))
def test_the_error_of_a_sum_is_that_of_its_unbroken_pieces(windows, holes):
    kept = [(number, one) for number, one in enumerate(windows, start=1) if number not in holes]
    ends_j2 = sum(one.start_j2 for number, one in kept if number - 1 not in dict(kept))
    ends_j2 += sum(one.end_j2 for number, one in kept if number + 1 not in dict(kept))
    expected_j2 = ends_j2 + sum(one.inside_j2 for _, one in kept)

    assert variance(summed(*kept)) == pytest.approx(expected_j2, rel=1e-9, abs=1e-9)


def test_a_sum_survives_the_way_to_a_replacement_of_the_aggregator():
    sums = summed((1, stretch()), (2, stretch()), (4, stretch()))

    assert msgspec.json.decode(msgspec.json.encode(sums), type=EnergySums) == sums


# --- side by side --------------------------------------------------------------------------------


def test_random_errors_of_gpus_add_in_squares_and_gains_linearly():
    eight = sum_of({f"GPU-{number}": stretch() for number in range(8)})

    assert eight.joules == 8000.0
    assert eight.error_j == pytest.approx(stretch().error_j * math.sqrt(8))
    assert eight.gain_j == pytest.approx(8 * 50.0)


def test_the_gain_is_that_of_each_devices_own_sensor():
    device = gpu(sensor=Sensor(gain_error=0.02))

    assert stretch_of(device, Integrals(500.0, 10.0)).gain_j == pytest.approx(10.0)
    assert stretch_of(device, Integrals()) == Stretch()


def test_a_job_of_two_gpus_and_two_windows_has_the_error_worked_by_hand():
    def wall(joules, start, end):
        return Integrals(
            joules,
            10.0,
            energy_start_j2=start,
            energy_end_j2=end,
            energy_inside_j2=1.0,
            energy_estimated_j=joules / 100,
        )

    account, devices = Account(), {"GPU-0": gpu("GPU-0"), "GPU-1": gpu("GPU-1", sensor=Sensor(gain_error=0.1))}
    for number, ends in ((1, (4.0, 9.0)), (2, (9.0, 16.0))):
        rows = [
            row(rank, number, devices=(device_window(f"GPU-{rank}", wall=wall(1000.0 * (rank + 1), *ends)),))
            for rank in (0, 1)
        ]
        merged = merge_devices(rows, devices, {"GPU-0": {0}, "GPU-1": {1}})
        account.add_rows(rows)
        account.add_energy(number, window_energy(merged, devices, 0), rows, 1.0)
    totals = account.totals(gpus=2)

    # Each GPU: 4 at its start, 16 at its end, 1 within each of two windows.
    assert totals.energy_error_j == pytest.approx(1.96 * math.sqrt(2 * (4 + 16 + 2)))
    # 2 x 1000 J at 5 %, 2 x 2000 J at 10 %
    assert totals.energy_gain_error_j == pytest.approx(100 + 400)
    assert (totals.energy_j, totals.energy_estimated_j) == pytest.approx((6000.0, 60.0))
    assert metrics.timing_error_ratio(totals) == pytest.approx(1.96 * math.sqrt(44) / 6000)
    assert metrics.sensor_error_ratio(totals) == pytest.approx(500 / 6000)


# --- to the metrics ------------------------------------------------------------------------------

TOTALS = ClusterTotals(
    energy_j=60_000.0,
    energy_gpus_j=50_000.0,
    energy_measured_j=60_000.0,
    energy_error_j=60.0,  # 0.1 %
    energy_gain_error_j=3_000.0,  # 5 %
    energy_time_s=40.0,
    energy_tokens=480_000,
    energy_iterations=80,
    energy_samples=240,
    energy_complete=True,
    time_s=40.0,
    iterations=80,
    tokens=480_000,
    gpus=4,
    baseline_w=500.0,
    power_peak_w=700.0,
    power_histogram_s={60: 40.0, 61: 10.0},
    carbon_g_per_kwh=400.0,
    pue=1.5,
    price_per_kwh=0.3,
    price_per_gpu_hour=2.0,
    peak_flops_per_s=1e10,
    flops_per_token=2e5,
)


@pytest.mark.parametrize(
    ("tag", "random", "systematic"),
    [
        ("aec_watts", 1.5, 75.0),  # of 1500 W
        ("run_energy/joules_per_token", 0.000125, 0.00625),  # of 0.125 J
        ("run_energy/joules_per_10k_tokens", 1.25, 62.5),
        ("run_energy/joules_per_iteration", 0.75, 37.5),
        ("energy/total_joules", 60.0, 3000.0),
        ("energy/total_wh", 60 / 3600, 3000 / 3600),
        # 60 kJ = 16.67 Wh, times 1.5, times 0.4 g/Wh: 10 g
        ("energy/co2_kg", 0.01 * 0.001, 0.01 * 0.05),
        ("energy/electricity_cost", 0.0075 * 0.001, 0.0075 * 0.05),
        # A token costs 8/J less 8 / 1.001, less 8 / 1.05.
        ("run_energy/tokens_per_joule", 8 - 8 / 1.001, 8 - 8 / 1.05),
        # 60,000 - 500 x 40: timing knows nothing of the baseline, the gain has it in common with the energy.
        ("energy/joules_above_baseline", 60.0, 0.05 * 40_000),
        # Readings of power have no timing error, but the gain.
        ("energy/peak_watts_per_gpu", 0.0, 35.0),
        ("energy/median_watts_per_gpu", 0.0, 605 * 0.05),
        ("energy/p95_watts_per_gpu", 0.0, 615 * 0.05),
    ],
)
def test_the_errors_of_a_metric_are_those_worked_by_hand(tag, random, systematic):
    found = metrics.errors(TOTALS, TOTALS)

    assert found[tag] == (pytest.approx(random, rel=1e-9), pytest.approx(systematic, rel=1e-9))


def test_what_no_energy_is_in_has_no_error_of_energy():
    found = metrics.errors(TOTALS, TOTALS)

    for name in ("run_throughput/mfu_ratio", "al_seconds", "energy/gpu_cost", "energy/timing_error_ratio"):
        assert name not in found
    for share in (0.1, 0.05, 0.03, 0.07):
        gain = msgspec.structs.replace(TOTALS, energy_gain_error_j=share * 60_000.0)
        assert "energy/sensor_error_ratio" not in metrics.errors(gain, gain), "for the rounding of floats"
    assert metrics.mfu_ratio(TOTALS) == pytest.approx(12_000 * 2e5 / 1e10)


@pytest.mark.parametrize("lacking", [{"energy_j": None}, {"energy_j": 0.0}, {"energy_error_j": None}])
def test_without_an_energy_or_its_error_there_are_no_errors(lacking):
    totals = msgspec.structs.replace(TOTALS, **lacking)

    assert metrics.errors(totals, totals) == {}


# --- compared ------------------------------------------------------------------------------------


def test_on_the_same_boards_the_gain_cancels_as_far_as_the_energies_are_equal():
    one, other = {"a": stretch(1000.0), "b": stretch(1000.0)}, {"a": stretch(1000.0), "b": stretch(900.0)}

    random, systematic = difference_error(one, other)

    assert random == pytest.approx(2 * stretch().error_j)
    assert systematic == pytest.approx(0.05 * 100.0)


def test_on_other_boards_the_gains_add_up():
    one, other = {"a": stretch(1000.0), "b": stretch(1000.0)}, {"b": stretch(1000.0), "c": stretch(2000.0)}

    assert difference_error(one, other)[1] == pytest.approx(0.05 * (1000 + 2000))
