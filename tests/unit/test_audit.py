"""The audit: counts and figures of a job are checked against each other."""

import random

import pytest
from audited import AuditedJob, value
from builders import reports, row
from msgspec.structs import replace

from effllm.job.audit.figures import FigureWindow, judge
from effllm.job.audit.known import KnownJob, peaks_like, quantities_of, reasons_for
from effllm.job.audit.utilization import above_tensor_activity, tensor_utilization
from effllm.job.ledger import restore
from effllm.records.audit import AGREES, COUNTS, NAMED, TOO_FEW, UNEXPLAINED, VARIES
from effllm.records.clock import Now
from effllm.records.framework_figures import (
    MFU_RATIO,
    SAMPLES_PER_S,
    TFLOPS_PER_GPU,
    TOKENS_PER_ITERATION,
    TOKENS_PER_S,
)
from effllm.records.job import ClusterTotals, Counts, DeviceTotals, JobConstants, LoopTimes


def windows(factors, tokens=1000, positions=1000, loss=0, **changes):
    """Return windows of 10 s, with a framework's tokens/s as factors of the counted tokens/s."""
    known = {"time_s": 10.0, "wall_s": 10.0, "busy_s": 10.0, "samples": 10}
    return [
        FigureWindow(factor * tokens / 10, tokens, positions, loss, **{**known, **changes}, iteration_first=1 + 10 * at,
                     iteration_last=10 + 10 * at)
        for at, factor in enumerate(factors)
    ]  # fmt: skip


def judged(factors, quantities=None, **counts):
    return judge(TOKENS_PER_S, windows(factors, **counts), KnownJob(quantities or {}))


# --- figures of the framework --------------------------------------------------------------------


def test_equal_figure_agrees():
    found = judged([1.0] * 10)
    assert (found.outcome, found.framework, found.own, found.factor) == (AGREES, 100.0, 100.0, 1.0)


@pytest.mark.parametrize(("factor", "outcome"), [(0.5, AGREES), (1.0, AGREES), (1.25, AGREES), (0.75, VARIES)])
def test_framework_may_divide_by_another_time(factor, outcome):
    """10 s of iterations are 8 s of steps, and 20 s of wall time with a checkpoint."""
    quantities = {"ranks": 2}
    assert judged([factor] * 10, quantities, wall_s=20.0, busy_s=8.0).outcome == outcome


def test_factor_of_a_known_quantity_has_a_named_cause():
    found = judged([0.125] * 5, {"gradient accumulation steps": 8, "ranks": 4})
    assert (found.outcome, found.reasons) == (NAMED, ("gradient accumulation steps",))
    assert found.text == (
        "tokens/s: framework 12.5, effllm 100, factor 0.125: exactly 1/8 = gradient accumulation steps"
    )


def test_factor_of_two_quantities_names_both():
    found = judged([8.0] * 5, {"gradient accumulation steps": 8, "ranks": 8})
    assert found.reasons == ("gradient accumulation steps", "ranks")


def test_whole_factor_without_a_quantity_has_no_cause():
    found = judged([3.0] * 10, {"ranks": 4})
    assert (found.outcome, found.reasons) == (UNEXPLAINED, ())
    assert found.text.endswith("differs by a factor of 3, which is no known quantity of the job: unexplained")


def test_difference_beyond_the_noise_is_unexplained():
    found = judged([1.031, 1.033, 1.029, 1.031, 1.031] * 3, {"ranks": 4})
    assert (found.outcome, found.text[-44:]) == (UNEXPLAINED, "differs by 3.1 % (noise ±2.0 %), unexplained")


def test_small_difference_agrees():
    assert judged([1.015] * 10).outcome == AGREES


def test_unexplained_difference_needs_ten_windows():
    assert judged([1.031] * 9).outcome == TOO_FEW
    assert judged([1.031] * 10).outcome == UNEXPLAINED


def test_named_cause_needs_five_windows():
    assert judged([4.0] * 4, {"ranks": 4}).outcome == TOO_FEW
    assert judged([4.0] * 5, {"ranks": 4}).outcome == NAMED


