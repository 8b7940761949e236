"""Unused GPUs of the allocation in complete jobs, with the real pynvml on GPUs of a trace."""

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat

IDLE = {"memory": flat(3 * 2.0**20), "utilization": flat(0.0), "power": flat(60.0)}
USED = Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0")
FREE = Gpu("GPU-bbbb0002-0000-4000-8000-000000000002", "00000000:5E:00.0", **IDLE)
OTHER = Gpu("GPU-cccc0003-0000-4000-8000-000000000003", "00000000:9A:00.0", **IDLE | {"memory": flat(2.0 * GIB)})
LISTED = Gpu("GPU-dddd0004-0000-4000-8000-000000000004", "00000000:C1:00.0", processes=2, **IDLE)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(USED, FREE, OTHER, LISTED)
    return trace


@pytest.fixture
def start(launch, trace):
    """Start one rank on the first GPU, with frequent checks."""

    def run(*arguments, **variables):
        environ = trace.environment() | jobs.first_on_path(jobs.SCRIPTS / "short_checks") | SLURM | variables
        return launch.python("loop.py", *arguments, environ=environ, device="nvml")

    return run


def parts(job):
    return {part.name: part for part in job.ledger.summary.waterfall.parts}


def test_allocated_gpu_without_a_process_is_a_part_and_an_event(start, tmp_path):
    job = start("--until", tmp_path / "enough", SLURM_JOB_GPUS="0-3", CUDA_VISIBLE_DEVICES="0")
    jobs.until(lambda: job.runs() and job.ledger.event_texts("gpus_unused"))
    (tmp_path / "enough").touch()
    job.done()

    (text,) = job.ledger.event_texts("gpus_unused")
    assert text.endswith(": GPU 1 is allocated (SLURM_JOB_GPUS) and used by no rank and no other process")
    summary = job.ledger.summary
    unused = parts(job)["unused"]
    assert unused.device_seconds == pytest.approx(summary.goodput.elapsed_s, rel=1e-6)
    assert (unused.joules, unused.evidence) == (None, text)
    assert sum(part.device_seconds for part in parts(job).values()) == pytest.approx(2 * summary.goodput.elapsed_s)
    assert not [line for line in summary.waterfall.unknown if "no rank used" in line]


@pytest.mark.parametrize(
    ("variables", "unknown"),
    [
        ({"SLURM_JOB_GPUS": "0,2,3"}, None),
        ({"SLURM_JOB_GPUS": "0"}, None),
        ({"SLURM_GPUS_ON_NODE": "1"}, None),
        ({"SLURM_GPUS_ON_NODE": "2"}, "it is not known which 2 of 4 GPUs are allocated"),
        ({"SLURM_JOB_GPUS": "0-7"}, "NVML lists 4 of 8 allocated GPUs"),
        ({}, "no allocation is stated"),
    ],
)
def test_no_gpu_is_unused_without_evidence(start, tmp_path, variables, unknown):
    job = start("--until", tmp_path / "enough", "--step-s", 0.05, CUDA_VISIBLE_DEVICES="0", **variables)

    def lines():
        return [line for line in job.ledger.summary.waterfall.unknown if "no rank used" in line]

    jobs.until(lambda: job.num_windows >= 6)
    (tmp_path / "enough").touch()
    job.done()

    assert job.ledger.event_texts("gpus_unused") == []
    assert "unused" not in parts(job)
    assert [unknown in line for line in lines()] == ([True] if unknown else [])
