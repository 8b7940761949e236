"""One model and the same data in every parallel layout: all counts are equal, and TT agrees with the counts."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
    pytest.skip("torch and megatron-core are not installed", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.long]

TESTS = Path(__file__).parents[1]
INTEGRATION = TESTS.parent / "integration" / "megatron_core"
ALONE = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]

ITERATIONS, SAMPLES, LENGTH = 12, 8, 16
# 256 tied token embeddings and 16 position embeddings of width 32; 2 layers with 12 x 32^2 weights, 9 x 32 biases and
# two norms; a final norm.
GPT = 256 * 32 + 16 * 32 + 2 * (12 * 32**2 + 9 * 32 + 4 * 32) + 2 * 32
EMBEDDED = 32 * 32 + 32 * 32 + 32  # of sharded_loop.py


def check(job, num_ranks, parameters):
    """Compare the counts with counts computed by hand, and TT with the ranks' reports."""
    summary, rows = job.ledger.summary, job.ledger.ranks
    assert (summary.status, summary.iterations) == ("completed", ITERATIONS)
    assert summary.parameters == parameters
    assert summary.samples == ITERATIONS * SAMPLES
    assert summary.tokens == ITERATIONS * SAMPLES * LENGTH
    assert sum(row.tokens for row in rows) == summary.tokens
    times_s = [sum(row.busy_s + row.wait_s for row in rows if row.rank == rank) for rank in range(num_ranks)]
    assert summary.metrics["tt_tokens_per_param_per_sec"].value == pytest.approx(
        summary.tokens / parameters / max(times_s)
    )


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(1, "1:1", id="DP1"),
        pytest.param(2, "1:1", id="DP2"),
        pytest.param(2, "2:1", id="TP2"),
        pytest.param(2, "1:2", id="PP2"),
        pytest.param(4, "2:2", id="TP2xPP2"),
        pytest.param(4, "2:1", id="TP2xDP2"),
    ],
)
def test_counts_of_megatron_core_are_equal_in_every_layout(launch, monkeypatch, num_ranks, layout):
    monkeypatch.setenv("PYTHONPATH", str(INTEGRATION))

    loop = TESTS / "megatron_core_loop.py"
    job = launch.torchrun([*ALONE, str(num_ranks)], loop, ".", layout, attach=1, log_interval=4).done(80)

    check(job, num_ranks, GPT)


@pytest.mark.parametrize(
    ("num_ranks", "kind"), [(1, "alone"), (2, "replicated"), (2, "sharded")], ids=["DP1", "DDP2", "FSDP2"]
)
def test_counts_of_a_torch_loop_are_equal_with_and_without_sharding(launch, num_ranks, kind):
    job = launch.torchrun([*ALONE, str(num_ranks)], "sharded_loop.py", kind, log_interval=4).done()

    check(job, num_ranks, EMBEDDED)
