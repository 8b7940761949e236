"""health/standing_out.py: who is judged at all; who stands out is in test_stragglers.py."""

from builders import row

from effllm.health.standing_out import Track


def test_iterations_that_no_clock_could_tell_name_nobody():
    track = Track()
    for window in range(3):
        rows = [row(rank, window) for rank in range(3)]
        track.look(rows, [5e-324, 5e-324, 1.0])  # of which shares are beyond every float

    assert not track.looks
