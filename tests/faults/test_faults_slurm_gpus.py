"""GPUs of a Slurm allocation that no rank uses, on a Slurm of two nodes on this machine, with GPUs of a trace."""

import re
import sys

import jobs
import pytest
from nvml_library import Gpu, Trace

pytest_plugins = ["slurm"]
pytestmark = [pytest.mark.faults, pytest.mark.fault("slurm"), pytest.mark.xdist_group("slurm")]

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
