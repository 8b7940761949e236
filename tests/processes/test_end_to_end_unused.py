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


def parts(job):
    return {part.name: part for part in job.ledger.summary.waterfall.parts}


@pytest.mark.parametrize("device", ["nvml", "simulated"])
def test_unused_gpus_of_one_process_and_without_a_gpu_are_unknown(launch, trace, tmp_path, device):
    environ = {**trace.environment(), "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    job = launch.python("loop.py", "--until", tmp_path / "enough", environ=environ, device=device)
    jobs.until(lambda: job.num_windows >= 6)
    (tmp_path / "enough").touch()
    job.done()

    assert (job.ledger.event_texts("gpus_unused"), "unused" in parts(job)) == ([], False)
    assert [line for line in job.ledger.summary.waterfall.unknown if "no rank used" in line]


ENGINE = """
import os, time
from types import SimpleNamespace as N
from effllm.hooks.generate import attach_vllm

class LLM:
    llm_engine = N(vllm_config=N(parallel_config=N(world_size={workers})))
    def generate(self, prompts):
        time.sleep(0.02)
        return [N(prompt_token_ids=[1], outputs=[N(token_ids=[6] * 4)]) for _ in prompts]
    def chat(self, prompts):
        return self.generate(prompts)

attach_vllm(N(LLM=LLM))
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


def test_rank_of_more_gpus_than_can_be_opened_is_not_compared(engine):
    assert [one.unused_gpus for one in engine(5).ledger.summary.goodput.attempts] == [None]
