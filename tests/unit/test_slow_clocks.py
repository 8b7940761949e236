"""effllm/job/slow_clocks.py: the time that low SM clocks with a reason cost at most."""

import pytest
from builders import device_window, gpu, hello, row
from cases import cases

from effllm.job.account import Rows
from effllm.job.slow_clocks import SlowClocks
from effllm.records.rank import CLOCK_RATIO, Gauge, Profile

MAX_HZ, REFERENCE_HZ = 2.0e9, 1.8e9
HELLOS = {0: hello(0, 1, host="node3")}


def window(rank, clock=1.0, limit_w=700.0, **reasons):
    """Return a window of 10 s in which the GPU has this share of its maximum clock; reasons are shares of the time."""
    ratio = clock * MAX_HZ / REFERENCE_HZ
    gauges = {
        CLOCK_RATIO: Gauge(10 * ratio, 10.0, ratio, ratio),
        "power_limit_w": Gauge(10 * limit_w, 10.0, limit_w, limit_w),
    }
    seconds = {name: 10 * share for name, share in reasons.items()}
    if {"sw_thermal", "hw_slowdown"} & set(reasons):
        seconds["any"] = max(seconds.values())
    return device_window(f"GPU-{rank}", gauges=gauges, throttled_s=seconds, throttle_covered_s=10.0)


def losses(*windows, default_w=700.0, others_s=6.0, **fields):
    """Return the rank-seconds by cause of one window, in which each rank has this window and an own time of 8 s.

    ``others_s`` is the own time of ranks without a clocks event reason.
    """
    known = {"sm_clock_max_hz": MAX_HZ, "sm_clock_reference_hz": REFERENCE_HZ, "power_limit_default_w": default_w}
    devices = {f"GPU-{rank}": gpu(f"GPU-{rank}", **known) for rank in range(len(windows))}
    rows = []
    for rank, one in enumerate(windows):
        times = {"own_steps": 10, "busy_s": 8.0, "own_step_s": 8.0 if any(one.throttled_s.values()) else others_s}
        rows.append(row(rank, devices=(one,), **{**times, **fields}))
    clocks = SlowClocks()
    clocks.add_window(Rows(rows), devices, {})
    return {cause: one.rank_seconds for cause, one in clocks.by_cause.items()}


def test_slowest_throttled_gpu_sets_the_loss_of_all_ranks():
    # At 75 % of the clock, 8 s become 6 s; all four ranks save 2 s.
    found = losses(window(0, 0.75, sw_thermal=0.9), window(1, 0.8, sw_thermal=0.9), window(2), window(3))

    assert found == {"throttled": pytest.approx(4 * 2.0)}


def test_clock_is_compared_with_the_gpus_without_a_reason():
    # The other GPUs run at 80 % of their maximum: 8 s x 60/80 are 6 s.
    found = losses(window(0, 0.6, hw_slowdown=0.5), window(1, 0.8))

    assert found == {"throttled": pytest.approx(2 * 2.0)}


def test_time_without_kernels_is_no_loss_by_a_low_clock():
    # 4 of 8 s of own time have kernels; the other 2 s of a profiled iteration of 10 s are exposed communication.
    profile = Profile(iterations=1, time_s=10.0, exposed_s=2.0, computing_s=4.0)
    found = losses(window(0, 0.75, sw_thermal=0.9), window(1), profile=profile)

    assert found == {"throttled": pytest.approx(2 * 4.0 * 0.25)}


def test_clock_at_a_lowered_limit_rises_at_most_in_proportion_to_the_limit():
    # 600 of 700 W: the clock rises from 60 % to at most 70 % of the maximum, so 8 s become 48/7 s.
    found = losses(window(0, 0.6, 600.0, power_cap=1.0), window(1, 0.6, 600.0, power_cap=1.0))

    assert found == {"power_limit": pytest.approx(2 * (8 - 48 / 7))}


@cases(
    "usual",
    [
        window(0, 0.7, power_cap=1.0),  # at the default limit
        window(0, 0.7, sw_thermal=0.1),  # rarely
        window(0, 0.7),  # without a reason
        window(0, 1.0, sw_thermal=0.9),  # at the maximum clock
        window(0, 0.95, 695.0, power_cap=1.0),
        *(window(0, clock, limit_w=350.0, power_cap=0.9) for clock in (0.0, -1.0)),  # not measured
    ],
)
def test_usual_clocks_are_no_loss(usual):
    assert losses(usual, window(1)) == {}


