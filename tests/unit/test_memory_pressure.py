"""Retries of torch's allocator: their cost from windows with and without retries, and the verdict."""

import msgspec
import pytest
from builders import row
from test_verdict import job, verdict_of

from benchmarks.planted.reports import summary_of_planted
from benchmarks.planted.timeline import planned, timeline
from effllm.job.account import Rows
from effllm.job.memory_pressure import ERRORS, MIN_USUAL, RETRIES, MemoryPressure
from effllm.records.rank import Allocator, ValueStatistics
from effllm.records.verdict import HEALTHY, MEDIUM, MemoryPressureLoss


def window(busy_s, retries=0, number=1, tokens=1000, is_read=True):
    """Return the reports of two ranks for one window of ten iterations."""
    known = {RETRIES: ValueStatistics(1, retries / 2, 0.0, retries / 2, retries / 2)} if retries else None
    made = [row(rank=rank, window=number) for rank in range(2)]
    memory = Allocator(60e9, 60e9, 0.0) if is_read else None
    changed = {"busy_s": busy_s / 2, "values": known, "allocator": memory, "tokens_processed": tokens // 2}
    return Rows([msgspec.structs.replace(one, **changed) for one in made])


def closed(*windows):
    found = MemoryPressure()
    for one in windows:
        found.add_window(one)
    return found.loss()


def usual(count=8, **changes):
    return [window(10.0 + 0.01 * number, **changes) for number in range(count)]


def test_time_above_the_usual_windows_is_lost():
    found = closed(*usual(), window(14.0, retries=6), window(13.0, retries=2))

    assert found.rank_seconds == pytest.approx(14.0 + 13.0 - 2 * 10.035)
    assert found.rank_seconds < found.max_rank_seconds < 7.1
    assert (found.retries, found.windows, found.per_iteration) == (8, 2, 8 / 200)


def test_retries_that_cost_no_time_are_no_loss():
    assert closed(*usual(), window(10.02, retries=6)).rank_seconds == 0.0


def test_windows_with_retries_before_the_usual_windows_are_compared_later():
    assert closed(window(14.0, retries=6), *usual()).rank_seconds == pytest.approx(14.0 - 10.035, abs=0.05)


def test_long_micro_batches_are_compared_by_their_positions():
    """Twice the positions in twice the time: no time is lost."""
    assert closed(*usual(), window(20.0, retries=6, tokens=2000)).rank_seconds == 0.0


def test_lost_time_is_unknown_without_windows_of_comparison():
    found = closed(*usual(MIN_USUAL - 1), *[window(14.0, retries=6)] * 200)

    assert (found.rank_seconds, found.max_rank_seconds) == (None, None)
    assert found.retries == 1200


def test_job_without_retries_or_without_a_reading_has_no_loss():
    assert closed(*usual()) is None
    assert closed(*usual(is_read=False)) is None


def test_state_continues_after_a_restart_of_the_aggregator():
    state = MemoryPressure()
    for one in [*usual(), window(14.0, retries=6)]:
        state.add_window(one)
    again = msgspec.json.decode(msgspec.json.encode(state), type=MemoryPressure)
    again.add_window(window(14.0, retries=6))

    assert again.loss().rank_seconds == pytest.approx(2 * (14.0 - 10.035))


def pressure(seconds, **changes):
    return MemoryPressureLoss(
        50, changes.pop("per_iteration", 0.25), 4, 120, 20, 140, seconds, changes.pop("most", seconds)
    )


def test_lost_time_above_its_threshold_is_the_cause():
    found = verdict_of(job(memory_pressure=pressure(60.0, most=70.0)))

    assert (found.cause, found.bound) == ("memory_pressure", pytest.approx(0.07 / 0.93, rel=0.03))
    assert found.why == "50 allocator retries in 4 windows, which are slower than the others"
    assert verdict_of(job(memory_pressure=pressure(40.0))).cause == HEALTHY


def test_time_of_retries_is_not_also_idle_time():
    found = verdict_of(job(device_idle=200.0, memory_pressure=pressure(150.0)))

    assert found.cause == "memory_pressure"
    assert [round(one.share, 3) for one in found.evidence] == [0.15, 0.05]


def test_many_retries_in_all_windows_are_the_cause_without_a_bound():
    found = verdict_of(job(memory_pressure=pressure(None)))

    assert (found.cause, found.bound, found.confidence) == ("memory_pressure", None, MEDIUM)
    assert found.text == "memory pressure: 0.25 allocator retries per iteration"


def test_job_that_ended_out_of_memory_has_its_memory_in_the_verdict():
    state = MemoryPressure()
    counts = {ERRORS: 1.0, RETRIES: 4.0}
    values = {name: ValueStatistics(1, count, 0.0, count, count) for name, count in counts.items()}
    memory = Allocator(70e9, 75e9, 2e9)
    state.add_window(
        Rows([msgspec.structs.replace(row(rank=3, window=9), values=values, allocator=memory, final=True)])
    )
    run = {f"allocator/{name}_peak_bytes": ValueStatistics(1, 1.0, 0.0, 1.0, 72e9) for name in ("steps", "startup")}
    run[RETRIES] = ValueStatistics(2, 4.0, 0.0, 1.0, 3.0)
    found = state.out_of_memory(run)

    assert (found.ranks, found.retries) == ((3,), 4)
    verdict = verdict_of(job(out_of_memory=found, status="failed", data=100.0))
    assert (verdict.cause, verdict.bound) == ("memory_pressure", None)
    assert verdict.text == "memory pressure: out of memory on rank 3"
    assert verdict.why == "peaks: steps 72.00 GB; 75.00 GB reserved, 2.00 GB fragmented; 4 allocator retries"
    assert verdict_of(job(out_of_memory=found, status="completed")).cause == HEALTHY


def test_error_that_the_loop_survives_is_not_the_end_of_the_job():
    state = MemoryPressure()
    values = {ERRORS: ValueStatistics(1, 1.0, 0.0, 1.0, 1.0)}
    state.add_window(Rows([msgspec.structs.replace(row(rank=3, window=9), values=values)]))

    assert state.out_of_memory({}) is None


def test_few_retries_are_no_cause():
    assert verdict_of(job(memory_pressure=pressure(None, per_iteration=0.09))).cause == HEALTHY
    assert verdict_of(job(memory_pressure=pressure(None), checkpoint=80.0)).cause == "checkpoint"


@pytest.mark.parametrize("seed", range(3))
def test_planted_pressure_is_the_verdict_and_the_time_is_right(seed):
    found = timeline(planned("memory_pressure", seed))
    summary = summary_of_planted(found)
    lost_s = summary.memory_pressure.rank_seconds

    assert summary.verdict.cause == "memory_pressure"
    assert lost_s == pytest.approx(found.truth["memory_pressure"], rel=0.15)
