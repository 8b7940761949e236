"""The audit: counts and figures of a job are checked against each other."""

import pytest
from audited import AuditedJob, value
from builders import row

from effllm.job.audit import (
    FigureSums,
    KnownJob,
    compared_figure,
    mfu_excess_text,
    tensor_utilization,
    why_mfu_unchecked,
)
from effllm.records.framework_figures import (
    MFU_RATIO,
    SAMPLES_PER_S,
    TFLOPS_PER_GPU,
    TOKENS_PER_ITERATION,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_GPU,
)
from effllm.records.job import ClusterTotals, Counts, DeviceTotals, JobConstants, LoopTimes

# --- figures of the framework: a rank has 1,000 tokens and 10 iterations in the 10 s of a window -----------------


def test_figure_that_differs_is_stated_with_its_factor_and_without_an_event():
    job = AuditedJob(2).windows(30, {TOKENS_PER_S: 50.0})
    found = job.figure
    assert (found.name, found.framework, found.own, found.factor) == (TOKENS_PER_S, 50.0, 200.0, 0.25)
    assert found.windows == 28  # without the first window, and the second, whose figure only starts the comparison
    assert job.printed() == []


@pytest.mark.parametrize(("figure", "is_stated"), [(100.0, False), (104.9, False), (95.1, False), (105.1, True)])
def test_figure_within_five_percent_is_not_stated(figure, is_stated):
    assert bool(AuditedJob().windows(12, {TOKENS_PER_S: figure}).summary().audit.figures) == is_stated


def test_factor_needs_five_compared_windows():
    job = AuditedJob().windows(6, {TOKENS_PER_S: 50.0})
    assert job.summary().audit.figures == ()
    assert job.windows(1, {TOKENS_PER_S: 50.0}).figure.windows == 5


def test_figure_of_the_last_window_is_not_compared():
    """The last log of a Trainer is the summary of its training."""
    job = AuditedJob().windows(6, {TOKENS_PER_S: 50.0})
    job.window({TOKENS_PER_S: 50.0}, final=True)
    assert job.summary().audit.figures == ()


def test_factor_is_that_of_the_sums_of_the_run():
    """The framework counts padding: 1,000 positions in each window, of which 100, 200, ... 900 are tokens."""
    job = AuditedJob().windows(2, {TOKENS_PER_S: 100.0})
    for tokens in range(100, 1000, 100):
        job.window({TOKENS_PER_S: 100.0}, tokens=tokens)
    assert job.figure.factor == pytest.approx(9000 / 4500)


@pytest.mark.parametrize(
    ("name", "own"),
    [(SAMPLES_PER_S, 2.0), (TOKENS_PER_S_PER_GPU, 100.0), (TFLOPS_PER_GPU, 100.0), (MFU_RATIO, 0.25),
     (TOKENS_PER_ITERATION, 200.0)],
)  # fmt: skip
def test_own_figure_has_the_unit_of_the_framework(name, own):
    """200 tokens/s x 1e12 FLOP / 2 ranks = 100 TFLOP/s of a rank; these are 25 % of a peak of 400."""
    job = AuditedJob(2, flops_per_token=1e12, settings={"peak_tflops": 400.0})
    job.windows(12, {name: 2 * own}, samples=10)
    assert (job.figure.own, job.figure.factor) == (own, 2.0)


def test_figure_without_counts_or_peak_is_not_compared():
    sums = FigureSums(figure=100.0, count=50, over=10.0, windows=12)
    assert compared_figure(MFU_RATIO, sums, KnownJob(flops_per_token=1e12)) is None
    assert AuditedJob().windows(12, {TOKENS_PER_S: 1.0}, tokens=0, tokens_processed=0).summary().audit.figures == ()


def test_figure_logged_every_third_window_is_compared_with_three_windows():
    """The framework counts each token twice; the other two windows have half as many tokens."""
    job = AuditedJob()
    for at in range(1, 31):
        job.window({TOKENS_PER_ITERATION: 2 * 200 / 3} if at % 3 == 0 else None, tokens=1000 if at % 3 == 0 else 500)
    assert (job.figure.windows, job.figure.factor) == (9, pytest.approx(2.0))


def test_windows_without_all_ranks_are_not_compared():
    """The framework counts both ranks, but from window 4 on only rank 0 reports."""
    job = AuditedJob(2).windows(3, {TOKENS_PER_S: 200.0})
    for number in range(4, 31):
        for rank in range(2):
            job.aggregator.presence.note_message(rank, 20.0 * number)
        values = {TOKENS_PER_S: value(200.0)}
        job.now_s = 20.0 * number
        job.send(row(0, number, devices=(), values=values))
        job.tick()

    assert job.summary().audit.figures == ()


def test_restarted_aggregator_continues_the_audit():
    job = AuditedJob().windows(8, {TOKENS_PER_S: 25.0})
    ledger = job.ledger()
    assert ledger.audit.figures == {TOKENS_PER_S: FigureSums(figure=1500.0, count=6000, over=60.0, windows=6)}
    assert list(ledger.audit.counts.column("tokens")) == [8000.0]


@pytest.mark.parametrize("figure", [1.7e308, 1e300, 1e-320, 0.0, -1.0])
def test_figure_that_is_no_figure_of_a_framework_is_ignored(figure):
    """Any instrument can record a value under the name of a figure."""
    job = AuditedJob().windows(12, {TOKENS_PER_S: figure})
    assert job.summary().audit.figures == ()
    assert job.ledger().audit.windows == 12


