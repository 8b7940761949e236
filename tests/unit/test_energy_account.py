"""effllm/job/energy_account.py: the combined error of windows and GPUs, compared with errors computed by hand."""

import math

import msgspec
import pytest
from builders import device_window, gpu, row
from hypothesis import given
from hypothesis import strategies as st
from sink_examples import make_totals, with_keys

from effllm import metrics
from effllm.job.account import Account, Rows
from effllm.job.energy_account import AMOUNT, OPEN_WINDOWS, EnergyTotals, Scope, total_of, window_energy
from effllm.job.merged import Expected, merge_devices
from effllm.records.columns import fields_of, from_json, to_json
from effllm.records.energy import NORMAL_95, EnergyAmount
from effllm.records.job import JobConstants
from effllm.records.rank import Integrals


def amount(joules=1000.0, start=9.0, end=16.0, inside=4.0, gain=0.05, estimated=0.0):
    return EnergyAmount(joules, 10.0, start, end, inside, gain * joules, estimated)


def enter(sums, number, *amounts, sign=1):
    """Add a window of one or more devices."""
    sums.add_window(number, [f"GPU-{at}" for at in range(len(amounts))], fields_of(amounts, AMOUNT), sign)


def summed(*windows, sums=None):
    sums = sums or EnergyTotals()
    for number, one in windows:
        enter(sums, number, one)
    return sums


def variance(sums):
    return (sums.total().error_j / NORMAL_95) ** 2


# --- one after the other -------------------------------------------------------------------------


def test_error_of_a_window_has_an_edge_part_and_an_inner_part():
    assert amount().error_j == pytest.approx(1.96 * math.sqrt(9 + 16 + 4))
    assert summed((7, amount())).total().error_j == pytest.approx(amount().error_j)


@pytest.mark.parametrize("first", [1, 3], ids=["from the start", "where the last one ended"])
def test_windows_of_two_attempts_share_no_edge(first):
    sums = summed((1, amount(start=1.0)), (2, amount(end=2.0)))
    sums.end_attempt()
    summed((first, amount(start=3.0)), (first + 1, amount()), (first + 2, amount(end=4.0)), sums=sums)

    assert variance(sums) == pytest.approx(1 + 2 + 3 + 4 + 5 * 4)


def test_error_of_a_thousand_windows_equals_error_of_one_window():
    one = amount(inside=0.0)
    sums = summed(*[(number, one) for number in range(1, 1001)])

    total = sums.total()
    assert total.error_j == pytest.approx(one.error_j)
    assert total.error_j / total.joules == pytest.approx(one.error_j / one.joules / 1000)
    assert len(sums.packed()["edges"]) <= OPEN_WINDOWS + 1


def test_errors_of_gain_and_of_estimated_energy_are_summed_linearly():
    sums = summed(*[(number, amount(estimated=1.0)) for number in range(1, 101)])

    total = sums.total()
    assert total.gain_j / total.joules == pytest.approx(0.05)
    assert total.estimated_j == pytest.approx(100.0)


VARIANCES = st.floats(0, 1e4)
AMOUNTS = st.builds(amount, st.floats(0, 1e6), VARIANCES, VARIANCES, VARIANCES, st.floats(0, 0.2), st.floats(0, 10))


def fields(sums):
    return {name: getattr(sums.total(), name) for name in ("joules", "gain_j", "estimated_j", "error_j")}


@given(st.lists(AMOUNTS, min_size=1, max_size=30), st.data())
def test_removing_and_adding_a_window_changes_no_total(windows, data):
    sums = summed(*enumerate(windows, start=1))
    before = fields(sums)
    back = data.draw(st.integers(max(1, len(windows) - 3 * OPEN_WINDOWS), len(windows)))

    enter(sums, back, windows[back - 1], sign=-1)
    enter(sums, back, windows[back - 1])

    assert fields(sums) == {name: pytest.approx(value, rel=1e-6, abs=1e-3) for name, value in before.items()}