def test_unknown_default_limit_is_no_reason():
    assert losses(window(0, 0.6, 600.0, power_cap=1.0), default_w=None) == {}


def alone(*windows, hellos=None, busy_s=()):
    """Return the losses by cause of a rank with these windows, by default with steps of 9 s."""
    clocks, device = SlowClocks(), gpu("GPU-0", sm_clock_max_hz=MAX_HZ, sm_clock_reference_hz=REFERENCE_HZ)
    for number, one in enumerate(windows, 1):
        times = {"busy_s": busy_s[number - 1]} if busy_s else {}
        clocks.add_window(Rows([row(0, number, devices=(one,), **times)]), {"GPU-0": device}, hellos or {})
    return clocks.by_cause


def test_losses_of_windows_add_up_and_the_worst_window_gives_the_text():
    found = alone(*(window(0, clock, sw_thermal=0.5) for clock in (0.75, 0.5)), hellos=HELLOS)["throttled"]

    # Steps of 9 s: at most at the maximum clock; at least at the clock of the peak, which is 90 % of it.
    assert found.max_rank_seconds == pytest.approx(9 * 0.25 + 9 * 0.5)
    assert found.rank_seconds == pytest.approx(9 * (1 - 0.75 / 0.9) + 9 * (1 - 0.5 / 0.9))
    assert found.why == "rank 0 (node3): thermal slowdown; SM clock 1.00 GHz, maximum 2.00"


def test_clock_of_earlier_windows_is_the_reference_if_all_gpus_have_a_reason():
    """At first, the GPU runs at 80 % of its maximum clock without a reason: 9 s at 60 % are 6.75 s at 80 %."""
    found = alone(window(0, 0.8), window(0, 0.6, sw_thermal=0.9))

    assert found["throttled"].rank_seconds == pytest.approx(9 - 6.75)


@cases(
    ("clocks", "reasons", "locked"),
    [
        ((0.7,) * 8, {}, True),
        ((0.7, 0.6) * 4, {}, False),  # they vary with the load
        ((0.95,) * 8, {}, False),  # near the maximum
        ((0.7,) * 8, {"sw_thermal": 0.9}, False),
        ((0.7,) * 3, {}, False),  # few windows
        ((0.0,) * 8, {}, False),  # not measured
    ],
)
def test_low_clocks_that_never_change_are_locked(clocks, reasons, locked):
    known = {"sm_clock_max_hz": MAX_HZ, "sm_clock_reference_hz": REFERENCE_HZ}
    devices, found = {f"GPU-{rank}": gpu(f"GPU-{rank}", **known) for rank in range(2)}, SlowClocks()
    for clock in clocks:
        found.add_window(Rows([row(rank, devices=(window(rank, clock, **reasons),)) for rank in range(2)]), devices, {})

    text = "the SM clocks of all GPUs are locked at 70 % of the maximum: nvidia-smi -q -d CLOCK"
    assert [one.why for cause, one in found.summary().items() if cause == "locked"] == [text] * locked


def test_low_clock_without_a_longer_own_time_is_no_loss():
    """Memory-bound kernels: at 75 % of the clock, the rank is as fast as its peers."""
    hot = window(0, 0.75, sw_thermal=0.9)

    assert losses(hot, window(1), window(2), others_s=8.1) == {}
    assert losses(hot, window(1), window(2), others_s=7.8) == {"throttled": pytest.approx(3 * 0.2)}, "what times show"
    assert losses(hot, window(1), window(2), others_s=5.0) == {"throttled": pytest.approx(3 * 2.0)}, "what clocks show"
    assert losses(hot, window(1), window(2), own_steps=0, own_step_s=0.0) != {}, "own times are not known"


@pytest.mark.parametrize(("busy_s", "is_loss"), [(10.0, False), (8.2, True)])
def test_low_clocks_of_all_gpus_are_compared_with_windows_without_a_reason(busy_s, is_loss):
    found = alone(*[window(0)] * 5, window(0, 0.75, sw_thermal=0.9), busy_s=[busy_s] * 5 + [10.0])

    assert bool(found) == is_loss
