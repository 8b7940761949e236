"""The waterfall: parts of a job's device-seconds and joules, which add up to the whole."""

import math

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from effllm.job.goodput_attempt import CLASSES
from effllm.job.waterfall import (
    ABOVE_PEAK,
    LITTLE_CLOCK,
    NO_CLOCK,
    NO_FLOPS,
    NO_GPUS,
    NO_PEAK,
    NO_PROFILE,
    NO_TOKENS,
    NOT_STATED,
    OTHER_DEVICES,
    RENAMED,
    Sources,
    waterfall,
)
from effllm.records.job import (
    AttemptSummary,
    ClusterTotals,
    Counts,
    DeviceTotals,
    GoodputSummary,
    HealthTotals,
    JobConstants,
)
from effllm.records.rank import Profile
from effllm.records.verdict import OF_GPUS, OF_RANKS, PARTS

PEAK = 1e15  # FLOP/s of one device


def goodput(joules=None, gpus=1, attempts=(), **rank_seconds):
    """Return the time of a job; ``gpus`` is the number of GPUs of each rank, 0 for a job without GPUs."""
    rank_seconds = dict.fromkeys(CLASSES, 0.0) | rank_seconds
    device_seconds = {name: value * (gpus or 1) for name, value in rank_seconds.items()}
    joules = dict.fromkeys(CLASSES) | (joules or {})
    time = GoodputSummary(sum(rank_seconds.values()), None, rank_seconds, rank_seconds, joules, 0, attempts)
    return replace(time, device_seconds=device_seconds, unit=OF_GPUS if gpus else OF_RANKS)


def totals(
    tokens=0, processed=None, profile=None, ranks=4, gpus=4, peak=4 * PEAK, clock=None, waiting_s=0.0, **constants
):
    """Return totals; ``clock`` is the ratio of the SM clock, its GPU-seconds, and its sampling error.

    ``waiting_s`` are the rank-seconds in which ranks waited for slow ranks.
    """
    known = JobConstants(world_size=ranks, gpus=gpus, peak_flops_per_s=peak, **constants)
    ratio, covered_s, error = clock or (None, 0.0, None)
    devices = DeviceTotals(sm_clock_ratio=ratio, sm_clock_covered_s=covered_s, sm_clock_error=error)
    counts = Counts(tokens=tokens, tokens_processed=tokens if processed is None else processed)
    health = HealthTotals(straggling_gpu_s=waiting_s)
    return ClusterTotals(constants=known, counts=counts, devices=devices, profile=profile, health=health)


def seconds(found):
    return {part.name: part.device_seconds for part in found.parts}


amount = st.floats(0.0, 1e9)
optional = st.one_of(st.none(), amount)
profiles = st.one_of(
    st.none(),
    st.builds(lambda a, b, c: Profile(1, a + b + c, exposed_s=a, computing_s=b), *3 * [st.floats(0.0, 1e6)]),
)


@given(
    st.fixed_dictionaries(dict.fromkeys(CLASSES, amount)),
    st.fixed_dictionaries(dict.fromkeys(CLASSES, optional)),
    profiles,
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.integers(1, 10**5),
    st.integers(0, 8),
    st.sampled_from([None, 1e9, 1e12]),
    st.sampled_from([None, 1.3e12]),
    st.one_of(st.none(), st.tuples(st.floats(0.0, 1.2), st.floats(0.0, 1e9), st.floats(0.0, 1.0))),
    st.floats(0.0, 1.0),
    amount,
    amount,
)
def test_parts_add_up_to_the_time_and_joules_of_all_classes(
    rank_seconds,
    joules,
    profile,
    tokens,
    padding,
    ranks,
    per_rank,
    flops,
    hardware_flops,
    clock,
    clocked,
    unused,
    waiting,
):
    whole = totals(
        tokens,
        tokens + padding,
        profile,
        ranks,
        ranks * per_rank,
        flops_per_token=flops,
        hardware_flops_per_token=hardware_flops,
        clock=clock,
        waiting_s=waiting,
        gpus_with_clock=int(clocked * ranks * per_rank),
    )
    unused = unused if per_rank else 0.0
    found = waterfall(replace(goodput(joules, per_rank, **rank_seconds), unused_gpu_seconds=unused), whole)
    if found is None:
        assert not sum(rank_seconds.values())
        return
    expected = sum(rank_seconds.values()) * max(per_rank, 1) + unused

    assert found.device_seconds == pytest.approx(expected, rel=1e-9)
    assert math.fsum(seconds(found).values()) == pytest.approx(expected, rel=1e-9)
    assert math.fsum(part.share for part in found.parts) == pytest.approx(1.0, rel=1e-9)
    assert [part.name for part in found.parts] == [name for name in PARTS if name in seconds(found)]
    assert all(part.device_seconds > 0 or part.joules > 0 for part in found.parts)
    assert all(part.evidence for part in found.parts)
    assert all(part.error_share >= 0.0 for part in found.parts if part.error_share is not None)
    known = [value for value in joules.values() if value is not None]
    assert (found.joules or 0.0) == pytest.approx(math.fsum(known), rel=1e-9)


