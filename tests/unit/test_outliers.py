"""effllm/job/health/outliers.py: which ranks are compared at all; test_stragglers.py has which are named."""

from builders import row

from effllm.job.health.outliers import OutlierTrack


def test_iterations_too_short_for_a_clock_name_no_rank():
    track = OutlierTrack()
    for window in range(3):
        rows = [row(rank, window) for rank in range(3)]
        track.look(rows, [5e-324, 5e-324, 1.0])  # of which shares are beyond every float

    assert not track.looks