def test_factor_that_varies_allows_no_statement():
    assert judged([0.5, 2.0, 1.0, 3.0, 0.7, 1.9, 0.6, 2.5, 1.0, 4.0]).outcome == VARIES


def test_padding_is_explained_by_the_two_counts_and_not_by_a_number():
    """1,000 tokens in 2,000 positions: the factor is 2, and so is the number of ranks."""
    found = judged([2.0] * 5, {"ranks": 2}, positions=2000)
    assert found.outcome == COUNTS
    assert found.text.endswith(
        "the framework counts all positions, with padding: 10,000, and 5,000 tokens without padding"
    )


def test_padding_that_varies_between_windows_is_explained():
    """The factor varies from 1.1 to 10, but the factor of all positions is 1."""
    padded = [replace(windows([1.0])[0], framework=100.0, tokens=tokens) for tokens in range(100, 1000, 90)]
    assert judge(TOKENS_PER_S, padded, KnownJob({"ranks": 2})).outcome == COUNTS


def test_labels_are_explained_by_the_two_counts():
    found = judged([0.7] * 5, loss=700)
    assert found.text.endswith(
        "the framework counts only positions with a label: 3,500, and 5,000 tokens without padding"
    )


def test_factor_of_another_count_has_a_named_cause():
    """Only positions with a label (70 %) of one of eight micro-batches: 0.7 / 8 = 0.0875."""
    found = judged([0.0875] * 5, {"gradient accumulation steps": 8}, loss=700)
    assert found.text.endswith("exactly 1/8 of a rate of only positions with a label = gradient accumulation steps")


def test_large_whole_factor_is_not_called_exact():
    assert "512 within 2 % = global batch size" in judged([512.0] * 5, {"global batch size": 512}).text


def test_cumulative_count_over_one_iteration_is_named():
    """The factor in the middle of a window of ten iterations: 5.5, 15.5, ..."""
    found = judged([5.5 + 10 * at for at in range(8)], {"ranks": 4})
    assert (found.outcome, found.reasons) == (NAMED, ("cumulative count over a short time",))
    assert "divides all tokens since the start by the time of one iteration" in found.text


@pytest.mark.parametrize(
    ("name", "framework", "own"), [(SAMPLES_PER_S, 1.0, 1.0), (TFLOPS_PER_GPU, 50.0, 50.0), (MFU_RATIO, 0.25, 0.25)]
)
def test_own_figure_has_the_units_of_the_framework(name, framework, own):
    """100 tokens/s x 1e12 FLOP / 2 GPUs = 50 TFLOP/s per GPU; of a peak of 4e14 FLOP/s these are 25 %."""
    known = KnownJob(devices=2, peak_flops_per_s=4e14, flops_per_token=1e12)
    found = judge(name, [replace(one, framework=framework) for one in windows([1.0] * 5)], known)
    assert (found.own, found.outcome) == (own, AGREES)


def test_tokens_per_iteration_are_compared_without_time():
    """A window of ten iterations has 1,000 tokens."""
    halves = [replace(one, framework=50.0) for one in windows([1.0] * 5)]
    found = judge(TOKENS_PER_ITERATION, halves, KnownJob({"ranks": 2}))
    assert (found.framework, found.own, found.reasons) == (50.0, 100.0, ("ranks",))


def test_figure_without_counts_or_peak_is_not_judged():
    assert judged([1.0] * 5, tokens=0, positions=0) is None
    assert judge(MFU_RATIO, windows([1.0] * 5), KnownJob(flops_per_token=1e12)) is None


# --- known quantities ----------------------------------------------------------------------------


def test_micro_batches_follow_from_the_batch():
    facts = {"global_batch_size": 64, "micro_batch_size": 2, "data_parallel": 4, "sequence_parallel": True}
    assert quantities_of(facts, 16, 16, 2) == {
        "data parallel size": 4,
        "global batch size": 64,
        "micro-batch size": 2,
        "micro-batches of an iteration": 8,
        "ranks": 16,
        "GPUs": 16,
        "GPUs of a node": 8,
    }