@given(st.lists(AMOUNTS, min_size=1, max_size=OPEN_WINDOWS), st.randoms(use_true_random=False))
def test_order_of_windows_does_not_change_the_error(windows, random):
    numbered = list(enumerate(windows, start=1))

    in_order, shuffled = summed(*numbered), summed(*random.sample(numbered, len(numbered)))

    assert fields(shuffled) == {name: pytest.approx(value, rel=1e-9) for name, value in fields(in_order).items()}


@given(st.lists(AMOUNTS, min_size=1, max_size=40), st.sets(st.integers(1, 40)))
def test_error_of_a_sum_has_the_edges_of_each_contiguous_part(windows, holes):
    kept = [(number, one) for number, one in enumerate(windows, start=1) if number not in holes]
    ends_j2 = sum(one.start_j2 for number, one in kept if number - 1 not in dict(kept))
    ends_j2 += sum(one.end_j2 for number, one in kept if number + 1 not in dict(kept))
    expected_j2 = ends_j2 + sum(one.inside_j2 for _, one in kept)

    assert variance(summed(*kept)) == pytest.approx(expected_j2, rel=1e-9, abs=1e-9)


def test_restored_sum_is_equal_to_the_saved_sum():
    sums = summed((1, amount()), (2, amount()), (4, amount()))

    again = msgspec.json.decode(msgspec.json.encode(sums, enc_hook=to_json), type=EnergyTotals, dec_hook=from_json)
    assert fields(again) == fields(sums)
    assert variance(summed((3, amount()), sums=again)) == pytest.approx(9 + 16 + 4 * 4), "its edges can still be joined"


# --- side by side --------------------------------------------------------------------------------


def test_random_errors_add_in_squares_and_gain_errors_add_linearly():
    eight = total_of(fields_of([amount()] * 8, AMOUNT))

    assert eight.joules == 8000.0
    assert eight.error_j == pytest.approx(amount().error_j * math.sqrt(8))
    assert eight.gain_j == pytest.approx(8 * 50.0)


def test_each_device_has_its_own_edges():
    sums = EnergyTotals()
    enter(sums, 1, amount(), amount(end=1.0))
    enter(sums, 2, amount())

    # GPU-0 has two adjacent windows; GPU-1 was only in the first window.
    assert sums.joules_by_key() == {"GPU-0": 2000.0, "GPU-1": 1000.0}
    expected_j2 = {"GPU-0": 9 + 16 + 2 * 4, "GPU-1": 9 + 1 + 4}
    assert sums.errors_by_key_j() == {key: pytest.approx(1.96 * math.sqrt(j2)) for key, j2 in expected_j2.items()}
    assert variance(sums) == pytest.approx(sum(expected_j2.values()))


# --- one amount and another -----------------------------------------------------------------------


def test_errors_cancel_at_a_shared_edge():
    one, other = amount(start=1.0, end=2.0), amount(start=3.0, end=4.0)

    # The variance inside each amount is 4; the variances 2 (end of `one`) and 3 (start of `other`) cancel only at a
    # shared edge.
    assert one.then(other) == EnergyAmount(2000.0, 20.0, 1.0, 4.0, 8.0, 100.0)
    assert one + other == EnergyAmount(2000.0, 20.0, 1.0, 4.0, 8.0 + 2.0 + 3.0, 100.0)


def test_error_of_an_edge_beside_an_unmeasured_window_remains():
    one = amount(start=1.0, end=2.0)

    assert one.then(EnergyAmount()) == EnergyAmount(1000.0, 10.0, 1.0, 0.0, 4.0 + 2.0, 50.0)
    assert EnergyAmount().then(one) == EnergyAmount(1000.0, 10.0, 0.0, 2.0, 4.0 + 1.0, 50.0)
    assert EnergyAmount() + EnergyAmount() == EnergyAmount()


