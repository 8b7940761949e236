"""The verdict: the largest avoidable loss of a job, with its evidence, or "healthy", or "unknown"."""

from pathlib import Path

import msgspec
import pytest
from builders import Job, device_window, full, row
from cases import cases
from msgspec.structs import replace
from sink_examples import make_summary

from effllm.job.causes import AVOIDABLE, MIN_ITERATIONS, SLOW_DATA, remedy
from effllm.job.losses import MIN_PROFILED, is_profiled, losses, profile_period
from effllm.job.verdict import verdict_of as judged
from effllm.records.host_lines import CodeLine, HostTime
from effllm.records.job import AttemptSummary, GoodputSummary, Value
from effllm.records.rank import Profile
from effllm.records.verdict import (
    CAUSES,
    DATA_WAIT,
    FAILED,
    HEALTHY,
    HIGH,
    MEDIUM,
    NO_VERDICT,
    NONE_FOUND,
    ClockLoss,
    LastRanks,
    LossWindows,
    SlowIterations,
    StragglerVerdict,
    Waterfall,
    WaterfallPart,
)
from effllm.records.verdict import PROFILE as PROFILE_EVIDENCE

DOCS = Path(__file__).parents[2] / "docs"
PROFILE = Profile(10, 10.0, computing_s=9.9)


def job(profile=PROFILE, metrics=None, **changes):
    """Return a summary whose waterfall has these parts, in device-seconds; the rest of 1,000 s is useful."""
    seconds = {name: changes.pop(name) for name in list(changes) if name not in make_summary().__struct_fields__}
    seconds["useful"] = 1000.0 - sum(seconds.values())
    parts = tuple(WaterfallPart(name, value, value / 1000.0) for name, value in seconds.items())
    summary = replace(make_summary(), waterfall=Waterfall(1000.0, None, parts, "GPU"), profile=profile, goodput=None)
    known = {f"run_throughput/{name}": Value(value, "") for name, value in (metrics or {}).items()}
    return replace(summary, **{"iterations": 100, "attempts": 1, "metrics": known, "stragglers": (), **changes})


def gain_of(saved, rel=1e-6):
    """Return the bound of the gain for a saved share of the device time, with the margin of 2 %."""
    saved *= 1.02
    return pytest.approx(saved / (1 - saved), rel=rel)


def verdict_of(summary, framework="torch", **more):
    """Return the verdict on a job with a hook, which sees the DataLoader."""
    return judged(summary, {"framework": framework}, **more)


def cause(summary):
    return verdict_of(summary).cause


@cases(
    ("part", "expected"),
    [
        ("data", "data_loading"),
        ("checkpoint", "checkpoint"),
        ("evaluation", "evaluation"),
        ("hang", "hang"),
        ("unused", "unused_gpus"),
        ("exposed_communication", "exposed_communication"),
        ("device_idle", "device_idle"),
    ],
)
def test_loss_from_its_threshold_on_is_the_cause(part, expected):
    limit = 1000.0 * AVOIDABLE[expected].share

    assert cause(job(**{part: limit})) == expected
    assert cause(job(**{part: 0.99 * limit})) == HEALTHY


@cases(
    ("facts", "expected"),
    [
        ({"clock_below_maximum": 100.0}, HEALTHY),  # a low clock without a reason
        ({"uneven_ranks": 49.0}, HEALTHY),
        ({"metrics": {"padding_ratio": 0.14}}, HEALTHY),
        # A long start-up is a loss only of a long job.
        ({"startup": 200.0, "elapsed_s": 3600.0}, "startup"),
        ({"startup": 200.0, "elapsed_s": 60.0}, HEALTHY),
        ({"hang": 5.0, "data": 100.0, "status": "stalled"}, "hang"),
        ({"data": 300.0, "status": "interrupted"}, "data_loading"),
        ({"data": 300.0, "status": "running"}, "data_loading"),
        # Few iterations are no evidence.
        ({"data": 300.0, "iterations": MIN_ITERATIONS - 1}, NO_VERDICT),
        ({"hang": 300.0, "iterations": MIN_ITERATIONS - 1}, "hang"),
        # A loss that is smaller than the time without reports is not the primary cause.
        ({"data": 80.0, "unreported": 90.0}, NO_VERDICT),
        ({"data": 100.0, "unreported": 90.0}, "data_loading"),
        ({"unreported": 90.0}, HEALTHY),
        ({"unreported": 110.0}, NO_VERDICT),
    ],
)
def test_cause_follows_from_what_is_known_of_the_job(facts, expected):
    assert cause(job(**facts)) == expected


