"""GPUs of a Slurm allocation that no rank uses, on a Slurm of two nodes on this machine, with GPUs of a trace."""

import sys

import jobs
import pytest
from nvml_library import Gpu, Trace, flat

pytest_plugins = ["slurm"]
pytestmark = [pytest.mark.faults, pytest.mark.fault("slurm"), pytest.mark.xdist_group("slurm")]

BUSES = (0x1B, 0x3B, 0x5E, 0x9A)
#: `slurmd` sets no SLURM_JOB_GPUS for GPUs that are empty files, so the script sets it as on a real node.
SCRIPT = "#!/bin/sh\nexport SLURM_JOB_GPUS=0-1\n{others}exec {python} {loop} --until {folder}/enough\n"


@pytest.fixture
def sbatch(launch, slurm_with_gpus, library, tmp_path):
    """Start a loop of one rank on the first of two nodes, each with two allocated GPUs."""
    trace = Trace(library, tmp_path / "trace")
    free = {"memory": flat(0.0), "utilization": flat(0.0)}
    trace.write(*(Gpu(f"GPU-{n}", f"00000000:{bus:02X}:00.0", **free if n else {}) for n, bus in enumerate(BUSES)))

    def start(others=""):
        job = launch._job()
        script = job.folder / "job.sbatch"
        names = {"python": sys.executable, "loop": jobs.SCRIPTS / "loop.py", "folder": job.folder}
        script.write_text(SCRIPT.format(others=others, **names))
        options = ["--wait", "--quiet", "--nodes=2", "--ntasks=2", "--gres=gpu:2", f"--chdir={job.folder}"]
        variables = trace.environment() | jobs.first_on_path(jobs.SCRIPTS / "short_checks") | slurm_with_gpus.environ
        environ = launch.environ({"device": "nvml"}, **variables)
        return job.start(["sbatch", *options, "--output=batch.txt", str(script)], environ)

    return start


def test_unused_gpus_of_both_nodes_of_an_allocation_count(sbatch):
    job = sbatch()
    jobs.until(lambda: job.runs() and len(job.ledger.event_texts("gpus_unused")) == 2)
    (job.folder / "enough").touch()
    job.done()

    own, other = job.ledger.event_texts("gpus_unused")
    assert own.endswith(": GPU 1 is allocated (SLURM_JOB_GPUS) and used by no rank and no other process")
    assert other == "node n2: 2 GPUs are allocated, and no rank and no step of the job runs there"
    summary = job.ledger.summary
    unused = next(part for part in summary.waterfall.parts if part.name == "unused")
    assert unused.device_seconds == pytest.approx(3 * summary.goodput.elapsed_s, rel=1e-6)
    assert not [line for line in summary.waterfall.unknown if "no rank used" in line]


def test_node_with_another_step_of_the_job_is_not_unused(sbatch):
    job = sbatch("srun --nodes=1 --ntasks=1 --nodelist=n2 --overlap sleep 600 &\nsleep 2\n")

    def unknown():
        summary = job.ledger.summary if job.runs() else None
        lines = summary.waterfall.unknown if summary and summary.waterfall else ()
        return [line for line in lines if "no rank used" in line]

    jobs.until(lambda: job.runs() and job.ledger.event_texts("gpus_unused"))
    jobs.until(lambda: job.num_windows >= 50)
    (job.folder / "enough").touch()
    job.wait()

    assert len(job.ledger.event_texts("gpus_unused")) == 1
    assert [line.partition(": ")[2] for line in unknown()] == [
        "1 nodes of the allocation have no rank: other steps of the job run on 1 of these nodes"
    ]