# --- counts of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "counts", "facts", "text"),
    [
        (1, {"tokens": 2000}, {}, "rank 0 counted 2,000 tokens without padding in 1,000 positions: a factor of 2"),
        (1, {"tokens_loss": 1500}, {}, "rank 0 counted 1,500 positions with a label in 1,000 positions"),
        (2, {}, {"max_positions_per_iteration": 50},
         "rank 0, 1 counted 2,000 positions in batches of 1,000: a factor of 2; the counts of tokens are wrong"),
    ],
)  # fmt: skip
def test_impossible_count_is_reported_in_its_first_window(ranks, counts, facts, text):
    (printed,) = AuditedJob(ranks, facts).windows(1, **counts).printed()
    assert printed.startswith(text)


@pytest.mark.parametrize(
    "windows",
    [
        [{"tokens": 500}, {"tokens": 1500}],
        [{"tokens": 500, "tokens_loss": 1000}] * 3,
        [{}, None, {"tokens": 1100}],
    ],
    ids=["half of a window arrives with the next one", "labels on padding", "positions of a lost report"],
)
def test_possible_counts_are_not_reported(windows):
    job = AuditedJob()
    for counts in windows:
        if counts is None:
            job.number += 1
        else:
            job.window(**counts)
    assert job.printed() == []


def test_values_from_wrong_counts_are_marked():
    job = AuditedJob().windows(2, tokens=2000)
    found = job.summary()
    doubtful = {tag for tag, one in found.metrics.items() if one.doubt}
    assert "run_throughput/tokens_per_second" in doubtful
    assert "tt_tokens_per_param_per_sec" in doubtful
    assert not doubtful & {"al_seconds", "run_throughput/samples_per_second"}
    assert found.audit.doubts == (found.metrics["tt_tokens_per_param_per_sec"].doubt,)
    last = job.closed()[-1]
    assert "throughput/tokens_per_second" in last.doubtful
    assert "al_seconds" not in last.doubtful


# --- MFU and tensor activity: the arithmetic only, not measured on a GPU -------------------------


def mfu_totals(mfu, activity, clock_hz=1.83e9, peak=989.4e12, covered_s=20.0, time_s=20.0, most=None):
    """Return the totals of one GPU with this MFU: tokens of 1 FLOP each."""
    return ClusterTotals(
        counts=Counts(tokens=round(mfu * peak * time_s)),
        loop=LoopTimes(time_s=time_s),
        devices=DeviceTotals(
            tensor_activity=activity,
            tensor_clock_hz=activity * clock_hz,
            tensor_clock_covered_s=covered_s,
            tensor_clock_most_hz=(most or activity) * clock_hz,
        ),
        constants=JobConstants(gpus=1, world_size=1, peak_flops_per_s=peak, flops_per_token=1.0),
    )


BF16 = KnownJob(precision="bf16", peak_clock_hz=1.83e9)


def test_tensor_utilization_is_activity_times_clock():
    assert tensor_utilization(mfu_totals(0.4, 0.5, 1.464e9), BF16) == pytest.approx(0.4)


@pytest.mark.parametrize("activity", [0.4, 0.45, 0.9])
def test_mfu_below_the_tensor_activity_is_possible(activity):
    assert mfu_excess_text(mfu_totals(0.45, activity), BF16) == ""


def test_mfu_above_the_tensor_activity_is_reported_with_its_factor():
    text = mfu_excess_text(mfu_totals(0.575, 0.25), BF16)
    assert text.startswith("MFU is 57.5 %, but tensor activity x SM clock is at most 25.0 %")
    assert text.endswith("by a factor of at least 2")


def test_too_few_readings_in_iterations_are_not_compared_and_said():
    totals = mfu_totals(0.9, 0.1, covered_s=19.9)

    assert (mfu_excess_text(totals, BF16), tensor_utilization(totals, BF16)) == ("", None)
    assert why_mfu_unchecked(totals, BF16).startswith("check of MFU by tensor activity: the readings")
    assert why_mfu_unchecked(mfu_totals(0.9, 0.1), BF16) == why_mfu_unchecked(totals, KnownJob(precision="bf16")) == ""


@pytest.mark.parametrize("peak", [148e12, 494.7e12, 756e12, 1000e12])
def test_wrong_peak_is_found(peak):
    assert mfu_excess_text(mfu_totals(0.9, 0.4, peak=peak), BF16).startswith("MFU is 90.0 %")


def test_time_of_iterations_without_readings_may_be_as_busy_as_the_largest_reading():
    # Readings of 0.2 s lie in the middle of iterations of 0.24 s, and the GPU is busy at their start and end.
    assert mfu_excess_text(mfu_totals(0.52, 0.39, time_s=80.0, most=0.48), BF16) == ""
    assert mfu_excess_text(mfu_totals(0.9, 0.39, time_s=80.0, most=0.48), BF16).startswith("MFU is 90.0 %")


@pytest.mark.parametrize(("precision", "why"), [("fp8", "the precision fp8 has"), ("", "the precision is not stated")])
def test_tensor_activity_of_another_precision_is_not_compared_and_said(precision, why):
    known = KnownJob(precision=precision, peak_clock_hz=1.83e9)

    assert mfu_excess_text(mfu_totals(0.9, 0.1), known) == ""
    assert why_mfu_unchecked(mfu_totals(0.9, 0.1), known).startswith(f"check of MFU by tensor activity: {why}")