def test_primary_cause_is_the_largest_loss_above_its_threshold():
    """Exposed communication of 14 % is the largest loss, but usual; 8 % of checkpoints is not."""
    found = verdict_of(job(exposed_communication=140.0, checkpoint=80.0, data=60.0))

    assert found.cause == "checkpoint"
    assert found.text == "checkpoint: 8.0 % of GPU time, gain at most 8.89 %"
    assert found.bound == gain_of(0.08)
    assert [one.share for one in found.evidence] == [0.14, 0.08, 0.06]


def test_why_of_data_loading_is_the_mean_wait_per_iteration():
    """4 s of data wait, as a mean over ranks, in 100 iterations of 0.4 s; without the warm-up they take 0.02 s."""
    seconds = {"kept": 30.0, "redone": 5.0, "data": 4.0, "straggling": 1.0, "checkpoint": 10.0}
    goodput = GoodputSummary(50.0, None, seconds, {}, {}, 0, ())

    found = verdict_of(
        job(data=100.0, goodput=goodput, metrics={"data_wait_ratio": 0.01, "seconds_per_iteration": 0.02})
    )

    assert found.why == "data wait 40 of 400 ms per iteration"


def test_a_long_start_of_a_short_job_is_named_with_the_length_of_its_threshold():
    summary = job(profile=None, startup=600.0, elapsed_s=900.0, iterations=100)

    found = verdict_of(summary)

    assert found.cause == NONE_FOUND
    assert found.why == "startup 60.0 % (short job); 40.0 % of GPU time is in steps"
    assert "(threshold 10 % in jobs of 30 min or more)" in found.evidence[0].claim
    assert verdict_of(replace(summary, elapsed_s=1800.0)).cause == "startup"


@cases(
    ("differences", "expected"),
    [
        ((), "straggler"),
        (("host",), "straggler"),
        (("clock",), "throttled"),
        (("clock", "throttled"), "throttled"),
        (("clock", "throttled", "power_limit"), "power_limit"),
    ],
)
def test_cause_of_a_straggler_is_the_difference_from_its_peers(differences, expected):
    slow = StragglerVerdict((3,), "gpu-17", "", 1, 0.2, 7, "own time", "SM clock 1.1 GHz", 80.0, None, differences)

    found = verdict_of(job(straggling=80.0, stragglers=(slow,)))

    assert (found.cause, found.why) == (expected, "rank 3 (gpu-17): SM clock 1.1 GHz")


def test_losses_of_stragglers_with_different_causes_are_separate():
    """Of 90 s of waiting, two thirds are for the throttled rank."""
    hot = StragglerVerdict((1,), "a", "", 1, 0.2, 7, "own time", "hot", 20.0, None, ("throttled",))
    slow = StragglerVerdict((2,), "b", "", 1, 0.2, 7, "own time", "unknown", 10.0)
    summary = job(straggling=90.0, stragglers=(slow, hot))

    found = {one.cause: one.seconds for one in losses(summary, summary.waterfall, "torch")}

    assert found == {"throttled": pytest.approx(60.0), "straggler": pytest.approx(30.0)}


@cases("expected", ["throttled", "power_limit"])
def test_low_clock_with_a_reason_is_a_loss(expected):
    clocks = {expected: ClockLoss(60.0, 3, 5.0, "rank 3: SM clock 1.10 GHz")}

    found = verdict_of(job(clock_below_maximum=20.0, slow_clocks=clocks))

    assert (found.cause, found.why) == (expected, "rank 3: SM clock 1.10 GHz")
    assert found.text.startswith(f"{expected.replace('_', ' ')}: 6.0 % of GPU time")


