"""effllm/job/health/outliers.py: the choice of compared ranks; test_stragglers.py tests the choice of named ranks."""

import pytest
from builders import row
from msgspec.structs import replace
from synchronous_job import SynchronousJob

from effllm.job.health.outliers import OutlierTrack
from effllm.records.job import PROFILE
from effllm.records.rank import Profile


def test_no_rank_is_named_for_iterations_too_short_to_measure():
    track = OutlierTrack()
    for window in range(3):
        rows = [row(rank, window) for rank in range(3)]
        track.look(rows, [5e-324, 5e-324, 1.0])  # the ratio to the median exceeds the range of a float

    assert not track.looks


def test_windows_between_profiles_have_the_excess_of_the_last_profile():
    """Every second window has a profile, in which one of eight ranks computes for 0.15 s longer per iteration."""
    job = SynchronousJob(8, has_sync_point=False, jitter=0.0, tail=0.0)
    costs = []
    for window in range(1, 21):
        rows = job.rows()
        if window % 2:
            rows = [replace(one, profile=Profile(1, 0.6, computing_s=0.65 if one.rank == 3 else 0.5)) for one in rows]
        costs.append(job.stragglers.close(rows if window < 20 else job.rows()).rank_seconds)

    (verdict,) = job.stragglers.totals()
    assert (verdict.ranks, verdict.evidence) == ((3,), PROFILE)
    # In ten iterations of each window, seven ranks wait for 0.15 s.
    assert costs[-4:] == [pytest.approx(7 * 10 * 0.15)] * 4


def test_cost_ends_when_profiles_end():
    track = OutlierTrack()
    for window in (1, 3):
        track.look([row(rank, window) for rank in range(3)], [1.0, 1.0, 2.0])

    assert track.recent(7, 5)._replace(values=()) == track.looks[-1]._replace(window=7, iterations=5, values=())
    assert track.recent(8, 5) is None
