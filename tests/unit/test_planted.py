"""Jobs with a planted cause (benchmarks/planted, benchmarks/judged), and the planted device time in the waterfall."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cases import cases, repeats

from benchmarks.judged import healthy
from benchmarks.judged.judging import MAX_EXCESS, is_accused, is_wrong, over, virtual
from benchmarks.planted.job import HEALTHY, MAX_SECOND, MIN_PADDING, NUM_HEALTHY, THRESHOLDS
from benchmarks.planted.reports import summary_of_planted
from benchmarks.planted.timeline import planned, timeline
from effllm.job.causes import SLOW_DATA
from effllm.records.verdict import DATA_WAIT, OWN_TIME

#: Cause -> parts of the waterfall that have its device time, also without a verdict.
PARTS = {
    "data_loading": ("data",),
    "straggler": ("straggling",),
    "exposed_communication": ("exposed_communication",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation",),
    "restarts": ("restart_gap", "redone"),
    "device_idle": ("device_idle",),
    "hang": ("hang",),
}


def shares(summary, *names):
    return sum(part.share for part in summary.waterfall.parts if part.name in names)


PLANTED = Path(__file__).parents[2] / "benchmarks" / "planted"
#: Modules that run a planted job as a real job; all other modules describe it.
DRIVERS = {
    "rank": {"effllm.efficientllm_metrics"},
    "reports": {"effllm.config.settings", "effllm.job.aggregator", "effllm.job.ledger"},
}


@cases("path", sorted(PLANTED.glob("*.py")))
def test_generator_of_planted_jobs_imports_nothing_of_the_verdict(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        imported.update([node.module or ""] if isinstance(node, ast.ImportFrom) else names)
    of_effllm = {name for name in imported if name.partition(".")[0] == "effllm"}

    # Records have no rules, except that the names of causes are in records.verdict.
    rules = {name for name in of_effllm if not name.startswith(("effllm.records.", "effllm.trainer."))}
    assert rules <= DRIVERS.get(path.stem, set())
    assert "effllm.records.verdict" not in of_effllm


@cases("cause", THRESHOLDS)
def test_planted_cause_is_the_largest_above_its_threshold(cause):
    for seed in range(repeats(2, 4)):
        job = planned(cause, seed)
        found = timeline(job)
        assert found.primary == cause
        assert found.shares[cause] >= THRESHOLDS[cause] or found.attempts[-1].status == "stalled"
        assert len(job.causes) == 1 + seed % 2
        assert all(found.shares[one.cause] <= MAX_SECOND * found.shares[cause] for one in job.causes[1:])


def test_no_cause_of_a_healthy_job_is_above_its_threshold():
    for seed in range(0, NUM_HEALTHY, 10):
        found = timeline(planned(HEALTHY, seed))
        above = {cause for cause, share in found.shares.items() if share >= THRESHOLDS[cause]}
        assert above <= ({"padding"} if found.padding < MIN_PADDING else set())


@cases("cause", THRESHOLDS)
def test_job_is_faster_without_the_planted_cause(cause):
    found, fixed = timeline(planned(cause, 0)), timeline(planned(cause, 0), fixed=cause)

    assert fixed.shares[cause] < found.shares[cause]
    # The kept iterations are the same, and the share of the cause is the time that its removal saves.
    saved = 1 - fixed.device_seconds / found.device_seconds
    assert saved == pytest.approx(found.shares[cause] - fixed.shares[cause] * (1 - saved), abs=0.02)


@cases("cause", list(PARTS)[: repeats(2, 100)])
@cases("seed", range(repeats(1, 2)))
def test_waterfall_has_the_planted_device_time(cause, seed):
    found = timeline(planned(cause, seed))
    summary = summary_of_planted(found)

    assert summary.elapsed_s == pytest.approx(found.elapsed_s, rel=1e-3)
    share = shares(summary, *PARTS[cause]) * (found.job.shape.ranks / (found.job.shape.ranks + found.unused))
    if cause == "restarts":  # the start-up of later attempts is a part of its own
        startup_s = sum(course.startup_s for course in found.attempts[1:])
        share += startup_s / found.elapsed_s
    # Waits for ranks that are slow by chance, and medians, explain the difference.
    assert share == pytest.approx(found.shares[cause], abs=0.02)


@cases("by_data", [False, True])
@cases("seed", range(repeats(1, 5)))
def test_slow_rank_of_two_is_the_verdict_of_a_planted_job(seed, by_data):
    job = planned("straggler", seed)
    slow = replace(job.causes[0], share=0.15, by_data=by_data)
    found = timeline(replace(job, shape=replace(job.shape, ranks=2), causes=(slow,)))

    summary = summary_of_planted(found)

    assert summary.verdict.cause == ("data_loading" if by_data else "straggler"), summary.verdict
    assert (summary.verdict.next == SLOW_DATA.text) == by_data, "one rank has most of the waits"
    assert [one.evidence for one in summary.stragglers] == [DATA_WAIT if by_data else OWN_TIME]
    assert shares(summary, "data" if by_data else "straggling") == pytest.approx(0.15, abs=0.03)


def test_job_that_ends_in_a_hang_is_stalled():
    found = next(found for found in (timeline(planned("hang", seed)) for seed in range(10)) if found.attempts[-1].hang_s
                 and found.attempts[-1].status == "stalled")  # fmt: skip
    assert summary_of_planted(found).status == "stalled"


def test_profile_of_the_iteration_that_hung_is_left_out():
    job = planned("hang", 0)
    found = timeline(replace(job, shape=replace(job.shape, profile_every=1)))
    assert found.attempts[-1].status == "completed" and found.attempts[-1].hang_s > 0

    share = shares(summary_of_planted(found), "exposed_communication")
    assert share == pytest.approx(found.shares["exposed_communication"], abs=0.02)


#: Kinds of which every job of the seeds 22 to 31 was right.
KINDS = (
    "loader_turn", "between_rank_0", "saves_of_rank_0", "pauses_all", "compilations", "warmup", "slow_rank",
    "slow_rank_forward", "slow_several", "slow_in_window", "wandering", "uneven", "comm_profiled", "idle_duty",
    "throttled_one", "limited_one", "cool_clocks", "checkpoint_rank_0", "restarts", "failed", "generation",
)  # fmt: skip


@cases("kind", KINDS[: repeats(6, 100)])
def test_planted_cause_is_found_and_its_gain_is_within_the_bound(kind):
    for seed in range(22, 22 + repeats(1, 5)):
        found = virtual(kind, seed)

        assert not is_wrong(found), found
        assert over(found) <= MAX_EXCESS, found


def test_healthy_jobs_are_not_accused():
    found = [virtual(healthy.HEALTHY, seed) for seed in range(22, 22 + repeats(6, 60))]

    assert [one for one in found if is_accused(one)] == []