def test_gain_of_a_clock_includes_time_without_kernels():
    clocks = {"throttled": ClockLoss(60.0, 3, 60.0, "rank 3", 100.0)}

    found = verdict_of(job(slow_clocks=clocks))

    assert found.text.startswith("throttled: 6.0 % of GPU time")
    assert found.bound == gain_of(0.1)


def test_waits_for_a_throttled_gpu_are_a_part_of_the_loss_by_its_clock():
    hot = StragglerVerdict((1,), "a", "", 1, 0.2, 7, "own time", "hot", 40.0, None, ("throttled",))
    clocks = {"throttled": ClockLoss(55.0, 1, 5.0, "rank 1: SM clock 1.10 GHz")}

    found = verdict_of(job(straggling=40.0, stragglers=(hot,), slow_clocks=clocks))

    assert found.text.startswith("throttled: 5.5 % of GPU time")


@cases(("of_rank", "is_of_few"), [(100.0, True), (80.0, False)])
def test_data_waits_of_few_ranks_are_data_loading_with_their_own_action(of_rank, is_of_few):
    """Waits for data cost 360 s; those of rank 1 cost half of it or more, or less."""
    slow = StragglerVerdict((1,), "", "", 1, 0.6, 1, DATA_WAIT, "data wait 184 ms", of_rank, own_seconds=of_rank)
    summary = job(data=360.0 if is_of_few else 400.0, stragglers=(slow,))
    summary = replace(summary, stragglers=(replace(slow, gpu_seconds=1.8 * of_rank),)) if is_of_few else summary

    found = verdict_of(summary)

    assert found.cause == "data_loading"
    assert (found.next == SLOW_DATA.text) == ("rank 1: data wait 184 ms" in found.why) == is_of_few


def test_straggler_without_a_reason_has_its_slowdown():
    slow = StragglerVerdict((1,), "", "", 1, 1.4, 1, PROFILE_EVIDENCE, gpu_seconds=180.0)

    found = verdict_of(job(straggling=180.0, stragglers=(slow,)))

    assert found.why == "rank 1: computation takes 140.0 % longer than its peer, reason unknown"


SLOW = StragglerVerdict((1,), "a", "", 1, 0.2, 3, "own time", "unknown", 90.0, own_seconds=30.0)
IN_EACH_STEP = replace(SLOW, own_seconds=90.0)


@cases(
    ("facts", "saved"),
    [
        # Four ranks lose 30 s each; at most, the slow rank is as slow after its first wait for other ranks.
        ({"straggling": 120.0, "stragglers": (SLOW,)}, 0.12),
        ({"straggling": 120.0, "stragglers": (replace(SLOW, max_seconds=150.0),)}, 0.15),
        # with the waits in windows in which it was not named
        (
            {
                "straggling": 120.0,
                "stragglers": (replace(SLOW, max_seconds=120.0),),
                "last_ranks": LastRanks(200.0, {1: 60.0, 2: 50.0}, max_waits_s={1: 150.0, 2: 80.0}),
            },
            0.15,
        ),
        # Two ranks save 90 s each, also in repeated steps: 90 of 910.
        (
            {"straggling": 180.0, "redone": 82.0, "attempts": 2, "stragglers": (IN_EACH_STEP,)},
            0.18 * (1 + 82 / 918),
        ),
        # waits of which only means are known
        ({"data": 100.0, "goodput": GoodputSummary(100.0, 0.7, {}, {"kept": 1e3}, {}, hidden_data_s=50.0)}, 0.15),
    ],
)
def test_bound_of_a_gain_includes_what_also_ends_without_the_loss(facts, saved):
    assert verdict_of(job(**facts)).bound == gain_of(saved)


def test_text_of_a_straggler_has_the_share_of_iterations_in_which_it_is_last():
    slow = replace(SLOW, last_share=0.31)

    found = verdict_of(job(straggling=120.0, stragglers=(slow, replace(slow, ranks=(2,), gpu_seconds=10.0))))

    text = "rank 1 (a): 20.0 % slower than 3 peers, reason unknown, last in 31 % of the iterations; and 1 more"
    assert found.why == text


