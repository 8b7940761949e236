"""Wall clocks that step or are wrong: durations, energies and totals use the monotonic clock and do not change."""

import shutil
import struct
import subprocess
import time
from pathlib import Path

import jobs
import pytest
from after_fault import assert_whole
from pytest import approx

pytestmark = pytest.mark.faults

SOURCE = Path(__file__).parents[1] / "wall_clock.c"
HOUR_S = 3600


class Clock:
    """A wall clock for processes started with ``environ``; the test can step this clock."""

    def __init__(self, folder):
        self._file = folder / "offset"
        library = folder / "libwallclock.so"
        self.environ = {"LD_PRELOAD": str(library), "TESTS_WALL_CLOCK": str(self._file)}
        self._file.write_bytes(bytes(8))
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True)

    def step(self, seconds):
        with self._file.open("r+b") as file:  # the file is changed in place, because processes have mapped it
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clock(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("no C compiler: a clock that steps cannot be built")
    return Clock(tmp_path)


def assert_busy(job, rows):
    """Check that the reported time in steps is between two times of the loop: inside and around the steps."""
    truth = job.output()
    outer_s = sum(end - start for start, end in truth["steps"])
    assert sum(truth["inner_s"]) - 1e-6 <= sum(row.busy_s for row in rows) <= outer_s + 1e-6


@pytest.mark.fault("wall-clock")
@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_wall_clock_step_changes_no_duration_or_energy(launch, clock, step_s):
    began_s = time.monotonic()
    job = launch.python("loop.py", "--until", "enough", environ=clock.environ)
    jobs.until(lambda: job.num_windows >= 5)
    clock.step(step_s)
    jobs.until(lambda: job.num_windows >= 15)
    clock.step(0)
    jobs.until(lambda: job.num_windows >= 20)
    clock.step(step_s)
    jobs.until(lambda: job.num_windows >= 25)
    count = job.finish()
    took_s = time.monotonic() - began_s

    summary = assert_whole(job.ledger, {0: count})
    rows = job.ledger.ranks
    assert_busy(job, rows)
    assert sum(row.wall_s for row in rows) < took_s
    assert all(row.end_time_s - row.start_time_s == approx(row.wall_s, abs=1e-3) for row in rows)
    assert 0 < summary.elapsed_s < took_s
    assert sum(summary.time_by_class.values()) < took_s
    assert not {"rank_lost", "missing", "stalled", "reports_lost", "late"} & summary.events.keys()


@pytest.mark.fault("clock-off")
def test_wrong_clock_of_a_node_changes_no_window_and_causes_no_event(launch, clock, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.write_bytes(bytes(64))
    loop = ("lockstep.py", meeting, "--step-s", 0.01)
    clock.step(HOUR_S)
    aggregator = launch.aggregator()
    endpoint = {"endpoint": aggregator.endpoint}
    right = launch.python(*loop, environ=jobs.rank_environ(0, 2), **endpoint)
    wrong = launch.python(*loop, environ={**jobs.rank_environ(1, 2), **clock.environ}, **endpoint)
    for job in (right, wrong):
        job.done()
    assert not aggregator.job.left()
    ledger = aggregator.ledger
    rows = {rank: [row for row in ledger.ranks if row.rank == rank] for rank in (0, 1)}

    assert [row.iteration_last for row in rows[0]] == [row.iteration_last for row in rows[1]]
    assert rows[1][0].start_time_s - rows[0][0].start_time_s == approx(HOUR_S, rel=0.1)
    for rank in (0, 1):
        assert_busy([right, wrong][rank], rows[rank])
    summary = ledger.summary
    assert (summary.status, summary.iterations, summary.tokens) == ("completed", 200, 40_000)
    assert summary.elapsed_s < HOUR_S / 2
    assert summary.coverage.reports_late == summary.coverage.reports_lost == 0
    assert all(abs(report.time_s - time.time()) < HOUR_S / 2 for report in ledger.windows)
    assert not {"rank_lost", "missing", "stalled", "straggler"} & summary.events.keys()
