"""effllm/job/health/outliers.py: the choice of compared ranks; test_stragglers.py tests the choice of named ranks."""

from builders import row

from effllm.job.health.outliers import OutlierTrack


def test_no_rank_is_named_for_iterations_too_short_to_measure():
    track = OutlierTrack()
    for window in range(3):
        rows = [row(rank, window) for rank in range(3)]
        track.look(rows, [5e-324, 5e-324, 1.0])  # the ratio to the median exceeds the range of a float

    assert not track.looks