def test_waits_of_the_ranks_without_a_slow_rank_are_their_own_cause():
    last = LastRanks(200.0, {3: 60.0, 5: 50.0}, max_uneven_s=150.0)
    summary = job(uneven_ranks=120.0, last_ranks=last)

    found = verdict_of(summary)

    assert (found.cause, found.bound) == ("uneven_ranks", gain_of(0.15))
    assert found.why.endswith("no rank is named as slow (most often last: rank 3, in 30 % of the iterations)")


def test_waits_of_the_ranks_in_communication_are_uneven_ranks_if_enough_iterations_were_profiled():
    """The waits before communication are below the threshold, with those in communication they are above it."""
    parts = {"uneven_ranks": 30.0, "waits_in_communication": 90.0, "exposed_communication": 60.0}

    assert verdict_of(job(**parts, profile=Profile(100, 100.0))).bound == gain_of(0.12)
    assert cause(job(**parts, profile=Profile(1, 1.0))) == NONE_FOUND
    slow = StragglerVerdict((1,), "", "", 1, 0.2, 3, "own time", max_seconds=90.0)
    assert cause(job(**parts, profile=Profile(100, 100.0), stragglers=(slow,))) == HEALTHY, "they may be for this rank"


def split_job(parts, **facts):
    """Return a job of which these parts, in seconds of 1,000, are all of its time."""
    whole = Waterfall(1000.0, None, tuple(WaterfallPart(name, s, s / 1000.0) for name, s in parts.items()), "GPU")
    return replace(job(slow_iterations=SlowIterations(5, 100, 0.1, 0.9, 60), **facts), waterfall=whole)


def test_long_first_iterations_may_have_the_cause_of_the_other_long_ones():
    found = verdict_of(split_job({"slow_iterations": 80.0, "warmup": 20.0, "useful": 900.0}))

    assert (found.cause, found.bound) == ("slow_iterations", gain_of(0.1))


def core_waits(share):
    return GoodputSummary(100.0, 1.0, {"kept": 100.0}, {"kept": 1000.0}, {}, core_wait_s=1000.0 * share)


def waiting_for_cores(share, **parts):
    return verdict_of(job(**parts, goodput=core_waits(share)))


def host_in(line):
    return HostTime(100, by_rank={0: 100}, by_kind={line.kind: 100}, lines=(line,))


def test_oversubscribed_cores_are_stated_with_the_losses_that_they_may_cause():
    claim = "training threads wait 9 % of the time for a CPU core"

    found = waiting_for_cores(0.09, uneven_ranks=120.0)
    assert found.cause == "uneven_ranks" and found.why.endswith(f"; {claim}")
    assert found.next.startswith("more CPU cores")
    assert (found.evidence[-1].claim, found.evidence[-1].share) == (claim, pytest.approx(0.09))
    other = waiting_for_cores(0.09, checkpoint=120.0)
    assert claim not in other.why and other.evidence[-1].claim == claim
    assert not waiting_for_cores(0.09, uneven_ranks=300.0).next.startswith("more CPU cores"), "not the larger part"
    healthy = waiting_for_cores(0.09)
    assert (healthy.cause, healthy.evidence[-1].claim) == (HEALTHY, claim)
    assert all("CPU core" not in one.claim for one in waiting_for_cores(0.04, uneven_ranks=120.0).evidence)


def test_slow_line_of_the_data_is_remedied_in_the_data_also_beside_waits_for_cores():
    line = CodeLine("data", "Rows.__getitem__ (train.py:8)", "", 100)
    without = job(data=600.0, goodput=core_waits(0.4))

    found = verdict_of(replace(without, host=host_in(line)))

    assert "Rows.__getitem__ (train.py:8)" in found.why and found.next.startswith("raise num_workers")
    assert verdict_of(without).next.startswith("more CPU cores")


