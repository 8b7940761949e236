"""MFU and tensor activity of real jobs on a simulated H100 that works only in the iterations (GPM, simulated NVML)."""

from __future__ import annotations

import os

import pytest
from nvml_library import GIB, Gpu, Trace, flat, square

MFU, ACTIVITY, PERIOD_S = 0.40, 0.42, 2.0
#: Iterations of 20 ms while the square waves of the GPU are high; an evaluation while they are low.
LOOP = f"""
import time
import effllm.efficientllm_metrics as effllm

effllm.initialize_efficientllm_metrics(
    1000, flops_per_token={MFU} * 989.4e12 * 0.02 / 100 * {{factor}}, facts={{{{"precision": "bf16"}}}}
)
collector = effllm.get_metrics_collector()


def until(end_s):
    time.sleep(max(end_s - time.monotonic(), 0.0))


begin_s = time.monotonic()
while time.monotonic() < begin_s + {{seconds}}:
    now_s = time.monotonic()
    if now_s % {PERIOD_S} < {{steps}} * {PERIOD_S} - 0.02:
        collector.record_iteration_start()
        until(now_s + 0.02)
        collector.record_iteration_end(100, 1)
    else:
        with collector.phase("evaluation"):
            until(now_s - now_s % {PERIOD_S} + {PERIOD_S})
effllm.finalize_efficientllm_metrics()
"""


def doubts(launch, library, tmp_path, *, steps=0.5, factor=1, seconds=10):
    """Train; return the doubts of the audit and the sentences about what is not measured."""
    trace = Trace(library, tmp_path / "trace")
    trace.write(
        Gpu(
            "GPU-1", "00000000:10:00.0", name="NVIDIA H100 80GB HBM3", memory=flat(GIB), power=flat(500.0), gpm=1,
            tensor_activity=square(0.02, ACTIVITY, PERIOD_S, steps), sm_activity=flat(0.5), dram_activity=flat(0.5),
            sm_clock_mhz=square(345.0, 1830.0, PERIOD_S, steps), utilization=flat(1.0),
        )
    )  # fmt: skip
    # On a slow machine the limit of the time in the driver allows fewer readings, and too few lie wholly in iterations.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nif any('effllm.agent.agent' in one for one in sys.orig_argv):\n"
        "    import effllm.agent.sampler\n    effllm.agent.sampler.UNCOUNTED_GPU_S = 1.0\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    job = launch.code(
        LOOP.format(factor=factor, steps=steps, seconds=seconds),
        environ={**trace.environment(), "PYTHONPATH": path}, device="nvml", collection_interval=0.1,
    ).done()  # fmt: skip
    summary = job.ledger.summary
    assert summary.metrics["run_throughput/mfu_ratio"].value == pytest.approx(
        MFU * factor, rel=0.3
    )  # lower on a busy machine
    return list(summary.audit.doubts), [one for one in summary.not_measured if "tensor activity" in one]


@pytest.mark.parametrize("steps", [0.3, 0.6])
def test_job_with_evaluations_is_not_in_doubt(launch, library, tmp_path, steps):
    assert doubts(launch, library, tmp_path, steps=steps, seconds=13) == ([], [])


def test_wrong_flops_are_found_beside_evaluations(launch, library, tmp_path):
    (text,), _ = doubts(launch, library, tmp_path, factor=2)

    assert text.startswith("MFU is ") and " by a factor of at least 1." in text


def test_short_job_says_once_that_mfu_was_not_checked(launch, library, tmp_path):
    found, (text,) = doubts(launch, library, tmp_path, factor=2, seconds=2)

    assert found == []
    assert text.endswith("the readings that lie wholly in iterations cover less than 20 sampling intervals")