def test_product_is_named_only_without_a_single_quantity():
    quantities = {"gradient accumulation steps": 4, "data parallel size": 8, "ranks": 16}
    assert reasons_for(32.2, 0.02, quantities) == (32, ("gradient accumulation steps (4) x data parallel size (8)",))
    assert reasons_for(1 / 16, 0.02, quantities) == (16, ("ranks",))
    assert reasons_for(1.01, 0.02, quantities) == (0, ())


def test_peak_of_the_own_device_is_no_reason():
    h100 = KnownJob(devices=8, peak_flops_per_s=8 * 989.4e12)
    assert peaks_like(312e12, h100) == ("an A100 (312 TFLOP/s)",)
    assert peaks_like(989e12, h100) == ()


# --- a job ---------------------------------------------------------------------------------------


def test_difference_becomes_one_event_and_both_figures_are_in_the_summary():
    """100 tokens/s of each of two ranks; the first figure only starts the comparison."""
    job = AuditedJob(2, {"gradient_accumulation_steps": 4}).windows(30, {TOKENS_PER_S: 50.0})
    assert len(job.printed()) == 1
    assert (job.figure.framework, job.figure.own, job.figure.windows) == (50.0, 200.0, 28)


def test_figure_logged_every_third_window_is_compared_with_three_windows():
    job = AuditedJob().windows(30, lambda at: {TOKENS_PER_ITERATION: 100.0} if at % 3 == 0 else None)
    assert (job.figure.windows, job.figure.own, job.figure.outcome) == (9, 100.0, AGREES)


def test_windows_without_all_ranks_are_not_compared():
    """The framework counts both ranks, but from window 4 on only rank 0 reports."""
    job = AuditedJob(2).windows(3, {TOKENS_PER_S: 200.0})
    for number in range(4, 31):
        for rank in range(2):
            job.aggregator.presence.hear(rank, 20.0 * number)
        values = {TOKENS_PER_S: value(200.0)}
        now = Now(20.0 * number, 1000.0 + 20.0 * number)
        job.aggregator.reports(reports(row(0, number, devices=(), values=values)), now)
        job.aggregator.tick(now)

    assert job.printed() == []
    assert job.figure.outcome == AGREES


def test_restarted_aggregator_continues_the_audit():
    job = AuditedJob(1, {"gradient_accumulation_steps": 4}).windows(8, {TOKENS_PER_S: 25.0})
    ledger = restore(job.aggregator.snapshot())
    assert len(ledger.audit.figures[TOKENS_PER_S]) == 6
    assert list(ledger.audit.counts.column("tokens")) == [8000.0]


# --- counts of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"tokens": 2000}, "rank 0 counted 2,000 tokens without padding in 1,000 positions: a factor of 2"),
        ({"tokens_loss": 1500}, "rank 0 counted 1,500 positions with a label in 1,000 positions"),
    ],
)
def test_impossible_count_is_reported_in_its_first_window(counts, text):
    job = AuditedJob().windows(1, **counts)
    (printed,) = job.printed()
    assert printed.startswith(text)


def test_factor_of_an_impossible_count_is_named():
    (printed,) = AuditedJob(1, {"gradient_accumulation_steps": 4}).windows(1, tokens=4000).printed()
    assert printed.endswith("a factor of 4, exactly 4 = gradient accumulation steps; the counts of tokens are wrong")


def test_more_positions_than_the_batch_are_reported():
    (printed,) = AuditedJob(2, {"max_positions_per_iteration": 50}).windows(1).printed()
    assert printed == (
        "rank 0, 1 counted 2,000 positions in batches of 1,000: a factor of 2, exactly 2 = ranks; "
        "the counts of tokens are wrong"
    )


def test_late_tokens_of_a_batch_are_possible():
    """The tokens of half a window arrive with the next window."""
    job = AuditedJob()
    job.window(tokens=500)
    job.window(tokens=1500)
    assert job.printed() == []


def test_labels_on_padding_are_possible():
    """A batch whose labels are a copy of its padded ids has a label at each position."""
    assert AuditedJob().windows(3, tokens=500, tokens_loss=1000).printed() == []