@cases(("slow_s", "is_named"), [(120.0, False), (300.0, True)])
def test_no_line_is_named_for_long_iterations_that_wait_for_cores(slow_s, is_named):
    host = host_in(CodeLine("other", "refresh (train.py:5)", "", 100, long=60))
    parts = {"slow_iterations": slow_s, "useful": 1000.0 - slow_s}
    found = verdict_of(split_job(parts, goodput=core_waits(0.09), host=host))

    assert found.cause == "slow_iterations"
    assert ("refresh (train.py:5)" in found.why) is is_named


def test_locked_clocks_are_stated_and_no_loss():
    locked = ClockLoss(0.0, -1, 0.0, "the SM clocks of all GPUs are locked")
    found = verdict_of(job(slow_clocks={"locked": locked}))

    assert (found.cause, found.evidence[-1].claim, found.evidence[-1].share) == (HEALTHY, locked.why, None)


def test_repeated_iterations_repeat_their_waits_and_phases():
    """Four devices repeat 25 s of steps with 2.5 s of waits and phases, at most with 5 s: 110 s, at most 120 s."""
    repeats = attempts(0.0, 0.0)
    first = replace(repeats.attempts[0], redone_around_s=2.5, max_redone_around_s=5.0)
    summary = job(redone=100.0, attempts=2, goodput=replace(repeats, attempts=(first, repeats.attempts[1])))

    (found,) = losses(summary, summary.waterfall, "torch")

    assert (found.cause, found.seconds) == ("restarts", pytest.approx(110.0))
    assert found.gain == gain_of(0.12)


def attempts(*startups, gap_s=0.0):
    made = [
        AttemptSummary(number, "killed", 0.0, 0.0, 0.0, gap_s * (number > 1), 4, 10, startup_s=seconds, devices=4.0)
        for number, seconds in enumerate(startups, 1)
    ]
    return GoodputSummary(0.0, None, {}, {}, {}, 7, tuple(made))


def test_start_ups_of_later_attempts_belong_to_the_restarts():
    """Three quarters of 40 s of start-up are in the second attempt: 30 + 20 + 10 s of 1,000 s."""
    summary = job(startup=40.0, restart_gap=20.0, redone=10.0, attempts=2, goodput=attempts(10.0, 30.0, gap_s=5))

    found = verdict_of(summary)

    assert found.cause == "restarts"
    assert found.text.startswith("restarts: 6.0 % of GPU time")
    assert found.why == "2 attempts (1 killed), gaps 5 s, 7 repeated iterations"
    # and at most 40 s of shutdown
    with_end = job(startup=40.0, restart_gap=20.0, redone=10.0, shutdown=40.0, attempts=2, goodput=attempts(10.0, 30.0))
    assert verdict_of(with_end).bound == gain_of(0.1, rel=1e-3)


def test_gain_without_a_loss_includes_the_shorter_time_of_unused_gpus():
    """Ranks use 800 of 1,000 s. Without 240 s of checkpoints, 30 % of their time, 60 s of unused GPUs end too."""
    found = verdict_of(job(unused=200.0, checkpoint=240.0))

    assert found.text == "checkpoint: 24.0 % of GPU time, gain at most 44.1 %"
    assert found.bound == gain_of(0.3)


def test_steps_that_compute_padding_have_a_gain_proportional_to_the_padding():
    """A fifth of the positions is padding, and steps take 900 of 1,000 s: 18 % of the time, a gain of at most 22 %."""
    found = verdict_of(job(data=40.0, startup=60.0, padding=10.0, metrics={"padding_ratio": 0.2}))

    assert found.cause == "padding"
    assert found.bound == gain_of(0.18)


@cases(("status", "why"), [("completed", ""), ("stalled", ", and the job ended so")])
def test_why_of_a_hang_is_its_time(status, why):
    seconds = {"hang": 81.4}
    summary = job(hang=300.0, goodput=GoodputSummary(1000.0, None, seconds, seconds, {}), status=status)

    assert verdict_of(summary).why == f"no rank made progress for 81 s{why}"


def test_why_of_unused_gpus_names_them():
    text = "host a: 4 GPUs are allocated (SLURM_GPUS_ON_NODE), and its ranks use 2"
    summary = job(unused=400.0)
    unused, rest = summary.waterfall.parts
    parts = (replace(unused, evidence=text), rest)

    assert verdict_of(replace(summary, waterfall=replace(summary.waterfall, parts=parts))).why == text


