"""The windows of a loss, to which the evidence of a verdict points."""

import pytest
from builders import Job, row
from cases import cases, repeats
from msgspec.structs import replace
from sink_examples import make_summary

from benchmarks.planted.reports import summary_of_planted
from benchmarks.planted.timeline import planned, timeline
from effllm.job.account import Rows
from effllm.job.goodput import Goodput
from effllm.job.losses import Loss
from effllm.job.memory_pressure import ERRORS, RETRIES, MemoryPressure
from effllm.job.verdict import windows_of
from effllm.records.rank import ValueStatistics
from effllm.records.verdict import LossWindows

#: Causes whose time is a class of goodput in the windows of iterations.
IN_WINDOWS = ("data_loading", "straggler", "memory_pressure", "hang")


def test_memory_pressure_points_to_the_windows_with_retries_and_the_error():
    pressure = MemoryPressure()
    read = {"allocator/allocated_bytes": ValueStatistics(1, 1e9, 1e9, 1e9)}
    for number, retries in enumerate((0, 2, 3, 0, 1, 0), 1):
        found = {RETRIES: ValueStatistics(1, retries, retries, retries)} if retries else {}
        pressure.add_window(Rows([row(0, number, values={**read, **found})]))
    error = {ERRORS: ValueStatistics(1, 1.0, 1.0, 1.0)}
    pressure.add_window(Rows([row(0, 7, values=error, final=True)]))

    loss = pressure.loss()
    assert (loss.windows, loss.first_iteration, loss.last_iteration, loss.worst_iteration) == (3, 20, 50, 30)
    assert pressure.out_of_memory({}).iteration == 70
    summary = replace(make_summary(), memory_pressure=loss)
    one = Loss("memory_pressure", 1.0, "", "")
    assert windows_of(one, summary, Goodput()) == LossWindows(3, 20, 50, 30)


def waits(job, shares):
    """Pass windows of ten iterations and 10 s with these shares of waits for data."""
    job.join()
    for number, share in enumerate(shares, 1):
        assert job.tick(10.0).send(row(0, number, busy_s=10.0 * (1 - share), wait_s=10.0 * share))
    return job.aggregator.ledger.goodput


def test_windows_above_the_share_are_counted_in_all_attempts():
    job = Job(1)
    goodput = waits(job, [0.0, 0.2, 0.04, 0.1])

    assert goodput.windows_of("data", 0.05) == LossWindows(2, 20, 40, 20, pytest.approx(0.2))
    assert goodput.windows_of("straggling", 0.05) is None
    again = Job(1, job.next_ledger("job2"), "job2")
    assert waits(again, [0.3]).windows_of("data", 0.05).count == 3


def test_merged_windows_are_still_counted():
    goodput = waits(Job(1), [0.2] * 10)
    goodput.attempt.merge_spans(3)

    assert goodput.windows_of("data", 0.05).count == 10


def test_loss_outside_of_iterations_has_no_window():
    assert windows_of(Loss("idle", 1.0, "", ""), make_summary(), Goodput()) is None


@cases("cause", IN_WINDOWS[: repeats(2, 100)])
def test_evidence_of_a_planted_cause_has_windows(cause):
    found = summary_of_planted(timeline(planned(cause, 1))).verdict

    one = next(one for one in found.evidence if one.claim.startswith(cause.replace("_", " ")))
    assert found.cause == cause
    assert one.windows.count >= 1
