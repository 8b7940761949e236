"""Unused GPUs of the allocation in complete jobs, with the real pynvml on GPUs of a trace."""

import jobs
import pytest
from nvml_library import Gpu, Trace

GPUS = [Gpu(f"GPU-aaaa000{n}-0000-4000-8000-000000000000", f"00000000:{n}B:00.0") for n in range(1, 5)]


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(*GPUS)
    return trace


@pytest.fixture
def start(launch, trace, tmp_path):
    """Start one rank on the first GPU."""

    def run(**variables):
        until = ("--until", tmp_path / "enough")
        options = {"device": variables.pop("device", "nvml")}
        job = launch.python(
            "loop.py", *until, environ={**trace.environment(), "SLURM_JOB_ID": "7", **variables}, **options
        )
        jobs.until(lambda: job.num_windows >= 6)
        (tmp_path / "enough").touch()
        return job.done()

    return run


def parts(job):
    return {part.name: part for part in job.ledger.summary.waterfall.parts}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_GPUS_ON_NODE": "4"},
        {"SLURM_GPUS_ON_NODE": "4", "device": "host"},
        {"SLURM_GPUS_ON_NODE": "4", "device": "simulated"},
    ],
    ids=["no statement", "one process", "host", "simulated"],
)
def test_unused_gpus_are_unknown_without_a_statement_and_without_a_gpu(start, variables):
    job = start(**variables)

    assert (job.ledger.event_texts("gpus_unused"), "unused" in parts(job)) == ([], False)
    assert [line for line in job.ledger.summary.waterfall.unknown if "no rank used" in line]


ENGINE = """
import os, time
from types import SimpleNamespace as N
from effllm.hooks.vllm import attach

class LLM:
    llm_engine = N(vllm_config=N(parallel_config=N(world_size={workers})))
    def generate(self, prompts):
        time.sleep(0.02)
        return [N(prompt_token_ids=[1], outputs=[N(token_ids=[6] * 4)]) for _ in prompts]
    def chat(self, prompts):
        return self.generate(prompts)

attach(N(LLM=LLM))
llm = LLM()
while not os.path.exists({enough!r}):
    llm.generate(["a"])
"""


@pytest.fixture
def engine(launch, trace, tmp_path):
    """Run an engine of ``workers`` GPUs on a node of four allocated GPUs."""

    def run(workers):
        enough = tmp_path / "enough"
        environ = {**trace.environment(), "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
        code = ENGINE.format(workers=workers, enough=str(enough))
        job = launch.code(code, environ=environ, device="nvml")
        jobs.until(lambda: job.num_windows >= 6)
        enough.touch()
        return job.done()

    return run


def test_gpus_that_no_rank_uses_are_a_part_and_an_event(engine):
    job = engine(2)

    (text,) = job.ledger.event_texts("gpus_unused")
    assert text.endswith(": 4 GPUs are allocated (SLURM_GPUS_ON_NODE), and its ranks use 2")
    summary = job.ledger.summary
    unused = parts(job)["unused"]
    assert unused.device_seconds == pytest.approx(2 * summary.goodput.elapsed_s, rel=1e-6)
    assert (unused.joules, unused.evidence) == (None, text)
    assert sum(part.device_seconds for part in parts(job).values()) == pytest.approx(4 * summary.goodput.elapsed_s)
    assert not [line for line in summary.waterfall.unknown if "no rank used" in line]


@pytest.mark.parametrize(("workers", "unused"), [(3, 1), (4, 0), (5, None)])
def test_rank_uses_all_gpus_of_its_engine(engine, workers, unused):
    """Only four of five GPUs can be opened, so it is not known how many are used."""
    job = engine(workers)

    assert [one.unused_gpus for one in job.ledger.summary.goodput.attempts] == [unused]