def test_no_loss_is_found_in_several_ranks_without_a_profile():
    found = verdict_of(job(profile=None, data=30.0, below_peak=500.0))

    assert (found.cause, found.bound, found.confidence) == (NONE_FOUND, None, MEDIUM)
    assert found.text == "no loss found; communication inside steps not split"
    assert found.why == "97.0 % of GPU time is in steps"


def busy(share, **parts):
    """Return a job of one rank without a profile, whose GPU runs a kernel in this share of the iterations."""
    summary = job(profile=None, simulated=False, **parts)
    metrics = {**summary.metrics, "pcu_ratio": Value(share, "ratio")}
    return replace(summary, metrics=metrics, coverage=replace(summary.coverage, ranks_expected=1))


def test_one_rank_with_a_busy_gpu_is_healthy_without_a_profile():
    found = verdict_of(busy(0.97, data=30.0, below_peak=500.0))

    assert (found.cause, found.confidence, found.next) == (HEALTHY, HIGH, "nothing to do")
    assert found.why == "the GPU runs a kernel in 97 % of the iterations; 97.0 % of GPU time is in steps"


def test_idle_gpus_are_seen_without_a_profile():
    """The GPU has no kernel in 60 % of 1,000 s, of which it waits 100 s for data."""
    found = verdict_of(busy(0.4, data=100.0, below_peak=500.0))

    assert found.cause == "device_idle"
    assert found.text.startswith("device idle: 50.0 % of GPU time")
    assert found.why == "the GPUs run a kernel in 40 % of the iterations"


def test_time_between_iterations_of_an_own_loop_is_not_called_data_loading():
    rare = SlowIterations(5, 100, 0.1, 0.9, 60, 20)
    goodput = GoodputSummary(100.0, 0.7, {"data": 30.0, "kept": 70.0}, {}, {})
    found = judged(job(data=300.0, rare_waits=rare, goodput=goodput))

    assert found.cause == "between_iterations"
    assert found.why == "time between iterations 300 of 1,000 ms per iteration; every 20th iteration, up to 900 ms"
    assert found.next == "mark checkpoints and evaluations with effllm.phase; else data"


def test_failed_job_names_its_ranks_and_what_was_reported_before():
    summary = job(data=300.0, status="failed", events={"memory_leak": 1, "left": 4})
    found = verdict_of(summary, ends={"failed": [1], "killed": [0, 2, 3]})

    assert (found.cause, found.text) == (FAILED, "failed: rank 1 after iteration 100")
    assert found.why.startswith("growing memory was reported; largest loss: data loading 30.0 %")
    assert found.next == "events.jsonl: memory_leak, memory_forecast"


def test_killed_job_is_no_performance_problem():
    found = verdict_of(job(status="killed", events={}), ends={"killed": [0, 1, 2, 3, 4]})

    assert found.text == "killed: rank 0,1,2,3,... after iteration 100"
    assert found.next == "dmesg, and the log of the scheduler"


def test_profiled_iterations_that_are_unlike_the_others_split_nothing():
    iteration_s = PROFILE.time_s / PROFILE.iterations
    for factor, is_like in ((1.0, True), (1.2, True), (1.3, False), (0.7, False)):
        kept_s = 100 * factor * iteration_s
        summary = job(below_peak=500.0, goodput=GoodputSummary(kept_s, 1.0, {"kept": kept_s}, {}, {}))

        assert is_profiled(summary) == is_like
        assert verdict_of(summary).cause == (HEALTHY if is_like else NONE_FOUND)