def test_useful_time_is_the_flops_of_kept_tokens_over_the_peak():
    """Of 100 s of four devices, 25 s are redone; 3e14 tokens need 3e17 FLOPs, which take 300 s at the peak."""
    found = waterfall(goodput(kept=300.0, redone=100.0), totals(3 * 10**14, flops_per_token=1e3))

    assert seconds(found) == pytest.approx({"redone": 100.0, "below_peak": 75.0, "useful": 225.0})
    evidence = "3e+14 tokens x 1000 FLOPs at 1000 TFLOP/s, 75.0 % of them in kept steps"
    assert found.parts[-1].evidence == evidence


def test_time_of_padding_and_recomputation_is_computed_at_the_peak():
    found = waterfall(
        goodput(kept=400.0), totals(10**14, 15 * 10**13, flops_per_token=1e3, hardware_flops_per_token=4e3 / 3)
    )

    assert seconds(found) == pytest.approx(
        {"padding": 50.0, "recomputation": 100 / 3, "below_peak": 400 - 550 / 3, "useful": 100.0}
    )


PROFILE = Profile(10, 10.0, exposed_s=3.0, computing_s=6.0)  # 30 % exposed communication, 10 % idle


@cases(
    ("classes", "waiting_s", "uneven_share", "expected"),
    [
        # Of 120 s, 20 s of the communication are waits for a straggler.
        ({"straggling": 20.0}, 20.0, 0.0, {"straggling": 20.0, "exposed_communication": 16.0, "steps": 72.0}),
        # Of 20 s lost by a slow rank, the other ranks wait 15 s; it computes in the other 5 s.
        ({"straggling": 20.0}, 15.0, 0.0, {"straggling": 20.0, "exposed_communication": 21.0, "steps": 67.0}),
        ({"uneven_ranks": 20.0}, 0.0, 0.0, {"uneven_ranks": 20.0, "exposed_communication": 16.0, "steps": 72.0}),
        # In profiles, ranks wait for each other in 25 % of 120 s, of which own times show 20 s.
        (
            {"uneven_ranks": 20.0},
            0.0,
            0.25,
            {"uneven_ranks": 20.0, "waits_in_communication": 10.0, "exposed_communication": 6.0, "steps": 72.0},
        ),
    ],
)
def test_waits_for_ranks_are_no_exposed_communication(classes, waiting_s, uneven_share, expected):
    whole = totals(profile=PROFILE, waiting_s=waiting_s)
    found = waterfall(goodput(kept=100.0, **classes), whole, uneven_share=uneven_share)

    assert seconds(found) == pytest.approx({"device_idle": 12.0, **expected})


@cases(
    ("whole", "reason"),
    [
        (totals(10**14), NO_FLOPS),
        (totals(10**14, peak=None, flops_per_token=1e3), NO_PEAK),
        (totals(0, flops_per_token=1e3), NO_TOKENS),
        (totals(10**15, flops_per_token=1e3), ABOVE_PEAK),
    ],
)
def test_steps_without_known_flops_stay_whole_and_the_reason_is_given(whole, reason):
    found = waterfall(goodput(kept=400.0), whole)

    assert seconds(found) == {"steps": 400.0}
    assert found.unknown[:2] == (NO_PROFILE.format(1), reason)