def test_difference_of_a_sum_and_its_part_has_the_edges_of_both():
    whole, part = (
        EnergyAmount(1000.0, 10.0, 1.0, 2.0, 9.0, 50.0, 8.0),
        EnergyAmount(400.0, 4.0, 3.0, 4.0, 5.0, 20.0, 6.0),
    )

    assert whole - part == EnergyAmount(600.0, 6.0, 1.0, 2.0, 9.0 + 3.0 + 4.0 - 5.0, 30.0, 2.0)
    assert whole - EnergyAmount() == whole
    assert whole - whole == EnergyAmount(), "a rounding error is no time"


def test_error_of_two_gpus_equals_the_error_computed_by_hand():
    def wall(rank, start, end):
        joules, gain = 1000.0 * (rank + 1), (0.05, 0.1)[rank]
        return Integrals(amount(joules, start, end, 1.0, gain, joules / 100))

    account, devices = Account(), Expected({"GPU-0": gpu("GPU-0"), "GPU-1": gpu("GPU-1")})
    scope = Scope("gpu", "gpu", frozenset(devices))
    for number, ends in ((1, (4.0, 9.0)), (2, (9.0, 16.0))):
        walls = [wall(rank, *ends) for rank in (0, 1)]
        rows = Rows(row(at, number, devices=(device_window(f"GPU-{at}", wall=one),)) for at, one in enumerate(walls))
        merged = merge_devices(rows, devices, {"GPU-0": {0}, "GPU-1": {1}})
        account.add_rows(rows)
        account.add_energy(number, window_energy(merged, devices, scope), rows, 1.0)
    totals = account.totals(JobConstants(gpus=2))

    # Each GPU has the variances 4 at its start, 16 at its end, and 1 within each of the two windows.
    assert totals.energy.error_j == pytest.approx(1.96 * math.sqrt(2 * (4 + 16 + 2)))
    # 2 x 1000 J at 5 %, 2 x 2000 J at 10 %
    assert totals.energy.gain_j == pytest.approx(100 + 400)
    assert (totals.energy.joules, totals.energy.estimated_j) == pytest.approx((6000.0, 60.0))
    assert metrics.energy.timing_error_ratio(totals) == pytest.approx(1.96 * math.sqrt(44) / 6000)
    assert metrics.energy.sensor_error_ratio(totals) == pytest.approx(500 / 6000)


# --- to the metrics ------------------------------------------------------------------------------

TOTALS = make_totals(
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
        ("run_energy/tokens_per_joule", 0.008, 0.4),  # of 8 tokens/J
        # The energy above the baseline is 60,000 - 500 x 40 J; the baseline has no timing error, but it has the gain
        # error.
        ("energy/joules_above_baseline", 60.0, 0.05 * 40_000),
        # The peak power has the gain error, but no timing error.
        ("energy/peak_watts_per_gpu", 0.0, 35.0),
        ("energy/median_watts_per_gpu", 0.0, 605 * 0.05),
        ("energy/p95_watts_per_gpu", 0.0, 615 * 0.05),
    ],
)
def test_errors_of_metrics_equal_errors_computed_by_hand(tag, random, systematic):
    found = metrics.errors(TOTALS, TOTALS)

    assert found[tag] == (pytest.approx(random, rel=1e-9), pytest.approx(systematic, rel=1e-9))


def test_metrics_without_energy_have_no_energy_error():
    found = metrics.errors(TOTALS, TOTALS)

    for name in ("run_throughput/mfu_ratio", "al_seconds", "energy/gpu_cost", "energy/timing_error_ratio"):
        assert name not in found
    for share in (0.1, 0.05, 0.03, 0.07):
        gain = with_keys(TOTALS, energy_gain_error_j=share * 60_000.0)
        assert "energy/sensor_error_ratio" not in metrics.errors(gain, gain), "for the rounding of floats"
    assert metrics.throughput.mfu_ratio(TOTALS) == pytest.approx(12_000 * 2e5 / 1e10)


@pytest.mark.parametrize("lacking", [{"energy_j": None}, {"energy_j": 0.0}])
def test_totals_without_energy_have_no_errors(lacking):
    totals = with_keys(TOTALS, **lacking)

    assert metrics.errors(totals, totals) == {}
