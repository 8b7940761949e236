"""A loop with megatron.core and without effllm code under torchrun, attached by an environment variable."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
    pytest.skip("torch and megatron-core are not installed", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.system("megatron-core", how="ran")]

TESTS = Path(__file__).parents[1]
INTEGRATION = TESTS.parent / "integration" / "megatron_core"
ALONE = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]
MODEL = 256 * 32 + 16 * 32 + 2 * (12 * 32**2 + 9 * 32 + 4 * 32) + 2 * 32  # as in test_megatron_core
SAMPLES = 12 * 8


@pytest.fixture
def loop(launch, monkeypatch):
    """Return a function that starts the loop on `num_ranks` ranks."""
    monkeypatch.setenv("PYTHONPATH", str(INTEGRATION))

    def start(num_ranks, layout, *arguments, attach=1):
        script = TESTS / "megatron_core_loop.py"
        return launch.torchrun([*ALONE, str(num_ranks)], script, ".", layout, *arguments, attach=attach, log_interval=4)

    return start


@pytest.mark.parametrize(("num_ranks", "layout"), [(2, "1:1"), (2, "1:2")], ids=["DP2", "PP2"])
def test_each_iteration_ends_at_an_optimizer_step(loop, num_ranks, layout):
    job = loop(num_ranks, layout).done()

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations, summary.parameters) == ("completed", 12, MODEL)
    assert (summary.samples, summary.tokens) == (SAMPLES, SAMPLES * 16)
    assert summary.time_by_class["evaluation"] > 0
    assert facts["framework"] == "megatron.core"
    assert (facts["pipeline_parallel"], facts["num_layers"], facts["precision"]) == (int(layout[-1]), 2, "fp32")
    assert [block["iteration"] for block in job.blocks] == ["4", "8", "12"]
    # The finalization of gradients is a sync point: the time of a rank before it does not depend on other ranks. In a
    # pipeline of two stages there is no other rank for a comparison.
    assert ("run_straggler/named_ranks" in summary.metrics) == (layout == "1:1")


@pytest.mark.parametrize(
    ("num_ranks", "layout", "kind", "tensor_parallel"),
    [(1, "1:1", "single", 1), (2, "2:1", "single", 2), (2, "1:1", "DDP", 1)],
)
def test_run_folder_has_the_layout(loop, num_ranks, layout, kind, tensor_parallel):
    job = loop(num_ranks, layout).done()

    facts = job.ledger.facts
    assert (facts["parallel_layout"], facts["tensor_parallel"]) == (kind, tensor_parallel)
    assert (facts["precision"], facts["sequence_length"], facts["micro_batch_size"]) == ("fp32", 16, 2)
    assert not job.our_errors


def test_several_schedule_runs_before_a_step_count_as_one_iteration(loop):
    summary = loop(1, "1:1", 2).done().ledger.summary

    assert (summary.iterations, summary.samples) == (12, SAMPLES)


def test_losses_are_equal_to_a_run_without_effllm(loop):
    attached, alone = loop(2, "1:1").done(), loop(2, "1:1", attach=0).done()

    for rank in range(2):
        losses = attached.output(f"losses-{rank}.json")
        assert len(losses) == 12 * 2  # micro-batches
        assert losses == alone.output(f"losses-{rank}.json")


def test_iteration_calls_of_the_script_replace_the_schedule_hook(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(INTEGRATION))
    config = tmp_path / "job.yaml"
    config.write_text(
        "model: {hidden_size: 32, num_layers: 2}\n"
        "data: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 8}\n"
        "training: {iterations: 12, evaluation_interval: 6}\n"
    )

    job = launch.torchrun([*ALONE, "1"], INTEGRATION / "train.py", "--config", config, attach=1, log_interval=4).done()

    assert job.ledger.summary.iterations == 12
    assert job.ledger.summary.samples == SAMPLES
    assert job.ledger.facts["framework"].startswith("megatron-core ")  # the script sets this name in its own call
    assert "flops_convention" in job.ledger.facts


def test_unknown_schedules_are_reported_and_not_changed(launch, tmp_path):
    package = tmp_path / "tree" / "megatron" / "core" / "pipeline_parallel"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "schedules.py").write_text("def run_everything(model): ...\n")
    code = "import torch\nfrom megatron.core.pipeline_parallel import schedules\nprint(schedules.run_everything)\n"

    job = launch.code(code, environ={"PYTHONPATH": str(tmp_path / "tree")}, attach=1).done()

    line, end = job.our_errors
    assert "this job ran without metrics" in end
    assert "this version of megatron.core.pipeline_parallel.schedules is unknown" in line
    assert "no forward_backward_ function" in line
    assert job.runs() == []