def test_computation_below_the_clock_of_the_peak_is_a_part():
    """Of 100 s, 30 s are communication; at 80 % of the clock, computation takes 70 s instead of 56 s."""
    profile = Profile(10, 10.0, exposed_s=3.0, computing_s=7.0)
    clock = (0.8, 100.0, 0.01)

    found = waterfall(goodput(kept=100.0), totals(profile=profile, clock=clock, gpus_with_clock=4))

    expected = {"exposed_communication": 30.0, "clock_below_maximum": 14.0, "steps": 56.0}
    assert seconds(found) == pytest.approx(expected)
    part = next(part for part in found.parts if part.name == "clock_below_maximum")
    assert part.evidence == "SM clock 80.0 % of the peak's; 4 of 4 GPUs, 100 % of the time"
    assert part.error_share == pytest.approx(0.007)
    assert NO_CLOCK not in found.unknown


@cases(
    ("clock", "gpus", "lost", "reason"),
    [
        ((1.05, 100.0, 0.01), 4, 0.0, None),
        ((0.8, 50.0, 0.01), 2, 10.0, None),
        ((0.8, 49.0, 0.01), 4, 0.0, LITTLE_CLOCK),
        (None, 4, 0.0, NO_CLOCK),
        ((0.8, 100.0, 0.01), 0, 0.0, NO_CLOCK),
    ],
)
def test_clock_counts_only_for_gpus_and_times_with_both_readings(clock, gpus, lost, reason):
    found = waterfall(goodput(kept=100.0), totals(clock=clock, gpus_with_clock=gpus))

    assert seconds(found).get("clock_below_maximum", 0.0) == pytest.approx(lost)
    assert [line for line in found.unknown if "clock" in line] == ([reason] if reason else [])


def test_clock_takes_no_time_that_the_flops_need_at_the_peak():
    clock = {"clock": (0.8, 400.0, 0.01), "gpus_with_clock": 4}
    found = waterfall(goodput(kept=400.0), totals(35 * 10**13, flops_per_token=1e3, **clock))

    assert seconds(found) == pytest.approx({"clock_below_maximum": 50.0, "useful": 350.0})


def test_cpus_have_no_clock_to_be_measured():
    assert not [line for line in waterfall(goodput(kept=1.0), totals(gpus=0)).unknown if "clock" in line]


def test_evidence_of_a_class_is_the_windows_or_iterations_with_its_values():
    found = waterfall(goodput(kept=7.0, data=1.0, straggling=1.0, uneven_ranks=1.0), totals(), Sources(240, 1, 2000))

    assert {part.name: part.evidence for part in found.parts} == {
        "data": "times of iterations in reports of windows 1-240",
        "straggling": "own times of ranks in 2,000 iterations",
        "uneven_ranks": "own times of ranks in 2,000 iterations",
        "steps": "rest of the steps",
    }
    again = waterfall(goodput(kept=8.0, data=1.0), totals(), Sources(240, 3, 2000))
    assert again.parts[0].evidence == "times of iterations in reports of 3 attempts, the last with windows 1-240"


def test_error_of_a_profiled_part_falls_with_the_profiled_iterations():
    """A share of 0.3 in 12 iterations has a standard error of at most sqrt(0.3 x 0.7 / 12) = 0.132."""
    profile = Profile(12 * 4, 10.0, exposed_s=3.0, computing_s=7.0)

    found = waterfall(goodput(kept=100.0), totals(profile=profile))

    part = found.parts[0]
    assert (part.name, part.error_share) == ("exposed_communication", pytest.approx(1.96 * 0.1323, rel=1e-3))
    assert part.evidence == "48 profiled iterations, summed over ranks"
    assert found.parts[-1].error_share == pytest.approx(part.error_share)


def test_joules_of_kept_steps_are_split_in_proportion_to_time():
    found = waterfall(
        goodput({"kept": 600.0, "data": 50.0}, kept=300.0, data=10.0), totals(10**14, flops_per_token=1e3)
    )

    assert {part.name: (part.joules, part.is_split_by_time) for part in found.parts} == {
        "data": (50.0, False),
        "below_peak": (pytest.approx(400.0), True),
        "useful": (pytest.approx(200.0), True),
    }
    assert found.joules == pytest.approx(650.0)


