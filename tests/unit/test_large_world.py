"""Large worlds: pace of acknowledgements, merging of late reports, exact medians."""

import msgspec
import numpy as np
import pytest
from builders import Job, device_window, full, row

from effllm.job import pacing
from effllm.job.ledger import Ledger
from effllm.job.pacing import Pace
from effllm.records.clock import Now
from effllm.records.columns import from_json, to_json
from effllm.store.run_folder import MAX_ROWS, outliers

RANKS = 1200


# --- the pace -----------------------------------------------------------------------------------


def test_a_small_world_is_acknowledged_after_every_window():
    pace = Pace(1000)
    assert not pace.is_due(0.0, 8, is_ending=False)
    pace.count_closed(1)
    assert pace.is_due(0.0, 8, is_ending=False)
    pace.note_saved(0.0)
    assert not pace.is_due(100.0, 8, is_ending=False)


def test_world_of_10000_ranks_is_acknowledged_every_10_seconds():
    pace = Pace(1000)
    pace.count_closed(1)
    assert pace.is_due(0.0, 10_000, is_ending=False), "the first"
    pace.note_saved(0.0)
    pace.count_closed(1)
    assert [pace.is_due(at_s, 10_000, is_ending=False) for at_s in (1.0, 9.9, 10.0)] == [False, False, True]


def test_reports_are_acknowledged_every_second_while_the_job_ends():
    pace = Pace(1000)
    pace.note_saved(0.0)
    pace.count_closed(1)
    assert not pace.is_due(4.0, 10_000, is_ending=False)
    assert [pace.is_due(at_s, 10_000, is_ending=True) for at_s in (5.0, 5.9, 6.0)] == [False, False, True]
    pace.note_saved(6.0)
    pace.count_closed(1)
    assert [pace.is_due(at_s, 10_000, is_ending=True) for at_s in (6.9, 7.0)] == [False, True]


def test_fast_windows_leave_seven_eighths_of_the_buffers_free():
    pace = Pace(1000)
    pace.note_saved(0.0)
    pace.count_closed(124)
    assert not pace.is_due(0.1, 10_000, is_ending=False)
    pace.count_closed(1)
    assert pace.is_due(0.1, 10_000, is_ending=False)


def test_small_world_has_no_pauses_between_reports():
    assert (pacing.report_every_s(1000), pacing.pause_s(1000), pacing.late_every_s(1000)) == (0.0, 0.0, 0.0)
    assert pacing.report_every_s(1001) > 0


def test_connection_of_a_quiet_rank_is_tested_later_in_a_large_world():
    assert pacing.quiet_s(1000) <= 1.0 < 2.0 < pacing.quiet_s(10_000)


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_behind", "closes_at_s"), [(False, 17), (True, 32)])
def test_aggregator_with_unread_reports_waits_longer_for_ranks(is_behind, closes_at_s):
    job = Job().join()
    job.tick(1.0).send(row(0), row(1))
    job.tick(1.0).send(row(0, 2))
    job.closed()

    closed_at_s = []
    for now_s in range(3, 40):
        job.aggregator.tick(Now(float(now_s), 0.0), heard_until_s=2.5 if is_behind else None)
        closed_at_s += [now_s for _ in job.closed()]

    # Rank 1 last sent at 1 s and is lost 15 s later; an aggregator that is behind waits up to 15 s longer.
    assert closed_at_s == [closes_at_s]


def test_late_reports_are_merged_and_joules_are_counted_once():
    job = Job(RANKS).join()
    job.send(*map(row, range(RANKS)))
    job.send(*(row(rank, window) for window in (2, 3) for rank in range(10, RANKS)))
    job.wait(55, *range(RANKS))
    first, *others = job.closed()
    assert [one.coverage.ranks_reporting for one in (first, *others)] == [RANKS, RANKS - 10, RANKS - 10]
    assert others[-1].job.energy.joules == 1000.0 * RANKS, "windows with holes are in no sum"

    job.send(*(row(rank, window) for window in (2, 3) for rank in range(10)))
    assert job.closed() == [], "late rows wait for more"
    safe = job.aggregator.open_windows.safe_sequences()
    assert (safe[0], safe[10]) == (1, 3), "waiting rows are not acknowledged"

    corrections = job.tick(1.0).closed()
    assert [(one.window, one.correction) for one in corrections] == [(2, True), (3, True)]
    whole = corrections[-1].job
    assert (whole.counts.tokens, whole.energy.is_complete) == (3 * 1000 * RANKS, True)
    assert whole.energy.joules == pytest.approx(3 * 1000.0 * RANKS)
    assert whole.energy.counts.tokens == whole.counts.tokens
    assert job.aggregator.open_windows.safe_sequences()[0] == 3
    late, _ = job.events("late")
    assert late.text.startswith("10 ranks reported window 2 after it had closed: 0, 1, 2")


def test_new_aggregator_of_a_large_world_keeps_all_sums():
    job = Job(RANKS).join()
    job.send(*(row(rank, window, tokens=1000 + window) for window in (1, 2) for rank in range(RANKS)))
    assert job.closed()[-1].job.counts.tokens == RANKS * (1001 + 1002)

    other = Job(RANKS, job.ledger()).join()
    for one in (job, other):
        one.send(*(row(rank, 3) for rank in range(RANKS)))

    assert other.closed()[-1].job == job.closed()[-1].job
    assert other.summary().energy.by_device == job.summary().energy.by_device


def test_aggregator_rejects_an_invalid_saved_state():
    text = msgspec.json.encode(Ledger(1, "job", 0.0), enc_hook=to_json).replace(b'"values":""', b'"values":"AAAA"')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Ledger, dec_hook=from_json)


# --- over ranks ---------------------------------------------------------------------------------


def test_outliers_and_median_of_10000_ranks_are_exact():
    chance = np.random.default_rng(0)
    busy_s = 9.0 + 0.01 * chance.standard_normal(10_000)
    slow = [17, 4711, 9999]
    busy_s[slow] = [10.0, 12.0, 11.0]
    rows = [
        row(rank, busy_s=float(seconds), devices=(device_window(f"GPU-{rank}", float(seconds) + 1.0),))
        for rank, seconds in enumerate(busy_s)
    ]

    found = outliers(rows)

    assert [one.rank for one in found] == slow
    rows = [row(rank, busy_s=9.0 + (rank % 2) * rank) for rank in range(10_000)]
    assert len(outliers(rows)) == MAX_ROWS


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, []),
        ({7: (device_window("GPU-7", wall=full(5.0)),)}, [7]),
        ({6: (), 7: (device_window("GPU-6"), device_window("GPU-7"))}, [6]),
    ],
    ids=["no gap", "half of a window", "no device beside a rank with two"],
)
def test_report_with_a_gap_waits_for_the_writer_and_the_others_do_not(changed, kept):
    job = Job(300).join()
    job.send(*(row(rank, **({"devices": changed[rank]} if rank in changed else {})) for rank in range(300)))

    (closed,) = job.aggregator.closed_windows.take_windows()
    assert [one.rank for one in closed.kept.rows] == kept
    assert closed.kept.start_time_s == closed.rows[0].start_time_s