@cases(
    ("iterations", "ranks", "every", "line"),
    [
        (100_000, 8, 0, "EFFICIENTLLM_PROFILE_EVERY=500 splits the steps by a profile"),
        (60, 4, 0, "EFFICIENTLLM_PROFILE_EVERY=20 splits the steps by a profile"),
        (60, 4, 500, "EFFICIENTLLM_PROFILE_EVERY=20 splits the steps by a profile"),
        (60, 4, 10, "few profiles: the log of the ranks has the reason"),
    ],
)
def test_next_of_steps_without_a_profile_fits_the_length_of_the_job(iterations, ranks, every, line):
    summary = job(profile=None, iterations=iterations)
    summary = replace(summary, coverage=replace(summary.coverage, ranks_expected=ranks))

    assert verdict_of(summary, profile_every=every).next == line


@cases("ranks", [1, 2, 3, 7, 1000])
@cases("iterations", [MIN_ITERATIONS, 60, 499, 5001, 10**6])
def test_proposed_period_gives_enough_profiled_iterations(iterations, ranks):
    assert iterations // profile_period(iterations, ranks) * ranks >= MIN_PROFILED


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"events": {"rank_lost": 1}}, "ranks or their reports were lost"),
        ({"status": "running"}, "the newest window is not complete"),
        ({}, "ranks began late, ended early, or sent no report"),
    ],
)
def test_time_without_reports_is_called_lost_only_if_something_was_lost(facts, why):
    assert verdict_of(job(unreported=110.0, **facts)).why == why


@cases(("lost", "why"), [(30.0, "an exception of the script"), (300.0, "largest loss: data loading 30.0 %")])
def test_failed_job_has_a_largest_loss_only_above_the_threshold(lost, why):
    assert verdict_of(job(data=lost, status="failed"), ends={"failed": [0]}).why.startswith(why)


@cases(
    ("facts", "confidence"),
    [
        ({"data": 100.0, "steps": 500.0}, HIGH),
        # A larger loss can be hidden in the steps.
        ({"profile": None, "data": 100.0, "steps": 500.0}, MEDIUM),
        ({"profile": None, "data": 100.0, "steps": 50.0}, HIGH),
        # Another program may use the GPUs.
        ({"unused": 400.0, "data": 100.0}, MEDIUM),
        ({"data": 400.0}, HIGH),
    ],
)
def test_confidence_is_medium_if_something_is_not_seen(facts, confidence):
    assert verdict_of(job(**facts)).confidence == confidence


def test_job_without_a_waterfall_has_no_verdict():
    assert verdict_of(replace(make_summary(), waterfall=None)) is None


@cases(
    ("framework", "words"),
    [("transformers", "dataloader_num_workers"), ("megatron", "--num-workers"), ("something else", "DataLoader")],
)
def test_next_action_is_in_the_words_of_the_framework(framework, words):
    assert words in verdict_of(job(data=100.0), framework).next


@cases(
    ("facts", "words"),
    [
        ({"framework": "megatron-core 0.16.1", "tensor_parallel": 2, "data_parallel": 1}, "tp_comm_overlap"),
        ({"framework": "megatron-core 0.16.1", "tensor_parallel": 1, "data_parallel": 8}, "overlap_grad_reduce"),
        ({"framework": "megatron", "pipeline_parallel": 4}, "--num-layers-per-virtual-pipeline-stage"),
        ({"framework": "megatron", "expert_parallel": 8}, "expert parallelism"),
        ({"framework": "deepspeed", "parallel_layout": "ZeRO", "zero_stage": 3}, "stage3_prefetch_bucket_size"),
        ({"framework": "deepspeed", "parallel_layout": "ZeRO", "zero_stage": 1}, "overlap_comm"),
        ({"framework": "transformers", "parallel_layout": "DDP"}, "ddp_bucket_cap_mb"),
        ({"framework": "transformers", "parallel_layout": "FSDP"}, "forward_prefetch"),
        ({"framework": "transformers", "device_mesh": "dp=2 tp=4"}, "tensor parallelism"),
        ({"framework": "torchtitan", "context_parallel": 2}, "context parallelism"),
        ({"framework": "lightning", "parallel_layout": "FSDP"}, "shard inside nodes"),
        ({"framework": "torch"}, "bucket_cap_mb of DDP"),
    ],
)
def test_action_for_communication_is_for_the_layout(facts, words):
    assert words in remedy("exposed_communication", facts).text


