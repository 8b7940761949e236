"""The disk of the run folder is full, blocked, broken or unmounted under running jobs."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import duckdb
import jobs
import psutil
import pytest
from after_fault import assert_readable, assert_undisturbed, assert_whole
from run_folders import GOLDEN, copy_golden

from effllm.trainer.session import FIRST_RANK_ENDS_S

pytest_plugins = ["disks"]
pytestmark = pytest.mark.faults

LOOP = "loop.py", "--until", "enough"


@pytest.fixture
def run(launch, disk):
    """Start a loop with its run folder on the disk; wait for its first windows. The test ends the loop."""

    def start(**settings):
        job = launch.python(*LOOP, run_dir=disk.path / "runs", run_name="one", **settings)
        ledger = jobs.Ledger(disk.path / "runs" / "one")
        jobs.until(lambda: ledger.num_windows >= 3)
        return job, ledger

    return start


@contextmanager
def fault(stretch):
    """Record start and end of a fault, on the monotonic clock."""
    stretch.append(time.monotonic())
    yield
    stretch.append(time.monotonic())


def blocks(job):
    return job.stdout.count("[EfficientLLM Metrics]")


def more_blocks(job, count):
    """Wait until the console shows `count` more windows."""
    before = blocks(job)
    jobs.until(lambda: blocks(job) >= before + count)


def troubles(ledger):
    return [text for text in ledger.event_texts("sink") if text.startswith("run folder /")]


@pytest.mark.fault("disk-full")
def test_windows_are_written_when_a_full_disk_has_space_again(run, disk):
    job, ledger = run()
    stretch = []
    with fault(stretch):
        disk.fill()
        jobs.until(lambda: "cannot be written: No space left on device" in job.stdout)
        more_blocks(job, 15)
        assert_readable(ledger.folder, unfinished=True)
    disk.empty()
    jobs.until(lambda: "is written again" in job.stdout)

    assert_whole(ledger, {0: job.finish()})
    assert [text.partition(":")[0].split(" ", 3)[-1] for text in troubles(ledger)] == [
        "cannot be written",
        "is written again",
    ]
    assert ledger.summary.left_out.keys() <= {"tensorboard"}
    assert_undisturbed(job, stretch)
    assert_readable(ledger.folder)


@pytest.mark.fault("disk-full")
def test_job_on_a_full_disk_completes_and_its_files_are_readable(run, disk):
    job, ledger = run()
    disk.fill()
    jobs.until(lambda: "cannot be written" in job.stdout)
    more_blocks(job, 5)
    job.finish()

    assert_readable(ledger.folder)
    assert ledger.summary.status == "completed", "a part of the disk is reserved for the last summary"
    assert not (ledger.folder / ".reserve").exists()
    shown = [report.iteration for report in ledger.windows]
    assert shown == list(range(10, 10 * len(shown) + 1, 10))
    assert "[EfficientLLM] Run completed" in job.stdout


@pytest.mark.fault("read-only")
def test_windows_are_written_after_repair_of_a_read_only_disk(run, disk):
    job, ledger = run()
    stretch = []
    with fault(stretch):
        disk.trigger_error()
        jobs.until(lambda: "cannot be written: Read-only file system" in job.stdout)
        more_blocks(job, 10)
    disk.repair()
    jobs.until(lambda: "is written again" in job.stdout)

    assert_whole(ledger, {0: job.finish()})
    assert len(troubles(ledger)) == 2
    assert_undisturbed(job, stretch)
    assert_readable(ledger.folder)


@pytest.mark.fault("read-only")
def test_every_window_is_written_after_a_disk_is_mounted_again(run, disk):
    job, ledger = run()
    disk.unmount()
    jobs.until(lambda: f"cannot be written: nothing is mounted at {disk.path}" in job.stdout)
    more_blocks(job, 10)
    disk.remount()
    jobs.until(lambda: "is written again" in job.stdout)

    assert_whole(ledger, {0: job.finish()})
    assert len(troubles(ledger)) == 2
    disk.close()
    assert list(disk.path.rglob("*.json*")) == []


@pytest.mark.fault("slow-disk")
def test_blocked_disk_does_not_delay_training_or_lose_data(run, disk):
    job, ledger = run()
    stretch = []
    with fault(stretch):
        disk.freeze()
        written = ledger.num_windows
        more_blocks(job, 20)
        assert ledger.num_windows <= written + 1
    disk.thaw()
    more_blocks(job, 5)

    summary = assert_whole(ledger, {0: job.finish()})
    assert summary.left_out == {}
    assert_undisturbed(job, stretch)


@pytest.mark.fault("slow-disk")
def test_job_that_ends_on_a_blocked_disk_is_not_delayed(run, disk):
    job, ledger = run()
    disk.freeze()
    more_blocks(job, 10)
    (job.folder / "enough").touch()
    assert job.wait().code == 0
    assert job.output()["end_held_s"] < FIRST_RANK_ENDS_S + 1.0
    disk.thaw()

    assert_whole(ledger, {0: job.finish()})


@pytest.mark.fault("folder-removed")
def test_removed_run_folder_is_made_again(launch, tmp_path):
    job = launch.python(*LOOP)
    jobs.until(lambda: job.num_windows >= 5)
    (folder,) = job.runs()
    removed = folder.rename(tmp_path / "removed")  # one atomic rename, because the job still writes to the folder
    jobs.until(lambda: shutil.rmtree(removed, ignore_errors=True) or not removed.exists())
    jobs.until(lambda: "was removed" in job.stdout)
    more_blocks(job, 5)
    count = job.finish()
    ledger = job.ledger

    assert (ledger.summary.status, ledger.summary.iterations, ledger.summary.tokens) == (
        "completed",
        count,
        100 * count,
    )
    last = [report.iteration_last for report in ledger.windows]
    whole = list(range(last[0], count + 1, 10))
    assert last[: len(whole)] == whole and last[-1] == count and len(last) <= len(whole) + 1
    assert ledger.facts["config"]["log_interval"] == 10
    assert len(troubles(ledger)) == 1


@pytest.mark.fault("disk-full", "aggregator-sigkill")
def test_aggregator_killed_with_a_full_disk_loses_no_token(run, disk):
    job, ledger = run()
    disk.fill()
    jobs.until(lambda: "cannot be written" in job.stdout)
    more_blocks(job, 5)
    (server,) = job.find("effllm.server.process")
    os.kill(server, signal.SIGKILL)
    jobs.until(lambda: any(pid != server for pid in job.find("effllm.server.process")))
    disk.empty()
    more_blocks(job, 5)

    assert_whole(ledger, {0: job.finish()})


@pytest.mark.fault("disk-full", "aggregator-sigkill")
def test_reports_lost_with_a_killed_aggregator_are_counted(run, disk):
    job, ledger = run(history_size=40)
    disk.fill()
    jobs.until(lambda: "cannot be written" in job.stdout)
    more_blocks(job, 30)  # if 20 windows wait for the disk, reports are acknowledged before they are written
    (server,) = job.find("effllm.server.process")
    os.kill(job.process.pid, signal.SIGSTOP)  # a running job could fill the outbox before the next aggregator starts
    os.kill(server, signal.SIGKILL)
    jobs.until(lambda: not psutil.pid_exists(server))
    unwritten = blocks(job) - ledger.num_windows
    disk.empty()
    jobs.until(lambda: any("died before it wrote them" in text for text in ledger.event_texts("reports_lost")))
    os.kill(job.process.pid, signal.SIGCONT)
    more_blocks(job, 5)
    count = job.finish()
    summary = ledger.summary

    lost = summary.coverage.reports_lost
    assert 0 < lost <= unwritten + 40
    assert (summary.tokens, summary.measured_tokens) == (None, 100 * count - 1000 * lost)
    # Reports of some lost windows may be on the disk, although the disk had no room for the state.
    written = [row.window for row in ledger.ranks]
    assert len(written) == len(set(written)) >= summary.measured_tokens / 1000
    assert any("died before it wrote them" in text for text in ledger.event_texts("reports_lost"))


def export(runs, path):
    return subprocess.run(
        [sys.executable, "-m", "effllm", "runs", str(runs), "--export", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("form", ["out", "out.csv", "out.jsonl"])
def test_export_to_a_full_disk_leaves_the_old_files(disk, form, tmp_path):
    path, later = disk.path / form, copy_golden(tmp_path / "later")
    assert export(GOLDEN, path).returncode == 0
    before = {one: one.read_bytes() for one in disk.path.rglob("*") if one.is_file()}
    disk.fill()

    done = export(later, path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("effllm runs: ")
    assert done.stderr.count("\n") == 1
    left = {one: one.read_bytes() for one in disk.path.rglob("*") if one.is_file() and one in before}
    assert left == before
    assert [one for one in disk.path.rglob(".*") if one.name.endswith(".new")] == []
    disk.empty()
    assert export(later, path).returncode == 0
    if form == "out":
        assert duckdb.sql(f"SELECT count(*) FROM '{path}/v5/runs/*/*/*.parquet'").fetchall() == [(2,)]