def test_tokens_of_a_lost_report_are_possible():
    job = AuditedJob()
    job.window()
    job.number += 1  # the report of window 2 is lost, and with it 1,000 positions
    job.window(tokens=1100)
    assert job.printed() == []


def test_values_from_wrong_counts_are_marked():
    job = AuditedJob().windows(2, tokens=2000)
    found = job.summary()
    doubtful = {tag for tag, one in found.metrics.items() if one.doubt}
    assert "run_throughput/tokens_per_second" in doubtful
    assert "tt_tokens_per_param_per_sec" in doubtful
    assert not doubtful & {"al_seconds", "run_throughput/samples_per_second"}
    assert found.audit.doubts == (found.metrics["tt_tokens_per_param_per_sec"].doubt,)
    last = [one.report for one in job.aggregator.closed.take()][-1]
    assert "throughput/tokens_per_second" in last.doubtful
    assert "al_seconds" not in last.doubtful


# --- MFU and tensor activity: the arithmetic only, not measured on a GPU -------------------------


def mfu_totals(mfu, activity, clock_hz=1.83e9, peak=989.4e12):
    """Return the totals of one GPU with this MFU: tokens of 1 FLOP each in one second."""
    return ClusterTotals(
        counts=Counts(tokens=round(mfu * peak)),
        loop=LoopTimes(time_s=1.0),
        devices=DeviceTotals(tensor_activity=activity, sm_clock_hz=clock_hz),
        constants=JobConstants(gpus=1, world_size=1, peak_flops_per_s=peak, flops_per_token=1.0),
    )


BF16 = KnownJob(precision="bf16")


def test_tensor_utilization_is_activity_times_clock():
    assert tensor_utilization(mfu_totals(0.4, 0.5, 1.464e9), BF16) == pytest.approx(0.4)


@pytest.mark.parametrize("activity", [0.4, 0.45, 0.6, 0.9])
def test_mfu_below_the_tensor_activity_is_possible(activity):
    assert above_tensor_activity(mfu_totals(0.45, activity), BF16) == ""


def test_mfu_above_the_tensor_activity_is_reported_with_its_factor():
    text = above_tensor_activity(mfu_totals(0.575, 0.25), BF16)
    assert text == (
        "MFU is 57.5 %, but tensor activity x SM clock is 25.0 %: the FLOPs per token, the tokens or the peak are "
        "wrong by a factor of at least 2"
    )


@pytest.mark.parametrize("known", [KnownJob(precision="fp8"), KnownJob()])
def test_tensor_activity_of_another_precision_is_not_compared(known):
    assert above_tensor_activity(mfu_totals(0.9, 0.1), known) == ""


# --- clean runs ----------------------------------------------------------------------------------


def clean_window(draw, shape, at):
    """Return the counts of a window of a correct job, and the figures that its framework logs."""
    positions = shape["iterations"] * shape["micro"] * shape["accumulation"] * shape["length"]
    tokens = round(positions * (1 - shape["padding"] * draw.random()))
    labels = round(tokens * shape["labels"])
    busy_s = shape["step_s"] * shape["iterations"] * draw.gauss(1, shape["noise"])
    wait_s = busy_s * shape["wait"] * draw.random()
    phase_s = shape["phase_s"] if at % 5 == 0 else 0.0
    return positions, tokens, labels, max(busy_s, 0.1), wait_s, phase_s


