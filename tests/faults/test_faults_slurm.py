"""Plain srun, without torchrun, on a Slurm of only this machine: ranks find each other, and scancel kills the job."""

import os
import re
import signal
import struct
import sys

import jobs
import psutil
import pytest
from after_fault import assert_whole
from nvml_library import Gpu, Trace

pytest_plugins = ["slurm"]
pytestmark = [pytest.mark.faults, pytest.mark.fault("slurm"), pytest.mark.xdist_group("slurm")]  # one Slurm per machine


@pytest.fixture
def srun(launch, slurm):
    """Start a loop on two ranks with srun."""

    def start(script, *arguments, options=(), **settings):
        command = ["srun", "-n2", "--quiet", *options, sys.executable, str(jobs.SCRIPTS / script)]
        environ = {**launch.environ(settings), **slurm.environ}
        return launch._job().start([*command, *map(str, arguments)], environ)

    return start


def test_ranks_of_plain_srun_share_one_run_folder(srun):
    job = srun("loop.py", "--iterations", 300).done()

    (folder,) = job.runs()
    assert_whole(job.ledger, {0: 300, 1: 300})
    assert job.ledger.facts["launcher"] == "slurm"
    assert folder.name == job.ledger.facts["run_id"] == job.ledger.facts["job_id"]
    assert job.ledger.summary.coverage.ranks_reporting == 2
    assert len(job.blocks) == 30


@jobs.skip_without_torch
def test_torchrun_in_a_batch_script_has_the_identity_of_the_slurm_job(launch, slurm):
    job = launch._job()
    script = job.folder / "job.sbatch"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 --local-addr=127.0.0.1"
    script.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID > id.txt\nexec {torchrun} {jobs.SCRIPTS / 'torch_loop.py'}\n")
    options = ["--wait", "--quiet", "--ntasks=1", "--cpus-per-task=2", "--job-name=train 7b", f"--chdir={job.folder}"]
    job.start(["sbatch", *options, "--output=batch.txt", str(script)], {**launch.environ({}), **slurm.environ}).done()

    summary = job.ledger.summary
    assert (summary.coverage.ranks_expected, job.ledger.facts["launcher"]) == (2, "torchrun")
    number = (job.folder / "id.txt").read_text().strip()
    assert (summary.job_id, summary.job_name, summary.partition, summary.user) == (number, "train 7b", "main", "root")
    assert summary.hosts == (os.uname().nodename,)


def test_plain_program_in_a_batch_script_is_one_rank(launch, slurm):
    job = launch._job()
    script = job.folder / "job.sbatch"
    script.write_text(f"#!/bin/sh\nenv > environ.txt\nexec {sys.executable} {jobs.SCRIPTS / 'loop.py'}\n")
    options = ["--wait", "--quiet", "--ntasks=2", f"--chdir={job.folder}", "--output=batch.txt"]
    job.start(["sbatch", *options, str(script)], {**launch.environ({}), **slurm.environ}).done()

    environ = (job.folder / "environ.txt").read_text()
    assert "SLURM_PROCID=0\n" in environ and "SLURM_NTASKS=2\n" in environ, "which looks like a rank of two"
    summary = job.ledger.summary
    assert (summary.status, summary.coverage.ranks_expected, summary.tokens) == ("completed", 1, 2000)


def test_cancelled_job_has_status_killed_and_its_last_iterations(srun, slurm, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.write_bytes(bytes(64))
    job = srun("lockstep.py", meeting, "--step-s", 0.01, "--until", "for ever")
    jobs.until(lambda: job.num_windows >= 5)
    slurm.command("scancel", slurm.job_id())
    job.wait()

    assert not job.left()
    reached = struct.unpack_from("<2q", meeting.read_bytes())
    summary = job.ledger.summary
    done = {rank: max(row.iteration_last for row in job.ledger.ranks if row.rank == rank) for rank in (0, 1)}
    assert all(number - 1 <= done[rank] <= number for rank, number in enumerate(reached))
    assert_whole(job.ledger, done, status="killed")
    assert summary.iterations == max(done.values())


def test_job_ended_by_slurm_after_a_killed_rank_has_status_killed(srun):
    job = srun("loop.py", "--until", "for ever", options=["--kill-on-bad-exit=1"])
    jobs.until(lambda: job.num_windows >= 5)
    trainers = [pid for pid in jobs.processes(job.token) if "loop.py" in jobs.describe(pid)]
    first = min(pid for pid in trainers if psutil.Process(pid).name().startswith("python"))
    os.kill(first, signal.SIGKILL)
    job.wait()

    assert job.code != 0
    assert not job.left()
    assert job.ledger.summary.status == "killed"
    assert job.ledger.summary.tokens == sum(row.tokens for row in job.ledger.ranks)


BUSES = (0x1B, 0x3B, 0x5E, 0x9A)


@pytest.fixture
def sbatch(launch, slurm_with_gpus, library, tmp_path):
    """Run a loop in an allocation on one node with four GPUs."""
    trace = Trace(library, tmp_path / "trace")
    trace.write(*(Gpu(f"GPU-{n}", f"00000000:{bus:02X}:00.0") for n, bus in enumerate(BUSES)))

    def run(srun, tasks=1, gpus=2):
        job = launch._job()
        script = job.folder / "job.sbatch"
        script.write_text(f"#!/bin/sh\nexec {srun} {sys.executable} {jobs.SCRIPTS / 'loop.py'} --iterations 60\n")
        options = ["--wait", "--quiet", "--nodes=1", f"--ntasks={tasks}", f"--gres=gpu:{gpus}", f"--chdir={job.folder}"]
        environ = launch.environ({"device": "nvml"}, **trace.environment(), **slurm_with_gpus.environ)
        return job.start(["sbatch", *options, "--output=batch.txt", str(script)], environ).done()

    return run


def test_allocated_gpu_that_no_rank_uses_counts(sbatch):
    job = sbatch("srun", tasks=2, gpus=3)

    (text,) = job.ledger.event_texts("gpus_unused")
    assert re.search(r": 3 GPUs are allocated \(SLURM_\w+\), and its ranks use 2$", text)
    summary = job.ledger.summary
    unused = next(part for part in summary.waterfall.parts if part.name == "unused")
    assert unused.device_seconds == pytest.approx(summary.goodput.elapsed_s, rel=1e-6)


@pytest.mark.parametrize(("gpus", "known"), [("gpu:1", 0), ("none", None)])
def test_gpus_of_a_step_replace_those_of_the_node(sbatch, gpus, known):
    job = sbatch(f"srun --gres={gpus}")

    assert job.ledger.event_texts("gpus_unused") == []
    assert [one.unused_gpus for one in job.ledger.summary.goodput.attempts] == [known]