def test_joules_of_classes_without_device_time_are_kept():
    found = waterfall(goodput({"kept": 60.0, "checkpoint": 5.0, "data": 1.0}, data=10.0), totals())

    assert {part.name: (part.device_seconds, part.joules) for part in found.parts} == {
        "checkpoint": (0.0, 5.0), "data": (10.0, 1.0), "steps": (0.0, 60.0),
    }  # fmt: skip
    assert found.joules == 66.0


def test_gain_of_a_part_is_bounded_by_its_share():
    found = waterfall(goodput(kept=300.0, data=100.0), totals())

    gains = {part.name: part.max_gain for part in found.parts}
    assert gains == {"data": pytest.approx(1 / 3), "steps": None}


def test_gain_of_a_part_includes_the_shorter_time_of_unused_gpus():
    """Half of 400 s is checkpoints: without them the job takes half of the time, also of the unused GPUs."""
    found = waterfall(replace(goodput(kept=200.0, checkpoint=200.0), unused_gpu_seconds=400.0), totals())

    assert {part.name: part.max_gain for part in found.parts} == {"unused": 1.0, "checkpoint": 1.0, "steps": None}


def test_price_of_an_hour_gives_the_cost_of_each_part():
    found = waterfall(goodput(kept=3600.0, data=1800.0), totals(price_per_gpu_hour=2.0))
    without = waterfall(goodput(gpus=0, kept=3600.0), totals(gpus=0, price_per_gpu_hour=2.0))

    assert {part.name: part.cost for part in found.parts} == {"data": 1.0, "steps": 2.0}
    assert [part.cost for part in without.parts] == [None]


def test_time_is_counted_for_each_gpu_of_a_rank():
    found = waterfall(goodput(gpus=2, kept=100.0, startup=10.0), totals(ranks=4, gpus=8))

    assert (seconds(found), found.unit) == ({"startup": 20.0, "steps": 200.0}, OF_GPUS)


def test_attempt_without_gpus_is_not_in_the_gpu_time():
    """The FLOPs of its tokens cannot be separated, so the steps of the other attempt are not split by them."""
    attempts = tuple(AttemptSummary(one, "killed", 0, 0, 0, 0, 4, 10, gpus=gpus) for one, gpus in ((1, 4), (2, 0)))

    found = waterfall(goodput(attempts=attempts, kept=100.0), totals(10**13, flops_per_token=1e3))

    assert OTHER_DEVICES in found.unknown
    assert NO_GPUS.format(1, 2) in found.unknown
    assert "useful" not in seconds(found)


def test_unused_gpus_are_a_part_without_joules():
    classes = replace(goodput({"kept": 60.0}, kept=400.0), unused_gpu_seconds=400.0)

    found = waterfall(classes, totals(price_per_gpu_hour=9.0), Sources(unused="host a: its ranks use 1"))

    part = found.parts[0]
    assert (part.name, part.device_seconds, part.share, part.joules, part.cost) == ("unused", 400.0, 0.5, None, 1.0)
    assert (part.max_gain, part.evidence) == (1.0, "host a: its ranks use 1")
    assert (found.joules, found.device_seconds) == (60.0, 800.0)


@pytest.mark.parametrize(("unused", "is_unknown"), [(None, True), (0, False), (3, False)])
def test_unused_gpus_of_an_attempt_without_a_statement_are_unknown(unused, is_unknown):
    attempts = (AttemptSummary(1, "killed", 0, 0, 0, 0, 4, 10, gpus=4, unused_gpus=unused),)

    found = waterfall(goodput(attempts=attempts, kept=100.0), totals())

    assert (NOT_STATED in found.unknown) == is_unknown


def test_job_without_reported_time_has_no_waterfall():
    assert waterfall(goodput(), totals()) is None
    assert waterfall(goodput(kept=1.0), replace(totals(), constants=JobConstants())) is None


def test_every_class_of_goodput_is_a_part():
    assert {RENAMED.get(name, name) for name in CLASSES} - {"kept"} <= set(PARTS)