def test_setting_of_a_trainer_is_one_that_it_has():
    facts = {"framework": "transformers", "trainer": "Trainer"}

    assert "SFTConfig" not in remedy("padding", facts).text
    assert "SFTConfig" in remedy("padding", {**facts, "trainer": "SFTTrainer"}).text
    assert not [row for one in AVOIDABLE.values() for row in one.actions.values() if "now in" in row.text]


def test_document_has_the_meaning_and_the_threshold_of_every_cause():
    page = (DOCS / "verdict.md").read_text()

    for name, meaning in CAUSES.items():
        limit = f"{100 * AVOIDABLE[name].share:g} %" if name in AVOIDABLE else "–"
        assert f"| `{name}` | {limit} | {meaning}" in page


def test_every_cause_has_a_threshold_and_a_remedy():
    accused = set(CAUSES) - {HEALTHY, NONE_FOUND, NO_VERDICT, FAILED}

    assert accused == set(AVOIDABLE)
    assert all("" in cause.actions for cause in AVOIDABLE.values())


@cases("name", sorted(AVOIDABLE))
def test_remedies_fit_into_one_line_of_the_console(name):
    for found in AVOIDABLE[name].actions.values():
        assert len(found.text) <= 62, found
        assert found.source.startswith(("https://", "docs/"))


def test_text_of_every_cause_fits_into_one_line_of_the_console():
    for name in set(CAUSES) - {HEALTHY, NO_VERDICT}:
        found = job(elapsed_s=1e6, data=987.6)
        text = verdict_of(found).text.replace("data loading", name.replace("_", " "))
        assert len(text) <= 62, text


def test_verdict_is_read_back_from_a_summary():
    summary = job(data=100.0)
    summary = replace(summary, verdict=verdict_of(summary))

    assert msgspec.json.decode(msgspec.json.encode(summary), type=type(summary)) == summary


def windows_job(*waits_s, **changes):
    """Return the summary of a job of one rank, with windows of ten iterations and 10 s with these data waits."""
    job = Job(1).join(facts={"framework": "transformers"})
    changes.setdefault("devices", (device_window(wall=full(10.0, utilization=1.0)),))
    for number, wait_s in enumerate(waits_s, 1):
        job.tick(10.0).send(row(0, number, busy_s=10.0 - wait_s, wait_s=wait_s, **changes))
        job.tick()
    job.bye(0, last_ordinal=10 * len(waits_s))
    return job.summary(ended=True)


def test_evidence_of_a_job_has_the_windows_with_the_loss():
    """20 windows of 10 s with a data wait of 1 s; the framework of rank 0 gives the setting."""
    found = windows_job(*20 * [1.0]).verdict

    assert found.cause == "data_loading"
    assert found.why == "data wait 100 of 1,000 ms per iteration"
    assert found.next.startswith("raise dataloader_num_workers")
    assert found.evidence[0].windows == LossWindows(20, 10, 200, 10, pytest.approx(0.1))


def test_loss_of_few_windows_has_the_iteration_of_the_worst_window():
    """9 s of data wait in window 7, and 6 s in window 9, of 30 windows."""
    waits_s = 30 * [0.0]
    waits_s[6], waits_s[8] = 9.0, 6.0

    found = windows_job(*waits_s).verdict

    assert found.why.endswith(", most at iteration 70")
    assert found.evidence[0].windows == LossWindows(2, 70, 90, 70, pytest.approx(0.9))


def test_loss_by_a_clock_does_not_grow_with_unused_gpus():
    """One rank on one of eight GPUs: its GPU loses 25 of 125 s, and the other GPUs have no clock in a job."""
    goodput = GoodputSummary(125.0, 1.0, {"kept": 125.0}, {"kept": 125.0}, {})
    clocks = {"throttled": ClockLoss(25.0, 0, 25.0, "rank 0")}
    summary = job(unused=875.0, slow_clocks=clocks, goodput=goodput)

    found = {one.cause: one.seconds for one in losses(summary, summary.waterfall, "torch")}

    assert found == {"unused_gpus": 875.0, "throttled": pytest.approx(25.0)}