def run_of(seed, is_wrong=False):
    """Return a job of varied shape; a wrong framework logs the rate of one of the micro-batches of an iteration."""
    draw = random.Random(seed)
    shape = {
        "iterations": 10, "micro": draw.choice([1, 2, 4, 8]), "accumulation": draw.choice([1, 2, 3, 4, 8, 16]),
        "length": draw.choice([128, 512, 2048]), "padding": draw.choice([0, 0, 0.1, 0.5, 0.9]),
        "labels": draw.choice([0, 0.2, 0.7, 1.0]), "step_s": draw.choice([0.05, 0.5, 5.0]),
        "noise": draw.choice([0.001, 0.01, 0.05]), "wait": draw.choice([0, 0.05, 0.5]),
        "phase_s": draw.choice([0, 0, 3.0, 30.0]),
    }  # fmt: skip
    ranks = draw.choice([1, 2, 3, 4])
    counts_padding, over, every = draw.random() < 0.5, draw.choice(["wall", "time", "busy"]), draw.choice([1, 1, 2, 3])
    facts = {
        "gradient_accumulation_steps": shape["accumulation"], "micro_batch_size": shape["micro"],
        "sequence_length": shape["length"], "data_parallel": ranks, "framework": "clean",
        "max_positions_per_iteration": shape["micro"] * shape["accumulation"] * shape["length"],
    }  # fmt: skip
    job = AuditedJob(ranks, facts, flops_per_token=6000.0, settings={"peak_tflops": 1000.0})
    job.since = [0.0, 0.0]  # tokens that the framework counted, and its seconds, since its last log
    late = 0
    for at in range(1, 21):
        positions, tokens, labels, busy_s, wait_s, phase_s = clean_window(draw, shape, at)
        job.since[0] += ranks * (positions if counts_padding else tokens)
        job.since[1] += {"wall": busy_s + wait_s + phase_s, "time": busy_s + wait_s, "busy": busy_s}[over]
        figures = None
        if at % every == 0:
            rate = job.since[0] / job.since[1] * draw.gauss(1, 0.003)  # rounding, and the time of a log line
            rate /= shape["accumulation"] if is_wrong else 1
            figures = {
                TOKENS_PER_S: rate,
                TFLOPS_PER_GPU: rate * 6000 / ranks / 1e12,
                TOKENS_PER_ITERATION: job.since[0] / (10 * every),
            }
            job.since = [0.0, 0.0]
        held = round(0.1 * tokens)  # tokens of the last iteration arrive with the next window
        job.window(
            figures, busy_s=busy_s, wait_s=wait_s, phases_s={"checkpoint": phase_s} if phase_s else {},
            tokens_processed=positions, tokens=tokens - held + late, tokens_loss=min(labels, tokens - held),
        )  # fmt: skip
        late = held
    return job, shape


@pytest.mark.parametrize("seed", range(200))
def test_clean_run_stays_silent(seed):
    job, _ = run_of(seed)
    assert job.printed() == []
    assert {one.outcome for one in job.summary().audit.figures} <= {AGREES, COUNTS, VARIES, TOO_FEW}


def test_most_clean_runs_are_judged():
    outcomes = [one.outcome for seed in range(50) for one in run_of(seed)[0].summary().audit.figures]
    assert outcomes.count(VARIES) < 0.1 * len(outcomes)


def test_wrong_runs_of_varied_shape_are_named_or_without_a_statement():
    """The framework counts one of the micro-batches of an iteration."""
    found = []
    for seed in range(80):
        job, shape = run_of(seed, is_wrong=True)
        figures = {one.name: one for one in job.summary().audit.figures}
        if shape["accumulation"] > 1:
            found.append(figures[TOKENS_PER_S])
    named = [one for one in found if any("gradient accumulation steps" in reason for reason in one.reasons)]
    assert {one.outcome for one in found if one not in named} <= {VARIES}
    assert len(named) > 0.85 * len(found)


def test_clean_values_are_not_empty():
    """The figures of `test_clean_run_stays_silent` are compared."""
    job = AuditedJob().windows(12, {TOKENS_PER_S: 100.0})
    assert (job.figure.outcome, job.figure.windows) == (AGREES, 10)


@pytest.mark.parametrize("figure", [1.7e308, 1e300, 1e-320, 0.0, -1.0])
def test_figure_that_is_no_figure_of_a_framework_is_ignored(figure):
    """Any instrument can record a value under the name of a figure."""
    found = [replace(one, framework=figure) for one in windows([1.0] * 10)]
    assert judge(TOKENS_PER_S, found, KnownJob()) is None


def test_figures_of_zero_before_a_figure_are_no_cumulative_count():
    found = judged([0.0] * 9 + [20.0])
    assert found.outcome == UNEXPLAINED
